"""The updates on NVIDIA GPUs: Triton kernels that give the same bits as ``reference.py``.

``README.md`` beside this file defines the step; the device code is in ``triton_kernels.py``, imported at the first
call.

A ternary step is three or four launches a parameter. ``squared_sums`` reads the gradient, ``ternary_factors`` makes
the new factors of its partial sums, ``ternary_update`` does the rest in place, once for the full blocks and once for
the narrower last block of each row. **The gradient is read twice**, for two reasons: the exponents are stored against
the base of *this* step, which needs all of G, and a gradient that is not finite must leave weights and state
untouched. In bf16 that is about 9 bytes a parameter where a one-pass step would move 6.8 (``bytes_moved`` counts
both).

Nothing waits for the GPU. Only the GPU knows whether a gradient was finite: in a 0-d bool tensor that pass 1 may set
to False and that the later launches read before they write anything. The functions return it in place of the
reference's bool.

Temporaries: partial sums in double precision, at most 0.16 bytes a parameter plus 8 a row and 8 a column, and three
fp32 vectors (``Plan.workspace_bytes``). No atomics, no autotuning (an in-place kernel cannot be tried twice), tiles
that depend on the shape alone: the same gradient gives the same bits on every GPU.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from . import trits
from .scalars import StepScalars

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""Compile options of every kernel: no contraction of a product and a sum into one rounding."""

TAIL_LAUNCH = LAUNCH | {"maxnreg": 255}
"""Left alone, the assembler aims at a number of warps and for that spills registers of some variants of the tail."""

SUM_TILE = (8, 256)
"""Rows and columns that ``squared_sums`` reads at once."""

UPDATE_ROWS, TAIL_ROWS = 16, 8
"""Rows of a program of ``ternary_update``. With four warps a thread has four neighbouring lanes of each of the five
planes: 16-byte accesses to fp32 and 8-byte accesses to 16-bit weights, in whole 32-byte sectors either way. Sixteen
bytes of 16-bit weights would put 40 elements on a thread, and registers for them would leave a GPU too few warps."""

DENSE_TILE, DENSE_VECTOR_TILE = (4, 256), (1024, 1)
FACTOR_BLOCK = 256
PARTS = 32
_MIN_CAPABILITY = (8, 0)
_MIN_TRITON = (3, 2)
_LARGEST_DIMENSION = 2**31 - 2**16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def available() -> tuple[bool, str]:
    """Whether the kernels run here, and if not, why."""
    try:
        import triton
    except ImportError:
        return False, "triton is not installed"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < _MIN_TRITON:
        return False, f"triton {triton.__version__} is older than {'.'.join(map(str, _MIN_TRITON))}"
    if not torch.cuda.is_available():
        return False, "torch finds no CUDA device"
    if torch.version.hip is not None:
        return False, "the kernels are written for NVIDIA GPUs and this torch is built for AMD's"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return False, f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return True, ""


