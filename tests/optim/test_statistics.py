"""The code statistics: right numbers, on request only, and without a trace in the training."""

from __future__ import annotations

import math

import pytest
import torch

from hf_memopt import TacoAdamW
from hf_memopt.optim import statistics
from tests.cases import parameter, randn
from tests.optim.common import state_equal


def gaussian_theory() -> tuple[float, float]:
    """(share of zeros, share of energy not held) for a Gaussian block: threshold c = 0.7 E|x|, one scale, the mean of
    what is kept.
    """
    c = 0.7 * math.sqrt(2 / math.pi)
    kept = math.erfc(c / math.sqrt(2))
    kept_magnitude = math.sqrt(2 / math.pi) * math.exp(-c * c / 2)
    return 1 - kept, 1 - kept_magnitude**2 / kept


def step_with_statistics(optimizer) -> dict[str, float]:
    optimizer.request_statistics()
    optimizer.step()
    return optimizer.statistics


def test_gaussian_momentum(kernel):
    """409600 elements, of which 65280 are sampled: six standard deviations of a share are 0.012; the scale of a block
    of 160 adds its own few thousandths.
    """
    p = parameter(256, 1600)
    optimizer = TacoAdamW([p], kernel=kernel, betas=(0.9, 0.999))
    p.grad = randn(256, 1600, seed=1)
    zero_share, carried = gaussian_theory()
    found = step_with_statistics(optimizer)
    assert found["zero_share"] == pytest.approx(zero_share, abs=0.015)
    assert found["carried_energy"] == pytest.approx(carried, abs=0.015)
    assert found["changed_share"] == pytest.approx(1 - zero_share, abs=0.015)  # all codes were 0 before


def test_exact_on_a_small_parameter(kernel):
    """Everything is sampled, so the shares can be counted from the state and from the weights' own equations."""
    p = parameter(64, 100)
    optimizer = TacoAdamW([p], kernel=kernel, maximize=True)
    codec = optimizer.CODECS["ternary"]["exp_avg"]

    def decoded():
        state = optimizer.state[p]
        return codec.decode({part: state[f"exp_avg.{part}"].clone() for part in ("codes", "scale")}, p.shape)

    p.grad = randn(64, 100, seed=1)
    optimizer.step()
    before = decoded()
    p.grad = randn(64, 100, seed=2)
    found = step_with_statistics(optimizer)
    after = decoded()
    m = 0.9 * before.double() - (1 - 0.9) * p.grad.double()
    assert found["zero_share"] == (after == 0).double().mean().item()
    assert found["changed_share"] == (after.sign() != before.sign()).double().mean().item()
    assert found["carried_energy"] == pytest.approx(((m - after).square().sum() / m.square().sum()).item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_the_same_with_and_without(kernel, dtype):
    runs = []
    for asked in (False, True):
        parameters = [parameter(40, 200, dtype=dtype), parameter(9, dtype=dtype)]
        optimizer = TacoAdamW(parameters, kernel=kernel)
        for t in range(4):
            for p in parameters:
                p.grad = randn(*p.shape, seed=t, dtype=dtype)
            if asked:
                optimizer.request_statistics()
            optimizer.step()
        runs.append((parameters, optimizer))
    (first, plain), (second, asked) = runs
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert state_equal(plain.state_dict(), asked.state_dict())
    assert plain.statistics == {} and asked.statistics


def test_only_on_request(kernel):
    p = parameter(40, 200)
    optimizer = TacoAdamW([p], kernel=kernel)
    p.grad = randn(40, 200)
    assert optimizer.statistics == {}
    first = step_with_statistics(optimizer)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.statistics == first
    assert step_with_statistics(optimizer) != first


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
def test_a_skipped_parameter_is_left_out(kernel, bad):
    """Also when the bad element is not in the sample: the 1600 x 1600 matrix is sampled at 40 rows."""
    good, skipped = parameter(64, 100), parameter(1600, 1600)
    optimizer = TacoAdamW([good, skipped], kernel=kernel)
    good.grad, skipped.grad = randn(64, 100, seed=1), torch.zeros(1600, 1600)
    skipped.grad[3, 5] = bad
    with_it = step_with_statistics(optimizer)
    assert optimizer.skipped_steps == 1

    alone = TacoAdamW([good], kernel=kernel)
    assert step_with_statistics(alone) == with_it


def test_nothing_to_sample(kernel):
    vector = parameter(100)
    optimizer = TacoAdamW([vector], kernel=kernel)
    vector.grad = torch.ones(100)
    assert step_with_statistics(optimizer) == {}


@pytest.mark.parametrize("scale", [1e-25, 1e19])
def test_gradients_whose_squares_leave_single_precision(kernel, scale):
    p = parameter(64, 100)
    optimizer = TacoAdamW([p], kernel=kernel)
    p.grad = randn(64, 100, seed=1).clamp(-1.7, 1.7) * scale
    assert 0.1 < step_with_statistics(optimizer)["carried_energy"] < 0.25


def test_sampled_rows_exist_however_many_there_are():
    """In single precision 2^24 + 3 rounds up, past the last row."""
    n = 2**24 + 4
    rows = statistics.sampled_rows(n, 1, torch.device("cpu"))
    assert rows.max() < n and rows.min() >= 0 and len(rows.unique()) == statistics.SAMPLE_ELEMENTS
