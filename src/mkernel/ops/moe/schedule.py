"""The schedule: the blocks of rows of this rank, in the order in which they are computed.

`schedule_blocks` cuts each expert's rows into blocks of a tile's height and puts the blocks into an order. In general
it is that in which their last rows arrive: those with own rows only, those of the node, those of other nodes, earlier
pieces of these first. But blocks of one expert that are computed at the same time read its matrix once, so there are
few such classes, and within a class the blocks are in the order of experts. (With every block in the order of its
arrival, an H200 read 484 MB of matrices for a round of tiles, in the 100 us that its memory needs for that; the tiles
themselves take 80. With 4 ranks on the GPU, classes with 2 blocks of each expert took 120 to 140 us a tile, with 4
blocks 100.) Blocks of an expert and a class are a group, whose tiles go column by column: all of them read the same
columns of the matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import rank_of
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import wait
from mkernel.ops.moe.kinds import SCHEDULED
from mkernel.ops.moe.protocol import signal_of
from mkernel.ops.moe.routing import BEFORE_NODE, BLOCKS, ENTRY, OK, STATUS

MOST_BINS = tl.constexpr(8)  # pieces of a source's tokens that the order of blocks tells apart, at the most
KEYS = tl.constexpr(16)  # a power of two above MOST_BINS + 2
FEW_BINS = tl.constexpr(4)  # if there are fewer, classes are made otherwise
SORTED_AT_ONCE = tl.constexpr(256)
BLOCKS_AT_ONCE = tl.constexpr(128)


class Span(NamedTuple):
    """Rows of some blocks: each block has `rows` rows of an expert, from `row` on; low and high are the (expert,
    source) that the first and the last of them come from, as indices of `Tables.bases`."""

    expert: Any
    row: Any
    rows: Any
    low: Any
    high: Any


@triton.jit
def _last_at_most(values, count, wanted, WIDTH: tl.constexpr):
    """For each wanted number: the index of the last of `count` growing values that is not above it."""
    found = tl.zeros((WIDTH,), tl.int32) - 1
    for start in range(0, count, 64):
        i = start + tl.arange(0, 64)
        value = tl.load(values + i, mask=i < count, other=0x7FFFFFFF)
        found += tl.sum((value[None, :] <= wanted[:, None]).to(tl.int32), axis=1)
    return found


@triton.jit
def _span_of(comm, tables, experts, block, inside, TILE_M: tl.constexpr):
    """The rows of some blocks, a `Span`."""
    expert = _last_at_most(tables.first_blocks, experts, block, BLOCKS_AT_ONCE)
    base = tl.load(tables.bases + expert * comm.WORLD_SIZE, mask=inside, other=0)
    end = tl.load(tables.bases + (expert + 1) * comm.WORLD_SIZE, mask=inside, other=1)
    row = base + (block - tl.load(tables.first_blocks + expert, mask=inside, other=0)) * TILE_M
    rows = tl.minimum(end - row, TILE_M)
    low = _last_at_most(tables.bases, experts * comm.WORLD_SIZE, row, BLOCKS_AT_ONCE)
    high = _last_at_most(tables.bases, experts * comm.WORLD_SIZE, row + rows - 1, BLOCKS_AT_ONCE)
    return Span(expert, row, rows, low, high)


@triton.jit
def _arrival_of(comm, tables, span, bins, inside):
    """When the last row of some blocks arrives: (in which of so many pieces of its source's rows, is it in the second
    half of them). Of a source before that a block has the last rows."""
    node = rank_of(comm.context) // comm.RANKS_PER_NODE
    low_node = span.low % comm.WORLD_SIZE // comm.RANKS_PER_NODE
    high_node = span.high % comm.WORLD_SIZE // comm.RANKS_PER_NODE
    begins = tl.load(tables.bases + span.high, mask=inside, other=0)
    reached = span.row + span.rows - begins
    among = tl.maximum(tl.load(tables.counts + span.high, mask=inside, other=1), 1)
    far = ((reached.to(tl.int64) * bins - 1) // among).to(tl.int32)
    far = tl.where(high_node == node, 0, far)
    behind_node = span.expert * comm.WORLD_SIZE + (node + 1) * comm.RANKS_PER_NODE
    between = (span.high >= behind_node) & (begins > tl.load(tables.bases + behind_node, mask=inside, other=0))
    ends_far = (span.low < span.high) & ((low_node != node) | between)
    return tl.where(ends_far, bins - 1, far), ends_far | (2 * reached > among)


@triton.jit
def schedule_blocks(comm, tables, experts, TILE_M: tl.constexpr, GROUP: tl.constexpr, NODE_LAST: tl.constexpr):
    """Write the schedule of `Tables`. NODE_LAST: blocks with rows of the node only, for half of the experts, come after
    those with rows of other nodes, whose results travel the longest."""
    rank = rank_of(comm.context)
    unsorted = tables.unsorted
    blocks = tl.load(tables.summary + BLOCKS)
    # classes that have a few blocks of each expert, if all is even
    WANTED: tl.constexpr = 8 if NODE_LAST else 4
    bins = tl.minimum(tl.maximum(blocks // (WANTED * tl.maximum(experts, 1)), 1), MOST_BINS)
    of_node = tl.full((), 0, tl.int32)
    for start in range(0, blocks, BLOCKS_AT_ONCE):
        block = start + tl.arange(0, BLOCKS_AT_ONCE)
        inside = block < blocks
        span = _span_of(comm, tables, experts, block, inside, TILE_M)
        expert = span.expert
        low, high = span.low % comm.WORLD_SIZE, span.high % comm.WORLD_SIZE
        own = (low == rank) & (high == rank)
        node = rank // comm.RANKS_PER_NODE
        near = (low // comm.RANKS_PER_NODE == node) & (high // comm.RANKS_PER_NODE == node)
        far, late = _arrival_of(comm, tables, span, bins, inside)
        other_half = 2 * expert >= experts
        first = own & (4 * expert < experts)  # so that the first tiles need not wait for the node
        if NODE_LAST:
            key = tl.where(first, 0, tl.where(near, tl.where(other_half, 2 + bins, 1), 2 + far))
            of_node += tl.sum((inside & near & ~first & other_half).to(tl.int32))
        elif bins < FEW_BINS:
            # what comes first of other nodes together with the node's, for half of the experts: the other half gives it
            # time to come
            early = tl.where(other_half, 2, 3)
            key = tl.where(first, 0, tl.where(near, 1 + other_half.to(tl.int32), tl.where(late, 4, early)))
        else:
            key = tl.where(own, 0, tl.where(near, 1, 2 + far))
        tl.store(unsorted + block * ENTRY, expert, mask=inside)
        tl.store(unsorted + block * ENTRY + 1, span.row, mask=inside)
        tl.store(unsorted + block * ENTRY + 2, span.rows, mask=inside)
        tl.store(unsorted + block * ENTRY + 3, key, mask=inside)
    tl.store(tables.summary + BEFORE_NODE, blocks - of_node)
    tl.debug_barrier()
    _sort(unsorted, tables.schedule, blocks)
    _group(unsorted, tables.schedule, blocks, GROUP)


@triton.jit
def _sort(unsorted, schedule, blocks):
    """Put blocks into the order of their keys, those with the same key in the order of their numbers."""
    keys = tl.arange(0, KEYS)[None, :]
    totals = tl.zeros((KEYS,), tl.int32)
    for start in range(0, blocks, SORTED_AT_ONCE):
        block = start + tl.arange(0, SORTED_AT_ONCE)
        key = tl.load(unsorted + block * ENTRY + 3, mask=block < blocks, other=-1)
        totals += tl.sum((key[:, None] == keys).to(tl.int32), axis=0)
    before = tl.cumsum(totals, 0) - totals
    for start in range(0, blocks, SORTED_AT_ONCE):
        block = start + tl.arange(0, SORTED_AT_ONCE)
        inside = block < blocks
        key = tl.load(unsorted + block * ENTRY + 3, mask=inside, other=-1)
        same = (key[:, None] == keys).to(tl.int32)
        entry = schedule + tl.sum(same * (before[None, :] + tl.cumsum(same, 0) - same), axis=1) * ENTRY
        for word in tl.static_range(3):
            tl.store(entry + word, tl.load(unsorted + block * ENTRY + word, mask=inside), mask=inside)
        tl.store(entry + 3, block, mask=inside)
        tl.store(entry + 4, key, mask=inside)
        before += tl.sum(same, axis=0)
    tl.debug_barrier()


@triton.jit
def _group(unsorted, schedule, blocks, GROUP: tl.constexpr):
    """Cut each run of blocks of one expert and class, whose key is in the entries, into groups of about GROUP."""
    runs = tl.full((), 0, tl.int32)
    for start in range(0, blocks, SORTED_AT_ONCE):
        place = start + tl.arange(0, SORTED_AT_ONCE)
        inside = place < blocks
        entry = schedule + place * ENTRY
        begins = place == 0
        for word in tl.static_range(0, 5, 4):
            before = tl.load(entry - ENTRY + word, mask=inside & (place > 0), other=-1)
            begins |= tl.load(entry + word, mask=inside, other=-1) != before
        begins &= inside
        run = runs + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(unsorted + run, place, mask=begins)
        tl.store(entry + 5, run, mask=inside)
        runs += tl.sum(begins.to(tl.int32))
    tl.store(unsorted + runs, blocks, mask=blocks > 0)
    tl.debug_barrier()
    for start in range(0, blocks, SORTED_AT_ONCE):
        place = start + tl.arange(0, SORTED_AT_ONCE)
        inside = place < blocks
        run = tl.load(schedule + place * ENTRY + 5, mask=inside, other=0)
        first = tl.load(unsorted + run, mask=inside, other=0)
        end = tl.load(unsorted + run + 1, mask=inside, other=1)
        groups = tl.maximum((end - first + GROUP // 2) // GROUP, 1)
        height = (end - first + groups - 1) // groups
        first += (place - first) // height * height
        tl.store(schedule + place * ENTRY + 4, first, mask=inside)
        tl.store(schedule + place * ENTRY + 5, tl.minimum(end - first, height), mask=inside)
    tl.debug_barrier()


@triton.jit
def tile_of(schedule, tile, columns):
    """(place, column): which block of the schedule and which of its columns a tile is; group by group."""
    entry = schedule + tile // columns * ENTRY
    first = tl.load(entry + 4)
    height = tl.load(entry + 5)
    within = tile - first * columns
    return first + within % height, within // height


@triton.jit
def wait_scheduled(comm, tables, signals):
    """Wait for the order of blocks; false if the routing cannot be carried out, or the group gave up."""
    scheduled = signal_of(comm, rank_of(comm.context), signals.scheduled, 0, 0)
    ok = wait(comm.context, scheduled, comm.epoch, COMPUTE, SCHEDULED, -1, 0)
    if ok:
        ok = tl.load(tables.summary + STATUS) == OK
    return ok
