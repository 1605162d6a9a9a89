"""matmul_reduce_scatter for Hopper: the warps of a CTA take turns, so that the tensor cores need not wait.

The protocol, the order of tiles and of sums are those of matmul_reduce_scatter.py, for the ranks of one
node; also the slots, so ranks may mix the two kernels. What differs is who does it. Each role runs
through the CTA's tiles on its own:

- two warpgroups multiply 64 rows of each tile. A tile of another rank's rows they push to that rank,
  straight from the accumulator; to a tile of the rank's own rows they add the parts of the others, and store
  it. While one of them does that the other one multiplies.
- the `load` warp brings the tiles of both operands into shared memory by TMA;
- the `signal` warp sends the signal of a pushed tile, once both warpgroups have stored it; so the release,
  which waits until the stores have reached the peer, holds up nobody else;
- the `await` warp waits for the parts of the rank's own tiles, ahead of time, and brings them into the
  L2 cache.

Why it cannot deadlock: as matmul_reduce_scatter.py; pushing waits for nothing but this CTA's signal warp,
which waits for nobody.

It needs operands that TMA can read, 16-bit elements that travel as they are, the rows of a rank in
whole tiles, and neither bias nor residual; other calls take the portable kernel, which is also what the
simulator runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.copy import pace
from mkernel.lang.device import clock
from mkernel.lang.hopper import ROWS, STAGES, STORED, TILE_K, TILE_M, TILE_N, Stages, multiply_rows, store_rows
from mkernel.lang.order import swizzle_tile
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import PARTIAL, finish, gave_up, notify, wait_again
from mkernel.lang.trace import LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace, trace_time
from mkernel.ops.matmul_reduce_scatter import _dealt, _pushed_slot, _taken
from mkernel.runtime.hopper import described, right_operand
from mkernel.runtime.sums import Plan, Sum, variant_of
from mkernel.runtime.world import Launch

if TYPE_CHECKING:
    from mkernel.runtime.group import Group, Workspace

SLOT = tl.constexpr(128 * 256)  # elements of a part
LINE = tl.constexpr(64)  # elements of a line of the cache


@gluon.jit
def _places(tiles, GPUS: gl.constexpr):
    """How many tiles this CTA has, full rounds of each kind, and whether one comes before."""
    rounds, early, late = _dealt(tiles, GPUS)
    return rounds * GPUS + early + late, rounds, early


@gluon.jit
def _load(
    context, a, b, a_stages, b_stages, filled, freed, rows, n, k,
    B_TRANSPOSED: gl.constexpr, GPUS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    rank = rank_of(context)
    row_blocks = rows // TILE_M
    column_blocks = tl.cdiv(n, TILE_N)
    tiles = row_blocks * column_blocks
    places, rounds, early = _places(tiles, GPUS)
    step = 0
    for place in range(places):
        _, ranks_on, tile = _taken(place, tiles, rounds, early, GPUS, GPUS)
        block, column_block = swizzle_tile(tile, row_blocks, column_blocks, GROUP)
        row = (rank + ranks_on) % GPUS * rows + block * TILE_M
        column = column_block * TILE_N
        for depth in range(0, k, TILE_K):
            stage = step % STAGES
            mbarrier.wait(freed.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(filled.index(stage), a.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(a, [row, depth], filled.index(stage), a_stages.index(stage))
            if B_TRANSPOSED:
                tma.async_copy_global_to_shared(b, [column, depth], filled.index(stage), b_stages.index(stage))
            else:
                tma.async_copy_global_to_shared(b, [depth, column], filled.index(stage), b_stages.index(stage))
            step += 1


@gluon.constexpr_function
def slot_layout():
    """How threads hold a packed half: 16 bytes of a thread beside 16 bytes of the next one, as in the slot."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [0, 128]],
        warp_bases=[[0, 256], [0, 512]],
        block_bases=[],
        shape=[8, 1024],
    )


