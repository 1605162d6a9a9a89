"""The symmetric heap: memory that every rank of a group has at the same place.

The heap is a list of segments; an allocation is a segment of its own, so the heap grows by itself
and nothing is ever moved. Allocation is collective: every rank of the group asks for the same number
of bytes, in the same order. A segment's memory is given back when all ranks have dropped it: since
Python may free things in another order on every rank, each rank tells the others at the next
allocation what it has dropped, and only what all have dropped is given back then (or when the group
is closed).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.world import Part

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

ALIGNMENT = 1024


@dataclass(eq=False)
class Segment:
    """One allocation, on this rank and on all others of the group."""

    number: int
    memory: torch.Tensor  # this rank's bytes
    addresses: list[int]  # of every rank's bytes; 0 where they are not mapped (other nodes)
    multicast: int  # address of all ranks' bytes at once; 0 where there is none, then on all ranks


class Heap:
    """One group's symmetric heap, seen from one rank."""

    def __init__(self, group: Group):
        self._group = weakref.proxy(group)
        self._segments: dict[int, Segment] = {}
        self._dropped: set[int] = set()
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes that this rank's segments hold now."""
        return sum(segment.memory.numel() for segment in self._segments.values())

    @torch.inference_mode(False)  # outside of it, too, the memory will be written to
    def allocate(
        self, nbytes: int, call: Hashable = None, replaces: Segment | None = None, parts: Sequence[Part] = ()
    ) -> Segment:
        """A new segment of zeroed bytes. Collective. `call`: what it is for, the same on every rank. `replaces`: what
        is dropped for it, as soon as all ranks have agreed. `parts`: what it consists of."""
        group = self._group
        dropped = self._dropped | ({replaces.number} if replaces is not None else set())
        wishes = group.exchange("heap", (nbytes, sorted(dropped)), call)
        sizes = [size for size, _ in wishes]
        if len(set(sizes)) > 1:
            problem = ArgumentError(
                "symmetric memory must have the same size on every rank of the group; asked for by rank: "
                + ", ".join(f"{rank}: {size} bytes" for rank, size in enumerate(sizes))
            )
            problem.on_every_rank = True
            raise problem
        # whatever fails on one rank from here on, all have numbered and dropped alike
        number, self._next = self._next, self._next + 1
        self._dropped |= dropped
        self._free(set.intersection(*(set(theirs) for _, theirs in wishes)))
        world = group.world
        memory = world.memory.allocate(group.world_rank, -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT)
        world.memory.describe(group, number, memory, parts)
        addresses = world.memory.map(group, memory)
        segment = Segment(number, memory, addresses, world.memory.map_multicast(group, memory, addresses))
        self._segments[number] = segment
        world.network.register(group, number, memory)
        group.barrier()
        return segment

    def drop(self, segment: Segment) -> None:
        """This rank will not use the segment any more."""
        self._dropped.add(segment.number)

    def holds(self, segment: Segment) -> bool:
        """Has the segment not been given back?"""
        return segment.number in self._segments

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a segment of its own, which is dropped when the tensor and its views are gone."""
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.itemsize
        segment = self.allocate(nbytes, parts=[Part("a tensor of mk.empty", 0, nbytes, "tensor")])
        # another storage object over the same memory, so that its end can be seen
        alias = torch.from_dlpack(segment.memory)
        weakref.finalize(alias.untyped_storage(), _drop, weakref.ref(self), segment.number)
        return alias[:nbytes].view(dtype).view(shape)

    def segments(self) -> list[tuple[int, torch.Tensor]]:
        """This rank's segments: their numbers and their memory."""
        return [(segment.number, segment.memory) for segment in self._segments.values()]

    def find(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """The segment that a tensor lies in, and its offset there in bytes; None for plain tensors."""
        address = tensor.data_ptr()
        for segment in self._segments.values():
            start = segment.memory.data_ptr()
            if start <= address < start + segment.memory.numel():
                return segment, address - start
        return None

    def close(self) -> None:
        """Give everything back. All ranks must be done with it."""
        self._free(set(self._segments))

    def _free(self, numbers: set[int]) -> None:
        if not numbers:
            return
        self._group.quiet()
        self._group.barrier()
        for number in sorted(numbers):
            self._group.world.network.register(self._group, number, None)
            self._group.world.memory.unmap(self._segments.pop(number).memory)
        self._dropped -= numbers


def _drop(heap: Callable[[], Any], number: int) -> None:
    alive = heap()
    if alive is not None:
        alive._dropped.add(number)
