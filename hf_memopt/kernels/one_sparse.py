r"""One step of ``taco``: at most one entry of each column of a matrix moves, by a fixed amount.

For a column with gradient g (m elements) and history h (at most k entries, the rest zero), with decay d:

    c  = d h + (1 - d) g
    i* = argmax |c|
    w[i*] = w[i*] - lr sign(c[i*])
    c[i*] = (1 - consume) c[i*]
    h  = the k largest of c, rounded to FP8

With consume = 1 the applied entry leaves the history. What was large and has not been applied yet stays and gets its
turn: a queue. Keeping the applied entry makes a column step on one row again and again (``docs/taco.md``).

FP8 is e4m3 with one bf16 scale a column, such that the largest kept entry is 448, the format's largest number: 3 bits
of mantissa, entries down to a 2^17th of the largest. Equal magnitudes: whichever ``torch.topk`` names first, the same
on every call. A column of zeros does not move.

Everything is plain torch on tiles of ``TILE`` elements and has no branch that depends on data, so it runs on any device
without waiting for it, and on fake tensors. Temporaries: about five tiles of fp32, 5 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .reference import hash_at, write_back
from .scalars import MAX_GRADIENT, StepScalars

TILE = 1 << 18  # elements worked on at once
GROUP = 32  # rows whose maximum is looked at first
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # below it a bf16 scale loses its digits


@dataclass(frozen=True)
class OneSparse:
    """What is constant over the run: ``decay`` d of the history, the share ``consume`` of the applied entry that leaves
    it, ``lr_scale`` between the step's lr and that of ``scalars``, and whether it is also multiplied by m / n."""

    decay: float
    consume: float
    lr_scale: float
    dimension_scale: bool = False


def one_sparse_(weight: Tensor, grad: Tensor, state: dict[str, Tensor], s: StepScalars, rule: OneSparse) -> Tensor:
    """Update ``weight`` and the history in place.

    Args:
        weight: (b, m, n), any strides: b matrices whose columns (the last dimension) are the input features.
        grad: (b, m, n), any floating dtype.
        state: ``history.values`` (b n, k) float8_e4m3fn, ``history.rows`` (b n, k) uint16 or int32,
            ``history.scale`` (b n,) bf16; none of them for k = 0.
        s: lr, weight decay, sign and random key of the step.
        rule: see ``OneSparse``.

    Returns:
        Bool tensor on the weight's device: False when the gradient holds NaN, Inf or a number whose square overflows;
        then nothing has changed.
    """
    b, m, n = weight.shape
    applied = _within_range(grad)
    lr = s.lr * rule.lr_scale * (m / n if rule.dimension_scale else 1.0)
    for matrix, cols, columns in _tiles(b, m, n):
        c = grad[matrix, :, cols].to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        c.mul_(-(1 - rule.decay) if s.maximize else 1 - rule.decay)
        history = {key.removeprefix("history."): state[key][columns] for key in state if key.startswith("history.")}
        k = history["values"].shape[1] if history else 0
        if k:
            rows = history["rows"].to(torch.int64).t()
            kept = (history["values"].float() * history["scale"].float()[:, None]).t()
            # the rows of a column differ, but for those that stand for nothing and add zero
            c.scatter_(0, rows, c.gather(0, rows) + kept * rule.decay)
        top, chosen = largest(c, k + 1)
        step = torch.where(applied, chosen[:, 0].sign() * lr, 0.0)
        _apply(weight[matrix, :, cols], top[:, 0], step, applied, s, matrix * m, cols)
        if k and rule.consume == 1.0:
            _remember(history, top[:, 1:], chosen[:, 1:], applied)
        elif k:
            chosen[:, 0] *= 1.0 - rule.consume
            kept = chosen.abs().topk(k, dim=1).indices
            _remember(history, top.gather(1, kept), chosen.gather(1, kept), applied)
    return applied


