r"""The linear layer that does not keep its input.

    y = x W^T + b          dx = dy W          db = sum dy          exact, as in nn.Linear
    compressed:  dB = dy^T z,   z = x P       the gradient of the carrier B (m x r), which is zero
    exact:       dW = dy^T x,   x remade      the gradient of the weight itself

B stands for W in the optimizer, also where somebody has made all parameters trainable: with y = x (W + B P^T)^T + b,
B's gradient at B = 0 is dy^T x P. Its term of the forward vanishes and is not computed. So the compressed gradient is
an ordinary gradient of an ordinary parameter, and clipping, GradScaler, DDP, accumulation and every optimizer see it.

Kept for backward: W, and either z or, where x can be remade from tensors that are kept anyway (``remade.py``), those.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .basis import InputBasis
from .remade import Kept


class LeanLinear(torch.autograd.Function):
    """Arguments: x (..., n); weight (m, n), or (n, m) if ``transposed``; bias (m,) or None; carrier (m, r) or None;
    z (..., r) or None; what is kept of x's recipe, or None; the basis, or None; ``transposed``; the recipe's inputs."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        carrier: Tensor | None,
        z: Tensor | None,
        source: Kept | None,
        basis: InputBasis | None,
        transposed: bool,
        *made_from: Tensor,
    ) -> Tensor:
        if not transposed:
            return F.linear(x, weight, bias)
        shape = (*x.shape[:-1], weight.shape[1])
        flat = x.reshape(-1, weight.shape[0])
        return (flat @ weight if bias is None else torch.addmm(bias, flat, weight)).view(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, weight, _, carrier, z, source, basis, transposed, *made_from = inputs
        ctx.source, ctx.transposed = source, transposed
        ctx.carrier_dtype = None if carrier is None else carrier.dtype
        # of this forward: the basis goes on to another epoch when the optimizer has stepped
        ctx.projection = None
        if basis is not None and source is not None:
            ctx.projection = (basis, basis.epoch, basis.top)
        ctx.has_z = z is not None
        ctx.save_for_backward(weight, *([z] if z is not None else []), *made_from)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        weight, *rest = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_carrier = ctx.needs_input_grad[:4]
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = dc = None
        if needs_x:
            own = weight.to(dy.dtype)
            own = own.T if ctx.transposed else own
            dx = (flat @ own).view(*dy.shape[:-1], own.shape[1])
        if needs_bias:
            db = flat.sum(0)
        if needs_weight or needs_carrier:
            known = rest[0] if ctx.has_z else ctx.source.make(rest)
            if not needs_carrier:
                known = known.to(dy.dtype).reshape(-1, known.shape[-1])
                dw = known.T @ flat if ctx.transposed else flat.T @ known
            else:
                if not ctx.has_z:
                    known = _compressed(known, ctx.projection, dy.dtype)
                dc = (flat.T @ known.reshape(-1, known.shape[-1])).to(ctx.carrier_dtype)
        return dx, dw, db, dc, *[None] * (len(ctx.needs_input_grad) - 4)


def _compressed(x: Tensor, projection: tuple, dtype: torch.dtype) -> Tensor:
    """x P; the layers that remake one x also share this, which lives as long as x."""
    basis, epoch, top = projection
    made = x.__dict__.setdefault("_hf_memopt_compressed", {})
    key = (id(basis), epoch, dtype)
    if key not in made:
        made[key] = basis.at(epoch, top, x.device, dtype).project(x.to(dtype))
    return made[key]
