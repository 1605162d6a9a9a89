"""How rows travel: the roles `send` and `intra`, which both Triton kernels that gather rows have.

`call` is the `Call` of either kernel. These functions read its fields `a`, `gather`, DIRECT, FLAT, SCALED, QUANTIZES,
COPY_ROWS, COPY_ELEMENTS and, if SCALED, `scales`.

If the call QUANTIZES, `a` has nothing but the dtype of the rows in the workspace, and the rows are in `scales.wide`.
`send` quantizes them, as it copies them otherwise; `intra` waits for each chunk before it pushes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.copy import Peers, push_rows, wait_paced
from mkernel.lang.device import clock
from mkernel.lang.layout import Buffer, row_of, word_of
from mkernel.lang.matrix import Block
from mkernel.lang.requests import Transfer, wait_sent
from mkernel.lang.roles import INTRA, SEND
from mkernel.lang.scaling import Scales, quantize_rows
from mkernel.lang.trace import PUSH_CHUNK, SEND_CHUNK, trace, trace_time
from mkernel.ops.all_gather_matmul.order import destination_at, forwarded_at
from mkernel.ops.all_gather_matmul.protocol import (
    Chunk,
    Gather,
    GatheredScales,
    notify_chunk,
    post_chunk,
    wait_chunk,
)
from mkernel.runtime.config import Settings
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants
from mkernel.runtime.scaling import Scaling

# For the simulator: scales, which kernels only read.
OF_SCALES = ("call.scales.own.data", "strides.b.scales.data")


class InHeap(NamedTuple):
    """Where own rows are in the symmetric heap, if they are sent from there."""

    segment: Any
    offset: Any  # in elements


@triton.jit
def copy_chunk(comm, call, chunk, origin, peers):
    """Copy a `Chunk` to its offset in the workspaces of some ranks. origin: the `Block` that holds its rows."""
    if call.FLAT:
        push_rows(
            comm.context, Block(origin.data, 0, 1), Block(chunk.offset, 0, 1), 1, chunk.rows * call.gather.k, peers,
            1, call.COPY_ELEMENTS,
        )  # fmt: skip
    else:
        target = Block(chunk.offset, call.gather.rows.row_stride, 1)
        COLUMNS: tl.constexpr = call.COPY_ELEMENTS // call.COPY_ROWS
        push_rows(comm.context, origin, target, chunk.rows, call.gather.k, peers, call.COPY_ROWS, COLUMNS)
    if call.SCALED:
        copy_scales(comm, call, chunk, peers)


@triton.jit
def copy_scales(comm, call, chunk, peers):
    """Copy the scales of a `Chunk` to behind its rows: this rank's from the caller's tensor, others' from the
    workspace, where they came with their rows; and this rank's, too, if they are made there."""
    rank = rank_of(comm.context)
    target = (chunk.offset + call.scales.AT) // 4  # in fp32
    pitch = tl.cast(call.gather.rows.row_stride, tl.int64) // 4
    if call.QUANTIZES:
        source = segment_of(comm.context, rank, tl.float32) + target
        row_stride = pitch
        column_stride = tl.cast(1, tl.int64)
    else:
        source = call.scales.own.data + (chunk.index * call.gather.chunk_rows).to(tl.int64) * call.scales.own.row_stride
        row_stride = tl.cast(call.scales.own.row_stride, tl.int64)
        column_stride = tl.cast(call.scales.own.column_stride, tl.int64)
        if chunk.source != rank:
            source = segment_of(comm.context, rank, tl.float32) + target
            row_stride = pitch
            column_stride = tl.cast(1, tl.int64)
    push_rows(
        comm.context, Block(source, row_stride, column_stride), Block(target, pitch, 1), chunk.rows, call.scales.COUNT,
        peers, call.scales.ROWS, call.scales.COLUMNS,
    )  # fmt: skip


