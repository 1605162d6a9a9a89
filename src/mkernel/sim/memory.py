"""The memory of a simulated cluster: what kernels may touch, and what they find there.

Memory comes in pieces, each allocated as one (`Shadow`), with named parts (`Region`). Every element that a kernel
touches must lie in one of them; one that does not is an error here, instead of a corrupted process.

A store is in memory at once, and a load sees the newest value. A GPU is weaker than that, but what a weaker memory
would show is always a race, and those are found as such (`races.py`).

Multicast addresses are ranges of their own: a store there is one store to each member; a load adds the members in
random order, since the switch promises none.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import random
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from triton._C.libtriton import interpreter as _native

from mkernel.runtime.errors import SimulatorError
from mkernel.runtime.world import Array, Part
from mkernel.sim.cta import running
from mkernel.sim.order import Cta, Thread
from mkernel.sim.races import Actor, Races, Sites
from mkernel.sim.shadow import GIVEN, UNWRITTEN, Access, Region, Shadow

PLAIN, DESCRIPTOR, MULTICAST = "plain", "descriptor", "multicast"  # paths to memory
OWN = "the library's own memory"
# what lets accesses on a path know what the CTA knows
FENCES = {PLAIN: "", DESCRIPTOR: "acquire_for_descriptors", MULTICAST: "fence_aliases"}


class Memory:
    """All memory that simulated CTAs share. `races` is None where nobody looks for them."""

    def __init__(self, rng: random.Random, races: Races | None = None):
        self.rng = rng
        self.races = races
        self.sites = Sites()
        if races is not None:
            races.describe, races.is_named = self.describe, self._is_named
            self.sites = races.sites
        self.writes = 0  # how often memory changed; waiting tasks look again when it does
        self.progress = 0  # the same without what a waiting task itself writes: the newest time it saw
        self.on_change: Callable[[Sequence[int] | range | None], None] = lambda where: None  # see `changed`
        self._starts: list[int] = []
        self._pieces: list[Shadow] = []
        self._multicasts: dict[int, tuple[int, list[int]]] = {}  # start of a range -> its end, and where members begin
        self._fresh: set[int] = set()  # where tensors begin that nobody has written yet

    # -- what may be touched

    def add(self, start: int, size: int, owner: int | None = None, *regions: Region) -> None:
        """Memory that kernels may touch until it is removed: all of it, or these parts."""
        piece = Shadow(start, start + size, owner, GIVEN if start not in self._fresh else UNWRITTEN)
        piece.regions = list(regions) or [Region(OWN, start, start + size)]
        place = bisect.bisect_left(self._starts, start)
        self._starts.insert(place, start)
        self._pieces.insert(place, piece)

    def remove(self, start: int) -> None:
        place = bisect.bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start:
            piece = self._pieces.pop(place)
            del self._starts[place]
            if self.races is not None:
                self.races.forget(piece)

    def piece_of(self, address: int) -> Shadow | None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place >= 0 and address < self._pieces[place].end:
            return self._pieces[place]
        return None

    def mark_segment(self, start: int, segment: Hashable, parts: Sequence[Part]) -> None:
        """A piece of memory is a rank's copy of this segment, and consists of these parts; () if it is not divided."""
        piece = self.piece_of(start)
        assert piece is not None
        piece.segment, piece.segment_start = segment, start
        if not parts:
            return
        piece.regions = [
            Region(part.name, start + part.start, start + part.end, unit="word" if part.kind == "signals" else "byte")
            for part in parts
        ]
        piece.belongs_to_user = any(part.kind == "tensor" for part in parts)
        for part in parts:
            if self.races is not None and part.kind == "buffer" and part.end > part.start:
                piece.set(start + part.start, start + part.end, UNWRITTEN)

    def mark_uninitialized(self, tensor: torch.Tensor) -> None:
        """Nobody has written this tensor: a kernel must store to it before it loads from it."""
        start = tensor.untyped_storage().data_ptr()
        self._fresh.add(start)
        weakref.finalize(tensor.untyped_storage(), self._fresh.discard, start)  # what is there next is another's

    def lend(self, tensors: Mapping[str, torch.Tensor], owner: int, writable: Callable[[str], bool]) -> list[Any]:
        """Kernels may touch these tensors, until `take_back` gets what this returns."""
        loans = []
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            low, high = extent(tensor)
            piece = self.piece_of(low)
            if piece is None:
                storage = tensor.untyped_storage()
                self.add(storage.data_ptr(), storage.nbytes(), owner)
                piece = self.piece_of(low)
                assert piece is not None
                piece.regions = []
            self._fresh.discard(piece.start)
            strides = [stride * tensor.element_size() for stride in tensor.stride()]
            region = Region(name, low, high, tuple(tensor.shape), strides, writable(name), _gaps(tensor), lent=True)
            piece.regions.append(region)
            if name == "context":  # the host's table, which no kernel changes
                piece.regions = [region]
            piece.constant = not any(each.writable for each in piece.regions)
            loans.append((piece, region))
        return loans

    def take_back(self, loans: Sequence[Any]) -> None:
        for piece, region in loans:
            if region.name == "context":
                continue
            piece.regions.remove(region)
            piece.constant = bool(piece.regions) and not any(each.writable for each in piece.regions)
            if not piece.regions:
                self.remove(piece.start)

    def reset(self, start: int) -> None:
        """A piece of memory was made as new, while nobody used it."""
        piece = self.piece_of(start)
        assert piece is not None
        fresh = Shadow(piece.start, piece.end, piece.owner, GIVEN)
        fresh.regions, fresh.belongs_to_user = piece.regions, piece.belongs_to_user
        self._pieces[self._pieces.index(piece)] = fresh
        if self.races is not None:
            self.races.forget(piece)

    def describe(self, address: int) -> str:
        """An address, for people."""
        piece = self.piece_of(address)
        return piece.describe(address) if piece is not None else f"{address:#x}"

    def _is_named(self, address: int) -> bool:
        """Does an author know what is at this address?"""
        piece = self.piece_of(address)
        return piece is not None and any(region.name != OWN for region in piece.regions)

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
        raise SimulatorError(
            f"{what} of {high - low} bytes is outside of every multicast range: use an address that `everywhere` "
            f"(multimem.py) returns{self._here()}"
        )

    def accesses(self, addresses: np.ndarray, size: int, what: str, stores: bool = False) -> list[Access]:
        """What elements of `size` bytes at these addresses touch, one for each piece of memory. Raises if any of them
        is outside of what may be touched."""
        if addresses.size == 1:
            low = int(addresses.item())
            high = low + size
        else:
            low, high = int(addresses.min()), int(addresses.max()) + size
        piece = self.piece_of(low)
        if piece is not None and high <= piece.end:
            self._check_inside(piece, addresses, size, low, high, what, stores)
            return [Access(piece, addresses, size, low, high)]
        found = []
        left: np.ndarray = addresses.reshape(-1)
        while left.size:
            low = int(left.min())
            piece = self.piece_of(low)
            if piece is None:
                raise self._outside(what, low, low + size)
            here = left < piece.end
            some, left = left[here], left[~here]
            high = int(some.max()) + size
            self._check_inside(piece, some, size, low, high, what, stores)
            found.append(Access(piece, some, size, low, high))
        return found

    def _check_inside(
        self, piece: Shadow, addresses: np.ndarray, size: int, low: int, high: int, what: str, stores: bool
    ) -> None:
        regions = piece.regions
        if piece.segment is not None:
            cta: Any = running.get(None)
            regions = (cta is not None and cta.launch.keeps.in_copy(piece)) or regions
        inputs = stores and any(not each.writable and each.start < high and low < each.end for each in regions)
        if not inputs:
            for region in regions:
                if region.start <= low and high <= region.end and region.inside is None:
                    return
        # one by one: the elements of a tensor with gaps, or of several
        addresses = np.unique(addresses)
        inside, may_store, lent = (np.zeros(addresses.shape, dtype=bool) for _ in range(3))
        for region in regions:
            here = region.elements(addresses, size)
            inside |= here
            lent |= here & region.lent
            may_store |= here & (region.writable and region.lent)
        if not inside.all():
            address = int(addresses[np.argmin(inside)])
            raise self._outside(what, address, address + size, piece, regions)
        if inputs and (lent & ~may_store).any():
            address = int(addresses[np.argmax(lent & ~may_store)])
            raise SimulatorError(
                f"{what} to an input of the kernel: {piece.describe(address)}, which the launch only reads "
                f"(`Launch.inputs`){self._here()}"
            )

    def _outside(
        self, what: str, low: int, high: int, inside: Shadow | None = None, of_it: Sequence[Region] = (),
        by: str | None = None,
    ) -> SimulatorError:  # fmt: skip
        """inside: the piece of memory that it is in, and what of that may be touched."""
        regions = [(region, piece) for piece in self._pieces for region in piece.regions if piece is not inside]
        regions += [(region, inside) for region in of_it if inside is not None]
        where = ""
        if regions:
            # of those that are as near, the one that holds it; then an argument of the kernel; then what ends before it
            region, piece = min(
                regions,
                key=lambda pair: (
                    pair[0].distance(low, high), not pair[0].holds(low, high), not pair[0].lent, pair[0].end > low,
                ),
            )  # fmt: skip
            shape = f" of shape {list(region.shape)}" if region.shape else f" of {region.end - region.start} bytes"
            name = f"{region.name}{piece.where},{shape}"
            if low >= region.end:
                where = f": {low - region.end} bytes behind the end of {name}"
            elif high <= region.start:
                where = f": {region.start - low} bytes before the beginning of {name}"
            elif region.holds(low, high):
                where = f": between the elements of {name}, behind {region.place(low)}"
            else:
                where = f": across the edge of {name}"
            if (low - region.start) % (high - low) == 0 and not region.holds(low, high):
                where += f" (element {(low - region.start) // (high - low)}, counted from its first one)"
        return SimulatorError(
            f"{what} of {high - low} bytes is outside of every tensor that the kernel was given{where}"
            + (self._here() if by is None else by)
        )

    def _here(self) -> str:
        """Who is running, and where."""
        cta: Any = running.get(None)
        if cta is None:
            return ""
        return (
            f"\n  rank {cta.rank}, CTA {cta.program_id} of {cta.launch.op}:\n    {self.sites.long(self.sites.here())}"
        )

    def check_request(
        self, launches: Sequence[Keeps], start: int, size: int, what: str, posted_by: Callable[[], str]
    ) -> None:
        """A request touches bytes of a segment. One of these launches of its rank has posted it."""
        piece = self.piece_of(start)
        if not size or piece is None:
            return
        regions = [region for keeps in launches for region in keeps.in_copy(piece)]
        inside = any(
            each.holds(start, start + size)
            and (each.inside is None or bool(each.inside[start - each.start : start + size - each.start].all()))
            for each in regions
        )
        if regions and not inside:
            raise self._outside(what, start, start + size, piece, regions, f"\n  posted by {posted_by()}")

    def span(self, start: int, size: int, what: str) -> Access:
        """An access to all bytes of a range, which lies in one piece of memory."""
        unit = next(unit for unit in (8, 4, 2, 1) if not (start | size) & (unit - 1))
        return self.accesses(np.arange(start, start + size, unit, dtype=np.uint64), unit, what)[0]

    def copy_undefined(self, source: int, target: int, size: int) -> None:
        """What was copied is as undefined as it was where it came from."""
        origin, copy = self.piece_of(source), self.piece_of(target)
        if self.races is not None and origin is not None and copy is not None and origin.may_be_undefined:
            undefined = origin.undefined(source, source + size)
            for start, end in undefined:
                copy.set(target + start, target + end, UNWRITTEN)

    # -- loads and stores of a CTA

    def load(
        self, cta: Cta | None, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype,
        path: str = PLAIN, volatile: bool = False,
    ) -> tuple[np.ndarray, list[Access]]:  # fmt: skip
        """The values of a block, and what was touched."""
        if addresses.size == 1 and mask.size == 1:
            touched = addresses if mask.item() else None
        else:
            addresses, mask = np.broadcast_arrays(addresses, mask)
            touched = addresses if mask.all() else addresses[mask] if mask.any() else None
        if touched is None:
            return np.broadcast_to(other, addresses.shape).astype(dtype), []
        found = self.accesses(touched, dtype.itemsize, "a load")
        if self.races is not None and cta is not None:
            for access in found:
                if access.shadow.constant:
                    continue
                if volatile:
                    for word in _words(access):
                        self.races.atomic(Actor(cta.atomics, cta.main.clock, cta), word, changes=False)
                else:
                    self.races.load(Actor(cta.main, _thread(cta, path).clock, cta, FENCES[path]), access)
        if touched is addresses and addresses.size == 1:
            value = ctypes.string_at(found[0].low, dtype.itemsize)
            return np.frombuffer(value, dtype=dtype).reshape(addresses.shape), found
        result = _native.load(np.ascontiguousarray(addresses), np.ascontiguousarray(mask),
                              np.ascontiguousarray(np.broadcast_to(other, addresses.shape)), dtype)  # fmt: skip
        return result, found

    def store(
        self, cta: Cta | None, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, path: str = PLAIN
    ) -> list[Access]:
        """Store a block. Returns what was touched."""
        addresses, values, mask = np.broadcast_arrays(addresses, values, mask)
        if not mask.all():
            addresses, values = addresses[mask], values[mask]
        if addresses.size == 0:
            return []
        found = self.accesses(addresses, values.itemsize, "a store", stores=True)
        if self.races is not None and cta is not None:
            thread = _thread(cta, path)
            for access in found:
                self.races.store(Actor(thread, thread.clock, cta, FENCES[path]), access)
        self.write(addresses, values)
        return found

    def store_everywhere(self, cta: Cta | None, addresses: np.ndarray, values: np.ndarray) -> None:
        """A store through multicast addresses: one to each member."""
        for places in self._members(addresses, values.itemsize, "a multicast store"):
            self.store(cta, places, values, np.ones(places.shape, dtype=bool), MULTICAST)

    def load_from_all(self, cta: Cta | None, addresses: np.ndarray, dtype: np.dtype) -> list[np.ndarray]:
        """What each member has at multicast addresses, the members in random order."""
        members = self._members(addresses, dtype.itemsize, "a multicast load")
        self.rng.shuffle(members)
        zero = np.zeros((), dtype=dtype)
        return [self.load(cta, places, np.ones(places.shape, bool), zero, dtype, MULTICAST)[0] for places in members]

    def atomic(self, cta: Cta | None, addresses: np.ndarray, size: int, changes: bool) -> None:
        """Words are changed, or looked at, by an atomic operation."""
        for access in self.accesses(addresses, size, "an atomic operation", stores=changes):
            if self.races is not None and cta is not None:
                for word in _words(access):
                    self.races.atomic(Actor(cta.atomics, cta.main.clock, cta), word, changes)

    # -- memory itself

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Values reach memory."""
        addresses, values = np.ascontiguousarray(addresses), np.ascontiguousarray(values)
        _native.store(addresses, values, np.ones(addresses.shape, dtype=bool))
        self.changed(True, range(int(addresses.min()), int(addresses.max()) + values.itemsize))

    def write_bytes(self, address: int, data: np.ndarray) -> None:
        """Bytes that something other than a CTA writes: the network."""
        self.write(np.arange(address, address + data.size, dtype=np.uint64), data)

    def changed(self, progress: bool, where: Sequence[int] | range | None = None) -> None:
        """Memory was changed: these words, bytes of this range, or anything."""
        self.writes += 1
        self.progress += progress
        self.on_change(where)


def _thread(cta: Cta, path: str) -> Thread:
    """Who accesses memory on a path."""
    return cta.main if path == PLAIN else cta.descriptors if path == DESCRIPTOR else cta.multicast


def _words(access: Access) -> list[Access]:
    """The single words of an access."""
    if access.addresses.size == 1:
        return [access]
    size = access.size
    return [
        Access(access.shadow, np.array([word], dtype=np.uint64), size, word, word + size)
        for word in access.addresses.reshape(-1).tolist()
    ]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin and end."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class Keeps:
    """What a launch keeps in a segment."""

    def __init__(self, segment: Hashable, arrays: Sequence[Array]):
        self._segment, self._arrays = segment, arrays
        self._in_copies: dict[Shadow, list[Region]] = {}

    def in_copy(self, piece: Shadow) -> Sequence[Region]:
        """What it keeps in a piece of memory, if that is a rank's copy of the segment."""
        if piece.segment != self._segment:
            return ()
        found = self._in_copies.get(piece)
        if found is None:
            found = piece.arrays = self._in_copies[piece] = _regions(piece, self._arrays)
        return found


