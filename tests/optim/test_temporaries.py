"""A step needs no memory of the parameter's size: its temporaries stay below 64 MB whatever the shape.

Measured on the process, in a fresh one: the peak of its resident memory while a step runs, less what it held before and
less the state that the step creates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt import TacoAdamW
from tests.cases import parameter, randn

LIMIT = 64 * 2**20
SHAPES = {"square": (4096, 4096), "long row": (1, 4_000_000), "long column": (300_000, 1), "vector": (4_000_000,)}

MEASURE = """
import json, re, sys
import torch
from hf_memopt import Taco, TacoAdamW

torch.set_num_threads(1)

def resident(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def temporaries(shape, dtype, statistics):
    p = torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
    if len(shape) == 4:  # strides of which no matrix is a view
        p = torch.nn.Parameter(p.data.to(memory_format=torch.channels_last))
    p.grad = torch.ones_like(p)
    optimizer = TacoAdamW([p], kernel=sys.argv[1])
    if statistics:
        optimizer.request_statistics()
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    optimizer.step()
    return resident("VmHWM") - before - optimizer.memory_report().state_bytes

def one_sparse(shape, dtype, layout):
    p = torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
    p.grad = torch.ones_like(p)
    optimizer = Taco([{"params": [p], "treatment": "one_sparse", "layout": layout}])
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    optimizer.step()
    return resident("VmHWM") - before - optimizer.memory_report().state_bytes

def norm_in_backward(shape, dtype):
    p = torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
    optimizer = TacoAdamW([p], update_in_backward=True, clip_per_parameter=1.0)
    p.grad = torch.ones_like(p)
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    optimizer.step()
    return resident("VmHWM") - before - optimizer.memory_report().state_bytes

one_sparse((512, 512), "float32", "matrix"), norm_in_backward((64, 64), "bfloat16")
temporaries((64, 64), "float32", True), temporaries((64,), "float32", True)  # what the first call of everything costs
found = [temporaries(*case) for case in json.loads(sys.argv[2])]
for layout in ("matrix", "transposed"):
    found += [one_sparse((4096, 6144), dtype, layout) for dtype in ("float32", "bfloat16")]
found += [norm_in_backward((4096, 12288), "bfloat16")]
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resets the peak of resident memory through /proc")
def test_peak_of_the_process(kernel):
    cases = [(shape, "float32", False) for shape in SHAPES.values()]
    cases += [
        (SHAPES["long row"], "float32", True),
        (SHAPES["long column"], "float32", True),
        (SHAPES["square"], "bfloat16", False),
        ((4096, 512, 3, 3), "float32", False),
        ((8, 300_000, 2, 2), "float32", True),
    ]
    command = [sys.executable, "-c", MEASURE, kernel, json.dumps(cases)]
    at_once = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # freed blocks go back at once and serve no later case unseen
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=at_once)
    more = [f"taco {layout} {dtype}" for layout in ("matrix", "transposed") for dtype in ("float32", "bfloat16")]
    names = [*map(str, cases), *more, "norm of a 16-bit gradient in backward"]
    peaks = dict(zip(names, json.loads(done.stdout), strict=True))
    assert all(peak < LIMIT for peak in peaks.values()), peaks


class LiveStorages(TorchDispatchMode):
    """Peak of the bytes that tensors made inside hold together."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_tensors_of_the_reference(shape):
    p = parameter(*shape)
    optimizer = TacoAdamW([p], kernel="reference")
    p.grad = randn(*shape, seed=1)
    with LiveStorages() as live:
        optimizer.step()
    assert live.peak - optimizer.memory_report().state_bytes < LIMIT
