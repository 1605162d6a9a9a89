"""The kernel of matmul_all_reduce in one node whose memory has multicast: the switch hands out finished tiles.

Who does what. As in two_level.py, with the same tiles, owners, blocks and signals; what differs is how
tiles travel:

- tiles that others own: pushed to the owner, which adds them in the order of ranks. If the caller lets the
  switch add (IN_SWITCH), a part stays in this rank's own memory, and only its signal goes to the owner;
- its own tile: the owner adds what was pushed to its part. IN_SWITCH: it stores its own part beside the others',
  waits for all of them, and loads their sum through the switch. Then bias and residual; the finished tile goes into
  the result, and with one store into a slot in the memory of every rank;
- the finished tiles of the block before, which others own: it copies them from its own memory into the result.

What it costs, for a result of m*n elements in a node of G ranks. Two levels: each rank gives and takes 2*(G-1)/G*m*n
elements. Here, parts being pushed, it gives m*n and takes (2-1/G)*m*n: the switch hands a tile to its owner, too.
So a rank takes 1/G*m*n more than it has to, gives nearly half as much, and waits for no read from another GPU.
IN_SWITCH: it gives and takes (1+1/G)*m*n, which is less from 4 ranks on. Workspace, elements of a half: (G-1)/G*m*n
(IN_SWITCH: m*n) of reduce_dtype and m*n of the result's.

Sums and rounding. Parts that are pushed: the bits of two levels, whatever is chosen. IN_SWITCH: every part is
rounded to reduce_dtype, the own one too, and so is their sum; the order of ranks is the switch's (multimem.py),
so bits may differ from run to run. On all ranks they are the same: one rank adds, and all get what it has stored.

Why buffers are safe and why it cannot deadlock: as there. That a rank has left an epoch also means that its parts
have been read: it waited for all finished tiles. And what lies in its finished slots only its own CTAs read.

Ordering. The fence between multicast and other accesses (multimem.py) is made by all threads, before the
barrier and the release that announce a finished tile, and (in `load_sum`) after the waits for the parts that the
switch adds. The owner releases its own part like a peer: otherwise it could still be on its way when the switch asks
for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import Comm, current_epoch, rank_of
from mkernel.lang.gemm import store_tile
from mkernel.lang.layout import slot_of
from mkernel.lang.matrix import Tile
from mkernel.lang.signals import finish
from mkernel.lang.trace import GATHER, LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.reduce.all_reduce.multimem import everywhere, fence_aliases, load_sum, store_everywhere
from mkernel.ops.reduce.all_reduce.order import Sequence, count_rounds, locate, round_of, slot_number, take, tile_of
from mkernel.ops.reduce.all_reduce.protocol import (
    copy_finished,
    notify_finished,
    prefetch,
    sum_node,
    wait_finished,
)
from mkernel.ops.reduce.epilogue import add_to_tile, halves, move_right
from mkernel.ops.reduce.loop import Progress, for_each_tile, notify_due
from mkernel.ops.reduce.operands import count_tiles, with_matrices
from mkernel.ops.reduce.partials import store_partial
from mkernel.ops.reduce.protocol import (
    notify_partial,
    push_partial,
    signal_at,
    slot_at,
    wait_partials,
)


@triton.jit
def _slot_everywhere(comm, slots, i, j):
    """Multicast address of a slot: that of all ranks."""
    DTYPE: tl.constexpr = slots.DTYPE
    return everywhere(comm.context, slot_of(slots, comm.epoch, i, j) * (DTYPE.primitive_bitwidth // 8), DTYPE)


@triton.jit
def _keep(comm, exchange, total, owner, block):
    """Store this rank's partial of a tile into its own memory, for the switch to add. Returns the address of the signal
    that is due then."""
    rank = rank_of(comm.context)
    slot = slot_at(comm, exchange.partials, rank, owner, slot_number(block))
    store_partial(slot, total, total.shape[0], total.shape[1])
    place = (rank + 2 * comm.WORLD_SIZE - 1 - owner) % comm.WORLD_SIZE
    signal = signal_at(comm, exchange.partial, owner, place, slot_number(block)).to(tl.int64)
    own = signal_at(comm, exchange.own_partial, rank, 0, slot_number(block)).to(tl.int64)
    return tl.where(owner == rank, own, signal)


@triton.jit
def _add_in_switch(comm, exchange, total, block, tile):
    """The sum of all ranks' partials of this rank's own tile, made by the switch when all are there."""
    rank = rank_of(comm.context)
    signal = _keep(comm, exchange, total, rank, block)
    notify_partial(comm, signal, True)
    missing = wait_partials(comm, exchange, 0, slot_number(block), tile)
    slot = _slot_everywhere(comm, exchange.partials, rank, slot_number(block))
    return load_sum(slot, total, total.shape[0], total.shape[1]) + missing


@triton.jit
def _finish_everywhere(comm, call, total, tile, block):
    """Add bias and residual to a sum; store it into the result, and into its slot in the memory of every rank."""
    M: tl.constexpr = total.shape[0]
    HALF: tl.constexpr = total.shape[1] // 2
    slot = _slot_everywhere(comm, call.exchange.finished_tiles, rank_of(comm.context), slot_number(block))
    left, right = halves(total)
    left = add_to_tile(call.result, tile, left)
    store_everywhere(slot, left, M, HALF)
    store_tile(call.result.c, tile, left)
    beside = move_right(tile, HALF)
    right = add_to_tile(call.result, beside, right)
    store_everywhere(slot + M * HALF, right, M, HALF)
    store_tile(call.result.c, beside, right)


@triton.jit
def _notify_everywhere(comm, exchange, block):
    """Tell the other ranks that this rank's tile of a block is in their memory."""
    fence_aliases()
    notify_finished(comm, exchange, block)


