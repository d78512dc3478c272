"""The strict parser: everything an annotation allows in each of its spellings, and one sentence for everything else."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, asdict, dataclass
from typing import ClassVar, Literal

import pytest

from hf_memopt.options import TacoAdamWOptions
from hf_memopt.parsing import describe_options, parse_options


@dataclass(frozen=True)
class Everything:
    strategy: ClassVar[str] = "everything"

    flag: bool = True
    count: int = 1
    ratio: float = 0.5
    label: str = "a"
    mode: Literal["fast", "exact"] = "fast"
    rank: int | float = 4
    gap: int | None = None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("", {}),
        ("  ", {}),
        ({}, {}),
        ("seed=7", {"seed": 7}),
        (" seed = 7 , dense_embeddings = true ", {"seed": 7, "dense_embeddings": True}),
        ({"seed": 7, "dense_embeddings": True}, {"seed": 7, "dense_embeddings": True}),
        ({"seed": "7", "dense_embeddings": "yes"}, {"seed": 7, "dense_embeddings": True}),
        ("kernel=reference,stochastic_rounding=0", {"kernel": "reference", "stochastic_rounding": False}),
    ],
)
def test_accepted(given, expected):
    assert parse_options(TacoAdamWOptions, given) == TacoAdamWOptions(**expected)


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "1", "yes", "Yes"])
def test_true(text):
    assert parse_options(Everything, f"flag={text}").flag is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "NO"])
def test_false(text):
    assert parse_options(Everything, f"flag={text}").flag is False


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"flag": 0}, "flag", False),
        ("count=-3", "count", -3),
        ("ratio=1e-4", "ratio", 1e-4),
        ({"ratio": 2}, "ratio", 2.0),
        ({"label": "x y"}, "label", "x y"),
        ("mode=exact", "mode", "exact"),
        ("rank=8", "rank", 8),
        ("rank=0.25", "rank", 0.25),
        ({"rank": 0.25}, "rank", 0.25),
        ("gap=none", "gap", None),
        ({"gap": None}, "gap", None),
        ("gap=200", "gap", 200),
    ],
)
def test_types(given, key, value):
    parsed = getattr(parse_options(Everything, given), key)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "given",
    [
        {"flag": "on"},
        {"flag": 2},
        {"flag": 1.0},
        {"flag": None},
        {"count": "1.5"},
        {"count": 1.0},
        {"count": True},
        {"count": "many"},
        {"count": ""},
        {"ratio": "nan"},
        {"ratio": float("inf")},
        {"ratio": True},
        {"ratio": None},
        {"label": 3},
        {"mode": "Fast"},
        {"mode": 1},
        {"rank": "x"},
        {"gap": "never"},
        {"count": [1]},
    ],
    ids=str,
)
def test_wrong_value_names_strategy_key_value_and_all_options(given):
    ((key, value),) = given.items()
    with pytest.raises(ValueError) as error:
        parse_options(Everything, given)
    message = str(error.value)
    assert message.startswith(f"everything: option '{key}' must be ")
    assert repr(value) in message
    assert describe_options(Everything) in message
    assert "\n" not in message and error.value.__cause__ is None


@pytest.mark.parametrize("given", ["sead=7", {"sead": 7}, {3: 4}])
def test_unknown_key_lists_what_exists(given):
    with pytest.raises(
        ValueError,
        match=r"^taco_adamw: there is no option .*; the options are seed: int = 0, stochastic_rounding: true",
    ):
        parse_options(TacoAdamWOptions, given)


@pytest.mark.parametrize("text", ["seed", "seed=", "=7", "seed=7,", ",seed=7", "seed=7,,kernel=auto", "seed 7", ","])
def test_malformed_text(text):
    with pytest.raises(ValueError, match="is not 'key=value'; the options are"):
        parse_options(TacoAdamWOptions, text)


def test_twice():
    with pytest.raises(ValueError, match="option 'seed' is given twice"):
        parse_options(TacoAdamWOptions, "seed=1,seed=2")


@pytest.mark.parametrize("given", [7, ["seed=7"], b"seed=7"])
def test_neither_text_nor_mapping(given):
    with pytest.raises(ValueError, match="options must be 'key=value,key=value' or a mapping"):
        parse_options(TacoAdamWOptions, given)


def test_seed_out_of_range():
    with pytest.raises(ValueError, match="taco_adamw: option 'seed' must be 0 or more, got -1"):
        parse_options(TacoAdamWOptions, "seed=-1")


def test_wrong_choice_lists_the_choices():
    with pytest.raises(ValueError, match=re.escape("must be auto|reference|compiled|triton|inductor, got 'cuda'")):
        parse_options(TacoAdamWOptions, "kernel=cuda")


def test_another_name_for_the_same_options():
    with pytest.raises(ValueError, match="^galore_taco_adamw: "):
        parse_options(TacoAdamWOptions, "x=1", strategy="galore_taco_adamw")


def test_frozen_and_round_trip():
    options = TacoAdamWOptions(seed=3, kernel="reference")
    with pytest.raises(FrozenInstanceError):
        options.seed = 4
    assert parse_options(TacoAdamWOptions, asdict(options)) == options
    text = ",".join(f"{key}={value}" for key, value in asdict(options).items())
    assert parse_options(TacoAdamWOptions, text) == options
