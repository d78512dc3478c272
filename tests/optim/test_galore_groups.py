"""Groups, options and bytes of GaLoreAdamW; what it leaves as it found it."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from hf_memopt.codecs.projected import Projection
from hf_memopt.kernels import projected
from hf_memopt.optim import import_adamw_state
from hf_memopt.optim.galore import GaLoreAdamW
from hf_memopt.param_groups import build_param_groups
from hf_memopt.projections import basis as bases
from tests.cases import parameter, randn
from tests.conftest import require_kernel
from tests.optim.common import same_bits, snapshot, state_equal, train
from tests.optim.test_temporaries import LiveStorages

REFRESH = ["subspace", "svd", "select", "random"]


class TestGroups:
    def test_in_the_style_of_galore_torch(self):
        matrix, vector, small = parameter(64, 128), parameter(64), parameter(8, 8)
        groups = [
            {"params": [vector, small]},
            {"params": [matrix], "rank": 16, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"},
        ]
        optimizer = GaLoreAdamW(groups, lr=1e-2)
        train(optimizer, range(3))
        assert [optimizer.treatment_of(g, p) for g, _, p in optimizer.named_params()] == ["dense", "dense", "projected"]
        assert optimizer.state[matrix]["exp_avg"].shape == (16, 128) and "side" not in optimizer.state[vector]
        assert optimizer.param_groups[1]["scale"] == 0.25

    @pytest.mark.parametrize(
        "shape, rank, expected",
        [
            ((64, 128), 16, "projected"),
            ((64, 128), 64, "dense"),  # rank = dimension
            ((64, 128), 100, "dense"),
            ((64, 128), 62, "dense"),  # the basis would cost more than is saved
            ((30, 500), 4, "dense"),  # under 32
            ((4, 64, 128), 16, "projected"),
            ((64, 8, 4, 4), 4, "dense"),
            ((10_000,), 4, "dense"),
            ((50, 50), 8, "dense"),  # under 4096 elements
            ((0, 64), 8, "dense"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("state", ["fp32", "ternary"])
    def test_with_a_rank_are_projected_where_it_saves(self, shape, rank, expected, state):
        p = parameter(*shape)
        optimizer = GaLoreAdamW([{"params": [p], "rank": rank, "refresh": "subspace"}], state=state)
        found = optimizer.treatment_of(optimizer.param_groups[0], p)
        big = state == "ternary" and len(shape) > 1 and math.prod(shape) >= 4096
        assert found == ("ternary" if expected == "dense" and big else expected)
        train(optimizer, range(2))

    def test_a_treatment_by_choice(self):
        p, q = parameter(8, 9), parameter(64, 128)
        groups = [
            {"params": [p], "treatment": "projected", "rank": 2},
            {"params": [q], "treatment": "dense", "rank": 2},
        ]
        optimizer = GaLoreAdamW(groups)
        train(optimizer, range(2))
        assert optimizer.state[p]["exp_avg"].shape == (2, 9) and optimizer.state[q]["exp_avg"].shape == (64, 128)
        for shape, sentence in (
            ((5,), "needs matrices"),
            ((2, 3, 4, 5), "Parameter 0 of the group: a projection needs"),
        ):
            with pytest.raises(ValueError, match=sentence):
                GaLoreAdamW([{"params": [parameter(*shape)], "treatment": "projected"}])
        with pytest.raises(ValueError, match="w of the group: a projection needs a matrix"):
            GaLoreAdamW([{"params": [("w", parameter(2, 3, 4, 5))], "treatment": "projected"}])

    def test_options_differ_between_groups(self):
        p, q, r = (parameter(64, 128, seed=i) for i in range(3))
        groups = [
            {"params": [p], "rank": 4, "refresh": "random", "residual": "sign"},
            {"params": [q], "rank": 0.125, "refresh": "svd", "residual": "fira", "projector": "float32"},
            {"params": [r], "rank": 6, "refresh": "select", "state": "ternary", "proj_type": "reverse_std"},
        ]
        optimizer = GaLoreAdamW(groups, update_proj_gap=2)
        train(optimizer, range(4))
        states = [optimizer.state[x] for x in (p, q, r)]
        assert "projector" not in states[0] and states[1]["projector"].shape == (1, 64, 8)
        assert states[2]["projector.coordinates"].shape == (1, 6) and states[2]["side"] == "right"
        assert "residual_norm" in states[1] and states[2]["exp_avg.codes"].dtype == torch.uint8

    def test_matmul_of_a_group(self):
        """Each group's own: as if the whole optimizer had it."""
        alone = {}
        for matmul in ("float32", "bfloat16"):
            alone[matmul] = parameter(64, 128)
            train(GaLoreAdamW([{"params": [alone[matmul]], "rank": 8}], refresh="subspace", matmul=matmul), range(1))
        assert not torch.equal(*alone.values())
        for matmul, expected in alone.items():
            p = parameter(64, 128)
            group = {"params": [p], "rank": 8, "matmul": matmul}
            train(GaLoreAdamW([group], refresh="subspace", matmul="auto"), range(1))
            assert torch.equal(p, expected)

    def test_options_as_text_are_what_they_say(self):
        """As they come from ``optim_args``: "false" is not true."""
        p = parameter(64, 128)
        text = {"rank": "4", "stagger": "false", "adaptive": "false", "scale": "0.5", "update_proj_gap": "7"}
        optimizer = GaLoreAdamW([{"params": [p], **text}], residual_scale="2")
        found = {key: optimizer.param_groups[0][key] for key in text}
        assert found == {"rank": 4, "stagger": False, "adaptive": False, "scale": 0.5, "update_proj_gap": 7}
        assert optimizer.param_groups[0]["residual_scale"] == 2.0
        train(optimizer, range(2))