@triton.jit
def _gather(comm, call, block, rounds):
    """Copy this CTA's tiles of a block that other ranks own from this rank's memory into the result."""
    M: tl.constexpr = call.product.tiling.M
    N: tl.constexpr = call.product.tiling.N
    rank = rank_of(comm.context)
    for i in range(comm.WORLD_SIZE - 1):
        owner = (rank + 1 + i) % comm.WORLD_SIZE
        round = round_of(block, owner, comm.WORLD_SIZE)
        if round < rounds:
            tile, row, column = tile_of(call.product, round)
            missing = wait_finished(comm, call.exchange, i, block, tile)
            slot = slot_at(comm, call.exchange.finished_tiles, rank, owner, slot_number(block))
            place = Tile(0, row, call.product.rows, column, call.product.n)
            copy_finished(call.result, slot, place, missing, M, N)
    trace(comm.context, TILES, GATHER, rank, block, LAST)


@triton.jit
def _prefetch(comm, call, taken):
    """Ask for what is pushed for a tile that this rank owns; the switch would have nothing to prefetch."""
    if not call.exchange.IN_SWITCH:
        prefetch(comm, call, taken)


@triton.jit
def _end_tile(comm, call, sequence, total, taken, progress):
    """As `_end_tile` of two_level.py, in one node, with multicast. There are no paced links with multicast."""
    WORLD_SIZE: tl.constexpr = comm.WORLD_SIZE
    rank = rank_of(comm.context)
    block = taken.round // WORLD_SIZE
    signal = progress.signal
    trace(comm.context, TILES, TILE, taken.owner, taken.tile, LAST)
    if signal != 0:
        notify_partial(comm, signal, True)
        signal = tl.full((), 0, tl.int64)
    if (taken.place % WORLD_SIZE == 0) & (block >= 1):
        # finished at the end of the block before
        _notify_everywhere(comm, call.exchange, block - 1)
    if taken.owner != rank:
        if call.exchange.IN_SWITCH:
            signal = _keep(comm, call.exchange, total, taken.owner, block)
        else:
            distance = (taken.owner + WORLD_SIZE - rank) % WORLD_SIZE
            signal = push_partial(comm, call.exchange, total, distance, 0, slot_number(block))
        trace(comm.context, TILES, PUSH_CHUNK, taken.owner, taken.tile, LAST)
    else:
        if call.exchange.IN_SWITCH:
            summed = _add_in_switch(comm, call.exchange, total, block, taken.tile)
        else:
            summed = sum_node(comm, call.exchange, total, block, taken.tile)
        _finish_everywhere(comm, call, summed, locate(call, taken), block)
        trace(comm.context, TILES, REDUCE, rank, taken.tile, LAST)
    if ((taken.place + 1 == sequence.length) | (taken.place % WORLD_SIZE == WORLD_SIZE - 1)) & (block >= 1):
        _gather(comm, call, block - 1, sequence.length)
    return Progress(signal, progress.moved, progress.start)


@triton.jit
def _run(comm, call):
    rank = rank_of(comm.context)
    rounds = count_rounds(count_tiles(call.product))
    blocks = tl.cdiv(rounds, comm.WORLD_SIZE)
    progress = for_each_tile(
        comm, call, Sequence(rounds), take, locate, _prefetch, _end_tile, HOIST=call.product.a.strides.USES_TMA
    )  # fmt: skip
    notify_due(comm, progress.signal)
    if blocks > 0:
        if round_of(blocks - 1, rank, comm.WORLD_SIZE) < rounds:
            _notify_everywhere(comm, call.exchange, blocks - 1)
        _gather(comm, call, blocks - 1, rounds)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def multicast_kernel(context, ranks, a, b, c, residual, call):
    """The whole operator. ranks: `Ranks`; a, b, c, residual: tensors or descriptors; call: `Call`."""
    with_matrices(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), call, a, b, c, residual, _run
    )  # fmt: skip
