"""matmul_reduce_scatter for Hopper: a warp-specialized kernel, so that the tensor cores do not wait for communication.

It follows the same protocol, tile order and order of sums (protocol.py, order.py) as kernel.py, for the ranks of one
node. The slots are the same too, so ranks may mix the two kernels. What differs is the division of labour. Each warp
role iterates over the CTA's tiles on its own:

- Two warpgroups multiply 64 rows of each tile each. They push a tile of another rank's rows to that rank, straight
  from the accumulator. To a tile of the rank's own rows they add the other ranks' partials, and store it. While one
  warpgroup does that, the other one multiplies.
- The `load` warp loads the tiles of both operands into shared memory by TMA, and, after those of one of the rank's own
  tiles, its partials, into the same stages. (When the warpgroups loaded them from memory, they waited for each.)
- The `signal` warp sends the signal of a pushed tile once both warpgroups have stored it. So the release, which waits
  until the stores have reached the peer, delays no other warp.
- The `wait` warp waits for the partials of the rank's own tiles ahead of time, and prefetches them into L2.

Why it cannot deadlock: as in kernel.py. Pushing waits only for this CTA's signal warp, which waits for no other rank.

It requires operands that TMA can read, a 16-bit result whose elements are not converted for transfer, and a number of
rows per rank that is a multiple of the tile height, unless there is one rank. Operands are 16-bit, then with neither
bias nor residual, or fp8, then with b in memory as [n, k]. Other calls take the kernel in kernel.py, which is also the
one that the simulator runs unless it simulates a Hopper GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of
from mkernel.lang.copy import wait_paced
from mkernel.lang.device import clock
from mkernel.lang.hopper import STORED, TILE_M, TILE_N, store_rows
from mkernel.lang.order import swizzle_tile
from mkernel.lang.signals import finish, gave_up, notify
from mkernel.lang.trace import LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace, trace_time
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
from mkernel.ops.reduce.operands import link_of, variant_of
from mkernel.ops.reduce.protocol import signal_at, slot_at, slot_bytes, wait_partials
from mkernel.ops.reduce.reduce_scatter.order import deal_tiles, tile_at
from mkernel.ops.reduce.reduce_scatter.protocol import exchange_of
from mkernel.runtime.group import Group
from mkernel.runtime.hopper import right_operand, tma_descriptor
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants
from mkernel.runtime.world import Launch


class Call(NamedTuple):
    """The arguments of the kernel, apart from the matrices."""

    rows: Any  # rows of one rank
    n: Any
    k: Any
    exchange: Any  # Exchange
    link: Any  # Link
    scales: Any  # OperandScales
    added: Any  # Added
    GROUP: Any  # row blocks that are computed together
    B_TRANSPOSED: Any


@triton.jit
def _count_tiles(call):
    """The number of tiles of one rank's rows."""
    return tl.cdiv(call.rows, TILE_M) * tl.cdiv(call.n, TILE_N)


@triton.jit
def _corner(call, tile):
    """(row, column) of a tile's upper left corner in a rank's rows."""
    block, column_block = swizzle_tile(tile, tl.cdiv(call.rows, TILE_M), tl.cdiv(call.n, TILE_N), call.GROUP)
    return block * TILE_M, column_block * TILE_N


@triton.jit
def _count_own_tiles(comm, call):
    """(number of tiles that this CTA takes, rounds, early): see `deal_tiles`."""
    rounds, early, late = deal_tiles(_count_tiles(call), comm.WORLD_SIZE)
    return rounds * comm.WORLD_SIZE + early + late, rounds, early


@triton.jit
def _tile_at(comm, call, position, rounds, early):
    """(rank offset, tile) at a position of this CTA's sequence."""
    _, rank_offset, tile = tile_at(position, _count_tiles(call), rounds, early, comm.WORLD_SIZE, comm.WORLD_SIZE)
    return rank_offset, tile


@gluon.jit
def _load(comm, operands, call, stages, arrivals):
    rank = rank_of(comm.context)
    count, rounds, early = _count_own_tiles(comm, call)
    common_tiles = _count_tiles(call) // gl.num_programs(0) * comm.WORLD_SIZE
    step = 0
    summed = 0
    for position in range(count):
        rank_offset, tile = _tile_at(comm, call, position, rounds, early)
        row, column = _corner(call, tile)
        row += (rank + rank_offset) % comm.WORLD_SIZE * call.rows
        step = load_tile(
            comm, operands, stages, step, position, common_tiles,
            row=row, column=column, k=call.k, B_TRANSPOSED=call.B_TRANSPOSED,
        )  # fmt: skip
        if rank_offset == 0:
            if comm.WORLD_SIZE > 1:
                step = load_partials(
                    comm, operands, call.exchange.partials, stages, step, tile, arrivals=arrivals, summed=summed
                )
            summed += 1


