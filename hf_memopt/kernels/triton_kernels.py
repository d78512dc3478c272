"""The Triton code of ``triton.py``: operation by operation what ``README.md`` beside this file demands.

How the order of operations is kept:

* Every kernel is compiled with ``enable_fp_fusion=False`` (``triton.LAUNCH``). fp32 quotients and roots are the rounded
  instructions themselves: Triton's ``/`` approximates, and its ``div_rn`` flushes subnormal numbers before version 3.6.
* The tree sum sees the 32 lanes as five axes of two and sums them one after the other. Every such sum adds exactly two
  numbers, and two numbers add up to the same in either order, so the compiler's choice of threads cannot change a bit;
  in a sum over one axis of 32 it could. All arithmetic on a block is done in this shape: then the block's threshold and
  scale have the layout of its elements, and nothing has to travel between threads but the sums themselves.
* Scaling by a power of two commutes with rounding: ``0.75 u`` is a quarter of ``3 u`` to the bit. ``1 - r`` is
  ``-(r - 1)``. ``beta1 * q`` with q = -s, 0 or s is -(beta1 s), 0 or beta1 s: one product a block, not one an element.
* bf16 is widened and rounded on its bits, in integer arithmetic.

A program of ``ternary_update`` works on one column block (160 columns, or the narrower last block) of ROWS rows. Each
of the five planes is a (ROWS, 32) array and a thread has neighbouring lanes of a row; the program reads the column
factors once for all its rows.
"""

import struct

import triton
import triton.language as tl

from . import scalars
from .triton_numbers import (
    copy_sign,
    div,
    magnitude_bits,
    mix,
    nearest_bf16,
    recompute,
    row_keys,
    sqrt,
    widen,
    write_back,
)

ONE_LESS_HALF_STEP = tl.constexpr(1 - 2**-24)
LARGEST_BITS = tl.constexpr(struct.unpack("i", struct.pack("f", scalars.MAX_GRADIENT))[0])
TINY = tl.constexpr(scalars.TINY)
PARTS = tl.constexpr(32)  # room for partial sums of R, and for as many of R'


# `do_not_specialize`: numbers that differ from call to call, and pointers into the middle of a buffer, would only
# multiply compiled variants. What is left specialises on strides and alignment, for 16-byte accesses.


@triton.jit
def _lanes(x):
    """(rows, 32) -> (rows, 2, 2, 2, 2, 2), the shape in which all arithmetic of a block is done; no data moves."""
    return tl.reshape(x, [x.shape[0], 2, 2, 2, 2, 2])


@triton.jit
def _per_row(x):
    """(rows,) -> (rows, 1, 1, 1, 1, 1)"""
    return x[:, None, None, None, None, None]


@triton.jit
def _tree(x):
    """(rows, 2, 2, 2, 2, 2) -> (rows,): the upper half of the lanes onto the lower, five times."""
    for _ in tl.static_range(5):
        x = tl.sum(x, axis=1)
    return x


