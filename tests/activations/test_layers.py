"""What compressed layers keep for backward, and who shares it with whom."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import CompActConfig, compress_activations
from hf_memopt.activations import shared
from hf_memopt.activations.layers import CARRIER
from tests.activations.compressed import TOKENS, N, blocks, carrier, gradients, llama_input, pair, sgd, step
from tests.activations.consumer import saved_storages
from tests.cases import randn
from tests.integration.tiny_llama import tiny_llama


def saved(model, run) -> list[tuple]:
    """(bytes, shape) of the distinct storages that are kept, sorted."""
    return sorted((nbytes, shape) for nbytes, shape, _ in saved_storages(model, run).values())


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["principal", "gaussian"])
def test_a_layer_keeps_z_and_nothing_else(kind, dtype):
    plain, ours = pair(24, 10, 6, kind, dtype=dtype)
    x = randn(7, 24, dtype=dtype).requires_grad_()
    assert saved(plain, lambda: plain(x)) == [(7 * 24 * dtype.itemsize, (7, 24))]
    assert saved(ours, lambda: ours(x)) == [(7 * 6 * dtype.itemsize, (7, 6))]


def test_under_autocast_z_is_in_its_dtype():
    _, ours = pair(24, 10, 6)
    x = randn(7, 24).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert saved(ours, lambda: ours(x)) == [(7 * 6 * 2, (7, 6))]


@pytest.mark.parametrize("how", ["eval", "no_grad", "frozen", "frozen weight"])
def test_where_nothing_trains_it_is_the_plain_layer(how):
    plain, ours = pair(24, 10, 6)
    if how == "eval":
        ours.eval()
    elif how == "frozen":
        ours.requires_grad_(False)
    elif how == "frozen weight":
        carrier(ours).requires_grad_(False)
    x = randn(7, 24).requires_grad_()
    with torch.set_grad_enabled(how != "no_grad"):
        assert saved(ours, lambda: ours(x)) == []
        y = ours(x)
        assert torch.equal(y, plain(x))
    if how != "no_grad":
        expected = torch.autograd.grad(plain(x).sum(), x)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected[0])
        assert type(y.grad_fn).__name__ != "LeanLinearBackward"


def linear_inputs(model, run) -> dict[tuple, int]:
    """(shape without the batch) of what is kept -> how often."""
    found = {}
    for _, shape, _ in saved_storages(model, run).values():
        found[shape] = found.get(shape, 0) + 1
    return found


@pytest.mark.parametrize("rank", [0.25, 0.5])
def test_a_llama_keeps_what_the_formula_says(rank):
    """A block keeps one z for q, k and v, one for gate and up, one for down: 2 r H + r I a token instead of 2 H + I.
    H and I are chosen so that no other tensor has these shapes."""
    h, i, tokens, layers = 48, 112, 12, 2
    shape = {"hidden_size": h, "intermediate_size": i, "num_hidden_layers": layers, "num_attention_heads": 3}
    plain, ours = tiny_llama(**shape).train(), tiny_llama(**shape).train()
    config = CompActConfig(rank=rank, recompute="none", projection="gaussian")
    compression = compress_activations(ours, config)
    batch = llama_input(tokens)
    ours(**batch).loss.backward()  # now they know whom they share with
    before = linear_inputs(plain, lambda: plain(**batch).loss)
    after = linear_inputs(ours, lambda: ours(**batch).loss)
    r, ri = round(rank * h), round(rank * i)
    new = {key: after.get(key, 0) - before.get(key, 0) for key in after.keys() | before.keys()}
    assert {key: count for key, count in new.items() if count} == {
        (1, tokens, r): 2 * layers,
        (1, tokens, ri): layers,
        (tokens, i): -layers,  # down's input; gate, up and act(gate) are kept by their product
        (tokens, h): -2 * layers,  # the norms' outputs
    }
    total = {
        model: sum(n for n, *_ in saved_storages(model, lambda m=model: m(**batch).loss).values())
        for model in (plain, ours)
    }
    assert total[plain] - total[ours] == 4 * tokens * layers * (2 * (h - r) + i - ri)
    sharing = {row.name.rpartition(".")[2]: row.reads_with.rpartition(".")[2] for row in compression.report().layers}
    assert sharing == {
        "q_proj": "q_proj", "k_proj": "q_proj", "v_proj": "q_proj",
        "gate_proj": "gate_proj", "up_proj": "gate_proj", "down_proj": "down_proj",
    }  # fmt: skip


def test_with_recompute_the_layers_keep_nothing_of_their_own():
    batch = llama_input()
    recomputed, ours = tiny_llama().train(), tiny_llama().train()
    compress_activations(recomputed, CompActConfig(rank=None))
    compress_activations(ours, CompActConfig(rank=0.25))
    ours(**batch).loss.backward()
    assert saved(recomputed, lambda: recomputed(**batch).loss) == saved(ours, lambda: ours(**batch).loss)


# -- who reads the same tensor -----------------------------------------------------------------------------------------


def test_readers_of_one_tensor_share_and_others_do_not():
    _, ours, compression = blocks()
    assert not any(layer.settled for layer in compression.layers.values())
    ours(randn(*TOKENS, N)).sum().backward()
    shared_with = {row.name: row.reads_with for row in compression.report().layers}
    assert shared_with == {
        f"blocks.{i}.{name}": f"blocks.{i}.{first}"
        for i in range(2)
        for name, first in {
            "attention.query": "attention.query",
            "attention.key": "attention.query",
            "attention.value": "attention.query",
            "expand": "expand",
            "shrink": "shrink",
        }.items()
    }
    assert len(compression.bases()) == 6


class Twice(nn.Module):
    """One layer that is called several times, and a tensor that is changed in place between two of its readers."""

    def __init__(self, change: bool) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(N, N), nn.Linear(N, N), change

    def forward(self, x):
        h = self.first(self.first(x).tanh()).tanh()
        y = self.first(h) + self.first(x)
        if self.change:
            h = h.clone().detach()
            y = y + self.first(h)
            h.add_(1.0)
        return y + self.second(h)


def test_a_layer_that_is_called_several_times():
    plain = nn.ModuleDict({"blocks": nn.ModuleList([Twice(change=False)])})
    ours = copy.deepcopy(plain)
    compress_activations(ours, CompActConfig(rank=1.0, recompute="none"))
    for model in (plain, ours):
        model["blocks"][0](randn(*TOKENS, N)).square().sum().backward()
    expected, found = gradients(plain), gradients(ours)
    for name in ("first", "second"):
        assert torch.equal(expected[f"blocks.0.{name}.weight"], found[f"blocks.0.{name}.{CARRIER}"]), name


def test_a_tensor_that_was_changed_in_place_is_projected_again():
    model = nn.ModuleDict({"blocks": nn.ModuleList([Twice(change=True)])})
    compress_activations(model, CompActConfig(rank=0.5, recompute="none", projection="structured"))
    second, read, given = model["blocks"][0].second, [], []
    second.register_forward_pre_hook(lambda module, args: read.append(args[0].clone()))
    second.register_full_backward_hook(lambda module, of_input, of_output: given.append(of_output[0]))
    model["blocks"][0](randn(*TOKENS, N)).square().sum().backward()
    z = second.basis.projection(read[0].device, torch.float32).project(read[0])
    assert second.basis.name == "blocks.0.second"
    assert torch.equal(carrier(second).grad, given[0].reshape(-1, N).T @ z.reshape(-1, N // 2))


def test_an_exception_in_forward_leaves_nothing_behind():
    _, ours, _ = blocks()
    handle = ours.blocks[1].attention.value.register_forward_pre_hook(_raise(ValueError))
    with pytest.raises(ValueError):
        ours(randn(*TOKENS, N))
    assert shared._scopes.stack == []
    handle.remove()
    step(ours, sgd(ours))
    assert shared._scopes.stack == []


def test_an_interrupted_forward_leaves_nothing_behind_after_the_next_step():
    """torch runs no hook on KeyboardInterrupt, as in a notebook; what was open is closed at the next step at last."""
    _, ours, _ = blocks()
    handle = ours.blocks[1].attention.value.register_forward_pre_hook(_raise(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ours(randn(*TOKENS, N))
    handle.remove()
    step(ours, sgd(ours))
    assert shared._scopes.stack == []


def _raise(error):
    def hook(module, args):
        raise error

    return hook


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["principal", "orthonormal"])
def test_gradient_checkpointing_gives_the_same_gradients(kind, reentrant):
    """Also when the layers meet their inputs for the first time within it."""
    results = []
    for checkpointed in (False, True):
        _, ours, compression = blocks(projection=kind)
        optimizer = sgd(ours, momentum=0.9)
        for i in range(3):
            x = randn(*TOKENS, N, seed=i).requires_grad_()
            h = x
            for block in ours.blocks:
                h = checkpoint(block, h, use_reentrant=reentrant) if checkpointed else block(h)
            optimizer.zero_grad()
            ours.head(h).square().mean().backward()
            found = {**gradients(ours), "x": x.grad}
            optimizer.step()
        results.append({**found, **{name: p.detach() for name, p in ours.named_parameters()}})
        assert len(compression.bases()) == 6 and shared._scopes.stack == []
    for name, expected in results[0].items():
        assert torch.equal(expected, results[1][name]), name
