"""The updates in C (``ternary_adamw.c``): one pass over weights, gradient and codes, threads over rows, the numbers
of ``reference.py`` bit for bit.

The library is built at first use (``build.py``) and called on data pointers. Since pointers know neither shapes nor
types, everything is checked here before a call. What the C code does not take (columns that are not adjacent, a
float64 gradient) the reference does instead, with the same numbers.
"""

from __future__ import annotations

import ctypes
import operator
from functools import lru_cache

import torch
from torch import Tensor

from . import build, reference, trits
from .scalars import NUMBERS, StepScalars

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_MEMORY, _DONE = -1, 1
_ELEMENTS_A_THREAD = 1 << 16  # below that, starting a thread costs more than it gains


class _Scalars(ctypes.Structure):
    """``StepScalars`` of the C code, in its order."""

    _fields_ = [
        *((name, ctypes.c_float) for name in NUMBERS),
        ("key", ctypes.c_uint32),
        ("first", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
    ]


class _Tensors(ctypes.Structure):
    """``Tensors`` of the C code, in its order."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("param_stride", ctypes.c_int64),
        ("grad_stride", ctypes.c_int64),
        ("param_dtype", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("m_codes", ctypes.c_void_p),
        ("v_codes", ctypes.c_void_p),
        ("m_scale", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("col", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
    ]


_in_order = operator.attrgetter(*[name for name, _ in _Scalars._fields_])


def available() -> tuple[bool, str]:
    """Whether the kernel can be used here; builds it at the first call. The string says why not."""
    library, why = _library()
    return library is not None, why


def ternary_adamw_(param: Tensor, grad: Tensor, state: dict[str, Tensor], scalars: StepScalars) -> bool:
    """``reference.ternary_adamw_``, in C: same arguments, same results.

    Raises:
        ValueError: a state buffer has not the shape, the type or the layout that the parameter asks for.
        MemoryError: the scratch memory (some numbers per row and column) could not be had.
    """
    if not _takes(param, grad):
        return reference.ternary_adamw_(param, grad, state, scalars)
    n, k = param.shape
    m_codes, v_codes, scale = state["exp_avg.codes"], state["exp_avg_sq.codes"], state["exp_avg.scale"]
    row, col = state["exp_avg_sq.row"], state["exp_avg_sq.col"]
    _check("exp_avg.codes", m_codes, (n, trits.row_bytes(k)), torch.uint8)
    _check("exp_avg_sq.codes", v_codes, (n, trits.row_bytes(k)), torch.uint8)
    _check("exp_avg.scale", scale, (n, trits.block_count(k)), torch.bfloat16)
    _check("exp_avg_sq.row", row, (n,), torch.float32)
    _check("exp_avg_sq.col", col, (k,), torch.float32)
    tensors = _tensors(param, grad)
    tensors.m_codes, tensors.v_codes, tensors.m_scale = m_codes.data_ptr(), v_codes.data_ptr(), scale.data_ptr()
    tensors.row, tensors.col = row.data_ptr(), col.data_ptr()
    return _run(_require_library().hf_memopt_ternary_adamw, tensors, scalars)


def dense_adamw_(param: Tensor, grad: Tensor, state: dict[str, Tensor], scalars: StepScalars) -> bool:
    """``reference.dense_adamw_``, in C: same arguments, same results, same errors as ``ternary_adamw_``."""
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    if not (_takes(param, grad) and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous()):
        return reference.dense_adamw_(param, grad, state, scalars)
    _check("exp_avg", exp_avg, tuple(param.shape), torch.float32)
    _check("exp_avg_sq", exp_avg_sq, tuple(param.shape), torch.float32)
    tensors = _tensors(param, grad)
    tensors.exp_avg, tensors.exp_avg_sq = exp_avg.data_ptr(), exp_avg_sq.data_ptr()
    return _run(_require_library().hf_memopt_dense_adamw, tensors, scalars)


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str]:
    try:
        library = build.load()
    except build.BuildError as error:
        return None, str(error)
    return _declared(library)


def _declared(library: ctypes.CDLL) -> tuple[ctypes.CDLL | None, str]:
    for name in ("hf_memopt_ternary_adamw", "hf_memopt_dense_adamw"):
        function = getattr(library, name)
        function.argtypes = [ctypes.POINTER(_Tensors), ctypes.POINTER(_Scalars), ctypes.c_int]
        function.restype = ctypes.c_int
    library.hf_memopt_stages.restype = ctypes.c_char_p
    sizes = library.hf_memopt_sizes(0), library.hf_memopt_sizes(1)
    if sizes != (ctypes.sizeof(_Tensors), ctypes.sizeof(_Scalars)):
        return None, f"the library's structures have {sizes} bytes, not those of this version"
    return library, ""


def _require_library() -> ctypes.CDLL:
    library, why = _library()
    if library is None:
        raise RuntimeError(f"The compiled kernel is not usable here ({why}): use kernel=auto or kernel=reference.")
    return library


def _takes(param: Tensor, grad: Tensor) -> bool:
    """Whether the C code takes this weight and gradient: its three dtypes, adjacent columns."""
    shape = param.shape
    if shape != grad.shape:
        raise ValueError(f"The gradient has shape {tuple(grad.shape)}, its parameter {tuple(shape)}.")
    return (
        param.dtype in _DTYPES
        and grad.dtype in _DTYPES
        and param.is_cpu
        and grad.is_cpu
        and shape[1] < 1 << 31
        and (shape[1] == 1 or param.stride(1) == grad.stride(1) == 1)
    )


def _check(name: str, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if buffer.shape == shape and buffer.dtype is dtype and buffer.is_cpu and buffer.is_contiguous():
        return
    raise ValueError(
        f"The state {name} is {buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device.type}, "
        f"not contiguous {dtype} of shape {shape} on cpu."
    )


def _tensors(param: Tensor, grad: Tensor) -> _Tensors:
    rows, cols = param.shape
    return _Tensors(
        rows,
        cols,
        param.data_ptr(),
        grad.data_ptr(),
        param.stride(0),
        grad.stride(0),
        _DTYPES[param.dtype],
        _DTYPES[grad.dtype],
    )


def _run(function, tensors: _Tensors, scalars: StepScalars) -> bool:
    threads = max(1, min(torch.get_num_threads(), tensors.rows * tensors.cols // _ELEMENTS_A_THREAD))
    result = function(tensors, _Scalars(*_in_order(scalars)), threads)
    if result == _NO_MEMORY:
        raise MemoryError(f"No memory for the sums of a parameter of shape ({tensors.rows}, {tensors.cols}).")
    return result == _DONE
