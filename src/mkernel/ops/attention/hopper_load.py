"""The loading warp of the kernel for Hopper, and the shared memory that it fills.

Whether chunks have arrived: when a tile begins, one look at the signals of all chunks that it will read
(`poll_all_arrived`). After the first tiles they are all there. To wait chunk by chunk takes the loading warp
longer than it is ahead.

Bounded grid sync. Where a head's keys and values are many, it matters that the CTAs of a rank read the same ones at the
same time, so that they come from memory once and from the L2 cache afterwards. Left alone, CTAs drift apart, if only by
0.1% (estimated), and read from everywhere in the end. So the schedule marks tiles that all of them begin at the same
time, and there the loading warps wait for each other, for MAX_SPINS polls at most. Nothing depends on it but speed.
(On an H200, one rank, 16 x 196608 positions, causal, with a sync every 1024 blocks: from 24% to 3% of the memory's
rate, 187 to 179 J, 270 to 253 ms. Waiting chunk by chunk seems to have kept CTAs together as well: whoever was ahead
found nothing in the cache, and had to wait for it.) Packed documents have no grid syncs: their tiles read different
keys anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mkernel.lang.context import GRID_SYNC, SIZE_WORD, rank_of, state_of
from mkernel.lang.device import acquire_for_descriptors, agreed
from mkernel.lang.gluon_compat import async_load, reinterpret
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

WARPGROUPS = gl.constexpr(2)  # that attend
ROWS = gl.constexpr(64)  # of queries, of each of them
TILE_M = gl.constexpr(128)
STAGES = gl.constexpr(2)  # blocks of keys, and of values, in shared memory
MAX_SPINS = gl.constexpr(64)  # polls of a grid sync; some 50 us (estimated)
SYNC_MARK = gl.constexpr(schedule.SYNC_MARK)


class Stages(NamedTuple):
    """Blocks in shared memory. full: TMA has written one; empty: both warpgroups have read it."""

    data: Any
    full: Any
    empty: Any


class Shared(NamedTuple):
    """The shared memory of a CTA. q: for the queries of a tile, or of two (`query_stages`), one warpgroup's rows after
    the other's; out: for results, which may be that of the queries (`has_room_for_out`)."""

    q: Any  # Stages
    k: Any
    v: Any
    out: Any


@gluon.constexpr_function
def query_stages(world_size, dim):
    """Tiles whose queries are there at a time. With two, scores are kept from one tile to the next, in registers that
    a rank with others needs."""
    return 2 if dim <= 128 and world_size == 1 else 1


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
        place = [tile.batch, tile.head, tile.row + which * ROWS, 0]
        async_load(q, place, shared.q.full.index(stage), target)


