"""Optimizers of other packages that `benchmarks/quality.py` trains with: how the Trainer is told of them.

`galore-torch` and `apollo-torch` are given to the Trainer as class and groups, because transformers drops the betas of
its `galore_adamw` (and knows ranks as whole numbers only); `apollo_adamw` is transformers' own name. All project every
linear layer but the output head, as this package does. `--optim-args` are options of their groups; a `rank` with a
point is a fraction of a matrix' smaller dimension.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch

SGD_MOMENTUM = "sgd-momentum"
GALORE_TORCH = "galore-torch"
APOLLO_TORCH = "apollo-torch"
TRANSFORMERS_LOW_RANK = ("apollo_adamw", "galore_adamw")

_GALORE = {"rank": "0.25", "update_proj_gap": "200", "scale": "1.0", "proj_type": "std"}
GROUP_OPTIONS: dict[str, dict[str, str]] = {
    GALORE_TORCH: _GALORE,
    APOLLO_TORCH: {**_GALORE, "proj": "random", "scale_type": "channel"},
}
"""Options of the projected groups and what they are unless given."""


def optimizer_arguments(
    optim: str, optim_args: str, *, lr: float, beta1: float, model: torch.nn.Module
) -> dict[str, Any]:
    """What names the optimizer to the Trainer: arguments of TrainingArguments, and of Trainer under "trainer".

    Raises:
        ValueError: `optim_args` has an option that the optimizer does not have.
    """
    if optim == SGD_MOMENTUM:
        # Not optim="sgd" with optim_args: transformers before 5 ignores them there, and that SGD has no momentum.
        if optim_args:
            raise ValueError(f"{SGD_MOMENTUM} takes no --optim-args: its momentum is 0.9.")
        chosen: tuple[type, dict[str, Any]] = (torch.optim.SGD, {"lr": lr, "momentum": 0.9})
        return {"optim": "sgd", "optim_args": None, "trainer": {"optimizer_cls_and_kwargs": chosen}}
    if optim in GROUP_OPTIONS:
        groups = low_rank_groups(model, {**GROUP_OPTIONS[optim], **parsed(optim, optim_args)})
        kwargs = {"params": groups, "lr": lr, "betas": (beta1, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        if optim == GALORE_TORCH:
            from galore_torch import GaLoreAdamW as chosen_class

            kwargs["no_deprecation_warning"] = True
        else:
            from apollo_torch import APOLLOAdamW as chosen_class
        # the name tells the Trainer nothing then; adamw_torch is one that every version has
        return {
            "optim": "adamw_torch",
            "optim_args": None,
            "trainer": {"optimizer_cls_and_kwargs": (chosen_class, kwargs)},
        }
    found = {"optim": optim, "optim_args": optim_args or None, "trainer": {}}
    if optim in TRANSFORMERS_LOW_RANK:
        found["optim_target_modules"] = "|".join(map(re.escape, linear_layers(model)))
    return found


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights of every linear layer but the output head, by the layer's name."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and module.weight.requires_grad
    }


def parsed(optim: str, optim_args: str) -> dict[str, str]:
    known = GROUP_OPTIONS[optim]
    pairs = [part.strip().partition("=") for part in optim_args.split(",") if part.strip()]
    for key, _, _ in pairs:
        if key not in known:
            raise ValueError(f"{optim} has no option {key!r}: it has {', '.join(known)}.")
    return {key: value for key, _, value in pairs}


def low_rank_groups(model: torch.nn.Module, options: dict[str, str]) -> list[dict[str, Any]]:
    """The linear layers, one group for each rank, and the rest of the trainable parameters as a plain group."""
    own: dict[str, Any] = {
        "update_proj_gap": int(options["update_proj_gap"]),
        "scale": float(options["scale"]),
        **{key: value for key, value in options.items() if key not in ("rank", "update_proj_gap", "scale")},
    }
    chosen = list(linear_layers(model).values())
    ranks: dict[int, list[torch.nn.Parameter]] = defaultdict(list)
    for p in chosen:
        ranks[rank_of(options["rank"], min(p.shape))].append(p)
    taken = set(map(id, chosen))
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    projected = [{"params": params, "rank": rank, **own} for rank, params in ranks.items()]
    return [{"params": rest}, *projected] if rest else projected


def rank_of(text: str, smaller: int) -> int:
    """`text` as a rank: a number of dimensions, or with a point a fraction of `smaller`."""
    return max(1, round(float(text) * smaller)) if "." in text else int(text)
