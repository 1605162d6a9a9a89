"""Operators with a rule of synchronisation broken on purpose: each broken variant must be caught in the first schedule
that is tried, in which the operator as it is passes.

A variant names the device functions that it breaks, and gives the function to call in place of each: the step left
out, or with a wrong value, or two steps in the wrong order. Such a function may call the one that it replaces."""

from __future__ import annotations

import contextlib
import functools
import importlib
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import pytest
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang import device, layout, signals
from mkernel.lang.gemm import store_tile
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.matrix import Tile
from mkernel.lang.signals import finish
from mkernel.runtime import group as runtime_group
from mkernel.sim.dtypes import KernelError
from support.operator_calls import run

WRONG = AssertionError  # a wrong result
RACE = mk.SimulatorError  # a race, or a load of what nobody has stored: which comes first depends on the schedule


# -- steps of lang/, broken


@triton.jit
def raise_relaxed(signal, value):
    tl.atomic_xchg(signal, value, sem="relaxed", scope="sys")


@triton.jit
def poll_relaxed(signal):
    return tl.atomic_add(signal, 0, sem="relaxed", scope="sys")


@triton.jit
def leave_fence_out():
    pass


@triton.jit
def finish_epoch_before(context, epoch, WORLD_SIZE: tl.constexpr):
    finish(context, epoch - 1, WORLD_SIZE)


@triton.jit
def always_even(epoch):
    return epoch * 0


@triton.jit
def word_without_halves(words, epoch, i, j):
    return words.start + tl.cast(i, tl.int64) * words.stride + j


@triton.jit
def slot_without_halves(slots, epoch, i, j):
    return slots.start + (tl.cast(i, tl.int64) * slots.stride + j) * slots.SIZE


@triton.jit
def word_far_away(words, epoch, i, j):
    return word_of(words, epoch, i, j) + (1 << 40)


@triton.jit
def slot_far_away(slots, epoch, i, j):
    return slot_of(slots, epoch, i, j) + (1 << 40)


@triton.jit
def take_slot_at_once(context, ring, posting, ticket, capacity, peer, ROLE: tl.constexpr):
    return ticket + 1


@triton.jit
def number_from_the_end():
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def store_tall_tile(c, tile, values):
    store_tile(c, Tile(tile.part, tile.row, 1 << 30, tile.column, tile.columns), values)


RELAXED_NOTIFY = {signals.raise_signal: raise_relaxed}
RELAXED_WAIT = {signals.poll: poll_relaxed}
NO_BARRIER = {signals.notify: signals.raise_signal}
NO_BARRIER_IN_LOOP = {signals.notify_in_loop: signals.raise_signal}
NO_FENCE_FOR_DESCRIPTORS = {device.acquire_for_descriptors: leave_fence_out}
EPOCH_STAYS = {signals.finish: finish_epoch_before}
ONE_HALF = {layout.parity: always_even}
ONE_HALF_OF_SIGNALS = {layout.word_of: word_without_halves}
ONE_HALF_OF_SLOTS = {layout.slot_of: slot_without_halves}


# -- what runs


@dataclass(frozen=True)
class SimulatedCalls:
    """Calls on a simulated cluster. A kind of scenario says which operator it is about, `op`, and what a rank
    does with it, `work(group)`.

    resident, ctas: options of the simulator; ring: requests that it holds.
    """

    cluster: tuple[int, int]
    _: KW_ONLY
    calls: int = 1
    resident: int | None = None
    ctas: int = 6
    ring: int = 256

    def run(self, seed, replace=None):
        """What `work` returns on each rank. replace: device functions, and those that are called in their place."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime_group, "RING_CAPACITY", self.ring)
            self.prepare(patch)
            return run(
                self.work, cluster=self.cluster, seed=seed, timeout=1e-4, resident=self.resident, ctas=self.ctas,
                replace=replace or {},
            )  # fmt: skip

    def prepare(self, patch):
        """Patches that a kind of scenario needs."""


@dataclass(frozen=True)
class Broken:
    """replace: device functions, and those that are called in their place; expected: how it shows; record: what the
    wait record must say; host: where the host's code is broken: the full name of a function, and another one."""

    scenario: SimulatedCalls
    replace: dict[Any, Any]
    expected: type | tuple[type, ...] = RACE
    record: dict[str, object] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)


@functools.cache
def passes_unbroken(scenario):
    scenario.run(seed=0)
    return True


@contextlib.contextmanager
def replaced_on_host(functions):
    """Inside, other functions are called in place of those with these names; each must be."""
    called = set()

    def noted(name, function):
        def call(*args, **kwargs):
            called.add(name)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, function in functions.items():
            module, _, attribute = name.rpartition(".")
            patch.setattr(importlib.import_module(module), attribute, noted(name, function))
        yield
    assert called == set(functions), "these were never called"


def failure_of(broken):
    """How the broken operator fails; the unbroken one does not."""
    assert broken.replace or broken.host
    assert passes_unbroken(broken.scenario)
    with replaced_on_host(broken.host), pytest.raises(broken.expected) as caught:
        broken.scenario.run(seed=0, replace=broken.replace)
    assert not isinstance(caught.value, KernelError), f"what Triton would not compile proves nothing: {caught.value}"
    return caught.value


def assert_caught(broken):
    """It fails as expected, and one of the records says what it must: other CTAs of the rank wait for the one that
    waits in vain, and may have been the first to give up."""
    failure = failure_of(broken)
    if broken.record:
        first = failure.record
        assert first.timed_out
        assert f"signal '{first.signal}' is {first.seen}, expected {first.expected}" in str(failure)
        assert all(record.op == broken.scenario.op for record in failure.records)
        assert broken.record in [{name: getattr(each, name) for name in broken.record} for each in failure.records]
