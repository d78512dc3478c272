"""Peak memory of LoRA on Llama-3-8B by the memory simulation, for `benchmarks/lora.py --memory`.

The whole model's shapes in bf16, one sequence of 2048 tokens, torch's AdamW, the loss that transformers computes; two
iterations of the real model, PEFT's real adapters and the real optimizer on tensors without storage, of which the
second is reported. VeLoRA looks at values and bitsandbytes' kernels take none but real tensors, so neither is here.
"""

from __future__ import annotations

import json
import pathlib
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from benchmarks import common
from benchmarks.lora_activations import LLAMA_3_8B
from benchmarks.lora_ways import EXACT, EXACT_ALONE, NARROW, PEFT, Way, adapted
from hf_memopt.memory.simulate import simulate

FOLDER = common.RESULTS / "lora" / "memory"
SIZES = LLAMA_3_8B | {"num_hidden_layers": 32, "vocab_size": 128256}
TOKENS = 2048
WAYS = [
    *(Way(memory=memory) for memory in (PEFT, NARROW, EXACT, EXACT_ALONE, "compressed:0.25:none")),
    *(Way(memory=memory) for memory in ("compressed:0.125:none", "compressed:0.25")),
    *(Way(memory=memory, checkpointing=True) for memory in (PEFT, NARROW, EXACT)),
]


def build_model(way: Way, sizes: dict[str, Any], tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(max_position_embeddings=tokens, **sizes)
    return adapted(LlamaForCausalLM._from_config(config, dtype=torch.bfloat16), way)[0]


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=False)


def run(folder: pathlib.Path = FOLDER, sizes: dict[str, Any] = SIZES, tokens: int = TOKENS) -> None:
    """Every way that has no file yet."""
    for way in WAYS:
        path = path_of(folder, way)
        if path.is_file():
            continue
        given = {"tokens": tokens, "gradient_checkpointing": way.checkpointing}
        memory = simulate(lambda way=way: build_model(way, sizes, tokens), build_optimizer, **given)
        record = {
            "name": way.name,
            "way": asdict(way),
            "sizes": sizes,
            "tokens": tokens,
            "memory": memory.as_dict(),
            "versions": common.versions(),
            "git_revision": common.git_revision(),
            "source_digest": common.source_digest(),
        }
        common.write_json(path, record)
        print(f"{way.name}: {memory.peak_bytes / 2**30:.2f} GiB in {memory.peak_phase}", flush=True)


def path_of(folder: pathlib.Path, way: Way) -> pathlib.Path:
    return folder / f"{way.name}.json"


def load(folder: pathlib.Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Name -> record of those that exist, in the order of WAYS."""
    paths = {way.name: path_of(folder, way) for way in WAYS}
    return {name: json.loads(p.read_text(encoding="utf8")) for name, p in paths.items() if p.is_file()}
