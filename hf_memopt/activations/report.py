"""What was done to a model, in words: compressed layers and whom they share with, recomputed modules, skipped ones."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from ..options import CompActConfig


@dataclass(frozen=True)
class LayerRow:
    """A compressed layer of ``features`` inputs and ``outputs``, at ``rank``; ``reads_with`` is the layer whose basis
    it shares, itself if none (known after the first forward)."""

    name: str
    features: int
    rank: int
    reads_with: str
    outputs: int


@dataclass(frozen=True)
class Skipped:
    """A module with a matrix that is left alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class CompressionReport:
    """``recomputed`` has the entries of ``recompute.py``."""

    config: CompActConfig
    layers: tuple[LayerRow, ...]
    skipped: tuple[Skipped, ...]
    recomputed: tuple[Any, ...]

    @property
    def weights(self) -> int:
        """Elements of the compressed weights."""
        return sum(row.features * row.outputs for row in self.layers)

    @property
    def carriers(self) -> int:
        """Elements of the carriers, which the optimizer sees instead."""
        return sum(row.rank * row.outputs for row in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return {
            **asdict(self),
            "weights": self.weights,
            "carriers": self.carriers,
        }

    def table(self) -> str:
        """One line for each kind of layer; numbers in names are written as ``*``."""
        lines: dict[tuple[str, ...], int] = {}
        for row in self.layers:
            own = row.reads_with == row.name
            what = f"compressed, rank {row.rank} of {row.features}"
            if row.rank == row.features:
                what = "carrier, all inputs"
            if not own:
                what += f", shares z with {row.reads_with.rpartition('.')[2]}"
            count_kind(lines, row.name, what)
        for skipped in self.skipped:
            count_kind(lines, skipped.name, f"left alone: {skipped.reason}")
        for entry in self.recomputed:
            count_kind(lines, entry.name, entry.outcome)
        head = (
            f"Activations: {len(self.layers)} linear layers compressed ({self.config.projection}); the optimizer sees "
            f"{self.carriers:,} carriers for {self.weights:,} weights"
            if self.layers
            else "Activations: no linear layer compressed"
        )
        return as_text(head, lines)


def count_kind(lines: dict[tuple[str, ...], int], name: str, what: str) -> None:
    """One more of the modules whose names differ in numbers only and of which ``what`` is to be said."""
    key = (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), what)
    lines[key] = lines.get(key, 0) + 1


def as_text(head: str, lines: dict[tuple[str, ...], int]) -> str:
    """``head``, and below it a line for each kind that ``count_kind`` has counted."""
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join([head, *(f"  {n.ljust(width)}  x{count:<4} {what}" for (n, what), count in lines.items())])
