"""How much memory a training takes, from running it on tensors without storage.

``simulate`` builds the model on the meta device and runs whole iterations on fake tensors: the model's own forward,
autograd's backward, the real optimizer with its real state, hooks and temporaries. No GPU is needed, nothing is
computed, and there is no formula that could drift from the code. The one piece that differs is the optimizer's kernel,
which works through pointers: its stand-in allocates what the Triton kernels do (``kernels/simulated.py``). And of
updates that are the same, operation by operation, one is carried out (``repeats.py``).

A builder of an optimizer may change the model: parameters that it adds (the carriers of CompAct) count as weights, and
what hooks of the step do (folding carriers into weights) as the optimizer's work.

``measure`` runs the same iterations on real tensors of the CPU, counted in the same way. The tests hold the two equal.

Not counted, because no framework code sees it: the CUDA context, workspaces inside kernels (cuBLAS, attention), and the
allocator's fragmentation. A GPU needs room for them beside these bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from .. import kernels
from ..optim.report import human_bytes
from .repeats import updates_once
from .storages import COMPONENTS, Kind, Peak, StorageLog, tensors_in

PHASES = ("forward", "backward", "step")
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class SimulatedMemory:
    """Bytes of the last iteration.

    ``phases`` has the peak of each of ``forward``, ``backward`` and ``step`` (with ``zero_grad``), ``after`` what is
    alive when each has ended. ``largest`` are the largest kinds of storages at the highest of these moments.
    ``first_peak_bytes`` is the highest moment of the iterations before, which allocate the state. ``parameters`` are
    those of the model as it was built.
    """

    phases: dict[str, Peak]
    after: dict[str, Peak]
    largest: tuple[Kind, ...]
    first_peak_bytes: int
    parameters: int
    tokens: int
    batch: int
    granularity: int
    seconds: float

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase].nbytes)

    @property
    def peak(self) -> Peak:
        """The highest moment of the iteration."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """The highest moment of all iterations."""
        return max(self.peak.nbytes, self.first_peak_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return {**asdict(self), "peak_bytes": self.peak_bytes, "peak_phase": self.peak_phase}

    def table(self) -> str:
        """Component by phase, as text."""
        lines = [("", *PHASES)]
        for component in COMPONENTS:
            if any(p.components[component] for p in self.phases.values()):
                lines.append((component, *(human_bytes(self.phases[p].components[component]) for p in PHASES)))
        lines.append(("peak", *(human_bytes(self.phases[p].nbytes) for p in PHASES)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        )


def causal_lm_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a transformers model computes itself."""
    return model(**batch, use_cache=False).loss


def simulate(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[nn.Module], Optimizer],
    *,
    tokens: int,
    batch: int = 1,
    gradient_checkpointing: bool | Literal["reentrant"] = True,
    steps: int = 2,
    loss: Loss = causal_lm_loss,
    granularity: int = 512,
    largest: int = 12,
) -> SimulatedMemory:
    """Run ``steps`` training iterations on fake tensors; the last one is reported.

    Args:
        build_model: Called with meta as the default device. What it returns is trained as it is: dtypes, ties and
            frozen parameters are its own.
        build_optimizer: Called with the fake model.
        tokens: Length of each of the ``batch`` sequences.
        gradient_checkpointing: The model's own, False for none, ``"reentrant"`` for the older implementation.
        steps: At least 2, because the first iteration allocates the state.
        loss: From the model and ``input_ids``, ``attention_mask``, ``labels`` (batch, tokens) int64 to a scalar.
        granularity: Every storage is rounded up to so many bytes; 512 is what CUDA's allocator does.
        largest: How many kinds of storages are listed.

    Raises:
        ValueError: An argument is out of range, or the model has no gradient checkpointing.
    """
    if isinstance(build_model, nn.Module):
        raise ValueError("simulate builds the model itself, without memory: pass a function that returns it.")
    options = _Options(tokens, batch, gradient_checkpointing, steps, loss, granularity, largest)
    with torch.device("meta"):
        model = build_model()
    log = StorageLog(granularity, fake=True)
    with FakeTensorMode(allow_non_fake_inputs=True), kernels.simulating(), updates_once(log):
        materialise(model)
        return _iterate(model, build_optimizer, options, log)


def measure(
    build_model: Callable[[], nn.Module], build_optimizer: Callable[[nn.Module], Optimizer], **options: Any
) -> SimulatedMemory:
    """The iterations of ``simulate``, with its ``options``, run on real tensors of the CPU and counted alike."""
    chosen = _Options(**options)
    return _iterate(build_model(), build_optimizer, chosen, StorageLog(chosen.granularity))


