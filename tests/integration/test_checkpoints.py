"""Which checkpoints count as whole: every way in which a folder can be less than what was saved."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny_llama import arguments, differences, snapshot, texts, tiny_llama, trainer
from transformers import TrainingArguments
from transformers.trainer_callback import TrainerCallback

import hf_memopt
from hf_memopt import last_complete_checkpoint
from hf_memopt.integrations import checkpoints
from hf_memopt.integrations.checkpoints import (
    CALLBACK_KEY,
    MARKER,
    TRAINER_STATE,
    fingerprint,
    read_marker,
    set_aside_torn,
    why_not_whole,
    write_marker,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Output folder of a run with checkpoints 2, 4 and 6."""
    path = tmp_path_factory.mktemp("trained")
    trainer(path).train()
    return path


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run", copy_function=shutil.copyfile))


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def fake_save(path: Path, *, weights: bytes = b"w" * 5000, ranks: int = 1, upto: str = TRAINER_STATE) -> None:
    """What the Trainer does in a save, in its order, stopped after file ``upto``."""
    path.mkdir(parents=True, exist_ok=True)

    def rng(name: str) -> None:
        torch.save({"cpu": torch.zeros(3)}, path / name)

    def state() -> None:
        save_id = write_marker(path, world_size=ranks)
        exported = {CALLBACK_KEY: {"args": {}, "attributes": {"save_id": save_id}}}
        (path / TRAINER_STATE).write_text(json.dumps({"global_step": 1, "stateful_callbacks": exported}))

    first_rng = "rng_state.pth" if ranks == 1 else "rng_state_0.pth"
    steps = {
        "model.safetensors": lambda: (path / "model.safetensors").write_bytes(weights),
        "optimizer.pt": lambda: torch.save({"moments": len(weights)}, path / "optimizer.pt"),
        first_rng: lambda: rng(first_rng),
        TRAINER_STATE: state,
    }
    for rank in range(1, ranks):
        steps[f"rng_state_{rank}.pth"] = lambda rank=rank: rng(f"rng_state_{rank}.pth")
    for name, write in steps.items():
        write()
        if name == upto:
            return


def test_callback_key_is_the_name_under_which_the_trainer_stores_it():
    assert hf_memopt.MemoptCallback.__name__ == CALLBACK_KEY


# -- what the Trainer leaves ----------------------------------------------------------------------------------------


def test_all_checkpoints_of_a_run_are_whole(run):
    assert {why_not_whole(run / f"checkpoint-{n}") for n in (2, 4, 6)} == {None}
    assert last_complete_checkpoint(run) == str(run / "checkpoint-6")
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-6")
    listed = read_marker(run / "checkpoint-6")["files"]
    assert set(listed) == set(names(run / "checkpoint-6")) - {MARKER, TRAINER_STATE}
    assert all((run / "checkpoint-6" / name).stat().st_size == size for name, (size, _) in listed.items())


def test_nothing_there(tmp_path, caplog):
    assert last_complete_checkpoint(tmp_path / "missing") is None
    assert last_complete_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-3").write_text("a file")
    assert last_complete_checkpoint(tmp_path) is None
    assert not caplog.records


