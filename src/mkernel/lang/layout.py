"""The kernel's view of a workspace. The host describes the workspace once (`runtime.layout.Layout`) and passes each
array to the kernel as one of these structures, so that no offset is computed in two places.

Signals and buffers are double buffered: there is one copy for even epochs and one for odd epochs, `half` words or
elements apart. `half` is a constant 0 for arrays that exist only once.

The functions return offsets from the start of a segment. Add them to `segment_of(context, rank, dtype)` for a pointer
into the memory of any rank of the node: the same offset is valid on every rank.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Words(NamedTuple):
    """An array of 64-bit words in a segment, [i, j] or [i]: signals, counters, or any other words.

    Attributes:
        start: offset of the first word in the segment, in words.
        half: words from the copy for even epochs to the copy for odd epochs; a constant 0 if there is one copy.
        stride: words from one i to the next.
    """

    start: Any
    half: Any
    stride: Any


class Buffer(NamedTuple):
    """Rows of elements in a segment.

    Attributes:
        start: offset of the first row in the segment, in elements.
        half: elements from the copy for even epochs to the copy for odd epochs; a constant 0 if there is one copy.
        row_stride: elements from one row to the next.
    """

    start: Any
    half: Any
    row_stride: Any


class Slots(NamedTuple):
    """Fixed-size blocks in a segment, [i, j], each for one tile in transit.

    Attributes:
        start: offset of the first slot in the segment, in elements.
        half: elements from the copy for even epochs to the copy for odd epochs; a constant 0 if there is one copy.
        stride: slots from one i to the next.
        SIZE: elements of a slot, a constant.
        DTYPE: type of the elements, a constant.
    """

    start: Any
    half: Any
    stride: Any
    SIZE: Any
    DTYPE: Any


@triton.jit
def parity(epoch):
    """Which half an epoch uses."""
    return epoch % 2


@triton.jit
def word_of(words, epoch, i, j):
    """Offset of word [i, j] of this epoch's copy in a segment, in words (64-bit integer)."""
    return words.start + parity(epoch) * words.half + tl.cast(i, tl.int64) * words.stride + j


@triton.jit
def single_word_of(words, i, j):
    """`word_of` for words that exist once, as a 32-bit integer if `i` is one. A workspace has fewer than 2**31 words,
    and the warps that poll have few registers."""
    return words.start + i * words.stride + j


@triton.jit
def row_of(buffer, epoch, row):
    """Offset of a row of this epoch's copy in a segment, in elements (64-bit integer)."""
    return buffer.start + parity(epoch) * buffer.half + tl.cast(row, tl.int64) * buffer.row_stride


@triton.jit
def slot_of(slots, epoch, i, j):
    """Offset of slot [i, j] of this epoch's copy in a segment, in elements (64-bit integer)."""
    return slots.start + parity(epoch) * slots.half + (tl.cast(i, tl.int64) * slots.stride + j) * slots.SIZE
