"""LoRA of PEFT with less activation memory: gradients, bytes, what is left alone, and that PEFT does not notice."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import VeloraConfig
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_memopt import LoraMemoryConfig, compress_lora
from hf_memopt.activations.lora import LoraFactor
from tests.integration.adapters import IDS, adapted, assert_same, logits, step
from tests.integration.tiny_llama import tiny_llama
from tests.tolerances import HALF_SPACING

BF16, FP32 = torch.bfloat16, torch.float32
CASES = {
    "fp32": {"dtype": FP32},
    "fp32, rsLoRA": {"dtype": FP32, "use_rslora": True},
    "fp32, lora_bias": {"dtype": FP32, "lora_bias": True},
    "fp32, few layers": {"dtype": FP32, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "bf16 adapters": {"dtype": BF16, "upcast": False},
}


@pytest.mark.parametrize("recompute", ["norms,mlp", "none"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.lora_bias")
def test_loss_and_gradients_are_pefts_bits(case, recompute):
    theirs, ours = adapted(**CASES[case]), adapted(**CASES[case])
    compress_lora(ours, LoraMemoryConfig(recompute=recompute))
    assert_same(step(theirs), step(ours))
    assert torch.equal(logits(theirs), logits(ours))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fp32_adapters_with_autocast_are_pefts_but_for_the_rounding_of_gradients(dtype):
    """PEFT's gradients of fp32 weights are rounded to bf16 on their way, ours are not; all else is the same bits.
    Sums in fp32 of 32 tokens differ by less than the last of the roundings, as they may round to either neighbour."""
    theirs, ours = adapted(dtype=dtype), adapted(dtype=dtype)
    compress_lora(ours)
    with torch.autocast("cpu", BF16):
        (loss, a, _), (loss2, b, _) = step(theirs), step(ours)
    assert torch.equal(loss, loss2) and a.keys() == b.keys()
    for name in a:
        size = b[name].abs().max()
        assert ((a[name] - b[name]).abs() <= HALF_SPACING[BF16] * (a[name].abs() + 2.0**-12 * size)).all(), name


def test_fp32_adapters_on_bf16_give_what_peft_gives_with_autocast():
    """They compute in bf16, as PEFT's do in autocast; PEFT's own without autocast compute in fp32."""
    theirs, ours = adapted(dtype=BF16), adapted(dtype=BF16)
    compress_lora(ours)
    with torch.autocast("cpu", BF16):
        loss, _, _ = step(theirs)
    loss2, gradients, _ = step(ours)
    assert torch.equal(loss, loss2)
    assert {g.dtype for g in gradients.values()} == {FP32}
    assert torch.equal(logits(theirs), logits(ours))


def test_gradients_on_bf16_are_as_near_to_the_truth_as_pefts():
    """The truth: the same numbers in fp64. Rounding errors of a whole model add up at random, so of two computations
    in one precision the one is as good as the other: here no worse than PEFT's in autocast by more than a quarter."""
    truth = step(adapted(dtype=BF16).double())[1]
    theirs, ours = adapted(dtype=BF16), adapted(dtype=BF16)
    compress_lora(ours)
    with torch.autocast("cpu", BF16):
        of_theirs = step(theirs)[1]
    of_ours = step(ours)[1]

    def error(gradients):
        return sum(((gradients[n] - truth[n]).norm() / truth[n].norm()).item() for n in truth) / len(truth)

    assert error(of_ours) <= 1.25 * error(of_theirs)


# -- bytes ------------------------------------------------------------------------------------------

H, INTER, KV, HEADS, R = 256, 896, 64, 4, 8
SHAPE = {"hidden_size": H, "intermediate_size": INTER, "num_attention_heads": HEADS, "num_key_value_heads": 1}


def block_bytes(change=lambda model: None, **lora) -> float:
    """Of one decoder block, a token: the difference between models of three blocks and of two."""
    held = []
    for blocks in (2, 3):
        model = adapted(dtype=BF16, shape={**SHAPE, "num_hidden_layers": blocks}, **lora)
        change(model)
        held.append(step(model)[2])
    return (held[1] - held[0]) / IDS.numel()


