"""What the tasks have in common: drawing the batches of a run, and the loss on held-out blocks."""

from __future__ import annotations

import torch
from tqdm.auto import tqdm


def drawn(count: int, seed: int) -> list[int]:
    """The numbers below ``count`` in the order of the run with this seed, which no model's seed shares."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 + seed)).tolist()


def as_rows(blocks: torch.Tensor, chosen: list[int]) -> list[dict[str, torch.Tensor]]:
    """The chosen blocks of tokens as examples whose labels are the tokens themselves."""
    return [{"input_ids": blocks[i], "labels": blocks[i]} for i in chosen]


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, blocks: torch.Tensor, batch: int) -> float:
    """Mean loss in nats a token over ``blocks`` (count, tokens); the logits are taken to fp32 before the loss."""
    training = model.training
    model.eval()
    total = 0.0
    for part in tqdm(blocks.split(batch), desc="held-out text", unit="batch", dynamic_ncols=True):
        logits = model(input_ids=part.to(model.device)).logits[:, :-1].float()
        target = part[:, 1:].to(model.device)
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum").item()
    model.train(training)
    return total / (blocks.shape[0] * (blocks.shape[1] - 1))
