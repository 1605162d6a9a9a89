"""Shadow memory: what happened to each byte of simulated memory, and what the byte is for.

A `Shadow` belongs to one allocation. For every unit of it, it has the last event that wrote the unit, and the loads
since. A `Region` is a part of it that kernels may access, with the name that the author of a kernel knows: an argument
of a launch, the signals of a workspace, one of its halves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

# Instead of the event that wrote a unit last. Events are numbered from 1.
GIVEN = 0  # written by the user's code, which is not recorded, before all recorded events
UNWRITTEN = -1  # nobody has written it
SPENT = -2  # the launch that it was written for has ended: its value must not be used

LOADS = 256  # that are kept individually; older ones are merged

Units = slice | np.ndarray  # which units of a shadow


@dataclass(eq=False)
class Region:
    """A part of memory that kernels may access."""

    name: str
    start: int
    end: int
    shape: Sequence[int] = ()  # of a tensor: to name an element
    strides: Sequence[int] = ()  # in bytes
    writable: bool = True
    inside: np.ndarray | None = None  # by byte: does it belong to the tensor? None: all do
    unit: str = "byte"  # of a region without a shape: its elements
    lent: bool = False  # it is an argument of a launch
    _fits: dict[int, np.ndarray] = field(default_factory=dict)

    def holds(self, low: int, high: int) -> bool:
        return self.start <= low and high <= self.end

    def elements(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which elements of `size` bytes lie entirely in the region?"""
        within = (addresses >= self.start) & (addresses + np.uint64(size) <= self.end)
        if self.inside is not None:
            if size not in self._fits:
                fits = self.inside.copy() if size > 1 else self.inside
                for shift in range(1, size):
                    fits[:-shift] &= self.inside[shift:]
                self._fits[size] = fits
            within[within] = self._fits[size][(addresses[within] - np.uint64(self.start)).astype(np.int64)]
        return within

    def place(self, address: int) -> str:
        """The index of an element of a tensor."""
        offset, index = address - self.start, [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis] and self.shape[axis] > 1:
                index[axis] = min(offset // self.strides[axis], self.shape[axis] - 1)
                offset -= index[axis] * self.strides[axis]
        return "[" + ", ".join(map(str, index)) + "]"

    def describe(self, address: int, where: str = "") -> str:
        """An address in the region, in terms of its author. where: whose memory it is."""
        if self.shape:
            return f"{self.name}{self.place(address)}{where}"
        size = 8 if self.unit == "word" else 1
        return f"{self.unit} {(address - self.start) // size} of {self.name}{where}"

    def distance(self, low: int, high: int) -> int:
        """Bytes between the region and [low, high); 0 if they touch."""
        return max(self.start - high, low - self.end, 0)


class Loads:
    """Loads that a later store may conflict with. The newest individually, older ones by thread and unit."""

    def __init__(self) -> None:
        self._numbers = np.zeros((4, LOADS), dtype=np.int64)  # events, threads, lows, highs
        self._accesses: list[Access] = []
        self.by_thread: dict[int, np.ndarray] = {}  # thread -> by unit, its last load
        self.last: dict[int, int] = {}  # thread -> its last load of those

    def add(self, event: int, thread: int, access: Access) -> None:
        if len(self._accesses) == LOADS:
            self._sum_up()
        self._numbers[:, len(self._accesses)] = event, thread, access.low, access.high
        self._accesses.append(access)

    def _sum_up(self) -> None:
        for event, thread, access in zip(self._numbers[0].tolist(), self._numbers[1].tolist(), self._accesses):
            units = access.units()
            if thread not in self.by_thread:
                self.by_thread[thread] = np.zeros(len(access.shadow.writes), dtype=np.int32)
            self.by_thread[thread][units] = event
            self.last[thread] = event
        self._accesses.clear()

    def unknown(self, clock: np.ndarray, low: int, high: int) -> Iterator[tuple[int, int, Access]]:
        """(event, thread, access) of the loads of [low, high) that did not happen before the clock."""
        events, threads, lows, highs = self._numbers[:, : len(self._accesses)]
        found = np.flatnonzero((lows < high) & (highs > low) & (events > clock[threads]))
        for place in found.tolist():
            yield int(events[place]), int(threads[place]), self._accesses[place]


class Shadow:
    """The history of one piece of memory."""

    def __init__(self, start: int, end: int, owner: int | None, initially: int):
        self.start, self.end = start, end
        self.owner = owner  # the rank whose memory it is
        self.regions: list[Region] = []
        self.segment: Hashable = None  # of the symmetric heap: its group and number
        self.segment_start = start
        self.arrays: Sequence[Region] = ()  # what the last launch that used it keeps there
        self.constant = False  # kernels only read it
        self.belongs_to_user = False  # a tensor in the symmetric heap, which the user's code accesses between calls
        self._initially = initially
        self.may_be_undefined = initially < 0
        self.writers: dict[int, int] = {}  # thread -> its last store here
        self.loads = Loads()
        # word and its end -> thread -> its last atomic operation there: those that change it, and those that only read
        self.changes: dict[tuple[int, int], dict[int, int]] = {}
        self.polls: dict[tuple[int, int], dict[int, int]] = {}
        self.atomic_low, self.atomic_high = end, start
        self._shift = 3  # a unit has 1 << shift bytes
        self._writes: np.ndarray | None = None  # by unit

    @property
    def writes(self) -> np.ndarray:
        """For every unit, the event that wrote it last."""
        if self._writes is None:
            self._writes = np.full(self._count(), self._initially, dtype=np.int32)
        return self._writes

    def _count(self) -> int:
        return (self.end - self.start + (1 << self._shift) - 1) >> self._shift

    def address(self, unit: int) -> int:
        return self.start + (unit << self._shift)

    def between(self, low: int, high: int, size: int = 1) -> slice:
        """The units of [low, high), which elements of `size` bytes fill."""
        first, shift = low - self.start, self._shift
        if size < 1 << shift or first & ((1 << shift) - 1):
            self._refine_for(first, size)
            shift = self._shift
        return slice(first >> shift, (high - self.start) >> shift)

    def scattered(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The units of elements of `size` bytes at these addresses."""
        offsets = (addresses.reshape(-1) - np.uint64(self.start)).astype(np.int64)
        self._refine_for(int(np.bitwise_or.reduce(offsets)), size)
        first = offsets >> self._shift
        wide = size >> self._shift
        return first if wide == 1 else (first[:, None] + np.arange(wide)).reshape(-1)

    def _refine_for(self, offset: int, size: int) -> None:
        """Make units small enough that no two elements of `size` bytes at this offset (or several, combined by `or`)
        share one."""
        if size < 1 << self._shift or offset & ((1 << self._shift) - 1):
            self._refine(size.bit_length() - 1 if not offset & (size - 1) else 0)

    def _refine(self, shift: int) -> None:
        finer = 1 << (self._shift - shift)
        self._shift = shift
        if self._writes is not None:
            self._writes = np.repeat(self._writes, finer)[: self._count()]
        for thread, loads in self.loads.by_thread.items():
            self.loads.by_thread[thread] = np.repeat(loads, finer)[: self._count()]

    def wrote(self, units: Units, event: int, thread: int) -> None:
        self.writes[units] = event
        self.writers[thread] = event

    def define(self, units: Units) -> None:
        """An atomic operation has written these units. Which one does not matter: atomics do not race with each
        other."""
        self.writes[units] = np.maximum(self.writes[units], GIVEN)

    def set(self, low: int, high: int, what: int) -> None:
        """Mark the bytes [low, high) as GIVEN, UNWRITTEN or SPENT."""
        self.may_be_undefined |= what < 0
        unit = next(unit for unit in (8, 4, 2, 1) if not ((low - self.start) | (high - low)) & (unit - 1))
        units = self.between(low, high, unit)
        self.writes[units] = what

    def undefined(self, low: int, high: int) -> list[tuple[int, int]]:
        """Runs (first, end) of bytes of [low, high) that nobody has written, relative to low."""
        first, last = (low - self.start) >> self._shift, (high - 1 - self.start) >> self._shift
        nothing = np.concatenate([[False], self.writes[first : last + 1] < 0, [False]])
        edges = np.flatnonzero(nothing[1:] != nothing[:-1]).reshape(-1, 2) + first
        return [(max(self.address(a), low) - low, min(self.address(b), high) - low) for a, b in edges.tolist()]

    def unwritten_since(self, region: Region, event: int) -> int | None:
        """The address of a byte of the region that was not written after this event; None if there is none."""
        units = self.between(region.start, region.end)
        old = self.writes[units] <= event
        for (word, end), threads in self.changes.items():
            if region.holds(word, end) and max(threads.values()) > event:
                old[word - region.start : end - region.start] = False
        if region.inside is not None:
            old &= region.inside
        return region.start + int(np.argmax(old)) if old.any() else None

    def region_of(self, low: int, high: int) -> Region | None:
        """The region that contains all of this; if there are several, the one that was added last."""
        for region in (*self.arrays, *reversed(self.regions)):
            if region.holds(low, high):
                return region
        return None

    @property
    def where(self) -> str:
        return f" on rank {self.owner}" if self.owner is not None else ""

    def describe(self, address: int) -> str:
        """An address, in terms of its author."""
        region = self.region_of(address, address + 1) or Region("memory", self.start, self.end)
        return region.describe(address, self.where)


@dataclass(eq=False, slots=True)
class Access:
    """Elements of `size` bytes in one piece of memory, which lie in [low, high)."""

    shadow: Shadow
    addresses: np.ndarray
    size: int
    low: int
    high: int
    _is_range: bool | None = None  # is it contiguous?

    def units(self) -> Units:
        if self._is_range or self.is_range:
            return self.shadow.between(self.low, self.high, self.size)
        return self.shadow.scattered(self.addresses, self.size)

    @property
    def is_range(self) -> bool:
        if self._is_range is None:
            self._is_range = self.addresses.size * self.size == self.high - self.low and (
                self.addresses.size == 1 or bool((np.diff(self.addresses.reshape(-1)) == self.size).all())
            )
        return self._is_range

    def meets(self, low: int, high: int) -> bool:
        """Does one of its elements overlap [low, high)?"""
        if self.high <= low or high <= self.low:
            return False
        return self.is_range or bool(((self.addresses < high) & (self.addresses + np.uint64(self.size) > low)).any())

    def address(self, units: Units, place: int) -> int:
        """The address of one of its units."""
        return self.shadow.address(place + units.start if isinstance(units, slice) else int(units[place]))
