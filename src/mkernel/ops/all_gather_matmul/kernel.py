"""The Triton kernel of all_gather_matmul: for every shape, any number of nodes, and the simulator.

CTAs are numbered by role: send, intra, compute. The package's docstring says what each role does, and why they cannot
deadlock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of, segment_of
from mkernel.lang.device import acquire_for_descriptors
from mkernel.lang.gemm import multiply_tile, store_tile
from mkernel.lang.layout import parity, row_of
from mkernel.lang.matrix import Block, Matrix, Strides, Tile, Tiling
from mkernel.lang.order import arrival_order, swizzle_tile
from mkernel.lang.roles import Share, other_tiles_of, own_tiles_of, this_cta
from mkernel.lang.signals import finish
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.all_gather_matmul.plan import Plan, as_gathered
from mkernel.ops.all_gather_matmul.protocol import wait_rows
from mkernel.ops.all_gather_matmul.transfer import (
    InHeap,
    gather_of,
    in_heap,
    scales_in_workspace,
    scales_of,
    send_rows,
    spread_rows,
)
from mkernel.runtime.group import Group
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, descriptor, named_constants
from mkernel.runtime.scaling import Scaling, with_scales
from mkernel.runtime.world import Launch

# For the simulator: what the kernel only reads, besides b and its scales.
OF_ROWS = ("call.a.data", "own", "strides.own.scales.data", "call.scales.own.data")
OF_QUANTIZED = ("call.scales.wide.data",)


class Call(NamedTuple):
    """A call, as the kernel sees it."""

    a: Any  # Block: this rank's rows, in the caller's tensor; not read if QUANTIZES
    gathered_out: Any  # Block: the caller's tensor for the gathered rows; not used unless GATHERED_OUT
    gather: Any  # Gather
    n: Any
    join_tiles: Any  # tiles that each send or intra CTA computes when its transfers are done
    tiling: Any  # Tiling
    scales: Any  # GatheredScales; None unless SCALED
    SENDERS: Any  # number of send CTAs
    INTRAS: Any  # number of intra CTAs
    STAGED: Any  # own rows are copied into the workspace and read there
    DIRECT: Any  # the network reads own rows directly from the symmetric heap
    FLAT: Any  # chunks are contiguous, both in a and in the workspace
    GATHERED_OUT: Any
    SCALED: Any  # rows are fp8, and have scales
    QUANTIZES: Any  # own rows are quantized on their way into the workspace; implies SCALED and STAGED
    COPY_ROWS: Any  # rows that a copying CTA has in flight, unless FLAT
    COPY_ELEMENTS: Any  # elements that a copying CTA has in flight


class Operands(NamedTuple):
    """Operands of the GEMM. The host passes the `Strides` of each; the kernel makes a `Matrix` of each."""

    own: Any  # this rank's rows, in the caller's tensor; not read if STAGED
    gathered: Any  # the rows of all ranks, in the workspace: one part per half
    b: Any
    c: Any  # the result: one part per rank


@triton.jit
def _copy_out(call, origin, source, row):
    """Copy a row block of `source`, which has arrived, to the caller's tensor for the gathered rows."""
    gather = call.gather
    ROWS: tl.constexpr = call.COPY_ROWS
    COLUMNS: tl.constexpr = call.COPY_ELEMENTS // call.COPY_ROWS
    out = call.gathered_out
    target = out.data + (source * gather.m + row).to(tl.int64) * out.row_stride
    rows = tl.minimum(gather.m - row, call.tiling.M)
    for first in range(0, rows, ROWS):
        for column in range(0, gather.k, COLUMNS):
            i = first + tl.arange(0, ROWS)[:, None]
            j = column + tl.arange(0, COLUMNS)[None, :]
            inside = (i < rows) & (j < gather.k)
            block = tl.load(origin.data + i.to(tl.int64) * origin.row_stride + j, mask=inside)
            tl.store(target + i.to(tl.int64) * out.row_stride + j, block, mask=inside)