def test_lora_checkpoint_and_subfolders(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.add_adapter("second", LoraConfig(r=8, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    trainer(tmp_path, model=model, max_steps=2).train()
    last = last_complete_checkpoint(tmp_path)
    assert "second/adapter_model.safetensors" in read_marker(last)["files"]
    os.remove(os.path.join(last, "second", "adapter_model.safetensors"))
    assert why_not_whole(last) == "second/adapter_model.safetensors is missing"


def test_checkpoints_of_other_optimizers_carry_no_marker(tmp_path, caplog):
    trainer(tmp_path, optim="adamw_torch", max_steps=2).train()
    assert MARKER not in names(tmp_path / "checkpoint-2")
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        assert last_complete_checkpoint(tmp_path) is None
    assert "checkpoint-2: it has no marker of a finished save" in caplog.text


def test_another_optimizer_goes_on_from_a_checkpoint_without_our_entry(tmp_path):
    """The Trainer looks our entry up in the old trainer_state.json when it saves."""
    trainer(tmp_path, optim="adamw_torch", max_steps=2).train()
    state = tmp_path / "checkpoint-2" / TRAINER_STATE
    content = json.loads(state.read_text())
    del content["stateful_callbacks"][CALLBACK_KEY]
    state.write_text(json.dumps(content))
    t = trainer(tmp_path, optim="adamw_torch", max_steps=4)
    t.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "checkpoint-4" / TRAINER_STATE).exists()


def test_callback_states_are_restored(tmp_path):
    trainer(tmp_path, max_steps=4).train()
    t = trainer(tmp_path, max_steps=6, restore_callback_states_from_checkpoint=True)
    t.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")


def test_callback_added_by_hand_as_well(tmp_path):
    t = trainer(tmp_path, max_steps=4, callbacks=[hf_memopt.MemoptCallback()])
    t.train()
    assert [why_not_whole(tmp_path / f"checkpoint-{n}") for n in (2, 4)] == [None, None]


def test_the_same_trainer_trains_twice(tmp_path):
    t = trainer(tmp_path, max_steps=2)
    t.train()
    t.args.max_steps = 4
    t.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [why_not_whole(tmp_path / f"checkpoint-{n}") for n in (2, 4)] == [None, None]


class Interrupt(TrainerCallback):
    """Ends the training by an exception after step ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise KeyboardInterrupt


def test_the_same_trainer_goes_on_after_an_interruption(tmp_path):
    straight = trainer(tmp_path / "straight")
    straight.train()
    t = trainer(tmp_path / "run", callbacks=[Interrupt(at=4)])
    with pytest.raises(KeyboardInterrupt):
        t.train()
    t.remove_callback(Interrupt)
    last = last_complete_checkpoint(tmp_path / "run")
    assert last.endswith("checkpoint-4")
    t.train(resume_from_checkpoint=last)
    assert differences(snapshot(straight), snapshot(t)) == []
    assert last_complete_checkpoint(tmp_path / "run").endswith("checkpoint-6")


class Terminate(TrainerCallback):
    """Sends SIGTERM after the first step, then lets time pass until the Trainer has reacted."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)


@pytest.mark.skipif(not hasattr(TrainingArguments, "enable_jit_checkpoint"), reason="new in transformers 5")
def test_checkpoint_saved_on_sigterm(tmp_path):
    """While the Trainer writes one, it holds a file of its own that it removes afterwards."""
    t = trainer(tmp_path, max_steps=1000, save_strategy="no", enable_jit_checkpoint=True, callbacks=[Terminate()])
    t.train()
    assert 1 < t.state.global_step < 1000
    (saved,) = (n for n in names(tmp_path) if n.startswith("checkpoint"))
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / saved)
    again = trainer(tmp_path, max_steps=t.state.global_step + 2, save_strategy="no")
    again.train(resume_from_checkpoint=last_complete_checkpoint(tmp_path))


def test_epoch_saves(tmp_path):
    trainer(tmp_path, max_steps=-1, num_train_epochs=2, save_strategy="epoch").train()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-32")


def test_save_only_model_is_no_checkpoint_to_resume_from(tmp_path, caplog):
    trainer(tmp_path, max_steps=2).train()
    trainer(tmp_path, max_steps=4, save_only_model=True).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    reason = "it was saved with save_only_model and holds no optimizer state"
    assert why_not_whole(tmp_path / "checkpoint-4") == reason
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-2")
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        assert last_complete_checkpoint(tmp_path) is None
    assert f"checkpoint-4: {reason}" in caplog.text


def test_rotation_keeps_whole_checkpoints(tmp_path):
    trainer(tmp_path, save_steps=1, save_total_limit=2).train()
    assert [n for n in names(tmp_path) if n.startswith("checkpoint")] == ["checkpoint-5", "checkpoint-6"]
    assert [why_not_whole(tmp_path / n) for n in ("checkpoint-5", "checkpoint-6")] == [None, None]


# -- damage ---------------------------------------------------------------------------------------------------------


FILES = [
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "training_args.bin",
    "config.json",
    TRAINER_STATE,
    MARKER,
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer"])
def test_damaged_file(name, damage, run):
    file = run / "checkpoint-6" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "longer": content + b"}"}[damage])
    assert why_not_whole(run / "checkpoint-6") is not None
    assert last_complete_checkpoint(run) == str(run / "checkpoint-4")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_file_of_another_save_with_the_same_size(name, run):
    shutil.copyfile(run / "checkpoint-4" / name, run / "checkpoint-6" / name)
    assert why_not_whole(run / "checkpoint-6") == f"{name} is not the file that was saved"


