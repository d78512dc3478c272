"""What is declared for a projected matrix is what is stored, and it means what was put in."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_memopt.codecs.dense import Dense
from hf_memopt.codecs.projected import Coordinates, Fp32Basis, InSubspace, Int8Basis, Norm, Projection
from hf_memopt.codecs.ternary import TernaryFirstMoment, TernarySecondMoment
from hf_memopt.projections.geometry import Subspace, subspace
from tests.cases import randn
from tests.tolerances import E

SPACES = [
    Subspace(1, 40, 64, 10, True),
    Subspace(3, 17, 170, 5, False),
    Subspace(2, 9, 4, 9, True),
    Subspace(1, 1, 5, 1, False),
]
MOMENTS = {"fp32": Dense(), "ternary first": TernaryFirstMoment(), "ternary second": TernarySecondMoment()}


def basis(space: Subspace) -> torch.Tensor:
    return torch.linalg.qr(randn(space.matrices, space.dimension, space.rank)).Q


def coordinates(space: Subspace) -> torch.Tensor:
    return torch.stack([torch.randperm(space.dimension)[: space.rank].sort().values for _ in range(space.matrices)])


def parameter_shape(space: Subspace) -> torch.Size:
    d, length = space.dimension, space.length
    return torch.Size((space.matrices, d, length) if space.left else (space.matrices, length, d))


def cases(space: Subspace) -> list:
    low = randn(*space.low_rank_shape).square()
    found = [(InSubspace(inner, space), low) for inner in MOMENTS.values()]
    return [
        *found,
        (Int8Basis(space), basis(space)),
        (Fp32Basis(space), basis(space)),
        (Coordinates(space), coordinates(space)),
        (Norm(space), torch.rand(space.matrices)),
    ]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_declared_and_encoded_agree(space):
    shape = parameter_shape(space)
    for codec, value in cases(space):
        specs, encoded = codec.specs(shape), codec.encode(value)
        assert specs.keys() == encoded.keys()
        for part, spec in specs.items():
            allocated = spec.allocate(torch.device("cpu"))
            assert tuple(encoded[part].shape) == spec.shape and encoded[part].dtype == spec.dtype == allocated.dtype
            assert allocated.untyped_storage().nbytes() == spec.nbytes
            # a row of it belongs to a row of the parameter only where the rows are what is projected
            assert not spec.per_row or (space.left and space.matrices == 1 and spec.shape[1] == space.dimension)
        assert codec.decode(encoded, shape).shape == value.shape


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_exact_ones(space):
    low, p, chosen = randn(*space.low_rank_shape), basis(space), coordinates(space)
    for codec, value in (
        (InSubspace(Dense(), space), low),
        (Fp32Basis(space), p),
        (Coordinates(space), chosen),
        (Norm(space), torch.rand(space.matrices)),
    ):
        assert torch.equal(codec.decode(codec.encode(value)), value)
    assert Coordinates(space).decode(Coordinates(space).encode(chosen)).dtype == torch.int64


@pytest.mark.parametrize("inner", [TernaryFirstMoment(), TernarySecondMoment()], ids=["first", "second"])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_moments_in_the_subspace_are_those_of_a_matrix_of_that_shape(space, inner):
    low = randn(*space.low_rank_shape).square()
    codec, plain = InSubspace(inner, space), inner.encode(low)
    encoded = codec.encode(low)
    assert all(torch.equal(encoded[part], plain[part]) for part in plain)
    assert torch.equal(codec.decode(encoded, parameter_shape(space)), inner.decode(plain, space.low_rank_shape))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_int8_basis(space):
    """Each entry is off by at most half a step, 1/254 of the column's largest, plus the rounding of scale, quotient and
    product; the column's largest is stored as 127."""
    p = basis(space)
    codec = Int8Basis(space)
    buffers = codec.encode(p)
    largest = p.abs().amax(dim=1)
    found = codec.decode(buffers)
    assert found.dtype == torch.float32
    assert ((found - p).abs() <= (largest / 254 * (1 + 2**-10) + 4 * E * largest)[:, None]).all()
    assert (buffers["codes"].abs().amax(dim=1) == 127).all()
    # what the module says: less than a hundredth of a column's norm, here in dimensions where that can be promised
    if space.dimension >= 9:
        assert ((found - p).norm(dim=1) < 0.01 * p.norm(dim=1)).all()


