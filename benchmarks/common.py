"""What every benchmark records the same way: bytes from real storages, peak memory, seconds, and where it ran.

Units stand in the names (`_bytes`, `_seconds`). Files are written whole or not at all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Write through a temporary file beside the target, so that a finished-looking result is a finished one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf8")
    os.replace(partial, path)


def storage_bytes(value: Any) -> int:
    """Bytes of every distinct storage among the tensors nested in `value`, attributes of objects (GaLore's projectors)
    included; a view counts as the whole storage that it keeps alive."""
    seen: dict[int, int] = {}

    def walk(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            inner = getattr(item, "__tensor_flatten__", None)
            if inner is not None:
                for name in inner()[0]:
                    walk(getattr(item, name))
            else:
                storage = item.untyped_storage()
                if storage.nbytes():
                    seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            for part in item.values():
                walk(part)
        elif isinstance(item, (list, tuple)):
            for part in item:
                walk(part)
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            walk(vars(item))

    walk(value)
    return sum(seen.values())


def state_bytes(optimizer: Any) -> int:
    """Bytes of everything in the optimizer's state, by storage."""
    return storage_bytes(dict(getattr(optimizer, "optimizer", optimizer).state))


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """What each parameter group was trained with: its number of weights, the bytes of its state, its learning rate
    before the schedule, and every other setting that is a number, a flag or a text."""
    groups = []
    for group in optimizer.param_groups:
        found: dict[str, Any] = {
            "parameters": sum(p.numel() for p in group["params"]),
            "state_bytes": storage_bytes([optimizer.state.get(p) for p in group["params"]]),
        }
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            plain = value if isinstance(value, (tuple, list)) and key != "param_names" else [value]
            if key != "params" and all(isinstance(v, (bool, int, float, str)) for v in plain):
                found[key] = list(plain) if plain is value else value
        found["lr"] = found.pop("initial_lr", found.get("lr"))
        groups.append(found)
    return groups


def reset_peak_memory() -> None:
    """Start a new measurement of the process's highest resident memory, where the system allows it (Linux)."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_memory_bytes() -> int:
    """Highest resident memory of this process since `reset_peak_memory`. Linux; elsewhere the highest since its start.

    Not getrusage on Linux: its figure is inherited from the process that started this one.
    """
    try:
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def git_revision() -> str:
    """The commit, with `+` when the package's files differ from it; `unknown` outside a repository."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        revision = git("rev-parse", "--short=12", "HEAD")
        return (revision + ("+" if git("status", "--porcelain", "--", "hf_memopt") else "")) if revision else "unknown"
    except OSError:
        return "unknown"


def source_digest() -> str:
    """One hash over the package's code: says whether two runs used the same optimizer, committed or not."""
    digest = hashlib.sha256()
    for path in sorted(p for p in (ROOT / "hf_memopt").rglob("*") if p.suffix in (".py", ".c", ".h")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    known = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchao", "galore-torch", "apollo-torch")
    for name in known:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    cpu = platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


class StepClock(TrainerCallback):
    """Seconds of each training step and of the optimizer's part of it, and the loss of each step.

    The step runs from its beginning to its end as the Trainer sees it (forward, backward, clipping, update); the update
    runs from the event before it to the event after it. Works through the Trainer's public events only.
    """

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.optimizer_seconds: list[float] = []
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.state_bytes = 0
        self.gradient_bytes = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self._step = time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient_bytes = max(self.gradient_bytes, storage_bytes([p.grad for p in model.parameters()]))
        self._update = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.optimizer_seconds.append(time.perf_counter() - self._update)

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.step_seconds.append(time.perf_counter() - self._step)
        self.state_bytes = state_bytes(optimizer)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))
            self.grad_norms.append(float(logs.get("grad_norm", 0.0)))


class Bar(TrainerCallback):
    """One progress bar with the loss, in place of the Trainer's line for each logged step."""

    def __init__(self, label: str) -> None:
        self.label = label

    def on_train_begin(self, args, state, control, **kwargs):
        self._bar = tqdm(total=state.max_steps, desc=self.label, unit="step", dynamic_ncols=True)

    def on_step_end(self, args, state, control, **kwargs):
        self._bar.update()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self._bar.set_postfix(loss=f"{float(logs['loss']):.3f}")

    def on_train_end(self, args, state, control, **kwargs):
        self._bar.close()
