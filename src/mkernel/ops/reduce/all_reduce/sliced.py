"""The kernel of matmul_all_reduce for small results in one node, with at most one tile per CTA: ranks share each tile.

With so few tiles there is no second tile whose multiplication could hide an exchange, and large tiles read the
operands the fewest times. So a CTA computes one large tile and splits it into slices of columns, one for each rank of
the node; local rank i owns slice i:

- The CTA pushes the slices that other ranks own to them, and adds the partials that they push to its own slice.
- It adds bias and residual, and stores the finished slice in the result and in a slot that peers read.
- It reads the finished slices of its tile from their owners, and stores them in the result.

All CTAs of all ranks do the same amount of work. Whole tiles would leave the reduction of each to a single rank. (With
4 ranks, 128 x 8192 with k 8192, whole tiles of 128x256 took 77 us.)

Signals, rounding, the order of sums and the reuse of buffers are described in the package's docstring; read slices for
tiles. A CTA waits only for CTAs with its own program id: for what they push before they wait for anything, and for
what they finish before they read. So it cannot deadlock, even if the CTAs of a rank run one after the other.
"""

import triton
import triton.language as tl

from mkernel.lang.context import TABLE, Comm, current_epoch, rank_of
from mkernel.lang.copy import wait_paced
from mkernel.lang.device import clock
from mkernel.lang.gemm import multiply_tile, store_tile
from mkernel.lang.layout import word_of
from mkernel.lang.matrix import Tile
from mkernel.lang.partials import load_partial
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import finish, notify_each, wait_peers
from mkernel.lang.trace import GATHER, LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.reduce.all_reduce.protocol import finish_tile
from mkernel.ops.reduce.epilogue import halves, move_right
from mkernel.ops.reduce.kinds import FINISHED_TILE, PARTIAL
from mkernel.ops.reduce.operands import tile_corner, with_matrices
from mkernel.ops.reduce.protocol import push_partial, signal_at, slot_at, slot_bytes


