"""Which parameter gets which treatment, and why.

``decide`` is the one eligibility rule: the optimizer, the memory report and whoever predicts memory ask it, always with
the parameter's *global* shape, so that sharding never changes a treatment.

==========  ========================================  ==================================
treatment   moments                                   which parameters
==========  ========================================  ==================================
ternary     codes in {-1, 0, +1}, 3.3 bits together   matrices of at least 4096 elements
dense       fp32, 64 bits together                    vectors, small matrices, whatever the user excluded
one_sparse  of each column the largest entries, FP8   ``taco`` only: linear layers, columns of at least 128
projected   in a subspace, fp32 or ternary            GaLore only: linear layers, where that saves memory
==========  ========================================  ==================================

``build_param_groups`` adds what only the model knows: names, the Trainer's decay and no-decay sets, embeddings, and
``optim_target_modules``. That setting has one meaning here, the one transformers gives it elsewhere: a string is a
regular expression that must match a module's whole name; a list holds parts of module names (any module whose name
contains one of them) and such regular expressions; ``all-linear`` is every ``nn.Linear`` and GPT-2 style ``Conv1D``,
the output head included. Ternary are then the matrices directly in matching modules; everything else keeps fp32
moments. For GaLore it says what is projected; without it that is every linear layer but the output head.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .codecs.base import all_specs
from .codecs.dense import Dense
from .codecs.one_sparse import as_columns
from .codecs.projected import Projection
from .codecs.ternary import TernaryFirstMoment, TernarySecondMoment

MIN_TERNARY_ELEMENTS = 4096
MIN_COLUMN = 128  # entries; of shorter columns sixteen FP8 values take more room than ternary codes of all
MIN_PROJECTED = 32  # of a smaller dimension there is little to save, and the few directions all matter
TREATMENTS = ("ternary", "dense")
ALL_LINEAR = "all-linear"
TRANSPOSED_EXPERTS = ("Llama4TextExperts",)  # (experts, in, out) without transformers' mark ``is_transposed``


@dataclass(frozen=True)
class Treatment:
    """What is done with a parameter's moments, and the reason in a few words."""

    name: str
    reason: str


def decide(
    shape: Sequence[int],
    *,
    targeted: bool = True,
    embedding: bool = False,
    dense_embeddings: bool = False,
    one_sparse: bool = False,
    column: int | None = None,
    projection: Projection | None = None,
    linear: bool = False,
) -> Treatment:
    """The treatment of a parameter of global ``shape``.

    Args:
        targeted: the parameter lies in a module that ``optim_target_modules`` names (true when it is not set).
        embedding: it is an input embedding or the output head.
        dense_embeddings: the option of that name.
        one_sparse: the strategy is ``taco``.
        column: how many entries one of its columns has (``codecs/one_sparse.py``), None where it is no linear layer's.
        projection: the strategy is GaLore, with these options.
        linear: for GaLore, it is a linear layer's or experts', so a matrix or a stack of matrices.
    """
    if len(shape) < 2:
        return Treatment("dense", "vector")
    if math.prod(shape) < MIN_TERNARY_ELEMENTS:
        return Treatment("dense", f"under {MIN_TERNARY_ELEMENTS} elements")
    if projection is not None:
        found = _decide_projected(torch.Size(shape), targeted, embedding, projection, linear)
        if found.name == "ternary" and embedding and dense_embeddings:
            return Treatment("dense", "dense_embeddings=true")
        return found
    if not targeted:
        return Treatment("dense", "not in optim_target_modules")
    if embedding and dense_embeddings:
        return Treatment("dense", "dense_embeddings=true")
    if not one_sparse:
        return Treatment("ternary", "matrix")
    if embedding:
        return Treatment("ternary", "embedding or output head")
    if column is None:
        return Treatment("ternary", "not a linear layer")
    if column < MIN_COLUMN:
        return Treatment("ternary", f"columns under {MIN_COLUMN} entries")
    return Treatment("one_sparse", "linear layer")


