"""Memory as weak as a GPU's, for CTAs that run one at a time.

A CTA's stores wait in its own store buffer. They reach memory at a release by that CTA, or piece by
piece, in random order, at any time before. A release covers what was stored before the CTA's last
barrier: the thread that releases speaks for the others only if a barrier stands between their
stores and its release. Stores through a tensor descriptor (TMA) must have been waited for before that.

Loads may be old, too: a plain load sees what was in memory when its CTA last acquired, or anything
newer. A load through a tensor descriptor (TMA) takes another path and may be as old as the last
fence for that path. So a missing release, barrier, acquire or fence shows up as old data, which in
a poisoned workspace is NaN.

Multicast addresses are ranges of their own: a store there is one store to each member, and like one through a
descriptor it is covered by a release only after its fence; a load may be as old as the last fence, does not see what
the CTA itself has stored and not released, and adds the members in random order, since the switch promises none.

Every access must lie inside memory that the launch was given; one that does not is an error here,
instead of a corrupted process.
"""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from triton._C.libtriton import interpreter as _native

from mkernel.runtime.errors import SimulatorError

HISTORY = 256  # how many writes back a load may look
SCATTERED = 64  # elements of a load that may lie in different tensors
BUFFERED = 32  # how many stores a CTA may keep to itself

PLAIN, DESCRIPTOR, MULTICAST = "plain", "descriptor", "multicast"  # paths to memory


@dataclass(eq=False)
class Store:
    """A block of values on its way to memory."""

    addresses: np.ndarray
    values: np.ndarray
    low: int
    high: int
    behind_barrier: bool = False
    path: str = PLAIN
    completed: bool = True  # a store on another path is not, until the CTA has waited for it, or fenced it


@dataclass(eq=False)
class Overwritten:
    """What was in memory before a write, for loads that may still see it."""

    number: int
    addresses: np.ndarray
    values: np.ndarray
    low: int
    high: int
    writer: View | None


@dataclass(eq=False)
class View:
    """How one CTA sees memory: its store buffer, and how new its loads are."""

    acquired: int = 0
    acquired_for_descriptors: int = 0
    acquired_for_multicast: int = 0
    buffer: list[Store] = field(default_factory=list)


