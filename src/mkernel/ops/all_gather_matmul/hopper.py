"""The Gluon kernel of all_gather_matmul, for Hopper GPUs: every CTA multiplies throughout, and one of its warps copies.

The protocol is the same (protocol.py, and the package's docstring on why buffers are safe), for the ranks of one
node. What differs is who does the work. No CTA is reserved for copying. The warps of each CTA take the roles, and each
goes through the same list of tiles or chunks on its own:

- two warpgroups multiply, each 64 rows of the tile, and store their part of the result;
- the `load` warp loads the tiles of both operands into shared memory by TMA, several steps ahead;
- the `wait` warp waits for the arrival of each tile's rows, ahead of the load warp, so that polling signals (about 1 us
  each) does not delay the multiplication;
- the `push` warp pushes this CTA's share of the rank's rows to the peers. One warp is enough: its share is small, and
  it has the whole duration of the launch. The registers and shared memory that a copying CTA would take are left to the
  multiplication;
- if the caller wants the gathered rows, the `keep` warp stores them from the stages of the multiplication, by TMA, when
  the tile is one of the first columns. So they are read no more often. A stage is then free when this warp has read it,
  too.

Why it cannot deadlock. A push waits for nobody. Tiles wait for pushes by any CTA of a peer, so all CTAs must be
resident: the launch has no more CTAs than fit, one per SM (planning.check).

What it costs: the same as kernel.py, without the CTAs lost to copying.

It needs rows and columns that TMA can read, 16-bit elements, and an m that is a multiple of the tile height. Other
calls run the kernel in kernel.py, and so does the simulator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of, segment_of
from mkernel.lang.copy import wait_paced
from mkernel.lang.device import acquire_for_descriptors, clock
from mkernel.lang.gluon_compat import async_load, async_store
from mkernel.lang.grid import sync_steps
from mkernel.lang.hopper import STAGES, STORED, Stages, multiply_rows, store_rows
from mkernel.lang.layout import parity, row_of
from mkernel.lang.matrix import Block
from mkernel.lang.order import arrival_order, swizzle_tile
from mkernel.lang.roles import COMPUTE, INTRA
from mkernel.lang.signals import finish, gave_up
from mkernel.lang.trace import PUSH_CHUNK, TILE, TILES, trace, trace_time
from mkernel.ops.all_gather_matmul.plan import Plan
from mkernel.ops.all_gather_matmul.protocol import Gather, notify_chunk, wait_chunk
from mkernel.runtime.config import Settings
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.hopper import right_operand, tma_descriptor
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, named_constants
from mkernel.runtime.world import Launch

PUSHED_BYTES = tl.constexpr(4096)  # that the push warp has in flight
SCALES = tl.constexpr(128)  # likewise


class Call(NamedTuple):
    """A call, as the kernel sees it."""

    a: Any  # Block: this rank's rows
    gather: Any  # Gather
    n: Any
    GROUP: Any  # row blocks that are computed together, for locality in L2
    B_TRANSPOSED: Any
    scales: Any  # GatheredScales of fp8; None unless SCALED
    TILE_M: Any
    TILE_N: Any
    TILE_K: Any
    KEEPS: Any  # the caller wants the gathered rows
    SCALED: Any  # rows are fp8, and have scales, which are pushed with them


class Operands(NamedTuple):
    """The inputs of the GEMM, as tensor descriptors."""

    own: Any  # this rank's rows
    even: Any  # the rows of all ranks, in the half of the workspace for even epochs
    odd: Any  # the same for odd epochs
    b: Any
    kept: Any  # the caller's tensor for the gathered rows; None unless KEEPS


class Arrivals(NamedTuple):
    """Barriers: the wait warp tells the load warp that the rows of a tile have arrived, up to two tiles ahead."""

    ready: Any
    taken: Any


@triton.jit
def _tile_at(comm, call, index):
    """(source, row block of the source, column block, whether the source is this rank) of a tile of the launch."""
    rank = rank_of(comm.context)
    blocks = call.gather.m // call.TILE_M
    column_blocks = tl.cdiv(call.n, call.TILE_N)
    own_tiles = blocks * column_blocks
    own = index < own_tiles
    row_blocks = tl.where(own, blocks, blocks * (comm.WORLD_SIZE - 1))
    nth, column = swizzle_tile(tl.where(own, index, index - own_tiles), row_blocks, column_blocks, call.GROUP)
    source, block = arrival_order(tl.where(own, nth, nth + blocks), rank, blocks, comm.WORLD_SIZE, comm.WORLD_SIZE)
    return source, block, column, own


@triton.jit
def _tiles(comm, call):
    """The number of tiles of a launch."""
    return call.gather.m // call.TILE_M * tl.cdiv(call.n, call.TILE_N) * comm.WORLD_SIZE


@gluon.jit
def _load(comm, call, operands, stages, arrivals):
    """The load warp."""
    odd_epoch = parity(comm.epoch) == 1
    common_steps = _tiles(comm, call) // gl.num_programs(0) * tl.cdiv(call.gather.k, call.TILE_K)
    step = 0
    remote = 0
    for index in range(gl.program_id(0), _tiles(comm, call), gl.num_programs(0)):
        source, block, column_block, own = _tile_at(comm, call, index)
        if not own:
            mbarrier.wait(arrivals.ready.index(remote % 2), (remote // 2) & 1)
            acquire_for_descriptors()
            mbarrier.arrive(arrivals.taken.index(remote % 2), count=1)
            remote += 1
        row = source * call.gather.m + block * call.TILE_M
        column = column_block * call.TILE_N
        for depth in range(0, call.gather.k, call.TILE_K):
            sync_steps(comm, step, common_steps)
            stage = step % STAGES
            filled = stages.filled.index(stage)
            mbarrier.wait(stages.freed.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(filled, operands.own.block_type.nbytes + operands.b.block_type.nbytes)
            if own:
                async_load(operands.own, [block * call.TILE_M, depth], filled, stages.a.index(stage))
            elif odd_epoch:
                async_load(operands.odd, [row, depth], filled, stages.a.index(stage))
            else:
                async_load(operands.even, [row, depth], filled, stages.a.index(stage))
            if call.B_TRANSPOSED:
                async_load(operands.b, [column, depth], filled, stages.b.index(stage))
            else:
                async_load(operands.b, [depth, column], filled, stages.b.index(stage))
            step += 1


@gluon.jit
def _wait_arrivals(comm, call, arrivals):
    """The wait warp."""
    chunk_rows = call.gather.chunk_rows
    remote = 0
    for index in range(gl.program_id(0), _tiles(comm, call), gl.num_programs(0)):
        source, block, _, own = _tile_at(comm, call, index)
        if not own:
            row = block * call.TILE_M
            for chunk in range(row // chunk_rows, tl.cdiv(row + call.TILE_M, chunk_rows)):
                wait_chunk(comm, call.gather, source, chunk, COMPUTE)
            mbarrier.wait(arrivals.taken.index(remote % 2), (remote // 2 + 1) & 1)
            mbarrier.arrive(arrivals.ready.index(remote % 2), count=1)
            remote += 1


@gluon.jit
def _push_scales(comm, call, row, rows):
    """Push the scales of a chunk of the rank's own rows, each to behind its row."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    scales = call.scales
    rank = rank_of(comm.context)
    target = (row_of(call.gather.rows, comm.epoch, rank * call.gather.m + row) + scales.AT) // 4  # in fp32
    for first in range(0, rows * scales.COUNT, SCALES):
        place = first + gl.arange(0, SCALES, layout)
        i, column = place // scales.COUNT, place % scales.COUNT
        own = (row + i).to(gl.int64) * scales.own.row_stride + column.to(gl.int64) * scales.own.column_stride
        values = gl.load(scales.own.data + own, mask=i < rows)
        offset = target + i.to(gl.int64) * (call.gather.rows.row_stride // 4) + column
        for j in gl.static_range(1, comm.WORLD_SIZE):
            there = segment_of(comm.context, (rank + j) % comm.WORLD_SIZE, tl.float32)
            gl.store(there + offset, values, mask=i < rows)


@gluon.jit
def push(comm, call):
    """The push warp. `call` is that of any kernel for Hopper that gathers rows; it has `a` and `gather`."""
    DTYPE: gl.constexpr = call.a.data.dtype.element_ty
    PUSHED: gl.constexpr = PUSHED_BYTES // (DTYPE.primitive_bitwidth // 8)
    layout: gl.constexpr = gl.BlockedLayout([128 // DTYPE.primitive_bitwidth], [32], [1], [0])
    gather = call.gather
    rank = rank_of(comm.context)
    start = clock()
    sent = tl.cast(0, tl.int64)
    lane = gl.arange(0, PUSHED, layout)
    for chunk in range(gl.program_id(0), gather.chunks, gl.num_programs(0)):
        since = trace_time(comm.context)
        row = chunk * gather.chunk_rows
        rows = tl.minimum(gather.m - row, gather.chunk_rows)
        for i in range(rows):
            origin = call.a.data + (row + i).to(tl.int64) * call.a.row_stride
            offset = row_of(gather.rows, comm.epoch, rank * gather.m + row + i)
            for column in range(0, gather.k, PUSHED):
                inside = lane < gather.k - column
                block = gl.load(origin + column + lane, mask=inside)
                for j in gl.static_range(1, comm.WORLD_SIZE):
                    target = segment_of(comm.context, (rank + j) % comm.WORLD_SIZE, DTYPE)
                    gl.store(target + offset + column + lane, block, mask=inside)
        if call.SCALED:
            _push_scales(comm, call, row, rows)
        if call.gather.PACED:
            sent += rows.to(tl.int64) * gather.k * (comm.WORLD_SIZE - 1) * (DTYPE.primitive_bitwidth // 8)
            wait_paced(start, sent, gather.nanoseconds_per_mib)
        trace(comm.context, INTRA, PUSH_CHUNK, rank, chunk, since)
        for i in range(1, comm.WORLD_SIZE):
            notify_chunk(comm, gather, (rank + i) % comm.WORLD_SIZE, rank, chunk)


@gluon.jit
def _keep(comm, call, kept, stages):
    """The keep warp: goes through the steps of the load warp, and frees each stage one step later."""
    step = 0
    for index in range(gl.program_id(0), _tiles(comm, call), gl.num_programs(0)):
        source, block, column_block, _ = _tile_at(comm, call, index)
        row = source * call.gather.m + block * call.TILE_M
        for depth in range(0, call.gather.k, call.TILE_K):
            stage = step % STAGES
            mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
            if column_block == 0:
                async_store(kept, [row, depth], stages.a.index(stage))
                tma.store_wait(1)
            else:
                tma.store_wait(0)
            if step > 0:
                mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
    tma.store_wait(0)
    if step > 0:
        mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)


@gluon.jit
def _multiply(comm, call, c, stages, c_stage, WARPGROUP: gl.constexpr):
    """One of the two warpgroups."""
    step = 0
    for index in range(gl.program_id(0), _tiles(comm, call), gl.num_programs(0)):
        source, block, column_block, _ = _tile_at(comm, call, index)
        since = trace_time(comm.context)
        total, step = multiply_rows(stages, step, call.gather.k, WARPGROUP, call.B_TRANSPOSED)
        # if the group gave up, rows may never have arrived: mark the tile with NaN; the host raises an error
        total += tl.where(gave_up(comm.context), float("nan"), 0.0)
        row = source * call.gather.m + block * call.TILE_M
        store_rows(c, c_stage, total, row, column_block * call.TILE_N, WARPGROUP)
        if WARPGROUP == 0:
            trace(comm.context, TILES, TILE, source, index, since)
    tma.store_wait(0)


@gluon.jit
def _run(comm, call, operands, c):
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
        mbarrier.init(freed.index(i), count=2 + call.KEEPS)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    stages = Stages(a_stages, b_stages, filled, freed)
    arrivals = Arrivals(ready, taken)
    # registers per thread: with fewer than 80, the load warp spills if b is not transposed
    if call.KEEPS:
        gl.warp_specialize(
            [
                (_multiply, (comm, call, c, stages, c_stages.index(0), 0)),
                (_multiply, (comm, call, c, stages, c_stages.index(1), 1)),
                (_load, (comm, call, operands, stages, arrivals)),
                (_wait_arrivals, (comm, call, arrivals)),
                (push, (comm, call)),
                (_keep, (comm, call, operands.kept, stages)),
            ],
            [4, 1, 1, 1, 1],
            [208, 80, 80, 80, 80],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (comm, call, c, stages, c_stages.index(0), 0)),
                (_multiply, (comm, call, c, stages, c_stages.index(1), 1)),
                (_load, (comm, call, operands, stages, arrivals)),
                (_wait_arrivals, (comm, call, arrivals)),
                (push, (comm, call)),
            ],
            [4, 1, 1, 1],
            [208, 80, 80, 80],
        )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def all_gather_matmul_hopper_kernel(context, ranks, own, even, odd, b, kept, c, call):
    """The whole operator. ranks: `Ranks`; own, even, odd, b, kept: see `Operands`; c: a descriptor; call: `Call`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Operands(own, even, odd, b, kept),
        c,
    )


def gather_by_warps(group: Group, memory: Layout, workspace: Workspace, a: torch.Tensor, config: Settings) -> Gather:
    """The `Gather` of a call in which a warp of every CTA pushes."""
    m, k = a.shape
    chunks = -(-m // config.chunk_rows)
    link = group.world.links.nvlink
    rate = (link or 0) / min(config.ctas, chunks)  # GB/s of one push warp
    return Gather(
        m, k, config.chunk_rows, chunks, memory.words_in(workspace, "arrived"), memory.buffer_in(workspace, "rows"),
        round(2**20 / rate) if link else 0, *constants(link is not None),
    )  # fmt: skip


def launch(
    group: Group, plan: Plan, memory: Layout, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
    kept: torch.Tensor | None,
) -> Launch:  # fmt: skip
    """The launch that executes a plan. Collective if the workspace must grow. kept: the caller's tensor for the
    gathered rows, if they are wanted."""
    workspace = memory.workspace(group)
    m, k = a.shape
    n = b.shape[1]
    c, size = plan.config, group.size
    rows = memory.buffer_in(workspace, "rows")
    data = workspace.segment.memory[workspace.data_start :].view(a.dtype)
    block = [c.tile_m, c.tile_k]
    call = Call(
        a=Block(a, a.stride(0), a.stride(1)),
        gather=gather_by_warps(group, memory, workspace, a, c),
        n=n,
        **named_constants(GROUP=c.group_m, B_TRANSPOSED=plan.access.right.transposed),
        scales=None,
        **named_constants(
            TILE_M=c.tile_m, TILE_N=c.tile_n, TILE_K=c.tile_k, KEEPS=kept is not None, SCALED=False,
        ),
    )  # fmt: skip
    return Launch(
        op="all_gather_matmul",
        group=group,
        kernel=all_gather_matmul_hopper_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(size, size)),
            own=tma_descriptor(a, m, k, a.stride(0), block),
            even=tma_descriptor(data, size * m, k, rows.row_stride, block),
            odd=tma_descriptor(data[rows.half :], size * m, k, rows.row_stride, block),
            b=right_operand(b, plan.access.right.transposed),
            kept=None if kept is None else tma_descriptor(kept, size * m, k, k, block),
            c=tma_descriptor(out, size * m, n, out.stride(0), [c.tile_m // 2, STORED.value]),
            call=call,
        ),
        options=dict(num_warps=c.warps),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(plan, kept is not None, workspace.signal_words, workspace.half_bytes),
        uses=memory.uses(workspace),
        inputs=("own", "b", "call.a.data"),
        results=("c", "kept"),
    )
