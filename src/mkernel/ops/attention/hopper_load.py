"""The loading warp of the Hopper kernel, and the shared memory that it fills.

Arrival of chunks. When a tile begins, the warp polls the signals of all chunks that the tile will read, all at once
(`poll_all_arrived`). Except for the first tiles, they have all arrived. Waiting chunk by chunk would take longer than
the time by which the warp is ahead of the warpgroups.

Bounded grid sync. If a head has many keys and values, the CTAs of a rank should read the same ones at the same time, so
that they come from memory once and from L2 afterwards. Left alone, CTAs drift apart, if only by 0.1% (estimated), and
end up reading different keys. So the schedule marks tiles that all CTAs start at the same time, and there the loading
warps wait for each other (`sync_grid`). This affects only speed; nothing else depends on it. (On an
H200, one rank, 16 x 196608 positions, causal, with a sync every 1024 blocks: from 24% to 3% of the memory bandwidth,
from 187 to 179 J, from 270 to 253 ms. Waiting chunk by chunk seems to have kept CTAs together as well: a CTA that was
ahead missed in L2 and was slowed down.) Packed documents have no grid syncs, because their tiles read different keys
anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mkernel.lang.context import SIZE_WORD, rank_of
from mkernel.lang.device import acquire_for_descriptors, agreed
from mkernel.lang.gluon_compat import async_load, reinterpret
from mkernel.lang.grid import sync_grid
from mkernel.lang.roles import COMPUTE
from mkernel.ops.attention import schedule
from mkernel.ops.attention.call import awaits_whole_panels, tile_at
from mkernel.ops.attention.mask import Blocks, key_blocks, seen_by_rank, seen_by_tile
from mkernel.ops.attention.protocol import (
    Panel,
    chunks_with,
    poll_all_arrived,
    slot_row,
    source_at,
    wait_own_round,
    wait_panel,
)

WARPGROUPS = gl.constexpr(2)  # warpgroups that attend
ROWS = gl.constexpr(64)  # rows of queries per warpgroup
TILE_M = gl.constexpr(128)
STAGES = gl.constexpr(2)  # blocks of keys, and of values, in shared memory
SYNC_MARK = gl.constexpr(schedule.SYNC_MARK)


class Stages(NamedTuple):
    """Blocks in shared memory. full: TMA has written one; empty: both warpgroups have read it."""

    data: Any
    full: Any
    empty: Any


class Shared(NamedTuple):
    """The shared memory of a CTA. q: queries of one or two tiles (`query_stages`), the first warpgroup's rows, then the
    second's. out: results; may be the memory of the queries (`has_room_for_out`)."""

    q: Any  # Stages
    k: Any
    v: Any
    out: Any


@gluon.constexpr_function
def query_stages(world_size, dim):
    """The number of tiles whose queries are in shared memory at the same time. With two, scores stay in registers from
    one tile to the next; with several ranks, these registers are needed for other things."""
    return 2 if dim <= 128 and world_size == 1 else 1


@gluon.constexpr_function
def in_turns(world_size, packed, tile_n):
    """Whether the kernel has the form for one rank whose rows see all keys, or all keys up to their own: see
    hopper.py. Blocks must be as large as tiles."""
    return world_size == 1 and not packed and tile_n == 128


