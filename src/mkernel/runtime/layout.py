"""The layout of a workspace, described once: sizes for the host, offsets for the kernel, names and bounds for the
simulator.

A workspace holds words that exist once, then two halves of signals, then two halves of buffers. Calls of different
shapes share it: it is as large as the largest of them needs, and its halves never move, so that a signal of one half is
never a signal of the other.

By default signals and buffers are double buffered: they exist in both halves, and a call uses the one of the parity of
its epoch. The buffers of an operator without double buffering (`Layout(op, double_buffered=False)`) exist once, across
both halves. Its signals, which only grow, use one half of the signal words, and its counters, which return to zero, the
other: whatever the shapes of two calls, no word is a signal in one and a counter in the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mkernel.lang.layout import Buffer, Slots, Words
from mkernel.runtime.group import Group, Uses, Workspace
from mkernel.runtime.heap import aligned
from mkernel.runtime.operands import DTYPES, constants
from mkernel.runtime.world import Array

WORD = 8  # bytes


@dataclass(frozen=True)
class _Place:
    """start: offset, in words or bytes, from the start of the words, of a half of the signals or of a half of the
    buffers."""

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
        """The stride of the first index, in items."""
        return math.prod(self.shape[1:])


@dataclass
class Layout:
    """The arrays of one call. Those of `words` must be the same in all calls of an operator on a group."""

    op: str
    double_buffered: bool = True
    _words: dict[str, _Place] = field(default_factory=dict)
    _signals: dict[str, _Place] = field(default_factory=dict)
    _counters: dict[str, _Place] = field(default_factory=dict)
    _buffers: dict[str, _Place] = field(default_factory=dict)

    def words(self, name: str, *shape: int) -> None:
        """Words that exist once."""
        self._words[name] = _Place(_end(self._words), shape)

    def signals(self, name: str, *shape: int) -> None:
        """Words that only grow. Double buffered: they exist in each half."""
        self._signals[name] = _Place(_end(self._signals), shape)

    def counters(self, name: str, *shape: int) -> None:
        """Words that are zero between calls. Only without double buffering."""
        assert not self.double_buffered, f"{self.op}: counters need a layout with double_buffered=False"
        self._counters[name] = _Place(_end(self._counters), shape)

    def buffer(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        """Elements. Double buffered: they exist in each half."""
        self._buffers[name] = _Place(_end_bytes(self._buffers), shape, dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._words or name in self._signals or name in self._buffers

    def workspace(self, group: Group) -> Workspace:
        """A workspace that is large enough for this call. Collective if it must grow."""
        return group.workspace(self.op, signal_words=self._signal_words, half_bytes=self._half_bytes)

    @property
    def nbytes(self) -> int:
        """The size of the smallest workspace for this call."""
        return aligned(self._signal_words * WORD) + 2 * self._half_bytes

    @property
    def _signal_words(self) -> int:
        return max(_end(self._words) + 2 * max(_end(self._signals), _end(self._counters)), 1)

    @property
    def _half_bytes(self) -> int:
        nbytes = _end_bytes(self._buffers)
        return nbytes if self.double_buffered else -(-nbytes // 2)

    # -- for the kernel

    def words_in(self, workspace: Workspace, name: str) -> Words:
        """Words, signals or counters of a workspace."""
        start, place = self._start_of(workspace, name)
        half = self._half_words(workspace) if self.double_buffered and name in self._signals else constants(0)[0]
        return Words(start, half, place.stride)

    def buffer_in(self, workspace: Workspace, name: str) -> Buffer:
        """A buffer of a workspace."""
        place = self._buffers[name]
        half = workspace.half_bytes // place.item if self.double_buffered else constants(0)[0]
        return Buffer((workspace.data_start + place.start) // place.item, half, place.stride)

    def tensor_in(self, workspace: Workspace, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A buffer that exists once, as a tensor."""
        assert not self.double_buffered, f"{self.op}: {name} exists twice"
        place = self._buffers[name]
        start = workspace.data_start + place.start
        return workspace.segment.memory[start : start + place.size * place.item].view(dtype).view(place.shape)

    def slots_in(self, workspace: Workspace, name: str) -> Slots:
        """A buffer [i, j, element] of a workspace, as slots [i, j]."""
        place = self._buffers[name]
        _, slots, size = place.shape
        start, half, _ = self.buffer_in(workspace, name)
        return Slots(start, half, slots, *constants(size, DTYPES[place.dtype]))

    # -- for the simulator

    def uses(self, workspace: Workspace, free: Mapping[str, tuple[tuple[int, int], ...] | None] | None = None) -> Uses:
        """What a launch may access. free: buffer -> the ranges of its first index that nobody may read after the
        launch; None means the whole buffer."""
        arrays = []
        for name in (*self._words, *self._counters, *self._signals):
            start, place = self._start_of(workspace, name)
            if self.double_buffered and name in self._signals:
                strides = (
                    self._half_words(workspace),
                    *(math.prod(place.shape[i + 1 :]) for i in range(len(place.shape))),
                )
                arrays.append(Array(name, start * WORD, (2, *place.shape), WORD, strides))
            else:
                arrays.append(Array(name, start * WORD, place.shape, WORD))
        for name, place in self._buffers.items():
            if self.double_buffered:
                arrays += workspace.buffers(place.start, name, place.item, *place.shape)
            else:
                arrays.append(Array(name, workspace.data_start + place.start, place.shape, place.item))
        ranges = []
        for name, indices in (free or {}).items():
            place = self._buffers[name]
            step = place.stride * place.item
            ranges += [
                (place.start + first * step, place.start + end * step)
                for first, end in indices or ((0, place.shape[0]),)
            ]
        return Uses(workspace, arrays, ranges, whole=not self.double_buffered)

    def _start_of(self, workspace: Workspace, name: str) -> tuple[int, _Place]:
        """The offset of the words of that name in the workspace, and their description."""
        if name in self._words:
            return self._words[name].start, self._words[name]
        common = _end(self._words)
        if name in self._counters:
            return common + self._counters[name].start, self._counters[name]
        first = 0 if self.double_buffered else self._half_words(workspace)
        return common + first + self._signals[name].start, self._signals[name]

    def _half_words(self, workspace: Workspace) -> int:
        return (workspace.signal_words - _end(self._words)) // 2


def _end(places: dict[str, _Place]) -> int:
    """The end of the last of these, in words."""
    return max((place.start + place.size for place in places.values()), default=0)


def _end_bytes(places: dict[str, _Place]) -> int:
    """The end of the last of these, in bytes, rounded up to the alignment."""
    end = max((place.start + place.size * place.item for place in places.values()), default=0)
    return aligned(end)
