"""Which parameter gets which treatment."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_memopt.param_groups import MIN_TERNARY_ELEMENTS, build_param_groups, decide
from tests.cases import SHAPES


def llama(tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=1, n_head=2))


def build(model, *, no_decay=(), **options) -> dict[str, dict]:
    """Group of every trainable parameter by its name; each must be in exactly one, under its own name."""
    groups = build_param_groups(model, weight_decay=0.1, no_decay=no_decay, **options)
    by_name = {name: group for group in groups for name in group["param_names"]}
    flat = [(name, p) for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(flat) == len(by_name) == len(trainable)
    assert all(trainable[name] is p for name, p in flat)
    torch.optim.SGD(groups, lr=0.1)  # torch's own check that nothing is in two groups
    return by_name


def treatments(by_name: dict[str, dict]) -> dict[str, str]:
    return {name: group["treatment"] for name, group in by_name.items()}


# -- decide --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES.values(), (), (10**6,), (64, 64), (63, 65), (4096, 0), (0,)], ids=str)
def test_decide_by_shape(shape):
    found = decide(shape)
    ternary = len(shape) >= 2 and math.prod(shape) >= MIN_TERNARY_ELEMENTS
    assert found.name == ("ternary" if ternary else "dense")
    assert found.reason


def test_decide_by_choice():
    big = (512, 512)
    assert decide(big, targeted=False).name == "dense"
    assert decide(big, embedding=True).name == "ternary"
    assert decide(big, embedding=True, dense_embeddings=True).name == "dense"
    assert decide(big, dense_embeddings=True).name == "ternary"
    reasons = {
        decide(big, targeted=False).reason,
        decide(big, embedding=True, dense_embeddings=True).reason,
        decide((9,)).reason,
        decide((3, 3)).reason,
    }
    assert len(reasons) == 4


# -- decay ---------------------------------------------------------------------------------------


def test_decay_follows_the_given_names():
    model = llama(tied=True)
    no_decay = {name for name, p in model.named_parameters() if p.dim() < 2}
    no_decay.add("model.layers.0.mlp.up_proj.weight")
    by_name = build(model, no_decay=no_decay)
    for name, group in by_name.items():
        assert group["weight_decay"] == (0.0 if name in no_decay else 0.1)
        assert group["decays"] == (name not in no_decay)


def test_groups_stay_apart_when_the_decay_is_zero():
    """Whether a parameter would decay is needed to follow the Trainer's order, also when the decay is 0."""
    model = llama(tied=True)
    groups = build_param_groups(model, weight_decay=0.0, no_decay=["model.norm.weight"])
    assert {group["decays"] for group in groups if group["treatment"] == "dense"} == {True, False}


# -- models --------------------------------------------------------------------------------------


def test_everything_by_default():
    model = llama(tied=False)
    for name, treatment in treatments(build(model)).items():
        p = model.get_parameter(name)
        assert treatment == ("ternary" if p.dim() >= 2 and p.numel() >= MIN_TERNARY_ELEMENTS else "dense")
    assert treatments(build(model))["lm_head.weight"] == "ternary"


@pytest.mark.parametrize("tied", [True, False])
def test_dense_embeddings(tied):
    model = llama(tied)
    found = treatments(build(model, dense_embeddings=True))
    assert found["model.embed_tokens.weight"] == "dense"
    assert found.get("lm_head.weight", "dense") == "dense" and ("lm_head.weight" in found) != tied
    assert found["model.layers.0.self_attn.q_proj.weight"] == "ternary"


def test_dense_embeddings_of_models_of_other_kinds():
    found = treatments(build(gpt2(), dense_embeddings=True))
    assert found["transformer.wte.weight"] == found["transformer.wpe.weight"] == "dense"
    assert found["transformer.h.0.attn.c_attn.weight"] == "ternary"
    config = BertConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    found = treatments(build(BertForSequenceClassification(config), dense_embeddings=True))
    assert (
        found["bert.embeddings.word_embeddings.weight"]
        == found["bert.embeddings.position_embeddings.weight"]
        == "dense"
    )
    assert found["bert.encoder.layer.0.intermediate.dense.weight"] == "ternary"
    # a model that is no transformers model has embeddings all the same
    plain = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128))
    assert treatments(build(plain, dense_embeddings=True)) == {
        "0.weight": "dense",
        "1.weight": "ternary",
        "1.bias": "dense",
    }


def test_tied_weights_are_there_once():
    model = llama(tied=True)
    by_name = build(model)
    assert "model.embed_tokens.weight" in by_name and "lm_head.weight" not in by_name


