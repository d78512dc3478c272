"""The reference's arithmetic compiled by ``torch.compile``: for machines on which the C kernel cannot be built but
torch's own compiler works.

Two functions are compiled, ``reference.ternary_blocks`` and ``reference.dense_elements``; the walk over the tiles and
the first pass over the gradient remain the reference's. So that the compiler sees one shape only, a tile is handed over
as N blocks of 5 x 32 elements (N elements for the dense step), N being its one dynamic dimension: narrow blocks are
padded, a single block is doubled. The step's scalars and its key are tensors. That leaves one compilation for each
weight dtype and way of rounding, and for each number of threads.

The numbers are the reference's. On the CPU they are equal bit for bit, since products and sums are not contracted and
intermediate casts to bf16 are carried out; both are asked for in ``_options``, whatever the process' settings are. On
CUDA the same options apply, but nothing has been run there.

Nothing falls back to eager silently: each function raises if it runs uncompiled, and torch raises when there are more
compilations than it allows (``fullgraph``).
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache

import torch
from torch import Tensor

from . import reference, trits
from .scalars import NUMBERS, StepScalars

# what a compiled function uses: the numbers as tensors without dimensions, and how to round
_Scalars = namedtuple("_Scalars", (*NUMBERS, "stochastic"))


@cache
def available() -> tuple[bool, str]:
    """Whether ``torch.compile`` works here, tried once on a function of one line. The string says why not."""
    try:
        done = bool(_compiled(_probe)(torch.zeros(8))[0])
    except Exception as error:  # whatever a compiler, a linker or this Python's version brings up
        first_paragraph = " ".join(str(error).split("\n\n")[0].split())
        return False, f"torch.compile: {first_paragraph[:300] or type(error).__name__}"
    return done, "" if done else "torch.compile is switched off and runs functions as they are"


def ternary_adamw_(param: Tensor, grad: Tensor, state: dict[str, Tensor], scalars: StepScalars) -> bool:
    """``reference.ternary_adamw_``, its second pass compiled: same arguments, same results."""
    return reference.ternary_adamw_(param, grad, state, scalars, _ternary_tile)


def dense_adamw_(param: Tensor, grad: Tensor, state: dict[str, Tensor], scalars: StepScalars) -> bool:
    """``reference.dense_adamw_``, compiled: same arguments, same results."""
    return reference.dense_adamw_(param, grad, state, scalars, _dense_tile)


def _ternary_tile(param, grad, state, s, factors, rows, cols, block_width):
    """``reference._ternary_tile``, with blocks of 5 x 32 whatever their width."""
    device = param.device
    in_bytes, in_blocks, plane = reference.code_slices(cols, block_width)
    m_codes = state["exp_avg.codes"][rows, in_bytes]
    v_codes = state["exp_avg_sq.codes"][rows, in_bytes]
    scale = state["exp_avg.scale"][rows, in_blocks]
    n, blocks = scale.shape
    w = param[rows, cols]
    width = w.shape[1]

    def elements(x: Tensor) -> Tensor:  # (r, width) -> (r blocks, 5, 32), padded with zeros
        return _lanes(_padded(x, blocks * trits.PLANES * plane).reshape(-1, trits.PLANES, plane))

    def of_columns(x: Tensor) -> Tensor:  # (width,) -> (n blocks, 5, 32)
        return elements(x[None]).expand(n, blocks, trits.PLANES, trits.PLANE).reshape(-1, trits.PLANES, trits.PLANE)

    def of_rows(x: Tensor) -> Tensor:  # (n,) -> (n blocks,)
        return x[:, None].expand(n, blocks).reshape(-1)

    a, c, a_inv, c_inv = factors
    keys = reference.row_keys(s.key, torch.arange(rows.start, rows.stop, device=device))
    first_cols = torch.arange(cols.start, cols.stop, block_width, dtype=torch.int32, device=device)
    places = torch.arange(trits.PLANES * plane, dtype=torch.int32, device=device)
    new, new_m_codes, new_v_codes, new_scale = _call(
        _ternary_blocks,
        (
            elements(w),
            elements(_gradient(grad, rows, cols, s, w.dtype)),
            _lanes(m_codes.reshape(-1, plane), trits.ZERO_BYTE),
            _lanes(v_codes.reshape(-1, plane), trits.ZERO_BYTE),
            scale.reshape(-1),
            of_rows(a),
            of_columns(c),
            of_rows(a_inv),
            of_columns(c_inv),
            (keys[:, None] + first_cols).reshape(-1),
        ),
        _lanes(places.view(trits.PLANES, plane)),
        _lanes((places < block_width).to(torch.int32).view(trits.PLANES, plane)),
        torch.tensor(trits.POWERS, dtype=torch.int32, device=device)[:, None],
        torch.tensor([reference.keep_above(block_width), *_numbers(s)], device=device),
        s.stochastic and w.dtype != torch.float32,
    )
    w.copy_(new[:, :, :plane].reshape(n, -1)[:, :width])
    m_codes.copy_(new_m_codes[:, :plane].reshape(m_codes.shape))
    v_codes.copy_(new_v_codes[:, :plane].reshape(v_codes.shape))
    scale.copy_(new_scale.view(scale.shape))


def _ternary_blocks(
    w, g, m_codes, v_codes, scale, a, c, a_inv, c_inv, seeds, places, real, powers, numbers, stochastic
):
    _refuse_eager()
    keep_above, *rest = numbers.unbind()
    h = reference.mix(seeds[:, None, None] + places)
    base, base_inv = a[:, None, None] * c, a_inv[:, None, None] * c_inv
    q = _unpacked(m_codes, powers).float() * scale.float()[:, None, None]
    exponent = _unpacked(v_codes, powers)
    s = _Scalars(*rest, stochastic)
    new, codes, new_scale, exponent = reference.ternary_blocks(
        w, g.float(), q, exponent, base, base_inv, h, real, keep_above, s
    )
    return new, trits.pack(codes), trits.pack(exponent), new_scale


def _unpacked(packed: Tensor, powers: Tensor) -> Tensor:
    """``trits.unpack`` in int32, which the compiler vectorises, unlike the narrower types."""
    return ((((packed.to(torch.int32)[:, None] * powers) & 255) * 3) >> 8) - 1


def _dense_tile(param, grad, state, s, rows, cols):
    device = param.device
    w, m, v = param[rows, cols], state["exp_avg"][rows, cols], state["exp_avg_sq"][rows, cols]
    inputs = [w, _gradient(grad, rows, cols, s, w.dtype), m, v]
    stochastic = s.stochastic and w.dtype != torch.float32
    if stochastic:
        keys = reference.row_keys(s.key, torch.arange(rows.start, rows.stop, device=device))
        inputs.append(keys[:, None] + torch.arange(cols.start, cols.stop, dtype=torch.int32, device=device))
    outputs = _call(
        _dense_elements,
        tuple(x.reshape(-1) for x in inputs),
        torch.tensor(_numbers(s), device=device),
    )
    for old, new in zip((w, m, v), outputs, strict=True):
        old.copy_(new.view(old.shape))


def _dense_elements(w, g, m, v, *seeds_and_numbers):
    _refuse_eager()
    *seeds, numbers = seeds_and_numbers
    s = _Scalars(*numbers.unbind(), bool(seeds))
    return reference.dense_elements(w, g.float(), m, v, lambda: reference.mix(seeds[0]), s)


def _probe(x):
    return x + 1.0 if torch.compiler.is_compiling() else x


def _refuse_eager() -> None:
    if not torch.compiler.is_compiling():
        raise RuntimeError("torch.compile is switched off, so kernel=inductor cannot run: set kernel=auto.")


@cache
def _compiled(function):
    return torch.compile(function, fullgraph=True, options=_options())


def _options() -> dict[str, bool | str]:
    from torch._inductor import config

    contraction = config.cpp.enable_floating_point_contract_flag  # a string or a bool: versions of torch differ
    return {
        "emulate_precision_casts": True,  # else float32 -> bf16 -> float32 is dropped; on CUDA also: no contraction
        "cpp.enable_floating_point_contract_flag": "off" if isinstance(contraction, str) else False,
        "cpp.enable_unsafe_math_opt_flag": False,
    }


@torch.no_grad()
def _call(function, inputs: tuple[Tensor, ...], *others):
    """``function`` compiled, on tensors that share the dynamic first dimension, and on others of fixed shape."""
    single = len(inputs[0]) == 1  # the compiler would make 1 a case of its own
    inputs = tuple((torch.cat([x, x]) if single else x).contiguous() for x in inputs)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    outputs = _compiled(function)(*inputs, *others)
    return tuple(x[:1] for x in outputs) if single else outputs


def _numbers(s: StepScalars) -> list[float]:
    return [getattr(s, name) for name in NUMBERS]


def _gradient(grad: Tensor, rows: slice, cols: slice, s: StepScalars, dtype: torch.dtype) -> Tensor:
    """The tile of the gradient as it is, or in fp32 where it must be negated or has not the weights' dtype."""
    return grad[rows, cols] if grad.dtype == dtype and not s.maximize else reference.gradient(grad, rows, cols, s)


def _padded(x: Tensor, size: int, value: int = 0) -> Tensor:
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]), value=value) if size > x.shape[-1] else x


def _lanes(x: Tensor, value: int = 0) -> Tensor:
    return _padded(x, trits.PLANE, value)
