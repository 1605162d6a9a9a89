"""Happens-before: who knows of what in a simulated cluster.

Everything that acts by itself is a `Thread`: a CTA, its stores through descriptors and those through multicast
addresses, a request in flight, a proxy, a rank's Python code. Each access to memory is an event with a number; numbers
grow. A thread's *clock* says, for every thread, up to which of its events this one knows of: they came before whatever
it does next. It learns by

- an acquire of a word that another has released (a signal, a counter);
- being started: a launch knows what its rank's Python code, and the launches before it on its stream, knew;
- waiting for a launch, or for other ranks in an exchange.

A release tells what its CTA did before its last barrier: the thread of the GPU that releases speaks for the others only
if a barrier stands between their accesses and its release.

What a wait guarantees. `wait(signal, expected)` returns when the signal has reached what was expected; by then it may
have gone further, and in another schedule it has not. So a wait tells only what was released when the signal first
reached the expected value (`Word.since`). A wait for the wrong epoch is found in every schedule.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np

EVERYTHING = np.iinfo(np.int32).max  # of its own events a thread knows all
ROOM = 256  # clocks have places for a multiple of so many threads
STEPS = 1000  # values of a word that are kept apart, at least

Clock = np.ndarray  # int32: by thread, the last of its events that is known; what is not in it is not known
NOTHING: Clock = np.zeros(0, dtype=np.int32)  # known


def joined(mine: Clock, theirs: Clock) -> Clock:
    """A new clock that knows what either knows."""
    if len(mine) < len(theirs):
        mine, theirs = theirs, mine
    result = mine.copy()
    known = result[: len(theirs)]
    np.maximum(known, theirs, out=known)
    return result


def _of(thread: Thread, event: int) -> Clock:
    """A clock that knows this thread's events, up to one of them."""
    clock = np.zeros(thread.number + 1, dtype=np.int32)
    clock[thread.number] = event
    return clock


@dataclass(eq=False)
class Step:
    """A word has got a value, and whoever waited for it knows this much."""

    value: int
    clock: Clock


@dataclass(eq=False)
class Word:
    """A word that CTAs synchronise by: what was released to it. initial: its value before that."""

    initial: int
    clock: Clock = field(default_factory=lambda: NOTHING)
    steps: list[Step] = field(default_factory=list)  # values that only grow

    def release(self, before: int, value: int, clock: Clock) -> None:
        """The word had the value `before`: that may be another than the last that was released to it."""
        if self.steps and before > self.steps[-1].value:
            self.steps.append(Step(before, self.clock))
        self.initial = min(self.initial, before)
        self.clock = joined(self.clock, clock)
        if self.steps and min(before, value) < self.steps[-1].value:
            self.steps.clear()  # it has begun again
        self.steps.append(Step(value, self.clock))
        if len(self.steps) > 2 * STEPS:
            del self.steps[:STEPS]

    def since(self, expected: int) -> Clock:
        """What a wait for this value guarantees: what was known when the word first reached it, and nothing if it had
        that value from the start."""
        if expected <= self.initial:
            return NOTHING
        place = bisect.bisect_left(self.steps, expected, key=lambda step: step.value)
        return self.steps[place].clock if place < len(self.steps) else self.clock


