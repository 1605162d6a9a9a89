"""Shared memory of Gluon kernels: allocations, and views of them with a layout.

A layout says where in memory an element lies, which matters when the same memory is viewed with another shape, as by
`reinterpret`. Swizzling within 16-byte pieces of rows is left out: it is the same in all views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.sim.cta import running
from mkernel.sim.dtypes import INTEGER, KernelError, NoAttribute, describe, from_memory, info, to_memory
from mkernel.sim.races import Actor
from mkernel.sim.shadow import Access, Region
from mkernel.sim.tensors import Tensor, convert

if TYPE_CHECKING:
    from mkernel.sim.memory import Memory

ALIGNMENT = 1024  # of allocations, in bytes
MOST_BYTES = 227 * 1024  # of a CTA, on Hopper


class Allocation:
    """An allocation of a CTA."""

    def __init__(self, memory: Memory, owner: int, nbytes: int, name: str):
        spare = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -spare.ctypes.data % ALIGNMENT
        self.data = spare[start : start + nbytes]
        self.address = self.data.ctypes.data
        self.name = name
        memory.add_unwritten(self.address, nbytes, owner, Region(name, self.address, self.address + nbytes))
        piece = memory.piece_of(self.address)
        assert piece is not None
        self.shadow = piece

    def free(self, memory: Memory) -> None:
        memory.remove(self.address)


def _bits(layout: Any) -> int:
    return int(layout.element_bitwidth)


@lru_cache(maxsize=256)
def _places(kind: str, key: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Where each element lies, counted in elements."""
    size = math.prod(shape)
    if kind == "order":  # the first dimension of the order varies fastest
        places, step = np.zeros(shape, dtype=np.int64), 1
        for axis in key:
            along = [1] * len(shape)
            along[axis] = shape[axis]
            places = places + (np.arange(shape[axis]) * step).reshape(along)
            step *= shape[axis]
    elif kind == "columns":  # blocks of columns, one after the other
        (wide,) = key
        rows, columns = size // shape[-1], shape[-1]
        row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
        wide = min(wide, columns)
        places = (column // wide * rows * wide + row * wide + column % wide).reshape(shape)
    else:  # a linear layout: the bits of a place, and what they add to the coordinates
        coordinates = np.zeros((size, len(shape)), dtype=np.int64)
        for bit, basis in enumerate(key):
            chosen = (np.arange(size) >> bit & 1).astype(bool)
            coordinates[chosen] ^= np.array(basis)
        places = np.empty(shape, dtype=np.int64)
        places[tuple(coordinates.T)] = np.arange(size)
    places.flags.writeable = False
    return places


def places_of(layout: Any, shape: Sequence[int], bits: int) -> np.ndarray:
    """Where each element of a block of this shape lies, counted in elements. Dimensions that the layout does not have
    come first, and are those of an array of blocks."""
    name = type(layout).__name__
    if name == "NVMMASharedLayout":
        rank, transposed = int(layout.rank), bool(layout.transposed)
        if _bits(layout) != bits:
            raise KernelError(f"a layout of elements of {_bits(layout)} bits for elements of {bits} bits")
        outer, block = tuple(shape[: len(shape) - rank]), list(shape[len(shape) - rank :])
        if transposed:
            block[-2:] = block[:-3:-1]
        wide = int(layout.swizzle_byte_width) * 8 // bits or block[-1]
        places = _places("columns", (wide,), tuple(block))
        if transposed:
            places = places.swapaxes(-1, -2)
    elif name in ("SwizzledSharedLayout", "MBarrierLayout"):
        rank = len(layout.order)
        outer, block = tuple(shape[: len(shape) - rank]), list(shape[len(shape) - rank :])
        places = _places("order", tuple(layout.order), tuple(block))
    elif name == "SharedLinearLayout":
        bases = tuple(tuple(basis) for basis in layout.offset_bases)
        outer, block = tuple(shape[: len(shape) - len(bases[0])]), list(shape[len(shape) - len(bases[0]) :])
        places = _places("bits", bases, tuple(block))
    else:
        raise KernelError(f"the simulator does not know the layout {layout}")
    for count in reversed(outer):
        places = np.arange(count).reshape(-1, *[1] * places.ndim) * places.size + places
    return places


class SharedBlock:
    """What kernels see as `gl.shared_memory_descriptor`."""

    __slots__ = ("_allocation", "_base", "_places", "dtype", "layout")

    def __init__(self, allocation: Allocation, base: int, places: np.ndarray, dtype: Any, layout: Any):
        self._allocation = allocation
        self._base = base  # in bytes
        self._places = places  # in elements
        self.dtype = dtype
        self.layout = layout

    @property
    def shape(self) -> list[int]:
        return list(self._places.shape)

    @property
    def rank(self) -> int:
        return self._places.ndim

    @property
    def numel(self) -> int:
        return self._places.size

    @property
    def type(self) -> SharedBlock:
        return self

    @property
    def address(self) -> int:
        return self._allocation.address + self._base + int(self._places.flat[0]) * self._size

    @property
    def _size(self) -> int:
        return info(self.dtype).memory.itemsize

    def __str__(self) -> str:
        return f"shared memory {self.dtype}{self.shape}"

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        raise NoAttribute(f"shared memory has no attribute `{name}` in the simulator")

    def _with(self, places: np.ndarray) -> SharedBlock:
        return SharedBlock(self._allocation, self._base, places, self.dtype, self.layout)

    # -- views

    def index(self, index: Any) -> SharedBlock:
        number = _whole(index)
        if not 0 <= number < len(self._places):
            raise KernelError(f"index({number}) is not in {self}")
        return self._with(self._places[number])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> SharedBlock:
        first, count = _whole(start), _whole(length)
        if first < 0 or first + count > self.shape[dim]:
            raise KernelError(f"slice({first}, {count}, dim={dim}) is not in {self}")
        return self._with(self._places[(slice(None),) * dim + (slice(first, first + count),)])

    def permute(self, order: Sequence[int]) -> SharedBlock:
        return self._with(self._places.transpose(tuple(order)))

    def reshape(self, shape: Sequence[int]) -> SharedBlock:
        return self._with(self._places.reshape(tuple(shape)))

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> SharedBlock:
        places = places_of(layout, [_whole(size) for size in shape], info(dtype).bits)
        first, nbytes = int(self._places.min()), places.size * info(dtype).memory.itemsize
        if int(self._places.max()) + 1 - first != self.numel or nbytes > self.numel * self._size:
            raise KernelError(f"{self} cannot be reinterpreted as {dtype}{list(shape)}: it has gaps, or is too small")
        return SharedBlock(self._allocation, self._base + first * self._size, places, dtype, layout)

    _reinterpret = reinterpret

    def _keep_alive(self) -> None: ...

    def is_contiguous_along(self, axis: int) -> bool:
        """Are the first two elements along an axis neighbours?"""
        second = tuple(int(each == axis) for each in range(self.rank))
        return bool(self._places[second] == self._places.flat[0] + 1)

    # -- contents

    def _access(self) -> Access:
        size = self._size
        low, high = int(self._places.min()), int(self._places.max()) + 1
        start = self._allocation.address + self._base
        if high - low == self._places.size:  # a range, in some order
            return Access(self._allocation.shadow, self._places, size, start + low * size, start + high * size, True)
        addresses = (start + self._places * size).astype(np.uint64)
        return Access(self._allocation.shadow, addresses, size, start + low * size, start + high * size)

    def _elements(self) -> np.ndarray:
        """The array of which `_places` has the indices."""
        return self._allocation.data[self._base :].view(info(self.dtype).memory)

    def read(self, actor: Actor | None = None) -> Tensor:
        """The contents. actor: the reader; None for the warps themselves."""
        cta: Any = running.get()
        order, races = cta.checked, cta.scheduler.memory.races
        if order is not None and races is not None:
            races.load(actor or Actor(order.main, order.main.clock, order), self._access())
        return Tensor(from_memory(self._elements()[self._places], self.dtype), self.dtype)

    def write(self, value: Tensor, actor: Actor | None = None) -> None:
        """Write the contents; actor: as for `read`."""
        cta: Any = running.get()
        order, races = cta.checked, cta.scheduler.memory.races
        if value.shape != self._places.shape:
            raise KernelError(f"{describe(value)} does not fit {self}")
        if order is not None and races is not None:
            races.store(actor or Actor(order.stored, order.main.clock, order), self._access())
        elements = self._elements()
        elements[self._places] = to_memory(value._data, self.dtype)
        cta.scheduler.memory.progress += 1

    def load(self, layout: Any = None) -> Tensor:
        return self.read()

    def store(self, value: Tensor) -> None:
        if value.dtype is not self.dtype:
            raise KernelError(f"{describe(value)} is stored to {self}: cast it first")
        self.write(Tensor(convert(value._data, value.dtype, self.dtype), self.dtype))


def _whole(value: Any) -> int:
    """A number, or an integer scalar."""
    if type(value) is not Tensor:
        return int(value)
    if value.shape or info(value.dtype).kind > INTEGER:
        raise KernelError(f"expected an integer scalar, got {describe(value)}")
    return int(value._data)
