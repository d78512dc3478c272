"""Recomputed norms, activations and gated MLPs: the same bits, fewer bytes kept, undone without a trace."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_memopt.activations import recompute as module_under_test
from hf_memopt.activations import remade
from hf_memopt.activations.recompute import recompute, restore
from hf_memopt.activations.remade import kept, recipe_of

from .consumer import saved_bytes, use_notes
from .models import GQA, MODELS, MODES, assert_same, batch, build, gradients, loss_of, norm


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_the_same_bits(name, mode):
    dtype, autocast = MODES[mode]
    model, inputs = build(name, dtype), batch(name)
    expected = gradients(model, inputs, autocast)
    before = saved_bytes(model, lambda: loss_of(model, inputs, autocast).loss)
    report = recompute(model)
    assert len(report.recomputed) >= 5
    assert_same(gradients(model, inputs, autocast), expected)
    use_notes(model)
    assert_same(gradients(model, inputs, autocast), expected)
    assert saved_bytes(model, lambda: loss_of(model, inputs, autocast).loss) < before


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("mode", ["fp32", "autocast"])
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_under_gradient_checkpointing(name, mode, reentrant):
    dtype, autocast = MODES[mode]
    model, inputs = build(name, dtype), batch(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    expected = gradients(model, inputs, autocast)
    recompute(model)
    assert_same(gradients(model, inputs, autocast), expected)
    if reentrant and autocast and name != "llama":
        # there a block's input is a leaf, of which autocast caches one cast for q, k and v: their gradients are added
        # up in bf16, by any function that casts by itself in fp32
        return
    use_notes(model)
    assert_same(gradients(model, inputs, autocast), expected)


def test_frozen_parts_get_no_gradient_and_the_rest_the_same():
    model, inputs = build("llama"), batch("llama")
    for name, p in model.named_parameters():
        p.requires_grad_("norm" not in name and "embed" not in name and "layers.0.mlp.gate" not in name)
    expected = gradients(model, inputs)
    recompute(use_notes(model))
    assert_same(gradients(model, inputs), expected)


def test_parameters_may_be_updated_as_soon_as_their_gradient_is_there():
    def trained(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            loss_of(model, batch("llama")).loss.backward()
        return model.state_dict()

    def update(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    expected = trained(build("llama"))
    model = use_notes(build("llama"))
    recompute(model)
    got = trained(model)
    assert not [k for k in expected if not torch.equal(got[k], expected[k])]


def test_hooks_of_parameters_and_modules_run_as_often_as_before():
    def counts(model):
        seen = []
        for p in model.parameters():
            p.register_hook(lambda g: seen.append("parameter"))
        for m in model.modules():
            m.register_forward_hook(lambda *_: seen.append("forward"))
            m.register_full_backward_hook(lambda *_: seen.append("backward"))
        loss_of(model, batch("llama")).loss.backward()
        return {kind: seen.count(kind) for kind in ("parameter", "forward", "backward")}

    expected = counts(build("llama"))
    model = build("llama")
    recompute(model, ["norms"])
    assert counts(model) == expected


def made_by_three(monkeypatch) -> tuple[list, nn.ModuleDict, torch.Tensor]:
    """Calls of a norm's forward, as they are added; the norm with its three readers; their loss."""
    calls = []
    forward = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: calls.append(1) or forward(self, x))
    block = nn.ModuleDict({"norm": norm(torch.float32), **{n: nn.Linear(64, 64) for n in "qkv"}})
    recompute(use_notes(block))
    calls.clear()
    y = block["norm"](torch.randn(3, 64, requires_grad=True))
    return calls, block, sum(block[n](y) for n in "qkv").square().sum()


def test_three_readers_and_the_norms_own_gradient_make_it_once(monkeypatch):
    calls, _, loss = made_by_three(monkeypatch)
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def test_a_graph_that_no_gradient_of_the_norm_takes_ends_with_the_pass(monkeypatch):
    calls, block, loss = made_by_three(monkeypatch)
    weights = [block[n].weight for n in "qkv"]
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    assert len(calls) == 2
    slot = remade._slot()
    assert slot.key is None and slot.tensor is None and slot.graph is None
    loss.backward()
    assert len(calls) == 3  # another pass makes it anew
    assert all(torch.equal(g, w.grad) for g, w in zip(first, weights, strict=True))


