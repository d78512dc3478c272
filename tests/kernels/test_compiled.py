"""The C kernel gives the bits of the reference: weights and every state buffer, whatever the shape, dtype, layout and
number of threads.

Everything runs on the stages that the machine's compiler chooses and on the portable ones (elsewhere the same, here
perhaps AVX-512), so both are tested wherever there is one.
"""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch
from torch import Tensor

from hf_memopt.codecs import base
from hf_memopt.codecs.dense import Dense
from hf_memopt.codecs.ternary import TernaryFirstMoment, TernarySecondMoment
from hf_memopt.kernels import build, compiled, reference
from hf_memopt.kernels.scalars import MAX_GRADIENT, StepScalars, parameter_key
from tests.cases import dtype_cases, randn, shape_cases, uneven_gradient
from tests.conftest import require_kernel

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
# Tails that fill their planes, that leave the last plane partly or wholly empty, and rows of more than one segment of
# four blocks.
MORE_SHAPES = [(5, k) for k in (1, 4, 5, 6, 16, 20, 96, 155, 156, 176, 640, 641, 799, 1300)]


@pytest.fixture(params=["native", "portable"], autouse=True)
def stages(request, monkeypatch, tmp_path_factory):
    require_kernel("compiled")
    if request.param == "portable":
        library = _portable(tmp_path_factory)
        assert library.hf_memopt_stages() == b"portable"
        monkeypatch.setattr(compiled, "_library", lambda: (library, ""))


_portable_library: list[ctypes.CDLL] = []


def _portable(tmp_path_factory) -> ctypes.CDLL:
    if not _portable_library:
        path = tmp_path_factory.mktemp("portable") / "kernel.so"
        build._compile(build.find_compiler(), path, ("-DHF_MEMOPT_PORTABLE",))
        library, why = compiled._declared(ctypes.CDLL(str(path)))
        assert library is not None, why
        _portable_library.append(library)
    return _portable_library[0]


@pytest.fixture(params=[1, 2, 5], ids="{} threads".format)
def threads(request, monkeypatch):
    """Threads even for small parameters."""
    monkeypatch.setattr(compiled, "_ELEMENTS_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


# -- the bits of the reference -------------------------------------------------------------------


@pytest.mark.parametrize(**dtype_cases())
@pytest.mark.parametrize(**shape_cases())
def test_ternary_steps(shape, dtype):
    run_both("ternary_adamw_", as_matrix(randn(*shape, dtype=dtype, scale=0.1)), gradients(shape, 5, dtype))


@pytest.mark.parametrize("shape", MORE_SHAPES)
def test_widths(shape):
    run_both("ternary_adamw_", randn(*shape, scale=0.1), gradients(shape, 4), weight_decay=0.0, maximize=True)
    run_both("ternary_adamw_", randn(*shape, scale=0.1, dtype=torch.bfloat16), gradients(shape, 4, torch.bfloat16))


@pytest.mark.parametrize(**dtype_cases())
@pytest.mark.parametrize(**shape_cases())
def test_dense_steps(shape, dtype):
    run_both("dense_adamw_", as_matrix(randn(*shape, dtype=dtype, scale=0.1)), gradients(shape, 4, dtype))


@pytest.mark.parametrize("step_of", ["ternary_adamw_", "dense_adamw_"])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_nearest_write_back(step_of, dtype):
    run_both(step_of, randn(20, 500, dtype=dtype), gradients((20, 500), 3, dtype), stochastic=False)


@pytest.mark.parametrize("step_of", ["ternary_adamw_", "dense_adamw_"])
def test_gradient_of_another_dtype(step_of):
    for dtype in (torch.float32, *SIXTEEN_BIT):
        for grad_dtype in (torch.float32, *SIXTEEN_BIT, torch.float64):
            run_both(step_of, randn(6, 333, dtype=dtype), gradients((6, 333), 2, grad_dtype))


@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.9, 0.0), (0.0, 0.0), (0.999, 0.9999)])
def test_extreme_betas(betas):
    run_both("ternary_adamw_", randn(6, 350), gradients((6, 350), 4), betas=betas)


def test_gradients_of_nothing():
    g = uneven_gradient(9, 700)
    g[2], g[5:7], g[:, 160:320] = 0, 0, 0
    run_both("ternary_adamw_", randn(9, 700), [g, torch.zeros(9, 700), g, -torch.zeros(9, 700)])
    run_both("ternary_adamw_", randn(9, 700), [torch.zeros(9, 700)] * 3)


def test_signs_of_zero():
    w = torch.zeros(4, 200)
    w[:, ::2] = -0.0
    g = torch.zeros(4, 200)
    g[:, ::3] = -0.0
    g[0, 0] = -1e-45
    run_both("ternary_adamw_", w, [g, -g, g])


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e15])
def test_sizes_of_the_gradient(scale):
    """From squares that underflow to squares near the end of the range."""
    run_both("ternary_adamw_", randn(8, 480), [scale * g for g in gradients((8, 480), 4)])
    run_both("dense_adamw_", randn(8, 480), [scale * g for g in gradients((8, 480), 4)])


