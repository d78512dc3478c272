"""Seconds of an optimizer step on 2048-wide layers, refreshes included: GaLoreAdamW, galore-torch, APOLLO. CPU.

Seconds are those that the process had of its core (one thread), so that other work on the machine counts less.

    python -m benchmarks.galore --steps-time

The parameters are the seven matrices of one layer: q, k, v and o of 2048 x 2048, gate and up of 5632 x 2048, down of
2048 x 5632. Every optimizer has its own weights; all read the same gradients. One process for each dtype and rank, with
one thread. In it:

1. `first`: every optimizer makes its first `FIRST` steps. galore-torch and APOLLO find all subspaces in the first one,
   GaLoreAdamW one a step; its state is allocated and its kernel compiled there too.
2. `normal`: rounds in which every optimizer makes one step without a refresh, the order rotating. Median, lowest,
   highest, and the ratio to galore-torch, round by round, so that a busy moment of the machine hits both sides.
3. `refreshes`: for GaLoreAdamW the second refresh of every matrix, one a step, now with moments to transport. Moved
   forward, so that nobody waits a gap for it. Before each comes a step without one, to compare with.

Seconds a step at a gap = the normal median + what the refreshes of all matrices take beyond a normal step / gap; the
refreshes are those of 3, for galore-torch and APOLLO those of their first step. `worst` is the slowest step of all
three parts; `largest_refresh` the largest ratio of a step with a refresh to the one before it.

State is counted by storages. galore-torch's projector is a view that keeps all singular vectors alive;
`state_bytes_of_views` is what its state would be if it kept only what it uses.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common
from benchmarks.demo import table

FOLDER = common.RESULTS / "galore"
WIDTH, INNER = 2048, 5632
GAP = 200
FIRST = 9
PEER = "galore-torch"
LEARNING_RATE = 1e-4

Built = Callable[[list[torch.nn.Parameter], int], Any]


def shapes(width: int, inner: int) -> list[tuple[int, int]]:
    return [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]


def _ours(**options: Any) -> Built:
    def build(params: list[torch.nn.Parameter], rank: int) -> Any:
        from hf_memopt.optim.galore import GaLoreAdamW

        group = {"params": params, "treatment": "projected"}
        fixed = {"update_proj_gap": GAP, "transport": "moments", "stagger": True, "scale": 1.0}
        return GaLoreAdamW([group], lr=LEARNING_RATE, rank=rank, **{"residual": "none", **fixed, **options})

    return build


def _galore_torch(params: list[torch.nn.Parameter], rank: int) -> Any:
    from galore_torch import GaLoreAdamW

    group = {"params": params, "rank": rank, "update_proj_gap": GAP, "scale": 1.0, "proj_type": "std"}
    return GaLoreAdamW([group], lr=LEARNING_RATE, no_deprecation_warning=True)


def _apollo(params: list[torch.nn.Parameter], rank: int) -> Any:
    from apollo_torch import APOLLOAdamW

    group = {"params": params, "rank": rank, "update_proj_gap": GAP, "scale": 1.0, "proj_type": "std"}
    return APOLLOAdamW([{**group, "proj": "random", "scale_type": "channel"}], lr=LEARNING_RATE)


def _adamw(params: list[torch.nn.Parameter], rank: int) -> Any:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


SUBJECTS: dict[str, Built] = {
    "torch AdamW fused": _adamw,
    PEER: _galore_torch,
    "apollo-torch": _apollo,
    "fp32, subspace": _ours(refresh="subspace"),
    "fp32, subspace, fira": _ours(refresh="subspace", residual="fira"),
    "fp32, select": _ours(refresh="select"),
    "fp32, select, fira": _ours(refresh="select", residual="fira"),
    "fp32, random": _ours(refresh="random"),
    "ternary, select": _ours(refresh="select", state="ternary"),
    "ternary, select, fira": _ours(refresh="select", residual="fira", state="ternary"),
}


class Subject:
    """One optimizer with its own weights."""

    def __init__(self, name: str, gradients: list[torch.Tensor], rank: int) -> None:
        self.name = name
        self.params = []
        generator = torch.Generator().manual_seed(0)
        for grad in gradients:
            p = torch.nn.Parameter(torch.empty_like(grad).normal_(0.0, 0.02, generator=generator))
            p.grad = grad
            self.params.append(p)
        self.optimizer = SUBJECTS[name](self.params, rank)
        self.first: list[float] = []
        self.normal: list[float] = []
        self.refreshes: list[float] = []
        self.beside: list[float] = []

    def step(self) -> float:
        start = time.process_time()
        self.optimizer.step()
        return time.process_time() - start

    @property
    def staggers(self) -> bool:
        return any("refresh_at" in state for state in self.optimizer.state.values())

    def refresh_one_by_one(self) -> None:
        """The next refresh of each matrix, one a step."""
        states = [self.optimizer.state[p] for p in self.params]
        for i, state in enumerate(states):
            state["refresh_at"] = int(state["step"]) + 2 + 2 * i
        before = [state["refreshes"] for state in states]
        for _ in states:
            self.beside.append(self.step())
            self.refreshes.append(self.step())
        if [state["refreshes"] for state in states] != [count + 1 for count in before]:
            raise RuntimeError(f"{self.name}: a matrix was not refreshed when it was due.")

    def record(self, peer: Subject) -> dict[str, Any]:
        normal = statistics.median(self.normal)
        pairs = list(zip(self.refreshes, self.beside, strict=True))
        beyond = sum(a - b for a, b in pairs) if pairs else self.first[0] - normal
        if self.name == "torch AdamW fused":
            beyond = 0.0
        worst = max(self.first + self.normal + self.beside + self.refreshes)
        state = [self.optimizer.state[p] for p in self.params]
        return {
            "first_seconds": self.first,
            "normal_seconds": self.normal,
            "refresh_seconds": self.refreshes,
            "beside_refresh_seconds": self.beside,
            "largest_refresh": max((a / b for a, b in pairs), default=None),
            "normal": spread(self.normal),
            "normal_ratio": spread([a / b for a, b in zip(self.normal, peer.normal, strict=True)]),
            "seconds_of_all_refreshes": beyond,
            "seconds_a_step": normal + beyond / GAP,
            "worst_seconds": worst,
            "worst_over_median": worst / normal,
            "state_bytes": common.storage_bytes(state),
            "state_bytes_of_views": view_bytes(state),
            "kernel": self.optimizer.kernel_name() if hasattr(self.optimizer, "kernel_name") else None,
        }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def view_bytes(value: Any) -> int:
    """Bytes of the tensors themselves, whatever storage they keep alive."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(view_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(view_bytes, value))
    return view_bytes(vars(value)) if hasattr(value, "__dict__") else 0


