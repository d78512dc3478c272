"""Bases: orthonormal, of the right subspace, and left alone where a gradient says nothing."""

from __future__ import annotations

import math

import pytest
import torch

from hf_memopt.kernels.scalars import mix32
from hf_memopt.projections import basis as bases
from tests.cases import randn
from tests.tolerances import E

CPU = torch.device("cpu")
SHAPES = [(1, 40, 64, 10), (3, 33, 17, 5), (2, 16, 90, 16), (1, 64, 20, 48), (2, 9, 31, 1)]  # b, d, L, r
ONE_STEP = 0.97
"""Share of the energy in the best subspace that a basis from one warm-started iteration must have."""


def start(b: int, d: int, r: int, key: int = 5) -> torch.Tensor:
    columns, signs = bases.random_columns(key, b, d, r, CPU)
    return bases.cosine_columns(columns, d) * signs[:, :, None]


def off_orthonormal(p: torch.Tensor) -> float:
    p = p.double()
    return (p.mT @ p - torch.eye(p.shape[-1], dtype=torch.float64)).abs().max().item()


def energy(grad: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """||P^T G||^2 of each matrix."""
    return (p.double().mT @ grad.double()).square().sum(dim=(1, 2))


def decaying(b: int, d: int, length: int, power: float, seed: int = 0) -> torch.Tensor:
    """Matrices with singular values 1, 2^-power, 3^-power, ..."""
    u = torch.linalg.qr(randn(b, d, d, seed=seed)).Q
    v = torch.linalg.qr(randn(b, length, length, seed=seed + 1)).Q
    k = min(d, length)
    return u[:, :, :k] * torch.arange(1, k + 1).float() ** -power @ v[:, :, :k].mT


@pytest.mark.parametrize("b, d, length, r", SHAPES)
@pytest.mark.parametrize("find", [bases.iterate, bases.singular], ids=["iterate", "singular"])
def test_orthonormal(find, b, d, length, r):
    """Householder's QR and LAPACK's SVD are off by a small multiple of d E."""
    for grad in (randn(b, d, length), decaying(b, d, length, 2.0), decaying(b, d, length, 1.0).bfloat16()):
        p, usable = find(grad, start(b, d, r))
        assert p.shape == (b, d, r) and p.dtype == torch.float32 and usable.tolist() == [True] * b
        assert off_orthonormal(p) < 10 * d * E


@pytest.mark.parametrize("b, d, length, r", [s for s in SHAPES if s[3] <= min(s[1], s[2])])
def test_singular_is_the_best_subspace(b, d, length, r):
    grad = decaying(b, d, length, 1.0)
    p, _ = bases.singular(grad, start(b, d, r))
    best = torch.linalg.svdvals(grad.double())[:, :r].square().sum(dim=1)
    assert ((energy(grad, p) / best - 1).abs() < 100 * d * E).all()


def test_singular_beyond_the_length_holds_every_direction():
    grad = randn(2, 64, 20)
    p, _ = bases.singular(grad, start(2, 64, 48))
    torch.testing.assert_close(p @ (p.mT @ grad), grad, rtol=0, atol=64 * E * grad.abs().max().item())


@pytest.mark.parametrize("b, d, length, r", [(1, 40, 64, 10), (2, 33, 48, 5)])
def test_iterate_is_subspace_iteration(b, d, length, r):
    """The span of G G^T P, in double."""
    grad, p = randn(b, d, length), start(b, d, r)
    found, _ = bases.iterate(grad, p)
    z = grad.double() @ (grad.double().mT @ p.double())
    q = torch.linalg.qr(z).Q
    condition = torch.linalg.cond(z).max().item()  # the error of z, (d + L) E, is that much larger in its span
    torch.testing.assert_close(found.double() @ found.double().mT, q @ q.mT, rtol=0, atol=(d + length) * E * condition)


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("b, d, length, r", [(2, 64, 96, 16), (1, 96, 96, 12), (1, 48, 200, 24)])
def test_iterate_captures_what_the_svd_captures(b, d, length, r, power):
    """Warm: after three refreshes on gradients that share their leading directions, and never less than it had."""
    grad = decaying(b, d, length, power)
    best = torch.linalg.svdvals(grad.double())[:, :r].square().sum(dim=1)
    p = start(b, d, r)
    shares = [energy(grad, p) / best]
    for _ in range(3):
        p, _ = bases.iterate(grad, p)
        shares.append(energy(grad, p) / best)
    assert all((later > earlier - 100 * d * E).all() for earlier, later in zip(shares, shares[1:], strict=False))
    assert (shares[1] > ONE_STEP).all() and (shares[3] > 0.995).all(), shares


def test_iterate_follows_a_turning_subspace():
    p = start(1, 64, 8)
    for turn in range(4):
        grad = decaying(1, 64, 80, 1.5, seed=10) + 0.3 * turn * decaying(1, 64, 80, 1.5, seed=20)
        p, _ = bases.iterate(grad, p)
    best = torch.linalg.svdvals(grad.double())[:, :8].square().sum()
    assert energy(grad, p).item() / best.item() > ONE_STEP


def test_iterate_where_the_gradient_has_a_lower_rank():
    """Missing directions are filled up; those of the gradient are all there."""
    grad = randn(1, 40, 3, seed=1) @ randn(1, 3, 50, seed=2)
    p, usable = bases.iterate(grad, start(1, 40, 8))
    assert usable.all() and off_orthonormal(p) < 10 * 40 * E
    assert energy(grad, p).item() / grad.double().square().sum().item() > 1 - 1e-4


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-6, 1e6, 1e15, 1e18])
def test_iterate_does_not_depend_on_the_size_of_the_gradient(size):
    grad, p = randn(1, 20, 30), start(1, 20, 4)
    found, usable = bases.iterate(grad * size, p)
    assert usable.all()
    condition = torch.linalg.cond(grad.double() @ (grad.double().mT @ p.double())).item()
    torch.testing.assert_close(found, bases.iterate(grad, p)[0], rtol=0, atol=(20 + 30) * 4 * E * condition)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_select_picks_the_most_energy(dtype):
    grad = randn(3, 41, 60, seed=3, dtype=dtype)
    chosen, usable = bases.select(grad, torch.arange(7).expand(3, 7))
    energies = grad.double().square().sum(dim=2)
    for b in range(3):
        best = sorted(range(41), key=lambda i, b=b: -energies[b, i].item())[:7]
        assert chosen[b].tolist() == sorted(best)
    assert usable.tolist() == [True] * 3 and chosen.dtype == torch.int64


