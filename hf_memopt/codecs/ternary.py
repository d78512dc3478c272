"""Moments as ternary codes.

First moment: blocks of 160 elements of a row, each element -s, 0 or +s, with one bf16 scale s a block: 1.6 + 0.1 bits
an element. Kept are the elements above 0.7 of the block's mean magnitude, s is the mean of what is kept: for a Gaussian
block within a few percent of the best ternary quantiser. What the code cannot hold is not lost: the step applies
it to the weight (``optim/taco_adamw.py``).

Second moment: v_ij = (R_i C_j / mean R) 4^d_ij. The factors R and C (running row and column means of the squared
gradient, fp32) follow every change exactly and give the range; the code d in {-1, 0, +1}, 1.6 bits an element, says
where the product is off by a factor of 4. d is rounded stochastically: a second moment moves by a thousandth a step,
far less than half a level, so nearest rounding would freeze it.

Bits a parameter, n x k: 3.3 + 32 (n + k) / (n k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import reference, trits
from .base import BufferSpec, fresh, matrix_shape


class TernaryFirstMoment:
    """``codes`` (n, bytes) uint8 and ``scale`` (n, blocks) bf16."""

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        n, k = matrix_shape(shape)
        return {
            "codes": BufferSpec((n, trits.row_bytes(k)), torch.uint8, fill=trits.ZERO_BYTE),
            "scale": BufferSpec((n, trits.block_count(k)), torch.bfloat16),
        }

    def encode(self, moment: Tensor) -> dict[str, Tensor]:
        """Nearest codes; the remainder ``moment - decode(encode(moment))`` is dropped here."""
        if moment.numel() == 0:
            return fresh(self, moment.shape, moment.device)
        n, k = matrix_shape(moment.shape)
        m = moment.to(torch.float32).reshape(n, k)
        full = k - k % trits.BLOCK
        codes, scales = [], []
        for part, width in ((m[:, :full], trits.BLOCK), (m[:, full:], k - full)):
            if part.shape[1] == 0:
                continue
            plane = -(-width // trits.PLANES)
            blocks = part.shape[1] // width
            padded = torch.nn.functional.pad(part.reshape(n, blocks, width), (0, plane * trits.PLANES - width))
            c, s = reference.ternarize(padded.reshape(n, blocks, trits.PLANES, plane), width)
            codes.append(trits.pack(c).reshape(n, -1))
            scales.append(s)
        return {"codes": torch.cat(codes, dim=1), "scale": torch.cat(scales, dim=1)}

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size) -> Tensor:
        _, k = matrix_shape(shape)
        scale = buffers["scale"].float().repeat_interleave(trits.BLOCK, dim=1)[:, :k]
        return (trits.unpack_rows(buffers["codes"], k) * scale).view(shape)

    def take_rows(self, buffers: dict[str, Tensor], rows: Tensor, seen: Tensor) -> dict[str, Tensor]:
        """The moment whose row i is row ``rows[i]`` of this one where ``seen[i]``, else zero; nothing is decoded."""
        codes, scale = (buffers[key].index_select(0, rows) for key in ("codes", "scale"))
        unseen = ~seen[:, None]
        return {"codes": codes.masked_fill_(unseen, trits.ZERO_BYTE), "scale": scale.masked_fill_(unseen, 0.0)}


class TernarySecondMoment:
    """``codes`` (n, bytes) uint8, ``row`` (n,) fp32 and ``col`` (k,) fp32."""

    def specs(self, shape: torch.Size) -> dict[str, BufferSpec]:
        n, k = matrix_shape(shape)
        return {
            "codes": BufferSpec((n, trits.row_bytes(k)), torch.uint8, fill=trits.ZERO_BYTE),
            "row": BufferSpec((n,), torch.float32),
            "col": BufferSpec((k,), torch.float32, per_row=False),
        }

    def encode(self, moment: Tensor, uniform: Tensor | None = None) -> dict[str, Tensor]:
        """Factors are the exact means; codes are rounded with ``uniform`` (n, k) in (0, 1), or to the nearest."""
        if moment.numel() == 0:
            return fresh(self, moment.shape, moment.device)
        n, k = matrix_shape(moment.shape)
        v = moment.to(torch.float32).reshape(n, k)
        row = v.double().mean(dim=1).float() + reference.TINY
        col = v.double().mean(dim=0).float() + reference.TINY
        base = (row / row.double().mean().float())[:, None] * col
        u = torch.full((), 0.5, device=v.device) if uniform is None else uniform
        codes = reference.round_exponent(v / base, u)
        return {"codes": trits.pack_rows(codes), "row": row, "col": col}

    def decode(self, buffers: dict[str, Tensor], shape: torch.Size) -> Tensor:
        _, k = matrix_shape(shape)
        row, col = buffers["row"], buffers["col"]
        mean = row.double().mean().float()
        base = torch.where(mean > 0, row / mean, 0.0)[:, None] * col
        return (base * torch.exp2(2.0 * trits.unpack_rows(buffers["codes"], k).float())).view(shape)

    def take_rows(self, buffers: dict[str, Tensor], rows: Tensor, seen: Tensor) -> dict[str, Tensor]:
        """The moment whose row i is row ``rows[i]`` of this one where ``seen[i]``, else the columns' factors, which are
        the mean of all rows but for what the codes correct. The other rows keep their values within rounding: the mean
        of the row factors changes with the rows, and the column factors make up for it."""
        mean = buffers["row"].double().mean()
        row = torch.where(seen, buffers["row"].index_select(0, rows), mean.float())
        col = buffers["col"] * torch.where(mean > 0, row.double().mean() / mean, 1.0).float()
        codes = buffers["codes"].index_select(0, rows).masked_fill_(~seen[:, None], trits.ZERO_BYTE)
        return {"codes": codes, "row": row, "col": col}
