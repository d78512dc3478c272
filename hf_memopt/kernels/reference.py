"""The updates in plain torch: the twin that every faster kernel must equal bit for bit, and the kernel of last resort.

``README.md`` beside this file defines the step; the code below carries it out operation by operation. It works on tiles
of at most ``TILE`` elements, so its temporaries are about 40 MB and one fp32 number a row, whatever the parameter's
size. It makes no assumption on the strides of weight and gradient, which need not even be tensors (``folded.py``).

torch's fused forms (``add`` with ``alpha``, ``addcmul``, ``lerp``) contract a product and a sum into one rounding on
some CPUs and are therefore not used.

The arithmetic of a tile is in ``ternary_blocks`` and ``dense_elements``, which take tensors and give tensors and write
nothing: ``inductor.py`` compiles them and passes the tile that calls them as ``tile=``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import trits
from .scalars import GOLDEN, MASK32, MAX_GRADIENT, TINY, StepScalars

TILE = 1 << 18  # elements worked on at once: about 1 MB a temporary, so that a tile stays in the CPU's cache


def ternary_adamw_(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars, tile: Callable | None = None
) -> bool:
    """One AdamW step with both moments ternary, in place.

    Args:
        param: (n, k) fp32, bf16 or fp16 weights.
        grad: (n, k) gradient, any floating dtype.
        state: ``exp_avg.codes``, ``exp_avg.scale``, ``exp_avg_sq.codes``, ``exp_avg_sq.row``, ``exp_avg_sq.col``
            (shapes in ``codecs/ternary.py``).
        s: the step's scalars.
        tile: does the second pass on a tile, as ``_ternary_tile`` does it.

    Returns:
        False when the gradient holds NaN, Inf or a number whose square overflows: then nothing was written.
    """
    tile = tile or _ternary_tile
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
            factors = a, old_col[cols], mean / row[rows], torch.reciprocal(col)
            tile(param, grad, state, s, factors, rows, cols, block_width)
        old_col[cols] = col
    old_row.copy_(row)
    return True


def dense_adamw_(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars, tile: Callable | None = None
) -> bool:
    """One AdamW step with fp32 ``exp_avg`` and ``exp_avg_sq`` (n, k), in place; returns like ``ternary_adamw_``."""
    tile = tile or _dense_tile
    n, k = param.shape
    strips = [(rows, cols) for cols, _ in _column_strips(k) for rows in _row_strips(n, cols)]
    if not all(_within_range(grad[strip].float()) for strip in strips):
        return False
    for rows, cols in strips:
        tile(param, grad, state, s, rows, cols)
    return True


def ternary_blocks(
    w: Tensor,
    g: Tensor,
    q: Tensor,
    exponent: Tensor,
    base: Tensor,
    base_inv: Tensor,
    h: Tensor,
    real: Tensor | None,
    keep_above: float | Tensor,
    s: StepScalars,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pass 2 of the step on blocks of equal width.

    Args:
        w: (..., 5, plane) weights of any of the three dtypes.
        g: (..., 5, plane) fp32 gradient, negated for ``maximize``; zero where a block has no element.
        q: (..., 5, plane) fp32, the decoded first moment.
        exponent: (..., 5, plane) int32, that of the second moment.
        base, base_inv: (..., 5, plane) fp32, the rank-one second moment before the step and the inverse of that after.
        h: (..., 5, plane) int32 hashes.
        real: (5, plane) int32, 1 where a block has elements, else 0; None: 1 everywhere.
        keep_above: 0.7 / width.
        s: the step's scalars, as numbers or as tensors without dimensions.

    Returns:
        The new weights; for the first moment codes as fp32, (..., 5, plane), and scales as bf16, (...); for the second
        one exponents as int32, (..., 5, plane).
    """
    m = q * s.beta1 + g * s.one_minus_beta1
    level = ((exponent * 2 + 127) << 23).view(torch.float32)  # 4^d, exact
    v = base * level + (g * g) * s.one_minus_beta2
    new_exponent = round_exponent(v * base_inv, uniform(h), torch.int32)
    if real is not None:
        new_exponent = new_exponent * real
    codes, scale = _ternarize(m, keep_above)
    remainder = m - codes * scale.float()[..., None, None]

    numerator = m * s.inv_bias1 + remainder * s.carry
    update = numerator / (sqrt(v * s.inv_bias2) + s.eps)
    new = w.float() * s.decay - update * s.lr
    return write_back(new, w.dtype, s, lambda: h), codes, scale, new_exponent


def dense_elements(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, random_bits: Callable[[], Tensor], s: StepScalars
) -> tuple[Tensor, Tensor, Tensor]:
    """The dense step on tensors of one shape: new weights and moments. ``random_bits()`` gives the elements' hashes."""
    m = m * s.beta1 + g * s.one_minus_beta1
    v = v * s.beta2 + (g * g) * s.one_minus_beta2
    update = (m * s.inv_bias1) / (sqrt(v * s.inv_bias2) + s.eps)
    return write_back(w.float() * s.decay - update * s.lr, w.dtype, s, random_bits), m, v


