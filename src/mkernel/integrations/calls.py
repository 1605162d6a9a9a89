"""Counts of the calls that an integration has served, and of those that it left to PyTorch.

A missed fusion is slow but not wrong, so it is easy to overlook. These counts make it visible. What torch.compile
traces is counted once, while it is traced: neither locks nor counters can be part of a graph.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mkernel.runtime.group_names import constant_in_graphs

_lock = threading.Lock()
_fused: Counter[str] = Counter()
_fell_back: dict[str, Counter[str]] = {}  # operator -> reason -> calls


@dataclass(frozen=True)
class Calls:
    """The calls of one operator on this rank.

    `fused`: those that mkernel computed. `fell_back`: those that PyTorch's implementation computed, by reason.
    """

    fused: int
    fell_back: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The calls of each operator on this rank since the start of the process or the last `reset`. Print it to read
    it."""

    operators: dict[str, Calls]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries, as for JSON: operator -> {"fused": calls, "fell_back": {reason: calls}}."""
        return {
            name: {"fused": calls.fused, "fell_back": dict(calls.fell_back)} for name, calls in self.operators.items()
        }

    def __str__(self) -> str:
        lines = []
        for name, calls in self.operators.items():
            others = sum(calls.fell_back.values())
            lines.append(f"{name}: {calls.fused} fused, {others} left to PyTorch" if calls.fused or others else
                         f"{name}: not called")  # fmt: skip
            lines += [f"    {count} x {reason}" for reason, count in calls.fell_back.items()]
        return "\n".join(lines)


def add(operator: str) -> None:
    """Let the report list an operator even if it is not called."""
    with _lock:
        _fell_back.setdefault(operator, Counter())


@constant_in_graphs
def count_fused(operator: str) -> None:
    with _lock:
        _fused[operator] += 1


@constant_in_graphs
def count_fallback(operator: str, reason: str) -> None:
    with _lock:
        _fell_back[operator][reason] += 1


def report() -> Report:
    """What was fused on this rank, what was left to PyTorch, and why."""
    with _lock:
        return Report({name: Calls(_fused[name], dict(reasons)) for name, reasons in sorted(_fell_back.items())})


def reset() -> None:
    """Set all counts to 0."""
    with _lock:
        _fused.clear()
        for reasons in _fell_back.values():
            reasons.clear()
