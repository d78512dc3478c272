"""Bytes kept by recomputed modules and the layers that read notes, against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

from hf_memopt.activations.recompute import recompute

from .consumer import saved_bytes, saved_storages, use_notes
from .models import GQA, T5, norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_and_its_readers_keep_the_input_only(dtype):
    tokens, width = 6, 64
    block = nn.ModuleDict({"norm": norm(dtype), **{n: nn.Linear(width, width, bias=False).to(dtype) for n in "qkv"}})
    x = torch.randn(2, tokens // 2, width).to(dtype).requires_grad_()
    recompute(use_notes(block))

    def run():
        y = block["norm"](x)
        return sum(block[n](y) for n in "qkv")

    assert saved_storages(block, run).keys() == {x.untyped_storage().data_ptr()}
    assert saved_bytes(block, run) == tokens * width * dtype.itemsize


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "gelu_new"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_mlp_keeps_its_input_gate_and_up(dtype, act):
    tokens, width, inner = 6, 64, 160
    mlp = LlamaMLP(LlamaConfig(**GQA, hidden_act=act)).to(dtype)
    x = torch.randn(1, tokens, width).to(dtype).requires_grad_()
    before = saved_bytes(mlp, lambda: mlp(x))
    recompute(use_notes(mlp))
    assert saved_bytes(mlp, lambda: mlp(x)) == tokens * (width + 2 * inner) * dtype.itemsize
    if act != "gelu_new":  # that one keeps intermediates as well
        assert before == tokens * (width + 4 * inner) * dtype.itemsize


def test_a_norm_before_an_mlp_costs_nothing():
    tokens, width, inner, dtype = 6, 64, 160, torch.bfloat16
    block = nn.Sequential(norm(dtype), LlamaMLP(LlamaConfig(**GQA)).to(dtype))
    x = torch.randn(1, tokens, width).to(dtype).requires_grad_()
    recompute(use_notes(block))
    assert saved_bytes(block, lambda: block(x)) == tokens * (width + 2 * inner) * dtype.itemsize


def test_a_llama_layer_keeps_less_than_half():
    """Bytes per token and layer in bf16, with H, KV, I the widths and a heads: 20 H + 4 KV + 8 I + 4 a + 8 (the two
    rsqrt) become 8 H + 4 KV + 4 I + 4 a: the two norms' inputs, attention's q, k, v, output and lse, gate and up."""
    tokens, (h, kv, i, a) = 16, (64, 32, 160, 4)

    def total(layers, patch):
        model = LlamaForCausalLM(LlamaConfig(**{**GQA, "num_hidden_layers": layers})).to(torch.bfloat16)
        if patch:
            recompute(use_notes(model))
        ids = torch.arange(tokens)[None]
        return saved_bytes(model, lambda: model(input_ids=ids).logits)

    layer = {patch: total(3, patch) - total(2, patch) for patch in (False, True)}
    assert layer[False] == tokens * (20 * h + 4 * kv + 8 * i + 4 * a + 8)
    assert layer[True] == tokens * (8 * h + 4 * kv + 4 * i + 4 * a)


def test_t5_keeps_its_conversion_to_the_dtype_of_wo():
    mlp = T5DenseGatedActDense(T5Config(**T5, feed_forward_proj="gated-gelu")).to(torch.bfloat16)
    mlp.wo.float()
    x = torch.randn(3, 64).to(torch.bfloat16).requires_grad_()

    def run():
        torch.manual_seed(0)
        y = mlp(x)
        return y, *torch.autograd.grad(y.sum(), [x, *mlp.parameters()])

    expected = run()
    assert recompute(mlp).recomputed == [""] and expected[0].dtype == torch.float32
    assert all(map(torch.equal, run(), expected))


def test_an_activation_and_its_reader_keep_the_input_only():
    mlp = nn.Sequential(nn.Linear(8, 32), ACT2FN["gelu_new"], nn.Linear(32, 8))
    x = torch.randn(5, 8)
    recompute(use_notes(mlp))
    assert saved_bytes(mlp, lambda: mlp(x)) == 5 * (8 + 32) * 4
