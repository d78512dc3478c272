"""The reference compiled by ``torch.compile`` gives the bits of the reference and never runs uncompiled in silence.

A compilation takes seconds, so the cases share few: each weight dtype, each of the two ways of rounding, but not all
pairs of them.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from hf_memopt import TacoAdamW, kernels
from hf_memopt.kernels import inductor, reference
from tests.cases import parameter, randn, uneven_gradient
from tests.conftest import require_kernel
from tests.kernels.test_compiled import (
    apply_all,
    as_matrix,
    assert_same,
    gradients,
    same_bits,
    scalars,
    state_for,
    ternary_state,
)

STEPS_OF = ("ternary_adamw_", "dense_adamw_")
SHAPES = [(7, 161), (64, 160), (5, 1000), (130, 33), (300, 1), (1, 160), (1, 5), (1, 1), (3, 1367), (2, 3, 5, 160)]


@pytest.fixture(autouse=True)
def _compiler():
    require_kernel("inductor")


def run_both(step_of: str, weights, grads, **settings) -> None:
    assert_same(
        apply_all(reference, step_of, weights, grads, **settings),
        apply_all(inductor, step_of, weights, grads, **settings),
    )


@pytest.mark.parametrize(
    "step_of, dtype, stochastic",
    [
        ("ternary_adamw_", torch.float32, True),
        ("ternary_adamw_", torch.bfloat16, True),
        ("ternary_adamw_", torch.float16, False),
        ("dense_adamw_", torch.float32, True),
        ("dense_adamw_", torch.bfloat16, False),
        ("dense_adamw_", torch.float16, True),
    ],
)
def test_shapes_and_dtypes(step_of, dtype, stochastic):
    for shape in SHAPES:
        weights = as_matrix(randn(*shape, dtype=dtype, scale=0.1))
        run_both(step_of, weights, gradients(shape, 4, dtype), stochastic=stochastic)


@pytest.mark.parametrize("step_of", STEPS_OF)
def test_gradient_of_another_dtype_or_sign(step_of):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        run_both(step_of, randn(6, 333), gradients((6, 333), 2, dtype))
    run_both(step_of, randn(6, 333), gradients((6, 333), 3), maximize=True, weight_decay=0.0)


def test_more_than_one_tile(monkeypatch):
    monkeypatch.setattr(reference, "TILE", 25 * 160)
    run_both("ternary_adamw_", randn(70, 700), gradients((70, 700), 3))
    run_both("dense_adamw_", randn(70, 700), gradients((70, 700), 3))


def test_every_code_byte():
    """Any of the 256 bytes decodes as README.md says, also the thirteen that are never written."""
    k = 8 * 160 + 40
    state = ternary_state((2, k))
    for moment in ("exp_avg", "exp_avg_sq"):
        codes = torch.arange(8 * 32).to(torch.uint8)
        tail = torch.arange(8, dtype=torch.uint8) * 31
        state[f"{moment}.codes"].copy_(torch.stack([torch.cat([codes, tail]), torch.cat([codes.flip(0), tail])]))
    state["exp_avg.scale"].copy_(randn(2, 9).abs() * 1e-3)
    state["exp_avg_sq.row"].copy_(randn(2).abs() * 1e-6 + 1e-9)
    state["exp_avg_sq.col"].copy_(randn(k).abs() * 1e-6 + 1e-9)
    run_both("ternary_adamw_", randn(2, k), gradients((2, k), 3), state=state, first_step=10)


@pytest.mark.parametrize("row", [0.0, 1e-45, 1e-38, 1e30, 3e38])
def test_factors_at_the_ends_of_the_range(row):
    """Subnormal and overflowing products come out as the reference's, NaN where it has NaN."""
    state = ternary_state((6, 330))
    state["exp_avg_sq.codes"].copy_(torch.randint(0, 256, state["exp_avg_sq.codes"].shape))
    state["exp_avg_sq.row"].copy_(torch.tensor([row, 1e-6, row, 1e-3, 1e-6, 1e-6]))
    state["exp_avg_sq.col"].copy_(
        torch.tensor([0.0, 1e-45, 1e-39, 1e-30, 1e-6, 1e10, 1e30, 3e38, 1e-20, 1.0, 1e-7]).repeat(30)
    )
    run_both("ternary_adamw_", randn(6, 330), gradients((6, 330), 3), state=state, first_step=5)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e15])
def test_sizes_of_the_gradient(scale):
    for step_of in STEPS_OF:
        run_both(step_of, randn(8, 480), [scale * g for g in gradients((8, 480), 4)])


def test_signs_of_zero_and_gradients_of_nothing():
    w, g = torch.zeros(4, 200), torch.zeros(4, 200)
    w[:, ::2] = -0.0
    g[:, ::3] = -0.0
    g[0, 0] = -1e-45
    for step_of in STEPS_OF:
        run_both(step_of, w, [g, -g, g])
        run_both(step_of, randn(4, 200), [torch.zeros(4, 200)] * 3)


