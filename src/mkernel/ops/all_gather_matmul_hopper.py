"""all_gather_matmul for Hopper: every CTA multiplies all the time, and one of its warps copies.

The protocol is that of all_gather_matmul.py (what is signalled, why buffers are safe), for the ranks
of one node. What differs is who does it. No CTA is set aside for copying; the warps of each CTA take
the roles, and each of them runs through the same list of tiles or chunks on its own:

- two warpgroups multiply, 64 rows of the tile each, and store their part of the result;
- the `load` warp brings the tiles of both operands into shared memory by TMA, some steps ahead;
- the `await` warp waits for the arrival of the rows of each tile, ahead of the load warp, so that
  looking at signals (about 1 us each) costs the multiplication nothing;
- the `push` warp pushes this CTA's share of the rank's rows to the peers. One warp is enough: its
  share is small, and it has the time of the whole launch. The registers and the shared memory of a
  copying CTA stay with the multiplication.

Why it cannot deadlock. A push waits for nobody. Tiles wait for pushes by any CTA of a peer, so
all CTAs must be resident: the launch has no more than fit (planning.check), one to an SM.

What it costs: as all_gather_matmul.py, without the CTAs lost to copying.

It needs rows and columns that TMA can read, 16-bit elements, and m in whole tiles; other calls take
the kernel in all_gather_matmul.py, which is also what the simulator runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.copy import pace
from mkernel.lang.device import acquire_for_descriptors, clock
from mkernel.lang.hopper import STAGES, STORED, TILE_K, TILE_M, TILE_N, multiply_rows, store_rows
from mkernel.lang.order import arriving, grouped
from mkernel.lang.roles import COMPUTE, INTRA
from mkernel.lang.signals import ARRIVED, finish, gave_up, notify, wait
from mkernel.lang.trace import PUSH_CHUNK, TILE, TILES, trace, trace_time
from mkernel.ops.all_gather_matmul import arrived, signals_of
from mkernel.runtime.hopper import described, right_operand
from mkernel.runtime.world import Launch

if TYPE_CHECKING:
    from mkernel.ops.all_gather_matmul import Plan
    from mkernel.runtime.group import Group, Workspace

PUSHED = tl.constexpr(2048)  # elements that the push warp has in flight


@triton.jit
def _tile_at(turn, rank, blocks, column_blocks, GPUS: tl.constexpr, GROUP: tl.constexpr):
    """The turn-th tile of a launch: (source rank, row block of that source, column block, is it mine)."""
    own = blocks * column_blocks
    mine = turn < own
    place, column = grouped(
        tl.where(mine, turn, turn - own), tl.where(mine, blocks, blocks * (GPUS - 1)), column_blocks, GROUP
    )
    source, block = arriving(tl.where(mine, place, place + blocks), rank, blocks, GPUS, GPUS)
    return source, block, column, mine


@gluon.jit
def _load(
    context, own, even, odd, b, a_stages, b_stages, filled, freed, ready, taken, epoch, m, n, k,
    B_TRANSPOSED: gl.constexpr, GPUS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    rank = rank_of(context)
    odd_epoch = epoch % 2 == 1
    blocks = m // TILE_M
    column_blocks = tl.cdiv(n, TILE_N)
    step = 0
    foreign = 0
    for turn in range(gl.program_id(0), blocks * column_blocks * GPUS, gl.num_programs(0)):
        source, block, column_block, mine = _tile_at(turn, rank, blocks, column_blocks, GPUS, GROUP)
        if not mine:
            mbarrier.wait(ready.index(foreign % 2), (foreign // 2) & 1)
            acquire_for_descriptors()
            mbarrier.arrive(taken.index(foreign % 2), count=1)
            foreign += 1
        row = source * m + block * TILE_M
        column = column_block * TILE_N
        for depth in range(0, k, TILE_K):
            stage = step % STAGES
            mbarrier.wait(freed.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(filled.index(stage), own.block_type.nbytes + b.block_type.nbytes)
            if mine:
                tma.async_copy_global_to_shared(
                    own, [block * TILE_M, depth], filled.index(stage), a_stages.index(stage)
                )
            elif odd_epoch:
                tma.async_copy_global_to_shared(odd, [row, depth], filled.index(stage), a_stages.index(stage))
            else:
                tma.async_copy_global_to_shared(even, [row, depth], filled.index(stage), a_stages.index(stage))
            if B_TRANSPOSED:
                tma.async_copy_global_to_shared(b, [column, depth], filled.index(stage), b_stages.index(stage))
            else:
                tma.async_copy_global_to_shared(b, [depth, column], filled.index(stage), b_stages.index(stage))
            step += 1


@gluon.jit
def _await(
    context, ready, taken, epoch, m, n, chunk_rows, signals, GPUS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    mine_signals = segment_of(context, rank, tl.int64)
    blocks = m // TILE_M
    column_blocks = tl.cdiv(n, TILE_N)
    foreign = 0
    for turn in range(gl.program_id(0), blocks * column_blocks * GPUS, gl.num_programs(0)):
        source, block, _, mine = _tile_at(turn, rank, blocks, column_blocks, GPUS, GROUP)
        if not mine:
            row = block * TILE_M
            for chunk in range(row // chunk_rows, tl.cdiv(row + TILE_M, chunk_rows)):
                signal = arrived(mine_signals, parity, source, chunk, signals, GPUS)
                wait(context, signal, epoch, COMPUTE, ARRIVED, source, chunk)
            mbarrier.wait(taken.index(foreign % 2), (foreign // 2 + 1) & 1)
            mbarrier.arrive(ready.index(foreign % 2), count=1)
            foreign += 1


@gluon.jit
def _push(
    context, a, a_stride, epoch, m, k, row_stride, data_start, half, chunk_rows, chunks, signals, nanoseconds_per_mib,
    GPUS: gl.constexpr, PACED: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    start = clock()
    sent = tl.cast(0, tl.int64)
    lane = gl.arange(0, PUSHED, layout)
    for chunk in range(gl.program_id(0), chunks, gl.num_programs(0)):
        since = trace_time(context)
        row = chunk * chunk_rows
        rows = tl.minimum(m - row, chunk_rows)
        for i in range(rows):
            origin = a + (row + i).to(tl.int64) * a_stride
            place = data_start + parity.to(tl.int64) * half + (rank * m + row + i).to(tl.int64) * row_stride
            for column in range(0, k, PUSHED):
                inside = lane < k - column
                block = gl.load(origin + column + lane, mask=inside)
                for j in gl.static_range(1, GPUS):
                    target = segment_of(context, (rank + j) % GPUS, a.dtype.element_ty)
                    gl.store(target + place + column + lane, block, mask=inside)
        if PACED:
            sent += rows.to(tl.int64) * k * (GPUS - 1) * (a.dtype.element_ty.primitive_bitwidth // 8)
            pace(start, sent, nanoseconds_per_mib)
        trace(context, INTRA, PUSH_CHUNK, rank, chunk, since)
        for i in range(1, GPUS):
            theirs = segment_of(context, (rank + i) % GPUS, tl.int64)
            notify(arrived(theirs, parity, rank, chunk, signals, GPUS), epoch)


@gluon.jit
def _multiply(
    context, c, a_stages, b_stages, c_stage, filled, freed, m, n, k,
    WARPGROUP: gl.constexpr, B_TRANSPOSED: gl.constexpr, GPUS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    rank = rank_of(context)
    blocks = m // TILE_M
    column_blocks = tl.cdiv(n, TILE_N)
    step = 0
    for turn in range(gl.program_id(0), blocks * column_blocks * GPUS, gl.num_programs(0)):
        source, block, column_block, _ = _tile_at(turn, rank, blocks, column_blocks, GPUS, GROUP)
        since = trace_time(context)
        total, step = multiply_rows(a_stages, b_stages, filled, freed, step, k, WARPGROUP, B_TRANSPOSED)
        # rows that never came: the group has given up, and the host will say so
        total += tl.where(gave_up(context), float("nan"), 0.0)
        store_rows(c, c_stage, total, source * m + block * TILE_M, column_block * TILE_N, WARPGROUP)
        if WARPGROUP == 0:
            trace(context, TILES, TILE, source, turn, since)
    tma.store_wait(0)


@gluon.jit
def all_gather_matmul_hopper_kernel(
    context, own, even, odd, b, c, a, a_stride, m, n, k, row_stride, data_start, half,
    chunk_rows, chunks, signals, nanoseconds_per_mib,
    B_TRANSPOSED: gl.constexpr, GPUS: gl.constexpr, GROUP: gl.constexpr, PACED: gl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring for the roles."""
    epoch = current_epoch(context)
    a_stages = gl.allocate_shared_memory(own.dtype, [STAGES] + own.block_type.shape, own.layout)
    b_stages = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    c_stages = gl.allocate_shared_memory(c.dtype, [2] + c.block_type.shape, c.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (context, c, a_stages, b_stages, c_stages.index(0), filled, freed, m, n, k,
                         0, B_TRANSPOSED, GPUS, GROUP)),
            (_multiply, (context, c, a_stages, b_stages, c_stages.index(1), filled, freed, m, n, k,
                         1, B_TRANSPOSED, GPUS, GROUP)),
            (_load, (context, own, even, odd, b, a_stages, b_stages, filled, freed, ready, taken, epoch, m, n, k,
                     B_TRANSPOSED, GPUS, GROUP)),
            (_await, (context, ready, taken, epoch, m, n, chunk_rows, signals, GPUS, GROUP)),
            (_push, (context, a, a_stride, epoch, m, k, row_stride, data_start, half, chunk_rows, chunks, signals,
                     nanoseconds_per_mib, GPUS, PACED)),
        ],
        [4, 1, 1, 1],
        [208, 80, 80, 80],  # registers: with fewer the load warp spills where b is not transposed
    )  # fmt: skip
    finish(context, epoch, GPUS)


