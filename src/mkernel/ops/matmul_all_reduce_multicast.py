"""matmul_all_reduce in one node whose memory has multicast: the switch hands out finished tiles.

Who does what. As in matmul_all_reduce.py, with the same tiles, owners, blocks and signals; what differs is how
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
rounded to reduce_dtype, the own one too, and so is their sum; the order of ranks is the switch's (lang/multicast.py),
so bits may differ from run to run. On all ranks they are the same: one rank adds, and all get what it has stored.

Why buffers are safe and why it cannot deadlock: as there. That a rank has left an epoch also means that its parts
have been read: it waited for all finished tiles. And what lies in its finished slots only its own CTAs read.

Ordering. The fence between multicast and other accesses (lang/multicast.py) is made by all threads, before the
barrier and the release that announce a finished tile, and (in `load_sum`) after the waits for the parts that the
switch adds. The owner releases its own part like a peer: otherwise it could still be on its way when the switch asks
for it.
"""

import triton
import triton.language as tl

from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.epilogue import add_to_tile, halves
from mkernel.lang.flat_gemm import multiply_step, store_tile
from mkernel.lang.multicast import everywhere, fence_aliases, load_sum, store_everywhere
from mkernel.lang.partials import load_partial, prefetch_partial, store_partial
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import FINISHED_TILE, PARTIAL, finish, notify_in_loop, wait
from mkernel.lang.trace import GATHER, LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.matmul_all_reduce import (
    _announce_finished,
    _corner,
    _finished_signal,
    _memory,
    _owned,
    _part_slot,
    _push,
    _round_of,
    _rounds,
    _slot,
    _sum_of_node,
    _sum_slot,
    _taken,
)


