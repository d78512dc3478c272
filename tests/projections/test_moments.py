"""How moments follow a change of basis."""

from __future__ import annotations

import math

import pytest
import torch

from hf_memopt.kernels.scalars import bias_correction
from hf_memopt.projections.moments import change_of_basis, overlap, transport, transport_coordinates
from tests.cases import randn
from tests.tolerances import E

BETAS = (0.9, 0.99)


def basis(b: int, d: int, r: int, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(randn(b, d, r, seed=seed)).Q


def moments(b: int, r: int, length: int, steps: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """As AdamW has them after some steps."""
    m, v = torch.zeros(b, r, length), torch.zeros(b, r, length)
    for t in range(steps):
        g = randn(b, r, length, seed=50 + t)
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
    return m, v


def bias(steps: int = 3) -> list[float]:
    return [bias_correction(beta, steps) for beta in BETAS]


@pytest.mark.parametrize("b, d, r, length", [(1, 9, 4, 7), (2, 6, 6, 3), (3, 5, 1, 2)])
def test_the_formula_by_loops(b, d, r, length):
    """In double: m_i <- sum_j C_ij m_j; v_i <- |sum_j C_ij^2 (v_j - m_j^2) + (sum_j C_ij m_j)^2| of corrected ones, and
    the mean of all v by the share of direction i that is new."""
    m, v = moments(b, r, length)
    c = change_of_basis(basis(b, d, r, 1), basis(b, d, r, 2))
    bias1, bias2 = bias()
    new_m, new_v = transport(m, v, c, bias1, bias2)
    for k in range(b):
        for i in range(r):
            for x in range(length):
                m_hat = [float(m[k, j, x]) / bias1 for j in range(r)]
                v_hat = [float(v[k, j, x]) / bias2 for j in range(r)]
                row = [float(c[k, i, j]) for j in range(r)]
                expected_m = math.fsum(row[j] * m_hat[j] for j in range(r))
                terms = [row[j] ** 2 * (v_hat[j] - m_hat[j] ** 2) for j in range(r)]
                unseen = max(0.0, 1 - math.fsum(c_ij**2 for c_ij in row))
                mean = math.fsum(v_hat) / r
                expected_v = abs(math.fsum(terms) + expected_m**2) + unseen * mean
                # r + 4 operations an entry, relative to the sum of magnitudes; v squares m's error
                size_m = math.fsum(abs(row[j] * m_hat[j]) for j in range(r))
                size_v = math.fsum(row[j] ** 2 * (v_hat[j] + m_hat[j] ** 2) for j in range(r)) + size_m**2 + mean
                assert abs(new_m[k, i, x].item() - expected_m * bias1) <= (r + 4) * E * size_m * bias1
                assert abs(new_v[k, i, x].item() - expected_v * bias2) <= 2 * (r + 6) * E * size_v * bias2


def test_the_momentum_is_kept_where_the_new_subspace_holds_the_old():
    """What it stands for in full coordinates, P m, is the same before and after."""
    old = basis(2, 12, 3)
    larger = torch.linalg.qr(torch.cat([old, randn(2, 12, 5, seed=4)], dim=2)).Q
    m, v = moments(2, 3, 8)
    new_m, _ = transport(m, v, change_of_basis(larger, old), *bias())
    torch.testing.assert_close(larger @ new_m, old @ m, rtol=0, atol=30 * E * m.abs().max().item())
    rotated = old @ torch.linalg.qr(randn(2, 3, 3, seed=5)).Q
    new_m, _ = transport(m, v, change_of_basis(rotated, old), *bias())
    torch.testing.assert_close(rotated @ new_m, old @ m, rtol=0, atol=30 * E * m.abs().max().item())


def test_what_the_new_subspace_cannot_hold_is_all_that_is_lost():
    old, new = basis(1, 12, 3, 1), basis(1, 12, 4, 2)
    m, v = moments(1, 3, 8)
    new_m, _ = transport(m, v, change_of_basis(new, old), *bias())
    torch.testing.assert_close(new @ new_m, new @ (new.mT @ (old @ m)), rtol=0, atol=40 * E * m.abs().max().item())


def test_signs_and_order_of_the_basis_mean_nothing():
    """Both moments follow a permutation with signs without loss: v does not see signs."""
    old = basis(1, 12, 5)
    order, signs = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0])
    m, v = moments(1, 5, 8)
    # of the exact change, of which ``change_of_basis`` is off by d E an entry
    change = torch.zeros(1, 5, 5)
    change[0, torch.arange(5), order] = signs
    new_m, new_v = transport(m, v, change, *bias())
    torch.testing.assert_close(new_m, m[:, order] * signs[:, None], rtol=4 * E, atol=0)
    torch.testing.assert_close(new_v, v[:, order], rtol=0, atol=20 * E * (v + m * m).max().item() / bias()[0])
    found = change_of_basis(old[:, :, order] * signs, old)
    torch.testing.assert_close(found, change, rtol=0, atol=2 * 12 * E)


