"""LoRA and QLoRA of PEFT with less activation memory: which modules are changed, and the way back.

``compress_lora`` exchanges classes in place (``activations/lora.py``, ``dropout.py``, ``int8.py``, ``recompute.py``):
of ``lora_A`` and ``lora_B``, of the adapters' dropout, of frozen 8-bit base layers, of norms and gated MLPs. Weights,
names, ``state_dict``, saved adapters, merging and unloading stay PEFT's. The adapters' layers get PEFT's own attribute
``cast_input_dtype_enabled = False``, so that the adapters see the tensor that q, k and v share and not a cast copy.

Adapters that are added, loaded or deleted later are found when the model next runs, in ``forward`` or in ``generate``;
``handle.refresh()`` does it at once. Once the model is unloaded or merged, nothing stays changed after its next run.
Left alone, with the reason in the report: layers with a variant of LoRA (DoRA,
aLoRA, ...), adapters on embeddings, convolutions and ``nn.MultiheadAttention``, LoRA on parameters (experts in three
dimensions), trained tokens of an embedding, layers of quantisation backends other than bitsandbytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft.tuners.lora import layer as plain
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers.trainer_callback import TrainerCallback

from ..activations import dropout, int8, lora, shared, structure
from ..activations.patch import behind_attention, rank_of
from ..activations.recompute import recompute, restore_copies
from ..activations.report import Skipped, as_text, count_kind
from ..options import LoraMemoryConfig
from .trainer import refuse_unsupported

logger = logging.getLogger("hf_memopt")

_CAST = "cast_input_dtype_enabled"


@dataclass(frozen=True)
class AdapterRow:
    """One adapter of one layer: its inputs n, and ``rank`` of what is kept of them (None: exact)."""

    name: str
    adapter: str
    features: int
    rank: int | None


@dataclass(frozen=True)
class LoraMemoryReport:
    """``recomputed`` has the entries of ``recompute.py``; ``int8`` the frozen 8-bit layers that keep no input."""

    config: LoraMemoryConfig
    adapters: tuple[AdapterRow, ...]
    skipped: tuple[Skipped, ...]
    recomputed: tuple[Any, ...]
    int8: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return asdict(self)

    def table(self) -> str:
        """One line for each kind of layer; numbers in names are written as ``*``."""
        lines: dict[tuple[str, ...], int] = {}
        for row in self.adapters:
            kept = "exact" if row.rank is None else f"compressed where kept for it alone, rank {row.rank}"
            count_kind(lines, row.name, f"adapter {row.adapter}: {kept} (of {row.features})")
        for name in self.int8:
            count_kind(lines, name, "frozen 8-bit layer: keeps no input")
        for skipped in self.skipped:
            count_kind(lines, skipped.name, f"left alone: {skipped.reason}")
        for entry in self.recomputed:
            count_kind(lines, entry.name, entry.outcome)
        head = f"LoRA activations, {self.config.tier}: {len(self.adapters)} adapters in their layers"
        return as_text(head, lines)


class LoraMemory:
    """What ``compress_lora`` returns.

    Attributes:
        config: the options.
    """

    def __init__(self, model: nn.Module, config: LoraMemoryConfig) -> None:
        self.config = config
        self._model = model
        self._layers: dict[str, tuple[nn.Module, Any]] = {}  # with the attribute that was changed
        self._adapters: list[AdapterRow] = []
        self._skipped: list[Skipped] = []
        self._int8: dict[str, nn.Module] = {}
        self._watched: dict[nn.Module, list[Any]] = {}
        self._configs: dict[str, Any] = {}
        parts = config.recompute_parts()
        self._recomputation = recompute(model, parts) if parts else None
        self.refresh()
        self._hooks = [root.register_forward_pre_hook(self._before_forward, prepend=True) for root in _roots(model)]

    @staticmethod
    def of(model: nn.Module) -> LoraMemory | None:
        """What ``compress_lora`` has returned for this model, if it is in force."""
        return next((handle for handle in _handles(model) if handle._model is model), None)

    def refresh(self) -> None:
        """Find adapters that were added or deleted since."""
        self._adapters.clear()
        self._skipped.clear()
        head = _output_head(self._model)
        for name, layer in _tuner_layers(self._model):
            reason = _why_not(layer)
            if reason is None:
                self._patch(name, layer, head)
            else:
                self._unpatch(name, layer)
                self._skipped.append(Skipped(name, reason))
        self._skipped += [
            Skipped(name, "trained in full (modules_to_save)")
            for name, module in self._model.named_modules()
            if isinstance(module, ModulesToSaveWrapper)
        ]
        self._configs = dict(getattr(self._model, "peft_config", None) or {})

    def _patch(self, name: str, layer: nn.Module, head: nn.Module | None) -> None:
        if name not in self._layers or self._layers[name][0] is not layer:
            self._layers[name] = layer, layer.__dict__.get(_CAST)
        setattr(layer, _CAST, False)
        parent = _ancestor(self._model, name, 1)
        if parent not in self._watched:
            self._watched[parent] = shared.watch(parent)
        base = layer.get_base_layer()
        if int8.patch(base):
            self._int8[f"{name}.base_layer"] = base
        rank, own_input = self._rank(name, layer, head), behind_attention(self._model, name, structure.is_linear)
        seed = self.config.seed
        plan_a = lora.Plan(None if own_input else rank, self.config.projection, seed, own_input)
        for adapter, factor in layer.lora_A.items():
            done = lora.patch(factor, plan_a) and lora.patch(layer.lora_B[adapter], lora.Plan(seed=seed))
            if not done:
                self._skipped.append(Skipped(f"{name}.lora_A.{adapter}", f"{type(factor).__name__}, not nn.Linear"))
                continue
            dropout.patch(layer.lora_dropout[adapter], seed)
            self._adapters.append(AdapterRow(name, adapter, factor.in_features, plan_a.rank))

    def _rank(self, name: str, layer: nn.Module, head: nn.Module | None) -> int | None:
        if self.config.tier == "exact" or layer is head or not re.search(r"(^|\.)\d+\.", name):
            return None
        rank = rank_of(self.config.rank, layer.in_features)
        return rank if rank < layer.in_features else None

    def _unpatch(self, name: str, layer: nn.Module) -> None:
        if name not in self._layers:
            return
        _, before = self._layers.pop(name)
        if before is None:
            delattr(layer, _CAST)
        else:
            setattr(layer, _CAST, before)
        base = self._int8.pop(f"{name}.base_layer", None)
        if base is not None:
            int8.unpatch(base)
        for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
            lora.unpatch(factor)
        for module in layer.lora_dropout.values():
            dropout.unpatch(module)

    @torch._disable_dynamo
    def _before_forward(self, root: nn.Module, args: tuple) -> None:
        shared.close()
        if self._retired():
            return
        now = getattr(self._model, "peft_config", None) or {}
        same = now.keys() == self._configs.keys() and all(now[key] is self._configs[key] for key in now)
        # an adapter may be deleted and added again with one config
        if not same or any(type(a) is nn.Linear for layer, _ in self._layers.values() for a in layer.lora_A.values()):
            self.refresh()

    def _retired(self) -> bool:
        """Whether the adapters' layers have left the model (``unload``, ``merge_and_unload``); restores the rest."""
        gone = any(self._model.get_submodule(name) is not layer for name, (layer, _) in [*self._layers.items()][:1])
        if gone:
            self.restore()
        return gone

    def report(self) -> LoraMemoryReport:
        """Which adapters are changed and how, which modules are recomputed, what is left alone and why."""
        recomputed = self._recomputation.entries if self._recomputation is not None else ()
        return LoraMemoryReport(
            self.config, tuple(self._adapters), tuple(self._skipped), tuple(recomputed), tuple(self._int8)
        )

    def restore(self) -> None:
        """Give every module its own class back. Call it between steps."""
        for hook in (*self._hooks, *(hook for hooks in self._watched.values() for hook in hooks)):
            hook.remove()
        self._watched.clear()
        for name, (layer, _) in list(self._layers.items()):
            self._unpatch(name, layer)
        self._adapters.clear()
        if self._recomputation is not None:
            self._recomputation.restore()
            for module in self._model.modules():
                if isinstance(module, ModulesToSaveWrapper):
                    for copy in module.modules_to_save.values():
                        restore_copies(module.original_module, copy)


