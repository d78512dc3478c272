"""One frozen dataclass per strategy: its options, their defaults and ranges. Text becomes one in ``parsing.py``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .parsing import checked


def require(options: Any, key: str, allowed: bool, says: str) -> None:
    """Raise ValueError for the option ``key`` unless its value is allowed."""
    if not allowed:
        raise ValueError(f"{options.strategy}: option {key!r} must be {says}, got {getattr(options, key)}.")


@dataclass(frozen=True)
class CommonOptions:
    """What every optimizer of the package takes in ``optim_args``, as in ``optim_args="seed=7,kernel=reference"``.

    Args:
        seed: Key of the counter hash behind every random number. At least 0.
        stochastic_rounding: Round bf16 and fp16 weights stochastically on write-back. Without it, updates below half a
            unit in the last place are lost.
        kernel: Which implementation of the step runs. ``auto`` takes the fastest that works on the parameter's device.
        update_in_backward: Step each parameter as soon as its gradient is complete and free the gradient. Excludes
            gradient accumulation, clipping of the global norm, fp16 and several processes.
        clip_per_parameter: With ``update_in_backward``, the largest L2 norm of each parameter's gradient.
        lora_memory: For a model with LoRA adapters, the tier of ``compress_lora`` with its defaults.
    """

    strategy: ClassVar[str] = ""

    seed: int = 0
    stochastic_rounding: bool = True
    kernel: Literal["auto", "reference", "compiled", "triton", "inductor"] = "auto"
    update_in_backward: bool = False
    clip_per_parameter: float | None = None
    lora_memory: Literal["none", "exact", "compressed"] = "none"

    def __post_init__(self) -> None:
        self._require("seed", self.seed >= 0, "0 or more")
        clip = self.clip_per_parameter
        if clip is not None:
            self._require("clip_per_parameter", clip > 0, "above 0")
            if not self.update_in_backward:
                raise ValueError(
                    f"{self.strategy}: option 'clip_per_parameter' needs update_in_backward=true; without it set "
                    "max_grad_norm, which clips the norm of all gradients together."
                )

    def _require(self, key: str, allowed: bool, says: str) -> None:
        require(self, key, allowed, says)


@dataclass(frozen=True)
class TacoAdamWOptions(CommonOptions):
    """Options of ``optim="taco_adamw"``: the common ones and this.

    Args:
        dense_embeddings: Keep fp32 moments for embeddings and the output head instead of ternary ones.
    """

    strategy: ClassVar[str] = "taco_adamw"

    dense_embeddings: bool = False


@dataclass(frozen=True)
class TacoOptions(TacoAdamWOptions):
    """Options of ``optim="taco"``; those of ``taco_adamw`` and these.

    Args:
        k: Entries of each column of a linear layer that the history keeps, 0 to 1024. 0 is the history-free method,
            which is unstable.
        decay: Of the history, a step. At least 0, below 1.
        consume: Share of an applied entry that leaves the history, 0 to 1.
        lr_scale: The chosen entry of a column moves by learning_rate * lr_scale.
        dimension_scale: Multiply that by rows / columns of the matrix.
    """

    strategy: ClassVar[str] = "taco"

    k: int = 16
    decay: float = 0.9
    consume: float = 1.0
    lr_scale: float = 50.0
    dimension_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("k", 0 <= self.k <= 1024, "from 0 to 1024")
        self._require("decay", 0 <= self.decay < 1, "at least 0 and below 1")
        self._require("consume", 0 <= self.consume <= 1, "from 0 to 1")
        self._require("lr_scale", self.lr_scale >= 0, "0 or more")


@dataclass(frozen=True)
class GaLoreOptions(CommonOptions):
    """Options of ``optim="memopt_galore_adamw"``: the common ones and these. Those that transformers has for its own
    GaLore have the same names.

    Args:
        rank: Dimension of the subspace, or a fraction of a matrix' smaller dimension (0.25).
        update_proj_gap: Steps between two refreshes of a matrix' subspace.
        scale: The projected matrices learn at learning_rate * scale.
        proj_type: Which dimension is projected: ``std`` the smaller one, ``reverse_std`` the larger one, ``left`` the
            rows, ``right`` the columns.
        refresh: How a new subspace is found; ``projections/__init__.py``.
        transport: What becomes of the moments on a refresh: ``moments`` turns them into the new subspace, ``none``
            leaves their numbers as they are, which is what the paper does.
        residual: What becomes of the gradient outside the subspace: ``none`` drops it, ``fira`` applies it scaled like
            the rest, ``sign`` applies its sign.
        residual_scale: The residual learns at learning_rate * scale * residual_scale.
        stagger: Refresh one matrix after another instead of all on one step.
        adaptive: A matrix whose subspace has settled waits twice as long for its next refresh.
        projector: How a projector is stored.
        matmul: In which precision gradients are projected and updates projected back. ``auto`` is bfloat16 on CPUs
            that multiply it faster, and on a GPU for bf16 gradients; else float32.
    """

    strategy: ClassVar[str] = "memopt_galore_adamw"

    rank: int | float = 0.25
    update_proj_gap: int = 200
    scale: float = 1.0
    proj_type: Literal["std", "reverse_std", "left", "right"] = "std"
    refresh: Literal["subspace", "svd", "select", "random"] = "select"
    transport: Literal["moments", "none"] = "moments"
    residual: Literal["none", "fira", "sign"] = "fira"
    residual_scale: float = 1.0
    stagger: bool = True
    adaptive: bool = False
    projector: Literal["int8", "float32"] = "int8"
    matmul: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.rank, int)
        self._require("rank", self.rank >= 1 if whole else 0 < self.rank <= 1, "1 or more, or a fraction up to 1.0")
        self._require("update_proj_gap", self.update_proj_gap >= 1, "1 or more")
        for key in ("scale", "residual_scale"):
            self._require(key, 0 < getattr(self, key) <= 1e6, "above 0 and at most 1e6")


@dataclass(frozen=True)
class GaLoreTacoOptions(GaLoreOptions):
    """Options of ``optim="galore_taco_adamw"``: those of ``memopt_galore_adamw`` and this.

    Args:
        dense_embeddings: Keep fp32 moments for embeddings and the output head instead of ternary ones.
    """

    strategy: ClassVar[str] = "galore_taco_adamw"

    dense_embeddings: bool = False


@dataclass(frozen=True)
class CompActConfig:
    """Options of ``compress_activations``.

    Args:
        rank: Dimensions that are kept of a layer's inputs, or a fraction of them (0.25). None compresses nothing and
            only recomputes.
        projection: Onto what inputs are projected; ``activations/projection.py``.
        update_proj_gap: Optimizer steps between two subspaces.
        scale: The compressed weights learn at learning_rate * scale.
        recompute: What is computed again in backward instead of kept: outputs of norms, products of gated MLPs. Does
            not change any gradient.
        seed: Of the random subspaces and of the rounding of bf16 and fp16 weights.
    """

    strategy: ClassVar[str] = "compress_activations"

    rank: int | float | None = 0.25
    projection: Literal["principal", "structured", "orthonormal", "gaussian"] = "principal"
    update_proj_gap: int = 50
    scale: float = 1.0
    recompute: Literal["norms,mlp", "norms", "mlp", "none"] = "norms,mlp"
    seed: int = 0

    def __post_init__(self) -> None:
        checked(self, type(self))  # a wrong type or choice, as from optim_args
        whole = isinstance(self.rank, int)
        fits = self.rank is None or (self.rank >= 1 if whole else 0 < self.rank <= 1)
        require(self, "rank", fits, "1 or more, or a fraction up to 1.0")
        require(self, "update_proj_gap", self.update_proj_gap >= 1, "1 or more")
        require(self, "scale", 0 < self.scale <= 1e6, "above 0 and at most 1e6")
        require(self, "seed", self.seed >= 0, "0 or more")
        if self.rank is None and self.recompute == "none":
            raise ValueError(f"{self.strategy}: rank=none and recompute=none together would do nothing.")

    def recompute_parts(self) -> tuple[str, ...]:
        """``recompute`` as words."""
        return () if self.recompute == "none" else tuple(self.recompute.split(","))


@dataclass(frozen=True)
class LoraMemoryConfig:
    """Options of ``compress_lora``.

    Args:
        tier: ``exact`` changes no gradient but by rounding; ``compressed`` also keeps inputs of adapters compressed
            where nothing else keeps them.
        rank: With ``compressed``, dimensions that are kept of an adapter's inputs, or a fraction of them (0.25).
        projection: Onto what they are projected; ``activations/projection.py``.
        recompute: What is computed again in backward instead of kept: outputs of norms, products of gated MLPs.
        seed: Mixed into the random subspaces and dropout masks, which are drawn with torch's global generator.
    """

    strategy: ClassVar[str] = "compress_lora"

    tier: Literal["exact", "compressed"] = "exact"
    rank: int | float = 0.25
    projection: Literal["principal", "structured", "orthonormal", "gaussian"] = "principal"
    recompute: Literal["norms,mlp", "norms", "mlp", "none"] = "norms,mlp"
    seed: int = 0

    def __post_init__(self) -> None:
        checked(self, type(self))
        whole = isinstance(self.rank, int)
        require(self, "rank", self.rank >= 1 if whole else 0 < self.rank <= 1, "1 or more, or a fraction up to 1.0")
        require(self, "seed", self.seed >= 0, "0 or more")

    def recompute_parts(self) -> tuple[str, ...]:
        """``recompute`` as words."""
        return () if self.recompute == "none" else tuple(self.recompute.split(","))


@dataclass(frozen=True)
class CompActOptions(CommonOptions):
    """Options of ``optim="compact_adamw"``: the common ones and those of ``CompActConfig``, where ``rank`` must be
    given as a number."""

    strategy: ClassVar[str] = "compact_adamw"

    rank: int | float = 0.25
    projection: Literal["principal", "structured", "orthonormal", "gaussian"] = "principal"
    update_proj_gap: int = 50
    scale: float = 1.0
    recompute: Literal["norms,mlp", "norms", "mlp", "none"] = "norms,mlp"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config()

    def config(self) -> CompActConfig:
        """What of these concerns the activations."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(CompActConfig)}
        try:
            return CompActConfig(**own)
        except ValueError as error:
            raise ValueError(str(error).replace(CompActConfig.strategy, self.strategy, 1)) from None


@dataclass(frozen=True)
class CompActTacoOptions(CompActOptions):
    """Options of ``optim="compact_taco_adamw"``: those of ``compact_adamw`` and this.

    Args:
        dense_embeddings: Keep fp32 moments for embeddings and the output head instead of ternary ones.
    """

    strategy: ClassVar[str] = "compact_taco_adamw"

    dense_embeddings: bool = False
