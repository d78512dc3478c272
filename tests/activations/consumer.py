"""A linear layer that knows of notes: saves a recipe's inputs instead of its own. Exact, by the original product."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memopt.activations.remade import autocast_state, kept, recipe_of, reenter


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        recipe = recipe_of(x)
        ctx.kept = kept(recipe) if recipe else None
        ctx.autocast = autocast_state(x.device.type)
        ctx.save_for_backward(weight, bias, *(recipe.inputs if recipe else (x,)))
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        weight, bias, *inputs = ctx.saved_tensors
        x = ctx.kept.make(inputs) if ctx.kept else inputs[0]
        tensors = [
            t if t is None else t.detach().requires_grad_(n)
            for t, n in zip((x, weight, bias), ctx.needs_input_grad, strict=True)
        ]
        with torch.enable_grad(), reenter(ctx.autocast):
            y = F.linear(*tensors)
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grad))
        return tuple(next(found) if t is not None and t.requires_grad else None for t in tensors)


class NotingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        return _Product.apply(x, self.weight, self.bias)


def use_notes(model: nn.Module) -> nn.Module:
    """Every nn.Linear of ``model`` reads notes from now on."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = NotingLinear
    return model


def saved_storages(model: nn.Module, run) -> dict[int, tuple]:
    """Address -> (bytes, shape, dtype) of the storages that autograd saves in ``run()``, the model's own aside."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen, alive = {}, []

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in own:
            seen.setdefault(s.data_ptr(), (s.nbytes(), tuple(t.shape), t.dtype))
            alive.append(t)  # a freed storage's address could be used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(run())
    return seen


def saved_bytes(model: nn.Module, run) -> int:
    return sum(nbytes for nbytes, *_ in saved_storages(model, run).values())
