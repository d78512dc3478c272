"""The optimizers and the parameter sets of `benchmarks/optimizer_step.py`.

Every optimizer is called as the Trainer calls it where the Trainer knows it, else as its own documentation does. A
builder imports its package itself, so that a missing one is a sentence in the results and not the end of the run.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

LEARNING_RATE = 1e-4
ANCHORS = ("torch AdamW fused", "torch AdamW foreach", "TacoAdamW")
"""Measured beside every other optimizer, in the same rounds: times are compared within a process only."""

Named = list[tuple[str, Parameter]]


@dataclass(frozen=True)
class Peer:
    """One optimizer. `note` is what a reader must know to read its figures; `gradient_reads`, where the step is
    known to go through memory once, how often it reads the gradient (for the bytes moved)."""

    build: Callable[[Named], Any]
    package: str
    note: str = ""
    gradient_reads: int = 0


def _tensors(named: Named) -> list[Parameter]:
    return [p for _, p in named]


def _torch(**options: Any) -> Callable[[Named], Any]:
    return lambda named: torch.optim.AdamW(_tensors(named), lr=LEARNING_RATE, **options)


def _taco(kernel: str) -> Callable[[Named], Any]:
    def build(named: Named) -> Any:
        from hf_memopt.kernels import select
        from hf_memopt.optim.taco_adamw import TacoAdamW

        select(kernel, "cpu")  # refuses here, before anything is measured, when there is no compiler
        return TacoAdamW(named, lr=LEARNING_RATE, kernel=kernel)

    return build


def _bitsandbytes(named: Named) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(_tensors(named), lr=LEARNING_RATE)


def _torchao(name: str) -> Callable[[Named], Any]:
    def build(named: Named) -> Any:
        import torchao.optim

        return getattr(torchao.optim, name)(_tensors(named), lr=LEARNING_RATE)

    return build


def _adafactor(named: Named) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(_tensors(named), lr=LEARNING_RATE, scale_parameter=False, relative_step=False)


def _adafactor8bit(named: Named) -> Any:
    from adafactor8bit import Adafactor8Bit

    options = {"beta1": 0.9, "scale_parameter": False, "relative_step": False, "use_cuda_kernel": False}
    return Adafactor8Bit(_tensors(named), lr=LEARNING_RATE, **options)


def _low_rank_groups(named: Named, **options: Any) -> list[dict[str, Any]]:
    """Matrices inside the blocks are projected, to a quarter of their smaller side; embeddings and vectors are not."""
    ranks: dict[int, list[Parameter]] = defaultdict(list)
    for name, p in named:
        ranks[min(p.shape) // 4 if p.dim() == 2 and "embed" not in name else 0].append(p)
    rest = [{"params": ranks.pop(0)}] if 0 in ranks else []
    return rest + [{"params": ps, "rank": rank, "update_proj_gap": 200, **options} for rank, ps in ranks.items()]


def _galore(named: Named) -> Any:
    from galore_torch import GaLoreAdamW

    groups = _low_rank_groups(named, scale=0.25, proj_type="std")
    return GaLoreAdamW(groups, lr=LEARNING_RATE, no_deprecation_warning=True)


def _apollo(named: Named) -> Any:
    from apollo_torch import APOLLOAdamW

    groups = _low_rank_groups(named, scale=1.0, proj="random", proj_type="std", scale_type="channel")
    return APOLLOAdamW(groups, lr=LEARNING_RATE)


_LOW_RANK = "block matrices at rank 1/4; a step without refresh of the projector, which comes every 200 steps: {}"
PEERS: dict[str, Peer] = {
    "torch AdamW fused": Peer(_torch(fused=True), "torch", gradient_reads=1),
    "torch AdamW foreach": Peer(_torch(foreach=True), "torch"),
    "TacoAdamW": Peer(_taco("compiled"), "hf_memopt", gradient_reads=2),
    "bitsandbytes AdamW8bit": Peer(_bitsandbytes, "bitsandbytes"),
    "torchao AdamW8bit": Peer(_torchao("AdamW8bit"), "torchao", "compiles at its first step"),
    "torchao AdamW4bit": Peer(_torchao("AdamW4bit"), "torchao", "compiles at its first step"),
    "torchao AdamWFp8": Peer(_torchao("AdamWFp8"), "torchao", "compiles at its first step"),
    "transformers Adafactor": Peer(_adafactor, "transformers", "no first moment"),
    "Adafactor8Bit": Peer(_adafactor8bit, "adafactor8bit", "first moment in 8 bits"),
    "GaLoreAdamW": Peer(_galore, "galore-torch", _LOW_RANK.format("an SVD, as in its first step")),
    "APOLLOAdamW": Peer(_apollo, "apollo-torch", _LOW_RANK.format("random numbers")),
    "TacoAdamW, reference kernel": Peer(_taco("reference"), "hf_memopt", "plain torch on tiles"),
    "TacoAdamW, inductor kernel": Peer(_taco("inductor"), "hf_memopt", "compiles at its first step"),
}


def package_version(name: str) -> str:
    """Version of the package of the optimizer `name`; empty when it is not installed."""
    if PEERS[name].package == "hf_memopt":
        import hf_memopt

        return hf_memopt.__version__
    try:
        return importlib.metadata.version(PEERS[name].package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _smollm2() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def _llama_layer() -> torch.nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    return LlamaDecoderLayer(LlamaConfig(**sizes, _attn_implementation="eager"), 0)


def _tiny() -> torch.nn.Module:
    up, down, norm = torch.nn.Linear(96, 160, bias=False), torch.nn.Linear(160, 96), torch.nn.LayerNorm(96)
    return torch.nn.ModuleDict({"up": up, "down": down, "norm": norm})


SETS: dict[str, tuple[str, Callable[[], torch.nn.Module]]] = {
    "smollm2-135m": ("all parameters of SmolLM2-135M", _smollm2),
    "llama-7b-layer": ("one layer of Llama-7B", _llama_layer),
    "tiny": ("a few small tensors, for the tests", _tiny),
}


def shapes(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a parameter set, from the model itself on the meta device; tied tensors once."""
    with torch.device("meta"):
        model = SETS[name][1]()
    return [(n, tuple(p.shape)) for n, p in model.named_parameters()]
