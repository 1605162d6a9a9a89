"""The schedule: the order in which a rank computes its blocks of rows.

`schedule_blocks` divides the rows of each expert into blocks of a tile's height, and orders the blocks. Ideally, blocks
are computed in the order in which their last rows arrive: first those with only the rank's own rows, then those with
rows of the node, then those with rows of other nodes, in order of arrival. But blocks of one expert that are computed
at the same time read its matrix from memory only once. So there are only a few *classes* of arrival, and within a class
blocks are ordered by expert. (With every block in order of arrival, an H200 read 484 MB of matrices per wave of tiles,
which takes its memory 100 us; the tiles themselves take 80 us. With 4 ranks on the GPU, a tile took 120 to 140 us if a
class had 2 blocks of each expert, and 100 us if it had 4.)

The blocks of one expert in one class form *groups*. Tiles of a group are computed column by column, so that concurrent
tiles read the same columns of the matrix.
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
from mkernel.ops.moe.routing import BEFORE_NODE, BLOCKS, ENTRY, may_place

MOST_BINS = tl.constexpr(8)  # bound on the parts of a source's rows that classes distinguish
KEYS = tl.constexpr(16)  # a power of two, greater than MOST_BINS + 2
FEW_BINS = tl.constexpr(4)  # with fewer bins, `schedule_blocks` forms classes differently
SORTED_AT_ONCE = tl.constexpr(256)
BLOCKS_AT_ONCE = tl.constexpr(128)


class Span(NamedTuple):
    """The rows of some blocks. Each block has `rows` rows of one expert, from `row` on; low and high are the (expert,
    source) of its first and last row, as indices into `Tables.bases`."""

    expert: Any
    row: Any
    rows: Any
    low: Any
    high: Any


@triton.jit
def _last_at_most(values, count, wanted, WIDTH: tl.constexpr):
    """For each wanted number, the index of the last of `count` ascending values that does not exceed it."""
    found = tl.zeros((WIDTH,), tl.int32) - 1
    for start in range(0, count, 64):
        i = start + tl.arange(0, 64)
        value = tl.load(values + i, mask=i < count, other=0x7FFFFFFF)
        found += tl.sum((value[None, :] <= wanted[:, None]).to(tl.int32), axis=1)
    return found


@triton.jit
def _span_of(comm, tables, experts, block, inside, TILE_M: tl.constexpr):
    """The `Span` of some blocks."""
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
    """When the last row of each block arrives: (bin, late). The rows of a source are taken to arrive in order. bin says
    in which of `bins` equal parts of its source's rows the last row of the block is (0 if the source is in this node),
    and late whether it is in the second half of them. A block with several sources holds the last rows of all but the
    last of these, so if one of those is in another node, the block is in the last bin, and late."""
    node = rank_of(comm.context) // comm.RANKS_PER_NODE
    low_node = span.low % comm.WORLD_SIZE // comm.RANKS_PER_NODE
    high_node = span.high % comm.WORLD_SIZE // comm.RANKS_PER_NODE
    source_begin = tl.load(tables.bases + span.high, mask=inside, other=0)
    reached = span.row + span.rows - source_begin
    source_end = tl.load(tables.bases + span.high + 1, mask=inside, other=1)
    source_rows = tl.maximum(source_end - source_begin, 1)
    arrival_bin = ((reached.to(tl.int64) * bins - 1) // source_rows).to(tl.int32)
    arrival_bin = tl.where(high_node == node, 0, arrival_bin)
    after_node = span.expert * comm.WORLD_SIZE + (node + 1) * comm.RANKS_PER_NODE
    far_before = (span.high >= after_node) & (source_begin > tl.load(tables.bases + after_node, mask=inside, other=0))
    ends_far = (span.low < span.high) & ((low_node != node) | far_before)
    return tl.where(ends_far, bins - 1, arrival_bin), ends_far | (2 * reached > source_rows)


@triton.jit
def schedule_blocks(comm, tables, experts, TILE_M: tl.constexpr, GROUP: tl.constexpr, NODE_LAST: tl.constexpr):
    """Write the schedule of `Tables`. NODE_LAST: for half of the experts, schedule blocks with rows of the node only
    after those with rows of other nodes, whose results take the longest to return."""
    rank = rank_of(comm.context)
    unsorted = tables.unsorted
    blocks = tl.load(tables.summary + BLOCKS)
    # so that a class has a few blocks of each expert if the routing is balanced
    WANTED: tl.constexpr = 8 if NODE_LAST else 4
    bins = tl.minimum(tl.maximum(blocks // (WANTED * tl.maximum(experts, 1)), 1), MOST_BINS)
    node_last_blocks = tl.full((), 0, tl.int32)
    for start in range(0, blocks, BLOCKS_AT_ONCE):
        block = start + tl.arange(0, BLOCKS_AT_ONCE)
        inside = block < blocks
        span = _span_of(comm, tables, experts, block, inside, TILE_M)
        expert = span.expert
        low, high = span.low % comm.WORLD_SIZE, span.high % comm.WORLD_SIZE
        own = (low == rank) & (high == rank)
        node = rank // comm.RANKS_PER_NODE
        near = (low // comm.RANKS_PER_NODE == node) & (high // comm.RANKS_PER_NODE == node)
        arrival_bin, late = _arrival_of(comm, tables, span, bins, inside)
        other_half = 2 * expert >= experts
        first = own & (4 * expert < experts)  # so that the first tiles need not wait for the node
        if NODE_LAST:
            key = tl.where(first, 0, tl.where(near, tl.where(other_half, 2 + bins, 1), 2 + arrival_bin))
            node_last_blocks += tl.sum((inside & near & ~first & other_half).to(tl.int32))
        elif bins < FEW_BINS:
            # Class 2 combines the node's blocks and the early blocks of other nodes, for half of the experts. Class 1,
            # the node's blocks of the other half, gives those rows time to arrive.
            early_class = tl.where(other_half, 2, 3)
            key = tl.where(first, 0, tl.where(near, 1 + other_half.to(tl.int32), tl.where(late, 4, early_class)))
        else:
            key = tl.where(own, 0, tl.where(near, 1, 2 + arrival_bin))
        tl.store(unsorted + block * ENTRY, expert, mask=inside)
        tl.store(unsorted + block * ENTRY + 1, span.row, mask=inside)
        tl.store(unsorted + block * ENTRY + 2, span.rows, mask=inside)
        tl.store(unsorted + block * ENTRY + 3, key, mask=inside)
    tl.store(tables.summary + BEFORE_NODE, blocks - node_last_blocks)
    tl.debug_barrier()
    _sort(unsorted, tables.schedule, blocks)
    _group(unsorted, tables.schedule, blocks, GROUP)


@triton.jit
def _sort(unsorted, schedule, blocks):
    """Sort blocks by key. Blocks with the same key stay in the order of their numbers."""
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
    """Divide each run of blocks of one expert and one class into groups of about GROUP blocks. The entries hold the key
    of the class."""
    runs = tl.full((), 0, tl.int32)
    for start in range(0, blocks, SORTED_AT_ONCE):
        index = start + tl.arange(0, SORTED_AT_ONCE)
        inside = index < blocks
        entry = schedule + index * ENTRY
        starts_run = index == 0
        for word in tl.static_range(0, 5, 4):
            before = tl.load(entry - ENTRY + word, mask=inside & (index > 0), other=-1)
            starts_run |= tl.load(entry + word, mask=inside, other=-1) != before
        starts_run &= inside
        run = runs + tl.cumsum(starts_run.to(tl.int32), 0) - 1
        tl.store(unsorted + run, index, mask=starts_run)
        tl.store(entry + 5, run, mask=inside)
        runs += tl.sum(starts_run.to(tl.int32))
    tl.store(unsorted + runs, blocks, mask=blocks > 0)
    tl.debug_barrier()
    for start in range(0, blocks, SORTED_AT_ONCE):
        index = start + tl.arange(0, SORTED_AT_ONCE)
        inside = index < blocks
        run = tl.load(schedule + index * ENTRY + 5, mask=inside, other=0)
        first = tl.load(unsorted + run, mask=inside, other=0)
        end = tl.load(unsorted + run + 1, mask=inside, other=1)
        groups = tl.maximum((end - first + GROUP // 2) // GROUP, 1)
        group_blocks = (end - first + groups - 1) // groups
        first += (index - first) // group_blocks * group_blocks
        tl.store(schedule + index * ENTRY + 4, first, mask=inside)
        tl.store(schedule + index * ENTRY + 5, tl.minimum(end - first, group_blocks), mask=inside)
    tl.debug_barrier()


@triton.jit
def tile_of(schedule, tile, columns):
    """(index, column): the schedule entry and the column block of a tile. Tiles are numbered group by group, within a
    group column by column."""
    entry = schedule + tile // columns * ENTRY
    first = tl.load(entry + 4)
    group_blocks = tl.load(entry + 5)
    within = tile - first * columns
    return first + within % group_blocks, within // group_blocks


@triton.jit
def wait_scheduled(comm, tables, signals):
    """Wait until the schedule is complete; false if the routing is invalid, or the group gave up."""
    scheduled = signal_of(comm, rank_of(comm.context), signals.scheduled, 0, 0)
    ok = wait(comm.context, scheduled, comm.epoch, COMPUTE, SCHEDULED, -1, 0)
    if ok:
        ok = may_place(tables)
    return ok
