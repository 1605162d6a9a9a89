"""The Gluon kernel of all_gather_scaled_matmul, for Hopper GPUs: fp8 with scales.

The warps have the roles of all_gather_matmul/hopper.py, and load, wait and push with the same code. The push warp also
pushes the scales of each row, to behind it. The tile is 256 x 128. A warpgroup multiplies 128 rows, as two halves of
64; lang/hopper_scaled.py says how.

Why it cannot deadlock, and what it costs: as for all_gather_matmul/hopper.py.

It needs what that kernel needs, and b in memory as [n, k], because tensor cores read fp8 along k only, an m that is a
multiple of 256, a result in bf16 or fp16, and rows that are quantized already. Other calls take the kernel in
kernel.py, and those with few rows that in few_rows.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.gluon_compat import async_store
from mkernel.lang.hopper import ROWS, STAGES, Stages
from mkernel.lang.hopper_scaled import COLUMNS, Factors, multiply_halves
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


class OperandScales(NamedTuple):
    """`Scales` of the operands (lang/scaling.py)."""

    own: Any  # of this rank's rows
    gathered: Any  # of the rows of all ranks, in the workspace: a part for each half
    b: Any
    BLOCKWISE: Any
    FAST: Any


@gluon.jit
def _factors_of(comm, call, scales, source, block, column, own):
    """The `Factors` of a tile."""
    row = block * call.TILE_M
    data = scales.own.data + row.to(tl.int64) * scales.own.row
    stride = tl.cast(scales.own.row, tl.int64)
    of_block = tl.cast(scales.own.block, tl.int64)
    if not own:
        there = (source * call.gather.m + row).to(tl.int64) * scales.gathered.row
        data = scales.gathered.data + parity(comm.epoch).to(tl.int64) * scales.gathered.part + there
        stride = tl.cast(scales.gathered.row, tl.int64)
        of_block = tl.cast(scales.gathered.block, tl.int64)
    return Factors(data, stride, of_block, call.gather.m - row, scales.b, column, call.n, call.gather.k)


@gluon.jit
def _store_half(c, c_stage, sums, row, column):
    """Store half of a warpgroup's rows of a tile by TMA. The store may still be in flight afterwards."""
    tma.store_wait(0)
    c_stage.store(sums.to(c.dtype))
    fence_async_shared()
    async_store(c, [row, column], c_stage)


@gluon.jit
def _multiply(comm, call, scales, c, stages, c_stage, WARPGROUP: gl.constexpr):
    """One of the two warpgroups."""
    step = 0
    for index in range(gl.program_id(0), _tiles(comm, call), gl.num_programs(0)):
        source, block, column_block, own = _tile_at(comm, call, index)
        since = trace_time(comm.context)
        column = column_block * COLUMNS
        factors = _factors_of(comm, call, scales, source, block, column, own)
        upper, lower, step = multiply_halves(
            stages, step, factors, WARPGROUP, True, BLOCKWISE=scales.BLOCKWISE, FAST=scales.FAST
        )
        # if the group gave up, rows may never have arrived: mark the tile with NaN; the host raises an error
        missing = tl.where(gave_up(comm.context), float("nan"), 0.0)
        row = source * call.gather.m + block * call.TILE_M + WARPGROUP * 2 * ROWS
        _store_half(c, c_stage, upper + missing, row, column)
        _store_half(c, c_stage, lower + missing, row + ROWS, column)
        if WARPGROUP == 0:
            trace(comm.context, TILES, TILE, source, index, since)
    tma.store_wait(0)


@gluon.jit
def _run(comm, call, operands, c, scales):
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
            (_multiply, (comm, call, scales, c, stages, c_stages.index(0), 0)),
            (_multiply, (comm, call, scales, c, stages, c_stages.index(1), 1)),
            (_load, (comm, call, operands, stages, arrivals)),
            (_wait_arrivals, (comm, call, arrivals)),
            (push, (comm, call)),
        ],
        [4, 1, 1, 1],
        [216, 72, 72, 72],  # registers per thread
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def all_gather_scaled_matmul_hopper_kernel(context, ranks, own, even, odd, b, c, call, scales):
    """The whole operator. ranks: `Ranks`; own, even, odd, b: see `Operands`; c: a descriptor; call: `Call`; scales:
    `OperandScales`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Operands(own, even, odd, b, None),
        c,
        scales,
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
    scales = OperandScales(
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
            scales=scales,
        ),
        options=dict(num_warps=c.warps),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(plan, scaling.key, workspace.signal_words, workspace.half_bytes),
        uses=memory.uses(workspace),
        inputs=("own", "b", "call.a.data", "call.scales.own.data", "scales.own.data", "scales.b.data"),
        results=("c",),
    )
