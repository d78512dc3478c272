"""``compress_activations``: which layers are compressed, and making them so.

Compressed are ``nn.Linear`` and ``Conv1D`` of exactly these classes (a quantised or adapted layer has its own rules)
with a trainable weight, in the repeated blocks of a model: what lies outside them, an output head, a pooler, a
classifier, is small in activations and large in effect. Left alone, with the reason in the report, are also

- the output projection of an attention: its input is the attention's output, which attention itself keeps for backward,
  so nothing would be saved. It is known by its place: a layer of an attention that is not called for a query, key or
  value, or the one layer of an attention's output module;
- weights that several modules share, and embeddings;
- the layers of PEFT's adapters, which are narrow already;
- experts in one tensor of three dimensions, which are not linear layers.

With ``recompute`` the remaining trainable linear layers become exact ones (``layers.py``), which do not keep an input
that can be remade.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from ..options import CompActConfig
from ..param_groups import embedding_parameters, module_matchers
from . import shared
from .basis import InputBasis
from .compression import Compression, compression_of
from .layers import lean_class, patch
from .recompute import recompute
from .report import Skipped

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "o", "c_proj", "wo", "dense", "proj_out", "o_lin", "out_lin", "linear_out")
"""What models call the layer behind an attention."""


def compress_activations(
    model: nn.Module, config: CompActConfig | None = None, *, target_modules: str | Iterable[str] | None = None
) -> Compression:
    """Make the model's linear layers keep compressed inputs for backward. Call it before the optimizer is made.

    Weights, their names and what is saved stay as they were; trainable are then the carriers instead of the compressed
    weights, so make the optimizer from the model's parameters afterwards, and keep to one optimizer. Without the
    Trainer, call ``compression.resume(optimizer)`` after ``optimizer.load_state_dict``.

    Args:
        model: in training it has to be in ``train()`` mode; in evaluation the layers are plain ones.
        config: the options; ``CompActConfig()`` by default.
        target_modules: which layers, as ``TrainingArguments.optim_target_modules``; None means all that qualify.

    Returns:
        A ``Compression``, with ``report()`` and ``restore()``.

    Raises:
        TypeError: not a model, or not a ``CompActConfig``.
        ValueError: the model is compressed already, nothing would be compressed, or ``target_modules`` match no layer.
    """
    config = CompActConfig() if config is None else config
    if not isinstance(config, CompActConfig) or not isinstance(model, nn.Module):
        raise TypeError(
            "compress_activations takes a model and a CompActConfig(...), got "
            f"{type(model).__name__} and {type(config).__name__}."
        )
    if compression_of(model) is not None:
        raise ValueError("The activations of this model are compressed already: call .restore() on that first.")
    chosen, skipped = _choose(model, config, target_modules)
    if not chosen and config.rank is not None:
        why = Counter(s.reason for s in skipped)
        found = ", ".join(f"{count} x {reason}" for reason, count in why.items()) or "it has no linear layer"
        raise ValueError(
            f"No linear layer of this model would be compressed ({found}): choose another rank or target_modules, or "
            "train with taco_adamw, which saves memory elsewhere; adapters of LoRA have hf_memopt.compress_lora."
        )
    parts = config.recompute_parts()
    recomputation = recompute(model, parts) if parts else None
    hooks = []
    for parent in {id(p): p for name in chosen for p in [_parent(model, name)]}.values():
        hooks += shared.watch(parent)
    layers, exact = {}, {}
    for name, layer in model.named_modules():
        if name in chosen:
            kind = config.projection
            patch(layer, InputBasis(name, _features(layer), chosen[name], kind, config.seed))
            layers[name] = layer
        elif parts and lean_class(layer) is not None and layer.weight.requires_grad:
            patch(layer, None)
            exact[name] = layer
    return Compression(model, config, layers, exact, skipped, recomputation, hooks)


def _choose(
    model: nn.Module, config: CompActConfig, target_modules: str | Iterable[str] | None
) -> tuple[dict[str, int], list[Skipped]]:
    """Name -> rank of the layers to compress, and what is left alone."""
    matchers = {} if target_modules is None else module_matchers(target_modules)
    hits = dict.fromkeys(matchers, 0)
    embeddings = embedding_parameters(model)
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    chosen, skipped = {}, []
    for name, layer in model.named_modules():
        reason = None
        if lean_class(layer) is None:
            reason = _not_linear(layer)
        else:
            matched = [label for label, matches in matchers.items() if matches(name, layer)]
            hits.update({label: hits[label] + 1 for label in matched})
            rank = rank_of(config.rank, _features(layer))
            if config.rank is None:
                reason = ""
            elif matchers and not matched:
                reason = "not in the target modules"
            elif id(layer.weight) in embeddings:
                reason = "embedding or output head"
            elif uses[id(layer.weight)] > 1:
                reason = "weight shared by several modules"
            elif "weight" not in layer._parameters:
                reason = "its weight is computed from others"  # weight_norm, pruning
            elif not layer.weight.requires_grad:
                reason = "frozen"
            elif "forward" in layer.__dict__:
                reason = "its forward has been replaced on the instance"  # which a changed class would not change
            elif any(hasattr(holder, "base_layer") for holder in _ancestors(model, name)):
                reason = "part of an adapter"
            elif not re.search(r"(^|\.)\d+\.", name):
                reason = "not in a repeated block"
            elif behind_attention(model, name, lean_class):
                reason = "behind an attention, which keeps its output itself"
            elif rank > _features(layer):
                reason = f"rank not below its {_features(layer)} inputs"
            else:
                chosen[name] = rank
        if reason:
            skipped.append(Skipped(name, reason))
    missing = [label for label, count in hits.items() if not count]
    if missing:
        raise ValueError(
            f"target_modules: {', '.join(map(repr, missing))} matches no linear layer (a string is a regular "
            "expression for a module's whole name, a list holds parts of names or such expressions)."
        )
    return chosen, skipped


def rank_of(rank: int | float | None, features: int) -> int:
    """A layer's rank from the option: a number as it is, a fraction of its inputs rounded, at least 1."""
    if rank is None or isinstance(rank, int):
        return rank or 0
    return max(1, round(rank * features))


