"""Cross-entropy of a language model without its logits: the head and the loss, a few hundred tokens at a time.

transformers computes logits (tokens, vocabulary) in the weights' dtype, upcasts them to fp32, and autograd keeps or
makes two more of that size. Here forward and backward compute the logits of `CHUNK` tokens at once and keep none; the
head's gradient is added up in place. The price is a second product with the head's weight in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHUNK = 256
IGNORED = -100


class HeadAndLoss(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T` against `labels`; labels of -100 do not count.

    Shapes: hidden (tokens, width), weight (vocabulary, width), labels (tokens,) int64. The loss is fp32.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        total = hidden.new_zeros(1, dtype=torch.float32)
        for h, y in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True):
            logits = (h @ weight.t()).float()
            total += nn.functional.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum")
        return (total / (labels != IGNORED).sum()).squeeze()

    @staticmethod
    def backward(ctx, outer: Tensor):
        hidden, weight, labels = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight)
        scale = outer / (labels != IGNORED).sum()
        for h, y, d in zip(hidden.split(CHUNK), labels.split(CHUNK), d_hidden.split(CHUNK), strict=True):
            p = (h @ weight.t()).float().softmax(dim=1)
            counted = (y != IGNORED)[:, None]
            p.scatter_add_(1, y.clamp(min=0)[:, None], -torch.ones_like(y, dtype=p.dtype)[:, None])
            p = (p.mul_(counted).mul_(scale)).to(weight.dtype)
            d.copy_(p @ weight)
            d_weight.addmm_(p.t(), h)
        return d_hidden, d_weight, None


def chunked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a causal language model of transformers (inner `model`, `lm_head`) by `HeadAndLoss`."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    labels = nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
    return HeadAndLoss.apply(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten())
