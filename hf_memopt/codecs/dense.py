"""A moment kept as it is, in fp32 whatever the parameter's dtype: 32 bits an element.

bf16 would not do: with beta2 = 0.999, v * 0.999 rounds back to v for every bf16 number, so the second moment could
never decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import BufferSpec


class Dense:
    """One fp32 buffer of the parameter's shape."""

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        return {"": BufferSpec(tuple(shape), torch.float32)}

    def encode(self, moment: Tensor) -> dict[str, Tensor]:
        return {"": moment.to(torch.float32, copy=True)}

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size) -> Tensor:
        return buffers[""].view(shape)