@triton.jit
def _tile_slot(owner, block, owned):
    """Number of a tile's slot: the same in every rank's memory."""
    return owner * owned + block * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _kept_offset(start, owner, block, owned, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Where every rank keeps its part of a tile that the switch adds, in bytes of the segment."""
    SLOT: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    return start + tl.cast(_tile_slot(owner, block, owned), tl.int64) * SLOT


@triton.jit
def _finished_offset(
    start, owner, block, owned,
    DTYPE: tl.constexpr, OUT: tl.constexpr, GPUS: tl.constexpr, IN_SWITCH: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Where a finished tile lies, behind the parts, in bytes of the segment."""
    PARTS: tl.constexpr = (GPUS if IN_SWITCH else GPUS - 1) * TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    SLOT: tl.constexpr = TILE_M * TILE_N * (OUT.primitive_bitwidth // 8)
    return start + tl.cast(owned, tl.int64) * PARTS + tl.cast(_tile_slot(owner, block, owned), tl.int64) * SLOT


@triton.jit
def _keep(
    context, total, epoch, start, signals, block, owner, owned,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Store this rank's part of a tile into its own memory; the address of the signal that is due then. The
    owner's signal to itself is that of a node's sum, of which there is none here."""
    rank = rank_of(context)
    offset = _kept_offset(start, owner, block, owned, DTYPE, TILE_M, TILE_N)
    store_partial(_memory(context, rank, offset, DTYPE), total, TILE_M, TILE_N)
    place = (rank + 2 * GPUS - 1 - owner) % GPUS
    signal = tl.where(owner == rank, _sum_slot(0, block, owned, GPUS), _part_slot(place, block, owned))
    return (segment_of(context, owner, tl.int64) + epoch % 2 * signals + signal).to(tl.int64)


@triton.jit
def _sum_in_switch(
    context, total, epoch, start, signals, block, owned, tile,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' parts of this rank's own tile, made by the switch when all are there."""
    rank = rank_of(context)
    signal = _keep(context, total, epoch, start, signals, block, rank, owned, DTYPE, GPUS, TILE_M, TILE_N)
    notify_in_loop(signal.to(tl.pointer_type(tl.int64)), epoch)
    mine = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    missing = 0.0
    for i in range(GPUS - 1):
        source = (rank + 1 + i) % GPUS
        if not wait(context, mine + _part_slot(i, block, owned), epoch, COMPUTE, PARTIAL, source, tile):
            missing = float("nan")
    offset = _kept_offset(start, rank, block, owned, DTYPE, TILE_M, TILE_N)
    return load_sum(everywhere(context, offset, DTYPE), total, TILE_M, TILE_N) + missing


@triton.jit
def _finish_everywhere(
    context, total, c, bias, residual, start, block, owned, row, column, m, n,
    c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
    DTYPE: tl.constexpr, OUT: tl.constexpr, GPUS: tl.constexpr, IN_SWITCH: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Store a tile that is summed up into the result, and into its slot in the memory of every rank."""
    HALF: tl.constexpr = TILE_N // 2
    offset = _finished_offset(
        start, rank_of(context), block, owned, DTYPE, OUT, GPUS, IN_SWITCH, TILE_M, TILE_N
    )  # fmt: skip
    slot = everywhere(context, offset, OUT)
    left, right = halves(total, TILE_M, TILE_N)
    left = add_to_tile(
        left, bias, residual, row, column, m, n, residual_row_stride, residual_column_stride,
        BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, TILE_M, HALF,
    )  # fmt: skip
    store_everywhere(slot, left, TILE_M, HALF)
    store_tile(c, 0, row, column, m, n, c_row_stride, c_column_stride, left, TILE_M, HALF, C_DESCRIPTOR)
    right = add_to_tile(
        right, bias, residual, row, column + HALF, m, n, residual_row_stride, residual_column_stride,
        BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, TILE_M, HALF,
    )  # fmt: skip
    store_everywhere(slot + TILE_M * HALF, right, TILE_M, HALF)
    store_tile(c, 0, row, column + HALF, m, n, c_row_stride, c_column_stride, right, TILE_M, HALF, C_DESCRIPTOR)


@triton.jit
def _announce(context, epoch, signals, block, owned, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Tell the other ranks that this rank's tile of a block is in their memory."""
    fence_aliases()
    _announce_finished(context, epoch, signals, block, owned, SIZE, GPUS)


@triton.jit
def _copy_finished(
    context, c, epoch, start, signals, block, rounds, owned, m, n, c_row_stride, c_column_stride,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, IN_SWITCH: tl.constexpr,
    C_DESCRIPTOR: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Copy this CTA's tiles of a block that other ranks own from this rank's memory into the result."""
    rank = rank_of(context)
    HALF: tl.constexpr = TILE_N // 2
    mine = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    for i in range(GPUS - 1):
        owner = (rank + 1 + i) % GPUS
        round = _round_of(block, owner, GPUS)
        if round < rounds:
            tile, row, column = _corner(round, m, n, GROUP, TILE_M, TILE_N)
            signal = mine + _finished_signal(i, block, owned, SIZE, GPUS)
            missing = 0.0
            if not wait(context, signal, epoch, COMPUTE, FINISHED_TILE, owner, tile):
                missing = float("nan")
            offset = _finished_offset(start, owner, block, owned, DTYPE, OUT, GPUS, IN_SWITCH, TILE_M, TILE_N)
            slot = _memory(context, rank, offset, OUT)
            left = load_partial(slot, TILE_M, HALF) + missing
            store_tile(c, 0, row, column, m, n, c_row_stride, c_column_stride, left, TILE_M, HALF, C_DESCRIPTOR)
            right = load_partial(slot + TILE_M * HALF, TILE_M, HALF) + missing
            store_tile(c, 0, row, column + HALF, m, n, c_row_stride, c_column_stride, right, TILE_M, HALF, C_DESCRIPTOR)


@triton.jit
def multicast_kernel(
    context, a, a_row_stride, a_column_stride, b, b_row_stride, b_column_stride,
    c, c_row_stride, c_column_stride, bias, residual, residual_row_stride, residual_column_stride,
    m, n, k, data_start, half, signals,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, IN_SWITCH: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The operator in one node with multicast; see the module's docstring. DTYPE is that of the parts, OUT of
    the result; data_start and half are in bytes; SIZE and GPUS are equal."""
    epoch = current_epoch(context)
    rank = rank_of(context)
    start = data_start + epoch % 2 * half
    tiles = tl.cdiv(m, TILE_M) * tl.cdiv(n, TILE_N)
    rounds = _rounds(tiles)
    owned = _owned(tiles, GPUS)
    blocks = tl.cdiv(rounds, GPUS)
    steps = tl.maximum(tl.cdiv(k, TILE_K), 1)

    place = -1
    step = steps - 1
    round = 0
    owner = 0
    tile = 0
    row = 0
    column = 0
    signal = tl.full((), 0, tl.int64)  # address of the signal of the part that was stored last, if it is due
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for _ in tl.range(rounds * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            place += 1
            round, owner = _taken(place, rounds, rank, GPUS)
            tile, row, column = _corner(round, m, n, GROUP, TILE_M, TILE_N)
        total = multiply_step(
            total, a, 0, row, m, 0, a_row_stride, a_column_stride,
            b, column, n, step * TILE_K, k, b_row_stride, b_column_stride,
            TILE_M, TILE_N, TILE_K, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, PRECISION,
        )  # fmt: skip
        if not IN_SWITCH:
            if (step == 0) & (owner == rank):
                for i in range(GPUS - 1):
                    slot = _part_slot(i, round // GPUS, owned)
                    prefetch_partial(_slot(context, rank, start, slot, DTYPE, TILE_M, TILE_N), TILE_M, TILE_N)
        if step == steps - 1:
            # Every way through here must use `total`, as in matmul_all_reduce.py.
            trace(context, TILES, TILE, owner, tile, LAST)
            block = round // GPUS
            if signal != 0:
                notify_in_loop(signal.to(tl.pointer_type(tl.int64)), epoch)
                signal = tl.full((), 0, tl.int64)
            if (place % GPUS == 0) & (block >= 1):
                # finished at the end of the block before
                _announce(context, epoch, signals, block - 1, owned, SIZE, GPUS)
            if owner != rank:
                if IN_SWITCH:
                    signal = _keep(
                        context, total, epoch, start, signals, block, owner, owned, DTYPE, GPUS, TILE_M, TILE_N
                    )
                else:
                    signal = _push(
                        context, total, epoch, start, signals, block, owner, owned, DTYPE, GPUS, TILE_M, TILE_N
                    )
                trace(context, TILES, PUSH_CHUNK, owner, tile, LAST)
            else:
                if IN_SWITCH:
                    summed = _sum_in_switch(
                        context, total, epoch, start, signals, block, owned, tile, DTYPE, GPUS, TILE_M, TILE_N
                    )
                else:
                    summed = _sum_of_node(
                        context, total, epoch, start, signals, block, owned, tile, DTYPE, GPUS, TILE_M, TILE_N
                    )
                _finish_everywhere(
                    context, summed, c, bias, residual, start, block, owned, row, column, m, n,
                    c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
                    DTYPE, OUT, GPUS, IN_SWITCH, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
                )  # fmt: skip
                trace(context, TILES, REDUCE, rank, tile, LAST)
            if ((place + 1 == rounds) | (place % GPUS == GPUS - 1)) & (block >= 1):
                _copy_finished(
                    context, c, epoch, start, signals, block - 1, rounds, owned, m, n, c_row_stride, c_column_stride,
                    DTYPE, OUT, SIZE, GPUS, IN_SWITCH, C_DESCRIPTOR, TILE_M, TILE_N, GROUP,
                )  # fmt: skip
                trace(context, TILES, GATHER, rank, block - 1, LAST)
            total = tl.zeros((TILE_M, TILE_N), tl.float32)
    if signal != 0:
        notify_in_loop(signal.to(tl.pointer_type(tl.int64)), epoch)
    if blocks > 0:
        if _round_of(blocks - 1, rank, GPUS) < rounds:
            _announce(context, epoch, signals, blocks - 1, owned, SIZE, GPUS)
        _copy_finished(
            context, c, epoch, start, signals, blocks - 1, rounds, owned, m, n, c_row_stride, c_column_stride,
            DTYPE, OUT, SIZE, GPUS, IN_SWITCH, C_DESCRIPTOR, TILE_M, TILE_N, GROUP,
        )  # fmt: skip
        trace(context, TILES, GATHER, rank, blocks - 1, LAST)
    finish(context, epoch, SIZE)
