"""Carriers folded into their weights: the numbers against double precision, what stays untouched, what it costs."""

from __future__ import annotations

import pytest
import torch

from hf_memopt.activations import folding
from hf_memopt.activations.folding import fold
from hf_memopt.activations.projection import Coordinates, make
from tests.activations.compressed import DEVICE, KINDS, Blocks, N, blocks, carrier, dense_p, sgd, step
from tests.cases import randn
from tests.tolerances import HALF_SPACING, SIGMAS, E, products, standard_error

M, FEATURES, R = 13, 20, 6


def fold_once(weight, b, kind="structured", *, scale=1.0, decay=1.0, dtype=None, seed=0, at=1, top=None):
    """What becomes of copies; (weight, carrier, P in double)."""
    p = make(kind, weight.shape[1], b.shape[1], 9, DEVICE, dtype or b.dtype, top)
    w, c = weight.clone(memory_format=torch.preserve_format), b.clone()
    fold(w, c, p, scale=scale, decay=decay, name="layer", seed=seed, step=at)
    eye = torch.eye(weight.shape[1], dtype=b.dtype)
    exact = p.matrix if hasattr(p, "matrix") else p.project(eye.float())
    return w, c, exact.double()


def expected_and_bound(weight, b, p, scale, decay, dense=False):
    """In double, and how far fp32 arithmetic may stray: the product, which is in the carrier's dtype where P is dense,
    and three roundings of each term."""
    w, c = weight.double(), b.double()
    size = w.abs() + scale * (c.abs() @ p.abs().T)
    product = products(b.float(), p.float().T, b.dtype if dense else torch.float32)
    return w * decay + scale * c @ p.T, scale * product + 4 * E * size


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_fp32_weights(kind, scale, decay):
    r = FEATURES if kind == "none" else R
    weight, b = randn(M, FEATURES), randn(M, r, seed=1)
    top = torch.tensor([17, 2, 5]) if kind == "principal" else None
    found, c, p = fold_once(weight, b, kind, scale=scale, decay=decay, top=top)
    expected, bound = expected_and_bound(weight, b, p, scale, decay)
    assert ((found - expected).abs() <= bound).all()
    assert not c.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["principal", "orthonormal", "none"])
def test_16_bit_weights_become_one_of_the_two_neighbours_and_are_right_on_average(kind, dtype):
    repeats, r = 400, FEATURES if kind == "none" else R
    weight, b = randn(M, FEATURES, dtype=dtype), (randn(M, r, seed=1) * 1e-3).to(dtype)
    runs = [fold_once(weight, b, kind, decay=0.999, at=at) for at in range(repeats)]
    found, p = torch.stack([w for w, *_ in runs]), runs[0][2]
    assert found.dtype == dtype
    expected, bound = expected_and_bound(weight, b, p, 1.0, 0.999, dense=kind == "orthonormal")
    below, above = neighbours(expected, dtype)
    assert ((found >= below - bound) & (found <= above + bound)).all()
    spacing = above - below
    # rounded up with the probability of its part of the spacing; fp16 draws it in 2^-13
    assert (
        (found.double().mean(0) - expected).abs()
        <= SIGMAS * standard_error(spacing**2 / 4, repeats) + bound + spacing * 2**-12
    ).all()
    assert (found != found[0]).any() and torch.equal(runs[3][0], fold_once(weight, b, kind, decay=0.999, at=3)[0])


