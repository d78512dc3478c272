r"""One step in a subspace: project, update there, project back.

With a basis P (d x r) of a matrix seen as d x L, its gradient G, and the direction U of AdamW in the subspace:

    R  = P^T G
    U  = AdamW's direction from R and the moments (r x L)
    W  = W (1 - lr wd) - lr scale (P U + residual)

``direction`` gets U from the kernels of ``taco_adamw``: they update a matrix of zeros, at lr = 1 and without decay,
which leaves -U. So ternary moments carry what their codes cannot hold here too, and every kernel serves both.

The residual is what the subspace does not see, E = G - P R:

    sign   residual_scale sign(E)
    fira   residual_scale E diag(phi), phi_j = ||U_j|| / ||R_j|| for each of the L columns, limited in its growth:
           with e = ||E diag(phi)|| and e_old that of the step before, the whole is divided by
           max(e / max(e_old, FLOOR ||U||), LIMIT) / LIMIT

It holds from the first step on, where Fira begins unlimited: the residual begins at a tenth of the update and grows by
at most 1 % a step, a warm-up of some two hundred steps, which was better where it was compared (``docs/galore.md``).
Fira has no floor either, so a matrix whose first gradient is nearly zero may grow by 1 % a step: 1,600 steps from 1e-8
to 0.1. Because of P^T P = I, P (U - R diag(phi)) + G diag(phi) is one matrix product, and ||E_j||^2 = ||G_j||^2 -
||R_j||^2.

Everything that is as large as the parameter is made in strips of rows, at most ``strip_elements`` elements at a time.
Weights in 16 bits are written by the dense AdamW kernel with betas (0, 1) and eps = 1, where it is W - lr G with the
stochastic rounding of ``README.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..projections.geometry import Subspace
from .scalars import GOLDEN, MAX_GRADIENT, StepScalars, mix32
from .sums import on_cpu, sums_of_squares

LIMIT = 1.01
FLOOR = 0.1
TINY = 1e-8


@dataclass(frozen=True)
class BackProjection:
    """``scale`` and the residual's options, as in ``GaLoreOptions``."""

    scale: float
    residual: str = "none"
    residual_scale: float = 1.0


def within_range(grad: Tensor) -> Tensor:
    """Whether the kernels take a gradient: every |g| is at most ``MAX_GRADIENT`` and none is NaN; a bool, ()."""
    # aminmax takes a third of the time of a norm, but only along the rows in memory
    smallest, largest = torch.aminmax(grad if grad.stride(-1) == 1 else grad.mT)
    return (smallest.float() >= -MAX_GRADIENT) & (largest.float() <= MAX_GRADIENT)


def project(grad: Tensor, basis: Tensor, usable: Tensor | None = None) -> Tensor:
    """R (b, r, L) fp32 of ``grad`` (b, d, L); NaN, which the kernels refuse, of a gradient that is not usable.

    A subspace can hide what the kernels would refuse, and the residual would bring it into the weights.

    Args:
        basis: (b, d, r), then R is computed in its dtype, or int64 numbers (b, r) of coordinates.
        usable: ``within_range(grad)``, if it is known.
    """
    usable = within_range(grad) if usable is None else usable
    return _project(grad, basis).masked_fill_(~usable, torch.nan)


