"""Seconds of a whole training step with adapters, for `benchmarks/lora.py --steps-time`. CPU, one thread.

Forward, backward and torch's AdamW (foreach) on 2 x 256 tokens through 6 Llama blocks of SmolLM2-135M's widths, and
through one block of Llama-3-8B's; LoRA on all linear layers (`lora_ways.py`). Elementwise work, recomputation above
all, has at 4096 features a seventh of the share that it has at 576. Interleaved as in `benchmarks/compact_step.py`,
which says why: in a round every way makes one step, the order rotating, and ratios are taken round by round; `seconds`
are of the process on its core, `wall_seconds` beside them. One process for each shape and dtype; its JSON is written
after every round and holds the rounds of an earlier call too, if that ran the same code.

In fp32 PEFT's adapters have the base's dtype already, so the ways with adapters in bf16 are not measured there.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import common
from benchmarks.compact_step import BATCH, DTYPES, FIRST, SIZES, TOKENS, build_model, earlier, ratios
from benchmarks.held_bytes import held_bytes
from benchmarks.lora_activations import LLAMA_3_8B
from benchmarks.lora_ways import EXACT, EXACT_ALONE, NARROW, PEFT, VELORA, VELORA_NARROW, Way, adapted

FOLDER = common.RESULTS / "lora"
LEARNING_RATE = 3e-4
SHAPES = {"smollm2-135m-blocks": SIZES, "llama-3-8b-block": LLAMA_3_8B}
BASELINE, BASELINE_NARROW = Way(memory=PEFT), Way(memory=NARROW)
WAYS = [
    BASELINE,
    BASELINE_NARROW,
    Way(memory=VELORA),
    Way(memory=VELORA_NARROW),
    Way(memory=PEFT, checkpointing=True),
    Way(memory=EXACT),
    Way(memory=EXACT_ALONE),
    Way(memory="compressed:0.25:none"),
    Way(memory="compressed:0.125:none"),
    Way(memory="compressed:0.125"),
    Way(memory=EXACT, checkpointing=True),
]


def ways_of(dtype: str) -> list[Way]:
    """Those that differ in this dtype."""
    return [way for way in WAYS if dtype != "float32" or not way.narrow]


class Subject:
    """One way with its own model."""

    def __init__(self, way: Way, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
        self.model, _ = adapted(build_model(dtype, sizes), way)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, foreach=True)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def step(self, ids: torch.Tensor) -> tuple[float, float, float]:
        """(seconds of the process, seconds that passed, loss)"""
        start, began = time.process_time(), time.perf_counter()
        loss = self.loss(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.process_time() - start, time.perf_counter() - began, float(loss.detach())


def measure(
    dtype: str, rounds: int, path: pathlib.Path, ways: list[Way] | None = None, sizes: dict[str, Any] = SIZES
) -> dict[str, Any]:
    """Go on with the rounds in ``path`` until there are ``rounds``; the record."""
    ways = ways_of(dtype) if ways is None else ways
    record = earlier(path, sizes, {way.name for way in ways})
    done = len(record["configurations"][BASELINE.name]["seconds"]) if record else 0
    if record and done >= rounds:
        return record
    ids = torch.randint(0, sizes["vocab_size"], (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    built = {way.name: Subject(way, getattr(torch, dtype), sizes) for way in ways}
    for subject in built.values():
        for _ in range(FIRST):
            subject.step(ids)
    record = record or {
        "dtype": dtype,
        "sizes": sizes,
        "tokens": [BATCH, TOKENS],
        "configurations": {
            way.name: {
                "options": asdict(way),
                "activation_bytes": held_bytes(built[way.name].model, lambda way=way: built[way.name].loss(ids))[0],
                "seconds": [],
                "wall_seconds": [],
                "losses": [],
            }
            for way in ways
        },
        "machine": common.machine(),
        "versions": common.versions(),
        "git_revision": common.git_revision(),
        "source_digest": common.source_digest(),
    }
    names = list(built)
    for number in range(done, rounds):
        for i in range(len(names)):
            name = names[(number + i) % len(names)]
            seconds, passed, loss = built[name].step(ids)
            for key, value in (("seconds", seconds), ("wall_seconds", passed), ("losses", loss)):
                record["configurations"][name][key].append(value)
        common.write_json(path, record)
        print(f"{dtype}: round {number + 1} of {rounds}", flush=True)
    return record


def ratio(record: dict[str, Any], name: str, to: str) -> float | None:
    """Their median; None where one has not been measured."""
    found = record["configurations"]
    return statistics.median(ratios(record, name, to)) if name in found and to in found else None


def path_of(folder: pathlib.Path, shape: str, dtype: str) -> pathlib.Path:
    return folder / "step" / f"{shape}-{dtype}.json"


def run(shapes: list[str], dtypes: list[str], rounds: int, folder: pathlib.Path = FOLDER) -> None:
    """Each shape and dtype in a process of its own, with one thread for every library from its start."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    for shape in shapes:
        for dtype in dtypes:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lora_step", shape, dtype, str(rounds)]
            command.append(str(path_of(folder, shape, dtype)))
            done = subprocess.run(command, cwd=common.ROOT, env={**os.environ, **threads})
            if done.returncode:
                raise SystemExit(f"{shape}, {dtype} ended with status {done.returncode}")


def load(folder: pathlib.Path = FOLDER) -> dict[tuple[str, str], dict[str, Any]]:
    """(shape, dtype) -> record."""
    paths = {(shape, dtype): path_of(folder, shape, dtype) for shape in SHAPES for dtype in DTYPES}
    return {key: json.loads(p.read_text(encoding="utf8")) for key, p in paths.items() if p.is_file()}


def main() -> None:
    shape, dtype, rounds, path = sys.argv[1:]
    torch.set_num_threads(1)
    measure(dtype, int(rounds), pathlib.Path(path), sizes=SHAPES[shape])


if __name__ == "__main__":
    main()
