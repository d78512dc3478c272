"""What does not fit is refused in one sentence, and nothing has been changed."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_memopt import TacoAdamW
from tests.cases import parameter
from tests.optim.common import snapshot, state_equal, train

SHAPES = {"a.weight": (64, 161), "b.weight": (70, 80), "c.bias": (9,)}


def make(shapes=SHAPES, groups=(2, 1), named=True, **options) -> TacoAdamW:
    items = [(name, parameter(*shape)) if named else parameter(*shape) for name, shape in shapes.items()]
    cut = [{"params": items[sum(groups[:i]) : sum(groups[: i + 1])]} for i in range(len(groups))]
    return TacoAdamW(cut, kernel="reference", **options)


def saved(optimizer: TacoAdamW | None = None) -> dict:
    optimizer = optimizer or make()
    train(optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


def refused(given: dict, sentence: str, optimizer: TacoAdamW | None = None) -> None:
    optimizer = optimizer or make(lr=0.5)
    train(optimizer, range(1))
    before, frozen = snapshot(optimizer), copy.deepcopy(given)
    with pytest.raises(ValueError, match=sentence) as error:
        optimizer.load_state_dict(given)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    assert state_equal(snapshot(optimizer), before) and state_equal(given, frozen)
    train(optimizer, range(1))


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        ["param_groups", "state"],
        "optimizer.pt",
        7,
        {"param_groups": None, "state": {}},
        {"param_groups": "ab", "state": {}},
        {"param_groups": [None, None], "state": {}},
        {"param_groups": [{}, {}], "state": {}},
        {"param_groups": [{"params": 0}, {"params": 1}], "state": {}},
        {"param_groups": [{"params": [0]}], "state": None},
    ],
    ids=repr,
)
def test_what_is_no_state_at_all(given):
    refused(given, r"^This is not the state_dict\(\) of an optimizer: ")


def test_states_of_a_parameter_that_are_no_dict():
    given = saved()
    given["state"][1] = [1, 2]
    refused(given, "keeps other moments for 'b.weight'")


@pytest.mark.parametrize("version", [0, 2, "1", "next"])
def test_another_format_version(version):
    given = saved()
    for group in given["param_groups"]:
        group["format_version"] = version
    refused(given, f"has format version.*{version}.*reads version 1: install the version of hf_memopt that wrote it")


def test_format_versions_mixed():
    given = saved()
    given["param_groups"][1]["format_version"] = 2
    refused(given, "format version")


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_another_optimizer(cls):
    other = cls([{"params": [parameter(64, 161), parameter(70, 80)]}, {"params": [parameter(9)]}], lr=0.1)
    train(other, range(1))
    refused(other.state_dict(), "state of another optimizer, not TacoAdamW's: .*import_adamw_state")


def test_other_shapes():
    refused(
        saved(make({**SHAPES, "a.weight": (64, 321)})),
        r"another model: 'exp_avg.codes' of 'a.weight' is uint8 \[64, 65\] where uint8 \[64, 33\] is needed",
    )
    refused(
        saved(make({**SHAPES, "c.bias": (8,)})),
        r"another model: 'exp_avg' of 'c.bias' is float32 \[8\] where float32 \[9\] is needed",
    )


def test_other_shapes_whose_codes_agree():
    """161 and 165 columns both take 33 bytes a row; the column factor tells them apart."""
    refused(saved(make({**SHAPES, "a.weight": (64, 165)})), r"another model: 'exp_avg_sq.col' of 'a.weight'")


def test_other_names():
    refused(
        saved(make({"x.weight": (64, 161), "b.weight": (70, 80), "c.bias": (9,)})),
        "another model: it has 'x.weight' where this one has 'a.weight'",
    )


def test_same_shapes_in_another_order():
    shapes = {"a.weight": (64, 161), "b.weight": (64, 161), "c.bias": (9,)}
    turned = {"b.weight": (64, 161), "a.weight": (64, 161), "c.bias": (9,)}
    refused(saved(make(turned)), "it has 'b.weight' where this one has 'a.weight'", make(shapes))


@pytest.mark.parametrize("groups", [(1, 2), (3,), (1, 1, 1)], ids=str)
def test_other_groups(groups):
    refused(saved(make(groups=groups)), "groups the same parameters otherwise .*optim_target_modules")


def test_other_number_of_parameters():
    refused(saved(make({"a.weight": (64, 161), "b.weight": (70, 80)}, groups=(1, 1))), "is only in this optimizer")


@pytest.mark.parametrize("own, other", [("ternary", "dense"), ("dense", "ternary"), ("auto", "dense")])
@pytest.mark.parametrize("steps", [0, 2])
def test_another_treatment(own, other, steps):
    """Also when nothing has been saved but the groups: the file must not decide in silence what the user has chosen."""

    def make_one(treatment):
        return TacoAdamW([{"params": [("a.weight", parameter(64, 161))], "treatment": treatment}], kernel="reference")

    given = make_one(other)
    train(given, range(steps))
    refused(given.state_dict(), "other moments for 'a.weight'.*optim_args", make_one(own))


def test_auto_and_the_same_treatment_by_name_agree():
    given = TacoAdamW([{"params": [("a.weight", parameter(64, 161))], "treatment": "ternary"}], kernel="reference")
    train(given, range(2))
    own = TacoAdamW([("a.weight", parameter(64, 161))], kernel="reference")
    own.load_state_dict(given.state_dict())
    train(own, range(1))


def test_a_buffer_of_another_dtype():
    """As torch's own loading, or a well-meant ``.half()`` over the file, leaves it."""
    given = saved()
    given["state"][0]["exp_avg.scale"] = given["state"][0]["exp_avg.scale"].float()
    refused(given, r"'exp_avg.scale' of 'a.weight' is float32 \[64, 2\] where bfloat16 \[64, 2\] is needed")


@pytest.mark.parametrize("key", ["exp_avg_sq.row", "step", "skipped"])
def test_a_missing_entry(key):
    given = saved()
    del given["state"][0][key]
    refused(given, "'a.weight'")


def test_an_unknown_entry():
    given = saved()
    given["state"][0]["max_exp_avg_sq"] = torch.zeros(3)
    refused(given, "other moments for 'a.weight'")


@pytest.mark.parametrize(
    "given",
    [{}, {"state": {}}, {"param_groups": []}, {"state": {}, "param_groups": []}, {"model.weight": torch.zeros(3)}],
    ids=str,
)
def test_not_a_state_of_an_optimizer(given):
    refused(given, "optimizer")


def test_the_error_comes_before_anything_is_loaded():
    """The fault is in the last parameter."""
    given = saved()
    given["state"][2]["exp_avg"] = torch.zeros(10)
    refused(given, "'exp_avg' of 'c.bias'")


def test_unnamed_and_named_fit_each_other():
    """Position decides; the names of the file, which seed its random numbers, are taken over."""
    for own, other in ((True, False), (False, True)):
        given = saved(make(named=other))
        optimizer = make(named=own)
        optimizer.load_state_dict(given)
        train(optimizer, range(2, 3))
