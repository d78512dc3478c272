"""Sums of squares along one dimension, in double, without a copy of what is summed.

On a CPU torch converts all of a tensor before it sums in another dtype, and sums across rows slowly. So squares are
made of a few rows in memory at a time, which stay in the cache, summed in single precision, and those sums are added in
double. Where that overflows, which takes numbers above 1e16, it is done again with all sums in double. A GPU converts
on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

PIECE = 1 << 16  # squares held at once on a CPU: a quarter of a megabyte


def sums_of_squares(x: Tensor, dim: int) -> Tensor:
    """Sums over dimension ``dim`` (1 or 2) of the squares of ``x`` (b, n, k), any floating dtype; fp64.

    Squares are rounded to single precision, and so are partial sums of at most 2^7 rows or 2^16 columns in memory.
    """
    if not on_cpu(x):
        return _sums(x, dim, 1 << 22, torch.float64)
    found = _sums(x, dim, PIECE, torch.float32)
    return found if bool(found.isfinite().all()) else _sums(x, dim, PIECE, torch.float64)


def _sums(x: Tensor, dim: int, piece: int, dtype: torch.dtype) -> Tensor:
    if x.stride(2) != 1 and x.stride(1) == 1:
        return _sums(x.mT, 3 - dim, piece, dtype)  # along the rows in memory
    b, n, k = x.shape
    out = torch.zeros(b, k if dim == 1 else n, device=x.device, dtype=torch.float64)
    height, width = max(1, min(128, piece // k)), min(k, piece)
    for matrix in range(b):
        for top in range(0, n, height):
            rows = slice(top, min(top + height, n))
            for left in range(0, k, width):
                cols = slice(left, min(left + width, k))
                squares = x[matrix, rows, cols].float().square()
                out[matrix, cols if dim == 1 else rows] += squares.sum(dim=dim - 1, dtype=dtype)
    return out


def on_cpu(t: Tensor) -> bool:
    """Whether ``t`` is really there, and on a CPU: a simulation counts what a GPU would do."""
    return t.device.type == "cpu" and not isinstance(t, FakeTensor)
