"""What codecs declare, allocate, encode and decode."""

from __future__ import annotations

import math

import pytest
import torch

from hf_memopt.codecs import base
from hf_memopt.codecs.dense import Dense
from hf_memopt.codecs.ternary import TernaryFirstMoment, TernarySecondMoment
from tests.cases import SHAPES, randn, shape_cases, uneven_gradient
from tests.reference import ternary_twin as twin
from tests.tolerances import E

CODECS = {"first": TernaryFirstMoment(), "second": TernarySecondMoment(), "dense": Dense()}
EDGES = [(1, 1), (1, 160), (2, 161), (0, 7), (7, 0)]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("shape", [*SHAPES.values(), *EDGES], ids=str)
def test_declared_allocated_and_encoded_agree(codec, shape):
    """The same parts, shapes, dtypes and bytes however a buffer comes into being; fresh buffers decode to zero."""
    specs = codec.specs(torch.Size(shape))
    fresh = {part: spec.allocate(torch.device("cpu")) for part, spec in specs.items()}
    encoded = codec.encode(randn(*shape).square())
    for buffers in (fresh, encoded):
        assert buffers.keys() == specs.keys()
        for part, spec in specs.items():
            assert tuple(buffers[part].shape) == spec.shape and buffers[part].dtype == spec.dtype
            assert buffers[part].untyped_storage().nbytes() == spec.nbytes
            assert not spec.per_row or spec.shape[0] == shape[0]
    zero = codec.decode(fresh, torch.Size(shape))
    assert zero.shape == shape and zero.dtype == torch.float32 and not zero.any()
    assert codec.decode(encoded, torch.Size(shape)).shape == shape


@pytest.mark.parametrize(**shape_cases())
def test_first_moment_round_trip(shape):
    """Each element is 0 or the block's scale with its sign, kept where it exceeds 0.7 of the block's mean, and the
    scale is the mean of what is kept to bf16's half ulp, 2^-8.
    """
    codec = CODECS["first"]
    m = uneven_gradient(*shape, seed=5)
    q = codec.decode(codec.encode(m), m.shape).reshape(shape[0], -1)
    for values, decoded in zip(m.reshape(shape[0], -1), q, strict=True):
        for block, found in zip(values.split(160), decoded.split(160), strict=True):
            threshold = 0.7 * block.abs().double().mean()
            clear = (block.abs() - threshold).abs() > 1e-6 * threshold
            kept = block.abs() > threshold
            assert torch.equal((found != 0)[clear], kept[clear])
            assert bool((found[kept].sign() == block[kept].sign()).all())
            if kept.any():
                mean = block[found != 0].abs().double().mean().item()
                assert found.abs().max().item() == pytest.approx(mean, rel=2.0**-8 + 11 * twin.E)


