"""QLoRA: real bitsandbytes layers under real PEFT adapters, and the preparation without the fp32 residual stream."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from peft import PeftModel, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from hf_memopt import LoraMemoryConfig, compress_lora, prepare_for_kbit_training
from hf_memopt.activations.int8 import LeanInt8
from tests.integration.adapters import IDS, adapted, assert_same, logits, step
from tests.integration.tiny_llama import tiny_llama

bnb = pytest.importorskip("bitsandbytes")
BF16 = torch.bfloat16
QUANTISED = {
    "nf4, twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
SHAPE = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("tiny")
    tiny_llama(BF16, **SHAPE).save_pretrained(where)
    return where


def quantised(path, kind, prepare=None):
    options = QUANTISED[kind]
    if "load_in_4bit" in options:
        options = {**options, "bnb_4bit_compute_dtype": BF16}
    model = LlamaForCausalLM.from_pretrained(
        path, quantization_config=BitsAndBytesConfig(**options), device_map="cpu", dtype=BF16
    )
    if prepare is None:
        model.requires_grad_(False)
    else:
        prepare(model)
    return model


def narrow(model):
    """With adapters in bf16, which TRL makes of those on quantised layers."""
    for name, p in model.named_parameters():
        if ".lora_" in name:
            p.data = p.data.to(BF16)
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", QUANTISED)
def test_bf16_adapters_have_pefts_bits_and_fewer_bytes(path, kind, dropout):
    theirs, ours = (narrow(adapted(quantised(path, kind), lora_dropout=dropout)) for _ in range(2))
    compress_lora(ours)
    a, b = step(theirs), step(ours)
    if not dropout:
        assert_same(a, b)
    assert b[2] < 0.65 * a[2]  # the head's logits are in both
    assert torch.equal(logits(theirs), logits(ours))


@pytest.mark.parametrize("kind", QUANTISED)
def test_fp32_adapters_give_what_they_give_on_a_layer_without_quantisation(path, kind):
    """The base is the same function of x in all: so ours and PEFT's in autocast agree, as in test_lora.py."""
    theirs, ours = adapted(quantised(path, kind)), adapted(quantised(path, kind))
    compress_lora(ours)
    with torch.autocast("cpu", BF16):
        loss, _, _ = step(theirs)
    assert torch.equal(loss, step(ours)[0])


@pytest.mark.parametrize("kind", QUANTISED)
def test_compressed_is_below_exact_where_nothing_is_recomputed(path, kind):
    held = []
    for tier in ("exact", "compressed"):
        model = narrow(adapted(quantised(path, kind)))
        compress_lora(model, LoraMemoryConfig(tier, 0.25, recompute="none"))
        held.append(step(model))
    assert torch.equal(held[0][0], held[1][0]) and held[1][2] < held[0][2]
    differing = {n for n in held[0][1] if not torch.equal(held[0][1][n], held[1][1][n])}
    assert differing and all("lora_A" in n and "o_proj" not in n for n in differing)


def test_int8_layers_keep_nothing_and_come_back(path):
    ours = adapted(quantised(path, "int8"), upcast=False)
    handle = compress_lora(ours)
    assert sum(isinstance(m, LeanInt8) for m in ours.modules()) == len(handle.report().int8) == 14
    handle.restore()
    assert not any(isinstance(m, LeanInt8) for m in ours.modules())


def test_a_pickled_int8_layer_loads_in_another_process(path, tmp_path):
    ours = adapted(quantised(path, "int8"), upcast=False)
    compress_lora(ours)
    base = ours.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    torch.save(base, tmp_path / "layer.pt")
    code = "import sys, torch; print([c.__name__ for c in type(torch.load(sys.argv[1], weights_only=False)).__mro__])"
    command = [sys.executable, "-c", code, str(tmp_path / "layer.pt")]
    assert "LeanInt8" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("kind", QUANTISED)
def test_merging_and_loading_in_plain_peft(path, kind, tmp_path):
    theirs, ours, merged = (adapted(quantised(path, kind)) for _ in range(3))
    compress_lora(ours)
    ours.save_pretrained(tmp_path)
    assert torch.equal(logits(ours.merge_and_unload()), logits(merged.merge_and_unload()))
    assert torch.equal(logits(PeftModel.from_pretrained(quantised(path, kind), tmp_path)), logits(theirs))


def test_training_after_an_evaluation_on_cpu_has_its_gradients(path):
    """bitsandbytes packs 4-bit weights for inference when it evaluates on some CPUs, and is constant from then on."""
    models = [adapted(quantised(path, "nf4, twice", prepare_for_kbit_training)) for _ in range(2)]
    for model in models:
        compress_lora(model)
    logits(models[1])
    assert_same(step(models[0]), step(models[1]))
    packed = quantised(path, "nf4, twice")
    logits(packed)
    if any(getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", False) for p in packed.parameters()):
        with pytest.raises(ValueError, match="load the model again"):
            prepare_for_kbit_training(packed)


@pytest.mark.parametrize("reentrant", [True, False])
def test_preparation_without_fp32_halves_the_residual_stream(path, reentrant):
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    theirs = adapted(
        quantised(path, "nf4, twice", lambda m: prepare_model_for_kbit_training(m, **kwargs)), upcast=False
    )
    models = {
        upcast: adapted(
            quantised(path, "nf4, twice", lambda m, u=upcast: prepare_for_kbit_training(m, upcast=u, **kwargs)),
            upcast=False,
        )
        for upcast in ("none", "norms", "all")
    }
    norm = {name: m.base_model.model.model.norm.weight.dtype for name, m in models.items()}
    head = {name: m.base_model.model.lm_head.weight.dtype for name, m in models.items()}
    assert norm == {"none": BF16, "norms": torch.float32, "all": torch.float32}
    assert head == {"none": BF16, "norms": BF16, "all": torch.float32}
    assert_same(step(theirs), step(models["all"]))
    compress_lora(models["none"])
    # logits and loss are fp32 in both
    saved = step(theirs)[2] - step(models["none"])[2]
    assert saved >= IDS.numel() * 128 * 2 * 2  # the inputs of two blocks, two bytes an element less
    with pytest.raises(ValueError, match="upcast must be"):
        prepare_for_kbit_training(tiny_llama(), upcast="some")
