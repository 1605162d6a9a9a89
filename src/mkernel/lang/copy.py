"""Copies between the ranks of a node: plain loads and stores through mapped pointers.

Data is pushed: its owner reads it once and writes it to every rank that needs it. The source need not be in the
symmetric heap, so a plain tensor, of any strides, is sent without staging, and one load serves all peers.

Measured on an H200 with a GEMM on the other CTAs, in an early version of the kernel: one CTA pushes 37 GB/s to three
peers, whether it loads 32 or 64 KB at a time. Stores through tensor descriptors gave 22 to 32 GB/s, depending on the
number of stages, because Triton waits for each store before the next. The loop over the peers is unrolled; the effect
of that was not measured separately.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import segment_of, state_of
from mkernel.lang.device import clock


class Peers(NamedTuple):
    """The ranks `base + (first + i) % modulus`, for i in 0..COUNT-1.

    Attributes:
        base: the first rank of the node.
        first: the first peer to write to, counted from `base`; the next rank, so that ranks start with different peers.
        modulus: ranks to wrap around at, usually those of the node.
        COUNT: how many peers, a constant.
    """

    base: Any
    first: Any
    modulus: Any
    COUNT: Any


@triton.jit
def push_rows(context, source, target, rows, columns, peers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy `rows` x `columns` elements from the block `source` to the same place in the segments of several peers.

    `target.data` is the offset in the segment; the columns of the target are contiguous. ROWS x COLUMNS elements are in
    flight at once. The caller signals the copy with `notify` afterwards.
    """
    DTYPE: tl.constexpr = source.data.dtype.element_ty
    for row in range(0, rows, ROWS):
        for column in range(0, columns, COLUMNS):
            i = row + tl.arange(0, ROWS)[:, None]
            j = column + tl.arange(0, COLUMNS)[None, :]
            inside = (i < rows) & (j < columns)
            block = tl.load(
                source.data + i.to(tl.int64) * source.row_stride + j.to(tl.int64) * source.column_stride, mask=inside
            )
            for i_peer in tl.static_range(peers.COUNT):
                segment = segment_of(context, peers.base + (peers.first + i_peer) % peers.modulus, DTYPE)
                tl.store(segment + target.data + i.to(tl.int64) * target.row_stride + j, block, mask=inside)


@triton.jit
def wait_paced(start, sent, nanoseconds_per_mib):
    """Wait until a link of the given rate would have carried `sent` bytes since `start`. For measurements only: it
    makes the memory of one GPU behave like a link between GPUs."""
    while clock() - start < (sent * nanoseconds_per_mib) >> 20:
        pass


# A word of the workspace's state: when the rank's paced link will have carried everything that was reserved.
LINK_FREE = tl.constexpr(4)


@triton.jit
def reserve_link(context, size, nanoseconds_per_mib):
    """Queue `size` bytes on the paced link that all CTAs of the rank share. Returns the time at which they will be
    through, for `wait_link`. Unlike with `wait_paced`, idle time of the link is lost. For measurements only."""
    free = state_of(context) + LINK_FREE
    duration = (size * nanoseconds_per_mib) >> 20
    tl.atomic_max(free, clock(), sem="relaxed", scope="gpu")
    return tl.atomic_add(free, duration, sem="relaxed", scope="gpu") + duration


@triton.jit
def wait_link(end):
    """Wait until the time that `reserve_link` returned."""
    while clock() < end:
        pass
