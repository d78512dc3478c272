"""Task `llama-pretrain`: train a small Llama from scratch on State of the Union addresses; judge on addresses it never
trained on.

4 layers of width 128, embedding and output head apart, 1.28 million parameters; the vocabulary is a byte-level BPE of
2048 made from the training addresses alone. The split is that of `sotu-lm`. Texts are joined by the end-of-text token
and cut into blocks of 128 tokens; a run draws its blocks, without replacement, with a generator that depends on the
seed alone. The figure is the mean loss of 160 fixed blocks of the held-out texts, evenly spaced.

The weights come from the run's seed, apart from the batches; there is no dropout.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from typing import Any

import torch

from benchmarks.language_model import as_rows, drawn, held_out_loss
from benchmarks.sotu_lm import END_OF_TEXT, texts
from tools.demo_assets import demo_dir

NAME = "llama-pretrain"
LEARNING_RATES = (1e-3, 2e-3, 4e-3)
STEPS = 400
BATCH_BLOCKS = 16
BLOCK_TOKENS = 128
HELD_OUT_BLOCKS = 160
VOCABULARY = 2048
FIGURE = "held-out loss"


def load_model(dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=BLOCK_TOKENS,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2_000_003 + seed)
        return LlamaForCausalLM(config).to(dtype)


def make_tokenizer(chosen: list[str]) -> Any:
    """A byte-level BPE of `chosen`: the same texts give the same one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(chosen, trainer)
    return made


def cut(bpe: Any, chosen: list[str]) -> torch.Tensor:
    """The texts, joined by the end-of-text token, in blocks: int16 token ids (blocks, 128). The rest is dropped."""
    end = bpe.token_to_id(END_OF_TEXT)
    # one text at a time: the encodings of all would be the largest thing the run ever holds
    ids = torch.cat([torch.tensor([*bpe.encode(text).ids, end], dtype=torch.int16) for text in chosen])
    whole = len(ids) // BLOCK_TOKENS
    return ids[: whole * BLOCK_TOKENS].view(whole, BLOCK_TOKENS)


@functools.cache
def blocks() -> tuple[torch.Tensor, torch.Tensor]:
    """(training blocks, held-out blocks), each (blocks, 128) int64 token ids; the latter are the 160 that are judged.

    Made once and kept in the asset cache, with the vocabulary and the hash of the texts that they were made from.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    split = texts()
    key = hashlib.sha256(repr((split, VOCABULARY, BLOCK_TOKENS, HELD_OUT_BLOCKS)).encode()).hexdigest()
    path = demo_dir() / f"{NAME}.safetensors"
    if path.is_file():
        with safe_open(path, "pt") as kept:
            if (kept.metadata() or {}).get("key") == key:
                return kept.get_tensor("train").long(), kept.get_tensor("held_out").long()
    bpe = make_tokenizer(split[0])
    train, held_out = (cut(bpe, chosen) for chosen in split)
    judged = torch.linspace(0, len(held_out) - 1, HELD_OUT_BLOCKS, dtype=torch.float64).round().long()
    held_out = held_out[judged]
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    save_file({"train": train, "held_out": held_out}, partial, {"key": key, "tokenizer": bpe.to_str()})
    os.replace(partial, path)
    return train.long(), held_out.long()


def training_blocks(seed: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """The blocks of a whole run, drawn without replacement: `steps` batches of sixteen blocks."""
    train, _ = blocks()
    return as_rows(train, drawn(len(train), seed)[: steps * BATCH_BLOCKS])


def training_arguments(steps: int = STEPS) -> dict[str, Any]:
    """What the task fixes of TrainingArguments; the strategy, its rate and the seed come from the run."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": BATCH_BLOCKS,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": math.ceil(steps / 10),
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
    }


def evaluate(model: torch.nn.Module) -> float:
    """Mean loss in nats a token over the fixed held-out blocks; the logits are taken to fp32 before the loss."""
    return held_out_loss(model, blocks()[1], batch=16)


def evaluate_before(model: torch.nn.Module) -> float:
    """`evaluate` of the untrained model."""
    return evaluate(model)
