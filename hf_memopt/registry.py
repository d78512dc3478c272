"""The names of the package's optimizers: the only place where they live.

An entry is data. The code behind it is named by a dotted string and imported when a training asks for it, so listing
the names costs nothing and needs neither torch nor transformers. A name is claimed once: registering it again raises,
because an ``optim=`` that changes its meaning with the order of imports would be found out only by its loss curve.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .options import (
    CompActOptions,
    CompActTacoOptions,
    GaLoreOptions,
    GaLoreTacoOptions,
    TacoAdamWOptions,
    TacoOptions,
)


@dataclass(frozen=True)
class OptimizerSpec:
    """What the package knows about one value of ``optim=``.

    Args:
        name: Lower-case value of ``TrainingArguments.optim``, for example ``"taco_adamw"``.
        summary: One line for tables.
        paper: Where the method comes from.
        builder: ``"package.module:function"``. It is called as ``function(model, options, *, lr, betas, eps,
            weight_decay, no_decay, target_modules)`` and returns the optimizer class and its keyword arguments, with
            ``"params"`` among them when a model is given.
        options: Frozen dataclass whose fields are the accepted ``optim_args``.
        docs: Page of the documentation, relative to the repository.
        preset: Options that the name itself fixes, such as ``update_in_backward`` in ``taco_adamw_layerwise``.
    """

    name: str
    summary: str
    paper: str
    builder: str
    options: type
    docs: str
    preset: Mapping[str, Any] = field(default_factory=dict)

    def load_builder(self) -> Callable[..., tuple[type, dict[str, Any]]]:
        """Import and return the builder."""
        module, _, function = self.builder.partition(":")
        return getattr(importlib.import_module(module), function)


_specs: dict[str, OptimizerSpec] = {}


def register_optimizer(spec: OptimizerSpec) -> OptimizerSpec:
    """Add ``spec`` to the table.

    Raises:
        ValueError: The name is taken or not lower-case letters, digits and underscores, or the builder is not
            ``module:function``.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", spec.name):
        raise ValueError(f"Optimizer name {spec.name!r} must consist of lower-case letters, digits and underscores.")
    if not re.fullmatch(r"[\w.]+:\w+", spec.builder):
        raise ValueError(
            f"Builder {spec.builder!r} of optimizer {spec.name!r} must be written as 'package.module:function'."
        )
    if spec.name in _specs:
        raise ValueError(f"Optimizer {spec.name!r} is registered already; registered are {_names()}.")
    _specs[spec.name] = spec
    return spec


def unregister_optimizer(name: str) -> None:
    """Take ``name`` out of the table, if it is there; it means again what it meant before."""
    _specs.pop(name, None)


def get_optimizer(name: str) -> OptimizerSpec:
    """The entry of ``name``.

    Raises:
        ValueError: There is none; the sentence lists those that exist.
    """
    if name not in _specs:
        raise ValueError(f"hf_memopt has no optimizer {name!r}; it has {_names()}.")
    return _specs[name]


def is_registered(name: str) -> bool:
    """Whether ``name`` is an optimizer of this package."""
    return name in _specs


def list_optimizers() -> list[OptimizerSpec]:
    """All entries, in order of their names."""
    return [_specs[name] for name in sorted(_specs)]


def _names() -> str:
    return ", ".join(sorted(_specs)) or "none"


def _register_with_layerwise(spec: OptimizerSpec) -> None:
    """``spec``, and the same with update in backward under the suffix that transformers uses for it."""
    register_optimizer(spec)
    register_optimizer(
        replace(
            spec,
            name=f"{spec.name}_layerwise",
            summary=f"{spec.name} with update in backward: no gradient buffer",
            preset={"update_in_backward": True},
        )
    )


_register_with_layerwise(
    OptimizerSpec(
        name="taco_adamw",
        summary="AdamW with both moments stored as ternary codes: 3.3 bits a parameter instead of 64",
        paper="hf_memopt (ternary states with carried remainder)",
        builder="hf_memopt.optim.builders:taco_adamw",
        options=TacoAdamWOptions,
        docs="docs/taco_adamw.md",
    )
)

_register_with_layerwise(
    OptimizerSpec(
        name="taco",
        summary="one entry of each column moves, chosen by an FP8 history: 0.1 bits a parameter of wide linear layers",
        paper="arXiv:2610.02199",
        builder="hf_memopt.optim.builders:taco",
        options=TacoOptions,
        docs="docs/taco.md",
    )
)

_register_with_layerwise(
    OptimizerSpec(
        name="memopt_galore_adamw",
        summary="AdamW in a low-rank subspace of each linear layer's gradient, moments in fp32",
        paper="arXiv:2403.03507",
        builder="hf_memopt.optim.builders:galore",
        options=GaLoreOptions,
        docs="docs/galore.md",
    )
)

_register_with_layerwise(
    OptimizerSpec(
        name="galore_taco_adamw",
        summary="AdamW in a subspace with ternary moments: under 1 bit a parameter of wide linear layers at rank 1/4",
        paper="arXiv:2403.03507, with ternary moments of hf_memopt",
        builder="hf_memopt.optim.builders:galore",
        options=GaLoreTacoOptions,
        docs="docs/galore.md",
    )
)

_register_with_layerwise(
    OptimizerSpec(
        name="compact_adamw",
        summary="AdamW on compressed gradients of linear layers that keep compressed inputs, moments in fp32",
        paper="arXiv:2410.15352",
        builder="hf_memopt.optim.builders:compact",
        options=CompActOptions,
        docs="docs/compact.md",
    )
)

_register_with_layerwise(
    OptimizerSpec(
        name="compact_taco_adamw",
        summary="the same with ternary moments",
        paper="arXiv:2410.15352, with ternary moments of hf_memopt",
        builder="hf_memopt.optim.builders:compact",
        options=CompActTacoOptions,
        docs="docs/compact.md",
    )
)
