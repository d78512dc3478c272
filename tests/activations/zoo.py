"""Models of the families that people fine-tune, two blocks each, and what CompAct must do to their linear layers."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 64
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}
GROUPED = {**SHAPE, "num_key_value_heads": 1}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 2}
SHARED_EXPERT = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**SHAPE)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**SHAPE)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "t5 gated": lambda: T5ForConditionalGeneration(T5Config(**T5, feed_forward_proj="gated-gelu")),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=4)),
    "qwen2moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**EXPERTS, **SHARED_EXPERT)),
}

_QKV = {f"self_attn.{name}_proj": "self_attn.q_proj" for name in "qkv"}
_MLP = {"mlp.gate_proj": "mlp.gate_proj", "mlp.up_proj": "mlp.gate_proj", "mlp.down_proj": "mlp.down_proj"}
_BERT = {
    **{f"attention.self.{name}": "attention.self.query" for name in ("query", "key", "value")},
    "intermediate.dense": "intermediate.dense",
    "output.dense": "output.dense",
}
_SELF = {f"layer.0.SelfAttention.{name}": "layer.0.SelfAttention.q" for name in "qkv"}
_T5 = {"q": "q", "k": "k", "v": "k"}


def _t5(feed_forward: dict[str, str]) -> dict[str, dict[str, str]]:
    def ff(place: int) -> dict[str, str]:
        at = f"layer.{place}.DenseReluDense"
        return {f"{at}.{a}": f"{at}.{b}" for a, b in feed_forward.items()}

    cross = {f"layer.1.EncDecAttention.{a}": f"layer.1.EncDecAttention.{b}" for a, b in _T5.items()}
    return {"encoder.block": {**_SELF, **ff(1)}, "decoder.block": {**_SELF, **cross, **ff(2)}}


BLOCKS = {
    "llama": {"model.layers": {**_QKV, **_MLP}},
    "qwen2": {"model.layers": {**_QKV, **_MLP}},
    "mistral": {"model.layers": {**_QKV, **_MLP}},
    "gpt2": {"transformer.h": {name: name for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")}},
    "bert": {"bert.encoder.layer": _BERT},
    "roberta": {"roberta.encoder.layer": _BERT},
    "t5": _t5({"wi": "wi", "wo": "wo"}),
    "t5 gated": _t5({"wi_0": "wi_0", "wi_1": "wi_0", "wo": "wo"}),
    "mixtral": {"model.layers": _QKV},
    "qwen2moe": {
        "model.layers": {
            **_QKV,
            **{
                a.replace("mlp.", "mlp.shared_expert."): b.replace("mlp.", "mlp.shared_expert.")
                for a, b in _MLP.items()
            },
            "mlp.shared_expert_gate": "mlp.shared_expert_gate",
        }
    },
}
"""Place of the blocks -> layer -> the layer that it shares its z with."""

ATTENTION = "behind an attention, which keeps its output itself"
HEAD = {"lm_head": "embedding or output head"}
STACK, OUTSIDE = "experts in one tensor, not linear layers", "not in a repeated block"


def _in_blocks(place: str, reasons: dict[str, str]) -> dict[str, str]:
    return {f"{place}.{i}.{name}": reason for i in range(2) for name, reason in reasons.items()}


_LEFT = {**HEAD, **_in_blocks("model.layers", {"self_attn.o_proj": ATTENTION})}
_T5_LEFT = {
    **HEAD,
    **_in_blocks("encoder.block", {"layer.0.SelfAttention.o": ATTENTION}),
    **_in_blocks("decoder.block", {"layer.0.SelfAttention.o": ATTENTION, "layer.1.EncDecAttention.o": ATTENTION}),
}
SKIPPED = {
    "llama": _LEFT,
    "qwen2": _LEFT,
    "mistral": _LEFT,
    "gpt2": {**HEAD, **_in_blocks("transformer.h", {"attn.c_proj": ATTENTION})},
    "bert": {
        **_in_blocks("bert.encoder.layer", {"attention.output.dense": ATTENTION}),
        "bert.pooler.dense": OUTSIDE,
        "classifier": OUTSIDE,
    },
    "roberta": {
        **_in_blocks("roberta.encoder.layer", {"attention.output.dense": ATTENTION}),
        "classifier.dense": OUTSIDE,
        "classifier.out_proj": OUTSIDE,
    },
    "t5": _T5_LEFT,
    "t5 gated": _T5_LEFT,
    "mixtral": {
        **_LEFT,
        **_in_blocks("model.layers", {"mlp.experts": STACK, "mlp.gate": "MixtralTopKRouter, not a plain linear layer"}),
    },
    "qwen2moe": {
        **_LEFT,
        **_in_blocks(
            "model.layers", {"mlp.experts": STACK, "mlp.gate": "Qwen2MoeTopKRouter, not a plain linear layer"}
        ),
    },
}


def build(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """In train mode, the same weights on every call."""
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


def batch(name: str, size: int = 4) -> dict[str, torch.Tensor]:
    """Rising numbers from a start that differs; classes say how the start is divided."""
    start = torch.arange(size) * 7
    ids = (start[:, None] + torch.arange(12)) % (VOCABULARY - 4) + 4
    return {"input_ids": ids, "labels": torch.arange(size) % 2 if "bert" in name else ids}
