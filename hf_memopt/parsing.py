"""The strict parser that fills an options dataclass.

``TrainingArguments.optim_args`` reaches an optimizer as one string, and ``bool("false")`` is true: options that are
cast by hand go wrong in silence. Here the annotations of the dataclass are the whole grammar. A value is accepted only
if it *is* what the annotation says, written as text (``"seed=7"``) or given with its own type (a dict, JSON, YAML).
Anything else is a ValueError of one sentence that names the strategy, the key and everything that would have been
accepted, so that a typing mistake costs a second at the start and not a training run.

Understood annotations: ``bool``, ``int``, ``float``, ``str``, ``Literal["a", "b"]``, ``None``, and unions of these,
tried in the order written.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")

TRUE = ("true", "1", "yes")
FALSE = ("false", "0", "no")


def parse_options(
    cls: type[T],
    given: str | Mapping[str, Any] | None,
    *,
    strategy: str | None = None,
    preset: Mapping[str, Any] | None = None,
) -> T:
    """Fill the options dataclass ``cls`` from text or a mapping.

    Args:
        cls: A frozen dataclass of this module.
        given: ``"key=value,key=value"`` (spaces are ignored), a mapping of keys to text or typed values, or nothing for
            all defaults.
        strategy: Name used in error sentences; by default ``cls.strategy``.
        preset: Options that the strategy's name fixes; they may be given too, but not otherwise.

    Returns:
        An instance of ``cls``; keys that were not given keep their defaults.

    Raises:
        ValueError: Malformed text, a key that does not exist or is given twice, or a value of the wrong type or
            outside the choices.
    """
    name = strategy or getattr(cls, "strategy", cls.__name__)
    hints = _option_types(cls)
    values = {}
    for key, value in _pairs(cls, name, given):
        if key not in hints:
            raise ValueError(f"{name}: there is no option {key!r}; {describe_options(cls)}.")
        if key in values:
            raise ValueError(f"{name}: option {key!r} is given twice; {describe_options(cls)}.")
        try:
            values[key] = _convert(hints[key], value)
        except ValueError:
            raise ValueError(
                f"{name}: option {key!r} must be {_type_text(hints[key])}, got {value!r}; {describe_options(cls)}."
            ) from None
    for key, value in (preset or {}).items():
        if values.setdefault(key, value) != value:
            raise ValueError(
                f"{name}: this name means {key}={_value_text(value)}, but {key}={_value_text(values[key])} is given: "
                f"use optim={cls.strategy!r} or leave the option out."
            )
    return cls(**values)


def checked(options: Any, cls: type) -> None:
    """Raise ValueError where a field of ``options``, an instance of ``cls``, is not what its annotation says."""
    for key, hint in _option_types(cls).items():
        value = getattr(options, key)
        try:
            same = not isinstance(value, str) or hint is str or typing.get_origin(hint) is Literal
            if not same or _convert(hint, value) != value:
                raise ValueError(value)
        except ValueError:
            raise ValueError(
                f"{cls.strategy}: option {key!r} must be {_type_text(hint)}, got {value!r}; {describe_options(cls)}."
            ) from None


def describe_options(cls: type) -> str:
    """All options of ``cls`` with type and default, as a clause: ``the options are seed: int = 0, ...``."""
    hints = _option_types(cls)
    listed = [f"{f.name}: {_type_text(hints[f.name])} = {_value_text(f.default)}" for f in dataclasses.fields(cls)]
    return f"the options are {', '.join(listed)}" if listed else "it takes no options"


@functools.cache
def _option_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _pairs(cls: type, name: str, given: str | Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [(str(key), value) for key, value in given.items()]
    if not isinstance(given, str):
        raise ValueError(
            f"{name}: options must be 'key=value,key=value' or a mapping, got {type(given).__name__}; "
            f"{describe_options(cls)}."
        )
    if not given.strip():
        return []
    pairs = []
    for item in given.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if pairs and not equals and _goes_on(cls, *pairs[-1], key):
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{key}")
            continue
        if not (key and equals and value):
            raise ValueError(
                f"{name}: {item.strip()!r} in options {given!r} is not 'key=value'; {describe_options(cls)}."
            )
        pairs.append((key, value))
    return pairs


def _goes_on(cls: type, key: str, value: str, more: str) -> bool:
    """Whether ``key`` takes a choice that is written with a comma, as ``recompute=norms,mlp`` is."""
    hint = _option_types(cls).get(key)
    return typing.get_origin(hint) is Literal and f"{value},{more}" in typing.get_args(hint)


def _convert(hint: Any, value: Any) -> Any:
    """``value`` as the annotation ``hint`` demands it; ValueError if it is anything else."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        for member in typing.get_args(hint):
            try:
                return _convert(member, value)
            except ValueError:
                continue
        raise ValueError(value)
    if origin is Literal:
        for choice in typing.get_args(hint):
            if value == choice and type(value) is type(choice):
                return choice
        raise ValueError(value)
    if hint is bool:
        if isinstance(value, bool):
            return value
        text = str(value).lower() if isinstance(value, (str, int)) else ""
        if text in TRUE or text in FALSE:
            return text in TRUE
        raise ValueError(value)
    if isinstance(value, bool):
        raise ValueError(value)
    if hint is int and isinstance(value, (int, str)):
        return int(value)
    if hint is float and isinstance(value, (int, float, str)):
        number = float(value)
        if math.isfinite(number):
            return number
        raise ValueError(value)
    if hint is str and isinstance(value, str):
        return value
    if hint is types.NoneType and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    raise ValueError(value)


def _type_text(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(member) for member in typing.get_args(hint))
    if origin is Literal:
        return "|".join(str(choice) for choice in typing.get_args(hint))
    if hint is bool:
        return "true|false"
    return "none" if hint is types.NoneType else hint.__name__


def _value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