def _regions(piece: Shadow, arrays: Sequence[Array]) -> list[Region]:
    found = []
    for array in arrays:
        if not math.prod(array.shape):
            continue
        strides = array.strides or tuple(math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape)))
        last = sum((size - 1) * stride for size, stride in zip(array.shape, strides))
        start, inside = piece.segment_start + array.start, None
        if last + 1 > math.prod(array.shape):
            inside = np.zeros((last + 1) * array.item, dtype=bool)
            steps = (*(stride * array.item for stride in strides), 1)
            np.lib.stride_tricks.as_strided(inside, (*array.shape, array.item), steps)[...] = True
        end = start + (last + 1) * array.item
        steps = tuple(stride * array.item for stride in strides)
        found.append(Region(array.name, start, end, array.shape, steps, inside=inside))
    return found


def _gaps(tensor: torch.Tensor) -> np.ndarray | None:
    """By byte of its extent, whether it belongs to the tensor; None if all do."""
    low, high = extent(tensor)
    size = tensor.element_size()
    if tensor.numel() * size == high - low:
        return None
    inside = torch.zeros(high - low, dtype=torch.bool)
    strides = [stride * size for stride in tensor.stride()]
    inside.as_strided((*tensor.shape, size), (*strides, 1)).fill_(True)
    return inside.numpy()


def call_when_freed(tensor: torch.Tensor, method: Callable[[int], None], address: int) -> None:
    """Call a method with that address once nobody holds the tensor's memory any more.

    Neither the method's object nor what it refers to is kept alive: a world refers to its tensors, which would never be
    freed otherwise."""
    weakref.finalize(tensor.untyped_storage(), _call_weakly, weakref.WeakMethod(method), address)


def _call_weakly(reference: weakref.WeakMethod[Callable[[int], None]], address: int) -> None:
    method = reference()
    if method is not None:
        method(address)
