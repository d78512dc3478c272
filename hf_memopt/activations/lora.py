r"""The two small matrices of a LoRA adapter, keeping less of what they read.

    y = W x + s B (A d(x))        h = A d(x)        A: r x n,  B: m x r,  d: dropout,  W frozen

W needs no input for backward; A does, for dA = dh^T d(x). PEFT's default holds A and B in fp32 and casts x for every
adapter by itself, so q, k and v keep three fp32 copies of one tensor, and dropout one more and a mask each: half of a
block. A layer of this class instead

- computes in the dtype of the activations (in the weight's, where that is the narrower one; in autocast's, where that
  is on), as PEFT does under autocast. The weight is cast on the fly and not kept as a copy;
- keeps nothing but the inputs of x's recipe where x can be made again (``remade.py``: outputs of norms, products of
  gated MLPs, dropout), else x, cast where it must be: one storage for all that read it;
- adds up the weight's gradient in fp32 and returns it in the weight's dtype.

With fp32 activations all this is PEFT's arithmetic, operation by operation.

**Compressed** (``rank``), where x would have to be kept for the adapter's sake alone: instead of x (T x n) it keeps
z = x P (T x k, ``projection.py``), shared by all that read x, and decompresses inside backward::

    dA = (dh^T z) P^T,      E[P P^T] = I  and P independent of x and dh, so  E[dA] = dh^T x

The gradient has A's own shape, so every optimizer, clipping, GradScaler, DDP and FSDP see an ordinary one; dx stays
exact. P is drawn anew in every forward from the CPU's global generator, so micro-batches and steps average its noise,
and nothing has to be saved: what the Trainer keeps of that generator is all. ``principal`` takes, in the same forward,
the coordinates of x with the most energy as they are; the choice depends on x, the random rest does not, so it stays
unbiased. Where x has a recipe whose inputs are kept anyway, or is what an attention keeps, x is exact instead: a z
would be stored on top. Dropout before coordinates is applied to z in backward: selecting columns commutes with it.

In evaluation the forward is ``nn.Linear``'s on x in the weight's dtype: bit for bit what PEFT computes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import projection, shared
from .dropout import Dropped, Mask, drawn_key
from .remade import Kept, Recipe, autocast_state, kept, recipe_of

_CHUNK = 1 << 20  # elements that are upcast at a time where sums in fp32 need upcast operands


@dataclass(frozen=True)
class Whole:
    """x itself is kept: tensors = (x,)."""

    def gradient(self, tensors: list[Tensor], dy: Tensor, dtype: torch.dtype) -> Tensor:
        """dW (k, n) in ``dtype`` of dy (T, k)."""
        return weight_gradient(dy, tensors[0], dtype)


@dataclass(frozen=True)
class Remade:
    """x is made again: tensors = the recipe's inputs."""

    source: Kept

    def gradient(self, tensors: list[Tensor], dy: Tensor, dtype: torch.dtype) -> Tensor:
        """As ``Whole``."""
        return weight_gradient(dy, self.source.make(tensors), dtype)


