"""Operators with a rule of synchronisation broken on purpose: each broken copy must be caught within a few seeds,
and the operator as it is must pass with the same seeds."""

from __future__ import annotations

import functools
import importlib
from dataclasses import KW_ONLY, dataclass, field

import pytest
from helpers import run
from mutation import mutated

import mkernel as mk
from mkernel.runtime import group as runtime_group
from mkernel.sim.scheduler import CtaTask, Scheduler

SEEDS = 20
WRONG = AssertionError  # a wrong result
ANY = (WRONG, mk.CommTimeout, mk.SimulatorError)

RELAXED_NOTIFY = [("signals", 'value, sem="release"', 'value, sem="relaxed"')]
RELAXED_WAIT = [("signals", 'tl.atomic_add(signal, 0, sem="acquire"', 'tl.atomic_add(signal, 0, sem="relaxed"')]
NO_BARRIER = [("signals", "    tl.debug_barrier()\n    tl.atomic_xchg(signal", "    tl.atomic_xchg(signal")]


def run_last(patch, rank, cta):
    """Let a CTA run only when nothing else can, and then up to the next point where others may."""
    choose, pause = Scheduler._choose, Scheduler.pause

    def is_last(task):
        return isinstance(task, CtaTask) and (task.rank, task.program_id) == (rank, cta)

    def choose_others(scheduler, ready):
        return choose(scheduler, [task for task in ready if not is_last(task)] or ready)

    def pause_at_once(scheduler, task):
        if is_last(task):
            scheduler.steps += 1
            scheduler.hub.switch()
        else:
            pause(scheduler, task)

    patch.setattr(Scheduler, "_choose", choose_others)
    patch.setattr(Scheduler, "pause", pause_at_once)


@dataclass(frozen=True)
class SimulatedCalls:
    """Calls on a simulated cluster. A kind of scenario says which operator it is about, `op`, and what a rank
    does with it, `work(group, function)`.

    slow: a rank that hardly runs; last: (rank, CTA) that runs only when nothing else can; resident, ctas: options of
    the simulator; ring: requests that it holds.
    """

    cluster: tuple[int, int]
    _: KW_ONLY
    calls: int = 2
    slow: int | None = None
    last: tuple[int, int] | None = None
    resident: int | None = None
    ctas: int = 6
    ring: int = 256

    def run(self, module, seed):
        """What `work` returns on each rank, with the operator of `module`: mkernel's, or that of a copy."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime_group, "RING_CAPACITY", self.ring)
            if self.last is not None:
                run_last(patch, *self.last)
            self.prepare(module, patch)
            return run(
                self.work, getattr(module, self.op), cluster=self.cluster, seed=seed, timeout=1e-4,
                slow={} if self.slow is None else {self.slow: 0.02}, resident=self.resident, ctas=self.ctas,
            )  # fmt: skip

    def prepare(self, module, patch):
        """Patches that a kind of scenario needs."""

    def run_unbroken(self, seed):
        return self.run(importlib.import_module(f"mkernel.ops.{self.op}"), seed)


@dataclass(frozen=True)
class Broken:
    """replacements: (file, old, new), as `mutated` takes them; expected: how it shows; record: what the wait
    record must say."""

    scenario: SimulatedCalls
    replacements: list[tuple[str, str, str]]
    expected: type | tuple[type, ...] = WRONG
    record: dict[str, object] = field(default_factory=dict)


@functools.cache
def passes_unbroken(scenario, seed):
    scenario.run_unbroken(seed)
    return True


def failure_of(broken, folder):
    """How the broken operator fails first; the unbroken one passes with all seeds up to that."""
    module = mutated(folder, broken.scenario.op, *broken.replacements)
    for seed in range(SEEDS):
        assert passes_unbroken(broken.scenario, seed)
        try:
            broken.scenario.run(module, seed)
        except broken.expected as failure:
            return failure
    raise LookupError(f"nobody noticed in {SEEDS} schedules")


def assert_caught(broken, folder):
    """It fails as expected, and the first record says what it must."""
    failure = failure_of(broken, folder)
    if broken.record:
        record = failure.record
        assert record.timed_out
        assert record.op == broken.scenario.op
        assert record.peer != record.rank
        assert {name: getattr(record, name) for name in broken.record} == broken.record
        assert f"signal '{record.signal}' is {record.seen}, expected {record.expected}" in str(failure)
