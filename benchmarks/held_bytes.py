"""What a forward pass leaves behind for backward: every storage that it made and that is alive when it has ended.

Counted by storages (``hf_memopt/memory/storages.py``), so views and tensors that several operations keep count once;
weights, buffers and the batch are not among them. What a closure holds, such as a checkpointed block's input, is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from hf_memopt.memory.storages import StorageLog


def held_bytes(
    model: nn.Module,
    forward: Callable[[], Tensor],
    *,
    apart: Callable[[], Iterable[Tensor]] = tuple,
    fake: bool = False,
    largest: int = 12,
) -> tuple[int, list[dict[str, Any]]]:
    """Run ``forward()`` and count what its graph holds.

    Args:
        forward: returns a tensor with a graph; its own storage counts only where the graph holds it.
        apart: called after it, gives tensors that are not counted.
        fake: a ``FakeTensorMode`` is on.
        largest: how many kinds of storages are listed.

    Returns:
        (bytes, the largest kinds: operation, shape, dtype, count, nbytes)
    """
    log = StorageLog(fake=fake)
    log.label(model.parameters(), "weights")
    log.label(model.buffers(), "buffers")
    with log, log.during("forward"):
        graph = forward().grad_fn
    position = log.position
    log.label(apart(), "other")
    if graph is None:
        raise ValueError("The forward pass has no graph: the model is in evaluation, or nothing of it is trained.")
    kinds = [k for k in log.kinds(position) if k.component == "activations"]
    listed = [{**asdict(k), "shape": list(k.shape)} for k in kinds[:largest]]
    return log.at(position).components["activations"], listed