@pytest.mark.parametrize("find", [bases.iterate, bases.singular, bases.select], ids=["iterate", "singular", "select"])
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -float("inf")])
def test_zero_and_nonfinite_gradients_leave_the_basis(find, bad):
    """Of the matrix concerned; the others of the stack get theirs."""
    grad = randn(3, 12, 20)
    if bad == 0:
        grad[1] = 0
    else:
        grad[1, 3, 4] = bad
    old = start(3, 12, 4) if find is not bases.select else torch.tensor([[0, 1, 2, 3]]).repeat(3, 1)
    before = old.clone()
    found, usable = find(grad, old)
    assert usable.tolist() == [True, False, True]
    assert torch.equal(found[1], old[1]) and torch.equal(old, before)
    assert not torch.equal(found[0], old[0]) and not torch.equal(found[2], old[2])


@pytest.mark.parametrize("find", [bases.iterate, bases.singular, bases.select], ids=["iterate", "singular", "select"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_is_only_read(find, dtype):
    grad = randn(2, 12, 20, dtype=dtype)
    before = grad.clone()
    find(grad.mT.contiguous().mT, start(2, 12, 4) if find is not bases.select else torch.arange(4).repeat(2, 1))
    find(grad, start(2, 12, 4) if find is not bases.select else torch.arange(4).repeat(2, 1))
    assert torch.equal(grad, before)


@pytest.mark.parametrize("find", [bases.iterate, bases.select], ids=["iterate", "select"])
def test_pieces_do_not_change_the_result(find, monkeypatch):
    grad = randn(2, 30, 50)
    old = start(2, 30, 6) if find is bases.iterate else torch.arange(6).repeat(2, 1)
    whole, _ = find(grad, old)
    monkeypatch.setattr(bases, "PIECE", 200)
    in_pieces, _ = find(grad, old)
    condition = torch.linalg.cond(grad.double() @ grad.double().mT).max().item()
    torch.testing.assert_close(in_pieces, whole, rtol=0, atol=80 * E * condition)


def test_pieces_cover_everything_once(monkeypatch):
    monkeypatch.setattr(bases, "PIECE", 64)
    for shape in ((2, 7, 30), (1, 100, 5), (1, 64, 1)):
        count = torch.zeros(shape)
        for matrix, part in bases.pieces(count):
            count[matrix, :, part] += 1
        assert (count == 1).all()


@pytest.mark.parametrize("b, d, r", [(1, 40, 10), (3, 33, 33), (2, 17, 1), (1, 1, 1)])
def test_random_bases(b, d, r):
    """Orthonormal, the same for the same key, another one for another key and for every matrix of a stack."""
    p = start(b, d, r)
    assert off_orthonormal(p) < 4 * d * E
    assert torch.equal(p, start(b, d, r))
    if r < d and d > 1:
        assert not torch.equal(p, start(b, d, r, key=6))
        assert all(not torch.equal(p[0], p[i]) for i in range(1, b))


def test_random_columns_by_their_definition():
    """Numbers in the order of their hashes; the twin has its own hash in Python integers."""
    key, b, d, r = 12345, 2, 23, 6
    columns, signs = bases.random_columns(key, b, d, r, CPU)

    def hashed(row: int, column: int) -> int:
        h = mix32(mix32(key + row * 0x9E3779B9) + column)
        return h - (1 << 32) if h >= 1 << 31 else h

    for i in range(b):
        assert columns[i].tolist() == sorted(sorted(range(d), key=lambda j, i=i: hashed(i, j))[:r])
        assert signs[i].tolist() == [1.0 - 2.0 * (hashed(i + b, j) & 1) for j in range(d)]


@pytest.mark.parametrize("d", [1, 2, 7, 40])
def test_cosine_columns_by_their_formula(d):
    table = bases.cosine_columns(torch.arange(d)[None], d)[0]
    for i in range(d):
        for c in range(d):
            size = math.sqrt((1 if c == 0 else 2) / d)
            assert table[i, c].item() == pytest.approx(
                size * math.cos(math.pi * (2 * i + 1) * c / (2 * d)), abs=2 * E * size
            )


def test_cosine_columns_of_a_large_dimension():
    """Where products of row and column need more than 32 bits."""
    d = 1 << 15
    column = torch.tensor([[d - 1, d - 2]])
    p = bases.cosine_columns(column, d)[0].double()
    rows = 2 * torch.arange(d, dtype=torch.float64)[:, None] + 1
    exact = math.sqrt(2 / d) * torch.cos(torch.pi * ((rows * column[0].double()) % (4 * d)) / (2 * d))
    torch.testing.assert_close(p, exact, rtol=0, atol=2 * E * math.sqrt(2 / d))


def test_a_random_subspace_prefers_no_direction():
    """The share of a fixed direction's energy that it captures is r / d in the mean, whatever the direction."""
    d, r, tries = 32, 8, 400
    for direction in (torch.eye(d)[0], torch.full((d,), d**-0.5), randn(d, seed=1)):
        direction = direction / direction.norm()
        shares = torch.stack([(start(1, d, r, key)[0].T @ direction).square().sum() for key in range(tries)])
        # a share of at most 1 has a standard deviation of at most sqrt(x (1 - x)); five standard errors
        assert shares.mean().item() == pytest.approx(r / d, abs=5 * (r / d * (1 - r / d)) ** 0.5 / tries**0.5)