@gluon.jit
def _packed(half):
    """Half of a warpgroup's columns in the order of a slot (see lang/partials.py): in turns of 8 rows of
    every 16, by 32 columns. Threads only rename their registers."""
    layout: gl.constexpr = slot_layout()
    split = half.reshape([ROWS // 16, 2, 8, STORED // 32, 4, 4, 2])
    return gl.convert_layout(split.permute(3, 1, 0, 2, 5, 4, 6).reshape([8, 1024]), layout)


@gluon.jit
def _unpacked(block):
    """What `_packed` made a block of."""
    split = block.reshape([STORED // 32, 2, ROWS // 16, 8, 4, 4, 2])
    return split.permute(2, 1, 3, 0, 5, 4, 6).reshape([ROWS, STORED])


@gluon.jit
def _places_in_slot(WARPGROUP: gl.constexpr):
    """Where the elements of a packed left half lie in a slot: the turns of both warpgroups alternate."""
    layout: gl.constexpr = slot_layout()
    turn = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
    i = gl.expand_dims(gl.arange(0, 1024, gl.SliceLayout(0, layout)), 0)
    return turn * 2048 + WARPGROUP * 1024 + i


@gluon.jit
def _push(slot, total, WARPGROUP: gl.constexpr):
    """Store this warpgroup's rows of a part into its slot."""
    slot = gl.multiple_of(slot, 16)
    left, right = total.to(slot.dtype.element_ty).reshape([ROWS, 2, STORED]).permute(0, 2, 1).split()
    i = _places_in_slot(WARPGROUP)
    gl.store(slot + i, _packed(left))
    gl.store(slot + TILE_M * STORED + i, _packed(right))


@gluon.jit
def _add(total, slot, WARPGROUP: gl.constexpr):
    """This warpgroup's rows of a tile, plus those of a part."""
    slot = gl.multiple_of(slot, 16)
    left, right = total.reshape([ROWS, 2, STORED]).permute(0, 2, 1).split()
    layout: gl.constexpr = left.type.layout
    total_layout: gl.constexpr = total.type.layout
    i = _places_in_slot(WARPGROUP)
    more = gl.load(slot + i)
    again = gl.load(slot + TILE_M * STORED + i)
    left += gl.convert_layout(_unpacked(more).to(gl.float32), layout)
    right += gl.convert_layout(_unpacked(again).to(gl.float32), layout)
    joined = gl.join(left, right).permute(0, 2, 1).reshape([ROWS, TILE_N])
    return gl.convert_layout(joined, total_layout)


@gluon.jit
def _multiply(
    context, c, a_stages, b_stages, c_stage, filled, freed, stored, signalled, ready, added,
    epoch, rows, n, k, data_start, half,
    WARPGROUP: gl.constexpr, B_TRANSPOSED: gl.constexpr, GPUS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    rank = rank_of(context)
    row_blocks = rows // TILE_M
    column_blocks = tl.cdiv(n, TILE_N)
    tiles = row_blocks * column_blocks
    places, rounds, early = _places(tiles, GPUS)
    step = 0
    pushed = 0
    summed = 0
    for place in range(places):
        _, ranks_on, tile = _taken(place, tiles, rounds, early, GPUS, GPUS)
        since = trace_time(context)
        total, step = multiply_rows(Stages(a_stages, b_stages, filled, freed), step, k, WARPGROUP, B_TRANSPOSED)
        if WARPGROUP == 0:
            trace(context, TILES, TILE, (rank + ranks_on) % GPUS, tile, since)
        if ranks_on != 0:
            parts = segment_of(context, (rank + ranks_on) % GPUS, c.dtype) + data_start + epoch % 2 * half
            slot = _pushed_slot(0 * tile, GPUS - 1 - ranks_on, tiles, tile, GPUS)
            mbarrier.wait(signalled.index(pushed % 2), (pushed // 2 + 1) & 1)
            _push(parts + slot * SLOT, total, WARPGROUP)
            mbarrier.arrive(stored.index(pushed % 2), count=1)
            if WARPGROUP == 0:
                trace(context, TILES, PUSH_CHUNK, (rank + ranks_on) % GPUS, tile, LAST)
            pushed += 1
        else:
            parts = segment_of(context, rank, c.dtype) + data_start + epoch % 2 * half
            mbarrier.wait(ready.index(summed % 2), (summed // 2) & 1)
            # parts that never came: the group has given up, and the host will say so
            total += tl.where(gave_up(context), float("nan"), 0.0)
            for i in range(GPUS - 1):
                slot = _pushed_slot(0 * tile, i, tiles, tile, GPUS)
                total = _add(total, parts + slot * SLOT, WARPGROUP)
            mbarrier.arrive(added.index(summed % 2), count=1)
            summed += 1
            block, column_block = swizzle_tile(tile, row_blocks, column_blocks, GROUP)
            store_rows(c, c_stage, total, block * TILE_M, column_block * TILE_N, WARPGROUP)
            if WARPGROUP == 0:
                trace(context, TILES, REDUCE, rank, tile, LAST)
    tma.store_wait(0)


@gluon.jit
def _signal(
    context, c, stored, signalled, epoch, rows, n, signals, nanoseconds_per_mib,
    GPUS: gl.constexpr, PACED: gl.constexpr,
):  # fmt: skip
    rank = rank_of(context)
    tiles = rows // TILE_M * tl.cdiv(n, TILE_N)
    places, rounds, early = _places(tiles, GPUS)
    start = clock()
    sent = tl.cast(0, tl.int64)
    pushed = 0
    for place in range(places):
        _, ranks_on, tile = _taken(place, tiles, rounds, early, GPUS, GPUS)
        if ranks_on != 0:
            mbarrier.wait(stored.index(pushed % 2), (pushed // 2) & 1)
            if PACED:
                sent += SLOT * (c.dtype.primitive_bitwidth // 8)
                pace(start, sent, nanoseconds_per_mib)
            theirs = segment_of(context, (rank + ranks_on) % GPUS, tl.int64) + epoch % 2 * signals
            notify(theirs + _pushed_slot(0 * tile, GPUS - 1 - ranks_on, tiles, tile, GPUS), epoch)
            mbarrier.arrive(signalled.index(pushed % 2), count=1)
            pushed += 1


@gluon.jit
def _await(
    context, c, ready, added, epoch, rows, n, data_start, half, signals, GPUS: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rank = rank_of(context)
    tiles = rows // TILE_M * tl.cdiv(n, TILE_N)
    places, rounds, early = _places(tiles, GPUS)
    mine = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    parts = segment_of(context, rank, c.dtype) + data_start + epoch % 2 * half
    summed = 0
    for place in range(places):
        _, ranks_on, tile = _taken(place, tiles, rounds, early, GPUS, GPUS)
        if ranks_on == 0:
            for i in range(GPUS - 1):
                slot = _pushed_slot(0 * tile, i, tiles, tile, GPUS)
                wait_again(context, mine + slot, epoch, COMPUTE, PARTIAL, (rank + 1 + i) % GPUS, tile)
            mbarrier.wait(added.index(summed % 2), (summed // 2 + 1) & 1)
            for i in range(GPUS - 1):
                first = parts + _pushed_slot(0 * tile, i, tiles, tile, GPUS) * SLOT
                _prefetch(first + gl.arange(0, SLOT // LINE, layout) * LINE)
            mbarrier.arrive(ready.index(summed % 2), count=1)
            summed += 1


@gluon.jit
def _prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def matmul_reduce_scatter_hopper_kernel(
    context, a, b, c, rows, n, k, data_start, half, signals, nanoseconds_per_mib,
    B_TRANSPOSED: gl.constexpr, GPUS: gl.constexpr, GROUP: gl.constexpr, PACED: gl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring for the roles."""
    epoch = current_epoch(context)
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
    gl.warp_specialize(
        [
            (_multiply, (context, c, a_stages, b_stages, c_stages.index(0), filled, freed, stored, signalled, ready,
                         added, epoch, rows, n, k, data_start, half, 0, B_TRANSPOSED, GPUS, GROUP)),
            (_multiply, (context, c, a_stages, b_stages, c_stages.index(1), filled, freed, stored, signalled, ready,
                         added, epoch, rows, n, k, data_start, half, 1, B_TRANSPOSED, GPUS, GROUP)),
            (_load, (context, a, b, a_stages, b_stages, filled, freed, rows, n, k, B_TRANSPOSED, GPUS, GROUP)),
            (_signal, (context, c, stored, signalled, epoch, rows, n, signals, nanoseconds_per_mib, GPUS, PACED)),
            (_await, (context, c, ready, added, epoch, rows, n, data_start, half, signals, GPUS)),
        ],
        [4, 1, 1, 1],
        [216, 72, 72, 72],
    )  # fmt: skip
    finish(context, epoch, GPUS)


def launch(group: Group, plan: Plan, workspace: Workspace, call: Sum) -> Launch:
    """The launch that carries out a plan."""
    a, b, out = call.a, call.b, call.out
    (m, k), n, c = a.shape, b.shape[1], plan.config
    rows = m // group.size
    element = a.element_size()
    link = group.world.links.nvlink if group.size > 1 else None
    arguments = dict(
        context=workspace.context,
        a=described(a, m, k, a.stride(0), [c.tile_m, c.tile_k]),
        b=right_operand(b, plan.right.transposed),
        c=described(out, rows, n, out.stride(0), [c.tile_m // 2, STORED.value]),
        rows=rows, n=n, k=k, data_start=workspace.data_start // element, half=workspace.half_bytes // element,
        signals=workspace.signal_words // 2,
        nanoseconds_per_mib=round(2**20 / (link / c.ctas)) if link else 0,
        B_TRANSPOSED=plan.right.transposed, GPUS=group.size, GROUP=c.group_m, PACED=link is not None,
    )  # fmt: skip
    return Launch(
        op="matmul_reduce_scatter",
        group=group,
        kernel=matmul_reduce_scatter_hopper_kernel,
        grid=c.ctas,
        arguments=arguments,
        options=dict(num_warps=c.warps),
        variant=variant_of(plan, workspace),
    )
