"""The step's scalars against exact arithmetic, and the hash."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from hf_memopt.kernels import reference, scalars
from hf_memopt.kernels.scalars import StepScalars, bias_correction, carry_weight, mix32, parameter_key
from tests.reference import ternary_twin as twin


def exact_carry(beta1: float, step: int) -> Fraction:
    """The defining series in fractions, cut where its terms are below 1e-18 of the first, denominators shortened to 200
    bits.
    """
    b = Fraction(beta1)
    power, grown, total = Fraction(1), b**step, Fraction(0)
    one = 1 << 200
    for _ in range(math.ceil(math.log(1e-18 * (1 - beta1)) / math.log(beta1))):
        power, grown = Fraction(int(power * b * one), one), Fraction(int(grown * b * one), one)
        total += Fraction(int(power / (1 - grown) * one), one)
    return total


@pytest.mark.parametrize("beta1", [0.1, 0.5, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("step", [1, 2, 3, 10, 1000])
def test_carry_weight(beta1, step):
    assert carry_weight(beta1, step) == pytest.approx(float(exact_carry(beta1, step)), rel=1e-11)


def test_carry_weight_in_the_limit():
    assert carry_weight(0.9, 10**6) == pytest.approx(9.0, rel=1e-11)
    assert carry_weight(0.0, 1) == 0.0


@pytest.mark.parametrize("beta1", [0.9999, 1 - 1e-9])
def test_carry_weight_next_to_one(beta1):
    """The optimizer accepts these; the defining series has 40 / (1 - beta1) terms and would not end."""
    assert carry_weight(beta1, 10**15) == pytest.approx(beta1 / (1 - beta1), rel=1e-9)
    # at step 1 it is sum_{m>=2} beta^(m-1) / (1 - beta^m), about (log(1/x) - 1 + Euler's constant) / x with x = 1 -
    # beta
    x = 1 - beta1
    assert carry_weight(beta1, 1) == pytest.approx(
        (math.log(1 / x) - 1 + 0.5772156649) / x, rel=20 * x * math.log(1 / x)
    )


@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.5, 0.9, 0.999, 0.999999, 1 - 1e-9])
@pytest.mark.parametrize("step", [1, 2, 7, 1000, 10**6])
def test_bias_correction(beta, step):
    if step * (1 - beta) > 1e4:
        assert bias_correction(beta, step) == 1.0
        return
    b = Fraction(beta)
    exact = 1 - b**step if step <= 1000 else -Fraction(math.expm1(step * math.log1p(float(b - 1))))
    assert bias_correction(beta, step) == pytest.approx(float(exact), rel=1e-12)


def test_mix32_is_a_bijection_on_16_bit_halves_and_reversible():
    """Each line of mix32 is invertible; the inverse is built here and must give back every sample."""
    inverse_1, inverse_2 = pow(0x7FEB352D, -1, 1 << 32), pow(0x846CA68B, -1, 1 << 32)
    for x in [0, 1, 2**31, 2**32 - 1, *range(0, 2**32, 65537 * 7)]:
        y = mix32(x)
        y ^= y >> 16
        y = (y * inverse_2) & 0xFFFFFFFF
        y ^= (y >> 15) ^ (y >> 30)
        y = (y * inverse_1) & 0xFFFFFFFF
        y ^= y >> 16
        assert y == x


def test_mix32_scalar_tensor_and_twin_agree():
    samples = [0, 1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, *range(12345, 2**32, 2**32 // 5000)]
    signed = torch.tensor([x - 2**32 if x >= 2**31 else x for x in samples], dtype=torch.int32)
    mixed = [x % 2**32 for x in reference.mix(signed).tolist()]
    assert mixed == [mix32(x) for x in samples] == [twin.mix(x) for x in samples]


def test_mix32_avalanche():
    """Every input bit flips every output bit half the time: 4000 samples, so six standard deviations are 0.047."""
    x = torch.randint(0, 2**31 - 1, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    for bit in range(32):
        flipped = reference.mix(x) ^ reference.mix(x ^ scalars_signed(1 << bit))
        shares = torch.stack([((flipped >> out) & 1).float().mean() for out in range(32)])
        assert (shares - 0.5).abs().max() < 0.047


def scalars_signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def test_parameter_key_is_part_of_the_format():
    """A checkpoint continues bit for bit only while this stays: the value is fixed."""
    assert parameter_key(0, "model.embed_tokens.weight") == 3852514247
    assert parameter_key(0, "a") != parameter_key(1, "a") != parameter_key(1, "b")


@pytest.mark.parametrize("key", [0, 2**32 - 1, 123456789])
def test_element_hash_equals_the_twin(key):
    rows, cols = slice(3, 9), slice(150, 330)
    h = reference._hash(key, rows, cols, torch.device("cpu"))
    for i in range(rows.start, rows.stop):
        row_key = twin.mix(key + i * 0x9E3779B9)
        expected = [twin.mix(row_key + j) for j in range(cols.start, cols.stop)]
        assert [x % 2**32 for x in h[i - rows.start].tolist()] == expected


def test_smallest_eps():
    at = {
        "lr": 1.0,
        "betas": (0.9, 0.9),
        "weight_decay": 0.0,
        "parameter_key": 0,
        "stochastic": True,
        "maximize": False,
    }
    assert StepScalars.at_step(1, eps=0.0, **at).eps == scalars.round_to_float32(1e-15)
    assert StepScalars.at_step(1, eps=1e-14, **at).eps == scalars.round_to_float32(1e-14)


def test_scalars_are_single_precision_and_rounded_once():
    s = StepScalars.at_step(
        3, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, parameter_key=5, stochastic=True, maximize=False
    )
    exact = {
        "beta1": 0.9,
        "one_minus_beta1": 1 - 0.9,
        "beta2": 0.999,
        "one_minus_beta2": 1 - 0.999,
        "inv_bias1": 1 / (1 - 0.9**3),
        "inv_bias2": 1 / (1 - 0.999**3),
        "carry": float(exact_carry(0.9, 3)),
        "decay": 1 - 1e-3 * 0.1,
        "lr": 1e-3,
        "eps": 1e-8,
    }
    for name, value in exact.items():
        assert getattr(s, name) == torch.tensor(value, dtype=torch.float64).float().item(), name
    assert not s.first and s.key == twin.mix(5 + 3 * 0x9E3779B9)


@pytest.mark.parametrize("x", [0.0, -0.0, 1e-50, 1e300, -1e300, 3.4028236e38, math.inf, 2.0**-149, 2.0**-150])
def test_round_to_float32(x):
    assert scalars.round_to_float32(x) == torch.tensor(x, dtype=torch.float64).float().item()
