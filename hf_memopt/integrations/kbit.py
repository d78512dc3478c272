"""PEFT's preparation of a quantised model without the fp32 copies that raise memory."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import nn

from ..activations import structure


def prepare_for_kbit_training(
    model: nn.Module,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    *,
    upcast: Literal["none", "norms", "all"] = "none",
) -> nn.Module:
    """``peft.prepare_model_for_kbit_training`` without its fp32 copies of norms, embeddings and head, in place.

    In fp32 the embedding makes the whole residual stream fp32, which doubles what every block keeps. Also keeps
    bitsandbytes from packing 4-bit weights for inference on CPUs: it does so at the first evaluation and gives wrong
    gradients, without a word, when it is trained through afterwards.

    Args:
        model: a transformers model, quantised or not; all its parameters are frozen.
        use_gradient_checkpointing: Turn checkpointing on. With ``use_reentrant=True`` in
            ``gradient_checkpointing_kwargs``, or without that key, the embeddings' output also requires a gradient.
        upcast: Which 16-bit parameters become fp32: none, those of norms, or as in PEFT all.

    Returns:
        The model.

    Raises:
        ValueError: ``upcast`` is something else, or the weights have been packed already.
    """
    if upcast not in ("none", "norms", "all"):
        raise ValueError(f"prepare_for_kbit_training: upcast must be none, norms or all, got {upcast!r}.")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    f"prepare_for_kbit_training: bitsandbytes has packed {name} for inference on this CPU, which "
                    "cannot be trained through: load the model again and prepare it before its first evaluation."
                )
            module.support_avx512bf16_for_cpu = False
        if upcast == "all" or (upcast == "norms" and structure.kind_of(module) == "norm"):
            for parameter in module.parameters(recurse=False):
                if parameter.dtype in (torch.float16, torch.bfloat16) and type(parameter).__name__ != "Params4bit":
                    parameter.data = parameter.data.float()
    if use_gradient_checkpointing:
        kwargs = dict(gradient_checkpointing_kwargs or {})
        if kwargs.get("use_reentrant", True):
            model.enable_input_require_grads()
        known = "gradient_checkpointing_kwargs" in inspect.signature(model.gradient_checkpointing_enable).parameters
        model.gradient_checkpointing_enable(**({"gradient_checkpointing_kwargs": kwargs} if known else {}))
    return model
