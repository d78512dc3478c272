"""One learning rate for embedding and output head, another for everything between, for any optimizer.

The optimizer is built as it always is; then, before the schedule reads the rates, each of its parameter groups that
holds some of these weights is cut in two. So every strategy gets the same treatment, and none has to offer it.
"""

from __future__ import annotations

from typing import Any

import torch


def embedding_and_head(model: torch.nn.Module) -> set[int]:
    """ids of the weights of all embeddings and of the output head: of the tokens, or of the classes."""
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    modules += [m for m in (model.get_output_embeddings(), getattr(model, "classifier", None)) if m is not None]
    return {id(p) for module in modules for p in module.parameters()}


def scale_groups(optimizer: torch.optim.Optimizer, chosen: set[int], scale: float) -> None:
    """Give the parameters whose ids are in `chosen` the rate times `scale`, in groups of their own.

    For an optimizer that has not taken a step. Raises ValueError if it has none of them.
    """
    if not any(id(p) in chosen for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("The optimizer holds no embedding and no output head whose learning rate could be scaled.")
    for group in list(optimizer.param_groups):
        params, names = group["params"], group.get("param_names")
        inside = [id(p) in chosen for p in params]
        if not any(inside):
            continue
        if all(inside):
            group["lr"] = group["lr"] * scale
            continue
        apart = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        apart["lr"] = group["lr"] * scale
        apart["params"] = [p for p, i in zip(params, inside, strict=True) if i]
        group["params"] = [p for p, i in zip(params, inside, strict=True) if not i]
        if names is not None:
            apart["param_names"] = [n for n, i in zip(names, inside, strict=True) if i]
            group["param_names"] = [n for n, i in zip(names, inside, strict=True) if not i]
        optimizer.add_param_group(apart)


def trainer_class(scale: float) -> type:
    """The Trainer, unmodified for a scale of 1."""
    from transformers import Trainer

    if scale == 1:
        return Trainer

    class EmbeddingRateTrainer(Trainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            if self.optimizer is None:
                super().create_optimizer(*args, **kwargs)
                scale_groups(self.optimizer, embedding_and_head(self.model), scale)
            return self.optimizer

    return EmbeddingRateTrainer
