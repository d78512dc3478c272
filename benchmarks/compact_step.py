"""Seconds of a whole training step, for `benchmarks/compact.py --steps-time`. CPU, one thread.

Forward, backward, optimizer and folding of 2 x 256 tokens through Llama blocks of SmolLM2-135M's widths: 6 of its 30,
so that all configurations stay in memory together, and a fifth of its vocabulary, so that the output head has the share
of the work that it has in the whole model. One process for each dtype. In a round every configuration makes one step,
the order rotating; ratios are taken round by round, so a busy moment of the machine hits both sides. Each configuration
first makes `FIRST` steps that are not counted: state is allocated, the kernel compiled, coordinates are chosen.

`seconds` are of the process on its core, so waiting for a core that others use is not in them; with one thread they are
those of a free machine, but for caches and memory that are shared. `wall_seconds` are beside them.

Plain is torch's AdamW (foreach); the package's own AdamW kernel, which CompAct uses, stands beside it. Peak memory is
simulated for the same training (`hf_memopt/memory/simulate.py`).

The JSON is written after every round and holds the rounds of an earlier call too, if that ran the same code.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from benchmarks import common
from benchmarks.compact_activations import CHECKPOINTING, PLAIN, RECOMPUTE, Way
from hf_memopt import TacoAdamW, compress_activations
from hf_memopt.memory.simulate import simulate

FOLDER = common.RESULTS / "compact"
DTYPES = ("float32", "bfloat16")
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 9830,
    "tie_word_embeddings": True,
}
BATCH, TOKENS = 2, 256
FIRST = 2
LEARNING_RATE = 1e-4
TORCH, OURS = "torch AdamW foreach", "package's AdamW"
PLAIN_TORCH, PLAIN_OURS = f"plain, {TORCH}", f"plain, {OURS}"

Subjects = dict[str, tuple[Way, str]]
QUARTER = [Way(recompute=True, rank=0.25, projection=kind) for kind in ("principal", "orthonormal", "gaussian")]
PAPER = Way(rank=0.25, projection="gaussian")
SUBJECTS: Subjects = {
    PLAIN_TORCH: (PLAIN, TORCH),
    PLAIN_OURS: (PLAIN, OURS),
    CHECKPOINTING.name: (CHECKPOINTING, TORCH),
    RECOMPUTE.name: (RECOMPUTE, TORCH),
    **{way.name: (way, OURS) for way in (*QUARTER, Way(rank=0.25, projection="principal"), PAPER)},
}


def build_model(dtype: torch.dtype, sizes: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=TOKENS, **sizes)).to(dtype)


def build_optimizer(way: Way, optimizer: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Patches the model too."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        config = way.config()
        if config is not None:
            compress_activations(model, config)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if optimizer == TORCH:
            return torch.optim.AdamW([p for _, p in named], lr=LEARNING_RATE, weight_decay=0.0, foreach=True)
        group = {"params": named, "treatment": "dense"}
        return TacoAdamW([group], lr=LEARNING_RATE, weight_decay=0.0)

    return build


class Subject:
    """One configuration with its own model."""

    def __init__(self, way: Way, optimizer: str, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
        self.model = build_model(dtype, sizes)
        if way.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.optimizer = build_optimizer(way, optimizer)(self.model)

    def step(self, ids: torch.Tensor) -> tuple[float, float, float]:
        """(seconds of the process, seconds that passed, loss)"""
        start, began = time.process_time(), time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.process_time() - start, time.perf_counter() - began, float(loss.detach())


def simulated_peaks(way: Way, optimizer: str, dtype: torch.dtype, sizes: dict[str, Any]) -> dict[str, int]:
    """Phase -> bytes at its highest moment."""
    memory = simulate(
        lambda: build_model(dtype, sizes),
        build_optimizer(way, optimizer),
        tokens=TOKENS,
        batch=BATCH,
        gradient_checkpointing=way.checkpointing,
    )
    return {phase: peak.nbytes for phase, peak in memory.phases.items()}


def measure(
    dtype: str, rounds: int, path: pathlib.Path, subjects: Subjects = SUBJECTS, sizes: dict[str, Any] = SIZES
) -> dict[str, Any]:
    """Go on with the rounds in ``path`` until there are ``rounds``; the record."""
    kind = getattr(torch, dtype)
    record = earlier(path, sizes, subjects) or {
        "dtype": dtype,
        "sizes": sizes,
        "tokens": [BATCH, TOKENS],
        "configurations": {
            name: {
                "options": asdict(way),
                "optimizer": optimizer,
                "simulated_peak_bytes": simulated_peaks(way, optimizer, kind, sizes),
                "seconds": [],
                "wall_seconds": [],
                "losses": [],
            }
            for name, (way, optimizer) in subjects.items()
        },
        "machine": common.machine(),
        "versions": common.versions(),
        "git_revision": common.git_revision(),
        "source_digest": common.source_digest(),
    }
    done = len(record["configurations"][PLAIN_TORCH]["seconds"])
    if done >= rounds:
        return record
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, sizes["vocab_size"], (BATCH, TOKENS), generator=generator)
    built = {name: Subject(*subject, kind, sizes) for name, subject in subjects.items()}
    for name, subject in built.items():
        first = [subject.step(ids)[0] for _ in range(FIRST)]
        print(f"{dtype}: {name}: first step {first[0]:.2f} s", flush=True)
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


def earlier(path: pathlib.Path, sizes: dict[str, Any], subjects: Collection[str]) -> dict[str, Any] | None:
    """The rounds of an earlier call of the same code for the same configurations, by name."""
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf8"))
    same = record["source_digest"] == common.source_digest() and record["sizes"] == sizes
    return record if same and set(record["configurations"]) == set(subjects) else None


def ratios(record: dict[str, Any], name: str, to: str) -> list[float]:
    """Seconds of ``name`` over those of ``to``, round by round."""
    found = record["configurations"]
    return [a / b for a, b in zip(found[name]["seconds"], found[to]["seconds"], strict=True)]


def rows(record: dict[str, Any]) -> list[dict[str, str]]:
    """A row a configuration; medians."""
    cells, known = [], record["configurations"]
    for name, found in sorted(known.items(), key=lambda item: [*SUBJECTS, item[0]].index(item[0])):
        of = {to: ratios(record, name, to) for to in (PLAIN_TORCH, PLAIN_OURS)}
        cells.append(
            {
                "configuration": name,
                "optimizer": found["optimizer"],
                "seconds a step": f"{statistics.median(found['seconds']):.3f}",
                "lowest - highest": f"{min(found['seconds']):.3f} - {max(found['seconds']):.3f}",
                f"x {PLAIN_TORCH}": f"{statistics.median(of[PLAIN_TORCH]):.3f}",
                f"x {PLAIN_OURS}": f"{statistics.median(of[PLAIN_OURS]):.3f}",
                "passed": f"{statistics.median(found['wall_seconds']):.3f}",
                "peak of backward, simulated": f"{found['simulated_peak_bytes']['backward'] / 1e6:,.0f} MB",
                "of the optimizer": f"{found['simulated_peak_bytes']['step'] / 1e6:,.0f} MB",
            }
        )
    return cells


def path_of(folder: pathlib.Path, dtype: str) -> pathlib.Path:
    return folder / f"step_{dtype}.json"


def run(dtypes: list[str], rounds: int, folder: pathlib.Path = FOLDER) -> None:
    """Each dtype in a process of its own, with one thread for every library from its start."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    for dtype in dtypes:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compact_step", dtype, str(rounds)]
        done = subprocess.run([*command, str(path_of(folder, dtype))], cwd=common.ROOT, env={**os.environ, **threads})
        if done.returncode:
            raise SystemExit(f"{dtype} ended with status {done.returncode}")


def load(folder: pathlib.Path = FOLDER) -> list[dict[str, Any]]:
    paths = [path_of(folder, dtype) for dtype in DTYPES]
    return [json.loads(p.read_text(encoding="utf8")) for p in paths if p.is_file()]


def main() -> None:
    dtype, rounds, path = sys.argv[1:]
    torch.set_num_threads(1)
    measure(dtype, int(rounds), pathlib.Path(path))


if __name__ == "__main__":
    main()
