"""Compressed layers as modules: state dicts, copies, pickles, the way back."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from hf_memopt import CompActConfig, compress_activations
from hf_memopt.activations.compression import _alive, compression_of
from hf_memopt.activations.layers import CARRIER, MemoptLinear
from tests.activations.compressed import TOKENS, Blocks, N, blocks, carrier, llama_input, pair, sgd, step
from tests.cases import randn
from tests.integration.tiny_llama import tiny_llama


def test_state_dict_is_the_plain_models():
    plain, ours, _ = blocks()
    assert list(ours.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]) and value.dtype == ours.state_dict()[key].dtype
    assert sum(name.endswith(CARRIER) for name, _ in ours.named_parameters()) == 10


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_strict_both_ways(assign):
    plain, ours, _ = blocks()
    other = Blocks()
    assert ours.load_state_dict(other.state_dict(), strict=True, assign=assign) == plain.load_state_dict(
        plain.state_dict()
    )
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))
    fresh = Blocks()
    fresh.load_state_dict(ours.state_dict(), strict=True)
    step(ours, sgd(ours))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ours.load_state_dict({**other.state_dict(), "blocks.0.expand.more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"blocks.0.expand.weight\"\."):
        ours.load_state_dict({k: v for k, v in other.state_dict().items() if k != "blocks.0.expand.weight"})
    assert carrier(ours.blocks[0].expand).requires_grad


def test_isinstance_repr_and_hooks_stay():
    plain, ours, _ = blocks()
    layer = ours.blocks[0].expand
    assert isinstance(layer, nn.Linear) and type(layer) is MemoptLinear
    assert (layer.in_features, layer.out_features) == (N, 2 * N)
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    ours(randn(*TOKENS, N))
    assert seen == [(*TOKENS, 2 * N)]


def test_a_deep_copy_trains_by_itself():
    _, ours, compression = blocks()
    optimizer = sgd(ours)
    step(ours, optimizer)
    twin = copy.deepcopy(ours)
    before = {k: v.clone() for k, v in ours.state_dict().items()}
    other = compression_of(twin)
    assert other is not compression and other.steps == 1
    assert not {id(layer) for layer in other.layers.values()} & {id(layer) for layer in compression.layers.values()}
    step(twin, sgd(twin), seed=1)
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items()) and compression.steps == 1
    step(ours, optimizer, seed=1)
    assert all(torch.equal(v, ours.state_dict()[k]) for k, v in twin.state_dict().items()) and other.steps == 2
    assert any(not torch.equal(v, before[k]) for k, v in twin.state_dict().items())
    other.restore()
    assert compression_of(ours) is compression and type(ours.blocks[0].expand) is MemoptLinear
    assert not twin.blocks[0]._forward_hooks and ours.blocks[0]._forward_hooks


@pytest.mark.parametrize("recompute", ["none", "norms,mlp"])
def test_a_model_that_was_saved_whole_goes_on(tmp_path, recompute):
    ours = tiny_llama().train()
    compress_activations(ours, CompActConfig(recompute=recompute))
    batch = llama_input()

    def go_on(model, steps):
        optimizer = sgd(model)
        for _ in range(steps):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        return model.state_dict()

    go_on(ours, 2)
    torch.save(ours, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert compression_of(loaded).steps == 2
    expected, found = go_on(ours, 2), go_on(loaded, 2)
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    compression_of(loaded).restore()
    assert not any(isinstance(m, MemoptLinear) for m in loaded.modules())


def test_a_pickle_of_conv1d_loads_in_a_new_process(tmp_path):
    _, ours = pair(8, 4, 2, conv=True)
    (tmp_path / "layer.pkl").write_bytes(pickle.dumps(ours))
    script = (
        "import pickle,sys; layer = pickle.load(open(sys.argv[1], 'rb')); print(type(layer).__name__, layer.basis.rank)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "layer.pkl")], capture_output=True, text=True, env={**os.environ}
    )
    assert done.stdout.split() == ["MemoptConv1D", "2"], done.stderr


@pytest.mark.parametrize("recompute", ["none", "norms,mlp"])
@pytest.mark.parametrize("trained", [False, True])
def test_restore_is_bit_for_bit(recompute, trained):
    plain, ours = tiny_llama().train(), tiny_llama().train()
    for model in (plain, ours):
        model.lm_head.weight.requires_grad_(False)
    compression = compress_activations(ours, CompActConfig(recompute=recompute))
    if trained:
        optimizer = sgd(ours)
        ours(**llama_input()).loss.backward()
        optimizer.step()
    weights = {key: value.clone() for key, value in ours.state_dict().items()}
    compression.restore()
    compression.restore()  # once more changes nothing
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(
        torch.equal(value, ours.state_dict()[key])
        for key, value in (weights if trained else plain.state_dict()).items()
    )
    for (name, a), (_, b) in zip(plain.named_modules(), ours.named_modules(), strict=True):
        assert type(a) is type(b), name
        assert a.__dict__.keys() == b.__dict__.keys(), name
        assert len(a._forward_hooks) == len(b._forward_hooks), name
        assert len(a._forward_pre_hooks) == len(b._forward_pre_hooks), name
        assert len(a._forward_hooks_always_called) == len(b._forward_hooks_always_called), name
    for (name, a), (other, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other and a.requires_grad == b.requires_grad, name
    assert compression_of(ours) is None
    compress_activations(ours, CompActConfig(recompute=recompute))


def test_a_model_is_freed_with_its_compression():
    _, ours, compression = blocks()
    count = len(_alive)
    step(ours, sgd(ours))
    del ours, compression
    gc.collect()
    assert len(_alive) < count
