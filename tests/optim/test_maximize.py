"""``maximize`` with a gradient is minimizing with its negative, bit for bit, in weights and in state.

Every operation of a step is odd or even in the gradient, and rounding to the nearest is the same on both sides of zero.
The stochastic rounding of weights is not mirrored, but both runs round the same numbers.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from hf_memopt import GaLoreAdamW, Taco, TacoAdamW
from tests.cases import DTYPES, parameter, randn
from tests.conftest import require_kernel
from tests.optim.common import state_equal

SHAPES = [(41, 23), (23, 41), (24, 24), (3, 9, 17), (30, 163)]
COMMON = {"lr": 1e-2, "weight_decay": 0.1, "seed": 3}


def check(kind, group: dict, shape: tuple[int, ...], dtype: torch.dtype, seed: int, **options) -> None:
    """Five steps on gradients a third of which are zeros: there the sign of a zero shows."""
    runs = []
    for maximize in (True, False):
        p = parameter(*shape, seed=seed, dtype=dtype)
        optimizer = kind([{"params": [("w", p)], **group}], maximize=maximize, **COMMON, **options)
        for t in range(5):
            grad = randn(*shape, seed=100 * seed + t) * (randn(*shape, seed=100 * seed + t + 50) > -0.5)
            p.grad = grad.to(dtype) if maximize else -grad.to(dtype)
            optimizer.step()
        runs.append((p.detach(), optimizer.state[p]))
    assert torch.equal(runs[0][0], runs[1][0]), (shape, dtype, options)
    # of zeros the sign may differ; everything else is the same up to the sign of what is odd in the gradient
    even = {"exp_avg_sq", "exp_avg_sq.codes", "exp_avg_sq.row", "exp_avg_sq.col", "residual_norm", "refreshes", "step"}
    first, second = ({key: value for key, value in state.items() if key in even} for _, state in runs)
    assert state_equal(first, second), (shape, dtype, options)


@pytest.mark.parametrize("refresh", ["subspace", "svd", "select", "random"])
@pytest.mark.parametrize("state", ["fp32", "ternary"])
def test_galore(refresh, state):
    """Options drawn by a seeded generator; every residual, dtype, kernel and way of rounding comes up."""
    require_kernel("compiled")
    draw = random.Random(f"{refresh} {state}")
    cases = list(itertools.product(["none", "fira", "sign"], DTYPES, ["reference", "compiled"], [False, True]))
    for number, (residual, dtype, kernel, stochastic) in enumerate(cases):
        options = {"refresh": refresh, "state": state, "residual": residual, "kernel": kernel}
        options |= {"stochastic_rounding": stochastic, "transport": draw.choice(["moments", "none"])}
        options |= {"projector": draw.choice(["int8", "float32"]), "matmul": draw.choice(["float32", "bfloat16"])}
        options |= {"proj_type": draw.choice(["std", "left", "right"]), "adaptive": draw.random() < 0.5}
        group = {"treatment": "projected", "rank": draw.choice([3, 5, 7]), "update_proj_gap": 2}
        check(GaLoreAdamW, group, draw.choice(SHAPES), dtype, number, **options)


@pytest.mark.parametrize("kind, treatment", [(TacoAdamW, "ternary"), (TacoAdamW, "dense"), (Taco, "one_sparse")])
def test_the_others(kind, treatment):
    require_kernel("compiled")
    cases = itertools.product(SHAPES, DTYPES, ["reference", "compiled"], [False, True])
    for number, (shape, dtype, kernel, stochastic) in enumerate(cases):
        options = {"kernel": kernel, "stochastic_rounding": stochastic}
        check(kind, {"treatment": treatment}, shape, dtype, number, **options)