def _native_load(addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
    everything = np.ones(addresses.shape, dtype=bool)
    return _native.load(addresses, everything, np.zeros(addresses.shape, dtype=dtype), dtype)


class Memory:
    """All memory that simulated CTAs share."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.writes = 0  # how often memory changed; waiting tasks look again when it does
        self.progress = 0  # the same without what a waiting task itself writes: the newest time it saw
        self.history: deque[Overwritten] = deque(maxlen=HISTORY)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._users: dict[int, int] = {}
        self._multicasts: dict[int, tuple[int, list[int]]] = {}  # start of a range -> its end, and where members begin

    # -- what may be touched

    def allow(self, start: int, size: int) -> None:
        """Let kernels touch `size` bytes from `start`, until `forbid` was called as often."""
        if size <= 0:
            return
        self._users[start] = self._users.get(start, 0) + 1
        place = bisect.bisect_left(self._starts, start)
        if self._users[start] > 1:
            self._ends[place] = max(self._ends[place], start + size)
        else:
            self._starts.insert(place, start)
            self._ends.insert(place, start + size)

    def forbid(self, start: int) -> None:
        """Take back what `allow` gave."""
        if start not in self._users:
            return
        self._users[start] -= 1
        if self._users[start] == 0:
            del self._users[start]
            place = bisect.bisect_left(self._starts, start)
            del self._starts[place], self._ends[place]

    def check(self, low: int, high: int, what: str) -> None:
        place = bisect.bisect_right(self._starts, low) - 1
        while place >= 0:
            if high <= self._ends[place]:
                return
            place -= 1
        raise SimulatorError(f"{what} of [{low:#x}, {high:#x}) is outside of every tensor that the kernel was given")

    def check_each(self, addresses: np.ndarray, size: int, what: str) -> None:
        """Addresses that may lie in different tensors, as the tables of several ranks do."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        if low + size * addresses.size == high:
            self.check(low, high, what)
        else:
            for address in addresses.reshape(-1).tolist():
                self.check(address, address + size, what)

    def allow_multicast(self, start: int, size: int, members: Sequence[int]) -> None:
        """Let kernels touch all members' memory through one range of addresses, until `forbid_multicast`."""
        self._multicasts[start] = (start + size, list(members))

    def forbid_multicast(self, start: int) -> None:
        del self._multicasts[start]

    def _members(self, addresses: np.ndarray, size: int, what: str) -> list[np.ndarray]:
        """The addresses, in each member's memory, of pieces of `size` bytes."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for start, (end, members) in self._multicasts.items():
            if start <= low and high <= end:
                return [(addresses - start + member).astype(np.uint64) for member in members]
        raise SimulatorError(f"{what} of [{low:#x}, {high:#x}) is outside of every multicast range")

    # -- a CTA's loads and stores

    def store(self, view: View, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, path: str = PLAIN) -> None:
        """Put a block of values into the CTA's store buffer."""
        addresses, values, mask = np.broadcast_arrays(addresses, values, mask)
        chosen = mask.reshape(-1)
        addresses = addresses.reshape(-1)[chosen]
        values = values.reshape(-1)[chosen]
        if addresses.size == 0:
            return
        low, high = int(addresses.min()), int(addresses.max()) + values.itemsize
        self.check(low, high, "a store")
        values = np.ascontiguousarray(values)
        view.buffer.append(Store(addresses, values, low, high, path=path, completed=path == PLAIN))
        if len(view.buffer) > BUFFERED:
            self._commit(view, view.buffer[0])

    def store_everywhere(self, view: View, addresses: np.ndarray, values: np.ndarray) -> None:
        """A store through multicast addresses: one to each member."""
        for places in self._members(addresses, values.itemsize, "a multicast store"):
            self.store(view, places, values, np.ones(places.shape, dtype=bool), MULTICAST)

    def load_from_all(self, view: View, addresses: np.ndarray, dtype: np.dtype) -> list[np.ndarray]:
        """What each member has at multicast addresses, the members in random order."""
        members = self._members(addresses, dtype.itemsize, "a multicast load")
        self.rng.shuffle(members)
        other = np.zeros((), dtype=dtype)
        return [self.load(view, places, np.ones(places.shape, bool), other, dtype, MULTICAST) for places in members]

    def load(
        self, view: View, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype,
        path: str = PLAIN,
    ) -> np.ndarray:  # fmt: skip
        """Load a block: memory, or something older, under the CTA's own stores."""
        addresses, mask = np.broadcast_arrays(addresses, mask)
        if not mask.any():
            return np.broadcast_to(other, addresses.shape).astype(dtype)
        touched = addresses if mask.all() else addresses[mask]
        low, high = int(touched.min()), int(touched.max()) + dtype.itemsize
        if touched.size <= SCATTERED:
            self.check_each(touched, dtype.itemsize, "a load")
        else:
            self.check(low, high, "a load")
        result = _native.load(np.ascontiguousarray(addresses), np.ascontiguousarray(mask),
                              np.ascontiguousarray(np.broadcast_to(other, addresses.shape)), dtype)  # fmt: skip
        newest = {
            PLAIN: view.acquired, DESCRIPTOR: view.acquired_for_descriptors, MULTICAST: view.acquired_for_multicast
        }[path]  # fmt: skip
        for old in reversed(self.history):
            if old.number <= newest:
                break
            if old.low < high and low < old.high:
                if old.writer is view and path != MULTICAST:
                    break  # what was there before its own store it will not see again
                if self.rng.random() < 0.5:
                    self._overlay(result, addresses, mask, old.addresses, old.values)
        for mine in view.buffer if path != MULTICAST else ():
            if mine.low < high and low < mine.high:
                self._overlay(result, addresses, mask, mine.addresses, mine.values)
        return result

    @staticmethod
    def _overlay(
        result: np.ndarray, addresses: np.ndarray, mask: np.ndarray, at: np.ndarray, values: np.ndarray
    ) -> None:
        if values.dtype.itemsize != result.dtype.itemsize:
            # another element size: compare byte by byte
            step = np.arange(values.dtype.itemsize, dtype=np.uint64)
            at = (at[:, None] + step).reshape(-1)
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            step = np.arange(result.dtype.itemsize, dtype=np.uint64)
            places = (addresses.reshape(-1, 1) + step).reshape(-1)
            wanted = np.repeat(mask.reshape(-1), result.dtype.itemsize)
            target = result.reshape(-1).view(np.uint8)
            Memory._overlay(target, places, wanted, at, raw)
            return
        order = np.argsort(at, kind="stable")
        sorted_at = at[order]
        flat = addresses.reshape(-1)
        # the last store to an address wins
        place = np.searchsorted(sorted_at, flat, side="right") - 1
        hit = (place >= 0) & mask.reshape(-1)
        hit &= sorted_at[np.maximum(place, 0)] == flat
        out = result.reshape(-1)
        out[hit] = values.view(out.dtype)[order[place[hit]]]

    # -- order

    def barrier(self, view: View) -> None:
        """A CTA barrier: a later release speaks for what was stored up to here."""
        for store in view.buffer:
            store.behind_barrier = store.completed

    def complete_descriptor_stores(self, view: View) -> None:
        """Stores through descriptors are done: a later barrier and release speak for them, too."""
        self._complete(view, DESCRIPTOR)

    def fence_aliases(self, view: View) -> None:
        """Later multicast loads are as new as plain loads; multicast stores are covered by a later barrier and
        release."""
        view.acquired_for_multicast = view.acquired
        self._complete(view, MULTICAST)

    @staticmethod
    def _complete(view: View, path: str) -> None:
        for store in view.buffer:
            store.completed |= store.path == path

    def release(self, view: View) -> None:
        """Everything that was stored before the last barrier reaches memory now."""
        for store in list(view.buffer):
            if store.behind_barrier:
                self._commit(view, store)

    def acquire(self, view: View) -> None:
        """Later loads see at least what is in memory now."""
        view.acquired = self.writes

    def acquire_for_descriptors(self, view: View) -> None:
        """Later loads through descriptors are as new as plain loads."""
        view.acquired_for_descriptors = view.acquired

    def drain(self, view: View) -> None:
        """The launch is over: all that its CTAs stored is in memory."""
        while view.buffer:
            self._commit(view, view.buffer[0])

    def leak(self, view: View) -> bool:
        """Let a random piece of a random buffered store reach memory. False if there is none."""
        if not view.buffer:
            return False
        place = self.rng.randrange(len(view.buffer))
        store = view.buffer[place]
        if self._overlaps_earlier(view, place):
            self._commit(view, view.buffer[0])
            return True
        size = store.addresses.size
        start = self.rng.randrange(size)
        end = min(size, start + self.rng.randint(1, max(1, size // 2)))
        self.write(store.addresses[start:end], store.values[start:end], view)
        rest = np.ones(size, dtype=bool)
        rest[start:end] = False
        if rest.any():
            store.addresses, store.values = store.addresses[rest], store.values[rest]
        else:
            del view.buffer[place]
        return True

    def commit_stores_to(self, view: View, address: int, size: int) -> None:
        """The CTA's own stores to an address come before its atomic on that address."""
        for store in list(view.buffer):
            if store.low < address + size and address < store.high:
                self._commit(view, store)

    def _overlaps_earlier(self, view: View, place: int) -> bool:
        store = view.buffer[place]
        return any(other.low < store.high and store.low < other.high for other in view.buffer[:place])

    def _commit(self, view: View, store: Store) -> None:
        """Write one buffered store to memory, after earlier ones that it overlaps, and so on."""
        if store not in view.buffer:
            return
        for earlier in view.buffer[: view.buffer.index(store)]:
            if earlier.low < store.high and store.low < earlier.high:
                self._commit(view, earlier)
        view.buffer.remove(store)
        self.write(store.addresses, store.values, view)

    # -- memory itself

    def write(self, addresses: np.ndarray, values: np.ndarray, writer: View | None = None) -> None:
        """Values reach memory; what they replace may still be seen by loads that are older."""
        addresses = np.ascontiguousarray(addresses)
        values = np.ascontiguousarray(values)
        before = _native_load(addresses, values.dtype)
        _native.store(addresses, values, np.ones(addresses.shape, dtype=bool))
        self.writes += 1
        self.progress += 1
        low, high = int(addresses.min()), int(addresses.max()) + values.itemsize
        self.history.append(Overwritten(self.writes, addresses, before, low, high, writer))

    def write_bytes(self, address: int, data: np.ndarray) -> None:
        """Bytes that something other than a CTA writes: the network."""
        places = np.arange(address, address + data.size, dtype=np.uint64)
        self.write(places, np.ascontiguousarray(data))

    def changed(self, progress: bool) -> None:
        """An atomic changed memory."""
        self.writes += 1
        self.progress += progress
