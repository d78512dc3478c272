r"""From the carriers into the weights, after each step of the optimizer:

    W = W (1 - lr wd) + scale B P^T,        B = 0

The optimizer's decay of B is a decay of zero, so W's own is applied here, decoupled as in AdamW. A carrier that is zero
(it had no gradient, or one that was not finite and was skipped) leaves its weight as it is.

Weights in bf16 and fp16 are written back with stochastic rounding, as by the package's optimizers: most updates are
smaller than half a unit in the last place. The random numbers are a hash of (seed, layer, step, element). The sum is
formed in fp32 (fp64 for such weights), in pieces of ``PIECE`` elements (the product with a dense P is the carrier's
dtype's, hence rounded to it); where P consists of coordinates and nothing decays, only their columns are touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.reference import hash_at, round_stochastically
from ..kernels.scalars import GOLDEN, mix32, parameter_key
from .projection import Coordinates, Projection

PIECE = 1 << 20


@torch.no_grad()
def fold(
    weight: Tensor,
    carrier: Tensor,
    projection: Projection,
    *,
    scale: float,
    decay: float,
    name: str,
    seed: int,
    step: int,
) -> None:
    """Add ``carrier`` (m, r) to ``weight`` (m, n), of any strides, and empty it.

    Args:
        decay: 1 - lr wd.
        name, seed, step: of the random numbers.
    """
    key = mix32(parameter_key(seed, f"fold/{name}") + step * GOLDEN)
    columns, cols = None, torch.arange(weight.shape[1], device=weight.device)
    if isinstance(projection, Coordinates) and decay == 1.0:
        columns = cols = projection.index
    dtype = torch.promote_types(weight.dtype, torch.float32)
    kept = None
    if decay != 1.0:
        kept = torch.where(carrier.any(), torch.full((), decay, dtype=dtype, device=carrier.device), 1.0)
    rows = max(1, PIECE // max(1, cols.numel()))
    for begin in range(0, weight.shape[0], rows):
        part, piece = weight[begin : begin + rows], carrier[begin : begin + rows]
        new = (part if columns is None else part.index_select(1, columns)).to(dtype)  # fp32 weights: themselves
        if kept is not None:
            new.mul_(kept)
        if columns is None:
            projection.add_to(new, piece, scale)
        else:
            new.add_(piece.to(dtype) * projection.weight, alpha=scale)
        if weight.dtype != dtype:
            row = torch.arange(begin, begin + new.shape[0], device=weight.device)[:, None]
            new = round_stochastically(new, weight.dtype, hash_at(key, row, cols))
        if columns is None:
            part.copy_(new)
        else:
            part.index_copy_(1, columns, new)
    carrier.zero_()