def test_frozen_parameters_are_left_out():
    model = llama(tied=False)
    model.model.requires_grad_(False)
    assert list(build(model)) == ["lm_head.weight"]
    model.requires_grad_(False)
    assert build_param_groups(model, weight_decay=0.1, no_decay=[]) == []


# -- optim_target_modules ------------------------------------------------------------------------


def ternary_names(model, target_modules, **options) -> set[str]:
    return {
        name for name, t in treatments(build(model, target_modules=target_modules, **options)).items() if t == "ternary"
    }


def test_a_string_is_a_regular_expression_for_the_whole_module_name():
    model = llama(tied=False)
    q = {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    assert ternary_names(model, r".*\.q_proj") == q
    assert ternary_names(model, r"model\.layers\.0\.self_attn\.q_proj") == {"model.layers.0.self_attn.q_proj.weight"}
    assert ternary_names(model, r".*(q_proj|up_proj)") == q | {f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)}
    with pytest.raises(ValueError, match="q_proj.*matches no module"):
        build_param_groups(model, weight_decay=0, no_decay=[], target_modules="q_proj")  # part of a name is not enough


def test_a_list_holds_parts_of_module_names():
    model = llama(tied=False)
    assert ternary_names(model, ["layers.1.mlp"]) == {
        f"model.layers.1.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }
    assert ternary_names(model, ("lm_head", "q_proj")) == {"lm_head.weight"} | {
        f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)
    }


def test_a_list_holds_regular_expressions_too():
    """As transformers' documentation of GaLore writes them."""
    model = llama(tied=False)
    documented = ternary_names(model, [r".*.attn.*", r".*.mlp.*"])
    assert documented == ternary_names(model, ["self_attn", "mlp"]) and documented
    assert ternary_names(model, [r"model\.layers\.\d+\.mlp\.up_proj", "lm_head"]) == {"lm_head.weight"} | {
        f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)
    }
    with pytest.raises(ValueError, match="matches no module"):  # the whole name, not the beginning of one
        build_param_groups(model, weight_decay=0, no_decay=[], target_modules=[r"model\.layers\.\d+\.ml"])


@pytest.mark.parametrize("spelling", ["all-linear", "all_linear"])
def test_all_linear(spelling):
    model = llama(tied=False)
    found = ternary_names(model, spelling)
    assert "lm_head.weight" in found and "model.embed_tokens.weight" not in found
    linears = {
        f"{name}.weight"
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m.weight.numel() >= MIN_TERNARY_ELEMENTS
    }
    assert found == linears


def test_all_linear_covers_conv1d_and_a_tied_head():
    found = ternary_names(gpt2(), "all-linear")
    assert {"transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"} <= found
    assert "transformer.wpe.weight" not in found
    assert "transformer.wte.weight" in found  # it is the head's weight too


def test_small_matrices_in_a_target_stay_dense():
    model = llama(tied=False)
    by_name = build(model, target_modules=["k_proj"])  # 32 x 64 elements
    assert by_name["model.layers.0.self_attn.k_proj.weight"]["treatment"] == "dense"
    assert "4096" in by_name["model.layers.0.self_attn.k_proj.weight"]["reason"]
    assert by_name["model.layers.0.self_attn.q_proj.weight"]["reason"] == "not in optim_target_modules"


@pytest.mark.parametrize("target", [r"nothing", ["q_proj", "nothing"], ["norm"], ["all-linear"]], ids=str)
def test_a_pattern_that_matches_no_matrix_is_an_error(target):
    with pytest.raises(ValueError, match="optim_target_modules: .* matches no module with a trainable matrix .*q_proj"):
        build_param_groups(llama(tied=True), weight_decay=0, no_decay=[], target_modules=target)


def test_a_pattern_that_matches_only_frozen_matrices_is_an_error():
    model = llama(tied=False)
    model.model.requires_grad_(False)
    with pytest.raises(ValueError, match="matches no module with a trainable matrix"):
        build_param_groups(model, weight_decay=0, no_decay=[], target_modules=["q_proj"])


@pytest.mark.parametrize("target", ["(", [], [""], [3], ["q_proj", None]], ids=str)
def test_malformed_targets(target):
    with pytest.raises(ValueError, match="^optim_target_modules"):
        build_param_groups(llama(tied=True), weight_decay=0, no_decay=[], target_modules=target)


def test_an_empty_string_matches_the_model_itself_only():
    with pytest.raises(ValueError, match="matches no module"):
        build_param_groups(llama(tied=True), weight_decay=0, no_decay=[], target_modules="")
