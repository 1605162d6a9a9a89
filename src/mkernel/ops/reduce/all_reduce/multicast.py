"""The kernel of matmul_all_reduce with multicast, in one node: the switch delivers finished tiles to all ranks.

Who does what. Tiles, owners, blocks and signals are those of two_level.py. What differs is how tiles travel:

- Tiles that other ranks own: the CTA pushes its partial to the owner, which reduces in rank order. If the caller lets
  the switch reduce (IN_SWITCH), the partial stays in this rank's own memory, and only its signal goes to the owner.
- The tile that this rank owns: the CTA adds the partials that were pushed. IN_SWITCH: it stores its own partial in the
  slot with the same index as the others', waits for all of them, and loads their sum through the switch. Then it adds
  bias and residual, and stores the finished tile in the result and, with one multicast store, in a slot in the memory
  of every rank.
- The other ranks' tiles of the previous block: the CTA copies them from its own rank's memory to the result.

What it costs, for a result of m*n elements in a node of G ranks. Without multicast, each rank sends and receives
2*(G-1)/G*m*n elements. With multicast and pushed partials, it sends m*n and receives (2-1/G)*m*n, because the switch
delivers a tile to its owner as well. So a rank receives 1/G*m*n more than it needs, sends little more than half as
much, and waits for no read from another GPU. IN_SWITCH: it sends and receives (1+1/G)*m*n, which is less from 4 ranks
on. Workspace, elements of a half: (G-1)/G*m*n (IN_SWITCH: m*n) of reduce_dtype and m*n of the result's dtype.

Accumulation and rounding. With pushed partials, the bits are those of two_level.py, whichever kernel is chosen.
IN_SWITCH: every partial is rounded to reduce_dtype, including the owner's, and so is their sum. The switch determines
the order (multimem.py), so the bits may differ from run to run. They are the same on all ranks: one rank reduces, and
all receive what it has stored.

Why buffers can be reused and why it cannot deadlock: as in two_level.py. If a rank has left an epoch, its partials
have been read too, because it waited for all finished tiles. Its finished slots are read only by its own CTAs.

Memory ordering. All threads execute the fence between multicast and other accesses (multimem.py): before the barrier
and the release that announce a finished tile, and (in `load_sum`) after the waits for the partials that the switch
adds. The owner signals its own partial with a release, like a peer; otherwise that store could still be in flight when
the switch reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import Comm, current_epoch, rank_of
from mkernel.lang.gemm import store_tile
from mkernel.lang.layout import slot_of
from mkernel.lang.matrix import Tile
from mkernel.lang.partials import store_partial
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
from mkernel.ops.reduce.protocol import (
    notify_partial,
    push_partial,
    signal_at,
    slot_at,
    wait_partials,
)


@triton.jit
def _slot_everywhere(comm, slots, i, j):
    """The multicast address of a slot, which stands for the slot of all ranks."""
    DTYPE: tl.constexpr = slots.DTYPE
    return everywhere(comm.context, slot_of(slots, comm.epoch, i, j) * (DTYPE.primitive_bitwidth // 8), DTYPE)


@triton.jit
def _keep(comm, exchange, total, owner, block):
    """Store this rank's partial of a tile in its own memory, for the switch to reduce. Returns the address of the
    signal, which the caller must send with `notify_partial`."""
    rank = rank_of(comm.context)
    slot = slot_at(comm, exchange.partials, rank, owner, slot_number(block))
    store_partial(slot, total, total.shape[0], total.shape[1])
    i = (rank + 2 * comm.WORLD_SIZE - 1 - owner) % comm.WORLD_SIZE
    signal = signal_at(comm, exchange.partial, owner, i, slot_number(block)).to(tl.int64)
    own = signal_at(comm, exchange.own_partial, rank, 0, slot_number(block)).to(tl.int64)
    return tl.where(owner == rank, own, signal)


@triton.jit
def _add_in_switch(comm, exchange, total, block, tile):
    """Wait for all ranks' partials of this rank's own tile, and return their sum, computed by the switch."""
    rank = rank_of(comm.context)
    signal = _keep(comm, exchange, total, rank, block)
    notify_partial(comm, signal, True)
    missing = wait_partials(comm, exchange, 0, slot_number(block), tile)
    slot = _slot_everywhere(comm, exchange.partials, rank, slot_number(block))
    return load_sum(slot, total, total.shape[0], total.shape[1]) + missing


@triton.jit
def _finish_everywhere(comm, call, total, tile, block):
    """Add bias and residual to a sum; store it in the result, and in its slot in the memory of every rank."""
    M: tl.constexpr = total.shape[0]
    HALF: tl.constexpr = total.shape[1] // 2
    slot = _slot_everywhere(comm, call.exchange.finished_tiles, rank_of(comm.context), slot_number(block))
    left, right = halves(total)
    left = add_to_tile(call.result, tile, left)
    store_everywhere(slot, left, M, HALF)
    store_tile(call.result.c, tile, left)
    right_tile = move_right(tile, HALF)
    right = add_to_tile(call.result, right_tile, right)
    store_everywhere(slot + M * HALF, right, M, HALF)
    store_tile(call.result.c, right_tile, right)


@triton.jit
def _notify_everywhere(comm, exchange, block):
    """Signal to the other ranks that this rank's tile of a block is in their memory."""
    fence_aliases()
    notify_finished(comm, exchange, block)


@triton.jit
def _gather(comm, call, block, rounds):
    """Copy this CTA's tiles of a block that other ranks own from this rank's memory to the result."""
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
            destination = Tile(0, row, call.product.rows, column, call.product.n)
            copy_finished(call.result, slot, destination, missing, M, N)
    trace(comm.context, TILES, GATHER, rank, block, LAST)


@triton.jit
def _prefetch(comm, call, taken):
    """Prefetch the partials pushed to a tile that this rank owns. If the switch reduces, there is nothing to
    prefetch."""
    if not call.exchange.IN_SWITCH:
        prefetch(comm, call, taken)


@triton.jit
def _end_tile(comm, call, sequence, total, taken, progress):
    """Like `_end_tile` in two_level.py, for one node with multicast. Links are never paced with multicast."""
    WORLD_SIZE: tl.constexpr = comm.WORLD_SIZE
    rank = rank_of(comm.context)
    block = taken.round // WORLD_SIZE
    signal = progress.signal
    trace(comm.context, TILES, TILE, taken.owner, taken.tile, LAST)
    if signal != 0:
        notify_partial(comm, signal, True)
        signal = tl.full((), 0, tl.int64)
    if (taken.position % WORLD_SIZE == 0) & (block >= 1):
        # this tile was finished at the end of the previous block
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
    if ((taken.position + 1 == sequence.length) | (taken.position % WORLD_SIZE == WORLD_SIZE - 1)) & (block >= 1):
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
