r"""The random subspaces onto which layer inputs are compressed: z = x P with P (n x r), scaled so that E[P P^T] = I.

Then z P^T is an unbiased estimate of x, and a product with it of whatever is linear in x. How far it strays:

===========  ============================================================  ==================  ====================
kind         P                                                             E ||x P P^T - x||^2  cost of x P, per token
===========  ============================================================  ==================  ====================
gaussian     independent normals of variance 1/r, as in the paper          (n + 1) / r ||x||^2  n r
orthonormal  r random columns of the cosine transform under random signs,  (n/r - 1) ||x||^2    n r
             times sqrt(n/r)
structured   r random coordinates, times sqrt(n/r)                         (n/r - 1) ||x||^2    r
principal    the r/2 coordinates with the most energy as they are, and     ((n - r1)/r2 - 1)    r
             r2 random ones of the others, times sqrt((n - r1)/r2)         of the others
none         the identity, for r = n                                       0                    0
===========  ============================================================  ==================  ====================

With coordinates the product is a selection and its transpose an addition to chosen columns: no matrix is made, and
neither has a cost that grows with n. That is why ``principal`` takes coordinates where PRAC (arXiv 2602.23111) takes
singular vectors: less energy is caught, but nothing has to be stored, orthogonalised or multiplied.

Every P is a function of a 32-bit key, its kind and, for ``principal``, the chosen coordinates: the same on every device
and in every process, computed where it is needed and not kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.reference import hash_at
from ..projections.basis import cosine_columns, random_columns


@dataclass(frozen=True)
class Dense:
    """``matrix`` (n, r) in the dtype of the products."""

    matrix: Tensor

    def project(self, x: Tensor) -> Tensor:
        """(..., n) to (..., r)."""
        return x @ self.matrix.to(x.dtype)

    def add_to(self, rows: Tensor, carrier: Tensor, scale: float) -> None:
        """``rows`` (k, n) fp32 or fp64 += scale ``carrier`` (k, r) P^T, in place."""
        product = carrier.to(self.matrix.dtype) @ self.matrix.T
        rows.add_(product.to(rows.dtype), alpha=scale)


@dataclass(frozen=True)
class Coordinates:
    """The columns ``index`` (r,) int64 of the identity, times ``weight`` (r,) fp32."""

    index: Tensor
    weight: Tensor

    def project(self, x: Tensor) -> Tensor:
        """(..., n) to (..., r)."""
        return x.index_select(-1, self.index).mul_(self.weight)  # in fp32: a rounded weight would be a bias

    def add_to(self, rows: Tensor, carrier: Tensor, scale: float) -> None:
        """``rows`` (k, n) fp32 += scale ``carrier`` (k, r) P^T, in place."""
        rows.index_add_(1, self.index, carrier.to(rows.dtype) * self.weight, alpha=scale)


@dataclass(frozen=True)
class Identity:
    """r = n and nothing is lost."""

    def project(self, x: Tensor) -> Tensor:
        return x

    def add_to(self, rows: Tensor, carrier: Tensor, scale: float) -> None:
        rows.add_(carrier.to(rows.dtype), alpha=scale)


Projection = Dense | Coordinates | Identity


def make(
    kind: str, features: int, rank: int, key: int, device: torch.device, dtype: torch.dtype, top: Tensor | None = None
) -> Projection:
    """The projection of ``kind`` (table above) of ``features`` onto ``rank`` dimensions for this 32-bit ``key``.

    Args:
        dtype: of a dense matrix.
        top: for ``principal``, the numbers (r1,) int64 of the coordinates with the most energy, in the order of their
            places; None where no energy has been seen yet, and all are drawn at random.
    """
    if rank == features or kind == "none":
        return Identity()
    if kind == "gaussian":
        return Dense(_normals(key, features, rank, device).mul_(rank**-0.5).to(dtype))
    if kind == "orthonormal":
        columns, signs = random_columns(key, 1, features, rank, device)
        scaled = cosine_columns(columns[0], features).mul_(signs[0, :, None])
        return Dense(scaled.mul_(math.sqrt(features / rank)).to(dtype))
    order = hash_at(key, torch.zeros((), dtype=torch.int64, device=device), torch.arange(features, device=device))
    chosen = 0
    if top is not None:
        chosen = top.numel()
        order = order.index_fill(0, top, torch.iinfo(torch.int32).max)  # last, so never drawn
    drawn = order.argsort(stable=True)[: rank - chosen].sort().values
    weight = torch.full((rank,), math.sqrt((features - chosen) / (rank - chosen)), device=device)
    if top is None:
        return Coordinates(drawn, weight)
    weight[:chosen] = 1.0
    return Coordinates(torch.cat([top, drawn]), weight)


def top_count(rank: int) -> int:
    """How many of ``rank`` coordinates ``principal`` gives to those with the most energy."""
    return rank // 2


def choose_top(energy: Tensor, count: int, before: Tensor | None) -> Tensor:
    """Numbers (count,) int64 of the coordinates with the most ``energy`` (n,) fp32.

    A coordinate that was among them ``before`` keeps its place, so the optimizer's moments of it stay its own. Energy
    that is not finite, or zero everywhere, changes nothing.
    """
    best = energy.topk(count).indices
    if before is not None:
        kept = torch.isin(before, best)
        fresh = best[~torch.isin(best, before)].sort().values
        best = before.masked_scatter(~kept, fresh)
        usable = energy.isfinite().all() & (energy > 0).any()
        return torch.where(usable, best, before)
    return best.sort().values


def _normals(key: int, rows: int, cols: int, device: torch.device) -> Tensor:
    """(rows, cols) fp32 normals by Box and Muller's transform of two hashes."""
    half = (cols + 1) // 2
    row = torch.arange(rows, device=device)[:, None]
    first = hash_at(key, row, torch.arange(half, device=device))
    second = hash_at(key, row, torch.arange(half, cols + cols % 2, device=device))
    radius = _uniform(first).log_().mul_(-2.0).sqrt_()
    angle = _uniform(second).mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :cols]


def _uniform(h: Tensor) -> Tensor:
    """From int32 hashes to fp32 in (0, 1)."""
    return ((h >> 8) & 0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
