"""A Llama of 98,624 parameters whose matrices are large enough for ternary moments, and the real Trainer on it."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import hf_memopt  # noqa: F401  (registers the names)

VOCABULARY, LENGTH = 128, 16


def tiny_llama(dtype: torch.dtype = torch.float32, **config) -> LlamaForCausalLM:
    """The same weights on every call."""
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **{**shape, **config})).to(
        dtype
    )


def texts(n: int = 64) -> list[dict[str, torch.Tensor]]:
    """``n`` sequences with some regularity: each token is near the one before."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(0, 4, (n, LENGTH), generator=generator).cumsum(1) % VOCABULARY
    return [{"input_ids": row, "labels": row.clone()} for row in steps]


def arguments(output_dir, **changes) -> TrainingArguments:
    """Six steps on the CPU with a checkpoint every second one; ``changes`` are TrainingArguments."""
    values = {
        "optim": "taco_adamw",
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(output_dir), **{**values, **changes})


def trainer(
    output_dir, *, model=None, dtype: torch.dtype = torch.float32, callbacks=None, eval_dataset=None, **changes
) -> Trainer:
    """An unmodified Trainer on the tiny model."""
    model = tiny_llama(dtype) if model is None else model
    args = arguments(output_dir, **changes)
    return Trainer(model, args, train_dataset=texts(), eval_dataset=eval_dataset, callbacks=callbacks)


def inner(optimizer):
    """The optimizer that accelerate wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def snapshot(t: Trainer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of ``t`` as one flat dict of tensors."""
    flat = {f"weight.{name}": p.detach().clone() for name, p in t.model.named_parameters()}
    for index, state in inner(t.optimizer).state_dict()["state"].items():
        flat.update({f"state.{index}.{key}": _tensor(value) for key, value in state.items()})
    return flat


def _tensor(value) -> torch.Tensor:
    return torch.as_tensor(list(value.encode()) if isinstance(value, str) else value).clone()


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names that are not equal in dtype and bits, or only in one of the two."""
    return sorted(
        key
        for key in a.keys() | b.keys()
        if key not in a or key not in b or a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])
    )
