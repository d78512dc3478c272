"""Layers and models with compressed activations, beside what they were made from."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_memopt import CompActConfig, compress_activations
from hf_memopt.activations.basis import InputBasis
from hf_memopt.activations.layers import CARRIER, patch
from tests.cases import randn

DEVICE = torch.device("cpu")
N, TOKENS = 16, (3, 5)
KINDS = ("principal", "structured", "orthonormal", "gaussian")


def pair(
    n: int, m: int, r: int, kind: str = "orthonormal", *, bias=True, dtype=torch.float32, conv=False, seed=0
) -> tuple[nn.Module, nn.Module]:
    """A linear layer of n inputs and m outputs, and a copy that is compressed to r dimensions; both in train mode."""
    torch.manual_seed(11)
    plain = Conv1D(m, n) if conv else nn.Linear(n, m, bias=bias)
    if plain.bias is not None:
        nn.init.normal_(plain.bias)
    plain = plain.to(dtype)
    ours = copy.deepcopy(plain)
    patch(ours, InputBasis("layer", n, r, kind, seed))
    return plain, ours


def carrier(layer: nn.Module) -> Tensor:
    return layer._parameters[CARRIER]


def dense_p(layer: nn.Module, dtype=torch.float32) -> Tensor:
    """The layer's P (n, r) of now in double, as ``dtype`` has it."""
    p = layer.basis.projection(DEVICE, dtype)
    return p.project(torch.eye(layer.basis.features, dtype=dtype)).double()


def run(layer: nn.Module, x: Tensor, dy: Tensor, **autocast) -> tuple[Tensor, Tensor]:
    """(y, dx) for the output's gradient ``dy``; gradients of the layer's parameters are left in them."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", **(autocast or {"enabled": False})):
        y = layer(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad


class Attention(nn.Module):
    """The reading of one tensor by three layers, as in every attention."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(n, n) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


class Block(nn.Module):
    """Attention and a layer behind it that reads something else."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.attention, self.expand, self.shrink = Attention(n), nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.shrink(torch.tanh(self.expand(x)))


class Blocks(nn.Module):
    """Blocks and a head."""

    def __init__(self, n: int = N, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(n) for _ in range(blocks))
        self.head = nn.Linear(n, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks(seed: int = 5, **config) -> tuple[Blocks, Blocks, object]:
    """The model, a copy with compressed activations, and the copy's ``Compression``."""
    torch.manual_seed(seed)
    plain = Blocks()
    ours = copy.deepcopy(plain)
    return plain, ours, compress_activations(ours, CompActConfig(**{"rank": 0.5, "recompute": "none", **config}))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sgd(model: nn.Module, **options) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **{"lr": 0.1, **options})


def step(model: Blocks, optimizer, seed: int = 0) -> float:
    """One step on numbers that depend on the seed; the loss before it."""
    loss = model(randn(*TOKENS, N, seed=seed)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def llama_input(tokens: int = 12) -> dict[str, Tensor]:
    ids = torch.arange(tokens)[None] % 100
    return {"input_ids": ids, "labels": ids}
