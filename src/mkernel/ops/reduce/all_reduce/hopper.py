"""matmul_all_reduce for Hopper: a warp-specialized kernel, so that the tensor cores do not wait for communication.

It follows the protocol, the tile order and the order of sums of two_level.py, for the ranks of one node; ranks may mix
the two kernels. What differs is the division of labour. Each warp role goes through the CTA's tiles on its own:

- Two warpgroups multiply 64 rows of each tile each. They push a tile that another rank owns to its owner, straight from
  the accumulator. To a tile that this rank owns they add the other ranks' partials, and store it in the result and in
  the slot that peers read.
- The `load` warp loads the tiles of both operands into shared memory by TMA, and the partials of the rank's own tiles.
- The `signal` warp sends the signal of a tile once both warpgroups have stored it: `partial` to the owner, or
  `finished` to all peers. So the release, which waits until the stores have reached the peer, delays no other warp.
- The `wait` warp waits for the partials of the rank's own tiles ahead of time, and prefetches them into L2.
- The `gather` warp reads the other ranks' finished tiles from their owners, and stores them in the result.

Why it cannot deadlock. As in two_level.py: every wait is for a CTA with the same program id. Reducing a tile waits for
pushes of the same block of tiles, which every rank does before it reduces. The gather warp waits for reduced tiles, and
nothing waits for the gather warp.

What it costs. As two_level.py, which multiplies, pushes, reduces and reads in turns.

It requires operands that TMA can read, a 16-bit result whose elements are not converted for transfer, and a multiple of
8 columns. Operands are 16-bit, then with neither bias nor residual, or fp8, then with b in memory as [n, k]. With one
rank, the sum is that of matmul_reduce_scatter, whose kernel for Hopper takes calls in fp8. Other calls take
two_level.py, which is also the kernel that the simulator runs unless it simulates a Hopper GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of
from mkernel.lang.copy import wait_paced
from mkernel.lang.device import clock
from mkernel.lang.hopper import ROWS, STORED, TILE_N, store_rows
from mkernel.lang.matrix import Block, Tiling
from mkernel.lang.roles import INTRA
from mkernel.lang.signals import finish, gave_up, notify
from mkernel.lang.trace import GATHER, LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace, trace_time
from mkernel.ops.reduce.all_reduce.order import Sequence, count_rounds, round_of, slot_number, take, tile_of
from mkernel.ops.reduce.all_reduce.protocol import exchange_of, finished_slot, free_of, wait_finished
from mkernel.ops.reduce.call import Plan, Sum
from mkernel.ops.reduce.hopper import (
    INPUTS,
    Arrivals,
    Extent,
    Operands,
    Pushes,
    add_staged_partial,
    add_to_rows,
    added_of,
    allocate_stages,
    barriers,
    load_partials,
    load_tile,
    multiply_tile,
    partials_descriptor,
    prefetch_arrived,
    scales_of,
    store_rows_of_partial,
)
from mkernel.ops.reduce.operands import Product, count_tiles, link_of, variant_of
from mkernel.ops.reduce.protocol import peer_behind, signal_at, slot_at, slot_bytes, wait_partials
from mkernel.runtime.group import Group
from mkernel.runtime.hopper import right_operand, tma_descriptor
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants
from mkernel.runtime.world import Launch

RUN = tl.constexpr(1024)  # elements of a slot that are one warpgroup's: 8 of every 16 of its rows, and 32 columns


class Call(NamedTuple):
    """The arguments of the kernel, apart from the descriptors."""

    product: Any  # Product, without its matrices
    result: Any  # Block
    exchange: Any  # Exchange
    link: Any  # Link
    scales: Any  # OperandScales
    added: Any  # Added
    B_TRANSPOSED: Any


@gluon.jit
def _load(comm, operands, call, stages, arrivals):
    local = rank_of(comm.context) % comm.RANKS_PER_NODE
    tiles = count_tiles(call.product)
    rounds = count_rounds(tiles)
    step = 0
    summed = 0
    for position in range(rounds):
        taken = take(comm, call, Sequence(rounds), position)
        step = load_tile(
            comm, operands, stages, step, position, tiles // gl.num_programs(0),
            row=taken.row, column=taken.column, k=call.product.k, B_TRANSPOSED=call.B_TRANSPOSED,
        )  # fmt: skip
        if taken.owner == local:
            number = slot_number(taken.round // comm.RANKS_PER_NODE)
            step = load_partials(
                comm, operands, call.exchange.partials, stages, step, number, arrivals=arrivals, summed=summed
            )
            summed += 1


@gluon.jit
def _multiply(comm, operands, call, stages, pushes, c_stage, WARPGROUP: gl.constexpr):
    rank = rank_of(comm.context)
    local = rank % comm.RANKS_PER_NODE
    rounds = count_rounds(count_tiles(call.product))
    extent = Extent(call.product.rows, call.product.n, call.product.k)
    step = 0
    for position in range(rounds):
        taken = take(comm, call, Sequence(rounds), position)
        block = taken.round // comm.RANKS_PER_NODE
        since = trace_time(comm.context)
        total, step = multiply_tile(
            call.scales, stages, step, extent, taken.row, taken.column,
            WARPGROUP=WARPGROUP, B_TRANSPOSED=call.B_TRANSPOSED,
        )  # fmt: skip
        if WARPGROUP == 0:
            trace(comm.context, TILES, TILE, rank - local + taken.owner, taken.tile, since)
        mbarrier.wait(pushes.signalled.index(position % 2), (position // 2 + 1) & 1)
        if taken.owner != local:
            distance = (taken.owner + comm.RANKS_PER_NODE - local) % comm.RANKS_PER_NODE
            i = comm.RANKS_PER_NODE - 1 - distance
            slot = slot_at(comm, call.exchange.partials, peer_behind(comm, distance), i, slot_number(block))
            store_rows_of_partial(slot, total, WARPGROUP)
            mbarrier.arrive(pushes.stored.index(position % 2), count=1)
            if WARPGROUP == 0:
                trace(comm.context, TILES, PUSH_CHUNK, rank - local + taken.owner, taken.tile, LAST)
        else:
            for _ in range(comm.RANKS_PER_NODE - 1):
                total = add_staged_partial(total, stages, step, operands.partials, WARPGROUP)
                step += 2
            # partials may be missing only if the group has given up; the host then raises an error
            total += tl.where(gave_up(comm.context), float("nan"), 0.0)
            total = add_to_rows(call.added, total, extent, taken.row, taken.column, WARPGROUP)
            store_rows_of_partial(finished_slot(comm, call.exchange, rank, block), total, WARPGROUP)
            mbarrier.arrive(pushes.stored.index(position % 2), count=1)
            store_rows(operands.c, c_stage, total, taken.row, taken.column, WARPGROUP)
            if WARPGROUP == 0:
                trace(comm.context, TILES, REDUCE, rank, taken.tile, LAST)
    tma.store_wait(0)


@gluon.jit
def _signal(comm, call, pushes):
    local = rank_of(comm.context) % comm.RANKS_PER_NODE
    rounds = count_rounds(count_tiles(call.product))
    start = clock()
    moved = tl.cast(0, tl.int64)
    for position in range(rounds):
        taken = take(comm, call, Sequence(rounds), position)
        number = slot_number(taken.round // comm.RANKS_PER_NODE)
        mbarrier.wait(pushes.stored.index(position % 2), (position // 2) & 1)
        if call.link.PACED:
            # what a peer reads of this rank's finished tiles crosses the link, too
            moved += slot_bytes(call.exchange.partials) * tl.where(taken.owner == local, comm.RANKS_PER_NODE - 1, 1)
            wait_paced(start, moved, call.link.nanoseconds_per_mib)
        if taken.owner != local:
            distance = (taken.owner + comm.RANKS_PER_NODE - local) % comm.RANKS_PER_NODE
            i = comm.RANKS_PER_NODE - 1 - distance
            notify(signal_at(comm, call.exchange.partial, peer_behind(comm, distance), i, number), comm.epoch)
        else:
            for distance in range(1, comm.RANKS_PER_NODE):
                i = comm.RANKS_PER_NODE - 1 - distance
                notify(signal_at(comm, call.exchange.finished, peer_behind(comm, distance), i, number), comm.epoch)
        mbarrier.arrive(pushes.signalled.index(position % 2), count=1)


@gluon.jit
def _wait_ahead(comm, call, arrivals):
    local = rank_of(comm.context) % comm.RANKS_PER_NODE
    rounds = count_rounds(count_tiles(call.product))
    summed = 0
    for position in range(rounds):
        taken = take(comm, call, Sequence(rounds), position)
        if taken.owner == local:
            number = slot_number(taken.round // comm.RANKS_PER_NODE)
            wait_partials(comm, call.exchange, 0, number, taken.tile)
            prefetch_arrived(comm, call.exchange, number, arrivals, summed)
            summed += 1


@gluon.jit
def _load_run(slot, run, poison):
    """A run of a slot, as pairs of elements. `poison` is or'ed to the bits: all ones but the signs is NaN."""
    offsets = gl.arange(0, RUN // 2, gl.BlockedLayout([4], [32], [1], [0]))
    return gl.load(slot + run * (RUN // 2) + offsets) | poison


@gluon.jit
def _store_run(call, run, row, column):
    """Store a run, 8 of every 16 rows of 64 and 32 columns, in the result, from (row, column) on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0])
    block = run.reshape([4, 8, 4, 4]).permute(0, 1, 3, 2).reshape([32, 16])
    i = gl.arange(0, 32, gl.SliceLayout(1, layout))
    rows = gl.expand_dims(row + i // 8 * 16 + i % 8, 1)
    pairs = gl.expand_dims(column // 2 + gl.arange(0, 16, gl.SliceLayout(0, layout)), 0)
    stride = call.result.row_stride // 2
    target = call.result.data.to(tl.pointer_type(tl.int32)) + rows.to(gl.int64) * stride + pairs
    inside = (rows < call.product.rows) & (pairs < call.product.n // 2)
    gl.store(target, gl.convert_layout(block, layout), mask=inside)


@gluon.jit
def _gather(comm, call):
    rounds = count_rounds(count_tiles(call.product))
    for block in range(tl.cdiv(rounds, comm.RANKS_PER_NODE)):
        for i in range(comm.RANKS_PER_NODE - 1):
            owner = peer_behind(comm, 1 + i)
            round = round_of(block, owner % comm.RANKS_PER_NODE, comm.RANKS_PER_NODE)
            if round < rounds:
                tile, row, column = tile_of(call.product, round)
                missing = wait_finished(comm, call.exchange, i, block, tile)
                poison = tl.where(missing == 0.0, 0, 0x7FFF7FFF)
                since = trace_time(comm.context)
                slot = finished_slot(comm, call.exchange, owner, block).to(tl.pointer_type(tl.int32))
                slot = gl.multiple_of(slot, 16)
                # a warpgroup's rows of 32 columns at a time: two runs
                for part in range(TILE_N // 32 * 2):
                    which, left = part // 2 * 4 + part % 2, column + part // 2 * 32
                    first = _load_run(slot, which, poison)
                    second = _load_run(slot, which + 2, poison)
                    _store_run(call, first, row + part % 2 * ROWS, left)
                    _store_run(call, second, row + part % 2 * ROWS + 8, left)
                trace(comm.context, INTRA, GATHER, owner, tile, since)


@gluon.jit
def _run(comm, operands, call):
    stages, c_stages = allocate_stages(operands)
    pushes = Pushes(barriers(2, 2), barriers(2, 1))
    arrivals = Arrivals(barriers(2, 1), barriers(2, 1))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (comm, operands, call, stages, pushes, c_stages.index(0), 0)),
            (_multiply, (comm, operands, call, stages, pushes, c_stages.index(1), 1)),
            (_load, (comm, operands, call, stages, arrivals)),
            (_signal, (comm, call, pushes)),
            (_wait_ahead, (comm, call, arrivals)),
            (_gather, (comm, call)),
        ],
        [4, 1, 1, 1, 1],
        [216, 72, 72, 72, 72],
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def matmul_all_reduce_hopper_kernel(context, ranks, a, b, c, partials, call):
    """The whole operator. ranks: `Ranks`; a, b, c, partials: tensor descriptors; call: `Call`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), Operands(a, b, c, partials), call
    )  # fmt: skip


def launch(group: Group, plan: Plan, memory: Layout, call: Sum) -> Launch:
    """The launch for a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    a, out, c = call.a, call.out, plan.config
    (m, k), n = a.shape, out.shape[1]
    (transposed,) = constants(plan.right.transposed)
    return Launch(
        op=memory.op,
        group=group,
        kernel=matmul_all_reduce_hopper_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.size)),
            a=tma_descriptor(a, m, k, a.stride(0), [c.tile_m, c.tile_k]),
            b=right_operand(call.b, plan.right.transposed, c.tile_k),
            c=tma_descriptor(out, m, n, out.stride(0), [c.tile_m // 2, STORED.value]),
            partials=partials_descriptor(workspace, out.dtype),
            call=Call(
                product=Product(
                    None, None, m, n, k, Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision))
                ),
                result=Block(out, out.stride(0), out.stride(1)),
                exchange=exchange_of(memory, workspace, plan),
                link=link_of(group, plan),
                scales=scales_of(call),
                added=added_of(call),
                B_TRANSPOSED=transposed,
            ),
        ),
        options=dict(num_warps=c.warps),
        variant=variant_of(plan, workspace),
        uses=memory.uses(workspace, free=free_of(group, plan, memory)),
        inputs=INPUTS,
        results=("c",),
    )
