"""Which dimension is projected, and to what rank."""

from __future__ import annotations

import pytest
import torch

from hf_memopt.projections.geometry import PROJ_TYPES, Subspace, resolve_rank, subspace
from tests.cases import randn

# shape -> (dimension, length, left) by proj_type; a square is projected on the right by std, as in galore-torch
SIDES = {
    (6, 4): {"std": (4, 6, False), "reverse_std": (6, 4, True), "left": (6, 4, True), "right": (4, 6, False)},
    (4, 6): {"std": (4, 6, True), "reverse_std": (6, 4, False), "left": (4, 6, True), "right": (6, 4, False)},
    (5, 5): {"std": (5, 5, False), "reverse_std": (5, 5, True), "left": (5, 5, True), "right": (5, 5, False)},
}


@pytest.mark.parametrize("proj_type", PROJ_TYPES)
@pytest.mark.parametrize("shape", SIDES, ids=str)
def test_side(shape, proj_type):
    d, length, left = SIDES[shape][proj_type]
    assert subspace(shape, 3, proj_type) == Subspace(1, d, length, 3, left)
    assert subspace((7, *shape), 3, proj_type) == Subspace(7, d, length, 3, left)


@pytest.mark.parametrize("proj_type", PROJ_TYPES)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (3, 6, 4), (3, 4, 6)], ids=str)
def test_view_is_b_d_L_of_the_same_memory(shape, proj_type):
    space = subspace(shape, 2, proj_type)
    p = randn(*shape)
    seen = space.view(p)
    assert seen.shape == (space.matrices, space.dimension, space.length)
    assert seen.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
    stack = p if p.dim() == 3 else p[None]
    for b in range(space.matrices):
        assert torch.equal(seen[b], stack[b] if space.left else stack[b].T)
    assert space.low_rank_shape == (space.matrices * 2, space.length)


@pytest.mark.parametrize(
    "rank, shape, expected",
    [
        (3, (8, 20), 3),
        (8, (8, 20), 8),
        (9, (8, 20), 8),  # at most the dimension
        (0.25, (8, 20), 2),  # of the smaller one
        (0.25, (20, 8), 2),
        (1.0, (8, 20), 8),
        (0.01, (8, 20), 1),  # never nothing
        (0.3, (10, 20), 3),
    ],
)
def test_rank(rank, shape, expected):
    assert subspace(shape, rank).rank == expected
    assert subspace((4, *shape), rank).rank == expected


def test_a_fraction_is_of_the_smaller_dimension_whatever_is_projected():
    assert subspace((40, 8), 0.5, "reverse_std") == Subspace(1, 40, 8, 4, True)
    assert subspace((40, 8), 20, "reverse_std").rank == 20
    assert resolve_rank(1, 8, 40) == 1 and resolve_rank(1.0, 8, 40) == 8


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5), (0, 4), (4, 0), (0, 3, 4)], ids=str)
def test_what_is_no_matrix_is_refused(shape):
    with pytest.raises(ValueError, match="a projection needs a matrix or a stack of matrices, got shape"):
        subspace(shape, 1)
