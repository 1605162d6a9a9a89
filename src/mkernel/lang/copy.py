"""Copies between the ranks of a node: ordinary loads and stores through mapped pointers.

Data is pushed: the rank that has it reads it once and writes it to every rank that needs it. Pushed
data needs no place in the symmetric heap on the sender's side, so a plain tensor, also one with
strides, is sent as it is; and one load serves all peers.

Measured on an H200 with a GEMM on the other CTAs, in an early version of the kernel: one CTA pushes 37
GB/s to three peers, whether it loads 32 or 64 KB at a time. Stores through tensor descriptors gave 22
to 32 GB/s, depending on the stages: Triton waits for each one before the next. The loop over the peers
is unrolled; that it pays was not measured by itself.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import segment_of, state_of
from mkernel.lang.device import clock


class Peers(NamedTuple):
    """Ranks `base + (first + i) % modulus`, for i in 0..COUNT-1."""

    base: Any
    first: Any
    modulus: Any
    COUNT: Any


@triton.jit
def push_rows(context, source, target, rows, columns, peers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy `rows` x `columns` elements of a block to a block in several ranks' copies of the segment.
    ROWS x COLUMNS elements are in flight at once."""
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
def pace(start, sent, nanoseconds_per_mib):
    """Wait until `sent` bytes would have taken their time on a link of the given rate since `start`.
    Only measurements use it: it makes one GPU's memory look like a link between GPUs."""
    while clock() - start < (sent * nanoseconds_per_mib) >> 20:
        pass


# A word of the workspace's state: when the rank's paced link will have carried what was reserved.
LINK_FREE = tl.constexpr(4)


@triton.jit
def reserve_link(context, size, nanoseconds_per_mib):
    """Put `size` bytes into the queue of a paced link that all CTAs of the rank share; the time when they are through.
    Unlike with `pace`, time in which nothing was to be sent is not made up for. Only measurements use it."""
    free = state_of(context) + LINK_FREE
    duration = (size * nanoseconds_per_mib) >> 20
    tl.atomic_max(free, clock(), sem="relaxed", scope="gpu")
    return tl.atomic_add(free, duration, sem="relaxed", scope="gpu") + duration


@triton.jit
def await_link(end):
    """Wait until a reservation is through."""
    while clock() < end:
        pass
