"""Patching and its end: what is left alone and why, copies, pickles, replicas, adapters, compile."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
)
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_memopt.activations.recompute import recompute, restore
from hf_memopt.activations.remade import recipe_of

from .models import GQA, MODELS, assert_same, batch, build, gradients, norm


class Mismatch(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 0.5


class Dropped(LlamaMLP):
    """Dropout after down, where eval mode cannot tell it from dropout before."""

    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(super().forward(x))


@pytest.mark.parametrize("cls", [Mismatch, Dropped])
def test_an_mlp_that_computes_something_else_is_left_alone(cls):
    mlp = cls(LlamaConfig(**GQA)).eval()
    state = torch.get_rng_state()
    report = recompute(mlp)
    assert torch.equal(torch.get_rng_state(), state) and not any(m.training for m in mlp.modules())
    assert report.entries[0].outcome == "its forward computes something else than down(act(gate(x)) * up(x))"
    assert type(mlp) is cls


def test_gate_and_up_are_found_by_trying():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2, self.w3, self.f = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.SiLU()

        def forward(self, x):
            return self.w1(self.w2(x) * self.f(self.w3(x)))

    mlp = Swapped()
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(mlp(x).sum(), [x, *mlp.parameters()])
    assert recompute(mlp).recomputed == [""]
    assert all(map(torch.equal, torch.autograd.grad(mlp(x).sum(), [x, *mlp.parameters()]), expected))


def test_reasons():
    class RandomNorm(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, self.training)

    class TwoInputsNorm(nn.Module):
        def forward(self, x, y):
            return x + y

    model = nn.ModuleDict(
        {
            "relu": nn.ReLU(),
            "inplace": nn.SiLU(inplace=True),
            "random": RandomNorm().eval(),
            "two": TwoInputsNorm(),
            "same": ACT2FN["linear"],
            "xielu": ACT2FN["xielu"],
            "replaced": nn.LayerNorm(4),
            "good": nn.LayerNorm(4),
        }
    )
    model["replaced"].forward = model["replaced"].forward
    reasons = {e.name: e.outcome for e in recompute(model).entries}
    assert reasons == {
        "relu": "autograd needs its output only, which the next layer keeps too: nothing to gain",
        "inplace": "it changes its input in place",
        "random": "it returns something else when called again",
        "two": "its forward does not take one tensor",
        "same": "it returns or changes its input",
        "xielu": "it has buffers",
        "replaced": "its forward has been replaced on the instance already",
        "good": "recomputed",
    }
    phi = {e.name: e.outcome for e in recompute(build("phi3")).entries}
    assert phi["model.layers.0.mlp"] == "gate and up are one weight"
    with pytest.raises(ValueError, match="'norm'"):
        recompute(model, ["norm"])


def test_restore_leaves_no_trace():
    model = build("llama")
    before = {n: (type(m), dict(m.__dict__)) for n, m in model.named_modules()}
    text, keys = repr(model), list(model.state_dict())
    report = recompute(model)
    assert repr(model) == text and list(model.state_dict()) == keys
    assert all(isinstance(m, before[n][0]) for n, m in model.named_modules())
    assert {n: dict(m.__dict__) for n, m in model.named_modules()} == {n: d for n, (_, d) in before.items()}
    assert "recomputed before" in str(recompute(model))
    report.restore()
    assert all(type(m) is before[n][0] for n, m in model.named_modules())
    recompute(model, ["mlp"])
    assert restore(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all(type(m) is before[n][0] for n, m in model.named_modules())


def test_a_wrapped_class_is_not_restored():
    layer = norm(torch.float32)
    report = recompute(layer)
    layer.__class__ = type("Wrapped", (type(layer),), {})
    with pytest.raises(RuntimeError, match="has been wrapped"):
        report.restore()


def test_copies_and_pickles_are_patched_and_independent():
    model, inputs = build("llama"), batch("llama")
    recompute(model)
    expected = gradients(model, inputs)
    copied = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for other in (copied, loaded):
        assert_same(gradients(other, inputs), expected)
        x = torch.randn(2, 64, requires_grad=True)
        assert recipe_of(other.model.norm(x)) is not None
        assert len(restore(other)) == 7 and type(other.model.norm) is LlamaRMSNorm
        assert_same(gradients(other, inputs), expected)


def test_replicas_of_data_parallel_give_gradients_to_the_parameters():
    layer = norm(torch.float32)
    recompute(layer)
    replica = layer._replicate_for_data_parallel()  # as torch.nn.parallel.replicate fills it
    replica._former_parameters = {"weight": layer.weight * 1}
    replica.weight = replica._former_parameters["weight"]
    x = torch.randn(3, 64)
    replica(x).sum().backward()
    got, layer.weight.grad = layer.weight.grad, None
    layer(x).sum().backward()
    assert torch.equal(got, layer.weight.grad)


def test_meta_parameters_are_patched_by_the_usual_names():
    with torch.device("meta"):
        model = MODELS["llama"]()
    assert len(recompute(model).recomputed) == 7


def test_adapters_of_peft_before_and_after():
    from peft import LoraConfig, get_peft_model

    def with_adapters(model):
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=0.3))

    expected = gradients(with_adapters(build("llama")), batch("llama"))
    model = build("llama")
    assert len(recompute(model).recomputed) == 7
    assert_same(gradients(with_adapters(model), batch("llama")), expected)
    model = with_adapters(build("llama"))
    assert len(recompute(model).recomputed) == 7
    assert_same(gradients(model, batch("llama")), expected)


def test_under_compile_the_original_is_traced_without_a_break():
    model, inputs = build("llama").eval(), batch("llama")
    recompute(model)
    expected = gradients(model, inputs)
    torch._dynamo.reset()
    block = torch.compile(model.model.layers[0].mlp, backend="aot_eager", fullgraph=True)
    layer = torch.compile(model.model.norm, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 64, requires_grad=True)
    assert torch.equal(layer(x), model.model.norm(x)) and torch.equal(block(x), model.model.layers[0].mlp(x))
    (layer(x) + block(x)).sum().backward()
    assert expected[1].keys() == gradients(model, inputs)[1].keys()
