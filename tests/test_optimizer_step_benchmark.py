"""The step benchmark measures real optimizers, records what cannot run by name, and goes on where it stopped."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import optimizer_step, optimizer_step_page, optimizers
from benchmarks.common import ROOT

FUSED = "torch AdamW fused"


def options(tmp_path, **more) -> argparse.Namespace:
    given = {"set": "tiny", "dtype": "float32", "threads": 1, "rounds": 2, "results": tmp_path, "only": None}
    return argparse.Namespace(**given | {"keep": False} | more)


def test_bytes_and_times_of_ours_and_of_torch(tmp_path):
    command = [sys.executable, "-m", "benchmarks.optimizer_step", "--set", "tiny", "--rounds", "2"]
    command += ["--results", str(tmp_path), "--only", FUSED, "TacoAdamW"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "tiny-float32-1t.json").read_text())
    count = result["parameters"]
    assert count == 2 * 96 * 160 + 3 * 96 and result["tensors"] == 5
    found = result["optimizers"]
    assert found[FUSED]["state_bytes"] == 8 * count + 4 * 5
    for name, record in found.items():
        assert set(record["ratio"]) == {*optimizers.ANCHORS} - {name}
    ours = found["TacoAdamW"]
    vectors = 3 * 96
    assert 8 * vectors < ours["state_bytes"] < 8 * vectors + (count - vectors) * 4 / 8
    assert ours["bytes_moved_a_parameter"] == pytest.approx(16 + 2 * ours["state_bytes"] / count)
    assert found[FUSED]["bytes_moved_a_parameter"] == pytest.approx(28, abs=0.01)
    for record in found.values():
        assert record["rounds"] == 2 and all(len(s) == 2 for s in record["steps_seconds"].values())
        assert 0 < record["seconds"]["min"] <= record["seconds"]["median"] <= record["seconds"]["max"]
    page = (tmp_path / "README.md").read_text()
    assert "| TacoAdamW" in page and page in done.stdout
    assert (tmp_path / "optimizer_step.png").stat().st_size > 10_000


def test_goes_on_where_it_stopped(tmp_path, monkeypatch):
    measured = []

    def record(name, given):
        measured.append(name)
        seconds = {"median": 1.0, "min": 1.0, "max": 1.0}
        return {"unavailable": "no such package"} if name == FUSED else {"seconds": seconds, "state_bytes": 8}

    monkeypatch.setattr(optimizer_step, "in_a_process", record)
    for _ in range(2):
        optimizer_step.run(options(tmp_path, only=["TacoAdamW", FUSED]))
    assert measured == ["TacoAdamW", FUSED, FUSED]
    monkeypatch.setattr(optimizer_step.common, "source_digest", lambda: "other")
    optimizer_step.run(options(tmp_path, only=["TacoAdamW"], keep=True))
    assert len(measured) == 3
    optimizer_step.run(options(tmp_path, only=["TacoAdamW"]))
    assert measured[3:] == ["TacoAdamW"]


def test_a_package_that_fails_is_a_finding(tmp_path, monkeypatch):
    def build(named):
        raise ImportError("No module named 'nothing'")

    monkeypatch.setitem(optimizers.PEERS, "TacoAdamW, reference kernel", optimizers.Peer(build, "nothing"))
    record = optimizer_step.measure("TacoAdamW, reference kernel", options(tmp_path))
    assert record == {"unavailable": "ImportError: No module named 'nothing'"}
    monkeypatch.setitem(optimizers.PEERS, "TacoAdamW", optimizers.Peer(build, "nothing"))
    with pytest.raises(ImportError):
        optimizer_step.measure("TacoAdamW", options(tmp_path))


def test_state_inside_objects_is_counted():
    class Projector:
        def __init__(self):
            self.matrix = torch.zeros(100)[:10]

    state = {"weight": {"projector": Projector(), "step": 3}}
    assert optimizer_step.common.storage_bytes(state) == 400


def test_temporaries_are_seen():
    rise = optimizer_step_rise(32 << 20)
    if rise is None:
        pytest.skip("needs Linux with glibc")
    assert 30 << 20 < rise < 40 << 20


def optimizer_step_rise(size: int) -> int | None:
    """In a process of its own: the measurement changes how the process takes memory."""
    step = f"lambda: torch.ones({size // 4})"
    code = f"import torch; from benchmarks.optimizer_step import temporaries; print(temporaries({step}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.replace("None", "null"))


def test_the_sets_are_the_models():
    smollm2, layer = (optimizers.shapes(s) for s in ("smollm2-135m", "llama-7b-layer"))
    assert len(smollm2) == 272 and sum(torch.Size(s).numel() for _, s in smollm2) == 134_515_008
    assert sorted(s for _, s in layer) == sorted(
        [(4096,)] * 2 + [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
    )


def test_labels_are_moved_apart_and_no_further():
    assert optimizer_step_page.apart([0.1, 0.5, 0.9], 0.2) == [0.1, 0.5, 0.9]
    assert optimizer_step_page.apart([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    places = optimizer_step_page.apart([0.1, 0.12, 0.3, 0.31, 0.33], 0.1)
    assert all(b - a >= 0.0999 for a, b in zip(places, places[1:], strict=False))