@pytest.mark.parametrize(
    "step_of, dtype, stochastic",
    [
        ("ternary_adamw_", torch.bfloat16, True),
        ("ternary_adamw_", torch.float16, False),
        ("dense_adamw_", torch.bfloat16, False),
        ("dense_adamw_", torch.float16, True),
    ],
)
def test_weights_at_the_ends_of_the_range(step_of, dtype, stochastic):
    limits = torch.finfo(dtype)
    w = torch.tensor([0.0, -0.0, limits.tiny, limits.smallest_normal / 2, limits.max, -limits.max, 1.0, 1e-7])
    w = torch.cat([w, torch.tensor([float("inf")])]).repeat(3, 40).to(dtype)
    for settings in ({}, {"lr": 10.0, "weight_decay": 0.0}, {"lr": 1e-8}):
        run_both(step_of, w, gradients(w.shape, 3, dtype), stochastic=stochastic, **settings)


@pytest.mark.parametrize("step_of", STEPS_OF)
def test_layouts(step_of):
    run_both(step_of, randn(300, 20).t(), [g.t() for g in gradients((300, 20), 2)])
    whole, whole_grad = randn(12, 700), uneven_gradient(12, 700)
    expected = whole.clone()
    for kernel, w in ((reference, expected), (inductor, whole)):
        state = state_for(step_of, (12, 500))
        assert getattr(kernel, step_of)(w[:, 100:600], whole_grad[:, 100:600], state, scalars(1))
    assert same_bits(expected, whole)


@pytest.mark.parametrize("step_of", STEPS_OF)
def test_nothing_is_written_for_a_gradient_that_is_not_finite(step_of):
    w, state = randn(7, 701), state_for(step_of, (7, 701))
    assert getattr(inductor, step_of)(w, uneven_gradient(7, 701), state, scalars(1))
    before, state_before = w.clone(), {name: buffer.clone() for name, buffer in state.items()}
    for bad in (float("nan"), float("inf"), 1.9e19):
        g = uneven_gradient(7, 701, seed=5)
        g[6, 700] = bad
        assert not getattr(inductor, step_of)(w, g, state, scalars(2))
        assert_same((before, state_before), (w, state))


# -- compilations --------------------------------------------------------------------------------


def test_neither_shapes_nor_scalars_compile_anew():
    for step_of in STEPS_OF:
        apply_all(inductor, step_of, randn(7, 161), gradients((7, 161), 1))
    before = counters["stats"]["unique_graphs"]
    for shape in SHAPES:
        for step_of in STEPS_OF:
            for t in (1, 2, 1000):
                settings = {"lr": 1e-3 / t, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0}
                w = as_matrix(randn(*shape))
                assert apply_all(inductor, step_of, w, gradients(shape, 1), first_step=t, **settings)
    assert counters["stats"]["unique_graphs"] == before


def test_it_raises_where_torch_would_run_eagerly():
    w, g = randn(7, 161), uneven_gradient(7, 161)
    for step_of in STEPS_OF:
        assert getattr(inductor, step_of)(w, g, state_for(step_of, w.shape), scalars(1))
        with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="kernel=inductor cannot run"):
            getattr(inductor, step_of)(w, g, state_for(step_of, w.shape), scalars(1))
    with torch.compiler.set_stance("force_eager"):
        usable, why = inductor.available.__wrapped__()
    assert not usable and why == "torch.compile is switched off and runs functions as they are"


def test_it_raises_beyond_the_allowed_number_of_compilations():
    w, g = randn(7, 161), uneven_gradient(7, 161)
    assert inductor.dense_adamw_(w, g, state_for("dense_adamw_", w.shape), scalars(1))
    limit, too_many = torch._dynamo.config.patch(recompile_limit=1), torch._dynamo.exc.FailOnRecompileLimitHit
    with limit, pytest.raises(too_many, match="fullgraph"):
        inductor.dense_adamw_(w.double(), g, state_for("dense_adamw_", w.shape), scalars(1))


# -- the switch ----------------------------------------------------------------------------------


def test_the_switch():
    assert kernels.select("inductor", "cpu") == ("inductor", inductor)
    assert kernels.select("auto", "cpu")[0] in ("compiled", "reference")
    with pytest.raises(ValueError, match="works on cpu and cuda parameters, but a parameter is on mps"):
        kernels.select("inductor", "mps")


def test_in_the_optimizer():
    trained = {}
    for kernel in ("reference", "inductor"):
        p, bias = parameter(64, 200), parameter(64)
        optimizer = TacoAdamW([("w", p), ("b", bias)], kernel=kernel)
        for t in range(3):
            p.grad, bias.grad = uneven_gradient(64, 200, seed=t), randn(64, seed=t)
            optimizer.step()
        assert optimizer.kernel_name() == kernel
        trained[kernel] = [p.detach(), bias.detach()]
    assert all(same_bits(one, other) for one, other in zip(*trained.values(), strict=True))
