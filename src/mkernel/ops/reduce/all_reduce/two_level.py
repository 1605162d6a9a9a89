"""The kernel of matmul_all_reduce for all but small results: two exchanges, first of partials, then of finished tiles.

See the package's docstring for what a CTA does with a block of tiles, and for why it cannot deadlock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import Comm, current_epoch, rank_of
from mkernel.lang.copy import pace
from mkernel.lang.device import clock
from mkernel.lang.gemm import multiply_step
from mkernel.lang.matrix import Tile
from mkernel.lang.signals import finish
from mkernel.lang.trace import GATHER, LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.reduce.all_reduce.order import count_rounds, round_at, round_of, slot_number, tile_of
from mkernel.ops.reduce.all_reduce.protocol import (
    copy_finished,
    finish_tile,
    finished_slot,
    notify_finished,
    send_node_sum,
    sum_node,
    sum_nodes,
    wait_finished,
)
from mkernel.ops.reduce.operands import count_steps, count_tiles, with_matrices
from mkernel.ops.reduce.protocol import (
    notify_partial,
    peer_behind,
    prefetch_partials,
    push_partial,
    slot_bytes,
)


class Taken(NamedTuple):
    """The tile that a CTA is at: the place in its sequence, the round, the local rank that owns the tile, its number,
    and where it begins."""

    place: Any
    round: Any
    owner: Any
    tile: Any
    row: Any
    column: Any


@triton.jit
def _lag(comm):
    """How many blocks later a tile is finished: the exchange between nodes takes one."""
    return 2 if comm.WORLD_SIZE > comm.RANKS_PER_NODE else 1


@triton.jit
def _notify_last_finished(comm, exchange, block):
    """At the beginning of a block, tell the node of the tile that was finished at the end of the block before."""
    notify_finished(comm, exchange, block - _lag(comm))


@triton.jit
def _finish_later(comm, call, block):
    """Finish this rank's own tile of a block, whose sums the nodes have exchanged."""
    own = round_of(block, rank_of(comm.context) % comm.RANKS_PER_NODE, comm.RANKS_PER_NODE)
    tile, row, column = tile_of(call.product, own)
    total = sum_nodes(comm, call.exchange, block, tile, call.product.tiling.M, call.product.tiling.N)
    finish_tile(comm, call, total, Tile(0, row, call.product.rows, column, call.product.n), block)
    trace(comm.context, TILES, REDUCE, rank_of(comm.context), tile, LAST)


@triton.jit
def _gather(comm, call, block, rounds):
    """Read this CTA's tiles of a block that the other ranks of the node own, and store them into the result.
    Returns how many bytes that were."""
    M: tl.constexpr = call.product.tiling.M
    N: tl.constexpr = call.product.tiling.N
    rank = rank_of(comm.context)
    count = 0
    for i in range(comm.RANKS_PER_NODE - 1):
        owner = peer_behind(comm, 1 + i)
        round = round_of(block, owner % comm.RANKS_PER_NODE, comm.RANKS_PER_NODE)
        if round < rounds:
            tile, row, column = tile_of(call.product, round)
            missing = wait_finished(comm, call.exchange, i, block, tile)
            slot = finished_slot(comm, call.exchange, owner, block)
            place = Tile(0, row, call.product.rows, column, call.product.n)
            copy_finished(call.result, slot, place, missing, M, N)
            count += 1
    trace(comm.context, TILES, GATHER, rank, block, LAST)
    return tl.cast(count, tl.int64) * slot_bytes(call.exchange.finished_tiles)


