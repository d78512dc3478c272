"""The matrices of an adapter, their dropout, frozen 8-bit layers: against plain layers and the formulas, no PEFT."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memopt.activations import dropout, int8, lora, shared
from hf_memopt.activations.projection import make
from tests.tolerances import HALF_SPACING, SIGMAS, E, products, standard_error

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ("principal", "structured", "orthonormal", "gaussian")
T, N, R, M = 24, 32, 4, 20


def factor(n: int, k: int, dtype=FP32, bias=False, **plan) -> tuple[nn.Linear, nn.Linear]:
    """A plain linear layer, and ours with its numbers; both in train mode."""
    plain = nn.Linear(n, k, bias=bias, dtype=dtype)
    ours = copy.deepcopy(plain)
    assert lora.patch(ours, lora.Plan(**plan))
    return plain, ours


def saved(run) -> dict[int, torch.Tensor]:
    """What autograd keeps of ``run()``: storage -> one tensor in it."""
    found = {}

    def pack(t):
        found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found["output"] = run()
    return found


def gradients(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(T, N), (2, 3, N), (2, 3, 2, N), (0, N)])
def test_in_one_dtype_it_is_linear_bit_for_bit(dtype, shape):
    plain, ours = factor(N, R, dtype, bias=True)
    x, dy = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], R, dtype=dtype)
    for a, b in zip(gradients(plain, x, dy), gradients(ours, x, dy), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_adapter_of_fp32_on_bf16_is_within_rounding_of_peft():
    """s B (A x) with A, B in fp32: PEFT casts x up and the sum down. Ours rounds A, h, B, delta and s delta to bf16:
    2 u of |x||A|^T in h, 3 u more behind it. Backward rounds s dy, B and dh: 3 u, and A and dx: 2 u more."""
    u, s = HALF_SPACING[BF16], 2.0 / 3.0
    plain_a, ours_a = factor(N, R)
    plain_b, ours_b = factor(R, M)
    x, dy = torch.randn(T, N, dtype=BF16), torch.randn(T, M, dtype=BF16)

    def run(a, b, cast):
        inner = x.detach().requires_grad_()
        out = (b(a(cast(inner))) * s).to(BF16)
        out.backward(dy)
        return out.detach(), inner.grad, a.weight.grad, b.weight.grad

    theirs, mine = run(plain_a, plain_b, lambda t: t.float()), run(ours_a, ours_b, lambda t: t)
    ax, aa, ab, ady = (t.detach().double().abs() for t in (x, plain_a.weight, plain_b.weight, dy))
    sizes = (s * ax @ aa.T @ ab.T, s * ady @ ab @ aa, s * (ady @ ab).T @ ax, s * ady.T @ (ax @ aa.T))
    for got, wanted, size, roundings in zip(mine, theirs, sizes, (6, 6, 3, 3), strict=True):
        assert got.dtype == wanted.dtype
        bound = ((1 + u) ** (roundings + 1) - 1) * size  # one more for the sums in fp32, of at most 32 terms
        assert ((got.double() - wanted.double()).abs() <= bound).all()
        assert not torch.equal(got, wanted)


def test_gradient_of_fp32_weight_is_summed_in_fp32(monkeypatch):
    dy, x = torch.randn(64, R, dtype=BF16), torch.randn(64, N, dtype=BF16)
    exact = dy.double().T @ x.double()
    for chunk in (1 << 20, 10 * N, 1):
        monkeypatch.setattr(lora, "_CHUNK", chunk)
        assert ((lora.weight_gradient(dy, x, FP32) - exact).abs() <= products(dy.T, x)).all()
    rounded = lora.weight_gradient(dy, x, BF16)
    assert rounded.dtype == BF16 and ((rounded - exact).abs() > products(dy.T, x)).any()


def test_autocast_is_the_plain_layer_but_for_the_rounded_gradient():
    plain, ours = factor(N, R)
    x, dy = torch.randn(T, N), torch.randn(T, R)
    with torch.autocast("cpu", BF16):
        (y, dx, dw, _), (y2, dx2, dw2, _) = gradients(plain, x, dy), gradients(ours, x, dy)
    assert torch.equal(y, y2) and torch.equal(dx, dx2) and dw2.dtype == FP32
    of_sums = 2 * products(dy.to(BF16).T, x.to(BF16))  # both sum in fp32, the plain layer rounds to bf16
    assert ((dw - dw2).abs() <= HALF_SPACING[BF16] * dw2.abs() * (1 + 2.0**-7) + of_sums).all()


def test_evaluation_is_the_plain_layer_on_a_cast_input():
    plain, ours = factor(N, R)
    x = torch.randn(T, N, dtype=BF16)
    ours.eval()
    assert torch.equal(ours(x), plain(x.float()))


def test_what_is_kept_is_one_storage_for_all_readers():
    layers = nn.ModuleList([factor(N, R)[1] for _ in range(3)])
    parent = _Reads(layers)
    shared.watch(parent)
    weights = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    x = torch.randn(T, N, dtype=BF16, requires_grad=True)
    kept = saved(lambda: parent(x))
    assert kept.keys() - weights - {"output"} == {x.untyped_storage().data_ptr()}
    x = torch.randn(T, N, requires_grad=True)
    with torch.autocast("cpu", BF16):
        kept = saved(lambda: parent(x))
    (cast,) = (t for key, t in kept.items() if key not in weights | {"output"})
    assert cast.dtype == BF16 and cast.shape == x.shape


class _Reads(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def test_frozen_factor_keeps_nothing_and_passes_the_gradient():
    plain, ours = factor(N, R)
    plain.weight.requires_grad_(False), ours.weight.requires_grad_(False)
    x, dy = torch.randn(T, N), torch.randn(T, R)
    assert torch.equal(gradients(plain, x, dy)[1], gradients(ours, x, dy)[1])
    kept = saved(lambda: ours(x.requires_grad_()))
    assert kept.keys() == {ours.weight.untyped_storage().data_ptr(), "output"}


def test_copies_and_pickles_stay_and_unpatching_leaves_nothing():
    plain, ours = factor(N, R)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again) is lora.LoraFactor and again.memopt_plan == ours.memopt_plan
    lora.unpatch(ours)
    assert type(ours) is nn.Linear and ours.__dict__.keys() == plain.__dict__.keys()
    assert not lora.patch(nn.Embedding(2, 2), lora.Plan())


# -- compressed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [0.0, 0.25])
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_gradient_is_unbiased_and_the_rest_exact(kind, drop):
    """Over 300 draws of P, with the mask of each draw: the mean of dA - dh^T d(x) is 0 within its standard error."""
    _, exact = factor(N, R)
    _, ours = factor(N, R, rank=8, kind=kind)
    ours.load_state_dict(exact.state_dict())
    d = nn.Dropout(drop)
    dropout.patch(d, 0)
    x, dy = torch.randn(T, N) * torch.linspace(0.1, 3, N), torch.randn(T, R)
    total, squares, samples = torch.zeros(R, N), torch.zeros(R, N), 300
    for seed in range(samples):
        results = []
        for layer in (exact, ours):
            torch.manual_seed(seed)
            layer.weight.grad = None
            inner = x.detach().requires_grad_()
            y = layer(d(inner))
            y.backward(dy)
            results.append((y.detach(), inner.grad, layer.weight.grad))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        error = results[1][2] - results[0][2]
        total += error
        squares += error.square()
    assert (total / samples).abs().max() > 0
    of_sums = (T + N + 8 + 4) * E * N / 8 * (dy.abs().T @ x.abs()) / (1 - drop)  # where P keeps all and nothing varies
    bound = SIGMAS * standard_error(squares / samples, samples) + of_sums
    assert ((total / samples).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_gradient_is_the_formula(kind):
    _, ours = factor(N, R, rank=8, kind=kind, seed=3)
    x, dy = torch.randn(T, N), torch.randn(T, R)
    torch.manual_seed(1)
    _, _, dw, _ = gradients(ours, x, dy)
    torch.manual_seed(1)
    key = dropout.drawn_key(3, x)
    top = x.square().sum(0).topk(4).indices.sort().values if kind == "principal" else None
    p = make(kind, N, 8, key, x.device, FP32, top).project(torch.eye(N)).double()
    size = dy.double().abs().T @ x.double().abs() @ p.abs() @ p.abs().T
    assert ((dw - dy.double().T @ x.double() @ p @ p.T).abs() <= (T + N + 8 + 4) * E * size).all()


@pytest.mark.parametrize("drop", [0.0, 0.25])
@pytest.mark.parametrize("kind", KINDS)
def test_readers_share_one_z_and_keep_no_x(kind, drop):
    """With dropout, which each reader draws for itself, only selections of columns can be shared."""
    reads = [nn.Sequential(nn.Dropout(drop), factor(N, R, rank=8, kind=kind)[1]) for _ in range(3)]
    for read in reads:
        dropout.patch(read[0], 0)
    parent = _Reads(nn.ModuleList(reads))
    shared.watch(parent)
    weights = {read[1].weight.untyped_storage().data_ptr() for read in reads}
    kept = saved(lambda: parent(torch.randn(T, N, requires_grad=True)))
    left = [t for key, t in kept.items() if key not in weights | {"output"}]
    alone = drop and kind in ("orthonormal", "gaussian")
    assert [t.shape for t in left if t.is_floating_point()] == [(T, 8)] * (3 if alone else 1)
    assert [t.shape for t in left if not t.is_floating_point()] == ([(4,)] if kind == "principal" else [])


# -- dropout ----------------------------------------------------------------------------------------


def test_dropout_is_that_of_a_stored_mask():
    ours = nn.Dropout(0.3)
    assert dropout.patch(ours, 7)
    x, dy = torch.randn(5, T, N, requires_grad=True), torch.randn(5, T, N)
    torch.manual_seed(2)
    kept = saved(lambda: ours(x))
    kept.pop("output").backward(dy)
    assert not kept
    torch.manual_seed(2)
    mask = dropout.Mask(dropout.drawn_key(7, x), 0.3).of(x.shape, x.device)
    again = x.detach().clone().requires_grad_()
    y = again * mask * (1 / 0.7)
    y.backward(dy)
    torch.manual_seed(2)
    assert torch.equal(ours(x), y) and torch.equal(x.grad, again.grad)


def test_dropout_keeps_each_element_with_its_probability_and_differs_between_calls():
    ours, p, samples = nn.Dropout(0.3), 0.3, 400
    dropout.patch(ours, 0)
    x = torch.ones(64, 32)
    ys = torch.stack([ours(x) for _ in range(samples)])
    assert ((ys == 0) | torch.isclose(ys, torch.tensor(1 / (1 - p)))).all()
    variance = p / (1 - p)  # of 1 / (1 - p) with probability 1 - p, else 0
    assert ((ys.mean(0) - 1).abs() <= SIGMAS * standard_error(variance, samples)).all()
    fourth = p + (1 - p) * (p / (1 - p)) ** 4  # centred moment of 0 and 1 / (1 - p)
    assert abs(ys.var() - variance) <= SIGMAS * standard_error(fourth, ys.numel())
    assert not torch.equal(ys[0], ys[1])


def test_dropout_in_front_of_an_adapter_leaves_x_as_all_that_is_kept():
    d, (plain, ours) = nn.Dropout(0.5), factor(N, R)
    dropout.patch(d, 0)
    x = torch.randn(T, N, requires_grad=True)
    torch.manual_seed(3)
    kept = saved(lambda: ours(d(x)))
    kept.pop("output").sum().backward()
    assert kept.keys() == {t.untyped_storage().data_ptr() for t in (x, ours.weight)}
    torch.manual_seed(3)
    plain(d(x.detach())).sum().backward()
    assert torch.equal(plain.weight.grad, ours.weight.grad)


@pytest.mark.parametrize("case", ["evaluation", "p=0", "p=1", "inplace"])
def test_dropout_is_the_plain_one_where_nothing_is_to_be_gained(case):
    plain = nn.Dropout({"p=0": 0.0, "p=1": 1.0}.get(case, 0.5), inplace=case == "inplace").train(case != "evaluation")
    ours = copy.deepcopy(plain)
    dropout.patch(ours, 0)
    results = []
    for layer in (plain, ours):
        torch.manual_seed(0)
        results.append(layer(torch.ones(8, 8)))
    assert torch.equal(*results)
    dropout.unpatch(ours)
    assert type(ours) is nn.Dropout and ours.__dict__.keys() == plain.__dict__.keys()


# -- frozen 8-bit layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("bias", [False, True])
def test_frozen_int8_layer_keeps_nothing_and_has_the_same_bits(dtype, bias):
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(N, M, bias=bias, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(torch.randn(M, N), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu").requires_grad_(False)
    x, dy = torch.randn(2, 3, N, dtype=dtype), torch.randn(2, 3, M, dtype=dtype)

    def run():
        inner = x.clone().requires_grad_()
        y = layer(inner)
        y.backward(dy)
        return y.detach(), inner.grad

    theirs = run()
    assert int8.patch(layer) and isinstance(layer, bnb.nn.Linear8bitLt)
    for a, b in zip(theirs, run(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    y = layer(x.clone().requires_grad_())
    assert not y.grad_fn.saved_tensors and not any(isinstance(v, torch.Tensor) for v in vars(y.grad_fn).values())
    layer.eval()
    ours = layer(x)
    int8.unpatch(layer)
    assert type(layer) is bnb.nn.Linear8bitLt and torch.equal(ours, layer(x))


def test_compiled_factor_and_dropout_give_what_the_eager_plain_ones_do():
    _, ours = factor(N, R)
    d = nn.Dropout(0.0)
    dropout.patch(d, 0)
    x = torch.randn(T, N, dtype=BF16, requires_grad=True)
    compiled = torch.compile(lambda t: ours(d(t)), backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert ours.weight.grad.dtype == FP32
    wanted = F.linear(x.detach(), ours.weight.to(BF16))
    assert torch.equal(compiled(x), wanted)