@dataclass(frozen=True)
class _Options:
    tokens: int
    batch: int = 1
    gradient_checkpointing: bool | str = True
    steps: int = 2
    loss: Loss = causal_lm_loss
    granularity: int = 512
    largest: int = 12

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("batch", 1), ("steps", 2), ("granularity", 1), ("largest", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.gradient_checkpointing not in (True, False, "reentrant"):
            raise ValueError(
                f"gradient_checkpointing must be True, False or 'reentrant', got {self.gradient_checkpointing!r}."
            )


def _iterate(
    model: nn.Module, build_optimizer: Callable[[nn.Module], Optimizer], options: _Options, log: StorageLog
) -> SimulatedMemory:
    began = time.perf_counter()
    _checkpoint(model, options.gradient_checkpointing)
    model.train()
    shape = options.batch, options.tokens
    with log.real():  # code may look at the batch: transformers asks whether a mask masks anything
        data = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "attention_mask": torch.ones(shape, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
        }
    parameters = list(model.parameters())
    log.label(data.values(), "other")
    log.label(parameters, "weights")
    log.label(model.buffers(), "buffers")
    marks, elements = [], sum(p.numel() for p in parameters)
    with log, _gradient_hooks(log, parameters, build_optimizer, model) as optimizer:
        parameters = list(model.parameters())
        for _ in range(options.steps):
            marks.append(log.position)
            with log.during("forward"):
                value = options.loss(model, data)
            marks.append(log.position)
            with log.during("backward"):
                value.backward()
            del value
            log.label((p.grad for p in parameters if p.grad is not None), "gradients")
            marks.append(log.position)
            with log.during("optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            log.label(tensors_in([dict(optimizer.state), _of_groups(optimizer)]), "optimizer state")
    *_, begin, forward, backward = marks
    ends = {"forward": forward, "backward": backward, "step": log.position}
    phases = {
        phase: log.peak(start, end)
        for (phase, end), start in zip(ends.items(), (begin, forward, backward), strict=True)
    }
    return SimulatedMemory(
        phases=phases,
        after={phase: log.at(end) for phase, end in ends.items()},
        largest=tuple(log.kinds(max(phases.values(), key=lambda p: p.nbytes).position)[: options.largest]),
        first_peak_bytes=log.peak(0, begin).nbytes,
        parameters=elements,
        tokens=options.tokens,
        batch=options.batch,
        granularity=options.granularity,
        seconds=time.perf_counter() - began,
    )


@contextmanager
def _gradient_hooks(
    log: StorageLog, parameters: list[Tensor], build_optimizer: Callable[[nn.Module], Optimizer], model: nn.Module
) -> Iterator[Optimizer]:
    """The optimizer, between two hooks of ours on each parameter: hooks run in the order in which they were registered.

    The first labels the gradient and opens the optimizer's section, for optimizers that update during backward; the
    last closes it. Parameters that the builder adds to the model get the first one as they are registered.
    """

    def opens(p: Tensor) -> None:
        log.label([p.grad], "gradients")
        log.section = "optimizer"

    def closes(p: Tensor) -> None:
        log.section = "backward"

    def added(module: nn.Module, name: str, p: nn.Parameter | None) -> None:
        if p is not None:
            log.label([p], "weights")
            if p.requires_grad:
                handles.append(p.register_post_accumulate_grad_hook(opens))

    handles = [p.register_post_accumulate_grad_hook(opens) for p in parameters if p.requires_grad]
    try:
        registration = register_module_parameter_registration_hook(added)
        try:
            with log.during("optimizer"):
                optimizer = build_optimizer(model)
        finally:
            registration.remove()
        handles += [p.register_post_accumulate_grad_hook(closes) for p in model.parameters() if p.requires_grad]
        yield optimizer
    finally:
        for handle in handles:
            handle.remove()


def _of_groups(optimizer: Optimizer) -> list[Any]:
    """What the groups hold beside their parameters."""
    return [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]


def _checkpoint(model: nn.Module, wanted: bool | str) -> None:
    if not wanted:
        return
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(f"{type(model).__name__} has no gradient checkpointing: set gradient_checkpointing=False.")
    reentrant = wanted == "reentrant"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()  # as PEFT does: a reentrant segment without such an input has no backward


def materialise(model: nn.Module) -> None:
    """Every parameter and buffer as a fake tensor on the CPU; tied ones stay tied."""
    made: dict[int, Tensor] = {}

    def fake(old: Tensor) -> Tensor:
        if id(old) not in made:
            new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
            is_parameter = isinstance(old, nn.Parameter)
            made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
        return made[id(old)]

    kept = []  # the meta tensors, so that no id is given twice
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    kept.append(old)
                    tensors[name] = fake(old)
