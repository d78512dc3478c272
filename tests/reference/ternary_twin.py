"""The ternary step once more, from the equations alone: Python floats (double precision), loops, digits by plain
division.

It shares nothing with the package. Its job is to say, for one step from a given state, what the exact numbers are and
how far a correct single-precision kernel may be from them. A kernel that rounds every operation to nearest stays within
the ``*_error`` values below; a decision (keep or drop, exponent up or down) is forced unless its margin is within them.

The equations (W weight n x k, G gradient, t the step from 1, q and d decoded from the old state):

    m    = b1 q + (1 - b1) G
    R, C = b2 R + (1 - b2) (mean_j G^2 + 1e-30),   b2 C + (1 - b2) (mean_i G^2 + 1e-30)
    v    = b2 (R_old C_old / mean R_old) 4^d + (1 - b2) G^2        (no first term when t = 1)
    keep = |m| > 0.7 mean_block |m|            scale = mean of the kept |m|, in bfloat16           q' = sign(m) scale
    where kept
    d'   = +1 if ratio - 1 > 3 u;  -1 if 1 - ratio > 0.75 u;  else 0         ratio = v mean R / (R C), u uniform of
    (seed, name, t, i, j)
    U    = (m / (1 - b1^t) + carry (m - q')) / (sqrt(v / (1 - b2^t)) + eps)            carry = sum_{j>=1} b1^j / (1 -
    b1^(t+j))
    W    = W (1 - lr wd) - lr U

Rounding: ``E`` is half an ulp of single precision, relative. Every constant (b1, 1 - b1, ...) is rounded once: one E
each. Bounds are to first order in E, plus one more E for the orders above.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, field

E = 2.0**-24
BLOCK, PLANES = 160, 5
_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


# -- the code layout -----------------------------------------------------------------------------


def digits_of_byte(byte: int) -> list[int]:
    """The five base-3 digits of a stored byte ceil(256 n / 243), most significant first."""
    n = byte * 243 // 256
    return [n // 81, n // 27 % 3, n // 9 % 3, n // 3 % 3, n % 3]


def byte_of_digits(digits: list[int]) -> int:
    n = 0
    for digit in digits:
        n = 3 * n + digit
    return -(-256 * n // 243)


def blocks_of_row(k: int) -> list[tuple[int, int]]:
    """(first column, width) of each block."""
    return [(start, min(BLOCK, k - start)) for start in range(0, k, BLOCK)]


def decode_row(row: list[int], k: int) -> list[int]:
    """Codes -1, 0, 1 of a row of k elements from its bytes; fails unless bytes and padding are exactly as laid out."""
    codes: list[int] = []
    position = 0
    for _, width in blocks_of_row(k):
        w = -(-width // PLANES)
        digits = [digits_of_byte(byte) for byte in row[position : position + w]]
        for byte, five in zip(row[position : position + w], digits, strict=True):
            assert byte_of_digits(five) == byte, f"{byte} is not the code of five digits"
        block = [digits[e % w][e // w] - 1 for e in range(PLANES * w)]
        assert not any(block[width:]), "padding must be code 0"
        codes += block[:width]
        position += w
    assert position == len(row), "bytes left over"
    return codes


def encode_row(codes: list[int]) -> list[int]:
    row: list[int] = []
    for start, width in blocks_of_row(len(codes)):
        w = -(-width // PLANES)
        padded = codes[start : start + width] + [0] * (PLANES * w - width)
        row += [byte_of_digits([padded[p * w + lane] + 1 for p in range(PLANES)]) for lane in range(w)]
    return row


# -- random numbers ------------------------------------------------------------------------------


def mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def hash_of(seed: int, name: str, step: int, i: int, j: int) -> int:
    parameter = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little")
    key = mix(parameter + step * _GOLDEN)
    return mix(mix(key + i * _GOLDEN) + j)


# -- rounding to the storage dtypes --------------------------------------------------------------


def round_nearest(x: float, mantissa: int, min_exponent: int) -> float:
    """To nearest, ties to even, with ``mantissa`` bits behind the leading one and subnormals below 2^min_exponent."""
    if x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, min_exponent)
    return round(math.ldexp(x, mantissa - exponent)) * 2.0 ** (exponent - mantissa)


def bf16(x: float) -> float:
    return round_nearest(x, 7, -126)


def fp16(x: float) -> float:
    return round_nearest(x, 10, -14)


def stochastic_bf16(x: float, h: int) -> float:
    """Upper or lower bf16 neighbour in magnitude: the fraction of the spacing against 16 random bits."""
    if x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, -126)
    units = math.floor(math.ldexp(abs(x), 7 - exponent) + ((h * _GOLDEN & _MASK) >> 16) / 65536)
    return math.copysign(units * 2.0 ** (exponent - 7), x)


def stochastic_fp16(x: float, h: int) -> float:
    """Upper or lower fp16 neighbour: the fraction of the spacing against 13 random bits."""
    exponent = max(math.frexp(x)[1] - 1, -14) if x else -14
    units = math.floor(math.ldexp(x, 10 - exponent) + ((h * _GOLDEN & _MASK) >> 19) / 8192)
    return units * 2.0 ** (exponent - 10)


# -- the step ------------------------------------------------------------------------------------


@functools.cache
def carry_weight(beta1: float, step: int) -> float:
    return math.fsum(beta1**j / (1 - beta1 ** (step + j)) for j in range(1, int(40 / (1 - beta1)))) if beta1 else 0.0


@dataclass(frozen=True)
class Hyper:
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    seed: int
    name: str
    maximize: bool = False


@dataclass
class State:
    """Old state, decoded: codes as rows of -1, 0, 1; scales, factors as floats."""

    m_codes: list[list[int]]
    scales: list[list[float]]
    v_codes: list[list[int]]
    row: list[float]
    col: list[float]


@dataclass
class Step:
    """Exact results of one step and the distance that rounding may put between them and a kernel's. Lists of rows."""

    row: list[float]
    col: list[float]
    m: list[list[float]] = field(default_factory=list)
    m_error: list[list[float]] = field(default_factory=list)
    v: list[list[float]] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    codes_forced: list[list[bool]] = field(default_factory=list)
    exponents: list[list[int]] = field(default_factory=list)
    exponents_forced: list[list[bool | None]] = field(
        default_factory=list
    )  # None: beyond single precision, nothing is claimed
    hashes: list[list[int]] = field(default_factory=list)