def compress_lora(model: nn.Module, config: LoraMemoryConfig | None = None) -> LoraMemory:
    """Make the adapters of a PEFT model keep less for backward. Call it before or after the optimizer is made.

    Args:
        model: a ``PeftModel`` with LoRA, or a transformers model with adapters added to it; parameters and what is
            saved stay as they are. Takes effect in ``train()`` mode.
        config: the options; ``LoraMemoryConfig()``, the exact tier, by default.

    Returns:
        A ``LoraMemory``, with ``report()``, ``refresh()`` and ``restore()``.

    Raises:
        ValueError: no LoRA adapter that could be changed, another tuner than LoRA, VeLoRA, or the model is changed
            already.
    """
    config = config or LoraMemoryConfig()
    for handle in (handle for root in _roots(model) for handle in _handles(root)):
        handle._retired()
    found = list(_tuner_layers(model))
    if not found:
        raise ValueError("compress_lora: this model has no adapters; make it with peft.get_peft_model first.")
    for name, layer in found:
        if not isinstance(layer, (plain.LoraLayer, TrainableTokensLayer)):
            raise ValueError(
                f"compress_lora: {name} is a {type(layer).__module__}.{type(layer).__name__}, not LoRA; only LoRA's "
                "adapters are supported."
            )
        for adapter, variant in _variants(layer).items():
            if "Velora" in type(variant).__name__:
                raise ValueError(
                    f"compress_lora: adapter {adapter!r} of {name} compresses its activations by VeLoRA already: leave "
                    "velora_config out of its LoraConfig."
                )
    if any(isinstance(module, lora.LoraFactor) for module in model.modules()):
        raise ValueError(
            "compress_lora: this model's adapters are changed already: call .restore() on that first "
            "(LoraMemory.of(model).restore())."
        )
    reasons = [_why_not(layer) for _, layer in found]
    if all(reasons):
        raise ValueError(
            f"compress_lora: no adapter of this model can be changed ({', '.join(sorted(set(reasons)))}); use plain "
            "LoRA on linear layers, or gradient checkpointing instead."
        )
    return LoraMemory(model, config)


