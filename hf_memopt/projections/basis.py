"""Finding a basis: orthonormal columns (b, d, r) fp32, or the numbers (b, r) int64 of coordinates.

A way that looks at the gradient takes it and the basis so far, and gives the new one and for which of the matrices it
could be found: a gradient that is zero or not finite leaves the basis as it was.

Gradients are read in pieces of ``PIECE`` elements, converted to fp32 one at a time, so no copy of a gradient is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..kernels.reference import hash_at
from ..kernels.sums import sums_of_squares

PIECE = 1 << 20  # elements of a gradient worked on at once


def iterate(grad: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """qr(G (G^T P)) of ``grad`` (b, d, L) and ``basis`` (b, d, r), and for which of the b matrices it could be found.

    Columns that vanish or depend on earlier ones become directions orthogonal to those, as Householder's QR gives them.
    """
    z = torch.zeros_like(basis, dtype=torch.float32)
    start = basis.float()
    # one of the two factors is scaled, so that products of huge or tiny gradients neither overflow nor vanish
    shrink = torch.ldexp(torch.ones_like(z[:, 0, 0]), (-torch.frexp(_largest(grad)).exponent).clamp(max=126))
    for matrix, part in pieces(grad):
        g = grad[matrix, :, part].float()
        z[matrix].addmm_(g, (g.mT @ start[matrix]).mul_(shrink[matrix]))
    size = z.abs().amax(dim=(1, 2))
    usable = size.isfinite() & (size > 0)
    pick = usable[:, None, None]
    # scaled, so that squares neither overflow nor vanish
    found = torch.linalg.qr(torch.where(pick, z / size[:, None, None], start)).Q
    return torch.where(pick, found, start), usable


def singular(grad: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The leading left singular vectors of each matrix of ``grad`` (b, d, L), as many as ``basis`` (b, d, r) has.

    Where r exceeds L there are only L; directions orthogonal to them follow.
    """
    found, usable = basis.float().clone(), []
    for matrix, g in enumerate(grad):
        g = g.float()
        usable.append(g.isfinite().all() & (g != 0).any())
        if truth(usable[-1]):
            # of the parameter as it lies in memory, as in galore-torch: the signs of the vectors depend on it
            if g.stride(-1) == 1:
                best = torch.linalg.svd(g, full_matrices=False).U[:, : basis.shape[2]]
            else:
                best = torch.linalg.svd(g.mT, full_matrices=False).Vh.mT[:, : basis.shape[2]]
            count = best.shape[1]
            if count < basis.shape[2]:
                found[matrix] = torch.linalg.qr(torch.cat([best, found[matrix]], dim=1)).Q[:, : basis.shape[2]]
            found[matrix, :, :count] = best
    return found, torch.stack(usable)


def select(grad: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers, rising, of those of the d coordinates of each matrix of ``grad`` (b, d, L) that have the most energy, as
    many as ``basis`` (b, r) has."""
    energy = sums_of_squares(grad, dim=2)
    best = energy.topk(basis.shape[1], dim=1).indices.sort(dim=1).values
    usable = energy.isfinite().all(dim=1) & (energy > 0).any(dim=1)
    return torch.where(usable[:, None], best, basis), usable


def _largest(grad: Tensor) -> Tensor:
    """The largest |g| of each matrix of ``grad`` (b, d, L), (b,) fp32."""
    flat = (grad if grad.stride(-1) == 1 else grad.mT).flatten(1)
    smallest, largest = torch.aminmax(flat, dim=1)
    return torch.maximum(-smallest, largest).float()


def truth(answer: Tensor) -> bool:
    """``answer`` as a bool; waits for a GPU."""
    return isinstance(answer, FakeTensor) or bool(answer)  # a simulation has no numbers, and none that are not finite


def random_columns(key: int, b: int, d: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(numbers (b, r) int64 of random columns of the cosine transform, random signs (b, d) of its rows).

    A function of its arguments alone, the same on every device. With the signs the columns are a random subspace in
    which no direction is preferred.
    """
    matrix = torch.arange(b, device=device)[:, None]
    element = torch.arange(d, device=device)
    order = hash_at(key, matrix, element)
    columns = order.argsort(dim=1, stable=True)[:, :rank].sort(dim=1).values
    signs = 1.0 - 2.0 * (hash_at(key, matrix + b, element) & 1).float()
    return columns, signs


def cosine_columns(columns: Tensor, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """These columns (..., r) of the orthonormal cosine transform of dimension ``d``: (..., d, r).

    sqrt(2 / d) cos(pi (2 i + 1) c / (2 d)), and sqrt(1 / d) for c = 0. The angle is a whole multiple of pi / (2 d), so
    the numbers are read from a table of one period: 4 d entries, computed in double.
    """
    angle = torch.arange(4 * d, dtype=torch.float64, device=columns.device) * (torch.pi / (2 * d))
    table = (torch.cos(angle) * (2 / d) ** 0.5).to(dtype)
    # products stay below 2 d^2, so 32 bits do for all but the largest dimensions
    whole = torch.int32 if d < 1 << 15 else torch.int64
    rows = 2 * torch.arange(d, dtype=whole, device=columns.device)[:, None] + 1
    place = (rows * columns.to(whole)[..., None, :]) % (4 * d)
    found = table.index_select(0, place.flatten()).view(place.shape)
    return found.masked_fill_((columns == 0)[..., None, :], d**-0.5)


def pieces(grad: Tensor) -> Iterator[tuple[int, slice]]:
    """(matrix, part of the last dimension) over ``grad`` (b, d, L), at most ``PIECE`` elements each."""
    b, d, length = grad.shape
    step = max(1, PIECE // d)
    for matrix in range(b):
        for begin in range(0, length, step):
            yield matrix, slice(begin, min(begin + step, length))