def test_int8_basis_of_a_large_dimension_loses_less_than_a_hundredth():
    space = Subspace(1, 1024, 4, 32, True)
    p = basis(space)
    found = Int8Basis(space).decode(Int8Basis(space).encode(p))
    assert ((found - p).norm(dim=1) < 0.01 * p.norm(dim=1)).all()


def test_int8_basis_with_a_column_of_zeros():
    p = basis(SPACES[0])
    p[0, :, 3] = 0
    found = Int8Basis(SPACES[0]).decode(Int8Basis(SPACES[0]).encode(p))
    assert found.isfinite().all() and not found[0, :, 3].any()


@pytest.mark.parametrize("dimension, dtype", [(32767, torch.int16), (32768, torch.int32), (100_000, torch.int32)])
def test_coordinates_of_large_dimensions(dimension, dtype):
    space = Subspace(1, dimension, 4, 2, True)
    encoded = Coordinates(space).encode(torch.tensor([[5, dimension - 1]]))
    assert encoded["coordinates"].dtype == dtype
    assert Coordinates(space).decode(encoded).tolist() == [[5, dimension - 1]]


@pytest.mark.parametrize("refresh", ["subspace", "svd", "select", "random"])
@pytest.mark.parametrize("residual", ["none", "fira", "sign"])
@pytest.mark.parametrize("projector", ["int8", "float32"])
@pytest.mark.parametrize("state", ["fp32", "ternary"])
def test_what_is_kept(refresh, residual, projector, state):
    projection = Projection(10, "std", refresh, projector, residual, state)
    found = projection.codecs(torch.Size((40, 64)))
    expected = {"exp_avg", "exp_avg_sq"}
    expected |= {"projector"} if refresh != "random" else set()
    expected |= {"residual_norm"} if residual == "fira" else set()
    assert found.keys() == expected
    if refresh == "select":
        assert isinstance(found["projector"], Coordinates)
    elif refresh != "random":
        assert isinstance(found["projector"], Int8Basis if projector == "int8" else Fp32Basis)
    declared = sum(s.nbytes for codec in found.values() for s in codec.specs(torch.Size((40, 64))).values())
    assert projection.nbytes(torch.Size((40, 64))) == declared


def bits(shape: tuple[int, int], **options) -> float:
    options = {"rank": 0.25, "proj_type": "std", "residual": "none", "projector": "int8", **options}
    return 8 * Projection(**options).nbytes(torch.Size(shape)) / (shape[0] * shape[1])


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"state": "fp32", "refresh": "subspace"}, 18),  # 16 for the moments, 2 for the basis
        ({"state": "fp32", "refresh": "subspace", "projector": "float32"}, 24),
        ({"state": "fp32", "refresh": "random"}, 16),
        ({"state": "ternary", "refresh": "subspace"}, 2.85),
    ],
)
def test_bits_a_parameter_of_a_square_matrix(options, expected):
    assert bits((4096, 4096), **options) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("refresh", ["random", "select"])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 11008), (2048, 5632), (512, 512)], ids=str)
def test_ternary_moments_at_a_quarter_are_below_one_bit(shape, refresh):
    assert bits(shape, state="ternary", refresh=refresh) <= 1.0


def test_of_reads_a_group_and_ignores_the_rest():
    group = {"rank": 4, "proj_type": "left", "refresh": "svd", "projector": "int8", "residual": "none"}
    projection = Projection.of({**group, "state": "fp32", "lr": 0.1, "params": []})
    assert projection == Projection(4, "left", "svd", "int8", "none", "fp32")
    for shape, proj_type in itertools.product(((8, 5), (5, 8), (2, 8, 5)), ("std", "reverse_std", "left", "right")):
        kept = Projection(3, proj_type, "svd", "int8", "none", "fp32")
        assert kept.space(torch.Size(shape)) == subspace(shape, 3, proj_type)
