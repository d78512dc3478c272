"""Small models of Transformers, and what the tests compare of them."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97}
GQA = {**WIDE, "intermediate_size": 160, "num_key_value_heads": 2}
T5 = {
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 97,
    "decoder_start_token_id": 0,
}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GQA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GQA, head_dim=16)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**GQA, head_dim=16)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GQA, pad_token_id=0)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=97)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**WIDE, intermediate_size=160)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5, feed_forward_proj="gated-gelu")),
}
MODES = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


def build(name: str, dtype=torch.float32):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).train()
    with torch.no_grad():  # norms are born as the identity, which hides a wrong gradient
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) / 4)
    return model


def batch(name: str):
    ids = torch.randint(1, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1]) if name == "bert" else ids
    return {"input_ids": ids, "labels": labels}


def loss_of(model, inputs, autocast=False):
    torch.manual_seed(2)  # dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(**inputs)


def gradients(model, inputs, autocast=False):
    model.zero_grad()
    out = loss_of(model, inputs, autocast)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got, expected):
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    assert not [n for n, g in expected[1].items() if not torch.equal(got[1][n], g)]


def norm(dtype, width=64):
    layer = LlamaRMSNorm(width).to(dtype)
    with torch.no_grad():
        layer.weight.add_(torch.randn(width) / 4)
    return layer
