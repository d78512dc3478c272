r"""What becomes of the moments when the basis changes.

The momentum is a vector in the old subspace, the new one holds its projection: with C = P_new^T P_old (r x r)

    m <- C m

The second moment is elementwise, so it does not follow a rotation by itself. LDAdam's estimate takes the coordinates'
variances for uncorrelated. It gives a direction that the old basis did not hold no second moment, and its first steps
would be several times too long, since the bias correction is that of an old moment; such a direction, by the share that
is new, is given the mean of the old ones. On bias-corrected moments, o elementwise,

    v <- | (C o C)(v - m o m) + (C m) o (C m) | + (1 - sum_k C_ik^2) mean_k v_k

What the new subspace cannot hold of the momentum, m - C^T C m in old coordinates, is lost with it. ``none`` keeps the
numbers and lets them mean the new basis, as the paper does.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 1 << 17  # elements of a moment worked on at once


def transport(m: Tensor, v: Tensor, change: Tensor, bias1: float, bias2: float) -> tuple[Tensor, Tensor]:
    """Moments after a change of basis.

    Args:
        m, v: (b, r, L) fp32, first and second moment in the old basis, not bias-corrected.
        change: (b, r, r), C.
        bias1, bias2: 1 - beta^t of the step that wrote them.
    """
    squares, moved = change * change, [m.new_empty(len(m), change.shape[1], m.shape[2]) for _ in range(2)]
    unseen = (1.0 - squares.sum(dim=2, keepdim=True)).clamp(min=0.0)
    width = max(1, PIECE // (m.shape[0] * m.shape[1]))
    # every column for itself, so that temporaries are a few columns
    for old_m, old_v, new_m, new_v in zip(*(x.split(width, dim=2) for x in (m, v, *moved)), strict=True):
        m_hat, v_hat = old_m / bias1, old_v / bias2
        turned = change @ m_hat
        level = (squares @ (v_hat - m_hat * m_hat) + turned * turned).abs_()
        level += unseen * v_hat.mean(dim=1, keepdim=True)
        new_m.copy_(turned.mul_(bias1))
        new_v.copy_(level.mul_(bias2))
    return tuple(moved)


def transport_coordinates(m: Tensor, v: Tensor, new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """``transport`` where both bases consist of coordinates, (b, r) int64, rising: what remains keeps its moments."""
    place, seen = _places(new, old)
    # row by row, which is a copy: a gather of elements with a choice for each takes five times as long
    rows = (place + torch.arange(len(place), device=place.device)[:, None] * place.shape[1]).flatten()
    new_m, new_v = (moment.flatten(0, 1).index_select(0, rows).view_as(moment) for moment in (m, v))
    unseen = ~seen[:, :, None]
    return new_m.masked_fill_(unseen, 0.0), torch.where(unseen, v.mean(dim=1, keepdim=True), new_v)


def overlap(new: Tensor, old: Tensor, low_grad: Tensor) -> Tensor:
    """How much of what the new subspace sees of the gradient the old one saw too, (b,), from 0 to 1.

    ||C^T R||^2 / ||R||^2 for R = P_new^T G, ``low_grad`` (b, r, L): each direction counts by the gradient's energy in
    it, and turning either basis changes nothing. Where all directions have the same energy it is ||C||^2 / r. Without
    the weights the directions that fill up the subspace of a gradient of lower rank would count like the rest, and
    they are others every time. 1 where the gradient is zero.
    """
    smallest, largest = torch.aminmax(low_grad.flatten(1), dim=1)
    peak = torch.maximum(-smallest, largest)
    scaled = low_grad / torch.where(peak > 0, peak, 1.0)[:, None, None]  # squares neither overflow nor vanish
    if new.is_floating_point():
        held = (change_of_basis(new, old).mT @ scaled).square().sum(dim=(1, 2))
    else:
        held = (scaled.square().sum(dim=2) * _places(new, old)[1]).sum(dim=1)
    return torch.where(peak > 0, held / scaled.square().sum(dim=(1, 2)), 1.0)


def change_of_basis(new: Tensor, old: Tensor) -> Tensor:
    """C = P_new^T P_old, (b, r, r) fp32, of two bases (b, d, r)."""
    return new.float().mT @ old.float()


def _places(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of the coordinates ``new`` is among ``old``, and whether it is there at all."""
    place = torch.searchsorted(old, new).clamp_(max=old.shape[1] - 1)
    return place, old.gather(1, place) == new
