"""The cases of `test_triton_interpreter.py`, in a process of its own: Triton decides at import whether it interprets.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_cases      # on the CPU, by Triton's interpreter
    python -m tests.kernels.triton_cases --device cuda           # the same on a GPU

prints one JSON object: case -> "" when it holds, else what was wrong. The reference always runs on the CPU. The
interpreter takes about a fifth of a second a program, so the parameters are small.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from hf_memopt.codecs import base
from hf_memopt.codecs.dense import Dense
from hf_memopt.codecs.ternary import TernaryFirstMoment, TernarySecondMoment
from hf_memopt.kernels import reference
from hf_memopt.kernels import triton as kernel
from hf_memopt.kernels.scalars import StepScalars, parameter_key
from tests.cases import randn, uneven_gradient

CASES: dict[str, Callable[[], None]] = {}
DEVICE = torch.device("cpu")  # where the Triton kernels run; main() sets it


def case(name: str, *arguments) -> Callable:
    def register(check: Callable) -> Callable:
        CASES[name] = lambda: check(*arguments)
        return check

    return register


def scalars(step: int, **settings) -> StepScalars:
    given = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "stochastic": True, "maximize": False}
    return StepScalars.at_step(step, parameter_key=parameter_key(7, "layer.weight"), **(given | settings))


def ternary_state(shape) -> dict[str, Tensor]:
    codecs = {"exp_avg": TernaryFirstMoment(), "exp_avg_sq": TernarySecondMoment()}
    return base.zeros(codecs, torch.Size(shape), torch.device("cpu"))


def dense_state(shape) -> dict[str, Tensor]:
    return base.zeros({"exp_avg": Dense(), "exp_avg_sq": Dense()}, torch.Size(shape), torch.device("cpu"))


def same_bits(one: Tensor, other: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.cpu().contiguous().view(integer), other.cpu().contiguous().view(integer))


def as_is(t: Tensor) -> Tensor:
    return t


class Twins:
    """One parameter twice: for the reference on the CPU and for the Triton kernel on DEVICE."""

    def __init__(self, kind: str, start: Tensor, view: Callable[[Tensor], Tensor] = as_is) -> None:
        """``view`` lays weights and gradients out in another way."""
        self.step_of, self.view = f"{kind}_adamw_", view
        self.params = [view(start.clone()), view(start.to(DEVICE, copy=True))]
        make = ternary_state if kind == "ternary" else dense_state
        self.states = [make(self.params[0].shape) for _ in range(2)]
        self.states[1] = {key: buffer.to(DEVICE) for key, buffer in self.states[1].items()}

    def set(self, key: str, value: Tensor) -> None:
        for state in self.states:
            state[key].copy_(value)

    def step(self, grad: Tensor, s: StepScalars) -> None:
        """One step by either kernel; every buffer must come out equal, bit for bit."""
        compare(self.step_of, self.params, self.states, [self.view(grad), self.view(grad.to(DEVICE))], s)


def compare(step_of: str, params: list[Tensor], states: list[dict], grads: list[Tensor], s: StepScalars) -> None:
    expected = getattr(reference, step_of)(params[0], grads[0], states[0], s)
    applied = getattr(kernel, step_of)(params[1], grads[1], states[1], s)
    assert applied.shape == () and applied.dtype == torch.bool
    assert bool(applied) == expected, f"applied: {bool(applied)}, reference: {expected}"
    pairs = {"weights": params} | {key: [state[key] for state in states] for key in states[0]}
    for name, (one, other) in pairs.items():
        wrong = int((one != other.cpu()).sum())
        assert same_bits(one, other), f"{name}: {wrong} of {one.numel()} differ at step {s}"


def follow(shape, dtype, grad_dtype=None, steps=2, view=as_is, kind="ternary", **settings) -> None:
    """Several steps of both kernels from the same start."""
    twins = Twins(kind, randn(*shape, seed=1, scale=0.1).to(dtype), view)
    for step in range(1, steps + 1):
        twins.step(uneven_gradient(*shape, seed=10 * step).to(grad_dtype or dtype), scalars(step, **settings))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

case("fp32: full blocks and a tail, three steps", (19, 343), F32, None, 3)(follow)
case("bf16, stochastic write-back", (5, 187), BF16)(follow)
case("fp16, stochastic write-back", (5, 187), F16)(follow)
case("bf16 weights with fp32 gradients", (3, 161), BF16, F32)(follow)
case("fp32 weights with fp16 gradients", (3, 161), F32, F16)(follow)
case("several row and column tiles of the sums", (70, 300), F32, None, 1)(follow)
case("several parts of the row means", (260, 3), F32, None, 1)(follow)
case("one row", (1, 200), F32)(follow)
case("one element", (1, 1), F32)(follow)
for _width in (1, 2, 3, 4, 5, 6, 79, 159, 160):
    case(f"width {_width}", (3, _width), F32)(follow)


@case("bf16, nearest write-back", BF16)
@case("fp16, nearest write-back", F16)
def nearest(dtype):
    follow((3, 165), dtype, stochastic=False)


@case("maximize")
def maximize():
    follow((3, 165), F32, maximize=True)


@case("other betas, no weight decay")
def other_scalars():
    follow((3, 165), F32, betas=(0.0, 0.95), weight_decay=0.0, eps=0.0)


@case("rows with gaps between them")
def row_strides():
    follow((5, 200), BF16, view=lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]])


@case("transposed weights and gradients")
def transposed():
    follow((165, 9), BF16, steps=1, view=lambda t: t.t())


@case("all code values")
def all_codes():
    """Every byte that stands for five digits, in both moments, under the digits that padding must keep."""
    shape = (8, 320)
    values = torch.arange(243, dtype=torch.int64)
    legal = ((256 * values + 242) * 17261 >> 22).to(torch.uint8)
    twins = Twins("ternary", randn(*shape, seed=2))
    count = twins.states[0]["exp_avg.codes"].numel()
    assert count > 243
    twins.set("exp_avg.codes", legal[torch.arange(count) % 243].view(8, -1))
    twins.set("exp_avg_sq.codes", legal[torch.arange(count) * 5 % 243].view(8, -1))
    twins.set("exp_avg.scale", randn(8, 2, seed=3).abs())
    twins.set("exp_avg_sq.row", randn(8, seed=4).abs())
    twins.set("exp_avg_sq.col", randn(320, seed=5).abs())
    twins.step(randn(*shape, seed=6), scalars(9))


@case("sums on an edge: full block", 160)
@case("sums on an edge: tail", 117)
def edges(width):
    """Block sums on which a decision hangs, so that one addition in another order shows.

    beta1 = 0 makes m the gradient. In one row after the other its first element is moved until it equals the threshold
    for being kept, or until the mean magnitude stands between two bf16 numbers: another last bit of the sum, and the
    element is kept or the scale is the other one.
    """
    rows, tie = 48, torch.tensor(1 + 2.0**-8)
    size = 0.9 + 0.2 * torch.rand(rows, width, generator=torch.Generator().manual_seed(5))
    size *= tie / size.mean(dim=1, keepdim=True)

    def block_sum(row: Tensor) -> Tensor:
        plane = -(-width // 5)
        padded = torch.nn.functional.pad(row, (0, 5 * plane - width))
        return reference._tree_sum(padded.view(1, 1, 5, plane))[0, 0]

    for row in size[::2]:
        for _ in range(50):
            row[0] = block_sum(row) * (0.7 / width)
    for row in size[1::2]:
        while block_sum(row) / width > tie:
            row[0] -= 2.0**-20
        while block_sum(row) / width <= tie:
            row[0] += 2.0**-22
    twins = Twins("ternary", randn(rows, width, seed=7))
    twins.step(size * randn(rows, width, seed=6).sign(), scalars(1, betas=(0.0, 0.999)))


@case("from 1e-44 to 1e19", F32)
@case("subnormal to large fp16 weights", F16)
@case("subnormal to large bf16 weights", BF16)
def magnitudes(dtype):
    """Numbers all over the range, subnormal ones included, so that a flush to zero or another rounding would show."""
    shape = (6, 163)
    powers = {F32: (-44, 18), BF16: (-40, 18), F16: (-7, 4)}[dtype]
    exponents = torch.linspace(*powers, 6 * 163, dtype=torch.float64).view(shape)
    twins = Twins("ternary", (randn(*shape, seed=3).sign() * 10.0**exponents).to(dtype))
    for step in (1, 2):
        exponents = torch.linspace(19, -44, 163, dtype=torch.float64)[None, :] * (torch.arange(6)[:, None] / 5)
        grad = (randn(*shape, seed=step) * 10.0**exponents).clamp(-1.7e19, 1.7e19).float()
        twins.step(grad, scalars(step, lr=1.0))


@case("rows and columns without gradient")
def zeros():
    shape = (4, 170)
    twins = Twins("ternary", randn(*shape, seed=1))
    for step in (1, 2):
        grad = randn(*shape, seed=step)
        grad[2], grad[:, 165:], grad[:, 7] = 0, 0, 0
        twins.step(grad, scalars(step, weight_decay=0.0))
    assert same_bits(twins.params[1][2], randn(*shape, seed=1)[2]), "a row without gradient moved"
    twins.step(torch.zeros(shape), scalars(3))


@case("NaN, infinite and too large gradients: ternary", "ternary", (70, 163))
@case("NaN, infinite and too large gradients: dense", "dense", (70, 7))
@case("NaN, infinite and too large gradients: vector", "dense", (1100, 1))
def not_finite(kind, shape):
    """Wherever it stands, one bad element leaves weights and state as they are; the largest good one does not."""
    twins = Twins(kind, randn(*shape, seed=1))
    before = {key: buffer.clone() for key, buffer in twins.states[1].items()}
    for where, value in ((0, float("nan")), (-1, float("inf")), (shape[1], -float("inf")), (-2, 2e19)):
        grad = randn(*shape, seed=2)
        grad.view(-1)[where] = value
        twins.step(grad, scalars(1))
        assert same_bits(twins.params[1], randn(*shape, seed=1)), "weights were written"
        assert all(same_bits(twins.states[1][key], before[key]) for key in before), "state was written"
    if kind == "dense":
        grad = randn(*shape, seed=2)
        grad[-1, -1] = 1.75e19
        twins.step(grad, scalars(1))


case("dense: bf16 vector over two tiles", (1100, 1), BF16, None, 2, as_is, "dense")(follow)
case("dense: fp32 matrix over tiles", (9, 300), F32, None, 2, as_is, "dense")(follow)
case("dense: fp16 scalar", (1, 1), F16, None, 2, as_is, "dense")(follow)
case("dense: transposed bf16 weights, fp32 gradients", (40, 3), BF16, F32, 2, lambda t: t.t(), "dense")(follow)


@case("the answer goes where it is wanted")
def answer():
    answers = torch.ones(3, dtype=torch.bool, device=DEVICE)
    for slot, value in ((0, 0.5), (1, float("nan"))):
        twins = Twins("ternary", randn(2, 9))
        grad = torch.full((2, 9), value, device=DEVICE)
        given = answers[slot]
        assert kernel.ternary_adamw_(twins.params[1], grad, twins.states[1], scalars(1), given) is given
    assert answers.tolist() == [True, False, True]


@case("empty parameters")
def empty():
    for shape in ((0, 5), (5, 0)):
        for kind in ("ternary", "dense"):
            nothing = Twins(kind, torch.zeros(shape))
            grad = torch.zeros(shape, device=DEVICE)
            assert bool(getattr(kernel, f"{kind}_adamw_")(nothing.params[1], grad, nothing.states[1], scalars(1)))


@case("what it cannot do is refused")
def refusals():
    twins = Twins("ternary", randn(2, 9))
    w, state = twins.params[1], twins.states[1]
    strided = state | {"exp_avg.codes": state["exp_avg.codes"].t().contiguous().t()}
    for arguments, word in (
        ((w.double(), w, state, scalars(1)), "torch.float64"),
        ((w, w[:, :8], state, scalars(1)), "one shape"),
        ((w, w, strided, scalars(1)), "exp_avg.codes"),
        ((w, w, ternary_state((2, 10)), scalars(1)), "exp_avg"),
        ((w, w, state | {"exp_avg.scale": state["exp_avg.scale"].float()}, scalars(1)), "torch.bfloat16"),
    ):
        try:
            kernel.ternary_adamw_(*arguments)
        except ValueError as error:
            assert word in str(error), str(error)
        else:
            raise AssertionError(f"not refused: {word}")


def spoiled(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.empty`` that never returns zeros by luck: temporaries must be written before they are read."""

    def make(*arguments, **settings) -> Tensor:
        tensor = empty(*arguments, **settings)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return make


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=DEVICE)
    DEVICE = parser.parse_args().device
    torch.set_num_threads(1)
    torch.empty = spoiled(torch.empty)
    results = {}
    for name, check in CASES.items():
        try:
            check()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