FACTOR_ERROR = 7 * E  # row mean 2 E (double sum rounded, tiny added), two constants, two products, one sum, one spare
_BASE_ERROR = 5 * E  # mean R, quotient, constant, product with it, product with C
_V_ERROR = _BASE_ERROR + 2 * E  # plus the sum with (1 - b2) G^2 (whose own 3 E are less), one spare
_RATIO_ERROR = _V_ERROR + 3 * FACTOR_ERROR + 5 * E  # R', C' and mean R' as computed; mean, two quotients, two products


def ternary_step(grad: list[list[float]], old: State, hyper: Hyper) -> Step:
    """One step, up to the codes. The weights follow from ``updated_weight``, given the codes and scales that were
    really stored.
    """
    n, k = len(grad), len(grad[0])
    sign = -1.0 if hyper.maximize else 1.0
    b1, b2 = hyper.beta1, hyper.beta2
    row = [b2 * old.row[i] + (1 - b2) * (math.fsum(g * g for g in grad[i]) / k + 1e-30) for i in range(n)]
    col = [b2 * old.col[j] + (1 - b2) * (math.fsum(grad[i][j] ** 2 for i in range(n)) / n + 1e-30) for j in range(k)]
    old_mean, mean = math.fsum(old.row) / n, math.fsum(row) / n
    out = Step(row, col)
    for i in range(n):
        m, m_error, v, exponents, forced, hashes = [], [], [], [], [], []
        for j in range(k):
            g = sign * grad[i][j]
            q = old.m_codes[i][j] * old.scales[i][j // BLOCK]
            m.append(b1 * q + (1 - b1) * g)
            m_error.append(3 * E * (abs(b1 * q) + abs((1 - b1) * g)))
            base = b2 * old.row[i] * old.col[j] / old_mean * 4.0 ** old.v_codes[i][j] if hyper.step > 1 else 0.0
            v.append(base + (1 - b2) * g * g)
            ratio = v[j] * mean / (row[i] * col[j])
            h = hash_of(hyper.seed, hyper.name, hyper.step, i, j)
            u = ((h >> 9) + 0.5) / 2**23
            exponents.append(int(ratio - 1 > 3 * u) - int(1 - ratio > 0.75 * u))
            # beside the ratio's own error: one subtraction, the product of u with its factor
            margin = _RATIO_ERROR * ratio + E * abs(ratio - 1) + E * 3 * u
            if (
                min(v[j], old.row[i] * old.col[j] / old_mean if old_mean else 1.0) < 2.0**-126
                or mean / (row[i] * col[j]) > 2.0**127
            ):
                forced.append(None)
            else:
                forced.append(abs(ratio - 1 - 3 * u) > margin and abs(1 - ratio - 0.75 * u) > margin)
            hashes.append(h)
        codes, codes_forced = _kept(m, m_error, k)
        for name, value in (("m", m), ("m_error", m_error), ("v", v), ("codes", codes), ("codes_forced", codes_forced)):
            getattr(out, name).append(value)
        out.exponents.append(exponents)
        out.exponents_forced.append(forced)
        out.hashes.append(hashes)
    return out


def _kept(m: list[float], m_error: list[float], k: int) -> tuple[list[int], list[bool]]:
    codes, forced = [], []
    for start, width in blocks_of_row(k):
        inside = range(start, start + width)
        threshold = 0.7 * math.fsum(abs(m[j]) for j in inside) / width
        # nine additions in the tree, the constant, its product, one spare
        threshold_error = 12 * E * threshold + 0.7 * math.fsum(m_error[j] for j in inside) / width
        for j in inside:
            kept = abs(m[j]) > threshold
            codes.append((1 if m[j] > 0 else -1) if kept else 0)
            # an element that is exactly zero together with its whole block, or alone, is never kept, whatever the
            # rounding
            forced.append(abs(abs(m[j]) - threshold) > m_error[j] + threshold_error or (m[j] == 0 and m_error[j] == 0))
    return codes, forced


def block_scale(m: list[float], m_error: list[float], codes: list[int]) -> tuple[float, float]:
    """Mean magnitude of the kept elements of a block before its rounding to bf16, and the error a kernel may make in
    it.
    """
    kept = [j for j, code in enumerate(codes) if code]
    if not kept:
        return 0.0, 0.0
    mean = math.fsum(abs(m[j]) for j in kept) / len(kept)
    return mean, 11 * E * mean + math.fsum(m_error[j] for j in kept) / len(
        kept
    )  # nine additions, one quotient, one spare


def updated_weight(weight: float, m: float, m_error: float, q: float, v: float, hyper: Hyper) -> tuple[float, float]:
    """The new weight before write-back and the error a kernel may make in it; ``q`` is the stored first moment."""
    carry = carry_weight(hyper.beta1, hyper.step)
    bias1 = 1 / (1 - hyper.beta1**hyper.step)
    bias2 = 1 / (1 - hyper.beta2**hyper.step)
    direct, carried = m * bias1, carry * (m - q)
    numerator = direct + carried
    denominator = math.sqrt(v * bias2) + hyper.eps
    numerator_error = m_error * (bias1 + carry) + 2 * E * abs(direct) + 3 * E * abs(carried) + E * abs(numerator)
    update = numerator / denominator
    # v and its correction under a root, the root, eps, the sum, the quotient, one spare
    update_error = numerator_error / denominator + abs(update) * ((_V_ERROR + 2 * E) / 2 + 5 * E)
    decayed = weight * (1 - hyper.lr * hyper.weight_decay)
    new = decayed - hyper.lr * update
    return new, hyper.lr * update_error + 2 * E * abs(decayed) + 2 * E * abs(hyper.lr * update) + 2 * E * abs(new)
