"""The Triton kernels compile for GPUs that are not here: no spills, no contracted or flushed operations."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import compile_kernels  # noqa: E402
from hf_memopt.kernels import triton as backend  # noqa: E402


def check(kernel):
    assert kernel["spills"] == 0 and kernel["stack_bytes"] == 0, kernel
    assert not any(kernel["forbidden"].values()), kernel
    assert kernel["shared_bytes"] <= 48 * 1024, kernel
    if kernel["kernel"].startswith(("ternary_update", "dense_update")):
        assert all(kernel["rounded"].values()), kernel


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "benchmarks.compile_kernels", "--few", "--jobs", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["kernels"]


@pytest.mark.slow
def test_compiled_now(compiled):
    names = {kernel["kernel"].split("[")[0].split(" ")[0] for kernel in compiled}
    assert names == {"squared_sums", "ternary_factors", "ternary_update", "gradient_check", "dense_update"}
    for kernel in compiled:
        check(kernel)
    for kernel in compiled:
        wide = kernel["global_accesses"]
        if kernel["kernel"].startswith("ternary_update[full]"):
            assert wide["load 8"] >= 10 and wide["store 8"] == 5  # gradient and weights, five planes each
        if kernel["kernel"].startswith(("squared_sums", "gradient_check", "dense_update")):
            assert wide["load 16"]


@pytest.fixture(scope="module")
def record():
    return json.loads(compile_kernels.RECORD.read_text(encoding="utf8"))


def test_recorded_variants(record):
    """Every variant, compiled when the kernels were last changed."""
    digest = compile_kernels.kernel_digest()
    assert record["source"] == digest, "the kernels have changed: run python -m benchmarks.compile_kernels"
    variants = compile_kernels.variants(few=False)
    launched = {launch.label() for variant in variants for launch in compile_kernels.launches(variant)}
    for architecture in compile_kernels.ARCHITECTURES:
        names = {k["kernel"] for k in record["kernels"] if k["architecture"] == f"sm_{architecture}"}
        assert names == launched
    for kernel in record["kernels"]:
        check(kernel)


def test_page_shows_the_record(record):
    page = compile_kernels.DOCS.read_text(encoding="utf8")
    for name, content in compile_kernels.documentation(record).items():
        assert content in page, f"the block {name} is old: run python -m benchmarks.compile_kernels --docs"


def test_bytes_moved():
    """By hand for a matrix of whole blocks: 2 bytes of gradient twice, weights twice, 64 bytes of codes and a scale of
    two bytes a block, each read and written."""
    parts = backend.bytes_moved(4096, 2560, torch.bfloat16, torch.bfloat16)
    assert parts["gradient, pass 1"] + parts["gradient, pass 2"] + parts["weights"] == 8
    assert parts["codes"] == pytest.approx(2 * 64 / 160) and parts["scales"] == pytest.approx(2 * 2 / 160)
    assert parts["floor"] == pytest.approx(2 + 4 + 0.8 + 0.025, abs=0.01)
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k not in ("total", "floor")))


@pytest.mark.parametrize("shape", [(1, 1), (64, 256), (65, 257), (4096, 4096), (2**21, 33), (3, 2**24), (2**17, 2**15)])
def test_plan(shape):
    """Tiles cover the parameter; the temporaries stay as small as the module says; every index fits 32 bits."""
    plan = backend.Plan(*shape)
    n, k = shape
    assert plan.row_tiles * plan.rows_per_program >= n > (plan.row_tiles - 1) * plan.rows_per_program
    assert plan.col_tiles * backend.SUM_TILE[1] >= k > (plan.col_tiles - 1) * backend.SUM_TILE[1]
    assert plan.parts * plan.rows_per_part >= n and plan.parts <= backend.PARTS
    assert 8 * plan.partial_sums <= 0.16 * n * k + 8 * (n + k)
    assert n * -(-k // 160) // 8 < 2**31
