"""The optimizer state of Llama 2 7B, counted: GaLore's headline, 65.5 % less than 8-bit Adam. Needs no GPU and no time.

    python -m benchmarks.galore_state

Ours are real buffers of the real optimizer: its state is created on the meta device, where storages have sizes and no
memory. The others are counted by their layouts, which the test holds equal to the state that bitsandbytes and
galore-torch really make:

- 8-bit Adam (bitsandbytes): from 4096 elements on two bytes an element and two fp32 scales a block of 256, fp32 below;
- 8-bit GaLore, as in the paper: the same of the projected gradients, the projector in the weights' bf16; embeddings,
  output head and norms by 8-bit Adam;
- galore-torch: moments and projector in the gradients' dtype.

One number a quantile map and a step counter is left out. One JSON file, `benchmarks/results/galore/state_7b.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from hf_memopt.parsing import parse_options
from hf_memopt.projections.geometry import Subspace, subspace
from hf_memopt.registry import get_optimizer

PATH = common.RESULTS / "galore" / "state_7b.json"
LLAMA_2_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
RANKS = (1024, 0.25, 0.125)
BLOCK = 256
SMALLEST_8BIT = 4096
PAPER = {"rank": 1024, "less_than_8bit_adam": 0.655, "less_than_bf16_adam": 0.825}
"""What arXiv 2403.03507 says of 8-bit GaLore on this model."""
OURS = (
    ("memopt_galore_adamw", "subspace"),
    ("memopt_galore_adamw", "select"),
    ("memopt_galore_adamw", "random"),
    ("galore_taco_adamw", "subspace"),
    ("galore_taco_adamw", "select"),
    ("galore_taco_adamw", "random"),
)
RATES = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def llama(**config: Any) -> nn.Module:
    """The model on the meta device, bf16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**(LLAMA_2_7B | config)), dtype=torch.bfloat16)


def targets(model: nn.Module) -> set[str]:
    """Names of what the paper projects: the matrices of attention and MLP."""
    heads = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    return {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) not in heads}


# -- layouts of others -------------------------------------------------------------------------------------------------


def adam(itemsize: int) -> Callable[[int], int]:
    """Bytes of Adam's two moments of so many elements."""
    return lambda elements: 2 * itemsize * elements


def adam_8bit(elements: int) -> int:
    """Bytes of bitsandbytes' 8-bit Adam, blockwise."""
    if elements < SMALLEST_8BIT:
        return adam(4)(elements)
    return 2 * (elements + 4 * -(-elements // BLOCK))


def galore(moments: Callable[[int], int], projector_itemsize: int) -> Callable[[Subspace], int]:
    """Bytes of GaLore's state of one matrix: moments of r x L, projector of d x r."""

    def state(space: Subspace) -> int:
        projector = projector_itemsize * space.dimension * space.rank
        return moments(space.rank * space.length) + projector

    return state


THEIRS = {
    "galore-torch fp32": (adam(4), galore(adam(4), 4)),
    "galore-torch bf16": (adam(2), galore(adam(2), 2)),
    "8-bit GaLore": (adam_8bit, galore(adam_8bit, 2)),
}
FULL_RANK = {"Adam fp32": adam(4), "Adam bf16": adam(2), "8-bit Adam": adam_8bit}


# -- ours --------------------------------------------------------------------------------------------------------------


def our_optimizer(model: nn.Module, name: str, rank: float, refresh: str) -> torch.optim.Optimizer:
    """With the projector in int8, without a residual, everything else by default."""
    spec = get_optimizer(name)
    options = {"rank": rank, "refresh": refresh, "projector": "int8", "residual": "none"}
    cls, kwargs = spec.load_builder()(model, parse_options(spec.options, options, strategy=name), **RATES)
    return cls(**kwargs)


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages; those of meta tensors have no address, so they are told apart as objects."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def our_state(model: nn.Module, name: str, rank: float, refresh: str) -> tuple[int, int]:
    """Bytes of the state of projected matrices, and of everything else, in buffers that the optimizer makes.

    Of parameters of one group and shape, one has its state made: the buffers of the others are as large.
    """
    optimizer = our_optimizer(model, name, rank, refresh)
    projected, others, known = 0, 0, {}
    for group, _, p in optimizer.named_params():
        kind = id(group), p.shape
        if kind not in known:
            known[kind] = storages(value for value in optimizer.state_of(group, p).values() if torch.is_tensor(value))
        if group["treatment"] == "projected":
            projected += known[kind]
        else:
            others += known[kind]
    return projected, others


# -- the table ---------------------------------------------------------------------------------------------------------


def rows(model: nn.Module, ranks: Iterable[float] = RANKS) -> list[dict[str, Any]]:
    """One row an optimizer and rank."""
    names = targets(model)
    matrices = [p for n, p in model.named_parameters() if n in names]
    rest = [p for n, p in model.named_parameters() if n not in names]
    found = []

    def add(optimizer: str, rank: float | None, projected: int, others: int) -> None:
        elements = sum(p.numel() for p in matrices)
        found.append(
            {
                "optimizer": optimizer,
                "rank": rank,
                "state_bytes": projected + others,
                "projected_bytes": projected,
                "other_bytes": others,
                "bits_per_projected_parameter": 8 * projected / elements,
            }
        )

    for optimizer, moments in FULL_RANK.items():
        add(optimizer, None, *(sum(moments(p.numel()) for p in part) for part in (matrices, rest)))
    for rank in ranks:
        for optimizer, (moments, state) in THEIRS.items():
            others = sum(moments(p.numel()) for p in rest)
            add(optimizer, rank, sum(state(subspace(p.shape, rank)) for p in matrices), others)
        for name, refresh in OURS:
            add(f"{name}, {refresh}", rank, *our_state(model, name, rank, refresh))
    by_name = {row["optimizer"]: row["state_bytes"] for row in found}
    for row in found:
        row["less_than_8bit_adam"] = 1 - row["state_bytes"] / by_name["8-bit Adam"]
        row["less_than_bf16_adam"] = 1 - row["state_bytes"] / by_name["Adam bf16"]
    return found


def table(found: Iterable[dict[str, Any]]) -> str:
    lines = [
        "| optimizer | rank | state, GB | less than 8-bit Adam | less than bf16 Adam | bits a projected parameter |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for row in found:
        cells = (
            row["optimizer"],
            "" if row["rank"] is None else f"{row['rank']:g}",
            f"{row['state_bytes'] / 1e9:.2f}",
            f"{100 * row['less_than_8bit_adam']:.1f} %",
            f"{100 * row['less_than_bf16_adam']:.1f} %",
            f"{row['bits_per_projected_parameter']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    model = llama()
    record = {
        "config": LLAMA_2_7B,
        "parameters": sum(p.numel() for p in model.parameters()),
        "paper": PAPER,
        "rows": rows(model),
        "versions": common.versions(),
        "revision": common.git_revision(),
        "source": common.source_digest(),
    }
    common.write_json(PATH, record)
    print(table(record["rows"]))


if __name__ == "__main__":
    main()
