"""Names are claimed once, unknown ones are answered with what exists, and every entry can be built."""

from __future__ import annotations

import dataclasses

import pytest

from hf_memopt import registry
from hf_memopt.options import TacoAdamWOptions
from hf_memopt.registry import OptimizerSpec, get_optimizer, is_registered, list_optimizers, register_optimizer


def spec(**changes) -> OptimizerSpec:
    return dataclasses.replace(get_optimizer("taco_adamw"), **changes)


@pytest.fixture
def _own_table(monkeypatch):
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))


@pytest.mark.usefixtures("_own_table")
def test_register_get_list():
    added = register_optimizer(spec(name="another_one"))
    assert get_optimizer("another_one") is added
    assert [s.name for s in list_optimizers()] == sorted(s.name for s in list_optimizers())
    assert added in list_optimizers()
    assert is_registered("another_one") and not is_registered("adamw_torch")


def test_duplicate_raises_and_lists():
    with pytest.raises(ValueError, match="'taco_adamw' is registered already; registered are .*taco_adamw"):
        register_optimizer(spec())


def test_unknown_raises_and_lists():
    with pytest.raises(ValueError, match="hf_memopt has no optimizer 'taco_adam'; it has .*taco_adamw"):
        get_optimizer("taco_adam")


@pytest.mark.parametrize("name", ["", "Taco", "taco-adamw", "2taco", "taco adamw"])
def test_bad_name(name):
    with pytest.raises(ValueError, match="must consist of lower-case letters"):
        register_optimizer(spec(name=name))


@pytest.mark.parametrize("builder", ["hf_memopt.optim.builders", "hf_memopt.optim:", ":taco", "a b:c"])
def test_bad_builder(builder):
    with pytest.raises(ValueError, match="must be written as 'package.module:function'"):
        register_optimizer(spec(name="another_one", builder=builder))


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_optimizer("taco_adamw").name = "x"


@pytest.mark.parametrize("entry", list_optimizers(), ids=lambda s: s.name)
def test_every_entry_is_complete(entry):
    assert callable(entry.load_builder())
    assert dataclasses.is_dataclass(entry.options) and entry.options()
    assert entry.summary and entry.paper and entry.docs.endswith(".md")


def test_options_class_of_taco():
    assert get_optimizer("taco_adamw").options is TacoAdamWOptions
