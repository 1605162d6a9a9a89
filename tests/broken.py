"""Operators with a rule of synchronisation broken on purpose: each broken copy must be caught in the first schedule
that is tried, in which the operator as it is passes."""

from __future__ import annotations

import functools
import importlib
from dataclasses import KW_ONLY, dataclass, field

import pytest
from helpers import run
from mutation import module_name, mutated

import mkernel as mk
from mkernel.runtime import group as runtime_group

WRONG = AssertionError  # a wrong result
RACE = mk.SimulatorError  # a race, or a load of what nobody has stored: which comes first depends on the schedule

RELAXED_NOTIFY = [("signals", 'value, sem="release"', 'value, sem="relaxed"')]
RELAXED_WAIT = [("signals", 'tl.atomic_add(signal, 0, sem="acquire"', 'tl.atomic_add(signal, 0, sem="relaxed"')]
NO_BARRIER = [("signals", "    tl.debug_barrier()\n    tl.atomic_xchg(signal", "    tl.atomic_xchg(signal")]


@dataclass(frozen=True)
class SimulatedCalls:
    """Calls on a simulated cluster. A kind of scenario says which operator it is about, `op`, and what a rank
    does with it, `work(group, function)`; and in which module of ops/ the operator is, if that has another name.

    resident, ctas: options of the simulator; ring: requests that it holds.
    """

    cluster: tuple[int, int]
    _: KW_ONLY
    calls: int = 1
    resident: int | None = None
    ctas: int = 6
    ring: int = 256

    def run(self, module, seed):
        """What `work` returns on each rank, with the operator of `module`: mkernel's, or that of a copy."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime_group, "RING_CAPACITY", self.ring)
            self.prepare(module, patch)
            return run(
                self.work, getattr(module, self.op), cluster=self.cluster, seed=seed, timeout=1e-4,
                resident=self.resident, ctas=self.ctas,
            )  # fmt: skip

    def prepare(self, module, patch):
        """Patches that a kind of scenario needs."""

    def run_unbroken(self, seed):
        return self.run(importlib.import_module(f"mkernel.{module_name(self.op)}"), seed)


@dataclass(frozen=True)
class Broken:
    """replacements: (file, old, new), as `mutated` takes them; expected: how it shows; record: what the wait
    record must say."""

    scenario: SimulatedCalls
    replacements: list[tuple[str, str, str]]
    expected: type | tuple[type, ...] = RACE
    record: dict[str, object] = field(default_factory=dict)


@functools.cache
def passes_unbroken(scenario):
    scenario.run_unbroken(seed=0)
    return True


def failure_of(broken, folder):
    """How the broken operator fails; the unbroken one does not."""
    assert passes_unbroken(broken.scenario)
    module = mutated(folder, broken.scenario.op, *broken.replacements)
    with pytest.raises(broken.expected) as caught:
        broken.scenario.run(module, seed=0)
    return caught.value


def assert_caught(broken, folder):
    """It fails as expected, and one of the records says what it must: other CTAs of the rank wait for the one that
    waits in vain, and may have been the first to give up."""
    failure = failure_of(broken, folder)
    if broken.record:
        first = failure.record
        assert first.timed_out
        assert f"signal '{first.signal}' is {first.seen}, expected {first.expected}" in str(failure)
        assert all(record.op == broken.scenario.op for record in failure.records)
        assert broken.record in [{name: getattr(each, name) for name in broken.record} for each in failure.records]
