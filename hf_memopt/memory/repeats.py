"""Updates that repeat: of all parameters of one shape, the simulation carries out one.

``kernels/one_sparse.py`` is plain torch on many small tiles, thousands of operations a parameter, and a model has
dozens of parameters of each shape. What an update allocates follows from shapes, strides and dtypes alone (it has no
branch that depends on data). So the first one of each kind runs on fake tensors like everything else, and for the
others its temporaries at their highest are allocated in one piece. The peaks are the same; a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..kernels import one_sparse
from ..kernels.scalars import StepScalars
from .storages import StorageLog


@contextmanager
def updates_once(log: StorageLog) -> Iterator[None]:
    """Within this context the one-sparse update runs once for each kind of parameter that ``log`` sees."""
    carry_out, highest = one_sparse.one_sparse_, {}

    def update(*args: Any) -> Tensor:
        kind = tuple(_kind(arg) for arg in args)
        if kind not in highest:
            begin = log.position
            applied = carry_out(*args)
            before, after = log.at(begin).nbytes, log.at(log.position).nbytes
            if after - before != log.rounded(applied.nbytes):
                raise AssertionError("A one-sparse update holds more than its answer after its end.")
            highest[kind] = log.peak(begin, log.position).nbytes - after
            return applied
        applied = torch.ones((), dtype=torch.bool, device=args[0].device)
        torch.empty(highest[kind], dtype=torch.uint8, device=args[0].device)  # and gone again
        return applied

    one_sparse.one_sparse_ = update
    try:
        yield
    finally:
        one_sparse.one_sparse_ = carry_out


def _kind(argument: Any) -> Any:
    """What of an argument decides on the operations."""
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if isinstance(argument, dict):
        return tuple((key, _kind(value)) for key, value in sorted(argument.items()) if isinstance(value, Tensor))
    if isinstance(argument, StepScalars):
        return argument.decay == 1.0, argument.stochastic, argument.maximize
    return argument
