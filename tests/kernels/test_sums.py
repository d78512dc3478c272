"""Sums of squares against double precision, whatever the layout; huge numbers too."""

from __future__ import annotations

import pytest
import torch

from hf_memopt.kernels import sums
from tests.cases import dtype_cases, randn
from tests.tolerances import E


@pytest.mark.parametrize("piece", [64, 1 << 16])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(**dtype_cases())
def test_sums_of_squares(dtype, dim, piece, monkeypatch):
    monkeypatch.setattr(sums, "PIECE", piece)
    for shape in ((1, 40, 70), (3, 9, 17), (2, 300, 5), (2, 1, 400), (1, 400, 1), (0, 3, 4)):
        x = randn(*shape, seed=1, dtype=dtype)
        expected = x.double().square().sum(dim=dim)
        for layout in (x, x.mT.contiguous().mT, torch.cat([x, x], dim=2)[:, :, : shape[2]]):
            before = layout.clone()
            found = sums.sums_of_squares(layout, dim)
            assert found.dtype == torch.float64 and torch.equal(layout, before)
            terms = min(shape[dim], max(128, piece))
            torch.testing.assert_close(found, expected, rtol=(terms + 1) * E, atol=0)


@pytest.mark.parametrize("dim", [1, 2])
def test_sums_that_single_precision_cannot_hold(dim):
    x = torch.full((1, 50, 60), 1.7e19)
    expected = x.double().square().sum(dim=dim)
    torch.testing.assert_close(sums.sums_of_squares(x, dim), expected, rtol=4 * E, atol=0)
    x[0, 3, 4] = torch.nan
    assert sums.sums_of_squares(x, dim).isnan().sum() == 1
