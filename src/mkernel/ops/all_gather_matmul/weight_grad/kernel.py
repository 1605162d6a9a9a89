"""The Triton kernel of all_gather_matmul_weight_grad, for every shape, any number of nodes, and the simulator.

CTAs are numbered by role: send, intra, compute. The package's docstring says what each role does, which tiles are
computed in passes, and why nothing can deadlock.

The result is stored as it lies in memory: a column-major [k, n] as a row-major [n, k]. So tile rows are columns of a
and tile columns are columns of dy, or, if TRANSPOSED, the other way round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of, segment_of
from mkernel.lang.device import acquire_for_descriptors
from mkernel.lang.gemm import masked_block, store_tile
from mkernel.lang.hints import waited_for
from mkernel.lang.layout import parity, word_of
from mkernel.lang.matrix import Block, Matrix, Strides, Tile, Tiling
from mkernel.lang.order import arrival_order, swizzle_tile
from mkernel.lang.partials import load_partial, prefetch_partial, store_partial
from mkernel.lang.roles import COMPUTE, Share, own_tiles_of, this_cta
from mkernel.lang.signals import finish, poll_each, share_acquired
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.all_gather_matmul.protocol import wait_chunk
from mkernel.ops.all_gather_matmul.transfer import InHeap, gather_of, in_heap, send_rows, spread_rows
from mkernel.ops.all_gather_matmul.weight_grad.plan import OP, Plan
from mkernel.runtime.group import Group
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, descriptor, named_constants
from mkernel.runtime.world import Launch

POLLED = tl.constexpr(128)  # signals that are polled at once


class Call(NamedTuple):
    """A call, as the kernel sees it."""

    a: Any  # Block: this rank's rows, in the caller's tensor
    gather: Any  # Gather
    n: Any
    partials: Any  # fp32 slots for the tiles that are computed in passes, `held_tiles` per compute CTA
    held_tiles: Any  # how many tiles each compute CTA computes in passes
    join_tiles: Any  # tiles that each send or intra CTA computes when its transfers are done
    tiling: Any  # Tiling: M and N columns of a and dy, K rows
    SENDERS: Any  # number of send CTAs
    INTRAS: Any  # number of intra CTAs
    PASSES: Any  # number of passes
    STAGED: Any  # own rows are copied into the workspace and read there
    DIRECT: Any  # the network reads own rows directly from the symmetric heap
    FLAT: Any  # chunks are contiguous, both in a and in the workspace
    TRANSPOSED: Any  # the tile is a tile of the transposed result
    SCALED: Any  # always false: there is no such operator for fp8
    QUANTIZES: Any  # likewise
    COPY_ROWS: Any  # rows that a copying CTA has in flight, unless FLAT
    COPY_ELEMENTS: Any  # elements that a copying CTA has in flight


class Operands(NamedTuple):
    """Operands of the GEMM. The host passes the `Strides` of each; the kernel makes a `Matrix` of each. Inputs are
    [parts, ranks, m, columns]: what reaches beyond the m rows of a rank is zero."""

    own: Any  # this rank's rows, in the caller's tensor; not read if STAGED
    gathered: Any  # the rows of all ranks, in the workspace: one part per half
    dy: Any
    c: Any  # the result, or its transpose


class Span(NamedTuple):
    """Rows to sum over: `own` of the rank's own rows, read from the caller's tensor, and the blocks at places
    first..end-1 of the arrival order, read from the workspace."""

    own: Any
    first: Any
    end: Any


class Rows(NamedTuple):
    """K rows of a rank: `source` in dy, and `part` and `origin` in the matrix that holds its rows of a."""

    part: Any
    origin: Any
    source: Any
    row: Any


@triton.jit
def blocks_of(gather, STEP: tl.constexpr):
    """(rows of a block, blocks of a rank, chunks of a block). A block is a chunk, or the chunks of a step of STEP rows
    if they are smaller; a step reads rows of one block."""
    rows = tl.maximum(gather.chunk_rows, STEP)
    return rows, tl.cdiv(gather.m, rows), rows // gather.chunk_rows


@triton.jit
def poll_chunks(comm, gather, first, end, STEP: tl.constexpr):
    """Have all chunks first..end-1 in the arrival order of their blocks arrived? At most POLLED of them. Acquires what
    has arrived, for all threads.

    Triton makes a load of an addition of zero to a single signal, but not to a block of them. These signals are in the
    memory of this GPU, which adds atomically: what peers or the network write at the same time is not lost."""
    rank = rank_of(comm.context)
    _, blocks, chunks = blocks_of(gather, STEP)
    nth = first + tl.arange(0, POLLED)
    source, block = arrival_order(nth // chunks, rank, blocks, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
    chunk = block * chunks + nth % chunks
    inside = (nth < end) & (chunk < gather.chunks)
    segment = segment_of(comm.context, rank, tl.int64)
    signals = segment + word_of(gather.arrived, comm.epoch, source, chunk)
    seen = tl.where(inside, poll_each(signals, inside, "sys"), comm.epoch)
    arrived = tl.min(seen) >= comm.epoch
    if arrived:
        waited_for(signals, inside, comm.epoch)
    share_acquired()
    return arrived


@triton.jit
def wait_block(comm, gather, place, STEP: tl.constexpr):
    """Wait for the chunks of the block at a place of the arrival order; false if the group gave up."""
    _, blocks, chunks = blocks_of(gather, STEP)
    rank = rank_of(comm.context)
    source, block = arrival_order(place, rank, blocks, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
    complete = True
    for chunk in range(block * chunks, tl.minimum((block + 1) * chunks, gather.chunks)):
        complete &= wait_chunk(comm, gather, source, chunk, COMPUTE)
    return complete


@triton.jit
def wait_places(comm, gather, first, end, STEP: tl.constexpr):
    """Wait for the blocks at places first..end-1 of the arrival order; false if the group gave up. A poll takes about
    1 us, so chunks are polled together first. One that is missing is waited for, and all after it, in order."""
    _, _, chunks = blocks_of(gather, STEP)
    complete = True
    for start in range(first * chunks, end * chunks, POLLED):
        last = tl.minimum(start + POLLED, end * chunks)
        if not poll_chunks(comm, gather, start, last, STEP):
            for place in range(start // chunks, tl.cdiv(last, chunks)):
                complete &= wait_block(comm, gather, place, STEP)
    return complete


@triton.jit
def _places_of(comm, call, which):
    """(first, end): the blocks of a pass, as places in the arrival order. The first pass has the rank's own rows, the
    others have equal shares of the other ranks' rows. If there is only one pass, it has all of them."""
    _, blocks, _ = blocks_of(call.gather, call.tiling.K)
    others = blocks * (comm.WORLD_SIZE - 1)
    if call.PASSES == 1:
        first = which * 0
        end = blocks + others
    else:
        first = tl.where(which == 0, 0, blocks + others * (which - 1) // (call.PASSES - 1))
        end = blocks + others * which // (call.PASSES - 1)
    return first, end


@triton.jit
def _wait_pass(comm, call, which):
    """Wait for the rows of a pass; false if the group gave up."""
    first, end = _places_of(comm, call, which)
    if not call.STAGED:
        _, blocks, _ = blocks_of(call.gather, call.tiling.K)
        first = tl.maximum(first, blocks)  # own rows are read from the caller's tensor
    return wait_places(comm, call.gather, first, end, call.tiling.K)


@triton.jit
def _block(matrix, part, rows, column, m, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS elements of an input. rows: (rank, first row); zeros beyond m rows and `columns` columns."""
    if matrix.strides.USES_TMA:
        block = matrix.data.load([part, rows[0], rows[1], column]).reshape(ROWS, COLUMNS)
    else:
        start = matrix.data + tl.cast(part, tl.int64) * matrix.strides.part
        start += tl.cast(rows[0], tl.int64) * m * matrix.strides.row
        there = Block(start, matrix.strides.row, matrix.strides.column)
        block = masked_block(there, rows[1], column, m, columns, ROWS, COLUMNS)
    return block


@triton.jit
def _add_rows(total, call, a, dy, tile, rows):
    """The sums of a tile plus the products of K `Rows`."""
    m = call.gather.m
    if call.TRANSPOSED:
        x = _block(a, rows.part, (rows.origin, rows.row), tile.column, m, tile.columns, call.tiling.K, call.tiling.N)
        y = _block(dy, 0, (rows.source, rows.row), tile.row, m, tile.rows, call.tiling.K, call.tiling.M)
        total = tl.dot(y.T, x, total, input_precision=call.tiling.PRECISION)
    else:
        x = _block(a, rows.part, (rows.origin, rows.row), tile.row, m, tile.rows, call.tiling.K, call.tiling.M)
        y = _block(dy, 0, (rows.source, rows.row), tile.column, m, tile.columns, call.tiling.K, call.tiling.N)
        total = tl.dot(x.T, y, total, input_precision=call.tiling.PRECISION)
    return total


@triton.jit
def _multiply(comm, call, operands, tile, span):
    """The sums of a tile over the rows of a `Span`, in fp32. Like `multiply_tile`, it starts from zero."""
    gather = call.gather
    rank = rank_of(comm.context)
    total = tl.zeros((call.tiling.M, call.tiling.N), tl.float32)
    if not call.STAGED:
        for step in range(tl.cdiv(span.own, call.tiling.K)):
            rows = Rows(0, 0, rank, step * call.tiling.K)
            total = _add_rows(total, call, operands.own, operands.dy, tile, rows)
    if call.STAGED or comm.WORLD_SIZE > 1:
        half = parity(comm.epoch).to(tl.int32)
        block_rows, blocks, _ = blocks_of(gather, call.tiling.K)
        steps = block_rows // call.tiling.K
        for step in range(span.first * steps, span.end * steps):
            source, block = arrival_order(step // steps, rank, blocks, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
            row = block * block_rows + step % steps * call.tiling.K
            total = _add_rows(
                total, call, operands.gathered, operands.dy, tile, Rows(half, source, source, row)
            )  # fmt: skip
    return total


@triton.jit
def _compute(comm, call, operands, share, held, slots):
    """Compute a share of the tiles: the first `held` of them in passes, then each of the others at once. slots: the
    CTA's slots for the partials of the first ones. Returns how many passes it has waited for."""
    gather = call.gather
    rows = tl.where(call.TRANSPOSED, call.n, gather.k)  # of the matrix that the tiles are tiles of
    columns = tl.where(call.TRANSPOSED, gather.k, call.n)
    count = tl.cdiv(tl.maximum(share.end - share.first, 0), share.step)
    held = tl.minimum(held, count)
    in_passes = held * call.PASSES
    waited = tl.full((), 0, tl.int32)
    missing = tl.full((), 0.0, tl.float32)
    for unit in range(in_passes + count - held):
        passing = unit < in_passes
        nth = tl.where(passing, unit % tl.maximum(held, 1), unit - held * (call.PASSES - 1))
        which = tl.where(passing, unit // tl.maximum(held, 1), call.PASSES - 1)
        if call.STAGED or comm.WORLD_SIZE > 1:
            for next_pass in range(waited, which + 1):
                missing += tl.where(_wait_pass(comm, call, next_pass), 0.0, float("nan"))
            waited = tl.maximum(waited, which + 1)
            if operands.gathered.strides.USES_TMA:
                acquire_for_descriptors()
        since = trace_time(comm.context)
        number = share.first + nth * share.step
        block, column_block = swizzle_tile(
            number, tl.cdiv(rows, call.tiling.M), tl.cdiv(columns, call.tiling.N), call.tiling.GROUP
        )  # fmt: skip
        tile = Tile(0, block * call.tiling.M, rows, column_block * call.tiling.N, columns)
        begins = (which == 0) | (passing == 0)
        slot = slots + tl.cast(nth, tl.int64) * (call.tiling.M * call.tiling.N) if call.PASSES > 1 else slots
        if call.PASSES > 1:
            if not begins:
                prefetch_partial(slot, call.tiling.M, call.tiling.N)
        first, end = _places_of(comm, call, which)
        first = tl.where(passing, first, 0)
        if not call.STAGED:
            _, blocks, _ = blocks_of(gather, call.tiling.K)
            first = tl.maximum(first, blocks)
        total = _multiply(comm, call, operands, tile, Span(tl.where(begins, gather.m, 0), first, end))
        total += missing
        if call.PASSES == 1:
            store_tile(operands.c, tile, total)
        else:
            if not begins:
                total += load_partial(slot, call.tiling.M, call.tiling.N)
            if which == call.PASSES - 1:
                store_tile(operands.c, tile, total)
            else:
                store_partial(slot, total, call.tiling.M, call.tiling.N)
                tl.debug_barrier()  # other threads may load what this one has stored
        trace(comm.context, TILES, TILE, -1, number, since)
    return waited


@triton.jit
def _run(comm, call, operands, heap):
    cta = this_cta()
    helpers: tl.constexpr = call.SENDERS + call.INTRAS
    if cta < call.SENDERS:
        send_rows(comm, call, heap, cta, call.SENDERS)
    if (cta >= call.SENDERS) & (cta < helpers):
        spread_rows(comm, call, cta - call.SENDERS, call.INTRAS)

    tiles = tl.cdiv(call.gather.k, call.tiling.N if call.TRANSPOSED else call.tiling.M)
    tiles *= tl.cdiv(call.n, call.tiling.M if call.TRANSPOSED else call.tiling.N)
    left = tl.minimum(call.join_tiles * helpers, tiles)
    first, end, step = own_tiles_of(cta, helpers, tiles, left)
    held = tl.where(cta < helpers, 0, call.held_tiles)
    slots = call.partials
    if call.PASSES > 1:
        worker = tl.maximum(cta - helpers, 0).to(tl.int64)
        slots += worker * call.held_tiles * (call.tiling.M * call.tiling.N)
    waited = _compute(comm, call, operands, Share(first, end, step), held, slots)
    if call.STAGED or comm.WORLD_SIZE > 1:
        if cta >= helpers:
            # buffers are safe to overwrite only because a rank leaves an epoch after all rows have arrived
            for which in range(waited, call.PASSES):
                _wait_pass(comm, call, which)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


# heap_segment and heap_offset are separate parameters for the reason given in all_gather_matmul_kernel.
@triton.jit(do_not_specialize=["heap_segment", "heap_offset"])
def weight_grad_kernel(context, ranks, own, gathered, dy, c, strides, call, heap_segment, heap_offset):
    """The whole operator. ranks: `Ranks`; own, gathered, dy, c: descriptors or pointers, to be accessed according to
    strides (`Operands`); call: `Call`; heap_segment, heap_offset: see `InHeap`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Operands(
            Matrix(own, strides.own), Matrix(gathered, strides.gathered), Matrix(dy, strides.dy), Matrix(c, strides.c)
        ),
        InHeap(heap_segment, heap_offset),
    )


def launch(
    group: Group, plan: Plan, memory: Layout, a: torch.Tensor, dy: torch.Tensor, out: torch.Tensor
) -> Launch:  # fmt: skip
    """The launch that executes a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    m, k = a.shape
    n = dy.shape[1]
    c, size, access = plan.config, group.size, plan.access
    rows = memory.buffer_in(workspace, "rows")
    partials = None
    if c.passes > 1:
        elements = (c.ctas - c.send_ctas - c.intra_ctas) * c.held_tiles * c.tile_m * c.tile_n
        partials = group.world.memory.empty(group.world_rank, (elements,), torch.float32)

    data = workspace.segment.memory[workspace.data_start :].view(a.dtype)
    stored = out.t() if access.transposed else out  # the matrix that the tiles are tiles of
    own: Any = a
    gathered: Any = data
    gradient: Any = dy
    result: Any = stored
    of_a, of_dy = (c.tile_n, c.tile_m) if access.transposed else (c.tile_m, c.tile_n)
    if access.rows.descriptors:
        block = [1, 1, c.tile_k, of_a]
        own = None if access.rows.staged else descriptor(a, [1, 1, m, k], [0, 0, a.stride(0), 1], block)
        strides_of_rows = [rows.half, m * rows.row_stride, rows.row_stride, 1]
        gathered = descriptor(data, [2, size, m, k], strides_of_rows, block)
    if access.dy_uses_tma:
        shape = [1, size, m, n]
        gradient = descriptor(dy, shape, [0, m * dy.stride(0), dy.stride(0), 1], [1, 1, c.tile_k, of_dy])
    if access.out_uses_tma:
        result = descriptor(stored, [1, *stored.shape], [0, stored.stride(0), 1], [1, c.tile_m, c.tile_n])
    call = Call(
        a=Block(a, a.stride(0), a.stride(1)),
        gather=gather_of(group, memory, workspace, a, c),
        n=n,
        partials=partials,
        held_tiles=c.held_tiles,
        join_tiles=c.join_tiles,
        tiling=Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision)),
        **named_constants(
            SENDERS=c.send_ctas, INTRAS=c.intra_ctas, PASSES=c.passes, STAGED=access.rows.staged,
            DIRECT=access.rows.direct, FLAT=access.rows.flat, TRANSPOSED=access.transposed, SCALED=False,
            QUANTIZES=False,
            COPY_ROWS=4, COPY_ELEMENTS=c.copy_bytes // a.element_size(),
        ),
    )  # fmt: skip
    strides = Operands(
        own=Strides(0, a.stride(0), a.stride(1), *constants(access.rows.descriptors, False)),
        gathered=Strides(rows.half, rows.row_stride, 1, *constants(access.rows.descriptors, False)),
        dy=Strides(0, dy.stride(0), dy.stride(1), *constants(access.dy_uses_tma, False)),
        c=Strides(0, stored.stride(0), stored.stride(1), *constants(access.out_uses_tma, False)),
    )
    others = ((0, group.rank * m), ((group.rank + 1) * m, size * m))
    return Launch(
        op=OP,
        group=group,
        kernel=weight_grad_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(size, group.gpus_per_node)),
            own=own,
            gathered=gathered,
            dy=gradient,
            c=result,
            strides=strides,
            call=call,
            **in_heap(group, a, access.rows.direct),
        ),
        options=dict(num_warps=c.warps, num_stages=c.stages),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(plan, workspace.signal_words, workspace.half_bytes),
        uses=memory.uses(workspace, free={"rows": others}),
        inputs=("call.a.data", "own", "dy"),
        results=("c",),
        scratch=() if partials is None else (partials,),
    )
