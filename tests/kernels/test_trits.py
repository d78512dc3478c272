"""The code layout: every byte, every width."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_memopt.kernels import trits
from tests.reference import ternary_twin as twin

WIDTHS = range(1, 331)  # up to two blocks and a tail of ten


def test_all_bytes_both_ways():
    digits = list(itertools.product((0, 1, 2), repeat=5))
    codes = (torch.tensor(digits, dtype=torch.int8) - 1).T.contiguous()  # (5, 243): plane, byte
    packed = trits.pack(codes)
    assert packed.tolist() == [twin.byte_of_digits(list(d)) for d in digits]
    assert len(set(packed.tolist())) == 3**5
    assert torch.equal(trits.unpack(packed), codes.to(torch.int16))
    assert [twin.digits_of_byte(byte) for byte in packed.tolist()] == [list(d) for d in digits]


def test_every_byte_value_unpacks_to_codes():
    """A byte that no packing gives still reads as five codes: damaged memory cannot leave {-1, 0, 1}."""
    assert set(trits.unpack(torch.arange(256, dtype=torch.uint8)).flatten().tolist()) == {-1, 0, 1}


def test_zero_byte():
    assert trits.pack(torch.zeros(5, 1, dtype=torch.int8)).tolist() == [trits.ZERO_BYTE]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_pack_takes_every_integer_dtype(dtype):
    codes = torch.tensor([[1], [-1], [0], [-1], [1]], dtype=dtype)
    assert torch.equal(trits.unpack(trits.pack(codes)), codes.to(torch.int16))


def test_rows_of_every_width():
    """Round trip, agreement with the twin's layout, and padding digits that are 1, which the twin's decoder demands."""
    for width in WIDTHS:
        codes = torch.randint(-1, 2, (3, width), generator=torch.Generator().manual_seed(width), dtype=torch.int8)
        packed = trits.pack_rows(codes)
        assert packed.shape == (3, trits.row_bytes(width)) and packed.dtype == torch.uint8
        assert packed.tolist() == [twin.encode_row(row) for row in codes.tolist()], width
        assert [twin.decode_row(row, width) for row in packed.tolist()] == codes.tolist(), width
        assert torch.equal(trits.unpack_rows(packed, width), codes.to(torch.int16)), width
        assert trits.block_count(width) == len(twin.blocks_of_row(width))


def test_a_wide_row_takes_1_6_bits_an_element():
    assert 8 * trits.row_bytes(trits.BLOCK * 1000) == 1.6 * trits.BLOCK * 1000


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0), (0, 160)])
def test_nothing_packs_to_nothing(shape):
    packed = trits.pack_rows(torch.zeros(shape, dtype=torch.int8))
    assert packed.shape == (shape[0], trits.row_bytes(shape[1]))
    assert trits.unpack_rows(packed, shape[1]).shape == shape
