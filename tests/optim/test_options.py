"""Options at their limits, and the machinery around an optimizer: closures, schedulers, gradient scalers."""

from __future__ import annotations

import warnings

import pytest
import torch

from hf_memopt import TacoAdamW
from tests.cases import NON_DEFAULT, dtype_cases, parameter, randn, uneven_gradient
from tests.optim.common import state_equal, train

SHAPES = [(64, 161), (300,)]
both_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@both_shapes
@pytest.mark.parametrize(**dtype_cases())
def test_all_zero_gradients(kernel, shape, dtype):
    """From the first step on: all keys exist, only weight decay moves the weights, and real gradients are taken up
    afterwards.
    """
    p = parameter(*shape, dtype=dtype)
    before = p.detach().clone()
    optimizer = TacoAdamW([p], lr=0.1, weight_decay=0.0, kernel=kernel)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before) and int(optimizer.state[p]["step"]) == 3
    train(optimizer, range(2))
    assert bool((p != before).float().mean() > 0.9) and p.isfinite().all()


@both_shapes
def test_zero_gradients_still_decay(kernel, shape):
    p = parameter(*shape)
    before = p.detach().clone()
    optimizer = TacoAdamW([p], lr=0.1, weight_decay=0.5, kernel=kernel)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, before * torch.tensor(1 - 0.1 * 0.5, dtype=torch.float32))


@both_shapes
@pytest.mark.parametrize(**dtype_cases())
def test_lr_zero(kernel, shape, dtype):
    """Weights stay, state goes on: a warm-up that starts at 0 counts its steps."""
    p, other = parameter(*shape, dtype=dtype), parameter(*shape, dtype=dtype)
    before = p.detach().clone()
    optimizer = TacoAdamW([p], lr=0.0, weight_decay=0.5, kernel=kernel)
    moving = TacoAdamW([other], lr=0.1, kernel=kernel)
    train(optimizer, range(3))
    train(moving, range(3))
    assert torch.equal(p, before)
    assert state_equal(dict(optimizer.state[p]), dict(moving.state[other]))


@both_shapes
@pytest.mark.parametrize("betas", [(0.0, 0.999), (0.9, 0.0), (0.0, 0.0)], ids=str)
def test_betas_of_zero(kernel, shape, betas):
    """beta1 = 0: nothing is carried and the update is the gradient's alone. beta2 = 0: |update| is 1 where the momentum
    is the gradient.
    """
    p = parameter(*shape)
    optimizer = TacoAdamW([p], lr=1.0, betas=betas, weight_decay=0.0, kernel=kernel)
    for t in range(3):
        before = p.detach().clone()
        p.grad = randn(*shape, seed=t)
        optimizer.step()
        assert p.isfinite().all()
        if betas == (0.0, 0.0) and len(shape) == 1:
            torch.testing.assert_close(before - p, torch.sign(p.grad), rtol=1e-5, atol=1e-5)
        if betas == (0.0, 0.0):
            assert torch.equal((before - p).sign(), p.grad.sign())


@both_shapes
@pytest.mark.parametrize(**dtype_cases())
def test_eps_zero(kernel, shape, dtype):
    """Where no gradient has been the weight stays (not 0 / 0); a gradient whose square underflows does no harm."""
    p = parameter(*shape, dtype=dtype)
    before = p.detach().clone()
    optimizer = TacoAdamW([p], lr=0.1, eps=0.0, weight_decay=0.0, kernel=kernel)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, before)
    for t in range(3):
        p.grad = randn(*shape, seed=t, dtype=dtype)
        p.grad[:9] = 0
        if dtype != torch.float16:
            p.grad[9:12] = 1e-30
        optimizer.step()
        assert p.isfinite().all() and torch.equal(p[:9], before[:9])
    assert bool((p[12:] != before[12:]).float().mean() > 0.9)


@both_shapes
def test_maximize_is_the_negative_gradient(kernel, shape):
    up, down = parameter(*shape), parameter(*shape)
    ascending, descending = TacoAdamW([up], maximize=True, kernel=kernel), TacoAdamW([down], kernel=kernel)
    for t in range(3):
        up.grad = uneven_gradient(*shape, seed=t)
        down.grad = -up.grad
        ascending.step()
        descending.step()
    assert torch.equal(up, down)
    assert state_equal(dict(ascending.state[up]), dict(descending.state[down]))


@both_shapes
@pytest.mark.parametrize(**dtype_cases())
def test_stochastic_rounding_off(kernel, shape, dtype):
    """No random number reaches the weights of a first step then; fp32 weights are the same either way."""
    results = []
    for seed, stochastic in ((0, False), (1, False), (0, True)):
        p = parameter(*shape, dtype=dtype)
        optimizer = TacoAdamW([p], kernel=kernel, seed=seed, stochastic_rounding=stochastic)
        p.grad = randn(*shape, seed=3, dtype=dtype)
        optimizer.step()
        results.append(p.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2]) == (dtype == torch.float32)


