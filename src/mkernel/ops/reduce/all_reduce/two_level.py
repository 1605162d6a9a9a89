"""The general kernel of matmul_all_reduce: the first exchange moves partials, the second one finished tiles.

The package's docstring describes what a CTA does with a block of tiles, and why it cannot deadlock.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import Comm, current_epoch, rank_of
from mkernel.lang.copy import wait_paced
from mkernel.lang.matrix import Tile
from mkernel.lang.signals import finish
from mkernel.lang.trace import GATHER, LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.reduce.all_reduce.home import is_home, send_finished, send_to_home, sum_at_home, wait_from_home
from mkernel.ops.reduce.all_reduce.order import (
    FEWEST_WITH_HOMES,
    Sequence,
    count_rounds,
    locate,
    round_of,
    slot_number,
    take,
    tile_of,
)
from mkernel.ops.reduce.all_reduce.protocol import (
    copy_finished,
    finish_tile,
    finished_slot,
    notify_finished,
    prefetch,
    send_node_sum,
    sum_node,
    sum_nodes,
    wait_finished,
)
from mkernel.ops.reduce.loop import Progress, for_each_tile, notify_due, wait_paced_progress
from mkernel.ops.reduce.operands import count_tiles, with_matrices
from mkernel.ops.reduce.protocol import (
    notify_partial,
    peer_behind,
    push_partial,
    slot_bytes,
)


@triton.jit
def _lag(comm):
    """How many blocks later a block's finished tiles are gathered: the exchange between two nodes takes one more, the
    way to the tile's home and back two more."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    return 3 if NODES >= FEWEST_WITH_HOMES else NODES


@triton.jit
def _notify_last_finished(comm, exchange, block):
    """At the beginning of a block, signal the tile that was finished or received last, during the previous block."""
    notify_finished(comm, exchange, block - _lag(comm))


@triton.jit
def _finish_later(comm, call, block):
    """Finish this rank's own tile of an earlier block, for which the nodes have sent their sums: at the tile's home, if
    it has one."""
    M: tl.constexpr = call.product.tiling.M
    N: tl.constexpr = call.product.tiling.N
    HAS_HOME: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE >= FEWEST_WITH_HOMES
    own = round_of(block, rank_of(comm.context) % comm.RANKS_PER_NODE, comm.RANKS_PER_NODE)
    tile, row, column = tile_of(call.product, own)
    here = Tile(0, row, call.product.rows, column, call.product.n)
    if HAS_HOME:
        if is_home(comm, block):
            finish_tile(comm, call, sum_at_home(comm, call.exchange, block, tile, M, N), here, block)
            send_finished(comm, call.exchange, block)
            trace(comm.context, TILES, REDUCE, rank_of(comm.context), tile, LAST)
    else:
        finish_tile(comm, call, sum_nodes(comm, call.exchange, block, tile, M, N), here, block)
        trace(comm.context, TILES, REDUCE, rank_of(comm.context), tile, LAST)


@triton.jit
def _receive_finished(comm, call, block):
    """Store this rank's own tile of an earlier block in the result, if it comes from a home in another node."""
    if not is_home(comm, block):
        rank = rank_of(comm.context)
        own = round_of(block, rank % comm.RANKS_PER_NODE, comm.RANKS_PER_NODE)
        tile, row, column = tile_of(call.product, own)
        missing = wait_from_home(comm, call.exchange, block, tile)
        slot = finished_slot(comm, call.exchange, rank, block)
        here = Tile(0, row, call.product.rows, column, call.product.n)
        copy_finished(call.result, slot, here, missing, call.product.tiling.M, call.product.tiling.N)


@triton.jit
def _gather(comm, call, block, rounds):
    """Read this CTA's tiles of a block that the other ranks of the node own, and store them in the result. Returns the
    number of bytes read."""
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
            destination = Tile(0, row, call.product.rows, column, call.product.n)
            copy_finished(call.result, slot, destination, missing, M, N)
            count += 1
    trace(comm.context, TILES, GATHER, rank, block, LAST)
    return tl.cast(count, tl.int64) * slot_bytes(call.exchange.finished_tiles)


