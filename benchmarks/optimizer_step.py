"""Seconds and memory of one optimizer step, ours and others', side by side. CPU.

    python -m benchmarks.optimizer_step --set smollm2-135m --dtype float32 --threads 1
    python -m benchmarks.optimizer_step --all          # both sets, both dtypes, 1 and 2 threads
    python -m benchmarks.optimizer_step --tables       # table and plot from the JSON files, nothing is measured

How: every optimizer (`benchmarks/optimizers.py`) is measured in a process of its own together with the anchors: torch
fused AdamW, torch foreach AdamW, TacoAdamW and a plain copy of memory. Each has its own parameters and gradients. In a
round every one of them makes one step; the order rotates from round to round. Given are median, lowest and highest of
the rounds, and the ratio to each anchor, round by round, so that a busy moment of the machine hits both sides. Steps
that initialise (state, compilation, projectors) are made before: two of them, the first one's time is kept. An
optimizer that needs over 2 s a step gets fewer rounds.

State is counted by the storages of everything that `optimizer.state` holds on to, objects included. Temporaries are
the rise of the process's resident memory during a step (VmHWM after a reset, less VmRSS before) with the C library told
to take every block of 64 KiB or more from the system and to give it back at once; this happens after the timing, sees
the memory of C code too, and has an error of about 1 MB. Linux with glibc only; elsewhere not measured.

One JSON file for each set, dtype and number of threads, written after every optimizer; calling again goes on where the
last call stopped, and measures again what another version of the package was measured with (unless `--keep`).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common
from benchmarks.optimizers import ANCHORS, PEERS, SETS, package_version, shapes

FOLDER = common.RESULTS / "optimizer_step"
DTYPES = ("float32", "bfloat16")
COPY = "copy"
COPY_BYTES = 1 << 28
WARM_UP = 2
ROUNDS_OF_THE_SLOW = ((2.0, 5), (10.0, 3))
"""(seconds a step, most rounds)"""


class Subject:
    """An optimizer with its own weights and gradients."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        dtype = getattr(torch, given.dtype)
        generator = torch.Generator().manual_seed(0)
        named = []
        for path, shape in shapes(given.set):
            p = torch.nn.Parameter(torch.empty(shape, dtype=dtype).normal_(0.0, 0.02, generator=generator))
            p.grad = torch.empty_like(p).normal_(0.0, 1e-3, generator=generator)
            named.append((path, p))
        self.name = name
        self.params = [p for _, p in named]
        self.optimizer = PEERS[name].build(named)
        self.seconds: list[float] = []

    def step(self) -> float:
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start

    def warm_up(self) -> None:
        self.first_seconds, *rest = (self.step() for _ in range(WARM_UP))
        self.steady_seconds = min(rest)
        self.bytes = common.state_bytes(self.optimizer)

    def round(self) -> None:
        self.seconds.append(self.step())


