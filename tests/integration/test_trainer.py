"""``optim="taco_adamw"`` in the unmodified Trainer: what reaches the optimizer, what comes out, what is refused."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
from tiny_llama import arguments, differences, inner, snapshot, texts, tiny_llama, trainer
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import hf_memopt
from hf_memopt import TacoAdamW


def by_name(model) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def decay_of_each(t: Trainer) -> dict[str, float]:
    """Weight decay by parameter name, of the optimizer that ``t`` makes."""
    names = by_name(t.model)
    groups = t.create_optimizer().param_groups
    flat = [(names[id(p)], group["weight_decay"]) for group in groups for p in group["params"]]
    assert len(flat) == len(dict(flat))
    return dict(flat)


def losses(t: Trainer) -> list[float]:
    return [entry["loss"] for entry in t.state.log_history if "loss" in entry]


# -- what reaches the optimizer -------------------------------------------------------------------------------------


def test_it_trains_and_the_state_is_ternary(tmp_path):
    t = trainer(tmp_path, max_steps=30, save_strategy="no")
    t.train()
    optimizer = inner(t.optimizer)
    assert type(optimizer) is TacoAdamW
    assert losses(t)[-1] < losses(t)[0] - 1
    report = optimizer.memory_report()
    assert report.measured and report.bits_per_parameter < 5
    assert report.parameters == sum(p.numel() for p in t.model.parameters())
    assert {row.treatment for row in report.rows} == {"ternary", "dense"}


MODELS = {
    "llama": tiny_llama,
    "llama, tied": lambda: tiny_llama(tie_word_embeddings=True),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4)),
    "bert": lambda: BertForSequenceClassification(
        BertConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    ),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_weight_decay_as_for_adamw_torch(build, tmp_path):
    model = build()
    for p in list(model.parameters())[3:5]:
        p.requires_grad_(False)
    ours = decay_of_each(trainer(tmp_path, model=model, weight_decay=0.3))
    theirs = decay_of_each(trainer(tmp_path, model=model, weight_decay=0.3, optim="adamw_torch"))
    assert ours == theirs
    assert set(ours.values()) == {0.0, 0.3}


def test_hyperparameters_as_for_adamw_torch(tmp_path):
    changes = {"learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    ours = trainer(tmp_path, **changes).create_optimizer()
    theirs = trainer(tmp_path, optim="adamw_torch", **changes).create_optimizer()
    for key in ("lr", "betas", "eps"):
        assert {group[key] for group in ours.param_groups} == {group[key] for group in theirs.param_groups}


def test_schedule_and_logged_learning_rate_as_for_adamw_torch(tmp_path):
    logged = []
    for optim in ("taco_adamw", "adamw_torch"):
        t = trainer(tmp_path, optim=optim, warmup_steps=2, lr_scheduler_type="cosine", save_strategy="no")
        t.train()
        logged.append([entry["learning_rate"] for entry in t.state.log_history if "loss" in entry])
    assert logged[0] == logged[1] and len(set(logged[0])) > 3


def test_frozen_parameters_neither_move_nor_cost(tmp_path):
    model = tiny_llama()
    model.model.embed_tokens.requires_grad_(False)
    before = model.model.embed_tokens.weight.clone()
    t = trainer(tmp_path, model=model, save_strategy="no")
    t.train()
    assert torch.equal(before, model.model.embed_tokens.weight)
    assert inner(t.optimizer).memory_report().parameters == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


@pytest.mark.parametrize(
    ("target", "inside"),
    [
        (r".*\.(q|v)_proj", ("q_proj", "v_proj")),
        (["q_proj", "v_proj"], ("q_proj", "v_proj")),
        ("all-linear", ("proj", "lm_head")),
    ],
    ids=["regex", "list", "all-linear"],
)
def test_target_modules(target, inside, tmp_path):
    t = trainer(tmp_path, optim_target_modules=target)
    for group in t.create_optimizer().param_groups:
        for name in group["param_names"]:
            targeted = any(part in name for part in inside)
            assert (group["treatment"] == "ternary") == targeted, name


def test_target_modules_that_match_nothing(tmp_path):
    with pytest.raises(ValueError, match="optim_target_modules: 'w_proj' matches no module"):
        trainer(tmp_path, optim_target_modules=["w_proj"]).train()


def test_dense_embeddings(tmp_path):
    optimizer = trainer(tmp_path, optim_args="dense_embeddings=true").create_optimizer()
    dense = {name for group in optimizer.param_groups if group["treatment"] == "dense" for name in group["param_names"]}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= dense


@pytest.mark.parametrize(
    ("optim_args", "message"),
    [
        ("dense_embedding=true", "taco_adamw: there is no option 'dense_embedding'; the options are seed: int = 0, "),
        ("dense_embeddings=on", "taco_adamw: option 'dense_embeddings' must be true|false, got 'on'; the options are "),
        (
            "dense_embeddings",
            "taco_adamw: 'dense_embeddings' in options 'dense_embeddings' is not 'key=value'; the options are ",
        ),
        (
            "kernel=cuda",
            "taco_adamw: option 'kernel' must be auto|reference|compiled|triton|inductor, got 'cuda'; the options are ",
        ),
    ],
)
def test_wrong_options_fail_before_the_first_step(optim_args, message, tmp_path):
    t = trainer(tmp_path, optim_args=optim_args)
    with pytest.raises(ValueError, match=re.escape(message)):
        t.train()
    assert t.state.global_step == 0


def test_start_table_is_logged_once_before_the_first_step(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_memopt"):
        trainer(tmp_path, max_steps=2).train()
        trainer(tmp_path, max_steps=2, optim="adamw_torch").train()
    tables = [r.getMessage() for r in caplog.records if "bits/param" in r.getMessage()]
    assert len(tables) == 1
    assert "declared" in tables[0]
    assert re.search(r"ternary +matrix", tables[0]) and re.search(r"dense +vector", tables[0])


# -- without a model, and the fallback ------------------------------------------------------------------------------


def test_fallback_without_a_model_keeps_the_trainers_groups(tmp_path):
    args = arguments(tmp_path, weight_decay=0.3)
    t = Trainer(
        tiny_llama(),
        args,
        train_dataset=texts(),
        optimizer_cls_and_kwargs=hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args),
    )
    optimizer = t.create_optimizer()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert {optimizer.treatment_of(optimizer.param_groups[0], p) for p in optimizer.param_groups[0]["params"]} == {
        "ternary"
    }


def test_fallback_with_the_model_is_what_the_name_gives(tmp_path):
    results = []
    for named in (True, False):
        args = arguments(tmp_path / str(named), optim="taco_adamw" if named else "sgd")
        model = tiny_llama()
        extra = (
            {} if named else {"optimizer_cls_and_kwargs": hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, model)}
        )
        t = Trainer(model, args, train_dataset=texts(), **extra)
        t.train()
        results.append(snapshot(t))
    assert differences(*results) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"optim_args": "dense_embeddings=true"}, "dense_embeddings=true"),
        ({"optim_target_modules": "all-linear"}, "optim_target_modules"),
    ],
)
def test_options_that_need_the_model_say_so(changes, what, tmp_path):
    with pytest.raises(ValueError, match=f"taco_adamw: {what} .*pass the model"):
        hf_memopt.optimizer_cls_and_kwargs("taco_adamw", arguments(tmp_path, **changes))


def test_fallback_with_an_unknown_name(tmp_path):
    with pytest.raises(ValueError, match="hf_memopt has no optimizer 'adamw_torch'; it has .*taco_adamw"):
        hf_memopt.optimizer_cls_and_kwargs("adamw_torch", arguments(tmp_path))


# -- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "tensor, context or sequence parallelism"),
    ],
)
def test_unsupported_launchers_are_refused_by_name(flag, what, tmp_path, monkeypatch):
    args, other = arguments(tmp_path), arguments(tmp_path, optim="sgd")
    monkeypatch.setenv(flag, "true")
    for refused in (
        lambda: hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, tiny_llama()),
        lambda: hf_memopt.MemoptCallback().on_init_end(args, None, None),
    ):
        with pytest.raises(
            NotImplementedError, match=f"optim='taco_adamw' does not support {what}.*(train without|use adamw_torch)"
        ) as error:
            refused()
        assert f"; the environment variable {flag} asks for it" in str(error.value)
        assert f"unset {flag} if this run is not meant to use it" in str(error.value)
    hf_memopt.MemoptCallback().on_init_end(other, None, None)


def test_fsdp_arguments_are_refused(tmp_path):
    args = arguments(tmp_path)
    args.fsdp = ["full_shard"]
    with pytest.raises(NotImplementedError, match="optim='taco_adamw' does not support FSDP yet: ") as error:
        hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, tiny_llama())
    assert "environment" not in str(error.value)


# -- the ways of training -------------------------------------------------------------------------------------------


def test_gradient_accumulation_equals_the_large_batch(tmp_path):
    """The optimizer is asked once per accumulated step, with the same gradient up to the order of its sums."""
    results = []
    for size, accumulate in ((8, 1), (2, 4)):
        t = trainer(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            save_strategy="no",
            data_seed=3,
        )
        t.train()
        assert int(inner(t.optimizer).state[t.model.lm_head.weight]["step"]) == 1
        results.append(torch.cat([p.detach().flatten() for p in t.model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in tiny_llama().parameters()])
    moved = (results[0] - start).norm()
    assert (results[0] - results[1]).norm() < 0.01 * moved


def test_clipping_reaches_the_step(tmp_path):
    """A clipped run and a hand-clipped plain loop over the same batches end in the same bits."""
    t = trainer(tmp_path, max_steps=3, save_strategy="no", max_grad_norm=0.05, lr_scheduler_type="constant")
    batches = []
    collate = t.data_collator
    t.data_collator = lambda features: batches.append(collate(features)) or batches[-1]
    t.train()

    model = tiny_llama().train()
    decay = {n for n, p in model.named_parameters() if p.dim() > 1}
    cls, kwargs = hf_memopt.optimizer_cls_and_kwargs("taco_adamw", t.args, model)
    optimizer = cls(**kwargs)
    assert {n for g in kwargs["params"] if g["weight_decay"] for n in g["param_names"]} == decay
    for batch in batches[:3]:
        model(**batch).loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
        optimizer.zero_grad()
    for (name, a), b in zip(t.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)


def test_gradient_checkpointing_and_bf16_autocast(tmp_path):
    t = trainer(tmp_path, max_steps=10, save_strategy="no", gradient_checkpointing=True, bf16=True)
    t.train()
    assert losses(t)[-1] < losses(t)[0]
    assert all(p.dtype == torch.float32 for p in t.model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights(dtype, tmp_path):
    t = trainer(tmp_path, dtype=dtype, max_steps=20, save_strategy="no")
    t.train()
    assert all(p.dtype == dtype for p in t.model.parameters())
    assert losses(t)[-1] < losses(t)[0] - 0.5


def test_grad_scaler_skips_the_whole_step_and_backs_off():
    """An infinite gradient: GradScaler does not call the optimizer, halves its scale, and training goes on."""
    model = tiny_llama().train()
    optimizer = TacoAdamW([(n, p) for n, p in model.named_parameters()], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    batch = {key: torch.stack([row[key] for row in texts(4)]) for key in ("input_ids", "labels")}

    def step(poison: bool) -> None:
        scaler.scale(model(**batch).loss).backward()
        if poison:
            model.lm_head.weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(poison=False)
    weights = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    step(poison=True)
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    after = optimizer.state_dict()["state"]
    assert all(
        torch.equal(torch.as_tensor(state["state"][i][k]), torch.as_tensor(after[i][k]))
        for i in after
        for k in after[i]
    )
    step(poison=False)
    assert int(optimizer.state[model.lm_head.weight]["step"]) == 2
    assert optimizer.skipped_steps == 0


def test_a_non_finite_gradient_is_skipped_counted_and_logged(tmp_path):
    """One NaN element: clipping by the global norm, which the Trainer always does, makes every gradient NaN."""
    model = tiny_llama()
    count, weights = iter(range(100)), []

    def poison_the_second(grad):
        if next(count) != 1:
            return grad
        weights.extend(p.detach().clone() for p in model.parameters())
        return grad.index_fill(0, torch.tensor([0]), float("nan"))

    model.lm_head.weight.register_hook(poison_the_second)
    changes = {"max_grad_norm": 0, "report_to": ["hf_memopt"], "save_strategy": "no"}
    stopped = trainer(tmp_path, model=model, max_steps=2, **changes)
    stopped.train()
    assert len(weights) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))

    count = iter(range(100))
    t = trainer(tmp_path, model=model, max_steps=4, **changes)
    t.train()
    logged = [entry for entry in t.state.log_history if "loss" in entry]
    assert [entry["memopt/skipped_steps"] for entry in logged] == [0, *[len(list(model.parameters()))] * 3]
    assert {int(state["step"]) for state in inner(t.optimizer).state.values()} == {3}
    assert all(p.isfinite().all() for p in model.parameters())


def test_grad_scaler_inside_accelerate():
    """AcceleratedOptimizer finds out about a skipped step by patching ``step``."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    weight = nn.Parameter(torch.zeros(64, 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(TacoAdamW([("weight", weight)]), device_placement=False, scaler=scaler)
    skipped = []
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((weight * factor).sum()).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    assert skipped == [False, True, False]
    assert int(optimizer.optimizer.state[weight]["step"]) == 2
    assert weight.isfinite().all() and weight.abs().min() > 0


