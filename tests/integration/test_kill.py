"""Trainings killed with SIGKILL at any moment, in saves above all, end bit-equal to one that was left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SAVES, OTHERS = 3, 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the trainings it kills")
@pytest.mark.parametrize(
    "optim, dtype",
    [
        ("taco_adamw", "float32"),
        ("taco_adamw", "bfloat16"),
        ("galore_taco_adamw:rank=0.25,update_proj_gap=3", "bfloat16"),
        ("compact_taco_adamw:rank=0.25,update_proj_gap=3", "bfloat16"),
    ],
)
def test_killed_trainings_end_bit_equal(optim, dtype, tmp_path):
    driver = os.path.join(os.path.dirname(__file__), "kill_driver.py")
    done = subprocess.run(
        [sys.executable, driver, optim, dtype, str(SAVES), str(OTHERS), "0", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    story = json.loads(done.stdout.splitlines()[-1])
    assert story["differences"] == []
    assert story["killed_in_a_save"] >= SAVES and story["killed_elsewhere"] >= OTHERS
    for steps in story["resumed_at"]:
        assert steps == sorted(steps), "a kill lost a checkpoint that was whole before"
    assert any(step > 0 for steps in story["resumed_at"] for step in steps)
