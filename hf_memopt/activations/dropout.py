"""Dropout that keeps no mask: 8 bytes of seed instead of a byte an element, and an output that can be made again.

    y = x * mask(seed) / (1 - p)          dx = dy * mask(seed) / (1 - p)

``nn.Dropout`` keeps its mask, and whoever reads y keeps y. Here the mask is drawn by a generator of its own from a
seed, and drawn again in backward. y carries a note (``remade.py``): x and the seed, so a layer that knows of notes
keeps x, which others may keep as well, or what x itself is made from.

The seed comes from the global generator of the CPU, at every call in training, with or without grad. So
``torch.manual_seed`` makes runs repeatable, the Trainer's checkpoints resume it, and gradient checkpointing, which
puts that generator back, gets the same mask when it runs the forward again. The numbers differ from those of
``nn.Dropout``; their distribution does not. Without training, and under torch.compile, the plain forward runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from ..kernels.scalars import parameter_key
from .remade import Kept, Recipe, kept, note, recipe_of


def drawn_key(seed: int, like: Tensor) -> int:
    """A 32-bit key from ``seed`` and one draw of the CPU's global generator; ``seed``'s own for tensors without
    numbers."""
    if like.is_meta or isinstance(like, FakeTensor):
        return parameter_key(seed, "")
    return parameter_key(seed, str(torch.empty((), dtype=torch.int64).random_().item()))


@dataclass(frozen=True)
class Mask:
    """Which elements stay: each with probability 1 - p (p below 1), a function of the key, the shape and the device."""

    key: int
    p: float

    def apply(self, x: Tensor) -> Tensor:
        """x * mask / (1 - p) of any shape, a new tensor."""
        return x.mul(self.of(x.shape, x.device)).mul_(1.0 / (1.0 - self.p))

    def of(self, shape: torch.Size, device: torch.device) -> Tensor:
        """The mask itself, bool."""
        mask = torch.empty(shape, dtype=torch.bool, device=device)
        if mask.is_meta or isinstance(mask, FakeTensor):
            return mask.bernoulli_(1.0 - self.p)
        return mask.bernoulli_(1.0 - self.p, generator=torch.Generator(device).manual_seed(self.key))


class Dropped:
    """The recipe's function: dropout of x, which is given or itself made. Attributes: ``mask``; ``source``, what is
    kept of x's recipe, or None."""

    __slots__ = ("mask", "source")

    def __init__(self, mask: Mask, source: Kept | None) -> None:
        self.mask, self.source = mask, source

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.mask.apply(inputs[0] if self.source is None else self.source.make(inputs))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, mask: Mask) -> Tensor:
        return mask.apply(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.mask = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple:
        return ctx.mask.apply(dy), None


class SeededDropout(nn.Dropout):
    """``nn.Dropout`` with ``memopt_seed``, mixed into what is drawn."""

    memopt_seed = 0

    def forward(self, input: Tensor) -> Tensor:
        usual = self.training and 0.0 < self.p < 1.0 and not self.inplace
        if not usual or torch.compiler.is_compiling():
            return super().forward(input)
        mask = Mask(drawn_key(self.memopt_seed, input), self.p)
        if not torch.is_grad_enabled():
            return mask.apply(input)
        y = _Dropout.apply(input, mask)
        recipe = recipe_of(input)
        if recipe is None:
            return note(y, Recipe(Dropped(mask, None), (input,)))
        return note(y, Recipe(Dropped(mask, kept(recipe)), recipe.inputs))


def patch(dropout: nn.Module, seed: int) -> bool:
    """Make a plain ``nn.Dropout`` a seeded one; False for any other class."""
    if type(dropout) is not nn.Dropout:
        return False
    dropout.__class__, dropout.memopt_seed = SeededDropout, seed
    return True


def unpatch(dropout: nn.Module) -> None:
    """Make it plain again."""
    if type(dropout) is SeededDropout:
        del dropout.memopt_seed
        dropout.__class__ = nn.Dropout