def test_trainer_state_of_another_save(run):
    shutil.copyfile(run / "checkpoint-4" / TRAINER_STATE, run / "checkpoint-6" / TRAINER_STATE)
    assert "of another save" in why_not_whole(run / "checkpoint-6")


def test_marker_of_another_format(run):
    marker = run / "checkpoint-6" / MARKER
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 99'))
    assert last_complete_checkpoint(run) == str(run / "checkpoint-4")


MALFORMED = [
    {"format": 1},
    {"format": True},
    {"sequence": None},
    {"sequence": "7"},
    {"sequence": 0},
    {"save_id": None},
    {"files": ["model.safetensors"]},
    {"files": {"model.safetensors": None}},
    {"files": {"model.safetensors": [1]}},
    {"files": {"model.safetensors": ["1", 2]}},
    {"other_ranks": None},
    {"other_ranks": [1]},
]


@pytest.mark.parametrize("change", MALFORMED, ids=json.dumps)
def test_malformed_marker(change, run, caplog):
    marker = run / "checkpoint-6" / MARKER
    whole = json.loads(marker.read_text())
    marker.write_text(json.dumps(change if change == {"format": 1} else {**whole, **change}))
    reason = f"its marker {MARKER} is damaged or of another version"
    assert read_marker(run / "checkpoint-6") is None
    assert why_not_whole(run / "checkpoint-6") == reason
    assert last_complete_checkpoint(run) == str(run / "checkpoint-4")
    fake_save(run / "checkpoint-7")  # reads the other markers for its number
    assert last_complete_checkpoint(run) == str(run / "checkpoint-7")
    for n in (2, 4, 7):
        shutil.rmtree(run / f"checkpoint-{n}")
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        assert last_complete_checkpoint(run) is None
    assert f"checkpoint-6: {reason}" in caplog.text


