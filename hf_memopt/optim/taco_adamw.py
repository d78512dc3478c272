r"""AdamW whose two moments are stored as ternary codes: 3.3 bits a parameter instead of 64.

For a matrix W (n x k) with gradient G, step t from 1; q is the decoded first moment, d the exponent of the second:

    m    = b1 q + (1 - b1) G
    R, C = b2 R + (1 - b2) mean_cols(G^2),   b2 C + (1 - b2) mean_rows(G^2)
    v    = b2 (R_old C_old / mean R_old) 4^d + (1 - b2) G^2
    q'   = ternary(m)
    d'   = stochastic rounding of log4(v mean R / (R C)) onto {-1, 0, 1}
    U    = (m / (1 - b1^t) + carry_t (m - q')) / (sqrt(v / (1 - b2^t)) + eps)
    W    = W (1 - lr wd) - lr U                                   stored: q', d', R, C, t

The remainder m - q' is what a code cannot hold. Dropped, it is a bias; rounded stochastically, it is noise that later
steps amplify by b1 / (1 - b1). But momentum is linear: the piece would have moved the weight by lr (m - q') (b1 + b1^2
+ ...) over the coming steps, each term over its own bias correction. The carry applies exactly that sum now. No
gradient is lost, no noise is added, and no error buffer is needed; what is given up is timing (the piece acts at this
step's learning rate and second moment).

This is not the optimizer of arXiv 2610.02199, which is also called TACO: that one stores a few FP8 gradient entries a
column.

Vectors and matrices under 4096 elements keep fp32 moments (``param_groups.py``). Weights in bf16 or fp16 are written
back with stochastic rounding: otherwise every update below half a unit in the last place would vanish. A gradient with
NaN or Inf leaves its parameter and its state as they were and is counted in ``skipped_steps``. The random numbers are a
hash of (seed, parameter name, step, element), so no generator is stored and resuming is bit-equal.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..codecs.base import matrix_shape
from ..codecs.dense import Dense
from ..codecs.ternary import TernaryFirstMoment, TernarySecondMoment
from ..kernels import reference
from ..kernels.folded import Folded, as_matrix
from ..kernels.scalars import StepScalars, parameter_key
from .answers import Answers
from .base import CodecOptimizer
from .checks import check_bool, check_options, is_number
from .loading import FORMAT_VERSION
from .statistics import CodeStatistics


class TacoAdamW(CodecOptimizer):
    """AdamW with ternary moments; equations in the module's docstring.

    Args:
        params: tensors, (name, tensor) pairs, or groups. A group may set ``treatment`` to ``auto`` (the default:
            matrices of at least 4096 elements are ternary), ``ternary`` or ``dense``. Names seed the random
            numbers; without names the position does.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW`` (decoupled decay, the same defaults).
        maximize: ascend instead of descend.
        seed: of the stochastic rounding.
        stochastic_rounding: write bf16 and fp16 weights back with stochastic rounding (fp32 weights are never rounded).
        kernel: ``auto``, ``reference``, ``compiled``, ``triton`` or ``inductor``; all give the same numbers
            (``kernels/__init__.py``).
        update_in_backward: step each parameter as soon as its gradient is complete and free the gradient
            (``optim/backward.py``). ``step()`` then ends the step; accumulation and clipping of the global norm are
            impossible.
        clip_per_parameter: with ``update_in_backward``, the largest L2 norm of each parameter's gradient.
        more_defaults: a subclass's group options.

    Raises:
        ValueError: an option or a parameter is out of range; the sentence names it.
    """

    NAME = "TacoAdamW"
    CODECS = {
        "ternary": {"exp_avg": TernaryFirstMoment(), "exp_avg_sq": TernarySecondMoment()},
        "dense": {"exp_avg": Dense(), "exp_avg_sq": Dense()},
    }

    SAVED_OPTIONS = ("seed", "stochastic_rounding")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        seed: int = 0,
        stochastic_rounding: bool = True,
        kernel: str = "auto",
        update_in_backward: bool = False,
        clip_per_parameter: float | None = None,
        more_defaults: dict[str, Any] | None = None,
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "seed": seed,
            "stochastic_rounding": stochastic_rounding,
        }
        check_options(own)
        check_bool("update_in_backward", update_in_backward)
        if kernel not in kernels.KERNELS:
            raise ValueError(f"kernel={kernel!r} is not a kernel: choose one of {', '.join(kernels.KERNELS)}.")
        if clip_per_parameter is not None:
            if not is_number(clip_per_parameter) or not 0.0 < clip_per_parameter < float("inf"):
                raise ValueError(f"clip_per_parameter must be a finite number above 0, got {clip_per_parameter!r}.")
            if not update_in_backward:
                raise ValueError(
                    "clip_per_parameter is for update_in_backward=True: otherwise clip the global norm before step()."
                )
        self.kernel = kernel
        self._start(update_in_backward, clip_per_parameter)
        defaults = {
            **own,
            "betas": tuple(betas),
            "treatment": "auto",
            "format_version": FORMAT_VERSION,
            "optimizer": self.NAME,
            **(more_defaults or {}),
        }
        super().__init__(params, defaults)

    def _start(self, *args: Any, **kwargs: Any) -> None:
        super()._start(*args, **kwargs)
        self._statistics_wanted = False
        self._statistics: dict[str, float] = {}
        self._sample: CodeStatistics | None = None
        self._answers = Answers()
        self._backends: dict[str, ModuleType] = {}

    def __getstate__(self) -> dict[str, Any]:
        self._answers.settle()
        return {**super().__getstate__(), "kernel": self.kernel}

    def _prepare_step(self) -> None:
        self._answers.settle()
        self._sample = CodeStatistics() if self._statistics_wanted else None
        self._backends = {}

    def _end_step(self) -> None:
        self._answers.send()
        if self._sample is not None:
            self._statistics, self._statistics_wanted, self._sample = self._sample.result(), False, None

    def _backend(self, p: Tensor) -> ModuleType:
        device = p.device.type
        return self._backends.get(device) or self._backends.setdefault(device, kernels.select(self.kernel, device)[1])

    def _update(self, group: dict, name: str, p: Tensor) -> None:
        state = self.state_of(group, p)
        scalars = StepScalars.at_step(
            int(state["step"]) + 1,
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            parameter_key=parameter_key(group["seed"], name),
            stochastic=group["stochastic_rounding"],
            maximize=group["maximize"],
        )
        if p.numel() == 0:
            state["step"] += 1
            return
        applied = self._update_matrix(group, p, state, scalars)
        torch.autograd.graph.increment_version(p)  # kernels that write through pointers do not
        self._count(state, applied)

    def _update_matrix(self, group: dict, p: Tensor, state: dict, scalars: StepScalars) -> bool | Tensor:
        """Update a parameter that is not empty; whether that was done, as ``_count`` takes it."""
        shape = matrix_shape(p.shape)
        weight, grad = as_matrix(p, shape), as_matrix(p.grad, shape)
        strided = not isinstance(weight, Folded) and not isinstance(grad, Folded)
        backend = self._backend(p) if strided else reference  # the reference works on any strides
        if self.treatment_of(group, p) == "ternary":
            before = self._sample.before(grad, state, scalars) if self._sample is not None else None
            applied = backend.ternary_adamw_(weight, grad, state, scalars)
            if self._sample is not None and bool(applied):
                self._sample.after(before, state, p.numel())
        else:
            buffers = {key: state[key].view(shape) for key in ("exp_avg", "exp_avg_sq")}
            applied = backend.dense_adamw_(weight, grad, buffers, scalars)
        return applied

    def _count(self, state: dict, applied: bool | Tensor) -> None:
        """Count an applied or a skipped step; a tensor is an answer that lies on a GPU."""
        if torch.is_tensor(applied):
            self._answers.add(state, applied)
        elif applied:
            state["step"] += 1
        else:
            state["skipped"] += 1

    def state_dict(self) -> dict[str, Any]:
        self._answers.settle()
        return super().state_dict()

    @property
    def skipped_steps(self) -> int:
        self._answers.settle()
        return super().skipped_steps

    def request_statistics(self) -> None:
        """Sample the codes in the next step; read them from ``statistics`` afterwards."""
        self._statistics_wanted = True

    @property
    def statistics(self) -> dict[str, float]:
        """``zero_share``, ``changed_share``, ``carried_energy`` of the last sampled step; empty before the first."""
        return dict(self._statistics)

    def kernel_name(self) -> str:
        devices = dict.fromkeys(p.device.type for group in self.param_groups for p in group["params"])
        return ", ".join(dict.fromkeys(kernels.select(self.kernel, d)[0] for d in devices)) or self.kernel