@both_shapes
def test_lr_as_a_tensor(kernel, shape):
    p, q = parameter(*shape), parameter(*shape)
    plain, tensor = (
        TacoAdamW([p], lr=0.01, kernel=kernel),
        TacoAdamW([q], lr=torch.tensor(0.01, dtype=torch.float64), kernel=kernel),
    )
    train(plain, range(2))
    train(tensor, range(2))
    assert torch.equal(p, q)
    again = TacoAdamW([parameter(*shape)], kernel=kernel)
    again.load_state_dict(tensor.state_dict())
    assert (
        float(again.param_groups[0]["lr"]) == 0.01 and again.param_groups[0]["lr"] is not tensor.param_groups[0]["lr"]
    )


def test_closure(kernel):
    """It runs with gradients on, once, before the update; its value is returned."""
    p = parameter(64, 100)
    optimizer = TacoAdamW([p], lr=0.005, kernel=kernel)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == calls and losses == sorted(losses, reverse=True)
    assert optimizer.step() is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_no_graph_is_kept(kernel):
    p = parameter(64, 100)
    optimizer = TacoAdamW([p], kernel=kernel)
    p.square().sum().backward(create_graph=True)
    optimizer.step()
    assert p.requires_grad and p.is_leaf and p.grad_fn is None
    assert not any(x.requires_grad for x in optimizer.state[p].values() if torch.is_tensor(x))


def test_gradients_seen_by_autograd_after_a_step(kernel):
    """The in-place change is noticed: a graph built before it cannot silently use the new weight."""
    p = parameter(64, 100)
    optimizer = TacoAdamW([p], kernel=kernel)
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_scheduler(kernel):
    """Each step uses the rate of its moment: bit-equal to setting it by hand. OneCycleLR changes beta1 as well."""
    p, q = parameter(64, 100), parameter(64, 100)
    scheduled, by_hand = TacoAdamW([p], lr=0.1, kernel=kernel), TacoAdamW([q], lr=0.1, kernel=kernel)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(scheduled, max_lr=0.1, total_steps=8)
    betas = set()
    for t in range(6):
        group = scheduled.param_groups[0]
        by_hand.param_groups[0].update(lr=group["lr"], betas=group["betas"])
        betas.add(group["betas"][0])
        p.grad = randn(64, 100, seed=t)
        q.grad = p.grad.clone()
        scheduled.step()
        by_hand.step()
        scheduler.step()
    assert torch.equal(p, q) and len(betas) > 3


def test_scheduler_and_optimizer_are_restored_together(kernel):
    def make():
        p = parameter(64, 100)
        optimizer = TacoAdamW([p], lr=0.1, kernel=kernel)
        return p, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)

    def go(optimizer, scheduler, steps):
        for t in steps:
            train(optimizer, [t])
            scheduler.step()

    p, optimizer, scheduler = make()
    go(optimizer, scheduler, range(3))
    q, again, scheduler_again = make()
    with torch.no_grad():
        q.copy_(p)
    again.load_state_dict(optimizer.state_dict())
    scheduler_again.load_state_dict(scheduler.state_dict())
    go(optimizer, scheduler, range(3, 6))
    go(again, scheduler_again, range(3, 6))
    assert torch.equal(p, q) and optimizer.param_groups[0]["lr"] == again.param_groups[0]["lr"]


def test_gradient_scaler(kernel):
    """``torch.amp.GradScaler``: unscaled gradients arrive; an overflow anywhere skips the whole step, lowers the scale
    and is not counted as ours.
    """
    p, q, reference = parameter(64, 100), parameter(30), parameter(64, 100)
    optimizer, plain = TacoAdamW([p, q], kernel=kernel), TacoAdamW([reference], kernel=kernel)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for t in range(4):
        optimizer.zero_grad()
        scaler.scale((p * randn(64, 100, seed=t)).sum() + q.sum()).backward()
        if t == 2:
            q.grad[3] = float("inf")
        before = p.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p, before) == (t == 2)
        if t != 2:
            reference.grad = randn(64, 100, seed=t)
            plain.step()
    assert torch.equal(p, reference)
    assert scaler.get_scale() == 2.0**9 and optimizer.skipped_steps == 0
    assert int(optimizer.state[p]["step"]) == 3


def test_step_hooks_and_profiling_wrappers(kernel):
    p = parameter(64, 100)
    optimizer = TacoAdamW([p], kernel=kernel)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, range(2))
    assert seen == ["before", "after"] * 2


def test_no_warnings(kernel):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(
            TacoAdamW([parameter(64, 161, dtype=torch.bfloat16), parameter(9)], kernel=kernel, **NON_DEFAULT), range(2)
        )


def test_two_runs_are_bit_equal_whatever_the_global_generator(kernel):
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        p = parameter(64, 161, dtype=torch.bfloat16)
        optimizer = TacoAdamW([p], kernel=kernel)
        state = torch.get_rng_state()
        train(optimizer, range(3))
        assert torch.equal(torch.get_rng_state(), state), "draws from the global generator"
        runs.append((p.detach(), optimizer.state_dict()))
    assert state_equal(runs[0], runs[1])
