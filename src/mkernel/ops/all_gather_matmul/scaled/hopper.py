"""The Gluon kernel of all_gather_scaled_matmul, for Hopper GPUs: fp8 with scales.

The warps have the roles of all_gather_matmul/hopper.py, and load, wait and push with the same code. The push warp also
pushes the scales of each row, to behind it. The tile is 256 x 128, in steps of 128 of k, which are as many bytes as
those of bf16. A warpgroup multiplies 128 rows, as two halves of 64.

Hopper's tensor cores add products of fp8 with few bits. So a half starts each step from zero, and its sums are added
to the total in fp32, multiplied by the scales of the step's block if blocks have scales. With one half after the other,
the sums of only one step are in registers beside the totals. While a warpgroup adds, the other one multiplies. With
fast accumulation the totals stay in the tensor cores. Scales of rows and columns are multiplied once, at the end.

Why it cannot deadlock, and what it costs: as for all_gather_matmul/hopper.py.

It needs what that kernel needs, and b in memory as [n, k], because tensor cores read fp8 along k only, an m that is a
multiple of 256, a result in bf16 or fp16, and rows that are quantized already. Other calls take the kernel in
kernel.py, and those with few rows that in few_rows.py. It has run in the simulator, not yet on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.gluon_compat import async_store
from mkernel.lang.hopper import ROWS, STAGES, Stages
from mkernel.lang.layout import parity
from mkernel.lang.matrix import Block
from mkernel.lang.signals import finish, gave_up
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.all_gather_matmul.hopper import (
    Arrivals,
    Call,
    Operands,
    _load,
    _tile_at,
    _tiles,
    _wait_arrivals,
    gather_by_warps,
    push,
)
from mkernel.ops.all_gather_matmul.plan import Plan
from mkernel.ops.all_gather_matmul.transfer import scales_in_workspace, scales_of
from mkernel.runtime.group import Group
from mkernel.runtime.hopper import tma_descriptor
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, named_constants
from mkernel.runtime.scaling import Scaling
from mkernel.runtime.world import Launch

BLOCK = tl.constexpr(128)  # elements of k in a step, which may have scales of their own
COLUMNS = tl.constexpr(128)  # of a tile
HALVES = tl.constexpr(2)  # of a warpgroup's rows


class Factors(NamedTuple):
    """`Scales` of the operands (lang/scaling.py)."""

    own: Any  # of this rank's rows
    gathered: Any  # of the rows of all ranks, in the workspace: a part for each half
    b: Any
    BLOCKWISE: Any
    FAST: Any


class Rows(NamedTuple):
    """The scales of a tile's rows: those of row i are `stride` elements after those of row i - 1."""

    data: Any
    stride: Any
    block: Any  # from a scale to that of the next block of k


@gluon.constexpr_function
def sums_layout():
    """The register layout of half a warpgroup's rows of a tile."""
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])


@gluon.jit
def _rows_of(comm, call, factors, source, block, own):
    """The scales of the rows of a tile, as `Rows`."""
    row = block * call.TILE_M
    data = factors.own.data + row.to(tl.int64) * factors.own.row
    stride = tl.cast(factors.own.row, tl.int64)
    of_block = tl.cast(factors.own.block, tl.int64)
    if not own:
        there = (source * call.gather.m + row).to(tl.int64) * factors.gathered.row
        data = factors.gathered.data + parity(comm.epoch).to(tl.int64) * factors.gathered.part + there
        stride = tl.cast(factors.gathered.row, tl.int64)
        of_block = tl.cast(factors.gathered.block, tl.int64)
    return Rows(data, stride, of_block)


@gluon.jit
def _scales_of_half(rows, block, first):
    """The scales of the ROWS rows from `first` on, in a block of k."""
    i = first + gl.arange(0, ROWS, gl.SliceLayout(1, sums_layout()))
    return gl.load(rows.data + i.to(gl.int64) * rows.stride + block * rows.block)


