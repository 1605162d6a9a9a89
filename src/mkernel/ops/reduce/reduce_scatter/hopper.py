"""matmul_reduce_scatter for Hopper: a warp-specialized kernel, so that the tensor cores do not wait for communication.

It follows the same protocol, tile order and order of sums (protocol.py, order.py) as kernel.py, for the ranks of one
node. The slots are the same too, so ranks may mix the two kernels. What differs is the division of labour. Each warp
role iterates over the CTA's tiles on its own:

- Two warpgroups multiply 64 rows of each tile each. They push a tile of another rank's rows to that rank, straight
  from the accumulator. To a tile of the rank's own rows they add the other ranks' partials, and store it. While one
  warpgroup does that, the other one multiplies.
- The `load` warp loads the tiles of both operands into shared memory by TMA.
- The `signal` warp sends the signal of a pushed tile once both warpgroups have stored it. So the release, which waits
  until the stores have reached the peer, delays no other warp.
- The `wait` warp waits for the partials of the rank's own tiles ahead of time, and prefetches them into L2.

Why it cannot deadlock: as in kernel.py. Pushing waits only for this CTA's signal warp, which waits for no other rank.

It requires operands that TMA can read, 16-bit elements that are not converted for transfer, a number of rows per rank
that is a multiple of the tile height, and neither bias nor residual. Other calls take the kernel in kernel.py, which
is also the one that the simulator runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of
from mkernel.lang.copy import pace
from mkernel.lang.device import clock
from mkernel.lang.gluon_compat import async_load
from mkernel.lang.hopper import ROWS, STAGES, STORED, TILE_K, TILE_M, TILE_N, Stages, multiply_rows, store_rows
from mkernel.lang.order import swizzle_tile
from mkernel.lang.signals import finish, gave_up, notify
from mkernel.lang.trace import LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace, trace_time
from mkernel.ops.reduce.call import Plan, Sum
from mkernel.ops.reduce.operands import link_of, variant_of
from mkernel.ops.reduce.protocol import signal_at, slot_at, slot_bytes, wait_partials
from mkernel.ops.reduce.reduce_scatter.order import deal_tiles, tile_at
from mkernel.ops.reduce.reduce_scatter.protocol import exchange_of
from mkernel.runtime.group import Group
from mkernel.runtime.hopper import right_operand, tma_descriptor
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants
from mkernel.runtime.world import Launch

LINE = tl.constexpr(64)  # elements of a cache line


class Operands(NamedTuple):
    """Tensor descriptors. Parameters of the kernel: Triton cannot launch one with descriptors in structures."""

    a: Any
    b: Any
    c: Any


class Call(NamedTuple):
    """The arguments of the kernel, apart from the matrices."""

    rows: Any  # rows of one rank
    n: Any
    k: Any
    exchange: Any  # Exchange
    link: Any  # Link
    GROUP: Any  # row blocks that are computed together
    B_TRANSPOSED: Any


class Pushes(NamedTuple):
    """Barriers between the warpgroups and the signal warp, double buffered: both warpgroups have stored a pushed tile;
    its signal has been sent."""

    stored: Any
    signalled: Any


class Arrivals(NamedTuple):
    """Barriers between the wait warp and the warpgroups, double buffered: the partials of one of the rank's own tiles
    have arrived; both warpgroups have added them."""

    ready: Any
    added: Any


@triton.jit
def _count_tiles(call):
    """The number of tiles of one rank's rows."""
    return call.rows // TILE_M * tl.cdiv(call.n, TILE_N)


