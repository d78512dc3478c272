"""One frozen dataclass per strategy, and the strict parser that fills it.

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
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, Union

T = TypeVar("T")

TRUE = ("true", "1", "yes")
FALSE = ("false", "0", "no")


@dataclass(frozen=True)
class CommonOptions:
    """What every optimizer of the package takes in ``optim_args``, as in ``optim_args="seed=7,kernel=reference"``.

    Args:
        seed: Key of the counter hash behind every random number. At least 0.
        stochastic_rounding: Round bf16 and fp16 weights stochastically on write-back. Without it, updates below half a
            unit in the last place are lost.
        kernel: Which implementation of the step runs. ``auto`` takes the fastest that works on the parameter's device.
        update_in_backward: Step each parameter as soon as its gradient is complete and free the gradient. Excludes
            gradient accumulation, clipping of the global norm, fp16 and several processes.
        clip_per_parameter: With ``update_in_backward``, the largest L2 norm of each parameter's gradient.
    """

    strategy: ClassVar[str] = ""

    seed: int = 0
    stochastic_rounding: bool = True
    kernel: Literal["auto", "reference", "compiled", "triton", "inductor"] = "auto"
    update_in_backward: bool = False
    clip_per_parameter: float | None = None

    def __post_init__(self) -> None:
        self._require("seed", self.seed >= 0, "0 or more")
        clip = self.clip_per_parameter
        if clip is not None:
            self._require("clip_per_parameter", clip > 0, "above 0")
            if not self.update_in_backward:
                raise ValueError(
                    f"{self.strategy}: option 'clip_per_parameter' needs update_in_backward=true; without it set "
                    "max_grad_norm, which clips the norm of all gradients together."
                )

    def _require(self, key: str, allowed: bool, says: str) -> None:
        """Raise ValueError for the option ``key`` unless its value is allowed."""
        if not allowed:
            raise ValueError(f"{self.strategy}: option {key!r} must be {says}, got {getattr(self, key)}.")


@dataclass(frozen=True)
class TacoAdamWOptions(CommonOptions):
    """Options of ``optim="taco_adamw"``: the common ones and this.

    Args:
        dense_embeddings: Keep fp32 moments for embeddings and the output head instead of ternary ones.
    """

    strategy: ClassVar[str] = "taco_adamw"

    dense_embeddings: bool = False


@dataclass(frozen=True)
class TacoOptions(TacoAdamWOptions):
    """Options of ``optim="taco"``; those of ``taco_adamw`` and these.

    Args:
        k: Entries of each column of a linear layer that the history keeps, 0 to 1024. 0 is the history-free method,
            which is unstable.
        decay: Of the history, a step. At least 0, below 1.
        consume: Share of an applied entry that leaves the history, 0 to 1.
        lr_scale: The chosen entry of a column moves by learning_rate * lr_scale.
        dimension_scale: Multiply that by rows / columns of the matrix.
    """

    strategy: ClassVar[str] = "taco"

    k: int = 16
    decay: float = 0.9
    consume: float = 1.0
    lr_scale: float = 50.0
    dimension_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("k", 0 <= self.k <= 1024, "from 0 to 1024")
        self._require("decay", 0 <= self.decay < 1, "at least 0 and below 1")
        self._require("consume", 0 <= self.consume <= 1, "from 0 to 1")
        self._require("lr_scale", self.lr_scale >= 0, "0 or more")


@dataclass(frozen=True)
class GaLoreOptions(CommonOptions):
    """Options of ``optim="memopt_galore_adamw"``: the common ones and these. Those that transformers has for its own
    GaLore have the same names.

    Args:
        rank: Dimension of the subspace, or a fraction of a matrix' smaller dimension (0.25).
        update_proj_gap: Steps between two refreshes of a matrix' subspace.
        scale: The projected matrices learn at learning_rate * scale.
        proj_type: Which dimension is projected: ``std`` the smaller one, ``reverse_std`` the larger one, ``left`` the
            rows, ``right`` the columns.
        refresh: How a new subspace is found; ``projections/__init__.py``.
        transport: What becomes of the moments on a refresh: ``moments`` turns them into the new subspace, ``none``
            leaves their numbers as they are, which is what the paper does.
        residual: What becomes of the gradient outside the subspace: ``none`` drops it, ``fira`` applies it scaled like
            the rest, ``sign`` applies its sign.
        residual_scale: The residual learns at learning_rate * scale * residual_scale.
        stagger: Refresh one matrix after another instead of all on one step.
        adaptive: A matrix whose subspace has settled waits twice as long for its next refresh.
        projector: How a projector is stored.
        matmul: In which precision gradients are projected and updates projected back. ``auto`` is bfloat16 for bf16
            gradients, and for fp32 ones on CPUs with instructions for it; else float32.
    """

    strategy: ClassVar[str] = "memopt_galore_adamw"

    rank: int | float = 0.25
    update_proj_gap: int = 200
    scale: float = 1.0
    proj_type: Literal["std", "reverse_std", "left", "right"] = "std"
    refresh: Literal["subspace", "svd", "select", "random"] = "select"
    transport: Literal["moments", "none"] = "moments"
    residual: Literal["none", "fira", "sign"] = "fira"
    residual_scale: float = 1.0
    stagger: bool = True
    adaptive: bool = False
    projector: Literal["int8", "float32"] = "int8"
    matmul: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.rank, int)
        self._require("rank", self.rank >= 1 if whole else 0 < self.rank <= 1, "1 or more, or a fraction up to 1.0")
        self._require("update_proj_gap", self.update_proj_gap >= 1, "1 or more")
        for key in ("scale", "residual_scale"):
            self._require(key, 0 < getattr(self, key) <= 1e6, "above 0 and at most 1e6")


@dataclass(frozen=True)
class GaLoreTacoOptions(GaLoreOptions):
    """Options of ``optim="galore_taco_adamw"``: those of ``memopt_galore_adamw`` and this.

    Args:
        dense_embeddings: Keep fp32 moments for embeddings and the output head instead of ternary ones.
    """

    strategy: ClassVar[str] = "galore_taco_adamw"

    dense_embeddings: bool = False


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
        if not (key and equals and value):
            raise ValueError(
                f"{name}: {item.strip()!r} in options {given!r} is not 'key=value'; {describe_options(cls)}."
            )
        pairs.append((key, value))
    return pairs


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
