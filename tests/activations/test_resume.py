"""Training goes on from an optimizer's state bit for bit: every projection, every kind of moments."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from hf_memopt import CompActAdamW, CompActConfig, compress_activations
from hf_memopt.activations.compression import STATE_KEY
from tests.activations.compressed import KINDS, blocks, sgd, step
from tests.activations.test_compression import train
from tests.activations.zoo import batch, build

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW([p for _, p in params], lr=3e-3, weight_decay=0.1),
    "fp32": lambda params: CompActAdamW(params, lr=3e-3, weight_decay=0.1),
    "ternary": lambda params: CompActAdamW(params, lr=3e-3, weight_decay=0.1, state="ternary"),
}


def make(name, dtype, projection, **config):
    model = build("llama", dtype)
    config = {"rank": 0.5, "projection": projection, "update_proj_gap": 3, "seed": 3, **config}
    compression = compress_activations(model, CompActConfig(**config))
    optimizer = OPTIMIZERS[name]([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    return model, compression, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("projection", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_is_bit_equal(name, projection, dtype, tmp_path):
    """Saved after the fourth of eight steps; refreshes lie before and after."""
    model, compression, optimizer = make(name, dtype, projection)
    train(model, optimizer, batch("llama"), 4)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    straight = train(model, optimizer, batch("llama"), 4)

    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    other, again, fresh = make(name, dtype, projection)
    other.load_state_dict(weights)
    fresh.load_state_dict(state)
    if name == "AdamW":
        again.resume(fresh)
    assert again.steps == 4 and {basis.epoch for basis in again.bases()} == {2 if projection == "principal" else 1}
    assert straight == train(other, fresh, batch("llama"), 4)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert [b.name for b in again.bases()] == [b.name for b in compression.bases()]
    for one, two in zip(compression.bases(), again.bases(), strict=True):
        assert one.epoch == two.epoch and (one.top is None) == (two.top is None)
        assert one.top is None or torch.equal(one.top, two.top)


def test_the_state_is_small_plain_and_in_one_group():
    model, compression, optimizer = make("AdamW", torch.float32, "principal")
    train(model, optimizer, batch("llama"), 2)
    state = optimizer.state_dict()["param_groups"][0][STATE_KEY]
    assert state["steps"] == 2 and state["options"]["projection"] == "principal"
    assert state["shared"]["model.layers.0.self_attn.v_proj"] == "model.layers.0.self_attn.q_proj"
    assert all(t.dtype == torch.int32 for t in state["top"].values()) and len(state["top"]) == 6
    assert all(key in ("steps", "options", "ranks", "shared", "epochs", "top") for key in state)


def test_who_forgets_to_resume_is_told():
    model, _, optimizer = make("AdamW", torch.float32, "principal")
    train(model, optimizer, batch("llama"), 2)
    other, _, fresh = make("AdamW", torch.float32, "principal")
    fresh.load_state_dict(optimizer.state_dict())
    with pytest.raises(
        RuntimeError, match=r"state is of step 2 and the compressed layers are at 0: call compression\.resume"
    ):
        train(other, fresh, batch("llama"), 1)


def test_resuming_without_a_state_changes_nothing():
    _, ours, compression = blocks()
    compression.resume(sgd(ours))
    assert compression.steps == 0
    step(ours, sgd(ours))
    assert compression.steps == 1


def test_a_checkpoints_options_are_kept_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_memopt"), "propagate", True)
    model, compression, optimizer = make("fp32", torch.float32, "gaussian")
    train(model, optimizer, batch("llama"), 4)
    other, again, fresh = make("fp32", torch.float32, "principal", update_proj_gap=50, seed=9)
    other.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    text = "written with projection=gaussian, update_proj_gap=3, seed=3, which is kept"
    assert text in caplog.text and "projection=principal, update_proj_gap=50, seed=9 is ignored" in caplog.text
    assert again.config == compression.config
    assert train(model, optimizer, batch("llama"), 3) == train(other, fresh, batch("llama"), 3)


def test_a_state_of_another_model_is_refused():
    model, _, optimizer = make("AdamW", torch.float32, "principal")
    train(model, optimizer, batch("llama"), 1)
    _, ours, compression = blocks()
    with pytest.raises(ValueError, match="compresses the activations of 'model.layers.0.*which this model does not"):
        compression.load_state_dict(optimizer.param_groups[0][STATE_KEY])
    assert compression.steps == 0


def test_layers_that_have_met_no_input_yet_find_their_company_after_the_resume():
    """A state from before the first forward of some layers."""
    _, ours, compression = blocks()
    optimizer = sgd(ours)
    step(ours, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for key in [key for key in state["param_groups"][0][STATE_KEY]["shared"] if ".1." in key]:
        del state["param_groups"][0][STATE_KEY]["shared"][key]
    optimizer.load_state_dict(state)
    compression.resume(optimizer)
    assert len(compression.bases()) == 8
    step(ours, optimizer, seed=1)
    assert len(compression.bases()) == 6
