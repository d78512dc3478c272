"""The history of ``taco``: of each column the k largest entries that have not been applied yet.

A column is one input feature: everything that one element of the layer's input is multiplied by. k FP8 values, their
row numbers and one bf16 scale a column: with k = 16 and 16-bit row numbers 50 bytes a column, which on 4096 rows is
0.098 bits a parameter. All other entries stand for zero: that is what is lost.

How a parameter's dimensions mean rows and columns is its layout:

================  =======================  ==========================================
layout            parameter                example
================  =======================  ==========================================
matrix            (m, n), columns last     ``nn.Linear``
transposed        (n, m)                   GPT-2's ``Conv1D``
stack             (b, m, n)                experts of Mixtral, Qwen-MoE
stack_transposed  (b, n, m)                experts of gpt-oss, Llama 4
================  =======================  ==========================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import one_sparse
from .base import BufferSpec

LAYOUTS = ("matrix", "transposed", "stack", "stack_transposed")


def as_columns(p: Tensor, layout: str) -> Tensor:
    """``p`` as a view (b, m, n) whose last dimension counts the columns. Raises ValueError where dimensions lack."""
    stacked = layout.startswith("stack")
    if p.dim() != (3 if stacked else 2):
        raise ValueError(f"layout={layout!r} needs {3 if stacked else 2} dimensions, got shape {tuple(p.shape)}.")
    view = p if stacked else p[None]
    return view.transpose(1, 2) if layout.endswith("transposed") else view


@dataclass(frozen=True)
class OneSparseHistory:
    """``values`` (columns, k) float8_e4m3fn, ``rows`` (columns, k) uint16 (int32 above 65536 rows), ``scale``
    (columns,) bf16. Columns of m <= k elements keep m - 1; for k = 0 there is no buffer.

    With the layouts ``transposed`` and ``stack_transposed`` a column is a row of the parameter (of each matrix).
    """

    k: int
    layout: str = "matrix"

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        b, m, n = self._dimensions(shape)
        k = min(self.k, m - 1)
        if k <= 0 or b * n == 0:
            return {}
        index = torch.uint16 if m <= 1 << 16 else torch.int32
        per_row = self.layout == "transposed"
        return {
            "values": BufferSpec((b * n, k), one_sparse.FP8, per_row=per_row),
            "rows": BufferSpec((b * n, k), index, per_row=per_row),
            "scale": BufferSpec((b * n,), torch.bfloat16, per_row=per_row),
        }

    def encode(self, moment: Tensor) -> dict[str, Tensor]:
        """The k largest entries of every column of ``moment``; the others are dropped."""
        specs = self.specs(moment.shape)
        if not specs:
            return {}
        columns = as_columns(moment.float(), self.layout).transpose(1, 2).flatten(0, 1)
        rows = columns.abs().topk(specs["values"].shape[1], dim=1).indices
        values, scale = one_sparse.encode(columns.gather(1, rows))
        return {"values": values, "rows": rows.to(specs["rows"].dtype), "scale": scale}

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size) -> Tensor:
        b, m, n = self._dimensions(shape)
        device = next(iter(buffers.values())).device if buffers else None
        columns = torch.zeros(b * n, m, device=device)
        if buffers:
            values = buffers["values"].float() * buffers["scale"].float()[:, None]
            columns.scatter_add_(1, buffers["rows"].to(torch.int64), values)
        moment = torch.zeros(shape, device=device)
        as_columns(moment, self.layout).copy_(columns.view(b, n, m).transpose(1, 2))
        return moment

    def _dimensions(self, shape: torch.Size) -> tuple[int, int, int]:
        return tuple(as_columns(torch.empty(shape, device="meta"), self.layout).shape)
