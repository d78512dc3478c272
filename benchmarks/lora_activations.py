"""Bytes that forward keeps for backward with adapters, for `benchmarks/lora.py --activations`.

Two models in bf16, sdpa attention without a mask, adapters of rank 16 on all linear layers (`lora_ways.py`), one
sequence of 512 tokens: SmolLM2-135M as it is, a block and the whole model with the loss that transformers computes; and
one block in the shapes of Llama-3-8B, on tensors without storage but where PEFT or bitsandbytes look at values (VeLoRA,
4-bit weights), which the tests hold against real ones. Counted is what forward leaves behind
(`held_bytes.py`), distinct storages without weights, scales of quantised weights and the rotary embedding, which all
blocks share; for a block from its input, which has a graph as that of a later block has, to its output.

The peak is of forward and backward of the whole model: the highest moment of all storages that operations return,
weights and gradients included, rounded to 512 bytes as CUDA's allocator does. What a kernel allocates inside itself is
not in it.

One process and one JSON file a configuration.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import common
from benchmarks.held_bytes import held_bytes
from benchmarks.lora_ways import (
    ALPHA,
    EXACT,
    EXACT_ALONE,
    NARROW,
    NO_UPCAST,
    PEFT,
    RANK,
    VELORA,
    VELORA_NARROW,
    Way,
    adapted,
    pretrained,
    quantisation_tensors,
)
from hf_memopt.memory.simulate import causal_lm_loss, materialise
from hf_memopt.memory.storages import StorageLog

FOLDER = common.RESULTS / "lora" / "activations"
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 256,
}
MODELS: dict[str, dict[str, Any] | None] = {"smollm2-135m": None, "llama-3-8b-block": LLAMA_3_8B}
"""None: pretrained. Of a model given by sizes, only the block is measured."""
TOKENS = 512
DROPOUT = 0.05

COMPRESSED = [f"compressed:{rank:g}{more}" for rank in (0.25, 0.125) for more in ("", ":none")]
WAYS = [
    Way("lora", PEFT),
    Way("lora", NARROW),
    Way("lora", VELORA),
    Way("lora", VELORA_NARROW),
    Way("lora", PEFT, checkpointing=True),
    *(Way("lora", memory) for memory in (EXACT, EXACT_ALONE, *COMPRESSED)),
    Way("lora", EXACT, checkpointing=True),
    *(
        Way("lora", memory, dropout=DROPOUT)
        for memory in (PEFT, NARROW, VELORA, EXACT, EXACT_ALONE, "compressed:0.125:none")
    ),
    Way("qlora", PEFT),
    Way("qlora", NO_UPCAST),
    Way("qlora", NARROW),
    Way("qlora", PEFT, checkpointing=True),
    *(Way("qlora", memory) for memory in (EXACT, EXACT_ALONE, *COMPRESSED)),
    Way("qlora", EXACT, checkpointing=True),
    *(Way("qlora", memory, dropout=DROPOUT) for memory in (PEFT, NARROW, EXACT)),
]


def can_be_fake(way: Way) -> bool:
    """Whether nothing of its forward looks at values."""
    return way.adapter == "lora" and way.memory not in (VELORA, VELORA_NARROW)


def measure(
    name: str, way: Way, tokens: int = TOKENS, sizes: dict[str, Any] | None = None, fake: bool = False
) -> dict[str, Any]:
    """Bytes of the model ``name``, or of a Llama of these ``sizes`` with random weights; ``fake``: with none, and of a
    block alone."""
    sizes = sizes or MODELS[name]
    with contextlib.ExitStack() as modes:
        if fake:
            with torch.device("meta"):
                model, handle = adapted(_shaped(sizes, tokens, way), way)
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            materialise(model)
        else:
            model, handle = adapted(_pretrained(name, way) if sizes is None else _shaped(sizes, tokens, way), way)
        return _counted(name, model, handle, way, tokens, fake)


def _counted(name: str, model: nn.Module, handle: Any, way: Way, tokens: int, fake: bool) -> dict[str, Any]:
    """The record of a model that is ready to train."""
    scales = quantisation_tensors(model)
    base = model.get_base_model()
    embedding, output = _block(base, tokens)
    block, of_block = held_bytes(model, output, apart=lambda: [*embedding, *scales], fake=fake)
    whole, of_whole, highest = None, [], None
    if not fake and len(base.model.layers) > 1:
        ids = torch.randint(0, base.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        whole, of_whole = held_bytes(model, lambda: causal_lm_loss(model, batch), apart=lambda: scales)
        highest = peak(model, lambda: causal_lm_loss(model, batch), scales)
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {
        "model": name,
        "way": way.name,
        "options": asdict(way),
        "compress_lora": None if handle is None else asdict(handle.config),
        "lora": {"r": RANK, "alpha": ALPHA, "target_modules": "all-linear"},
        "tokens": tokens,
        "dtype": "bfloat16",
        "fake": fake,
        "attention": base.config._attn_implementation,
        "layers": len(base.model.layers),
        "sizes": {key: getattr(base.config, key) for key in kept},
        "block_bytes": block,
        "model_bytes": whole,
        "peak": highest,
        "largest_of_block": of_block,
        "largest_of_model": of_whole,
        "versions": common.versions(),
        "git_revision": common.git_revision(),
        "source_digest": common.source_digest(),
    }


def peak(model: nn.Module, loss: Callable[[], Tensor], scales: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Bytes at the highest moment of one forward and backward, in all and by what they are for."""
    log = StorageLog(512)
    log.label(model.parameters(), "weights")
    log.label(scales, "weights")
    log.label(model.buffers(), "buffers")
    model.zero_grad(set_to_none=True)
    begin = log.position
    with log:
        with log.during("forward"):
            found = loss()
        with log.during("backward"):
            found.backward()
    log.label((p.grad for p in model.parameters() if p.grad is not None), "gradients")
    return asdict(log.peak(begin, log.position))


