"""A model whose activations are compressed: its layers, their subspaces in the course of training, and the way back.

After each ``step()`` of an optimizer, of whatever class, that holds the carriers, they are folded into the weights
(``folding.py``) and the subspaces refreshed if that is due. torch calls a hook for every optimizer's step; it looks
among the compressions that are alive for those whose carriers the optimizer holds.

What must survive a restart is little: how many steps there were, which layers share a basis, and the chosen
coordinates. It is written into the optimizer's first parameter group under ``"compact"``, plain numbers and tensors, so
it is in every checkpoint of every optimizer and nothing is added to the model's. ``resume(optimizer)`` reads it after a
``load_state_dict``; the Trainer's callback and the package's optimizers do that themselves, and who forgets is told at
the next step.
"""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..options import CompActConfig
from . import shared
from .basis import InputBasis
from .folding import fold
from .layers import CARRIER, DROPPED, unpatch
from .projection import Projection
from .report import CompressionReport, LayerRow, Skipped

logger = logging.getLogger("hf_memopt")

STATE_KEY = "compact"
OWNER = "_memopt_compression"
"""Attribute of the model that holds its ``Compression``: a copied or pickled model brings its own along."""
KEPT = ("projection", "update_proj_gap", "scale", "seed")
"""Options that a checkpoint brings along; a rank that differs does not fit its moments."""

_alive: weakref.WeakSet[Compression] = weakref.WeakSet()


