"""A compiled model with compressed layers: the same losses, and graphs that are made once."""

from __future__ import annotations

import torch

from hf_memopt import CompActConfig, compress_activations
from tests.activations.test_compression import optimizer_of
from tests.activations.zoo import batch, build


def losses(compiled: bool) -> list[float]:
    model = build("llama")
    compress_activations(model, CompActConfig(rank=0.5, update_proj_gap=2))
    model.train()
    run = torch.compile(model, backend="eager") if compiled else model
    optimizer, found = optimizer_of(model, torch.optim.AdamW), []
    for _ in range(4):
        loss = run(**batch("llama")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_compiled_it_trains_as_it_does_otherwise(caplog):
    torch._dynamo.reset()
    expected = losses(compiled=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert losses(compiled=True) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert "recompile_limit" not in caplog.text  # tensors are told apart outside of the graphs
    torch._dynamo.reset()
