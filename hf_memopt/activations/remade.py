"""Tensors that can be made again, so that the layers that read them need not keep them.

A linear layer y = x W^T keeps its input x for the gradient of W. When x is the output of a norm or of act(gate) * up,
what it was made from is kept by that operation anyway, and x is a cheap function of it. So the operation *notes* on x
how to make it (``note``: a ``Recipe``), and a layer that knows of notes saves the recipe's inputs instead of x::

    forward:   recipe = recipe_of(x)
               ctx.kept = kept(recipe)
               ctx.save_for_backward(weight, *recipe.inputs)
    backward:  weight, *inputs = ctx.saved_tensors
               x = ctx.kept.make(inputs)                       # not to be changed in place

Tensors go through ``save_for_backward`` only, so nothing leaks, in-place changes are found by autograd and hooks on
saved tensors (checkpointing, offloading) see them.

**Notes.** A note is an attribute of the Python object: any operation on the tensor gives another object without it. It
ends when the tensor or an input is changed in place (their version counters moved). Assigning to ``.data`` goes
unnoticed, as it does by autograd. A note is not copied or pickled with its tensor.

**Made once.** q, k and v (gate and up) read one tensor; their backward passes follow one another. A slot per thread
holds the tensor made last, and gives it only to consumers of the same recipe within the same backward pass (known by
the engine's number of it). Another graph is another recipe; another pass over the same graph, or a pass within a pass
(reentrant checkpointing), is another number. So a stale tensor is never given; it is made anew. The slot is emptied
when the last consumer has been served, when another tensor is to be made, at the end of the pass, and, where an
exception ended the pass, by the next note.

**And for the operation itself.** Behind its consumers comes the operation's own backward, which needs the same forward
with a graph. So the first consumer makes the tensor with the graph (``Kept.graph``), from inputs cut off from theirs,
and the operation takes it (``graph_made``): one forward for all. It holds the operation's intermediate tensors from the
first consumer's backward to its own; a pass in which its own does not come drops it at the end.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

_ATTRIBUTE = "_hf_memopt_note"

AutocastState = tuple[str, bool, "torch.dtype"]


def autocast_state(device_type: str) -> AutocastState | None:
    """(device type, enabled, dtype) of autocast now; None for devices that have no autocast (meta)."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def reenter(state: AutocastState | None) -> AbstractContextManager:
    """A context in which autocast is as it was in ``state``.

    Without the cache of casts: it would hold copies of tensors that live for one call.
    """
    if state is None or state == autocast_state(state[0]):
        return nullcontext()
    device_type, enabled, dtype = state
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)


@dataclass(frozen=True)
class Graph:
    """An operation run again for its gradients: ``leaves``, cut off from the inputs' own graphs, and ``output``."""

    leaves: list[Tensor]
    output: Tensor


class Kept:
    """What a consumer keeps of a recipe beside its inputs; one object for all consumers. Holds no tensor.

    Attributes:
        function: Makes the tensor from the inputs.
        autocast: The state of autocast in which it is called.
        consumers: How many consumers have asked for this object.
        needs: For which inputs the operation's own backward will ask ``graph_made()`` for a graph; None: it will not.
    """

    __slots__ = ("function", "autocast", "consumers", "needs")

    def __init__(self, function: Callable[..., Tensor], autocast: AutocastState | None) -> None:
        self.function = function
        self.autocast = autocast
        self.consumers = 0
        self.needs: tuple[bool, ...] | None = None

    def make(self, inputs: Sequence[Tensor]) -> Tensor:
        """The tensor made from ``inputs``, the recipe's in their order; without a graph. Not to be changed in place.

        In a backward pass, consumers of one recipe get one tensor.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or self.consumers + (self.needs is not None) < 2:
            return self._compute(inputs)
        slot = _slot()
        tensor = slot.take(self, task)
        if tensor is None:
            graph = None if self.needs is None else self.graph(inputs)
            tensor = self._compute(inputs) if graph is None else graph.output.detach()
            slot.put(self, task, tensor, graph)
        return tensor

    def graph(self, inputs: Sequence[Tensor], connected: bool = False) -> Graph:
        """The operation once more with a graph that ends at the inputs; ``connected`` goes on into theirs."""
        with torch.enable_grad(), reenter(self.autocast):
            leaves = [
                t.view_as(t) if need and connected else t.detach().requires_grad_(need)
                for t, need in zip(inputs, self.needs, strict=True)
            ]
            return Graph(leaves, self.function(*leaves))

    def graph_made(self) -> Graph | None:
        """The graph that ``make`` left in this backward pass, if it was the last; it is given once."""
        return _slot().take_graph(self, torch._C._current_graph_task_id())

    def _compute(self, inputs: Sequence[Tensor]) -> Tensor:
        with torch.no_grad(), reenter(self.autocast):
            return self.function(*inputs)


@dataclass(eq=False)
class Recipe:
    """How to make a tensor again.

    Attributes:
        function: Called with ``inputs`` and with autocast as it was when the recipe was written; gives the tensor
            again, bit for bit. Must hold no tensor of its own.
        inputs: What a consumer saves instead of the tensor.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    _kept: Kept | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self._kept is None:
            self._kept = Kept(self.function, autocast_state(self.inputs[0].device.type))

    def make(self, inputs: Sequence[Tensor]) -> Tensor:
        """The tensor made from ``inputs`` in the place of the recipe's own; without a graph, always computed."""
        return self._kept._compute(inputs)