@triton.jit
def _copy_scales_out(comm, call, source, row, OWN: tl.constexpr):
    """The same for the scales of a row block."""
    gather = call.gather
    ROWS: tl.constexpr = call.scales.ROWS
    COLUMNS: tl.constexpr = call.scales.COLUMNS
    if OWN:
        start = call.scales.own.data + row.to(tl.int64) * call.scales.own.row_stride
        row_stride = tl.cast(call.scales.own.row_stride, tl.int64)
        column_stride = tl.cast(call.scales.own.column_stride, tl.int64)
    else:
        workspace = segment_of(comm.context, rank_of(comm.context), tl.float32)
        start = workspace + (row_of(gather.rows, comm.epoch, source * gather.m + row) + call.scales.AT) // 4
        row_stride = tl.cast(gather.rows.row_stride, tl.int64) // 4
        column_stride = tl.cast(1, tl.int64)
    target = call.scales.out.data + (source * gather.m + row).to(tl.int64) * call.scales.out.row_stride
    rows = tl.minimum(gather.m - row, call.tiling.M)
    for first in range(0, rows, ROWS):
        for column in range(0, call.scales.COUNT, COLUMNS):
            i = first + tl.arange(0, ROWS)[:, None]
            j = column + tl.arange(0, COLUMNS)[None, :]
            inside = (i < rows) & (j < call.scales.COUNT)
            block = tl.load(start + i.to(tl.int64) * row_stride + j * column_stride, mask=inside)
            tl.store(target + i.to(tl.int64) * call.scales.out.row_stride + j, block, mask=inside)


@triton.jit
def _rows_at(comm, call, source, row, OWN: tl.constexpr):
    """The rows of `source` starting at `row`, as a `Block`: OWN in the caller's tensor, otherwise in the workspace."""
    if OWN:
        start = call.a.data + row.to(tl.int64) * call.a.row_stride
        stride = tl.cast(call.a.row_stride, tl.int64)
    else:
        workspace = segment_of(comm.context, rank_of(comm.context), call.a.data.dtype.element_ty)
        start = workspace + row_of(call.gather.rows, comm.epoch, source * call.gather.m + row)
        stride = tl.cast(call.gather.rows.row_stride, tl.int64)
    return Block(start, stride, tl.cast(1, tl.int64))


@triton.jit
def _copy_out_at(comm, call, source, row, OWN: tl.constexpr):
    """Copy a row block of `source`, and its scales if it has any, to the caller's tensors for what is gathered."""
    _copy_out(call, _rows_at(comm, call, source, row, OWN), source, row)
    if call.SCALED:
        _copy_scales_out(comm, call, source, row, OWN)


@triton.jit
def _gather_only(comm, call, worker, workers):
    """What a rank without columns does instead of computing: it waits for all rows, as other ranks do. Its buffers are
    safe to overwrite only because it leaves an epoch after all rows have arrived."""
    rank = rank_of(comm.context)
    blocks = tl.cdiv(call.gather.m, call.tiling.M)
    if worker >= 0:
        for item in range(worker, blocks * comm.WORLD_SIZE, workers):
            source = item // blocks
            row = item % blocks * call.tiling.M
            if call.STAGED or source != rank:
                wait_rows(comm, call.gather, source, row, call.tiling.M)
                if call.GATHERED_OUT:
                    _copy_out_at(comm, call, source, row, False)
            else:
                if call.GATHERED_OUT:
                    _copy_out_at(comm, call, source, row, True)