# -- PEFT and TRL ---------------------------------------------------------------------------------------------------


def lora(rank: int = 64):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def test_lora(tmp_path):
    from peft import get_peft_model

    model = get_peft_model(tiny_llama(), lora())
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    t = trainer(tmp_path, model=model, max_steps=20, learning_rate=3e-2)
    t.train()
    assert losses(t)[-1] < losses(t)[0]
    names = {name for group in inner(t.optimizer).param_groups for name in group["param_names"]}
    assert names == {n for n, p in model.named_parameters() if p.requires_grad}
    assert {row.treatment for row in inner(t.optimizer).memory_report().rows} == {"ternary"}
    assert all(torch.equal(frozen[n], p) for n, p in model.named_parameters() if n in frozen)


def test_lora_resume_is_bit_equal(tmp_path):
    from peft import get_peft_model

    def run(resume):
        t = trainer(tmp_path, model=get_peft_model(tiny_llama(), lora(8)))
        t.train(resume_from_checkpoint=resume)
        return snapshot(t)

    straight = run(None)
    assert differences(straight, run(str(tmp_path / "checkpoint-2"))) == []


def test_sft_trainer(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": row["input_ids"].tolist(), "labels": row["labels"].tolist()} for row in texts()]
    changes = {
        "optim": "taco_adamw",
        "optim_args": "seed=4",
        "max_steps": 4,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": "none",
    }
    config = trl.SFTConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        bf16=False,
        learning_rate=1e-2,
        logging_steps=1,
        dataset_kwargs={"skip_prepare_dataset": True},
        **changes,
    )
    t = trl.SFTTrainer(
        tiny_llama(),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=word_tokenizer(),
        peft_config=lora(),
    )
    t.train()
    optimizer = inner(t.optimizer)
    assert type(optimizer) is TacoAdamW and optimizer.param_groups[0]["seed"] == 4
    assert hf_memopt.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def word_tokenizer():
    """A tokenizer of 128 words; nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(126)} | {"[PAD]": 126, "[UNK]": 127}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[PAD]", unk_token="[UNK]")


# -- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [2, 4])
def test_resume_is_bit_equal(dtype, step, tmp_path):
    straight = trainer(tmp_path, dtype=dtype)
    straight.train()
    again = trainer(tmp_path, dtype=dtype)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert differences(snapshot(straight), snapshot(again)) == []
    assert losses(straight) == losses(again)


def test_state_of_a_checkpoint_loads_with_weights_only_and_keeps_dtypes(tmp_path):
    trainer(tmp_path, dtype=torch.bfloat16).train()
    saved = torch.load(tmp_path / "checkpoint-6" / "optimizer.pt", weights_only=True)
    dtypes = {
        key: value.dtype for state in saved["state"].values() for key, value in state.items() if torch.is_tensor(value)
    }
    assert dtypes["exp_avg.codes"] == torch.uint8 and dtypes["exp_avg_sq.row"] == torch.float32


def test_resume_from_plain_adamw_says_what_to_do(tmp_path):
    trainer(tmp_path, optim="adamw_torch").train()
    with pytest.raises(
        ValueError, match="holds the state of another optimizer, not TacoAdamW's: .*import_adamw_state"
    ) as error:
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert "\n" not in str(error.value)


def test_resume_with_other_options_says_what_to_do(tmp_path):
    trainer(tmp_path).train()
    with pytest.raises(ValueError, match="This checkpoint.*(optim_args|grouping)"):
        trainer(tmp_path, optim_args="dense_embeddings=true").train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-4")
        )


def test_training_arguments_alone_are_enough(tmp_path):
    """No callback, no class of ours: one import and one word."""
    args = TrainingArguments(str(tmp_path), optim="taco_adamw", max_steps=1, use_cpu=True, report_to=[])
    t = Trainer(tiny_llama(), args, train_dataset=texts())
    t.train()
    assert hf_memopt.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("targets", [None, "all-linear"])
@pytest.mark.parametrize("optim", ["taco_adamw", "taco"])
def test_a_model_that_is_all_frozen(tmp_path, targets, optim):
    model = tiny_llama().requires_grad_(False)
    t = trainer(tmp_path, model=model, optim=optim, optim_target_modules=targets)
    with pytest.raises(ValueError, match="no trainable parameter"):
        t.train()
