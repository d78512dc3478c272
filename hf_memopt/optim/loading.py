"""Loading an optimizer's state, checked buffer by buffer before anything is changed.

``torch.optim.Optimizer.load_state_dict`` casts every state tensor except ``step`` to the parameter's dtype: codes would
become floats, fp32 factors bf16. Here each buffer keeps its dtype and has to be what the codecs declare; what does not
fit is refused in one sentence that says which run would have fitted.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..codecs.base import all_specs

FORMAT_VERSION = 1

logger = logging.getLogger("hf_memopt")


class CheckedLoading(torch.optim.Optimizer):
    """``load_state_dict`` of ``CodecOptimizer``, which says by ``NAME``, ``SAVED_OPTIONS``, ``named_params``,
    ``treatment_of``, ``codecs_of`` and ``numbers_of`` what it expects."""

    IMPORTS = ", or bring plain AdamW's moments over with hf_memopt.import_adamw_state(optimizer, state_dict, model)"
    """A further way out for who resumes with the state of another optimizer."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` gave: every buffer keeps its own dtype and is moved to its parameter's device.

        Raises:
            ValueError: the state is of another format, model or optimizer; nothing has been changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"This is not the state_dict() of an optimizer: a dict is needed, got {type(state_dict).__name__}."
            )
        checked: list[tuple[Tensor, dict]] = []

        def check(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            checked.extend(self._check_loadable(given))
            # an option that the checkpoint does not know yet stays as it is here
            groups = [
                {**{key: value for key, value in own.items() if key != "params"}, **saved}
                for own, saved in zip(self.param_groups, given["param_groups"], strict=True)
            ]
            return {**given, "state": {}, "param_groups": groups}

        def fill(_: torch.optim.Optimizer) -> None:
            self.state = defaultdict(dict)
            for p, state in checked:
                self.state[p] = {
                    key: value.to("cpu" if key == "step" else p.device, copy=True) if torch.is_tensor(value) else value
                    for key, value in state.items()
                }

        # the last hook before torch loads and the first one after: other hooks see what they would see of any optimizer
        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(fill, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_loadable(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict]]:
        me = type(self).__name__
        saved_groups = state_dict.get("param_groups")
        if not saved_groups or not isinstance(state_dict.get("state"), Mapping):
            raise ValueError("This is not the state_dict() of an optimizer: it lacks 'state' or 'param_groups'.")
        if not isinstance(saved_groups, (list, tuple)) or not all(
            isinstance(g, Mapping) and isinstance(g.get("params"), (list, tuple)) for g in saved_groups
        ):
            raise ValueError("This is not the state_dict() of an optimizer: 'param_groups' is no list of groups.")
        sizes = [len(g["params"]) for g in saved_groups]
        own_sizes = [len(g["params"]) for g in self.param_groups]
        versions = {g.get("format_version") for g in saved_groups}
        if versions == {None}:
            raise ValueError(
                f"This checkpoint holds the state of another optimizer, not {me}'s: resume with the optimizer that "
                f"wrote it, or remove optimizer.pt to start with fresh moments{self.IMPORTS}."
            )
        if versions != {FORMAT_VERSION}:
            raise ValueError(
                f"This checkpoint's optimizer state has format version {sorted(map(str, versions))}, this hf_memopt "
                f"reads version {FORMAT_VERSION}: install the version of hf_memopt that wrote it."
            )
        writer = saved_groups[0].get("optimizer", "TacoAdamW")
        if writer != self.NAME:
            raise ValueError(
                f"This checkpoint holds the state of {writer}, not {self.NAME}'s: resume with the optim= that wrote "
                "it, or remove optimizer.pt to start with fresh state."
            )
        if sizes != own_sizes:
            raise ValueError(self._other_groups(saved_groups, sizes, own_sizes))
        found = []
        saved_flat = [(g, i, pid) for g in saved_groups for i, pid in enumerate(g["params"])]
        for (group, name, p), (saved_group, i, pid) in zip(self.named_params(), saved_flat, strict=True):
            saved_name = name_in_group(saved_group, i)
            if saved_name and name_in_group(group, 0) and saved_name != name:
                raise ValueError(
                    "This checkpoint's optimizer state is of another model: "
                    f"it has {saved_name!r} where this one has {name!r}."
                )
            state = state_dict["state"].get(pid)
            # a checkpoint's options win, as in torch, so its state is checked by them
            saved = {**group, "treatment": "auto", **{key: saved_group[key] for key in saved_group if key in group}}
            if self.treatment_of(saved, p) != self.treatment_of(group, p) or saved.get("layout") != group.get("layout"):
                raise self._other_moments(group, name, p)
            if state:
                self._check_state(state, saved, name, p)
                found.append((p, state))
        self._tell_kept_options(saved_groups)
        return found

    def _tell_kept_options(self, saved_groups: list[dict]) -> None:
        """As in torch a checkpoint's options win over those given; for ours it is said."""
        kept = {
            f"{key}={saved[key]}": f"{key}={own[key]}"
            for saved, own in zip(saved_groups, self.param_groups, strict=True)
            for key in self.SAVED_OPTIONS
            if key in saved and saved[key] != own[key]
        }
        if kept:
            logger.warning(
                "The checkpoint was written with %s, which is kept so that the run goes on as it began; %s is ignored.",
                ", ".join(kept),
                ", ".join(dict.fromkeys(kept.values())),
            )

    def _check_state(self, state: dict, group: dict, name: str, p: Tensor) -> None:
        specs = all_specs(self.codecs_of(group, p), p.shape)
        expected = {key: _describe(spec.shape, spec.dtype) for key, spec in specs.items()}
        expected["step"] = _describe((), torch.float32)
        numbers = self.numbers_of(group, p)
        if not isinstance(state, Mapping) or state.keys() != {*expected, *numbers}:
            raise self._other_moments(group, name, p)
        for key, value in numbers.items():  # numbers go on from where they were, words must be the same
            if type(state[key]) is not type(value) or (isinstance(value, str) and state[key] != value):
                raise self._other_moments(group, name, p)
        given = {key: _describe(v.shape, v.dtype) if torch.is_tensor(v) else repr(v) for key, v in state.items()}
        wrong = next((key for key in expected if given[key] != expected[key]), None)
        if wrong is not None:
            raise ValueError(
                f"This checkpoint's optimizer state is of another model: {wrong!r} of {name!r} is {given[wrong]} "
                f"where {expected[wrong]} is needed."
            )

    def _other_groups(self, saved_groups: list[dict], sizes: list[int], own_sizes: list[int]) -> str:
        """Why the groups differ, as far as the names tell."""
        groups = f"it has parameter groups of {sizes} tensors, {type(self).__name__} has {own_sizes}"
        saved_names = {name for g in saved_groups for name in g.get("param_names") or ()}
        own_names = {name for g in self.param_groups for name in g.get("param_names") or ()}
        if not saved_names or not own_names:
            return f"This checkpoint's optimizer state is of another model or grouping: {groups}."
        if saved_names == own_names:
            return (
                f"This checkpoint groups the same parameters otherwise ({groups}): "
                "set the same optim_args, optim_target_modules and weight_decay as in the run that wrote it."
            )
        difference = [f"{n!r} is only in the checkpoint" for n in sorted(saved_names - own_names)[:2]]
        difference += [f"{n!r} is only in this optimizer" for n in sorted(own_names - saved_names)[:2]]
        return (
            "This checkpoint's optimizer state is of another model, or other parameters are frozen: "
            f"{', '.join(difference)}."
        )

    def _other_moments(self, group: dict, name: str, p: Tensor) -> ValueError:
        return ValueError(
            f"This checkpoint keeps other moments for {name!r} than this optimizer, which treats it as "
            f"{self.treatment_of(group, p)}: "
            "set the same optim_args and optim_target_modules as in the run that wrote it."
        )


def name_in_group(group: dict, i: int) -> str | None:
    names = group.get("param_names")
    return names[i] if names else None


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