@triton.jit
def _end_tile(comm, call, sequence, total, taken, progress):
    """Push the partial of a tile, or reduce what others have pushed. At the end of a block, also finish and gather
    tiles of earlier blocks."""
    RANKS_PER_NODE: tl.constexpr = comm.RANKS_PER_NODE
    NODES: tl.constexpr = comm.WORLD_SIZE // RANKS_PER_NODE
    rank = rank_of(comm.context)
    local = rank % RANKS_PER_NODE
    block = taken.round // RANKS_PER_NODE
    signal = progress.signal
    moved = progress.moved
    trace(comm.context, TILES, TILE, rank - local + taken.owner, taken.tile, LAST)
    wait_paced_progress(call.link, progress)
    if signal != 0:
        notify_partial(comm, signal, True)
        signal = tl.full((), 0, tl.int64)
    if (taken.position % RANKS_PER_NODE == 0) & (block >= _lag(comm)):
        _notify_last_finished(comm, call.exchange, block)
    is_pushed = False  # a compile-time constant with one rank per node: Triton fails on code for absent peers if k is 1
    if RANKS_PER_NODE > 1:
        is_pushed = taken.owner != local
    if is_pushed:
        distance = (taken.owner + RANKS_PER_NODE - local) % RANKS_PER_NODE
        signal = push_partial(comm, call.exchange, total, distance, 0, slot_number(block))
        moved += slot_bytes(call.exchange.partials)
        trace(comm.context, TILES, PUSH_CHUNK, rank - local + taken.owner, taken.tile, LAST)
    else:
        total = sum_node(comm, call.exchange, total, block, taken.tile)
        if NODES >= FEWEST_WITH_HOMES:
            send_to_home(comm, call.exchange, total, block)
        elif NODES > 1:
            send_node_sum(comm, call.exchange, total, block)
        else:
            finish_tile(comm, call, total, locate(call, taken), block)
        trace(comm.context, TILES, REDUCE, rank, taken.tile, LAST)
    if (taken.position + 1 == sequence.length) | (taken.position % RANKS_PER_NODE == RANKS_PER_NODE - 1):
        if NODES > 1:
            if block >= 1:
                _finish_later(comm, call, block - 1)
        if NODES >= FEWEST_WITH_HOMES:
            if block >= 2:
                _receive_finished(comm, call, block - 2)
        if RANKS_PER_NODE > 1:
            if block >= _lag(comm):
                moved += _gather(comm, call, block - _lag(comm), sequence.length)
    return Progress(signal, moved, progress.start)


@triton.jit
def _owns(comm, block, rounds):
    """Whether this rank owns one of this CTA's tiles of a block: there may be no such block, and the last one may be
    shorter."""
    local = rank_of(comm.context) % comm.RANKS_PER_NODE
    return (block >= 0) & (round_of(block, local, comm.RANKS_PER_NODE) < rounds)


@triton.jit
def _drain_with_homes(comm, call, blocks, rounds):
    """The steps that would follow in further blocks. Returns the number of bytes read."""
    moved = tl.cast(0, tl.int64)
    for block in range(blocks, blocks + _lag(comm)):
        if _owns(comm, block - _lag(comm), rounds):
            notify_finished(comm, call.exchange, block - _lag(comm))
        if _owns(comm, block - 1, rounds):
            _finish_later(comm, call, block - 1)
        if _owns(comm, block - 2, rounds):
            _receive_finished(comm, call, block - 2)
        if block >= _lag(comm):
            moved += _gather(comm, call, block - _lag(comm), rounds)
    return moved


@triton.jit
def _drain(comm, call, rounds, progress):
    """What remains after the last multiplication: the pending signal, and the tiles of the last blocks."""
    RANKS_PER_NODE: tl.constexpr = comm.RANKS_PER_NODE
    NODES: tl.constexpr = comm.WORLD_SIZE // RANKS_PER_NODE
    local = rank_of(comm.context) % RANKS_PER_NODE
    blocks = tl.cdiv(rounds, RANKS_PER_NODE)
    wait_paced_progress(call.link, progress)
    notify_due(comm, progress.signal)
    moved = progress.moved
    if NODES >= FEWEST_WITH_HOMES:
        moved += _drain_with_homes(comm, call, blocks, rounds)
    else:
        for late in range(tl.maximum(blocks - _lag(comm), 0), blocks):
            if round_of(late, local, RANKS_PER_NODE) < rounds:
                if NODES > 1:
                    if late == blocks - 1:
                        _finish_later(comm, call, late)
                notify_finished(comm, call.exchange, late)
        if RANKS_PER_NODE > 1:
            for late in range(tl.maximum(blocks - _lag(comm), 0), blocks):
                moved += _gather(comm, call, late, rounds)
    if RANKS_PER_NODE > 1:
        if call.link.PACED:
            wait_paced(progress.start, moved, call.link.nanoseconds_per_mib)


@triton.jit
def _run(comm, call):
    sequence = Sequence(count_rounds(count_tiles(call.product)))
    progress = for_each_tile(
        comm, call, sequence, take, locate, prefetch, _end_tile, HOIST=call.product.a.strides.USES_TMA
    )  # fmt: skip
    _drain(comm, call, sequence.length, progress)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def two_level_kernel(context, ranks, a, b, c, residual, call):
    """The whole operator. ranks: `Ranks`; a, b, c, residual: tensors or descriptors; call: `Call`."""
    with_matrices(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), call, a, b, c, residual, _run
    )  # fmt: skip
