"""The update of the memory simulation: allocates what the Triton kernels allocate, computes nothing.

Kernels work through pointers, and tensors of a simulation have none. What counts there is what a step allocates: its
answer and the workspace of ``triton.Plan``. Both come from the code that runs on a GPU, and its checks of shapes,
dtypes and layouts are made. Only fake tensors are taken, and ``kernels.select`` gives this backend only within
``kernels.simulating()``, so no real training can end up here.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import triton
from .scalars import StepScalars


def ternary_adamw_(param: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars) -> Tensor:
    """Arguments, answer and errors as ``triton.ternary_adamw_``; the answer is always that the step was applied."""
    n, k = _check(param, grad, state, ternary=True)
    applied = triton.answer(None, param.device)
    if n and k:
        triton.Plan(n, k).workspace(param.device)
    return applied


def dense_adamw_(param: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars) -> Tensor:
    """Arguments, answer and errors as ``triton.dense_adamw_``, which has no temporaries."""
    _check(param, grad, state, ternary=False)
    return triton.answer(None, param.device)


def _check(param: Tensor, grad: Tensor, state: dict[str, Tensor], ternary: bool) -> tuple[int, int]:
    if not isinstance(param, FakeTensor):
        raise ValueError("The simulated kernel updates nothing and takes fake tensors only: set kernel=auto.")
    return triton.check(param, grad, state, ternary)
