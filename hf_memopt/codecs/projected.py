"""What GaLore keeps of a matrix: both moments in the subspace, and what tells the subspace.

A matrix of d x L projected to rank r (``projections/geometry.py``) has moments of r x L, in fp32 or as ternary codes.
The basis (d x r) is stored as int8 with one scale a column, as fp32, or, where it consists of coordinates, as their r
numbers; a random one is computed anew from its seed and stored as nothing.

int8 loses less than a hundredth of a column's norm. The moments are those of the coordinates in the stored basis, which
is also the one that the update is projected back with, so what is lost is orthogonality, not gradient.

Bits a parameter for a square matrix at r = d / 4: fp32 moments 16, ternary ones 0.85; the basis 2 as int8, 8 as fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..options import GaLoreOptions
from ..parsing import parse_options
from ..projections.geometry import Subspace, subspace
from .base import BufferSpec, Codec, all_specs
from .dense import Dense
from .ternary import TernaryFirstMoment, TernarySecondMoment

_defaults = GaLoreOptions()

STATES = ("fp32", "ternary")
STORED = ("subspace", "svd")
"""Ways to find a basis (``projections/__init__.py``) whose bases have to be stored."""


@dataclass(frozen=True)
class InSubspace:
    """A moment in the subspace, stored as ``inner`` stores a matrix."""

    inner: Codec
    space: Subspace

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        # no row of it belongs to a row of the parameter
        own = self.inner.specs(self.space.low_rank_shape)
        return {part: BufferSpec(s.shape, s.dtype, s.fill, per_row=False) for part, s in own.items()}

    def encode(self, moment: Tensor, *more: Tensor) -> dict[str, Tensor]:
        """Of ``moment`` in the subspace, (b r, L)."""
        return self.inner.encode(moment, *more)

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size | None = None) -> Tensor:
        """The moment in the subspace, (b r, L) fp32."""
        return self.inner.decode(buffers, self.space.low_rank_shape)

    def take_rows(self, buffers: dict[str, Tensor], rows: Tensor, seen: Tensor) -> dict[str, Tensor]:
        """As the ternary codecs' own."""
        return self.inner.take_rows(buffers, rows, seen)


@dataclass(frozen=True)
class Int8Basis:
    """``codes`` (b, d, r) int8 and ``scale`` (b, r) fp32, the largest entry of each column being 127."""

    space: Subspace

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        b, d, r = _basis_shape(self.space)
        per_row = self.space.left and b == 1
        return {
            "codes": BufferSpec((b, d, r), torch.int8, per_row=per_row),
            "scale": BufferSpec((b, r), torch.float32, per_row=False),
        }

    def encode(self, basis: Tensor) -> dict[str, Tensor]:
        scale = basis.abs().amax(dim=1) / 127
        return {"codes": (basis / scale[:, None]).nan_to_num_(0.0).round_().to(torch.int8), "scale": scale}

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size | None = None) -> Tensor:
        return buffers["codes"] * buffers["scale"][:, None]


@dataclass(frozen=True)
class Fp32Basis:
    """One buffer (b, d, r) fp32."""

    space: Subspace

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        per_row = self.space.left and self.space.matrices == 1
        return {"": BufferSpec(_basis_shape(self.space), torch.float32, per_row=per_row)}

    def encode(self, basis: Tensor) -> dict[str, Tensor]:
        return {"": basis.float()}

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size | None = None) -> Tensor:
        return buffers[""]


@dataclass(frozen=True)
class Coordinates:
    """``coordinates`` (b, r) int16, int32 from a dimension of 32768 on."""

    space: Subspace

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        whole = torch.int16 if self.space.dimension < 1 << 15 else torch.int32
        return {"coordinates": BufferSpec((self.space.matrices, self.space.rank), whole, per_row=False)}

    def encode(self, coordinates: Tensor) -> dict[str, Tensor]:
        return {"coordinates": coordinates.to(self.specs(coordinates.shape)["coordinates"].dtype)}

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size | None = None) -> Tensor:
        """The numbers, int64."""
        return buffers["coordinates"].to(torch.int64)


@dataclass(frozen=True)
class Norm:
    """One fp32 number for each of the matrices."""

    space: Subspace

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        return {"": BufferSpec((self.space.matrices,), torch.float32, per_row=False)}

    def encode(self, norm: Tensor) -> dict[str, Tensor]:
        return {"": norm}

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size | None = None) -> Tensor:
        return buffers[""]


@dataclass(frozen=True)
class Projection:
    """The options that decide what is stored; their meaning is that of ``GaLoreOptions``."""

    rank: int | float = _defaults.rank
    proj_type: str = _defaults.proj_type
    refresh: str = _defaults.refresh
    projector: str = _defaults.projector
    residual: str = _defaults.residual
    state: str = "fp32"

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state={self.state!r} is not known: choose {' or '.join(STATES)}.")
        own = {key: value for key, value in vars(self).items() if key != "state"}
        parse_options(GaLoreOptions, own, strategy="Projection")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Projection:
        """From a parameter group or any other mapping with these keys."""
        return cls(**{key: options[key] for key in cls.__dataclass_fields__})

    def space(self, shape: torch.Size) -> Subspace:
        return subspace(shape, self.rank, self.proj_type)

    def codecs(self, shape: torch.Size) -> dict[str, Codec]:
        """What is kept of a parameter of ``shape``, by moment."""
        space = self.space(shape)
        ternary = self.state == "ternary"
        found: dict[str, Codec] = {
            "exp_avg": InSubspace(TernaryFirstMoment() if ternary else Dense(), space),
            "exp_avg_sq": InSubspace(TernarySecondMoment() if ternary else Dense(), space),
        }
        if self.refresh in STORED:
            found["projector"] = Int8Basis(space) if self.projector == "int8" else Fp32Basis(space)
        elif self.refresh == "select":
            found["projector"] = Coordinates(space)
        if self.residual == "fira":
            found["residual_norm"] = Norm(space)
        return found

    def nbytes(self, shape: torch.Size) -> int:
        return sum(spec.nbytes for spec in all_specs(self.codecs(shape), shape).values())


def _basis_shape(space: Subspace) -> tuple[int, int, int]:
    return space.matrices, space.dimension, space.rank
