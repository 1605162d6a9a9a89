"""The loading warp of the Hopper kernel for gradients, the shared memory that it fills, and what a task goes through.

A task keeps 128 rows of two tensors in shared memory, its *held* rows, 64 for each warpgroup: queries and gradients of
the result for a tile of dq, keys and values for a block of keys. It goes through the rows of the two other tensors, 64
of each at a time: its *steps*. So both kinds of tasks begin a step with the same two products.

The held rows of two tasks fit into shared memory, so the warp loads those of the next task during a task. Steps have a
ring of STAGES stages, which continues from task to task.
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
from mkernel.lang.roles import COMPUTE
from mkernel.ops.attention.backward.call import task_at
from mkernel.ops.attention.backward.protocol import wait_prepared
from mkernel.ops.attention.mask import Blocks, is_seen, key_blocks, seen_by_tile
from mkernel.ops.attention.protocol import (
    Panel,
    poll_all_arrived,
    slot_row,
    source_at,
    wait_own_round,
    wait_panel,
)

WARPGROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # held rows of a warpgroup, and rows of a step
TILE_M = gl.constexpr(128)  # held rows
STAGES = gl.constexpr(3)  # steps in shared memory
STATS = gl.constexpr(128)  # numbers of a tile of ROWS queries: the log-sum-exp of each, then delta of each


class Descriptors(NamedTuple):
    """Tensor descriptors. Each is a separate parameter of the kernel: see ops/attention/call.py."""

    q: Any
    k: Any
    v: Any
    dout: Any
    dq: Any
    dk: Any
    dv: Any
    slots: Any  # None with one rank
    stats: Any  # [tiles of ROWS queries of all heads, STATS]


class Held(NamedTuple):
    """Held rows of two tasks: see `held_at`. full: TMA has written them; empty: both warpgroups have read them, and
    stored what took their place."""

    data: Any
    full: Any
    empty: Any


class Ring(NamedTuple):
    """Steps: rows of keys and of values, or of queries, with their `stats`, and of gradients of the result. A barrier
    for each of the two, and one that both warpgroups have read both."""

    first: Any
    second: Any
    stats: Any
    first_full: Any
    second_full: Any
    empty: Any


class Shared(NamedTuple):
    """The shared memory of a CTA."""

    held: Any  # Held
    ring: Any  # Ring


@gluon.constexpr_function
def block_layout():
    """The layout of rows in shared memory, as wgmma reads them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def held_at(held, number, WHICH: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup's rows of the first (WHICH=0) or second tensor that task `number` of this CTA holds."""
    return held.data.index((number % 2 * 2 + WHICH) * WARPGROUPS + GROUP)


# -- what a task goes through


@gluon.jit
def segment(blocks, which):
    """(begin, end): the steps of a source or of a head. which: 0 and 2 are those that need a mask, 1 those that do
    not."""
    begin = gl.where(which == 0, blocks.first, gl.where(which == 1, blocks.full, blocks.full_end))
    end = gl.where(which == 0, blocks.full, gl.where(which == 1, blocks.full_end, blocks.end))
    return begin, end


@gluon.jit
def keys_of_tile(call, rank, source, row):
    """The `Blocks` of a source's keys that a tile of dq goes through. row: the first row of the tile."""
    visible = seen_by_tile(call.mask, rank, row, TILE_M)
    return key_blocks(call.mask, visible, source, 0, call.mask.length, ROWS)


@gluon.jit
def has_partial(call, rank, source, key):
    """Whether this rank has a partial of the source's ROWS keys from `key` on. Each warpgroup has such rows of its own
    in a block of keys; the second half of the last block may not exist."""
    seen = key < call.mask.length
    return seen & is_seen(call.mask, rank, source, key, ROWS)


@gluon.jit
def is_block_seen(call, rank, which):
    """Whether this rank has a partial of a block of TILE_M keys, or of half of it."""
    source = which // call.tiles
    key = which % call.tiles * TILE_M
    return has_partial(call, rank, source, key) | has_partial(call, rank, source, key + ROWS)


@gluon.jit
def rows_of_block(call, rank, which):
    """The `Blocks` of this rank's queries that a block of TILE_M keys goes through, in each head."""
    entry = call.ranges + 4 * which
    seen = tl.load(entry).to(gl.int32)
    seen_end = tl.load(entry + 1).to(gl.int32)
    first = seen // ROWS
    # `ranges` has rows for a block that reaches beyond the last key, even if none of its keys is seen
    end = gl.where((seen < seen_end) & is_block_seen(call, rank, which), tl.cdiv(seen_end, ROWS), first)
    full = gl.minimum(gl.maximum(tl.cdiv(tl.load(entry + 2).to(gl.int32), ROWS), first), end)
    full_end = gl.minimum(gl.maximum(tl.load(entry + 3).to(gl.int32) // ROWS, full), end)
    return Blocks(first, full, full_end, end)


# -- loads


@gluon.jit
def _load_rows(source, memory, full, batch, head, row):
    """Load ROWS rows of a head."""
    target = reinterpret(memory, source.dtype, source.block_type.shape, source.layout)
    async_load(source, [batch, head, row, 0], full, target)


@gluon.jit
def _wait_stage(ring, loaded):
    """(the stage of the next step, when it is free)"""
    stage = loaded % STAGES
    mbarrier.wait(ring.empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def _load_own(descriptors, ring, batch, head, key, loaded):
    """Load a step of the rank's own keys and values."""
    stage = _wait_stage(ring, loaded)
    mbarrier.expect(ring.first_full.index(stage), descriptors.k.block_type.nbytes)
    _load_rows(descriptors.k, ring.first.index(stage), ring.first_full.index(stage), batch, head, key)
    mbarrier.expect(ring.second_full.index(stage), descriptors.v.block_type.nbytes)
    _load_rows(descriptors.v, ring.second.index(stage), ring.second_full.index(stage), batch, head, key)


@gluon.jit
def _load_slots(slots, ring, row, loaded):
    """Load a step of another rank's keys and values."""
    stage = _wait_stage(ring, loaded)
    mbarrier.expect(ring.first_full.index(stage), slots.block_type.nbytes)
    async_load(slots, [row, 0], ring.first_full.index(stage), ring.first.index(stage))
    mbarrier.expect(ring.second_full.index(stage), slots.block_type.nbytes)
    async_load(slots, [row + ROWS, 0], ring.second_full.index(stage), ring.second.index(stage))


@gluon.jit
def _load_queries(call, descriptors, ring, batch, head, tile, loaded):
    """Load a step of queries and gradients of the result."""
    stage = _wait_stage(ring, loaded)
    full = ring.first_full.index(stage)
    mbarrier.expect(full, descriptors.q.block_type.nbytes + descriptors.stats.block_type.nbytes)
    _load_rows(descriptors.q, ring.first.index(stage), full, batch, head, tile * ROWS)
    line = (batch * call.heads + head) * (WARPGROUPS * call.blocks) + tile
    async_load(descriptors.stats, [line, 0], full, ring.stats.index(stage))
    mbarrier.expect(ring.second_full.index(stage), descriptors.dout.block_type.nbytes)
    _load_rows(descriptors.dout, ring.second.index(stage), ring.second_full.index(stage), batch, head, tile * ROWS)


@gluon.jit
def _wait_held(held, number):
    """Wait until there is memory for the rows of task `number`. Returns the barrier that completes when they are
    loaded."""
    mbarrier.wait(held.empty.index(number % 2), ((number // 2) & 1) ^ 1)
    return held.full.index(number % 2)


@gluon.jit
def _poll_tile(comm, call, task, row):
    """Whether everything that a tile of dq reads from other ranks has arrived. TMA may then load it."""
    visible = seen_by_tile(call.mask, rank_of(comm.context), row, TILE_M)
    offsets = gl.arange(0, call.POLL_WIDTH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    panel = Panel(task.round_index, 0, call.mask.length)
    arrived = poll_all_arrived(comm, call.rounds, call.mask, panel, visible.low, visible.highest_end, offsets)
    arrived = agreed(arrived)
    tl.debug_barrier()  # makes what each thread has acquired visible to all threads
    acquire_for_descriptors()
    return arrived


@gluon.jit
def _wait_chunk(comm, call, round_index, source, key):
    """Wait for the chunk of a source's panel that holds `key`. TMA may then load it."""
    chunk = key // call.rounds.chunk_rows
    wait_panel(comm, call.rounds, round_index, source, chunk, chunk + 1)
    acquire_for_descriptors()


@gluon.jit
def _load_tile_of_dq(comm, call, descriptors, shared, task, number, loaded):
    """Load what a tile of dq needs: the rank's own keys and values, which need no wait, then those of others. Returns
    the new value of `loaded`."""
    rank = rank_of(comm.context)
    head = task.kv_head * (call.heads // call.kv_heads) + task.within // call.blocks
    row = task.within % call.blocks * TILE_M
    full = _wait_held(shared.held, number)
    mbarrier.expect(full, WARPGROUPS * (descriptors.q.block_type.nbytes + descriptors.dout.block_type.nbytes))
    for group in gl.static_range(WARPGROUPS):
        place = row + group * ROWS
        _load_rows(descriptors.q, held_at(shared.held, number, 0, group), full, task.batch, head, place)
        _load_rows(descriptors.dout, held_at(shared.held, number, 1, group), full, task.batch, head, place)
    own = keys_of_tile(call, rank, rank, row)
    for part in range(3):
        begin, end = segment(own, part)
        for block in range(begin, end):
            _load_own(descriptors, shared.ring, task.batch, task.kv_head, block * ROWS, loaded)
            loaded += 1
    if comm.WORLD_SIZE > 1:
        # not unrolled: see ops/attention/hopper_load.py
        ranks = tl.load(comm.context + SIZE_WORD).to(gl.int32)
        all_arrived = _poll_tile(comm, call, task, row)
        for part in range(3, 3 * ranks):
            source = source_at(comm, rank, part // 3)
            panel_row = slot_row(comm, call.rounds, task.round_index, source, rank)
            begin, end = segment(keys_of_tile(call, rank, source, row), part % 3)
            for block in range(begin, end):
                key = block * ROWS
                if (not all_arrived) & ((block == begin) | (key % call.rounds.chunk_rows == 0)):
                    _wait_chunk(comm, call, task.round_index, source, key)
                _load_slots(descriptors.slots, shared.ring, panel_row + 2 * key, loaded)
                loaded += 1
    return loaded


@gluon.jit
def _load_half(comm, call, descriptors, held, task, number, source, key, GROUP: gl.constexpr):
    """Load the keys and values of a warpgroup. Where there are none for it, load some of the rank's own instead: the
    barrier expects as many bytes of every block."""
    rank = rank_of(comm.context)
    full = held.full.index(number % 2)
    first = held_at(held, number, 0, GROUP)
    second = held_at(held, number, 1, GROUP)
    if comm.WORLD_SIZE == 1:
        _load_rows(descriptors.k, first, full, task.batch, task.kv_head, key)
        _load_rows(descriptors.v, second, full, task.batch, task.kv_head, key)
    elif (source == rank) | (not has_partial(call, rank, source, key)):
        own = gl.where(source == rank, key, 0)
        _load_rows(descriptors.k, first, full, task.batch, task.kv_head, own)
        _load_rows(descriptors.v, second, full, task.batch, task.kv_head, own)
    else:
        _wait_chunk(comm, call, task.round_index, source, key)
        row = slot_row(comm, call.rounds, task.round_index, source, rank) + 2 * key
        async_load(descriptors.slots, [row, 0], full, first)
        async_load(descriptors.slots, [row + ROWS, 0], full, second)


@gluon.jit
def _load_block_of_keys(comm, call, descriptors, shared, task, number, which, loaded):
    """Load what a block of keys needs. Returns the new value of `loaded`."""
    rank = rank_of(comm.context)
    source = which // call.tiles
    key = which % call.tiles * TILE_M
    group = call.heads // call.kv_heads
    full = _wait_held(shared.held, number)
    if is_block_seen(call, rank, which):
        mbarrier.expect(full, WARPGROUPS * (descriptors.k.block_type.nbytes + descriptors.v.block_type.nbytes))
        for half in gl.static_range(WARPGROUPS):
            _load_half(
                comm, call, descriptors, shared.held, task, number, source=source, key=key + half * ROWS, GROUP=half
            )
        blocks = rows_of_block(call, rank, which)
        for part in range(3 * group):
            head = task.kv_head * group + part // 3
            begin, end = segment(blocks, part % 3)
            for tile in range(begin, end):
                _load_queries(call, descriptors, shared.ring, task.batch, head, tile, loaded=loaded)
                loaded += 1
    else:
        mbarrier.arrive(full, count=1)  # nothing to load
    return loaded


@gluon.jit
def load(comm, call, descriptors, shared, first_entry, end_entry):
    """The loading warp: loads what the tasks in entries first_entry..end_entry-1 of the schedule need, in the order in
    which they need it. It skips reductions, and never waits for one, so it may be ahead of them."""
    wait_prepared(comm, call)
    acquire_for_descriptors()
    tiles_of_dq = call.heads // call.kv_heads * call.blocks
    loaded = first_entry * 0
    number = first_entry * 0  # of tasks with loads
    for entry in range(first_entry, end_entry):
        task = task_at(comm, call, entry)
        if task.within < tiles_of_dq + comm.WORLD_SIZE * call.tiles:
            if call.rounds.CREDITS:
                wait_own_round(comm, call.rounds, task.round_index, COMPUTE)
            if task.within < tiles_of_dq:
                loaded = _load_tile_of_dq(comm, call, descriptors, shared, task, number, loaded)
            else:
                loaded = _load_block_of_keys(
                    comm, call, descriptors, shared, task, number, which=task.within - tiles_of_dq, loaded=loaded
                )
            number += 1
