"""matmul_all_reduce for results of at most one tile for each CTA, in one node: every CTA shares its tile out.

With so few tiles there is no second one to hide an exchange behind, and large tiles are the ones that read
the operands least often. So a CTA computes one large tile, and cuts its sum into as many slices of columns as
the node has ranks; slice i is owned by local rank i:

- it pushes the slices that others own to them, and adds what they push to its own slice;
- bias and residual; the finished slice goes into the result, and into a slot of its own;
- it reads the finished slices of its tile from their owners, and stores them into the result.

All CTAs of all ranks do the same amount of everything, where whole tiles would leave the adding to one rank
in as many as there are. With 4 ranks, 128 x 8192 of k 8192, tiles of 128x256 as a whole took 77 us.

Signals, rounding, the order of sums and why buffers are safe: as matmul_all_reduce.py, with slices for tiles. A
CTA waits only for its namesakes: for what they push before they wait for anything, and for what they
finish before they read; so it cannot deadlock, even if a rank's CTAs run one after the other.
"""

import triton
import triton.language as tl

from mkernel.lang.context import TABLE, current_epoch, rank_of, segment_of
from mkernel.lang.copy import pace
from mkernel.lang.device import clock
from mkernel.lang.epilogue import halves
from mkernel.lang.flat_gemm import multiply_tile, store_tile
from mkernel.lang.order import swizzle_tile
from mkernel.lang.partials import load_partial
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import FINISHED_TILE, PARTIAL, finish, notify_each, wait_peers
from mkernel.lang.trace import GATHER, LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.matmul_all_reduce import (
    _finish,
    _finished_signal,
    _finished_slot,
    _part_slot,
    _push,
    _slot,
)


@triton.jit
def _slice(tile, INDEX: tl.constexpr, COUNT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The INDEX-th of COUNT slices of a tile's columns; COUNT is 2, 4 or 8."""
    left, right = halves(tile, TILE_M, TILE_N)
    part = right if INDEX >= COUNT // 2 else left
    if COUNT >= 4:
        left, right = halves(part, TILE_M, TILE_N // 2)
        part = right if INDEX % (COUNT // 2) >= COUNT // 4 else left
    if COUNT >= 8:
        left, right = halves(part, TILE_M, TILE_N // 4)
        part = right if INDEX % (COUNT // 4) >= COUNT // 8 else left
    return part


@triton.jit
def _sum_of_slices(
    context, total, epoch, start, signals, tiles, tile,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """As `_sum_of_node`, for slices: they are small enough to be loaded all together."""
    rank = rank_of(context)
    i = tl.arange(0, GPUS)
    arrived = segment_of(context, rank, tl.int64) + epoch % 2 * signals + _part_slot(i, 0, tiles)
    here = wait_peers(context, arrived, i < GPUS - 1, epoch, COMPUTE, PARTIAL, (rank + 1 + i) % GPUS, tile)
    parts = ()
    for which in tl.static_range(GPUS - 1):
        slot = _slot(context, rank, start, _part_slot(which, 0, tiles), DTYPE, TILE_M, SLICE)
        parts = parts + (load_partial(slot, TILE_M, SLICE),)  # type: ignore[assignment]
    total += tl.where(here, 0.0, float("nan"))
    for which in tl.static_range(GPUS - 1):
        total += parts[which]
    return total


@triton.jit
def sliced_kernel(
    context, a, a_row_stride, a_column_stride, b, b_row_stride, b_column_stride,
    c, c_row_stride, c_column_stride, bias, residual, residual_row_stride, residual_column_stride,
    m, n, k, data_start, half, signals, nanoseconds_per_mib,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, PACED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile for each CTA; see the module's docstring. data_start and half are in bytes."""
    epoch = current_epoch(context)
    rank = rank_of(context)
    start = data_start + epoch % 2 * half
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    SLICE: tl.constexpr = TILE_N // GPUS
    HALF: tl.constexpr = SLICE // 2
    begun = tl.cast(0, tl.int64)
    if PACED:
        begun = clock()
    block, column_block = swizzle_tile(tile, tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N), GROUP)
    row = block * TILE_M
    column = column_block * TILE_N
    total = multiply_tile(
        a, 0, row, m, 0, a_row_stride, b, column, n, k, b_row_stride, b_column_stride,
        TILE_M, TILE_N, TILE_K, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, PRECISION, a_column_stride,
    )  # fmt: skip
    trace(context, TILES, TILE, rank, tile, LAST)

    mine = tl.zeros((TILE_M, SLICE), tl.float32)
    for index in tl.static_range(GPUS):
        part = _slice(total, index, GPUS, TILE_M, TILE_N)
        if index == rank:
            mine = part
        else:
            _push(context, part, epoch, start, signals, 0, index, tiles, DTYPE, GPUS, TILE_M, SLICE)
    if PACED:
        pushed = tl.cast(GPUS - 1, tl.int64) * (TILE_M * SLICE * (DTYPE.primitive_bitwidth // 8))
        pace(begun, pushed, nanoseconds_per_mib)
    trace(context, TILES, PUSH_CHUNK, rank, tile, LAST)
    i = tl.arange(0, GPUS)
    mates = tl.load(context + TABLE + (rank + i) % GPUS).to(tl.pointer_type(tl.int64)) + epoch % 2 * signals
    notify_each(mates + _part_slot(GPUS - 1 - i, 0, tiles), epoch, i > 0)
    mine = _sum_of_slices(context, mine, epoch, start, signals, tiles, tile, DTYPE, GPUS, TILE_M, SLICE)
    _finish(
        context, mine, c, bias, residual, start, 0, tiles, row, column + rank * SLICE, m, n,
        c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
        DTYPE, OUT, SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, SLICE,
    )  # fmt: skip
    trace(context, TILES, REDUCE, rank, tile, LAST)
    notify_each(mates + _finished_signal(GPUS - 1 - i, 0, tiles, SIZE, GPUS), epoch, i > 0)

    words = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    done = words + _finished_signal(i, 0, tiles, SIZE, GPUS)
    here = wait_peers(context, done, i < GPUS - 1, epoch, COMPUTE, FINISHED_TILE, (rank + 1 + i) % GPUS, tile)
    missing = tl.where(here, 0.0, float("nan"))
    # all are asked for before the first is stored, so that they come together
    finished = ()
    for which in tl.static_range(GPUS - 1):
        slot = _finished_slot(
            context, (rank + 1 + which) % GPUS, start, 0, tiles, DTYPE, OUT, SIZE, GPUS, TILE_M, SLICE
        )
        left = load_partial(slot, TILE_M, HALF)
        finished = finished + ((left, load_partial(slot + TILE_M * HALF, TILE_M, HALF)),)  # type: ignore[assignment]
    for which in tl.static_range(GPUS - 1):
        there = column + (rank + 1 + which) % GPUS * SLICE
        for side in tl.static_range(2):
            store_tile(
                c, 0, row, there + side * HALF, m, n, c_row_stride, c_column_stride, finished[which][side] + missing,
                TILE_M, HALF, C_DESCRIPTOR,
            )  # fmt: skip
    trace(context, TILES, GATHER, rank, tile, LAST)
    if PACED:
        gathered = tl.cast(GPUS - 1, tl.int64) * (TILE_M * SLICE * (OUT.primitive_bitwidth // 8))
        pace(begun, pushed + gathered, nanoseconds_per_mib)
    finish(context, epoch, SIZE)
