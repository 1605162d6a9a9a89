"""The symmetric heap: memory that every rank of a group has under the same segment number and offset.

The heap is a list of segments. Every allocation is a segment of its own, so the heap grows on demand and nothing ever
moves. Allocation is collective: every rank asks for the same number of bytes, in the same order. A segment is freed
once all ranks have dropped it. Python may free objects in a different order on every rank, so ranks exchange what they
have dropped at the next allocation, and free only what all of them have dropped (or everything, when the group is
closed).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.world import Part

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

ALIGNMENT = 1024


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Segment:
    """One allocation, which every rank of the group has."""

    number: int
    memory: torch.Tensor  # this rank's bytes
    addresses: list[int]  # of every rank's bytes; 0 if they are not mapped (other nodes)
    multicast: int  # multicast address of all ranks' bytes; 0 on all ranks if there is none


class Heap:
    """The symmetric heap of one group, on one rank."""

    def __init__(self, group: Group):
        self._group = weakref.proxy(group)
        self._segments: dict[int, Segment] = {}
        self._dropped: set[int] = set()
        self._next = 0
        self._edges: list[int] = []  # where segments begin and end, in order

    @property
    def nbytes(self) -> int:
        """How many bytes this rank's segments have."""
        return sum(segment.memory.numel() for segment in self._segments.values())

    @torch.inference_mode(False)  # the memory will also be written outside of inference mode
    def allocate(
        self, nbytes: int, call: Hashable = None, replaces: Segment | None = None, parts: Sequence[Part] = ()
    ) -> Segment:
        """A new segment of zeroed bytes. Collective. `call`: what it is for, the same on every rank. `replaces`: a
        segment to drop for it once all ranks have agreed. `parts`: what it consists of."""
        group = self._group
        dropped = self._dropped | ({replaces.number} if replaces is not None else set())
        freed = sorted(dropped) if not group.capturing else []  # freeing waits for streams, and captured ones never end
        requested = group.exchange("heap", (nbytes, freed), call)
        sizes = [size for size, _ in requested]
        if len(set(sizes)) > 1:
            problem = ArgumentError(
                "symmetric memory must have the same size on every rank of the group; sizes by rank: "
                + ", ".join(f"{rank}: {size} bytes" for rank, size in enumerate(sizes))
            )
            problem.on_every_rank = True
            raise problem
        # whatever fails on one rank from here on: all ranks have the same numbers and have dropped the same segments
        number, self._next = self._next, self._next + 1
        self._dropped |= dropped
        self._free(set.intersection(*(set(theirs) for _, theirs in requested)))
        world = group.world
        memory = world.memory.allocate(group.world_rank, aligned(max(nbytes, 1)))
        world.memory.describe(group, number, memory, parts)
        addresses = world.memory.map(group, memory)
        segment = Segment(number, memory, addresses, world.memory.map_multicast(group, memory, addresses))
        self._segments[number] = segment
        self._changed()
        world.network.register(group, number, memory)
        group.barrier()
        return segment

    def holds(self, segment: Segment) -> bool:
        """Is the segment still allocated?"""
        return segment.number in self._segments

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a segment of its own, which is dropped with the last view of the tensor."""
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.itemsize
        segment = self.allocate(nbytes, parts=[Part("a tensor of mk.empty", 0, nbytes, "tensor")])
        # another storage object over the same memory, whose finalizer tells when the user's views are gone
        alias = torch.from_dlpack(segment.memory)
        weakref.finalize(alias.untyped_storage(), _drop, weakref.ref(self), segment.number)
        return alias[:nbytes].view(dtype).view(shape)

    def segments(self) -> list[tuple[int, torch.Tensor]]:
        """The numbers and the memory of this rank's segments."""
        return [(segment.number, segment.memory) for segment in self._segments.values()]

    def find(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """The segment that holds a tensor, and the tensor's offset there in bytes; None for plain tensors."""
        address = tensor.data_ptr()
        for segment in self._segments.values():
            start = segment.memory.data_ptr()
            if start <= address < start + segment.memory.numel():
                return segment, address - start
        return None

    def holds_one_of(self, addresses: Sequence[int]) -> bool:
        """Is one of these addresses in a segment?"""
        for address in addresses:  # noqa: SIM110 (every call asks, and a generator takes twice as long)
            if bisect_right(self._edges, address) % 2:
                return True
        return False

    def close(self) -> None:
        """Free all segments. Collective."""
        self._free(set(self._segments))

    def _free(self, numbers: set[int]) -> None:
        if not numbers:
            return
        self._group.quiet()
        self._group.world.network.wait_until_arrived(self._group)
        for number in sorted(numbers):
            self._group.world.network.register(self._group, number, None)
            self._group.world.memory.unmap(self._segments.pop(number).memory)
        self._dropped -= numbers
        self._changed()

    def _changed(self) -> None:
        self._group.prepared.forget()
        memories = [segment.memory for segment in self._segments.values()]
        self._edges = sorted(edge for memory in memories for edge in _ends(memory))


def _ends(memory: torch.Tensor) -> tuple[int, int]:
    """The addresses where memory begins and ends."""
    return memory.data_ptr(), memory.data_ptr() + memory.numel()


def _drop(heap: Callable[[], Any], number: int) -> None:
    alive = heap()
    if alive is not None:
        alive._dropped.add(number)
