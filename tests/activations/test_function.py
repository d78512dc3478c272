"""One compressed layer beside the plain one: exact where it must be, and as wrong as predicted where it may be."""

from __future__ import annotations

import pytest
import torch

from hf_memopt.activations.basis import InputBasis
from hf_memopt.activations.layers import patch
from tests.activations.compressed import KINDS, carrier, dense_p, pair, run
from tests.cases import randn
from tests.tolerances import SIGMAS, E, products, standard_error

N, M, R = 24, 10, 6
SHAPES = [(7, N), (2, 5, N), (2, 3, 5, N), (N,), (0, N), (2, 0, N)]


def check_exact_parts(plain, ours, x, dy, **autocast):
    """Output, input and bias gradients are nn.Linear's, bit for bit."""
    expected, got = run(plain, x, dy, **autocast), run(ours, x, dy, **autocast)
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if plain.bias is not None:
        assert torch.equal(plain.bias.grad, ours.bias.grad)
    assert ours.weight.grad is None and carrier(ours).grad.shape == (M, ours.basis.rank)
    assert carrier(ours).grad.dtype == ours.weight.dtype


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_input_gradients_are_exact(shape, bias, dtype):
    plain, ours = pair(N, M, R, bias=bias, dtype=dtype)
    check_exact_parts(plain, ours, randn(*shape, dtype=dtype), randn(*shape[:-1], M, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_exact_for_every_projection(kind):
    check_exact_parts(*pair(N, M, R, kind), randn(2, 5, N), randn(2, 5, M, seed=1))


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_exact_under_autocast(shape, bias):
    plain, ours = pair(N, M, R, bias=bias)
    x, dy = randn(*shape), randn(*shape[:-1], M, seed=1)
    check_exact_parts(plain, ours, x, dy, dtype=torch.bfloat16)
    p = ours.basis.projection(x.device, torch.bfloat16).matrix
    z = (x.to(torch.bfloat16) @ p).reshape(-1, R)
    expected = (dy.to(torch.bfloat16).reshape(-1, M).T @ z).float()
    assert torch.equal(carrier(ours).grad, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conv1d_is_exact(shape, dtype):
    if shape == (N,):
        pytest.skip("Conv1D takes no vector either")
    plain, ours = pair(N, M, R, conv=True, dtype=dtype)
    check_exact_parts(plain, ours, randn(*shape, dtype=dtype), randn(*shape[:-1], M, seed=1))


def test_inputs_that_are_not_contiguous():
    plain, ours = pair(N, M, R)
    across = randn(N, 5, 2).permute(2, 1, 0)
    strided = randn(4, 2 * N)[:, ::2]
    for x in (across, strided, randn(1, N).expand(6, N)):
        check_exact_parts(plain, ours, x, randn(M, *x.shape[:-1]).movedim(0, -1))
        plain.zero_grad(), ours.zero_grad()


def test_an_input_without_gradient():
    plain, ours = pair(N, M, R)
    x = randn(4, N)
    for layer in (plain, ours):
        layer(x).sum().backward()
    assert torch.equal(plain.bias.grad, ours.bias.grad) and carrier(ours).grad.any()


def test_the_input_may_be_given_by_name():
    plain, ours = pair(N, M, R)
    x = randn(4, N)
    assert torch.equal(plain(input=x), ours(input=x))
    assert torch.equal(plain.eval()(input=x), ours.eval()(input=x))


# -- the carrier's gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_carriers_gradient_is_the_written_one(kind, dtype, conv):
    """dy^T x P in double. Two products follow each other, each with its own sums and rounding."""
    _, ours = pair(N, M, R, kind, dtype=dtype, conv=conv)
    x, dy = randn(3, 7, N, dtype=dtype), randn(3, 7, M, seed=1, dtype=dtype)
    run(ours, x, dy)
    p, x, dy = dense_p(ours, dtype), x.reshape(-1, N), dy.reshape(-1, M)
    z = x.double() @ p
    expected = dy.double().T @ z
    bound = products(dy.T, z.float(), dtype) + dy.double().abs().T @ products(x, p.float(), dtype)
    assert ((carrier(ours).grad.double() - expected).abs() <= 1.01 * bound).all()  # 1 %: z itself is computed
    assert bound.mean() < (0.02 if dtype == torch.float32 else 1) * expected.abs().mean()


def test_two_backwards_add_up():
    _, ours = pair(N, M, R)
    x, dy = randn(2, 6, N), randn(2, 6, M, seed=1)
    parts = []
    for i in range(2):
        run(ours, x[i], dy[i])
        parts.append(carrier(ours).grad.clone())
        carrier(ours).grad = None
    for i in range(2):
        run(ours, x[i], dy[i])
    assert torch.equal(carrier(ours).grad, parts[0] + parts[1])


@pytest.mark.parametrize("kind", ["gaussian", "structured", "orthonormal"])
def test_unbiased_with_the_predicted_variance(kind):
    """The mean over keys of dB P^T is dW. An element of g P P^T has the variance (|g|^2 + g_a^2) / r for the Gaussian,
    (n/r - 1) g_a^2 for coordinates; for orthonormal columns the sum over a row is (n/r - 1) |g|^2."""
    samples = 300
    x, dy = randn(9, N), randn(9, M, seed=1)
    g = dy.double().T @ x.double()
    found = []
    for seed in range(samples):
        _, ours = pair(N, M, R, kind, seed=seed)
        run(ours, x, dy)
        found.append(carrier(ours).grad.double() @ dense_p(ours).T)
    found = torch.stack(found)
    size = g.square().sum(dim=1, keepdim=True)
    variance = {"gaussian": (size + g.square()) / R, "structured": (N / R - 1) * g.square()}.get(kind)
    total = ((N + 1) / R if kind == "gaussian" else N / R - 1) * size[:, 0]
    squares = (found - g).square().sum(dim=2)
    assert ((squares.mean(0) - total).abs() <= SIGMAS * standard_error(squares.var(0), samples)).all()
    if variance is None:
        variance = found.var(0)
    assert ((found.mean(0) - g).abs() <= SIGMAS * standard_error(variance, samples) + 100 * E * g.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_full_rank_gives_the_gradient_itself(kind, dtype):
    plain, ours = pair(N, M, N, kind, dtype=dtype)
    x, dy = randn(2, 5, N, dtype=dtype), randn(2, 5, M, seed=1)
    run(plain, x, dy), run(ours, x, dy)
    assert torch.equal(carrier(ours).grad, plain.weight.grad)


def test_full_rank_of_conv1d():
    plain, ours = pair(N, M, N, conv=True)
    x, dy = randn(2, 5, N), randn(2, 5, M, seed=1)
    run(plain, x, dy), run(ours, x, dy)
    # the same sums in another order
    flat = products(dy.reshape(-1, M).T, x.reshape(-1, N))
    assert ((carrier(ours).grad - plain.weight.grad.T).abs() <= 2 * flat).all()


def test_a_second_derivative_is_refused():
    _, ours = pair(N, M, R)
    x = randn(4, N).requires_grad_()
    (dx,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_numeric_gradient_of_the_input():
    _, ours = pair(5, 4, 2)
    ours = ours.double()
    assert torch.autograd.gradcheck(ours, (randn(3, 5).double().requires_grad_(),))


def test_the_weight_changed_between_forward_and_backward_is_noticed():
    _, ours = pair(N, M, R)
    y = ours(randn(4, N).requires_grad_())
    with torch.no_grad():
        ours.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("features", [1, 2, 3])
def test_the_smallest_layers(features):
    layer = torch.nn.Linear(features, 1)
    patch(layer, InputBasis("layer", features, 1, "principal", 0))
    layer(randn(3, features)).sum().backward()
    assert carrier(layer).grad.shape == (1, 1)
