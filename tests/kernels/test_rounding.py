"""Properties of the roundings, over their whole domain where it is finite.

The uniform numbers and the write-back noise each take finitely many values, so an expectation is a count, not a sample.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from hf_memopt.kernels import reference
from hf_memopt.kernels.scalars import StepScalars
from tests.cases import randn
from tests.reference import ternary_twin as twin

SCALARS = StepScalars.at_step(
    1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, parameter_key=0, stochastic=True, maximize=False
)
# noise >> 16 is 0, 1, ... 65535
HASHES_OF_ALL_NOISE = torch.arange(0, 2**32, 2**16) * pow(0x9E3779B9, -1, 2**32) % 2**32


def as_int32(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def write_back(x: torch.Tensor, dtype: torch.dtype, hashes: torch.Tensor) -> torch.Tensor:
    return reference.write_back(x, dtype, SCALARS, lambda: hashes)


# -- the uniform numbers -------------------------------------------------------------------------


def test_uniform_takes_every_value_exactly_and_stays_inside():
    u = reference.uniform(as_int32(torch.arange(0, 2**32, 2**9)))
    assert u.dtype == torch.float32
    assert torch.equal(u.double(), (torch.arange(2**23).double() + 0.5) * 2.0**-23)
    assert 0 < u.min() and u.max() < 1


# -- the exponent of the second moment -----------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.25, 0.2500001, 0.3, 0.5, 0.9999, 1.0, 1.0001, 1.5, 2.0, 3.9999, 4.0])
def test_exponent_is_unbiased(ratio):
    """Over all 2^23 uniform numbers. P(d) is off by at most one number of 2^23, and by the roundings of the ratio's
    distance to 1 and of 3 u: 2 E each.
    """
    u = (torch.arange(2**23).float() + 0.5) * 2.0**-23
    r = torch.tensor(ratio)
    d = reference.round_exponent(r.expand_as(u), u)
    assert torch.pow(4.0, d.double()).mean().item() == pytest.approx(r.item(), abs=3 * (2.0**-23 + 4 * twin.E))
    assert set(d.unique().tolist()) <= ({0, 1} if ratio > 1 else {0, -1} if ratio < 1 else {0})


def test_exponent_over_the_whole_range_with_a_coarse_grid_of_uniforms():
    """1024 uniform midpoints leave half a step, 1/2048, in P(d)."""
    u = (torch.arange(1024).float() + 0.5) / 1024
    ratio = torch.linspace(0.25, 4.0, 4001)[:, None]
    mean = torch.pow(4.0, reference.round_exponent(ratio, u).double()).mean(dim=1)
    assert (mean - ratio[:, 0]).abs().max() <= 3 / 2048 + 1e-6


@pytest.mark.parametrize(
    "ratio, code", [(0.0, -1), (0.2, -1), (5.0, 1), (3e38, 1), (math.inf, 1), (math.nan, 0), (1.0, 0)]
)
def test_exponent_outside_the_range_saturates(ratio, code):
    u = torch.tensor([2.0**-24, 0.5, 1 - 2.0**-24])
    assert reference.round_exponent(torch.full((3,), ratio), u).tolist() == [code] * 3


# -- the first moment ----------------------------------------------------------------------------


def ternarized(block: torch.Tensor) -> tuple[list[int], float]:
    width = len(block)
    w = -(-width // 5)
    padded = torch.nn.functional.pad(block, (0, 5 * w - width)).reshape(1, 1, 5, w)
    codes, scale = reference.ternarize(padded, width)
    codes = codes.flatten().tolist()
    assert not any(codes[width:])
    return codes[:width], scale.item()


@pytest.mark.parametrize("width", [1, 2, 4, 5, 6, 33, 159, 160])
def test_ternarize_against_loops(width):
    for seed in range(20):
        block = randn(width, seed=seed) * 10.0 ** (seed - 10)
        threshold = 0.7 * sum(abs(x) for x in block.tolist()) / width
        expected = [0 if abs(x) <= threshold else int(math.copysign(1, x)) for x in block.tolist()]
        codes, scale = ternarized(block)
        assert codes == expected
        kept = [abs(x) for x, code in zip(block.tolist(), codes, strict=True) if code]
        mean = math.fsum(kept) / len(kept)
        assert twin.bf16(mean * (1 - 11 * twin.E)) <= scale <= twin.bf16(mean * (1 + 11 * twin.E))


@pytest.mark.parametrize("seed", range(5))
def test_ternarize_is_near_the_best_ternary_quantiser(seed):
    """Brute force over every number of kept elements (the best code keeps the largest): the rule loses at most 2 % of
    the block's energy against it.
    """
    block = randn(160, seed=seed)
    magnitude = block.abs().sort(descending=True).values.double()
    energy = magnitude.square().sum()
    count = torch.arange(1, 161)
    least = (energy - magnitude.cumsum(0).square() / count).min() / energy
    codes, scale = ternarized(block)
    lost = (block.double() - torch.tensor(codes) * scale).square().sum() / energy
    assert least <= lost + 1e-6 and lost <= least + 0.02


@pytest.mark.parametrize(
    "block, codes, scale",
    [
        ([0.0] * 160, [0] * 160, 0.0),
        ([0.5] * 160, [1] * 160, 0.5),
        ([-0.5] * 7, [-1] * 7, 0.5),
        ([0.0] * 159 + [3.0], [0] * 159 + [1], 3.0),
        ([1e-45, 0.0], [1, 0], 0.0),  # a scale below bf16's range is zero, and the code then decodes to zero
        ([1e-39] * 3, [1] * 3, twin.bf16(1e-39)),
        ([1.8e19] * 160, [1] * 160, twin.bf16(1.8e19)),
        ([-0.0, 2.0], [0, 1], 2.0),
    ],
    ids=["zeros", "equal", "equal negative", "one spike", "smallest", "subnormal", "largest", "negative zero"],
)
def test_ternarize_special_blocks(block, codes, scale):
    found_codes, found_scale = ternarized(torch.tensor(block))
    assert found_codes == codes and found_scale == scale


# -- the write-back of 16-bit weights ------------------------------------------------------------

FORMATS = {torch.bfloat16: (7, -126, twin.stochastic_bf16), torch.float16: (10, -14, twin.stochastic_fp16)}
NUMBERS = [1.0, 1.003, 1.9999, -1.003, 0.1, -0.1, 3.14159, 1e-3, -12345.678, 65503.9]
SUBNORMAL = {torch.bfloat16: [1e-39, -3.3e-40, 1.17e-38], torch.float16: [1e-5, -3e-7, 6.1e-5, 2e-8, -5.9e-8]}


def neighbours(x: float, mantissa: int, min_exponent: int) -> tuple[float, float]:
    spacing = 2.0 ** (max(math.frexp(x)[1] - 1, min_exponent) - mantissa)
    return math.floor(x / spacing) * spacing, math.ceil(x / spacing) * spacing


@pytest.mark.parametrize("dtype, x", [(d, x) for d in FORMATS for x in NUMBERS + SUBNORMAL[d]])
def test_write_back_is_unbiased_and_takes_neighbours_only(dtype, x):
    """Exact for bf16, whose 16 dropped bits meet 16 random ones. fp16 meets 13 dropped bits with 13 random ones; a
    subnormal weight drops more, and P may be off by 2^-13.
    """
    mantissa, min_exponent, _ = FORMATS[dtype]
    x = torch.tensor(x).item()
    new = write_back(torch.full((65536,), x), dtype, as_int32(HASHES_OF_ALL_NOISE)).double()
    low, high = neighbours(x, mantissa, min_exponent)
    assert set(new.tolist()) == {low, high}
    off = 2.0**-13 * (high - low) if dtype == torch.float16 and abs(x) < 2.0**-14 else 0.0
    assert abs(new.mean().item() - x) <= off + 1e-15 * abs(x)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_write_back_equals_the_twin(dtype):
    _, _, rounding = FORMATS[dtype]
    x = torch.cat([randn(2000, seed=1), randn(2000, seed=2) * 1e-4, torch.tensor(SUBNORMAL[dtype]), torch.zeros(1)])
    h = torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(3))
    expected = [rounding(value, bits) for value, bits in zip(x.tolist(), h.tolist(), strict=True)]
    assert write_back(x, dtype, as_int32(h)).double().tolist() == expected


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_write_back_leaves_every_representable_number(dtype):
    """All 2^16 of them, with the least and the most noise, so that a weight whose update is zero never moves.
    Infinities stay, NaN stays NaN.
    """
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for noise in (0, 1, 32768, 65535):
        hashes = as_int32(HASHES_OF_ALL_NOISE[noise]).expand(2**16)
        assert torch.equal(write_back(every.float(), dtype, hashes).nan_to_num(nan=7.0), every.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_write_back_beyond_the_range_is_infinite(dtype):
    most = torch.finfo(dtype).max
    x = torch.tensor([most * 1.01, -most * 1.01]) if dtype == torch.float16 else torch.tensor([math.inf, -math.inf])
    for noise in (0, 65535):
        assert write_back(x, dtype, as_int32(HASHES_OF_ALL_NOISE[noise]).expand(2)).isinf().all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_write_back_off_by_option_rounds_to_nearest(dtype):
    nearest = dataclasses.replace(SCALARS, stochastic=False)
    x = randn(5000, seed=4)
    rounded = reference.write_back(x, dtype, nearest, lambda: pytest.fail("asks for random bits"))
    assert torch.equal(rounded, x.to(dtype))


def test_write_back_keeps_fp32():
    x = randn(100)
    assert reference.write_back(x, torch.float32, SCALARS, lambda: pytest.fail("asks for random bits")) is x


# -- the hash over a matrix ----------------------------------------------------------------------


def test_hash_does_not_depend_on_the_tile():
    """An element's bits are those of its row and column in the whole parameter."""
    cpu = torch.device("cpu")
    whole = reference._hash(99, slice(0, 50), slice(0, 400), cpu)
    for rows, cols in itertools.product((slice(0, 1), slice(7, 50)), (slice(0, 160), slice(320, 400))):
        assert torch.equal(reference._hash(99, rows, cols, cpu), whole[rows, cols])


