"""CompAct under the unmodified Trainer: by its names, and by its callback under any other ``optim=``."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file
from tiny_llama import arguments, differences, inner, snapshot, texts, tiny_llama, trainer
from transformers import Trainer

import hf_memopt
from hf_memopt import CompActAdamW, CompActCallback, CompActConfig, last_complete_checkpoint
from hf_memopt.activations.compression import STATE_KEY, compression_of
from hf_memopt.activations.layers import CARRIER, LeanLayer
from hf_memopt.integrations.trainer import refuse_unsupported

NAMES = ("compact_adamw", "compact_taco_adamw")
OPTIONS = "rank=0.5,update_proj_gap=3"
OTHERS = ("adamw_torch", "adamw_bnb_8bit", "taco_adamw")


def compact(tmp_path, optim="compact_adamw", **changes):
    """A Trainer that compresses: by the name of its optimizer, or by the callback."""
    settings = {"optim": optim}
    if optim.startswith("compact"):
        settings["optim_args"] = OPTIONS
    else:
        settings["callbacks"] = [CompActCallback(CompActConfig(rank=0.5, update_proj_gap=3))]
    if optim.endswith("layerwise"):
        settings["max_grad_norm"] = 0.0
    if optim.startswith("adamw_bnb"):
        pytest.importorskip("bitsandbytes")
    return trainer(tmp_path, **{**settings, **changes})


def history(t, key):
    return [entry[key] for entry in t.state.log_history if key in entry]


def names_in(optimizer) -> int:
    return sum(len(group["params"]) for group in inner(optimizer).param_groups)


# -- it trains ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", [*NAMES, *(f"{name}_layerwise" for name in NAMES), *OTHERS])
def test_it_trains_and_every_weight_moves(optim, tmp_path):
    model = tiny_llama()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    t = compact(tmp_path, optim, model=model, max_steps=12, save_strategy="no")
    t.train()
    assert history(t, "loss")[-1] < history(t, "loss")[0] - 0.3
    assert not [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    compression = compression_of(model)
    assert compression.steps == 12 and len(compression.layers) == 12
    assert {basis.epoch for basis in compression.bases()} == {5}  # after 1, 3, 6, 9, 12
    if optim.startswith("compact"):
        assert type(inner(t.optimizer)) is CompActAdamW
    if not optim.endswith("layerwise"):
        assert all(norm > 0 for norm in history(t, "grad_norm"))


def test_options_reach_the_model(tmp_path):
    args = "rank=0.5,recompute=norms,mlp,projection=gaussian,scale=0.5,update_proj_gap=7,seed=3"
    t = trainer(tmp_path, optim="compact_adamw", optim_args=args, optim_target_modules=["q_proj", "mlp"])
    t.create_optimizer()
    compression = compression_of(t.model)
    assert compression.config == CompActConfig(
        rank=0.5, recompute="norms,mlp", projection="gaussian", scale=0.5, update_proj_gap=7, seed=3
    )
    assert {n.rpartition(".")[2] for n in compression.layers} == {"q_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(compression.recomputation.recomputed) == 7


@pytest.mark.parametrize(
    ("optim_args", "match"),
    [
        ("rank=2.0", "compact_adamw: option 'rank' must be 1 or more, or a fraction up to 1.0, got 2.0"),
        ("rank=none", "compact_adamw: option 'rank' must be int or float"),
        ("projection=svd", "compact_adamw: option 'projection' must be principal.structured"),
        ("recompute=norms,attention", "compact_adamw: 'attention' in options"),
        ("rnk=0.5", "compact_adamw: there is no option 'rnk'"),
    ],
)
def test_wrong_options(optim_args, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        trainer(tmp_path, optim="compact_adamw", optim_args=optim_args).create_optimizer()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_backward_the_same_as_without(name, dtype, tmp_path):
    runs = []
    for optim in (name, f"{name}_layerwise"):
        t = compact(tmp_path / optim, optim, dtype=dtype, max_grad_norm=0.0, save_strategy="no")
        t.train()
        runs.append(t)
    assert inner(runs[1].optimizer).update_in_backward
    assert differences(snapshot(runs[0]), snapshot(runs[1])) == []
    assert history(runs[0], "loss") == history(runs[1], "loss")


def test_weight_decay_learning_rate_and_groups_are_adamws(tmp_path):
    """The carrier of a layer has what its weight would have."""
    settings = {"weight_decay": 0.3, "learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95}

    def by_name(t):
        groups = inner(t.create_optimizer()).param_groups  # first: it may compress
        names = {id(p): name.replace(CARRIER, "weight") for name, p in t.model.named_parameters()}
        return {names[id(p)]: (g["weight_decay"], g["lr"], g["betas"]) for g in groups for p in g["params"]}

    expected = by_name(trainer(tmp_path, optim="adamw_torch", **settings))
    for optim in ("compact_adamw", "adamw_torch"):
        assert by_name(compact(tmp_path, optim, **settings)) == expected


def test_gradients_of_carriers_are_clipped(tmp_path):
    norms = []
    for limit in (1e9, 1e-3):
        t = compact(tmp_path / str(limit), max_grad_norm=limit, max_steps=1, save_strategy="no")
        seen = {}
        t.create_optimizer().register_step_pre_hook(
            lambda optimizer, args, kwargs, seen=seen: seen.update(
                {id(p): p.grad.norm() for group in optimizer.param_groups for p in group["params"]}
            )
        )
        t.train()
        carriers = [p for name, p in t.model.named_parameters() if name.endswith(CARRIER)]
        norms.append(torch.stack([seen[id(p)] for p in carriers]))
    assert (norms[0] > 1e-3).any() and 0 < torch.linalg.vector_norm(norms[1]) <= 1e-3


# -- what the training arguments ask for -------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["compact_adamw", "adamw_torch"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(optim, reentrant, tmp_path):
    runs = []
    for number, changes in enumerate(
        ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}})
    ):
        t = compact(tmp_path / str(number), optim, save_strategy="no", **changes)
        t.train()
        runs.append(t)
    assert differences(snapshot(runs[0]), snapshot(runs[1])) == []
    assert history(runs[0], "loss") == history(runs[1], "loss")


@pytest.mark.parametrize("optim", ["compact_adamw", "adamw_torch"])
@pytest.mark.parametrize(
    "changes", [{"bf16": True}, {"dtype": torch.bfloat16}, {"gradient_accumulation_steps": 2}], ids=str
)
def test_mixed_precision_16_bit_weights_and_accumulation(optim, changes, tmp_path):
    t = compact(tmp_path, optim, max_steps=12, save_strategy="no", **changes)
    t.train()
    assert history(t, "loss")[-1] < history(t, "loss")[0] - 0.3
    assert compression_of(t.model).steps == 12


def test_evaluation_during_training_changes_nothing(tmp_path):
    runs = []
    for number, changes in enumerate(({}, {"eval_dataset": texts(8), "eval_strategy": "steps", "eval_steps": 1})):
        t = compact(tmp_path / str(number), save_strategy="no", **changes)
        t.train()
        runs.append(t)
    assert len(history(runs[1], "eval_loss")) == 6
    assert differences(snapshot(runs[0]), snapshot(runs[1])) == []
    ours = history(runs[1], "eval_loss")[-1]
    compression_of(runs[1].model).restore()
    assert runs[1].evaluate()["eval_loss"] == ours


def test_load_best_model_at_end(tmp_path, caplog):
    t = compact(
        tmp_path,
        eval_dataset=texts(8),
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the worst, which is not the last
    )
    with caplog.at_level(logging.WARNING):
        t.train()
    assert t.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(value, t.model.state_dict()[key]) for key, value in saved.items())
    assert "missing keys" not in caplog.text


def test_the_log_says_what_was_done(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_memopt"), "propagate", True)
    with caplog.at_level(logging.INFO, "hf_memopt"):
        compact(tmp_path, max_steps=2, save_strategy="no").train()
    assert "CompActAdamW (rank=0.5, principal)" in caplog.text
    assert caplog.text.count("Activations: 12 linear layers compressed (principal)") == 1
    assert "shares z with q_proj" in caplog.text and "carrier, " in caplog.text


# -- saving and resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", [*NAMES, "compact_adamw_layerwise", *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_bit_equal(optim, dtype, tmp_path):
    straight = compact(tmp_path, optim, dtype=dtype)
    straight.train()
    again = compact(tmp_path, optim, dtype=dtype)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert history(straight, "loss") == history(again, "loss")
    weights = again.model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in straight.model.state_dict().items())
    if "bnb" not in optim:  # whose state is nested
        assert differences(snapshot(straight), snapshot(again)) == []
    a, b = compression_of(straight.model), compression_of(again.model)
    assert a.steps == b.steps == 6
    assert all(torch.equal(x.top, y.top) for x, y in zip(a.bases(), b.bases(), strict=True))


@pytest.mark.parametrize("optim", ["compact_adamw", "adamw_torch"])
def test_checkpoints_hold_the_plain_model(optim, tmp_path):
    t = compact(tmp_path, optim, max_steps=2)
    t.train()
    folder = tmp_path / "checkpoint-2"
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == tiny_llama().state_dict().keys()
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0][STATE_KEY]["steps"] == 2
    loaded = type(t.model).from_pretrained(folder)
    assert not any(isinstance(m, LeanLayer) for m in loaded.modules())
    assert all(torch.equal(value, t.model.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_a_second_training_of_one_trainer_goes_on(tmp_path):
    t = compact(tmp_path, max_steps=3, save_strategy="no")
    t.train()
    t.train()
    assert compression_of(t.model).steps == 6


# -- what cannot work is said ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["compact_adamw", "adamw_torch"])
@pytest.mark.parametrize(("flag", "what"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")])
def test_sharding_is_refused(optim, flag, what, tmp_path, monkeypatch):
    args = arguments(tmp_path, optim=optim)
    monkeypatch.setenv(flag, "true")
    with pytest.raises(NotImplementedError, match=f"does not support {what}"):
        if optim == "compact_adamw":
            refuse_unsupported(optim, args)
        else:
            CompActCallback().on_init_end(args, None, None, model=tiny_llama())


def test_both_ways_at_once_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="optim='compact_adamw' compresses activations by itself: leave CompActCallback"
    ):
        trainer(tmp_path, optim="compact_adamw", callbacks=[CompActCallback()])


def test_an_optimizer_that_exists_already_is_refused(tmp_path):
    model = tiny_llama()
    args = arguments(tmp_path, optim="adamw_torch")
    optimizers = (torch.optim.AdamW(model.parameters()), None)
    with pytest.raises(ValueError, match="CompActCallback comes too late for an optimizer that exists already"):
        Trainer(model, args, train_dataset=texts(), callbacks=[CompActCallback()], optimizers=optimizers)


def compressed_llama():
    model = tiny_llama()
    hf_memopt.compress_activations(model, CompActConfig(rank=0.5))
    return model


@pytest.mark.parametrize(("optim", "make"), [("compact_adamw", tiny_llama), ("adamw_torch", compressed_llama)])
def test_a_model_of_model_init(optim, make, tmp_path):
    args = arguments(tmp_path, optim=optim, max_steps=2, save_strategy="no")
    t = Trainer(model_init=lambda: make(), args=args, train_dataset=texts())
    t.train()
    assert compression_of(t.model).steps == 2


def test_checkpoints_of_another_optimizer_are_marked_too(tmp_path):
    compact(tmp_path, "adamw_torch", max_steps=4, save_steps=2).train()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_the_callback_cannot_compress_what_model_init_makes_later(tmp_path):
    """The Trainer calls it once more when it trains, and nothing may train uncompressed in silence."""
    args = arguments(tmp_path, optim="adamw_torch", max_steps=2, save_strategy="no")
    t = Trainer(model_init=lambda: tiny_llama(), args=args, train_dataset=texts(), callbacks=[CompActCallback()])
    with pytest.raises(RuntimeError, match="not the one that CompActCallback compressed.*compress_activations"):
        t.train()


def test_options_in_two_places_must_agree(tmp_path):
    model = tiny_llama()
    hf_memopt.compress_activations(model, CompActConfig(rank=0.25))
    with pytest.raises(ValueError, match="compressed already, with other options"):
        compact(tmp_path, model=model).create_optimizer()
    t = trainer(tmp_path, model=model, optim="compact_adamw", optim_args="rank=0.25")
    assert names_in(t.create_optimizer()) == sum(p.requires_grad for p in model.parameters())
