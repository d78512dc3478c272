"""From a model and options to an optimizer class and its arguments: one function per strategy, named in the registry.

The builders know nothing of the Trainer. The integration calls them with what ``TrainingArguments`` say; a plain loop
or the memory simulation can call them directly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from ..activations.compression import compression_of
from ..activations.patch import compress_activations
from ..codecs.projected import Projection
from ..options import (
    CommonOptions,
    CompActOptions,
    CompActTacoOptions,
    GaLoreOptions,
    GaLoreTacoOptions,
    TacoAdamWOptions,
    TacoOptions,
)
from ..param_groups import build_param_groups
from .compact import CompActAdamW, mark_carriers
from .galore import OWN_OPTIONS, GaLoreAdamW
from .taco import Taco
from .taco_adamw import TacoAdamW


def taco_adamw(
    model: nn.Module | None, options: TacoAdamWOptions, **training: Any
) -> tuple[type[TacoAdamW], dict[str, Any]]:
    """Class and keyword arguments of ``TacoAdamW``; ``params`` is among them when ``model`` is given. ``training`` and
    errors are those of ``_common``."""
    return TacoAdamW, _common(model, options, **training)


def taco(model: nn.Module | None, options: TacoOptions, **training: Any) -> tuple[type[Taco], dict[str, Any]]:
    """Class and keyword arguments of ``Taco``, as ``taco_adamw``.

    Without a model nobody can tell an embedding from a linear layer, so there must be one.
    """
    if model is None:
        raise ValueError(
            f"{options.strategy}: which weights belong to linear layers is read from the model: pass the model as well."
        )
    own = {key: getattr(options, key) for key in ("k", "decay", "consume", "lr_scale", "dimension_scale")}
    return Taco, {**_common(model, options, one_sparse=True, **training), **own}


def galore(
    model: nn.Module | None, options: GaLoreOptions, **training: Any
) -> tuple[type[GaLoreAdamW], dict[str, Any]]:
    """Class and keyword arguments of ``GaLoreAdamW``, as ``taco_adamw``; with ``GaLoreTacoOptions`` its moments are
    ternary. Which weights belong to linear layers is read from the model, so there must be one."""
    if model is None:
        raise ValueError(
            f"{options.strategy}: which weights belong to linear layers is read from the model: pass the model as well."
        )
    own = {key: getattr(options, key) for key in OWN_OPTIONS}
    own["state"] = "ternary" if isinstance(options, GaLoreTacoOptions) else "fp32"
    return GaLoreAdamW, {**_common(model, options, projection=Projection.of(own), **training), **own}


def compact(
    model: nn.Module | None, options: CompActOptions, **training: Any
) -> tuple[type[CompActAdamW], dict[str, Any]]:
    """Class and keyword arguments of ``CompActAdamW``; the model is patched, unless it is already. With
    ``CompActTacoOptions`` moments are ternary. ``target_modules`` says which layers are compressed."""
    if model is None:
        raise ValueError(f"{options.strategy}: the layers to compress are found in the model: pass the model as well.")
    targets, config = training.pop("target_modules", None), options.config()
    found = compression_of(model)
    if found is None:
        compress_activations(model, config, target_modules=targets)
    elif found.config != config:
        raise ValueError(
            f"{options.strategy}: the activations of this model are compressed already, with other options "
            f"({found.config}): give the options in one place, or call .restore() on that compression first."
        )
    common = _common(model, options, **training)
    ternary = isinstance(options, CompActTacoOptions)
    common["params"] = mark_carriers(common["params"])
    return CompActAdamW, {**common, "state": "ternary" if ternary else "fp32"}


def _common(
    model: nn.Module | None,
    options: CommonOptions,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    no_decay: Collection[str] = (),
    target_modules: str | Iterable[str] | None = None,
    one_sparse: bool = False,
    projection: Projection | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``TacoAdamW`` and its subclasses.

    Args:
        model: Its trainable parameters are grouped by weight decay and treatment. None leaves the grouping to the
            caller.
        no_decay: Names of the parameters without weight decay.
        target_modules: Which matrices are ternary, as ``TrainingArguments.optim_target_modules``; None means all.

    Raises:
        ValueError: An option needs the model and there is none, or ``target_modules`` matches nothing.
    """
    kwargs: dict[str, Any] = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "seed": options.seed,
        "stochastic_rounding": options.stochastic_rounding,
        "kernel": options.kernel,
        "update_in_backward": options.update_in_backward,
        "clip_per_parameter": options.clip_per_parameter,
    }
    dense_embeddings = getattr(options, "dense_embeddings", False)
    if model is not None:
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                f"{options.strategy}: the model has no trainable parameter (requires_grad is False for all of them): "
                "unfreeze some, or add adapters, before the Trainer is made."
            )
        kwargs["params"] = build_param_groups(
            model,
            weight_decay=weight_decay,
            no_decay=no_decay,
            target_modules=target_modules,
            dense_embeddings=dense_embeddings,
            one_sparse=one_sparse,
            projection=projection,
        )
        return kwargs
    for needs_model, what in (
        (dense_embeddings, "dense_embeddings=true"),
        (target_modules is not None, "optim_target_modules"),
    ):
        if needs_model:
            raise ValueError(
                f"{options.strategy}: {what} can only be applied to a model's named modules, so pass the model as well."
            )
    return kwargs
