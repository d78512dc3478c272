"""``GaLoreAdamW`` step by step against the twin, over its options; refreshes, transport, gradients that are no use."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from hf_memopt.codecs.base import parts
from hf_memopt.codecs.projected import Projection
from hf_memopt.codecs.ternary import TernaryFirstMoment, TernarySecondMoment
from hf_memopt.kernels import projected, reference
from hf_memopt.kernels.scalars import StepScalars, bias_correction, mix32, parameter_key
from hf_memopt.optim.galore import FIND, GaLoreAdamW
from hf_memopt.projections import basis as bases
from hf_memopt.projections.moments import change_of_basis, transport, transport_coordinates
from tests.cases import parameter, randn
from tests.conftest import fastest_kernel
from tests.optim.common import same_bits, snapshot, state_equal
from tests.reference import galore_twin as twin
from tests.tolerances import HALF_SPACING, E

SHAPES = [(41, 23), (23, 41), (24, 24), (3, 9, 17)]
PROJ_TYPES = ["std", "reverse_std", "left", "right"]
REFRESH = ["subspace", "svd", "select", "random"]
BETAS, EPS, LR, RANK = (0.8, 0.95), 1e-2, 1e-2, 5
PLAIN = {"refresh": "subspace", "transport": "moments", "residual": "none", "stagger": False, "projector": "int8"}
PLAIN |= {"matmul": "float32", "update_proj_gap": 2, "rank": RANK, "lr": LR, "betas": BETAS, "eps": EPS}


def galore(p, **options) -> GaLoreAdamW:
    options = {"kernel": fastest_kernel(), **PLAIN, **options}
    return GaLoreAdamW([{"params": [("w", p)], "treatment": "projected"}], **options)


class Watched:
    """One parameter's steps beside the twin's, each from the optimizer's own state before it."""

    def __init__(self, optimizer: GaLoreAdamW, p: torch.nn.Parameter) -> None:
        self.optimizer, self.p = optimizer, p
        self.group = optimizer.param_groups[0]
        self.projection = Projection.of(self.group)
        self.space, self.codecs = self.projection.space(p.shape), self.projection.codecs(p.shape)
        self.rule = twin.Rule(
            self.group["lr"],
            self.group["betas"],
            self.group["eps"],
            self.group["weight_decay"],
            self.group["scale"],
            self.group["residual"],
            self.group["residual_scale"],
            self.group["maximize"],
        )

    def stored(self, moment: str, state: dict) -> torch.Tensor:
        """A moment (b, r, L), fp32."""
        found = self.codecs[moment].decode(parts(self.codecs[moment], moment, state, self.p.shape))
        return found.reshape(self.space.matrices, self.space.rank, self.space.length)

    def basis(self, state: dict) -> torch.Tensor:
        """(b, d, r) fp32, or coordinates."""
        if self.group["refresh"] != "random":
            codec = self.codecs["projector"]
            return codec.decode(parts(codec, "projector", state, self.p.shape)).clone()
        d, r, b = self.space.dimension, self.space.rank, self.space.matrices
        key = mix32(parameter_key(self.group["seed"], "w/subspace") + state["refreshes"])
        columns, signs = bases.random_columns(key, b, d, r, torch.device("cpu"))
        exact = [twin.random_basis(d, c, s) for c, s in zip(columns.tolist(), signs.tolist(), strict=True)]
        return torch.stack(exact).float()

    def full(self, basis: torch.Tensor) -> torch.Tensor:
        if basis.is_floating_point():
            return basis.double()
        return torch.stack([twin.unit_basis(self.space.dimension, row) for row in basis.tolist()])

    def step(self, grad: torch.Tensor) -> None:
        p, state = self.p, self.optimizer.state_of(self.group, self.p)
        before = {key: v.clone() if torch.is_tensor(v) else v for key, v in state.items()}
        weight, old = p.detach().clone(), self.basis(before)
        p.grad = grad.clone()
        step = int(before["step"]) + 1
        self.optimizer.step()
        assert same_bits(p.grad, grad), "the gradient is not to be touched"
        new = self.basis(state)
        refreshed = step >= before["refresh_at"]
        assert state["refreshes"] == before["refreshes"] + refreshed and int(state["step"]) == step
        if refreshed:
            assert state["refresh_at"] == step + self.group["update_proj_gap"]
            self.check_refresh(self.space.view(grad).double(), self.full(old), self.full(new))
        else:
            assert torch.equal(new, old)
        moves = refreshed and step > 1 and self.group["transport"] == "moments"
        expect = self.ternary_low_rank if self.group["state"] == "ternary" else self.low_rank
        low, u, stored = expect(before, grad, old, new, step, moves)
        for moment, near in stored.items():
            found = self.stored(moment, state)
            assert all(one.holds(found[b]) for b, one in enumerate(near)), moment
        after = self.space.view(p.detach())
        for b, basis in enumerate(self.full(new)):
            args = self.space.view(weight)[b].double(), self.space.view(grad)[b].double(), basis, low[b], u[b]
            norm = float(before["residual_norm"][b]) if "residual_norm" in before else 0.0
            expected, new_norm = twin.apply(*args, norm, self.rule)
            assert expected.error.median() < 1e-2 * self.rule.lr, "a bound that says nothing"
            if p.dtype != torch.float32:
                width = 2 if self.group["stochastic_rounding"] else 1
                half = HALF_SPACING[p.dtype] * expected.value.abs().clamp(min=torch.finfo(p.dtype).tiny)
                expected.error = expected.error + width * half * (1 + 2**-6)
            assert expected.holds(after[b])
            assert "residual_norm" not in before or new_norm.holds(state["residual_norm"][b])

    def low_rank(self, before, grad, old, new, step, moves):
        """R, U and the moments after the step, by the twin."""
        lows, us, ms, vs = [], [], [], []
        for b, basis in enumerate(self.full(new)):
            m, v = (twin.Near(self.stored(name, before)[b].double()) for name in ("exp_avg", "exp_avg_sq"))
            if moves:
                m, v = twin.transported(m, v, basis, self.full(old)[b], step, self.group["betas"])
            low = twin.project(self.space.view(grad)[b].double(), basis)
            u, m, v = twin.adamw(low, m, v, step, self.rule)
            for found, one in ((lows, low), (us, u), (ms, m), (vs, v)):
                found.append(one)
        return lows, us, {"exp_avg": ms, "exp_avg_sq": vs}

    def ternary_low_rank(self, before, grad, old, new, step, moves):
        """The same with codes, where a last bit can turn one: from the parts, which have twins of their own, exactly.
        In the subspace it is ``taco_adamw``'s step on zeros at lr = 1, of which U is what it subtracts."""
        shape = self.space.low_rank_shape
        moments = {key: v.clone() for key, v in before.items() if key.startswith("exp_avg")}
        if moves:
            stored = [self.stored(name, before) for name in ("exp_avg", "exp_avg_sq")]
            bias = [bias_correction(beta, step - 1) for beta in self.group["betas"]]
            if new.is_floating_point():
                moved = transport(*stored, change_of_basis(new, old), *bias)
            else:
                moved = transport_coordinates(*stored, new, old)
            m, v = (x.reshape(shape) for x in moved)
            key = mix32(parameter_key(self.group["seed"], "w/subspace") + before["refreshes"] + 1)
            hashes = reference.hash_at(key, torch.arange(shape[0])[:, None], torch.arange(shape[1]))
            first, second = TernaryFirstMoment().encode(m), TernarySecondMoment().encode(v, reference.uniform(hashes))
            moments = {f"exp_avg.{part}": x for part, x in first.items()}
            moments |= {f"exp_avg_sq.{part}": x for part, x in second.items()}
        low = projected.project(self.space.view(grad), new)
        minus_u = torch.zeros(shape)
        scalars = StepScalars.at_step(
            step,
            lr=1.0,
            betas=self.group["betas"],
            eps=self.group["eps"],
            weight_decay=0.0,
            parameter_key=parameter_key(self.group["seed"], "w"),
            stochastic=False,
            maximize=self.group["maximize"],
        )
        assert reference.ternary_adamw_(minus_u, low.reshape(shape), moments, scalars)
        view = (self.space.matrices, self.space.rank, self.space.length)
        zero = torch.zeros(view[1:], dtype=torch.float64)
        exact = [[twin.Near(x.double(), zero) for x in full.view(view)] for full in (low, -minus_u)]
        state = self.optimizer.state[self.p]
        assert all(same_bits(state[key], value) for key, value in moments.items())
        return *exact, {}

    def check_refresh(self, grad: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
        """The new basis is what the option says, as far as it is stored exactly."""
        d, length, r = self.space.dimension, self.space.length, self.space.rank
        for g, p, q in zip(grad, old, new, strict=True):
            if self.group["refresh"] == "select":
                best = g.square().sum(dim=1).topk(r).indices.sort().values
                assert torch.equal(q, twin.unit_basis(d, best.tolist()))
            if self.group["refresh"] not in ("subspace", "svd"):
                continue
            lost = q.abs().amax(dim=0) / 254 * 1.01 if self.projection.projector == "int8" else torch.zeros(r)
            if self.group["refresh"] == "subspace":
                z = g @ (g.T @ p)
                off = 2 * (d + length) * E * torch.linalg.cond(z).item()
                assert ((torch.linalg.qr(z).Q - q).abs() <= off + lost).all()
            elif r < min(d, length):
                u, s, _ = torch.linalg.svd(g)
                off = (d + length) * E * (s[0] / (s[r - 1] - s[r])).item()
                span = u[:, :r] @ u[:, :r].T
                assert (span - q @ q.T).norm() <= 2 * off + 2.1 * d**0.5 * lost.norm()


CASES = list(itertools.product(["fp32", "ternary"], ["moments", "none"], ["none", "fira", "sign"], REFRESH))


@pytest.mark.parametrize("state, transport, residual, refresh", CASES, ids=["-".join(case) for case in CASES])
def test_against_the_twin(state, transport, residual, refresh):
    """Three steps with two refreshes, on every side of every shape; decay, scale and residual_scale away from 1."""
    options = {"state": state, "transport": transport, "residual": residual, "refresh": refresh}
    for number, (shape, proj_type) in enumerate(itertools.product(SHAPES, PROJ_TYPES)):
        p = parameter(*shape)
        more = {"weight_decay": 0.1, "scale": 0.7, "residual_scale": 0.6, "maximize": number % 2 == 1, "seed": number}
        more["projector"] = "float32" if number % 3 == 1 else "int8"
        watched = Watched(galore(p, proj_type=proj_type, **options, **more), p)
        for t in range(3):
            watched.step(randn(*shape, seed=100 * number + t))


@pytest.mark.parametrize("state", ["fp32", "ternary"])
@pytest.mark.parametrize("refresh", REFRESH)
def test_rank_equal_to_the_dimension(state, refresh):
    for shape in ((41, 7), (7, 41), (7, 7)):
        p = parameter(*shape)
        watched = Watched(galore(p, rank=7, refresh=refresh, state=state), p)
        for t in range(3):
            watched.step(randn(*shape, seed=t) + torch.eye(*shape))


@pytest.mark.parametrize("residual", ["none", "fira", "sign"])
@pytest.mark.parametrize("refresh", ["subspace", "select"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights(kernel, dtype, refresh, residual):
    for stochastic, shape in ((False, (41, 23)), (True, (41, 23)), (True, (3, 9, 17))):
        p = parameter(*shape, dtype=dtype)
        options = {"weight_decay": 0.1, "kernel": kernel, "stochastic_rounding": stochastic}
        watched = Watched(galore(p, refresh=refresh, residual=residual, **options), p)
        for t in range(3):
            watched.step(randn(*shape, seed=t, dtype=dtype))
        floats = [v.dtype for v in watched.optimizer.state[p].values() if torch.is_tensor(v) and v.is_floating_point()]
        assert set(floats) == {torch.float32}, "a bf16 second moment could not decay"


@pytest.mark.parametrize("refresh", REFRESH)
def test_a_weight_stored_transposed(refresh):
    """As GPT-2's (in, out) weights seen as (out, in): strides decide nothing."""
    runs = []
    for transposed in (False, True):
        data = parameter(23, 41).detach()
        p = torch.nn.Parameter(data.t().contiguous().t() if transposed else data)
        optimizer = galore(p, refresh=refresh, residual="fira")
        for t in range(3):
            p.grad = randn(23, 41, seed=t)
            optimizer.step()
        runs.append(p.detach())
    assert not runs[1].is_contiguous()
    torch.testing.assert_close(*runs, rtol=0, atol=1e-3 * LR)


class TestTransport:
    def test_a_turned_basis_changes_nothing(self, monkeypatch):
        """A refresh that gives the same subspace with other signs in another order: with the moments transported the
        update is what it would have been; with ``none`` the moments mean other directions."""
        order, signs = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0])

        def same(grad, old):
            return old, torch.ones(1, dtype=torch.bool)

        def turned(grad, old):
            return old[:, :, order] * signs, torch.ones(1, dtype=torch.bool)

        updates = {}
        for how, turn in itertools.product(("moments", "none"), (False, True)):
            p = torch.nn.Parameter(torch.zeros(23, 41))
            optimizer = galore(p, transport=how, projector="float32", update_proj_gap=3)
            with monkeypatch.context() as patch:
                for t in range(4):  # refreshes before the first and the fourth
                    p.grad = randn(23, 41, seed=5) + 0.1 * randn(23, 41, seed=t)
                    before = p.detach().clone()
                    optimizer.step()
                    patch.setitem(FIND, "subspace", turned if turn else same)
            updates[how, turn] = p.detach() - before
        size = updates["moments", False].norm()
        assert (updates["moments", True] - updates["moments", False]).norm() < 1e-4 * size
        assert (updates["none", True] - updates["none", False]).norm() > 0.5 * size

    def test_momentum_is_exact_where_the_new_subspace_contains_the_old(self):
        """Rank = dimension: every subspace does, so P m is what it would have been without a refresh."""
        momenta = []
        for gap in (2, 100):
            p = parameter(12, 30)
            optimizer = galore(p, rank=12, update_proj_gap=gap, projector="float32", refresh="subspace")
            for t in range(6):
                p.grad = randn(12, 30, seed=t)
                optimizer.step()
            state = optimizer.state[p]
            momenta.append(state["projector"][0] @ state["exp_avg"])
        off = 6 * 2 * 13 * E * 12 * 4  # six steps, two products of 13 roundings, sums of 12 numbers up to 4
        torch.testing.assert_close(*momenta, rtol=0, atol=off)


class TestGradientsOfNoUse:
    @pytest.mark.parametrize("state", ["fp32", "ternary"])
    @pytest.mark.parametrize("refresh", REFRESH)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e25])
    @pytest.mark.parametrize("shape", [(23, 41), (3, 9, 17)], ids=str)
    def test_not_finite_at_a_refresh(self, caplog, shape, bad, refresh, state):
        """Nothing changes but the count, not even of experts whose own gradient is finite; the very next step
        refreshes."""
        p = parameter(*shape)
        optimizer = galore(p, refresh=refresh, residual="fira", state=state)
        for t in range(2):
            p.grad = randn(*shape, seed=t)
            optimizer.step()
        before = snapshot(optimizer)
        p.grad = randn(*shape, seed=2)
        p.grad.view(-1)[60] = bad
        with caplog.at_level(logging.WARNING, logger="hf_memopt"):
            optimizer.step()
        assert "The subspace of w stays as it is" in caplog.text
        assert optimizer.skipped_steps == 1
        after = snapshot(optimizer)
        after[1]["state"][0]["skipped"] = 0
        assert state_equal(before, after)
        Watched(optimizer, p).step(randn(*shape, seed=3))
        assert optimizer.state[p]["refreshes"] == 2

    @pytest.mark.parametrize("residual", ["none", "fira", "sign"])
    @pytest.mark.parametrize("refresh", REFRESH)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25, 1.9e19])
    def test_not_usable_between_refreshes(self, bad, refresh, residual):
        """Wherever it stands: ``select`` does not see every coordinate."""
        p = parameter(23, 41)
        optimizer = galore(p, refresh=refresh, residual=residual, update_proj_gap=50)
        p.grad = randn(23, 41)
        optimizer.step()
        before = snapshot(optimizer)
        for row in (0, 7, 22):
            p.grad = randn(23, 41, seed=2)
            p.grad[row, 6] = bad
            optimizer.step()
        after = snapshot(optimizer)
        assert optimizer.skipped_steps == 3
        after[1]["state"][0]["skipped"] = 0
        assert state_equal(before, after)

    @pytest.mark.parametrize("refresh", REFRESH)
    @pytest.mark.parametrize("size", [1e10, 1e17, 1e19, 1e30, 3e38, 1e-20, 1e-40])
    def test_huge_and_tiny(self, refresh, size):
        p = parameter(23, 41)
        optimizer = galore(p, refresh=refresh, residual="sign")
        for t in range(3):
            p.grad = (randn(23, 41, seed=t).double() * size).clamp(-3.4e38, 3.4e38).float()
            before = p.grad.clone()
            optimizer.step()
            assert torch.equal(p.grad, before)
        state = optimizer.state[p]
        assert p.isfinite().all() and all(v.isfinite().all() for v in state.values() if torch.is_tensor(v))
        if not 1e17 < size < 1.8e19:  # between them it depends on whether a sum of them is still below
            assert optimizer.skipped_steps == (0 if size <= 1e17 else 3)

    @pytest.mark.parametrize("refresh", ["subspace", "svd", "select"])
    def test_zero(self, caplog, refresh):
        """The basis stays, the step counts, moments decay, and it is tried again on the next step."""
        p = parameter(23, 41)
        optimizer = galore(p, refresh=refresh)
        for t in range(2):
            p.grad = randn(23, 41, seed=t)
            optimizer.step()
        watched = Watched(optimizer, p)
        old, m = watched.basis(optimizer.state[p]), optimizer.state[p]["exp_avg"].clone()
        p.grad = torch.zeros_like(p)
        with caplog.at_level(logging.WARNING, logger="hf_memopt"):
            optimizer.step()
        state = optimizer.state[p]
        assert not caplog.text
        assert torch.equal(watched.basis(state), old) and state["refreshes"] == 1 and int(state["step"]) == 3
        torch.testing.assert_close(state["exp_avg"], 0.8 * m, rtol=4 * E, atol=0)
        watched.step(randn(23, 41, seed=4))
        assert state["refreshes"] == 2 and state["refresh_at"] == 6

    def test_one_expert_without_gradient(self, caplog):
        """It keeps its basis and its moments; the others refresh."""
        p = parameter(3, 9, 17)
        optimizer = galore(p, projector="float32")
        for t in range(2):
            p.grad = randn(3, 9, 17, seed=t)
            optimizer.step()
        state = optimizer.state[p]
        old, m = state["projector"].clone(), state["exp_avg"].view(3, 5, 17).clone()
        p.grad = randn(3, 9, 17, seed=2)
        p.grad[1] = 0
        optimizer.step()
        changed = [not torch.equal(state["projector"][b], old[b]) for b in range(3)]
        assert changed == [True, False, True] and state["refreshes"] == 2
        torch.testing.assert_close(state["exp_avg"].view(3, 5, 17)[1], 0.8 * m[1], rtol=4 * E, atol=0)
