"""What an optimizer refuses at the start: options out of range, and parameters that no in-place update can work with.

A group's options are checked like the constructor's, since torch lets a group override each of them. They are checked
once, when the group is added: schedulers set them later, and a checkpoint brings what was checked when it was written.

``expand``, ``as_strided`` and ``unfold`` give tensors whose elements share memory. Such a *gradient* is only read, and
is fine. Such a *parameter* is one number under several indices: every update would be applied several times, in an
order that depends on the kernel and its threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def check_options(options: Mapping[str, Any]) -> None:
    """Check what all optimizers of the package share: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``seed``,
    ``stochastic_rounding`` and ``maximize``; other keys are left alone.

    Raises:
        ValueError: one is of the wrong type or out of range; the sentence names it.
    """
    lr, betas, seed = options["lr"], options["betas"], options["seed"]
    one_number = torch.is_tensor(lr) and lr.numel() == 1 and lr.dtype != torch.bool and not lr.is_complex()
    if not (is_number(lr) or one_number) or not 0.0 <= lr < float("inf"):
        raise ValueError(f"lr must be a finite number of at least 0, got {lr!r}.")
    pair = isinstance(betas, Sequence) and len(betas) == 2 and all(is_number(b) for b in betas)
    if not pair or not all(0.0 <= b < 1.0 for b in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}.")
    for name in ("eps", "weight_decay"):
        if not is_number(options[name]) or not 0.0 <= options[name] < float("inf"):
            raise ValueError(f"{name} must be a finite number of at least 0, got {options[name]!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}.")
    for name in ("stochastic_rounding", "maximize"):
        check_bool(name, options[name])


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def is_number(x: Any) -> bool:
    """Whether ``x`` is an int or a float, and no bool."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)
