"""Real runs whose optimizer allocates what it allocates on a GPU."""

from __future__ import annotations

import pytest

from hf_memopt import kernels
from hf_memopt.optim.answers import Answers


@pytest.fixture
def launches_left_out(monkeypatch):
    """The Triton kernels' allocations on the CPU, their launches left out: the CPU's own kernels have temporaries of
    other sizes. Without a launch there is no answer to read either, a byte a parameter, which a simulation does not
    keep."""
    pytest.importorskip("triton")
    from hf_memopt.kernels import triton, triton_kernels

    class Launched:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    for name in ("squared_sums", "ternary_factors", "ternary_update", "gradient_check", "dense_update"):
        monkeypatch.setattr(triton_kernels, name, Launched())
    chosen = kernels.select

    def select(kernel, device):
        name, backend = chosen(kernel, device)
        return (name, backend) if name == "simulated" else ("triton", triton)

    def applied(self, state, answer):
        state["step"] += 1

    monkeypatch.setattr(kernels, "select", select)
    monkeypatch.setattr(Answers, "add", applied)
