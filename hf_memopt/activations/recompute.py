r"""Norms, activation functions and gated MLPs that keep their inputs only. Exact: every gradient is the same number.

A norm of Transformers keeps an fp32 copy of its input, the normalised value and more, and the layer after it keeps the
norm's output. ``down(act(gate) * up)`` keeps gate, act(gate), up and their product. All of that are cheap functions of
the operation's inputs. With H and I the widths of the residual stream and of the MLP, in elements per token:

==========================  ====================================  ==============================
operation                   keeps, as it is                       keeps here
==========================  ====================================  ==============================
RMSNorm (16 bits)           x in fp32, normalised x, the output   x: H, the residual stream
gate, up, down              4 I                                   gate and up: 2 I
activation, linear          x, often intermediates, the output    x: I
==========================  ====================================  ==============================

The output is saved by whoever reads it. So it carries a note (``remade.py``), and a linear layer that knows of notes
keeps the same inputs instead: storages that are kept already. A plain ``nn.Linear`` still keeps the output.

**How.** ``Recompute``, an autograd function, runs the module's own forward without a graph and saves the input and the
parameters. Its backward takes that forward as a consumer of its output has run it again, or runs it itself, with
autocast as it was, and asks autograd for the gradients of the original operations. A sum of floating-point numbers
depends on the order: where the module reads x twice (x * rsqrt(mean(x^2))), autograd adds the two gradients one after
the other to what x already has from the residual connection. Hence x is passed ``USES`` times, and each use's gradient
is given back on its own, in the order in which it came.

**Patching** swaps the module's class for a subclass of it with the same name. Parameters, state_dict keys, hooks,
isinstance, repr and ``forward``'s signature stay; copies (deepcopy, DataParallel's replicas, PEFT's modules_to_save)
are patched too and hold no reference to the original, as a ``forward`` attribute on the instance would; pickles
name the original class and are patched again when loaded. The gated MLP calls its children as modules, so PEFT may
wrap them before or after.

The original forward runs, untouched, when nothing needs a gradient, when a module is called with more than one
tensor or with keywords, and under torch.compile, whose partitioner recomputes such operations by itself.

Not possible: changing x in place after the norm read it (autograd raises, even where
the original had its own copy), parameters sharded so that they are whole only during their own module's backward
(DeepSpeed ZeRO-3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import structure
from .remade import Kept, Recipe, autocast_state, note

USES = 4  # of x within one forward; gradients of further uses are added up before they are given back
_ORIGINAL = "_hf_memopt_original"


class Recompute(torch.autograd.Function):
    """y = function(x, *others), keeping x and the others. Inputs: the function's Kept, x ``USES`` times, others."""

    @staticmethod
    def forward(ctx, kept: Kept, *tensors: Tensor) -> Tensor:
        x, others = tensors[0], tensors[USES:]
        kept.needs = ctx.needs_input_grad[USES:]  # the inputs are kept, x (USES times), others: from the last x on
        ctx.kept = kept
        ctx.save_for_backward(x, *others)
        return kept.function(x, *others)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[USES:]
        again = torch.is_grad_enabled()  # create_graph: what follows is to be differentiated as well
        graph = ctx.kept.graph_made()
        if graph is None or again:
            graph = ctx.kept.graph(ctx.saved_tensors, again)
        inputs, y = graph.leaves, graph.output
        uses: list[Tensor] = []
        edges = _edges_to(inputs[0], y) if needs[0] and not again else []
        if sum(len(places) for _, places in edges) > 1:
            for node, places in edges:
                node.register_hook(functools.partial(_collect, uses, places))
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, grad, allow_unused=True, create_graph=again))
        of_x, *of_others = [next(found) if need else None for need in needs]
        uses = uses or [of_x]
        if len(uses) > USES:
            uses[USES - 1 :] = [functools.reduce(torch.add, uses[USES - 1 :])]
        return None, *uses, *[None] * (USES - len(uses)), *of_others


def _collect(uses: list[Tensor], places: list[int], grad_inputs: tuple, grad_outputs: tuple) -> None:
    uses.extend(grad_inputs[place] for place in places if grad_inputs[place] is not None)