def largest(c: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows (int64) and values of the ``count`` entries of each column of ``c`` (m, n) with the largest magnitudes,
    largest first, each (n, count).

    Long columns are searched in two stages: the entries looked for lie in those ``count`` groups of rows that have the
    largest maxima, and reading a matrix along its rows is faster than sorting its columns.
    """
    m, n = c.shape
    if m % GROUP or m < 4 * GROUP * count:
        columns = c.t().contiguous()
        rows = columns.abs().topk(count, dim=1).indices
        return rows, columns.gather(1, rows)
    maxima = c.view(m // GROUP, GROUP, n).abs().amax(dim=1).t().contiguous()
    groups = maxima.topk(count, dim=1).indices
    rows = (groups[:, :, None] * GROUP + torch.arange(GROUP, device=c.device)).flatten(1)
    candidates = c.gather(0, rows.t()).t().contiguous()
    places = candidates.abs().topk(count, dim=1).indices
    return rows.gather(1, places), candidates.gather(1, places)


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes and bf16 scales of (columns, k) fp32 ``values``."""
    scale = (values.abs().amax(dim=1) / FP8_MAX).to(torch.bfloat16)
    usable = scale.float() >= SMALLEST_SCALE
    scale = torch.where(usable, scale, 0.0)
    # rounding the scale moves the largest entry to 450 at most, which rounds to 448
    codes = torch.where(usable[:, None], values / scale.float()[:, None], 0.0).to(FP8)
    return codes, scale


def _within_range(grad: Tensor) -> Tensor:
    """Whether every number of ``grad`` (b, m, n) is finite and has a finite square, as a bool tensor."""
    # aminmax copies what is not contiguous: whole matrices are read as they lie, anything else in tiles
    parts = [view for view in (grad, grad.transpose(1, 2)) if view.is_contiguous()][:1]
    if not parts:
        parts = (grad[matrix, :, cols].contiguous() for matrix, cols, _ in _tiles(*grad.shape))
    bounds = [torch.stack(torch.aminmax(part)).float() for part in parts]  # of a NaN: NaN
    return (torch.stack(bounds).abs() <= MAX_GRADIENT).all()


def _remember(history: dict[str, Tensor], rows: Tensor, values: Tensor, applied: Tensor) -> None:
    codes, scale = encode(values)
    # as integers: not every device selects among float8 or uint16
    for old, new, integers in (
        (history["values"], codes, torch.uint8),
        (history["rows"], rows.to(history["rows"].dtype), torch.int16 if history["rows"].itemsize == 2 else None),
        (history["scale"], scale, None),
    ):
        old, new = (old, new) if integers is None else (old.view(integers), new.view(integers))
        old.copy_(torch.where(applied, new, old))


def _apply(w: Tensor, row: Tensor, step: Tensor, applied: Tensor, s: StepScalars, first_row: int, cols: slice) -> None:
    """``w`` (m, columns): subtract ``step`` (columns,) at ``row``, after the weight decay."""
    col = torch.arange(cols.start, cols.stop, device=w.device)
    if s.decay == 1.0:
        place = row[None]
        old = w.gather(0, place)
        new = write_back(old.float() - step, w.dtype, s, lambda: hash_at(s.key, place + first_row, col))
        w.scatter_(0, place, torch.where(applied, new, old))
        return
    new = w.float() * s.decay
    new.scatter_(0, row[None], new.gather(0, row[None]) - step)
    rows = torch.arange(first_row, first_row + w.shape[0], device=w.device)[:, None]
    w.copy_(torch.where(applied, write_back(new, w.dtype, s, lambda: hash_at(s.key, rows, col)), w))


def _tiles(b: int, m: int, n: int) -> Iterator[tuple[int, slice, slice]]:
    """(matrix, its columns, the same columns counted over all matrices)."""
    width = max(1, TILE // m)
    for matrix in range(b):
        for begin in range(0, n, width):
            end = min(begin + width, n)
            yield matrix, slice(begin, end), slice(matrix * n + begin, matrix * n + end)