def test_half_deleted_by_rotation(run):
    """A killed rmtree leaves any subset of the files."""
    files = names(run / "checkpoint-6")
    random.Random(0).shuffle(files)
    for name in files[: len(files) // 2]:
        (run / "checkpoint-6" / name).unlink()
    assert last_complete_checkpoint(run) == str(run / "checkpoint-4")


def test_none_whole_is_said(run, caplog):
    for n in (2, 4, 6):
        (run / f"checkpoint-{n}" / "optimizer.pt").unlink()
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        assert last_complete_checkpoint(run) is None
    assert "checkpoint-6: optimizer.pt is missing; checkpoint-4: optimizer.pt is missing" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_fingerprint_sees_a_change_at_either_end(size, tmp_path):
    file = tmp_path / "f"
    content = bytearray(random.Random(size).randbytes(size))
    file.write_bytes(content)
    before = fingerprint(file)
    assert fingerprint(file) == before
    for place in {0, size - 1} if size else ():
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert fingerprint(file) != before


# -- a save that stops half-way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("upto", ["model.safetensors", "rng_state.pth"])
def test_first_save_stopped(upto, tmp_path):
    fake_save(tmp_path / "checkpoint-1")
    fake_save(tmp_path / "checkpoint-2", upto=upto)
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


def test_stopped_between_marker_and_trainer_state(tmp_path):
    fake_save(tmp_path / "checkpoint-1")
    fake_save(tmp_path / "checkpoint-2", upto="rng_state.pth")
    write_marker(tmp_path / "checkpoint-2")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("upto", ["model.safetensors", "rng_state.pth"])
def test_written_over_and_stopped(upto, tmp_path):
    """The old marker and the old trainer_state.json are still there and fit each other."""
    fake_save(tmp_path / "checkpoint-1")
    fake_save(tmp_path / "checkpoint-2", weights=b"a" * 5000)
    fake_save(tmp_path / "checkpoint-2", weights=b"b" * 5000, upto=upto)
    assert why_not_whole(tmp_path / "checkpoint-2") == "model.safetensors is not the file that was saved"
    write_marker(tmp_path / "checkpoint-2")
    assert "of another save" in why_not_whole(tmp_path / "checkpoint-2")
    fake_save(tmp_path / "checkpoint-2", weights=b"b" * 5000)
    assert why_not_whole(tmp_path / "checkpoint-2") is None


def test_written_over_with_the_same_bytes(tmp_path):
    fake_save(tmp_path / "checkpoint-2")
    marker = read_marker(tmp_path / "checkpoint-2")
    fake_save(tmp_path / "checkpoint-2")
    assert read_marker(tmp_path / "checkpoint-2") == marker
    assert why_not_whole(tmp_path / "checkpoint-2") is None


def test_going_back_and_on(tmp_path):
    """The line of training that was saved last counts, whatever its step numbers."""
    for n in (1, 2, 3):
        fake_save(tmp_path / f"checkpoint-{n}", weights=b"a" * n)
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-3")
    fake_save(tmp_path / "checkpoint-2", weights=b"b" * 2)
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-2")


def test_training_past_checkpoints_without_saving_leaves_them_whole(run):
    trainer(run, max_steps=6, save_strategy="no").train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert [why_not_whole(run / f"checkpoint-{n}") for n in (2, 4, 6)] == [None, None, None]


class SaveNow(TrainerCallback):
    """Asks for a save after the package's own callback was called in ``event``."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._ask)

    def _ask(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 4


class Killed(BaseException):
    pass


SAVES = {
    "by steps": {},
    "asked for in on_step_end": {"save_strategy": "no", "callbacks": [SaveNow("on_step_end")]},
    "asked for in on_log": {"save_strategy": "no", "callbacks": [SaveNow("on_log")]},
    "the best": {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 4},
}


@pytest.mark.parametrize("changes", SAVES.values(), ids=SAVES.keys())
def test_a_save_takes_the_old_marker_before_its_first_file(changes, run, monkeypatch):
    """Weights of another save can have the fingerprint of the old ones, if little of them is trained."""
    t = trainer(run, max_steps=4, eval_dataset=texts(8), **changes)

    def killed(*_, **__):
        assert MARKER not in names(run / "checkpoint-4")
        raise Killed

    monkeypatch.setattr(t, "_save", killed)
    with pytest.raises(Killed):
        t.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert [why_not_whole(run / f"checkpoint-{n}") is None for n in (2, 4, 6)] == [True, False, True]


def test_weights_saved_into_a_checkpoint_by_hand_take_its_marker(run):
    trainer(run, optim="adamw_torch").save_model(str(run / "checkpoint-6"))
    assert MARKER not in names(run / "checkpoint-6")
    assert last_complete_checkpoint(run) == str(run / "checkpoint-4")


def test_another_process_than_the_saving_one_leaves_the_marker(run, monkeypatch):
    t = trainer(run)
    monkeypatch.setattr(TrainingArguments, "should_save", False)
    t.save_model(str(run / "checkpoint-6"))
    assert why_not_whole(run / "checkpoint-6") is None


def test_marking_fails_but_training_goes_on(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_flush", full)
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        trainer(tmp_path, max_steps=2).train()
    assert "checkpoint-2 could not be marked as finished" in caplog.text and "No space left" in caplog.text
    assert last_complete_checkpoint(tmp_path) is None


def test_leftover_temporary_marker_is_not_listed(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / f"{MARKER}.tmp").write_text("{")
    fake_save(tmp_path / "checkpoint-1")
    listed = set(read_marker(tmp_path / "checkpoint-1")["files"])
    assert listed == {"model.safetensors", "optimizer.pt", "rng_state.pth"}


# -- several processes ----------------------------------------------------------------------------------------------


def test_other_ranks_must_have_finished(tmp_path):
    path = tmp_path / "checkpoint-1"
    fake_save(path, ranks=3)
    assert why_not_whole(path) == "rng_state_1.pth, written by another process, is missing or unfinished"
    fake_save(path, ranks=3, upto="rng_state_1.pth")
    assert why_not_whole(path).startswith("rng_state_2.pth")
    fake_save(path, ranks=3, upto="rng_state_2.pth")
    assert why_not_whole(path) is None
    content = (path / "rng_state_2.pth").read_bytes()
    (path / "rng_state_2.pth").write_bytes(content[:-40])
    assert why_not_whole(path).startswith("rng_state_2.pth")


# -- torn folders in the way ----------------------------------------------------------------------------------------


def test_torn_folders_are_set_aside(tmp_path):
    for n in (1, 2, 3):
        fake_save(tmp_path / f"checkpoint-{n}")
    (tmp_path / "checkpoint-3" / TRAINER_STATE).write_text('{"global_step": 3, "log_hist')
    fake_save(tmp_path / "checkpoint-4", upto="model.safetensors")
    fake_save(tmp_path / "checkpoint-0", upto="model.safetensors")
    moved = set_aside_torn(tmp_path, beyond=2)
    assert sorted(map(os.path.basename, moved)) == ["torn-checkpoint-3", "torn-checkpoint-4"]
    assert names(tmp_path) == ["checkpoint-0", "checkpoint-1", "checkpoint-2", "torn-checkpoint-3", "torn-checkpoint-4"]
    assert "model.safetensors" in names(tmp_path / "torn-checkpoint-4")
    fake_save(tmp_path / "checkpoint-4", upto="model.safetensors")
    assert set_aside_torn(tmp_path, beyond=2) == [str(tmp_path / "torn-checkpoint-4-2")]


def test_a_torn_folder_does_not_cost_the_next_checkpoints(run):
    """save_total_limit=1, with a torn folder of a higher number than anything that will be saved."""
    shutil.copytree(run / "checkpoint-6", run / "checkpoint-90")
    (run / "checkpoint-90" / TRAINER_STATE).unlink()
    (run / "checkpoint-90" / MARKER).unlink()
    trainer(run, max_steps=8, save_total_limit=1).train(resume_from_checkpoint=last_complete_checkpoint(run))
    assert last_complete_checkpoint(run) == str(run / "checkpoint-8")
    assert [n for n in names(run) if "checkpoint" in n] == ["checkpoint-8", "torn-checkpoint-90"]


def test_a_hyperparameter_search_is_not_marked(tmp_path):
    args = arguments(tmp_path)
    callback = hf_memopt.MemoptCallback()
    t = trainer(tmp_path)
    t.create_optimizer()
    t.state.is_hyper_param_search = True
    callback.on_train_begin(args, t.state, t.control, optimizer=t.optimizer)
    (tmp_path / "checkpoint-0").mkdir()
    assert callback.state() == {"args": {}, "attributes": {"save_id": None}}
    assert names(tmp_path / "checkpoint-0") == []
