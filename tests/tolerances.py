"""How far correct results may lie apart, and why. No number here was found by trying.

``E`` is the relative rounding error of one single-precision operation. The ternary step has element-wise bounds of its
own in ``reference/ternary_twin.py``.
"""

from __future__ import annotations

import torch

from .reference.ternary_twin import E

HALF_SPACING = {torch.float32: E, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative, of normal numbers


def first_moment(beta1: float, largest_gradient: float) -> float:
    """Absolute. A step adds at most 3 E of the largest gradient (two products with rounded constants, one sum), and of
    an
    older error beta1 remains: a geometric series."""
    return 3 * E * largest_gradient / (1 - beta1)


def second_moment(beta2: float, steps: int) -> float:
    """Relative, since nothing cancels: 5 E a step (constant, square, two products, sum), of which beta2 remains."""
    return 5 * E * min(steps, 1 / (1 - beta2))


def adamw_weight(
    steps: int, lr: float, betas: tuple[float, float], largest_ratio: float, largest_weight: float
) -> float:
    """Absolute, after ``steps``. The update is the first moment over the root of the second.

    ``largest_ratio`` bounds (largest gradient) / sqrt(v) over all elements: the first moment's error in the update is
    that
    many times its 3 E / (1 - beta1), the second's is half its relative error; root, eps, corrections and quotient add 8
    E.
    Decay, product and difference add 3 E of the weight.
    """
    of_update = 3 * E / (1 - betas[0]) + second_moment(betas[1], steps) / 2 + 8 * E
    return steps * (lr * largest_ratio * of_update + 3 * E * largest_weight)


SIGMAS = 6.0
"""A mean of independent samples lies further out than this many of its standard errors once in 5e8 times; a test
compares at most some thousand means."""


def standard_error(variance: torch.Tensor | float, samples: int) -> torch.Tensor | float:
    """Of the mean of ``samples`` independent samples of this variance."""
    return (variance / samples) ** 0.5


def products(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of each element of ``a @ b`` in ``dtype`` with sums in fp32: Higham's k E sum |a| |b|, and one rounding."""
    a, b = a.double().abs(), b.double().abs()
    size = a @ b
    return a.shape[-1] * E * size + HALF_SPACING[dtype] * size
