"""Which subspace a layer's input is compressed onto, now.

Layers that read the same tensor (q, k and v; gate and up) share one ``InputBasis``, hence one projection and one stored
z: with a subspace of its own for each, as in the paper, the saving at r = n/2 falls from 11 % to 5 % of a block. The
basis bears the name of the layer that meets the input first.

The subspace is fixed between two refreshes, so that all micro-batches of a step give gradients in one basis and the
optimizer's moments mean something. ``epoch`` counts refreshes and is, with seed and name, what the projection is made
from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.scalars import parameter_key
from . import projection


@dataclass
class InputBasis:
    """Args:
    name: of the layer that meets the input first.
    features, rank: n and r.
    kind, seed: see ``projection.py``.
    """

    name: str
    features: int
    rank: int
    kind: str
    seed: int
    epoch: int = 0
    top: Tensor | None = None
    collecting: bool = False
    energy: Tensor | None = field(default=None, repr=False)

    def projection(self, device: torch.device, dtype: torch.dtype) -> projection.Projection:
        """The projection of this epoch, made anew."""
        return self.at(self.epoch, self.top, device, dtype)

    def at(self, epoch: int, top: Tensor | None, device: torch.device, dtype: torch.dtype) -> projection.Projection:
        """The projection of another epoch, with its ``top`` coordinates."""
        key = parameter_key(self.seed, f"{self.name}/{epoch}")
        top = top if top is None else top.to(device)
        return projection.make(self.kind, self.features, self.rank, key, device, dtype, top)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Add the energy of ``x`` (..., n), where that is wanted."""
        if self.collecting:
            # one feature after another, so that no copy of x in fp32 is made
            dtype = torch.promote_types(x.dtype, torch.float32)
            norm = torch.linalg.vector_norm(x.reshape(-1, self.features), dim=0, dtype=dtype).float()
            self.energy = norm.square() if self.energy is None else self.energy.add_(norm.square())

    def wants_energy(self) -> bool:
        """Whether the next refresh chooses by energy."""
        return self.kind == "principal" and projection.top_count(self.rank) > 0 and self.rank < self.features

    @torch.no_grad()
    def refresh(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        if self.energy is not None:
            self.top = projection.choose_top(self.energy, projection.top_count(self.rank), self.top)
            self.energy = None
