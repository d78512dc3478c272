"""The frozen 8-bit layer of bitsandbytes without its input.

    y = x W^T,   W = CB * SCB / 127 (int8 times a scale a row)        dx = dy W

bitsandbytes keeps x for a gradient of W that a frozen W does not have (its 4-bit layer keeps nothing). Here its own
forward runs without a graph, and backward is its own formula for dx, operation by operation: the same bits, and
nothing kept. Layers with 16-bit weights, a trainable weight or bias, evaluation and torch.compile run as they are.

The class is known by its name, so nothing is imported for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .recompute import needs_grad


class _FrozenInt8(torch.autograd.Function):
    """Arguments: x (..., n), the layer, its original class."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, original: type[nn.Module]) -> Tensor:
        y = original.forward(layer, x)
        ctx.state, ctx.dtype = layer.state, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        state = ctx.state
        weight = state.CB.to(ctx.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
        dx = torch.matmul(dy.reshape(-1, dy.shape[-1]).to(ctx.dtype), weight)
        return dx.view(*dy.shape[:-1], weight.shape[1]), None, None


class LeanInt8:
    """What is added to bitsandbytes' class, which follows it among the bases."""

    def forward(self, x: Tensor) -> Tensor:
        frozen = not self.weight.requires_grad and (self.bias is None or not self.bias.requires_grad)
        if self.training and frozen and not self.state.has_fp16_weights and x.numel() and needs_grad(x):
            return _FrozenInt8.apply(x, self, type(self).__mro__[2])
        return super().forward(x)

    def __reduce_ex__(self, protocol: int) -> tuple:
        _, _, *rest = super().__reduce_ex__(protocol)
        return _new, (type(self).__mro__[2],), *rest


def patch(layer: nn.Module) -> bool:
    """Make a ``bitsandbytes.nn.Linear8bitLt`` a lean one; False for any other class."""
    cls = type(layer)
    if cls.__name__ != "Linear8bitLt" or not cls.__module__.startswith("bitsandbytes."):
        return False
    layer.__class__ = _lean(cls)
    return True


@functools.cache
def _lean(original: type[nn.Module]) -> type[nn.Module]:
    body = {"__module__": __name__, "__doc__": original.__doc__}
    return type("MemoptLinear8bitLt", (LeanInt8, original), body)


def _new(original: type[nn.Module]) -> nn.Module:
    """For unpickling and copying."""
    cls = _lean(original)
    return cls.__new__(cls)


def unpatch(layer: nn.Module) -> None:
    """Make it bitsandbytes' own again."""
    if isinstance(layer, LeanInt8):
        layer.__class__ = type(layer).__mro__[2]