class Compression:
    """What ``compress_activations`` returns.

    Attributes:
        config: the options.
        layers: name -> compressed layer.
        steps: optimizer steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CompActConfig,
        layers: dict[str, nn.Module],
        exact: dict[str, nn.Module],
        skipped: list[Skipped],
        recomputation: Any,
        hooks: list[Any],
    ) -> None:
        self.config, self.layers, self.exact, self.skipped = config, layers, exact, skipped
        self.steps = 0
        self._told, self._agreed = "", False
        self.recomputation, self._hooks = recomputation, hooks
        self._model = model
        model.__dict__[OWNER] = self
        self._prepare()
        _alive.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _alive.add(self)  # a copy folds too

    # -- the course of training -------------------------------------------------------------------

    def bases(self) -> list[InputBasis]:
        """The distinct bases, in the order of the layers."""
        return list({id(layer.basis): layer.basis for layer in self.layers.values()}.values())

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Fold what ``optimizer`` has stepped; called after each of its steps."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        held = {name for name, layer in self.layers.items() if id(_carrier(layer)) in groups}
        if not held:
            self._refuse_missing(optimizer, groups)
            return
        _refuse_copies(optimizer)
        trainable = {name for name, layer in self.layers.items() if _carrier(layer).requires_grad}
        if trainable - held:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds {len(held)} of {len(trainable)} carriers of compressed layers, but "
                f"not that of {min(trainable - held)}: give all parameters of the model to one optimizer."
            )
        saved = optimizer.param_groups[0].get(STATE_KEY)
        if saved is not None and saved["steps"] != self.steps:
            raise RuntimeError(
                f"The optimizer's state is of step {saved['steps']} and the compressed layers are at {self.steps}: "
                "call compression.resume(optimizer) after optimizer.load_state_dict(...)."
            )
        shared.close()
        self._agree(trainable)
        settled = sum(layer.settled for layer in self.layers.values())
        self._tell_idle(trainable)
        self.steps += 1
        made: dict[int, tuple[InputBasis, Projection]] = {}
        for name, layer in sorted(self.layers.items(), key=lambda item: id(item[1].basis)):
            if name in held:
                group = groups[id(_carrier(layer))]
                self._fold(name, layer, optimizer, group, made)
        refreshed = self._advance()
        if saved is None or refreshed or len(saved["shared"]) != settled:
            saved = self.state_dict()
        optimizer.param_groups[0][STATE_KEY] = {**saved, "steps": self.steps}

    def _fold(self, name: str, layer: nn.Module, optimizer: Any, group: dict[str, Any], made: dict) -> None:
        carrier, basis = _carrier(layer), layer.basis
        kind = (id(basis), carrier.device, carrier.dtype)
        if kind not in made:
            made.clear()  # layers come basis by basis: one dense matrix is alive at a time
            made[kind] = basis.projection(carrier.device, carrier.dtype)
        fold(
            layer.matrix(),
            carrier.detach(),
            made[kind],
            scale=self.config.scale,
            decay=_decay(optimizer, group),
            name=name,
            seed=self.config.seed,
            step=self.steps,
        )
        torch.autograd.graph.increment_version(layer.weight)
        layer.zero_at = carrier._version

    def _tell_idle(self, trainable: set[str]) -> None:
        """Warn of weights that this step leaves as they are: once in the first step, once if it becomes all of them."""
        idle = sorted(name for name in trainable if not self.layers[name].ran)
        if idle and len(idle) == len(trainable) and self._told != "all":
            self._told = "all"
            logger.warning(
                "No compressed layer has run in train() mode before this step, so their weights stay as they are: call "
                "model.train() before training."
            )
        elif idle and not self._told:
            logger.warning(
                "%d of %d compressed layers, such as %s, have not run in train() mode before the first step, so their "
                "weights stay as they are until they do: call model.train(); and leave out, by the target modules, "
                "layers whose weight the model's forward uses without calling them.",
                len(idle),
                len(trainable),
                idle[0],
            )
        self._told = self._told or "first"
        for layer in self.layers.values():
            layer.ran = False

    def _due(self, steps: int) -> bool:
        """Whether the subspaces are refreshed after so many steps; by energy first after step 1, which saw some."""
        first = steps == 1 and self.config.projection == "principal"
        return first or steps % self.config.update_proj_gap == 0

    def _advance(self) -> bool:
        """Refresh the subspaces if that is due; whether it was."""
        bases, due = self.bases(), self._due(self.steps)
        if due:
            self._sum_over_processes([basis for basis in bases if basis.collecting])
            for basis in bases:
                basis.refresh()
        self._prepare()
        return due

    def _agree(self, trainable: set[str]) -> None:
        """A layer that another process has met (an expert) and this one has not: its gradient is of that subspace.

        One exchange a step, until all layers have been met by somebody.
        """
        if self._agreed or _processes() < 2:
            return
        met = {name: layer.basis.name for name, layer in self.layers.items() if layer.settled}
        gathered: list[Any] = [None] * _processes()
        torch.distributed.all_gather_object(gathered, met)
        for theirs in gathered:
            for name, owner in theirs.items():
                if met.setdefault(name, owner) != owner:
                    raise RuntimeError(
                        f"One process sees {name} read the same tensor as {met[name]}, another as {owner}: leave it "
                        "out by the target modules."
                    )
        own = {name: layer.basis for name, layer in self.layers.items() if met.get(name, name) == name}
        for name, owner in met.items():
            self.layers[name].basis, self.layers[name].settled = own[owner], True
        self._agreed = trainable <= met.keys()

    def _sum_over_processes(self, bases: list[InputBasis]) -> None:
        """Each process has seen its own part of the batch, or nothing of a layer; all must choose the same
        coordinates."""
        if bases and _processes() > 1:
            device = next(iter(self.layers.values())).weight.device
            for basis in bases:
                if basis.energy is None:
                    basis.energy = torch.zeros(basis.features, device=device)
            together = torch.cat([basis.energy.to(device) for basis in bases])
            torch.distributed.all_reduce(together)
            for basis, energy in zip(bases, together.split([b.features for b in bases]), strict=True):
                basis.energy = energy.to(basis.energy.device)

    def _prepare(self) -> None:
        wanted = self._due(self.steps + 1)
        for basis in self.bases():
            basis.collecting = wanted and basis.wants_energy()

    def _refuse_missing(self, optimizer: torch.optim.Optimizer, groups: dict[int, dict]) -> None:
        for name, layer in self.layers.items():
            if id(layer.weight) in groups and _carrier(layer).grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was made before the activations were compressed: it holds the weight "
                    f"of {name}, which gets no gradient now, and not its carrier. Call compress_activations first and "
                    "make the optimizer from the model's parameters afterwards."
                )

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers, words and tensors from which the subspaces go on."""
        return {
            "steps": self.steps,
            "options": {key: getattr(self.config, key) for key in KEPT},
            "ranks": {name: layer.basis.rank for name, layer in self.layers.items()},
            "shared": {name: layer.basis.name for name, layer in self.layers.items() if layer.settled},
            "epochs": {basis.name: basis.epoch for basis in self.bases()},
            "top": {basis.name: basis.top.to(torch.int32) for basis in self.bases() if basis.top is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises ValueError where it is of another model."""
        unknown = sorted({*state["shared"], *state["shared"].values()} - self.layers.keys())
        if unknown:
            raise ValueError(
                f"This checkpoint compresses the activations of {unknown[0]!r}, which this model does not: use the "
                "model, rank and target modules of the run that wrote it."
            )
        for name, rank in state["ranks"].items():
            if name in self.layers and self.layers[name].basis.rank != rank:
                raise ValueError(
                    f"This checkpoint compresses the activations of {name!r} to rank {rank} and this model to "
                    f"{self.layers[name].basis.rank}: use the rank of the run that wrote it."
                )
        differing = {key: value for key, value in state["options"].items() if value != getattr(self.config, key)}
        if differing:
            logger.warning(
                "The checkpoint was written with %s, which is kept so that the run goes on as it began; %s is ignored.",
                ", ".join(f"{key}={value}" for key, value in differing.items()),
                ", ".join(f"{key}={getattr(self.config, key)}" for key in differing),
            )
            self.config = replace(self.config, **differing)
        self.steps = state["steps"]
        bases = {}
        for name, layer in self.layers.items():
            owner = state["shared"].get(name, name)
            if owner not in bases:
                kind, seed = self.config.projection, self.config.seed
                bases[owner] = replace(
                    layer.basis, name=owner, kind=kind, seed=seed, epoch=state["epochs"].get(owner, 0), top=None,
                    energy=None,
                )  # fmt: skip
                if owner in state["top"]:
                    bases[owner].top = state["top"][owner].to(layer.weight.device, torch.int64)
            layer.basis, layer.settled = bases[owner], name in state["shared"]
            with torch.no_grad():
                _carrier(layer).zero_()  # what an interrupted step may have left
        self._prepare()

    def resume(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on where ``optimizer``, whose state has been loaded, was saved. One without changes nothing."""
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        state = optimizer.param_groups[0].get(STATE_KEY)
        if state is not None:
            self.load_state_dict(state)
        elif self.steps == 0 and any(optimizer.state.get(_carrier(layer)) for layer in self.layers.values()):
            raise ValueError(
                "The optimizer's state was written without compressed activations, so its moments are of weights and "
                "not of carriers: begin with a new optimizer, and load the model's weights only."
            )

    # -- what was done ----------------------------------------------------------------------------

    def report(self) -> CompressionReport:
        """Which layers are compressed, which share a subspace, which are left alone and why."""
        rows = [
            LayerRow(name, layer.basis.features, layer.basis.rank, layer.basis.name, layer.matrix().shape[0])
            for name, layer in self.layers.items()
        ]
        recomputed = self.recomputation.entries if self.recomputation is not None else ()
        return CompressionReport(self.config, tuple(rows), tuple(self.skipped), tuple(recomputed))

    def restore(self) -> None:
        """Make every layer the plain one again: same weight, no carrier, nothing left behind. Call it between steps;
        gradients of carriers are dropped. Once more changes nothing."""
        if self._model.__dict__.get(OWNER) is not self:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.recomputation is not None:
            self.recomputation.restore()
        for layer in (*self.layers.values(), *self.exact.values()):
            unpatch(layer)
        self._model.__dict__.pop(OWNER, None)
        _alive.discard(self)


def compressions_of(optimizer: torch.optim.Optimizer) -> list[Compression]:
    """Those whose carriers ``optimizer`` holds."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [c for c in list(_alive) if any(id(_carrier(layer)) in held for layer in c.layers.values())]


def compression_of(model: nn.Module) -> Compression | None:
    """The compression of ``model``, if it has one."""
    return next((m.__dict__[OWNER] for m in model.modules() if OWNER in m.__dict__), None)


def _processes() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _carrier(layer: nn.Module) -> Tensor:
    return layer._parameters[CARRIER]


def _decay(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    """1 - lr wd of a group."""
    rate, decay = group.get("lr"), float(group.get("weight_decay") or 0.0)
    if decay and rate is None:
        raise ValueError(
            f"{type(optimizer).__name__} has no learning rate (lr=None), by which the decay of compressed weights "
            "is applied: give it one, or set weight_decay=0."
        )
    return 1.0 - float(rate) * decay if decay else 1.0


def _refuse_copies(optimizer: torch.optim.Optimizer) -> None:
    """Optimizers that keep copies of the parameters would keep copies of zeros."""
    switches = callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
    if switches or "d0" in optimizer.param_groups[0]:
        raise NotImplementedError(
            f"{type(optimizer).__name__} keeps copies of the parameters (schedule-free, Prodigy, D-Adaptation), which "
            "carriers, zero after every step, make meaningless: choose another optimizer, or compress nothing with "
            "rank=None."
        )


def _nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is the end of a step that was called by another step of ``optimizer``: torch calls its hooks for
    each, where a class whose step calls that of its base inherits from one that has been made before."""
    of_torch = register_optimizer_step_post_hook.__code__.co_filename
    frame, calls = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == of_torch:
            calls += frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return calls > 1


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if any(DROPPED in p.__dict__ for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(
            f"{type(optimizer).__name__} holds carriers of a model that has been restored since, so it does not train "
            "its weights: make a new optimizer from the model's parameters."
        )
    if not _alive or _nested(optimizer):
        return
    if len(_alive) > 1 and len(found := compressions_of(optimizer)) > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds the carriers of {len(found)} compressed models: use one optimizer for "
            "each, or put the models into one and compress that."
        )
    for compression in list(_alive):
        compression.after_step(optimizer)


register_optimizer_step_post_hook(_after_step)