@gluon.jit
def _scales_of_step(call, factors, rows, column, block, WARPGROUP: gl.constexpr):
    """(the scales of the two halves of a warpgroup's rows) in a block of k, times that of the columns. Behind the
    last block, those of the last one."""
    first: gl.constexpr = WARPGROUP * HALVES * ROWS
    block = tl.minimum(block, tl.cdiv(call.gather.k, BLOCK) - 1)
    there = (column // BLOCK).to(tl.int64) * factors.b.row + block.to(tl.int64) * factors.b.block
    of_b = gl.load(factors.b.data + there)
    return _scales_of_half(rows, block, first) * of_b, _scales_of_half(rows, block, first + ROWS) * of_b


@gluon.jit
def _multiply_promoted(call, factors, stages, step, rows, column, WARPGROUP: gl.constexpr):
    """(the sums of the two halves of a warpgroup's rows of a tile, the number of steps so far): each step is added to
    them in fp32."""
    upper = gl.zeros([ROWS, COLUMNS], gl.float32, sums_layout())
    lower = gl.zeros([ROWS, COLUMNS], gl.float32, sums_layout())
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, sums_layout())
    first: gl.constexpr = WARPGROUP * HALVES * ROWS
    if factors.BLOCKWISE:
        # once the first step of a tile is here, so are all scales of its rows; loaded a step ahead
        mbarrier.wait(stages.filled.index(step % STAGES), (step // STAGES) & 1)
        of_upper, of_lower = _scales_of_step(call, factors, rows, column, step * 0, WARPGROUP)
    for block in range(0, tl.cdiv(call.gather.k, BLOCK)):
        stage = step % STAGES
        mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
        y = stages.b.index(stage).permute((1, 0))
        x = stages.a.index(stage).slice(first, ROWS)
        part = warpgroup_mma_wait(0, deps=[warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)])
        if factors.BLOCKWISE:
            part = part * gl.expand_dims(of_upper, 1)
        upper += part
        x = stages.a.index(stage).slice(first + ROWS, ROWS)
        part = warpgroup_mma_wait(0, deps=[warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)])
        mbarrier.arrive(stages.freed.index(stage), count=1)
        if factors.BLOCKWISE:
            part = part * gl.expand_dims(of_lower, 1)
            of_upper, of_lower = _scales_of_step(call, factors, rows, column, block + 1, WARPGROUP)
        lower += part
        step += 1
    return upper, lower, step


@gluon.jit
def _multiply_fast(call, stages, step, WARPGROUP: gl.constexpr):
    """Like `_multiply_promoted`, but the sums stay in the tensor cores."""
    upper = warpgroup_mma_init(gl.zeros([ROWS, COLUMNS], gl.float32, sums_layout()))
    lower = warpgroup_mma_init(gl.zeros([ROWS, COLUMNS], gl.float32, sums_layout()))
    first: gl.constexpr = WARPGROUP * HALVES * ROWS
    for depth in range(0, call.gather.k, BLOCK):
        stage = step % STAGES
        mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
        y = stages.b.index(stage).permute((1, 0))
        x = stages.a.index(stage)
        upper = warpgroup_mma(x.slice(first, ROWS), y, upper, use_acc=depth > 0, is_async=True)
        lower = warpgroup_mma(x.slice(first + ROWS, ROWS), y, lower, use_acc=depth > 0, is_async=True)
        upper, lower = warpgroup_mma_wait(2, deps=[upper, lower])
        upper = warpgroup_mma_init(upper)
        lower = warpgroup_mma_init(lower)
        if depth > 0:
            # the step before this one is done, so its stage is free
            mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
    return upper, lower, step


@gluon.jit
def _store_half(c, c_stage, sums, row, column):
    """Store half of a warpgroup's rows of a tile by TMA. The store may still be in flight afterwards."""
    tma.store_wait(0)
    c_stage.store(sums.to(c.dtype))
    fence_async_shared()
    async_store(c, [row, column], c_stage)


