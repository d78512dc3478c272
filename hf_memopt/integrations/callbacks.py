"""What the package does from inside the Trainer.

``MemoptCallback`` is in every Trainer through ``transformers.trainer.DEFAULT_CALLBACKS``: ``optim="taco_adamw"`` alone
says at the start what will be kept in memory, refuses what does not work, and makes checkpoints that
``last_complete_checkpoint`` can trust. It acts only where one of the package's optimizers trains, or a model
whose activations the package keeps small.

``MemoryReportCallback`` is asked for: ``report_to=["hf_memopt", "tensorboard"]``. The Trainer hands one dict of logs to
its callbacks in turn: default callbacks, reporters in the order of ``report_to``, the user's callbacks, progress bar.
What is put into it is seen by those that come later, therefore ours has to be the first reporter.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from ..memory.peak import peak_bytes
from ..optim.backward import release
from ..registry import is_registered
from . import compact
from .checkpoints import CALLBACK_KEY, set_aside_torn, write_marker
from .trainer import refuse_in_backward, refuse_unsupported, updates_in_backward

logger = logging.getLogger("hf_memopt")

REPORTER_NAME = "hf_memopt"


def package_optimizer(optimizer: Any) -> Any:
    """The package's optimizer inside ``optimizer`` (which accelerate wraps), or None if it is not one of ours."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    ours = any(cls.__module__.split(".")[0] == "hf_memopt" for cls in type(optimizer).__mro__)
    return optimizer if ours else None


class MemoptCallback(TrainerCallback, ExportableState):
    """Start table, refusals, the gradient norm of updates in backward, and a marker on each finished checkpoint.

    The marker is explained in ``checkpoints.py``. The Trainer asks callbacks of type ``ExportableState`` for their
    state when everything else of a checkpoint is written, and stores the answer in ``trainer_state.json``, the last
    file. That moment is where the marker belongs: after the files, before older checkpoints are deleted. ``on_save``
    would be too late. Checkpoints of a hyperparameter search, which nobody resumes, are not marked.

    The old marker of a folder that is written over is taken away in ``Trainer.save_model`` (see ``trainer.py``): no
    callback comes between the decision to save and the first file, and with ``save_strategy="best"`` none comes after
    the decision at all.
    """

    def __init__(self) -> None:
        self.save_id: str | None = None
        self._args: Any = None
        self._state: Any = None
        self._marking = False
        self._first = 0

    def on_init_end(self, args, state, control, **kwargs):
        # DeepSpeed with an optimizer of its own in its config never asks for ours: said here, not found out later
        name = getattr(args.optim, "value", args.optim)
        if is_registered(name):
            refuse_unsupported(name, args)
            if updates_in_backward(name, args):
                refuse_in_backward(f"optim={name!r}", args)

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        # the trainer_state.json of a run without this package has no entry for it, but the Trainer wants one to save
        state.stateful_callbacks.setdefault(CALLBACK_KEY, self._exported())
        ours = package_optimizer(optimizer)
        if ours is not None and ours.update_in_backward:  # again: the optimizer may have been passed in, not named
            refuse_in_backward(type(ours).__name__, args)
            ours.resume_updates()
        left = release(model.parameters(), keep=ours) if model is not None else []
        if left:
            logger.warning(
                "%s of an earlier training still updated parameters of this model in backward; that has been ended.",
                ", ".join(left),
            )
        compact.begin(model, optimizer, args)
        if ours is not None and state.is_world_process_zero:
            logger.info("%s", ours.memory_report(model).table())
        self._first = state.global_step + 1
        self._args, self._state = args, state
        concerned = ours is not None or compact.changed(model)
        self._marking = concerned and args.should_save and not state.is_hyper_param_search
        if self._marking:
            set_aside_torn(args.output_dir, beyond=state.global_step)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self._first and state.is_world_process_zero:
            compact.tell(model)  # now they have met their inputs

    def on_log(self, args, state, control, logs=None, optimizer=None, **kwargs):
        # the Trainer finds no gradients after an update in backward and logs a norm of 0, or none
        ours = package_optimizer(optimizer)
        if ours is None or logs is None or "loss" not in logs:
            return
        norm = ours.grad_norm
        if norm is not None:
            logs["grad_norm"] = norm
            state.log_history[-1]["grad_norm"] = norm  # filled from a copy of the logs before this is called

    def on_train_end(self, args, state, control, optimizer=None, **kwargs):
        self._marking = False
        ours = package_optimizer(optimizer)
        if ours is not None:
            ours.hold_updates()  # a backward after training is not meant to train

    def state(self) -> dict[str, Any]:
        """Called by the Trainer in the middle of a save, where there is a folder to mark, and while it sets up."""
        if self._marking and os.path.isdir(self._checkpoint()):
            try:
                self.save_id = write_marker(self._checkpoint(), world_size=self._args.world_size)
            except OSError as error:
                self.save_id = None
                logger.warning(
                    "%s could not be marked as finished and will not count as a checkpoint to resume from: %s",
                    self._checkpoint(),
                    error,
                )
        return self._exported()

    def _exported(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"save_id": self.save_id}}

    def _checkpoint(self) -> str:
        return os.path.join(self._args.output_dir, f"checkpoint-{self._state.global_step}")


