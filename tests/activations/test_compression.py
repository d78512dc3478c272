"""``compress_activations`` on the models that people train: which layers, who shares, what is left alone, learning."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_memopt import CompActConfig, compress_activations
from hf_memopt.activations.layers import CARRIER, LeanLayer
from hf_memopt.activations.patch import rank_of
from tests.activations.zoo import BLOCKS, MODELS, SKIPPED, batch, build


def optimizer_of(model: nn.Module, cls=torch.optim.AdamW, **options):
    return cls([p for p in model.parameters() if p.requires_grad], **{"lr": 3e-3, **options})


def train(model, optimizer, inputs, steps: int) -> list[float]:
    losses = []
    for i in range(steps):
        torch.manual_seed(i)  # dropout
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_which_layers_are_compressed_and_with_whom(name):
    model = build(name)
    compression = compress_activations(model, CompActConfig(rank=0.5))
    train(model, optimizer_of(model), batch(name), 1)
    report = compression.report()
    expected = {
        f"{place}.{i}.{layer}": f"{place}.{i}.{first}"
        for place, layers in BLOCKS[name].items()
        for i in range(2)
        for layer, first in layers.items()
    }
    assert {row.name: row.reads_with for row in report.layers} == expected
    assert {s.name: s.reason for s in report.skipped} == SKIPPED[name]
    for row in report.layers:
        layer = model.get_submodule(row.name)
        assert isinstance(layer, LeanLayer) and layer.settled and not layer.weight.requires_grad
        assert (row.outputs, row.rank) == layer._parameters[CARRIER].shape and row.rank == row.features // 2
    assert report.weights == sum(model.get_submodule(n).weight.numel() for n in expected)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n.removesuffix(f".{CARRIER}") for n in trainable if n.endswith(CARRIER)} == set(expected)
    table = report.table()
    assert table.startswith(f"Activations: {len(expected)} linear layers compressed (principal); the optimizer sees ")
    for reason in SKIPPED[name].values():
        assert f"left alone: {reason}" in table
    assert report.as_dict()["carriers"] == report.carriers


@pytest.mark.parametrize("name", MODELS)
def test_it_learns_and_every_weight_moves(name):
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    compress_activations(model, CompActConfig(rank=0.5, update_proj_gap=5))
    losses = train(model, optimizer_of(model, weight_decay=0.01), batch(name), 15)
    assert min(losses[-3:]) < losses[0] - 0.1 * abs(losses[0])
    after = model.state_dict()
    still = {key for key, value in before.items() if torch.equal(value, after[key])}
    # T5 has no cross attention's or decoder's relative positions in later blocks; positions and types of BERT are rows
    assert not {key for key in still if key.endswith("weight") and "relative" not in key and "bias" not in key}


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5 gated"])
def test_evaluation_is_the_plain_models(name):
    plain, ours = build(name).eval(), build(name)
    compress_activations(ours)
    ours.eval()
    with torch.no_grad():
        assert torch.equal(plain(**batch(name)).logits, ours(**batch(name)).logits)


@pytest.mark.parametrize("recompute", ["none", "norms,mlp"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "t5", "roberta"])
def test_all_other_gradients_are_exact(name, recompute):
    plain, ours = build(name), build(name)
    compress_activations(ours, CompActConfig(recompute=recompute, projection="gaussian"))
    found = []
    for model in (plain, ours):
        torch.manual_seed(1)
        model(**batch(name)).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    kept = [n for n in found[0] if n in found[1]]
    assert len(kept) > 5 and any("norm" in n.lower() or "ln" in n for n in kept)
    assert not [n for n in kept if not torch.equal(found[0][n], found[1][n])]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_save_pretrained_is_the_plain_models(name, tmp_path):
    model = build(name)
    compression = compress_activations(model)
    train(model, optimizer_of(model), batch(name), 2)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    compression.restore()
    assert list(loaded.state_dict()) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]) and value.dtype == loaded.state_dict()[key].dtype, key
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (r".*\.mlp\..*", {"gate_proj", "up_proj", "down_proj"}),
        ("all-linear", {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_target_modules(targets, expected):
    compression = compress_activations(build("llama"), target_modules=targets)
    assert {name.rpartition(".")[2] for name in compression.layers} == expected
    reasons = {s.name: s.reason for s in compression.skipped}
    assert reasons["model.layers.0.self_attn.o_proj"] in (
        "not in the target modules",
        SKIPPED["llama"]["model.layers.0.self_attn.o_proj"],
    )


def test_ranks():
    assert [rank_of(r, 48) for r in (0.25, 0.5, 1.0, 0.001, 7)] == [12, 24, 48, 1, 7]
    compression = compress_activations(build("llama"), CompActConfig(rank=40))
    assert {name.rpartition(".")[2] for name in compression.layers} == {"down_proj"}
    reasons = {s.reason for s in compression.skipped}
    assert "rank not below its 32 inputs" in reasons


def test_frozen_and_tied_layers_are_left_alone():
    model = build("llama")
    model.model.layers[0].mlp.requires_grad_(False)
    model.model.layers[1].self_attn.k_proj.weight = model.model.layers[1].self_attn.v_proj.weight
    compression = compress_activations(model)
    reasons = {s.name: s.reason for s in compression.skipped}
    assert reasons["model.layers.0.mlp.up_proj"] == "frozen"
    assert reasons["model.layers.1.self_attn.v_proj"] == "weight shared by several modules"
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    train(model, optimizer_of(model, weight_decay=0.5), batch("llama"), 2)
    assert torch.equal(before, model.model.layers[0].mlp.up_proj.weight)
    compression.restore()
    assert not model.model.layers[0].mlp.up_proj.weight.requires_grad


def test_a_model_is_compressed_once():
    model = build("llama")
    compress_activations(model)
    with pytest.raises(ValueError, match=r"compressed already: call \.restore\(\) on that first"):
        compress_activations(model)
    with pytest.raises(ValueError, match="compressed already"):
        compress_activations(nn.ModuleDict({"inner": model}))


def test_lora_is_refused_with_the_reason():
    model = get_peft_model(build("llama"), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    before = [(type(m), len(m._forward_hooks)) for m in model.modules()]
    with pytest.raises(
        ValueError,
        match=r"No linear layer of this model.*14 x frozen.*8 x part of an adapter.*adapters of LoRA",
    ):
        compress_activations(model)
    assert before == [(type(m), len(m._forward_hooks)) for m in model.modules()]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 0}, "'rank' must be 1 or more, or a fraction up to 1.0, got 0"),
        ({"rank": 1.5}, "'rank' must be 1 or more"),
        ({"rank": -0.5}, "'rank' must be"),
        ({"rank": float("nan")}, "'rank' must be"),
        ({"rank": True}, "'rank' must be int or float or none"),
        ({"rank": "0.25"}, "'rank' must be int or float or none"),
        ({"projection": "svd"}, "'projection' must be principal.structured.orthonormal.gaussian"),
        ({"recompute": "all"}, "'recompute' must be norms,mlp.norms.mlp.none"),
        ({"update_proj_gap": 0}, "'update_proj_gap' must be 1 or more"),
        ({"scale": 0.0}, "'scale' must be above 0"),
        ({"seed": -1}, "'seed' must be 0 or more"),
        ({"rank": None, "recompute": "none"}, "would do nothing"),
    ],
)
def test_wrong_options_are_one_sentence(options, match):
    with pytest.raises(ValueError, match=match) as error:
        CompActConfig(**options)
    assert str(error.value).startswith("compress_activations: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("targets", "match"),
    [(["wrong"], "'wrong' matches no linear layer"), (["lm_head"], "1 x embedding or output head")],
)
def test_wrong_targets(targets, match):
    model = build("llama")
    with pytest.raises(ValueError, match=match):
        compress_activations(model, target_modules=targets)
    assert not any(isinstance(m, LeanLayer) for m in model.modules())
    compress_activations(model)


def test_only_recomputing_needs_no_carriers():
    model = build("llama")
    compression = compress_activations(model, CompActConfig(rank=None))
    assert not compression.layers and len(compression.exact) == 15 and not compression.skipped
    assert compression.report().table().startswith("Activations: no linear layer compressed")
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, batch("llama"), 3)
    plain = build("llama")
    assert losses == train(plain, optimizer_of(plain), batch("llama"), 3)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
