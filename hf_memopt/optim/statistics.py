"""How the codes behave, measured on a sample of a step.

Of every ternary parameter at most 65536 elements are looked at: rows evenly spread, and of a longer row its first
blocks. So a sampled step costs little more than any other. Parameters whose step is skipped are left out.

- ``zero_share``: elements whose first-moment code is 0 (about 0.43 for a Gaussian block);
- ``changed_share``: elements whose first-moment code differs from the one before the step. Near 0, the momentum would
  be stale;
- ``carried_energy``: sum (m - q')^2 / sum m^2, the part of the first moment that the code cannot hold and the carry
  moves into the weight (0.19 for a Gaussian block).

The result is the mean over parameters, weighted by their size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import trits
from ..kernels.scalars import StepScalars

SAMPLE_ELEMENTS = 1 << 16


class CodeStatistics:
    """Collects one step: ``before`` and ``after`` around each parameter's update, then ``result``."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._weight = 0

    def before(self, grad: Tensor, state: dict[str, Tensor], s: StepScalars) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled rows, their codes, and the first moment (fp32) that the coming update will form there."""
        n, k = grad.shape
        cols = min(k, SAMPLE_ELEMENTS // trits.BLOCK * trits.BLOCK)
        rows = sampled_rows(n, cols, grad.device)
        codes, q = _decode(state, rows, cols)
        g = grad[rows, :cols].float()
        return rows, codes, q * s.beta1 + (-g if s.maximize else g) * s.one_minus_beta1

    def after(self, sample: tuple[Tensor, Tensor, Tensor], state: dict[str, Tensor], weight: int) -> None:
        """Compare with the state after the update; ``weight`` is the parameter's size."""
        rows, old_codes, m = sample
        codes, q = _decode(state, rows, m.shape[1])
        energy = m.double().square().sum()
        carried = (m - q).double().square().sum() / energy if energy > 0 else torch.zeros(())
        shares = (codes == 0).double().mean(), (codes != old_codes).double().mean(), carried
        self._sums += weight * torch.tensor([float(x) for x in shares], dtype=torch.float64)
        self._weight += weight

    def result(self) -> dict[str, float]:
        """The shares; empty when no ternary parameter was updated."""
        if not self._weight:
            return {}
        means = (self._sums / self._weight).tolist()
        return dict(zip(("zero_share", "changed_share", "carried_energy"), means, strict=True))


def sampled_rows(n: int, cols: int, device: torch.device) -> Tensor:
    """Indices of ``SAMPLE_ELEMENTS // cols`` of ``n`` rows (at least one, at most all), spread evenly."""
    count = max(1, min(n, SAMPLE_ELEMENTS // cols))
    return (2 * torch.arange(count, device=device) + 1) * n // (2 * count)


def _decode(state: dict[str, Tensor], rows: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """First-moment codes and values of the first ``cols`` columns, which are all or whole blocks."""
    codes = trits.unpack_rows(state["exp_avg.codes"][rows, : trits.row_bytes(cols)], cols)
    scale = state["exp_avg.scale"][rows, : trits.block_count(cols)].float()
    return codes, codes * scale.repeat_interleave(trits.BLOCK, dim=1)[:, :cols]
