"""The Gluon kernel of all_gather_matmul_weight_grad, for Hopper GPUs: every CTA multiplies throughout, and one of its
warps copies.

The protocol is that of all_gather_matmul, for the ranks of one node, and so are the roles of the warps
(all_gather_matmul/hopper.py): two warpgroups multiply, a warp loads, one waits for arrivals, one pushes. What differs
is that every tile needs the rows of all ranks. As in kernel.py, a CTA takes its first `held` tiles in passes: first
over the rank's own rows, then over equal shares of the others' rows, in the order in which they arrive. Partial sums
are in memory in between, in fp32; a thread loads what it has stored. Afterwards all rows are here, and the CTA computes
each of its other tiles at once. All warps go through the same list (`_unit_at`).

Rows are the second dimension of both operands: the tensor cores transpose them. The left operand has a stage for each
warpgroup, 64 rows x 64 columns.

Why it cannot deadlock. A push waits for nobody. Loads wait for the share of rows that they need, and the wait warp
waits for the shares in order: for pushes by any CTA of a peer. So all CTAs must be resident: the launch has no more
CTAs than fit, one per SM (planning.check). The wait warp always waits for all rows, so a rank leaves an epoch only
after they have arrived.

What it costs: the same as kernel.py, without the CTAs lost to copying.

It needs operands and a result that TMA can access, 16-bit elements, and an m that is a multiple of 128 and of the rows
of a chunk. Other calls run the kernel in kernel.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
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

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of
from mkernel.lang.device import acquire_for_descriptors
from mkernel.lang.gluon_compat import async_load
from mkernel.lang.grid import sync_steps
from mkernel.lang.hopper import (
    ROWS,
    STAGES,
    STORED,
    TILE_K,
    TILE_M,
    TILE_N,
    Stages,
    accumulator_layout,
    store_rows,
)
from mkernel.lang.layout import parity
from mkernel.lang.matrix import Block
from mkernel.lang.order import arrival_order, swizzle_tile
from mkernel.lang.signals import finish, gave_up
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.all_gather_matmul.hopper import gather_by_warps, push
from mkernel.ops.all_gather_matmul.weight_grad.kernel import blocks_of, wait_block
from mkernel.ops.all_gather_matmul.weight_grad.plan import OP, Plan
from mkernel.runtime.group import Group
from mkernel.runtime.hopper import tma_descriptor
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, named_constants
from mkernel.runtime.world import Launch


class Call(NamedTuple):
    """A call, as the kernel sees it."""

    a: Any  # Block: this rank's rows
    gather: Any  # Gather
    n: Any
    partials: Any  # fp32: `held` tiles of each CTA
    held: Any  # how many tiles each CTA computes in passes
    GROUP: Any  # row blocks that are computed together, for locality in L2
    PASSES: Any
    TRANSPOSED: Any  # the tiles are tiles of the transposed result
    SCALED: Any  # always false: there is no such operator for fp8


class Operands(NamedTuple):
    """The inputs of the GEMM, as tensor descriptors."""

    own: Any  # this rank's rows
    even: Any  # the rows of all ranks, in the half of the workspace for even epochs
    odd: Any  # the same for odd epochs
    dy: Any


class Unit(NamedTuple):
    """A tile, or a pass over a tile, in the list of a CTA."""

    number: Any  # of the tile, in the launch
    nth: Any  # of the CTA's tiles
    row: Any  # of the tile, in the result or its transpose
    column: Any
    needs: Any  # shares of the others' rows that must have arrived
    own: Any  # steps over the rank's own rows
    first: Any  # the places of the blocks of other ranks: first..end-1 in the order of arrival
    end: Any
    begins: Any  # no pass came before
    ends: Any  # no pass comes after


@gluon.constexpr_function
def shares(passes):
    """Into how many shares the others' rows are divided."""
    return max(passes - 1, 1)


@triton.jit
def _place_of(comm, call, share):
    """The place of the first block of a share, in the order of arrival."""
    _, blocks, _ = blocks_of(call.gather, TILE_K)
    SHARES: tl.constexpr = shares(call.PASSES)
    return blocks + blocks * (comm.WORLD_SIZE - 1) * share // SHARES


@triton.jit
def _tile_count(comm, call):
    """The number of tiles of this CTA, and of the launch."""
    rows = call.n if call.TRANSPOSED else call.gather.k
    columns = call.gather.k if call.TRANSPOSED else call.n
    tiles = tl.cdiv(rows, TILE_M) * tl.cdiv(columns, TILE_N)
    return tl.cdiv(tl.maximum(tiles - tl.program_id(0), 0), tl.num_programs(0)), tiles


@triton.jit
def _units(comm, call):
    """The number of units of this CTA."""
    count, _ = _tile_count(comm, call)
    return count + tl.minimum(call.held, count) * (call.PASSES - 1)


