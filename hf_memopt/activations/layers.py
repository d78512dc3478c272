"""Linear layers that keep less than their input for backward, as subclasses of what they replace.

The class of an existing module is exchanged, so its weight, bias, name, hooks and state-dict keys stay, and
``isinstance(module, nn.Linear)`` stays true. Two things may be spared:

- *compressed*: the layer has a carrier B (m x r) and keeps z = x P (``function.py``). Its weight is frozen for autograd
  and moves when the optimizer has stepped B (``folding.py``);
- *exact*: it has none, and keeps nothing where its input can be remade (``recompute.py``). The weight has its gradient.

In evaluation, without grad, or with a frozen carrier the forward is the plain layer's own. A carrier is zero whenever a
step is complete, so it is not part of the model: ``state_dict`` leaves it out and ``load_state_dict`` does not ask for
it, which also keeps it out of ``save_pretrained``'s files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from . import shared
from .basis import InputBasis
from .function import LeanLinear
from .remade import kept, recipe_of

CARRIER = "compact_carrier"
DROPPED = "_memopt_dropped"
"""Attribute of a carrier whose layer is a plain one again."""


class LeanLayer:
    """What ``LeanLinear`` adds to a layer class. ``basis`` is None in an exact layer; ``settled`` says that the layer
    has met its input once and knows who else reads it."""

    transposed = False
    basis: InputBasis | None
    settled: bool
    ran = False  # compressed, since the optimizer's last step
    zero_at = -1  # the carrier's version at which it is known to be zero

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(x)
        carrier = self._parameters.get(CARRIER)
        if carrier is not None and carrier.requires_grad:
            return self._compressed(x, carrier)
        if self.weight.requires_grad:
            recipe = recipe_of(x)
            if recipe is not None:
                return self._lean(x, None, None, kept(recipe), None, recipe.inputs)
        return super().forward(x)

    def _compressed(self, x: Tensor, carrier: Tensor) -> Tensor:
        _begin(self, carrier)
        if not self.settled:
            self.basis, self.settled = shared.first_reader(x, self.basis), True
        recipe = recipe_of(x)
        if recipe is None:
            z = shared.compress(x, self.basis, _compute_dtype(x))
            return self._lean(x, carrier, z, None, None, ())
        self.basis.observe(x.detach())
        return self._lean(x, carrier, None, kept(recipe), self.basis, recipe.inputs)

    def _lean(self, x: Tensor, carrier: Any, z: Any, source: Any, basis: Any, made_from: tuple) -> Tensor:
        dtype = _compute_dtype(x)
        x = x.to(dtype)
        weight, bias = self.weight, self.bias
        return LeanLinear.apply(x, weight, bias, carrier, z, source, basis, self.transposed, *made_from)

    def matrix(self) -> Tensor:
        """The weight as (m, n), a view."""
        return self.weight.detach().T if self.transposed else self.weight.detach()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # pickles name the plain class: that of Conv1D's subclass exists only where it has been asked for
        _, _, *rest = super().__reduce_ex__(protocol)
        return _new, (_plain_class(self),), *rest

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + CARRIER, None)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        carrier = self._parameters.pop(CARRIER, None)
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            if carrier is not None:
                self._parameters[CARRIER] = carrier


class MemoptLinear(LeanLayer, nn.Linear):
    """``nn.Linear`` that keeps less."""

    def forward(self, input: Tensor) -> Tensor:  # under the plain layer's name of it
        return super().forward(input)


_CLASSES: dict[type, type] = {nn.Linear: MemoptLinear}


def lean_class(module: nn.Module) -> type | None:
    """The class for ``module``, or None if it is of a kind that is left alone. transformers' ``Conv1D`` is known by its
    name, so nothing is imported for it."""
    return _lean_class(type(module))


def _lean_class(cls: type) -> type | None:
    if cls not in _CLASSES and cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers."):
        body = {"transposed": True, "__module__": __name__, "__doc__": cls.__doc__}
        made = type("MemoptConv1D", (LeanLayer, cls), body)
        _CLASSES[cls] = globals()["MemoptConv1D"] = made
    return _CLASSES.get(cls)


def _plain_class(layer: nn.Module) -> type:
    return next(plain for plain, cls in _CLASSES.items() if cls is type(layer))


def _new(plain: type) -> nn.Module:
    """For unpickling and copying."""
    cls = _lean_class(plain)
    return cls.__new__(cls)


def patch(layer: nn.Module, basis: InputBasis | None) -> None:
    """Make ``layer`` a compressed layer, or with None an exact one. Its weight is then frozen, or as it was."""
    cls = lean_class(layer)
    layer.basis, layer.settled = basis, False
    layer.__class__ = cls
    if basis is not None:
        rows = layer.matrix().shape[0]
        weight = layer.weight.requires_grad_(False)
        zeros = torch.zeros(rows, basis.rank, dtype=weight.dtype, device=weight.device)
        layer.register_parameter(CARRIER, nn.Parameter(zeros))


def unpatch(layer: nn.Module) -> None:
    """Make it the plain layer again, with a trainable weight if it was compressed."""
    carrier = layer._parameters.pop(CARRIER, None)
    if carrier is not None:
        carrier.__dict__[DROPPED] = True
        layer.weight.requires_grad_(True)
        layer.weight.grad = None
    for name in ("basis", "settled", "ran", "zero_at"):
        layer.__dict__.pop(name, None)
    layer.__class__ = _plain_class(layer)


@torch._disable_dynamo
def _begin(layer: nn.Module, carrier: Tensor) -> None:
    """Note that the layer runs. What its forward computes is right while the carrier is zero; whether it is, is looked
    up only where something has written to it that is not the fold."""
    layer.ran = True
    if carrier._version != layer.zero_at and not (carrier.is_meta or isinstance(carrier, FakeTensor)):
        if carrier.any():
            raise RuntimeError(
                "The carrier of a compressed layer is not zero in a forward: an optimizer that evaluates the model at "
                "moved parameters (LBFGS, SAM) cannot train compressed activations, choose another one; and after a "
                "step that was interrupted, load the last checkpoint and call compression.resume(optimizer)."
            )
        layer.zero_at = carrier._version


def compressed_weights(model: nn.Module) -> set[int]:
    """ids of the weights that move through carriers."""
    return {id(m.weight) for m in model.modules() if isinstance(m, LeanLayer) and CARRIER in m._parameters}


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
