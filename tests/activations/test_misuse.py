"""What a training loop may do to compressed layers that would leave weights untrained or wrong: right, or said."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from hf_memopt import CompActConfig, compress_activations
from tests.activations.compressed import TOKENS, Blocks, N, blocks, carrier, gradients, sgd, step
from tests.activations.models import batch, build
from tests.cases import randn

CONFIG = CompActConfig(rank=0.5, recompute="none")


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "norms,mlp"])
def test_all_parameters_made_trainable_changes_nothing(recompute):
    """``requires_grad_(True)`` is what unfreezing a model looks like; the carriers go on to stand for the weights."""
    found = []
    for unfreeze in (False, True):
        model = build("llama")
        compress_activations(model, CompActConfig(rank=0.5, recompute=recompute))
        if unfreeze:
            model.requires_grad_(False).requires_grad_(True)
        model(**batch("llama")).loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys() and any(name.endswith("compact_carrier") for name in found[0])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("how", ["weight_norm", "prune", "forward"])
def test_layers_whose_weight_or_forward_is_not_their_own_are_left_alone(how):
    model = Blocks()
    layer = model.blocks[0].expand
    if how == "weight_norm":
        nn.utils.weight_norm(layer)
    elif how == "prune":
        prune.l1_unstructured(layer, "weight", 0.3)
    else:
        layer.forward = layer.forward  # as accelerate's hooks do
    compression = compress_activations(model, CONFIG)
    reason = {s.name: s.reason for s in compression.report().skipped}["blocks.0.expand"]
    replaced = "its forward has been replaced on the instance"
    assert reason == (replaced if how == "forward" else "its weight is computed from others")
    x = randn(*TOKENS, N)
    model(x)
    before = layer.weight.detach().clone()
    step(model, sgd(model))
    model(x)  # computes the weight from what has been stepped
    assert not torch.equal(before, layer.weight)


@pytest.mark.parametrize("kind", ["principal", "structured", "orthonormal", "gaussian"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_double_precision_weights_keep_theirs(kind, decay):
    torch.manual_seed(0)
    model = Blocks().double()
    compress_activations(model, CompActConfig(rank=0.5, recompute="none", projection=kind))
    layer = model.blocks[0].expand
    rate = 1e-12  # far below half a unit of fp32
    optimizer = sgd(model, lr=rate, weight_decay=decay)
    model(randn(*TOKENS, N).double()).square().mean().backward()
    p = layer.basis.projection(layer.weight.device, torch.float64).project(torch.eye(N, dtype=torch.float64))
    expected = layer.weight.detach() * (1 - rate * decay) - rate * carrier(layer).grad @ p.T
    before = layer.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, layer.weight)
    # two roundings of numbers below 1, and P's weights in fp32
    tolerance = 2 * torch.finfo(torch.float64).eps + rate * torch.finfo(torch.float32).eps
    assert (layer.weight - expected).abs().max() <= tolerance


def test_inputs_are_let_go_before_the_holder_of_the_layers_returns():
    """A stage that is one long Sequential would otherwise keep each layer's input until its own end."""
    stage = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(N, N), nn.Tanh())])
    compress_activations(nn.ModuleList([stage]), CompActConfig(rank=0.5, recompute="none"))
    inputs, alive = [], []
    for layer in stage[::2]:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    stage[-1].register_forward_hook(lambda *_: alive.extend(ref() is not None for ref in inputs))
    stage(randn(*TOKENS, N))
    assert alive == [True, False, False, False]  # the first is the caller's own


def test_a_model_that_is_gone_leaves_nothing():
    _, ours, compression = blocks()
    step(ours, sgd(ours))
    found = [weakref.ref(ours), weakref.ref(compression), weakref.ref(ours.blocks[0].expand.weight)]
    del ours, compression, _
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


def test_averages_of_the_weights_are_those_of_plain_weights():
    _, ours, compression = blocks()
    optimizer, average, seen = sgd(ours), torch.optim.swa_utils.AveragedModel(ours), []
    for seed in range(4):
        step(ours, optimizer, seed=seed)
        average.update_parameters(ours)
        seen.append(ours.blocks[0].expand.weight.detach().clone())
    found = average.module.blocks[0].expand.weight
    assert (found - sum(seen) / 4).abs().max() <= 8 * torch.finfo(torch.float32).eps  # of numbers below 1
    assert not carrier(average.module.blocks[0].expand).any() and compression.steps == 4


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_moved_parameters_are_not_evaluated():
    _, ours, _ = blocks()
    optimizer = torch.optim.LBFGS([p for p in ours.parameters() if p.requires_grad], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = ours(randn(*TOKENS, N, seed=0)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"not zero in a forward.*LBFGS.*choose another"):
        optimizer.step(closure)


def test_a_closure_of_an_ordinary_optimizer_is_right():
    losses = []
    for closed in (False, True):
        _, ours, compression = blocks()
        optimizer, x = sgd(ours), randn(*TOKENS, N, seed=0)

        def closure(ours=ours, optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = ours(x).square().mean()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() if closed else step(ours, optimizer) for _ in range(3)])
        assert compression.steps == 3
    assert losses[0] == losses[1]