class MemoryReportCallback(TrainerCallback):
    """Adds to every training log of one of the package's optimizers:

    ========================  ======================================================================================
    ``memopt/state_bytes``    bytes of optimizer state, counted over real storages
    ``memopt/bits_per_param`` the same in bits a trainable parameter
    ``memopt/peak_bytes``     peak so far: of the CUDA allocator, or the process's resident set on the CPU
    ``memopt/skipped_steps``  parameters left alone because of a non-finite gradient, summed over steps
    ``memopt/zero_share``     share of first-moment codes that are 0
    ``memopt/changed_share``  share of codes that changed in this step
    ``memopt/carried_energy`` share of the first moment's energy that was carried into the weights
    ========================  ======================================================================================

    The last three are sampled in the logged step only. TensorBoard, wandb and trackio show them as
    ``train/memopt/...``.

    Use it as ``report_to=["hf_memopt", "tensorboard"]``, first in the list. Given through ``callbacks=[...]`` it comes
    after the reporters: then the figures are in ``trainer.state.log_history`` and in the progress output, and one
    warning says that reporters do not see them.

    Raises:
        ValueError: At the start, if another reporter is listed before ``"hf_memopt"`` in ``report_to``.
    """

    def on_init_end(self, args, state, control, **kwargs):
        reporters = list(args.report_to or [])
        if REPORTER_NAME not in reporters:
            if reporters:
                logger.warning(
                    "MemoryReportCallback was given through callbacks=[...], after the reporters, so %s will not show "
                    "its figures: use report_to=%s instead.",
                    ", ".join(reporters),
                    [REPORTER_NAME, *reporters],
                )
        elif reporters.index(REPORTER_NAME) > 0:
            right = [REPORTER_NAME, *(r for r in reporters if r != REPORTER_NAME)]
            raise ValueError(
                f"report_to={reporters} lists {REPORTER_NAME!r} after another reporter, which would not see its "
                f"figures: use report_to={right}."
            )

    def on_step_begin(self, args, state, control, optimizer=None, train_dataloader=None, **kwargs):
        ours = package_optimizer(optimizer)
        if ours is not None and self._will_be_logged(args, state, train_dataloader):
            ours.request_statistics()

    def on_log(self, args, state, control, logs=None, optimizer=None, **kwargs):
        ours = package_optimizer(optimizer)
        if ours is None or logs is None or "loss" not in logs:
            return
        report = ours.memory_report()
        figures = {
            "state_bytes": report.state_bytes,
            "bits_per_param": report.bits_per_parameter,
            "peak_bytes": peak_bytes(args.device),
            "skipped_steps": ours.skipped_steps,
            **ours.statistics,
        }
        figures = {f"memopt/{key}": value for key, value in figures.items()}
        logs.update(figures)
        state.log_history[-1].update(figures)  # filled from a copy of the logs before this is called

    def _will_be_logged(self, args, state, train_dataloader) -> bool:
        """Whether the Trainer will log after the step that is about to be taken."""
        step = state.global_step + 1
        strategy = getattr(args.logging_strategy, "value", args.logging_strategy)
        if step == 1 and args.logging_first_step:
            return True
        if strategy == "steps":
            return step % state.logging_steps == 0
        if strategy == "epoch":
            try:
                batches = len(train_dataloader)
            except TypeError:  # an iterable without a length: its last step cannot be foreseen
                return True
            return step % max(1, math.ceil(batches / args.gradient_accumulation_steps)) == 0 or step == state.max_steps
        return False
