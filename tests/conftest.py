"""What every test starts from: one seed, one thread, and uninitialised memory that is never zero by luck.

``torch.empty`` mostly returns fresh zero pages, so code that forgets to write a buffer passes its tests and fails in a
long training. While a function of ``hf_memopt`` asks for uninitialised memory, it gets NaN (floating dtypes) or a value
that no code or counter has (integers).
"""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from hf_memopt import kernels

CPU_KERNELS = ("reference", "compiled")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Of the session, so that fixtures of whole modules have it too: threads that wait for busy cores cost minutes."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _garbage_in_uninitialised_memory(monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _spoiled(getattr(owner, name)))


def _spoiled(make):
    def spoiled(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("hf_memopt") and not tensor.is_meta:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 111)
        return tensor

    return spoiled


@pytest.fixture(params=CPU_KERNELS)
def kernel(request) -> str:
    """Every kernel that can run on this machine's CPU. Triton's kernel has tests of its own."""
    require_kernel(request.param)
    return request.param


def require_kernel(name: str) -> None:
    """Skip the test, with the reason, where the kernel cannot be used."""
    why_not = unusable(name)
    if why_not:
        pytest.skip(why_not)


def fastest_kernel() -> str:
    """For tests in which the kernel does not matter: all give the same numbers."""
    return next(name for name in reversed(CPU_KERNELS) if not unusable(name))


def unusable(name: str) -> str:
    if importlib.util.find_spec(f"hf_memopt.kernels.{name}") is None:
        return f"hf_memopt has no {name} kernel"
    try:
        kernels.select(name, "cpu")
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def _bitsandbytes_forgets():
    """The Trainer registers 32 bits for embeddings with bitsandbytes, which keeps that by the place in the groups for
    every optimizer that the process makes later."""
    yield
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is not None:
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
