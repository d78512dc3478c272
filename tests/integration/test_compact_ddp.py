"""CompAct in two real processes (gloo, CPU): the same on both, and what one process does with the same batches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from ddp_compact import RATE, STEPS, run
from tiny_llama import LENGTH, differences

from tests.tolerances import E


def launch(tmp_path, *optims: str) -> list[dict]:
    """What two processes with two sequences each give."""
    script = os.path.join(os.path.dirname(__file__), "ddp_compact.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script]
    done = subprocess.run(
        [*command, str(tmp_path / "run"), str(tmp_path / "result"), "2", *optims],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(tmp_path / f"result.{rank}") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes(tmp_path):
    ranks = launch(tmp_path, "sgd", "compact_adamw")
    for optim in ("sgd", "compact_adamw"):
        one, other = (rank[optim] for rank in ranks)
        assert one["world"] == 2 and one["loss"] == other["loss"]
        assert differences(one["numbers"], other["numbers"]) == []
        assert len(one["top"]) == 6 and differences(one["top"], other["top"]) == []

    # with SGD: AdamW divides by roots of what may be rounding alone
    one, alone = ranks[0]["sgd"], run(str(tmp_path / "alone"), "sgd", 4)
    assert differences(one["top"], alone["top"]) == []
    # a gradient is a sum over 4 x LENGTH tokens of products that are themselves sums of 64 to 128 terms, in at most 30
    # operations one behind the other: in another order it is another by this share of the largest
    share = 30 * (4 * LENGTH + 128) * E
    sizes = [g.abs().max() for g in alone["first"].values()]
    for name, gradient in alone["first"].items():
        assert gradient.any() and ((gradient - one["first"][name]).abs() <= share * max(sizes)).all(), name
    # what SGD moves is the rate times that, and a loss follows with the gradient's norm
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in alone["first"].values()]))
    bound = share * (alone["loss"][0] + STEPS * RATE * 10 * norm**2)
    assert max(abs(a - b) for a, b in zip(alone["loss"], one["loss"], strict=True)) <= bound < 0.02