def launch(
    group: Group, plan: Plan, workspace: Workspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> Launch:
    """The launch that carries out a plan."""
    m, k = a.shape
    n = b.shape[1]
    c = plan.config
    size, element = group.size, a.element_size()
    half = workspace.half_bytes // element
    data = workspace.segment.memory[workspace.data_start :].view(a.dtype)

    tile_m, tile_k = c.tile_m, c.tile_k
    link = group.world.links.nvlink
    rate = (link or 0) / min(c.ctas, plan.chunks)  # GB/s of one pushing warp
    arguments = dict(
        context=workspace.context,
        own=described(a, m, k, a.stride(0), [tile_m, tile_k]),
        even=described(data, size * m, k, plan.row_stride, [tile_m, tile_k]),
        odd=described(data[half:], size * m, k, plan.row_stride, [tile_m, tile_k]),
        b=right_operand(b, plan.right.transposed),
        c=described(out, size * m, n, out.stride(0), [tile_m // 2, STORED.value]),
        a=a, a_stride=a.stride(0), m=m, n=n, k=k,
        row_stride=plan.row_stride, data_start=workspace.data_start // element, half=half,
        chunk_rows=c.chunk_rows, chunks=plan.chunks, signals=signals_of(workspace, size),
        nanoseconds_per_mib=round(2**20 / rate) if link else 0,
        B_TRANSPOSED=plan.right.transposed, GPUS=size, GROUP=c.group_m, PACED=link is not None,
    )  # fmt: skip
    return Launch(
        op="all_gather_matmul",
        group=group,
        kernel=all_gather_matmul_hopper_kernel,
        grid=c.ctas,
        arguments=arguments,
        options=dict(num_warps=c.warps),
        # the workspace too: Triton makes another binary for integers with other divisors
        variant=(plan, workspace.signal_words, workspace.half_bytes),
    )
