"""Update during backward under the unmodified Trainer: names, logs, resume, combinations, refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny_llama import differences, inner, snapshot, tiny_llama, trainer
from transformers import TrainingArguments

import hf_memopt
from hf_memopt import TacoAdamW

NO_CLIPPING = {"max_grad_norm": 0.0}
IN_BACKWARD = {"optim": "taco_adamw_layerwise", **NO_CLIPPING}


def history(t, key):
    return [entry[key] for entry in t.state.log_history if key in entry]


def assert_same(one, other):
    assert differences(snapshot(one), snapshot(other)) == []


COMBINATIONS = {
    "fp32": {},
    "tied": {"model": {"tie_word_embeddings": True}},
    "bf16 weights": {"dtype": torch.bfloat16},
    "bf16 autocast": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.mark.parametrize("changes", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_the_same_as_without(tmp_path, changes):
    changes = dict(changes)
    config, dtype = changes.pop("model", {}), changes.pop("dtype", torch.float32)
    runs = []
    for number, optim in enumerate(("taco_adamw", "taco_adamw_layerwise")):
        t = trainer(tmp_path / str(number), model=tiny_llama(dtype, **config), optim=optim, **NO_CLIPPING, **changes)
        t.train()
        runs.append(t)
    plain, ours = runs
    assert inner(ours.optimizer).update_in_backward and not inner(plain.optimizer).update_in_backward
    assert_same(plain, ours)
    assert history(ours, "loss") == history(plain, "loss")
    assert history(ours, "learning_rate") == history(plain, "learning_rate")
    assert len(set(history(ours, "learning_rate"))) > 1


def test_taco_in_backward_and_its_resume(tmp_path):
    config = {"optim": "taco_layerwise", "dtype": torch.bfloat16, **NO_CLIPPING}
    whole = trainer(tmp_path / "whole", **config)
    whole.train()
    plain = trainer(tmp_path / "plain", **{**config, "optim": "taco"})
    plain.train()
    assert_same(whole, plain)
    resumed = trainer(tmp_path / "whole", **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(whole, resumed)
    report = inner(whole.optimizer).memory_report()
    assert {(row.treatment, row.reason) for row in report.rows} == {
        ("one_sparse", "linear layer"),
        ("ternary", "embedding or output head"),
        ("ternary", "columns under 128 entries"),
        ("dense", "vector"),
    }
    assert report.table().startswith("Taco with update in backward, kernel ")


def test_the_logged_norm_is_the_true_one(tmp_path):
    # max_grad_norm large enough to clip nothing makes every version of the Trainer log the norm
    plain = trainer(tmp_path / "plain", max_grad_norm=1e9)
    ours = trainer(tmp_path / "ours", **IN_BACKWARD, report_to=["hf_memopt"])
    plain.train()
    ours.train()
    assert history(ours, "grad_norm") == pytest.approx(history(plain, "grad_norm"), rel=1e-4)
    assert len(history(ours, "memopt/zero_share")) == 6


def test_resume_is_bit_equal(tmp_path):
    whole = trainer(tmp_path / "whole", **IN_BACKWARD)
    whole.train()
    first = trainer(tmp_path / "resumed", **IN_BACKWARD)
    first.args.max_steps = 6
    first.train()
    resumed = trainer(tmp_path / "resumed", **IN_BACKWARD)
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))
    assert_same(whole, resumed)


def test_after_training_a_backward_is_a_backward(tmp_path):
    t = trainer(tmp_path, **IN_BACKWARD, lr_scheduler_type="constant", save_strategy="no")
    t.train()
    before = [p.detach().clone() for p in t.model.parameters()]
    batch = {key: value[None] for key, value in t.train_dataset[0].items()}
    t.model(**batch).loss.backward()
    assert all(p.grad is not None for p in t.model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(t.model.parameters(), before, strict=True))
    t.model.zero_grad()
    t.train()  # and training goes on
    assert not any(torch.equal(p, q) for p, q in zip(t.model.parameters(), before, strict=True))


def test_an_optimizer_that_was_left_behind_is_ended(tmp_path, caplog):
    model = tiny_llama()
    left = TacoAdamW(model.named_parameters(), update_in_backward=True)
    with caplog.at_level("WARNING", logger="hf_memopt"):
        t = trainer(tmp_path, model=model, optim="adamw_torch", save_strategy="no")
        t.train()
    assert "TacoAdamW of an earlier training still updated parameters" in caplog.text
    assert not left.state and min(history(t, "grad_norm")) > 0
    alone = trainer(tmp_path, optim="adamw_torch", save_strategy="no")
    alone.train()
    assert history(t, "loss") == history(alone, "loss")


def test_the_option_and_per_parameter_clipping(tmp_path):
    t = trainer(tmp_path, optim_args="update_in_backward=true,clip_per_parameter=0.01", **NO_CLIPPING)
    t.train()
    assert inner(t.optimizer).clip_per_parameter == 0.01
    assert history(t, "grad_norm")[0] > 0.01


def test_an_optimizer_passed_in_is_checked_too(tmp_path):
    model = tiny_llama()
    t = trainer(tmp_path, model=model)
    t.optimizer = TacoAdamW(model.named_parameters(), lr=1e-3, update_in_backward=True)
    with pytest.raises(ValueError, match="^TacoAdamW with update in backward .* set max_grad_norm=0"):
        t.train()


REFUSED = {
    "max_grad_norm=1.0: .* set max_grad_norm=0, and optim_args=": {},
    "gradient_accumulation_steps=2: .* set gradient_accumulation_steps=1": {
        **NO_CLIPPING,
        "gradient_accumulation_steps": 2,
    },
    "auto_find_batch_size: .* set per_device_train_batch_size": {**NO_CLIPPING, "auto_find_batch_size": True},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_when_the_trainer_is_made(tmp_path, sentence):
    with pytest.raises(ValueError, match=sentence):
        trainer(tmp_path, optim="taco_adamw_layerwise", **REFUSED[sentence])


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    both = "set gradient_accumulation_steps=1.*; nor max_grad_norm=1.0: .*clip_per_parameter"
    with pytest.raises(ValueError, match=both):
        trainer(tmp_path, optim="taco_layerwise", gradient_accumulation_steps=2)


def test_fp16_and_several_processes_are_refused(monkeypatch):
    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **NO_CLIPPING)
    monkeypatch.setattr(args, "fp16", True)
    with pytest.raises(ValueError, match="fp16 with its gradient scaler: set bf16=True"):
        hf_memopt.optimizer_cls_and_kwargs("taco_adamw_layerwise", args, tiny_llama())


def test_a_name_and_an_option_that_contradict_each_other(tmp_path):
    with pytest.raises(ValueError, match="this name means update_in_backward=true.*use optim='taco_adamw'"):
        trainer(tmp_path, **IN_BACKWARD, optim_args="update_in_backward=false").train()
    with pytest.raises(ValueError, match="'clip_per_parameter' needs update_in_backward=true"):
        trainer(tmp_path, optim_args="clip_per_parameter=1.0").train()


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    runs = []
    for number, optim in enumerate(("taco_adamw", "taco_adamw_layerwise")):
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(tiny_llama(), lora)
        t = trainer(tmp_path / str(number), model=model, optim=optim, **NO_CLIPPING)
        t.train()
        runs.append(t)
    assert_same(*runs)


def test_compiled_model(tmp_path):
    runs = []
    for number, optim in enumerate(("taco_adamw", "taco_adamw_layerwise")):
        model = tiny_llama()
        compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        short = {"max_steps": 2, "save_strategy": "no", "optim": optim}
        trainer(tmp_path / str(number), model=model, **short, **compiled, **NO_CLIPPING).train()
        assert all(p.grad is None for p in model.parameters())
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


TWO_PROCESSES = """
import sys, torch
import torch.distributed as dist
from hf_memopt import TacoAdamW
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
layer = torch.nn.Linear(80, 80)
optimizer = TacoAdamW(layer.parameters(), update_in_backward=True)
parallel = torch.nn.parallel.DistributedDataParallel(layer)
before = layer.weight.detach().clone()
try:
    parallel(torch.ones(1, 80)).sum().backward()
except NotImplementedError as error:
    assert torch.equal(before, layer.weight)
    print(error)
"""


def test_several_processes_are_refused_in_a_plain_loop(tmp_path):
    command = [sys.executable, "-c", TWO_PROCESSES, str(tmp_path / "store")]
    both = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    for process in both:
        said, _ = process.communicate(timeout=120)
        assert "does not support several processes" in said
