"""Projecting, the direction in the subspace, and the way back, against double precision."""

from __future__ import annotations

import pytest
import torch

from hf_memopt import kernels
from hf_memopt.codecs.projected import Int8Basis
from hf_memopt.kernels import projected, reference
from hf_memopt.kernels.scalars import StepScalars
from hf_memopt.projections.geometry import subspace
from tests.cases import dtype_cases, parameter, randn
from tests.reference import galore_twin as twin
from tests.tolerances import HALF_SPACING

LAYOUTS = {"tall": (70, 33), "wide": (33, 70), "square": (40, 40), "stack": (3, 20, 34), "tall stack": (2, 41, 17)}
RULE = twin.Rule(lr=1e-2, betas=(0.8, 0.95), eps=1e-2, weight_decay=0.1, scale=0.7, residual_scale=0.6)


def scalars(step: int, rule: twin.Rule, stochastic: bool = False) -> StepScalars:
    options = {"lr": rule.lr, "betas": rule.betas, "eps": rule.eps, "weight_decay": rule.weight_decay}
    return StepScalars.at_step(step, **options, parameter_key=7, stochastic=stochastic, maximize=rule.maximize)


def bases_of(space, kind: str) -> torch.Tensor:
    if kind == "coordinates":
        return torch.stack([torch.randperm(space.dimension)[: space.rank].sort().values for _ in range(space.matrices)])
    p = torch.linalg.qr(randn(space.matrices, space.dimension, space.rank, seed=9)).Q
    return p.to(torch.bfloat16) if kind == "bfloat16" else p


def full(space, basis: torch.Tensor) -> torch.Tensor:
    if basis.is_floating_point():
        return basis.double()
    return torch.stack([twin.unit_basis(space.dimension, row) for row in basis.tolist()])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "coordinates"])
@pytest.mark.parametrize("shape", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(**dtype_cases())
def test_project(shape, kind, dtype, monkeypatch):
    monkeypatch.setattr(projected, "strip_elements", lambda like: 300)
    for proj_type in ("left", "right"):
        space = subspace(shape, 6, proj_type)
        basis, grad = bases_of(space, kind), randn(*shape, seed=3, dtype=dtype)
        before = grad.clone()
        low = projected.project(space.view(grad), basis)
        assert low.shape == (space.matrices, 6, space.length) and low.dtype == torch.float32 and low.is_contiguous()
        assert torch.equal(grad, before)
        for b, p in enumerate(full(space, basis)):
            assert twin.project(space.view(grad)[b].double(), p, kind).holds(low[b])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1e25])
def test_coordinates_that_are_not_chosen_must_be_usable_too(bad):
    """Otherwise a residual would bring them into the weights, and nobody would count the step as skipped."""
    space = subspace((20, 30), 4, "left")
    grad = randn(20, 30)
    chosen = torch.tensor([[1, 2, 3, 4]])
    assert projected.project(space.view(grad), chosen).isfinite().all()
    grad[10, 5] = bad
    assert projected.project(space.view(grad), chosen).isnan().all()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("step", [1, 4])
def test_direction_is_adamw_on_the_projected_gradient(kernel, step, maximize):
    rule = twin.Rule(lr=0.3, betas=(0.8, 0.95), eps=1e-2, weight_decay=0.1, maximize=maximize)
    low = randn(2, 5, 31, seed=4)
    state = {"exp_avg": randn(10, 31, seed=5) * 0.1, "exp_avg_sq": randn(10, 31, seed=6).square() * 0.05}
    old = [twin.Near(state[key].double().view(2, 5, 31)) for key in ("exp_avg", "exp_avg_sq")]
    backend = kernels.select(kernel, "cpu")[1]
    minus_u, applied = projected.direction(backend, False, low, state, scalars(step, rule, stochastic=True))
    u, m, v = twin.adamw(twin.Near(low.double(), torch.zeros(())), *old, step, rule)
    assert applied is True
    assert (
        u.holds(-minus_u) and m.holds(state["exp_avg"].view(2, 5, 31)) and v.holds(state["exp_avg_sq"].view(2, 5, 31))
    )


