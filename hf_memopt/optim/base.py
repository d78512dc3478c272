"""What every optimizer of the package shares: the step, lazy state, names, the report. Loading is in ``loading.py``.

Two facts of the field shape it.

- accelerate and FSDP2 replace the tensors in the groups between construction and the first step: state is created in
  ``step`` and names are kept by position.
- State is plain tensors and numbers, so ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from ..activations.compression import compressions_of
from ..activations.layers import compressed_weights
from ..codecs.base import Codec, all_specs, zeros
from ..param_groups import TREATMENTS, Treatment, decide, unsupported_dtype
from .backward import BackwardUpdates, release
from .checks import check_options, refuse_shared_memory
from .loading import CheckedLoading, name_in_group
from .report import GroupRow, MemoryReport, storage_bytes

logger = logging.getLogger("hf_memopt")


class CodecOptimizer(CheckedLoading):
    """Base of the package's optimizers.

    A subclass gives ``CODECS`` (treatment -> moment -> codec) and ``_update``, which updates one parameter from its
    gradient. It calls ``_start`` before and ``_hook_up`` after torch's ``__init__``.
    """

    NAME = ""
    """Which optimizer it is, in checkpoints."""
    CODECS: dict[str, dict[str, Codec]] = {}
    TREATMENTS: tuple[str, ...] = TREATMENTS
    SAVED_OPTIONS: tuple[str, ...] = ()
    """Options of the groups, beside torch's own, that a checkpoint brings along."""

    # -- stepping ---------------------------------------------------------------------------------

    def _start(self, update_in_backward: bool = False, clip_per_parameter: float | None = None) -> None:
        """What is not part of the state and begins anew in every process."""
        self._in_step = False
        self.update_in_backward, self.clip_per_parameter = update_in_backward, clip_per_parameter
        self._backward = BackwardUpdates(self, clip_per_parameter) if update_in_backward else None
        if update_in_backward:
            self._step_supports_amp_scaling = True  # a GradScaler then shows itself to step(), which refuses it

    def _hook_up(self) -> None:
        if self._backward is not None:
            self._backward.attach()
            return
        lost = release(p for _, _, p in self.named_params())
        if lost:
            logger.warning(
                "%s with update_in_backward=True still held parameters that are now %s's: it can no longer step.",
                ", ".join(lost),
                type(self).__name__,
            )

    def hold_updates(self) -> None:
        """With ``update_in_backward``: backward leaves gradients alone until ``resume_updates``."""
        if self._backward is not None:
            self._backward.detach()

    def resume_updates(self) -> None:
        """With ``update_in_backward``: backward updates again, as it does from the beginning."""
        if self._backward is not None:
            self._backward.resume()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient; returns what ``closure`` returned.

        With ``update_in_backward`` most parameters have been updated by then, and this ends the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._backward is not None:
            self._backward.check(self)
        self._begin_step()
        with_gradient = [(group, name, p) for group, name, p in self.named_params() if p.grad is not None]
        for _, name, p in with_gradient:
            self._check_gradient(name, p)
        for group, name, p in with_gradient:
            if self._backward is None:
                self._update(group, name, p)
            else:
                self._backward.update(p)
        self._in_step = False
        self._end_step()
        if self._backward is not None:
            self._backward.end()
        return loss

    def _begin_step(self) -> None:
        """Called once before the first update of a step."""
        if not self._in_step:
            self._in_step = True
            self._prepare_step()

    def _prepare_step(self) -> None: ...

    def _end_step(self) -> None: ...

    def _update(self, group: dict, name: str, p: Tensor) -> None:
        raise NotImplementedError

    def _check_gradient(self, name: str, p: Tensor) -> None:
        if p.grad.layout != torch.strided:
            raise ValueError(
                f"{type(self).__name__} takes dense gradients, but that of {name} is sparse: "
                "build the embedding with sparse=False."
            )

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of all gradients of the last step before clipping, known with ``update_in_backward`` only."""
        return self._backward.grad_norm() if self._backward is not None else None

    def __getstate__(self) -> dict[str, Any]:
        kept = {"update_in_backward": self.update_in_backward, "clip_per_parameter": self.clip_per_parameter}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # called for copies, unpickled optimizers, and for a loaded state_dict, which has none of our options
        super().__setstate__(state)
        self._start(
            state.get("update_in_backward", getattr(self, "update_in_backward", False)),
            state.get("clip_per_parameter", getattr(self, "clip_per_parameter", None)),
        )
        self._hook_up()

    # -- parameters -------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses, before the first step, options out of range and parameters that no kernel takes."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._hook_up()

    def _check_group(self, group: dict[str, Any]) -> None:
        check_options(group)
        me, treatment = type(self).__name__, group["treatment"]
        if treatment not in ("auto", *self.TREATMENTS):
            raise ValueError(f"treatment={treatment!r} is not known: choose auto, {' or '.join(self.TREATMENTS)}.")
        for i, p in enumerate(group["params"]):
            name = name_in_group(group, i) or f"number {i} of its group"
            if unsupported_dtype(p):
                raise ValueError(
                    f"{me} takes float32, bfloat16 and float16 parameters, but {name} is {p.dtype}: "
                    "convert it or freeze it."
                )
            refuse_shared_memory(me, name, p)
            if type(p.data).__name__ == "DTensor":
                raise ValueError(
                    f"{me} does not support sharded parameters yet, and {name} is a DTensor: "
                    "train without FSDP, or use adamw_torch."
                )
            if p.device.type == "mps":
                raise ValueError(
                    f"{me} needs double precision sums, which MPS lacks ({name}): train on the CPU or CUDA."
                )
            if treatment not in ("auto", "dense") and p.dim() < 2:
                raise ValueError(
                    f"treatment={treatment!r} needs matrices, but {name} has shape {tuple(p.shape)}: "
                    "use treatment='auto'."
                )

    def named_params(self) -> Iterator[tuple[dict, str, Tensor]]:
        """(group, name, parameter) in the order of ``state_dict``; without a name, its number is the name."""
        number = 0
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                yield group, name_in_group(group, i) or str(number), p
                number += 1

    def decision(self, group: dict, p: Tensor) -> Treatment:
        """The parameter's treatment and why."""
        if group["treatment"] == "auto":
            return decide(p.shape)
        return Treatment(group["treatment"], group.get("reason", "by choice"))

    def treatment_of(self, group: dict, p: Tensor) -> str:
        """One of ``TREATMENTS``."""
        return self.decision(group, p).name

    def codecs_of(self, group: dict, p: Tensor) -> dict[str, Codec]:
        """The codecs of the parameter's moments."""
        return self.CODECS[self.treatment_of(group, p)]

    def numbers_of(self, group: dict, p: Tensor) -> dict[str, Any]:
        """What the state holds beside ``step`` and the codecs' buffers, as it is at the beginning: plain numbers and
        strings."""
        return {"skipped": 0}

    def state_of(self, group: dict, p: Tensor) -> dict[str, Any]:
        """The parameter's state, created on first use."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(self.numbers_of(group, p))
            state.update(zeros(self.codecs_of(group, p), p.shape, p.device))
        return state

    # -- reporting --------------------------------------------------------------------------------

    def memory_report(self, model: torch.nn.Module | None = None) -> MemoryReport:
        """Bytes of state per group and treatment: real storages once they exist, the codecs' declarations before the
        first step.

        With ``model`` given its frozen parameters are listed too.
        """
        rows: dict[tuple, list[int]] = {}
        measured = True
        for group, _, p in self.named_params():
            treatment, reason = astuple(self.decision(group, p))
            state = self.state.get(p)
            if state:
                nbytes = storage_bytes(state)
            else:
                measured = False
                nbytes = 4 + sum(spec.nbytes for spec in all_specs(self.codecs_of(group, p), p.shape).values())
            row = rows.setdefault((treatment, reason, group["weight_decay"]), [0, 0, 0])
            for i, n in enumerate((1, p.numel(), nbytes)):
                row[i] += n
        frozen = None
        if model is not None:
            moved = compressed_weights(model)  # frozen for autograd only
            frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad and id(p) not in moved)
        me = self.title() + (" with update in backward" if self.update_in_backward else "")
        groups = tuple(GroupRow(*k, *v) for k, v in rows.items())
        return MemoryReport(me, self.kernel_name(), groups, measured, frozen, self.stands_for())

    def stands_for(self) -> int | None:
        """How many parameters of the model are trained, if not as many as the optimizer holds."""
        own = sum(p.numel() for _, _, p in self.named_params())
        more = sum(r.weights - r.carriers for r in (c.report() for c in compressions_of(self)))
        return own + more if more else None

    def title(self) -> str:
        """What the report calls the optimizer."""
        return type(self).__name__

    def kernel_name(self) -> str:
        """The kernel that updates, for the report."""
        raise NotImplementedError

    @property
    def skipped_steps(self) -> int:
        """How often a parameter was left alone for a gradient that was not finite, over all parameters and steps."""
        return sum(state.get("skipped", 0) for state in self.state.values())