def ternarize(m: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Nearest ternary code of each block of ``m`` (r, b, 5, w), of which ``width`` elements are real.

    Returns codes (r, b, 5, w) int8 and the block scales (r, b) bf16: the mean of the kept magnitudes, kept are those
    above 0.7 of the mean magnitude.
    """
    codes, scale = _ternarize(m, keep_above(width))
    return codes.to(torch.int8), scale


def keep_above(width: int) -> float:
    """A block of ``width`` elements keeps the magnitudes above this times their sum."""
    return 0.7 / width


def _ternarize(m: Tensor, keep_above: float | Tensor) -> tuple[Tensor, Tensor]:
    magnitude = m.abs()
    keep = (magnitude > (_tree_sum(magnitude) * keep_above)[..., None, None]).float()  # stored bools compile badly
    count = keep.sum(dim=(-2, -1))  # exact, whatever the order
    scale = torch.where(count > 0, _tree_sum(magnitude * keep) / count, 0.0).to(torch.bfloat16)
    return torch.sign(m) * keep, scale


def round_exponent(ratio: Tensor, uniform: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Stochastic rounding of ``ratio`` onto {1/4, 1, 4}, unbiased in that range: the exponent, 0 for NaN."""
    return ((ratio - 1.0) > uniform * 3.0).to(dtype) - ((1.0 - ratio) > uniform * 0.75).to(dtype)


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root: in double precision, where an error of the last bit cannot reach the result.

    ``torch.sqrt`` on fp32 is off by one bit for a sixth of all numbers on CPUs where it uses MKL.
    """
    return torch.sqrt(x.double()).float()


def uniform(h: Tensor) -> Tensor:
    """Hash bits (int32) -> fp32 in (0, 1), exact."""
    return (((h >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23


def code_slices(cols: slice, block_width: int) -> tuple[slice, slice, int]:
    """Of the columns of a tile: their bytes in the codes, their blocks, and the elements of a plane."""
    blocks = -(-(cols.stop - cols.start) // block_width)
    plane = -(-block_width // trits.PLANES)
    first = cols.start // trits.BLOCK
    return slice(first * trits.PLANE, first * trits.PLANE + blocks * plane), slice(first, first + blocks), plane


def _ternary_tile(param, grad, state, s, factors, rows, cols, block_width):
    """Pass 2 of the step on ``param[rows, cols]``; all blocks of a tile have the same width.

    ``factors`` are a, c, a_inv and c_inv of ``README.md`` for these rows and columns.
    """
    w = param[rows, cols]
    n, width = w.shape
    in_bytes, in_blocks, plane = code_slices(cols, block_width)
    blocks = in_blocks.stop - in_blocks.start
    padding = blocks * trits.PLANES * plane - width

    def planes(x: Tensor) -> Tensor:  # (r, width) -> (r, blocks, 5, plane), padded with zeros
        x = torch.nn.functional.pad(x, (0, padding)) if padding else x
        return x.reshape(-1, blocks, trits.PLANES, plane)

    a, c, a_inv, c_inv = factors
    m_codes = state["exp_avg.codes"][rows, in_bytes]
    v_codes = state["exp_avg_sq.codes"][rows, in_bytes]
    scale = state["exp_avg.scale"][rows, in_blocks]
    codes = trits.unpack(m_codes.view(n, blocks, plane))
    exponent = trits.unpack(v_codes.view(n, blocks, plane))
    real = planes(torch.ones(1, width, dtype=torch.int32, device=param.device))[0] if padding else None
    new, codes, new_scale, exponent = ternary_blocks(
        planes(w),
        planes(gradient(grad, rows, cols, s)),
        codes.float() * scale.float()[..., None, None],
        exponent.to(torch.int32),
        planes(a[:, None] * c),
        planes(a_inv[:, None] * c_inv),
        planes(_hash(s.key, rows, cols, param.device)),
        real,
        keep_above(block_width),
        s,
    )
    param[rows, cols] = new.reshape(n, -1)[:, :width]
    m_codes.copy_(trits.pack(codes).view_as(m_codes))
    v_codes.copy_(trits.pack(exponent).view_as(v_codes))
    scale.copy_(new_scale)


def _dense_tile(param, grad, state, s, rows, cols):
    m, v = state["exp_avg"][rows, cols], state["exp_avg_sq"][rows, cols]
    new, new_m, new_v = dense_elements(
        param[rows, cols],
        gradient(grad, rows, cols, s),
        m,
        v,
        lambda: _hash(s.key, rows, cols, param.device),
        s,
    )
    m.copy_(new_m)
    v.copy_(new_v)
    param[rows, cols] = new


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


def gradient(grad: Tensor, rows: slice, cols: slice, s: StepScalars) -> Tensor:
    """The tile of ``grad`` in fp32, negated for ``maximize``."""
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


def mix(x: Tensor) -> Tensor:
    """``scalars.mix32`` on int32 tensors (a signed shift copies the sign bit, hence the masks)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _as_int32(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _as_int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def row_keys(key: int, rows: Tensor) -> Tensor:
    """The rows' keys (int32) at a step with this key; ``rows`` are their numbers (int64)."""
    return mix(((rows * GOLDEN + key) & MASK32).to(torch.int32))


def hash_at(key: int, rows: Tensor, cols: Tensor) -> Tensor:
    """The hashes (int32) at a step with this key of the elements with these row and column numbers (int64), which are
    broadcast against each other."""
    return mix(row_keys(key, rows) + cols.to(torch.int32))


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
    return round_stochastically(new, dtype, random_bits())


def round_stochastically(new: Tensor, dtype: torch.dtype, hashes: Tensor) -> Tensor:
    """Round fp32 numbers to bf16 or fp16, up or down by their ``hashes`` (int32)."""
    noise = hashes * _as_int32(GOLDEN)
    bits = new.contiguous().view(torch.int32)
    if dtype == torch.bfloat16:
        rounded = (bits + ((noise >> 16) & 0xFFFF)) & ~0xFFFF
        return rounded.view(torch.float32).to(dtype)
    exponent = (bits & 0x7F800000).clamp_(min=113 << 23)
    spacing = (exponent - (10 << 23)).view(torch.float32)
    u = ((noise >> 19) & 0x1FFF).float() * 2.0**-13
    return (torch.floor(new * torch.reciprocal(spacing) + u) * spacing).to(dtype)
