"""Update during backward: the same numbers as without it, no gradient left, and refusals instead of surprises.

What runs under the Trainer is in ``tests/integration/test_update_in_backward.py``.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_memopt import TacoAdamW
from tests.cases import randn
from tests.optim.common import state_equal
from tests.optim.test_temporaries import LiveStorages


class Net(nn.Module):
    """Embedding tied to the head, a bias, a small matrix, one parameter without gradient in odd steps, one frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(130, 80)
        self.layers = nn.ModuleList(nn.Linear(80, 80) for _ in range(3))
        self.small = nn.Linear(80, 8, bias=False)
        self.back = nn.Linear(8, 80, bias=False)
        self.sometimes = nn.Parameter(torch.zeros(80, 80))
        self.frozen = nn.Linear(80, 80)
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(randn(*p.shape, seed=number, scale=0.1))
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, ids, odd=False, use_checkpoint=None):
        h = self.embed(ids)
        for layer in self.layers:
            if use_checkpoint is None:
                h = torch.tanh(layer(h))
            else:
                h = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), h, use_reentrant=use_checkpoint)
        h = h + self.back(self.small(h)) + self.frozen(h)
        if not odd:
            h = h + h @ self.sometimes
        return F.cross_entropy((h @ self.embed.weight.T).float().flatten(0, 1), ids.flatten())


def ids(step: int) -> torch.Tensor:
    return torch.randint(0, 130, (2, 7), generator=torch.Generator().manual_seed(step))


def make(dtype=torch.float32, cls=TacoAdamW, **options):
    model = Net(dtype)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    halves = [{"params": named[:3], "weight_decay": 0.1}, {"params": named[3:], "lr": 3e-3, "weight_decay": 0.0}]
    return model, cls(halves, lr=1e-2, **options)


def train(model, optimizer, steps, **forward):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    for t in steps:
        model(ids(t), odd=t % 2 == 1, **forward).backward()
        if optimizer.update_in_backward:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def assert_same(one, other):
    for (name, p), q in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert torch.equal(p, q), name
    assert state_equal(one[1].state_dict(), other[1].state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forward", [{}, {"use_checkpoint": False}, {"use_checkpoint": True}], ids=str)
def test_the_same_bits_as_without(dtype, forward):
    plain, ours = make(dtype), make(dtype, update_in_backward=True)
    train(*plain, range(5), **forward)
    train(*ours, range(5), **forward)
    assert_same(plain, ours)


def test_steps_count_once_and_a_parameter_without_gradient_keeps_its_state():
    model, optimizer = make(update_in_backward=True)
    train(model, optimizer, range(5))
    assert {name: int(optimizer.state[p]["step"]) for _, name, p in optimizer.named_params()} == {
        name: 3 if name == "sometimes" else 5 for _, name, _ in optimizer.named_params()
    }
    assert model.frozen.weight not in optimizer.state


def test_a_gradient_that_no_backward_made_is_applied_by_step():
    plain, ours = make(), make(update_in_backward=True)
    for model, optimizer in (plain, ours):
        model(ids(0), odd=True).backward()
        model.sometimes.grad = randn(80, 80, seed=9)
        optimizer.step()
    assert_same(plain, ours)


def test_closure():
    plain, ours = make(), make(update_in_backward=True)
    for model, optimizer in (plain, ours):

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(ids(0))
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    assert_same(plain, ours)


def test_true_gradient_norm_and_clipping_of_each_parameter():
    plain = make()
    plain[0](ids(0)).backward()
    with_gradient = [p for p in plain[0].parameters() if p.grad is not None]
    norms = sorted(p.grad.norm().item() for p in with_gradient)
    clip = norms[len(norms) // 2]  # above it and below it there are some
    ours = make(update_in_backward=True, clip_per_parameter=clip)
    assert ours[1].grad_norm is None and plain[1].grad_norm is None
    expected = torch.nn.utils.get_total_norm([p.grad for p in with_gradient])
    for p in with_gradient:
        nn.utils.clip_grad_norm_([p], clip)
    plain[1].step()
    ours[0](ids(0)).backward()
    ours[1].step()
    assert ours[1].grad_norm == pytest.approx(expected.item(), rel=1e-5)  # sums of fp32 squares in two orders
    assert_same(plain, ours)


def test_a_nonfinite_gradient_skips_its_parameter_only():
    for clip in (None, 1.0):
        model, optimizer = make(update_in_backward=True, clip_per_parameter=clip)
        before = copy.deepcopy(model.state_dict())
        handle = model.layers[1].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), float("inf")))
        model(ids(0)).backward()
        optimizer.step()
        handle.remove()
        assert optimizer.skipped_steps == 1
        after = model.state_dict()
        assert {name for name in before if torch.equal(before[name], after[name])} == {
            "layers.1.weight",
            "frozen.weight",
            "frozen.bias",
        }


