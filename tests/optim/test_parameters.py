"""Parameters as models have them: odd strides, empty, frozen, seldom used, added later."""

from __future__ import annotations

import pytest
import torch

from hf_memopt import TacoAdamW
from tests.cases import NON_DEFAULT, dtype_cases, parameter, randn, uneven_gradient
from tests.optim.common import snapshot, state_equal, train


def transposed(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def every_second(x):
    wide = x.repeat_interleave(2, dim=-1)
    return wide[..., ::2]


def channels_last(x):
    """Of the two last dimensions; a 3-D tensor laid out like this has no (rows, rest) view."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS = [
    ((70, 161), transposed),
    ((70, 161), every_second),
    ((6, 40, 33), channels_last),
    ((33, 6, 40), transposed),
    ((6, 40, 33), every_second),
    ((500,), every_second),
    ((2, 3, 5, 160), channels_last),
]


@pytest.mark.parametrize(**dtype_cases())
@pytest.mark.parametrize("gradient_too", [False, True], ids=["contiguous gradient", "gradient alike"])
@pytest.mark.parametrize("shape, layout", LAYOUTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_strides_do_not_matter(kernel, shape, layout, gradient_too, dtype):
    plain = parameter(*shape, dtype=dtype)
    strided = torch.nn.Parameter(layout(plain.detach()))
    assert not strided.is_contiguous() and torch.equal(plain, strided)
    strides = strided.stride()
    first, second = (TacoAdamW([("w", p)], kernel=kernel, **NON_DEFAULT) for p in (plain, strided))
    for t in range(2):
        plain.grad = uneven_gradient(*shape, seed=t, dtype=dtype)
        strided.grad = layout(plain.grad) if gradient_too else plain.grad.clone()
        first.step()
        second.step()
    assert torch.equal(plain, strided) and strided.stride() == strides
    assert state_equal(first.state_dict(), second.state_dict())


def test_a_strided_gradient_of_a_plain_parameter(kernel):
    results = []
    for layout in (lambda x: x, transposed, every_second):
        p = parameter(70, 161)
        optimizer = TacoAdamW([p], kernel=kernel)
        p.grad = layout(uneven_gradient(70, 161))
        optimizer.step()
        results.append(p.detach())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_an_expanded_gradient(kernel):
    """``loss.sum()`` through a linear layer gives rows that share memory (stride 0)."""
    p, q = parameter(64, 100), parameter(64, 100)
    row = randn(1, 100, seed=2)
    p.grad, q.grad = row.expand(64, 100), row.repeat(64, 1)
    for x in (p, q):
        TacoAdamW([x], kernel=kernel).step()
    assert torch.equal(p, q)


def test_the_gradient_is_not_changed(kernel):
    for shape, dtype in (((70, 161), torch.float32), ((300,), torch.bfloat16)):
        p = parameter(*shape, dtype=dtype)
        p.grad = randn(*shape, seed=1, dtype=dtype)
        before = p.grad.clone()
        TacoAdamW([p], kernel=kernel, maximize=True).step()
        assert torch.equal(p.grad, before)


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_view_into_a_larger_tensor_stays_inside_it(kernel, gradient_dtype):
    whole = randn(90, 200, seed=1, dtype=gradient_dtype)
    before = whole.clone()
    p = torch.nn.Parameter(whole[10:80, 20:181])
    p.grad = randn(70, 161, seed=2, dtype=gradient_dtype)
    TacoAdamW([p], kernel=kernel, lr=0.1).step()
    assert not torch.equal(whole[10:80, 20:181], before[10:80, 20:181])
    whole[10:80, 20:181] = before[10:80, 20:181]
    assert torch.equal(whole, before)


@pytest.mark.parametrize(
    "shape, treatment",
    [
        ((0,), "auto"),
        ((0, 5), "auto"),
        ((5, 0), "auto"),
        ((0, 5), "ternary"),
        ((5, 0), "ternary"),
        ((0, 200), "ternary"),
    ],
)
def test_empty_parameters(kernel, shape, treatment):
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = TacoAdamW([{"params": [p], "treatment": treatment}], kernel=kernel)
    train(optimizer, range(2))
    assert int(optimizer.state[p]["step"]) == 2 and optimizer.skipped_steps == 0
    again = TacoAdamW([{"params": [p], "treatment": treatment}], kernel=kernel)
    again.load_state_dict(optimizer.state_dict())
    assert state_equal(again.state_dict(), optimizer.state_dict())
    assert optimizer.memory_report().parameters == 0 and "0.00" in optimizer.memory_report().table()


def test_a_scalar_and_single_elements(kernel):
    parameters = [torch.nn.Parameter(torch.ones(s)) for s in ((), (1,), (1, 1), (1, 1, 1))]
    optimizer = TacoAdamW(parameters, kernel=kernel, weight_decay=0.0, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [p.item() for p in parameters] == pytest.approx([0.9] * 4)


def test_frozen_and_unused_parameters_stay(kernel):
    used, frozen, unused = parameter(64, 100), parameter(64, 100, seed=1), parameter(64, 100, seed=2)
    frozen.requires_grad_(False)
    before = frozen.clone(), unused.detach().clone()
    optimizer = TacoAdamW([used, frozen, unused], kernel=kernel, weight_decay=0.5)
    (used.sum() * 1.0).backward()
    optimizer.step()
    assert torch.equal(frozen, before[0]) and torch.equal(unused, before[1])
    assert list(optimizer.state) == [used]
    assert len(optimizer.state_dict()["state"]) == 1


def test_gradients_in_some_steps_only(kernel):
    """A parameter counts the steps in which it had a gradient: the same as training it alone on those."""
    seldom, alone, always = parameter(64, 100), parameter(64, 100), parameter(64, 100, seed=1)
    optimizer = TacoAdamW([("seldom", seldom), ("always", always)], kernel=kernel)
    single = TacoAdamW([("seldom", alone)], kernel=kernel)
    for t in range(6):
        always.grad = randn(64, 100, seed=t)
        seldom.grad = randn(64, 100, seed=50 + t) if t % 3 == 1 else None
        optimizer.step()
        if t % 3 == 1:
            alone.grad = seldom.grad.clone()
            single.step()
    assert torch.equal(seldom, alone)
    assert state_equal(dict(optimizer.state[seldom]), dict(single.state[alone]))
    assert int(optimizer.state[seldom]["step"]) == 2 and int(optimizer.state[always]["step"]) == 6


def test_no_gradient_anywhere(kernel):
    optimizer = TacoAdamW([parameter(64, 100)], kernel=kernel)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("treatment", ["ternary", "dense"])
def test_what_never_gets_a_gradient_never_moves(kernel, treatment, dtype):
    """Rows of an embedding, columns, and single elements: not a bit over 300 steps without weight decay."""
    p = parameter(40, 200, dtype=dtype)
    silent = torch.zeros(40, 200, dtype=torch.bool)
    silent[3:9], silent[:, 170:], silent[20, 5] = True, True, True
    before = p.detach().clone()
    optimizer = TacoAdamW([{"params": [p], "treatment": treatment}], lr=0.1, weight_decay=0.0, kernel=kernel)
    for t in range(300):
        p.grad = torch.where(silent, 0, randn(40, 200, seed=t, dtype=dtype))
        optimizer.step()
    assert torch.equal(p[silent], before[silent])
    assert bool((p[~silent] != before[~silent]).all())


def test_a_row_that_gets_its_first_gradient_late(kernel):
    """After 50 silent steps: it moves as AdamW would move it, within its first update's size, and stays finite."""
    p = parameter(40, 200)
    optimizer = TacoAdamW([p], lr=0.01, weight_decay=0.0, kernel=kernel)
    for t in range(60):
        p.grad = randn(40, 200, seed=t)
        if t < 50:
            p.grad[7] = 0
        before = p.detach().clone()
        optimizer.step()
        if t == 50:
            moved = (p - before)[7].abs()
            # the whole effect that one gradient has in AdamW, sum of beta1^j over the root of 1 - beta2, is the most
            # that can come at once
            assert 0 < moved.min() and moved.max() <= 0.01 * 1.01 / (1 - 0.999) ** 0.5
    assert p.isfinite().all()


def test_add_param_group_in_mid_training(kernel):
    """The new group starts at step 1 with the defaults and its own options; the old ones go on as if nothing had
    happened.
    """
    first, second, alone = parameter(64, 100), parameter(50, 161, seed=1), parameter(64, 100)
    optimizer, single = TacoAdamW([("a", first)], kernel=kernel), TacoAdamW([("a", alone)], kernel=kernel)
    train(optimizer, range(3))
    optimizer.add_param_group({"params": [("b", second)], "lr": 0.5, "treatment": "dense"})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999) and optimizer.param_groups[1]["format_version"] == 1
    train(optimizer, range(3, 5))
    train(single, range(5))
    assert torch.equal(first, alone)
    assert int(optimizer.state[second]["step"]) == 2 and "exp_avg" in optimizer.state[second]


