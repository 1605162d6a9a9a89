"""The race detector: finds unordered conflicting accesses, and loads of undefined memory.

Two accesses to a byte conflict if at least one of them is a store, unless both are atomic. One must happen before the
other (`order.py`). Every access is checked against the last store to each byte and the loads since (`shadow.py`), so a
missing wait, signal, barrier or fence is an error in every schedule, whatever the values.

Since every race is found, the simulated memory need not be weak: a program without races sees the same values in a weak
memory as in this one, in which stores take effect at once.

Covered: loads and stores of CTAs, plain, through tensor descriptors and through multicast addresses; their atomics;
reads and writes of the network; and what the Python code of a rank may do with its tensors after a call has returned.
Not covered: races between the threads of one CTA, and memory that is shared with other processes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from mkernel.runtime.errors import RaceError, SimulatorError
from mkernel.sim.order import NOTHING, PATHS, Clock, Cta, Thread, Word, joined
from mkernel.sim.shadow import SPENT, UNWRITTEN, Access, Shadow

SIMULATOR_FRAMES = 4  # the fewest frames of the simulator between a line of a kernel and where it is recorded
FRAMES = 8  # kernel functions of a site, from the innermost
WAITS = 16  # and waits
NETWORK = -1  # NETWORK - rank stands for the network of a rank among the users of a word
RELEASES = 64  # of a thread that are kept, to say which of them would have ordered an access
_PACKAGE = Path(__file__).parent.parent

Site = tuple[tuple[CodeType, int], ...]  # code and line, the innermost first


@dataclass(frozen=True)
class Release:
    """A release of a word by a thread, and the clock that it released."""

    word: int
    value: int
    releases: Clock
    after: int  # it comes after all events up to this one
    site: int


@dataclass(frozen=True)
class Waited:
    """A wait of a thread until a word reached a value."""

    word: int
    expected: int
    acquired: bool
    one_by_one: bool  # many words at once, each by another thread
    site: int


@dataclass(frozen=True)
class AtBarrier:
    """An arrival of warps at a barrier of their CTA, or a wait that has ended there."""

    barrier: Any
    phase: int
    after: int  # it comes after all events up to this one
    site: int
    clocks: tuple[Clock, Clock] = (NOTHING, NOTHING)  # that an arrival passes on


class Sites:
    """Places in kernels."""

    def __init__(self) -> None:
        self._numbers: dict[Site, int] = {}
        self._sites: list[Site | str] = []
        self._named: dict[str, int] = {}
        self._is_kernel: dict[CodeType, bool] = {}

    def here(self, frames: int = SIMULATOR_FRAMES) -> int:
        """The current line of the kernel, which is at least so many frames above."""
        found: list[Any] = []
        frame: FrameType | None = sys._getframe(frames)
        known = self._is_kernel.get
        while frame is not None:
            code = frame.f_code
            is_kernel = known(code)
            if is_kernel is None:
                is_kernel = self._is_kernel[code] = "__mkernel_kernel__" in frame.f_globals
            if is_kernel:
                found.append((code, frame.f_lineno))
                if len(found) == FRAMES:
                    break
            elif found:
                break  # the caller of the kernel
            frame = frame.f_back
        site = tuple(found)
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = self._add(site)
        return number

    def named(self, name: str) -> int:
        """A site outside of kernels."""
        if name not in self._named:
            self._named[name] = self._add(name)
        return self._named[name]

    def _add(self, site: Site | str) -> int:
        self._sites.append(site)
        return len(self._sites) - 1

    def short(self, number: int) -> str:
        site = self._sites[number]
        if isinstance(site, str):
            return site
        return _line(*site[0]) if site else "somewhere"

    def long(self, number: int, functions: int = FRAMES) -> str:
        site = self._sites[number]
        if isinstance(site, str):
            return site
        return ", called from ".join(_line(*each) for each in site[:functions]) or "somewhere"

    def caller(self, number: int) -> str:
        """The call site of a function of lang/signals.py, which the author of a kernel recognizes."""
        site = self._sites[number]
        if isinstance(site, str):
            return site
        outer = [each for each in site if Path(each[0].co_filename).stem != "signals"]
        return _line(*(outer or site)[0]) if site else "somewhere"


def _line(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    if path.is_relative_to(_PACKAGE):
        path = path.relative_to(_PACKAGE)
    else:
        path = Path(*path.parts[-2:])
    return f"{path}:{line} in {code.co_name}"


@dataclass(eq=False, slots=True)
class Actor:
    """Who accesses memory, and what happened before. cta: the CTA of the access, whose pending acquires may add to the
    clock. fence: what orders accesses on this path after those of the CTA; "" on the plain path."""

    thread: Thread
    clock: Clock
    cta: Cta | None = None
    fence: str = ""


class Races:
    """The accesses of all threads of a simulated cluster to its memory."""

    def __init__(self) -> None:
        self.sites = Sites()
        self.record_orders = False
        self.orders: dict[tuple[str, str], int] = {}  # sites of two conflicting accesses, in their order -> how often
        self._waits: dict[int, list[int]] = {}  # site of a wait -> [satisfied at once, had to wait]
        self.describe: Callable[[int], str] = hex  # an address in readable form
        self.is_named: Callable[[int], bool] = lambda address: True  # does the address have a name that authors know?
        self._threads: dict[Hashable, Thread] = {}
        self._by_number: list[Thread] = []
        self._last = 0  # event
        self._thread_of: np.ndarray = np.zeros(1024, dtype=np.int32)  # by event
        self._site_of = [self.sites.named("the user's code")]  # by event
        self._words: dict[int, Word] = {}
        self._uses: set[tuple[int, int, bool]] = set()  # words, ranks, and whether by scope "gpu"
        self._users: dict[int, dict[tuple[int, bool], int]] = {}  # word -> rank and scope -> site
        self._mail: dict[Hashable, Clock] = {}
        self._releases: dict[int, deque[Release]] = {}  # by thread
        self._waited: dict[int, deque[Waited]] = {}  # by thread
        self._changed: dict[int, deque[tuple[int, int]]] = {}  # by thread: its atomic changes, and the words
        self._arrived: dict[int, deque[AtBarrier]] = {}  # by thread
        self._left: dict[int, deque[AtBarrier]] = {}  # by thread: barriers that it has waited for

    @property
    def waits(self) -> dict[str, list[int]]:
        """Line of a wait -> [how often it was satisfied at once, how often it had to wait]."""
        lines: dict[str, list[int]] = {}
        for site, counts in self._waits.items():
            line = lines.setdefault(self.sites.caller(site), [0, 0])
            line[0] += counts[0]
            line[1] += counts[1]
        return lines

    # -- threads

    def thread(self, key: Hashable, name: str) -> Thread:
        """The thread of that key. A thread that is used again keeps its number: what it does next must happen after
        everything it has done."""
        thread = self._threads.get(key)
        if thread is None:
            thread = self._threads[key] = Thread(len(self._by_number), name)
            self._by_number.append(thread)
        thread.name = name
        return thread

    def cta(self, key: Hashable, name: str, clock: Clock) -> Cta:
        """The threads of a CTA that starts with this clock."""
        threads = [self.thread((key, part), name) for part in ("plain", "atomic", "descriptor", "multicast")]
        for thread in threads:
            thread.begin(clock)
        return Cta(*threads)

    def _event(self, thread: Thread, site: int) -> int:
        self._last += 1
        if self._last == len(self._thread_of):
            self._thread_of = np.concatenate([self._thread_of, np.zeros_like(self._thread_of)])
        self._thread_of[self._last] = thread.number
        self._site_of.append(site)
        thread.last = self._last
        return self._last

    @property
    def now(self) -> int:
        """The number of the last event."""
        return self._last

    # -- synchronization

    def release(
        self, thread: Thread, clock: Clock, word: int, before: int, value: int, site: int | None = None
    ) -> None:
        """A word was set to a value, instead of `before`, by an operation that releases this clock."""
        self._words.setdefault(word, Word(before)).release(before, value, clock)
        site = self.sites.here() if site is None else site
        releases = self._releases.setdefault(thread.number, deque(maxlen=RELEASES))
        releases.append(Release(word, value, clock, self._last, site))

    def scopes(self, rank: int, words: Sequence[int], one_gpu: bool, site: int | None = None) -> None:
        """A CTA of a rank, or the network of a rank, uses these words by atomics of scope "gpu" or "sys". Words that
        another GPU or the network uses, too, need scope "sys" on both sides."""
        for word in words:
            use = (word, rank, one_gpu)
            if use in self._uses:
                continue
            self._uses.add(use)
            users = self._users.setdefault(word, {})
            users[rank, one_gpu] = site = self.sites.here() if site is None else site
            for (other, theirs), their_site in users.items():
                if other != rank and (one_gpu or theirs):
                    raise RaceError(
                        f"race on {self.describe(word)}\n"
                        f"  Atomics on words that GPUs share with each other or the network need scope='sys':\n"
                        f"    {self._scope(rank, one_gpu)}: {self.sites.long(site)}\n"
                        f"    {self._scope(other, theirs)}: {self.sites.long(their_site)}"
                    )

    def last_release(self, word: int) -> str:
        """Who released the word last, and where, in readable form."""
        found = [(each.after, number, each.site) for number, releases in self._releases.items()
                 for each in releases if each.word == word]  # fmt: skip
        if not found:
            return "somebody"
        _, number, site = max(found)
        return f"{self._by_number[number].name}: {self.sites.long(site)}"

    def clock_of(self, word: int) -> Clock:
        """The clock that an acquire of the word gets now."""
        known = self._words.get(word)
        return known.clock if known is not None else NOTHING

    def clock_since(self, word: int, value: int) -> Clock:
        """The clock that a wait for this value of the word gets."""
        known = self._words.get(word)
        return known.since(value) if known is not None else NOTHING

    def waited(self, cta: Cta, words: Sequence[int], expected: Sequence[int], by_all: bool, late: bool) -> None:
        """A wait has ended: each word has reached its expected value. by_all: it was a scalar wait."""
        site = self.sites.here()
        waits = self._waited.setdefault(cta.main.number, deque(maxlen=WAITS))
        for word, value in zip(words, expected):
            acquired = cta.guaranteed(word, value, self.clock_since(word, value), by_all)
            waits.append(Waited(word, value, acquired, not by_all, site))
        self._waits.setdefault(site, [0, 0])[late] += 1

    def arrived(self, thread: Thread, barrier: Any, phase: int, clocks: tuple[Clock, Clock], site: int) -> None:
        """Warps have arrived at a barrier of their CTA."""
        arrived = self._arrived.setdefault(thread.number, deque(maxlen=RELEASES))
        arrived.append(AtBarrier(barrier, phase, self._last, site, clocks))

    def waited_at(self, thread: Thread, barrier: Any, phase: int, site: int) -> int:
        """Warps have waited for a barrier of their CTA. Returns the event."""
        event = self._event(thread, site)
        self._left.setdefault(thread.number, deque(maxlen=RELEASES)).append(AtBarrier(barrier, phase, event, site))
        return event

    def check_waits(self, barrier: Any, phase: int, waits: Sequence[tuple[Thread, int]], clock: Clock) -> None:
        """The next phase of a barrier ends, after arrivals with this clock: all waits for this one must come before."""
        for thread, event in waits:
            if thread.number >= len(clock) or event > clock[thread.number]:
                raise RaceError(
                    f"race on {barrier}\n"
                    f"  {thread.name} has waited for its phase {phase}:\n"
                    f"    {self.sites.long(self._site_of[event])}\n"
                    f"  Nothing orders that before the end of phase {phase + 1}:\n"
                    f"    {self.sites.long(self.sites.here())}\n"
                    "  Had it come later, it would have waited for ever, because a wait only tells whether the number "
                    "of phases is even. Those who arrive must first hear from those who wait."
                )

    def forget(self, shadow: Shadow) -> None:
        """The memory was freed, or reset while nobody used it."""
        for word in [word for word in self._words if shadow.start <= word < shadow.end]:
            del self._words[word]
        for word in [word for word in self._users if shadow.start <= word < shadow.end]:
            self._uses -= {(word, *user) for user in self._users.pop(word)}

    # -- exchanges between ranks

    def release_exchange(self, key: Hashable, thread: Thread) -> None:
        """A rank has passed a value to an exchange."""
        told = thread.release_clock()
        self._mail[key] = joined(self._mail[key], told) if key in self._mail else told

    def acquire_exchange(self, key: Hashable, thread: Thread) -> None:
        """A rank has waited for the values of all ranks."""
        thread.acquire(self._mail[key])

    def forget_exchange(self, key: Hashable) -> None:
        self._mail.pop(key, None)

    # -- accesses

    def load(self, actor: Actor, access: Access, site: int | None = None, may_be_undefined: bool = False) -> None:
        """A load. may_be_undefined: the value is only copied."""
        shadow = access.shadow
        event = self._event(actor.thread, self.sites.here() if site is None else site)
        self._lengthen(actor)
        if shadow.may_be_undefined or any(last > actor.clock[thread] for thread, last in shadow.writers.items()) or (
            self.record_orders and shadow.writers
        ):  # fmt: skip
            self._after_stores(actor, access, event, "loads", may_be_undefined)
        if shadow.atomic_low < access.high and access.low < shadow.atomic_high:
            self._after_atomics(actor, access, event, "loads", shadow.changes)
        shadow.loads.add(event, actor.thread.number, access)

    def store(self, actor: Actor, access: Access, site: int | None = None) -> None:
        """A store."""
        shadow = access.shadow
        event = self._event(actor.thread, self.sites.here() if site is None else site)
        self._lengthen(actor)
        if shadow.writers:
            self._after_stores(actor, access, event, "stores to")
        self._after_loads(actor, access, event, "stores to")
        if shadow.atomic_low < access.high and access.low < shadow.atomic_high:
            for kind in (shadow.changes, shadow.polls):
                self._after_atomics(actor, access, event, "stores to", kind)
        shadow.wrote(access.units(), event, actor.thread.number)

    def atomic(
        self, actor: Actor, access: Access, changes: bool, site: int | None = None, in_order: bool = False
    ) -> None:
        """An atomic operation that changes a word, or only reads it. in_order: it must come after all changes."""
        shadow, thread = access.shadow, actor.thread
        if not changes:
            polls = shadow.polls.get((access.low, access.high))
            if polls is not None and polls.get(thread.number, 0) > thread.released_up_to:
                return  # a poll: indistinguishable from the one before
        event = self._event(thread, self.sites.here() if site is None else site)
        self._lengthen(actor)
        what = "changes (atomically)" if changes else "polls at (atomically)"
        if shadow.writers:
            self._after_stores(actor, access, event, what)
        if changes:
            self._after_loads(actor, access, event, what)
        if in_order:
            self._after_atomics(actor, access, event, what, shadow.changes)
        if changes:
            changed = self._changed.setdefault(actor.thread.speaker.number, deque(maxlen=RELEASES))
            changed.append((event, access.low))
        kind = shadow.changes if changes else shadow.polls
        kind.setdefault((access.low, access.high), {})[actor.thread.number] = event
        shadow.atomic_low = min(shadow.atomic_low, access.low)
        shadow.atomic_high = max(shadow.atomic_high, access.high)
        if changes and shadow.may_be_undefined:
            shadow.define(access.units())

    def _lengthen(self, actor: Actor) -> None:
        """Extend the clock of the actor to all threads."""
        if len(actor.clock) < len(self._by_number):
            actor.clock = np.concatenate([actor.clock, np.zeros(len(self._by_number) - len(actor.clock), np.int32)])

    def _after_stores(
        self, actor: Actor, access: Access, event: int, what: str, may_be_undefined: bool = False
    ) -> None:
        """The event must come after all stores to what it accesses and, if it is a load, after at least one."""
        units = access.units()
        if type(units) is slice and units.stop - units.start == 1 and not self.record_orders:
            store = int(access.shadow.writes[units.start])
            if store == 0 or (store > 0 and store <= actor.clock[self._thread_of[store]]):
                return  # the common case: one word, in order
        stores = access.shadow.writes[units]
        if what == "loads" and not may_be_undefined and stores.size and stores.min() < 0:
            place = int(np.argmin(stores))
            raise self._undefined(access.shadow, access.address(units, place), event, int(stores[place]))
        stores = np.maximum(stores, 0)
        threads = self._thread_of[stores]
        unknown = stores > actor.clock[threads]
        if unknown.any():
            self._settle(actor)
            unknown = stores > actor.clock[threads]
        if self.record_orders:
            for store in np.unique(stores[~unknown]).tolist():
                self._ordered(store, event)
        if unknown.any():
            place = int(np.argmax(unknown))
            raise self._race(
                actor, access.shadow, access.address(units, place), event, what, int(stores[place]), "stored to"
            )

    def _after_loads(self, actor: Actor, access: Access, event: int, what: str) -> None:
        """The event must come after all loads of what it changes."""
        shadow = access.shadow
        # the loads of a CTA have finished before it stores, on any path
        own = actor.cta.main.number if actor.cta is not None else actor.thread.number
        touched: np.ndarray | None = None
        for load, thread, theirs in shadow.loads.unknown(actor.clock, access.low, access.high):
            if thread == own:
                continue
            theirs.units()  # units may be refined for these, and again for mine
            mine = access.units()
            units = theirs.units()
            if touched is None or len(touched) != len(shadow.writes):
                touched = np.zeros(len(shadow.writes), dtype=bool)
                touched[mine] = True
            met = np.flatnonzero(touched[units])
            if met.size:
                self._check(actor, shadow, theirs.address(units, int(met[0])), event, what, load, thread, "loaded")
        for thread, last in shadow.loads.last.items():
            if thread != own and last > actor.clock[thread]:
                units = access.units()
                loads = shadow.loads.by_thread[thread][units]
                place = int(np.argmax(loads))
                load = int(loads[place])
                if load > actor.clock[thread]:
                    self._check(actor, shadow, access.address(units, place), event, what, load, thread, "loaded")

    def _after_atomics(
        self, actor: Actor, access: Access, event: int, what: str, kind: dict[tuple[int, int], dict[int, int]]
    ) -> None:
        """The event, which is not atomic, must come after all atomic operations on what it accesses."""
        how = "polled (atomically)" if kind is access.shadow.polls else "changed (atomically)"
        for (word, end), threads in kind.items():
            if word < access.high and access.low < end and access.meets(word, end):
                for thread, last in threads.items():
                    if last > actor.clock[thread]:
                        self._check(actor, access.shadow, word, event, what, last, thread, how)

    def _settle(self, actor: Actor) -> None:
        """Add the pending acquires of its CTA to the clock of the actor."""
        if actor.cta is not None and not actor.fence and actor.cta.settle():
            actor.clock = actor.cta.main.clock
            self._lengthen(actor)

    def _check(
        self, actor: Actor, shadow: Shadow, address: int, event: int, what: str, earlier: int, thread: int, how: str
    ) -> None:
        if earlier > actor.clock[thread]:
            self._settle(actor)
        if earlier > actor.clock[thread]:
            raise self._race(actor, shadow, address, event, what, earlier, how)
        if self.record_orders:
            self._ordered(earlier, event)

    def _ordered(self, first: int, second: int) -> None:
        if first > 0 and self._thread_of[first] != self._thread_of[second]:
            pair = self.sites.short(self._site_of[first]), self.sites.short(self._site_of[second])
            self.orders[pair] = self.orders.get(pair, 0) + 1

    # -- messages

    def _did(self, event: int) -> str:
        return self._by_number[self._thread_of[event]].name

    def _undefined(self, shadow: Shadow, address: int, event: int, why: int) -> SimulatorError:
        reason = {
            UNWRITTEN: "nobody has written",
            SPENT: "was written for a launch that has ended, and not since",
        }[why]
        return SimulatorError(
            f"{self._did(event)} loads {shadow.describe(address)}, which {reason}:\n"
            f"    {self.sites.long(self._site_of[event])}\n"
            f"  Whoever writes it must signal that, and this CTA must wait for the signal; "
            f"{self._last_wait(event)}."
        )

    def _race(
        self, actor: Actor, shadow: Shadow, address: int, event: int, what: str, earlier: int, how: str
    ) -> RaceError:
        return RaceError(
            f"race on {shadow.describe(address)}\n"
            f"  {self._did(event)} {what} it:\n"
            f"    {self.sites.long(self._site_of[event])}\n"
            f"  {self._did(earlier)} {how} it before, and nothing orders the two:\n"
            f"    {self.sites.long(self._site_of[earlier])}\n"
            f"  {self._missing(actor, earlier, event)}"
        )

    def _missing(self, actor: Actor, earlier: int, event: int) -> str:
        """What would have ordered two events, as far as is known."""
        thread = self._by_number[self._thread_of[earlier]]
        first, second = thread.speaker, actor.thread.speaker
        one, other = first.name, second.name
        if first is second and not thread.counted_by:
            return f"{thread.completed_by or actor.fence}() must come between the two."
        if actor.fence and actor.cta is not None:
            actor.cta.settle()
            if actor.cta.main.knows_of(thread) >= earlier:
                return f"{other} has waited for that, but {PATHS[actor.fence]}."
        if first.warps_of is not None and first.warps_of == second.warps_of:
            return self._between_warps(thread, earlier, one, other, second)
        waits = {each.word: each for each in self._waited.get(second.number, ())}
        releases = [each for each in self._releases.get(first.number, ()) if self.is_named(each.word)]
        releases.sort(key=lambda each: each.word not in waits)  # releases that the other one waited for come first
        since = [each for each in releases if each.after > earlier]
        enough = [
            each for each in since if thread.number < len(each.releases) and each.releases[thread.number] >= earlier
        ]
        relaxed = [
            (change, word) for change, word in self._changed.get(first.number, ())
            if change > earlier and self.is_named(word) and all(change != each.after for each in releases)
        ]  # fmt: skip
        relaxed.sort(key=lambda pair: pair[1] not in waits)
        if enough and (enough[0].word in waits or since[0].word not in waits):
            return self._not_waited(enough[0], one, other, event, waits.get(enough[0].word))
        if since and (since[0].word in waits or not relaxed or relaxed[0][1] not in waits):
            stands = f"{thread.completed_by}() and a barrier" if thread.completed_by else "a barrier"
            return f"{self._set(since[0], one, 'then')}, but {stands} must come between the access and that."
        if relaxed:
            change, word = relaxed[0]
            where = f"{self.describe(word)} ({self._at(self._site_of[change])})"
            return f"{one} then changed {where}, but not by a release, which orders nothing."
        before = [each for each in releases if each.word in waits]
        if before:
            wait = waits[before[-1].word]
            return (
                f"{self._set(before[-1], one, 'had')} before that access, and {other} has only waited until it was "
                f"{wait.expected} ({self._at(wait.site)}): the signal to wait for must come after the access."
            )
        return f"{one} has signalled nothing since; {self._last_wait(event)}."

    def _between_warps(self, thread: Thread, earlier: int, one: str, other: str, second: Thread) -> str:
        """What would have ordered an event after an earlier one in other warps of the same CTA."""
        waits = self._left.get(second.number, ())
        last = (
            f"it last waited ({self._at(waits[-1].site)}) for {waits[-1].barrier}"
            if waits
            else "it has waited for none"
        )
        if thread.counted_by:
            return f"the load is complete when {thread.counted_by} says so, which {other} must wait for first: {last}."
        since = [each for each in self._arrived.get(thread.speaker.number, ()) if each.after >= earlier]
        if not since:
            return f"{one} has arrived at no barrier since, for which {other} could have waited: {last}."
        which = {each.barrier for each in waits}
        arrival = min(since, key=lambda each: each.barrier not in which)  # the first of those that it waited for
        then = f"{one} then arrived ({self._at(arrival.site)}) at {arrival.barrier}"
        if thread.number >= len(arrival.clocks[0]) or arrival.clocks[0][thread.number] < earlier:
            return f"{then}, but {thread.completed_by}() must come between the access and that."
        return f"{then}, which {other} must wait for first: {last}."

    def _not_waited(self, release: Release, one: str, other: str, event: int, wait: Waited | None) -> str:
        """One has released enough; why has the other not acquired it?"""
        told = self._set(release, one, "then")
        if wait is None:
            return f"{told}, which {other} has not waited for: {self._last_wait(event)}."
        at = f" ({self._at(wait.site)})"
        if not wait.acquired:
            return f"{told}; {other} saw that with an operation that does not acquire{at}."
        if wait.one_by_one and wait.expected >= release.value:
            return f"{told}; {other} waited for many signals at once{at}, which a barrier must follow."
        return f"{told}; {other} has only waited until it was {wait.expected}{at}."

    def _scope(self, rank: int, one_gpu: bool) -> str:
        who = f"rank {rank}" if rank >= 0 else f"the network of rank {NETWORK - rank}"
        return f"{who}, with scope='{'gpu' if one_gpu else 'sys'}'"

    def _set(self, release: Release, who: str, when: str) -> str:
        return f"{who} {when} set {self.describe(release.word)} to {release.value} ({self._at(release.site)})"

    def _at(self, site: int) -> str:
        return self.sites.caller(site)

    def _last_wait(self, event: int) -> str:
        thread = self._by_number[self._thread_of[event]].speaker
        waits, barriers = self._waited.get(thread.number), self._left.get(thread.number)
        if not waits and barriers:
            return f"{thread.name} last waited ({self._at(barriers[-1].site)}) for {barriers[-1].barrier}"
        if not waits:
            return f"{thread.name} has waited for nothing"
        wait = waits[-1]
        return f"{thread.name} last waited until {self.describe(wait.word)} was {wait.expected} ({self._at(wait.site)})"