def _project(grad: Tensor, basis: Tensor) -> Tensor:
    if not basis.is_floating_point():
        return torch.stack([_chosen_rows(g, chosen) for g, chosen in zip(grad, basis, strict=True)]).float()
    if grad.dtype == basis.dtype == torch.float32:
        return basis.mT @ grad
    b, d, length = grad.shape
    out = torch.empty(b, basis.shape[2], length, device=grad.device)
    width = max(1, strip_elements(grad) // d)
    for matrix in range(b):
        for begin in range(0, length, width):
            part = slice(begin, min(begin + width, length))
            out[matrix, :, part] = basis[matrix].mT @ grad[matrix, :, part].to(basis.dtype)
    return out


def _chosen_rows(g: Tensor, chosen: Tensor) -> Tensor:
    """Those rows of ``g`` (d, L). A transposed view is read along the rows in memory, three times as fast."""
    if g.stride(0) == 1:
        return g.t().index_select(1, chosen).t().contiguous()
    return g.index_select(0, chosen)


def direction(
    backend: ModuleType, ternary: bool, low_grad: Tensor, state: dict[str, Tensor], s: StepScalars
) -> tuple[Tensor, bool | Tensor]:
    """(-U (b, r, L) fp32, whether the gradient was usable); updates the moments in ``state``.

    Args:
        low_grad: R, (b, r, L) fp32.
        state: the moments of shape (b r, L), under the keys that the kernels know.
        s: of the step; its lr, decay and rounding are those of the weight and have no part in this.
    """
    flat = low_grad.view(-1, low_grad.shape[-1])
    minus_u = torch.zeros_like(flat)
    plain = replace(s, lr=1.0, decay=1.0, stochastic=False)
    step = backend.ternary_adamw_ if ternary else backend.dense_adamw_
    applied = step(minus_u, flat, state, plain)
    return minus_u.view(low_grad.shape), applied


def project_back_(
    weight: Tensor,
    grad: Tensor,
    space: Subspace,
    basis: Tensor,
    low_grad: Tensor,
    minus_u: Tensor,
    norm: Tensor | None,
    applied: bool | Tensor,
    backend: ModuleType,
    s: StepScalars,
    rule: BackProjection,
) -> None:
    """Update ``weight`` in place, and with the residual ``fira`` its ``norm`` (b,).

    Args:
        weight, grad: the parameter (m, n) or (b, m, n) and its gradient.
        basis: as for ``project``.
        low_grad, minus_u: (b, r, L) fp32, R and -U; both are worked in and lost.
        applied: as ``direction`` gave it; where it is a tensor that is False, nothing changes.
        backend: kernels that write 16-bit weights.
    """
    outside = None
    if rule.residual == "fira":
        outside = _fira(space.view(grad), low_grad, minus_u, norm, applied, s, rule)
    inside = minus_u.mul_(-rule.scale)
    if outside is not None:
        inside -= _where(applied, low_grad.mul_(outside[:, None]))
    stack, gradients = (t if t.dim() == 3 else t[None] for t in (weight, grad))
    for matrix, w in enumerate(stack):
        back = _Product(basis[matrix], inside[matrix], space)
        writer = _Writer(w, backend, s, applied, matrix)
        if rule.residual == "none" and w.dtype == back.dtype == torch.float32:
            writer.decay(slice(None))
            w.addmm_(*back.factors, alpha=-s.lr)
            continue
        seen = _Product(basis[matrix], low_grad[matrix], space) if rule.residual == "sign" else None
        for rows in _strips(w):
            change = back.rows(rows)
            if outside is not None:
                phi = outside[matrix] if space.left else outside[matrix, rows, None]
                change += _where(applied, gradients[matrix, rows].float() * phi)
            elif seen is not None:
                missed = gradients[matrix, rows].float() - seen.rows(rows)
                if s.maximize:
                    missed.neg_()
                change += _where(applied, missed.sign_().mul_(rule.scale * rule.residual_scale))
            writer.subtract(rows, change)


class _Product:
    """P K as rows of the parameter, for a basis P of one matrix, (d, r) or (r,) coordinates, and K (r, L) fp32."""

    def __init__(self, basis: Tensor, inside: Tensor, space: Subspace) -> None:
        self._left = space.left
        self.dtype = basis.dtype
        if basis.is_floating_point():
            inside = inside.to(basis.dtype)
            self.factors = (basis, inside) if space.left else (inside.mT, basis.mT)
            return
        # coordinates that are not among them read the row, or column, of zeros that follows
        more = (0, 0, 0, 1) if space.left else (0, 1)
        self._inside = torch.nn.functional.pad(inside if space.left else inside.t().contiguous(), more)
        self._place = torch.full((space.dimension,), space.rank, device=basis.device)
        self._place[basis] = torch.arange(space.rank, device=basis.device)

    def rows(self, rows: slice) -> Tensor:
        """(rows, columns of the parameter) fp32, of its own."""
        if self.dtype.is_floating_point:
            return (self.factors[0][rows] @ self.factors[1]).float()
        if self._left:
            return self._inside.index_select(0, self._place[rows])
        return self._inside[rows].index_select(1, self._place)


class _Writer:
    """Writes strips of one matrix of weights: W (1 - lr wd) - lr change."""

    def __init__(self, w: Tensor, backend: ModuleType, s: StepScalars, applied: bool | Tensor, matrix: int) -> None:
        self._w, self._backend, self._s, self._matrix = w, backend, s, matrix
        self._decay: float | Tensor = s.decay
        if torch.is_tensor(applied) and s.decay != 1.0:
            self._decay = torch.where(applied, s.decay, 1.0)
        self._scratch: Tensor | None = None

    def decay(self, rows: slice) -> None:
        if self._s.decay != 1.0:
            self._w[rows].mul_(self._decay)

    def subtract(self, rows: slice, change: Tensor) -> None:
        """``change`` is fp32 and not used afterwards."""
        s, w = self._s, self._w[rows]
        if w.dtype == torch.float32:
            self.decay(rows)
            w.sub_(change.mul_(s.lr))
            return
        change.mul_(s.lr)
        if s.decay != 1.0:
            change.add_(w.float().mul_(1.0 - self._decay))
        if self._scratch is None:
            self._scratch = torch.zeros(2, change.numel(), device=w.device)
        m, v = (part[: change.numel()].view(change.shape) for part in self._scratch)
        key = mix32(s.key + (self._matrix * self._w.shape[0] + rows.start) * GOLDEN)
        only_subtract = StepScalars(
            beta1=0.0,
            one_minus_beta1=1.0,
            beta2=1.0,
            one_minus_beta2=0.0,
            inv_bias1=1.0,
            inv_bias2=1.0,
            carry=0.0,
            decay=1.0,
            lr=1.0,
            eps=1.0,
            key=key,
            first=False,
            stochastic=s.stochastic,
            maximize=False,
        )
        self._backend.dense_adamw_(w, change, {"exp_avg": m, "exp_avg_sq": v}, only_subtract)


def _fira(
    grad: Tensor,
    low_grad: Tensor,
    minus_u: Tensor,
    norm: Tensor,
    applied: bool | Tensor,
    s: StepScalars,
    rule: BackProjection,
) -> Tensor:
    """The residual's factors scale residual_scale phi / limit, (b, L), of ``grad`` (b, d, L); ``norm`` becomes that of
    the limited residual."""
    low_squares, u_squares, squares = (sums_of_squares(x, dim=1) for x in (low_grad, minus_u, grad))
    phi = u_squares.sqrt() / (low_squares.sqrt() + TINY)
    outside = (squares - low_squares).clamp_(min=0.0)
    e = (outside * phi.square()).sum(dim=1).sqrt()
    before = torch.maximum(norm, FLOOR * u_squares.sum(dim=1).sqrt())
    limit = (e / (before + TINY)).clamp(min=LIMIT) / LIMIT
    norm.copy_(_where(applied, (e / limit).float(), norm))
    sign = -1.0 if s.maximize else 1.0
    return _where(applied, (phi * (sign * rule.scale * rule.residual_scale) / limit[:, None]).float())


def _where(applied: bool | Tensor, value: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
    """``value`` where the step is applied; on a GPU nobody waits for that answer."""
    return torch.where(applied, value, otherwise) if torch.is_tensor(applied) else value


def matmul_dtype(choice: str, grad: Tensor) -> torch.dtype:
    """The dtype of the two products for a gradient; ``choice`` is ``GaLoreOptions.matmul``."""
    if choice != "auto":
        return getattr(torch, choice)
    bf16 = grad.dtype == torch.bfloat16
    if on_cpu(grad):
        bf16 = grad.dtype in (torch.bfloat16, torch.float32) and _cpu_multiplies_bfloat16()
    return torch.bfloat16 if bf16 else torch.float32


@lru_cache(maxsize=1)
def _cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices faster than fp32 ones: with AMX, and with AVX512_BF16 on AMD's.

    Intel's AVX512_BF16 has half the throughput of its fp32 products, measured on a Xeon: twice the time. (torch says
    what there is under private names. Known by the processor and not by trying, so that a run and its resumption
    choose alike.)
    """

    def has(name: str) -> bool:
        ask = getattr(torch.cpu, name, None)
        return ask is not None and ask()

    return has("_is_amx_tile_supported") or (has("_is_avx512_bf16_supported") and _vendor() == "AuthenticAMD")


def _vendor() -> str:
    """The processor's maker as Linux names it, "" elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def strip_elements(like: Tensor) -> int:
    """How many elements are worked on at once: what fits into a CPU's cache, on a GPU what keeps it busy."""
    return 1 << 19 if on_cpu(like) else 1 << 22


def _strips(w: Tensor) -> Iterator[slice]:
    m, n = w.shape
    step = max(1, strip_elements(w) // n)
    for begin in range(0, m, step):
        yield slice(begin, min(begin + step, m))