def _decide_projected(
    shape: torch.Size, targeted: bool, embedding: bool, projection: Projection, linear: bool
) -> Treatment:
    rest = "ternary" if projection.state == "ternary" else "dense"
    if not targeted:
        return Treatment(rest, "not in optim_target_modules")
    if embedding:
        return Treatment(rest, "embedding or output head")
    if not linear:
        return Treatment(rest, "not a linear layer")
    space = projection.space(shape)
    if min(shape[-2:]) < MIN_PROJECTED:
        return Treatment(rest, f"a dimension under {MIN_PROJECTED}")
    if space.rank >= space.dimension:
        return Treatment(rest, f"rank not below {space.dimension}")
    unprojected = {"exp_avg": TernaryFirstMoment(), "exp_avg_sq": TernarySecondMoment()}
    if rest == "dense":
        unprojected = {"exp_avg": Dense(), "exp_avg_sq": Dense()}
    if projection.nbytes(shape) >= sum(spec.nbytes for spec in all_specs(unprojected, shape).values()):
        return Treatment(rest, f"rank {space.rank} of {space.dimension} would save nothing")
    return Treatment("projected", f"rank {space.rank} of {space.dimension}")


def build_param_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    no_decay: Collection[str] = (),
    target_modules: str | Iterable[str] | None = None,
    dense_embeddings: bool = False,
    one_sparse: bool = False,
    projection: Projection | None = None,
) -> list[dict]:
    """Parameter groups of all trainable parameters of ``model``, one per weight decay, treatment and reason.

    Args:
        weight_decay: for every parameter that is not in ``no_decay``.
        no_decay: names of the parameters without weight decay.
        target_modules: see the module's note; None targets everything.
        dense_embeddings: keep fp32 moments for embeddings and the output head.
        one_sparse: the strategy is ``taco``; groups then have a ``layout`` too.
        projection: the strategy is GaLore, with these options, which the groups then have too.

    Returns:
        Groups with ``params``, ``param_names``, ``weight_decay``, ``decays``, ``treatment`` and ``reason``. A tied
        parameter is in one group, once.

    Raises:
        ValueError: ``target_modules`` (or one entry of the list) matches no module with a trainable matrix, or with
            ``projection`` nothing is projected.
    """
    targets = None if target_modules is None else _targeted_parameters(model, target_modules)
    embeddings = embedding_parameters(model) if dense_embeddings or one_sparse or projection else set()
    layouts = linear_layouts(model) if one_sparse or projection else {}
    groups: dict[tuple, dict] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        treatment = decide(
            p.shape,
            targeted=targets is None or id(p) in targets,
            # who names the output head has it projected
            embedding=id(p) in embeddings and not (projection and targets and id(p) in targets),
            dense_embeddings=dense_embeddings,
            one_sparse=one_sparse,
            column=as_columns(p, layouts[id(p)]).shape[1] if id(p) in layouts else None,
            projection=projection,
            linear=id(p) in layouts,
        )
        more = {"layout": layouts[id(p)]} if treatment.name == "one_sparse" else {}
        if projection is not None:
            more = dataclasses.asdict(projection) if treatment.name == "projected" else {"state": projection.state}
        decay = 0.0 if name in no_decay else weight_decay
        group = groups.setdefault(
            (name in no_decay, treatment, *more.values()),
            {
                "params": [],
                "param_names": [],
                "weight_decay": decay,
                "decays": name not in no_decay,
                "treatment": treatment.name,
                "reason": treatment.reason,
                **more,
            },
        )
        group["params"].append(p)
        group["param_names"].append(name)
    if projection is not None and not any(group["treatment"] == "projected" for group in groups.values()):
        raise ValueError(_nothing_projected(groups.values(), projection))
    return list(groups.values())


def _nothing_projected(groups: Iterable[dict], projection: Projection) -> str:
    why: dict[str, int] = {}
    for group in groups:
        if any(p.dim() > 1 for p in group["params"]):
            why[group["reason"]] = why.get(group["reason"], 0) + len(group["params"])
    found = ", ".join(f"{count} x {reason}" for reason, count in why.items()) or "there are only vectors"
    return (
        f"No parameter would be projected at rank={projection.rank} ({found}): choose another rank or other "
        "optim_target_modules if that is why, or train with taco_adamw, which needs no projection."
    )


