"""What about a parameter's memory an in-place update cannot work with.

``expand``, ``as_strided`` and ``unfold`` give tensors whose elements share memory. Such a *gradient* is only read, and
is fine. Such a *parameter* is one number under several indices: every update would be applied several times, in an
order that depends on the kernel and its threads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlaps(p: Tensor) -> bool:
    """Whether two elements of ``p`` share memory. Exact; costs time and memory only for nested odd strides."""
    if p.layout != torch.strided or p.numel() < 2:
        return False
    dims = sorted((stride, size) for size, stride in zip(p.shape, p.stride(), strict=True) if size > 1)
    reach = 0  # distance between the first and the last element of the dimensions so far
    for stride, size in dims:
        if stride <= reach:
            break  # this dimension begins inside the smaller ones: elements may coincide
        reach += stride * (size - 1)
    else:
        return False
    if dims[0][0] == 0:
        return True
    offsets = torch.zeros((), dtype=torch.int64)
    for stride, size in dims:
        offsets = offsets[..., None] + stride * torch.arange(size)
    return len(offsets.unique()) < offsets.numel()


def refuse_shared_memory(optimizer: str, name: str, p: Tensor) -> None:
    """Raise ValueError, naming both, where ``overlaps(p)``."""
    if overlaps(p):
        raise ValueError(
            f"{optimizer} updates parameters in place, but elements of {name} share memory (shape {tuple(p.shape)}, "
            f"strides {p.stride()}, as expand makes them): give it memory of its own with .clone()."
        )