@triton.jit(do_not_specialize=["n", "col_tiles", "rows_per_program", "applied"])
def squared_sums(
    grad, grad_row, grad_col, n, k, col_tiles, rows_per_program, sums, applied, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Pass 1 of the ternary step: partial sums of squares in double; False into ``applied`` when a |g| is too large.

    ``sums``: (column tiles, n) partial row sums, then (row tiles, k) partial column sums. Grid: row x column tiles.
    """
    col_tile = tl.program_id(0) % col_tiles
    row_tile = tl.program_id(0) // col_tiles
    first_row = row_tile * rows_per_program
    cols = col_tile * COLS + tl.arange(0, COLS)
    in_cols = cols < k
    row_sums = sums + col_tile.to(tl.int64) * n
    col_sums = sums + tl.cast(col_tiles, tl.int64) * n + row_tile.to(tl.int64) * k
    col_offset = cols.to(tl.int64) * grad_col

    total = tl.zeros([ROWS, COLS], dtype=tl.float64)
    worst = tl.zeros([ROWS, COLS], dtype=tl.int32)
    for start in range(0, tl.minimum(rows_per_program, n - first_row), ROWS):
        rows = first_row + start + tl.arange(0, ROWS)
        in_rows = rows < n
        at = grad + rows.to(tl.int64)[:, None] * grad_row + col_offset[None, :]
        g = widen(tl.load(at, mask=in_rows[:, None] & in_cols[None, :], other=0.0))
        worst = tl.maximum(worst, magnitude_bits(g))
        wide = g.to(tl.float64)
        square = wide * wide
        total += square
        tl.store(row_sums + rows, tl.sum(square, axis=1), mask=in_rows)
    tl.store(col_sums + cols, tl.sum(total, axis=0), mask=in_cols)
    within = tl.min(tl.min((worst <= LARGEST_BITS).to(tl.int32), axis=1), axis=0)
    if within == 0:
        tl.store(applied, within != 0)


@triton.jit(do_not_specialize=["n", "k", "col_tiles", "row_tiles", "parts", "rows_per_part", "means", "applied"])
def ternary_factors(
    sums, row, col, means, old_row, old_col, col_inv, applied, n, k, col_tiles, row_tiles, parts, rows_per_part,
    beta2, one_minus_beta2, BLOCK: tl.constexpr,
):  # fmt: skip
    """Between the passes: R' and C' into ``row`` and ``col``; aside the old R and C, ``1 / C'`` and sums of R and R'.

    The first ``parts`` programs take ``rows_per_part`` rows each, the others BLOCK columns each. ``means``: one sum of
    R from each of the ``parts``, then, from PARTS on, one of R'.
    """
    if tl.load(applied) == 0:
        return
    pid = tl.program_id(0)
    if pid < parts:
        total = tl.zeros([BLOCK], dtype=tl.float64)
        new_total = tl.zeros([BLOCK], dtype=tl.float64)
        for start in range(0, rows_per_part, BLOCK):
            at = pid * rows_per_part + start + tl.arange(0, BLOCK)
            inside = at < n
            square = tl.zeros([BLOCK], dtype=tl.float64)
            for tile in range(0, col_tiles):
                square += tl.load(sums + tl.cast(tile, tl.int64) * n + at, mask=inside, other=0.0)
            old = tl.load(row + at, mask=inside, other=0.0)
            mean = (square / tl.cast(k, tl.float64)).to(tl.float32) + TINY
            new = beta2 * old + one_minus_beta2 * mean
            total += old.to(tl.float64)
            new_total += tl.where(inside, new, 0.0).to(tl.float64)
            tl.store(old_row + at, old, mask=inside)
            tl.store(row + at, new, mask=inside)
        tl.store(means + pid, tl.sum(total, axis=0))
        tl.store(means + PARTS + pid, tl.sum(new_total, axis=0))
    else:
        at = (pid - parts) * BLOCK + tl.arange(0, BLOCK)
        inside = at < k
        square = tl.zeros([BLOCK], dtype=tl.float64)
        col_sums = sums + tl.cast(col_tiles, tl.int64) * n
        for tile in range(0, row_tiles):
            square += tl.load(col_sums + tl.cast(tile, tl.int64) * k + at, mask=inside, other=0.0)
        old = tl.load(col + at, mask=inside, other=0.0)
        mean = (square / tl.cast(n, tl.float64)).to(tl.float32) + TINY
        new = beta2 * old + one_minus_beta2 * mean
        tl.store(old_col + at, old, mask=inside)
        tl.store(col_inv + at, div(1.0, new), mask=inside)
        tl.store(col + at, new, mask=inside)


@triton.jit
def _place(in_rows, block, plane, width, P: tl.constexpr, TAIL: tl.constexpr):
    """Plane P of a block: its columns (32,), which of them exist, and which of its elements (ROWS, 32) do."""
    lane = tl.arange(0, 32)
    e = P * plane + lane
    in_cols = lane < 32
    inside = in_rows[:, None]
    if TAIL:
        in_cols = (lane < plane) & (e < width)
        inside = inside & in_cols[None, :]
    return block * 160 + e, in_cols, inside


@triton.jit
def _moments(
    grad, grad_col, old_col, in_rows, block, plane, width, codes_m, codes_v, scaled, a,
    one_minus_beta1, one_minus_beta2, P: tl.constexpr, POWER: tl.constexpr, MAXIMIZE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """m and v of plane P.

    The bytes of the codes stand at the top of 32 bits, as fractions of 2^32. POWER is 3^P: it moves plane P's base-3
    digit to the front, where it is 2 from 171/256 on and 0 below 86/256.
    """
    cols, in_cols, inside = _place(in_rows, block, plane, width, P, TAIL)
    g = _lanes(widen(tl.load(grad + cols.to(tl.int64)[None, :] * grad_col, mask=inside, other=0.0)))
    if MAXIMIZE:
        g = -g
    fraction = codes_m * POWER
    q = tl.where(fraction >= (171 << 24), scaled, tl.where(fraction < (86 << 24), -scaled, 0.0))
    m = q + one_minus_beta1 * g
    fraction = codes_v * POWER
    level = tl.where(fraction >= (171 << 24), 4.0, tl.where(fraction < (86 << 24), 0.25, 1.0))
    c = tl.load(old_col + cols, mask=in_cols, other=0.0) if TAIL else tl.load(old_col + cols)
    v = (a * _lanes(c[None, :])) * level + one_minus_beta2 * (g * g)
    return m, v


@triton.jit
def _kept(m, threshold, POWER: tl.constexpr):
    """What a plane adds to the sum of kept magnitudes and to the packed codes, the count of the kept above bit 16."""
    magnitude = tl.abs(m)
    keep = magnitude > threshold
    negative = m.to(tl.int32, bitcast=True) >> 31  # -1 or 0
    return tl.where(keep, magnitude, 0.0), tl.where(keep, 65536 + POWER + negative * (2 * POWER), 0)


@triton.jit
def _finish(
    param, param_col, col_inv, in_rows, block, plane, width, m, v, row_key, a_inv, threshold, scale,
    inv_bias1, inv_bias2, carry, decay, lr, eps,
    P: tl.constexpr, POWER: tl.constexpr, STOCHASTIC: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Write plane P of the weights; returns what its exponents add to the packed codes, POWER being 3^(4 - P)."""
    cols, in_cols, inside = _place(in_rows, block, plane, width, P, TAIL)
    at = param + cols.to(tl.int64)[None, :] * param_col
    w = tl.load(at, mask=inside, other=0.0)
    h = mix(row_key + _lanes(cols[None, :].to(tl.uint32)))
    # 23 bits make a number in [1, 2); taking 1 - 2^-24 from it is exact and leaves u = (bits + 0.5) 2^-23.
    u = ((h >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - ONE_LESS_HALF_STEP
    c_inv = tl.load(col_inv + cols, mask=in_cols, other=0.0) if TAIL else tl.load(col_inv + cols)
    excess = v * (a_inv * _lanes(c_inv[None, :])) - 1.0
    step = u * 3.0
    exponent = tl.where(excess > step, POWER, tl.where(-excess > step * 0.25, -POWER, 0))
    if TAIL:
        exponent = tl.where(_lanes(in_cols[None, :]), exponent, 0)
    stored = tl.where(tl.abs(m) > threshold, copy_sign(scale, m), 0.0)
    numerator = m * inv_bias1 + carry * (m - stored)
    update = div(numerator, sqrt(v * inv_bias2) + eps)
    new = _lanes(widen(w)) * decay - lr * update
    tl.store(at, tl.reshape(write_back(new, h, w.dtype, STOCHASTIC), w.shape), mask=inside)
    return exponent


@triton.jit
def _pack(n):
    """0..242 -> the byte whose base-3 digits are n's."""
    return (((256 * n + 242) * 17261) >> 22).to(tl.uint8)


@triton.jit(do_not_specialize=["n", "k", "parts", "key", "first", "means", "applied"])
def ternary_update(
    param, param_row, param_col, grad, grad_row, grad_col, codes_m, codes_v, code_row, scales, scale_row,
    row, old_row, old_col, col_inv, means, applied, n, k, parts, key, first, mean_share,
    beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias1, inv_bias2, carry, decay, lr, eps,
    ROWS: tl.constexpr, TAIL: tl.constexpr, STOCHASTIC: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Pass 2 of the ternary step, in place.

    On the full blocks of all rows (grid: row tiles x full blocks, blocks running fastest) or, with TAIL, on their last,
    narrower blocks (grid: row tiles). ``mean_share`` is 0.7 / width.
    """
    if tl.load(applied) == 0:
        return
    full = k // 160
    plane = 32
    width = 160
    if TAIL:
        block = full
        row_tile = tl.program_id(0)
        width = k - full * 160
        plane = (width + 4) // 5
    else:
        block = tl.program_id(0) % full
        row_tile = tl.program_id(0) // full
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    in_rows = rows < n

    part = tl.arange(0, PARTS)
    count = tl.cast(n, tl.float64)
    mean = (tl.sum(tl.load(means + part, mask=part < parts, other=0.0), axis=0) / count).to(tl.float32)
    new_mean = (tl.sum(tl.load(means + PARTS + part, mask=part < parts, other=0.0), axis=0) / count).to(tl.float32)
    share = div(tl.load(old_row + rows, mask=in_rows, other=0.0), mean)
    a = _per_row(tl.where(first != 0, 0.0, beta2 * share))
    a_inv = _per_row(div(new_mean, tl.load(row + rows, mask=in_rows, other=1.0)))
    row_key = _per_row(row_keys(key, rows))

    lane = tl.arange(0, 32)
    wide_rows = rows.to(tl.int64)
    in_bytes = in_rows[:, None]
    if TAIL:
        in_bytes = in_bytes & (lane < plane)[None, :]
    code_at = wide_rows[:, None] * code_row + (block * 32 + lane)[None, :]
    scale_at = scales + wide_rows * scale_row + block
    bytes_m = _lanes(tl.load(codes_m + code_at, mask=in_bytes, other=128)).to(tl.uint32) << 24
    bytes_v = _lanes(tl.load(codes_v + code_at, mask=in_bytes, other=128)).to(tl.uint32) << 24
    scaled = _per_row(beta1 * widen(tl.load(scale_at, mask=in_rows, other=0.0)))
    grad += wide_rows[:, None] * grad_row
    param += wide_rows[:, None] * param_row

    m0, v0 = _moments(
        grad, grad_col, old_col, in_rows, block, plane, width, bytes_m, bytes_v, scaled, a,
        one_minus_beta1, one_minus_beta2, 0, 1, MAXIMIZE, TAIL,
    )  # fmt: skip
    m1, v1 = _moments(
        grad, grad_col, old_col, in_rows, block, plane, width, bytes_m, bytes_v, scaled, a,
        one_minus_beta1, one_minus_beta2, 1, 3, MAXIMIZE, TAIL,
    )  # fmt: skip
    m2, v2 = _moments(
        grad, grad_col, old_col, in_rows, block, plane, width, bytes_m, bytes_v, scaled, a,
        one_minus_beta1, one_minus_beta2, 2, 9, MAXIMIZE, TAIL,
    )  # fmt: skip
    m3, v3 = _moments(
        grad, grad_col, old_col, in_rows, block, plane, width, bytes_m, bytes_v, scaled, a,
        one_minus_beta1, one_minus_beta2, 3, 27, MAXIMIZE, TAIL,
    )  # fmt: skip
    m4, v4 = _moments(
        grad, grad_col, old_col, in_rows, block, plane, width, bytes_m, bytes_v, scaled, a,
        one_minus_beta1, one_minus_beta2, 4, 81, MAXIMIZE, TAIL,
    )  # fmt: skip
    magnitudes = tl.abs(m0) + tl.abs(m1) + tl.abs(m2) + tl.abs(m3) + tl.abs(m4)
    threshold = _per_row(_tree(magnitudes) * mean_share)
    k0, n0 = _kept(m0, threshold, 81)
    k1, n1 = _kept(m1, threshold, 27)
    k2, n2 = _kept(m2, threshold, 9)
    k3, n3 = _kept(m3, threshold, 3)
    k4, n4 = _kept(m4, threshold, 1)
    packed = n0 + n1 + n2 + n3 + n4 + 121
    count = _tree(packed >> 16)
    mean = div(_tree(k0 + k1 + k2 + k3 + k4), tl.maximum(count, 1).to(tl.float32))
    new_scale = nearest_bf16(tl.where(count > 0, mean, 0.0))
    scale = _per_row(widen(new_scale))
    threshold = recompute(threshold)
    tl.store(scale_at, new_scale, mask=in_rows)
    tl.store(codes_m + code_at, tl.reshape(_pack(packed & 0xFFFF), [ROWS, 32]), mask=in_bytes)

    n0 = _finish(
        param, param_col, col_inv, in_rows, block, plane, width, m0, v0, row_key, a_inv, threshold, scale,
        inv_bias1, inv_bias2, carry, decay, lr, eps, 0, 81, STOCHASTIC, TAIL,
    )  # fmt: skip
    n1 = _finish(
        param, param_col, col_inv, in_rows, block, plane, width, m1, v1, row_key, a_inv, threshold, scale,
        inv_bias1, inv_bias2, carry, decay, lr, eps, 1, 27, STOCHASTIC, TAIL,
    )  # fmt: skip
    n2 = _finish(
        param, param_col, col_inv, in_rows, block, plane, width, m2, v2, row_key, a_inv, threshold, scale,
        inv_bias1, inv_bias2, carry, decay, lr, eps, 2, 9, STOCHASTIC, TAIL,
    )  # fmt: skip
    n3 = _finish(
        param, param_col, col_inv, in_rows, block, plane, width, m3, v3, row_key, a_inv, threshold, scale,
        inv_bias1, inv_bias2, carry, decay, lr, eps, 3, 3, STOCHASTIC, TAIL,
    )  # fmt: skip
    n4 = _finish(
        param, param_col, col_inv, in_rows, block, plane, width, m4, v4, row_key, a_inv, threshold, scale,
        inv_bias1, inv_bias2, carry, decay, lr, eps, 4, 1, STOCHASTIC, TAIL,
    )  # fmt: skip
    tl.store(codes_v + code_at, tl.reshape(_pack(n0 + n1 + n2 + n3 + n4 + 121), [ROWS, 32]), mask=in_bytes)


@triton.jit(do_not_specialize=["n", "col_tiles", "row_tiles", "applied"])
def gradient_check(
    grad, grad_row, grad_col, n, k, col_tiles, row_tiles, applied, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Pass 1 of the dense step: False into ``applied`` when a |g| is too large. A program has ``row_tiles`` tiles."""
    cols = (tl.program_id(0) % col_tiles) * COLS + tl.arange(0, COLS)
    first = (tl.program_id(0) // col_tiles) * row_tiles * ROWS
    col_offset = cols.to(tl.int64) * grad_col
    worst = tl.zeros([ROWS, COLS], dtype=tl.int32)
    for start in range(0, tl.minimum(row_tiles * ROWS, n - first), ROWS):
        rows = first + start + tl.arange(0, ROWS)
        at = grad + rows.to(tl.int64)[:, None] * grad_row + col_offset[None, :]
        g = widen(tl.load(at, mask=(rows < n)[:, None] & (cols < k)[None, :], other=0.0))
        worst = tl.maximum(worst, magnitude_bits(g))
    within = tl.min(tl.min((worst <= LARGEST_BITS).to(tl.int32), axis=1), axis=0)
    if within == 0:
        tl.store(applied, within != 0)


@triton.jit(do_not_specialize=["n", "col_tiles", "key", "applied"])
def dense_update(
    param, param_row, param_col, grad, grad_row, grad_col, exp_avg, exp_avg_sq, state_row, applied,
    n, k, col_tiles, key, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias1, inv_bias2, decay, lr, eps,
    ROWS: tl.constexpr, COLS: tl.constexpr, STOCHASTIC: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Pass 2 of the dense step, in place; the moments are contiguous (n, k) fp32. Grid: row tiles x column tiles."""
    if tl.load(applied) == 0:
        return
    cols = (tl.program_id(0) % col_tiles) * COLS + tl.arange(0, COLS)
    rows = (tl.program_id(0) // col_tiles) * ROWS + tl.arange(0, ROWS)
    inside = (rows < n)[:, None] & (cols < k)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    wide_cols = cols.to(tl.int64)[None, :]
    g = widen(tl.load(grad + wide_rows * grad_row + wide_cols * grad_col, mask=inside, other=0.0))
    if MAXIMIZE:
        g = -g
    at = wide_rows * state_row + wide_cols
    m = beta1 * tl.load(exp_avg + at, mask=inside, other=0.0) + one_minus_beta1 * g
    v = beta2 * tl.load(exp_avg_sq + at, mask=inside, other=0.0) + one_minus_beta2 * (g * g)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    update = div(m * inv_bias1, sqrt(v * inv_bias2) + eps)
    param_at = param + wide_rows * param_row + wide_cols * param_col
    w = tl.load(param_at, mask=inside, other=0.0)
    h = mix(row_keys(key, rows)[:, None] + cols[None, :].to(tl.uint32))
    new = widen(w) * decay - lr * update
    tl.store(param_at, write_back(new, h, w.dtype, STOCHASTIC), mask=inside)
