"""What one update of one parameter needs besides tensors: the step's scalars and its random key.

Everything is computed in double on the host and rounded once to single precision, so that every kernel, on whatever
device, starts from the same numbers (``README.md`` beside this file).

The carry weight. A piece r of the first moment that the ternary code cannot hold would have moved the weight over the
coming steps by ``lr * r * beta1^j / (1 - beta1^(t+j))`` at step t+j. It is applied now instead:

    carry_t = sum over j >= 1 of  beta1^j / (1 - beta1^(t+j))        (-> beta1 / (1 - beta1) as t grows)
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import lru_cache

MASK32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive counters
MAX_GRADIENT = 1.8e19  # the largest |g| whose square is a finite single-precision number, with a margin
TINY = 1e-30  # keeps the factors of the second moment positive
SMALLEST_EPS = 1e-15  # sqrt(TINY): with eps = 0 a weight that has had no gradient stays, where 0 / 0 would make it NaN

NUMBERS = (
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "inv_bias1",
    "inv_bias2",
    "carry",
    "decay",
    "lr",
    "eps",
)
"""The single-precision fields of ``StepScalars``, in the order in which the C code has them."""

_CARRY_TERM_RELATIVE_SIZE = 1e-17  # far below the rounding to single precision


def round_to_float32(x: float) -> float:
    """The single-precision number nearest to ``x``, as a Python float; beyond the range it is infinite."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def mix32(x: int) -> int:
    """A bijective hash of 32-bit integers (two multiplications, full avalanche)."""
    x &= MASK32
    x ^= x >> 16
    x = (x * 0x7FEB352D) & MASK32
    x ^= x >> 15
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


@lru_cache(maxsize=65536)
def parameter_key(seed: int, name: str) -> int:
    """32 bits that stand for one parameter of one run; the same on every rank and after every resume."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little")


@lru_cache(maxsize=64)
def carry_weight(beta1: float, step: int) -> float:
    """``sum_{j>=1} beta1^j / (1 - beta1^(step+j))``, see the module's note. ``step`` counts from 1; 0 <= ``beta1`` < 1.

    Each quotient written as a geometric series makes this a sum over pairs (j, i). Summed outwards from its diagonal,
    as Clausen did with Lambert's series, it needs only the square root of the number of terms: 20 for beta1 = 0.9,
    2 10^5 for a beta1 of 1 - 1e-9.
    """
    if beta1 == 0.0:
        return 0.0
    log = math.log(beta1)
    terms = math.ceil(math.sqrt(1.0 + math.log(_CARRY_TERM_RELATIVE_SIZE) / log))
    return math.fsum(
        math.exp((s * s + step * (s - 1)) * log) / -math.expm1(s * log)
        + math.exp((s * s + s + step * s) * log) / -math.expm1((s + step) * log)
        for s in range(1, terms + 1)
    )


def bias_correction(beta: float, step: int) -> float:
    """``1 - beta^step``, without cancellation."""
    return 1.0 if beta == 0.0 else -math.expm1(step * math.log(beta))


@dataclass(frozen=True)
class StepScalars:
    """Scalars of one update, all rounded to single precision; ``key`` is a 32-bit integer.

    ``first`` is true at the first update of the parameter (the stored factors are still zero).
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_bias1: float
    inv_bias2: float
    carry: float
    decay: float
    lr: float
    eps: float
    key: int
    first: bool
    stochastic: bool
    maximize: bool

    @classmethod
    def at_step(
        cls,
        step: int,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        parameter_key: int,
        stochastic: bool,
        maximize: bool,
    ) -> StepScalars:
        """The scalars of update number ``step`` (from 1)."""
        beta1, beta2 = betas
        r = round_to_float32
        return cls(
            beta1=r(beta1),
            one_minus_beta1=r(1.0 - beta1),
            beta2=r(beta2),
            one_minus_beta2=r(1.0 - beta2),
            inv_bias1=r(1.0 / bias_correction(beta1, step)),
            inv_bias2=r(1.0 / bias_correction(beta2, step)),
            carry=r(carry_weight(beta1, step)),
            decay=r(1.0 - lr * weight_decay),
            lr=r(lr),
            eps=r(max(eps, SMALLEST_EPS)),
            key=mix32(parameter_key + step * GOLDEN),
            first=step == 1,
            stochastic=stochastic,
            maximize=maximize,
        )
