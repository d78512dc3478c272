"""Plain AdamW's moments become ours: by name, in the Trainer's order, by position; or one sentence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_memopt import TacoAdamW, import_adamw_state
from hf_memopt.param_groups import build_param_groups
from tests.cases import parameter, randn
from tests.optim.common import snapshot, state_equal, train


class Net(nn.Module):
    """Decaying and not decaying parameters in turns, two of the same shape, so that a wrong order shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(161, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, 161)
        self.third = nn.Linear(161, 64)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def no_decay(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.dim() < 2}


def adamw(model: Net, *, named=False, grouped=True, **options) -> torch.optim.AdamW:
    """As the Trainer makes it (``grouped``), or over all parameters in order; trained three steps with gradients of
    their own.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    cut = (
        [[x for x in trainable if x[0] not in no_decay(model)], [x for x in trainable if x[0] in no_decay(model)]]
        if grouped
        else [trainable]
    )
    groups = [{"params": part if named else [p for _, p in part]} for part in cut]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, **options)
    for t in range(3):
        for number, (_, p) in enumerate(trainable):
            p.grad = randn(*p.shape, seed=100 * t + number, dtype=p.dtype)
        optimizer.step()
    return optimizer


def ours(model: Net, **options) -> TacoAdamW:
    return TacoAdamW(
        build_param_groups(model, weight_decay=0.01, no_decay=no_decay(model)), kernel="reference", **options
    )


def decoded(optimizer: TacoAdamW, name: str) -> tuple[torch.Tensor, torch.Tensor, dict]:
    group, p = next((group, p) for group, found, p in optimizer.named_params() if found == name)
    state = optimizer.state[p]
    moments = []
    for moment, codec in optimizer.CODECS[optimizer.treatment_of(group, p)].items():
        parts = {part: state[f"{moment}.{part}" if part else moment] for part in codec.specs(p.shape)}
        moments.append(codec.decode(parts, p.shape))
    return *moments, state


def check_imported(optimizer: TacoAdamW, model: Net, source: torch.optim.AdamW) -> None:
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        given = source.state[p]
        m, v, state = decoded(optimizer, name)
        assert int(state["step"]) == 3 and state["skipped"] == 0
        if "exp_avg" in state:
            assert torch.equal(m, given["exp_avg"].float()) and torch.equal(v, given["exp_avg_sq"].float())
            assert m.data_ptr() != given["exp_avg"].data_ptr()
            continue
        # of a Gaussian moment the code holds 0.81 of the energy: a cosine of 0.9
        exact, exact_v = given["exp_avg"].double(), given["exp_avg_sq"].double()
        held = (m * exact).sum() / (m.double().norm() * exact.norm())
        assert held > 0.87, name
        torch.testing.assert_close(state["exp_avg_sq.row"].double(), exact_v.mean(dim=1), rtol=1e-6, atol=1e-29)
        torch.testing.assert_close(state["exp_avg_sq.col"].double(), exact_v.mean(dim=0), rtol=1e-6, atol=1e-29)
        assert 0.9 < v.double().mean() / exact_v.mean() < 1.1, name


@pytest.mark.parametrize("grouped", [True, False])
def test_by_name(grouped):
    """However the other optimizer grouped its parameters."""
    model = Net()
    source = adamw(model, named=True, grouped=grouped)
    optimizer = ours(model)
    import_adamw_state(optimizer, source.state_dict())
    check_imported(optimizer, model, source)


def test_in_the_trainers_order():
    model = Net()
    source = adamw(model)
    optimizer = ours(model)
    import_adamw_state(optimizer, source.state_dict(), model=model)
    check_imported(optimizer, model, source)


def test_by_position():
    model = Net()
    trainable = [p for p in model.parameters() if p.requires_grad]
    source = adamw(model, grouped=False)
    optimizer = TacoAdamW(trainable, kernel="reference")
    import_adamw_state(optimizer, source.state_dict())
    named = {
        name: TacoAdamW([(name, p)], kernel="reference") for name, p in model.named_parameters() if p.requires_grad
    }
    for (name, single), (_, _, p) in zip(named.items(), optimizer.named_params(), strict=True):
        single.state[p] = optimizer.state[p]
        assert decoded(single, name)[2] is optimizer.state[p]
    assert [int(optimizer.state[p]["step"]) for p in trainable] == [3] * len(trainable)
    assert torch.equal(optimizer.state[model.norm.weight]["exp_avg"], source.state[model.norm.weight]["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moments_of_16_bit_models(dtype):
    model = Net().to(dtype)
    source = adamw(model, named=True, eps=1e-4)
    optimizer = ours(model)
    import_adamw_state(optimizer, source.state_dict())
    state = optimizer.state[model.norm.weight]
    assert state["exp_avg"].dtype == torch.float32
    assert torch.equal(state["exp_avg"], source.state[model.norm.weight]["exp_avg"].float())


def test_training_goes_on_from_there():
    """It saves, loads and steps; its first steps stay close to AdamW's own, closer than starting afresh."""
    model = Net()
    source = adamw(model, named=True)
    start = copy.deepcopy(model.state_dict())

    def go(optimizer):
        model.load_state_dict(start)
        for t in range(3, 6):
            for number, p in enumerate(p for p in model.parameters() if p.requires_grad):
                p.grad = randn(*p.shape, seed=100 * t + number)
            optimizer.step()
        return model.first.weight.detach().clone() - start["first.weight"]

    imported = ours(model)
    import_adamw_state(imported, source.state_dict())
    again = ours(model)
    again.load_state_dict(imported.state_dict())
    moved, moved_again, moved_fresh = go(imported), go(again), go(ours(model))
    moved_adamw = go(source)
    assert torch.equal(moved, moved_again)
    assert (moved - moved_adamw).norm() < (moved_fresh - moved_adamw).norm()


