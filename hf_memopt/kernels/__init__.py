"""Choosing a kernel: ``select(kernel, device)`` gives the module that does the update.

============  ==========================================================  =======================
name          what it is                                                  devices
============  ==========================================================  =======================
reference     plain torch on tiles, the definition of the numbers         any with float64
compiled      one pass in C, built at first use by the system's compiler  CPU
triton        one fused kernel                                            CUDA
inductor      the reference's arithmetic through ``torch.compile``        CPU; CUDA, untested
auto          triton on CUDA, compiled on the CPU, else reference
============  ==========================================================  =======================

All give the same weights and the same state, bit for bit (``README.md``), so the choice is about speed alone and a
checkpoint does not remember it. ``inductor`` is for machines on which the fast kernel of the device cannot be built; it
has to be asked for, since its first step takes seconds to compile. The memory simulation has a backend of its own,
which ``simulating`` switches on.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from types import ModuleType

KERNELS = ("auto", "reference", "compiled", "triton", "inductor")

_DEVICES = {"compiled": ("cpu",), "triton": ("cuda",), "inductor": ("cpu", "cuda")}
_FASTEST = {"cpu": "compiled", "cuda": "triton"}
_logger = logging.getLogger("hf_memopt")
_told: set[str] = set()
_simulations = 0


@contextlib.contextmanager
def simulating() -> Iterator[None]:
    """Within this context every choice is the backend for fake tensors, which refuses real ones (``simulated.py``)."""
    global _simulations
    _simulations += 1
    try:
        yield
    finally:
        _simulations -= 1


def select(kernel: str, device_type: str) -> tuple[str, ModuleType]:
    """The name and module of the backend for parameters on ``device_type``.

    Raises:
        ValueError: the kernel is unknown or does not work on this device or machine; the sentence says why.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is not a kernel: choose one of {', '.join(KERNELS)}.")
    if _simulations:
        return "simulated", _backend("simulated")
    if kernel == "reference":
        return kernel, _backend(kernel)
    if kernel == "auto":
        fast = _FASTEST.get(device_type)
        if fast is None:
            return "reference", _backend("reference")
        usable, why = _backend(fast).available()
        if usable:
            return fast, _backend(fast)
        if why not in _told:
            _told.add(why)
            _logger.warning(
                "The %s kernel is not usable (%s): the slower reference kernel is used, with the same results.",
                fast,
                why,
            )
        return "reference", _backend("reference")
    if device_type not in _DEVICES[kernel]:
        devices = " and ".join(_DEVICES[kernel])
        raise ValueError(
            f"kernel={kernel!r} works on {devices} parameters, but a parameter is on {device_type}: set kernel=auto."
        )
    usable, why = _backend(kernel).available()
    if not usable:
        raise ValueError(f"kernel={kernel!r} is not usable here ({why}): set kernel=auto or kernel=reference.")
    return kernel, _backend(kernel)


def _backend(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __name__)