class Copy:
    """Memory copied to memory, as fast as torch does it: the bandwidth that a step could have."""

    name = COPY

    def __init__(self, size: int) -> None:
        self.source, self.target = torch.ones(size // 4), torch.zeros(size // 4)
        self.moved_bytes = 2 * self.source.nbytes
        self.seconds: list[float] = []

    def round(self) -> None:
        start = time.perf_counter()
        self.target.copy_(self.source)
        self.seconds.append(time.perf_counter() - start)


def resident_bytes() -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def temporaries(step: Callable[[], Any]) -> int | None:
    """Highest rise of resident memory during a step, in bytes, of two steps; None where it cannot be measured. From
    this call on every block of 64 KiB or more comes from the system, which is slow: nothing is timed afterwards."""
    try:
        libc = ctypes.CDLL(None)
        mallopt, trim = libc.mallopt, libc.malloc_trim
        resident_bytes()
    except (AttributeError, OSError, StopIteration):
        return None
    mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    rises = []
    for _ in range(2):
        gc.collect()
        trim(0)
        common.reset_peak_memory()
        before = resident_bytes()
        step()
        rises.append(max(0, common.peak_memory_bytes() - before))
    return max(rises)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The record of one optimizer, measured in this process beside the anchors."""
    torch.set_num_threads(given.threads)
    try:
        subject = Subject(name, given)
        subject.warm_up()
    except Exception as error:  # whatever a package does here is a finding about it
        if name in ANCHORS:
            raise
        return {"unavailable": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    subjects = [subject]
    for anchor in ANCHORS:
        if anchor != name:
            subjects.append(Subject(anchor, given))
            subjects[-1].warm_up()
    copy = Copy(1 << 20 if given.set == "tiny" else COPY_BYTES)
    copy.target.copy_(copy.source)
    everyone: list[Subject | Copy] = [*subjects, copy]
    rounds = min([given.rounds, *(n for limit, n in ROUNDS_OF_THE_SLOW if subject.steady_seconds > limit)])
    for i in range(rounds):
        for j in range(len(everyone)):
            everyone[(i + j) % len(everyone)].round()
    parameters = sum(p.numel() for p in subject.params)
    record = {
        "seconds": spread(subject.seconds),
        "first_step_seconds": subject.first_seconds,
        "rounds": rounds,
        "steps_seconds": {e.name: e.seconds for e in everyone},
        "ratio": {
            e.name: spread([a / b for a, b in zip(subject.seconds, e.seconds, strict=True)])
            for e in subjects
            if e is not subject
        },
        "copy_bytes_a_second": copy.moved_bytes / statistics.median(copy.seconds),
        "state_bytes": subject.bytes,
        "bits_per_parameter": 8 * subject.bytes / parameters,
    }
    reads = PEERS[name].gradient_reads
    if reads:
        weights, gradients = (common.storage_bytes(x) for x in (subject.params, [p.grad for p in subject.params]))
        moved = 2 * weights + reads * gradients + 2 * subject.bytes
        record["bytes_moved_a_parameter"] = moved / parameters
        record["bytes_moved_a_second"] = moved / record["seconds"]["median"]
    del subjects, everyone, copy
    record["temporaries_bytes"] = temporaries(subject.step)
    return record


def path_of(given: argparse.Namespace) -> pathlib.Path:
    return given.results / f"{given.set}-{given.dtype}-{given.threads}t.json"


def in_a_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a new process with the number of threads set for every library from its start."""
    threads = {k: str(given.threads) for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    environment = {**os.environ, **threads, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "record.json"
        what = ["--set", given.set, "--dtype", given.dtype, "--threads", str(given.threads)]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.optimizer_step", *what]
        command += ["--rounds", str(given.rounds), "--measure", name, "--out", str(out)]
        done = subprocess.run(command, cwd=common.ROOT, env=environment)
        if out.exists():
            return json.loads(out.read_text(encoding="utf8"))
    if name in ANCHORS:
        raise SystemExit(f"Measuring {name} ended with status {done.returncode}; its messages stand above.")
    return {"unavailable": f"the process ended with status {done.returncode}"}


def run(given: argparse.Namespace) -> None:
    """Measure what is missing of one set, dtype and number of threads."""
    path = path_of(given)
    content = json.loads(path.read_text(encoding="utf8")) if path.exists() else {"optimizers": {}}
    revision, digest = common.git_revision(), common.source_digest()
    known = shapes(given.set)
    bits = {"float32": 32, "bfloat16": 16}[given.dtype]
    parameters = sum(torch.Size(shape).numel() for _, shape in known)
    for name in given.only or PEERS:
        old = content["optimizers"].get(name, {})
        if "seconds" in old and (given.keep or old["source"] == digest) and old["requested_rounds"] == given.rounds:
            print(f"{path.stem}: {name}: measured before", flush=True)
            continue
        print(f"{path.stem}: {name} ...", flush=True)
        record = in_a_process(name, given)
        record |= {"revision": revision, "source": digest, "version": package_version(name), "note": PEERS[name].note}
        content["optimizers"][name] = record | {"requested_rounds": given.rounds}
        content |= {
            "set": given.set,
            "what": SETS[given.set][0],
            "tensors": len(known),
            "parameters": parameters,
            "weight_bytes": parameters * bits // 8,
            "dtype": given.dtype,
            "machine": {**common.machine(), "threads": given.threads},
            "versions": common.versions(),
        }
        common.write_json(path, content)
        said = record.get("unavailable") or f"{record['seconds']['median']:.3f} s, {record['state_bytes'] / 1e6:.1f} MB"
        print(f"{path.stem}: {name}: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and gradients")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="both sets, both dtypes, 1 and 2 threads")
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="OPTIMIZER", help=f"of: {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=15, help="steps measured, less for slow ones")
    parser.add_argument("--keep", action="store_true", help="keep what another version of the package gave")
    parser.add_argument("--results", type=pathlib.Path, default=FOLDER)
    parser.add_argument("--tables", action="store_true", help="only write the table and the plot")
    parser.add_argument("--measure", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rounds < 1 or given.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    if given.measure:
        common.write_json(given.out, measure(given.measure, given))
        return
    if not given.tables:
        sets = [s for s in SETS if s != "tiny"] if given.all else [given.set]
        for threads in (1, 2) if given.all else (given.threads,):
            for dtype in DTYPES if given.all else (given.dtype,):
                for one in sets:
                    run(argparse.Namespace(**{**vars(given), "set": one, "dtype": dtype, "threads": threads}))
    from benchmarks.optimizer_step_page import write_page

    print(write_page(given.results))


if __name__ == "__main__":
    main()
