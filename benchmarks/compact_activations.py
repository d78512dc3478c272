"""Activation bytes of one decoder block and of a whole model, for `benchmarks/compact.py --activations`.

Three models in bf16, one sequence of 512 tokens, sdpa attention without a mask: SmolLM2-135M as it is, and Llama's
architecture in the shapes of Llama-3.2-1B and Llama-2-7B on tensors without storage. Counted is what forward leaves
behind for backward (`held_bytes.py`): for a block from its input to its output, the input included where it is kept;
for the model with the loss that transformers computes. Weights and carriers are not counted, nor the rotary embedding
of a block, which all blocks share, nor the energies by which `principal` chooses coordinates (4 bytes a feature, in
the step before a refresh).

One process and one JSON file a configuration. Bytes come from shapes alone, so one forward pass is enough.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pathlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import common
from benchmarks.fits import SIZES, VOCABULARY
from benchmarks.held_bytes import held_bytes
from hf_memopt import CompActConfig, compress_activations
from hf_memopt.memory.simulate import causal_lm_loss, materialise

FOLDER = common.RESULTS / "compact" / "activations"
MODELS = {"smollm2-135m": None, "llama-3.2-1b": SIZES["1b"], "llama-2-7b": SIZES["7b"]}
TOKENS = 512
RANKS = (0.5, 0.25, 0.125)
PROJECTIONS = ("principal", "orthonormal", "structured", "gaussian")


@dataclass(frozen=True)
class Way:
    """One way to train. ``rank`` of None compresses nothing."""

    checkpointing: bool = False
    recompute: bool = False
    rank: float | None = None
    projection: str = ""

    @property
    def name(self) -> str:
        compact = "" if self.rank is None else f"compact-{self.rank:g}-{self.projection}"
        parts = (compact, "recompute" if self.recompute else "", "checkpointing" if self.checkpointing else "")
        return "+".join(filter(None, parts)) or "plain"

    def config(self) -> CompActConfig | None:
        """The options of the package; None where it does nothing."""
        if self.rank is None and not self.recompute:
            return None
        given = {"projection": self.projection} if self.rank is not None else {}
        return CompActConfig(rank=self.rank, recompute="norms,mlp" if self.recompute else "none", **given)


PLAIN, CHECKPOINTING, RECOMPUTE = Way(), Way(checkpointing=True), Way(recompute=True)
COMPACT = [Way(rank=rank, projection=kind) for rank in RANKS for kind in PROJECTIONS]
BOTH = [Way(recompute=True, rank=way.rank, projection=way.projection) for way in COMPACT]
WAYS = [
    PLAIN,
    CHECKPOINTING,
    RECOMPUTE,
    *COMPACT,
    *BOTH,
    Way(checkpointing=True, recompute=True, rank=0.25, projection="principal"),
]


def per_token(sizes: dict[str, int], way: Way) -> int:
    """Bytes a token that a Llama block in 16 bits keeps, by the shapes of its tensors; H, K, I: widths of the residual
    stream, of keys and of the MLP; a: heads.

    Plain: two norms, each with an fp32 copy of the input, its normalised value in 16 bits and a root (4 H + 2 H + 4);
    their outputs (2 H each); q, k, v and the attention's output (4 H + 4 K) with 4 a for the softmax; gate, its
    activation, up and the product (8 I). CompAct keeps ``rank`` of the norms' outputs and of the product.
    Recomputation keeps the norms' inputs in 16 bits (2 H each), the attention's tensors, gate and up; what linear
    layers read is made again, so nothing remains to be compressed. Checkpointing keeps the block's input.
    """
    h, i, a = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    k = h * sizes.get("num_key_value_heads", a) // a
    if way.checkpointing:
        return 2 * h
    attention = 4 * h + 4 * k + 4 * a
    if way.recompute:
        return 4 * h + attention + 4 * i
    rank = 1 if way.rank is None else way.rank
    return 2 * (6 * h + 4) + round(rank * (4 * h + 2 * i)) + attention + 6 * i


def measure(name: str, way: Way, tokens: int = TOKENS, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """Bytes of the model ``name``, or on tensors without storage of a Llama of these ``sizes``."""
    sizes = sizes or MODELS[name]
    ids = torch.zeros(1, tokens, dtype=torch.int64)  # real ones: of a batch without numbers transformers makes a mask
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with contextlib.ExitStack() as modes:
        if sizes is None:
            model = _pretrained(name)
        else:
            model = _shaped(sizes, tokens)
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            materialise(model)
        model.train()
        if way.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        config = way.config()
        compression = None if config is None else compress_activations(model, config)
        fake = sizes is not None

        def energies() -> list[Tensor]:
            bases = () if compression is None else compression.bases()
            return [basis.energy for basis in bases if basis.energy is not None]

        def loss() -> Tensor:
            return causal_lm_loss(model, batch)

        whole, of_whole = held_bytes(model, loss, apart=energies, fake=fake)
        embedding, block_output = _block(model, tokens)
        block, of_block = held_bytes(model, block_output, apart=lambda: [*embedding, *energies()], fake=fake)
        layers = len(model.model.layers)
        if compression is not None:
            compression.restore()
        used = model.config.to_dict()
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {
        "model": name,
        "way": way.name,
        "options": asdict(way),
        "tokens": tokens,
        "dtype": "bfloat16",
        "attention": model.config._attn_implementation,
        "fake": fake,
        "layers": layers,
        "sizes": {key: used[key] for key in kept},
        "block_bytes": block,
        "model_bytes": whole,
        "largest_of_block": of_block,
        "largest_of_model": of_whole,
        "versions": common.versions(),
        "git_revision": common.git_revision(),
        "source_digest": common.source_digest(),
    }


def _block(model: nn.Module, tokens: int) -> tuple[tuple[Tensor, Tensor], Callable[[], Tensor]]:
    """The rotary embedding, and the forward pass of the first block alone, from an input that has a graph as that of a
    later block has."""
    layer, base = model.model.layers[0], model.model
    positions = torch.arange(tokens)[None]
    x = torch.zeros(1, tokens, model.config.hidden_size, dtype=torch.bfloat16)
    embedding = base.rotary_emb(x, positions)
    x.requires_grad_()

    def forward() -> Tensor:
        given = {"attention_mask": None, "position_ids": positions, "position_embeddings": embedding}
        return layer(x.clone(), use_cache=False, **given)

    return embedding, forward


def _pretrained(name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from tools.demo_assets import asset

    return AutoModelForCausalLM.from_pretrained(asset(name), dtype=torch.bfloat16, attn_implementation="sdpa")


def _shaped(sizes: dict[str, int], tokens: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(max_position_embeddings=tokens, **{"vocab_size": VOCABULARY, **sizes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


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
    found = measure(name, way)
    common.write_json(path_of(folder, name, way), found)
    block, model = (found[key] / 2**20 for key in ("block_bytes", "model_bytes"))
    print(f"{name}, {way.name}: a block {block:,.2f} MiB, the model {model:,.1f} MiB", flush=True)


def load(folder: pathlib.Path = FOLDER) -> dict[str, dict[str, dict[str, Any]]]:
    """model -> way -> record, in the order of MODELS and WAYS."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in MODELS:
        paths = {way.name: path_of(folder, name, way) for way in WAYS}
        records = {way: json.loads(p.read_text(encoding="utf8")) for way, p in paths.items() if p.is_file()}
        if records:
            found[name] = records
    return found