@triton.jit
def quantize_chunk(comm, call, chunk):
    """Quantize a `Chunk` of this rank's rows, with their scales, into its own workspace."""
    rank = rank_of(comm.context)
    pitch = tl.cast(call.gather.rows.row_stride, tl.int64)
    wide = call.scales.wide
    start = wide.data + (chunk.index * call.gather.chunk_rows).to(tl.int64) * wide.row_stride
    rows = segment_of(comm.context, rank, call.a.data.dtype.element_ty) + chunk.offset
    scales = segment_of(comm.context, rank, tl.float32) + (chunk.offset + call.scales.AT) // 4
    quantize_rows(
        Block(start, wide.row_stride, wide.column_stride), Block(rows, pitch, 1), Block(scales, pitch // 4, 1),
        chunk.rows, call.gather.k, call.scales.COUNT == 1,
    )  # fmt: skip


@triton.jit
def row_bytes(call):
    """Bytes of a row that travel: its elements and, with what may lie between them, its scales."""
    if call.SCALED:
        size = call.scales.AT + call.scales.COUNT * 4
    else:
        size = call.gather.k * (call.a.data.dtype.element_ty.primitive_bitwidth // 8)
    return size


@triton.jit
def send_rows(comm, call, in_heap, first, step):
    """Stage this rank's rows in its own workspace, quantized if need be, and post them to its counterparts in the other
    nodes."""
    gather = call.gather
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    element: tl.constexpr = call.a.data.dtype.element_ty.primitive_bitwidth // 8
    ticket = tl.full((), -1, tl.int64)
    # Whatever Triton hoists out of this loop, or out of that of `spread_rows`, stays in registers through all tiles.
    # Compiled for Ampere, this spilled 320 bytes instead of 48.
    for chunk in tl.range(first, gather.chunks, step, disable_licm=True):
        since = trace_time(comm.context)
        row = chunk * gather.chunk_rows
        rows = tl.minimum(gather.m - row, gather.chunk_rows)
        offset = row_of(gather.rows, comm.epoch, rank * gather.m + row)
        source_segment = in_heap.segment
        source = (in_heap.offset + row.to(tl.int64) * call.a.row_stride) * element
        if not call.DIRECT:
            source_segment = segment
            source = offset * element
            if call.QUANTIZES:
                quantize_chunk(comm, call, Chunk(rank, chunk, rows, offset))
            else:
                start = call.a.data + row.to(tl.int64) * call.a.row_stride
                own = Block(start, call.a.row_stride, call.a.column_stride)
                copy_chunk(comm, call, Chunk(rank, chunk, rows, offset), own, Peers(rank, 0, 1, 1))
            notify_chunk(comm, gather, rank, rank, chunk)
        signal = word_of(gather.arrived, comm.epoch, rank, chunk) * 8
        for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
            node_offset = destination_at(i, comm.WORLD_SIZE // comm.RANKS_PER_NODE)
            peer = (rank + node_offset * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
            if call.SCALED:
                size = (rows - 1).to(tl.int64) * gather.rows.row_stride * element + row_bytes(call)
            else:
                size = ((rows - 1).to(tl.int64) * gather.rows.row_stride + gather.k) * element
            transfer = Transfer(peer, source_segment, source, segment, offset * element, size)
            ticket = post_chunk(comm, transfer, signal)
        trace(comm.context, SEND, SEND_CHUNK, rank, chunk, since)
    if call.DIRECT:
        # the caller may overwrite a as soon as the launch has finished, so the network must have read it by then
        if ticket >= 0:
            wait_sent(comm.context, ticket, SEND)


@triton.jit
def spread_rows(comm, call, first, step):
    """Push this rank's rows to its node, then those of its counterparts in other nodes as they arrive."""
    gather = call.gather
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    local = rank % comm.RANKS_PER_NODE
    DTYPE: tl.constexpr = call.a.data.dtype.element_ty
    PEERS: tl.constexpr = comm.RANKS_PER_NODE - 1
    workspace = segment_of(comm.context, rank, DTYPE)
    start = clock()
    sent = tl.full((), 0, tl.int64)
    chunks = gather.chunks * (comm.WORLD_SIZE // comm.RANKS_PER_NODE)
    for item in tl.range(first, chunks, step, disable_licm=True):
        chunk, node_offset = forwarded_at(item, gather.chunks, comm.WORLD_SIZE // comm.RANKS_PER_NODE)
        source_rank = (rank + node_offset * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        row = chunk * gather.chunk_rows
        rows = tl.minimum(gather.m - row, gather.chunk_rows)
        offset = row_of(gather.rows, comm.epoch, source_rank * gather.m + row)
        source = call.a.data + row.to(tl.int64) * call.a.row_stride
        row_stride = tl.cast(call.a.row_stride, tl.int64)
        column_stride = tl.cast(call.a.column_stride, tl.int64)
        staged = source_rank != rank
        if call.QUANTIZES:
            staged = source_rank >= 0
        if staged:
            wait_chunk(comm, gather, source_rank, chunk, INTRA)
            source = workspace + offset
            row_stride = tl.cast(gather.rows.row_stride, tl.int64)
            column_stride = tl.cast(1, tl.int64)
        since = trace_time(comm.context)
        copy_chunk(
            comm, call, Chunk(source_rank, chunk, rows, offset), Block(source, row_stride, column_stride),
            Peers(base, local + 1, comm.RANKS_PER_NODE, PEERS),
        )  # fmt: skip
        if call.gather.PACED:
            if call.SCALED:
                sent += rows.to(tl.int64) * row_bytes(call) * PEERS
            else:
                sent += rows.to(tl.int64) * gather.k * PEERS * (DTYPE.primitive_bitwidth // 8)
            wait_paced(start, sent, gather.nanoseconds_per_mib)
        trace(comm.context, INTRA, PUSH_CHUNK, source_rank, chunk, since)
        for i in range(1, comm.RANKS_PER_NODE):
            notify_chunk(comm, gather, base + (local + i) % comm.RANKS_PER_NODE, source_rank, chunk)


def gather_of(group: Group, memory: Layout, workspace: Workspace, a: torch.Tensor, config: Settings) -> Gather:
    """The `Gather` of a call, for the kernel."""
    m, k = a.shape
    link = group.world.links.nvlink
    paced = link is not None and config.intra_ctas > 0
    rate = (link or 0) / max(config.intra_ctas, 1)  # GB/s of one copying CTA
    return Gather(
        m, k, config.chunk_rows, -(-m // config.chunk_rows), memory.words_in(workspace, "arrived"),
        memory.buffer_in(workspace, "rows"), round(2**20 / rate) if paced else 0, *constants(paced),
    )  # fmt: skip


def scales_of(
    scaling: Scaling | None, scale_at: int, out: torch.Tensor | None, a: torch.Tensor | None = None
) -> GatheredScales | None:  # fmt: skip
    """The scales of rows that are gathered, for the kernel. out: the caller's tensor for those of all rows, if any. a:
    the rows, if the kernel quantizes them."""
    if scaling is None:
        return None
    columns = min(1 << (scaling.count - 1).bit_length(), 128)
    own = scaling.of_a(0)
    return GatheredScales(
        None if own is None else Block(own.data, own.row, own.block),
        Block(out, out.stride(0) if out is not None else 0, 1),
        None if a is None else Block(a, a.stride(0), a.stride(1)),
        *constants(scale_at, scaling.count, max(512 // columns, 4), columns),
    )  # fmt: skip


def scales_in_workspace(scaling: Scaling, workspace: Workspace, rows: Buffer, scale_at: int) -> Scales:
    """The scales of the rows in the workspace, for the kernel. One part for each half."""
    memory = workspace.segment.memory[workspace.data_start + scale_at :]
    data = memory[: memory.numel() // 4 * 4].view(torch.float32)
    return scaling.of_gathered(data, rows.half // 4, rows.row_stride // 4)


def in_heap(group: Group, a: torch.Tensor, direct: bool) -> dict[str, int]:
    """Where a is in the symmetric heap, if the network reads it there: the arguments of a kernel for its `InHeap`."""
    found = group.heap.find(a) if direct else None
    return dict(heap_segment=found[0].number if found else 0, heap_offset=found[1] // a.element_size() if found else 0)
