"""The updates in plain torch: the twin that every faster kernel must equal bit for bit, and the kernel of last resort.

``README.md`` beside this file defines the step; the code below carries it out operation by operation. It works on tiles
of at most ``TILE`` elements, so its temporaries are about 40 MB and one fp32 number a row, whatever the parameter's
size. It makes no assumption on the strides of weight and gradient, which need not even be tensors (``folded.py``).

torch's fused forms (``add`` with ``alpha``, ``addcmul``, ``lerp``) contract a product and a sum into one rounding on
some CPUs and are therefore not used.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import trits
from .scalars import GOLDEN, MASK32, MAX_GRADIENT, TINY, StepScalars

TILE = 1 << 18  # elements worked on at once: about 1 MB a temporary, so that a tile stays in the CPU's cache


def ternary_adamw_(param: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars) -> bool:
    """One AdamW step with both moments ternary, in place.

    Args:
        param: (n, k) fp32, bf16 or fp16 weights.
        grad: (n, k) gradient, any floating dtype.
        state: ``exp_avg.codes``, ``exp_avg.scale``, ``exp_avg_sq.codes``, ``exp_avg_sq.row``, ``exp_avg_sq.col``
            (shapes in ``codecs/ternary.py``).
        s: the step's scalars.

    Returns:
        False when the gradient holds NaN, Inf or a number whose square overflows: then nothing was written.
    """
    n, k = param.shape
    old_row, old_col = state["exp_avg_sq.row"], state["exp_avg_sq.col"]
    row = _next_row_factor(grad, old_row, s)
    if row is None:
        return False
    old_mean, mean = _mean(old_row), _mean(row)
    for cols, block_width in _column_strips(k):
        col_sum = sum(_squares(grad[rows, cols]).sum(dim=0) for rows in _row_strips(n, cols))
        col = _next_factor(old_col[cols], col_sum / n, s)
        for rows in _row_strips(n, cols):
            a = torch.zeros_like(old_row[rows]) if s.first else (old_row[rows] / old_mean) * s.beta2
            base = a[:, None] * old_col[cols]
            base_inv = (mean / row[rows])[:, None] * torch.reciprocal(col)
            _ternary_tile(param, grad, state, s, base, base_inv, rows, cols, block_width)
        old_col[cols] = col
    old_row.copy_(row)
    return True


def dense_adamw_(param: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars) -> bool:
    """One AdamW step with fp32 ``exp_avg`` and ``exp_avg_sq`` (n, k), in place; returns like ``ternary_adamw_``."""
    n, k = param.shape
    tiles = [(rows, cols) for cols, _ in _column_strips(k) for rows in _row_strips(n, cols)]
    if not all(_within_range(grad[tile].float()) for tile in tiles):
        return False
    for rows, cols in tiles:
        g = _gradient(grad, rows, cols, s)
        m = state["exp_avg"][rows, cols]
        v = state["exp_avg_sq"][rows, cols]
        m.copy_(m * s.beta1 + g * s.one_minus_beta1)
        v.copy_(v * s.beta2 + (g * g) * s.one_minus_beta2)
        update = (m * s.inv_bias1) / (sqrt(v * s.inv_bias2) + s.eps)
        w = param[rows, cols]
        new = w.float() * s.decay - update * s.lr
        param[rows, cols] = write_back(new, w.dtype, s, lambda r=rows, c=cols: _hash(s.key, r, c, param.device))
    return True


def ternarize(m: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Nearest ternary code of each block of ``m`` (r, b, 5, w), of which ``width`` elements are real.

    Returns codes (r, b, 5, w) int8 and the block scales (r, b) bf16: the mean of the kept magnitudes, kept are those
    above 0.7 of the mean magnitude.
    """
    magnitude = m.abs()
    keep = magnitude > (_tree_sum(magnitude) * (0.7 / width))[..., None, None]
    count = keep.sum(dim=(-2, -1)).float()
    scale = torch.where(count > 0, _tree_sum(magnitude * keep) / count, 0.0).to(torch.bfloat16)
    return torch.sign(m).to(torch.int8) * keep, scale