def test_bytes_of_a_block_are_the_formula_and_the_promise():
    statistics = 4 * HEADS  # log-sum-exp of attention
    rsqrt = 2 * 4  # of norms
    peft = block_bytes()
    narrow = block_bytes(upcast=False)
    ours = block_bytes(compress_lora)
    assert peft == 36 * H + 4 * KV + 10 * INTER + 7 * R * 4 + statistics + rsqrt
    assert narrow == 16 * H + 4 * KV + 8 * INTER + 7 * R * 2 + statistics + rsqrt
    assert ours == 8 * H + 4 * KV + 4 * INTER + 7 * R * 2 + statistics
    assert ours <= 0.5 * peft and ours <= 0.8 * narrow
    assert block_bytes(compress_lora, lora_dropout=0.1) == ours < 0.5 * block_bytes(lora_dropout=0.1)
    without = block_bytes(lambda model: compress_lora(model, LoraMemoryConfig(recompute="none")))
    assert without == narrow


@pytest.mark.parametrize("share", [4, 8])
def test_bytes_of_a_compressed_block(share):
    """Without recomputation, so that there is something to compress: z of q/k/v, of gate/up and of down instead of x;
    o_proj's x is what attention keeps. ``principal`` keeps the numbers of the chosen coordinates, 8 bytes each."""

    def change(model, kind):
        compress_lora(model, LoraMemoryConfig("compressed", 1 / share, kind, "none"))

    exact = 16 * H + 4 * KV + 8 * INTER + 7 * R * 2 + 4 * HEADS + 8
    z = exact - (2 * H + 2 * H + 2 * INTER) * (1 - 1 / share)
    # the product stays kept by nobody, the norm's output by nobody
    assert block_bytes(lambda model: change(model, "structured")) == z
    top = 8 * (2 * H + INTER) // share // 2 / IDS.numel()
    assert block_bytes(lambda model: change(model, "principal")) == z + top


def test_compressed_is_exact_where_inputs_are_kept_anyway():
    theirs, ours = adapted(), adapted()
    compress_lora(ours, LoraMemoryConfig("compressed", 0.25))
    assert_same(step(theirs), step(ours))


def gpt2(**lora):
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return adapted(model, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, **lora)


def test_conv1d_exact_and_compressed():
    theirs, ours, small = gpt2(), gpt2(), gpt2()
    compress_lora(ours)
    handle = compress_lora(small, LoraMemoryConfig("compressed", 0.25, recompute="none"))
    ranks = {row.name.rpartition("h.0.")[2]: row.rank for row in handle.report().adapters if ".h.0." in row.name}
    assert ranks == {"attn.c_attn": 16, "attn.c_proj": None, "mlp.c_fc": 16, "mlp.c_proj": 64}
    a, b, c = step(theirs), step(ours), step(small)
    assert_same(a, b)
    assert torch.equal(a[0], c[0]) and c[2] < a[2] and b[2] < a[2]
    exact = [name for name in a[1] if torch.equal(a[1][name], c[1][name])]
    assert all("lora_B" in name or ".attn.c_proj" in name for name in exact) and len(exact) == 4 * 2 + 2