@gluon.jit
def _load_queries(comm, call, q, shared, tile, number):
    """Load the queries of this CTA's tile `number`."""
    stage = number % query_stages(comm.WORLD_SIZE, call.DIM)
    phase = (number // query_stages(comm.WORLD_SIZE, call.DIM)) & 1
    mbarrier.wait(shared.q.empty.index(stage), phase ^ 1)
    mbarrier.expect(shared.q.full.index(stage), WARPGROUPS * q.block_type.nbytes)
    for which in gl.static_range(WARPGROUPS):
        target = shared.q.data.index(stage * WARPGROUPS + which)
        target = reinterpret(target, q.dtype, [1, 1, ROWS, call.DIM], q.layout)
        coordinates = [tile.batch, tile.head, tile.row + which * ROWS, 0]
        async_load(q, coordinates, shared.q.full.index(stage), target)


@gluon.jit
def _load_block(source, stages, tile, block, loaded, TILE_N: gl.constexpr, DIM: gl.constexpr):
    """Load a block of the rank's own keys or values. loaded: how many blocks came before; this selects the stage."""
    stage = loaded % STAGES
    mbarrier.wait(stages.empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
    mbarrier.expect(stages.full.index(stage), source.block_type.nbytes)
    target = reinterpret(stages.data.index(stage), source.dtype, [1, 1, TILE_N, DIM], source.layout)
    coordinates = [tile.batch, tile.kv_head, block * TILE_N, 0]
    async_load(source, coordinates, stages.full.index(stage), target)


@gluon.jit
def _load_own(call, descriptors, shared, tile, first, end, loaded):
    """Load blocks first..end-1 of the rank's own keys and values. Returns the new value of `loaded`."""
    for block in range(first, end):
        _load_block(descriptors.k, shared.k, tile, block, loaded, call.TILE_N, call.DIM)
        _load_block(descriptors.v, shared.v, tile, block, loaded, call.TILE_N, call.DIM)
        loaded += 1
    return loaded


@gluon.jit
def _load_rows(slots, stages, row, loaded):
    """Load a block of another rank's keys or values. loaded: see `_load_block`."""
    stage = loaded % STAGES
    mbarrier.wait(stages.empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
    mbarrier.expect(stages.full.index(stage), slots.block_type.nbytes)
    async_load(slots, [row, 0], stages.full.index(stage), stages.data.index(stage))


@gluon.jit
def _load_slots(comm, call, slots, shared, round_index, source, first, end, loaded, all_arrived):
    """Load blocks first..end-1 of another rank. Unless all have arrived, wait for their chunks one by one. Returns the
    new value of `loaded`."""
    panel_row = slot_row(comm, call.rounds, round_index, source, rank_of(comm.context))
    for block in range(first, end):
        key = block * call.TILE_N
        if (not all_arrived) & ((block == first) | (key % call.rounds.chunk_rows == 0)):
            chunk = key // call.rounds.chunk_rows
            wait_panel(comm, call.rounds, round_index, source, chunk, chunk + 1)
            acquire_for_descriptors()
        _load_rows(slots, shared.k, panel_row + 2 * key, loaded)
        _load_rows(slots, shared.v, panel_row + 2 * key + call.TILE_N, loaded)
        loaded += 1
    return loaded


@gluon.jit
def blocks_of(mask, rank, source, row, TILE_N: gl.constexpr):
    """The `Blocks` of a source for the tile of queries that starts at `row`, without the block of the rank's own keys
    that is processed before all others (`first_block`)."""
    visible = seen_by_tile(mask, rank, row, TILE_M)
    blocks = key_blocks(mask, visible, source, 0, mask.length, TILE_N)
    if in_turns(mask.WORLD_SIZE, mask.PACKED, TILE_N):
        end = blocks.end - 1
        full = gl.minimum(blocks.full, end)
        return Blocks(blocks.first, full, gl.maximum(gl.minimum(blocks.full_end, end), full), end)
    else:
        first = blocks.first + (source == rank).to(gl.int32)
        full = gl.maximum(blocks.full, first)
        return Blocks(first, full, gl.maximum(blocks.full_end, full), blocks.end)


@gluon.jit
def first_block(mask, own, TILE_N: gl.constexpr):
    """The block of the rank's own keys that a tile begins with: the first one, or with `in_turns` the last one. own:
    from `blocks_of`."""
    if in_turns(mask.WORLD_SIZE, mask.PACKED, TILE_N):
        return own.end
    else:
        return own.first - 1


@gluon.jit
def _wait_whole_panels(comm, call, tile, ranks):
    """Wait for everything that this rank is sent in the tile's round."""
    rank = rank_of(comm.context)
    need, need_end = seen_by_rank(call.mask, rank)
    for i in range(1, ranks):
        source = source_at(comm, rank, i)
        panel = Panel(tile.round_index, 0, call.mask.length)
        chunk, chunk_end = chunks_with(call.rounds, call.mask, panel, source, need, need_end)
        wait_panel(comm, call.rounds, tile.round_index, source, chunk, chunk_end)


@gluon.jit
def _poll_tile(comm, call, tile):
    """Whether everything that a tile reads from other ranks has arrived. TMA may then load it."""
    visible = seen_by_tile(call.mask, rank_of(comm.context), tile.row, TILE_M)
    offsets = gl.arange(0, call.POLL_WIDTH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    panel = Panel(tile.round_index, 0, call.mask.length)
    arrived = poll_all_arrived(comm, call.rounds, call.mask, panel, visible.low, visible.highest_end, offsets)
    arrived = agreed(arrived)
    tl.debug_barrier()  # makes what each thread has acquired visible to all threads
    acquire_for_descriptors()
    return arrived


@gluon.jit
def load(comm, call, descriptors, shared, first_entry, end_entry):
    """The loading warp: loads what the tiles in entries first_entry..end_entry-1 of the schedule need, in the order in
    which they need it. A tile's queries and first keys are the rank's own, so it loads them without waiting, except at
    a grid sync: with one rank, the warpgroups multiply them while they finish the previous tile. All waits of a tile
    come before the load of its first values, because without those the tile cannot finish."""
    TILE_N: gl.constexpr = call.TILE_N
    DIM: gl.constexpr = call.DIM
    rank = rank_of(comm.context)
    # loops over ranks have a bound that the compiler does not know, or else it unrolls them and keeps the values of
    # every rank in registers
    ranks = tl.load(comm.context + SIZE_WORD).to(gl.int32)
    loaded = first_entry * 0
    syncs = first_entry * 0
    all_arrived = first_entry == first_entry
    for entry in range(first_entry, end_entry):
        tile = tile_at(call, entry)
        if call.SYNCS_GRID:
            if tl.load(call.schedule + entry) >= SYNC_MARK:
                sync_grid(comm, syncs, gl.num_programs(0) - call.SENDERS)
                syncs += 1
        own = blocks_of(call.mask, rank, rank, tile.row, TILE_N)
        _load_queries(comm, call, descriptors.q, shared, tile, entry - first_entry)
        initial = first_block(call.mask, own, TILE_N)
        _load_block(descriptors.k, shared.k, tile, initial, loaded, TILE_N, DIM)
        if call.rounds.CREDITS:
            wait_own_round(comm, call.rounds, tile.round_index, COMPUTE)
        if comm.WORLD_SIZE > 1 and call.mask.PACKED:
            if awaits_whole_panels(call, tile):
                _wait_whole_panels(comm, call, tile, ranks)
        _load_block(descriptors.v, shared.v, tile, initial, loaded, TILE_N, DIM)
        if comm.WORLD_SIZE > 1:
            all_arrived = _poll_tile(comm, call, tile)
        loaded = _load_own(call, descriptors, shared, tile, own.full, own.full_end, loaded + 1)
        if comm.WORLD_SIZE > 1:
            for i in range(1, ranks):
                source = source_at(comm, rank, i)
                other = blocks_of(call.mask, rank, source, tile.row, TILE_N)
                loaded = _load_slots(
                    comm, call, descriptors.slots, shared, tile.round_index, source, other.full, other.full_end,
                    loaded=loaded, all_arrived=all_arrived,
                )  # fmt: skip
        if not in_turns(comm.WORLD_SIZE, call.mask.PACKED, TILE_N):
            for side in range(2):
                begin = gl.where(side == 0, own.first, own.full_end)
                end = gl.where(side == 0, own.full, own.end)
                loaded = _load_own(call, descriptors, shared, tile, begin, end, loaded)
        if comm.WORLD_SIZE > 1:
            for i in range(2, 2 * ranks):
                source = source_at(comm, rank, i // 2)
                other = blocks_of(call.mask, rank, source, tile.row, TILE_N)
                begin = gl.where(i % 2 == 0, other.first, other.full_end)
                end = gl.where(i % 2 == 0, other.full, other.end)
                loaded = _load_slots(
                    comm, call, descriptors.slots, shared, tile.round_index, source, begin, end,
                    loaded=loaded, all_arrived=all_arrived,
                )  # fmt: skip
    if query_stages(comm.WORLD_SIZE, DIM) > 1:
        # the last tile computes the first scores of a next tile, which does not exist: load something for it
        if first_entry < end_entry:
            tile = tile_at(call, end_entry - 1)
            _load_queries(comm, call, descriptors.q, shared, tile, end_entry - first_entry)
            _load_block(descriptors.k, shared.k, tile, 0, loaded, TILE_N, DIM)
