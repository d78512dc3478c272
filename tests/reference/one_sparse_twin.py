"""The step of ``taco`` by its equations: one column after the other, in plain Python floats (double precision)."""

from __future__ import annotations

import torch


def one_sparse_step(
    weight: torch.Tensor,
    grad: torch.Tensor,
    history: list[dict[int, float]],
    *,
    lr: float,
    k: int,
    decay: float,
    consume: float = 1.0,
    weight_decay_factor: float = 1.0,
) -> tuple[torch.Tensor, list[dict[int, float]], list[int | None]]:
    """New weight (float64), new history (row -> value, not rounded to FP8) and the row that moved, by column.

    ``weight`` and ``grad`` are (m, n); ``history`` holds one dict a column.
    """
    m, n = weight.shape
    new = weight.double() * weight_decay_factor
    histories, moved = [], []
    for j in range(n):
        c = [(1 - decay) * float(grad[i, j]) + decay * history[j].get(i, 0.0) for i in range(m)]
        order = sorted(range(m), key=lambda i: -abs(c[i]))
        best = order[0]
        if c[best] == 0:
            moved.append(None)
        else:
            new[best, j] -= lr if c[best] > 0 else -lr
            moved.append(best)
        c[best] *= 1 - consume
        histories.append({i: c[i] for i in sorted(range(m), key=lambda i: -abs(c[i]))[:k] if c[i] != 0})
    return new, histories, moved
