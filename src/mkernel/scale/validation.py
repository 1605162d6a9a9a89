"""The model beside what was measured: emulated figures of one H200 that several ranks share, see measured.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mkernel.operators import Shape
from mkernel.scale.machine import load
from mkernel.scale.predict import emulated

ASIDE = "kept aside"


@dataclass(frozen=True)
class Point:
    """A measurement and what the model says. Times in ms. use: "kept aside", or what it calibrates."""

    op: str
    nodes: int
    ranks: int
    shape: Shape
    options: dict[str, Any]
    readme: bool
    use: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_emulated(self) -> bool:
        """Do several ranks share the GPU?"""
        return self.nodes * self.ranks > 1


def measured_rows() -> list[dict[str, Any]]:
    return json.loads(resources.files("mkernel.scale").joinpath("measured.json").read_text())["rows"]


def points(machine: str = "h200-cx7") -> list[Point]:
    """Every measurement beside the model."""
    found = []
    for row in measured_rows():
        nodes, ranks, options = row["nodes"], row["ranks"], row["options"]
        # without zigzag, the last rank of a causal mask has the most work
        rank = nodes * ranks - 1 if options.get("causal") and not options.get("zigzag") else 0
        prediction = emulated(
            row["op"], tuple(row["shape"]), load(machine), nodes=nodes, ranks=ranks, options=options, rank=rank
        )
        found.append(
            Point(
                row["op"], nodes, ranks, tuple(row["shape"]), options, row["readme"], row["use"], row["ms"],
                prediction.seconds * 1e3,
            )
        )  # fmt: skip
    return found


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