def test_a_made_tensor_that_was_changed_is_not_what_the_gradient_is_taken_from(monkeypatch):
    def gradients(spoil: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, x = norm(torch.float32), torch.randn(3, 64, requires_grad=True)
        recompute(layer)
        y = layer(x)
        made = kept(recipe_of(y))

        def reader(grad):
            tensor = made.make([x, layer.weight])
            if spoil:
                tensor.mul_(2)

        z = y * 1.0
        z.register_hook(reader)
        z.square().sum().backward()
        return [x.grad, layer.weight.grad]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_called_twice_and_backward_twice():
    def run(layer, x):
        loss = (layer(layer(x) * 2) ** 2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad, layer.weight.grad

    layer = norm(torch.float32)
    x = torch.randn(3, 64, requires_grad=True)
    expected = [g.clone() for g in run(layer, x)]
    x.grad = layer.weight.grad = None
    recompute(layer)
    assert all(map(torch.equal, run(layer, x), expected))


def test_nothing_stays_alive_after_the_graph():
    layer = norm(torch.float32)
    recompute(layer)
    x = torch.randn(3, 64, requires_grad=True) * 1
    y = layer(x)
    assert recipe_of(y) is not None
    refs = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [ref() for ref in refs] == [None, None]  # by counting references alone: there is no cycle


def test_without_gradients_and_with_other_arguments_the_original_runs():
    layer, mlp = norm(torch.float32), LlamaMLP(LlamaConfig(**GQA))
    x = torch.randn(3, 64)
    expected = layer(x), mlp(x)
    recompute(layer), recompute(mlp)
    with torch.no_grad():
        got = layer(x), mlp(x)
    assert all(map(torch.equal, got, expected)) and recipe_of(got[0]) is None
    by_keyword = layer(hidden_states=x.requires_grad_())
    assert torch.equal(by_keyword, expected[0]) and recipe_of(by_keyword) is None
    assert "Recompute" not in by_keyword.grad_fn.name()
    layer.requires_grad_(False)
    assert not layer(x.detach()).requires_grad


def test_an_exception_in_forward_changes_nothing():
    layer = norm(torch.float32)
    recompute(layer)
    with pytest.raises(RuntimeError, match="size"):
        layer(torch.randn(3, 63, requires_grad=True))
    assert set(layer._parameters) == {"weight"} and isinstance(layer.weight, nn.Parameter)
    layer(torch.randn(3, 64, requires_grad=True)).sum().backward()


def test_gradients_of_gradients():
    layer = nn.RMSNorm(16).double()
    assert recompute(layer).recomputed == [""]
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x: (layer(x) ** 2).sum(), x)

    def penalty():
        (grad,) = torch.autograd.grad((layer(x) ** 2).sum(), x, create_graph=True)
        return torch.autograd.grad((grad**2).sum(), [x, layer.weight])

    got = penalty()
    restore(layer)
    torch.testing.assert_close(got, penalty(), rtol=1e-12, atol=1e-12)  # other orders of sums, in double precision


def test_more_uses_of_the_input_than_are_told_apart_are_added_up():
    class SumNorm(nn.Module):
        def forward(self, x):
            return x * 2 + x * x + x.exp() + x.sin() + x.cos() + x.tanh()

    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    layer = SumNorm()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    assert recompute(layer).recomputed == [""]
    (got,) = torch.autograd.grad(layer(x).sum(), x)
    # six terms in another order: five sums, each off by half a spacing of at most the sum of the terms' sizes
    size = 2 + 2 * x.abs() + x.exp() + 3
    assert ((got - expected).abs() <= 10 * 2.0**-53 * size).all()


def test_gradients_of_each_use_matter(monkeypatch):
    """Without giving back the uses of x one by one, fp32 gradients differ in the last bit: the reason for ``USES``."""
    model, inputs = build("llama"), batch("llama")
    expected = gradients(model, inputs)
    recompute(model)
    monkeypatch.setattr(module_under_test, "_edges_to", lambda x, y: [])
    got = gradients(model, inputs)
    assert [n for n, g in expected[1].items() if not torch.equal(got[1][n], g)]
