"""Where the Triton kernels cannot run, the choice of a kernel says so in one sentence."""

import sys

import pytest
import torch

from hf_memopt import kernels
from hf_memopt.kernels import triton as backend


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert backend.available() == (False, "triton is not installed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu():
    pytest.importorskip("triton")
    usable, why = backend.available()
    assert not usable and why
    with pytest.raises(ValueError, match=f"kernel='triton' is not usable here .{why}"):
        kernels.select("triton", "cuda")


def test_not_for_the_cpu():
    with pytest.raises(ValueError, match="set kernel=auto"):
        kernels.select("triton", "cpu")