def test_direction_refuses_what_is_not_finite(kernel):
    state = {"exp_avg": torch.zeros(5, 7), "exp_avg_sq": torch.zeros(5, 7)}
    low = randn(1, 5, 7)
    low[0, 2, 3] = float("nan")
    _, applied = projected.direction(kernels.select(kernel, "cpu")[1], False, low, state, scalars(1, RULE))
    assert applied is False and not any(value.any() for value in state.values())


def back(weight, grad, space, basis, rule, norm=0.3, backend=reference, stochastic=False, step=3):
    """The package's way back from given R and U; returns what the twin says, too."""
    low = projected.project(space.view(grad), basis)
    minus_u = randn(*low.shape, seed=8)
    norms = torch.full((space.matrices,), norm)
    expected = []
    for b, p in enumerate(full(space, basis)):
        matmul = "bfloat16" if basis.dtype == torch.bfloat16 else "float32"
        exact = twin.Near(low[b].double(), torch.zeros(())), twin.Near(-minus_u[b].double(), torch.zeros(()))
        matrices = (space.view(x.detach())[b].double() for x in (weight, grad))
        expected.append(twin.apply(*matrices, p, *exact, float(norms[b]), rule, matmul))
    how = projected.BackProjection(rule.scale, rule.residual, rule.residual_scale)
    s = scalars(step, rule, stochastic)
    with torch.no_grad():
        projected.project_back_(weight, grad, space, basis, low, minus_u, norms, True, backend, s, how)
    return expected, norms