def embedding_parameters(model: nn.Module) -> set[int]:
    """ids of the weights of all embeddings and of the output head (not names: tied weights have several)."""
    found = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    try:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    except NotImplementedError:
        head = None
    if isinstance(head, nn.Module):  # with what wraps it: PEFT's modules_to_save, several layers
        found |= {id(p) for p in head.parameters()}
    elif isinstance(head, torch.Tensor):
        found.add(id(head))
    return found


def linear_layouts(model: nn.Module) -> dict[int, str]:
    """By id, the layout (``codecs/one_sparse.py``) of every weight that multiplies input features: of linear layers,
    GPT-2's ``Conv1D``, and experts that say how they are stored."""
    found: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found[id(module.weight)] = "matrix"
        elif _is_linear(module):
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                found[id(weight)] = "transposed"
        else:
            transposed = getattr(module, "is_transposed", type(module).__name__ in TRANSPOSED_EXPERTS or None)
            for p in module.parameters(recurse=False):
                if isinstance(transposed, bool) and p.dim() == 3:
                    found[id(p)] = "stack_transposed" if transposed else "stack"
    return found


def _targeted_parameters(model: nn.Module, target_modules: str | Iterable[str]) -> set[int]:
    """ids of the trainable matrices that lie directly in matching modules."""
    matchers = module_matchers(target_modules)
    hits = dict.fromkeys(matchers, 0)
    found: set[int] = set()
    for module_name, module in model.named_modules(remove_duplicate=False):
        matrices = [p for p in module.parameters(recurse=False) if p.requires_grad and p.dim() >= 2]
        for label, matches in matchers.items():
            if matrices and matches(module_name, module):
                hits[label] += len(matrices)
                found.update(map(id, matrices))
    missing = [label for label, count in hits.items() if count == 0]
    if missing:
        raise ValueError(
            f"optim_target_modules: {', '.join(map(repr, missing))} matches no module with a trainable matrix "
            "(a string is a regular expression for a module's whole name, a list holds parts of names or such "
            f"expressions, '{ALL_LINEAR}' stands alone); "
            f"modules of this model are for example {', '.join(map(repr, _example_names(model)))}."
        )
    return found


def module_matchers(target_modules: str | Iterable[str]) -> dict:
    if isinstance(target_modules, str):
        if target_modules.replace("_", "-") == ALL_LINEAR:
            return {target_modules: lambda name, module: _is_linear(module)}
        try:
            pattern = re.compile(target_modules)
        except re.error as error:
            raise ValueError(
                f"optim_target_modules: {target_modules!r} is not a regular expression ({error})."
            ) from None
        return {target_modules: lambda name, module: pattern.fullmatch(name) is not None}
    parts = list(target_modules) if isinstance(target_modules, Iterable) else []
    bad = [part for part in parts if not isinstance(part, str) or not part]
    if bad or not parts:
        raise ValueError(
            f"optim_target_modules must be a string or a list of parts of module names, got {target_modules!r}."
        )
    return {part: _part_matcher(part) for part in parts}


def _part_matcher(part: str) -> Callable[[str, nn.Module], bool]:
    try:
        pattern = re.compile(part)
    except re.error:  # as a part of a name it may still occur
        return lambda name, module: part in name
    return lambda name, module: part in name or pattern.fullmatch(name) is not None


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D is known by name, so that this file need not import transformers
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _example_names(model: nn.Module, most: int = 4) -> list[str]:
    names = (n for n, m in model.named_modules() if n and any(p.dim() >= 2 for p in m.parameters(recurse=False)))
    return [name for name, _ in zip(names, range(most), strict=False)]


def unsupported_dtype(p: torch.Tensor) -> bool:
    """Whether no kernel takes weights of this dtype."""
    return p.dtype not in (torch.float32, torch.bfloat16, torch.float16)