def _edges_to(x: Tensor, y: Tensor) -> list[tuple[Any, list[int]]]:
    """The nodes of y's graph that give gradients to the leaf ``x``, and which of their outputs do."""
    target = torch.autograd.graph.get_gradient_edge(x).node
    seen, todo, found = {y.grad_fn}, [y.grad_fn], []
    while todo:
        node = todo.pop()
        places = [i for i, (following, _) in enumerate(node.next_functions) if following is target]
        if places:
            found.append((node, places))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def recomputed(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """``function(x, *others)`` with a note, keeping only its arguments. ``function`` must hold no tensor and be
    deterministic. Without gradients: the plain call."""
    if not needs_grad(x, *others):
        return function(x, *others)
    kept = Kept(function, autocast_state(x.device.type))
    return note(Recompute.apply(kept, *[x] * USES, *others), Recipe(function, (x, *others), kept))


def needs_grad(*tensors: Tensor) -> bool:
    """Whether autograd would record an operation on these tensors, outside of torch.compile."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and any(t.requires_grad for t in tensors)


class OfInput:
    """A module's forward as a function of x and of the module's tensors, for modules without layers inside.

    It runs on a stand-in that has the module's class and attributes, and the given tensors as parameters, so that the
    module itself is never changed and hooks do not run a second time.
    """

    def __init__(self, module: nn.Module, original: type[nn.Module], names: Sequence[str]) -> None:
        self.original, self.names = original, names
        without = {*names, "_parameters", "_former_parameters"}  # the tensors come with the call
        self.state = {k: v for k, v in module.__dict__.items() if k not in without}
        self.absent = dict.fromkeys(module._parameters)

    def __call__(self, x: Tensor, *tensors: Tensor) -> Tensor:
        module = self.original.__new__(self.original)
        given = dict(zip(self.names, tensors, strict=True))
        module.__dict__.update(self.state, _parameters={**self.absent, **given})
        return self.original.forward(module, x)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters, also where they are plain attributes (DataParallel's replicas, FSDP's views)."""
    found = {k: v for k, v in module.__dict__.items() if isinstance(v, Tensor)}
    return found | {k: v for k, v in module._parameters.items() if v is not None}


def _forward_of_input(original: type[nn.Module], roles: None) -> Callable[..., Tensor]:
    def forward(self, *args, **kwargs):
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return original.forward(self, *args, **kwargs)
        tensors = tensors_of(self)
        if not needs_grad(args[0], *tensors.values()):
            return original.forward(self, args[0])
        return recomputed(OfInput(self, original, tuple(tensors)), args[0], *tensors.values())

    return forward


class _Gated:
    """act(gate) * up, of an activation without parameters."""

    def __init__(self, act: nn.Module) -> None:
        self.act = act

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act(gate) * up


def gated(self: nn.Module, roles: structure.Roles, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)), keeping gate and up."""
    gate, up = getattr(self, roles.gate)(x), getattr(self, roles.up)(x)
    h = recomputed(_Gated(getattr(self, roles.act)), gate, up)
    if roles.dropout:
        h = getattr(self, roles.dropout)(h)
    down = getattr(self, roles.down)
    if roles.cast and h.dtype != down.weight.dtype:
        h = h.to(down.weight.dtype)
    return down(h)


def _forward_of_gated(original: type[nn.Module], roles: structure.Roles) -> Callable[..., Tensor]:
    def forward(self, *args, **kwargs):
        if kwargs or len(args) != 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original.forward(self, *args, **kwargs)
        return gated(self, roles, args[0])

    return forward


@functools.cache
def _patched(original: type[nn.Module], roles: structure.Roles | None) -> type[nn.Module]:
    forward = (_forward_of_input if roles is None else _forward_of_gated)(original, roles)

    def reduce(self, protocol):
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return _new, (original, roles), *rest

    body = {
        "forward": functools.wraps(original.forward)(forward),
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        _ORIGINAL: original,
    }
    return type(original)(original.__name__, (original,), body)


def _new(original: type[nn.Module], roles: structure.Roles | None) -> nn.Module:
    """For unpickling and copying."""
    cls = _patched(original, roles)
    return cls.__new__(cls)


@dataclass(frozen=True)
class Entry:
    """One module: its name, its kind ("norm", "activation", "gated mlp"), "recomputed" or the reason why not."""

    name: str
    kind: str
    outcome: str


@dataclass
class RecomputeReport:
    """What ``recompute`` did; ``restore()`` undoes it."""

    entries: list[Entry] = field(default_factory=list)
    _changed: list[tuple[str, nn.Module]] = field(default_factory=list, repr=False)

    @property
    def recomputed(self) -> list[str]:
        """Names of the patched modules."""
        return [e.name for e in self.entries if e.outcome == "recomputed"]

    def __str__(self) -> str:
        lines: dict[tuple[str, str], int] = {}
        for e in self.entries:
            lines[e.kind, e.outcome] = lines.get((e.kind, e.outcome), 0) + 1
        return "\n".join(f"{count} x {kind}: {outcome}" for (kind, outcome), count in lines.items())

    def restore(self) -> None:
        """Give the modules their classes back. Raises RuntimeError if one has been wrapped since."""
        for name, module in self._changed:
            _restore(name, module)
        self._changed.clear()


def recompute(model: nn.Module, which: Sequence[Literal["norms", "mlp"]] = ("norms", "mlp")) -> RecomputeReport:
    """Patch the norms ("norms") and the activation functions and gated MLPs ("mlp") of ``model`` in place.

    Every module is first tried on a few random numbers (a generator of its own, no gradient): a gated MLP must compute
    the same bits as before. Parameters on the meta device or fake ones cannot be tried; there the usual names of the
    children decide. Modules that are not patched are reported with the reason.

    Raises ValueError for a name in ``which`` that is neither.
    """
    unknown = set(which) - {"norms", "mlp"}
    if unknown:
        raise ValueError(f"recompute: which has {sorted(unknown)[0]!r}; there are 'norms' and 'mlp'")
    report = RecomputeReport()
    inside: set[int] = set()
    for name, module in model.named_modules():
        kind = structure.kind_of(module)
        if kind is None or id(module) in inside or ("norms" if kind == "norm" else "mlp") not in which:
            continue
        if hasattr(type(module), _ORIGINAL):
            outcome = "recomputed before"
        else:
            outcome = _patch(module, kind)
        if kind == "gated mlp" and outcome.startswith("recomputed"):
            inside.update(id(child) for child in module.children())
        if outcome == "recomputed":
            report._changed.append((name, module))
        report.entries.append(Entry(name, kind, outcome))
    return report


def _patch(module: nn.Module, kind: str) -> str:
    roles = None
    if kind == "gated mlp":
        roles, why_not = structure.roles_of(module, gated)
    else:
        function = OfInput(module, type(module), tuple(tensors_of(module)))
        function.state["training"] = True  # where it would be random, if anywhere
        why_not = structure.why_not(module, function)
    if why_not is None:
        try:
            module.__class__ = _patched(type(module), roles)
        except TypeError as error:
            why_not = f"its class cannot be exchanged: {error}"
    return why_not or "recomputed"


def restore(model: nn.Module) -> list[str]:
    """Undo ``recompute`` in ``model``, which may be a copy or loaded from a pickle; names of the restored modules."""
    names = [name for name, module in model.named_modules() if hasattr(type(module), _ORIGINAL)]
    for name in names:
        _restore(name, model.get_submodule(name))
    return names


def restore_copies(original: nn.Module, copy: nn.Module) -> None:
    """Undo ``recompute`` in a deep copy of ``original`` where it has been undone in that (PEFT's modules_to_save)."""
    if not any(hasattr(type(module), _ORIGINAL) for module in original.modules()):
        restore(copy)


def _restore(name: str, module: nn.Module) -> None:
    cls = type(module)
    original = getattr(cls, _ORIGINAL, None)
    if original is None:
        return
    if _ORIGINAL not in vars(cls):
        raise RuntimeError(f"{name} has been wrapped since it was patched; undo that before restore()")
    module.__class__ = original
