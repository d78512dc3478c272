"""Which modules of a model can be recomputed: found by their structure and tried on a few numbers.

- A *norm* is a module whose class name ends with "Norm" (or "Norm2d" and the like); an *activation* is one of
  ``torch.nn.modules.activation`` or a class whose name says so. Neither may have layers or buffers inside. Its forward
  must take one tensor and return a new one of the same shape, and the same one when called again.
- A *gated MLP* is a module with three linear children, an activation without parameters and at most a dropout. Which
  of the linear layers is gate, up and down follows from their widths and from trying: the replaced forward must give
  the same bits as the original in eval and in train mode, with the same random numbers for dropout. Names only say
  which order is tried first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_NORM = re.compile(r"Norm(\dd)?$")
_ACTIVATION = re.compile(r"(Activation|GELU\w*|SiLU|ReLU\w*)$")
_OF_TORCH = "torch.nn.modules.activation"
_NOT_ELEMENTWISE = {"MultiheadAttention", "Softmax", "Softmax2d", "Softmin", "LogSoftmax", "GLU"}
_OF_OUTPUT = {"ReLU", "Tanh", "Sigmoid"}  # their derivatives are functions of the output


@dataclass(frozen=True)
class Roles:
    """Names of a gated MLP's children: down(dropout(act(gate(x)) * up(x))), converted to down's dtype if ``cast``."""

    gate: str
    up: str
    down: str
    act: str
    dropout: str | None
    cast: bool


def kind_of(module: nn.Module) -> str | None:
    """ "norm", "activation", "gated mlp" (which may turn out not to be one), or None."""
    name = type(module).__name__
    if _NORM.search(name):
        return "norm"
    if is_activation(module):
        return "activation"
    children = module._modules.values()
    fused = any("gate_up" in name for name in (*module._modules, *module._parameters))
    three = sum(map(is_linear, children)) == 3 and any(map(is_activation, children))
    return "gated mlp" if fused or three else None


def is_activation(module: nn.Module | None) -> bool:
    """Whether its class is an element-wise function by name."""
    cls = type(module)
    if cls.__module__ == _OF_TORCH:
        return cls.__name__ not in _NOT_ELEMENTWISE
    return isinstance(module, nn.Module) and _ACTIVATION.search(cls.__name__) is not None


def is_linear(module: nn.Module | None) -> bool:
    """Linear layers, quantised or with adapters: whatever says how many features come in and go out."""
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


def why_not(module: nn.Module, function: Callable[..., Tensor]) -> str | None:
    """Why a norm or an activation cannot be recomputed, None if it can. ``function(x, *tensors)`` is its forward."""
    if type(module).__name__ in _OF_OUTPUT and type(module).__module__ == _OF_TORCH:
        return "autograd needs its output only, which the next layer keeps too: nothing to gain"
    reason = _replaced(module) or _needs_more(module)
    if reason:
        return reason
    if any(b is not None for b in module._buffers.values()):
        return "it has buffers"
    if any(True for child in module.children() for _ in (*child.parameters(), *child.buffers())):
        return "it has layers inside"
    if any(isinstance(child, nn.modules.dropout._DropoutNd) for child in module.modules()):
        return "it has dropout inside"
    if getattr(module, "inplace", False):
        return "it changes its input in place"
    parameters = [p for p in module._parameters.values() if p is not None]
    return None if any(map(_empty, parameters)) else _tried(module, function, parameters)


def _tried(module: nn.Module, function: Callable[..., Tensor], parameters: list[Tensor]) -> str | None:
    width = max(
        (tuple(p.shape) for p in parameters), key=len, default=tuple(getattr(module, "normalized_shape", (16,)))
    )
    like = parameters[0] if parameters else torch.empty(0)
    problem = ""
    for shape in ((2, *width), (2, *width, 2, 2)):  # features last, or channels first
        x = _random(shape, like)
        before = x.clone()
        try:
            with torch.autocast(x.device.type, enabled=False), _fixed_random_numbers(x.device):
                with torch.no_grad():
                    y = function(x, *parameters)
                with torch.enable_grad():
                    again = function(x.clone().requires_grad_(), *parameters)
        except Exception as error:  # whatever a forward that was not made for this input may raise
            problem = problem or f"its forward fails on a tensor of shape {shape}: {error}"
            continue
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return "it does not return one tensor of its input's shape"
        if y.untyped_storage()._cdata == x.untyped_storage()._cdata or not torch.equal(x, before):
            return "it returns or changes its input"
        return None if torch.equal(y, again) else "it returns something else when called again"
    return problem


def roles_of(module: nn.Module, body: Callable[[nn.Module, Roles, Tensor], Tensor]) -> tuple[Roles | None, str | None]:
    """(roles, None), or (None, why the MLP cannot be replaced by ``body(module, roles, x)``)."""
    reason = _replaced(module) or _needs_more(module)
    if reason:
        return None, reason
    if any("gate_up" in name for name in (*module._modules, *module._parameters)):
        return None, "gate and up are one weight"
    if any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
        return None, "it has parameters of its own"
    linear = [n for n, m in module.named_children() if is_linear(m)]
    acts = [n for n, m in module.named_children() if is_activation(m)]
    dropouts = [n for n, m in module.named_children() if isinstance(m, nn.Dropout)]
    more = [n for n, _ in module.named_children() if n not in (*linear, *acts, *dropouts)]
    if more or len(acts) != 1 or len(dropouts) > 1:
        return None, f"it has more inside: {', '.join(more or (acts + dropouts))}"
    if any(True for _ in (*module._modules[acts[0]].parameters(), *module._modules[acts[0]].buffers())):
        return None, "its activation has parameters"
    if getattr(module._modules[acts[0]], "inplace", False):
        return None, "its activation works in place"
    found = list(_orders(module, linear, acts[0], dropouts[0] if dropouts else None))
    if any(_empty(p) for p in module.parameters()):
        named = [roles for roles in found if (roles.gate, roles.up, roles.down) in _KNOWN and not roles.cast]
        return (
            (named[0], None) if named else (None, "it cannot be tried without numbers, and its layers' names are new")
        )
    return _tried_mlp(module, found, body)


_KNOWN = (("gate_proj", "up_proj", "down_proj"), ("wi_0", "wi_1", "wo"))


def _orders(module: nn.Module, linear: list[str], act: str, dropout: str | None) -> Iterator[Roles]:
    """All assignments of roles that the widths allow, the likely one first."""
    width = {n: (module._modules[n].in_features, module._modules[n].out_features) for n in linear}
    orders = [
        (gate, up, down)
        for down in linear
        for gate in linear
        for up in linear
        if len({gate, up, down}) == 3 and width[gate] == width[up] == width[down][::-1]
    ]
    orders.sort(key=lambda order: order not in _KNOWN)  # stable
    for cast in (False, True):
        for gate, up, down in orders:
            yield Roles(gate, up, down, act, dropout, cast)


def _tried_mlp(module, found: list[Roles], body) -> tuple[Roles | None, str | None]:
    if not found:
        return None, "the widths of its layers are not those of gate, up and down"
    first = getattr(module, found[0].gate)
    weight = getattr(getattr(first, "base_layer", first), "weight", torch.empty(0))
    x = _random((1, 3, first.in_features), weight).requires_grad_()
    try:
        expected = _both_modes(module, lambda: module.forward(x))
    except Exception as error:  # whatever a forward that was not made for this input may raise
        return None, f"its forward fails on a tensor of shape {tuple(x.shape)}: {error}"
    for roles in found:
        try:
            results = _both_modes(module, lambda roles=roles: body(module, roles, x))
        except Exception:  # noqa: S112 - a wrong order may fail in any way
            continue
        if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
            return roles, None
    return None, "its forward computes something else than down(act(gate(x)) * up(x))"


def _both_modes(module: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """Results in eval and in train mode, from fixed random numbers; all states are put back.

    With a graph, so that quantised layers do not take it for inference: on CPUs, bitsandbytes packs 4-bit weights for
    good when it sees an input that needs no gradient in evaluation, and cannot be trained through afterwards. Its
    layers also remember the first input's dtype; hence all attributes are put back.
    """
    states = {m: dict(m.__dict__) for m in module.modules()}
    device = next(module.parameters()).device
    results = []
    try:
        for training in (False, True):
            for m in states:
                m.training = training
            with torch.enable_grad(), torch.autocast(device.type, enabled=False), _fixed_random_numbers(device):
                results.append(run().detach())
    finally:
        for m, state in states.items():
            m.__dict__.clear()
            m.__dict__.update(state)
    return results


@contextmanager
def _fixed_random_numbers(device: torch.device) -> Iterator[None]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [g.get_state() for g in generators]
    try:
        for g in generators:
            g.manual_seed(0)
        yield
    finally:
        for g, state in zip(generators, states, strict=True):
            g.set_state(state)


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Gaussian numbers with the device and dtype of ``like``; fp32 if that is quantised."""
    x = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")  # whatever the default is
    return x.to(like.device, like.dtype if like.dtype.is_floating_point else torch.float32)


def _empty(p: Tensor) -> bool:
    return p.is_meta or isinstance(p, FakeTensor)


def _replaced(module: nn.Module) -> str | None:
    return "its forward has been replaced on the instance already" if "forward" in module.__dict__ else None


def _needs_more(module: nn.Module) -> str | None:
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):
        return "its forward does not take one tensor"
    return None
