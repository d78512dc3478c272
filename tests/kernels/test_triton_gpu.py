"""The cases of the interpreter on a real GPU: compiled code must give the same bits."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import triton_cases  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, "-m", triton_cases.__name__, "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_equals_reference(results, name):
    assert not results[name], results[name]