def test_a_step_that_calls_its_bases_step_is_one():
    """torch calls its hooks twice for it once an optimizer of the base class has been made."""

    class Ours(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    assert torch.optim.SGD.step.hooked
    _, ours, compression = blocks()
    optimizer = Ours([p for p in ours.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        step(ours, optimizer)
    assert compression.steps == 2


class ScheduleFree(torch.optim.SGD):
    """The two methods by which schedule-free optimizers are known."""

    def train(self):
        """To the parameters of the gradients."""

    def eval(self):
        """To the averages."""


@pytest.mark.parametrize("how", ["schedule-free", "prodigy"])
def test_optimizers_that_keep_copies_of_parameters_are_refused(how):
    _, ours, _ = blocks()
    parameters = [p for p in ours.parameters() if p.requires_grad]
    if how == "schedule-free":
        optimizer = ScheduleFree(parameters, lr=0.1)
    else:
        optimizer = torch.optim.SGD([{"params": parameters, "d": 1e-6, "d0": 1e-6}], lr=1.0)
    with pytest.raises(NotImplementedError, match="keeps copies of the parameters.*choose another"):
        step(ours, optimizer)


@pytest.mark.parametrize("again", [False, True])
def test_an_optimizer_of_carriers_that_are_gone_is_refused(again):
    _, ours, compression = blocks()
    optimizer = sgd(ours)
    step(ours, optimizer)
    compression.restore()
    if again:
        compress_activations(ours, CONFIG)
    with pytest.raises(RuntimeError, match="restored since.*make a new optimizer"):
        step(ours, optimizer)
    before = ours.blocks[0].expand.weight.detach().clone()
    step(ours, sgd(ours))
    assert not torch.equal(before, ours.blocks[0].expand.weight)


# -- layers that do not run --------------------------------------------------------------------------------------------


@pytest.fixture
def told(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_memopt"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if "stay as they are" in r.getMessage()]


def test_forgetting_train_after_an_evaluation_is_told_once(told):
    _, ours, _ = blocks()
    optimizer = sgd(ours)
    step(ours, optimizer)
    ours.eval()
    assert told() == []
    for _ in range(2):
        step(ours, optimizer)
    assert len(told()) == 1 and "call model.train()" in told()[0]


@pytest.mark.parametrize("how", ["eval", "by hand"])
def test_single_layers_that_do_not_train_are_told(how, told):
    _, ours, _ = blocks()
    layer = ours.blocks[1].shrink
    if how == "eval":
        layer.eval()
    else:
        ours.blocks[1]._modules["shrink"] = ours.unused = nn.Identity()
        ours.blocks[1].shrink = ByHand(layer)
    for _ in range(2):
        step(ours, sgd(ours))
    assert len(told()) == 1 and told()[0].startswith("1 of 10 compressed layers, such as blocks.1.shrink,")


class ByHand(nn.Module):
    """Reads the weight of a layer without calling it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return F.linear(x, self.layer.weight, self.layer.bias)


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, 4, 12])
def test_another_rank_is_refused_also_where_no_moment_has_a_shape(rank):
    _, ours, _ = blocks(rank=8)
    optimizer = sgd(ours)
    step(ours, optimizer)
    _, other, compression = blocks(rank=rank)
    again = sgd(other)
    again.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"to rank 8 and this model to {rank}: use the rank of the run"):
        compression.resume(again)


def test_resuming_in_the_same_process_after_an_interrupted_step():
    """The carriers that the step had reached are no part of the checkpoint."""
    _, ours, compression = blocks()
    optimizer = sgd(ours, momentum=0.9)
    step(ours, optimizer)
    saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
    expected = [step(ours, optimizer) for _ in range(2)]
    with torch.no_grad():
        carrier(ours.blocks[0].expand).fill_(1.0)
    ours.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    compression.resume(optimizer)
    assert [step(ours, optimizer) for _ in range(2)] == expected


def test_a_state_from_before_the_compression_is_refused():
    plain, ours, compression = blocks()
    before = torch.optim.AdamW(plain.parameters())
    step(plain, before)
    optimizer = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad])
    compression.resume(optimizer)  # empty as yet
    optimizer.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match="written without compressed activations.*begin with a new optimizer"):
        compression.resume(optimizer)


@pytest.mark.parametrize(("model", "config"), [(None, None), (nn.Linear(2, 2), {"rank": 0.5})], ids=str)
def test_arguments_of_the_wrong_kind(model, config):
    with pytest.raises(TypeError, match=r"takes a model and a CompActConfig"):
        compress_activations(model, config)
