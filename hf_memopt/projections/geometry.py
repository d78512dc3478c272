"""Which dimension of a parameter is projected, and to how many dimensions.

A parameter (m, n), or a stack of them (b, m, n), is seen as (b, d, L): d is the dimension that is projected. The side
follows from the parameter's *global* shape and ``proj_type`` alone; nothing is guessed from the shape of a projected
tensor, which is the same for both sides when the rank is no less than a dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROJ_TYPES = ("std", "reverse_std", "left", "right")


@dataclass(frozen=True)
class Subspace:
    """``matrices`` (b) of shape (d, L) whose d = ``dimension`` is projected to ``rank``; L = ``length``.

    ``left``: d counts the rows of the parameter, else its columns.
    """

    matrices: int
    dimension: int
    length: int
    rank: int
    left: bool

    def view(self, p: Tensor) -> Tensor:
        """``p`` as (b, d, L), a view."""
        stack = p if p.dim() == 3 else p[None]
        return stack if self.left else stack.transpose(1, 2)

    @property
    def low_rank_shape(self) -> torch.Size:
        """Shape of a projected moment: one row per basis vector of each matrix."""
        return torch.Size((self.matrices * self.rank, self.length))


def subspace(shape: Sequence[int], rank: int | float, proj_type: str = "std") -> Subspace:
    """The subspace of a parameter of global ``shape``; the rank is at most the projected dimension.

    Args:
        rank: a dimension, or a fraction of the smaller dimension of the matrix if it is a float.
        proj_type: as ``GaLoreOptions.proj_type``. With ``std`` a square matrix is projected on the right, as in
            galore-torch.

    Raises:
        ValueError: the shape is not that of a matrix or a stack of matrices.
    """
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"a projection needs a matrix or a stack of matrices, got shape {tuple(shape)}.")
    b, m, n = (1, *shape) if len(shape) == 2 else tuple(shape)
    left = {"std": m < n, "reverse_std": m >= n, "left": True, "right": False}[proj_type]
    d, length = (m, n) if left else (n, m)
    return Subspace(b, d, length, min(resolve_rank(rank, m, n), d), left)


def resolve_rank(rank: int | float, m: int, n: int) -> int:
    """The rank as a number of dimensions: a float is a fraction of the smaller dimension."""
    return rank if isinstance(rank, int) else max(1, round(rank * min(m, n)))
