"""Saving, loading, copying: the run goes on bit for bit, nothing is cast, nothing is shared."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from hf_memopt import TacoAdamW
from tests.cases import NON_DEFAULT, dtype_cases, parameter
from tests.optim.common import snapshot, state_equal, train

SHAPES = {
    "matrix.weight": (64, 161),
    "conv.weight": (33, 8, 3, 8),
    "small.weight": (7, 9),
    "norm.weight": (161,),
    "scale": (),
}
OPTIONS = {key: value for key, value in NON_DEFAULT.items() if key not in ("lr", "weight_decay")}


def make(kernel, dtype=torch.float32, named=True, **options) -> tuple[TacoAdamW, list[torch.nn.Parameter]]:
    """Two groups with every option away from its default and different in each."""
    parameters = {name: parameter(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())}
    items = list(parameters.items()) if named else list(parameters.values())
    groups = [
        {"params": items[:2], "weight_decay": 0.1, "lr": 3e-3, "reason": "decays"},
        {"params": items[2:], "weight_decay": 0.0, "lr": 1e-2, "betas": (0.7, 0.9), "eps": 1e-4, "seed": 5},
    ]
    return TacoAdamW(groups, kernel=kernel, **{**OPTIONS, **options}), list(parameters.values())


def through_a_file(optimizer: TacoAdamW) -> dict:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def copy_weights(source, target) -> None:
    with torch.no_grad():
        for a, b in zip(source, target, strict=True):
            b.copy_(a)


@pytest.mark.parametrize("stochastic_rounding", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(**dtype_cases())
def test_resume_is_bit_equal(kernel, dtype, named, stochastic_rounding):
    optimizer, parameters = make(kernel, dtype, named, stochastic_rounding=stochastic_rounding)
    train(optimizer, range(3))
    saved, weights = through_a_file(optimizer), [p.detach().clone() for p in parameters]
    train(optimizer, range(3, 6))

    # constructed with the defaults: the options come from the file
    fresh = [parameter(*shape, dtype=dtype) for shape in SHAPES.values()]
    items = list(zip(SHAPES, fresh, strict=True)) if named else fresh
    resumed = TacoAdamW([{"params": items[:2]}, {"params": items[2:]}], kernel=kernel)
    copy_weights(weights, fresh)
    resumed.load_state_dict(saved)
    assert state_equal(resumed.state_dict(), saved)
    train(resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(parameters, fresh, strict=True))
    assert state_equal(optimizer.state_dict(), resumed.state_dict())


@pytest.mark.parametrize(**dtype_cases())
def test_load_keeps_every_dtype(kernel, dtype):
    """torch's own ``load_state_dict`` casts floating state to the parameter's dtype."""
    optimizer, _ = make(kernel, dtype)
    train(optimizer, range(1))
    again, parameters = make(kernel, dtype)
    again.load_state_dict(through_a_file(optimizer))
    kinds = {key: value.dtype for key, value in again.state[parameters[0]].items() if torch.is_tensor(value)}
    assert kinds == {
        "step": torch.float32,
        "exp_avg.codes": torch.uint8,
        "exp_avg.scale": torch.bfloat16,
        "exp_avg_sq.codes": torch.uint8,
        "exp_avg_sq.row": torch.float32,
        "exp_avg_sq.col": torch.float32,
    }
    kinds = {key: value.dtype for key, value in again.state[parameters[3]].items() if torch.is_tensor(value)}
    assert kinds == {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


@pytest.mark.parametrize(
    "before, after", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_weights_of_another_dtype_take_the_same_state(kernel, before, after):
    optimizer, _ = make(kernel, before)
    train(optimizer, range(2))
    again, _ = make(kernel, after)
    again.load_state_dict(through_a_file(optimizer))
    assert state_equal(again.state_dict()["state"], optimizer.state_dict()["state"])
    train(again, range(2, 4))


def test_loading_does_not_alias(kernel):
    optimizer, _ = make(kernel)
    train(optimizer, range(2))
    given = optimizer.state_dict()
    frozen = copy.deepcopy(given)
    again, _ = make(kernel)
    again.load_state_dict(given)
    train(again, range(2, 4))
    assert state_equal(given, frozen), "training the loaded optimizer changed the state that was given"
    loaded = copy.deepcopy(again.state_dict())
    train(optimizer, range(2, 5))
    assert state_equal(again.state_dict(), loaded)
    storages = [
        {v.data_ptr() for s in o.state.values() for v in s.values() if torch.is_tensor(v)} for o in (optimizer, again)
    ]
    assert not storages[0] & storages[1]


def test_loading_its_own_state_changes_nothing(kernel):
    optimizer, parameters = make(kernel, torch.bfloat16)
    other, others = make(kernel, torch.bfloat16)
    for o in (optimizer, other):
        train(o, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    for o in (optimizer, other):
        train(o, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_parameters_without_state_stay_without(kernel):
    """Saved before some parameter had its first gradient."""
    optimizer, parameters = make(kernel)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    again, others = make(kernel)
    again.load_state_dict(through_a_file(optimizer))
    assert list(again.state) == [others[0]]
    train(again, range(2))
    empty, _ = make(kernel)
    again.load_state_dict(empty.state_dict())
    assert not again.state


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_go_on_alone(kernel, copied, steps):
    optimizer, parameters = make(kernel, torch.bfloat16)
    train(optimizer, range(steps))
    twin, theirs = copied((optimizer, parameters))
    assert twin.kernel == kernel and twin.param_groups[0]["params"][0] is theirs[0]
    before = snapshot(twin)
    train(optimizer, range(steps, steps + 2))
    assert state_equal(snapshot(twin), before)
    train(twin, range(steps, steps + 2))
    assert all(torch.equal(a, b) for a, b in zip(parameters, theirs, strict=True))
    assert state_equal(optimizer.state_dict(), twin.state_dict())
    assert twin.statistics == {} and twin.skipped_steps == 0
    twin.add_param_group({"params": [("late", parameter(70, 80))]})
    train(twin, range(9, 10))


def test_copy_of_the_optimizer_alone(kernel):
    """Then the parameters are copied with it."""
    optimizer, parameters = make(kernel)
    train(optimizer, range(1))
    weights = [p.detach().clone() for p in parameters]
    train(copy.deepcopy(optimizer), range(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(parameters, weights, strict=True))


def test_state_is_made_of_plain_tensors_and_numbers(kernel):
    optimizer, _ = make(kernel)
    train(optimizer, range(1))
    for state in optimizer.state_dict()["state"].values():
        assert all(type(value) in (torch.Tensor, int) for value in state.values())
        assert state["step"].shape == () and state["step"].device.type == "cpu"
    for group in optimizer.state_dict()["param_groups"]:
        assert group["format_version"] == 1
        assert all(isinstance(value, (int, float, str, bool, tuple, list)) for value in group.values())


def test_hooks_on_loading_see_the_loaded_state(kernel):
    optimizer, _ = make(kernel)
    train(optimizer, range(1))
    again, _ = make(kernel)
    seen = []
    again.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    again.load_state_dict(optimizer.state_dict())
    assert seen == [len(SHAPES)]


def test_a_hook_may_adapt_what_is_loaded(kernel):
    """torch's pre-hooks change the given state before it is loaded, for example to rename or drop entries."""
    optimizer, _ = make(kernel)
    train(optimizer, range(1))
    again, parameters = make(kernel)

    def without_the_first(_, state_dict):
        return {**state_dict, "state": {key: value for key, value in state_dict["state"].items() if key != 0}}

    again.register_load_state_dict_pre_hook(without_the_first)
    again.load_state_dict(optimizer.state_dict())
    assert parameters[0] not in again.state and parameters[1] in again.state


def test_a_checkpoint_of_one_kernel_goes_on_with_another(kernel):
    ours, parameters = make(kernel, torch.bfloat16)
    other, others = make("reference", torch.bfloat16)
    train(ours, range(2))
    copy_weights(parameters, others)
    other.load_state_dict(through_a_file(ours))
    assert other.kernel == "reference"
    for optimizer in (ours, other):
        train(optimizer, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert state_equal(ours.state_dict(), other.state_dict())