def test_hash_looks_random_along_rows_and_columns():
    """Uniform numbers of 1000 x 1000 elements: mean, variance and neighbour correlations within six standard
    deviations.
    """
    u = reference.uniform(reference._hash(7, slice(0, 1000), slice(0, 1000), torch.device("cpu"))).double() - 0.5
    six = 6 / 1000 / 12  # of a product of two such numbers
    assert abs(u.mean()) < 6 * math.sqrt(1 / 12) / 1000
    assert abs(u.square().mean() - 1 / 12) < 6 * math.sqrt(1 / 180) / 1000
    assert abs((u[1:] * u[:-1]).mean()) < six * 1.001
    assert abs((u[:, 1:] * u[:, :-1]).mean()) < six * 1.001
    assert abs((u * u.T)[np.triu_indices(1000, 1)].mean()) < six * math.sqrt(2) * 1.01


def test_steps_and_parameters_have_different_bits():
    """Of 10^5 elements about 10^5 / 2^32 agree by chance."""
    keys = [SCALARS.key, dataclasses.replace(SCALARS, key=SCALARS.key ^ 1).key, 12345]
    bits = [reference._hash(key, slice(0, 100), slice(0, 1000), torch.device("cpu")) for key in keys]
    for a, b in itertools.combinations(bits, 2):
        assert (a == b).sum() <= 3
