"""The counted state of Llama 2 7B: the result file is what the code gives, and the layouts of others are theirs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks import galore_state
from hf_memopt.projections.geometry import subspace

RESULT = json.loads(galore_state.PATH.read_text(encoding="utf8"))


@pytest.fixture(scope="module")
def found():
    """The rows at the paper's rank, counted anew."""
    return galore_state.rows(galore_state.llama(), [galore_state.PAPER["rank"]])


def test_the_result_is_what_the_code_gives(found):
    kept = [row for row in RESULT["rows"] if row["rank"] in (None, galore_state.PAPER["rank"])]
    assert kept == found
    assert {row["rank"] for row in RESULT["rows"]} == {None, *galore_state.RANKS}
    assert (RESULT["config"], RESULT["paper"]) == (galore_state.LLAMA_2_7B, galore_state.PAPER)


def test_the_headline(found):
    by_name = {row["optimizer"]: row for row in found}
    for refresh in ("subspace", "select", "random"):
        row = by_name[f"galore_taco_adamw, {refresh}"]
        assert row["less_than_8bit_adam"] >= galore_state.PAPER["less_than_8bit_adam"]
        assert row["less_than_bf16_adam"] >= galore_state.PAPER["less_than_bf16_adam"]
        assert row["state_bytes"] < by_name["8-bit GaLore"]["state_bytes"]
        if refresh != "subspace":  # rank 1024 is a quarter of the smaller dimension of every matrix
            assert row["bits_per_projected_parameter"] <= 1
        ours = by_name[f"memopt_galore_adamw, {refresh}"]
        assert ours["state_bytes"] < by_name["galore-torch fp32"]["state_bytes"]


def test_a_quarter_is_the_papers_rank(found):
    quarter = [row for row in RESULT["rows"] if row["rank"] == 0.25]
    whole = [row for row in found if row["rank"] is not None]
    assert [row["state_bytes"] for row in quarter] == [row["state_bytes"] for row in whole]


@pytest.mark.parametrize(("name", "refresh"), galore_state.OURS)
def test_buffers_on_the_meta_device_are_those_of_a_training(name, refresh):
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    model = galore_state.llama(**small, num_attention_heads=4)
    counted = galore_state.our_state(model, name, 16, refresh)
    real = model.to_empty(device="cpu").float()
    for p in real.parameters():
        p.data.normal_()
        p.grad = torch.randn_like(p)
    optimizer = galore_state.our_optimizer(real, name, 16, refresh)
    optimizer.step()
    assert optimizer.memory_report().measured
    assert optimizer.memory_report().state_bytes == sum(counted)


@pytest.mark.parametrize("shape", [(64, 64), (63, 65), (80, 120), (1000,), (4096,)], ids=str)
def test_the_layout_of_bitsandbytes(shape):
    bnb = pytest.importorskip("bitsandbytes")
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.ones(shape)
    optimizer = bnb.optim.AdamW8bit([p])
    optimizer.init_state(optimizer.param_groups[0], p, 0, 0)
    state = optimizer.state[p]
    held = [v for k, v in state.items() if torch.is_tensor(v) and not k.startswith("qmap")]
    assert sum(t.numel() * t.itemsize for t in held) == galore_state.adam_8bit(p.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (64, 64)], ids=str)
def test_the_layout_of_galore_torch(shape, dtype):
    galore_torch = pytest.importorskip("galore_torch")
    p = nn.Parameter(torch.ones(shape, dtype=dtype))
    p.grad = torch.randn(shape).to(dtype)
    group = {"params": [p], "rank": 16, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    optimizer = galore_torch.GaLoreAdamW([group], lr=1e-3)
    optimizer.step()
    state = optimizer.state[p]
    held = [state["exp_avg"], state["exp_avg_sq"], state["projector"].ortho_matrix]
    _, layout = galore_state.THEIRS["galore-torch fp32" if dtype == torch.float32 else "galore-torch bf16"]
    assert sum(t.numel() * t.itemsize for t in held) == layout(subspace(shape, 16))
