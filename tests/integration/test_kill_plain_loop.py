"""A plain loop that is killed with SIGKILL again and again, in mid-step and in mid-save, ends with the same bits.

The loop saves as docs/trainer.md says: into a temporary file beside the checkpoint, which then replaces it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.optim.common import state_equal

STEPS = 24
LOOP = """
import os, sys
import torch
from hf_memopt import CompActAdamW, CompActConfig, Taco, TacoAdamW, build_param_groups, compress_activations

output, dtype, optimizer_class, in_backward, steps = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
layers = torch.nn.Linear(600, 900), torch.nn.Tanh(), torch.nn.Linear(900, 600)
model = torch.nn.Sequential(*layers).to(getattr(torch, dtype))
cls = {"CompActAdamW": CompActAdamW, "Taco": Taco, "TacoAdamW": TacoAdamW}[optimizer_class]
if cls is CompActAdamW:
    model = torch.nn.Sequential(model)  # now a block
    compress_activations(model, CompActConfig(rank=0.1, update_proj_gap=3))
groups = build_param_groups(model, one_sparse=cls is Taco)
optimizer = cls(groups, lr=1e-3, update_in_backward=in_backward == "True")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(steps))
checkpoint, begin = os.path.join(output, "checkpoint.pt"), 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    begin = saved["step"]
for step in range(begin, int(steps)):
    x = torch.randn(8, 600, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "schedule": schedule.state_dict(), "step": step + 1}, checkpoint + ".tmp")
    os.replace(checkpoint + ".tmp", checkpoint)
    print("saved", step + 1, flush=True)
"""


def start(folder: Path, *how: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", LOOP, str(folder), *how, str(STEPS)], stdout=subprocess.PIPE, text=True, bufsize=1
    )


def checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize(
    "how",
    [
        ("float32", "TacoAdamW", "False"),
        ("bfloat16", "TacoAdamW", "True"),
        ("bfloat16", "Taco", "False"),
        ("bfloat16", "CompActAdamW", "False"),
        ("float32", "CompActAdamW", "True"),
    ],
    ids=" ".join,
)
def test_killed_at_any_moment(tmp_path, how):
    straight = start(tmp_path / "straight", *how)
    said, _ = straight.communicate(timeout=300)
    assert straight.returncode == 0 and f"saved {STEPS}" in said
    draw = random.Random(0)
    kills = torn = 0
    while True:
        process = start(tmp_path / "killed", *how)
        lines = 0
        # after a few saves, somewhere in the next step or its save
        for line in process.stdout:
            lines += line.startswith("saved")
            if lines >= draw.randint(2, 9):
                time.sleep(draw.random() * 0.02)
                break
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break
        kills += 1
        torn += (tmp_path / "killed" / "checkpoint.pt.tmp").exists()
        assert 0 < checkpoint(tmp_path / "killed")["step"] <= STEPS
        if checkpoint(tmp_path / "killed")["step"] == STEPS:
            break
    assert kills >= 2
    print(f"{kills} kills, {torn} in a save")
    assert state_equal(checkpoint(tmp_path / "straight"), checkpoint(tmp_path / "killed"))
