"""Whether a parameter's gradient was finite, as kernels on a GPU answer it: a flag there, which nobody should wait for.

Counters are moved as if every step had been applied. The flags of a step are copied to the host without waiting when it
ends, and read when the next one begins, by which time they have long arrived; a step that was skipped is then taken
back from its parameter's counter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Answers:
    """The outstanding flags of an optimizer: ``add`` one a parameter, ``send`` at the end of a step, ``settle`` before
    the counters are looked at."""

    def __init__(self) -> None:
        self._states: dict[torch.device, list[dict]] = {}
        self._flags: dict[torch.device, list[Tensor]] = {}
        self._sent: list[tuple[list[dict], Tensor, torch.cuda.Event | None]] = []

    def add(self, state: dict, applied: Tensor) -> None:
        """Count a step that ``applied`` (bool, one element) says was made."""
        state["step"] += 1
        if not isinstance(applied, FakeTensor):  # a simulation has no data: every step counts as made
            self._states.setdefault(applied.device, []).append(state)
            self._flags.setdefault(applied.device, []).append(applied)

    def send(self) -> None:
        """Start copying what was added to the host."""
        for device, flags in self._flags.items():
            on_gpu = device.type == "cuda"
            host = torch.empty(len(flags), dtype=torch.bool, pin_memory=on_gpu)
            host.copy_(torch.stack(flags), non_blocking=on_gpu)
            event = None
            if on_gpu:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            self._sent.append((self._states[device], host, event))
        self._states, self._flags = {}, {}

    def settle(self) -> None:
        """Read all flags and take back the steps that were skipped."""
        self.send()
        for states, host, event in self._sent:
            if event is not None:
                event.synchronize()
            for state, applied in zip(states, host.tolist(), strict=True):
                if not applied:
                    state["step"] -= 1
                    state["skipped"] += 1
        self._sent = []
