"""Where things lie in a workspace, as a kernel knows it. The host describes a workspace once (`runtime.layout.Layout`)
and hands each array to the kernel as one of these structures, so that no offset is computed in two places.

Signals and buffers exist twice, once for even and once for odd epochs (double buffering): `half` is the distance, or a
constant 0 where they exist once.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Words(NamedTuple):
    """An array of signals, [i, j] or [i], in 64-bit words of a segment. stride: words from one i to the next."""

    start: Any
    half: Any
    stride: Any


class Buffer(NamedTuple):
    """Rows of elements in a segment. start and half: in elements, as the stride of the rows."""

    start: Any
    half: Any
    row_stride: Any


class Slots(NamedTuple):
    """Blocks of SIZE elements in a segment, [i, j]. start, half: in elements; stride: slots from one i to the next."""

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
    """Offset of signal [i, j] in a segment, in words."""
    return words.start + parity(epoch) * words.half + tl.cast(i, tl.int64) * words.stride + j


@triton.jit
def single_word_of(words, i, j):
    """The same of words that exist once. In 32 bits: a workspace has fewer than 2**31 words, and the warps that poll
    have few registers."""
    return words.start + i * words.stride + j


@triton.jit
def row_of(buffer, epoch, row):
    """Offset of a row in a segment, in elements."""
    return buffer.start + parity(epoch) * buffer.half + tl.cast(row, tl.int64) * buffer.row_stride


@triton.jit
def slot_of(slots, epoch, i, j):
    """Offset of slot [i, j] in a segment, in elements."""
    return slots.start + parity(epoch) * slots.half + (tl.cast(i, tl.int64) * slots.stride + j) * slots.SIZE