def test_the_second_moment_stays_above_zero_and_zero_stays_zero():
    m, v = moments(3, 6, 40, steps=1)
    c = change_of_basis(basis(3, 9, 6, 1), basis(3, 9, 6, 2))
    assert (transport(m, v, c, *bias(1))[1] >= 0).all()
    assert not any(t.any() for t in transport(torch.zeros(3, 6, 40), torch.zeros(3, 6, 40), c, *bias(1)))


def test_coordinates():
    """Lists of coordinates are the bases of these unit vectors."""
    new, old = torch.tensor([[0, 3, 5], [1, 2, 4], [3, 4, 5]]), torch.tensor([[3, 4, 5], [0, 3, 5], [3, 4, 5]])
    unit = torch.eye(6)
    as_bases = [torch.stack([unit[:, row] for row in listed]) for listed in (new, old)]
    m, v = moments(3, 3, 8)
    found = transport_coordinates(m, v, new, old)
    # nothing is added up, but v goes through v - m^2 + m^2, each rounded, and its bias correction
    expected = transport(m, v, change_of_basis(*as_bases), *bias())
    torch.testing.assert_close(found[0], expected[0], rtol=4 * E, atol=0)
    size = v + 2 * m.square().amax() * bias()[1] / bias()[0] ** 2
    assert ((found[1] - expected[1]).abs() <= 8 * E * size.amax()).all()
    assert torch.equal(found[0][2], m[2]) and torch.equal(found[1][2], v[2])
    low = torch.tensor([2.0, 1.0, 1.0])[None, :, None].expand(3, 3, 8)
    assert overlap(new, old, low).tolist() == pytest.approx([2 / 6, 0.0, 1.0])
    assert overlap(new, old, torch.ones(3, 3, 8)).tolist() == pytest.approx([2 / 3, 0.0, 1.0])


def even(b: int, r: int) -> torch.Tensor:
    """A projected gradient with as much energy in every direction as in any other."""
    return torch.eye(r).expand(b, r, r)


def test_overlap():
    p = basis(2, 50, 10)
    assert overlap(p, p, randn(2, 10, 30)).tolist() == pytest.approx([1.0, 1.0], abs=100 * E)
    rotated = p @ torch.linalg.qr(randn(2, 10, 10, seed=3)).Q
    assert overlap(rotated, p, randn(2, 10, 30)).tolist() == pytest.approx([1.0, 1.0], abs=200 * E)
    # of unrelated ones r / d in the mean; 50 pairs, each with a standard deviation of about sqrt(2) (1 - r / d) / d
    many = overlap(basis(50, 50, 10, 8), basis(50, 50, 10, 9), even(50, 10))
    assert many.mean().item() == pytest.approx(10 / 50, abs=5 * 2**0.5 * 0.8 / 50 / 50**0.5)
    # d - r dimensions are orthogonal to a subspace of r
    full = torch.linalg.qr(randn(1, 20, 20)).Q
    assert overlap(full[:, :, :7], full[:, :, 7:14], even(1, 7)).item() < 1e-10


def test_overlap_weighs_by_energy():
    """The definition in double; of a gradient of rank 2 only its two directions count, whatever fills the rest."""
    d, r, length = 30, 6, 40
    new, old, grad = basis(2, d, r, 1), basis(2, d, r, 2), randn(2, d, length, seed=3)
    low = (new.mT @ grad).double()
    seen = old.double().mT @ (new.double() @ low)
    expected = seen.square().sum(dim=(1, 2)) / low.square().sum(dim=(1, 2))
    torch.testing.assert_close(overlap(new, old, low.float()).double(), expected, rtol=0, atol=4 * (d + length) * E)
    axes = torch.eye(d)[None]
    new, old = axes[:, :, :r], axes[:, :, [0, 1, *range(10, 10 + r - 2)]]
    grad = torch.zeros(1, d, length)
    grad[:, :2] = randn(1, 2, length)
    assert overlap(new, old, new.mT @ grad).item() == pytest.approx(1.0, abs=100 * E)
    for size in (1e-40, 1e-30, 1e19):
        assert overlap(new, old, new.mT @ grad * size).item() == pytest.approx(1.0, abs=100 * E)
    assert overlap(new, old, torch.zeros(1, r, length)).item() == 1.0