@pytest.mark.parametrize(**shape_cases())
def test_first_moment_decodes_what_the_twin_reads(shape):
    codec = CODECS["first"]
    buffers = codec.encode(randn(*shape, seed=6))
    k = math.prod(shape[1:])
    codes = [twin.decode_row(row, k) for row in buffers["codes"].tolist()]
    expected = [
        [c * s[j // 160] for j, c in enumerate(row)] for row, s in zip(codes, buffers["scale"].tolist(), strict=True)
    ]
    assert codec.decode(buffers, torch.Size(shape)).reshape(shape[0], -1).tolist() == expected


@pytest.mark.parametrize(**shape_cases())
def test_second_moment_nearest(shape):
    """A ratio r to the factors' product becomes 1/4, 1 or 4, the nearest: it is off by at most 3/8 of base below 1, 3/2
    up to 4.
    """
    codec = CODECS["second"]
    v = uneven_gradient(*shape, seed=7).square()
    matrix = v.double().reshape(shape[0], -1)
    base_ = matrix.mean(dim=1)[:, None] * matrix.mean(dim=0) / matrix.mean()
    found = codec.decode(codec.encode(v), v.shape).double().reshape_as(matrix)
    ratio, decoded = matrix / base_, found / base_
    inside = (ratio <= 4) & (base_ > 1e-25)  # below, the 1e-30 in the factors shows
    assert bool(((decoded - ratio).abs()[inside & (ratio <= 1)] <= 3 / 8 + 1e-5).all())
    assert bool(((decoded - ratio).abs()[inside & (ratio > 1)] <= 3 / 2 + 1e-5).all())
    assert bool(((decoded - 4).abs()[(ratio > 4) & (base_ > 1e-25)] <= 1e-5).all())


def test_second_moment_stochastic_is_unbiased():
    """Mean of 4000 encodings of a matrix whose ratios stay in [1/4, 4]; a decoded ratio has a standard deviation of at
    most 1.5.
    """
    codec = CODECS["second"]
    v = torch.rand(4, 12, generator=torch.Generator().manual_seed(0)) + 0.5
    repeated = v.repeat(4000, 1)
    uniform = torch.rand(repeated.shape, generator=torch.Generator().manual_seed(1))
    decoded = codec.decode(codec.encode(repeated, uniform), repeated.shape).reshape(4000, 4, 12).mean(dim=0)
    assert ((decoded / v - 1).abs() < 6 * 1.5 / math.sqrt(4000)).all()


def test_second_moment_exact_for_a_product():
    v = torch.outer(torch.rand(50) + 0.1, torch.rand(300) + 0.1)
    codec = CODECS["second"]
    torch.testing.assert_close(codec.decode(codec.encode(v), v.shape), v, rtol=1e-6, atol=0)


def test_dense_copies():
    m = randn(3, 4)
    buffers = CODECS["dense"].encode(m)
    m.zero_()
    assert buffers[""].any()


@pytest.mark.parametrize(
    "shape, rows",
    [((), (1, 1)), ((5,), (5, 1)), ((5, 7), (5, 7)), ((5, 2, 3), (5, 6)), ((0, 3), (0, 3)), ((3, 0), (3, 0))],
)
def test_matrix_shape(shape, rows):
    assert base.matrix_shape(torch.Size(shape)) == rows


def test_bits_of_a_wide_matrix():
    """1.6 + 1.6 + 0.1 bits an element and 32 (n + k) / (n k) for the factors, as the docs say."""
    shape = torch.Size((4096, 4096))
    nbytes = sum(spec.nbytes for codec in (CODECS["first"], CODECS["second"]) for spec in codec.specs(shape).values())
    n = k = 4096
    exact = 3.3 + 32 * (n + k) / (n * k)
    assert 8 * nbytes / shape.numel() == pytest.approx(exact, abs=0.02)  # 4096 is not a multiple of 160
    assert 8 * nbytes / shape.numel() <= 3.35


@pytest.mark.parametrize("shape", [(7, 331), (12, 160), (5, 3)], ids=str)
def test_rows_are_taken_without_decoding(shape):
    """Rows that are taken keep their values, the second moment's within rounding (a quotient, two products, the two
    means); others are zero and the columns' factors."""
    rows, seen = torch.tensor([3, 0, 4, 1]), torch.tensor([True, False, True, True])
    generator = torch.Generator().manual_seed(0)
    for codec, sign in ((TernaryFirstMoment(), -1.0), (TernarySecondMoment(), 0.0)):
        moment = torch.rand(shape, generator=generator).add_(sign / 2).mul_(torch.arange(1, shape[0] + 1)[:, None])
        buffers = codec.encode(moment)
        before = codec.decode(buffers, torch.Size(shape))
        taken = codec.take_rows(buffers, rows, seen)
        found = codec.decode(taken, torch.Size((4, shape[1])))
        assert all(taken[part].dtype == buffers[part].dtype for part in buffers)
        if sign:
            expected = torch.where(seen[:, None], before[rows], 0.0)
            assert torch.equal(found, expected)
        else:
            expected = torch.where(seen[:, None], before[rows], buffers["col"])
            assert ((found - expected).abs() <= 8 * E * expected).all()
