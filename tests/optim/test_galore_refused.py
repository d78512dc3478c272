"""A refused step of ``GaLoreAdamW`` changes nothing: gradients about the largest that a kernel takes, at a refresh."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_memopt.kernels.scalars import MAX_GRADIENT
from hf_memopt.optim.galore import GaLoreAdamW
from tests.cases import parameter, randn
from tests.conftest import fastest_kernel
from tests.optim.common import snapshot, state_equal

REFRESH = ["subspace", "svd", "select", "random"]
SHAPES = [(23, 41), (41, 23), (3, 9, 17)]
SIZES = [0.02, 0.2, 0.9, 1.0, 1.02, 2.0, 10.0]


def gradients(shape: tuple[int, ...], size: float) -> dict[str, torch.Tensor]:
    """Gradients whose largest |g| is so many times ``MAX_GRADIENT``."""
    peak = size * MAX_GRADIENT
    noise = randn(*shape, seed=5).clamp(-1, 1)
    one = 1e-3 * noise
    one.view(-1)[60] = 1.0
    aligned = torch.ones(shape)  # its sums are much larger than its elements
    return {"noise": noise / noise.abs().max() * peak, "one": one * peak, "aligned": aligned * peak}


@pytest.mark.parametrize("refresh", REFRESH)
@pytest.mark.parametrize("residual", ["none", "fira", "sign"])
@pytest.mark.parametrize("state", ["fp32", "ternary"])
def test_a_refused_step_at_a_refresh_changes_nothing(refresh, residual, state):
    """Over sizes that are refused for |g|, for the sums in P^T g alone, or taken; whatever the rank and the side."""
    taken = refused = 0
    for shape, rank, proj_type in itertools.product(SHAPES, (1, 5, 9), ("left", "right")):
        p = parameter(*shape)
        options = {"refresh": refresh, "residual": residual, "state": state, "stagger": False, "adaptive": True}
        group = {"params": [("w", p)], "treatment": "projected", "rank": rank, "proj_type": proj_type}
        optimizer = GaLoreAdamW([group], kernel=fastest_kernel(), matmul="float32", update_proj_gap=1, **options)
        for t in range(2):
            p.grad = randn(*shape, seed=t)
            optimizer.step()
        start = snapshot(optimizer)
        for size in SIZES:
            for kind, grad in gradients(shape, size).items():
                p.grad = grad
                optimizer.step()
                weights, after = snapshot(optimizer)
                was_refused = after["state"][0].pop("skipped")
                if was_refused:
                    expected = {key: value for key, value in start[1]["state"][0].items() if key != "skipped"}
                    assert state_equal(weights, start[0]) and state_equal(after["state"][0], expected), (size, kind)
                else:
                    assert size <= 1.0, "beyond the largest |g| that the kernels take elsewhere"
                    numbers = [*weights, *(v for v in after["state"][0].values() if torch.is_tensor(v))]
                    assert all(v.isfinite().all() for v in numbers if v.is_floating_point()), (size, kind)
                refused, taken = refused + bool(was_refused), taken + (not was_refused)
                optimizer.load_state_dict(start[1])
                with torch.no_grad():
                    p.copy_(start[0][0])
    assert taken and refused
