"""LoRA of PEFT with less activation memory, and what may happen to a model afterwards: adapters that come and go where
its forward does not run, unloading, inference, interrupts."""

from __future__ import annotations

import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_memopt import LoraMemory, LoraMemoryConfig, compress_lora
from hf_memopt.activations import shared
from hf_memopt.activations.lora import LoraFactor
from hf_memopt.activations.recompute import restore
from tests.integration.adapters import IDS, adapted, assert_same, logits, step
from tests.integration.tiny_llama import tiny_llama

BF16 = torch.bfloat16
SECOND = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)


def add_second(model, config=SECOND):
    torch.manual_seed(8)
    model.add_adapter("second", config)
    model.set_adapter("second")


def changed(model) -> list[str]:
    """Names of modules that are not PEFT's and transformers' own, or have hooks."""
    factors = [n for n, m in model.named_modules() if isinstance(m, LoraFactor) or m._forward_pre_hooks]
    return factors + restore(model)


def test_an_adapter_deleted_and_added_again_with_one_config():
    theirs, ours = adapted(dtype=BF16, upcast=False), adapted(dtype=BF16, upcast=False)
    compress_lora(ours)
    for model in (theirs, ours):
        add_second(model)
    step(ours)
    for model in (theirs, ours):
        model.delete_adapter("second")
        add_second(model)
        model.base_model.model.to(BF16)
    assert_same(step(theirs), step(ours))
    assert type(ours.base_model.model.model.layers[0].self_attn.q_proj.lora_A["second"]) is LoraFactor


def test_an_adapter_that_is_new_when_the_model_generates():
    """fp32 adapters on a bf16 model; generate() calls the model inside, not the one that PEFT made."""
    theirs, ours = adapted(dtype=BF16), adapted(dtype=BF16)
    compress_lora(ours)
    texts = []
    for model in (theirs, ours):
        add_second(model)
        texts.append(model.eval().generate(input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))
        with torch.no_grad():
            model.get_base_model()(input_ids=IDS)
    assert torch.equal(*texts)


def test_trained_tokens_beside_adapters_are_left_alone():
    parts = {"target_modules": ["q_proj", "up_proj"], "trainable_token_indices": [1, 2]}
    theirs, ours = adapted(**parts), adapted(**parts)
    handle = compress_lora(ours)
    assert_same(step(theirs), step(ours))
    assert {s.reason for s in handle.report().skipped} == {"trained tokens of an embedding"}


@pytest.mark.parametrize("tier", ["exact", "compressed"])
def test_inference_mode_while_training(tier):
    """Its tensors have no version, and fp32 activations are cast for autocast."""
    ours = adapted()
    compress_lora(ours, LoraMemoryConfig(tier, recompute="none"))
    with torch.autocast("cpu", BF16):
        with torch.inference_mode():
            inferred = ours(input_ids=IDS).logits
        with torch.no_grad():
            assert torch.equal(inferred, ours(input_ids=IDS).logits)


def test_nothing_is_held_after_an_interrupt():
    ours = adapted()
    compress_lora(ours)

    def interrupt(module, args):
        raise KeyboardInterrupt

    hook = ours.base_model.model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(ours)
    hook.remove()
    assert shared._scopes.stack  # torch runs no hook on it
    step(ours)
    assert not shared._scopes.stack


def test_restore_reaches_copies_in_modules_to_save():
    ours = adapted()
    handle = compress_lora(ours)
    ours.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]))
    ours.set_adapter("second")
    step(ours)
    handle.restore()
    assert not changed(ours)


@pytest.mark.parametrize("again", [False, True])
def test_an_unloaded_model_is_plain_after_its_next_run(again):
    """And with new adapters in it, those are what counts."""
    ours, plain = adapted(), adapted()
    compress_lora(ours)
    base, expected = ours.merge_and_unload(), plain.merge_and_unload()
    if again:
        theirs, second = adapted(expected), adapted(base)
        handle = compress_lora(second)
        assert {entry.outcome for entry in handle.report().recomputed} == {"recomputed"}
        second.generate(input_ids=IDS, max_new_tokens=1, pad_token_id=0)  # runs the hooks of the model inside
        kept = step(second.train())
        assert_same(step(theirs.train()), kept)
        assert kept[2] < step(theirs)[2]
        handle.restore()
    assert torch.equal(logits(expected), logits(base))
    assert not changed(base)


def test_pickled_whole():
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
    ours = get_peft_model(tiny_llama(), config).train()
    compress_lora(ours)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    results = []
    for model in (ours, other):
        torch.manual_seed(1)
        results.append(step(model))
    assert_same(*results)
    add_second(other)
    step(other)
    assert LoraMemory.of(other) is not LoraMemory.of(ours) is not None and "second" not in ours.peft_config
    assert not any(type(m) is nn.Linear for name, m in other.named_modules() if ".lora_" in name)