def test_every_code_byte():
    """Any of the 256 bytes decodes as README.md says, also the thirteen that are never written, in full blocks and
    narrow ones."""
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


@pytest.mark.parametrize("row", [0.0, 1e-45, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_factors_at_the_ends_of_the_range(row):
    """Subnormal and overflowing products of the second moment's factors come out as the reference's, NaN where it has
    NaN."""
    state = ternary_state((6, 330))
    state["exp_avg_sq.codes"].copy_(torch.randint(0, 256, state["exp_avg_sq.codes"].shape))
    state["exp_avg_sq.row"].copy_(torch.tensor([row, 1e-6, row, 1e-3, 1e-6, 1e-6]))
    state["exp_avg_sq.col"].copy_(
        torch.tensor([0.0, 1e-45, 1e-39, 1e-30, 1e-6, 1e10, 1e30, 3e38, 1e-20, 1.0, 1e-7]).repeat(30)
    )
    run_both("ternary_adamw_", randn(6, 330), gradients((6, 330), 3), state=state, first_step=5)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_weights_at_the_ends_of_the_range(dtype):
    limits = torch.finfo(dtype)
    w = torch.tensor(
        [0.0, -0.0, limits.tiny, limits.smallest_normal / 2, limits.max, -limits.max, 1.0, 65504.0, 1e-7, float("inf")]
    )
    w = w.repeat(3, 40).to(dtype)
    for settings in ({}, {"stochastic": False}, {"lr": 10.0, "weight_decay": 0.0}, {"lr": 1e-8}):
        run_both("ternary_adamw_", w, gradients(w.shape, 3, dtype), **settings)
        run_both("dense_adamw_", w, gradients(w.shape, 3, dtype), **settings)


def test_flush_to_zero_of_the_caller_does_not_matter():
    w, g = randn(5, 400) * 1e-38, [1e-25 * x for x in gradients((5, 400), 3)]
    expected = apply_all(reference, "ternary_adamw_", w, g)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to zero")
    try:
        given = apply_all(compiled, "ternary_adamw_", w, g)
    finally:
        torch.set_flush_denormal(False)
    assert_same(expected, given)


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_of", ["ternary_adamw_", "dense_adamw_"])
@pytest.mark.parametrize(**dtype_cases())
def test_rows_apart(step_of, dtype):
    """A column slice of a larger matrix: rows lie apart, and what lies between them is not touched."""
    whole, whole_grad = randn(12, 700, dtype=dtype), uneven_gradient(12, 700, dtype=dtype)
    expected, state = whole.clone(), state_for(step_of, (12, 500))
    s = scalars(1)
    assert getattr(reference, step_of)(expected[:, 100:600], whole_grad[:, 100:600], state, s)
    assert getattr(compiled, step_of)(whole[:, 100:600], whole_grad[:, 100:600], state_for(step_of, (12, 500)), s)
    assert same_bits(expected, whole)


@pytest.mark.parametrize("step_of", ["ternary_adamw_", "dense_adamw_"])
def test_columns_apart(step_of):
    w = randn(300, 20)
    run_both(step_of, w.t(), [g.t() for g in gradients((300, 20), 2)])
    run_both(step_of, randn(20, 300), [torch.ones(()).expand(20, 300), torch.ones(20, 1).expand(20, 300)])


def test_a_column_of_a_matrix():
    run_both("dense_adamw_", randn(50, 3)[:, 1:2], [uneven_gradient(50, 3)[:, 1:2]] * 3)
    run_both("ternary_adamw_", randn(50, 3)[:, 1:2], [uneven_gradient(50, 3)[:, 1:2]] * 3)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_do(shape):
    assert compiled.dense_adamw_(torch.zeros(shape), torch.zeros(shape), dense_state(shape), scalars(1))


# -- gradients that are not finite ---------------------------------------------------------------


@pytest.mark.parametrize("step_of", ["ternary_adamw_", "dense_adamw_"])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf"), 1.9e19, -3e38])
@pytest.mark.parametrize("at", [(0, 0), (0, 159), (3, 160), (2, 640), (69, 700), (69, 0), (64, 333)])
def test_nothing_is_written(step_of, bad, at, threads):
    w, state = randn(70, 701), state_for(step_of, (70, 701))
    assert getattr(compiled, step_of)(w, uneven_gradient(70, 701), state, scalars(1))
    before, state_before = w.clone(), {name: buffer.clone() for name, buffer in state.items()}
    g = uneven_gradient(70, 701, seed=5)
    g[at] = bad
    assert not getattr(compiled, step_of)(w, g, state, scalars(2))
    assert_same((before, state_before), (w, state))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_nothing_is_written_for_16_bits(dtype):
    for bad in (float("nan"), float("inf"), -float("inf")):
        w, state = randn(5, 200, dtype=dtype), ternary_state((5, 200))
        before = w.clone()
        g = uneven_gradient(5, 200, dtype=dtype)
        g[4, 199] = bad
        assert not compiled.ternary_adamw_(w, g, state, scalars(1))
        assert_same((before, ternary_state((5, 200))), (w, state))


def test_the_largest_gradient_is_still_taken():
    greatest = torch.tensor(MAX_GRADIENT)
    g = torch.full((3, 200), greatest)
    run_both("ternary_adamw_", randn(3, 200), [g, -g])
    g[1, 3] = torch.nextafter(greatest, torch.tensor(float("inf")))
    assert not compiled.ternary_adamw_(randn(3, 200), g, ternary_state((3, 200)), scalars(1))
    assert not reference.ternary_adamw_(randn(3, 200), g, ternary_state((3, 200)), scalars(1))


# -- threads and processes -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(300, 500), (3, 5000), (2000, 33), (4100, 1), (1, 1)])
def test_threads(shape, threads):
    run_both("ternary_adamw_", randn(*shape), gradients(shape, 3))
    run_both("ternary_adamw_", randn(*shape, dtype=torch.bfloat16), gradients(shape, 2, torch.bfloat16))
    run_both("dense_adamw_", randn(*shape), gradients(shape, 3))


def test_calls_from_several_python_threads(threads):
    shape = (200, 333)
    expected = apply_all(reference, "ternary_adamw_", randn(*shape), gradients(shape, 3))
    results = []
    callers = [
        threading.Thread(
            target=lambda: results.append(apply_all(compiled, "ternary_adamw_", randn(*shape), gradients(shape, 3)))
        )
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    for result in results:
        assert_same(expected, result)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child(threads):
    """Data loaders fork after the optimizer has run; nothing of the kernel may wait for a thread that the child does
    not have."""
    w, g, state = randn(100, 333), uneven_gradient(100, 333), ternary_state((100, 333))
    compiled.ternary_adamw_(w, g, state, scalars(1))
    child = os.fork()
    if child == 0:
        done = compiled.ternary_adamw_(w, g, state, scalars(2))
        os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0


# -- what is refused -----------------------------------------------------------------------------


def test_state_that_does_not_fit_is_refused():
    for name in ternary_state((4, 200)):
        for spoil in (lambda x: x[:1], lambda x: x.to(torch.float64), lambda x: torch.stack([x, x], -1)[..., 0]):
            state = ternary_state((4, 200))
            state[name] = spoil(state[name])
            with pytest.raises(ValueError, match=name):
                compiled.ternary_adamw_(randn(4, 200), randn(4, 200), state, scalars(1))
    with pytest.raises(ValueError, match="exp_avg_sq"):
        compiled.dense_adamw_(
            randn(4, 20), randn(4, 20), {"exp_avg": torch.zeros(4, 20), "exp_avg_sq": torch.zeros(80)}, scalars(1)
        )
    with pytest.raises(ValueError, match="shape"):
        compiled.ternary_adamw_(randn(4, 200), randn(4, 201), ternary_state((4, 200)), scalars(1))


# -- helpers -------------------------------------------------------------------------------------


def scalars(step: int, **settings) -> StepScalars:
    given = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "stochastic": True, "maximize": False}
    return StepScalars.at_step(step, parameter_key=parameter_key(7, "layer.weight"), **(given | settings))


def ternary_state(shape) -> dict[str, Tensor]:
    codecs = {"exp_avg": TernaryFirstMoment(), "exp_avg_sq": TernarySecondMoment()}
    return base.zeros(codecs, torch.Size(shape), torch.device("cpu"))


def dense_state(shape) -> dict[str, Tensor]:
    return base.zeros({"exp_avg": Dense(), "exp_avg_sq": Dense()}, torch.Size(shape), torch.device("cpu"))


def state_for(step_of: str, shape) -> dict[str, Tensor]:
    return ternary_state(shape) if step_of == "ternary_adamw_" else dense_state(shape)


def as_matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1)


def gradients(shape, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [as_matrix(uneven_gradient(*shape, seed=10 * t, dtype=dtype)) for t in range(count)]


def apply_all(kernel, step_of: str, weights: Tensor, grads: list[Tensor], state=None, first_step: int = 1, **settings):
    """The weights and the state after a step for each gradient."""
    weights = weights.clone(memory_format=torch.preserve_format)
    state = {name: buffer.clone() for name, buffer in (state or state_for(step_of, weights.shape)).items()}
    for t, g in enumerate(grads, start=first_step):
        assert getattr(kernel, step_of)(weights, g, state, scalars(t, **settings))
    return weights, state


def run_both(step_of: str, weights: Tensor, grads: list[Tensor], **settings) -> None:
    assert_same(
        apply_all(reference, step_of, weights, grads, **settings),
        apply_all(compiled, step_of, weights, grads, **settings),
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bits; a NaN equals any NaN."""
    if one.is_floating_point() and one.isnan().any():
        return torch.equal(one.isnan(), other.isnan()) and same_bits(one.nan_to_num(0.5), other.nan_to_num(0.5))
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def assert_same(expected, given) -> None:
    assert same_bits(expected[0], given[0]), f"{(expected[0] != given[0]).sum()} weights differ"
    assert expected[1].keys() == given[1].keys()
    for name, buffer in expected[1].items():
        assert same_bits(buffer, given[1][name]), f"{(buffer != given[1][name]).sum()} elements of {name} differ"
