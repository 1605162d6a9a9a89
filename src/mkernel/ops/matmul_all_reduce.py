"""matmul_all_reduce: y = the sum over all ranks of a @ b, on every rank, in one kernel per rank.

What it computes. Every rank holds a slice of the depth: a [m, k_local] and b [k_local, n]. The result, on
every rank, is the sum of all ranks' products [m, n], plus `bias` and `residual`. m and n are arbitrary.

Who does what. One persistent launch per rank, in which all CTAs do the same (role `compute`). Every tile
has an owner in each node, the same local rank everywhere, and is computed by the same CTA on every rank. A
CTA takes its tiles in blocks of as many as the node has ranks, of which each rank owns one:

- tiles that others own: pushed to the owner, the rank behind itself first, so that the ranks of a node
  push to different ranks at any time;
- its own tile: it adds what the node has pushed. With one node that is the sum. With several, it sends the
  node's sum to the owners in the other nodes, and adds the sums of all nodes when they are here, one block
  later. Then bias and residual; the finished tile goes into the result, and into a slot of its own;
- the finished tiles of the block before (with several nodes: of the block before that), which the other
  ranks of the node own: it reads them from their memory, and stores them into the result.

So pushing, summing up and reading back are spread over the whole launch, and the links are never left to one
of them. A finished tile is read from its owner, rather than pushed to everybody, because it has to go
through a CTA on its way into the result anyhow: pushed, it would be written and read once more.

Results of few tiles in one node take the kernel in matmul_all_reduce_sliced.py, which cuts tiles into slices.
Where there is multicast, see below, larger ones in one node take another one, too.

The smallest results (`one shot`, one node, chosen by size): every rank pushes its part of every tile to all ranks
of the node, and every rank sums up everything. One exchange instead of two, for gpus/2 times the bytes.

The loop. Tiles and steps through k are one loop, so that Triton loads the first steps of a tile while
the tile before is summed up. Signals of what was stored for others are sent after the next
multiplication: a release has to wait until the stores have reached the peer, and by then they have.

What is signalled. `partial[half, slot]`: the slot holds a part, or a node's sum, of the epoch. `finished
tile[half, owner, tile]`: the owner has a finished tile in its slot. Both hold epochs and only grow.

Sums and rounding. Accumulation is in fp32. What travels is rounded to `reduce_dtype` (by default the dtype
of a): a part once, a node's sum once more. The order is fixed: within the node the owner's own part, which
is not rounded, then those of the ranks behind it, in turn; then the nodes' sums, from node 0 on, the own
one rounded like the others. In one shot: the ranks' parts from rank 0 on, all rounded. So the same inputs
give the same bits on every run, and on every rank. The error, beside that of one product with all of k in
fp32, is at most u * (the sum over all parts and node sums of their absolute values), u = eps/2 of
reduce_dtype, and eps/2 of the result's dtype times the result.

Why buffers are safe. Slots and signals have two halves, used in turn by the epoch's parity. A rank's
result needs a part of every rank. So a rank that begins epoch e knows that every rank has entered e-1,
and has left e-2, the last epoch that used this half: its slots have been read, what was sent from its
memory has arrived, and nothing of that parity is in flight. No entry signal is needed.

Why it cannot deadlock. Order what is waited for by (program id, block, step), the steps of a block being:
push, sum up the node, add the nodes, read what is finished. Every wait is for a step of a CTA with the
same program id that comes strictly before: the node's sum needs what was pushed in the same block; adding
the nodes, sums of the block before; reading, tiles that were finished in an earlier block. So of all
waiting CTAs the first in this order can always go on, even if a rank's CTAs run one after the other. All
ranks have the same number of CTAs (they agree on it). A full request ring is emptied by the proxy, which
waits for no kernel. Waits have a timeout all the same.

What it costs. FLOPs 2*m*n*k_local. Over NVLink each rank writes (gpus-1)/gpus*m*n elements of reduce_dtype
and reads as many of the result's; in one shot it writes (gpus-1)*m*n. Over the network it sends
(nodes-1)/gpus*m*n. Workspace: 2*m*n*(gpus-1 + nodes)/gpus elements of reduce_dtype (nodes only if there are
several) and 2*m*n/gpus of the result's; in one shot 2*m*n*gpus.

Multicast. Where symmetric memory has a multicast object (ranks on GPUs of their own in one node, as processes, with
NVSwitch), results that are not small take the kernel in matmul_all_reduce_multicast.py from 4 ranks on, by
themselves: one store through the switch hands a finished tile to all ranks. The parts are still pushed, and added by
their owner in the order above, so the bits are the same as without. The switch could add them as well, and a third
less would move with 8 GPUs; but it promises no order, and different bits were seen from call to call (NCCL's issues
1497 and 2360). So it adds only if the caller says `fixed_order=False`, and never where torch is asked for deterministic
algorithms. The error then has one more term, u * |the sum|, with u up to eps: how the switch rounds is not told.
What moves, and how accesses are ordered, is told there and in lang/multicast.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, TABLE, current_epoch, rank_of, segment_of
from mkernel.lang.copy import pace
from mkernel.lang.device import clock
from mkernel.lang.epilogue import add_to_tile, halves, store_result
from mkernel.lang.flat_gemm import multiply_step, multiply_tile, store_tile
from mkernel.lang.order import swizzle_tile
from mkernel.lang.partials import load_partial, prefetch_partial, store_partial
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import FINISHED_TILE, PARTIAL, finish, notify_in_loop, wait_again
from mkernel.lang.trace import GATHER, LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.runtime import planning, sums
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, Uses, Workspace, collective, current
from mkernel.runtime.operands import DTYPES
from mkernel.runtime.sums import Plan, Sum
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Array, Launch

OP = "matmul_all_reduce"
TUNABLE = Tunable(OP, agreed=("m", "n"), own=("k",), shared=("tile_m", "tile_n", "ctas"))


# -- tiles


@triton.jit
def _rounds(tiles):
    """How many tiles this CTA has."""
    return tl.cdiv(tl.maximum(tiles - tl.program_id(0), 0), tl.num_programs(0))


@triton.jit
def _taken(place, rounds, local, GPUS: tl.constexpr):
    """(round, owner): which of its tiles this CTA takes at a place of its sequence, and the local rank that
    owns it. In every block of GPUS rounds each rank owns one, which it takes last."""
    cta = tl.program_id(0)
    start = place // GPUS * GPUS
    size = tl.maximum(tl.minimum(rounds - start, GPUS), 1)  # the last block may be shorter
    own = (local + GPUS - cta % GPUS) % GPUS
    within = (own + 1 + place - start) % size
    return start + within, (cta + within) % GPUS


@triton.jit
def _round_of(block, owner, GPUS: tl.constexpr):
    """The round of a block in which a local rank owns this CTA's tile."""
    return block * GPUS + (owner + GPUS - tl.program_id(0) % GPUS) % GPUS


