"""CompAct in the Trainer: ``CompActCallback`` for any ``optim=``, and what ``MemoptCallback`` does for both ways.

``optim="compact_adamw"`` patches the model when the Trainer makes its optimizer. With another optimizer the callback
does it, when the Trainer is made: carriers have to exist before the optimizer is built from the model's parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from transformers.trainer_callback import TrainerCallback

from ..activations.compression import compression_of
from ..activations.lora import LoraFactor
from ..activations.patch import compress_activations
from ..options import CompActConfig
from ..registry import get_optimizer, is_registered
from .trainer import refuse_unsupported

logger = logging.getLogger("hf_memopt")


class CompActCallback(TrainerCallback):
    """``Trainer(..., callbacks=[CompActCallback(CompActConfig(rank=0.25))])``: compression under any ``optim=``.

    Args:
        config: the options.
        target_modules: which layers, as ``optim_target_modules``.

    Raises:
        ValueError: when the Trainer is made, if nothing can be compressed, the model is compressed already, an
            optimizer exists before its carriers, or ``optim=`` is one that compresses by itself.
        NotImplementedError: for FSDP, DeepSpeed and other ways of sharding.
        RuntimeError: when training begins, if the Trainer trains another model by then, one that ``model_init`` made.
    """

    def __init__(
        self, config: CompActConfig | None = None, *, target_modules: str | Iterable[str] | None = None
    ) -> None:
        self.config, self.target_modules = config or CompActConfig(), target_modules

    def on_init_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        name = getattr(args.optim, "value", args.optim)
        refuse_unsupported(f"{name} with CompActCallback", args)
        if is_registered(name) and get_optimizer(name).builder.endswith(":compact"):
            raise ValueError(
                f"optim={name!r} compresses activations by itself: leave CompActCallback out, or choose another optim."
            )
        if optimizer is not None:
            raise ValueError(
                "CompActCallback comes too late for an optimizer that exists already: call "
                "hf_memopt.compress_activations(model, config) before you make it, and leave the callback out."
            )
        compress_activations(model, self.config, target_modules=self.target_modules)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if compression_of(model) is None:
            raise RuntimeError(
                "The model that is trained is not the one that CompActCallback compressed: where model_init= makes it, "
                "call hf_memopt.compress_activations(model, config) in there and leave the callback out."
            )


def begin(model: Any, optimizer: Any, args: Any) -> None:
    """At the start of a training: take the subspaces up from the optimizer's state, refuse what does not work."""
    compression = compression_of(model) if model is not None else None
    if compression is None:
        return
    mode = getattr(getattr(args, "parallel_mode", None), "name", "")
    if mode == "NOT_DISTRIBUTED" and getattr(args, "n_gpu", 1) > 1:
        raise NotImplementedError(
            "Compressed activations do not support several GPUs in one process (DataParallel): start one process a "
            "GPU with torchrun, or show it one with CUDA_VISIBLE_DEVICES."
        )
    compression.resume(optimizer)


def changed(model: Any) -> bool:
    """Whether the package keeps this model's activations small, whatever optimizer trains it."""
    if model is None:
        return False
    return compression_of(model) is not None or any(isinstance(m, LoraFactor) for m in model.modules())


def tell(model: Any) -> None:
    """Log which layers are compressed and whom they share with, once this is known."""
    compression = compression_of(model) if model is not None else None
    if compression is not None:
        logger.info("%s", compression.report().table())