def round_exponent(ratio: Tensor, uniform: Tensor) -> Tensor:
    """Stochastic rounding of ``ratio`` onto {1/4, 1, 4}, unbiased in that range: the exponent as int8, 0 for NaN."""
    return ((ratio - 1.0) > uniform * 3.0).to(torch.int8) - ((1.0 - ratio) > uniform * 0.75).to(torch.int8)


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root: in double precision, where an error of the last bit cannot reach the result.

    ``torch.sqrt`` on fp32 is off by one bit for a sixth of all numbers on CPUs where it uses MKL.
    """
    return torch.sqrt(x.double()).float()


def uniform(h: Tensor) -> Tensor:
    """Hash bits (int32) -> fp32 in (0, 1), exact."""
    return (((h >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23


def _ternary_tile(param, grad, state, s, base, base_inv, rows, cols, block_width):
    """Pass 2 of the step on ``param[rows, cols]``; all blocks of a tile have the same width."""
    w = param[rows, cols]
    n, width = w.shape
    blocks = -(-width // block_width)
    plane = -(-block_width // trits.PLANES)
    first_block = cols.start // trits.BLOCK
    in_bytes = slice(first_block * trits.PLANE, first_block * trits.PLANE + blocks * plane)
    in_blocks = slice(first_block, first_block + blocks)

    def planes(x: Tensor) -> Tensor:  # (r, width) -> (r, blocks, 5, plane), padded with zeros
        x = torch.nn.functional.pad(x, (0, blocks * trits.PLANES * plane - width))
        return x.reshape(-1, blocks, trits.PLANES, plane)

    def columns(x: Tensor) -> Tensor:  # back to (r, width)
        return x.reshape(n, -1)[:, :width]

    m_codes = state["exp_avg.codes"][rows, in_bytes].view(n, blocks, plane)
    v_codes = state["exp_avg_sq.codes"][rows, in_bytes].view(n, blocks, plane)
    scale = state["exp_avg.scale"][rows, in_blocks]

    g = planes(_gradient(grad, rows, cols, s))
    q = trits.unpack(m_codes).float() * scale.float()[..., None, None]
    m = q * s.beta1 + g * s.one_minus_beta1
    level = ((trits.unpack(v_codes).to(torch.int32) * 2 + 127) << 23).view(torch.float32)  # 4^d, exact
    v = planes(base) * level + (g * g) * s.one_minus_beta2
    ratio = v * planes(base_inv)
    h = planes(_hash(s.key, rows, cols, param.device))
    exponent = round_exponent(ratio, uniform(h))
    if width < blocks * trits.PLANES * plane:
        exponent.view(n, -1)[:, width:] = 0
    codes, new_scale = ternarize(m, block_width)
    remainder = m - codes * new_scale.float()[..., None, None]

    numerator = m * s.inv_bias1 + remainder * s.carry
    update = numerator / (sqrt(v * s.inv_bias2) + s.eps)
    new = w.float() * s.decay - columns(update) * s.lr
    param[rows, cols] = write_back(new, w.dtype, s, lambda: columns(h))
    m_codes.copy_(trits.pack(codes))
    v_codes.copy_(trits.pack(exponent))
    scale.copy_(new_scale)


def _column_strips(k: int) -> Iterator[tuple[slice, int]]:
    """The columns in strips of at most ``TILE`` with their block width: whole blocks, then the narrower last one."""
    full = k - k % trits.BLOCK
    step = TILE // trits.BLOCK * trits.BLOCK
    for begin in range(0, full, step):
        yield slice(begin, min(begin + step, full)), trits.BLOCK
    if full < k:
        yield slice(full, k), k - full


def _row_strips(n: int, cols: slice) -> Iterator[slice]:
    """The rows in strips that hold at most ``TILE`` elements of ``cols``, a narrow block counted as a full one."""
    step = max(1, TILE // max(cols.stop - cols.start, trits.BLOCK))
    for begin in range(0, n, step):
        yield slice(begin, min(begin + step, n))


def _next_row_factor(grad: Tensor, old_row: Tensor, s: StepScalars) -> Tensor | None:
    """R' (n,), or None when an element of the gradient is not finite or its square overflows."""
    n, k = grad.shape
    row = torch.empty_like(old_row)
    for rows in _row_strips(n, slice(0, k)):
        row_sum = 0.0
        for cols, _ in _column_strips(k):
            g = grad[rows, cols]
            if not _within_range(g.float()):
                return None
            row_sum = row_sum + _squares(g).sum(dim=1)
        row[rows] = _next_factor(old_row[rows], row_sum / k, s)
    return row