@dataclass(frozen=True)
class Plan:
    """Tiles and temporaries of a ternary step of an (n, k) parameter; a function of the shape alone."""

    n: int
    k: int

    @property
    def rows_per_program(self) -> int:
        """Rows that one program of ``squared_sums`` adds up: a power of two that leaves a large GPU about 512
        programs.
        """
        wanted = self.n * self.k // (SUM_TILE[1] * 512)
        return min(max(1 << max(wanted, 1).bit_length() - 1, 64), 1024)

    @property
    def row_tiles(self) -> int:
        return -(-self.n // self.rows_per_program)

    @property
    def col_tiles(self) -> int:
        return -(-self.k // SUM_TILE[1])

    @property
    def rows_per_part(self) -> int:
        """Rows that a row program of ``ternary_factors`` takes: whole blocks, enough for PARTS programs."""
        return -(-self.n // (PARTS * FACTOR_BLOCK)) * FACTOR_BLOCK

    @property
    def parts(self) -> int:
        return -(-self.n // self.rows_per_part)

    @property
    def partial_sums(self) -> int:
        """Doubles that ``squared_sums`` leaves: row sums for each column tile, column sums for each row tile."""
        return self.col_tiles * self.n + self.row_tiles * self.k

    @property
    def workspace_bytes(self) -> int:
        """Temporaries of a step."""
        return 8 * (self.partial_sums + 2 * PARTS) + 4 * (self.n + 2 * self.k)

    def workspace(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The temporaries themselves: the partial sums (float64) with the parts of two means behind them; old row
        factor, old column factor and inverse new column factor (fp32).
        """
        sums = torch.empty(self.partial_sums + 2 * PARTS, dtype=torch.float64, device=device)
        row, col, col_inv = (
            torch.empty(size, dtype=torch.float32, device=device) for size in (self.n, self.k, self.k)
        )
        return sums, row, col, col_inv


def ternary_adamw_(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars, applied: Tensor | None = None
) -> Tensor:
    """One AdamW step with both moments ternary, in place, without waiting for the GPU.

    Args:
        param: (n, k) fp32, bf16 or fp16 weights, any strides.
        grad: (n, k) gradient in one of these dtypes, any strides.
        state: ``exp_avg.codes``, ``exp_avg.scale``, ``exp_avg_sq.codes``, ``exp_avg_sq.row``, ``exp_avg_sq.col``
            (shapes in ``codecs/ternary.py``), contiguous.
        s: the step's scalars.
        applied: 0-d bool tensor on the same device that holds True, for the answer; made here when None. One element
            each of a vector for all parameters saves a launch a parameter, and all answers can be fetched at once.

    Returns:
        ``applied``: False when the gradient holds NaN, Inf or a number whose square overflows; then nothing was
        written.

    Raises:
        ValueError: a dtype, shape or layout that the kernels do not work on.
    """
    from . import triton_kernels as kernels

    n, k = check(param, grad, state, ternary=True)
    applied = answer(applied, param.device)
    if n == 0 or k == 0:
        return applied
    plan = Plan(n, k)
    sums, old_row, old_col, col_inv = plan.workspace(param.device)
    means = sums[plan.partial_sums :]
    codes_m, codes_v, scale = state["exp_avg.codes"], state["exp_avg_sq.codes"], state["exp_avg.scale"]
    row, col = state["exp_avg_sq.row"], state["exp_avg_sq.col"]
    with _on(param.device):
        kernels.squared_sums[(plan.row_tiles * plan.col_tiles,)](
            grad, *grad.stride(), n, k, plan.col_tiles, plan.rows_per_program, sums, applied,
            ROWS=SUM_TILE[0], COLS=SUM_TILE[1], **LAUNCH,
        )
        kernels.ternary_factors[(plan.parts + -(-k // FACTOR_BLOCK),)](
            sums, row, col, means, old_row, old_col, col_inv, applied, n, k, plan.col_tiles, plan.row_tiles,
            plan.parts, plan.rows_per_part, s.beta2, s.one_minus_beta2, BLOCK=FACTOR_BLOCK, **LAUNCH,
        )  # fmt: skip
        for tail, blocks, width, rows, options in (
            (False, k // trits.BLOCK, trits.BLOCK, UPDATE_ROWS, LAUNCH),
            (True, 1, k % trits.BLOCK, TAIL_ROWS, TAIL_LAUNCH),
        ):
            if not blocks or not width:
                continue
            kernels.ternary_update[(-(-n // rows) * blocks,)](
                param, *param.stride(), grad, *grad.stride(), codes_m, codes_v, codes_m.stride(0),
                scale, scale.stride(0), row, old_row, old_col, col_inv, means, applied,
                n, k, plan.parts, _signed(s.key), int(s.first), 0.7 / width, s.beta1, s.one_minus_beta1,
                s.beta2, s.one_minus_beta2, s.inv_bias1, s.inv_bias2, s.carry, s.decay, s.lr, s.eps,
                ROWS=rows, TAIL=tail, STOCHASTIC=_rounds(param, s), MAXIMIZE=s.maximize, **options,
            )  # fmt: skip
    return applied


def dense_adamw_(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars, applied: Tensor | None = None
) -> Tensor:
    """One AdamW step with contiguous fp32 moments ``exp_avg`` and ``exp_avg_sq`` (n, k), in place.

    Arguments, answer and errors as for ``ternary_adamw_``; two launches.
    """
    from . import triton_kernels as kernels

    n, k = check(param, grad, state, ternary=False)
    applied = answer(applied, param.device)
    if n == 0 or k == 0:
        return applied
    rows, cols = DENSE_VECTOR_TILE if k == 1 else DENSE_TILE
    row_tiles, col_tiles = -(-n // rows), -(-k // cols)
    tiles_each = 16
    with _on(param.device):
        kernels.gradient_check[(-(-row_tiles // tiles_each) * col_tiles,)](
            grad, *grad.stride(), n, k, col_tiles, tiles_each, applied, ROWS=rows, COLS=cols, **LAUNCH
        )
        kernels.dense_update[(row_tiles * col_tiles,)](
            param, *param.stride(), grad, *grad.stride(), state["exp_avg"], state["exp_avg_sq"], k, applied,
            n, k, col_tiles, _signed(s.key), s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2,
            s.inv_bias1, s.inv_bias2, s.decay, s.lr, s.eps,
            ROWS=rows, COLS=cols, STOCHASTIC=_rounds(param, s), MAXIMIZE=s.maximize, **LAUNCH,
        )  # fmt: skip
    return applied


def bytes_moved(n: int, k: int, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> dict[str, float]:
    """Bytes a parameter that a ternary step of an (n, k) matrix reads and writes in the GPU's memory, by what they are.

    ``floor`` is what any step with this state must move: the gradient read once, weights and state read and written
    once.
    """
    plan = Plan(n, k)
    count = n * k
    vectors = 4 * (n + k) / count
    parts = {
        "gradient, pass 1": grad_dtype.itemsize,
        "gradient, pass 2": grad_dtype.itemsize,
        "weights": 2 * param_dtype.itemsize,
        "codes": 2 * 2 * n * trits.row_bytes(k) / count,
        "scales": 2 * 2 * n * trits.block_count(k) / count,
        "partial sums": 2 * 8 * plan.partial_sums / count,
        "factors": 5 * vectors,
    }
    floor = grad_dtype.itemsize + parts["weights"] + parts["codes"] + parts["scales"] + 2 * vectors
    return parts | {"total": sum(parts.values()), "floor": floor}


def check(param: Tensor, grad: Tensor, state: dict[str, Tensor], ternary: bool) -> tuple[int, int]:
    """(n, k), once everything has the layout that the kernels take for granted: a wrong one would write elsewhere."""
    if param.dtype not in _DTYPES or grad.dtype not in _DTYPES:
        raise ValueError(
            f"kernel=triton works on fp32, bf16 and fp16, not on {param.dtype} weights with {grad.dtype} gradients: "
            "set kernel=reference."
        )
    if param.dim() != 2 or grad.shape != param.shape:
        raise ValueError(f"Weight {tuple(param.shape)} and gradient {tuple(grad.shape)} must be matrices of one shape.")
    if max(param.shape) > _LARGEST_DIMENSION:
        raise ValueError(
            f"kernel=triton counts rows and columns in 32 bits, too few for {tuple(param.shape)}: set kernel=reference."
        )
    n, k = param.shape
    if ternary:
        codes = (n, trits.row_bytes(k)), torch.uint8
        expected = {
            "exp_avg.codes": codes,
            "exp_avg.scale": ((n, trits.block_count(k)), torch.bfloat16),
            "exp_avg_sq.codes": codes,
            "exp_avg_sq.row": ((n,), torch.float32),
            "exp_avg_sq.col": ((k,), torch.float32),
        }
    else:
        expected = dict.fromkeys(("exp_avg", "exp_avg_sq"), ((n, k), torch.float32))
    for key, (shape, dtype) in expected.items():
        buffer = state[key]
        if buffer.shape != shape or buffer.dtype != dtype or buffer.device != param.device:
            raise ValueError(
                f"{key} is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}; "
                f"a weight of {(n, k)} on {param.device} needs {shape} {dtype}."
            )
        if not buffer.is_contiguous():
            raise ValueError(f"kernel=triton needs contiguous state, but {key} has strides {buffer.stride()}.")
    if grad.device != param.device:
        raise ValueError(f"The gradient is on {grad.device}, the weight on {param.device}.")
    return n, k


def answer(applied: Tensor | None, device: torch.device) -> Tensor:
    """Where a step's answer goes: ``applied``, or a new one."""
    return torch.ones((), dtype=torch.bool, device=device) if applied is None else applied


def _rounds(param: Tensor, s: StepScalars) -> bool:
    """Whether the write-back draws random numbers; fp32 weights never do, and need no second compiled variant."""
    return s.stochastic and param.dtype != torch.float32


def _on(device: torch.device):
    """Triton launches on the current device, which need not be the parameter's."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _signed(key: int) -> int:
    """The 32 bits of ``key`` as a signed number, so that Triton always passes 32 bits."""
    return struct.unpack("i", struct.pack("I", key))[0]