def test_several_groups_with_their_own_options(kernel):
    """Each group's result is that of an optimizer with the group's options alone."""
    options = [
        {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0, "seed": 3},
        {"lr": 0.1, "eps": 1e-3, "maximize": True},
        {"stochastic_rounding": False, "treatment": "dense"},
    ]
    shapes = [(64, 100), (70, 161), (64, 64)]
    together = [parameter(*s, dtype=torch.bfloat16) for s in shapes]
    optimizer = TacoAdamW(
        [{"params": [(f"p{i}", p)], **o} for i, (p, o) in enumerate(zip(together, options, strict=True))], kernel=kernel
    )
    alone = [parameter(*s, dtype=torch.bfloat16) for s in shapes]
    singles = [
        TacoAdamW([{"params": [(f"p{i}", p)], **o}], kernel=kernel)
        for i, (p, o) in enumerate(zip(alone, options, strict=True))
    ]
    for t in range(3):
        for a, b in zip(together, alone, strict=True):
            a.grad = randn(*a.shape, seed=t, dtype=torch.bfloat16)
            b.grad = a.grad.clone()
        optimizer.step()
        for single in singles:
            single.step()
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_dtypes_without_a_kernel_are_refused(dtype):
    p = torch.zeros(4, 4).to(dtype).requires_grad_(dtype.is_floating_point or dtype.is_complex)
    with pytest.raises(ValueError, match=f"takes float32, bfloat16 and float16 parameters, but some.weight is {dtype}"):
        TacoAdamW([("some.weight", p)])


