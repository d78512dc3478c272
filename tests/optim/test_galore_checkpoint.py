"""GaLoreAdamW saved, loaded, copied: bases, refreshes and moments go on bit for bit."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle

import pytest
import torch

from hf_memopt.optim.galore import GaLoreAdamW
from tests.cases import NON_DEFAULT, parameter, randn
from tests.conftest import fastest_kernel
from tests.optim.common import snapshot, state_equal, train
from tests.optim.test_checkpoint import copy_weights, through_a_file
from tests.optim.test_update_in_backward import Net, ids

SHAPES = {"tall": (161, 40), "wide": (40, 161), "experts": (3, 40, 50), "head": (70, 80), "norm": (40,)}
REFRESH = ["subspace", "svd", "select", "random"]
OPTIONS = {"rank": 8, "update_proj_gap": 3, "residual": "fira", "adaptive": True, "stagger": True, "scale": 0.5}
OPTIONS |= {"transport": "moments", "proj_type": "std"}
OPTIONS |= {key: value for key, value in NON_DEFAULT.items() if key not in ("lr", "weight_decay")}
RESUMED_AFTER = 4


def make(dtype=torch.float32, named=True, **options) -> tuple[GaLoreAdamW, list[torch.nn.Parameter]]:
    """Three projected matrices, and two parameters that are not."""
    parameters = {name: parameter(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())}
    items = list(parameters.items()) if named else list(parameters.values())
    groups = [{"params": items[:3], "treatment": "projected", "weight_decay": 0.1, "lr": 3e-3}, {"params": items[3:]}]
    return GaLoreAdamW(groups, kernel=fastest_kernel(), **options), list(parameters.values())


@pytest.mark.parametrize("state", ["fp32", "ternary"])
@pytest.mark.parametrize("refresh", REFRESH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_bit_equal(dtype, refresh, state):
    """Refreshes of all matrices lie before and after; constructed with other options, those of the file count."""
    for named, more in ((True, {}), (False, {"projector": "float32", "residual": "sign", "adaptive": False})):
        optimizer, parameters = make(dtype, named, **{**OPTIONS, **more}, refresh=refresh, state=state)
        train(optimizer, range(RESUMED_AFTER))
        saved, weights = through_a_file(optimizer), [p.detach().clone() for p in parameters]
        train(optimizer, range(RESUMED_AFTER, 9))
        refreshes = [s["refreshes"] for s in optimizer.state.values() if "refreshes" in s]
        assert len(refreshes) == 3 and all(
            count > saved["state"][i]["refreshes"] > 0 for i, count in enumerate(refreshes)
        )

        resumed, fresh = make(dtype, named, state=state)
        copy_weights(weights, fresh)
        resumed.load_state_dict(saved)
        assert state_equal(resumed.state_dict(), saved)
        train(resumed, range(RESUMED_AFTER, 9))
        assert all(torch.equal(a, b) for a, b in zip(parameters, fresh, strict=True))
        assert state_equal(optimizer.state_dict(), resumed.state_dict())


def backward_run(optimizer, model, steps):
    for t in steps:
        model(ids(t), odd=t % 2 == 1).backward()
        optimizer.step()
        optimizer.zero_grad()


def net(update_in_backward: bool, **options) -> tuple[GaLoreAdamW, Net]:
    model = Net()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [item for item in named if item[1].shape == (80, 80)], "treatment": "projected"},
        {"params": [item for item in named if item[1].shape != (80, 80)]},
    ]
    given = {"update_in_backward": update_in_backward, "rank": 8, "update_proj_gap": 2, **options}
    return GaLoreAdamW(groups, lr=1e-2, kernel=fastest_kernel(), **given), model


@pytest.mark.parametrize("state, refresh", list(itertools.product(["fp32", "ternary"], REFRESH)))
def test_update_in_backward(state, refresh):
    """The same numbers as without it, and resumed."""
    options = {"state": state, "refresh": refresh, "residual": "fira", "adaptive": True}
    plain, plain_model = net(False, **options)
    optimizer, model = net(True, **options)
    for o, m in ((plain, plain_model), (optimizer, model)):
        backward_run(o, m, range(7))
    assert state_equal(snapshot(plain), snapshot(optimizer))

    half, half_model = net(True, **options)
    backward_run(half, half_model, range(3))
    saved = through_a_file(half)
    resumed, resumed_model = net(True, **options)
    resumed_model.load_state_dict(half_model.state_dict())
    resumed.load_state_dict(saved)
    backward_run(resumed, resumed_model, range(3, 7))
    assert state_equal(snapshot(optimizer), snapshot(resumed))


@pytest.mark.parametrize("state", ["fp32", "ternary"])
@pytest.mark.parametrize("refresh", REFRESH)
def test_state_is_tensors_numbers_and_strings(refresh, state):
    optimizer, _ = make(**OPTIONS, refresh=refresh, state=state)
    train(optimizer, range(2))
    saved = through_a_file(optimizer)  # with weights_only=True
    for number, of_one in saved["state"].items():
        assert all(type(value) in (torch.Tensor, int, str) for value in of_one.values())
        assert number > 2 or of_one["side"] == ("left" if SHAPES[list(SHAPES)[number]][-2] < 100 else "right")
    plain = (int, float, str, bool, tuple, list)
    assert all(isinstance(value, plain) for group in saved["param_groups"] for value in group.values())


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 5},
        {"rank": 0.25},
        {"proj_type": "reverse_std"},
        {"state": "ternary"},
        {"refresh": "select"},
        {"refresh": "random"},
        {"projector": "float32"},
        {"residual": "none"},
        {"transport": "none"},
        {"update_proj_gap": 50},
        {"scale": 1.0},
        {"adaptive": False},
        {"stagger": False},
    ],
    ids=str,
)
def test_the_options_of_the_checkpoint_win_and_it_is_said(caplog, other):
    """As everywhere in the package: the run goes on as it began."""
    options = {**OPTIONS, "refresh": "subspace", "projector": "int8", "state": "fp32"}
    optimizer, parameters = make(**options)
    train(optimizer, range(3))
    saved, weights = through_a_file(optimizer), [p.detach().clone() for p in parameters]
    again, fresh = make(**{**options, **other})
    if "state" in other:  # what is not projected has codes then, which are other moments
        with pytest.raises(ValueError, match="keeps other moments for 'head' .* set the same optim_args"):
            again.load_state_dict(saved)
        assert not again.state
        return
    copy_weights(weights, fresh)
    with caplog.at_level(logging.WARNING, logger="hf_memopt"):
        again.load_state_dict(saved)
    (key,) = other
    assert f"written with {key}={options[key]}" in caplog.text and "is ignored" in caplog.text
    for o in (optimizer, again):
        train(o, range(3, 8))
    assert state_equal(snapshot(optimizer), snapshot(again))


def test_groups_of_matrices_only_take_the_checkpoints_state(caplog):
    """The same with nothing but projected matrices, where fp32 and ternary moments do not exclude each other."""
    runs = []
    for state in ("fp32", "ternary"):
        p = parameter(40, 161)
        runs.append(
            (GaLoreAdamW([{"params": [("w", p)], "treatment": "projected"}], rank=8, state=state, refresh="svd"), p)
        )
        if state == "fp32":
            train(runs[0][0], range(2))
    (optimizer, p), (again, q) = runs
    copy_weights([p], [q])
    again.load_state_dict(through_a_file(optimizer))
    assert again.param_groups[0]["state"] == "fp32" and again.state[q]["exp_avg"].dtype == torch.float32
    for o in (optimizer, again):
        train(o, range(2, 5))
    assert state_equal(snapshot(optimizer), snapshot(again))


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda s: s.update(side="right"), "keeps other moments for 'wide'"),
        (lambda s: s.pop("refresh_at"), "keeps other moments for 'wide'"),
        (lambda s: s.update(refreshes=1.5), "keeps other moments for 'wide'"),
        (
            lambda s: s.update(exp_avg=torch.zeros(9, 161)),
            r"'exp_avg' of 'wide' is float32 \[9, 161\] where float32 \[8",
        ),
        (lambda s: s.update({"projector.codes": torch.zeros(1, 40, 8)}), "'projector.codes' of 'wide' is float32"),
    ],
    ids=["side", "missing", "type", "shape", "dtype"],
)
def test_state_that_does_not_fit_is_refused(change, sentence):
    optimizer, _ = make(**OPTIONS, refresh="subspace")
    train(optimizer, range(1))
    saved = through_a_file(optimizer)
    change(saved["state"][1])
    again, _ = make(**OPTIONS, refresh="subspace")
    with pytest.raises(ValueError, match=sentence) as found:
        again.load_state_dict(saved)
    assert str(found.value).count(". ") == 0 and not again.state


def test_a_matrix_that_is_projected_in_one_of_both_only():
    p = parameter(64, 128)
    optimizer = GaLoreAdamW([{"params": [("w", p)], "rank": 8}])
    train(optimizer, range(1))
    for group in ({"treatment": "dense"}, {"rank": 64}):
        other = GaLoreAdamW([{"params": [("w", parameter(64, 128))], **group}])
        with pytest.raises(
            ValueError, match="keeps other moments for 'w' than this optimizer, which treats it as dense"
        ):
            other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("refresh", REFRESH)
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_go_on_alone(copied, refresh, steps):
    optimizer, parameters = make(torch.bfloat16, **OPTIONS, refresh=refresh, state="ternary", matmul="float32")
    train(optimizer, range(steps))
    twin, theirs = copied((optimizer, parameters))
    assert twin.param_groups[0]["matmul"] == "float32" and twin.param_groups[0]["params"][0] is theirs[0]
    before = snapshot(twin)
    train(optimizer, range(steps, steps + 4))
    assert state_equal(snapshot(twin), before)
    train(twin, range(steps, steps + 4))
    assert state_equal(snapshot(optimizer), snapshot(twin))
    twin.add_param_group({"params": [("late", parameter(70, 80))], "rank": 8})
    train(twin, range(9, 10))


def test_loading_does_not_alias():
    optimizer, _ = make(**OPTIONS, refresh="subspace")
    train(optimizer, range(2))
    given = optimizer.state_dict()
    frozen = copy.deepcopy(given)
    again, _ = make(**OPTIONS, refresh="subspace")
    again.load_state_dict(given)
    train(again, range(2, 5))
    assert state_equal(given, frozen)


def test_parameters_without_gradient_have_their_own_time():
    """One that gets its first gradient later, or pauses, refreshes by its own count, resumed or not."""
    runs = []
    for resume in (False, True):
        optimizer, parameters = make(**OPTIONS, refresh="subspace")
        for t in range(10):
            if resume and t == 5:
                saved, weights = through_a_file(optimizer), [p.detach().clone() for p in parameters]
                optimizer, parameters = make(**OPTIONS, refresh="subspace")
                copy_weights(weights, parameters)
                optimizer.load_state_dict(saved)
            for i, p in enumerate(parameters):
                p.grad = None if (i == 1 and t < 6) or (i == 0 and t % 2) else randn(*p.shape, seed=100 * t + i)
            optimizer.step()
        runs.append(snapshot(optimizer))
        assert [int(optimizer.state[p]["step"]) for p in parameters[:3]] == [5, 4, 10]
    assert state_equal(*runs)
