"""Memory figures in the Trainer's logs, read back from the real reporters' own files."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from tiny_llama import inner, trainer
from transformers.trainer_callback import TrainerCallback

import hf_memopt
from hf_memopt.memory.peak import peak_bytes, peak_resident_bytes

SIZES = ["memopt/state_bytes", "memopt/bits_per_param", "memopt/peak_bytes", "memopt/skipped_steps"]
SHARES = ["memopt/zero_share", "memopt/changed_share", "memopt/carried_energy"]
KEYS = SIZES + SHARES


def training_logs(t) -> list[dict]:
    return [entry for entry in t.state.log_history if "loss" in entry]


# -- the figures ----------------------------------------------------------------------------------------------------


def test_figures_in_the_log_history(tmp_path):
    t = trainer(tmp_path, report_to=["hf_memopt"], save_strategy="no")
    t.train()
    report = inner(t.optimizer).memory_report()
    for entry in training_logs(t):
        assert entry["memopt/state_bytes"] == report.state_bytes
        assert entry["memopt/bits_per_param"] == report.bits_per_parameter
        assert entry["memopt/skipped_steps"] == 0
        assert all(0 < entry[key] < 1 for key in SHARES)
        assert all(isinstance(entry[key], (int, float)) and math.isfinite(entry[key]) for key in KEYS)
    peaks = [entry["memopt/peak_bytes"] for entry in training_logs(t)]
    assert peaks == sorted(peaks) and peaks[0] > 100e6
    assert not any(key.startswith("memopt/") for key in t.state.log_history[-1])


@pytest.mark.parametrize(
    ("changes", "logged"),
    [
        ({"logging_steps": 2}, [2, 4, 6]),
        ({"logging_steps": 4, "logging_first_step": True}, [1, 4]),
        (
            {"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 32},
            [2, 4],
        ),
        (
            {
                "logging_strategy": "epoch",
                "max_steps": -1,
                "num_train_epochs": 2,
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 3,
            },
            [3, 6],
        ),
    ],
    ids=["steps", "first step", "epoch", "epoch, accumulated"],
)
def test_statistics_are_sampled_in_the_logged_steps_only(changes, logged, tmp_path, monkeypatch):
    asked = []
    request = hf_memopt.TacoAdamW.request_statistics
    monkeypatch.setattr(
        hf_memopt.TacoAdamW, "request_statistics", lambda self: (asked.append(counter.step + 1), request(self))[1]
    )

    class Counter(TrainerCallback):
        step = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.step = state.global_step

    counter = Counter()
    t = trainer(tmp_path, report_to=["hf_memopt"], save_strategy="no", callbacks=[counter], **changes)
    t.train()
    assert asked == logged == [entry["step"] for entry in training_logs(t)]
    assert all(key in entry for entry in training_logs(t) for key in KEYS)


def test_other_optimizers_get_no_figures(tmp_path):
    t = trainer(tmp_path, optim="adamw_torch", report_to=["hf_memopt"], save_strategy="no")
    t.train()
    assert not any(key.startswith("memopt/") for entry in t.state.log_history for key in entry)


def test_logging_the_figures_does_not_change_the_training(tmp_path):
    results = []
    for report_to in ([], ["hf_memopt"]):
        t = trainer(tmp_path, report_to=report_to, save_strategy="no")
        t.train()
        results.append([p.detach().clone() for p in t.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_peak_of_the_process():
    """Not the parent's: a child of a process with a large peak begins with its own."""
    block = torch.ones(64 << 20)
    assert peak_bytes("cpu") == peak_resident_bytes() >= block.numel() * 4
    child = (
        "from hf_memopt.memory.peak import peak_resident_bytes as p; a = p(); b = bytearray(200 << 20); print(a, p())"
    )
    before, after = map(int, subprocess.check_output([sys.executable, "-c", child], text=True).split())
    assert after - before > 190 << 20
    assert after < peak_resident_bytes() + (200 << 20)


# -- the reporters --------------------------------------------------------------------------------------------------


def test_tensorboard_shows_them(tmp_path, monkeypatch):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    t = trainer(tmp_path, report_to=["hf_memopt", "tensorboard"], save_strategy="no")
    t.train()
    events = {}
    for folder, _, files in os.walk(tmp_path):
        if any("tfevents" in name for name in files):
            accumulator = event_accumulator.EventAccumulator(folder)
            accumulator.Reload()
            for tag in accumulator.Tags()["scalars"]:
                events[tag] = [(event.step, event.value) for event in accumulator.Scalars(tag)]
    for key in KEYS:
        written = [(entry["step"], pytest.approx(entry[key], rel=1e-6)) for entry in training_logs(t)]
        assert events[f"train/{key}"] == written, key
    assert "train/loss" in events


def test_trackio_shows_them(tmp_path):
    """In a process of its own: trackio reads where to store things when it is imported, and starts a server."""
    pytest.importorskip("trackio")
    code = f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import hf_memopt
        from tiny_llama import trainer
        reporting = dict(report_to=["hf_memopt", "trackio"], project="memory", run_name="first")
        t = trainer({str(tmp_path / "out")!r}, save_strategy="no", **reporting)
        t.train()
        from trackio.sqlite_storage import SQLiteStorage
        rows = SQLiteStorage.get_logs("memory", "first")
        logged = [e for e in t.state.log_history if "loss" in e]
        assert len(logged) == 6
        for key in {KEYS!r}:
            stored = [row[f"train/{{key}}"] for row in rows if f"train/{{key}}" in row]
            assert stored == [e[key] for e in logged], (key, stored, logged)
        print("read back", len(rows))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "GRADIO_ANALYTICS_ENABLED": "False",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "read back" in done.stdout


class Reporter(TrainerCallback):
    """A user's reporter: keeps what it is handed."""

    def __init__(self) -> None:
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_users_callbacks_see_them(tmp_path):
    reporter = Reporter()
    trainer(tmp_path, report_to=["hf_memopt"], save_strategy="no", callbacks=[reporter]).train()
    assert all(key in reporter.logs[0] for key in KEYS)


# -- the order ------------------------------------------------------------------------------------------------------


def test_after_another_reporter_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"lists 'hf_memopt' after another reporter.*use report_to=\['hf_memopt', 'tensorboard'\]"
    ):
        trainer(tmp_path, report_to=["tensorboard", "hf_memopt"])


def test_through_callbacks_warns_once_and_still_fills_the_history(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        t = trainer(
            tmp_path, report_to=["tensorboard"], save_strategy="no", callbacks=[hf_memopt.MemoryReportCallback()]
        )
        t.train()
    warnings = [r.getMessage() for r in caplog.records if r.name == "hf_memopt"]
    assert len(warnings) == 1
    assert "so tensorboard will not show its figures: use report_to=['hf_memopt', 'tensorboard']" in warnings[0]
    assert all(key in entry for entry in training_logs(t) for key in KEYS)


def test_through_callbacks_without_reporters_is_fine(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        trainer(tmp_path, save_strategy="no", callbacks=[hf_memopt.MemoryReportCallback()]).train()
    assert not [r for r in caplog.records if r.name == "hf_memopt"]


def test_unknown_reporter_lists_ours(tmp_path):
    with pytest.raises(ValueError, match="hf_memopt"):
        trainer(tmp_path, report_to=["hf_memop"])