@triton.jit
def _corner(call, tile):
    """(row, column) of a tile's upper left corner in a rank's rows."""
    block, column_block = swizzle_tile(tile, call.rows // TILE_M, tl.cdiv(call.n, TILE_N), call.GROUP)
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
def _load(comm, operands, call, stages):
    rank = rank_of(comm.context)
    count, rounds, early = _count_own_tiles(comm, call)
    step = 0
    for position in range(count):
        rank_offset, tile = _tile_at(comm, call, position, rounds, early)
        row, column = _corner(call, tile)
        row += (rank + rank_offset) % comm.WORLD_SIZE * call.rows
        for depth in range(0, call.k, TILE_K):
            stage = step % STAGES
            filled = stages.filled.index(stage)
            mbarrier.wait(stages.freed.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(filled, operands.a.block_type.nbytes + operands.b.block_type.nbytes)
            async_load(operands.a, [row, depth], filled, stages.a.index(stage))
            if call.B_TRANSPOSED:
                async_load(operands.b, [column, depth], filled, stages.b.index(stage))
            else:
                async_load(operands.b, [depth, column], filled, stages.b.index(stage))
            step += 1


@gluon.constexpr_function
def slot_layout():
    """The register layout of a packed half: 16 bytes of one thread, then 16 bytes of the next, as in the slot."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [0, 128]],
        warp_bases=[[0, 256], [0, 512]],
        block_bases=[],
        shape=[8, 1024],
    )


@gluon.jit
def _packed(half):
    """Half of a warpgroup's columns in the order of a slot (see lang/partials.py): as runs that each hold 8 rows of
    every 16, and 32 columns. This only renames registers."""
    layout: gl.constexpr = slot_layout()
    split = half.reshape([ROWS // 16, 2, 8, STORED // 32, 4, 4, 2])
    return gl.convert_layout(split.permute(3, 1, 0, 2, 5, 4, 6).reshape([8, 1024]), layout)


@gluon.jit
def _unpacked(block):
    """The inverse of `_packed`."""
    split = block.reshape([STORED // 32, 2, ROWS // 16, 8, 4, 4, 2])
    return split.permute(2, 1, 3, 0, 5, 4, 6).reshape([ROWS, STORED])


@gluon.jit
def _offsets_in_slot(WARPGROUP: gl.constexpr):
    """Offsets of the elements of a packed left half in a slot: the runs of the two warpgroups alternate."""
    layout: gl.constexpr = slot_layout()
    run = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
    i = gl.expand_dims(gl.arange(0, 1024, gl.SliceLayout(0, layout)), 0)
    return run * 2048 + WARPGROUP * 1024 + i


@gluon.jit
def _store_partial(slot, total, WARPGROUP: gl.constexpr):
    """Store this warpgroup's rows of a partial in its slot."""
    slot = gl.multiple_of(slot, 16)
    left, right = total.to(slot.dtype.element_ty).reshape([ROWS, 2, STORED]).permute(0, 2, 1).split()
    i = _offsets_in_slot(WARPGROUP)
    gl.store(slot + i, _packed(left))
    gl.store(slot + TILE_M * STORED + i, _packed(right))


@gluon.jit
def _add_partial(total, slot, WARPGROUP: gl.constexpr):
    """Add this warpgroup's rows of a partial to those of a tile."""
    slot = gl.multiple_of(slot, 16)
    left, right = total.reshape([ROWS, 2, STORED]).permute(0, 2, 1).split()
    layout: gl.constexpr = left.type.layout
    total_layout: gl.constexpr = total.type.layout
    i = _offsets_in_slot(WARPGROUP)
    left_partial = gl.load(slot + i)
    right_partial = gl.load(slot + TILE_M * STORED + i)
    left += gl.convert_layout(_unpacked(left_partial).to(gl.float32), layout)
    right += gl.convert_layout(_unpacked(right_partial).to(gl.float32), layout)
    joined = gl.join(left, right).permute(0, 2, 1).reshape([ROWS, TILE_N])
    return gl.convert_layout(joined, total_layout)


@gluon.jit
def _multiply(comm, c, call, stages, pushes, arrivals, c_stage, WARPGROUP: gl.constexpr):
    rank = rank_of(comm.context)
    count, rounds, early = _count_own_tiles(comm, call)
    step = 0
    pushed = 0
    summed = 0
    for position in range(count):
        rank_offset, tile = _tile_at(comm, call, position, rounds, early)
        owner = (rank + rank_offset) % comm.WORLD_SIZE
        since = trace_time(comm.context)
        total, step = multiply_rows(stages, step, call.k, WARPGROUP, call.B_TRANSPOSED)
        if WARPGROUP == 0:
            trace(comm.context, TILES, TILE, owner, tile, since)
        if rank_offset != 0:
            slot = slot_at(comm, call.exchange.partials, owner, comm.WORLD_SIZE - 1 - rank_offset, tile)
            mbarrier.wait(pushes.signalled.index(pushed % 2), (pushed // 2 + 1) & 1)
            _store_partial(slot, total, WARPGROUP)
            mbarrier.arrive(pushes.stored.index(pushed % 2), count=1)
            if WARPGROUP == 0:
                trace(comm.context, TILES, PUSH_CHUNK, owner, tile, LAST)
            pushed += 1
        else:
            mbarrier.wait(arrivals.ready.index(summed % 2), (summed // 2) & 1)
            # partials may be missing only if the group has given up; the host then raises an error
            total += tl.where(gave_up(comm.context), float("nan"), 0.0)
            for i in range(comm.WORLD_SIZE - 1):
                total = _add_partial(total, slot_at(comm, call.exchange.partials, rank, i, tile), WARPGROUP)
            mbarrier.arrive(arrivals.added.index(summed % 2), count=1)
            summed += 1
            row, column = _corner(call, tile)
            store_rows(c, c_stage, total, row, column, WARPGROUP)
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
                pace(start, sent, call.link.nanoseconds_per_mib)
            notify(signal_at(comm, call.exchange.partial, owner, comm.WORLD_SIZE - 1 - rank_offset, tile), comm.epoch)
            mbarrier.arrive(pushes.signalled.index(pushed % 2), count=1)
            pushed += 1


@gluon.jit
def _wait_ahead(comm, call, arrivals):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rank = rank_of(comm.context)
    count, rounds, early = _count_own_tiles(comm, call)
    lines = gl.arange(0, call.exchange.partials.SIZE // LINE, layout) * LINE
    summed = 0
    for position in range(count):
        rank_offset, tile = _tile_at(comm, call, position, rounds, early)
        if rank_offset == 0:
            wait_partials(comm, call.exchange, 0, tile, tile)
            mbarrier.wait(arrivals.added.index(summed % 2), (summed // 2 + 1) & 1)
            for i in range(comm.WORLD_SIZE - 1):
                _prefetch(slot_at(comm, call.exchange.partials, rank, i, tile) + lines)
            mbarrier.arrive(arrivals.ready.index(summed % 2), count=1)
            summed += 1


@gluon.jit
def _prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _run(comm, operands, call):
    a, b, c = operands.a, operands.b, operands.c
    a_stages = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_stages = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    c_stages = gl.allocate_shared_memory(c.dtype, [2] + c.block_type.shape, c.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    signalled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(stored.index(i), count=2)
        mbarrier.init(signalled.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(added.index(i), count=2)
    fence_async_shared()
    stages = Stages(a_stages, b_stages, filled, freed)
    pushes = Pushes(stored, signalled)
    arrivals = Arrivals(ready, added)
    gl.warp_specialize(
        [
            (_multiply, (comm, c, call, stages, pushes, arrivals, c_stages.index(0), 0)),
            (_multiply, (comm, c, call, stages, pushes, arrivals, c_stages.index(1), 1)),
            (_load, (comm, operands, call, stages)),
            (_signal, (comm, call, pushes)),
            (_wait_ahead, (comm, call, arrivals)),
        ],
        [4, 1, 1, 1],
        [216, 72, 72, 72],
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def matmul_reduce_scatter_hopper_kernel(context, ranks, a, b, c, call):
    """The whole operator. ranks: `Ranks`; a, b, c: tensor descriptors; call: `Call`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), Operands(a, b, c), call
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
            b=right_operand(call.b, plan.right.transposed),
            c=tma_descriptor(out, rows, n, out.stride(0), [c.tile_m // 2, STORED.value]),
            call=Call(
                rows=rows,
                n=n,
                k=k,
                exchange=exchange_of(memory, workspace),
                link=link_of(group, plan),
                GROUP=group_m,
                B_TRANSPOSED=transposed,
            ),
        ),
        options=dict(num_warps=c.warps),
        variant=variant_of(plan, workspace),
        uses=memory.uses(workspace),
    )