def test_resume_is_bit_equal():
    whole = make(update_in_backward=True)
    train(*whole, range(3))
    file = io.BytesIO()
    torch.save({"model": whole[0].state_dict(), "optimizer": whole[1].state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for options in ({"update_in_backward": True}, {}):  # a checkpoint moves between the two ways
        resumed = make(**options)
        resumed[0].load_state_dict(saved["model"])
        resumed[1].load_state_dict(saved["optimizer"])
        go_on = copy.deepcopy(whole)
        for model, optimizer in (resumed, go_on):
            for t in (3, 4):
                model(ids(t)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(resumed, go_on)


def test_second_backward_before_step_raises_by_name():
    model, optimizer = make(update_in_backward=True)
    model(ids(0)).backward()
    with pytest.raises(RuntimeError, match="second gradient before optimizer.step.*gradient_accumulation_steps=1"):
        model(ids(1)).backward()


def test_copies_and_pickles_have_their_own_hooks():
    ours = make(update_in_backward=True)
    train(*ours, range(2))
    copied = copy.deepcopy(ours)
    pickled = io.BytesIO()
    torch.save(ours, pickled)
    pickled.seek(0)
    for twin in (copied, torch.load(pickled, weights_only=False)):
        assert_same(ours, twin)
        fresh = copy.deepcopy(ours)
        for model, optimizer in (fresh, twin):
            model(ids(7)).backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
        assert_same(fresh, twin)
        assert not torch.equal(ours[0].embed.weight, twin[0].embed.weight)


def test_a_later_optimizer_takes_over(caplog):
    model, first = make(update_in_backward=True)
    train(model, first, range(1))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with caplog.at_level(logging.WARNING, logger="hf_memopt"):
        second = TacoAdamW(named, update_in_backward=True)
    assert "takes them over" in caplog.text
    train(model, second, range(1))
    assert all(int(state["step"]) == 1 for state in first.state.values())
    with pytest.raises(RuntimeError, match="has taken over"):
        first.step()


def test_an_ordinary_optimizer_of_the_package_takes_over_too(caplog):
    model, first = make(update_in_backward=True)
    train(model, first, range(1))
    with caplog.at_level(logging.WARNING, logger="hf_memopt"):
        second = TacoAdamW([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    assert "it can no longer step" in caplog.text
    model(ids(0)).backward()
    assert model.embed.weight.grad is not None
    second.step()
    with pytest.raises(RuntimeError, match="has taken over"):
        first.step()


def test_updates_can_be_held():
    model, optimizer = make(update_in_backward=True)
    train(model, optimizer, range(1))
    before = model.embed.weight.detach().clone()
    optimizer.hold_updates()
    model(ids(0)).backward()
    assert model.embed.weight.grad is not None and torch.equal(model.embed.weight, before)
    optimizer.zero_grad()
    optimizer.resume_updates()
    train(model, optimizer, range(1))
    assert not torch.equal(model.embed.weight, before)


def test_what_is_unfrozen_later_is_clipped_and_counted():
    runs = []
    for late in (False, True):
        model, optimizer = make(update_in_backward=True, clip_per_parameter=1e-3)
        if late:
            optimizer.hold_updates()  # no hook saw these gradients
        model(ids(0)).backward()
        optimizer.step()
        runs.append((model, optimizer, optimizer.grad_norm))
    assert_same(runs[0][:2], runs[1][:2])
    assert runs[0][2] == pytest.approx(runs[1][2], rel=1e-6)


def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(100, 80, sparse=True)
    optimizer = TacoAdamW([("embed", embedding.weight)], update_in_backward=True)
    with pytest.raises(ValueError, match="that of embed is sparse: build the embedding with sparse=False"):
        embedding(torch.tensor([3])).sum().backward()
    assert not optimizer.state


def test_a_norm_beyond_fp32_skips_instead_of_zeroing():
    p = nn.Parameter(torch.ones(80, 80))
    optimizer = TacoAdamW([p], update_in_backward=True, clip_per_parameter=1.0)
    (p * 1e17).sum().backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    (p * 1.7e19).sum().backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1 and optimizer.grad_norm == float("inf")


def test_a_dropped_optimizer_leaves_nothing_behind():
    model, optimizer = make(update_in_backward=True)
    del optimizer
    gc.collect()
    model(ids(0)).backward()
    assert model.embed.weight.grad is not None


def test_added_groups_are_hooked():
    model, optimizer = make(update_in_backward=True)
    model.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": [("frozen.weight", model.frozen.weight), ("frozen.bias", model.frozen.bias)]})
    train(model, optimizer, range(2))
    assert int(optimizer.state[model.frozen.weight]["step"]) == 2


def test_a_gradient_scaler_is_refused():
    model, optimizer = make(update_in_backward=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(ids(0))).backward()
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        scaler.step(optimizer)
    assert "GradScaler" in str(caught.value)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"clip_per_parameter": 1.0}, "clip_per_parameter is for update_in_backward=True"),
        ({"update_in_backward": True, "clip_per_parameter": 0.0}, "clip_per_parameter must be a finite number above 0"),
        ({"update_in_backward": True, "clip_per_parameter": "1"}, "clip_per_parameter must be a finite number above 0"),
        ({"update_in_backward": 1}, "update_in_backward must be True or False"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**options)


def test_statistics_are_sampled():
    model, optimizer = make(update_in_backward=True)
    plain = make()
    for m, o in ((model, optimizer), plain):
        o.request_statistics()
        train(m, o, range(1))
    assert optimizer.statistics == pytest.approx(plain[1].statistics, rel=1e-12) and optimizer.statistics


def test_gradients_are_not_alive_together():
    """The peak of live storages, over a whole step, falls by the gradients less the few that backward works on."""
    peaks = {}
    for in_backward in (False, True):
        layers = nn.Sequential(*(nn.Linear(320, 320, bias=False) for _ in range(12)))
        optimizer = TacoAdamW(layers.parameters(), update_in_backward=in_backward)
        for _ in range(2):  # the second step has its state already
            with LiveStorages() as live:
                layers(torch.ones(1, 320)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks[in_backward] = live.peak
    gradient = 320 * 320 * 4
    assert peaks[False] >= 12 * gradient
    assert peaks[True] <= peaks[False] - 10 * gradient


MEASURE = """
import re, sys
import torch
from hf_memopt import TacoAdamW

torch.set_num_threads(1)
layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24)))
optimizer = TacoAdamW(layers.parameters(), update_in_backward=sys.argv[1] == "True")

def step():
    layers(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step()  # the state, and what the first call of everything costs
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew


def resident(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

before = resident("VmRSS")
step()
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resets the peak of resident memory through /proc")
def test_peak_of_the_process():
    # freed blocks go back to the system at once and serve no later allocation unseen
    at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    rises = {}
    for in_backward in (False, True):
        command = [sys.executable, "-c", MEASURE, str(in_backward)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=at_once)
        rises[in_backward] = int(done.stdout)
    gradient = 1024 * 1024 * 4
    assert rises[False] >= 24 * gradient
    assert rises[True] <= 4 * gradient, rises
