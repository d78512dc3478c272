"""What only a GPU can show, in one run of less than eight minutes: same bits, speed, memory, a fine-tune.

    python -m benchmarks.gpu                       (make gpu)
    python -m benchmarks.gpu --only correctness step
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu     a dry run: every path, tiny, nothing to conclude from

Needs torch, triton and transformers. bitsandbytes and torchao are measured where they are installed and skipped by name
where they are not. Each part writes `benchmarks/results/gpu/<device>/<part>.json` when it is done. Time is shared out
beforehand: what would begin after its share is skipped and says so, the most telling measurements coming first.

    correctness   the kernels on the GPU against the reference on the CPU, bit for bit; twice the same; nothing waits
    kernel        one matrix: seconds, bytes a second, share of what a plain copy reaches
    step          whole optimizer steps on the parameters of a Llama-7B layer and of SmolLM2-135M: seconds, state and
                  peak memory, beside the peers
    finetune      the unmodified Trainer, the same batches with each optimizer
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import hf_memopt  # noqa: F401  registers the names
from benchmarks.common import RESULTS, ROOT, git_revision, machine, source_digest, state_bytes, versions, write_json
from benchmarks.gpu_finetune import DTYPES, finetune
from hf_memopt import kernels
from hf_memopt.codecs import base
from hf_memopt.codecs.ternary import TernaryFirstMoment, TernarySecondMoment
from hf_memopt.kernels import triton as backend
from hf_memopt.kernels.scalars import StepScalars
from hf_memopt.optim.taco_adamw import TacoAdamW

PARTS = {"correctness": 2.5, "kernel": 3.0, "step": 5.5, "finetune": 7.0}
"""Part -> minutes after the start of the run when nothing more of it begins."""


class Skipped(Exception):
    """A part or a peer that cannot run here; the message says why."""


class Place:
    """The device, and what differs between measuring on it and a dry run on the CPU."""

    def __init__(self, device: str, hurry: bool = True) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.hurry = hurry
        self.began = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def late(self, part: str) -> str:
        """Why nothing more of a part may begin; empty while it may."""
        return f"the first {PARTS[part]:g} minutes are over" if self.hurry and self.elapsed() > 60 * PARTS[part] else ""

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name().replace(" ", "-").replace("/", "-") if self.cuda else "dry-run"

    def sizes(self, real: Any, tiny: Any) -> Any:
        return real if self.cuda else tiny

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median time of a call; on a GPU the cache is emptied before each."""
        if self.cuda:
            from triton.testing import do_bench

            return do_bench(call, warmup=50, rep=200, return_mode="median") / 1e3
        call()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """Highest allocation during a call, above what was allocated before; None where it is not measured."""
        if not self.cuda:
            call()
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() - before

    def clean(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """torch raises when something inside waits for the GPU."""
        if not self.cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --------------------------------------------------------------------------------------------------------- correctness


def correctness(place: Place) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.kernels.triton_cases"]
    done = subprocess.run([*command, "--device", place.device.type], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the kernel cases failed to run: {done.stderr[-2000:]}")
    cases = json.loads(done.stdout.splitlines()[-1])
    failed = {name: text.splitlines()[-1] for name, text in cases.items() if text}
    found: dict[str, Any] = {"cases": len(cases), "cases_failed": failed}
    for name, dtype in DTYPES.items():
        found[f"large {name}"] = large_matrix(place, place.sizes((4096, 4160), (17, 330)), dtype)
    found["beyond 2^31 elements"] = beyond_32_bits(place)
    return found


def large_matrix(place: Place, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Three steps on the GPU, twice, and on the CPU: elements that differ, by buffer. Nothing on the way may wait."""
    cpu_kernel, cpu = kernels.select("auto", "cpu")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator).to(dtype)
    grads = [(torch.randn(shape, generator=generator) * 1e-3).to(dtype) for _ in range(3)]
    results = []
    for step, device in ((cpu.ternary_adamw_, torch.device("cpu")), *[(backend.ternary_adamw_, place.device)] * 2):
        w, state = start.to(device, copy=True), ternary_state(shape, device)
        moved = [g.to(device) for g in grads]
        step(w.clone(), moved[0], {k: v.clone() for k, v in state.items()}, scalars(1))  # compiles what has to be
        with place.no_waiting() if device.type == "cuda" else contextlib.nullcontext():
            for t, grad in enumerate(moved, 1):
                step(w, grad, state, scalars(t))
        results.append({"weights": w.cpu()} | {key: buffer.cpu() for key, buffer in state.items()})

    def differences(one: dict, other: dict) -> dict[str, int]:
        return {key: int((one[key] != other[key]).sum()) for key in one}

    first, second, third = results
    return {
        "shape": list(shape),
        "cpu_kernel": cpu_kernel,
        "differ_from_cpu": differences(first, second),
        "differ_from_itself": differences(second, third),
    }


def beyond_32_bits(place: Place) -> dict[str, Any] | str:
    """More than 2^31 elements: the last rows must come out as they do in a small parameter with the same rows."""
    if not place.cuda:
        return "skipped: needs a GPU"
    n, k = 2**31 // 16384 + 64, 16384
    needed = 3.5 * 2 * n * k
    if torch.cuda.mem_get_info()[0] < needed:
        return f"skipped: needs {needed / 2**30:.0f} GiB of free GPU memory"
    last = 40
    w = torch.ones(n, k, dtype=torch.bfloat16, device=place.device)
    grad = torch.zeros(n, k, dtype=torch.bfloat16, device=place.device)
    grad[-last:] = 1e-3
    state = ternary_state((n, k), place.device)
    applied = bool(backend.ternary_adamw_(w, grad, state, scalars(1, stochastic=False)))
    moved = w[-last:] != 1
    return {
        "shape": [n, k],
        "applied": applied,
        "rows with gradient that moved": int(moved.all(dim=1).sum()),
        "rows with gradient": last,
        "other rows that moved": int((w[:-last] != 1).any(dim=1).sum()),
    }


def ternary_state(shape: tuple[int, int], device: torch.device) -> dict[str, torch.Tensor]:
    codecs = {"exp_avg": TernaryFirstMoment(), "exp_avg_sq": TernarySecondMoment()}
    return base.zeros(codecs, torch.Size(shape), device)


def scalars(step: int, stochastic: bool = True) -> StepScalars:
    return StepScalars.at_step(
        step, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, parameter_key=1,
        stochastic=stochastic, maximize=False,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- kernel and step


def kernel(place: Place) -> dict[str, Any]:
    """The ternary step of one matrix, against the speed of a plain copy."""
    copy = copy_rate(place)
    place.clean()
    found: dict[str, Any] = {"copy_bytes_a_second": copy, "matrices": []}
    for shape in place.sizes([(4096, 4096), (11008, 4096), (4096, 11008), (576, 576)], [(16, 160)]):
        for name, dtype in DTYPES.items():
            w, state = torch.randn(shape, dtype=dtype, device=place.device), ternary_state(shape, place.device)
            grad = torch.randn_like(w)
            step = scalars(5)
            seconds = place.seconds(lambda w=w, g=grad, st=state, s=step: backend.ternary_adamw_(w, g, st, s))
            moved = backend.bytes_moved(*shape, dtype, dtype)
            rate = moved["total"] * w.numel() / seconds
            row = {"shape": list(shape), "dtype": name, "seconds": seconds, "bytes_a_parameter": moved["total"]}
            found["matrices"].append(row | {"bytes_a_second": rate, "share_of_copy": rate / copy})
    return found


def copy_rate(place: Place) -> float:
    """Bytes a second, read and written, of a large copy."""
    buffers = torch.empty(2, place.sizes(2**29, 2**10), dtype=torch.uint8, device=place.device)
    return buffers.numel() / place.seconds(lambda: buffers[0].copy_(buffers[1]))


def smollm2(scale: int) -> list[tuple[int, ...]]:
    """Shapes of SmolLM2-135M's parameters, or of a model `scale` times narrower with two layers."""
    d, f, v, layers = 576 // scale, 1536 // scale, 49152 // scale, 30 if scale == 1 else 2
    layer = [(d, d), (d // 3, d), (d // 3, d), (d, d), (f, d), (f, d), (d, f), (d,), (d,)]
    return [(v, d), *layer * layers, (d,)]


def llama_7b_layer(scale: int) -> list[tuple[int, ...]]:
    d, f = 4096 // scale, 11008 // scale
    return [*[(d, d)] * 4, (f, d), (f, d), (d, f), (d,), (d,)]


def optimizers() -> dict[str, Callable[[list], torch.optim.Optimizer]]:
    """Name -> constructor; a constructor raises Skipped when its package is not there."""

    def package(name: str, build: Callable[[Any, list], Any]) -> Callable[[list], Any]:
        def construct(params: list) -> Any:
            if importlib.util.find_spec(name) is None:
                raise Skipped(f"{name} is not installed")
            return build(importlib.import_module(f"{name}.optim"), params)

        return construct

    return {
        "hf_memopt TacoAdamW": lambda params: TacoAdamW(params, lr=1e-5),
        "torch AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True),
        "torch AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-5, foreach=True),
        "bitsandbytes AdamW8bit": package("bitsandbytes", lambda m, params: m.AdamW8bit(params, lr=1e-5)),
        "torchao AdamW8bit": package("torchao", lambda m, params: m.AdamW8bit(params, lr=1e-5)),
        "torchao AdamW4bit": package("torchao", lambda m, params: m.AdamW4bit(params, lr=1e-5)),
    }


def step(place: Place) -> dict[str, Any]:
    """Every optimizer on every parameter set: seconds, state, peak."""
    rows = []
    for set_name, shapes in (("Llama-7B layer", llama_7b_layer), ("SmolLM2-135M", smollm2)):
        for dtype_name, dtype in reversed(DTYPES.items()):
            for name, construct in optimizers().items():
                row: dict[str, Any] = {"parameters": set_name, "dtype": dtype_name, "optimizer": name}
                row |= one_optimizer(place, name, construct, shapes(place.sizes(1, 16)), dtype)
                print(f"  {row}", flush=True)
                rows.append(row)
                place.clean()
    return {"rows": rows}


def one_optimizer(place: Place, name: str, construct: Callable, shapes: list, dtype: torch.dtype) -> dict[str, Any]:
    if reason := place.late("step"):
        return {"skipped": reason}
    params = [torch.nn.Parameter(torch.randn(s, dtype=dtype, device=place.device) * 0.02) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    count = sum(p.numel() for p in params)
    try:
        return {"count": count} | measured(place, construct(params), count)
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # a peer that fails is a result; our own failure is not
        if name.startswith("hf_memopt"):
            raise
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def measured(place: Place, optimizer: Any, count: int) -> dict[str, Any]:
    """Of `optimizer.step()`: seconds, how much of them the host takes to launch it, bytes of state, and the peak above
    what lies in memory between steps."""
    began = time.perf_counter()
    optimizer.step()
    place.wait()
    result: dict[str, Any] = {"first_step_seconds": time.perf_counter() - began}
    launches = []
    for _ in range(place.sizes(5, 1)):
        began = time.perf_counter()
        optimizer.step()
        launches.append(time.perf_counter() - began)
        place.wait()
    held = state_bytes(optimizer)
    return result | {
        "host_seconds": statistics.median(launches),
        "step_seconds": place.seconds(optimizer.step),
        "state_bytes": held,
        "bits_a_parameter": 8 * held / count,
        "peak_bytes": place.peak_bytes(optimizer.step),
    }


# ---------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--all", action="store_true", help="skip nothing, however long it takes")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS / "gpu")
    given = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # more than one and the Trainer would use them all
    if given.device == "cuda":
        usable, why = backend.available()
        if not usable:
            raise SystemExit(f"error: the Triton kernels do not run here ({why}); --device cpu makes a dry run")
    place = Place(given.device, hurry=not given.all)
    about = {"versions": versions() | triton_version(), "machine": machine(), "git_revision": git_revision(),
             "source_digest": source_digest()}  # fmt: skip
    wrong: list[str] = []
    for part, run in (("correctness", correctness), ("kernel", kernel), ("step", step), ("finetune", finetune)):
        if part not in given.only:
            continue
        if reason := place.late(part):
            print(f"{part}: skipped, {reason}", flush=True)
            continue
        print(f"{part}: begins after {place.elapsed():.0f} s", flush=True)
        result = run(place)
        write_json(given.results / place.name / f"{part}.json", about | {"part": part, "result": result})
        if part == "correctness":
            wrong = mistakes(result)
            print("\n".join(wrong) or "  every bit equal", flush=True)
    print(f"done after {place.elapsed():.0f} s: {given.results / place.name}")
    if wrong:
        raise SystemExit("error: the kernels and the reference differ")


def mistakes(result: dict[str, Any]) -> list[str]:
    found = [f"  {name}: {text}" for name, text in result["cases_failed"].items()]
    for name, part in result.items():
        for kind in ("differ_from_cpu", "differ_from_itself"):
            if isinstance(part, dict) and any(part.get(kind, {}).values()):
                found.append(f"  {name}: {kind}: {part[kind]}")
    huge = result["beyond 2^31 elements"]
    if isinstance(huge, dict) and (
        huge["rows with gradient that moved"] != huge["rows with gradient"] or huge["other rows that moved"]
    ):
        found.append(f"  beyond 2^31 elements: {huge}")
    return found


def triton_version() -> dict[str, str]:
    import triton

    return {"triton": triton.__version__}


if __name__ == "__main__":
    main()
