"""Two real processes (gloo, CPU): one table, the same weights on both, checkpoints of both marked, resume bit-equal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_llama import differences

from hf_memopt import last_complete_checkpoint
from hf_memopt.integrations.checkpoints import read_marker


def launch(output, result) -> str:
    script = os.path.join(os.path.dirname(__file__), "ddp_train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script]
    done = subprocess.run(
        [*command, str(output), str(result)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes(tmp_path):
    log = launch(tmp_path / "run", tmp_path / "straight")
    assert log.count("fp32 AdamW would keep") == 1
    straight = torch.load(tmp_path / "straight.0")
    assert differences(straight, torch.load(tmp_path / "straight.1")) == []

    last = last_complete_checkpoint(tmp_path / "run")
    assert last == str(tmp_path / "run" / "checkpoint-4")
    assert read_marker(last)["other_ranks"] == ["rng_state_1.pth"]

    shutil.rmtree(last)
    launch(tmp_path / "run", tmp_path / "again")
    assert differences(straight, torch.load(tmp_path / "again.0")) == []
    assert differences(straight, torch.load(tmp_path / "again.1")) == []