@triton.jit
def _compute(comm, call, operands, share, OWN: tl.constexpr):
    """Compute a share of the tiles. OWN: tiles of this rank's rows, which are read from the caller's tensor. Otherwise
    rows are read from the workspace as they arrive: those of all other ranks, and this rank's own too if STAGED."""
    gather = call.gather
    rank = rank_of(comm.context)
    m = gather.m
    blocks = tl.cdiv(m, call.tiling.M)
    column_blocks = tl.cdiv(call.n, call.tiling.N)
    skipped = 0 if call.STAGED else 1  # ranks whose rows are not read from the workspace
    for tile in tl.range(share.first, share.end, share.step):
        if OWN:
            source = rank
            block, column_block = swizzle_tile(tile, blocks, column_blocks, call.tiling.GROUP)
        else:
            row_blocks = blocks * (comm.WORLD_SIZE - skipped)
            nth, column_block = swizzle_tile(tile, row_blocks, column_blocks, call.tiling.GROUP)
            source, block = arrival_order(nth + blocks * skipped, rank, blocks, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
        row = block * call.tiling.M
        column = column_block * call.tiling.N
        missing = 0.0
        if not OWN:
            complete = wait_rows(comm, gather, source, row, call.tiling.M)
            if operands.gathered.strides.USES_TMA:
                acquire_for_descriptors()
            missing = tl.where(complete, 0.0, float("nan"))
        since = trace_time(comm.context)
        if call.GATHERED_OUT:
            if column_block == 0:
                _copy_out_at(comm, call, source, row, OWN)
        if OWN:
            total = multiply_tile(operands.own, operands.b, Tile(0, row, m, column, call.n), gather.k, call.tiling)
        else:
            half = parity(comm.epoch).to(tl.int32)
            gathered_tile = Tile(half, source * m + row, (source + 1) * m, column, call.n)
            total = multiply_tile(operands.gathered, operands.b, gathered_tile, gather.k, call.tiling)
            total += missing
        store_tile(operands.c, Tile(source, row, m, column, call.n), total)
        trace(comm.context, TILES, TILE, source, tile, since)


@triton.jit
def _run(comm, call, operands, in_heap):
    cta = this_cta()
    helpers: tl.constexpr = call.SENDERS + call.INTRAS
    if cta < call.SENDERS:
        send_rows(comm, call, in_heap, cta, call.SENDERS)
    if (cta >= call.SENDERS) & (cta < helpers):
        spread_rows(comm, call, cta - call.SENDERS, call.INTRAS)

    tiles = tl.cdiv(call.gather.m, call.tiling.M) * tl.cdiv(call.n, call.tiling.N)
    before = tiles * 0
    if not call.STAGED:
        left = tl.minimum(call.join_tiles * helpers, tiles)
        before = tiles - left
        first, end, step = own_tiles_of(cta, helpers, tiles, left)
        _compute(comm, call, operands, Share(first, end, step), True)
    if call.STAGED or comm.WORLD_SIZE > 1 or call.GATHERED_OUT:
        if call.n == 0:
            _gather_only(comm, call, cta - helpers, tl.num_programs(0) - helpers)
    if call.STAGED or comm.WORLD_SIZE > 1:
        ranks: tl.constexpr = comm.WORLD_SIZE if call.STAGED else comm.WORLD_SIZE - 1
        first, end, step = other_tiles_of(cta, helpers, before, tiles * ranks)
        _compute(comm, call, operands, Share(first, end, step), False)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


# Where rows are in the heap differs between calls with the same plan, and must not lead to another binary, which would
# be loaded while a peer spins. Triton specializes all integers in structures, so these two are separate parameters.
@triton.jit(do_not_specialize=["heap_segment", "heap_offset"])
def all_gather_matmul_kernel(context, ranks, own, gathered, b, c, strides, call, heap_segment, heap_offset):
    """The whole operator. ranks: `Ranks`; own, gathered, b, c: descriptors or pointers, to be read according to strides
    (`Operands`); call: `Call`; heap_segment, heap_offset: see `InHeap`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Operands(
            Matrix(own, strides.own), Matrix(gathered, strides.gathered), Matrix(b, strides.b), Matrix(c, strides.c)
        ),
        InHeap(heap_segment, heap_offset),
    )


def launch(
    group: Group, plan: Plan, memory: Layout, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
    gathered_out: torch.Tensor | None, scaling: Scaling | None = None, scales_out: torch.Tensor | None = None,
) -> Launch:  # fmt: skip
    """The launch that executes a plan. Collective if the workspace must grow. scales_out: the caller's tensor for the
    scales of the gathered rows, if they are wanted, too."""
    workspace = memory.workspace(group)
    m, k = a.shape
    n = b.shape[1]
    c, size = plan.config, group.size
    dtype, quantizes = as_gathered(a, scaling).dtype, scaling is not None and scaling.quantizes is not None
    rows = memory.buffer_in(workspace, "rows")
    data = workspace.segment.memory[workspace.data_start :].view(dtype)
    own: Any = data if quantizes else a
    gathered: Any = data
    result: Any = out
    if plan.access.rows.descriptors:
        block = [1, c.tile_m, c.tile_k]
        own = None if plan.access.rows.staged else descriptor(a, [1, m, k], [0, a.stride(0), 1], block)
        gathered = descriptor(data, [2, size * m, k], [rows.half, rows.row_stride, 1], block)
    if plan.access.out_uses_tma:
        result = descriptor(out, [size, m, n], [m * out.stride(0), out.stride(0), 1], [1, c.tile_m, c.tile_n])
    call = Call(
        a=Block(data if quantizes else a, a.stride(0), a.stride(1)),
        gathered_out=Block(gathered_out, gathered_out.stride(0) if gathered_out is not None else 0, 1),
        gather=gather_of(group, memory, workspace, a, c),
        n=n,
        join_tiles=c.join_tiles,
        tiling=Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision)),
        scales=scales_of(scaling, plan.access.rows.scale_at, scales_out, a if quantizes else None),
        **named_constants(
            SENDERS=c.send_ctas, INTRAS=c.intra_ctas, STAGED=plan.access.rows.staged, DIRECT=plan.access.rows.direct,
            FLAT=plan.access.rows.flat, GATHERED_OUT=gathered_out is not None, SCALED=scaling is not None,
            QUANTIZES=quantizes, COPY_ROWS=4, COPY_ELEMENTS=c.copy_bytes // dtype.itemsize,
        ),
    )  # fmt: skip
    of_own = of_gathered = of_b = None
    if scaling is not None:
        of_own, of_b = scaling.of_a(0), scaling.of_b()
        of_gathered = scales_in_workspace(scaling, workspace, rows, plan.access.rows.scale_at)
    of_own_rows = Strides(0, a.stride(0), a.stride(1), *constants(plan.access.rows.descriptors, False))
    of_all_rows = Strides(rows.half, rows.row_stride, 1, *constants(plan.access.rows.descriptors, False))
    strides = Operands(
        own=with_scales(of_own_rows, of_own),
        gathered=with_scales(of_all_rows, of_gathered),
        b=plan.access.right.strides(b, of_b),
        c=Strides(m * out.stride(0), out.stride(0), out.stride(1), *constants(plan.access.out_uses_tma, False)),
    )
    others = ((0, group.rank * m), ((group.rank + 1) * m, size * m))
    return Launch(
        op="all_gather_matmul",
        group=group,
        kernel=all_gather_matmul_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(size, group.gpus_per_node)),
            own=own,
            gathered=gathered,
            b=plan.access.right.operand(b, c.tile_n, c.tile_k),
            c=result,
            strides=strides,
            call=call,
            **in_heap(group, a, plan.access.rows.direct),
        ),
        options=dict(num_warps=c.warps, num_stages=c.stages),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(plan, gathered_out is not None, workspace.signal_words, workspace.half_bytes),
        uses=memory.uses(workspace, free={"rows": others}),
        inputs=("b", "strides.b.scales.data", *(OF_QUANTIZED if quantizes else OF_ROWS)),
        results=("c", "call.gathered_out.data", "call.scales.out.data"),
    )