WRONG = [
    ("rank", 0),
    ("rank", -3),
    ("rank", 0.0),
    ("rank", 1.5),
    ("rank", float("nan")),
    ("rank", None),
    ("rank", True),
    ("rank", "many"),
    ("update_proj_gap", 0),
    ("update_proj_gap", 2.5),
    ("scale", 0.0),
    ("scale", -1.0),
    ("scale", float("inf")),
    ("residual_scale", 0),
    ("proj_type", "full"),
    ("refresh", "qr"),
    ("transport", "carry"),
    ("residual", "apollo"),
    ("stagger", "perhaps"),
    ("stagger", 2),
    ("adaptive", None),
    ("projector", "int4"),
    ("matmul", "fp8"),
    ("matmul", None),
    ("state", "int8"),
    ("state", None),
]


class TestOptions:
    @pytest.mark.parametrize("key, value", WRONG, ids=str)
    def test_out_of_range(self, key, value):
        with pytest.raises(ValueError) as found:
            GaLoreAdamW([parameter(4, 4)], **{key: value})
        self.is_one_sentence(found, key)

    @pytest.mark.parametrize("key, value", WRONG, ids=str)
    def test_out_of_range_in_a_group(self, key, value):
        optimizer = GaLoreAdamW([{"params": [parameter(4, 4)], "treatment": "dense"}])
        with pytest.raises(ValueError) as found:
            optimizer.add_param_group({"params": [parameter(64, 128)], **{key: value}})
        self.is_one_sentence(found, key)
        assert len(optimizer.param_groups) == 1

    @staticmethod
    def is_one_sentence(found, key):
        text = str(found.value)
        assert f"{key}" in text and text.endswith(".") and ". " not in text and "\n" not in text

    @pytest.mark.parametrize(
        "key, value", [("lr", -1.0), ("betas", (0.9, 1.0)), ("eps", -1.0), ("weight_decay", float("nan")), ("seed", -1)]
    )
    def test_those_of_adamw(self, key, value):
        with pytest.raises(ValueError, match=key):
            GaLoreAdamW([{"params": [parameter(64, 128)], "rank": 4}], **{key: value})

    def test_a_treatment_that_is_not_known(self):
        with pytest.raises(ValueError, match="treatment='galore' is not known: choose auto, projected"):
            GaLoreAdamW([{"params": [parameter(64, 128)], "treatment": "galore"}])