@gluon.jit
def _load_block(source, stages, tile, block, loaded, TILE_N: gl.constexpr, DIM: gl.constexpr):
    """Load a block of the rank's own keys, or values, into the stage for number `loaded`."""
    stage = loaded % STAGES
    mbarrier.wait(stages.empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
    mbarrier.expect(stages.full.index(stage), source.block_type.nbytes)
    target = reinterpret(stages.data.index(stage), source.dtype, [1, 1, TILE_N, DIM], source.layout)
    place = [tile.batch, tile.kv_head, block * TILE_N, 0]
    async_load(source, place, stages.full.index(stage), target)


@gluon.jit
def _load_own(call, descriptors, shared, tile, first, end, loaded):
    """Load blocks first..end-1 of the rank's own keys and values; returns how many were loaded so far."""
    for block in range(first, end):
        _load_block(descriptors.k, shared.k, tile, block, loaded, call.TILE_N, call.DIM)
        _load_block(descriptors.v, shared.v, tile, block, loaded, call.TILE_N, call.DIM)
        loaded += 1
    return loaded


@gluon.jit
def _load_rows(slots, stages, row, loaded):
    """Load a block of another rank's keys, or values, into the stage for number `loaded`."""
    stage = loaded % STAGES
    mbarrier.wait(stages.empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
    mbarrier.expect(stages.full.index(stage), slots.block_type.nbytes)
    async_load(slots, [row, 0], stages.full.index(stage), stages.data.index(stage))


@gluon.jit
def _load_slots(comm, call, slots, shared, round_index, source, first, end, loaded, all_here):
    """Load blocks first..end-1 of another rank: as their chunks arrive, unless they are all here."""
    panel_row = slot_row(comm, call.rounds, round_index, source, rank_of(comm.context))
    for block in range(first, end):
        key = block * call.TILE_N
        if (not all_here) & ((block == first) | (key % call.rounds.chunk_rows == 0)):
            chunk = key // call.rounds.chunk_rows
            wait_panel(comm, call.rounds, round_index, source, chunk, chunk + 1)
            acquire_for_descriptors()
        _load_rows(slots, shared.k, panel_row + 2 * key, loaded)
        _load_rows(slots, shared.v, panel_row + 2 * key + call.TILE_N, loaded)
        loaded += 1
    return loaded


@gluon.jit
def blocks_of(mask, rank, source, row, TILE_N: gl.constexpr):
    """`Blocks` of a source for the tile of queries from `row` on. The first block of the rank's own keys is left out:
    it comes before all others."""
    visible = seen_by_tile(mask, rank, row, TILE_M)
    blocks = key_blocks(mask, visible, source, 0, mask.length, TILE_N)
    first = blocks.first + (source == rank).to(gl.int32)
    full = gl.maximum(blocks.full, first)
    return Blocks(first, full, gl.maximum(blocks.full_end, full), blocks.end)


@gluon.jit
def _sync_grid(comm, syncs, ctas):
    """Wait for the rank's other CTAs to come to grid sync number `syncs`, for MAX_SPINS polls at most: it is for speed
    alone."""
    word = state_of(comm.context) + GRID_SYNC
    begin = comm.epoch * 4294967296
    tl.atomic_max(word, begin, sem="relaxed", scope="gpu")
    seen = tl.atomic_add(word, 1, sem="relaxed", scope="gpu") + 1
    spins = 0
    while (seen < begin + (syncs + 1) * ctas) & (spins < MAX_SPINS):
        seen = tl.atomic_add(word, 0, sem="relaxed", scope="gpu")
        spins += 1


@gluon.jit
def _wait_whole_panels(comm, call, tile, ranks):
    """Wait for all that is sent to this rank in the tile's round."""
    rank = rank_of(comm.context)
    need, need_end = seen_by_rank(call.mask, rank)
    for i in range(1, ranks):
        source = source_at(comm, rank, i)
        panel = Panel(tile.round_index, 0, call.mask.length)
        chunk, behind = chunks_with(call.rounds, call.mask, panel, source, need, need_end)
        wait_panel(comm, call.rounds, tile.round_index, source, chunk, behind)


@gluon.jit
def _poll_tile(comm, call, tile):
    """Has all arrived that a tile reads of other ranks? What has may be loaded by TMA afterwards."""
    visible = seen_by_tile(call.mask, rank_of(comm.context), tile.row, TILE_M)
    places = gl.arange(0, call.POLL_WIDTH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    panel = Panel(tile.round_index, 0, call.mask.length)
    here = poll_all_arrived(comm, call.rounds, call.mask, panel, visible.low, visible.highest_end, places)
    here = agreed(here)
    tl.debug_barrier()  # what one thread has acquired all may read
    acquire_for_descriptors()
    return here


@gluon.jit
def load(comm, call, descriptors, shared, first_place, end_of_places):
    """The loading warp: what the tiles of this CTA need, in the order in which it is needed. A tile's queries and first
    keys, which are the rank's own, wait for nobody but at a grid sync: with one rank they are multiplied while the tile
    before ends. Whatever a tile must wait for comes before its first values, without which it can not be done."""
    TILE_N: gl.constexpr = call.TILE_N
    DIM: gl.constexpr = call.DIM
    rank = rank_of(comm.context)
    # loops over ranks go to a number that the compiler does not know, or it unrolls them and keeps what every
    # rank needs in registers
    ranks = tl.load(comm.context + SIZE_WORD).to(gl.int32)
    loaded = first_place * 0
    syncs = first_place * 0
    all_here = first_place == first_place
    for place in range(first_place, end_of_places):
        tile = tile_at(call, place)
        if call.SYNCS_GRID:
            if tl.load(call.schedule + place) >= SYNC_MARK:
                _sync_grid(comm, syncs, gl.num_programs(0) - call.SENDERS)
                syncs += 1
        own = blocks_of(call.mask, rank, rank, tile.row, TILE_N)
        _load_queries(comm, call, descriptors.q, shared, tile, place - first_place)
        _load_block(descriptors.k, shared.k, tile, own.first - 1, loaded, TILE_N, DIM)
        if call.rounds.CREDITS:
            wait_own_round(comm, call.rounds, tile.round_index, COMPUTE)
        if comm.WORLD_SIZE > 1 and call.mask.PACKED:
            if awaits_whole_panels(call, tile):
                _wait_whole_panels(comm, call, tile, ranks)
        _load_block(descriptors.v, shared.v, tile, own.first - 1, loaded, TILE_N, DIM)
        if comm.WORLD_SIZE > 1:
            all_here = _poll_tile(comm, call, tile)
        loaded = _load_own(call, descriptors, shared, tile, own.full, own.full_end, loaded + 1)
        if comm.WORLD_SIZE > 1:
            for i in range(1, ranks):
                source = source_at(comm, rank, i)
                other = blocks_of(call.mask, rank, source, tile.row, TILE_N)
                loaded = _load_slots(
                    comm, call, descriptors.slots, shared, tile.round_index, source, other.full, other.full_end,
                    loaded=loaded, all_here=all_here,
                )  # fmt: skip
        for side in range(2):
            begin = gl.where(side == 0, own.first, own.full_end)
            loaded = _load_own(call, descriptors, shared, tile, begin, gl.where(side == 0, own.full, own.end), loaded)
        if comm.WORLD_SIZE > 1:
            for i in range(2, 2 * ranks):
                source = source_at(comm, rank, i // 2)
                other = blocks_of(call.mask, rank, source, tile.row, TILE_N)
                begin = gl.where(i % 2 == 0, other.first, other.full_end)
                end = gl.where(i % 2 == 0, other.full, other.end)
                loaded = _load_slots(
                    comm, call, descriptors.slots, shared, tile.round_index, source, begin, end,
                    loaded=loaded, all_here=all_here,
                )  # fmt: skip
    if query_stages(comm.WORLD_SIZE, DIM) > 1:
        # what the last tile takes for the beginning of another one
        if first_place < end_of_places:
            tile = tile_at(call, end_of_places - 1)
            _load_queries(comm, call, descriptors.q, shared, tile, end_of_places - first_place)
            _load_block(descriptors.k, shared.k, tile, 0, loaded, TILE_N, DIM)