def _block(base: nn.Module, tokens: int) -> tuple[tuple[Tensor, Tensor], Callable[[], Tensor]]:
    """The rotary embedding, and the forward pass of the first block alone."""
    layer = base.model.layers[0]
    positions = torch.arange(tokens)[None]
    dtype = base.get_input_embeddings().weight.dtype
    x = torch.zeros(1, tokens, base.config.hidden_size, dtype=dtype)
    embedding = base.model.rotary_emb(x, positions)
    x.requires_grad_()

    def forward() -> Tensor:
        given = {"attention_mask": None, "position_ids": positions, "position_embeddings": embedding}
        return layer(x.clone(), use_cache=False, **given)

    return embedding, forward


def _pretrained(name: str, way: Way) -> nn.Module:
    from tools.demo_assets import asset

    return pretrained(asset(name), way, torch.bfloat16)


def _shaped(sizes: dict[str, Any], tokens: int, way: Way) -> nn.Module:
    """Written and read again, because bitsandbytes quantises what is loaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=tokens, dtype=torch.bfloat16, **sizes)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if way.adapter == "lora":
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return pretrained(folder, way, torch.bfloat16)


def path_of(folder: pathlib.Path, name: str, way: Way) -> pathlib.Path:
    return folder / name / f"{way.name}.json"


def run(folder: pathlib.Path = FOLDER, models: list[str] | None = None) -> None:
    """Every configuration that has no file yet, each in a fork of this process: what one holds is gone with it."""
    forks = multiprocessing.get_context("fork")
    for name in models or MODELS:
        for way in WAYS:
            if path_of(folder, name, way).is_file():
                continue
            one = forks.Process(target=record, args=(folder, name, way))
            one.start()
            one.join()
            if one.exitcode:
                raise SystemExit(f"{name}, {way.name} ended with status {one.exitcode}")


def record(folder: pathlib.Path, name: str, way: Way) -> None:
    """Measure one configuration into its file."""
    torch.set_num_threads(1)
    found = measure(name, way, fake=MODELS[name] is not None and can_be_fake(way))
    common.write_json(path_of(folder, name, way), found)
    model = "" if found["model_bytes"] is None else f", the model {found['model_bytes'] / 2**20:,.1f} MiB"
    print(f"{name}, {way.name}: a block {found['block_bytes'] / 2**20:,.2f} MiB{model}", flush=True)


def load(folder: pathlib.Path = FOLDER) -> dict[str, dict[str, dict[str, Any]]]:
    """model -> way -> record, in the order of MODELS and WAYS."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in MODELS:
        paths = {way.name: path_of(folder, name, way) for way in WAYS}
        records = {way: json.loads(p.read_text(encoding="utf8")) for way, p in paths.items() if p.is_file()}
        if records:
            found[name] = records
    return found