def test_options_stay_and_other_state_is_replaced():
    model = Net()
    source = adamw(model, named=True)
    optimizer = ours(model, lr=0.123, betas=(0.5, 0.6))
    train(optimizer, range(1))
    import_adamw_state(optimizer, source.state_dict())
    assert {g["lr"] for g in optimizer.param_groups} == {0.123} and {g["betas"] for g in optimizer.param_groups} == {
        (0.5, 0.6)
    }
    check_imported(optimizer, model, source)


def test_moments_of_a_layer_without_gradients():
    """All zero, or zero in some rows: the factors stay positive, as in training, and the next steps finite."""
    model = Net()
    given = copy.deepcopy(adamw(model, named=True).state_dict())
    for moment in ("exp_avg", "exp_avg_sq"):
        given["state"][0][moment].zero_()
        given["state"][4][moment][5] = 0
    optimizer = ours(model)
    import_adamw_state(optimizer, given)
    assert all(s["exp_avg_sq.row"].min() > 0 for s in optimizer.state.values() if "exp_avg_sq.row" in s)
    train(optimizer, range(2))
    assert all(p.isfinite().all() for p in model.parameters())


def test_amsgrad_and_step_as_a_number_are_taken():
    model = Net()
    source = adamw(model, named=True, amsgrad=True)
    given = source.state_dict()
    for state in given["state"].values():
        state["step"] = int(state["step"])
    optimizer = ours(model)
    import_adamw_state(optimizer, given)
    check_imported(optimizer, model, source)


# -- errors --------------------------------------------------------------------------------------


def refused(optimizer: TacoAdamW, given: dict, sentence: str, model=None) -> None:
    train(optimizer, range(1))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=sentence) as error:
        import_adamw_state(optimizer, given, model=model)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    assert state_equal(snapshot(optimizer), before)


def test_no_names_and_other_groups():
    model = Net()
    optimizer = ours(model)
    optimizer.add_param_group({"params": [("extra", parameter(3))]})
    refused(optimizer, adamw(model).state_dict(), "no parameter names and is grouped otherwise.*pass model=")


def test_other_decay_groups_than_the_trainers():
    """The same parameters, but the other run let the norms decay too: the order would be another, and shapes that agree
    would hide it.
    """
    model = Net()
    given = adamw(model).state_dict()
    moved = given["param_groups"][1]["params"].pop(0)
    given["param_groups"][0]["params"].append(moved)
    refused(ours(model), given, "groups of .4, 4. parameters.*would make .3, 5.", model=model)


def test_one_group_is_that_of_a_plain_loop():
    model = Net()
    plain = adamw(model, grouped=False)
    optimizer = ours(model)
    import_adamw_state(optimizer, plain.state_dict(), model)
    for _, name, p in optimizer.named_params():
        if "exp_avg" in optimizer.state[p]:
            assert torch.equal(optimizer.state[p]["exp_avg"], plain.state[p]["exp_avg"]), name
    given = plain.state_dict()
    given["param_groups"][0]["params"].pop()
    refused(ours(model), given, "it has 7 parameters, the model 8 trainable", model=model)


def test_other_model():
    other = Net()
    other.third = nn.Linear(64, 64)
    refused(
        ours(Net()),
        adamw(other, named=True).state_dict(),
        r"another model: 'third.weight' has moments of shape \(64, 64\), the parameter \(64, 161\)",
    )


def test_other_names():
    refused(
        TacoAdamW([("x", parameter(64, 161))], kernel="reference"),
        adamw(Net(), named=True).state_dict(),
        "no moments for any parameter",
    )


def test_second_moment_of_another_shape():
    model = Net()
    given = copy.deepcopy(adamw(model, named=True).state_dict())
    given["state"][0]["exp_avg_sq"] = torch.zeros(64)
    refused(ours(model), given, "another model: 'first.weight'")


def test_another_kind_of_optimizer():
    model = Net()
    sgd = torch.optim.SGD([(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    sgd.step()
    refused(ours(model), sgd.state_dict(), "is not plain AdamW's: it has no 'step'")


def test_a_moment_that_is_no_tensor():
    model = Net()
    given = copy.deepcopy(adamw(model, named=True).state_dict())
    given["state"][0]["exp_avg"] = 0.0
    refused(ours(model), given, "is not plain AdamW's: it has no 'exp_avg'")


def test_our_own_state():
    model = Net()
    source = ours(model)
    train(source, range(1))
    refused(ours(model), source.state_dict(), "is not plain AdamW's: it has no 'exp_avg'")


def test_an_untrained_adamw():
    model = Net()
    untrained = torch.optim.AdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    refused(ours(model), untrained.state_dict(), "no moments for any parameter")


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_moments_that_are_not_finite(moment):
    """They would poison a whole block or a whole row and column."""
    model = Net()
    given = copy.deepcopy(adamw(model, named=True).state_dict())
    given["state"][0][moment][3, 3] = float("nan")
    refused(ours(model), given, "'first.weight'.*not finite")
