"""The README's table of cards: current, and made of the bytes that a real training holds."""

import pathlib
import re

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import TacoAdamW
from tools import memory_budget as tool

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_the_table_in_the_readme_is_current():
    text = (pathlib.Path(tool.ROOT) / "README.md").read_text(encoding="utf8")
    (block,) = re.findall(r"<!-- cards: begin[^>]*-->\n(.*?)\n<!-- cards: end -->", text, re.DOTALL)
    assert block == tool.readme_block(), "run python -m tools.memory_budget --readme"


def test_weights_gradients_and_state_are_those_of_a_real_step():
    config = LlamaConfig(vocab_size=128, max_position_embeddings=64, tie_word_embeddings=True, **TINY)
    predicted = tool.budget(config, tokens=32)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.tie_weights()
    ids = torch.zeros(1, 32, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    assert predicted.parameters == sum(p.numel() for p in model.parameters())
    assert predicted.weights == sum(p.nbytes for p in model.parameters())
    assert predicted.gradients == sum(p.grad.nbytes for p in model.parameters())

    ours, torchs = TacoAdamW(model.named_parameters()), torch.optim.AdamW(model.parameters())
    ours.step()
    torchs.step()
    assert predicted.ternary_state == ours.memory_report().state_bytes
    moments = [s[key] for s in torchs.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert predicted.adamw_state == sum(m.nbytes for m in moments)


def test_activations_grow_with_the_text_and_shrink_by_checkpointing():
    config = LlamaConfig(vocab_size=128, max_position_embeddings=64, **{**TINY, "num_hidden_layers": 8})
    short, long = (tool.budget(config, tokens=t).activations for t in (16, 32))
    assert 1.8 < long / short < 2.2
    everything = sum(tool._kept_by_forward(LlamaForCausalLM(config).to(torch.bfloat16), 32))
    assert long < everything / 3


def test_the_smallest_card():
    assert tool.smallest_card(7 * tool.GIB) == "8 GB"
    assert tool.smallest_card(7 * tool.GIB + 1) == "12 GB"
    assert tool.smallest_card(80 * tool.GIB) == "over 80 GB"