@dataclass(frozen=True)
class Compressed:
    """z = x P is kept: tensors = (z,) or (z, top). ``mask`` is dropout that z has not seen, of ``shape`` (..., n)."""

    kind: str
    features: int
    rank: int
    key: int
    mask: Mask | None
    shape: torch.Size

    def projection(self, device: torch.device, dtype: torch.dtype, top: Tensor | None) -> projection.Projection:
        """P, as in forward."""
        return projection.make(self.kind, self.features, self.rank, self.key, device, dtype, top)

    def gradient(self, tensors: list[Tensor], dy: Tensor, dtype: torch.dtype) -> Tensor:
        """As ``Whole``, unbiased."""
        z, top = tensors if len(tensors) == 2 else (tensors[0], None)
        p = self.projection(z.device, z.dtype, top)
        if self.mask is not None:
            chosen = self.mask.of(self.shape, z.device).index_select(-1, p.index)
            z = z.mul(chosen).mul_(1.0 / (1.0 - self.mask.p))
        small = weight_gradient(dy, z, torch.float32)
        rows = torch.zeros(dy.shape[1], self.features, dtype=torch.float32, device=dy.device)
        p.add_to(rows, small, 1.0)
        return rows.to(dtype)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy (T, k) ^T x (..., n) in ``dtype``, in the operands' precision with sums in fp32."""
    x = x.reshape(-1, x.shape[-1])
    if x.dtype != dy.dtype:
        x = x.to(dy.dtype)
    if dtype != torch.float32 or dy.dtype == torch.float32:
        return (dy.T @ x).to(dtype)
    if _sums_in_fp32(dy.device.type):
        return torch.mm(dy.T, x, out_dtype=torch.float32)
    total = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.device)
    rows = max(1, _CHUNK // x.shape[1])
    for part, of in zip(dy.split(rows), x.split(rows), strict=True):
        total.addmm_(part.float().T, of.float())
    return total


@functools.cache
def _sums_in_fp32(device_type: str) -> bool:
    """Whether a product of 16-bit matrices can be returned in fp32 without casting them (torch 2.8, CUDA)."""
    if device_type != "cuda":
        return False
    a = torch.ones(8, 8, dtype=torch.bfloat16, device=device_type)
    try:
        torch.mm(a, a, out_dtype=torch.float32)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


class FactorLinear(torch.autograd.Function):
    """Arguments: x (..., n); x in the dtype of the computation, or None if it is so already; weight (k, n); bias (k,)
    or None; how x is known in backward, or None if the weight is frozen; the tensors for that."""

    @staticmethod
    def forward(x: Tensor, cast: Tensor | None, weight: Tensor, bias: Tensor | None, known: Any, *kept: Tensor):
        operand = x if cast is None else cast
        return F.linear(operand, weight.to(operand.dtype), None if bias is None else bias.to(operand.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, _, weight, bias, known, *kept = inputs
        ctx.known, ctx.x_dtype = known, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(weight, *kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        weight, *kept = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (flat @ weight.to(dy.dtype)).view(*dy.shape[:-1], weight.shape[1]).to(ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            dw = ctx.known.gradient(kept, flat, weight.dtype)
        if ctx.needs_input_grad[3]:
            db = flat.sum(0, dtype=ctx.bias_dtype)
        return dx, None, dw, db, *[None] * (len(ctx.needs_input_grad) - 4)


@dataclass(frozen=True)
class Plan:
    """What one matrix keeps.

    Args:
        rank: k of the compressed input; None keeps it exactly.
        kind: of the projection.
        seed: mixed into what is drawn.
        own_input: keep x in its own dtype, because another (an attention) keeps it anyway.
    """

    rank: int | None = None
    kind: str = "principal"
    seed: int = 0
    own_input: bool = False


class LoraFactor(nn.Linear):
    """A or B of an adapter, with a ``memopt_plan``; made by ``patch`` from an ``nn.Linear``, whose weight it has."""

    memopt_plan = Plan()

    def forward(self, input: Tensor) -> Tensor:
        x, weight, plan = input, self.weight, self.memopt_plan
        if not self.training:
            return super().forward(x.to(weight.dtype))
        dtype = compute_dtype(x, weight)
        if torch.compiler.is_compiling():
            return F.linear(x.to(dtype), weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
        # drawn without grad too: a checkpointed forward runs twice and must find the generator alike
        key = None if plan.rank is None else drawn_key(plan.seed, x)
        cast = None if x.dtype == dtype else shared.once(x, dtype, lambda: x.detach().to(dtype))
        known, tensors = None, ()
        if torch.is_grad_enabled() and weight.requires_grad:
            known, tensors = _keep(x, cast, plan, key)
        return FactorLinear.apply(x, cast, weight, self.bias, known, *tensors)


def _keep(x: Tensor, cast: Tensor | None, plan: Plan, key: int | None) -> tuple[Any, tuple[Tensor, ...]]:
    recipe = recipe_of(x)
    alone = recipe is None or (isinstance(recipe.function, Dropped) and recipe.function.source is None)
    if alone and key is not None:
        return _compress(x, cast, recipe, plan, key)
    if recipe is not None:
        return Remade(kept(recipe)), recipe.inputs
    return Whole(), (x if cast is None or plan.own_input else cast,)


def _compress(x: Tensor, cast: Tensor | None, recipe: Recipe | None, plan: Plan, key: int) -> tuple[Any, tuple]:
    """z of x, made once for all that read x; of what dropout was given, where dropout can follow later."""
    mask = None
    if recipe is not None and plan.kind in ("principal", "structured"):
        mask, source = recipe.function.mask, recipe.inputs[0]
    else:
        source = x
    dtype = x.dtype if cast is None else cast.dtype

    def made() -> tuple[Compressed, tuple[Tensor, ...]]:
        detached = source.detach()
        top = _strongest(detached, plan.rank) if plan.kind == "principal" else None
        how = Compressed(plan.kind, x.shape[-1], plan.rank, key, None, x.shape)
        operand = detached if cast is None or source is not x else cast
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            z = how.projection(x.device, dtype, top).project(operand.to(dtype))
        return how, (z,) if top is None else (z, top)

    how, tensors = shared.once(source, (plan.kind, plan.rank, dtype), made)
    if mask is not None:
        how = Compressed(how.kind, how.features, how.rank, how.key, mask, how.shape)
    return how, tensors


@torch.no_grad()
def _strongest(x: Tensor, rank: int) -> Tensor | None:
    """The coordinates of x (..., n) with the most energy, as many as ``principal`` takes as they are."""
    count = projection.top_count(rank)
    if count == 0 or rank >= x.shape[-1]:
        return None
    norm = torch.linalg.vector_norm(x.reshape(-1, x.shape[-1]), dim=0, dtype=torch.float32)
    return projection.choose_top(norm, count, None)


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Autocast's dtype where that is on; else the narrower of the two, the weight's if they are as wide."""
    state = autocast_state(x.device.type)
    if state is not None and state[1]:
        return state[2]
    return x.dtype if x.dtype.itemsize < weight.dtype.itemsize else weight.dtype


def patch(factor: nn.Module, plan: Plan) -> bool:
    """Make a plain ``nn.Linear`` a ``LoraFactor``, or give one a new plan; False for any other class."""
    if type(factor) not in (nn.Linear, LoraFactor):
        return False
    factor.__class__, factor.memopt_plan = LoraFactor, plan
    return True


def unpatch(factor: nn.Module) -> None:
    """Make it plain again."""
    if type(factor) is LoraFactor:
        del factor.memopt_plan
        factor.__class__ = nn.Linear