@gluon.jit
def _multiply(comm, call, factors, c, stages, c_stage, WARPGROUP: gl.constexpr):
    """One of the two warpgroups."""
    step = 0
    first: gl.constexpr = WARPGROUP * HALVES * ROWS
    for index in range(gl.program_id(0), _tiles(comm, call), gl.num_programs(0)):
        source, block, column_block, own = _tile_at(comm, call, index)
        since = trace_time(comm.context)
        column = column_block * COLUMNS
        rows = _rows_of(comm, call, factors, source, block, own)
        if factors.FAST:
            upper, lower, step = _multiply_fast(call, stages, step, WARPGROUP)
        else:
            upper, lower, step = _multiply_promoted(call, factors, stages, step, rows, column, WARPGROUP)
        if not factors.BLOCKWISE:  # one after the other, see scale_tile
            upper = upper * gl.expand_dims(_scales_of_half(rows, 0, first), 1)
            lower = lower * gl.expand_dims(_scales_of_half(rows, 0, first + ROWS), 1)
            j = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, sums_layout()))
            of_columns = gl.load(factors.b.data + j.to(gl.int64) * factors.b.row, mask=j < call.n, other=0.0)
            upper = upper * gl.expand_dims(of_columns, 0)
            lower = lower * gl.expand_dims(of_columns, 0)
        # if the group gave up, rows may never have arrived: mark the tile with NaN; the host raises an error
        missing = tl.where(gave_up(comm.context), float("nan"), 0.0)
        row = source * call.gather.m + block * call.TILE_M + first
        _store_half(c, c_stage, upper + missing, row, column)
        _store_half(c, c_stage, lower + missing, row + ROWS, column)
        if WARPGROUP == 0:
            trace(comm.context, TILES, TILE, source, index, since)
    tma.store_wait(0)


@gluon.jit
def _run(comm, call, operands, c, factors):
    own, b = operands.own, operands.b
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
    stages = Stages(a_stages, b_stages, filled, freed)
    arrivals = Arrivals(ready, taken)
    gl.warp_specialize(
        [
            (_multiply, (comm, call, factors, c, stages, c_stages.index(0), 0)),
            (_multiply, (comm, call, factors, c, stages, c_stages.index(1), 1)),
            (_load, (comm, call, operands, stages, arrivals)),
            (_wait_arrivals, (comm, call, arrivals)),
            (push, (comm, call)),
        ],
        [4, 1, 1, 1],
        [216, 72, 72, 72],  # registers per thread
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def all_gather_scaled_matmul_hopper_kernel(context, ranks, own, even, odd, b, c, call, factors):
    """The whole operator. ranks: `Ranks`; own, even, odd, b: see `Operands`; c: a descriptor; call: `Call`; factors:
    `Factors`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Operands(own, even, odd, b, None),
        c,
        factors,
    )


def launch(
    group: Group, plan: Plan, memory: Layout, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scaling: Scaling
) -> Launch:  # fmt: skip
    """The launch that executes a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    m, k = a.shape
    n = b.shape[1]
    c, size, scale_at = plan.config, group.size, plan.access.rows.scale_at
    rows = memory.buffer_in(workspace, "rows")
    data = workspace.segment.memory[workspace.data_start :].view(a.dtype)
    block = [c.tile_m, c.tile_k]
    call = Call(
        a=Block(a, a.stride(0), a.stride(1)),
        gather=gather_by_warps(group, memory, workspace, a, c),
        n=n,
        **named_constants(GROUP=c.group_m, B_TRANSPOSED=True),
        scales=scales_of(scaling, scale_at, None),
        **named_constants(TILE_M=c.tile_m, TILE_N=c.tile_n, TILE_K=c.tile_k, KEEPS=False, SCALED=True),
    )  # fmt: skip
    factors = Factors(
        scaling.of_a(0), scales_in_workspace(scaling, workspace, rows, scale_at), scaling.of_b(),
        *constants(scaling.blockwise, scaling.fast),
    )  # fmt: skip
    return Launch(
        op="all_gather_matmul",
        group=group,
        kernel=all_gather_scaled_matmul_hopper_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(size, size)),
            own=tma_descriptor(a, m, k, a.stride(0), block),
            even=tma_descriptor(data, size * m, k, rows.row_stride, block),
            odd=tma_descriptor(data[rows.half :], size * m, k, rows.row_stride, block),
            b=tma_descriptor(b, n, k, b.stride(1), [c.tile_n, c.tile_k]),
            c=tma_descriptor(out, size * m, n, out.stride(0), [ROWS.value, c.tile_n]),
            call=call,
            factors=factors,
        ),
        options=dict(num_warps=c.warps),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(plan, scaling.key, workspace.signal_words, workspace.half_bytes),
        uses=memory.uses(workspace),
        inputs=("own", "b", "call.a.data", "call.scales.own.data", "factors.own.data", "factors.b.data"),
        results=("c",),
    )
