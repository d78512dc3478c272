"""The reference's fp32 operations must be the correctly rounded ones of IEEE 754, or no other kernel could equal it."""

import numpy as np
import pytest
import torch

from hf_memopt.kernels import reference


@pytest.mark.parametrize("exponent", [-126, -20, -1, 0, 1, 101])
def test_square_roots_are_correctly_rounded(exponent):
    """``torch.sqrt`` is not, on CPUs where it goes through MKL's vector library."""
    mantissas = torch.arange(0, 1 << 23, 7, dtype=torch.int32)
    x = (mantissas + ((exponent + 127) << 23)).view(torch.float32)
    assert np.array_equal(reference.sqrt(x).numpy(), np.sqrt(x.numpy()))


def test_quotients_are_correctly_rounded():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 1 << 20, generator=generator) + 1e-3
    assert np.array_equal((a / b).numpy(), a.numpy() / b.numpy())
    assert np.array_equal(torch.reciprocal(b).numpy(), np.float32(1) / b.numpy())
