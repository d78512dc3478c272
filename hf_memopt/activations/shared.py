"""Who reads the same tensor: found by watching, not by a list of model names.

While the module that holds some compressed layers runs its forward (an attention, an MLP), the tensors that these
layers are given are remembered, and z is made once for each. A scope opens when that forward begins and closes when it
ends, also by an exception, so nothing outlives it, and a module that calls itself has one scope a call. It holds the
tensors weakly: an input that nobody else keeps is freed at once, and no number of a freed tensor is taken for a new
one. Nothing of it decides what autograd keeps: each layer saves z itself, and they are one storage. Recomputation under
gradient checkpointing runs the same forward and finds the same.

torch.compile breaks its graphs here: a tensor's identity is not a thing that can be traced. (``torch._disable_dynamo``
is ``torch.compiler.disable`` without importing the compiler.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from .basis import InputBasis


@dataclass
class _Seen:
    x: TensorWeakRef
    version: int
    basis: InputBasis | None
    made: dict[Hashable, Any] = field(default_factory=dict)


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[dict[int, _Seen]] = []


_scopes = _Scopes()


def watch(parent: nn.Module) -> list[Any]:
    """Open a scope for each forward of ``parent``; the handles of its hooks."""
    return [
        parent.register_forward_pre_hook(_open),
        parent.register_forward_hook(_close, always_call=True),
    ]


@torch._disable_dynamo
def _open(module: nn.Module, args: tuple) -> None:
    _scopes.stack.append({})


@torch._disable_dynamo
def _close(module: nn.Module, args: tuple, output: Any) -> None:
    if _scopes.stack:
        _scopes.stack.pop()


def close() -> None:
    """Close what is open in this thread, between two forwards: torch runs no hook on KeyboardInterrupt."""
    _scopes.stack.clear()


@torch._disable_dynamo
def first_reader(x: Tensor, basis: InputBasis) -> InputBasis:
    """The basis of the first layer that was given ``x`` in this scope, if it fits ``basis``; else ``basis`` itself."""
    seen = _seen(x, basis)
    if seen is None or seen.basis is None or (seen.basis.features, seen.basis.rank) != (basis.features, basis.rank):
        return basis
    return seen.basis


@torch._disable_dynamo
def compress(x: Tensor, basis: InputBasis, dtype: torch.dtype) -> Tensor:
    """z = x P in ``dtype`` without gradient, once a scope."""
    seen = _seen(x, basis)
    key = (id(basis), basis.epoch, dtype)
    if seen is not None and key in seen.made:
        return seen.made[key]
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        basis.observe(x)
        z = basis.projection(x.device, dtype).project(x.detach().to(dtype))
    if seen is not None:
        seen.made[key] = z
    return z


@torch._disable_dynamo
def once(x: Tensor, key: Hashable, make: Callable[[], Any]) -> Any:
    """What ``make()`` gives, once a scope for each ``x`` and ``key``; at every call outside of a scope."""
    seen = _seen(x, None)
    if seen is None:
        return make()
    if key not in seen.made:
        seen.made[key] = make()
    return seen.made[key]


def _seen(x: Tensor, basis: InputBasis | None) -> _Seen | None:
    if not _scopes.stack or x.is_inference():  # such a tensor has no version
        return None
    scope = _scopes.stack[-1]
    seen = scope.get(id(x))
    if seen is None or seen.x() is not x or seen.version != x._version:
        seen = scope[id(x)] = _Seen(TensorWeakRef(x), x._version, basis)
    return seen
