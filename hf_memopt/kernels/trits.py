"""Five ternary digits in a byte: the layout of the codes, and the plain packing of them.

A row of ``cols`` elements is cut into blocks of 160; the last block may be narrower. A block has five *planes* of ``w``
elements and takes ``w`` bytes: element ``e`` lies in byte ``e % w`` as base-3 digit ``e // w``. 3^5 = 243 values fit a
byte, 1.6 bits a digit. Blocks never cross a row, so the packed state has one row per parameter row and can be sharded
along dim 0 as the parameter is.

A value n in 0..242 is stored as ceil(256 n / 243): the byte is then the fraction n / 243 to eight bits, and its base-3
digits fall out one after the other by multiplying with 3 (digit i = (((byte * 3^i) & 255) * 3) >> 8). No division, no
table.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 160
PLANES = 5
PLANE = BLOCK // PLANES
ZERO_BYTE = 128  # five digits 1, that is five codes 0

POWERS = (1, 3, 9, 27, 81)


def block_count(cols: int) -> int:
    """Blocks in a row of ``cols`` elements."""
    return -(-cols // BLOCK)


def row_bytes(cols: int) -> int:
    """Bytes that the codes of a row of ``cols`` elements take."""
    full, tail = divmod(cols, BLOCK)
    return full * PLANE + -(-tail // PLANES)


def pack(codes: Tensor) -> Tensor:
    """``(..., 5, w)`` codes in {-1, 0, 1} of any integer dtype -> ``(..., w)`` uint8."""
    digits = codes.to(torch.int32) + 1
    n = digits[..., 0, :] * 81
    for plane, weight in enumerate((27, 9, 3, 1), start=1):
        n = n + digits[..., plane, :] * weight
    return (((256 * n + 242) * 17261) >> 22).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """``(..., w)`` uint8 -> ``(..., 5, w)`` int16 codes in {-1, 0, 1}."""
    powers = torch.tensor(POWERS, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    fraction = packed.unsqueeze(-2) * powers  # uint8 wraps, which is the & 255
    return ((fraction.to(torch.int16) * 3) >> 8) - 1


def unpack_rows(packed: Tensor, cols: int) -> Tensor:
    """``(n, row_bytes(cols))`` uint8 -> ``(n, cols)`` int16 codes."""
    n = packed.shape[0]
    full, tail = divmod(cols, BLOCK)
    parts = [unpack(packed[:, : full * PLANE].reshape(n, full, PLANE)).reshape(n, full * BLOCK)]
    if tail:
        parts.append(unpack(packed[:, full * PLANE :]).flatten(1)[:, :tail])
    return torch.cat(parts, dim=1)


def pack_rows(codes: Tensor) -> Tensor:
    """``(n, cols)`` codes in {-1, 0, 1} -> ``(n, row_bytes(cols))`` uint8."""
    n, cols = codes.shape
    full, tail = divmod(cols, BLOCK)
    parts = [pack(codes[:, : full * BLOCK].reshape(n, full, PLANES, PLANE)).reshape(n, full * PLANE)]
    if tail:
        w = -(-tail // PLANES)
        rest = torch.nn.functional.pad(codes[:, full * BLOCK :], (0, w * PLANES - tail))
        parts.append(pack(rest.reshape(n, PLANES, w)))
    return torch.cat(parts, dim=1)
