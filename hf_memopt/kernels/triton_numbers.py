"""Single numbers in Triton, as ``README.md`` beside this file defines them: quotients, hashes, rounding."""

import os

import triton
import triton.language as tl

from . import scalars

GOLDEN = tl.constexpr(scalars.GOLDEN)

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def div(x, y):
        return tl.div_rn(x, y)

    @triton.jit
    def sqrt(x):
        return tl.sqrt_rn(x)

    @triton.jit
    def recompute(x):
        return x

else:

    @triton.jit
    def div(x, y):
        """Quotient rounded to nearest, subnormal numbers included."""
        return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def sqrt(x):
        """Square root rounded to nearest, subnormal numbers included."""
        return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def recompute(x):
        """``x``, but the compiler does not know: what depends on it is computed again rather than kept in registers."""
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_keys(key, rows):
    return mix(key.to(tl.uint32) + rows.to(tl.uint32) * GOLDEN)


@triton.jit
def widen(x):
    """fp32 of a bf16, fp16 or fp32 array, exact."""
    if x.dtype == tl.bfloat16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def magnitude_bits(x):
    """int32 that is ordered as |x| is, for fp32 ``x``; infinity comes after every number and NaN after infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def copy_sign(x, y):
    """fp32 ``x``, which is not negative, with the sign of ``y``."""
    sign = y.to(tl.uint32, bitcast=True) & 0x80000000
    return (x.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def nearest_bf16(x):
    """bf16 nearest to fp32 ``x``, ties to even; any NaN becomes the NaN that torch writes."""
    bits = x.to(tl.uint32, bitcast=True)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper = tl.where(x == x, upper, 0x7FC0)
    return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def write_back(new, h, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    """fp32 ``new`` rounded to ``dtype``; ``h`` is the element's hash."""
    if dtype == tl.float32:
        out = new
    elif dtype == tl.bfloat16:
        if STOCHASTIC:
            bits = new.to(tl.uint32, bitcast=True) + ((h * GOLDEN) >> 16)
            out = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            out = nearest_bf16(new)
    else:
        if STOCHASTIC:
            exponent = tl.maximum((new.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.int32), 113 << 23)
            spacing_bits = exponent - (10 << 23)
            spacing = spacing_bits.to(tl.float32, bitcast=True)
            inverse = ((254 << 23) - spacing_bits).to(tl.float32, bitcast=True)
            u = ((h * GOLDEN) >> 19).to(tl.int32).to(tl.float32) * (1.0 / 8192)
            out = (tl.floor(new * inverse + u) * spacing).to(tl.float16)
        else:
            out = new.to(tl.float16)
    return out
