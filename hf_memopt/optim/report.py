"""What the optimizer holds, counted: per group the parameters, their treatment, bytes and bits a parameter.

Before the first step the bytes are the codecs' declarations, afterwards those of the real storages; a test keeps the
two equal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class GroupRow:
    """One line of the report. ``state_bytes`` are bytes, ``parameters`` counts elements, ``tensors`` counts tensors."""

    treatment: str
    reason: str
    weight_decay: float
    tensors: int
    parameters: int
    state_bytes: int

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.state_bytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class MemoryReport:
    """State of an optimizer. ``measured``: the bytes are of real storages (after the first step), not declared ones.

    ``stands_for`` is how many parameters of the model it trains, where that is not the number of its own: carriers
    stand for larger weights.
    """

    optimizer: str
    kernel: str
    rows: tuple[GroupRow, ...]
    measured: bool
    frozen_parameters: int | None = None
    stands_for: int | None = None

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows) if self.stands_for is None else self.stands_for

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.state_bytes / self.parameters if self.parameters else 0.0

    def as_dict(self) -> dict:
        """Plain numbers and strings, for JSON."""
        return {
            **asdict(self),
            "rows": [{**asdict(row), "bits_per_parameter": row.bits_per_parameter} for row in self.rows],
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "bits_per_parameter": self.bits_per_parameter,
        }

    def table(self) -> str:
        """The report as text, one line a group."""
        head = ("moments", "why", "decay", "tensors", "parameters", "bits/param", "state")
        lines = [
            (
                r.treatment,
                r.reason,
                f"{r.weight_decay:g}",
                f"{r.tensors:,}",
                f"{r.parameters:,}",
                f"{r.bits_per_parameter:.2f}",
                human_bytes(r.state_bytes),
            )
            for r in self.rows
        ]
        if self.frozen_parameters:
            lines.append(("none", "frozen", "", "", f"{self.frozen_parameters:,}", "0.00", human_bytes(0)))
        total = ("total", "measured" if self.measured else "declared", "", f"{sum(r.tensors for r in self.rows):,}")
        if self.stands_for is not None:
            own = sum(r.parameters for r in self.rows)
            lines.append(("", "weights that carriers stand for", "", "", f"{self.parameters - own:+,}", "", ""))
        lines.append((*total, f"{self.parameters:,}", f"{self.bits_per_parameter:.2f}", human_bytes(self.state_bytes)))
        widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
        text = [f"{self.optimizer}, kernel {self.kernel}; fp32 AdamW would keep {human_bytes(8 * self.parameters)}"]
        for row in [head, *lines]:
            left = [cell.ljust(w) for cell, w in zip(row[:2], widths[:2], strict=True)]
            right = [cell.rjust(w) for cell, w in zip(row[2:], widths[2:], strict=True)]
            text.append("  " + "  ".join(left + right))
        return "\n".join(text)


def human_bytes(n: float) -> str:
    """1536 -> '1.50 KiB'."""
    for unit in _UNITS:
        if n < 1024 or unit == _UNITS[-1]:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def storage_bytes(state: dict) -> int:
    """Bytes of the distinct storages behind the tensors of one parameter's state."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in state.values()
        if torch.is_tensor(t) and t.numel()
    }
    return sum(storages.values())