@pytest.mark.parametrize("tier", ["exact", "compressed"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recompute", ["norms,mlp", "none"])
def test_gradient_checkpointing_changes_nothing(tier, reentrant, recompute):
    """With dropout, and compressed inputs drawn in the same forwards: the same masks and subspaces again."""
    results = []
    for checkpointing in (False, True):
        model = adapted(lora_dropout=0.1)
        compress_lora(model, LoraMemoryConfig(tier, 0.25, recompute=recompute))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(4)
        results.append(step(model))
    assert_same(*results)
    assert results[1][2] < results[0][2]


# -- what PEFT does with it -------------------------------------------------------------------------


def test_state_dict_saving_loading_and_merging_are_pefts(tmp_path):
    theirs, ours = adapted(), adapted()
    compress_lora(ours, LoraMemoryConfig("compressed"))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert torch.equal(logits(plain), logits(theirs))
    merged, expected = ours.merge_and_unload(), theirs.merge_and_unload()
    assert not any(isinstance(module, LoraFactor) for module in merged.modules())
    for (name, a), (other, b) in zip(merged.named_parameters(), expected.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)


def test_adapters_added_switched_disabled_and_deleted_later():
    theirs, ours = adapted(), adapted()
    handle = compress_lora(ours)
    for model in (theirs, ours):
        torch.manual_seed(8)
        model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
        model.set_adapter("second")
    assert_same(step(theirs), step(ours))
    assert {row.adapter for row in handle.report().adapters} == {"default", "second"}
    assert type(ours.base_model.model.model.layers[0].self_attn.q_proj.lora_A["second"]) is LoraFactor
    for model in (theirs, ours):
        model.base_model.set_adapter(["default", "second"])
    assert_same(step(theirs), step(ours))
    with theirs.disable_adapter(), ours.disable_adapter():
        assert torch.equal(logits(theirs), logits(ours))
    for model in (theirs, ours):
        model.delete_adapter("default")
        model.set_adapter("second")
    assert_same(step(theirs), step(ours))
    assert {row.adapter for row in handle.report().adapters} == {"second"}


def test_modules_to_save_head_and_embedding_adapters():
    parts = {"target_modules": ["embed_tokens", "q_proj", "lm_head"], "modules_to_save": ["model.norm"]}
    theirs, ours = adapted(**parts), adapted(**parts)
    handle = compress_lora(ours)
    assert_same(step(theirs), step(ours))
    skipped = {s.name.rpartition(".")[2]: s.reason for s in handle.report().skipped}
    assert skipped.keys() == {"embed_tokens", "norm"}
    assert "embedding" in skipped["embed_tokens"] and "modules_to_save" in skipped["norm"]


def test_dora_is_left_alone_and_a_later_one_gives_its_layer_back():
    theirs, ours = adapted(use_dora=True), adapted(target_modules=["v_proj"])
    with pytest.raises(ValueError, match="DoRA.*plain LoRA"):
        compress_lora(adapted(use_dora=True))
    theirs = adapted(target_modules=["v_proj"])
    handle = compress_lora(ours)
    for model in (theirs, ours):
        torch.manual_seed(8)
        model.add_adapter("dora", LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True))
        model.set_adapter("dora")
    assert_same(step(theirs), step(ours))
    assert not handle.report().adapters and len(handle.report().skipped) == 4
    assert "left alone: variant of LoRA: DoRA" in handle.report().table()


def test_restore_leaves_pefts_classes_and_nothing_else():
    plain, ours = adapted(lora_dropout=0.1), adapted(lora_dropout=0.1)
    handle = compress_lora(ours, LoraMemoryConfig("compressed"))
    step(ours)
    handle.restore()
    ours.zero_grad()
    for (name, a), (_, b) in zip(plain.named_modules(), ours.named_modules(), strict=True):
        assert type(a) is type(b) and a.__dict__.keys() == b.__dict__.keys(), name
        assert not b._forward_pre_hooks and not b._forward_hooks or a._forward_hooks
    compress_lora(ours)


def test_a_deep_copy_goes_on_by_itself():
    ours = adapted()
    compress_lora(ours)
    other = copy.deepcopy(ours)
    assert_same(step(ours), step(other))
    other.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj"]))
    other.set_adapter("second")
    step(other)
    assert type(other.base_model.model.model.layers[0].self_attn.q_proj.lora_A["second"]) is LoraFactor
    assert "second" not in ours.peft_config


def test_a_compiled_block_gives_the_same():
    eager, compiled = adapted(shape={"num_hidden_layers": 1}), adapted(shape={"num_hidden_layers": 1})
    for model in (eager, compiled):
        compress_lora(model)
    compiled.base_model.model.model.layers[0].mlp.compile(backend="aot_eager")
    assert_same(step(eager), step(compiled))


# -- refused ----------------------------------------------------------------------------------------


def test_refused_by_name():
    with pytest.raises(ValueError, match="no adapters"):
        compress_lora(tiny_llama())
    with pytest.raises(ValueError, match="ia3.*not LoRA"):
        compress_lora(get_peft_model(tiny_llama(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])))
    with pytest.raises(ValueError, match="VeLoRA already: leave velora_config out"):
        compress_lora(adapted(velora_config=VeloraConfig(num_groups=8)))
    ours = adapted()
    compress_lora(ours)
    with pytest.raises(ValueError, match="already"):
        compress_lora(ours)
    with pytest.raises(ValueError, match="embedding"):
        compress_lora(adapted(target_modules=["embed_tokens"]))


@pytest.mark.parametrize(
    "wrong", [{"tier": "lossy"}, {"rank": 0}, {"rank": 1.5}, {"projection": "svd"}, {"recompute": "all"}, {"seed": -1}]
)
def test_wrong_options(wrong):
    with pytest.raises(ValueError, match=f"compress_lora: option '{next(iter(wrong))}'"):
        LoraMemoryConfig(**wrong)


def test_importing_the_package_imports_no_peft():
    code = "import sys, hf_memopt; assert 'peft' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
