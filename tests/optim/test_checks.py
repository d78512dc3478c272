"""Parameters whose elements share memory are found, whatever the strides; gradients of that kind are legal."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_memopt import TacoAdamW
from hf_memopt.optim.checks import overlaps, refuse_shared_memory
from tests.cases import NON_DEFAULT, parameter, randn
from tests.optim.common import snapshot, state_equal


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 1, 2), (2, 2, 3)], ids=str)
def test_every_small_stride(shape):
    memory = torch.zeros(64)
    for strides in itertools.product(range(7), repeat=len(shape)):
        indices = itertools.product(*map(range, shape))
        offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]
        assert overlaps(memory.as_strided(shape, strides)) == (len(set(offsets)) < len(offsets)), strides


def test_usual_tensors_do_not_overlap():
    x = torch.randn(4, 6, 5, 3)
    for y in (x, x.transpose(0, 2), x[:, ::2], x.to(memory_format=torch.channels_last), x[:0], x[0, 0, 0, 0]):
        assert not overlaps(y)
    assert not overlaps(torch.empty(1 << 20, 1 << 20, device="meta"))
    assert not overlaps(torch.zeros(3, 4).to_sparse())
    assert not overlaps(torch.zeros(1).expand(1, 1))


def test_the_usual_ways_to_share_memory():
    for y in (torch.zeros(1, 5).expand(4, 5), torch.zeros(()).expand(3), torch.zeros(9).unfold(0, 4, 1)):
        assert overlaps(y)


def test_the_refusal_names_optimizer_parameter_and_way_out():
    refuse_shared_memory("TacoAdamW", "w", torch.zeros(64, 80))
    with pytest.raises(ValueError, match=r"TacoAdamW .* elements of w share memory .*\(64, 80\).*\.clone\(\)\.$"):
        refuse_shared_memory("TacoAdamW", "w", torch.zeros(80).expand(64, 80))


EXPANDED = {
    "rows alike": ((70, 161), (1, 161)),
    "columns alike": ((70, 161), (70, 1)),
    "all alike": ((70, 161), (1, 1)),
    "one row": ((1, 5000), (1, 1)),
    "one column": ((4096, 1), (1, 1)),
    "four dimensions, one alike": ((6, 5, 4, 40), (6, 1, 4, 40)),
    "four dimensions, all alike": ((6, 5, 4, 40), (1, 1, 1, 1)),
    "vector": ((300,), (1,)),
    "scalar": ((), ()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape, source", EXPANDED.values(), ids=EXPANDED)
def test_an_expanded_gradient_is_as_good_as_a_copied_one(kernel, shape, source, dtype):
    results = []
    for layout in (lambda g: g, torch.Tensor.contiguous):
        p = parameter(*shape, dtype=dtype)
        optimizer = TacoAdamW([("w", p)], kernel=kernel, **NON_DEFAULT)
        for t in range(2):
            p.grad = layout(randn(*source, seed=t, dtype=dtype).expand(shape))
            given = p.grad.clone()
            optimizer.step()
            assert torch.equal(p.grad, given)
        results.append(snapshot(optimizer))
    assert state_equal(*results)


def test_the_gradient_of_a_sum(kernel):
    p, q = parameter(70, 161), parameter(70, 161)
    p.sum().backward()
    q.grad = torch.ones_like(q)
    for x in (p, q):
        TacoAdamW([("w", x)], kernel=kernel).step()
    assert torch.equal(p, q)


def test_a_parameter_that_shares_memory_is_refused_by_name():
    with pytest.raises(ValueError, match="elements of w share memory"):
        TacoAdamW([("w", torch.nn.Parameter(torch.zeros(80).expand(64, 80)))])
