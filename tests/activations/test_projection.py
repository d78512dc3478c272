"""Each projection is unbiased, strays as far as its table says, and is a function of its key alone."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from hf_memopt.activations import projection
from hf_memopt.activations.basis import InputBasis
from hf_memopt.activations.projection import Coordinates, Dense, Identity, choose_top, make, top_count
from tests.cases import randn
from tests.tolerances import HALF_SPACING, SIGMAS, E, standard_error

CPU = torch.device("cpu")
KINDS = ("gaussian", "orthonormal", "structured", "principal")
SAMPLES = 1000
SIZES = [(12, 5), (9, 1), (7, 6), (16, 8)]


def of(kind, n, r, key=1, dtype=torch.float32, top=None):
    return make(kind, n, r, key, CPU, dtype, top)


def matrix(p, n: int) -> torch.Tensor:
    """P (n, r) in double, read off as what is done to the unit vectors."""
    return p.project(torch.eye(n)).double()


def top_of(n: int, r: int) -> torch.Tensor:
    """Coordinates as energy would choose them, the last ones and not in order."""
    return torch.arange(n - top_count(r), n).flip(0)


@functools.cache
def samples(kind, n, r) -> torch.Tensor:
    """P P^T for ``SAMPLES`` keys."""
    top = top_of(n, r) if kind == "principal" else None
    found = torch.stack([matrix(of(kind, n, r, key * 2654435761 % 2**32, top=top), n) for key in range(SAMPLES)])
    return found @ found.mT


def variance(kind: str, n: int, r: int, chosen: int = 0) -> torch.Tensor:
    """Of each element of P P^T (n, n), from the definitions; the last ``chosen`` coordinates are fixed."""
    if kind == "gaussian":  # sums of r products of normals of variance 1/r, squares on the diagonal
        return (torch.ones(n, n) + torch.eye(n)).double() / r
    if kind == "orthonormal":  # r of n terms n/r c_aj c_bj drawn without replacement, under signs
        transform = projection.cosine_columns(torch.arange(n), n, torch.float64)
        terms = transform[:, None, :] * transform[None, :, :]
        return (n / r) ** 2 * r * (1 - r / n) * terms.var(dim=-1, correction=1)
    free = n - chosen  # a coordinate is free/s with probability s/free, else 0
    diagonal = torch.zeros(n, dtype=torch.float64)
    diagonal[:free] = free / (r - chosen) - 1
    return diagonal.diag()


@pytest.mark.parametrize(("n", "r"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_p_p_t_is_the_identity(kind, n, r):
    mean = samples(kind, n, r).mean(dim=0)
    spread = standard_error(variance(kind, n, r, top_count(r) if kind == "principal" else 0), SAMPLES)
    rounding = 4 * E * n / r  # of the numbers of P: two factors of P, each of one or two roundings
    assert (mean - torch.eye(n)).abs().le(SIGMAS * spread + rounding).all()
    assert (spread > 0).any()


@pytest.mark.parametrize(("n", "r"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_strays_as_far_as_the_table_says(kind, n, r):
    x = randn(n, seed=5).double()
    energy, factor = x.square().sum(), n / r - 1
    if kind == "gaussian":
        factor = (n + 1) / r
    elif kind == "principal":
        r1 = top_count(r)
        energy, factor = x[: n - r1].square().sum(), (n - r1) / (r - r1) - 1
    squares = (samples(kind, n, r) @ x - x).square().sum(dim=-1)
    spread = standard_error(squares.var(), SAMPLES)
    rounding = 8 * E * (n / r) ** 2 * x.square().sum()
    assert abs(squares.mean() - factor * energy) <= SIGMAS * spread + rounding


@pytest.mark.parametrize(("n", "r"), [*SIZES, (1000, 250), (37, 36), (5, 1)])
def test_orthonormal_columns_are_orthogonal(n, r):
    p = of("orthonormal", n, r).matrix.double()
    # entries of size sqrt(2 / r), each rounded three times (table, root n/r, product); n products a sum
    assert (p.T @ p - n / r * torch.eye(r)).abs().max() <= n * (2 / r) * 6 * E


@pytest.mark.parametrize(("n", "r"), [*SIZES, (1000, 250), (37, 36), (5, 1)])
@pytest.mark.parametrize("kind", ["structured", "principal"])
def test_coordinates_are_distinct_columns_of_the_identity(kind, n, r):
    top = top_of(n, r) if kind == "principal" else None
    p = of(kind, n, r, top=top)
    chosen = 0 if top is None else top.numel()
    assert isinstance(p, Coordinates) and p.index.unique().numel() == r == p.weight.numel()
    assert p.index.min() >= 0 and p.index.max() < n
    if chosen:
        assert torch.equal(p.index[:chosen], top) and p.weight[:chosen].eq(1).all()
    assert torch.equal(p.index[chosen:], p.index[chosen:].sort().values)
    assert p.weight[chosen:].eq(torch.tensor(math.sqrt((n - chosen) / (r - chosen)))).all()


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_full_rank_is_the_identity(kind):
    p = of(kind, 9, 9)
    x = randn(4, 9)
    assert isinstance(p, Identity) and p.project(x) is x
    rows, carrier = randn(2, 9, seed=1), randn(2, 9, seed=2)
    expected = rows + 0.5 * carrier
    p.add_to(rows, carrier, 0.5)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_on_every_call_and_others_for_another_key(kind):
    top = top_of(48, 12) if kind == "principal" else None
    torch.manual_seed(1)
    first = matrix(of(kind, 48, 12, top=top), 48)
    state = torch.get_rng_state()
    again = matrix(of(kind, 48, 12, top=top), 48)
    assert torch.equal(first, again) and torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, matrix(of(kind, 48, 12, key=2, top=top), 48))


def test_gaussian_numbers_are_normal():
    """Kolmogorov's distance of 60,000 numbers, which exceeds 1.95 / sqrt(n) once in a thousand times; and the tails."""
    p = of("gaussian", 300, 200, key=77).matrix.double().flatten() * 200**0.5
    ordered = p.sort().values
    steps = torch.arange(1, p.numel() + 1) / p.numel()
    assert (torch.special.ndtr(ordered) - steps).abs().max() < 1.95 / p.numel() ** 0.5
    assert p.isfinite().all() and 3.5 < p.abs().max() < 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_folded_back_is_what_was_projected(kind, dtype):
    """``add_to`` is the transpose of ``project``, also in bf16: else the estimate would be biased."""
    n, r = 24, 6
    top = top_of(n, r) if kind == "principal" else None
    p = of(kind, n, r, dtype=dtype, top=top)
    forward = p.project(torch.eye(n, dtype=dtype))
    rows = torch.zeros(r, n)
    p.add_to(rows, torch.eye(r, dtype=dtype), 1.0)
    if isinstance(p, Dense):
        assert torch.equal(forward.float(), rows.T)
    else:  # the one is rounded to the dtype, the other is not
        assert torch.equal(forward, rows.T.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_coordinates_are_weighted_without_bias(dtype):
    """A weight rounded to bf16 would make all of z too large or too small by up to 0.4 %; z is rounded anyway."""
    p = of("structured", 4096, 999)
    x = randn(64, 4096, seed=3, dtype=dtype)
    exact = x.double()[:, p.index] * p.weight.double()
    error = (p.project(x).double() - exact) / exact.abs()
    half = HALF_SPACING[dtype]
    assert error.abs().max() <= half + 2 * E
    # 1 / (2 half) different mantissas, each rounded up or down by at most half a spacing
    assert abs((error * exact.sign()).mean()) <= SIGMAS * standard_error(half**2 / 3, round(0.5 / half))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_shape(kind):
    p = of(kind, 8, 3)
    x = randn(2, 5, 4, 8)
    flat = p.project(x.reshape(-1, 8))
    assert torch.equal(p.project(x).reshape(-1, 3), flat)
    across = randn(8, 6).T
    assert torch.allclose(p.project(across), p.project(across.contiguous()), rtol=0, atol=8 * E * 40)
    assert p.project(torch.zeros(0, 8)).shape == (0, 3)


# -- choosing by energy ------------------------------------------------------------------------------------------------


def test_coordinates_that_stay_keep_their_places():
    energy = torch.tensor([9.0, 1, 8, 2, 7, 3])
    assert choose_top(energy, 3, None).tolist() == [0, 2, 4]
    assert choose_top(energy, 3, torch.tensor([4, 1, 0])).tolist() == [4, 2, 0]
    assert choose_top(energy, 3, torch.tensor([1, 3, 5])).tolist() == [0, 2, 4]
    assert choose_top(energy, 3, torch.tensor([2, 4, 0])).tolist() == [2, 4, 0]


def test_ties_give_distinct_coordinates():
    for before in (None, torch.tensor([7, 3, 5])):
        found = choose_top(torch.ones(9), 3, before)
        assert found.unique().numel() == 3 and torch.equal(found, choose_top(torch.ones(9), 3, before))


@pytest.mark.parametrize(
    "bad", [torch.zeros(6), torch.full((6,), float("nan")), torch.tensor([1.0, 2, 3, 4, 5, math.inf])]
)
def test_energy_that_says_nothing_changes_nothing(bad):
    before = torch.tensor([5, 0, 3])
    assert torch.equal(choose_top(bad, 3, before), before)
    assert choose_top(bad, 3, None).unique().numel() == 3


def basis(rank=6, kind="principal", n=16) -> InputBasis:
    return InputBasis("layer", n, rank, kind, seed=3)


def test_a_basis_observes_only_when_asked_and_adds_up():
    b, x = basis(), randn(3, 5, 16)
    b.observe(x)
    assert b.energy is None
    b.collecting = True
    b.observe(x[:1])
    b.observe(x[1:].to(torch.bfloat16))
    expected = x[:1].double().square().sum((0, 1)) + x[1:].to(torch.bfloat16).double().square().sum((0, 1))
    assert b.energy.dtype == torch.float32
    assert (b.energy - expected).abs().le(15 * 2 * E * expected).all()  # sums of 15 squares, a root and its square
    b.refresh()
    assert b.epoch == 1 and b.energy is None
    assert torch.equal(b.top, expected.topk(3).indices.sort().values)


@pytest.mark.parametrize(
    ("kind", "rank", "wants"),
    [("principal", 6, True), ("principal", 1, False), ("principal", 16, False), ("gaussian", 6, False)],
)
def test_who_wants_energy(kind, rank, wants):
    assert basis(rank, kind).wants_energy() is wants


def test_an_epoch_can_be_had_again():
    b = basis(kind="gaussian")
    old = matrix(b.projection(CPU, torch.float32), 16)
    b.refresh()
    assert not torch.equal(old, matrix(b.projection(CPU, torch.float32), 16))
    assert torch.equal(old, matrix(b.at(0, None, CPU, torch.float32), 16))
    other = InputBasis("other", 16, 6, "gaussian", seed=3)
    assert not torch.equal(old, matrix(other.projection(CPU, torch.float32), 16))
