"""A tensor seen as a matrix where no view is one: a ``channels_last`` convolution's weight, for example.

``(n, a, b, c)`` with other strides than the contiguous ones cannot be viewed as ``(n, a b c)``, and a copy would be a
temporary of the parameter's size. ``Folded`` copies a few rows at a time, so the reference kernel, which
works on tiles, runs on it as on a matrix and gives the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 1 << 18  # elements copied at once


class Folded:
    """Reads and writes tiles ``[rows, cols]`` of ``tensor`` as the matrix of ``shape`` that ``reshape`` would give."""

    def __init__(self, tensor: Tensor, shape: tuple[int, int]) -> None:
        self._tensor = tensor
        self.shape = torch.Size(shape)
        self.device, self.dtype = tensor.device, tensor.dtype

    def __getitem__(self, tile: tuple) -> Tensor:
        rows, cols = tile
        return torch.cat([part.reshape(len(part), -1)[:, cols] for part in self._pieces(rows)])

    def __setitem__(self, tile: tuple, value: Tensor) -> None:
        rows, cols = tile
        begin = 0
        for part in self._pieces(rows):
            whole = part.reshape(len(part), -1)
            whole[:, cols] = value[begin : begin + len(part)]
            part.copy_(whole.view(part.shape))
            begin += len(part)

    def _pieces(self, rows: slice | Tensor) -> tuple[Tensor, ...]:
        """The rows in pieces whose copies stay small (a single row is copied whole)."""
        return self._tensor[rows].split(max(1, PIECE // max(1, self.shape[1])))


def as_matrix(tensor: Tensor, shape: tuple[int, int]) -> Tensor | Folded:
    """``tensor`` as (rows, columns): a view where the strides allow."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        return Folded(tensor, shape)