def test_a_refused_group_is_not_added():
    optimizer = TacoAdamW([parameter(64, 100)], kernel="reference")
    for group in (
        {"params": [torch.zeros(3, dtype=torch.float64, requires_grad=True)]},
        {"params": [parameter(9)], "treatment": "ternary"},
    ):
        with pytest.raises(ValueError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    train(optimizer, range(1))


def test_sparse_gradients_are_refused_before_anything_is_changed(kernel):
    first = parameter(64, 100)
    embedding = torch.nn.Embedding(64, 100, sparse=True)
    optimizer = TacoAdamW([("first", first), ("embedding.weight", embedding.weight)], kernel=kernel)
    first.grad = randn(64, 100)
    embedding(torch.tensor([1, 2])).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(
        ValueError,
        match="dense gradients, but that of embedding.weight is sparse: build the embedding with sparse=False",
    ):
        optimizer.step()
    assert state_equal(snapshot(optimizer), before)


def test_vectors_cannot_be_ternary():
    with pytest.raises(ValueError, match=r"needs matrices, but bias has shape \(9,\)"):
        TacoAdamW([{"params": [("bias", parameter(9))], "treatment": "ternary"}])


@pytest.mark.parametrize(
    "option, value, sentence",
    [
        ("lr", -1.0, "lr must be a finite number of at least 0"),
        ("lr", float("nan"), "lr must be a finite number of at least 0"),
        ("betas", (0.9, 1.0), r"betas must be two numbers in \[0, 1\)"),
        ("betas", (-0.1, 0.9), r"betas must be two numbers in \[0, 1\)"),
        ("betas", (0.9,), r"betas must be two numbers in \[0, 1\)"),
        ("eps", -1e-8, "eps must be a finite number of at least 0"),
        ("weight_decay", -0.1, "weight_decay must be a finite number of at least 0"),
        ("kernel", "fast", "kernel='fast' is not a kernel: choose one of auto, reference, compiled, triton, inductor"),
    ],
)
def test_options_out_of_range(option, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        TacoAdamW([parameter(3, 3)], **{option: value})


def test_unknown_treatment():
    with pytest.raises(ValueError, match="treatment='quaternary' is not known: choose auto, ternary or dense"):
        TacoAdamW([{"params": [parameter(64, 100)], "treatment": "quaternary"}])
