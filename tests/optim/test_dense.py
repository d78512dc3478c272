"""What is not ternary is AdamW: compared with ``torch.optim.AdamW`` in double precision."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_memopt import TacoAdamW
from tests import tolerances
from tests.cases import parameter, randn

SHAPES = [(), (1,), (777,), (63, 65), (3, 5, 7), (300_000,)]
STEPS = 6
OPTIONS = [
    {},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    {"lr": 0.02, "betas": (0.5, 0.9), "eps": 1e-12, "weight_decay": 0.0, "maximize": True},
    {"betas": (0.0, 0.999)},
]


def gradients(shape, t: int) -> torch.Tensor:
    """Away from zero, so that the ratio of gradient and root mean square stays below 12."""
    g = randn(*shape, seed=100 + t)
    return g + 0.5 * torch.sign(g)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_adamw(kernel, shape, options):
    p = torch.nn.Parameter(randn(*shape, seed=1))
    exact = torch.nn.Parameter(p.detach().double())
    ours = TacoAdamW([p], kernel=kernel, **options)
    theirs = torch.optim.AdamW([exact], foreach=False, **({"lr": 1e-3, "weight_decay": 1e-2} | options))
    for t in range(STEPS):
        p.grad = gradients(shape, t)
        exact.grad = p.grad.double()
        ours.step()
        theirs.step()

    group = ours.param_groups[0]
    beta1, beta2 = group["betas"]
    largest = max(gradients(shape, t).abs().max().item() for t in range(STEPS))
    state, expected = ours.state[p], theirs.state[exact]
    assert int(state["step"]) == STEPS
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == p.shape
    close(state["exp_avg"], expected["exp_avg"], tolerances.first_moment(beta1, largest))
    close(state["exp_avg_sq"] / expected["exp_avg_sq"], torch.ones(shape), tolerances.second_moment(beta2, STEPS))
    allowed = tolerances.adamw_weight(STEPS, group["lr"], group["betas"], 12, p.abs().max().item())
    close(p, exact, allowed)


@pytest.mark.parametrize("stochastic_rounding", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_rounded_once(kernel, dtype, stochastic_rounding):
    """Each step from the rounded weight: a neighbour of AdamW's result when rounded stochastically, the nearest
    otherwise. The moments do not see the rounding.
    """
    p = parameter(777, dtype=dtype, scale=1.0)
    ours = TacoAdamW([p], lr=1e-2, kernel=kernel, stochastic_rounding=stochastic_rounding)
    exact = torch.nn.Parameter(p.detach().double())
    theirs = torch.optim.AdamW([exact], lr=1e-2, foreach=False)
    for t in range(STEPS):
        with torch.no_grad():
            exact.copy_(p.double())
        p.grad = gradients((777,), t).to(dtype)
        exact.grad = p.grad.double()
        ours.step()
        theirs.step()
        half = tolerances.HALF_SPACING[dtype] * exact.abs().clamp(min=torch.finfo(dtype).tiny)
        allowed = (2 if stochastic_rounding else 1) * half * 2 + tolerances.adamw_weight(1, 1e-2, (0.9, 0.999), 12, 5.0)
        assert bool(((p.double() - exact).abs() <= allowed).all())
    assert ours.state[p]["exp_avg"].dtype == ours.state[p]["exp_avg_sq"].dtype == torch.float32
    close(ours.state[p]["exp_avg"], theirs.state[exact]["exp_avg"], tolerances.first_moment(0.9, 6.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_updates_below_half_a_spacing_arrive_on_average(kernel, dtype):
    """2000 weights of 1 and an update of 1/20 of the spacing: nearest rounding never moves them; stochastic rounding
    moves the mean by the sum, within six standard deviations.
    """
    spacing = 2 * tolerances.HALF_SPACING[dtype]
    steps, lr = 40, spacing / 2 / 20  # below 1 the spacing is half that above
    for stochastic in (True, False):
        p = torch.nn.Parameter(torch.ones(2000, dtype=dtype))
        optimizer = TacoAdamW([p], lr=lr, weight_decay=0.0, kernel=kernel, stochastic_rounding=stochastic)
        for _ in range(steps):
            p.grad = torch.ones_like(p)  # AdamW's update of a constant gradient is lr
            optimizer.step()
        moved = (1 - p.double()).mean().item()
        if stochastic:
            assert moved == pytest.approx(
                steps * lr, abs=6 * spacing / 2 * (steps * 0.05 / 2000) ** 0.5 + 0.01 * steps * lr
            )
        else:
            assert moved == 0


def test_names_and_positions_decide_the_random_numbers(kernel):
    """The same parameter under another name or seed is rounded otherwise, under the same name alike."""

    def rounded(name, seed):
        p = parameter(4000, dtype=torch.bfloat16)
        optimizer = TacoAdamW([(name, p)], kernel=kernel, seed=seed)
        p.grad = randn(4000, seed=5).bfloat16()
        optimizer.step()
        return p.detach()

    assert torch.equal(rounded("a", 0), rounded("a", 0))
    assert not torch.equal(rounded("a", 0), rounded("b", 0))
    assert not torch.equal(rounded("a", 0), rounded("a", 1))


def test_two_parameters_do_not_touch_each_other(kernel):
    """The same result alone and in company (by name, so that the random numbers are the same)."""
    alone, together = parameter(500, dtype=torch.bfloat16), parameter(500, dtype=torch.bfloat16)
    other = parameter(70, 80)
    gradient = randn(500, seed=3).bfloat16()
    alone.grad, together.grad, other.grad = gradient, copy.deepcopy(gradient), randn(70, 80)
    TacoAdamW([("x", alone)], kernel=kernel).step()
    TacoAdamW([("y", other), ("x", together)], kernel=kernel).step()
    assert torch.equal(alone, together)


def close(found: torch.Tensor, exact: torch.Tensor, allowed: float) -> None:
    off = (found.detach().double() - exact.detach().double()).abs().max().item()
    assert off <= allowed, (off, allowed)
