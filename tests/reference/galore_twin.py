"""A step in a subspace once more, from the equations alone, in double precision and with the basis as a full matrix.

It shares nothing with the package. Beside each exact number stands how far a correct single-precision computation may
be from it: every operation is off by at most ``E`` relative, a sum of n products by (n + 1) E of the sum of magnitudes,
and errors go on to first order. The equations, with P the basis d x r, G the gradient d x L, R and the moments r x L, t
the step from 1:

    R   = P^T G                                 negated for the moments when maximizing
    m   = b1 m + (1 - b1) R                     v = b2 v + (1 - b2) R^2
    U   = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    W   = W (1 - lr wd) - lr scale (P U + residual)
    sign: residual_scale sign(G - P R)
    fira: residual_scale (G - P R)_j phi_j / limit,  phi_j = |U_j| / (|R_j| + 1e-8),
          e^2 = sum_j (|G_j|^2 - |R_j|^2) phi_j^2,  limit = max(e / (max(e_old, |U| / 10) + 1e-8), 1.01) / 1.01

On a refresh, with C = P_new^T P_old, on bias-corrected moments: m <- C m, v <- |C^2 (v - m^2) + (C m)^2|, elementwise
squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .ternary_twin import E

BF16 = 2.0**-9


@dataclass
class Near:
    """An exact number and how far a correct result may be from it."""

    value: Tensor
    error: Tensor | float = 0.0

    def holds(self, found: Tensor) -> bool:
        return bool(((found.double() - self.value).abs() <= self.error).all())


@dataclass(frozen=True)
class Rule:
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float = 0.0
    scale: float = 1.0
    residual: str = "none"
    residual_scale: float = 1.0
    maximize: bool = False


def random_basis(d: int, columns: list[int], signs: list[float]) -> Tensor:
    """These columns of the cosine transform, its rows with signs, by the formula."""
    c = torch.tensor(columns, dtype=torch.float64)
    size = ((2 - (c == 0).double()) / d).sqrt()
    row = torch.arange(d, dtype=torch.float64)[:, None]
    return torch.tensor(signs, dtype=torch.float64)[:, None] * size * torch.cos(math.pi * (2 * row + 1) * c / (2 * d))


def unit_basis(d: int, coordinates: list[int]) -> Tensor:
    return torch.eye(d, dtype=torch.float64)[:, coordinates]


def product_unit(basis: Tensor, terms: int, matmul: str = "float32") -> float:
    """Relative to the sum of magnitudes: exact for coordinates; bf16 rounds both factors and the result. A factor alpha
    of the whole may be multiplied into every term."""
    if bool(((basis == 0) | (basis == 1)).all()):
        return 0.0
    return (terms + 2) * E + (3.1 * BF16 if matmul == "bfloat16" else 0.0)


def project(grad: Tensor, basis: Tensor, matmul: str = "float32") -> Near:
    """R of a float64 gradient (d, L) and basis (d, r)."""
    unit = product_unit(basis, grad.shape[0], matmul)
    return Near(basis.T @ grad, unit * (basis.abs().T @ grad.abs()))


def transported(m: Near, v: Near, new: Tensor, old: Tensor, step: int, betas: tuple[float, float]) -> tuple[Near, Near]:
    """Moments (r, L) written at step ``step`` - 1, after the change of basis."""
    d, r = new.shape
    bias1, bias2 = (1 - beta ** (step - 1) for beta in betas)
    c = new.T @ old
    c_error = product_unit(torch.cat([new, old], dim=1), d) * (new.abs().T @ old.abs())
    m_hat, v_hat = m.value / bias1, v.value / bias2
    moved = c @ m_hat
    moved_error = (r + 4) * E * (c.abs() @ m_hat.abs()) + c_error @ m_hat.abs()
    squares = c * c
    size = v_hat + m_hat**2
    new_v = (squares @ (v_hat - m_hat**2) + moved**2).abs()
    v_error = (r + 8) * E * (squares @ size) + 2 * (c.abs() * c_error) @ size
    v_error = v_error + 2.1 * moved.abs() * moved_error + moved_error**2 + 8 * E * (new_v + moved**2)
    mean, unseen = v_hat.mean(dim=0, keepdim=True), (1 - squares.sum(dim=1, keepdim=True)).clamp(min=0)
    unseen_error = (r + 4) * E + 2.1 * (c.abs() * c_error).sum(dim=1, keepdim=True)
    v_error = v_error + (unseen_error + (r + 8) * E * unseen) * mean
    v_error = v_error + unseen * (v.error / bias2).mean(dim=0, keepdim=True) if torch.is_tensor(v.error) else v_error
    new_v = new_v + unseen * mean
    return Near(moved * bias1, moved_error * bias1), Near(new_v * bias2, v_error * bias2)


def adamw(low: Near, m: Near, v: Near, step: int, rule: Rule) -> tuple[Near, Near, Near]:
    """U and the new moments."""
    b1, b2 = rule.betas
    g = -low.value if rule.maximize else low.value
    new_m, new_v = b1 * m.value + (1 - b1) * g, b2 * v.value + (1 - b2) * g * g
    m_error = (1 - b1) * low.error + b1 * m.error + 3 * E * (abs(b1) * m.value.abs() + (1 - b1) * g.abs())
    v_error = (1 - b2) * (2 * g.abs() * low.error + low.error**2) + b2 * v.error + 5 * E * new_v
    inv1, inv2 = 1 / (1 - b1**step), 1 / (1 - b2**step)
    lowest = (new_v - v_error).clamp(min=0)
    root_error = (v_error / (new_v.sqrt() + lowest.sqrt() + 1e-300)) * inv2**0.5
    u = new_m * inv1 / ((new_v * inv2).sqrt() + rule.eps)
    u_error = (m_error * inv1 + u.abs() * root_error) / ((lowest * inv2).sqrt() + rule.eps) + 10 * E * u.abs()
    return Near(u, u_error), Near(new_m, m_error), Near(new_v, v_error)


def apply(
    weight: Tensor, grad: Tensor, basis: Tensor, low: Near, u: Near, norm: float, rule: Rule, matmul: str = "float32"
) -> tuple[Near, Near]:
    """The new weight (d, L) before it is rounded to 16 bits, and the residual's norm."""
    d, r = basis.shape
    unit = product_unit(basis, r, matmul)
    size = basis.abs()
    inside = rule.scale * (basis @ u.value)
    inside_error = rule.scale * (size @ (u.error + unit * u.value.abs()))
    residual, residual_error, new_norm = torch.zeros_like(weight), torch.zeros_like(weight), Near(torch.zeros(()))
    if rule.residual != "none":
        missed = grad - basis @ low.value
        margin = size @ (low.error + unit * low.value.abs()) + 3 * E * (grad.abs() + missed.abs()) * (unit > 0)
        sign = -1.0 if rule.maximize else 1.0
        if rule.residual == "sign":
            residual = sign * rule.scale * rule.residual_scale * missed.sign()
            residual_error = 2 * rule.scale * rule.residual_scale * (missed.abs() <= margin).double() * (margin > 0)
        else:
            factor, relative, new_norm = _fira(grad, low, u, norm, rule)
            residual = sign * missed * factor
            residual_error = residual.abs() * relative + factor * (margin + (r + 6) * E * (grad.abs() + missed.abs()))
    change = inside + residual
    decayed = weight * (1 - rule.lr * rule.weight_decay)
    error = rule.lr * (inside_error + residual_error + 3 * E * (inside.abs() + residual.abs())) + 4 * E * weight.abs()
    return Near(decayed - rule.lr * change, error), new_norm