@triton.jit
def _end_tile(comm, call, total, taken, rounds, signal, moved, begun):
    """Push a tile that is multiplied, or add what others have pushed; at the end of a block, finish and gather tiles of
    earlier ones. Returns (address of the signal that is due, bytes moved so far). Every way through here must use
    `total`: then it has been computed when it becomes zero again, and the tensor cores may still be at work on it
    everywhere else in the loop."""
    RANKS_PER_NODE: tl.constexpr = comm.RANKS_PER_NODE
    rank = rank_of(comm.context)
    local = rank % RANKS_PER_NODE
    block = taken.round // RANKS_PER_NODE
    trace(comm.context, TILES, TILE, rank - local + taken.owner, taken.tile, LAST)
    if call.link.PACED:
        pace(begun, moved, call.link.nanoseconds_per_mib)
    if signal != 0:
        notify_partial(comm, signal, True)
        signal = tl.full((), 0, tl.int64)
    if (taken.place % RANKS_PER_NODE == 0) & (block >= _lag(comm)):
        _notify_last_finished(comm, call.exchange, block)
    is_pushed = False  # known to the compiler: it fails on code for peers that there are none of, if k is 1
    if RANKS_PER_NODE > 1:
        is_pushed = taken.owner != local
    if is_pushed:
        distance = (taken.owner + RANKS_PER_NODE - local) % RANKS_PER_NODE
        signal = push_partial(comm, call.exchange, total, distance, 0, slot_number(block))
        moved += slot_bytes(call.exchange.partials)
        trace(comm.context, TILES, PUSH_CHUNK, rank - local + taken.owner, taken.tile, LAST)
    else:
        total = sum_node(comm, call.exchange, total, block, taken.tile)
        if comm.WORLD_SIZE > RANKS_PER_NODE:
            send_node_sum(comm, call.exchange, total, block)
        else:
            place = Tile(0, taken.row, call.product.rows, taken.column, call.product.n)
            finish_tile(comm, call, total, place, block)
        trace(comm.context, TILES, REDUCE, rank, taken.tile, LAST)
    if (taken.place + 1 == rounds) | (taken.place % RANKS_PER_NODE == RANKS_PER_NODE - 1):
        if comm.WORLD_SIZE > RANKS_PER_NODE:
            if block >= 1:
                _finish_later(comm, call, block - 1)
        if RANKS_PER_NODE > 1:
            if block >= _lag(comm):
                moved += _gather(comm, call, block - _lag(comm), rounds)
    return signal, moved


@triton.jit
def _drain(comm, call, rounds, signal, moved, begun):
    """What is left when the last tile is multiplied: signals that are due, and the tiles of the last blocks."""
    RANKS_PER_NODE: tl.constexpr = comm.RANKS_PER_NODE
    local = rank_of(comm.context) % RANKS_PER_NODE
    blocks = tl.cdiv(rounds, RANKS_PER_NODE)
    if call.link.PACED:
        pace(begun, moved, call.link.nanoseconds_per_mib)
    if signal != 0:
        notify_partial(comm, signal, True)
    for late in range(tl.maximum(blocks - _lag(comm), 0), blocks):
        if round_of(late, local, RANKS_PER_NODE) < rounds:
            if comm.WORLD_SIZE > RANKS_PER_NODE:
                if late == blocks - 1:
                    _finish_later(comm, call, late)
            notify_finished(comm, call.exchange, late)
    if RANKS_PER_NODE > 1:
        for late in range(tl.maximum(blocks - _lag(comm), 0), blocks):
            moved += _gather(comm, call, late, rounds)
        if call.link.PACED:
            pace(begun, moved, call.link.nanoseconds_per_mib)


@triton.jit
def _run(comm, call):
    M: tl.constexpr = call.product.tiling.M
    N: tl.constexpr = call.product.tiling.N
    local = rank_of(comm.context) % comm.RANKS_PER_NODE
    rounds = count_rounds(count_tiles(call.product))
    steps = count_steps(call.product)

    place = -1
    step = steps - 1
    round = 0
    owner = 0
    tile = 0
    row = 0
    column = 0
    signal = tl.full((), 0, tl.int64)  # address of the signal of the partial that was pushed last, if it is due
    moved = tl.full((), 0, tl.int64)
    begun = tl.full((), 0, tl.int64)
    if call.link.PACED:
        begun = clock()
    total = tl.zeros((M, N), tl.float32)
    # hoisting costs spills where operands are read through pointers, and saves some where they are not
    for _ in tl.range(rounds * steps, disable_licm=not call.product.a.strides.USES_TMA):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            place += 1
            round, owner = round_at(place, rounds, local, comm.RANKS_PER_NODE)
            tile, row, column = tile_of(call.product, round)
        total = multiply_step(
            total, call.product.a, call.product.b, Tile(0, row, call.product.rows, column, call.product.n),
            step * call.product.tiling.K, call.product.k, call.product.tiling,
        )  # fmt: skip
        if comm.RANKS_PER_NODE > 1:
            if (step == 0) & (owner == local):
                prefetch_partials(comm, call.exchange, 0, slot_number(round // comm.RANKS_PER_NODE), M, N)
        if step == steps - 1:
            taken = Taken(place, round, owner, tile, row, column)
            signal, moved = _end_tile(comm, call, total, taken, rounds, signal, moved, begun)
            total = tl.zeros((M, N), tl.float32)
    _drain(comm, call, rounds, signal, moved, begun)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def two_level_kernel(context, ranks, a, b, c, residual, call):
    """The whole operator. ranks: `Ranks`; a, b, c, residual: tensors or descriptors; call: `Call`."""
    with_matrices(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), call, a, b, c, residual, _run
    )  # fmt: skip
