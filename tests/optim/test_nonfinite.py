"""A gradient that is not finite leaves its parameter as it was, bit for bit, and is counted."""

from __future__ import annotations

import pytest
import torch

from hf_memopt import TacoAdamW
from hf_memopt.kernels.scalars import MAX_GRADIENT
from tests.cases import dtype_cases, parameter, randn, uneven_gradient
from tests.optim.common import snapshot, state_equal, train

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
CASES = {
    "ternary": ((7, 1367), [(0, 0), (6, 1366), (3, 159), (3, 160), (0, 1279), (5, 1280), (2, 700)]),
    "dense matrix": ((50, 33), [(0, 0), (49, 32), (20, 7)]),
    "vector": ((1000,), [(0,), (999,), (517,)]),
    "scalar": ((), [()]),
}


def positions():
    return [pytest.param(shape, at, id=f"{name} {at}") for name, (shape, ats) in CASES.items() for at in ats]


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("shape, at", positions())
def test_one_bad_element_anywhere(kernel, shape, at, bad):
    p = parameter(*shape)
    optimizer = TacoAdamW([p], kernel=kernel)
    train(optimizer, range(2))
    weights, state = snapshot(optimizer)
    p.grad = randn(*shape, seed=9)
    p.grad[at] = bad
    optimizer.step()
    after_weights, after = snapshot(optimizer)
    assert state_equal(after_weights, weights)
    assert after["state"][0].pop("skipped") == state["state"][0].pop("skipped") + 1 == optimizer.skipped_steps
    assert state_equal(after, state)  # the step counter too


@pytest.mark.parametrize(**dtype_cases())
@pytest.mark.parametrize("shape", [(7, 1367), (900,)], ids=str)
def test_at_the_very_first_step(kernel, shape, dtype):
    """All keys exist, nothing has happened, and the run goes on as if the step had never been."""
    p, undisturbed = parameter(*shape, dtype=dtype), parameter(*shape, dtype=dtype)
    optimizer, other = TacoAdamW([p], kernel=kernel), TacoAdamW([undisturbed], kernel=kernel)
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert torch.equal(p, undisturbed)
    assert int(optimizer.state[p]["step"]) == 0 and optimizer.skipped_steps == 1
    train(optimizer, range(3))
    train(other, range(3))
    assert optimizer.state[p].pop("skipped") == 1 and other.state[undisturbed].pop("skipped") == 0
    assert torch.equal(p, undisturbed) and state_equal(dict(optimizer.state[p]), dict(other.state[undisturbed]))


def test_only_the_bad_parameter_is_skipped(kernel):
    parameters = [parameter(64, 100), parameter(64, 100), parameter(30)]
    optimizer = TacoAdamW(parameters, kernel=kernel)
    for p in parameters:
        p.grad = randn(*p.shape, seed=1)
    parameters[1].grad[5, 5] = float("nan")
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert [torch.equal(p, b) for p, b in zip(parameters, before, strict=True)] == [False, True, False]
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [1, 0, 1]
    assert [optimizer.state[p]["skipped"] for p in parameters] == [0, 1, 0]


@pytest.mark.parametrize("shape", [(64, 100), (500,)], ids=str)
def test_skips_are_counted_over_steps_and_saved(kernel, shape):
    p = parameter(*shape)
    optimizer = TacoAdamW([p], kernel=kernel)
    for t in range(5):
        p.grad = torch.full(shape, float("nan")) if t % 2 else randn(*shape, seed=t)
        optimizer.step()
    assert optimizer.skipped_steps == 2 and int(optimizer.state[p]["step"]) == 3
    again = TacoAdamW([parameter(*shape)], kernel=kernel)
    again.load_state_dict(optimizer.state_dict())
    assert again.skipped_steps == 2


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shape", [(64, 100), (500,)], ids=str)
def test_finite_but_too_large_to_square(kernel, shape, maximize):
    """1e20 would make the second moment infinite for a thousand steps: such a gradient is as bad as an infinite one.
    The limit itself is still taken.
    """
    limit = torch.tensor(MAX_GRADIENT)  # in single precision
    beyond = torch.nextafter(limit, torch.tensor(torch.inf))
    for value, skipped in ((1e20, True), (beyond, True), (-beyond, True), (limit, False), (-limit, False)):
        p = parameter(*shape)
        optimizer = TacoAdamW([p], lr=0.01, kernel=kernel, maximize=maximize)
        p.grad = torch.full(shape, float(value))
        before = p.detach().clone()
        optimizer.step()
        assert torch.equal(p, before) == skipped == bool(optimizer.skipped_steps), value
        assert p.isfinite().all()


@pytest.mark.parametrize("shape", [(64, 400), (500,)], ids=str)
@pytest.mark.parametrize("scale", [1e18, 1e-18, 1e-30, 1e-44])
def test_extreme_but_legal_gradients_stay_finite(kernel, shape, scale):
    """Then ordinary ones again: nothing infinite or NaN may be left in weights or state."""
    p = parameter(*shape)
    optimizer = TacoAdamW([p], lr=0.01, kernel=kernel)
    for t in range(6):
        p.grad = uneven_gradient(*shape, seed=t).clamp(-1, 1) * (scale if t in (1, 2) else 1.0)
        optimizer.step()
        assert p.isfinite().all()
        assert all(x.isfinite().all() for x in optimizer.state[p].values() if torch.is_tensor(x))
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("shape", [(64, 400), (500,)], ids=str)
def test_huge_and_tiny_side_by_side(kernel, shape):
    """Rows and columns forty orders of magnitude apart make products of the factors leave single precision on both
    sides.
    """
    p = parameter(*shape)
    optimizer = TacoAdamW([p], lr=0.01, kernel=kernel)
    for t in range(6):
        p.grad = randn(*shape, seed=t).clamp(-1, 1)
        p.grad[::3] *= 1e18
        p.grad[1::3] *= 1e-25
        p.grad[..., ::7] *= 1e-12
        p.grad[..., 1::7] = 0
        optimizer.step()
        assert p.isfinite().all()
        assert all(x.isfinite().all() for x in optimizer.state[p].values() if torch.is_tensor(x))
    assert optimizer.skipped_steps == 0


def test_fp16_gradient_that_overflowed(kernel):
    p = parameter(64, 100, dtype=torch.float16)
    optimizer = TacoAdamW([p], kernel=kernel)
    before = p.detach().clone()
    p.grad = torch.full_like(p, 6e4) * 2
    optimizer.step()
    assert torch.equal(p, before) and optimizer.skipped_steps == 1


def test_weights_that_are_already_broken_do_not_poison_the_state(kernel):
    """The state depends on gradients alone."""
    p = parameter(64, 100)
    with torch.no_grad():
        p[0, 0] = float("nan")
    optimizer = TacoAdamW([p], kernel=kernel)
    train(optimizer, range(2))
    assert p.isnan().sum() == 1
    assert all(x.isfinite().all() for x in optimizer.state[p].values() if torch.is_tensor(x))