class LoraMemoryCallback(TrainerCallback):
    """``Trainer(..., callbacks=[LoraMemoryCallback()])``: ``compress_lora`` when the Trainer is made.

    Args:
        config: the options.

    Attributes:
        handle: what ``compress_lora`` returned.

    Raises:
        ValueError: when the Trainer is made, as ``compress_lora``.
        NotImplementedError: for FSDP, DeepSpeed and other ways of sharding.
    """

    def __init__(self, config: LoraMemoryConfig | None = None) -> None:
        self.config = config or LoraMemoryConfig()
        self.handle: LoraMemory | None = None

    def on_init_end(self, args, state, control, model=None, **kwargs):
        name = getattr(args.optim, "value", args.optim)
        refuse_unsupported(f"{name} with LoraMemoryCallback", args)
        self.handle = in_force(model, self.config)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handle = in_force(model, self.config)  # of another model, where model_init made one


def in_force(model: nn.Module, config: LoraMemoryConfig) -> LoraMemory:
    """``compress_lora(model, config)``, logged, or what it returned before for the same model and options."""
    handle = LoraMemory.of(model)
    if handle is None or handle.config != config:
        handle = compress_lora(model, config)
        logger.info("%s", handle.report().table())
    return handle


# -- what is where --------------------------------------------------------------------------------


def _roots(model: nn.Module) -> list[nn.Module]:
    """Modules whose forward begins a run: the model, and the one inside, which ``generate`` calls but PEFT does not."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return [model] if inner is model else [model, inner]


def _handles(root: nn.Module) -> list[LoraMemory]:
    """Those that follow the runs of ``root``."""
    owners = [getattr(hook, "__self__", None) for hook in root._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, LoraMemory)]


def _tuner_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with adapters, without those inside others (the layers of a ``ParamWrapper`` are nested)."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def _variants(layer: nn.Module) -> dict[str, Any]:
    return dict(getattr(layer, "lora_variant", None) or {})


def _why_not(layer: nn.Module) -> str | None:
    """Why a layer with LoRA is left alone."""
    cls = type(layer)
    if isinstance(layer, TrainableTokensLayer):
        return "trained tokens of an embedding"
    if isinstance(layer, plain.ParamWrapper):
        return "LoRA on a parameter, which has no linear layer"
    if isinstance(layer, plain.Embedding):
        return "adapter on an embedding, which keeps token numbers only"
    if cls is not plain.Linear and not (cls.__module__ == "peft.tuners.lora.bnb" and cls.__name__ in _BNB):
        return f"{cls.__module__}.{cls.__name__}"
    variants = {type(variant).__name__ for variant in _variants(layer).values()}
    variants |= {"DoRA"} if any(getattr(layer, "use_dora", {}).values()) else set()
    if variants:
        return f"variant of LoRA: {', '.join(sorted(variants))}"
    return None


_BNB = ("Linear8bitLt", "Linear4bit")


def _output_head(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    try:
        return get() if get is not None else None
    except (AttributeError, NotImplementedError):  # of models without one
        return None


def _ancestor(model: nn.Module, name: str, levels: int) -> nn.Module:
    return model.get_submodule(".".join(name.split(".")[:-levels]))