class TestBytes:
    @pytest.mark.parametrize("refresh", REFRESH)
    @pytest.mark.parametrize("projector", ["int8", "float32"])
    @pytest.mark.parametrize("state", ["fp32", "ternary"])
    @pytest.mark.parametrize("residual", ["none", "fira"])
    def test_real_storages_are_what_is_declared(self, state, projector, refresh, residual):
        optimizer = GaLoreAdamW(
            [{"params": [parameter(96, 160), parameter(3, 64, 48)], "rank": 0.25}],
            state=state,
            projector=projector,
            refresh=refresh,
            residual=residual,
        )
        declared = optimizer.memory_report()
        train(optimizer, range(1))
        measured = optimizer.memory_report()
        assert not declared.measured and measured.measured and declared.state_bytes == measured.state_bytes
        moments = 2 * 4 * (24 * 160 + 3 * 12 * 64)
        bases = {"int8": 1, "float32": 4}[projector] * (96 * 24 + 3 * 48 * 12) + (projector == "int8") * 4 * (24 + 36)
        kept = {"subspace": bases, "svd": bases, "select": 2 * (24 + 36), "random": 0}[refresh]
        if state == "fp32":
            steps, norms = 2 * 4, (residual == "fira") * 4 * (1 + 3)
            assert measured.state_bytes == moments + kept + norms + steps

    @pytest.mark.parametrize("refresh", ["select", "random"])
    def test_ternary_at_a_quarter_is_below_one_bit_a_parameter(self, refresh):
        """Declared for 4096 x 4096, and really held for a smaller one."""
        options = {"rank": 0.25, "proj_type": "std", "refresh": refresh, "projector": "int8", "residual": "none"}
        declared = Projection(state="ternary", **options).nbytes(torch.Size((4096, 4096)))
        assert 8 * (declared + 4) / 4096**2 <= 1.0
        p = parameter(512, 1024)
        optimizer = GaLoreAdamW([{"params": [p], "rank": 0.25}], state="ternary", refresh=refresh)
        p.grad = randn(512, 1024)
        optimizer.step()
        assert optimizer.memory_report().measured and optimizer.memory_report().bits_per_parameter <= 1.0


class TestLeftAsFound:
    @pytest.mark.parametrize("residual", ["none", "fira", "sign"])
    @pytest.mark.parametrize("refresh", REFRESH)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_the_gradient(self, dtype, refresh, residual):
        p = parameter(64, 128, dtype=dtype)
        group = {"params": [p], "treatment": "projected", "rank": 8}
        optimizer = GaLoreAdamW([group], refresh=refresh, residual=residual, update_proj_gap=2)
        for t in range(4):
            p.grad = randn(64, 128, seed=t, dtype=dtype)
            kept, address = p.grad.clone(), p.grad.data_ptr()
            optimizer.step()
            assert same_bits(p.grad, kept) and p.grad.data_ptr() == address and p.grad.shape == p.shape

    def test_zero_grad_keeps_a_gradient_that_backward_can_use(self):
        layer = torch.nn.Linear(128, 64, bias=False)
        group = {"params": [layer.weight], "rank": 8, "update_proj_gap": 2}
        optimizer = GaLoreAdamW([group], refresh="subspace", residual="fira")
        runs = []
        for set_to_none in (True, False):
            layer.load_state_dict({"weight": parameter(64, 128).detach()})
            optimizer = GaLoreAdamW([{**group, "params": [layer.weight]}], refresh="subspace", residual="fira")
            for t in range(4):
                optimizer.zero_grad(set_to_none=set_to_none)
                layer(randn(16, 128, seed=t)).square().mean().backward()
                optimizer.step()
            runs.append(snapshot(optimizer))
        assert state_equal(*runs)

    def test_the_weights_memory(self):
        p = parameter(64, 128)
        address, version = p.data_ptr(), p._version
        optimizer = GaLoreAdamW([{"params": [p], "rank": 8}])
        train(optimizer, range(1))
        assert p.data_ptr() == address and p.requires_grad and p._version > version


