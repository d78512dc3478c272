"""The reference works on tiles; where they end must not show in a single bit."""

from __future__ import annotations

import pytest
import torch

from hf_memopt import TacoAdamW
from hf_memopt.kernels import reference
from tests.cases import NON_DEFAULT, parameter, shape_cases, uneven_gradient
from tests.optim.common import state_equal


def trained(shape, dtype, treatment):
    p = parameter(*shape, dtype=dtype)
    optimizer = TacoAdamW([{"params": [p], "treatment": treatment}], kernel="reference", **NON_DEFAULT)
    for t in range(2):
        p.grad = uneven_gradient(*shape, seed=t, dtype=dtype)
        optimizer.step()
    return p.detach(), optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    "treatment, dtype", [("ternary", torch.float32), ("ternary", torch.float16), ("dense", torch.bfloat16)]
)
@pytest.mark.parametrize(**shape_cases())
def test_result_is_independent_of_the_tiles(shape, dtype, treatment, monkeypatch):
    whole = trained(shape, dtype, treatment)
    for tile in (7 * 160 + 1, 25 * 160):
        monkeypatch.setattr(reference, "TILE", tile)
        assert state_equal(trained(shape, dtype, treatment), whole), tile


@pytest.mark.parametrize("n, k", [(1, 1), (1, 5000), (5, 160), (7, 161), (3, 159), (1000, 3), (4, 4000)])
@pytest.mark.parametrize("tile", [160, 1000, 1 << 18])
def test_tiles_cover_every_element_once(n, k, tile, monkeypatch):
    monkeypatch.setattr(reference, "TILE", tile)
    seen = torch.zeros(n, k, dtype=torch.int32)
    for cols, width in reference._column_strips(k):
        assert cols.start % 160 == 0 and (width == 160) == ((cols.stop - cols.start) % 160 == 0)
        for rows in reference._row_strips(n, cols):
            seen[rows, cols] += 1
            assert seen[rows, cols].numel() <= max(tile, 160)
    assert bool((seen == 1).all())