@triton.jit
def _unit_at(comm, call, unit):
    """A unit of this CTA: passes over the held tiles, then the other tiles."""
    SHARES: tl.constexpr = shares(call.PASSES)
    rows = call.n if call.TRANSPOSED else call.gather.k
    columns = call.gather.k if call.TRANSPOSED else call.n
    count, _ = _tile_count(comm, call)
    held = tl.minimum(call.held, count)
    passing = unit < held * call.PASSES
    which = tl.where(passing, unit // tl.maximum(held, 1), 0)
    nth = tl.where(passing, unit % tl.maximum(held, 1), unit - held * (call.PASSES - 1))
    number = tl.program_id(0) + nth * tl.num_programs(0)
    block, column_block = swizzle_tile(number, tl.cdiv(rows, TILE_M), tl.cdiv(columns, TILE_N), call.GROUP)
    first = _place_of(comm, call, tl.where(passing, tl.maximum(which - 1, 0), 0))
    end = _place_of(comm, call, tl.where(passing, which, SHARES))
    begins = which == 0
    ends = (passing == 0) | (which == call.PASSES - 1)
    needs = tl.where(passing, which, SHARES)
    own = tl.where(begins, call.gather.m // TILE_K, 0)
    return Unit(number, nth, block * TILE_M, column_block * TILE_N, needs, own, first, end, begins, ends)


@gluon.jit
def _load_step(operands, call, stages, step, unit, a, rows):
    """Load TILE_K rows into the next stage. a: the descriptor that has them; rows: (in it, in dy)."""
    stage = step % STAGES
    filled = stages.filled.index(stage)
    mbarrier.wait(stages.freed.index(stage), (step // STAGES + 1) & 1)
    left, right = operands.dy, a
    of_left, of_right = rows[1], rows[0]
    if not call.TRANSPOSED:
        left, right = a, operands.dy
        of_left, of_right = rows[0], rows[1]
    mbarrier.expect(filled, 2 * left.block_type.nbytes + right.block_type.nbytes)
    for half in gl.static_range(2):
        async_load(left, [of_left, unit.row + half * ROWS], filled, stages.a.index(stage * 2 + half))
    async_load(right, [of_right, unit.column], filled, stages.b.index(stage))


@gluon.jit
def _load(comm, call, operands, stages, arrived):
    """The load warp."""
    gather = call.gather
    rank = rank_of(comm.context)
    odd_epoch = parity(comm.epoch) == 1
    block_rows, blocks, _ = blocks_of(gather, TILE_K)
    steps_of_block = block_rows // TILE_K
    _, tiles = _tile_count(comm, call)
    common_steps = tiles // gl.num_programs(0) * (gather.m // TILE_K * comm.WORLD_SIZE)
    step = 0
    waited = 0
    for index in range(_units(comm, call)):
        unit = _unit_at(comm, call, index)
        for i in range(unit.own):
            sync_steps(comm, step, common_steps)
            rows = (i * TILE_K, rank * gather.m + i * TILE_K)
            _load_step(operands, call, stages, step, unit, operands.own, rows)
            step += 1
        if comm.WORLD_SIZE > 1:
            if unit.needs > waited:
                for share in range(waited, unit.needs):
                    mbarrier.wait(arrived.index(share), 0)
                acquire_for_descriptors()
                waited = unit.needs
            for i in range((unit.end - unit.first) * steps_of_block):
                sync_steps(comm, step, common_steps)
                source, block = arrival_order(
                    unit.first + i // steps_of_block, rank, blocks, comm.WORLD_SIZE, comm.RANKS_PER_NODE
                )
                row = source * gather.m + block * block_rows + i % steps_of_block * TILE_K
                if odd_epoch:
                    _load_step(operands, call, stages, step, unit, operands.odd, (row, row))
                else:
                    _load_step(operands, call, stages, step, unit, operands.even, (row, row))
                step += 1


@gluon.jit
def _wait_arrivals(comm, call, arrived):
    """The wait warp."""
    if comm.WORLD_SIZE > 1:
        for share in range(shares(call.PASSES)):
            for place in range(_place_of(comm, call, share), _place_of(comm, call, share + 1)):
                wait_block(comm, call.gather, place, TILE_K)
            mbarrier.arrive(arrived.index(share), count=1)


@gluon.jit
def _multiply_rows(stages, step, steps, WARPGROUP: gl.constexpr):
    """(the sums of this warpgroup's rows of a tile over the next steps, the number of steps so far)"""
    layout: gl.constexpr = accumulator_layout()
    total = warpgroup_mma_init(gl.zeros([ROWS, TILE_N], gl.float32, layout))
    for i in range(steps):
        stage = step % STAGES
        mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
        x = stages.a.index(stage * 2 + WARPGROUP).permute((1, 0))
        total = warpgroup_mma(x, stages.b.index(stage), total, use_acc=i > 0, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        total = warpgroup_mma_init(total)
        if i > 0:
            mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    total = warpgroup_mma_wait(0, deps=[total])
    if steps > 0:
        mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
    return total, step


@gluon.jit
def _offsets(WARPGROUP: gl.constexpr):
    """Offsets of this warpgroup's elements in the partial of a tile."""
    layout: gl.constexpr = accumulator_layout()
    i = WARPGROUP * ROWS + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    return i * TILE_N + gl.expand_dims(gl.arange(0, TILE_N, gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _multiply(comm, call, c, stages, c_stage, WARPGROUP: gl.constexpr):
    """One of the two warpgroups."""
    block_rows, _, _ = blocks_of(call.gather, TILE_K)
    step = 0
    for index in range(_units(comm, call)):
        unit = _unit_at(comm, call, index)
        since = trace_time(comm.context)
        steps = unit.own + (unit.end - unit.first) * (block_rows // TILE_K)
        total, step = _multiply_rows(stages, step, steps, WARPGROUP)
        if call.PASSES > 1:
            slot = call.partials + (gl.program_id(0) * call.held + unit.nth).to(gl.int64) * (TILE_M * TILE_N)
            if not unit.begins:
                total += gl.load(slot + _offsets(WARPGROUP))
        if unit.ends:
            # if the group gave up, rows may never have arrived: mark the tile with NaN; the host raises an error
            total += tl.where(gave_up(comm.context), float("nan"), 0.0)
            store_rows(c, c_stage, total, unit.row, unit.column, WARPGROUP)
        elif call.PASSES > 1:
            gl.store(slot + _offsets(WARPGROUP), total)
        if WARPGROUP == 0:
            trace(comm.context, TILES, TILE, -1, unit.number, since)
    tma.store_wait(0)


@gluon.jit
def _run(comm, call, operands, c):
    left, right = operands.dy, operands.own
    if not call.TRANSPOSED:
        left, right = operands.own, operands.dy
    SHARES: gl.constexpr = shares(call.PASSES)
    a_stages = gl.allocate_shared_memory(left.dtype, [2 * STAGES] + left.block_type.shape, left.layout)
    b_stages = gl.allocate_shared_memory(right.dtype, [STAGES] + right.block_type.shape, right.layout)
    c_stages = gl.allocate_shared_memory(c.dtype, [2] + c.block_type.shape, c.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [SHARES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=2)
    for i in gl.static_range(SHARES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    stages = Stages(a_stages, b_stages, filled, freed)
    gl.warp_specialize(
        [
            (_multiply, (comm, call, c, stages, c_stages.index(0), 0)),
            (_multiply, (comm, call, c, stages, c_stages.index(1), 1)),
            (_load, (comm, call, operands, stages, arrived)),
            (_wait_arrivals, (comm, call, arrived)),
            (push, (comm, call)),
        ],
        [4, 1, 1, 1],
        [208, 80, 80, 80],  # registers per thread
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def weight_grad_hopper_kernel(context, ranks, own, even, odd, dy, c, call):
    """The whole operator. ranks: `Ranks`; own, even, odd, dy: see `Operands`; c: a descriptor; call: `Call`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Operands(own, even, odd, dy),
        c,
    )


def launch(
    group: Group, plan: Plan, memory: Layout, a: torch.Tensor, dy: torch.Tensor, out: torch.Tensor
) -> Launch:  # fmt: skip
    """The launch that executes a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    m, k = a.shape
    n = dy.shape[1]
    c, size, transposed = plan.config, group.size, plan.access.transposed
    rows = memory.buffer_in(workspace, "rows")
    data = workspace.segment.memory[workspace.data_start :].view(a.dtype)
    stored = out.t() if transposed else out  # the matrix that the tiles are tiles of
    left, right = [c.tile_k, c.tile_m // 2], [c.tile_k, c.tile_n]
    of_a, of_dy = (right, left) if transposed else (left, right)
    partials = None
    if c.passes > 1:
        elements = c.ctas * c.held_tiles * c.tile_m * c.tile_n
        partials = group.world.memory.empty(group.world_rank, (elements,), torch.float32)
    call = Call(
        a=Block(a, a.stride(0), a.stride(1)),
        gather=gather_by_warps(group, memory, workspace, a, c),
        n=n,
        partials=partials,
        held=c.held_tiles if c.passes > 1 else 0,
        **named_constants(GROUP=c.group_m, PASSES=c.passes, TRANSPOSED=transposed, SCALED=False),
    )
    return Launch(
        op=OP,
        group=group,
        kernel=weight_grad_hopper_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(size, size)),
            own=tma_descriptor(a, m, k, a.stride(0), of_a),
            even=tma_descriptor(data, size * m, k, rows.row_stride, of_a),
            odd=tma_descriptor(data[rows.half :], size * m, k, rows.row_stride, of_a),
            dy=tma_descriptor(dy, size * m, n, dy.stride(0), of_dy),
            c=tma_descriptor(stored, stored.shape[0], stored.shape[1], stored.stride(0), [c.tile_m // 2, STORED.value]),
            call=call,
        ),
        options=dict(num_warps=c.warps),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(plan, workspace.signal_words, workspace.half_bytes),
        uses=memory.uses(workspace),
        inputs=("own", "dy", "call.a.data"),
        results=("c",),
        scratch=() if partials is None else (partials,),
    )
