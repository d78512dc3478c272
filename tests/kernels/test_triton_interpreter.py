"""The Triton kernels equal the reference bit for bit: weights and every state buffer, run by Triton's interpreter on
the CPU.

What the interpreter cannot show, and a GPU must (``benchmarks/gpu.py``): that the machine code rounds as the
interpreter does.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.kernels import triton_cases  # noqa: E402


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", triton_cases.__name__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_equals_reference(results, name):
    assert not results[name], results[name]
