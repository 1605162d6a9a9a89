"""The memory of a simulated cluster: what kernels may access, and its contents.

Memory consists of pieces, one per allocation (`Shadow`), with named parts (`Region`). Every element that a kernel
accesses must lie in one of them; one that does not is an error here, instead of a corrupted process.

A store takes effect at once, and a load sees the latest value. The memory model of a GPU is weaker, but a program that
could tell the difference has a race, and races are detected as such (`races.py`).

Multicast addresses are ranges of their own: a store there is one store to each member; a load adds the members in
random order, since the switch guarantees none.
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
    """All memory that simulated CTAs share. `races` is None if races are not detected."""

    def __init__(self, rng: random.Random, races: Races | None = None):
        self.rng = rng
        self.races = races
        self.sites = Sites()
        if races is not None:
            races.describe, races.is_named = self.describe, self._is_named
            self.sites = races.sites
        self.writes = 0  # how often memory has changed; each change lets waiting tasks poll again
        self.progress = 0  # the same, not counting the newest time that a waiting task writes
        self.on_change: Callable[[Sequence[int] | range | None], None] = lambda where: None  # see `changed`
        self._starts: list[int] = []
        self._pieces: list[Shadow] = []
        self._multicasts: dict[int, tuple[int, list[int]]] = {}  # start -> end, and addresses of the members
        self._fresh: set[int] = set()  # addresses of tensors that nobody has written yet

    # -- what kernels may access

    def add(self, start: int, size: int, owner: int | None = None, *regions: Region) -> None:
        """Let kernels access memory until it is removed: all of it, or these parts."""
        piece = Shadow(start, start + size, owner, GIVEN if start not in self._fresh else UNWRITTEN)
        piece.regions = list(regions) or [Region(OWN, start, start + size)]
        place = bisect.bisect_left(self._starts, start)
        self._starts.insert(place, start)
        self._pieces.insert(place, piece)

    def add_unwritten(self, start: int, size: int, owner: int | None, *regions: Region) -> None:
        """Like `add`, for memory that must be written before it is read."""
        self._fresh.add(start)
        self.add(start, size, owner, *regions)
        self._fresh.discard(start)

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
        weakref.finalize(tensor.untyped_storage(), self._fresh.discard, start)  # the address may be reused

    def lend(self, tensors: Mapping[str, torch.Tensor], owner: int, writable: Callable[[str], bool]) -> list[Any]:
        """Let kernels access these tensors until the result of this is passed to `take_back`."""
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
        """Forget the history of a piece of memory that nobody uses: its contents have been reset."""
        piece = self.piece_of(start)
        assert piece is not None
        fresh = Shadow(piece.start, piece.end, piece.owner, GIVEN)
        fresh.regions, fresh.belongs_to_user = piece.regions, piece.belongs_to_user
        self._pieces[self._pieces.index(piece)] = fresh
        if self.races is not None:
            self.races.forget(piece)

    def describe(self, address: int) -> str:
        """An address in readable form."""
        piece = self.piece_of(address)
        return piece.describe(address) if piece is not None else f"{address:#x}"

    def _is_named(self, address: int) -> bool:
        """Does this address have a name that the author of a kernel knows?"""
        piece = self.piece_of(address)
        return piece is not None and any(region.name != OWN for region in piece.regions)

    def allow_multicast(self, start: int, size: int, members: Sequence[int]) -> None:
        """Let kernels access the memory of all members through one range of addresses, until `forbid_multicast`."""
        self._multicasts[start] = (start + size, list(members))

    def forbid_multicast(self, start: int) -> None:
        del self._multicasts[start]

    def _members(self, addresses: np.ndarray, size: int, what: str) -> list[np.ndarray]:
        """The addresses of elements of `size` bytes in the memory of each member."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for start, (end, members) in self._multicasts.items():
            if start <= low and high <= end:
                return [(addresses - start + member).astype(np.uint64) for member in members]
        raise SimulatorError(
            f"{what} of {high - low} bytes is outside of every multicast range: use an address that `everywhere` "
            f"(multimem.py) returns{self._here()}"
        )

    def accesses(self, addresses: np.ndarray, size: int, what: str, stores: bool = False) -> list[Access]:
        """The accesses to elements of `size` bytes at these addresses, one per piece of memory. Raises if an element is
        outside of what kernels may access."""
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
        """inside: the piece of memory, and the parts of it that may be accessed."""
        regions = [(region, piece) for piece in self._pieces for region in piece.regions if piece is not inside]
        regions += [(region, inside) for region in of_it if inside is not None]
        where = ""
        if regions:
            # of equally near ones: one that contains it, then an argument of the kernel, then one that ends before it
            region, piece = min(
                regions,
                key=lambda pair: (
                    pair[0].distance(low, high), not pair[0].holds(low, high), not pair[0].lent, pair[0].end > low,
                ),
            )  # fmt: skip
            shape = f" of shape {list(region.shape)}" if region.shape else f" of {region.end - region.start} bytes"
            name = f"{region.name}{piece.where},{shape}"
            if low >= region.end:
                where = f": {low - region.end} bytes after the end of {name}"
            elif high <= region.start:
                where = f": {region.start - low} bytes before the start of {name}"
            elif region.holds(low, high):
                where = f": between the elements of {name}, after {region.place(low)}"
            else:
                where = f": across the edge of {name}"
            if (low - region.start) % (high - low) == 0 and not region.holds(low, high):
                where += f" (element {(low - region.start) // (high - low)}, counted from its first one)"
        return SimulatorError(
            f"{what} of {high - low} bytes is outside of every tensor that the kernel was given{where}"
            + (self._here() if by is None else by)
        )

    def _here(self) -> str:
        """Which CTA is running, and where."""
        cta: Any = running.get(None)
        if cta is None:
            return ""
        return (
            f"\n  rank {cta.rank}, CTA {cta.program_id} of {cta.launch.op}:\n    {self.sites.long(self.sites.here())}"
        )

    def check_request(
        self, launches: Sequence[Keeps], start: int, size: int, what: str, posted_by: Callable[[], str]
    ) -> None:
        """Check the bytes of a segment that a request accesses. One of these launches of its rank has posted it."""
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
        """Undefined bytes stay undefined when they are copied."""
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
        """Load a block. Returns its values, and the accesses."""
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
                    reader = cta.descriptor_reads if path == DESCRIPTOR else cta.main
                    self.races.load(Actor(reader, _thread(cta, path).clock, cta, FENCES[path]), access)
        if touched is addresses and addresses.size == 1:
            value = ctypes.string_at(found[0].low, dtype.itemsize)
            return np.frombuffer(value, dtype=dtype).reshape(addresses.shape), found
        result = _native.load(np.ascontiguousarray(addresses), np.ascontiguousarray(mask),
                              np.ascontiguousarray(np.broadcast_to(other, addresses.shape)), dtype)  # fmt: skip
        return result, found

    def store(
        self, cta: Cta | None, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, path: str = PLAIN
    ) -> list[Access]:
        """Store a block. Returns the accesses."""
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
        """The values of all members at multicast addresses, in random order of the members."""
        members = self._members(addresses, dtype.itemsize, "a multicast load")
        self.rng.shuffle(members)
        zero = np.zeros((), dtype=dtype)
        return [self.load(cta, places, np.ones(places.shape, bool), zero, dtype, MULTICAST)[0] for places in members]

    def atomic(self, cta: Cta | None, addresses: np.ndarray, size: int, changes: bool) -> None:
        """An atomic operation changes or reads words."""
        for access in self.accesses(addresses, size, "an atomic operation", stores=changes):
            if self.races is not None and cta is not None:
                for word in _words(access):
                    self.races.atomic(Actor(cta.atomics, cta.main.clock, cta), word, changes)

    # -- memory itself

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write values to memory."""
        addresses, values = np.ascontiguousarray(addresses), np.ascontiguousarray(values)
        _native.store(addresses, values, np.ones(addresses.shape, dtype=bool))
        self.changed(True, range(int(addresses.min()), int(addresses.max()) + values.itemsize))

    def write_bytes(self, address: int, data: np.ndarray) -> None:
        """Write bytes on behalf of the network."""
        self.write(np.arange(address, address + data.size, dtype=np.uint64), data)

    def changed(self, progress: bool, where: Sequence[int] | range | None = None) -> None:
        """Memory has changed: these words, bytes of this range, or anything."""
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
    """The addresses of the first byte of a tensor and of the byte after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class Keeps:
    """What a launch keeps in a segment."""

    def __init__(self, segment: Hashable, arrays: Sequence[Array]):
        self._segment, self._arrays = segment, arrays
        self._in_copies: dict[Shadow, list[Region]] = {}

    def in_copy(self, piece: Shadow) -> Sequence[Region]:
        """The arrays in a piece of memory, if that is a rank's copy of the segment."""
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
    """For every byte in the extent of a tensor: does it belong to the tensor? None if all do."""
    low, high = extent(tensor)
    size = tensor.element_size()
    if tensor.numel() * size == high - low:
        return None
    inside = torch.zeros(high - low, dtype=torch.bool, device="cpu")
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
