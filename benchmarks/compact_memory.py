"""Peak memory of full fine-tuning at 7B by the memory simulation, for `benchmarks/compact.py --memory`.

Llama-2-7B's shapes in bf16, one sequence of 2048 tokens, the loss that transformers computes; with and without gradient
checkpointing, with and without update in backward. Two whole iterations of the real model and the real optimizer on
tensors without storage; the second is reported. CompAct at rank 1/4 with recomputation, its default.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import common
from benchmarks.fits import Case, model_of, optimizer_of
from hf_memopt import CompActConfig, compress_activations
from hf_memopt.memory.simulate import simulate

FOLDER = common.RESULTS / "compact" / "memory"
TOKENS = 2048


@dataclass(frozen=True)
class Training:
    """One simulation. ``recompute`` is for optimizers that do not patch the model themselves."""

    optimizer: str
    checkpointing: bool
    recompute: bool = False

    @property
    def name(self) -> str:
        parts = self.optimizer, "recompute" if self.recompute else "", "checkpointing" if self.checkpointing else ""
        return "+".join(filter(None, parts))


TRAININGS = [
    *(Training(name, on) for name in ("adamw_torch", "taco_adamw") for on in (False, True)),
    *(
        Training(f"{name}{suffix}", on)
        for name in ("compact_adamw", "compact_taco_adamw")
        for suffix in ("", "_layerwise")
        for on in (False, True)
    ),
    *(Training("taco_adamw_layerwise", on) for on in (False, True)),
    Training("taco_adamw", False, recompute=True),
    Training("taco_adamw_layerwise", False, recompute=True),
]


def builder(training: Training, case: Case) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    chosen = optimizer_of(case)
    if not training.recompute:
        return chosen

    def build(model: torch.nn.Module) -> torch.optim.Optimizer:
        compress_activations(model, CompActConfig(rank=None))
        return chosen(model)

    return build


def run(folder: pathlib.Path = FOLDER, size: str = "7b", layers: int | None = None, tokens: int = TOKENS) -> None:
    """Every training that has no file yet."""
    for training in TRAININGS:
        path = folder / f"{training.name}.json"
        if path.is_file():
            continue
        case = Case(training.optimizer, size=size, layers=layers, tokens=tokens)
        given = {"tokens": tokens, "gradient_checkpointing": training.checkpointing}
        memory = simulate(model_of(case), builder(training, case), **given)
        record = {
            "name": training.name,
            "training": asdict(training),
            "case": asdict(case),
            "memory": memory.as_dict(),
            "versions": common.versions(),
            "git_revision": common.git_revision(),
            "source_digest": common.source_digest(),
        }
        common.write_json(path, record)
        print(f"{training.name}: {memory.peak_bytes / 2**30:.2f} GiB in {memory.peak_phase}", flush=True)


def load(folder: pathlib.Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Name -> record of those that exist, in the order of TRAININGS."""
    paths = {t.name: folder / f"{t.name}.json" for t in TRAININGS}
    return {name: json.loads(p.read_text(encoding="utf8")) for name, p in paths.items() if p.is_file()}