@gluon.jit
def _multiply(comm, operands, call, stages, pushes, c_stage, WARPGROUP: gl.constexpr):
    rank = rank_of(comm.context)
    count, rounds, early = _count_own_tiles(comm, call)
    step = 0
    pushed = 0
    for position in range(count):
        rank_offset, tile = _tile_at(comm, call, position, rounds, early)
        owner = (rank + rank_offset) % comm.WORLD_SIZE
        since = trace_time(comm.context)
        row, column = _corner(call, tile)
        total, step = multiply_tile(
            call.scales, stages, step, Extent(call.rows * comm.WORLD_SIZE, call.n, call.k),
            owner * call.rows + row, column, WARPGROUP=WARPGROUP, B_TRANSPOSED=call.B_TRANSPOSED,
        )  # fmt: skip
        if WARPGROUP == 0:
            trace(comm.context, TILES, TILE, owner, tile, since)
        if rank_offset != 0:
            slot = slot_at(comm, call.exchange.partials, owner, comm.WORLD_SIZE - 1 - rank_offset, tile)
            mbarrier.wait(pushes.signalled.index(pushed % 2), (pushed // 2 + 1) & 1)
            store_rows_of_partial(slot, total, WARPGROUP)
            mbarrier.arrive(pushes.stored.index(pushed % 2), count=1)
            if WARPGROUP == 0:
                trace(comm.context, TILES, PUSH_CHUNK, owner, tile, LAST)
            pushed += 1
        else:
            for _ in range(comm.WORLD_SIZE - 1):
                total = add_staged_partial(total, stages, step, operands.partials, WARPGROUP)
                step += 2
            # partials may be missing only if the group has given up; the host then raises an error
            total += tl.where(gave_up(comm.context), float("nan"), 0.0)
            total = add_to_rows(call.added, total, Extent(call.rows, call.n, call.k), row, column, WARPGROUP)
            store_rows(operands.c, c_stage, total, row, column, WARPGROUP)
            if WARPGROUP == 0:
                trace(comm.context, TILES, REDUCE, rank, tile, LAST)
    tma.store_wait(0)


@gluon.jit
def _signal(comm, call, pushes):
    rank = rank_of(comm.context)
    count, rounds, early = _count_own_tiles(comm, call)
    start = clock()
    sent = tl.cast(0, tl.int64)
    pushed = 0
    for position in range(count):
        rank_offset, tile = _tile_at(comm, call, position, rounds, early)
        if rank_offset != 0:
            owner = (rank + rank_offset) % comm.WORLD_SIZE
            mbarrier.wait(pushes.stored.index(pushed % 2), (pushed // 2) & 1)
            if call.link.PACED:
                sent += slot_bytes(call.exchange.partials)
                wait_paced(start, sent, call.link.nanoseconds_per_mib)
            notify(signal_at(comm, call.exchange.partial, owner, comm.WORLD_SIZE - 1 - rank_offset, tile), comm.epoch)
            mbarrier.arrive(pushes.signalled.index(pushed % 2), count=1)
            pushed += 1


@gluon.jit
def _wait_ahead(comm, call, arrivals):
    count, rounds, early = _count_own_tiles(comm, call)
    summed = 0
    for position in range(count):
        rank_offset, tile = _tile_at(comm, call, position, rounds, early)
        if rank_offset == 0:
            wait_partials(comm, call.exchange, 0, tile, tile)
            prefetch_arrived(comm, call.exchange, tile, arrivals, summed)
            summed += 1


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
        ],
        [4, 1, 1, 1],
        [216, 72, 72, 72],
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def matmul_reduce_scatter_hopper_kernel(context, ranks, a, b, c, partials, call):
    """The whole operator. ranks: `Ranks`; a, b, c, partials: tensor descriptors; call: `Call`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), Operands(a, b, c, partials), call
    )  # fmt: skip


def launch(group: Group, plan: Plan, memory: Layout, call: Sum) -> Launch:
    """The launch for a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    a, out, c = call.a, call.out, plan.config
    (m, k), (rows, n) = a.shape, out.shape
    group_m, transposed = constants(c.group_m, plan.right.transposed)
    return Launch(
        op=memory.op,
        group=group,
        kernel=matmul_reduce_scatter_hopper_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.size)),
            a=tma_descriptor(a, m, k, a.stride(0), [c.tile_m, c.tile_k]),
            b=right_operand(call.b, plan.right.transposed, c.tile_k),
            c=tma_descriptor(out, rows, n, out.stride(0), [c.tile_m // 2, STORED.value]),
            partials=partials_descriptor(workspace, out.dtype),
            call=Call(
                rows=rows,
                n=n,
                k=k,
                exchange=exchange_of(memory, workspace),
                link=link_of(group, plan),
                scales=scales_of(call),
                added=added_of(call),
                GROUP=group_m,
                B_TRANSPOSED=transposed,
            ),
        ),
        options=dict(num_warps=c.warps),
        variant=variant_of(plan, workspace),
        uses=memory.uses(workspace),
        inputs=INPUTS,
        results=("c",),
    )
