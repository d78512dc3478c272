"""The highest memory use so far: of a GPU's allocator, or of the process on the CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch


def peak_bytes(device: torch.device | str) -> int:
    """Bytes at the peak since the process started (on a GPU: since the last reset of its statistics).

    A GPU counts what its allocator gave out, on this device. The CPU has no such count: there it is the largest
    resident set of the process, code and data of everything loaded included.
    """
    device = torch.device(device)
    backend = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(backend, "max_memory_allocated"):
        return backend.max_memory_allocated(device)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    if sys.platform == "linux":
        # not getrusage: across fork and exec it keeps the parent's peak
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
