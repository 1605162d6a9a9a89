"""The kernel of matmul_all_reduce for the smallest results, in one node: all partials go to all ranks.

One exchange instead of two, for half as many times the bytes as the node has ranks.
"""

import triton
import triton.language as tl

from mkernel.lang.context import Comm, current_epoch, rank_of
from mkernel.lang.copy import pace
from mkernel.lang.device import clock
from mkernel.lang.gemm import multiply_tile
from mkernel.lang.matrix import Tile
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import PARTIAL, finish, notify_in_loop, wait_again
from mkernel.lang.trace import LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.reduce.all_reduce.order import count_rounds, tile_of
from mkernel.ops.reduce.epilogue import store_result
from mkernel.ops.reduce.operands import count_tiles, with_matrices
from mkernel.ops.reduce.partials import load_partial, store_partial
from mkernel.ops.reduce.protocol import signal_at, slot_at, slot_bytes


@triton.jit
def _push_to_all(comm, exchange, total, tile):
    """Push this rank's partial of a tile to every rank, itself too."""
    rank = rank_of(comm.context)
    for i in range(comm.WORLD_SIZE):
        slot = slot_at(comm, exchange.partials, (rank + i) % comm.WORLD_SIZE, rank, tile)
        store_partial(slot, total, total.shape[0], total.shape[1])


@triton.jit
def _notify_all(comm, exchange, tile):
    """Tell the other ranks that this rank's partial of a tile is there."""
    rank = rank_of(comm.context)
    for i in range(1, comm.WORLD_SIZE):
        peer = (rank + i) % comm.WORLD_SIZE
        notify_in_loop(signal_at(comm, exchange.partial, peer, rank, tile), comm.epoch)


@triton.jit
def _add_all(comm, exchange, tile, M: tl.constexpr, N: tl.constexpr):
    """All ranks' partials of a tile, added in the order of ranks once they are here; NaN if the group gave up."""
    rank = rank_of(comm.context)
    missing = 0.0
    for source in range(comm.WORLD_SIZE):
        if source != rank:
            signal = signal_at(comm, exchange.partial, rank, source, tile)
            if not wait_again(comm.context, signal, comm.epoch, COMPUTE, PARTIAL, source, tile):
                missing = float("nan")
    total = tl.zeros((M, N), tl.float32)
    for source in range(comm.WORLD_SIZE):
        total += load_partial(slot_at(comm, exchange.partials, rank, source, tile), M, N)
    return total + missing


@triton.jit
def _run(comm, call):
    M: tl.constexpr = call.product.tiling.M
    N: tl.constexpr = call.product.tiling.N
    rank = rank_of(comm.context)
    rounds = count_rounds(count_tiles(call.product))
    begun = tl.full((), 0, tl.int64)
    if call.link.PACED:
        begun = clock()
    for round in range(rounds):
        tile, row, column = tile_of(call.product, round)
        place = Tile(0, row, call.product.rows, column, call.product.n)
        total = multiply_tile(call.product.a, call.product.b, place, call.product.k, call.product.tiling)
        trace(comm.context, TILES, TILE, rank, tile, LAST)
        _push_to_all(comm, call.exchange, total, tile)
        if call.link.PACED:
            pushed = tl.cast(round + 1, tl.int64) * (comm.WORLD_SIZE - 1) * slot_bytes(call.exchange.partials)
            pace(begun, pushed, call.link.nanoseconds_per_mib)
        trace(comm.context, TILES, PUSH_CHUNK, rank, tile, LAST)
        _notify_all(comm, call.exchange, tile)
    for round in range(rounds):
        tile, row, column = tile_of(call.product, round)
        total = _add_all(comm, call.exchange, tile, M, N)
        store_result(call.result, Tile(0, row, call.product.rows, column, call.product.n), total)
        trace(comm.context, TILES, REDUCE, rank, tile, LAST)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def one_shot_kernel(context, ranks, a, b, c, residual, call):
    """The whole operator. ranks: `Ranks`; a, b, c, residual: tensors or descriptors; call: `Call`."""
    with_matrices(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), call, a, b, c, residual, _run
    )  # fmt: skip
