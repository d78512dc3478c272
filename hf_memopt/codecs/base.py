"""What a codec is: the declaration of the buffers that hold one moment.

Allocation, the memory report, the checks on load and the tests read the same declaration, so none of them has byte
counts of its own. A moment of a parameter is stored under ``<moment>.<part>`` for every part its codec declares; a part
named "" is stored under ``<moment>`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class BufferSpec:
    """One buffer: its shape and dtype, the value that stands for zero, and whether it has one row per parameter row.

    Buffers with ``per_row`` are cut along dim 0 when the parameter is; the others are the same on every shard.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0
    per_row: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        return torch.full(self.shape, self.fill, dtype=self.dtype, device=device)


class Codec(Protocol):
    """Storage of one moment of a parameter of a given shape."""

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        """The buffers by part name, for a parameter of ``shape``."""

    def encode(self, moment: Tensor) -> dict[str, Tensor]:
        """Buffers, by part name, that stand for ``moment`` (fp32, the parameter's shape)."""

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size) -> Tensor:
        """The moment that ``buffers`` stand for: fp32, ``shape``."""


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """The (rows, columns) as which kernels see a parameter: dim 0 and the rest; a vector is (n, 1), a scalar (1, 1)."""
    if len(shape) == 0:
        return 1, 1
    return shape[0], math.prod(shape[1:])


def state_key(moment: str, part: str) -> str:
    return f"{moment}.{part}" if part else moment


def parts(codec: Codec, moment: str, state: Mapping[str, Tensor], shape: torch.Size) -> dict[str, Tensor]:
    """The buffers of one moment in a parameter's state, by part name."""
    return {part: state[state_key(moment, part)] for part in codec.specs(shape)}


def write(moment: str, state: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Copy the buffers of one moment, by part name, into a parameter's state."""
    for part, value in buffers.items():
        state[state_key(moment, part)].copy_(value)


def fresh(codec: Codec, shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
    """Buffers that stand for zero, by part name."""
    return {part: spec.allocate(device) for part, spec in codec.specs(shape).items()}


def zeros(codecs: dict[str, Codec], shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
    """Fresh buffers of all moments, by state key."""
    return {key: spec.allocate(device) for key, spec in all_specs(codecs, shape).items()}


def all_specs(codecs: dict[str, Codec], shape: torch.Size) -> dict[str, BufferSpec]:
    """The declared buffers of all moments, by state key."""
    return {
        state_key(moment, part): spec for moment, codec in codecs.items() for part, spec in codec.specs(shape).items()
    }
