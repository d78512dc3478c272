"""Going on from a run of plain AdamW: its fp32 or bf16 moments become ours.

The second moment goes through the same stochastic code as in training. The first moment's remainder has no weight to be
carried into here and is dropped: about a fifth of its energy, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..codecs.base import matrix_shape, state_key
from ..codecs.ternary import TernarySecondMoment
from .base import CodecOptimizer


@torch.no_grad()
def import_adamw_state(optimizer: CodecOptimizer, state_dict: dict[str, Any], model: nn.Module | None = None) -> None:
    """Fill ``optimizer``'s state from the ``state_dict()`` of a ``torch.optim.AdamW`` over the same parameters.

    Parameters are matched by name where the state has ``param_names``; else in the Trainer's order of ``model``'s
    parameters; else by position, if the groups are the same. Options of the groups (lr, betas, ...) stay as they are in
    ``optimizer``, which may be the Trainer's (wrapped by accelerate). The running maximum of ``amsgrad`` is dropped.

    Raises:
        ValueError: the state is not plain AdamW's, or belongs to another model.
    """
    while not isinstance(optimizer, CodecOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # accelerate wraps optimizers
    if not isinstance(optimizer, CodecOptimizer):
        raise ValueError(f"import_adamw_state fills an optimizer of hf_memopt, got {type(optimizer).__name__}.")
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "import_adamw_state takes the state_dict() of a torch.optim.AdamW, for example torch.load('optimizer.pt')."
        )
    source = _by_name(optimizer, state_dict, model)
    filled = {}
    for group, name, p in optimizer.named_params():
        state = source.get(name)
        if not state:
            continue
        if optimizer.treatment_of(group, p) == "projected":
            raise ValueError(
                f"import_adamw_state cannot bring AdamW's moments into a subspace, and {name!r} is projected: start "
                "with fresh moments, or use taco_adamw."
            )
        _check(state, name, p)
        new = {"step": torch.tensor(float(state["step"])), "skipped": 0}
        for moment, codec in optimizer.codecs_of(group, p).items():
            # what taco has not applied yet is, at the change, what AdamW is about to apply
            value = state["exp_avg" if moment == "history" else moment].to(p.device, torch.float32)
            if isinstance(codec, TernarySecondMoment):
                generator = torch.Generator().manual_seed(group["seed"])
                parts = codec.encode(value, torch.rand(matrix_shape(p.shape), generator=generator).to(p.device))
            else:
                parts = codec.encode(value)
            new |= {state_key(moment, part): buffer for part, buffer in parts.items()}
        filled[p] = new
    if not filled:
        raise ValueError("The AdamW state holds no moments for any parameter of this optimizer.")
    for p, state in filled.items():
        optimizer.state[p] = state


def _check(state: dict[str, Any], name: str, p: Tensor) -> None:
    if not isinstance(state.get("step"), Tensor | int | float):
        raise ValueError(f"The state of {name!r} is not plain AdamW's: it has no 'step'.")
    for moment in ("exp_avg", "exp_avg_sq"):
        value = state.get(moment)
        if not torch.is_tensor(value):
            raise ValueError(f"The state of {name!r} is not plain AdamW's: it has no {moment!r}.")
        if value.shape != p.shape:
            raise ValueError(
                f"The AdamW state is of another model: {name!r} has moments of shape {tuple(value.shape)}, "
                f"the parameter {tuple(p.shape)}."
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"The AdamW state of {name!r} cannot be used: {moment!r} is not finite.")


def _by_name(optimizer: CodecOptimizer, state_dict: dict[str, Any], model: nn.Module | None) -> dict[str, dict]:
    """The saved states by parameter name, however the two sides group their parameters."""
    groups = state_dict["param_groups"]
    saved = [(g, i, pid) for g in groups for i, pid in enumerate(g["params"])]
    sizes = [len(g["params"]) for g in groups]
    if all("param_names" in g for g in groups):
        names = [g["param_names"][i] for g, i, _ in saved]
    elif model is not None and len(groups) == 1:  # the Trainer always makes two; this is AdamW(model.parameters())
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        if sizes != [len(names)]:
            raise ValueError(
                f"The AdamW state is of another model: it has {sizes[0]} parameters, the model {len(names)} trainable."
            )
    elif model is not None:
        in_order = _names_in_trainer_order(optimizer, model)
        if sizes != [len(names) for names in in_order]:
            raise ValueError(
                f"The AdamW state has groups of {sizes} parameters, where the Trainer, with the weight decay of this "
                f"optimizer's groups, would make {[len(names) for names in in_order]}: "
                "it is of another model or grouping. The optimizer to fill must have the Trainer's groups too: make it "
                "with trainer.create_optimizer()."
            )
        names = [name for names in in_order for name in names]
    elif sizes == [len(g["params"]) for g in optimizer.param_groups]:
        names = [name for _, name, _ in optimizer.named_params()]
    else:
        raise ValueError(
            "The AdamW state has no parameter names and is grouped otherwise than this optimizer: "
            "pass model= so that the Trainer's order can be followed."
        )
    return {name: state_dict["state"].get(pid, {}) for name, (_, _, pid) in zip(names, saved, strict=True)}


def _names_in_trainer_order(optimizer: CodecOptimizer, model: nn.Module) -> tuple[list[str], list[str]]:
    """The Trainer makes two groups, with and without weight decay, each in the model's order."""
    decays = {name: group.get("decays", True) for group, name, _ in optimizer.named_params()}
    ours = [name for name, _ in model.named_parameters() if name in decays]
    return [n for n in ours if decays[n]], [n for n in ours if not decays[n]]
