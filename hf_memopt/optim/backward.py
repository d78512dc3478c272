"""Update during backward: a parameter is stepped as soon as its gradient is complete, and the gradient is freed.

With ternary states the gradients are the largest thing left beside the weights: 7B in bf16 is 12.6 GiB of weights, 12.6
of gradients and 2.7 of states. Here only the gradients that backward is working on are alive. It stays one real
optimizer, with real groups, schedule and state: ``step()`` does what the hooks left over and closes the step.

What is asked of autograd: a post-accumulate hook fires once a backward for each leaf, tied or not, after the whole sum.
Two backwards before one ``step()`` would be two updates, so the second raises.

A parameter has at most one owner. A later optimizer of the package takes over the parameters of an earlier one (a
notebook's second Trainer, a trial of a hyperparameter search), which from then on refuses to step: both stepping would
be worse. Hooks act on every backward, whoever calls it; the Trainer's are therefore removed when training ends, and a
Trainer that begins removes what others left on its model (``integrations/callbacks.py``).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from .base import CodecOptimizer

logger = logging.getLogger("hf_memopt")

PIECE = 1 << 20  # elements that are converted at once

# parameter -> (weak reference to the BackwardUpdates that steps it, handle of its hook)
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class BackwardUpdates:
    """The hooks of one optimizer and what the running step has done so far.

    Args:
        optimizer: steps its parameters; only a weak reference is kept, so hooks do not keep it alive.
        clip: largest L2 norm of a single parameter's gradient, or None.
    """

    def __init__(self, optimizer: CodecOptimizer, clip: float | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._clip = clip
        self._lock = threading.RLock()  # autograd runs one thread a GPU
        self._done: set[int] = set()
        self._places: dict[int, tuple[dict, str]] = {}
        self._norms: list[Tensor] = []
        self._last_norms: list[Tensor] = []
        self._lost: str | None = None
        self._held = False

    def attach(self) -> None:
        """Hook every trainable parameter of the optimizer that is not hooked yet."""
        optimizer = self._optimizer()
        trainable = [p for _, _, p in optimizer.named_params() if p.requires_grad]
        lost = release(trainable, keep=optimizer)
        for p in trainable:
            if p not in _owners:
                _owners[p] = (weakref.ref(self), p.register_post_accumulate_grad_hook(_hook(weakref.ref(self))))
        if lost:
            logger.warning(
                "%s updated parameters of this %s in backward; the new optimizer takes them over, and the earlier one "
                "can no longer step.",
                ", ".join(lost),
                type(optimizer).__name__,
            )

    def resume(self) -> None:
        """Hook them again after ``detach``, or after another optimizer has taken them over."""
        self._held, self._lost = False, None
        self.attach()

    def detach(self) -> None:
        """Remove the hooks until ``resume``."""
        self._held = True
        for _, _, p in self._optimizer().named_params():
            owner, handle = _owners.get(p, (None, None))
            if owner is not None and owner() is self:
                handle.remove()
                del _owners[p]

    @torch.no_grad()
    def update(self, p: Tensor) -> None:
        """The hook's work: norm, clipping, update, and no gradient left."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:
            if not self._done:
                self._begin(optimizer)
            if id(p) not in self._places:
                return  # no longer in a group
            group, name = self._places[id(p)]
            if id(p) in self._done:
                raise RuntimeError(
                    f"{name} got a second gradient before optimizer.step(), and update_in_backward=True has applied "
                    "the first: call step() after every backward (gradient_accumulation_steps=1), and with gradient "
                    "checkpointing of layers that share weights set use_reentrant=False; or train without "
                    "update_in_backward. If an earlier backward was interrupted, part of the weights has been updated: "
                    "go on from a checkpoint."
                )
            optimizer._check_gradient(name, p)
            self._done.add(id(p))
            norm = _norm(p.grad)
            self._norms.append(norm)
            if self._clip is not None:
                # as torch's clip_grad_norm_; a norm that is not finite makes the gradient so, and it is skipped
                factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)
                p.grad.mul_(torch.where(norm.isfinite(), factor, float("nan")))
            optimizer._update(group, name, p)
            p.grad = None

    def _begin(self, optimizer: CodecOptimizer) -> None:
        self.check(optimizer)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_world_size() > 1:
                raise NotImplementedError(
                    "update_in_backward=True does not support several processes: a gradient would be applied before "
                    "it is averaged over them. Train in one process or without update_in_backward."
                )
        self._places = {id(p): (group, name) for group, name, p in optimizer.named_params()}
        optimizer._begin_step()

    def check(self, optimizer: CodecOptimizer) -> None:
        """Raise RuntimeError where a step would not do what was asked."""
        if self._lost is not None:
            raise RuntimeError(
                f"A later {self._lost} has taken over parameters of this optimizer with update_in_backward=True: "
                "use that one, or build this one anew."
            )
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "update_in_backward=True has applied gradients that a GradScaler had scaled: train in bf16, or "
                "without update_in_backward."
            )

    def end(self) -> None:
        """Close the step: the next backward begins a new one."""
        self._last_norms, self._norms = self._norms, []
        self._done, self._places = set(), {}
        if not self._held:
            self.attach()  # what has been unfrozen since

    def grad_norm(self) -> float | None:
        """L2 norm over all gradients that the last step's hooks saw, before clipping; None before the first step."""
        if not self._last_norms:
            return None
        return float(torch.linalg.vector_norm(torch.stack([norm.double().cpu() for norm in self._last_norms])))


def release(parameters: Iterable[Tensor], keep: CodecOptimizer | None = None) -> list[str]:
    """Remove the hooks of every optimizer but ``keep`` from ``parameters``; the kinds of optimizers that lost some.

    An optimizer that has lost a parameter refuses to step.
    """
    losers = {}
    for p in parameters:
        owner, handle = _owners.get(p, (None, None))
        if owner is None:
            continue
        updates = owner()  # gone with its optimizer, or when that has been loaded or copied into
        optimizer = updates._optimizer() if updates is not None else None
        if keep is not None and optimizer is keep:
            continue
        handle.remove()
        del _owners[p]
        if optimizer is not None:
            updates._lost = type(keep).__name__ if keep is not None else "optimizer"
            losers[id(optimizer)] = type(optimizer).__name__
    return list(losers.values())


def _norm(grad: Tensor) -> Tensor:
    """L2 norm, fp32, without a copy of the gradient in another dtype (which the CPU would make of a 16-bit one)."""
    # a simulation counts what a GPU would do, which converts on the way
    if grad.device.type != "cpu" or grad.dtype == torch.float32 or grad.dim() == 0 or isinstance(grad, FakeTensor):
        return torch.linalg.vector_norm(grad, dtype=torch.float32)
    rows = max(1, PIECE // max(1, grad[:1].numel()))
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part.float()) for part in grad.split(rows)]))


def _hook(updates: weakref.ref[BackwardUpdates]) -> Any:
    def update(p: Tensor) -> None:
        owner = updates()
        if owner is not None:
            owner.update(p)

    return update