def neighbours(x: torch.Tensor, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    near = x.to(dtype)
    inf = torch.full_like(near, float("inf"))
    below = torch.where(near.double() > x, torch.nextafter(near, -inf), near)
    above = torch.where(near.double() > x, near, torch.nextafter(near, inf))
    return below.double(), above.double()


def test_updates_far_below_the_spacing_are_not_lost():
    """1 + 1000 x 2^-14 in bf16, whose spacing there is 2^-7."""
    weight = torch.ones(64, 32, dtype=torch.bfloat16)
    for at in range(1000):
        weight, *_ = fold_once(weight, torch.full((64, 32), 2.0**-14, dtype=torch.bfloat16), "none", at=at)
    rise = 1000 * 2.0**-14
    # each fold is rounded up once in 2^7: variance per fold 2^-14 (2^-7 - 2^-14)
    spread = standard_error(1000 * 2.0**-14 * (2.0**-7 - 2.0**-14), weight.numel())
    assert abs(weight.double().mean() - 1 - rise) <= SIGMAS * spread


def test_coordinates_touch_only_their_columns_where_nothing_decays():
    weight = randn(M, FEATURES, dtype=torch.bfloat16)
    weight[:, 0] = float("nan")
    for at in range(20):
        p = make("structured", FEATURES, R, at, DEVICE, torch.bfloat16)
        others = torch.ones(FEATURES, dtype=torch.bool).index_fill(0, p.index, False)
        before = weight.clone()
        fold(weight, randn(M, R, seed=at).bfloat16(), p, scale=1.0, decay=1.0, name="l", seed=0, step=at)
        assert weight[:, others].view(torch.int16).equal(before[:, others].view(torch.int16))
        assert isinstance(p, Coordinates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_strides_make_no_difference(kind, decay, dtype):
    weight, b = randn(M, FEATURES, dtype=dtype), randn(M, R, seed=1, dtype=dtype)
    across = weight.T.contiguous().T
    assert across.stride() != weight.stride()
    one, *_ = fold_once(weight, b, kind, decay=decay)
    other, *_ = fold_once(across, b, kind, decay=decay)
    assert other.stride() == across.stride() and torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_carrier_of_zeros_leaves_its_weight_alone(kind, dtype):
    """Also with decay: it had no gradient, or a step was skipped."""
    weight = randn(M, FEATURES, dtype=dtype)
    for decay in (1.0, 0.5):
        found, *_ = fold_once(weight, torch.zeros(M, R, dtype=dtype), kind, decay=decay)
        assert torch.equal(found, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["principal", "gaussian"])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_pieces_give_the_same_numbers(monkeypatch, kind, decay, dtype):
    weight, b = randn(M, FEATURES, dtype=dtype), randn(M, R, seed=1, dtype=dtype)
    whole, *_ = fold_once(weight, b, kind, decay=decay)
    monkeypatch.setattr(folding, "PIECE", 3 * FEATURES)
    found, c, p = fold_once(weight, b, kind, decay=decay)
    if kind == "principal":
        assert torch.equal(found, whole)
    else:  # a product of fewer rows may add up in another order, and be rounded to the other side
        bound = products(b.float(), p.float().T, dtype) + 2 * HALF_SPACING[dtype] * (whole.double().abs() + 0.1)
        assert ((found.double() - whole.double()).abs() <= 2 * bound).all()
    assert not c.any()


@pytest.mark.parametrize("kind", ["principal", "orthonormal"])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_temporaries_are_pieces(kind, decay):
    """No tensor of the weight's size is made for a bf16 weight; what is largest is one fp32 piece or hash of it."""
    m, n, r = 3072, 1024, 16
    largest = folding.PIECE * 4
    weight, b = torch.zeros(m, n, dtype=torch.bfloat16), torch.ones(m, r, dtype=torch.bfloat16)
    p = make(kind, n, r, 1, DEVICE, torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fold(weight, b, p, scale=1.0, decay=decay, name="l", seed=0, step=1)
    sizes = [event.cpu_memory_usage for event in profile.events()]
    assert m * n * 4 > largest >= max(sizes) > 0


# -- a whole step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_step_of_plain_sgd(kind, decay, scale):
    """W (1 - lr wd) + scale B P^T with B = -lr dB, and all other parameters as SGD moves them."""
    _, ours, compression = blocks(projection=kind, scale=scale)
    optimizer = sgd(ours, weight_decay=decay)
    step(ours, optimizer)  # principal has chosen its coordinates now
    before = {name: layer.weight.detach().clone() for name, layer in compression.layers.items()}
    p = {name: dense_p(layer) for name, layer in compression.layers.items()}
    step(ours, optimizer, seed=1)
    for name, layer in compression.layers.items():
        assert not carrier(layer).any()
        b = -0.1 * carrier(layer).grad
        expected, bound = expected_and_bound(before[name], b, p[name], scale, 1 - 0.1 * decay)
        assert ((layer.weight - expected).abs() <= bound + 4 * E * b.abs().max()).all(), name
        assert not torch.equal(layer.weight, before[name])


def test_a_step_at_full_rank_is_sgds():
    """B P^T is then the gradient itself: the same weights, but for the order of sums."""
    plain, ours, _ = blocks(rank=1.0)
    seen, size = {}, {}  # a layer's input; its weight's gradient, were all terms of one sign

    def watch(name, layer):
        def backward(_, dx, dy):
            size[f"{name}.weight"] = products(dy[0].flatten(0, -2).T, seen[name].flatten(0, -2))

        layer.register_forward_pre_hook(lambda _, args: seen.update({name: args[0].detach()}))
        layer.register_full_backward_hook(backward)

    for name, layer in plain.named_modules():
        if isinstance(layer, torch.nn.Linear):
            watch(name, layer)
    for model in (plain, ours):
        step(model, sgd(model))
    for (name, a), b in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        of_sums = 2 * 0.1 * size[name] if name in size else 0.0
        assert ((a - b).abs() <= of_sums + 2 * E * (a.abs() + b.abs())).all(), name


def test_two_runs_are_equal():
    results = []
    for _ in range(2):
        _, ours, _ = blocks()
        ours.bfloat16()
        optimizer = sgd(ours, momentum=0.9)
        for seed in range(3):
            x = randn(3, 5, N, seed=seed).bfloat16()
            optimizer.zero_grad()
            ours(x).square().mean().backward()
            optimizer.step()
        results.append(ours.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*map(dict.values, results), strict=True))
    assert isinstance(ours, Blocks)