def _fira(grad: Tensor, low: Near, u: Near, norm: float, rule: Rule) -> tuple[Tensor, Tensor, Near]:
    """(scale residual_scale phi / limit, its relative error, the new norm)."""
    d, (r, length) = grad.shape[0], low.value.shape
    low_norm, u_norm = low.value.norm(dim=0), u.value.norm(dim=0)
    low_error, u_error = (
        x.error.norm(dim=0) if torch.is_tensor(x.error) else torch.zeros(length).double() for x in (low, u)
    )
    phi = u_norm / (low_norm + 1e-8)
    relative = u_error / u_norm + low_error / low_norm + (r + 8) * E
    squares = (grad**2).sum(dim=0)
    outside = (squares - low_norm**2).clamp(min=0)
    outside_error = (d + 4) * E * squares + (r + 6) * E * low_norm**2 + 2.1 * low_norm * low_error
    e = ((outside * phi**2).sum()).sqrt()
    shift = (phi**2 * (outside_error + 2.1 * relative * outside)).sum()
    e_error = shift / (e + (e**2 - shift).clamp(min=0).sqrt() + 1e-300) + (length + 4) * E * e
    floor = 0.1 * u.value.norm()
    before = max(norm, floor.item())
    before_relative = (u_error.norm() / u.value.norm()).item() + (r * length + 4) * E
    limit = max((e / (before + 1e-8)).item(), 1.01) / 1.01
    limit_relative = (e_error / e + before_relative + 6 * E) if limit > 1 - 1e-3 else 0.0
    norm_error = e_error / limit + e / limit * limit_relative
    return (
        rule.scale * rule.residual_scale * phi / limit,
        relative + limit_relative + 4 * E,
        Near(e / limit, norm_error),
    )
