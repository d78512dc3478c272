"""When subspaces are refreshed: one matrix after another, and less often where they have settled."""

from __future__ import annotations

import math

import pytest
import torch

from hf_memopt.optim.galore import SPREAD, GaLoreAdamW
from tests.cases import parameter, randn
from tests.conftest import fastest_kernel
from tests.optim.common import train

OPTIONS = {"rank": 4, "matmul": "float32", "transport": "moments", "residual": "none", "state": "fp32"}


def refreshed_at(optimizer: GaLoreAdamW, steps: int, gradient=None) -> list[list[int]]:
    """The steps, from 1, on which each projected matrix was refreshed."""
    matrices = [p for group in optimizer.param_groups for p in group["params"] if p.dim() > 1]
    found, counts = [[] for _ in matrices], [0] * len(matrices)
    for t in range(steps):
        for i, p in enumerate(matrices):
            p.grad = randn(*p.shape, seed=1000 * t + i) if gradient is None else gradient(t, i)
        optimizer.step()
        for i, p in enumerate(matrices):
            more = optimizer.state[p]["refreshes"] - counts[i]
            assert more in (0, 1)
            counts[i] += more
            found[i] += [t + 1] * more
    return found


def many(number: int, **options) -> GaLoreAdamW:
    """So many small matrices, and vectors between them, which take no turn."""
    parameters = [p for i in range(number) for p in (parameter(6, 8, seed=i), parameter(8))]
    groups = [{"params": parameters[0::2], "treatment": "projected"}, {"params": parameters[1::2]}]
    return GaLoreAdamW(groups, kernel=fastest_kernel(), **{**OPTIONS, **options})


@pytest.mark.parametrize(
    "number, gap, refresh",
    [
        (25, 12, "select"),
        (7, 20, "subspace"),
        (1, 20, "subspace"),
        (13, 12, "random"),
        (9, 4, "random"),
        (5, 1, "subspace"),
        (6, 3, "svd"),
    ],
)
def test_staggered(number, gap, refresh):
    found = refreshed_at(many(number, update_proj_gap=gap, stagger=True, refresh=refresh), 3 * gap + SPREAD)
    spread = min(SPREAD, gap)
    at = lambda step: sum(step in steps for steps in found)  # noqa: E731
    for steps in found:
        assert 1 <= steps[0] <= spread  # the first of its own, within SPREAD steps
        gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
        assert math.ceil(gap / 2) <= gaps[0] < math.ceil(gap / 2) + gap  # to its place in the gap
        assert set(gaps[1:]) <= {gap}
    firsts = [steps[0] for steps in found]
    assert max(firsts.count(step) for step in firsts) <= math.ceil(number / spread)
    most = max(at(step) - firsts.count(step) for step in range(1, 3 * gap + SPREAD + 1))
    assert most <= math.ceil(number / gap)


def test_all_at_once_as_in_the_paper():
    found = refreshed_at(many(5, update_proj_gap=4, stagger=False, refresh="subspace"), 10)
    assert found == [[1, 5, 9]] * 5


@pytest.mark.parametrize("refresh", ["subspace", "svd", "select"])
def test_adaptive(refresh):
    """A constant gradient's subspace has settled after a few refreshes; that of independent ones never has."""
    gap, rank, steps = 3, 4, 60
    fixed = randn(24, rank, seed=1) @ randn(rank, 30, seed=2)
    fixed[:rank] *= 10  # so that coordinates settle too

    for gradient, settles in ((lambda t, i: fixed, True), (lambda t, i: randn(24, 30, seed=t), False)):
        for adaptive in (False, True):
            p = parameter(24, 30)
            options = {**OPTIONS, "rank": rank, "refresh": refresh, "update_proj_gap": gap, "stagger": False}
            optimizer = GaLoreAdamW([{"params": [p], "treatment": "projected"}], adaptive=adaptive, **options)
            (found,) = refreshed_at(optimizer, steps, gradient)
            gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
            if adaptive and settles:
                assert gaps[-1] == 2 * gap and set(gaps[3:]) == {2 * gap}, gaps
            else:
                assert set(gaps) == {gap}, gaps


@pytest.mark.parametrize("refresh", ["subspace", "svd", "select"])
def test_adaptive_where_the_gradient_has_a_lower_rank(refresh):
    """Two directions, and noise in all others: which of the noise fills the rest of the subspace means nothing."""
    gap, steps = 3, 60
    fixed = randn(24, 2, seed=1) @ randn(2, 30, seed=2)
    if refresh == "select":
        fixed[2:] = 0
    p = parameter(24, 30)
    options = {**OPTIONS, "refresh": refresh, "update_proj_gap": gap, "stagger": False, "adaptive": True}
    optimizer = GaLoreAdamW([{"params": [p], "treatment": "projected"}], **options)
    (found,) = refreshed_at(optimizer, steps, lambda t, i: fixed + 1e-3 * randn(24, 30, seed=t))
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert set(gaps[3:]) == {2 * gap}, gaps


def test_adaptive_leaves_random_subspaces_alone():
    optimizer = many(3, update_proj_gap=3, stagger=False, refresh="random", adaptive=True)
    assert refreshed_at(optimizer, 10) == [[1, 4, 7, 10]] * 3


def test_adaptive_and_staggered_keep_their_places():
    """A pause of two gaps leads to the same place."""
    gap = 6
    fixed = randn(24, 4, seed=1) @ randn(4, 30, seed=2)
    parameters = [parameter(24, 30, seed=i) for i in range(6)]
    options = {**OPTIONS, "refresh": "subspace", "update_proj_gap": gap, "stagger": True, "adaptive": True}
    optimizer = GaLoreAdamW([{"params": parameters, "treatment": "projected"}], **options)
    found = refreshed_at(optimizer, 60, lambda t, i: fixed)
    assert [{step % gap for step in steps[1:]} for steps in found] == [{place} for place in range(6)]
    assert all(steps[-1] - steps[-2] == 2 * gap for steps in found)


@pytest.mark.parametrize("refresh", ["subspace", "random"])
def test_a_later_group_gets_places_of_its_own(refresh):
    optimizer = many(3, update_proj_gap=8, stagger=True, refresh=refresh)
    refreshed_at(optimizer, 5)
    late = [parameter(6, 8, seed=i) for i in (20, 21)]
    optimizer.add_param_group({"params": late, "treatment": "projected"})
    train(optimizer, range(5, 40))
    assert all(optimizer.state[p]["refreshes"] in (4, 5) for p in late)
    assert optimizer.state[late[0]]["refresh_at"] != optimizer.state[late[1]]["refresh_at"]
    assert all(torch.isfinite(p).all() for group in optimizer.param_groups for p in group["params"])