@pytest.mark.parametrize(
    "refresh, residual",
    [("subspace", "none"), ("subspace", "fira"), ("subspace", "sign"), ("select", "fira"), ("random", "sign")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_temporary_of_the_parameters_size(dtype, refresh, residual, monkeypatch):
    """Beside its state a step holds: in the subspace R, -U and what goes back, with its copies at most six times r L;
    of a basis the one before, the one after, what it is found from and their copies, at most six times d r; in strips
    and pieces at most eight times as many elements as one has. Strips are made small here to tell them from the rest,
    so the kernel is the compiled one, which has no tiles of its own.
    """
    require_kernel("compiled")
    d, length, rank, strip = 2048, 2048, 32, 1 << 14
    monkeypatch.setattr(projected, "strip_elements", lambda like: strip)
    monkeypatch.setattr(bases, "PIECE", strip)
    p = parameter(d, length, dtype=dtype)
    group = {"params": [p], "rank": rank, "update_proj_gap": 1}
    matmul = str(dtype).removeprefix("torch.")
    optimizer = GaLoreAdamW([group], refresh=refresh, residual=residual, kernel="compiled", matmul=matmul)
    p.grad = randn(d, length, dtype=dtype)
    optimizer.step()
    with LiveStorages() as live:
        optimizer.step()
    allowed = 4 * (6 * rank * length + 6 * d * rank + 8 * strip)
    assert live.peak <= allowed, f"{live.peak / 4e6:.2f} of {allowed / 4e6:.2f} million numbers"
    assert allowed < d * length * p.element_size(), "a copy of the parameter must not pass unseen"


@pytest.mark.parametrize("refresh", ["subspace", "select", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2048, 2048), (4096, 1024)], ids=str)
def test_temporaries_of_a_refresh(shape, dtype, refresh):
    """With strips as they are, at a quarter of the rank: R, both moments on their way and one copy beside them, a basis
    in fp32, and four strips. (``svd`` needs what LAPACK needs.)"""
    require_kernel("compiled")
    p = parameter(*shape, dtype=dtype)
    group = {"params": [p], "rank": 0.25, "update_proj_gap": 1}
    optimizer = GaLoreAdamW([group], refresh=refresh, residual="fira", kernel="compiled")
    p.grad = randn(*shape, dtype=dtype)
    for _ in range(2):
        optimizer.step()
    with LiveStorages() as live:
        optimizer.step()
    assert optimizer.state[p]["refreshes"] == 3
    d, length = min(shape), max(shape)
    allowed = 4 * (4 * (d // 4) * length + d * (d // 4) + 4 * (1 << 19))
    assert live.peak <= allowed, f"{live.peak / 2**20:.1f} of {allowed / 2**20:.1f} MB"


class TestWhatIsProjected:
    @staticmethod
    def model():
        return torch.nn.ModuleDict({"a": torch.nn.Linear(512, 128), "b": torch.nn.Linear(128, 256, bias=False)})

    def test_groups_bring_the_projection_along(self):
        """The optimizer does what the groups were made for, whatever its own defaults are."""
        projection = Projection(
            rank=16, proj_type="left", refresh="svd", projector="int8", residual="none", state="ternary"
        )
        groups = build_param_groups(self.model(), projection=projection)
        optimizer = GaLoreAdamW(groups, lr=1e-3)
        assert "rank=16" in optimizer.title() and "refresh=svd" in optimizer.title()
        p = groups[0]["params"][0]
        for group in optimizer.param_groups:
            assert group["state"] == "ternary"
            if group["treatment"] == "projected":
                assert Projection.of(group) == projection
                p = group["params"][0]
        p.grad = randn(*p.shape)
        optimizer.step()
        state = optimizer.state[p]
        assert state["projector.codes"].shape[2] == 16 and "exp_avg.codes" in state and "residual_norm" not in state

    @pytest.mark.parametrize(
        "wrong", [{"refresh": "foo"}, {"state": "bogus"}, {"rank": 0}, {"residual": "fria"}], ids=str
    )
    def test_a_wrong_projection_is_refused_at_once(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Projection(**wrong)

    @pytest.mark.parametrize("named", [True, False])
    def test_bare_parameters_are_refused(self, named):
        model = self.model()
        with pytest.raises(ValueError, match="cannot tell a linear layer .* pass hf_memopt.build_param_groups"):
            GaLoreAdamW(model.named_parameters() if named else model.parameters())

    def test_nothing_projected_is_said(self, caplog):
        with caplog.at_level(logging.WARNING, logger="hf_memopt"):
            GaLoreAdamW([{"params": [parameter(64, 128)], "rank": 64}])
        assert "projects none of its parameters" in caplog.text


@pytest.mark.parametrize("residual", ["fira", "sign"])
def test_scale_scales_the_whole_update(residual):
    moved = []
    for scale in (1.0, 0.25):
        p = torch.nn.Parameter(torch.zeros(48, 80))
        options = {"rank": 8, "scale": scale, "residual": residual, "matmul": "float32", "stagger": False}
        optimizer = GaLoreAdamW([{"params": [("w", p)], "treatment": "projected"}], lr=1e-2, **options)
        p.grad = randn(48, 80)
        optimizer.step()
        moved.append(p.detach().clone())
    torch.testing.assert_close(moved[1], 0.25 * moved[0], rtol=1e-5, atol=1e-9)


def test_moments_of_adamw_are_not_imported():
    model = torch.nn.Linear(128, 256)
    adamw = torch.optim.AdamW(model.parameters())
    model(randn(4, 128)).sum().backward()
    adamw.step()
    optimizer = GaLoreAdamW(build_param_groups(model, projection=Projection()))
    with pytest.raises(ValueError, match="cannot bring AdamW's moments into a subspace, and 'weight' is projected"):
        import_adamw_state(optimizer, adamw.state_dict(), model)
    with pytest.raises(ValueError, match="remove optimizer.pt to start with fresh moments.$"):
        optimizer.load_state_dict(adamw.state_dict())
