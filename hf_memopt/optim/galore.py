r"""GaLore (arXiv 2403.03507): AdamW in a low-rank subspace of each matrix' gradient.

    R = P^T G,   m, v, U = AdamW's moments and direction of R,   W = W (1 - lr wd) - lr scale (P U + residual)

The step is in ``kernels/projected.py``, the subspaces are in ``projections/``, the storage is in
``codecs/projected.py``. Where it differs from the paper and its code galore-torch, each by an option:

- a new subspace is found by one warm-started subspace iteration instead of a singular value decomposition;
- the moments follow a change of subspace instead of meaning the new one with the old one's numbers;
- matrices refresh one after another, so that no step pays for all. They begin in random subspaces and find their first
  own ones during the first ``SPREAD`` steps;
- moments are fp32 or ternary, whatever the dtype of the gradient (a bf16 second moment cannot decay);
- a matrix of which the subspace would not save memory is treated like the rest.

At rank = d and scale 1 a group's matrices are not projected, which is AdamW itself. What is not projected is updated as
in ``TacoAdamW``: fp32 moments with ``state="fp32"``, ternary ones for matrices with ``state="ternary"``.

A refresh is due by the parameter's own count of steps. A gradient that is zero leaves the subspace as it is, and the
next step tries again. So does one that is not finite, or so large that a kernel would refuse it or its projection onto
the new subspace: that step changes nothing at all, with a warning.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..codecs.base import Codec, parts, state_key, write
from ..codecs.projected import STATES, Projection
from ..kernels import projected, reference
from ..kernels.scalars import StepScalars, bias_correction, mix32, parameter_key
from ..options import GaLoreOptions
from ..param_groups import Treatment, decide
from ..parsing import parse_options
from ..projections import basis as bases
from ..projections.geometry import Subspace
from ..projections.moments import change_of_basis, overlap, transport, transport_coordinates
from .taco_adamw import TacoAdamW

logger = logging.getLogger("hf_memopt")

SPREAD = 10
SETTLED = 0.8
"""The share of the seen energy (``overlap`` in ``projections/moments.py``) from which on a subspace is settled."""

FIND = {"subspace": bases.iterate, "svd": bases.singular, "select": bases.select}

OWN_OPTIONS = (
    "rank",
    "update_proj_gap",
    "scale",
    "proj_type",
    "refresh",
    "transport",
    "residual",
    "residual_scale",
    "stagger",
    "adaptive",
    "projector",
    "matmul",
)
_defaults = GaLoreOptions()


class GaLoreAdamW(TacoAdamW):
    """AdamW in subspaces; equations in the module's docstring.

    Args:
        params: the groups of ``hf_memopt.build_param_groups(model, projection=...)``. Of groups of your own those are
            projected that have a ``rank``, as in galore-torch, or ``treatment="projected"``, which also projects
            where it saves nothing; ``rank``, ``update_proj_gap``, ``scale``, ``proj_type`` and the further options
            below may differ between groups.
        lr: learning rate; projected matrices learn at lr * scale.
        state: ``fp32`` or ``ternary``, of all moments but those of vectors and small matrices.
        rank, update_proj_gap, scale, proj_type, refresh, transport, residual, residual_scale, stagger, adaptive,
        projector, matmul: as in ``GaLoreOptions``.
        betas, eps, weight_decay, **options: as for ``TacoAdamW``.

    Raises:
        ValueError: an option or a parameter is out of range; the sentence names it.
    """

    NAME = "GaLoreAdamW"
    SAVED_OPTIONS = (*TacoAdamW.SAVED_OPTIONS, "state", *OWN_OPTIONS)
    TREATMENTS = ("projected", *TacoAdamW.TREATMENTS)
    IMPORTS = ""  # no moments of AdamW's become moments in a subspace

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        state: str = "fp32",
        rank: int | float = _defaults.rank,
        update_proj_gap: int = _defaults.update_proj_gap,
        scale: float = _defaults.scale,
        proj_type: str = _defaults.proj_type,
        refresh: str = _defaults.refresh,
        transport: str = _defaults.transport,
        residual: str = _defaults.residual,
        residual_scale: float = _defaults.residual_scale,
        stagger: bool = _defaults.stagger,
        adaptive: bool = _defaults.adaptive,
        projector: str = _defaults.projector,
        matmul: str = _defaults.matmul,
        **options: Any,
    ) -> None:
        given = locals()
        own = _checked({"state": state, **{key: given[key] for key in OWN_OPTIONS}})
        self._slots: dict[int, int] = {}
        self._names: dict[int, str] = {}
        super().__init__(params, lr, betas, eps, weight_decay, more_defaults=own, **options)
        if all(group["treatment"] == "auto" for group in self.param_groups):
            raise ValueError(
                "GaLoreAdamW cannot tell a linear layer from an embedding in a list of parameters: pass "
                "hf_memopt.build_param_groups(model, projection=hf_memopt.Projection(rank=...)), or groups of which "
                "those to be projected have a rank."
            )
        if not any(self.treatment_of(group, p) == "projected" for group, _, p in self.named_params()):
            logger.warning("GaLoreAdamW projects none of its parameters: it is AdamW, at AdamW's memory.")

    def title(self) -> str:
        """Its name and the options that its projected groups agree on, for the report."""
        groups = [g for g in self.param_groups if g["treatment"] in ("projected", "where it saves")]
        shown = ("rank", "update_proj_gap", "scale", "refresh", "transport", "residual")
        common = {key: {g[key] for g in groups} for key in shown}
        agreed = ", ".join(f"{key}={values.pop()}" for key, values in common.items() if len(values) == 1)
        return f"{super().title()} ({agreed})" if agreed else super().title()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._slots, self._names = {}, {}
        super().__setstate__(state)

    # -- parameters -------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "rank" in param_group and "treatment" not in param_group:
            param_group = {**param_group, "treatment": "where it saves"}
        super().add_param_group(param_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        group.update(_checked(group))
        super()._check_group({**group, "treatment": "auto"} if group["treatment"] == "where it saves" else group)
        if group["treatment"] == "projected":
            for i, p in enumerate(group["params"]):
                try:
                    Projection.of(group).space(p.shape)
                except ValueError as error:
                    name = group["param_names"][i] if group.get("param_names") else f"Parameter {i}"
                    raise ValueError(f"{name} of the group: {error}") from None

    def decision(self, group: dict, p: Tensor) -> Treatment:
        if group["treatment"] == "where it saves":
            return decide(p.shape, projection=Projection.of(group), linear=p.dim() in (2, 3))
        if group["treatment"] == "auto":
            found = decide(p.shape)
            return found if group["state"] == "ternary" else replace(found, name="dense")
        return super().decision(group, p)

    def codecs_of(self, group: dict, p: Tensor) -> dict[str, Codec]:
        if self.treatment_of(group, p) == "projected":
            return Projection.of(group).codecs(p.shape)
        return super().codecs_of(group, p)

    def numbers_of(self, group: dict, p: Tensor) -> dict[str, Any]:
        if self.treatment_of(group, p) != "projected":
            return super().numbers_of(group, p)
        side = "left" if Projection.of(group).space(p.shape).left else "right"
        return {
            **super().numbers_of(group, p),
            "side": side,
            "refreshes": 0,
            "refresh_at": self._first_refresh(group, p),
        }

    def state_of(self, group: dict, p: Tensor) -> dict[str, Any]:
        begins = not self.state[p]
        state = super().state_of(group, p)
        if begins and self.treatment_of(group, p) == "projected" and group["refresh"] in FIND:
            projection = Projection.of(group)
            space, codec = projection.space(p.shape), projection.codecs(p.shape)["projector"]
            columns, _ = bases.random_columns(self._key(group, p, 0), *_basis_size(space), p.device)
            start = columns
            if group["refresh"] != "select":
                start = self._random(group, p, 0, space, torch.float32)
            write("projector", state, codec.encode(start))
        return state

    def _first_refresh(self, group: dict, p: Tensor) -> int:
        return 1 + self._slot(p) % min(SPREAD, group["update_proj_gap"]) if group["stagger"] else 1

    def _slot(self, p: Tensor) -> int:
        """The parameter's number among those that are projected."""
        if id(p) not in self._slots:
            matrices = [q for group, _, q in self.named_params() if self.treatment_of(group, q) == "projected"]
            self._slots = {id(q): number for number, q in enumerate(matrices)}
        return self._slots[id(p)]

    # -- stepping ---------------------------------------------------------------------------------

    def _prepare_step(self) -> None:
        super()._prepare_step()
        self._slots, self._names = {}, {}  # parameters may have been replaced, and their ids used again

    def _update_matrix(self, group: dict, p: Tensor, state: dict, scalars: StepScalars) -> bool | Tensor:
        if self.treatment_of(group, p) != "projected":
            return super()._update_matrix(group, p, state, scalars)
        projection = Projection.of(group)
        space, codecs = projection.space(p.shape), projection.codecs(p.shape)
        dtype = projected.matmul_dtype(group["matmul"], p.grad)
        step = int(state["step"]) + 1
        grad, now, usable, fresh = space.view(p.grad), state, None, None
        # a simulation is asked for the highest step, and that one refreshes
        if step >= state["refresh_at"] or isinstance(p, FakeTensor):
            usable = projected.within_range(grad)
            now, fresh = self._find(group, p, state, space, codecs, usable)
        basis = self._basis(group, p, now, space, codecs, dtype)
        low_grad = projected.project(grad, basis, usable)
        if usable is not None:
            if not bases.truth(usable & projected.within_range(low_grad)):
                logger.warning(
                    "The subspace of %s stays as it is: its gradient is not finite, or too large, at a refresh.",
                    self._name(p),
                )
                return False  # as the kernels would say; nothing has changed, and the refresh is still due
            if fresh is not None:
                self._refresh(group, p, state, space, codecs, now, fresh, step, low_grad)
        backend = self._backend(p)
        minus_u, applied = projected.direction(backend, group["state"] == "ternary", low_grad, _flat(state), scalars)
        if applied is False:
            return False
        rule = projected.BackProjection(group["scale"], group["residual"], group["residual_scale"])
        rows_adjacent = p.stride(-1) == 1 or p.dtype == torch.float32
        projected.project_back_(
            p,
            p.grad,
            space,
            basis,
            low_grad,
            minus_u,
            state.get("residual_norm"),
            applied,
            backend if rows_adjacent else reference,
            scalars,
            rule,
        )
        return applied

    def _basis(
        self, group: dict, p: Tensor, state: dict, space: Subspace, codecs: dict[str, Codec], dtype: torch.dtype
    ) -> Tensor:
        """The basis as ``projected.project`` takes it: (b, d, r) in ``dtype``, or coordinates (b, r)."""
        if group["refresh"] == "random":
            return self._random(group, p, state["refreshes"], space, dtype)
        basis = codecs["projector"].decode(parts(codecs["projector"], "projector", state, p.shape))
        return basis.to(dtype) if basis.is_floating_point() else basis

    def _random(self, group: dict, p: Tensor, refreshes: int, space: Subspace, dtype: torch.dtype) -> Tensor:
        """The random basis after so many refreshes, (b, d, r)."""
        columns, signs = bases.random_columns(self._key(group, p, refreshes), *_basis_size(space), p.device)
        return bases.cosine_columns(columns, space.dimension, dtype).mul_(signs[:, :, None])

    def _find(
        self, group: dict, p: Tensor, state: dict, space: Subspace, codecs: dict[str, Codec], usable: Tensor
    ) -> tuple[dict, Tensor | None]:
        """(The state with a new subspace, which of the matrices have one); nothing is written yet, since the projected
        gradient may still be refused. Where there is none: (``state``, None)."""
        if not bases.truth(usable):
            return state, None
        refreshes = state["refreshes"] + 1
        if group["refresh"] == "random":
            return {**state, "refreshes": refreshes}, usable.expand(space.matrices)
        old = self._basis(group, p, state, space, codecs, torch.float32)
        grad = p.grad
        if group["maximize"] and group["refresh"] == "svd":
            grad = -grad  # so that it is what minimizing finds: LAPACK's vectors of -G are not always those of G
        found, fresh = FIND[group["refresh"]](space.view(grad), old)
        if not bases.truth(fresh.any()):
            return state, None  # zeros tell nothing: it is still due
        encoded = codecs["projector"].encode(found)
        # laid out as they will be stored: the order of a product's sums depends on it
        basis = {state_key("projector", part): value.contiguous() for part, value in encoded.items()}
        return {**state, "refreshes": refreshes, **basis}, fresh

    def _refresh(
        self,
        group: dict,
        p: Tensor,
        state: dict,
        space: Subspace,
        codecs: dict[str, Codec],
        now: dict,
        fresh: Tensor,
        step: int,
        low_grad: Tensor,
    ) -> None:
        """Take over the subspace that ``_find`` gave, let the moments follow, and say when the next one is due."""
        where = group, p, space, codecs
        settled = group["adaptive"] and group["refresh"] != "random"
        if settled:
            settled = bases.truth((overlap(*self._both(*where, now, state), low_grad) >= SETTLED).all())
        if step > 1 and group["transport"] == "moments":
            self._transport(*where, state, now, fresh, step)
        state["refreshes"] = now["refreshes"]
        if group["refresh"] in FIND:
            buffers = parts(codecs["projector"], "projector", now, p.shape)
            write("projector", state, buffers)
        state["refresh_at"] = self._next_refresh(group, p, step)
        if settled:
            state["refresh_at"] += group["update_proj_gap"]

    def _both(
        self, group: dict, p: Tensor, space: Subspace, codecs: dict[str, Codec], now: dict, state: dict
    ) -> tuple[Tensor, Tensor]:
        """The new basis and the old one, fp32 or coordinates."""
        new, old = (self._basis(group, p, one, space, codecs, torch.float32) for one in (now, state))
        return new, old

    def _transport(
        self,
        group: dict,
        p: Tensor,
        space: Subspace,
        codecs: dict[str, Codec],
        state: dict,
        now: dict,
        usable: Tensor,
        step: int,
    ) -> None:
        """Let the moments follow into the new basis, for the matrices whose basis is usable."""
        moments = []
        for name in ("exp_avg", "exp_avg_sq"):
            found = codecs[name].decode(parts(codecs[name], name, state, space.low_rank_shape))
            moments.append(found.view(space.matrices, space.rank, space.length))
        new, old = self._both(group, p, space, codecs, now, state)
        if new.is_floating_point():
            change = change_of_basis(new, old)
            del new, old
            moved = transport(*moments, change, *(bias_correction(beta, step - 1) for beta in group["betas"]))
            for new_one, old_one in zip(moved, moments, strict=True):
                torch.where(usable[:, None, None], new_one, old_one, out=new_one)
        else:
            moved = transport_coordinates(*moments, new, old)  # a matrix that keeps its coordinates keeps its moments
        m, v = (moment.reshape(space.low_rank_shape) for moment in moved)
        write("exp_avg", state, codecs["exp_avg"].encode(m))
        more = ()
        if group["state"] == "ternary":
            n, k = v.shape
            key = self._key(group, p, state["refreshes"] + 1)
            row = torch.arange(n, device=v.device)[:, None]
            more = (reference.uniform(reference.hash_at(key, row, torch.arange(k, device=v.device))),)
        write("exp_avg_sq", state, codecs["exp_avg_sq"].encode(v, *more))

    def _next_refresh(self, group: dict, p: Tensor, step: int) -> int:
        gap = group["update_proj_gap"]
        if not group["stagger"]:
            return step + gap
        # each matrix has its place in the gap; the next one there that is not too near
        place = self._slot(p) * gap // max(1, len(self._slots))
        soonest = step + -(-gap // 2)
        return soonest + (place - soonest) % gap

    def _key(self, group: dict, p: Tensor, refreshes: int) -> int:
        return mix32(parameter_key(group["seed"], f"{self._name(p)}/subspace") + refreshes)

    def _name(self, p: Tensor) -> str:
        if id(p) not in self._names:
            self._names = {id(q): name for _, name, q in self.named_params()}
        return self._names[id(p)]


def _basis_size(space: Subspace) -> tuple[int, int, int]:
    return space.matrices, space.dimension, space.rank


def _flat(state: dict) -> dict[str, Tensor]:
    """The moments under the kernels' keys, as they are stored: (b r, L)."""
    return {key: value for key, value in state.items() if key.startswith("exp_avg")}


def _checked(group: dict[str, Any]) -> dict[str, Any]:
    """``state`` and the options of a group, with their own types where they were given as text; raises ValueError for
    one that is wrong, with the sentence of ``GaLoreOptions``."""
    if group["state"] not in STATES:
        raise ValueError(f"state={group['state']!r} is not known: choose {' or '.join(STATES)}.")
    options = parse_options(GaLoreOptions, {key: group[key] for key in OWN_OPTIONS}, strategy="GaLoreAdamW")
    return {"state": group["state"], **{key: getattr(options, key) for key in OWN_OPTIONS}}
