"""Every storage that a training allocates: its size, when it came and went, and what it was for.

``StorageLog`` is a dispatch mode. It sees the results of each operation, on real tensors and on fake ones alike, and
notes every storage it has not seen before; a weak reference notes its end. So nothing is estimated, views cost nothing,
and a gradient that is freed inside backward is gone from that moment on.

What a storage was for is often known only later (a sum in backward turns out to be a parameter's gradient, a temporary
of a step its state). Therefore events are written down first and added up afterwards, with the last label of each
storage. Not seen is what a kernel allocates inside itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPONENTS = (
    "weights",
    "buffers",
    "gradients",
    "activations",
    "backward temporaries",
    "optimizer state",
    "optimizer temporaries",
    "other",
)
"""``activations`` is all that forward computes, recomputation included; ``backward temporaries`` are the gradients of
activations and what leads to them; ``other`` is the batch."""

_SECTION_LABELS = {"forward": "activations", "backward": "backward temporaries", "optimizer": "optimizer temporaries"}
_SCALARS = {torch.ops.aten.zeros.default: 0.0, torch.ops.aten.ones.default: 1.0}


@dataclass
class Record:
    """One storage: bytes as asked for, its component, and the operation, shape and dtype it began with."""

    nbytes: int
    label: str
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Kind:
    """Storages of one origin that are alive together."""

    component: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Peak:
    """A moment: bytes in all and by component, and where in the log it is."""

    nbytes: int
    components: dict[str, int]
    position: int


class StorageLog(TorchDispatchMode):
    """Write down all storages while the mode is on.

    Args:
        granularity: Sizes are rounded up to this many bytes (CUDA's caching allocator gives out multiples of 512).
        fake: A ``FakeTensorMode`` is on as well.

    On top of a ``FakeTensorMode`` three things keep code running that looks at values: operations on real tensors alone
    (the batch) are carried out; new 0-d zeros and ones have a known value, as ``torch.tensor(0.0)`` has in that mode
    (step counters); and a bool that an optimizer reads is True, because those ask whether a gradient was finite.
    """

    def __init__(self, granularity: int = 1, fake: bool = False) -> None:
        super().__init__()
        self.fake = fake
        self.granularity = granularity
        self.section = "other"
        self.records: list[Record] = []
        self._events: list[tuple[int, int]] = []  # (record, change in bytes)
        self._alive: dict[int, tuple[int, weakref.ref]] = {}  # address of the StorageImpl -> record and its end

    # -- writing ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf, func.overloadpacket.__name__)
        return out

    def _run(self, func, args, kwargs):
        if not self.fake:
            return func(*args, **kwargs)
        if func in _SCALARS and list(args[0]) == []:
            with self.real():
                scalar = func(*args, **kwargs)
            return torch.ops.aten.lift_fresh.default(scalar)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(isinstance(t, FakeTensor) for t in tensors) and not _lifts(func):
            with self.real():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and self.section == "optimizer":
            if tensors[0].dtype == torch.bool and tensors[0].constant is None:
                return True
        return func(*args, **kwargs)

    def real(self) -> AbstractContextManager:
        """Within this context tensors are real, whatever mode is on."""
        return unset_fake_temporarily() if self.fake else nullcontext()

    def see(self, tensor: Tensor, operation: str = "given") -> int | None:
        """Note the tensor's storage if it is new; the number of its record, None for an empty one."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        known = self._alive.get(storage._cdata)
        if known is not None:
            number = known[0]
            record = self.records[number]
            if nbytes != record.nbytes:  # resized in place
                self._events.append((number, self.rounded(nbytes) - self.rounded(record.nbytes)))
                record.nbytes = nbytes
            return number
        if nbytes == 0:
            return None
        number = len(self.records)
        recomputed = self.section == "backward" and torch.is_grad_enabled()
        label = "activations" if recomputed else _SECTION_LABELS.get(self.section, "other")
        self.records.append(Record(nbytes, label, operation, tuple(tensor.shape), tensor.dtype))
        self._events.append((number, self.rounded(nbytes)))
        address = storage._cdata
        self._alive[address] = number, weakref.ref(storage, lambda _: self._gone(address))
        return number

    def _gone(self, address: int) -> None:
        number, _ = self._alive.pop(address)
        self._events.append((number, -self.rounded(self.records[number].nbytes)))

    def label(self, tensors: Iterable[Tensor], component: str) -> None:
        """Say what the storages of ``tensors`` are for, from their beginning on."""
        for tensor in tensors:
            number = self.see(tensor)
            if number is not None:
                self.records[number].label = component

    @contextmanager
    def during(self, section: str) -> Iterator[None]:
        """What is allocated in this context belongs to ``section``: forward, backward or optimizer."""
        before, self.section = self.section, section
        try:
            yield
        finally:
            self.section = before

    def rounded(self, nbytes: int) -> int:
        """The bytes that a storage of ``nbytes`` takes."""
        return -(-nbytes // self.granularity) * self.granularity

    # -- reading ----------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The present moment, for ``peak`` and ``at``."""
        return len(self._events)

    def peak(self, begin: int, end: int) -> Peak:
        """The highest moment from ``begin`` to ``end``, both included."""
        now: Counter[str] = Counter()
        total, best = 0, None
        for position in range(end + 1):
            if position:
                number, change = self._events[position - 1]
                now[self.records[number].label] += change
                total += change
            if position >= begin and (best is None or total > best.nbytes):
                best = Peak(total, {c: now[c] for c in COMPONENTS}, position)
        return best

    def at(self, position: int) -> Peak:
        """What is alive at a moment."""
        return self.peak(position, position)

    def kinds(self, position: int) -> list[Kind]:
        """What is alive at a moment, by origin, largest first."""
        alive: Counter[int] = Counter()
        for number, change in self._events[:position]:
            alive[number] += change
        count: Counter[tuple] = Counter()
        nbytes: Counter[tuple] = Counter()
        for number, size in alive.items():
            if size:
                r = self.records[number]
                key = r.label, r.operation, r.shape, str(r.dtype).removeprefix("torch.")
                count[key] += 1
                nbytes[key] += size
        return [Kind(*key, count[key], size) for key, size in nbytes.most_common()]


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors nested in dicts, lists and tuples, and those that a tensor subclass holds."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from tensors_in(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _lifts(func) -> bool:
    """Whether the operation makes a tensor of a literal (``torch.tensor``), which fake mode handles itself."""
    return func in (
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.lift_fresh_copy.default,
        torch.ops.aten.lift.default,
    )
