"""Happens-before in a simulated cluster, by vector clocks.

Everything that runs concurrently is a `Thread`: a CTA, its stores through descriptors and those through multicast
addresses, a request in flight, a proxy, the Python code of a rank. Each access to memory is an event with a number;
numbers grow. The *clock* of a thread has, for every thread, the last of its events that happened before whatever this
one does next. A clock grows by

- an acquire of a word that another thread has released (a signal, a counter);
- a start: a launch inherits the clocks of its rank's Python code, and of the launches before it on its stream;
- waiting for a launch, or for other ranks in an exchange.

A release covers what its CTA did before its last barrier: the GPU thread that releases covers the accesses of the
others only if a barrier comes between them and its release.

What a wait guarantees. `wait(signal, expected)` returns when the signal has reached the expected value. By then it may
be larger, but in another schedule it is not. So a wait acquires only what was released when the signal first reached
the expected value (`Word.since`), and a wait for the wrong epoch is found in every schedule.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EVERYTHING = np.iinfo(np.int32).max  # all events of a thread happen before its next one
ROOM = 256  # clocks grow by this many threads at a time
STEPS = 1000  # values of a word that are kept, at least

PATHS = {  # what accesses on a path need, by the name of what lets them know what the CTA knows
    "acquire_for_descriptors": "accesses through tensor descriptors need acquire_for_descriptors() after the wait",
    "fence_aliases": "accesses through multicast addresses need fence_aliases() after the wait",
    "fence_async_shared": "what TMA and the tensor cores access in shared memory, after it was stored with ordinary "
                          "instructions, needs fence_async_shared() between that and the arrival",
}  # fmt: skip

Clock = np.ndarray  # int32: by thread, its last event that happened before; 0 for threads beyond its end
NOTHING: Clock = np.zeros(0, dtype=np.int32)  # the empty clock


def joined(mine: Clock, theirs: Clock) -> Clock:
    """A new clock, the maximum of two."""
    if len(mine) < len(theirs):
        mine, theirs = theirs, mine
    result = mine.copy()
    known = result[: len(theirs)]
    np.maximum(known, theirs, out=known)
    return result


def only(thread: Thread, event: int) -> Clock:
    """A clock with the events of one thread, up to this one."""
    clock = np.zeros(thread.number + 1, dtype=np.int32)
    clock[thread.number] = event
    return clock


@dataclass(eq=False)
class Step:
    """A value of a word, and the clock that a wait for it gets."""

    value: int
    clock: Clock


@dataclass(eq=False)
class Word:
    """A word that CTAs synchronize by: what was released to it. initial: its value before."""

    initial: int
    clock: Clock = field(default_factory=lambda: NOTHING)
    steps: list[Step] = field(default_factory=list)  # of growing values

    def release(self, before: int, value: int, clock: Clock) -> None:
        """`before`: the value that the word had, which may differ from the last one that was released to it."""
        if self.steps and before > self.steps[-1].value:
            self.steps.append(Step(before, self.clock))
        self.initial = min(self.initial, before)
        self.clock = joined(self.clock, clock)
        if self.steps and min(before, value) < self.steps[-1].value:
            self.steps.clear()  # it was reset
        self.steps.append(Step(value, self.clock))
        if len(self.steps) > 2 * STEPS:
            del self.steps[:STEPS]

    def since(self, expected: int) -> Clock:
        """The clock that a wait for this value gets: what had been released when the word first reached it; nothing if
        it had that value from the start."""
        if expected <= self.initial:
            return NOTHING
        place = bisect.bisect_left(self.steps, expected, key=lambda step: step.value)
        return self.steps[place].clock if place < len(self.steps) else self.clock


class Thread:
    """Something that runs concurrently with others."""

    def __init__(self, number: int, name: str):
        self.number = number
        self.name = name
        self.last = 0  # its last event
        self.released_up_to = 0  # its last event that was released
        self.speaker = self  # the thread that releases and waits on its behalf
        self.completed_by = ""  # what its speaker must call before a release covers it; a barrier is always needed
        self.counted_by: Any = None  # the mbarrier to wait for, if it is loads by TMA
        self.warps_of: Hashable = None  # the CTA of which it is some warps
        self.begin(NOTHING)

    def begin(self, clock: Clock) -> None:
        """The thread starts, or starts again, with this clock."""
        self.clock = np.zeros(-(-max(len(clock), self.number + 1) // ROOM) * ROOM, dtype=np.int32)
        self.clock[: len(clock)] = clock
        self.clock[self.number] = EVERYTHING

    def acquire(self, clock: Clock) -> None:
        self.clock = joined(self.clock, clock)

    def knows_of(self, thread: Thread) -> int:
        return int(self.clock[thread.number]) if thread.number < len(self.clock) else 0

    def release_clock(self, up_to: int | None = None) -> Clock:
        """The clock that it releases: its own, with its own events up to this one; None means all."""
        clock = self.clock.copy()
        clock[self.number] = self.last if up_to is None else up_to
        return clock


class Cta:
    """The threads of one CTA: the one that computes, its atomic operations, and its stores on other paths, which are
    asynchronous.

    A release covers the atomic operations before it, with or without a barrier: one GPU thread executes them all. Loads
    on other paths are behind the clock of the CTA until a fence.
    """

    def __init__(self, main: Thread, atomics: Thread, descriptors: Thread, multicast: Thread):
        self.main, self.atomics, self.descriptors, self.multicast = main, atomics, descriptors, multicast
        self.descriptor_reads = main  # whose events loads through descriptors are
        main.acquire(only(atomics, EVERYTHING))
        for thread in (atomics, descriptors, multicast):
            thread.speaker = main
        descriptors.completed_by, multicast.completed_by = "complete_descriptor_stores", "fence_aliases"
        # word -> the clock acquired from it, unless a wait says that less is guaranteed: by a scalar operation, whose
        # result all GPU threads have; or by each thread separately, which covers all of them after a barrier (many
        # words without a wait are assumed to be combined by a reduction, which contains barriers)
        self._by_all: dict[int, Clock] = {}
        self._by_each: dict[int, Clock] = {}
        self._behind_barrier: list[Clock] = []
        self._acquired: dict[int, int] = {}  # words acquired since the last wait for them, and the value seen last
        self._cover()
        self.fence_descriptors()
        self.fence_multicast()

    def _cover(self) -> None:
        """From now on a release covers what was done so far."""
        self._covered = self.main.last
        self._covered_others = [self.main.knows_of(thread) for thread in (self.descriptors, self.multicast)]

    def acquired(self, word: int, clock: Clock, by_all: bool, value: int) -> None:
        """A word that had this value was acquired, by a scalar operation (by_all) or as one of many words."""
        (self._by_all if by_all else self._by_each)[word] = clock
        self._acquired[word] = value

    def guaranteed(self, word: int, expected: int, clock: Clock, by_all: bool) -> bool:
        """A wait for this value of the word has ended, and guarantees this clock. Return False if it has not acquired
        the word since it has that value."""
        if self._acquired.pop(word, expected - 1) < expected:
            return False
        if by_all:
            self._by_all.pop(word, None)
            self.main.acquire(clock)
        else:
            self._by_each.pop(word, None)
            self._behind_barrier.append(clock)
        return True

    def settle(self) -> bool:
        """Add all pending acquires to the clock. Return False if there were none."""
        if not self._by_all and not self._by_each:
            return False
        for clock in (*self._by_all.values(), *self._by_each.values()):
            self.main.acquire(clock)
        self._by_all.clear()
        self._by_each.clear()
        return True

    def barrier(self) -> None:
        for clock in (*self._behind_barrier, *self._by_each.values()):
            self.main.acquire(clock)
        self._behind_barrier.clear()
        self._by_each.clear()
        self._cover()

    def _release_clock(self, up_to: int | None = None) -> Clock:
        clock = self.main.release_clock(up_to)
        clock[self.atomics.number] = self.atomics.released_up_to = self.atomics.last
        return clock

    def released(self) -> Clock:
        """The clock of a release."""
        self.settle()
        clock = self._release_clock(self._covered)
        for thread, covered in zip((self.descriptors, self.multicast), self._covered_others):
            if thread.number < len(clock):
                clock[thread.number] = covered
        return clock

    def complete_descriptors(self) -> None:
        """Stores through descriptors have completed."""
        self.main.acquire(only(self.descriptors, self.descriptors.last))

    def fence_descriptors(self) -> None:
        """Accesses through descriptors get the clock of the CTA, with its own accesses up to its last barrier: each GPU
        thread fences its own."""
        self.settle()
        self.descriptors.acquire(self._release_clock(self._covered))

    def fence_multicast(self) -> None:
        """Loads through multicast addresses get the clock of the CTA, with its own accesses up to its last barrier;
        stores through them have completed."""
        self.settle()
        self.main.acquire(only(self.multicast, self.multicast.last))
        self.multicast.acquire(self._release_clock(self._covered))

    def ended(self) -> Clock:
        """The clock at the end of the CTA: everything it did, on all paths."""
        self.settle()
        for thread in (self.descriptors, self.multicast):
            self.main.acquire(only(thread, thread.last))
        return self._release_clock()
