"""The ways to train adapters that `benchmarks/lora.py` and `benchmarks/quality.py --adapter` compare, on real PEFT and
bitsandbytes.

Adapters of rank 16, alpha 32, on every linear layer but the head; LoRA on a bf16 (or fp32) base, QLoRA on nf4 with
double quantisation, computing in the base's dtype. What is kept for backward is named by one word, `memory`:

    none                      PEFT's defaults: fp32 adapters, and for QLoRA its preparation, which makes norms,
                              embeddings and head fp32
    no-upcast                 QLoRA only: fp32 adapters without that preparation
    bf16-adapters             adapters in the base's dtype (autocast_adapter_dtype=False), without that preparation
    velora, velora:bf16       PEFT's VeLoRA with its defaults, on fp32 adapters and on those of the base's dtype
    exact[:RECOMPUTE]         this package, `tier="exact"`; RECOMPUTE as in LoraMemoryConfig, its default if absent
    compressed:RANK[:RECOMPUTE]   this package, `tier="compressed"`

This package's own have PEFT's fp32 adapters. QLoRA's bases are prepared by this package's `prepare_for_kbit_training`,
for `none` with `upcast="all"`, which upcasts as PEFT does: PEFT's own leaves bitsandbytes on CPUs free to pack weights
at the first evaluation, and gradients are wrong after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt import LoraMemoryConfig, compress_lora, prepare_for_kbit_training

RANK, ALPHA = 16, 32
ADAPTERS = ("lora", "qlora")
PEFT, NO_UPCAST, NARROW = "none", "no-upcast", "bf16-adapters"
VELORA, VELORA_NARROW = "velora", "velora:bf16"
EXACT, EXACT_ALONE = "exact", "exact:none"
PLAIN = (PEFT, NO_UPCAST, NARROW, VELORA, VELORA_NARROW)


def config_of(memory: str, seed: int = 0) -> LoraMemoryConfig | None:
    """The options of this package that ``memory`` names; None for what is PEFT's alone.

    Raises:
        ValueError: there is no such way.
    """
    if memory in PLAIN:
        return None
    tier, *words = memory.split(":")
    try:
        if tier == "compressed":
            rank, *words = words
            given: dict[str, Any] = {"rank": float(rank) if "." in rank else int(rank)}
        elif tier == "exact":
            given = {}
        else:
            raise ValueError
        (recompute,) = words or [LoraMemoryConfig.recompute]
    except ValueError:
        names = ", ".join((*PLAIN, "exact[:RECOMPUTE]", "compressed:RANK[:RECOMPUTE]"))
        raise ValueError(f"{memory!r} is no way to keep activations: {names}.") from None
    return LoraMemoryConfig(tier=tier, recompute=recompute, seed=seed, **given)


@dataclass(frozen=True)
class Way:
    """One way to train adapters; the module says what ``memory`` may be."""

    adapter: str = "lora"
    memory: str = PEFT
    checkpointing: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.adapter not in ADAPTERS:
            raise ValueError(f"adapter must be one of {', '.join(ADAPTERS)}, got {self.adapter!r}.")
        config_of(self.memory)
        if self.memory in (VELORA, VELORA_NARROW) and self.adapter == "qlora":
            raise ValueError("PEFT's VeLoRA refuses layers of bitsandbytes: use adapter lora, or another memory.")
        if self.memory == NO_UPCAST and self.adapter == "lora":
            raise ValueError(f"{NO_UPCAST} is of qlora: nothing of a base is upcast for lora.")

    @property
    def name(self) -> str:
        """Of files and strategies."""
        dropout = f"+dropout={self.dropout:g}" if self.dropout else ""
        checkpointing = "+checkpointing" if self.checkpointing else ""
        return f"{self.adapter}-{self.memory.replace(':', '-')}{checkpointing}{dropout}"

    @property
    def narrow(self) -> bool:
        """Whether the adapters have the base's dtype."""
        return self.memory in (NARROW, VELORA_NARROW)


def pretrained(path: Any, way: Way, dtype: torch.dtype) -> nn.Module:
    """The causal language model in the folder ``path``, quantised for ``qlora``; sdpa attention."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    more: dict[str, Any] = {}
    if way.adapter == "qlora":
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        more = {"quantization_config": quantisation, "device_map": "cuda" if torch.cuda.is_available() else "cpu"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", **more)


def adapted(model: nn.Module, way: Way, seed: int = 0) -> tuple[nn.Module, Any]:
    """(the ``PeftModel`` in train mode, what ``compress_lora`` returned or None); equal seeds give equal adapters."""
    from peft import LoraConfig, VeloraConfig, get_peft_model

    if way.adapter == "qlora":
        upcast = "all" if way.memory == PEFT else "none"
        prepare_for_kbit_training(model, use_gradient_checkpointing=False, upcast=upcast)
    more = {"velora_config": VeloraConfig()} if way.memory in (VELORA, VELORA_NARROW) else {}
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=way.dropout, target_modules="all-linear", **more)
    dtype = model.get_input_embeddings().weight.dtype
    torch.manual_seed(seed)
    model = get_peft_model(model, lora, autocast_adapter_dtype=not way.narrow)
    if way.narrow:  # PEFT makes those on quantised layers in fp32 in any case
        for name, p in model.named_parameters():
            if ".lora_" in name:
                p.data = p.data.to(dtype)
    if way.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = config_of(way.memory, seed)
    handle = None if config is None else compress_lora(model, config)
    return model.train(), handle


def quantisation_tensors(model: nn.Module) -> list[Tensor]:
    """What bitsandbytes keeps of 4-bit weights beside the numbers: scales, and the scales' scales."""
    found: list[Tensor] = []
    states = [getattr(p, "quant_state", None) for p in model.parameters()]
    while states:
        state = states.pop()
        if state is not None:
            found += [v for v in vars(state).values() if isinstance(v, Tensor)]
            states.append(getattr(state, "state2", None))
    return found
