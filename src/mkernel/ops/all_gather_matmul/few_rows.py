"""The Triton kernel of all_gather_matmul for few rows, in one node: the time goes into reading b, so it is read once.

A tile covers the rows of several ranks. The other kernels have tiles of each rank's rows, and would read b once per
rank. All CTAs do the same:

- Push: the chunks of the rank's rows are shared among all its CTAs. Each pushes its chunks to every rank, its own
  workspace included, and signals them. With one rank there is nothing to push: rows are read from the caller's tensor.
- Multiply: a team of CTAs (lang/team.py) waits for the rows of a tile, from any rank, and computes it. If
  there are more tiles than teams, each team computes several.

Signals, buffers and why they are safe: as in the package's docstring. Each rank waits for all rows, since its tiles
cover them all.

Why it cannot deadlock. Pushing waits for nothing. The multiplication waits for pushes, and for the members of the team,
which are resident and have pushed before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of, segment_of
from mkernel.lang.copy import Peers, wait_paced
from mkernel.lang.device import acquire_for_descriptors, clock
from mkernel.lang.gemm import store_tile
from mkernel.lang.layout import parity, row_of, word_of
from mkernel.lang.matrix import Block, Matrix, Strides, Tile, Tiling
from mkernel.lang.order import swizzle_tile
from mkernel.lang.roles import COMPUTE, this_cta
from mkernel.lang.signals import ARRIVED, finish, wait_peers
from mkernel.lang.team import first_row_in_team, multiply_in_team
from mkernel.lang.trace import PUSH_CHUNK, TILE, TILES, trace, trace_time
from mkernel.ops.all_gather_matmul.plan import Plan
from mkernel.ops.all_gather_matmul.protocol import Chunk, Gather, notify_chunk
from mkernel.ops.all_gather_matmul.transfer import OF_SCALES, copy_chunk, scales_in_workspace, scales_of
from mkernel.runtime.group import Group
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, descriptor, named_constants
from mkernel.runtime.scaling import Scaling, with_scales
from mkernel.runtime.teams import scratch_of, team_of
from mkernel.runtime.world import Launch


class Call(NamedTuple):
    """A call, as the kernel sees it."""

    a: Any  # Block: this rank's rows, in the caller's tensor
    gather: Any  # Gather
    n: Any
    tiling: Any  # Tiling
    team: Any  # Team
    scales: Any  # GatheredScales; None unless SCALED
    FLAT: Any  # chunks are contiguous, both in a and in the workspace
    SCALED: Any  # rows are fp8, and have scales
    QUANTIZES: Any  # always false: rows that are to be quantized take the other kernel
    COPY_ROWS: Any  # rows that a CTA has in flight, unless FLAT
    COPY_ELEMENTS: Any  # elements that a CTA has in flight


class Operands(NamedTuple):
    """Operands of the GEMM. The host passes the `Strides` of each; the kernel makes a `Matrix` of each."""

    rows: Any  # all ranks' rows in the workspace, one part per half; with one rank, the caller's tensor
    b: Any
    c: Any


@triton.jit
def push_own_rows(comm, call):
    """Push this CTA's share of the rank's rows to all ranks."""
    gather = call.gather
    rank = rank_of(comm.context)
    DTYPE: tl.constexpr = call.a.data.dtype.element_ty
    start = clock()
    sent = tl.full((), 0, tl.int64)
    for chunk in tl.range(this_cta(), gather.chunks, tl.num_programs(0), disable_licm=True):
        since = trace_time(comm.context)
        row = chunk * gather.chunk_rows
        rows = tl.minimum(gather.m - row, gather.chunk_rows)
        offset = row_of(gather.rows, comm.epoch, rank * gather.m + row)
        origin = call.a.data + row.to(tl.int64) * call.a.row_stride
        copy_chunk(
            comm, call, Chunk(rank, chunk, rows, offset), Block(origin, call.a.row_stride, call.a.column_stride),
            Peers(0, rank, comm.WORLD_SIZE, comm.WORLD_SIZE),
        )  # fmt: skip
        if gather.PACED:
            sent += rows.to(tl.int64) * gather.k * (comm.WORLD_SIZE - 1) * (DTYPE.primitive_bitwidth // 8)
            wait_paced(start, sent, gather.nanoseconds_per_mib)
        trace(comm.context, COMPUTE, PUSH_CHUNK, rank, chunk, since)
        for i in range(comm.WORLD_SIZE):
            notify_chunk(comm, gather, (rank + i) % comm.WORLD_SIZE, rank, chunk)


@triton.jit
def wait_gathered(comm, gather, row, ROWS: tl.constexpr):
    """Wait for ROWS gathered rows, from `row` on; false if the group gave up."""
    segment = segment_of(comm.context, rank_of(comm.context), tl.int64)
    i = row + tl.arange(0, ROWS)
    source = i // gather.m
    chunk = i % gather.m // gather.chunk_rows
    signals = segment + word_of(gather.arrived, comm.epoch, source, chunk)
    inside = i < comm.WORLD_SIZE * gather.m
    return wait_peers(comm.context, signals, inside, comm.epoch, COMPUTE, ARRIVED, source, row)


@triton.jit
def _compute(comm, call, operands):
    """Compute the tiles of this CTA's team."""
    M: tl.constexpr = call.tiling.M
    gather = call.gather
    worker = this_cta()
    rows = gather.m * comm.WORLD_SIZE
    row_blocks = tl.cdiv(rows, M)
    column_blocks = tl.cdiv(call.n, call.tiling.N)
    for tile in tl.range(worker // call.team.SIZE, row_blocks * column_blocks, tl.num_programs(0) // call.team.SIZE):
        block, column_block = swizzle_tile(tile, row_blocks, column_blocks, call.tiling.GROUP)
        row = block * M
        column = column_block * call.tiling.N
        missing = 0.0
        part = tl.full((), 0, tl.int32)
        if comm.WORLD_SIZE > 1:
            complete = wait_gathered(comm, gather, row, M)
            missing = tl.where(complete, 0.0, float("nan"))
            part = parity(comm.epoch).to(tl.int32)
            if operands.rows.strides.USES_TMA:
                acquire_for_descriptors()
        since = trace_time(comm.context)
        location = Tile(part, row, rows, column, call.n)
        total = multiply_in_team(comm, operands.rows, operands.b, location, gather.k, call.tiling, call.team, worker)
        first = first_row_in_team(call.team, worker, M)
        # rows behind those of this worker belong to others: they are in no block of it
        store_tile(operands.c, Tile(0, row + first, rows, column, call.n), total + missing)
        trace(comm.context, TILES, TILE, 0, tile, since)


@triton.jit
def _run(comm, call, operands):
    if comm.WORLD_SIZE > 1:
        push_own_rows(comm, call)
    _compute(comm, call, operands)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def few_rows_kernel(context, ranks, rows, b, c, strides, call):
    """The whole operator. ranks: `Ranks`; rows, b: descriptors or pointers, to be read according to strides
    (`Operands`); c: pointer; call: `Call`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Operands(Matrix(rows, strides.rows), Matrix(b, strides.b), Matrix(c, strides.c)),
    )


def launch(
    group: Group, plan: Plan, memory: Layout, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
    scaling: Scaling | None = None,
) -> Launch:  # fmt: skip
    """The launch that executes a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    m, k = a.shape
    c, size, access = plan.config, group.size, plan.access
    rows = memory.buffer_in(workspace, "rows")
    data = workspace.segment.memory[workspace.data_start :].view(a.dtype)
    scale_at = access.rows.scale_at
    gathered = scales_in_workspace(scaling, workspace, rows, scale_at) if scaling is not None else None
    of_rows = Strides(rows.half, rows.row_stride, 1, *constants(access.rows.descriptors, False))
    operand: Any = data
    if size == 1:
        operand = a
        of_rows = Strides(0, a.stride(0), a.stride(1), *constants(plan.rows_use_tma, False))
        gathered = scaling.of_a(0) if scaling is not None else None
    of_rows = with_scales(of_rows, gathered)
    if plan.rows_use_tma:
        block = [1, c.tile_m, c.tile_k]
        operand = (
            descriptor(a, [1, m, k], [0, a.stride(0), 1], block)
            if size == 1
            else descriptor(data, [2, size * m, k], [rows.half, rows.row_stride, 1], block)
        )
    link = group.world.links.nvlink if size > 1 else None
    team = team_of(group, workspace, c)
    call = Call(
        a=Block(a, a.stride(0), a.stride(1)),
        gather=Gather(
            m, k, c.chunk_rows, plan.chunks, memory.words_in(workspace, "arrived"), rows,
            round(2**20 * min(c.ctas, plan.chunks) / link) if link else 0, *constants(link is not None),
        ),
        n=b.shape[1],
        tiling=Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision)),
        team=team,
        scales=scales_of(scaling, scale_at, None),
        **named_constants(
            FLAT=access.rows.flat, SCALED=scaling is not None, QUANTIZES=False, COPY_ROWS=1,
            COPY_ELEMENTS=c.copy_bytes // a.element_size(),
        ),
    )  # fmt: skip
    others = ((0, group.rank * m), ((group.rank + 1) * m, size * m))
    return Launch(
        op="all_gather_matmul",
        group=group,
        kernel=few_rows_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(size, group.gpus_per_node)),
            rows=operand,
            b=access.right.operand(b, c.tile_n, c.tile_k),
            c=out,
            strides=Operands(
                rows=of_rows,
                b=access.right.strides(b, scaling.of_b() if scaling is not None else None),
                c=Strides(0, out.stride(0), out.stride(1), *constants(False, False)),
            ),
            call=call,
        ),
        options=dict(num_warps=c.warps, num_stages=c.stages),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(plan, workspace.signal_words, workspace.half_bytes),
        uses=memory.uses(workspace, free={"rows": others}),
        inputs=("call.a.data", "b", *OF_SCALES, *(("rows", "strides.rows.scales.data") if size == 1 else ())),
        results=("c",),
        scratch=scratch_of(team),
    )