@pytest.mark.parametrize("residual", ["none", "fira", "sign"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "coordinates"])
@pytest.mark.parametrize("shape", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_way_back(shape, kind, residual, monkeypatch):
    """fp32 weights; strips of less than a matrix."""
    monkeypatch.setattr(projected, "strip_elements", lambda like: 300)
    for proj_type, maximize, dtype in (("left", False, torch.float32), ("right", True, torch.bfloat16)):
        rule = twin.Rule(**{**RULE.__dict__, "residual": residual, "maximize": maximize})
        space = subspace(shape, 6, proj_type)
        weight, grad = parameter(*shape, seed=1), randn(*shape, seed=3, dtype=dtype)
        before = grad.clone()
        expected, norms = back(weight, grad, space, bases_of(space, kind), rule)
        assert torch.equal(grad, before)
        for b, (new, norm) in enumerate(expected):
            assert new.holds(space.view(weight.detach())[b])
            assert residual != "fira" or norm.holds(norms[b])


@pytest.mark.parametrize("residual", ["none", "fira", "sign"])
@pytest.mark.parametrize("kind", ["float32", "coordinates"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_rounded_once(kernel, dtype, kind, residual, monkeypatch):
    """To the nearest without stochastic rounding, to a neighbour with it."""
    monkeypatch.setattr(projected, "strip_elements", lambda like: 300)
    rule = twin.Rule(**{**RULE.__dict__, "residual": residual})
    for stochastic in (False, True):
        space = subspace((2, 20, 34), 6, "left")
        weight, grad = parameter(2, 20, 34, dtype=dtype, scale=1.0), randn(2, 20, 34, seed=3, dtype=dtype)
        backend = kernels.select(kernel, "cpu")[1]
        expected, _ = back(weight, grad, space, bases_of(space, kind), rule, backend=backend, stochastic=stochastic)
        for b, (new, _) in enumerate(expected):
            half = HALF_SPACING[dtype] * new.value.abs().clamp(min=torch.finfo(dtype).tiny)
            twin_near = twin.Near(new.value, new.error + half * (2 if stochastic else 1) * (1 + 2**-6))
            assert twin_near.holds(weight[b].detach())


def test_stochastic_rounding_is_unbiased_and_never_the_same_in_two_strips(monkeypatch):
    """An update of a twentieth of a spacing arrives on average: six standard deviations of the mean of 2^16 draws."""
    monkeypatch.setattr(projected, "strip_elements", lambda like: 1 << 12)
    weight = torch.nn.Parameter(torch.full((256, 256), 1.5, dtype=torch.bfloat16))
    spacing = 2.0**-7
    space = subspace((256, 256), 256, "left")
    minus_u = torch.full((1, 256, 256), -1.0)
    rule = twin.Rule(lr=spacing / 20, betas=(0.9, 0.99), eps=1e-8)
    s = scalars(2, rule, stochastic=True)
    basis = torch.arange(256)[None]
    low = torch.zeros(1, 256, 256)
    how = projected.BackProjection(1.0)
    with torch.no_grad():
        grad = torch.ones_like(weight)
        projected.project_back_(weight, grad, space, basis, low, minus_u, None, True, reference, s, how)
    moved = 1.5 - weight.detach().double()
    assert set(moved.unique().tolist()) <= {0.0, spacing}
    deviation = spacing * (0.05 * 0.95 / 2**16) ** 0.5
    assert moved.mean().item() == pytest.approx(spacing / 20, abs=6 * deviation + 2**-16 * spacing)
    strips = moved.view(-1, 16, 256)
    assert all(not torch.equal(strips[0], other) for other in strips[1:])


def test_fira_limits_its_growth_and_has_a_floor():
    """From no norm, or one of nearly zero, it reaches a tenth of the update's size at once."""
    space = subspace((20, 30), 4, "left")
    basis = bases_of(space, "float32")
    rule = twin.Rule(**{**RULE.__dict__, "residual": "fira"})
    grad = randn(20, 30, seed=3)
    sizes = []
    for norm in (0.0, 1e-8, 1.0, 1e6):
        _, norms = back(parameter(20, 30), grad, space, basis, rule, norm=norm)
        sizes.append(norms.item())
    floor = projected.FLOOR * randn(1, 4, 30, seed=8).norm().item()
    assert sizes[0] == sizes[1] == pytest.approx(1.01 * floor, rel=1e-5)
    assert sizes[2] == pytest.approx(1.01 * max(1.0, floor), rel=1e-5)
    assert sizes[3] > sizes[2]  # nothing to limit: its own size


@pytest.mark.parametrize("size", [1e10, 1e19, 1.7e19])
def test_fira_on_huge_gradients(size):
    """Sums of squares that fp32 cannot hold, of numbers that it can."""
    space = subspace((20, 30), 4, "left")
    rule = twin.Rule(**{**RULE.__dict__, "residual": "fira"})
    p = parameter(20, 30)
    _, norms = back(p, torch.full((20, 30), size), space, bases_of(space, "float32"), rule)
    assert p.isfinite().all() and norms.isfinite().all()


def test_an_int8_basis_makes_fira_off_by_little():
    """|G_j|^2 - |R_j|^2 stands for |G_j - P R_j|^2, which holds for an orthonormal P: with int8 codes the norm of the
    residual is off by less than two hundredths, twice what a column loses."""
    space = subspace((256, 300), 64, "left")
    codec = Int8Basis(space)
    basis = codec.decode(codec.encode(bases_of(space, "float32")))
    grad = randn(256, 300, seed=3)
    low = projected.project(grad[None], basis)
    assumed = grad.square().sum() - low.square().sum()
    real = (grad - basis[0] @ low[0]).square().sum()
    assert abs((assumed / real).sqrt().item() - 1) < 0.02


def test_matmul_dtype():
    fp32, bf16 = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    for grad in (fp32, bf16):
        assert projected.matmul_dtype("float32", grad) == torch.float32
        assert projected.matmul_dtype("bfloat16", grad) == torch.bfloat16
    chosen = torch.bfloat16 if projected._cpu_multiplies_bfloat16() else torch.float32
    assert projected.matmul_dtype("auto", fp32) == projected.matmul_dtype("auto", bf16) == chosen
    assert projected.matmul_dtype("auto", bf16.to("meta")) == torch.bfloat16
    assert projected.matmul_dtype("auto", fp32.to("meta")) == torch.float32
