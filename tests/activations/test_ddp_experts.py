"""Two processes (gloo, CPU) of which each meets other layers at first: their weights and subspaces are the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_layers_that_one_process_has_not_met_are_folded_as_where_they_were(tmp_path):
    script = os.path.join(os.path.dirname(__file__), "ddp_experts.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script]
    done = subprocess.run(
        [*command, str(tmp_path / "result")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = (torch.load(tmp_path / f"result.{rank}") for rank in range(2))
    for kind in one:
        a, b = one[kind], other[kind]
        assert a["state"]["shared"] == b["state"]["shared"] and a["state"]["epochs"] == b["state"]["epochs"]
        assert a["state"]["shared"]["experts.2.up"] == "experts.2.gate"
        assert not [n for n in a["state"]["top"] if not torch.equal(a["state"]["top"][n], b["state"]["top"][n])]
        assert not [n for n in a["weights"] if not torch.equal(a["weights"][n], b["weights"][n])]
