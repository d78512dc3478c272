"""transformers' own GaLore names, trained by this package instead of galore-torch.

An explicit call, because it changes what a name of somebody else means. Existing configurations then train without
galore-torch or bitsandbytes:

============================  =====================================================================
``galore_adamw``              ``GaLoreAdamW`` with fp32 moments, as ``memopt_galore_adamw``
``galore_adamw_8bit``         ``GaLoreAdamW`` with ternary moments, as ``galore_taco_adamw``
both with ``_layerwise``      the same with update in backward
``galore_adafactor``          stays transformers' own
============================  =====================================================================

``optim_args`` are read with transformers' names and defaults (rank 128, gap 200, scale 0.25); the package's further
options may be added. What transformers drops is kept: weight decay, betas and eps reach the optimizer, the groups
without decay stay, a wrong option raises, runs resume. Two things that transformers lets pass in silence are refused:
clipping with ``max_grad_norm`` under a layerwise name, where it has no effect, and ``proj_type=full``.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..options import GaLoreOptions, GaLoreTacoOptions
from ..registry import get_optimizer, is_registered, register_optimizer, unregister_optimizer


def replace_builtin_galore() -> ExitStack:
    """Let ``optim="galore_adamw"``, ``"galore_adamw_8bit"`` and their layerwise forms mean this package's optimizers.

    Trainers that make their optimizer afterwards use it. The call may be repeated.

    Returns:
        The way back, if one is wanted: a context manager with ``close()``, which gives the names back to transformers.
        ``with hf_memopt.replace_builtin_galore(): ...`` replaces for a block. Of repeated calls the first one's counts.
    """
    way_back = ExitStack()
    for name, (model, options) in _MEANINGS.items():
        if not is_registered(name):
            register_optimizer(replace(get_optimizer(model), name=name, options=options))
            way_back.callback(unregister_optimizer, name)
    return way_back


class _Builtin:
    """What both kinds of options share: ``full`` is known, and refused with its reason."""

    def __post_init__(self) -> None:
        if self.proj_type == "full":
            raise ValueError(
                f"{self.strategy}: proj_type=full, which projects both dimensions, is not supported: set "
                "proj_type=std, or train with galore-torch and without hf_memopt.replace_builtin_galore()."
            )
        super().__post_init__()


@dataclass(frozen=True)
class BuiltinGaLoreOptions(_Builtin, GaLoreOptions):
    """Options of ``optim="galore_adamw"``: those of ``memopt_galore_adamw`` with transformers' defaults."""

    strategy: ClassVar[str] = "galore_adamw"

    rank: int | float = 128
    update_proj_gap: int = 200
    scale: float = 0.25
    proj_type: Literal["std", "reverse_std", "left", "right", "full"] = "std"


@dataclass(frozen=True)
class BuiltinGaLore8bitOptions(_Builtin, GaLoreTacoOptions):
    """Options of ``optim="galore_adamw_8bit"``: those of ``galore_taco_adamw`` with transformers' defaults."""

    strategy: ClassVar[str] = "galore_adamw_8bit"

    rank: int | float = 128
    update_proj_gap: int = 200
    scale: float = 0.25
    proj_type: Literal["std", "reverse_std", "left", "right", "full"] = "std"


_MEANINGS = {
    f"{name}{suffix}": (f"{model}{suffix}", options)
    for name, model, options in (
        ("galore_adamw", "memopt_galore_adamw", BuiltinGaLoreOptions),
        ("galore_adamw_8bit", "galore_taco_adamw", BuiltinGaLore8bitOptions),
    )
    for suffix in ("", "_layerwise")
}