@triton.jit
def _slice(values, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """The INDEX-th of COUNT slices of a tile's columns; COUNT is 2, 4 or 8."""
    left, right = halves(values)
    part = right if INDEX >= COUNT // 2 else left
    if COUNT >= 4:
        left, right = halves(part)
        part = right if INDEX % (COUNT // 2) >= COUNT // 4 else left
    if COUNT >= 8:
        left, right = halves(part)
        part = right if INDEX % (COUNT // 4) >= COUNT // 8 else left
    return part


@triton.jit
def _notify_peers(comm, words, tile):
    """Set this rank's signal of a tile on every other rank."""
    i = tl.arange(0, comm.WORLD_SIZE)
    peers = tl.load(comm.context + TABLE + (rank_of(comm.context) + i) % comm.WORLD_SIZE).to(tl.pointer_type(tl.int64))
    notify_each(peers + word_of(words, comm.epoch, comm.WORLD_SIZE - 1 - i, tile), comm.epoch, i > 0)


@triton.jit
def _notify_partial(comm, exchange, tile):
    """Signal to every other rank that this rank's partial of its slice has been pushed."""
    _notify_peers(comm, exchange.partial, tile)


@triton.jit
def _notify_finished(comm, exchange, tile):
    """Signal to every other rank that this rank's slice of a tile is finished."""
    _notify_peers(comm, exchange.finished, tile)


@triton.jit
def _wait_peers(comm, words, tile, KIND: tl.constexpr):
    """Wait for all other ranks' signals of a tile. Returns 0.0, or NaN if the group gave up."""
    rank = rank_of(comm.context)
    i = tl.arange(0, comm.WORLD_SIZE)
    signals = signal_at(comm, words, rank, i, tile)
    peers = (rank + 1 + i) % comm.WORLD_SIZE
    here = wait_peers(comm.context, signals, i < comm.WORLD_SIZE - 1, comm.epoch, COMPUTE, KIND, peers, tile)
    return tl.where(here, 0.0, float("nan"))


@triton.jit
def _share(comm, exchange, total, tile):
    """Push the slices of a tile that other ranks own. Returns the slice that this rank owns."""
    COUNT: tl.constexpr = comm.WORLD_SIZE
    rank = rank_of(comm.context)
    mine = tl.zeros((total.shape[0], total.shape[1] // COUNT), tl.float32)
    for index in tl.static_range(COUNT):
        part = _slice(total, index, COUNT)
        if index == rank:
            mine = part
        else:
            push_partial(comm, exchange, part, (index + COUNT - rank) % COUNT, 0, tile)
    return mine


@triton.jit
def _add_slices(comm, exchange, total, tile):
    """Wait for the other ranks' partials of this rank's slice, and add them. All are loaded before the first is added:
    slices are small enough for that."""
    missing = _wait_peers(comm, exchange.partial, tile, PARTIAL)
    rank = rank_of(comm.context)
    partials = ()
    for i in tl.static_range(comm.WORLD_SIZE - 1):
        slot = slot_at(comm, exchange.partials, rank, i, tile)
        partials = partials + (load_partial(slot, total.shape[0], total.shape[1]),)  # type: ignore[assignment]
    total += missing
    for i in tl.static_range(comm.WORLD_SIZE - 1):
        total += partials[i]
    return total


@triton.jit
def _gather(comm, call, location, tile):
    """Read the finished slices of a tile from their owners, and store them in the result."""
    M: tl.constexpr = call.product.tiling.M
    SLICE: tl.constexpr = call.product.tiling.N // comm.WORLD_SIZE
    HALF: tl.constexpr = SLICE // 2
    rank = rank_of(comm.context)
    missing = _wait_peers(comm, call.exchange.finished, tile, FINISHED_TILE)
    # issue all loads before the first store, so that their latencies overlap
    finished = ()
    for i in tl.static_range(comm.WORLD_SIZE - 1):
        slot = slot_at(comm, call.exchange.finished_tiles, (rank + 1 + i) % comm.WORLD_SIZE, 0, tile)
        left = load_partial(slot, M, HALF)
        finished = finished + ((left, load_partial(slot + M * HALF, M, HALF)),)  # type: ignore[assignment]
    for i in tl.static_range(comm.WORLD_SIZE - 1):
        column = (rank + 1 + i) % comm.WORLD_SIZE * SLICE
        for side in tl.static_range(2):
            store_tile(call.result.c, move_right(location, column + side * HALF), finished[i][side] + missing)


@triton.jit
def _run(comm, call):
    rank = rank_of(comm.context)
    tile = tl.program_id(0)
    begun = tl.cast(0, tl.int64)
    if call.link.PACED:
        begun = clock()
    row, column = tile_corner(call.product, tile)
    location = Tile(0, row, call.product.rows, column, call.product.n)
    total = multiply_tile(call.product.a, call.product.b, location, call.product.k, call.product.tiling)
    trace(comm.context, TILES, TILE, rank, tile, LAST)

    mine = _share(comm, call.exchange, total, tile)
    if call.link.PACED:
        pushed = tl.cast(comm.WORLD_SIZE - 1, tl.int64) * slot_bytes(call.exchange.partials)
        wait_paced(begun, pushed, call.link.nanoseconds_per_mib)
    trace(comm.context, TILES, PUSH_CHUNK, rank, tile, LAST)
    _notify_partial(comm, call.exchange, tile)
    mine = _add_slices(comm, call.exchange, mine, tile)
    finish_tile(comm, call, mine, move_right(location, rank * mine.shape[1]), 0)
    trace(comm.context, TILES, REDUCE, rank, tile, LAST)
    _notify_finished(comm, call.exchange, tile)

    _gather(comm, call, location, tile)
    trace(comm.context, TILES, GATHER, rank, tile, LAST)
    if call.link.PACED:
        gathered = tl.cast(comm.WORLD_SIZE - 1, tl.int64) * slot_bytes(call.exchange.finished_tiles)
        wait_paced(begun, pushed + gathered, call.link.nanoseconds_per_mib)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def sliced_kernel(context, ranks, a, b, c, residual, call):
    """The whole operator. ranks: `Ranks`; a, b, c, residual: tensors or descriptors; call: `Call`."""
    with_matrices(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), call, a, b, c, residual, _run
    )  # fmt: skip
