"""What a call keeps in its workspace, described once: sizes for the host, offsets for the kernel, names and bounds for
the simulator.

A workspace holds words that exist once (counters, flags that only grow), then two halves of signals, then two halves of
buffers. Calls of other shapes share it: it is as large as the largest of them needs, and its halves stay where they
are, so that a signal of one half is never a signal of the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mkernel.lang.layout import Buffer, Slots, Words
from mkernel.runtime.group import Group, Uses, Workspace
from mkernel.runtime.heap import ALIGNMENT
from mkernel.runtime.operands import DTYPES, constants
from mkernel.runtime.world import Array

WORD = 8  # bytes


@dataclass(frozen=True)
class _Place:
    """start: words or bytes from the beginning of the words, of a half of the signals, or of a half of the buffers."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stride(self) -> int:
        """Items from one first index to the next."""
        return math.prod(self.shape[1:])


@dataclass
class Layout:
    """The arrays of one call. Those of `words` must be the same in all calls of an operator on a group."""

    op: str
    _words: dict[str, _Place] = field(default_factory=dict)
    _signals: dict[str, _Place] = field(default_factory=dict)
    _buffers: dict[str, _Place] = field(default_factory=dict)

    def words(self, name: str, *shape: int) -> None:
        """Words that exist once."""
        self._words[name] = _Place(_end(self._words), shape)

    def signals(self, name: str, *shape: int) -> None:
        """Words that exist in each half."""
        self._signals[name] = _Place(_end(self._signals), shape)

    def buffer(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        """Elements that exist in each half."""
        self._buffers[name] = _Place(_end_bytes(self._buffers), shape, dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._words or name in self._signals or name in self._buffers

    def workspace(self, group: Group) -> Workspace:
        """A workspace with room for this call. Collective if it must grow."""
        signal_words = _end(self._words) + 2 * _end(self._signals)
        return group.workspace(self.op, signal_words=max(signal_words, 1), half_bytes=_end_bytes(self._buffers))

    # -- for the kernel

    def words_in(self, workspace: Workspace, name: str) -> Words:
        """Words, or signals, of a workspace."""
        if name in self._words:
            place = self._words[name]
            return Words(place.start, 0, place.stride)
        place = self._signals[name]
        return Words(_end(self._words) + place.start, self._half_words(workspace), place.stride)

    def buffer_in(self, workspace: Workspace, name: str) -> Buffer:
        """A buffer of a workspace."""
        place = self._buffers[name]
        return Buffer(
            (workspace.data_start + place.start) // place.item, workspace.half_bytes // place.item, place.stride
        )

    def slots_in(self, workspace: Workspace, name: str) -> Slots:
        """A buffer [i, j, element] of a workspace, as slots [i, j]."""
        place = self._buffers[name]
        _, slots, size = place.shape
        start, half, _ = self.buffer_in(workspace, name)
        return Slots(start, half, slots, *constants(size, DTYPES[place.dtype]))

    # -- for the simulator

    def uses(self, workspace: Workspace, free: Mapping[str, tuple[tuple[int, int], ...] | None] | None = None) -> Uses:
        """What a launch may touch. free: of some buffers, the ranges of first indices that nobody may read once the
        launch is over; None: all of the buffer."""
        arrays = [Array(name, place.start * WORD, place.shape, WORD) for name, place in self._words.items()]
        common, half = _end(self._words), self._half_words(workspace)
        for name, place in self._signals.items():
            start = (common + place.start) * WORD
            strides = (half, *(math.prod(place.shape[axis + 1 :]) for axis in range(len(place.shape))))
            arrays.append(Array(name, start, (2, *place.shape), WORD, strides))
        for name, place in self._buffers.items():
            arrays += workspace.buffers(place.start, name, place.item, *place.shape)
        ranges = []
        for name, indices in (free or {}).items():
            place = self._buffers[name]
            step = place.stride * place.item
            ranges += [
                (place.start + first * step, place.start + end * step)
                for first, end in indices or ((0, place.shape[0]),)
            ]
        return Uses(workspace, arrays, ranges)

    def _half_words(self, workspace: Workspace) -> int:
        return (workspace.signal_words - _end(self._words)) // 2


def _end(places: dict[str, _Place]) -> int:
    """Words behind the last of these."""
    return max((place.start + place.size for place in places.values()), default=0)


def _end_bytes(places: dict[str, _Place]) -> int:
    """Bytes to the next aligned place behind the last of these."""
    end = max((place.start + place.size * place.item for place in places.values()), default=0)
    return -(-end // ALIGNMENT) * ALIGNMENT
