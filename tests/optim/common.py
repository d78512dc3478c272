"""Small helpers of the optimizer's tests."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch

from hf_memopt import TacoAdamW


def state_equal(a, b) -> bool:
    """Bit equality of nested state: same structure, dtypes and bits (NaN included)."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(state_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(state_equal, a, b))
    return type(a) is type(b) and a == b


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    flat = [x.detach().contiguous().reshape(-1).view(integers) for x in (a, b)]
    return torch.equal(*flat)


def snapshot(optimizer: TacoAdamW) -> tuple[list[torch.Tensor], dict]:
    """Weights and state, copied."""
    weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return weights, copy.deepcopy(optimizer.state_dict())


def train(optimizer: TacoAdamW, steps: Iterable[int]) -> None:
    """Steps with gradients that depend on the step and the parameter's number alone."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for t in steps:
        for number, p in enumerate(parameters):
            generator = torch.Generator().manual_seed(1000 * t + number)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