def measure(
    dtype: str, rank: int, rounds: int, names: list[str], *, width: int = WIDTH, inner: int = INNER
) -> dict[str, Any]:
    """All of `names`, galore-torch among them, in this process. Raises ValueError when it is not."""
    if PEER not in names:
        raise ValueError(f"everything is compared with {PEER}: leave it in.")
    generator = torch.Generator().manual_seed(1)
    gradients = [
        torch.empty(shape, dtype=getattr(torch, dtype)).normal_(0.0, 1e-3, generator=generator)
        for shape in shapes(width, inner)
    ]
    subjects = [Subject(name, gradients, rank) for name in names]
    for subject in subjects:
        count = FIRST if "hf_memopt" in type(subject.optimizer).__module__ else 2
        subject.first = [subject.step() for _ in range(count)]
        print(f"{dtype}, rank {rank}: {subject.name}: first step {subject.first[0]:.2f} s", flush=True)
    gc.collect()
    for number in range(rounds):
        for i in range(len(subjects)):
            subject = subjects[(number + i) % len(subjects)]
            subject.normal.append(subject.step())
    for subject in subjects:
        if subject.staggers:
            subject.refresh_one_by_one()
    peer = next(s for s in subjects if s.name == PEER)
    return {
        "dtype": dtype,
        "rank": rank,
        "gap": GAP,
        "rounds": rounds,
        "shapes": shapes(width, inner),
        "parameters": sum(g.numel() for g in gradients),
        "optimizers": {s.name: s.record(peer) for s in subjects},
        "machine": common.machine(),
        "versions": common.versions(),
        "git_revision": common.git_revision(),
        "source_digest": common.source_digest(),
    }


def path_of(folder: pathlib.Path, dtype: str, rank: int) -> pathlib.Path:
    return folder / f"step_{dtype}_{rank}.json"


def run(given: argparse.Namespace) -> None:
    """Each dtype and rank in a process of its own with one thread for every library from its start."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    for dtype in given.dtype:
        for rank in given.rank:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.galore_step", dtype, str(rank)]
            command += [str(given.rounds), str(path_of(given.results, dtype, rank))]
            done = subprocess.run(command, cwd=common.ROOT, env={**os.environ, **threads})
            if done.returncode:
                raise SystemExit(f"{dtype}, rank {rank} ended with status {done.returncode}")


def load(folder: pathlib.Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text(encoding="utf8")) for path in folder.glob("step_*.json")]
    return sorted(found, key=lambda r: (r["dtype"] != "float32", -r["rank"]))


def section(result: dict[str, Any]) -> str:
    """Table of one dtype and rank, as markdown."""
    peer = result["optimizers"][PEER]
    cells = [
        {
            "optimizer": name,
            "a step without refresh, median": f"{r['normal']['median']:.3f} s",
            "lowest - highest": f"{r['normal']['min']:.3f} - {r['normal']['max']:.3f} s",
            f"x {PEER}": f"{r['normal_ratio']['median']:.2f}",
            "refreshes of all matrices": f"{r['seconds_of_all_refreshes']:.2f} s",
            f"a step at gap {result['gap']}": f"{r['seconds_a_step']:.3f} s",
            f"x {PEER} ": f"{r['seconds_a_step'] / peer['seconds_a_step']:.2f}",
            "worst step": f"{r['worst_seconds']:.2f} s",
            "worst / median": f"{r['worst_over_median']:.2f}",
            "largest refresh": "" if r["largest_refresh"] is None else f"x {r['largest_refresh']:.2f}",
            "state": f"{r['state_bytes'] / 1e6:.1f} MB",
            "bits a parameter": f"{8 * r['state_bytes'] / result['parameters']:.2f}",
            "of views": f"{r['state_bytes_of_views'] / 1e6:.1f} MB",
        }
        for name, r in sorted(result["optimizers"].items(), key=lambda item: item[1]["seconds_a_step"])
    ]
    known = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if "torch" in k)
    where = f"{result['machine']['cpu']}, 1 thread, {result['rounds']} rounds; {known}."
    return f"### {result['dtype']}, rank {result['rank']}\n\n{table(cells)}\n\n{where}"


def main() -> None:
    dtype, rank, rounds, path = sys.argv[1:]
    common.write_json(pathlib.Path(path), measure(dtype, int(rank), int(rounds), list(SUBJECTS)))


if __name__ == "__main__":
    main()
