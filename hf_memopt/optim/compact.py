"""CompAct (arXiv 2410.15352): AdamW on the carriers of compressed linear layers, and on everything else as usual.

The method is in the model (``activations/``): a layer's input is kept as z = x P, its gradient in the subspace is the
gradient of a carrier parameter, and a carrier that has been stepped is folded into its weight. So any optimizer does.
This one knows of it: it names the carriers in the report, takes the subspaces up again from a checkpoint, and keeps the
moments in fp32 or, as ``TacoAdamW`` does, as ternary codes.

    B = - lr U(dy^T z),   W = W (1 - lr wd) + scale B P^T,   B = 0              U: AdamW's direction

From the paper it differs in the subspaces (``activations/projection.py``), one z for all readers of a tensor, and
decay, which the paper's code applies to W by way of the projected update. When a subspace is exchanged the moments keep
their numbers, as in the paper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..activations.compression import compressions_of
from ..activations.layers import CARRIER
from ..param_groups import Treatment
from .taco_adamw import TacoAdamW

STATES = ("fp32", "ternary")


class CompActAdamW(TacoAdamW):
    """AdamW for a model whose activations are compressed; the module's note has the equations.

    Args:
        params: of a model to which ``compress_activations`` has been applied; named, or groups of
            ``build_param_groups``.
        state: ``fp32`` or ``ternary``, of all moments but those of vectors and small matrices.
        lr, betas, eps, weight_decay, **options: as for ``TacoAdamW``.

    Raises:
        ValueError: an option or a parameter is out of range; the sentence names it.
    """

    NAME = "CompActAdamW"
    SAVED_OPTIONS = (*TacoAdamW.SAVED_OPTIONS, "state")
    IMPORTS = ""  # AdamW's moments are of weights, not of carriers

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "fp32",
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, more_defaults={"state": state}, **options)

    def title(self) -> str:
        name = super().title()
        found = [c.config for c in compressions_of(self)]
        return f"{name} (rank={found[0].rank}, {found[0].projection})" if found else name

    def _check_group(self, group: dict[str, Any]) -> None:
        if group["state"] not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, got {group['state']!r}.")
        super()._check_group(group)

    def decision(self, group: dict, p: Tensor) -> Treatment:
        found = super().decision(group, p)
        return found if group["state"] == "ternary" else replace(found, name="dense")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``TacoAdamW``'s; the compressed layers go on with the subspaces of that time."""
        super().load_state_dict(state_dict)
        for compression in compressions_of(self):
            compression.resume(self)


def mark_carriers(groups: list[dict]) -> list[dict]:
    """``groups`` of ``build_param_groups`` with the carriers in groups of their own, which say so."""
    marked = []
    for group in groups:
        pairs = list(zip(group["param_names"], group["params"], strict=True))
        for ours in (True, False):
            part = [(name, p) for name, p in pairs if name.endswith(CARRIER) is ours]
            if part:
                names, params = map(list, zip(*part, strict=True))
                reason = f"carrier, {group['reason']}" if ours else group["reason"]
                marked.append({**group, "params": params, "param_names": names, "reason": reason})
    return marked
