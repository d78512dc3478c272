"""LoRA with less activation memory in the real Trainer and in TRL's SFTTrainer."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from hf_memopt import LoraMemory, LoraMemoryCallback, LoraMemoryConfig
from hf_memopt.activations.lora import LoraFactor
from tests.integration.adapters import adapted
from tests.integration.tiny_llama import arguments, differences, inner, snapshot, texts, tiny_llama


def make(where, callbacks=(), model=None, **changes) -> Trainer:
    model = adapted(lora_dropout=0.1) if model is None else model
    values = {"optim": "adamw_torch", "weight_decay": 0.0, **changes}
    return Trainer(model, arguments(where, **values), train_dataset=texts(), callbacks=list(callbacks))


def test_training_is_pefts_bit_for_bit(tmp_path):
    runs = []
    for name, callbacks in (("theirs", []), ("ours", [LoraMemoryCallback()])):
        t = make(tmp_path / name, callbacks, adapted(), max_steps=3, gradient_accumulation_steps=2)
        t.train()
        runs.append((snapshot(t), t.state.log_history[0]["loss"]))
    assert runs[0][1] == runs[1][1] and not differences(runs[0][0], runs[1][0])


@pytest.mark.parametrize("tier", ["exact", "compressed"])
def test_a_resumed_run_is_the_uninterrupted_one(tier, tmp_path):
    """Masks and subspaces come from the generator that the Trainer saves."""
    config = LoraMemoryConfig(tier, 0.25, recompute="none")
    whole = make(tmp_path, [LoraMemoryCallback(config)], max_steps=4)
    whole.train()
    callback = LoraMemoryCallback(config)
    rest = make(tmp_path, [callback], max_steps=4)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not differences(snapshot(whole), snapshot(rest))
    assert len(callback.handle.report().adapters) == 14


def test_with_an_optimizer_of_the_package_and_checkpointing(tmp_path):
    t = make(
        tmp_path,
        [LoraMemoryCallback(LoraMemoryConfig("compressed", recompute="none"))],
        max_steps=3,
        optim="taco_adamw",
        gradient_checkpointing=True,
    )
    t.train()
    losses = [entry["loss"] for entry in t.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(0 < loss < 10 for loss in losses)
    assert type(inner(t.optimizer)).__name__ == "TacoAdamW"


def test_asked_for_in_optim_args(tmp_path):
    t = make(tmp_path, max_steps=2, optim="taco_adamw", optim_args="lora_memory=compressed")
    t.train()
    assert sum(isinstance(m, LoraFactor) for m in t.model.modules()) == 28
    plain = make(tmp_path, model=tiny_llama(), max_steps=2, optim="galore_taco_adamw", optim_args="lora_memory=exact")
    with pytest.raises(ValueError, match="no adapters"):
        plain.train()


@pytest.mark.parametrize("how", ["callback", "optim_args"])
def test_a_second_trainer_for_one_model_keeps_what_the_first_did(how, tmp_path):
    model = adapted()
    if how == "callback":
        runs = [make(tmp_path, [LoraMemoryCallback()], model, max_steps=1) for _ in range(2)]
        other = LoraMemoryCallback(LoraMemoryConfig("compressed"))
        with pytest.raises(ValueError, match="already.*LoraMemory.of"):
            make(tmp_path, [other], model)
    else:
        asked = {"optim": "taco_adamw", "optim_args": "lora_memory=exact"}
        runs = [make(tmp_path, [], model, max_steps=1, **asked) for _ in range(2)]
    for t in runs:
        t.train()
    assert LoraMemory.of(model).config == LoraMemoryConfig()


def test_the_callback_changes_what_model_init_made(tmp_path):
    callback = LoraMemoryCallback()
    values = arguments(tmp_path, optim="adamw_torch", weight_decay=0.0, max_steps=1)
    t = Trainer(model_init=lambda: adapted(), args=values, train_dataset=texts(), callbacks=[callback])
    t.train()
    assert sum(isinstance(m, LoraFactor) for m in t.model.modules()) == 28
    assert LoraMemory.of(t.model) is callback.handle


def test_refused_when_the_trainer_is_made(tmp_path):
    with pytest.raises(ValueError, match="no adapters"):
        make(tmp_path, [LoraMemoryCallback()], tiny_llama())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_sft_trainer(tmp_path, checkpointing):
    """TRL makes the adapters itself, casts and checkpoints by its defaults; both runs begin and go on alike."""
    trl = pytest.importorskip("trl")
    losses = []
    for callbacks in ([], [LoraMemoryCallback()]):
        torch.manual_seed(0)
        args = trl.SFTConfig(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
            gradient_checkpointing=checkpointing, bf16=False, disable_tqdm=True, save_strategy="no", max_length=16,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in texts(16)])
        config = LoraConfig(r=4, target_modules="all-linear")
        t = trl.SFTTrainer(
            get_peft_model(tiny_llama(), config), args, train_dataset=data, processing_class=_tokenizer(),
            callbacks=callbacks,
        )  # fmt: skip
        t.train()
        assert bool(callbacks) == any(type(m) is LoraFactor for m in t.model.modules())
        losses.append([entry["loss"] for entry in t.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 3


def _tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(126)} | {"<pad>": 126, "<eos>": 127}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