def _features(layer: nn.Module) -> int:
    return layer.weight.shape[0] if type(layer).__name__.endswith("Conv1D") else layer.weight.shape[1]


def _not_linear(module: nn.Module) -> str | None:
    """Why a module with trainable matrices of its own, which is no linear layer, is left alone."""
    matrices = [p for p in module.parameters(recurse=False) if p.requires_grad and p.dim() >= 2]
    if not matrices or isinstance(module, nn.Embedding):
        return None
    if any(p.dim() == 3 for p in matrices):
        return "experts in one tensor, not linear layers"
    return f"{type(module).__name__}, not a plain linear layer"


def behind_attention(model: nn.Module, name: str, is_layer: Callable[[nn.Module], object]) -> bool:
    """Whether the input of the layer ``name`` is what an attention has computed and keeps: known by its name and place.
    ``is_layer`` says which other children of a module are such layers."""
    if name.rpartition(".")[2] not in OUTPUT_PROJECTIONS:
        return False
    for module in _ancestors(model, name):
        if re.search(r"attention|attn", type(module).__name__, re.IGNORECASE):
            return True
        # BERT's output module has one linear layer and lies in the attention
        if sum(bool(is_layer(child)) for child in module.children()) != 1:
            return False
    return False


def _ancestors(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that hold ``name``, the nearest first; at most two."""
    for _ in range(2):
        name = name.rpartition(".")[0]
        if name:
            yield model.get_submodule(name)


def _parent(model: nn.Module, name: str) -> nn.Module:
    holder = name.rpartition(".")[0]
    return model.get_submodule(holder) if holder else model