def kept(recipe: Recipe) -> Kept:
    """What a consumer's ctx keeps: the recipe without its inputs. To be called once by every consumer."""
    recipe._kept.consumers += 1
    return recipe._kept


class _Note:
    __slots__ = ("recipe", "version", "input_versions")

    def __init__(self, tensor: Tensor, recipe: Recipe) -> None:
        self.recipe = recipe
        self.version = tensor._version
        self.input_versions = tuple(t._version for t in recipe.inputs)

    def holds(self, tensor: Tensor) -> bool:
        inputs = self.recipe.inputs
        return tensor._version == self.version and all(
            t._version == v for t, v in zip(inputs, self.input_versions, strict=True)
        )

    def __reduce__(self):
        # a tensor is pickled and copied with its attributes; this one becomes something that weights_only can load
        return OrderedDict, ()


def note(tensor: Tensor, recipe: Recipe) -> Tensor:
    """Write ``recipe`` on ``tensor`` and return it. Inference tensors have no version counter and get no note."""
    if torch._C._current_graph_task_id() == -1:
        _drop_leftovers()
    if not tensor.is_inference() and not any(t.is_inference() for t in recipe.inputs):
        setattr(tensor, _ATTRIBUTE, _Note(tensor, recipe))
    return tensor


def recipe_of(tensor: Tensor) -> Recipe | None:
    """The recipe noted on ``tensor``; None without one, or if the tensor or an input was changed in place since."""
    found = getattr(tensor, _ATTRIBUTE, None)
    return found.recipe if isinstance(found, _Note) and found.holds(tensor) else None


class _Slot:
    """The tensor made last in one thread: for whom, in which backward pass, for how many more consumers; its graph."""

    def __init__(self) -> None:
        self.task = -1
        self.clear()

    def clear(self, task: int | None = None) -> None:
        if task is None or task == self.task:
            self.key: Kept | None = None
            self.tensor: Tensor | None = None
            self.graph: Graph | None = None
            self.version = self.left = 0

    def take(self, key: Kept, task: int) -> Tensor | None:
        tensor = self.tensor
        hit = tensor is not None and self.key is key and self.task == task and tensor._version == self.version
        self.left -= 1
        if not hit:
            self.clear()
        elif self.left == 0:
            self.forget_tensor()
        return tensor if hit else None

    def forget_tensor(self) -> None:
        """All consumers have been served; a graph stays for the operation's own backward."""
        self.tensor = None
        if self.graph is None:
            self.clear()

    def take_graph(self, key: Kept, task: int) -> Graph | None:
        if self.graph is None or self.key is not key or self.task != task:
            return None
        graph = self.graph if self.graph.output._version == self.version else None
        self.clear()
        return graph

    def put(self, key: Kept, task: int, tensor: Tensor, graph: Graph | None) -> None:
        if self.task != task:
            # may run in another thread, hence the slot and not "the slot of this thread"
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.clear(task))
        self.task, self.key, self.tensor, self.graph = task, key, tensor, graph
        self.version, self.left = tensor._version, key.consumers - 1
        if self.left == 0:
            self.forget_tensor()


_local = threading.local()
_slots: weakref.WeakSet[_Slot] = weakref.WeakSet()


def _slot() -> _Slot:
    if not hasattr(_local, "slot"):
        _local.slot = _Slot()
        _slots.add(_local.slot)
    return _local.slot


def _drop_leftovers() -> None:
    for slot in list(_slots):
        if slot.key is not None:
            slot.clear()
