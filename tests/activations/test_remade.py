"""Notes on tensors: when they hold, and that a tensor made again is made once, is the right one and does not stay."""

from __future__ import annotations

import copy
import io
import threading
import weakref

import pytest
import torch
from torch.nn import functional as F

from hf_memopt.activations import remade
from hf_memopt.activations.remade import Recipe, kept, note, recipe_of


class Maker:
    """y = scale * x^2; remembers what it made."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.made = []

    def __call__(self, x):
        y = self.scale * x * x
        self.made.append(weakref.ref(y))
        return y

    def alive(self) -> int:
        return sum(ref() is not None for ref in self.made)


class Square(torch.autograd.Function):
    """scale * x^2, noted."""

    @staticmethod
    def forward(ctx, x, maker):
        ctx.save_for_backward(x)
        ctx.scale = maker.scale
        return ctx.scale * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * ctx.scale * x, None


class Read(torch.autograd.Function):
    """w * y, keeping the recipe of y; ``before`` is called in backward before y is made."""

    @staticmethod
    def forward(ctx, y, w, before):
        recipe = recipe_of(y)
        ctx.before = before
        ctx.kept = kept(recipe)
        ctx.save_for_backward(w, *recipe.inputs)
        return w * y

    @staticmethod
    def backward(ctx, grad):
        w, *inputs = ctx.saved_tensors
        if ctx.before is not None:
            ctx.before()
        return grad * w, (grad * ctx.kept.make(inputs)).sum(), None


def weights(count: int = 3) -> list[torch.Tensor]:
    return [torch.full((), float(i + 1), requires_grad=True) for i in range(count)]


def noted(x, maker):
    return note(Square.apply(x, maker), Recipe(maker, (x,)))


def read(y, ws, before=None):
    return sum(Read.apply(y, w, before).sum() for w in ws)


@pytest.fixture
def x():
    return torch.arange(1.0, 5.0, requires_grad=True)


def check(x, ws, scale=1.0):
    expected = (scale * x.detach() ** 2).sum()
    for w in ws:
        assert torch.equal(w.grad, expected)
        w.grad = None


def test_a_note_holds_for_the_object_and_until_something_is_changed_in_place(x):
    recipe = Recipe(Maker(), (x,))
    y = note(x * x, recipe)
    assert recipe_of(y) is recipe
    assert recipe_of(F.dropout(y, 0.5, training=False)) is recipe  # returns y itself
    assert recipe_of(y.detach()) is None and recipe_of(y[:]) is None and recipe_of(y.clone()) is None
    assert recipe_of(x) is None
    y[:1].add_(1)
    assert recipe_of(y) is None
    y = note(x * x, recipe)
    with torch.no_grad():
        x.mul_(1)
    assert recipe_of(y) is None


def test_inference_tensors_get_no_note():
    with torch.inference_mode():
        x = torch.ones(3)
        assert recipe_of(note(x * x, Recipe(Maker(), (x,)))) is None


def test_a_note_is_neither_pickled_nor_copied(x):
    y = note((x * x).detach(), Recipe(lambda x: x * x, (x,)))
    stream = io.BytesIO()
    torch.save(y, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert torch.equal(loaded, y) and recipe_of(loaded) is None
    assert recipe_of(copy.deepcopy(y)) is None


def test_three_consumers_make_it_once_and_nothing_stays(x):
    maker, ws = Maker(2.0), weights()
    read(noted(x, maker), ws).backward()
    check(x, ws, 2.0)
    assert len(maker.made) == 1 and maker.alive() == 0


def test_each_pass_over_one_graph_makes_it_anew(x):
    maker, ws = Maker(), weights()
    loss = read(noted(x, maker), ws)
    for count in (1, 2, 3):
        loss.backward(retain_graph=True)
        check(x, ws)
        assert len(maker.made) == count and maker.alive() == 0


def test_at_most_one_is_alive_and_two_recipes_are_not_confused(x):
    a, b, ws, vs = Maker(), Maker(3.0), weights(), weights()
    y, z = noted(x, a), noted(x, b)
    peak = []
    loss = 0
    for w, v in zip(ws, vs, strict=True):  # alternating, so that each consumer finds the other's tensor
        loss = loss + read(y, [w], lambda: peak.append(a.alive() + b.alive()))
        loss = loss + read(z, [v], lambda: peak.append(a.alive() + b.alive()))
    loss.backward()
    check(x, ws)
    check(x, vs, 3.0)
    assert max(peak) == 1 and len(a.made) == len(b.made) == 3
    assert a.alive() == b.alive() == 0


def test_part_of_the_consumers_leave_nothing_behind(x):
    maker, ws = Maker(), weights()
    torch.autograd.grad(read(noted(x, maker), ws), ws[:2])
    assert len(maker.made) == 1 and maker.alive() == 0


def test_a_pass_within_a_pass(x):
    outer, inner, ws, vs = Maker(), Maker(5.0), weights(), weights()

    def nested():
        with torch.enable_grad():
            read(noted(x, inner), vs).backward()

    read(noted(x, outer), ws, nested).backward()
    for v in vs:
        assert torch.equal(v.grad, 3 * (5 * x.detach() ** 2).sum())
    check(x, ws)
    assert outer.alive() == inner.alive() == 0


def test_after_an_exception_the_next_pass_is_right_and_the_tensor_goes(x):
    maker, ws, calls = Maker(), weights(), []

    def fail_second():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("on purpose")

    loss = read(noted(x, maker), ws, fail_second)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward(retain_graph=True)
    assert len(maker.made) == 1
    for w in ws:
        w.grad = None
    x.grad = None
    loss.backward()
    check(x, ws)
    assert len(maker.made) == 2 and maker.alive() == 0

    calls.clear()
    loss = read(noted(x, maker), ws, fail_second)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    assert maker.alive() == 1
    noted(x, maker)
    assert maker.alive() == 0


def test_a_changed_input_raises_as_autograd_does(x):
    maker, ws = Maker(), weights()
    loss = read(noted(x, maker), ws)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_made_tensor_that_a_consumer_changed_is_not_given_to_the_next(x):
    maker, got = Maker(), []
    recipe = Recipe(maker, (x.detach(),))
    one = kept(recipe)
    assert kept(recipe) is one and kept(recipe) is one

    class Change(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            got.append(one.make(recipe.inputs).clone())
            one.make(recipe.inputs).zero_()
            got.append(one.make(recipe.inputs).clone())
            return grad

    Change.apply(x).sum().backward()
    assert torch.equal(got[0], x * x) and torch.equal(got[1], x * x)


def test_outside_of_a_backward_pass_it_is_always_made(x):
    maker = Maker()
    recipe = Recipe(maker, (x,))
    kept(recipe), kept(recipe)
    first, second = kept(recipe).make([x]), kept(recipe).make([x])
    assert first is not second and torch.equal(first, second) and not first.requires_grad


def test_what_a_consumer_keeps_holds_no_tensor():
    x = torch.ones(4, requires_grad=True) * 1
    ref = weakref.ref(x)
    one = kept(Recipe(Maker(), (x,)))
    del x
    assert ref() is None and one is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_as_it_was_when_the_recipe_was_written(enabled):
    w = torch.ones(3, 3)

    def product(x):
        return x @ w

    x = torch.ones(2, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        recipe = Recipe(product, (x,))
    with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
        assert recipe.make((x,)).dtype == (torch.bfloat16 if enabled else torch.float32)


def test_threads_have_slots_of_their_own():
    wrong = []
    barrier = threading.Barrier(4)

    def work(scale):
        x = torch.arange(1.0, 5.0, requires_grad=True)
        barrier.wait()
        for _ in range(50):
            maker, ws = Maker(scale), weights()
            read(noted(x, maker), ws).backward()
            if any(not torch.equal(w.grad, (scale * x.detach() ** 2).sum()) for w in ws):
                wrong.append(scale)

    threads = [threading.Thread(target=work, args=(float(i + 1),)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert all(slot.tensor is None for slot in remade._slots)
