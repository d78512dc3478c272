r"""TACO of arXiv 2610.02199: one entry of each column moves a step, and a small FP8 history says which.

Steepest descent under the dimension-normalised 1->1 operator norm moves, in each column of a weight matrix, the entry
with the largest gradient, by a fixed amount. Alone that is unstable under the noise of mini-batches, so each column
keeps a few gradient components in FP8. The update is in ``kernels/one_sparse.py``, the storage in
``codecs/one_sparse.py``. Embeddings, output head, convolutions and everything that is no linear layer are treated as in
``taco_adamw``.

The paper's abstract leaves open how the history accumulates and what becomes of the entry that was applied, and its
code was not available. What is done here (the applied entry leaves the history; decay; k; no factor m / n; two learning
rates) is our decision by measurement, written down with the numbers in ``docs/taco.md``.

The step is lr * lr_scale for the linear layers and lr, AdamW's, for the rest: one entry a column has to move much
further than all of them together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..codecs.base import Codec
from ..codecs.one_sparse import LAYOUTS, OneSparseHistory, as_columns
from ..kernels import one_sparse
from ..kernels.scalars import StepScalars
from ..param_groups import decide
from .checks import is_number
from .taco_adamw import TacoAdamW

MAX_KEPT = 1024


class Taco(TacoAdamW):
    """One-sparse steps with an FP8 history for linear layers, ``TacoAdamW`` for the rest.

    Args:
        params: the groups of ``hf_memopt.build_param_groups(model, one_sparse=True)``, which knows embeddings, heads
            and transposed layers. In groups of your own the ``treatment`` of matrices must be named: ``one_sparse``,
            with ``layout`` one of those of ``codecs/one_sparse.py`` (without it: ``matrix``, or ``stack`` in three
            dimensions), ``ternary`` or ``dense``.
        lr: learning rate of the parameters that are not one-sparse.
        k: entries of a column that are kept. 0 keeps no history, which is unstable.
        decay: of the history, a step.
        consume: share of an applied entry that leaves the history, 0 to 1.
        lr_scale: an entry of a one-sparse matrix moves by lr * lr_scale.
        dimension_scale: multiply that by rows / columns, as the norm would have it.
        betas, eps, weight_decay, **options: as for ``TacoAdamW``.

    Raises:
        ValueError: an option or a parameter is out of range; the sentence names it.
    """

    NAME = "Taco"
    SAVED_OPTIONS = (*TacoAdamW.SAVED_OPTIONS, "k", "decay", "consume", "lr_scale", "dimension_scale")
    TREATMENTS = ("one_sparse", *TacoAdamW.TREATMENTS)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        k: int = 16,
        decay: float = 0.9,
        consume: float = 1.0,
        lr_scale: float = 50.0,
        dimension_scale: bool = False,
        **options: Any,
    ) -> None:
        own = {"k": k, "decay": decay, "consume": consume, "lr_scale": lr_scale, "dimension_scale": dimension_scale}
        own["layout"] = "auto"
        super().__init__(params, lr, betas, eps, weight_decay, more_defaults=own, **options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        _check_rule(group)
        if group["layout"] not in ("auto", *LAYOUTS):
            raise ValueError(f"layout={group['layout']!r} is not known: choose auto, {', '.join(LAYOUTS)}.")
        if group["treatment"] == "auto" and any(decide(p.shape).name == "ternary" for p in group["params"]):
            raise ValueError(
                "Taco cannot tell a linear layer from an embedding in a list of parameters: pass "
                "hf_memopt.build_param_groups(model, one_sparse=True), or name the treatment of each group "
                f"({', '.join(self.TREATMENTS)})."
            )
        if group["treatment"] == "one_sparse" or group["layout"] != "auto":
            for i, p in enumerate(group["params"]):
                try:
                    as_columns(p, _layout(group, p))
                except ValueError as error:
                    name = group["param_names"][i] if group.get("param_names") else f"Parameter {i}"
                    raise ValueError(f"{name} of the group: {error}") from None

    def codecs_of(self, group: dict, p: Tensor) -> dict[str, Codec]:
        if self.treatment_of(group, p) == "one_sparse":
            return {"history": OneSparseHistory(group["k"], _layout(group, p))}
        return super().codecs_of(group, p)

    def _update_matrix(self, group: dict, p: Tensor, state: dict, scalars: StepScalars) -> bool | Tensor:
        if self.treatment_of(group, p) != "one_sparse":
            return super()._update_matrix(group, p, state, scalars)
        rule = one_sparse.OneSparse(*(group[key] for key in ("decay", "consume", "lr_scale", "dimension_scale")))
        layout = _layout(group, p)
        return one_sparse.one_sparse_(as_columns(p, layout), as_columns(p.grad, layout), state, scalars, rule)


def _check_rule(group: dict[str, Any]) -> None:
    """Raise ValueError for an option of the one-sparse step that is out of range."""
    k, consume = group["k"], group["consume"]
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= MAX_KEPT:
        raise ValueError(f"k must be a whole number from 0 to {MAX_KEPT}, got {k!r}.")
    for name, below in (("decay", 1.0), ("lr_scale", float("inf"))):
        if not is_number(group[name]) or not 0.0 <= group[name] < below:
            raise ValueError(f"{name} must be a number of at least 0 and below {below:g}, got {group[name]!r}.")
    if not is_number(consume) or not 0.0 <= consume <= 1.0:
        raise ValueError(f"consume must be a number from 0 to 1, got {consume!r}.")
    if not isinstance(group["dimension_scale"], bool):
        raise ValueError(f"dimension_scale must be True or False, got {group['dimension_scale']!r}.")


def _layout(group: dict, p: torch.Tensor) -> str:
    if group["layout"] != "auto":
        return group["layout"]
    return "stack" if p.dim() == 3 else "matrix"
