"""Shapes and settings over which tests are written once."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# A block holds 160 elements in five planes; every one of these breaks another assumption.
SHAPES = {
    "one row, 31 blocks and a tail": (1, 5000),
    "one element over a block": (7, 161),
    "one block exactly": (64, 160),
    "one element under a block": (33, 159),
    "several whole blocks and a tail": (5, 1000),
    "only a tail, planes not full": (130, 33),
    "one column": (4096, 1),
    "two columns": (70, 2),
    "tail of 87, planes of 18": (3, 1367),
    "four dimensions": (2, 3, 5, 160),
}

# Each option away from its default, so that one that is lost on the way shows.
NON_DEFAULT = {
    "lr": 3e-3,
    "betas": (0.8, 0.95),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "maximize": True,
    "seed": 11,
    "stochastic_rounding": True,
}


def shape_cases() -> dict:
    """For ``pytest.mark.parametrize(**shape_cases())``."""
    return {
        "argnames": "shape",
        "argvalues": list(SHAPES.values()),
        "ids": ["x".join(map(str, s)) for s in SHAPES.values()],
    }


def dtype_cases() -> dict:
    """For ``pytest.mark.parametrize(**dtype_cases())``."""
    return {"argnames": "dtype", "argvalues": DTYPES, "ids": [str(d).removeprefix("torch.") for d in DTYPES]}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Gaussian numbers that depend on the arguments alone."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 0.1) -> torch.nn.Parameter:
    return torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype, scale=scale))


def uneven_gradient(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A gradient as layers have it: rows and columns of very different size, some exact zeros."""
    g = randn(*shape, seed=seed).reshape(shape[0], -1)
    n, k = g.shape
    g = g * torch.exp(randn(n, 1, seed=seed + 1)) * torch.exp(randn(1, k, seed=seed + 2))
    g = torch.where(randn(n, k, seed=seed + 3) > 1.5, 0.0, g)
    return (g * 1e-2).reshape(shape).to(dtype)