class Thread:
    """One that acts by itself."""

    def __init__(self, number: int, name: str):
        self.number = number
        self.name = name
        self.last = 0  # its last event
        self.released_up_to = 0  # the last event that others may know of
        self.speaker = self  # who releases for it, and waits
        self.completed_by = ""  # what its speaker must call before a release speaks for it; a barrier is always needed
        self.begin(NOTHING)

    def begin(self, clock: Clock) -> None:
        """The thread starts, or starts again, knowing this."""
        self.clock = np.zeros(-(-max(len(clock), self.number + 1) // ROOM) * ROOM, dtype=np.int32)
        self.clock[: len(clock)] = clock
        self.clock[self.number] = EVERYTHING

    def acquire(self, clock: Clock) -> None:
        self.clock = joined(self.clock, clock)

    def knows_of(self, thread: Thread) -> int:
        return int(self.clock[thread.number]) if thread.number < len(self.clock) else 0

    def release_clock(self, up_to: int | None = None) -> Clock:
        """What it tells: all it knows, and its own events up to one of them; None is all."""
        clock = self.clock.copy()
        clock[self.number] = self.last if up_to is None else up_to
        return clock


class Cta:
    """The threads of one CTA: the one that computes, its atomic operations, and its stores on other paths, which nobody
    waits for unless told.

    A release speaks for atomic operations before it, with or without a barrier: one thread of the GPU does them all.
    What loads on other paths may know is less than what the CTA knows, until a fence.
    """

    def __init__(self, main: Thread, atomics: Thread, descriptors: Thread, multicast: Thread):
        self.main, self.atomics, self.descriptors, self.multicast = main, atomics, descriptors, multicast
        main.acquire(_of(atomics, EVERYTHING))
        for thread in (atomics, descriptors, multicast):
            thread.speaker = main
        descriptors.completed_by, multicast.completed_by = "complete_descriptor_stores", "fence_aliases"
        # word -> what was acquired from it, unless a wait says that less is guaranteed: by a scalar operation, whose
        # result all threads of the GPU have; and by each for itself, so that all may rely on it behind a barrier
        # (many words without a wait are taken to be brought together by a reduction, which has barriers in it)
        self._by_all: dict[int, Clock] = {}
        self._by_each: dict[int, Clock] = {}
        self._behind_barrier: list[Clock] = []
        self._acquired: set[int] = set()  # words that no wait has said anything about since
        self._cover()
        self.fence_descriptors()
        self.fence_multicast()

    def _cover(self) -> None:
        """A release speaks for what was done until now."""
        self._covered = self.main.last
        self._covered_others = [self.main.knows_of(thread) for thread in (self.descriptors, self.multicast)]

    def acquired(self, word: int, clock: Clock, by_all: bool) -> None:
        """A word was acquired, by a scalar operation or by one of many words."""
        (self._by_all if by_all else self._by_each)[word] = clock
        self._acquired.add(word)

    def guaranteed(self, word: int, clock: Clock, by_all: bool) -> bool:
        """A wait for the word is over, and guarantees this much, if it has acquired the word. False if it has not."""
        if word not in self._acquired:
            return False
        self._acquired.remove(word)
        if by_all:
            self._by_all.pop(word, None)
            self.main.acquire(clock)
        else:
            self._by_each.pop(word, None)
            self._behind_barrier.append(clock)
        return True

    def settle(self) -> bool:
        """Take what was acquired for granted. False if there was nothing."""
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
        """What a release tells."""
        self.settle()
        clock = self._release_clock(self._covered)
        for thread, covered in zip((self.descriptors, self.multicast), self._covered_others):
            if thread.number < len(clock):
                clock[thread.number] = covered
        return clock

    def complete_descriptors(self) -> None:
        """Stores through descriptors are done."""
        self.main.acquire(_of(self.descriptors, self.descriptors.last))

    def fence_descriptors(self) -> None:
        """Accesses through descriptors know what the CTA knows now and, of its own accesses, those before its last
        barrier: each thread of the GPU fences its own."""
        self.settle()
        self.descriptors.acquire(self._release_clock(self._covered))

    def fence_multicast(self) -> None:
        """Loads through multicast addresses know what the CTA knows now and, of its own accesses, those before its last
        barrier; stores through them are done."""
        self.settle()
        self.main.acquire(_of(self.multicast, self.multicast.last))
        self.multicast.acquire(self._release_clock(self._covered))

    def ended(self) -> Clock:
        """What is known when the CTA has ended: all it did, on all paths."""
        self.settle()
        for thread in (self.descriptors, self.multicast):
            self.main.acquire(_of(thread, thread.last))
        return self._release_clock()