def _next_factor(old: Tensor, mean_square: Tensor, s: StepScalars) -> Tensor:
    return old * s.beta2 + (mean_square.float() + TINY) * s.one_minus_beta2


def _squares(g: Tensor) -> Tensor:
    return g.float().double().square_()


def _gradient(grad: Tensor, rows: slice, cols: slice, s: StepScalars) -> Tensor:
    g = grad[rows, cols].float()
    return -g if s.maximize else g


def _within_range(g: Tensor) -> bool:
    return bool((g.abs() <= MAX_GRADIENT).all())


def _mean(factor: Tensor) -> Tensor:
    sums = torch.stack([part.double().sum() for part in factor.split(TILE)])
    return (sums.sum() / factor.numel()).float()


def _tree_sum(x: Tensor) -> Tensor:
    """Sum of each block, (r, b, 5, w) -> (r, b): planes in order, then five times the upper lanes onto the lower."""
    lanes = x[..., 0, :]
    for plane in range(1, trits.PLANES):
        lanes = lanes + x[..., plane, :]
    lanes = torch.nn.functional.pad(lanes, (0, trits.PLANE - lanes.shape[-1]))
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def _as_int32(x: int) -> int:
    x &= MASK32
    return x - (1 << 32) if x >= 1 << 31 else x


def _mix(x: Tensor) -> Tensor:
    """``scalars.mix32`` on int32 tensors (a signed shift copies the sign bit, hence the masks)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _as_int32(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _as_int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def hash_at(key: int, rows: Tensor, cols: Tensor) -> Tensor:
    """The hashes (int32) at a step with this key of the elements with these row and column numbers (int64), which are
    broadcast against each other."""
    row_keys = _mix(((rows * GOLDEN + key) & MASK32).to(torch.int32))
    return _mix(row_keys + cols.to(torch.int32))


def _hash(key: int, rows: slice, cols: slice, device: torch.device) -> Tensor:
    """``hash_at`` of the elements ``rows`` x ``cols``."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    return hash_at(key, row, torch.arange(cols.start, cols.stop, device=device))


def write_back(new: Tensor, dtype: torch.dtype, s: StepScalars, random_bits) -> Tensor:
    """Round fp32 weights to ``dtype``; ``random_bits()`` gives the elements' hashes where they are needed."""
    if dtype == torch.float32:
        return new
    if not s.stochastic:
        return new.to(dtype)
    noise = random_bits() * _as_int32(GOLDEN)
    bits = new.contiguous().view(torch.int32)
    if dtype == torch.bfloat16:
        rounded = (bits + ((noise >> 16) & 0xFFFF)) & ~0xFFFF
        return rounded.view(torch.float32).to(dtype)
    exponent = (bits & 0x7F800000).clamp_(min=113 << 23)
    spacing = (exponent - (10 << 23)).view(torch.float32)
    u = ((noise >> 19) & 0x1FFF).float() * 2.0**-13
    return (torch.floor(new * torch.reciprocal(spacing) + u) * spacing).to(dtype)
