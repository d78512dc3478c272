"""What fits on a card: peak memory of full fine-tuning by the memory simulation. Needs no GPU.

    python -m benchmarks.fits                    # every case that has no result yet, then the page
    python -m benchmarks.fits --only taco_adamw_layerwise-7b-2048
    python -m benchmarks.fits --tables           # page and plot from the JSON files, nothing is simulated
    python -m benchmarks.fits --tables --readme  # also the table of cards in README.md

Llama's architecture, bf16 weights, batch 1, gradient checkpointing (non-reentrant), the loss that transformers computes
unless the case says otherwise. Every case runs two whole iterations of the real model and optimizer on tensors without
storage (`hf_memopt/memory/simulate.py`); the second is reported. Questions such as the longest sequence are answered by
further cases: the answer fits, the next larger one does not. A card's room is 97.5 % of its memory, which is
what CUDA reports, less `--reserve` for what the simulation cannot see: context, workspaces inside kernels,
fragmentation.

One JSON file a case in `benchmarks/results/fits/`, in bytes. A case of 7B takes about half a minute of a free core.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import hf_memopt
from benchmarks import common
from benchmarks.chunked_loss import chunked_loss
from hf_memopt.integrations.trainer import no_decay_names
from hf_memopt.memory.peak import peak_resident_bytes
from hf_memopt.memory.simulate import SimulatedMemory, causal_lm_loss, simulate
from hf_memopt.parsing import parse_options

FOLDER = common.RESULTS / "fits"
GIB = 2**30
RESERVE_GIB = 0.7
USABLE = 0.975
"""Share of a card's nominal memory that CUDA reports: 23.5 GiB of a 24 GB card, 31.4 of one of 32 GB."""
SIZES = {
    # Llama 3.2 1B and 3B, Llama 2 7B and 13B
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "3b": {
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
VOCABULARY = 32000
LOSSES = {"": causal_lm_loss, "chunked": chunked_loss}
ADAMW, ADAMW_FP32 = "adamw_torch", "adamw-fp32-state"
OURS = ("taco_adamw_layerwise", "taco_layerwise")


@dataclass(frozen=True)
class Case:
    """One simulation. `layers` of None are the size's own."""

    optimizer: str
    size: str = "7b"
    tokens: int = 2048
    layers: int | None = None
    loss: str = ""

    @property
    def name(self) -> str:
        size = self.size if self.layers is None else f"{self.size}-{self.layers}layers"
        return "-".join(part for part in (self.optimizer, size, str(self.tokens), self.loss) if part)


@dataclass(frozen=True)
class Question:
    """The largest value of a case's `field`, in whole `step`s, that a card of `gib` has room for."""

    what: str
    case: Case
    field: str
    step: int
    gib: int

    @property
    def name(self) -> str:
        return f"largest-{self.field}-{self.gib}gib-{self.case.name}"


TABLE = [
    Case(ADAMW_FP32),
    Case(ADAMW),
    Case("taco_adamw"),
    *(Case(name) for name in OURS),
    *(Case(name, loss="chunked") for name in OURS),
    *(Case(name, size="13b") for name in OURS),
    *(Case(name, size=size) for size in ("1b", "3b") for name in (ADAMW, "taco_adamw", *OURS)),
]
QUESTIONS = [
    question
    for name in OURS
    for question in (
        Question("longest sequence of 7B", Case(name), "tokens", 256, 24),
        Question("longest sequence of 7B, loss in chunks", Case(name, loss="chunked"), "tokens", 256, 24),
        Question("most layers of 7B's width", Case(name, layers=36), "layers", 1, 24),
    )
]


def model_of(case: Case) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = {"vocab_size": VOCABULARY} | SIZES[case.size]
        sizes |= {} if case.layers is None else {"num_hidden_layers": case.layers}
        config = LlamaConfig(max_position_embeddings=case.tokens, **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    return build


def optimizer_of(case: Case) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    def build(model: torch.nn.Module) -> torch.optim.Optimizer:
        if case.optimizer == ADAMW:
            return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
        if case.optimizer == ADAMW_FP32:  # torch's keeps its moments in the weights' dtype; this one in fp32
            return hf_memopt.TacoAdamW([{"params": list(model.parameters()), "treatment": "dense"}], lr=1e-5)
        spec = hf_memopt.get_optimizer(case.optimizer)
        options = parse_options(spec.options, None, strategy=case.optimizer, preset=spec.preset)
        rates = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        cls, kwargs = spec.load_builder()(model, options, **rates, no_decay=no_decay_names(model), target_modules=None)
        return cls(**kwargs)

    return build


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """The case's record, simulated unless its file exists."""
    path = folder / f"{case.name}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf8"))
    print(f"{case.name} ...", flush=True)
    memory = simulate(model_of(case), optimizer_of(case), tokens=case.tokens, loss=LOSSES[case.loss])
    record = {
        "case": asdict(case),
        "memory": memory.as_dict(),
        "host_peak_bytes": peak_resident_bytes(),
        "versions": common.versions(),
        "revision": common.git_revision(),
        "source": common.source_digest(),
    }
    common.write_json(path, record)
    print(said(case, memory), flush=True)
    return record


def said(case: Case, memory: SimulatedMemory) -> str:
    return f"{case.name}: {memory.peak_bytes / GIB:.2f} GiB in {memory.peak_phase}, {memory.seconds:.0f} s"


def room_bytes(gib: float, reserve: float) -> float:
    """What a training may take of a card of nominally ``gib``."""
    return (gib * USABLE - reserve) * GIB


def answer(question: Question, folder: pathlib.Path, reserve: float) -> dict[str, Any]:
    """The largest value that fits and the proof: the next larger one does not."""
    room = room_bytes(question.gib, reserve)

    def peak(steps: int) -> int:
        case = Case(**{**asdict(question.case), question.field: steps * question.step})
        return run(case, folder)["memory"]["peak_bytes"]

    low = getattr(question.case, question.field) // question.step
    known = {low: peak(low)}
    if known[low] > room:
        return {"fits": None, "room_bytes": int(room), "peak_bytes": known[low], "smallest": low * question.step}
    high = None
    guess = low + max(1, low // 8)
    while high is None or high - low > 1:
        known[guess] = peak(guess)
        low, high = (guess, high) if known[guess] <= room else (low, guess)
        # the line through the two nearest points, kept between what fits and what does not
        a, b = sorted(known, key=lambda steps: abs(known[steps] - room))[:2]
        slope = (known[b] - known[a]) / (b - a)
        guess = int(a + (room - known[a]) / slope)
        if guess <= low:
            guess = low + 1
        if high is not None:
            guess = min(guess, high - 1) if guess >= high else guess
    return {
        "fits": low * question.step,
        "peak_bytes": known[low],
        "next": high * question.step,
        "next_peak_bytes": known[high],
        "room_bytes": int(room),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases and questions, as their files")
    parser.add_argument("--reserve", type=float, default=RESERVE_GIB, help="GiB of a card that are kept free")
    parser.add_argument("--results", type=pathlib.Path, default=FOLDER)
    parser.add_argument("--tables", action="store_true", help="only write the page and the plot")
    parser.add_argument("--readme", action="store_true", help="also write the table of cards into README.md")
    given = parser.parse_args()
    wanted = [*TABLE, *QUESTIONS]
    unknown = set(given.only or ()) - {one.name for one in wanted}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in wanted)}")
    for one in () if given.tables else wanted:
        if given.only and one.name not in given.only:
            continue
        if isinstance(one, Case):
            run(one, given.results)
            continue
        found = {
            "what": one.what,
            "gib": one.gib,
            "reserve_gib": given.reserve,
            **answer(one, given.results, given.reserve),
        }
        common.write_json(given.results / "answers" / f"{one.name}.json", {**found, "case": asdict(one.case)})
        print(f"{one.name}: {found['fits']}", flush=True)
    from benchmarks.fits_page import cards_block, write_page
    from benchmarks.tables import replace_block

    print(write_page(given.results))
    if given.readme:
        path = common.ROOT / "README.md"
        block = cards_block(given.results, given.reserve)
        path.write_text(replace_block(path.read_text(encoding="utf8"), "cards", block), encoding="utf8")


if __name__ == "__main__":
    main()