@triton.jit
def _corner(
    round, m, n, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    """(tile, row, column): this CTA's tile of a round, and where it begins."""
    tile = round * tl.num_programs(0) + tl.program_id(0)
    block, column_block = swizzle_tile(tile, tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N), GROUP)
    return tile, block * TILE_M, column_block * TILE_N


# -- slots. A rank owns one tile of every block of a CTA: its slots are numbered block * CTAs + CTA.


@triton.jit
def _owned(tiles, GPUS: tl.constexpr):
    """How many tiles a rank can own, rounded up to whole rounds."""
    ctas = tl.num_programs(0)
    return tl.cdiv(tl.cdiv(tiles, ctas), GPUS) * ctas


@triton.jit
def _part_slot(place, block, owned):
    """Slot, and signal, of a part that the rank place + 1 behind the owner has pushed."""
    return place * owned + block * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _sum_slot(node, block, owned, GPUS: tl.constexpr):
    """Slot, and signal, of a node's sum, in the memory of an owner; that of its own node is sent from there."""
    return (GPUS - 1 + node) * owned + block * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _finished_signal(place, block, owned, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Signal of a tile that the rank place + 1 behind the waiting one has finished."""
    return (GPUS - 1 + SIZE // GPUS + place) * owned + block * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _memory(context, rank, offset, DTYPE: tl.constexpr):
    """Pointer to a byte of a rank's copy of the segment; offsets are divisible by 16."""
    address = tl.load(context + TABLE + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _slot(context, rank, start, slot, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Pointer to a slot of parts or sums; `start` is where the half begins, in bytes."""
    SLOT: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    return _memory(context, rank, start + tl.cast(slot, tl.int64) * SLOT, DTYPE)


@triton.jit
def _finished_slot(
    context, rank, start, block, owned,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Pointer to the slot of a tile that a rank of this node has finished."""
    NODES: tl.constexpr = SIZE // GPUS
    BEFORE: tl.constexpr = GPUS - 1 + (NODES if NODES > 1 else 0)
    SLOT: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    FINISHED: tl.constexpr = TILE_M * TILE_N * (OUT.primitive_bitwidth // 8)
    number = tl.cast(block * tl.num_programs(0) + tl.program_id(0), tl.int64)
    return _memory(context, rank, start + tl.cast(owned, tl.int64) * (BEFORE * SLOT) + number * FINISHED, OUT)


# -- steps of a block


@triton.jit
def _push(
    context, total, epoch, start, signals, block, owner, owned,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Push this rank's part of a tile to its owner; the address of the signal that is due then."""
    rank = rank_of(context)
    place = (rank + 2 * GPUS - 1 - owner) % GPUS
    adder = rank // GPUS * GPUS + owner
    slot = _part_slot(place, block, owned)
    store_partial(_slot(context, adder, start, slot, DTYPE, TILE_M, TILE_N), total, TILE_M, TILE_N)
    return (segment_of(context, adder, tl.int64) + epoch % 2 * signals + slot).to(tl.int64)


@triton.jit
def _sum_of_node(
    context, total, epoch, start, signals, block, owned, tile,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Add what the node has pushed to this rank's part of its own tile."""
    rank = rank_of(context)
    mine = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    missing = 0.0
    for i in range(GPUS - 1):
        source = rank // GPUS * GPUS + (rank + 1 + i) % GPUS
        if not wait_again(context, mine + _part_slot(i, block, owned), epoch, COMPUTE, PARTIAL, source, tile):
            missing = float("nan")
    if GPUS > 1:
        total += missing
    for i in range(GPUS - 1):
        slot = _slot(context, rank, start, _part_slot(i, block, owned), DTYPE, TILE_M, TILE_N)
        total += load_partial(slot, TILE_M, TILE_N)
    return total


@triton.jit
def _exchange(
    context, total, epoch, start, signals, block, owned,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Put the node's sum into its slot, and ask the network to write it to the owners in other nodes."""
    rank = rank_of(context)
    SLOT: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    slot = _sum_slot(rank // GPUS, block, owned, GPUS)
    store_partial(_slot(context, rank, start, slot, DTYPE, TILE_M, TILE_N), total, TILE_M, TILE_N)
    segment = tl.load(context + SEGMENT)
    place = start + slot.to(tl.int64) * SLOT
    for i in range(1, SIZE // GPUS):
        post(
            context,
            Transfer((rank + i * GPUS) % SIZE, segment, place, segment, place, SLOT),
            (epoch % 2 * signals + slot) * 8,
            epoch,
            COMPUTE,
            True,
        )


@triton.jit
def _sum_of_nodes(
    context, epoch, start, signals, block, owned, tile,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Add the sums of all nodes, in their order."""
    rank = rank_of(context)
    mine = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    missing = 0.0
    for node in range(SIZE // GPUS):
        if node != rank // GPUS:
            signal = mine + _sum_slot(node, block, owned, GPUS)
            if not wait_again(context, signal, epoch, COMPUTE, PARTIAL, node * GPUS + rank % GPUS, tile):
                missing = float("nan")
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for node in range(SIZE // GPUS):
        slot = _slot(context, rank, start, _sum_slot(node, block, owned, GPUS), DTYPE, TILE_M, TILE_N)
        total += load_partial(slot, TILE_M, TILE_N)
    return total + missing


@triton.jit
def _finish(
    context, total, c, bias, residual, start, block, owned, row, column, m, n,
    c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Store a tile that is summed up into the result, and, for the rest of the node, into its slot."""
    HALF: tl.constexpr = TILE_N // 2
    slot = _finished_slot(
        context, rank_of(context), start, block, owned, DTYPE, OUT, SIZE, GPUS, TILE_M, TILE_N
    )  # fmt: skip
    left, right = halves(total, TILE_M, TILE_N)
    left = add_to_tile(
        left, bias, residual, row, column, m, n, residual_row_stride, residual_column_stride,
        BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, TILE_M, HALF,
    )  # fmt: skip
    if GPUS > 1:
        store_partial(slot, left, TILE_M, HALF)
    store_tile(c, 0, row, column, m, n, c_row_stride, c_column_stride, left, TILE_M, HALF, C_DESCRIPTOR)
    right = add_to_tile(
        right, bias, residual, row, column + HALF, m, n, residual_row_stride, residual_column_stride,
        BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, TILE_M, HALF,
    )  # fmt: skip
    if GPUS > 1:
        store_partial(slot + TILE_M * HALF, right, TILE_M, HALF)
    store_tile(c, 0, row, column + HALF, m, n, c_row_stride, c_column_stride, right, TILE_M, HALF, C_DESCRIPTOR)


@triton.jit
def _finish_later(
    context, c, bias, residual, epoch, start, signals, block, owned, m, n,
    c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Finish this rank's own tile of a block, whose sums the nodes have exchanged."""
    tile, row, column = _corner(
        _round_of(block, rank_of(context) % GPUS, GPUS), m, n, GROUP, TILE_M, TILE_N
    )  # fmt: skip
    total = _sum_of_nodes(
        context, epoch, start, signals, block, owned, tile, DTYPE, SIZE, GPUS, TILE_M, TILE_N
    )  # fmt: skip
    _finish(
        context, total, c, bias, residual, start, block, owned, row, column, m, n,
        c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
        DTYPE, OUT, SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
    )  # fmt: skip


@triton.jit
def _announce_finished(
    context, epoch, signals, block, owned, SIZE: tl.constexpr, GPUS: tl.constexpr
):  # fmt: skip
    """Tell the other ranks of the node that this rank's tile of a block is in its slot."""
    rank = rank_of(context)
    for i in range(1, GPUS):
        peer = rank // GPUS * GPUS + (rank + i) % GPUS
        signal = _finished_signal(GPUS - 1 - i, block, owned, SIZE, GPUS)
        notify_in_loop(segment_of(context, peer, tl.int64) + epoch % 2 * signals + signal, epoch)


@triton.jit
def _gather(
    context, c, epoch, start, signals, block, rounds, owned, m, n, c_row_stride, c_column_stride,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Read this CTA's tiles of a block that the other ranks of the node own, and store them into the result.
    Returns how many there were."""
    rank = rank_of(context)
    HALF: tl.constexpr = TILE_N // 2
    mine = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    count = 0
    for i in range(GPUS - 1):
        owner = (rank + 1 + i) % GPUS
        round = _round_of(block, owner, GPUS)
        if round < rounds:
            tile, row, column = _corner(round, m, n, GROUP, TILE_M, TILE_N)
            source = rank // GPUS * GPUS + owner
            signal = mine + _finished_signal(i, block, owned, SIZE, GPUS)
            missing = 0.0
            if not wait_again(context, signal, epoch, COMPUTE, FINISHED_TILE, source, tile):
                missing = float("nan")
            slot = _finished_slot(context, source, start, block, owned, DTYPE, OUT, SIZE, GPUS, TILE_M, TILE_N)
            left = load_partial(slot, TILE_M, HALF) + missing
            store_tile(c, 0, row, column, m, n, c_row_stride, c_column_stride, left, TILE_M, HALF, C_DESCRIPTOR)
            right = load_partial(slot + TILE_M * HALF, TILE_M, HALF) + missing
            store_tile(c, 0, row, column + HALF, m, n, c_row_stride, c_column_stride, right, TILE_M, HALF, C_DESCRIPTOR)
            count += 1
    return count


# -- one shot


@triton.jit
def _push_to_all(
    context, total, start, tiles, tile,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Push this rank's part of a tile to every rank, itself too."""
    rank = rank_of(context)
    for i in range(GPUS):
        slot = _slot(context, (rank + i) % GPUS, start, rank * tiles + tile, DTYPE, TILE_M, TILE_N)
        store_partial(slot, total, TILE_M, TILE_N)


@triton.jit
def _announce_parts(context, epoch, signals, tiles, tile, GPUS: tl.constexpr):
    """Tell the other ranks that this rank's part of a tile is there."""
    rank = rank_of(context)
    for i in range(1, GPUS):
        peer = (rank + i) % GPUS
        notify_in_loop(segment_of(context, peer, tl.int64) + epoch % 2 * signals + rank * tiles + tile, epoch)


@triton.jit
def _sum_of_all(
    context, epoch, start, signals, tiles, tile,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Add all ranks' parts of a tile, in their order."""
    rank = rank_of(context)
    mine = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    missing = 0.0
    for source in range(GPUS):
        if source != rank:
            if not wait_again(context, mine + source * tiles + tile, epoch, COMPUTE, PARTIAL, source, tile):
                missing = float("nan")
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for source in range(GPUS):
        slot = _slot(context, rank, start, source * tiles + tile, DTYPE, TILE_M, TILE_N)
        total += load_partial(slot, TILE_M, TILE_N)
    return total + missing


@triton.jit
def two_level_kernel(
    context, a, a_row_stride, a_column_stride, b, b_row_stride, b_column_stride,
    c, c_row_stride, c_column_stride, bias, residual, residual_row_stride, residual_column_stride,
    m, n, k, data_start, half, signals, nanoseconds_per_mib,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, PACED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The operator for all but small results; see the module's docstring. DTYPE is that of the parts, OUT of
    the result; data_start and half are in bytes."""
    epoch = current_epoch(context)
    rank = rank_of(context)
    local = rank % GPUS
    SEVERAL: tl.constexpr = SIZE > GPUS  # nodes
    LAG: tl.constexpr = 2 if SEVERAL else 1  # blocks after which a tile is finished everywhere
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
    signal = tl.full((), 0, tl.int64)  # address of the signal of the part that was pushed last, if it is due
    begun = tl.full((), 0, tl.int64)
    if PACED:
        begun = clock()
    moved = tl.full((), 0, tl.int64)
    PART_BYTES: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    TILE_BYTES: tl.constexpr = TILE_M * TILE_N * (OUT.primitive_bitwidth // 8)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for _ in tl.range(rounds * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            place += 1
            round, owner = _taken(place, rounds, local, GPUS)
            tile, row, column = _corner(round, m, n, GROUP, TILE_M, TILE_N)
        total = multiply_step(
            total, a, 0, row, m, 0, a_row_stride, a_column_stride,
            b, column, n, step * TILE_K, k, b_row_stride, b_column_stride,
            TILE_M, TILE_N, TILE_K, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, PRECISION,
        )  # fmt: skip
        if GPUS > 1:
            if (step == 0) & (owner == local):
                for i in range(GPUS - 1):
                    slot = _part_slot(i, round // GPUS, owned)
                    prefetch_partial(_slot(context, rank, start, slot, DTYPE, TILE_M, TILE_N), TILE_M, TILE_N)
        if step == steps - 1:
            # Every way through here must use `total`: then it has been computed when it becomes zero again,
            # and the tensor cores may still be at work on it everywhere else in the loop.
            trace(context, TILES, TILE, rank - local + owner, tile, LAST)
            block = round // GPUS
            if PACED:
                pace(begun, moved, nanoseconds_per_mib)
            if signal != 0:
                notify_in_loop(signal.to(tl.pointer_type(tl.int64)), epoch)
                signal = tl.full((), 0, tl.int64)
            if (place % GPUS == 0) & (block >= LAG):
                # finished at the end of the block before
                _announce_finished(context, epoch, signals, block - LAG, owned, SIZE, GPUS)
            of_another = False  # known to the compiler: it fails on code for peers that there are none of, if k is 1
            if GPUS > 1:
                of_another = owner != local
            if of_another:
                signal = _push(context, total, epoch, start, signals, block, owner, owned, DTYPE, GPUS, TILE_M, TILE_N)
                moved += PART_BYTES
                trace(context, TILES, PUSH_CHUNK, rank - local + owner, tile, LAST)
            else:
                node_sum = _sum_of_node(
                    context, total, epoch, start, signals, block, owned, tile, DTYPE, GPUS, TILE_M, TILE_N
                )
                if SEVERAL:
                    _exchange(context, node_sum, epoch, start, signals, block, owned, DTYPE, SIZE, GPUS, TILE_M, TILE_N)
                else:
                    _finish(
                        context, node_sum, c, bias, residual, start, block, owned, row, column, m, n,
                        c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
                        DTYPE, OUT, SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
                    )  # fmt: skip
                trace(context, TILES, REDUCE, rank, tile, LAST)
            if (place + 1 == rounds) | (place % GPUS == GPUS - 1):
                if SEVERAL:
                    if block >= 1:
                        _finish_later(
                            context, c, bias, residual, epoch, start, signals, block - 1, owned, m, n,
                            c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
                            DTYPE, OUT, SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR,
                            TILE_M, TILE_N, GROUP,
                        )  # fmt: skip
                        trace(context, TILES, REDUCE, rank, tile, LAST)
                if GPUS > 1:
                    if block >= LAG:
                        count = _gather(
                            context, c, epoch, start, signals, block - LAG, rounds, owned, m, n,
                            c_row_stride, c_column_stride,
                            DTYPE, OUT, SIZE, GPUS, C_DESCRIPTOR, TILE_M, TILE_N, GROUP,
                        )  # fmt: skip
                        moved += count.to(tl.int64) * TILE_BYTES
                        trace(context, TILES, GATHER, rank, block - LAG, LAST)
            total = tl.zeros((TILE_M, TILE_N), tl.float32)
    if PACED:
        pace(begun, moved, nanoseconds_per_mib)
    if signal != 0:
        notify_in_loop(signal.to(tl.pointer_type(tl.int64)), epoch)
    for late in range(tl.maximum(blocks - LAG, 0), blocks):
        if _round_of(late, local, GPUS) < rounds:
            if SEVERAL:
                if late == blocks - 1:
                    _finish_later(
                        context, c, bias, residual, epoch, start, signals, late, owned, m, n,
                        c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
                        DTYPE, OUT, SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR,
                        TILE_M, TILE_N, GROUP,
                    )  # fmt: skip
                    trace(context, TILES, REDUCE, rank, late, LAST)
            _announce_finished(context, epoch, signals, late, owned, SIZE, GPUS)
    if GPUS > 1:
        for late in range(tl.maximum(blocks - LAG, 0), blocks):
            count = _gather(
                context, c, epoch, start, signals, late, rounds, owned, m, n, c_row_stride, c_column_stride,
                DTYPE, OUT, SIZE, GPUS, C_DESCRIPTOR, TILE_M, TILE_N, GROUP,
            )  # fmt: skip
            moved += count.to(tl.int64) * TILE_BYTES
            trace(context, TILES, GATHER, rank, late, LAST)
        if PACED:
            pace(begun, moved, nanoseconds_per_mib)
    finish(context, epoch, SIZE)


@triton.jit
def one_shot_kernel(
    context, a, a_row_stride, a_column_stride, b, b_row_stride, b_column_stride,
    c, c_row_stride, c_column_stride, bias, residual, residual_row_stride, residual_column_stride,
    m, n, k, data_start, half, signals, nanoseconds_per_mib,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, PACED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The operator for small results, in one node: all parts go to all ranks."""
    epoch = current_epoch(context)
    rank = rank_of(context)
    start = data_start + epoch % 2 * half
    tiles = tl.cdiv(m, TILE_M) * tl.cdiv(n, TILE_N)
    rounds = _rounds(tiles)
    begun = tl.full((), 0, tl.int64)
    if PACED:
        begun = clock()
    PART_BYTES: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    for round in range(rounds):
        tile, row, column = _corner(round, m, n, GROUP, TILE_M, TILE_N)
        total = multiply_tile(
            a, 0, row, m, 0, a_row_stride, b, column, n, k, b_row_stride, b_column_stride,
            TILE_M, TILE_N, TILE_K, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, PRECISION, a_column_stride,
        )  # fmt: skip
        trace(context, TILES, TILE, rank, tile, LAST)
        _push_to_all(context, total, start, tiles, tile, DTYPE, GPUS, TILE_M, TILE_N)
        if PACED:
            pace(begun, tl.cast(round + 1, tl.int64) * (GPUS - 1) * PART_BYTES, nanoseconds_per_mib)
        trace(context, TILES, PUSH_CHUNK, rank, tile, LAST)
        _announce_parts(context, epoch, signals, tiles, tile, GPUS)
    for round in range(rounds):
        tile, row, column = _corner(round, m, n, GROUP, TILE_M, TILE_N)
        total = _sum_of_all(context, epoch, start, signals, tiles, tile, DTYPE, GPUS, TILE_M, TILE_N)
        store_result(
            c, bias, residual, total, row, column, m, n,
            c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
            BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
        )  # fmt: skip
        trace(context, TILES, REDUCE, rank, tile, LAST)
    finish(context, epoch, GPUS)


# An exchange inside a node costs about this: a release, a signal seen, a tile read. Assumed, not measured.
EXCHANGE_SECONDS = 5e-6
# bytes; above, every rank summing up everything takes longer than it saves: with 4 ranks one shot took 94 us for
# 2 MB where two levels took 78; where they meet was not measured
LARGEST_ONE_SHOT = 2**18
LARGEST_SLICED = 2**24  # bytes: more than one large tile for each CTA of a GPU
LEAST_COLUMNS = 16  # of a slice
# ranks: with multicast each takes in its own tiles, too, 1/4 of the result with 4 ranks and 1/2 with 2; that 4 are
# enough to make up for it follows from what moves, and was not measured
FEWEST_FOR_MULTICAST = 4


def _one_shot(group: Group, m: int, n: int, dtype: torch.dtype) -> bool:
    """One exchange with all parts to all ranks, or two with a share each: what takes less time on the link."""
    gpus = group.gpus_per_node
    if group.nodes > 1 or gpus == 1:
        return False
    nbytes = m * n * dtype.itemsize
    link = group.world.links.nvlink * 1e9 if group.world.links.nvlink else planning.NVLINK_RATE
    more = (gpus - 1) * (1 - 2 / gpus) * nbytes / link
    return nbytes <= LARGEST_ONE_SHOT and more <= EXCHANGE_SECONDS


def _why_no_multicast(group: Group, small: bool) -> str | None:
    """Why the switch does not take part in a call whose result is small, or not; None if it does."""
    if not group.multicast:
        if group.device.type != "cuda":
            return "there is none between CPUs"
        if group.nodes > 1:
            return "the ranks are on several nodes"
        if len({group.world.gpu(member) for member in group.members}) < group.size:
            return "several ranks share a GPU"
        return (
            "symmetric memory has none here; it takes processes (torchrun) with a GPU each, and NVSwitch between "
            "them (`mkernel doctor` tells)"
        )
    if group.size < FEWEST_FOR_MULTICAST:
        return f"with fewer than {FEWEST_FOR_MULTICAST} ranks each would take in far more than it has to"
    return "the result is small" if small else None


def _sliced(group: Group, m: int, n: int, dtype: torch.dtype, config: Config | None) -> tuple[int, int] | None:
    """The tile of a result that is cut into slices: the smallest of which there is one for each CTA; None
    if there are too many tiles, or the ranks are not 2, 4 or 8 of one node."""
    gpus = group.gpus_per_node
    if group.nodes > 1 or gpus not in (2, 4, 8) or (config is not None and config.ctas is not None):
        return None
    if m * n * dtype.itemsize > LARGEST_SLICED or _one_shot(group, m, n, dtype):
        return None
    choose = planning.chooser(config)
    default = planning.default_tiles(group.device, dtype, n, described=True)
    tiles = [(default.tile_m, default.tile_n)]
    if group.device.type == "cuda" and dtype != torch.float32:
        tiles += [(128, 128), (64, 128)]
    found = None
    for tile_m, tile_n in ((choose("tile_m", tile_m), choose("tile_n", tile_n)) for tile_m, tile_n in tiles):
        few = math.ceil(m / tile_m) * math.ceil(n / tile_n) <= planning.common_ctas(group)
        if few and tile_n // gpus >= LEAST_COLUMNS:
            found = tile_m, tile_n
    return found


def _cut(
    group: Group, m: int, n: int, dtype: torch.dtype, config: Config | None
) -> tuple[int, int, int]:  # fmt: skip
    """(tile_m, tile_n, CTAs): from what is the same on every rank, since owners and slots follow from them."""
    choose = planning.chooser(config)
    most = planning.common_ctas(group)
    sliced = _sliced(group, m, n, dtype, config)
    if sliced is not None:
        return *sliced, math.ceil(m / sliced[0]) * math.ceil(n / sliced[1])
    tile_m, tile_n = planning.tile_of_sum(group.device, dtype, m, n, most)
    tile_m, tile_n = choose("tile_m", tile_m), choose("tile_n", tile_n)
    return tile_m, tile_n, choose("ctas", min(most, max(math.ceil(m / tile_m) * math.ceil(n / tile_n), 1)))


def plan(group: Group, call: Sum, try_multicast: bool = True) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    m, n, gpus = call.a.shape[0], call.b.shape[1], group.gpus_per_node
    tile_m, tile_n, ctas = _cut(group, m, n, call.a.dtype, call.config)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    elements = tiles * tile_m * tile_n
    one_shot = _one_shot(group, m, n, call.a.dtype)
    sliced = _sliced(group, m, n, call.a.dtype, call.config) is not None
    how = "every tile is cut into slices, one for each rank: there is one tile for each CTA"
    missing = _why_no_multicast(group, one_shot or sliced) if try_multicast else "the workspace got none"
    multicast = missing is None
    # a sum is loaded once only if the tensor cores say how threads hold it, see lang/multicast.py
    in_switch = multicast and not call.fixed_order and call.a.dtype != torch.float32
    pushed = elements * (gpus - 1) if one_shot else 2 * elements * (gpus - 1) // gpus
    if multicast:
        pushed = elements * (gpus + 1) // gpus if in_switch else elements
    decided = sums.plan(
        OP,
        group,
        call,
        tile=(tile_m, tile_n),
        tiles=tiles,
        computed=tiles,
        ctas=ctas,
        one_shot=one_shot,
        pushed=pushed,
        sent=elements * (group.nodes - 1) // gpus,
        reasons=(*([how] if sliced else []), _about_multicast(missing, in_switch)),
    )
    decided = replace(decided, multicast=multicast, in_switch=in_switch)
    # slices are narrower than the blocks of descriptors
    return replace(decided, sliced=True, out_described=False, residual_described=False) if sliced else decided


def _about_multicast(missing: str | None, in_switch: bool) -> str:
    """What a plan says of multicast."""
    if missing is not None:
        return f"multicast is not used: {missing}"
    if in_switch:
        return "the switch adds the parts, in an order of its own, and hands out finished tiles (multicast)"
    return "the switch hands out finished tiles (multicast); the ranks add the parts themselves, in their order"


@dataclass(frozen=True)
class _Slots:
    """How much a call keeps in a half of the workspace."""

    parts: int  # that arrive
    sums: int  # of one node
    finished: int
    signals: int

    @staticmethod
    def of(group: Group, plan: Plan) -> _Slots:
        gpus, nodes, ctas = group.gpus_per_node, group.nodes, plan.config.ctas
        if plan.one_shot:
            return _Slots(gpus * plan.tiles, 0, 0, gpus * plan.tiles)
        if plan.sliced:
            return _Slots((gpus - 1) * plan.tiles, 0, plan.tiles, (2 * gpus - 1) * plan.tiles)
        owned = math.ceil(math.ceil(plan.tiles / ctas) / gpus) * ctas
        if plan.multicast:
            return _Slots((gpus - 1 + plan.in_switch) * owned, 0, gpus * owned, (2 * gpus - 1) * owned)
        return _Slots((gpus - 1) * owned, owned if nodes > 1 else 0, owned, (2 * (gpus - 1) + nodes) * owned)


@dataclass(frozen=True)
class _Room:
    """What a call needs of the workspace."""

    signal_words: int
    half_bytes: int
    free: list[tuple[int, int]]  # bytes of the half that nobody reads any more when a rank's launch is over
    buffers: dict[str, tuple[int, tuple[int, ...]]]  # name -> bytes of an element, and shape: one behind the other

    @staticmethod
    def of(group: Group, call: Sum, plan: Plan) -> _Room:
        slots = _Slots.of(group, plan)
        tile = plan.config.tile_m * plan.config.tile_n // (group.gpus_per_node if plan.sliced else 1)
        parts, of_node = slots.parts * tile * call.travels.itemsize, slots.sums * tile * call.travels.itemsize
        arrived, finished = parts + group.nodes * of_node, slots.finished * tile * call.a.dtype.itemsize
        ours = parts + group.node * of_node  # this node's sums: the network may still be reading them
        # not finished tiles either: other ranks may still be reading them
        free = [(0, ours), (ours + of_node, arrived)]
        if plan.multicast:
            # finished tiles are read by their own rank alone; and its parts were added, or it would still wait
            free = [(0, arrived + finished)]
        travelling, own = call.travels.itemsize, call.a.dtype.itemsize
        buffers: dict[str, tuple[int, tuple[int, ...]]] = {
            "parts": (travelling, (slots.parts, tile)),
            "sums of nodes": (travelling, (group.nodes * slots.sums, tile)),
            "finished tiles": (own, (slots.finished, tile)),
        }
        return _Room(2 * slots.signals, arrived + finished, free, buffers)

    def arrays(self, workspace: Workspace) -> list[Array]:
        """What the call keeps in the workspace."""
        half = workspace.signal_words // 2
        arrays = [Array("signals", 0, (2, self.signal_words // 2), 8, (half, 1))]
        start = 0
        for name, (item, shape) in self.buffers.items():
            arrays += workspace.buffers(start, name, item, *shape)
            start += item * math.prod(shape)
        return arrays


def _kernel(plan: Plan) -> Any:
    if plan.sliced:
        from mkernel.ops.matmul_all_reduce_sliced import sliced_kernel

        return sliced_kernel
    if plan.multicast:
        from mkernel.ops.matmul_all_reduce_multicast import multicast_kernel

        return multicast_kernel
    return one_shot_kernel if plan.one_shot else two_level_kernel


def prepare(group: Group, call: Sum) -> Launch:
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    call = sums.tuned(TUNABLE, group, call)
    decided = group.planned((OP, call.key), lambda: plan(group, call))
    room = _Room.of(group, call, decided)
    workspace = group.workspace(OP, room.signal_words, room.half_bytes)
    if decided.multicast and not workspace.segment.multicast:
        # the group has multicast, but there was none left for this memory
        decided = group.planned((OP, call.key, "no multicast"), lambda: plan(group, call, try_multicast=False))
        room = _Room.of(group, call, decided)
        workspace = group.workspace(OP, room.signal_words, room.half_bytes)
    c = decided.config
    arguments = sums.arguments_of(group, decided, workspace, call, parts=1) | dict(
        m=call.a.shape[0], data_start=workspace.data_start, half=workspace.half_bytes
    )
    if not decided.one_shot:
        arguments |= dict(OUT=DTYPES[call.a.dtype], SIZE=group.size)
    if decided.multicast:
        del arguments["PACED"], arguments["nanoseconds_per_mib"]  # ranks with multicast have real links
        arguments |= dict(IN_SWITCH=decided.in_switch)
    return Launch(
        op=OP,
        group=group,
        kernel=_kernel(decided),
        grid=c.ctas,
        arguments=arguments,
        options=dict(num_warps=c.warps, num_stages=c.stages),
        variant=sums.variant_of(decided, workspace),
        uses=Uses(workspace, room.arrays(workspace), room.free),
        inputs=sums.INPUTS,
        results=sums.RESULTS,
    )


def _call_of(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, reduce_dtype: torch.dtype | None, config: Config | None, fixed_order: bool,
) -> Sum:  # fmt: skip
    """The call that these arguments make, if they are in order."""
    if not isinstance(fixed_order, bool):
        raise ArgumentError(f"fixed_order must be True or False, got {fixed_order!r}")
    call = sums.call_of(TUNABLE, group, a, b, out, bias, residual, reduce_dtype, config, scatter=False)
    return replace(call, fixed_order=fixed_order or torch.are_deterministic_algorithms_enabled())


@collective
def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    fixed_order: bool = True,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply `a` by `b` on every rank, and add all ranks' products, on every rank.

    Args:
        a: [m, k_local], this rank's slice of the depth; m and the dtype are the same on every rank; k_local
            may differ. Any strides.
        b: [k_local, n]. A transposed view (`w.t()`) is read as it is.
        bias: [n], added to every row of the sum; the same on every rank.
        residual: [m, n], added to the sum; the same on every rank. It may be `out` itself.
        reduce_dtype: of what travels between ranks: torch.float32 or the dtype of a, which is the default.
        group: the group to reduce over; the current one by default.
        out: [m, n], where to put the result; must not overlap an input.
        fixed_order: False lets the NVLink switch add the parts where it can (multicast, 4 ranks or more, bf16 and
            fp16), which moves less. The switch promises no order of ranks: bits are the same on every rank, but may
            differ from run to run, and 16-bit sums are rounded once more. `torch.use_deterministic_algorithms`
            overrides it. The same on every rank.
        config: tiles and CTAs; None takes good defaults. tile_m, tile_n and ctas are the same on every rank.

    Returns:
        [m, n], the same bits on every rank. bf16, fp16 or fp32, accumulated in fp32 in a fixed order of ranks
        (unless `fixed_order` is False): the same inputs give the same bits on every run.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout. On a GPU, where calls return
            before they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    call = _call_of(group, a, b, out, bias, residual, reduce_dtype, config, fixed_order)
    m, n = call.out.shape
    tile_m, tile_n, ctas = _cut(group, m, n, a.dtype, call.config)
    group.agree(
        OP, m=m, n=n, dtype=a.dtype, reduce_dtype=call.travels, bias=bias is not None,
        residual=residual is not None, tile_m=tile_m, tile_n=tile_n, ctas=ctas, fixed_order=call.fixed_order,
    )  # fmt: skip
    if call.out.numel():
        group.launch(prepare(group, call))
    else:
        group.confirm()
    return call.out


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    fixed_order: bool = True,
    config: Config | None = None,
) -> Plan:
    """The plan that `matmul_all_reduce` with these arguments would carry out."""
    group = current(group)
    call = _call_of(group, a, b, out, bias, residual, reduce_dtype, config, fixed_order)
    decided = plan(group, call)
    reasons = [*decided.reasons, TUNABLE.origin(config, call.config)]
    if call.fixed_order and not fixed_order:
        reasons.append("torch.use_deterministic_algorithms is on: parts are added in the order of ranks")
    return replace(decided, reasons=tuple(reasons))
