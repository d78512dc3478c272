"""The loss in chunks that `benchmarks/fits.py` uses: value and gradients are those of the loss with logits."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import chunked_loss
from hf_memopt.memory.simulate import causal_lm_loss


@pytest.mark.parametrize("chunk", [5, 18, 256])
def test_equals_the_loss_with_logits(chunk, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", chunk)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape))
    ids = torch.randint(0, 97, (2, 9))
    labels = ids.clone()
    labels[0, 3] = chunked_loss.IGNORED
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    found = []
    for loss in (causal_lm_loss, chunked_loss.chunked_loss):
        model.zero_grad()
        value = loss(model, batch)
        (3 * value).backward()
        found.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    for expected, given in zip(*found, strict=True):
        # sums in another order: a few units in the last place of the largest element
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
