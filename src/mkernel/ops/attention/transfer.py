"""The roles that move keys and values: `send` to other nodes, `intra` within the node. Both kernels run them, and each
passes its own function to copy rows, COPY_ROWS(comm, call, source, chunk, row, height, STAGED):

    Copy `height` rows of `source`, a `Rows`, to the slot of the chunk's source, starting at row `row` of the slot.
    STAGED: to this rank's own slot, for the network; otherwise to all other ranks of the node that see the chunk. Rows
    beyond `source.count` are filled with zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.copy import reserve_link, wait_link
from mkernel.lang.requests import wait_sent
from mkernel.lang.roles import INTRA, SEND
from mkernel.lang.trace import PUSH_CHUNK, SEND_CHUNK, trace, trace_time
from mkernel.ops.attention.call import head_of
from mkernel.ops.attention.mask import is_seen, is_seen_in_node, keys_of
from mkernel.ops.attention.protocol import (
    chunk_at,
    chunk_offset,
    finish_task,
    notify_chunk,
    post_chunk,
    wait_chunk,
    wait_own_round,
    wait_writable,
)


class Rows(NamedTuple):
    """`count` rows of keys or values, starting at a pointer. FLAT: they are contiguous, and as wide as those of the
    slots. WIDTH: columns of the slots, rounded up to a power of two."""

    pointer: Any
    row_stride: Any
    column_stride: Any
    count: Any
    columns: Any
    FLAT: Any
    WIDTH: Any


@triton.jit
def _copy_own(comm, call, chunk, STAGED: tl.constexpr, COPY_ROWS: tl.constexpr):
    """Copy a chunk of this rank's own keys and values into slots: every TILE_N keys are followed by their values."""
    unit = chunk.round_index // call.rounds.parts
    batch = unit // call.kv_heads
    head = unit % call.kv_heads
    k_start = head_of(call.k, batch, head)
    v_start = head_of(call.v, batch, head)
    for key in range(chunk.key, chunk.key + chunk.height, call.TILE_N):
        rows = tl.minimum(keys_of(call.mask) - key, call.TILE_N)
        row = 2 * (key - chunk.begin)
        k_rows = k_start + tl.cast(key, tl.int64) * call.k.row_stride
        v_rows = v_start + tl.cast(key, tl.int64) * call.v.row_stride
        COPY_ROWS(
            comm, call,
            Rows(k_rows, call.k.row_stride, call.k.column_stride, rows, call.k.columns, call.k.FLAT, call.k.WIDTH),
            chunk, row, call.TILE_N, STAGED,
        )  # fmt: skip
        COPY_ROWS(
            comm, call,
            Rows(v_rows, call.v.row_stride, call.v.column_stride, rows, call.v.columns, call.v.FLAT, call.v.WIDTH),
            chunk, row + call.TILE_N, call.TILE_N, STAGED,
        )  # fmt: skip


@triton.jit
def send(comm, call, first, step, COPY_ROWS: tl.constexpr):
    """Stage this rank's chunks in its own slot, and post them to its counterparts in other nodes. Counted over all
    rounds, this CTA takes chunks first, first + step, and so on. At the end, the network has read all of them: in a
    call of another shape, ranks of this node may write there as soon as this rank has left the epoch."""
    rank = rank_of(comm.context)
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    ELEMENT: tl.constexpr = call.k.pointer.dtype.element_ty.primitive_bitwidth // 8
    chunks = call.rounds.chunks
    posted = tl.cast(-1, tl.int64)
    for round_index in range(call.rounds.count):
        for i in range(1, NODES):
            wait_writable(comm, call.rounds, round_index, (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE, SEND)
        for index in range((first - round_index * chunks % step + step) % step, chunks, step):
            chunk = chunk_at(call.rounds, round_index, rank, index)
            staged = chunk.key < 0
            since = trace_time(comm.context)
            for i in range(1, NODES):
                node = (rank // comm.RANKS_PER_NODE + i) % NODES
                if is_seen_in_node(call.mask, node, rank, chunk.key, chunk.height, comm.RANKS_PER_NODE):
                    if not staged:
                        _copy_own(comm, call, chunk, True, COPY_ROWS)
                        staged = chunk.key >= 0
                    peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
                    posted = tl.maximum(posted, post_chunk(comm, call.rounds, chunk, peer, ELEMENT))
            trace(comm.context, SEND, SEND_CHUNK, rank, index, since)
    if posted >= 0:
        wait_sent(comm.context, posted, SEND)


@triton.jit
def intra(comm, call, first, step, COPY_ROWS: tl.constexpr):
    """Push this rank's chunks to its node, and those of its counterparts in other nodes as they arrive. Counted over
    all chunks that the rank pushes, this CTA takes chunks first, first + step, and so on."""
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    SEVERAL_NODES: tl.constexpr = comm.WORLD_SIZE > comm.RANKS_PER_NODE
    chunks = call.rounds.chunks
    count = chunks * (comm.WORLD_SIZE // comm.RANKS_PER_NODE)  # chunks that this rank pushes in a round
    for round_index in range(call.rounds.count):
        for i in range(1, comm.RANKS_PER_NODE):
            wait_writable(comm, call.rounds, round_index, base + (rank + i) % comm.RANKS_PER_NODE, INTRA)
        if call.rounds.CREDITS and SEVERAL_NODES:
            wait_own_round(comm, call.rounds, round_index, INTRA)
        for item in range((first - round_index * count % step + step) % step, count, step):
            source = (rank + item // chunks * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
            chunk = chunk_at(call.rounds, round_index, source, item % chunks)
            since = trace_time(comm.context)
            if source == rank:
                _copy_own(comm, call, chunk, False, COPY_ROWS)
            elif SEVERAL_NODES:
                node = rank // comm.RANKS_PER_NODE
                if is_seen_in_node(call.mask, node, source, chunk.key, chunk.height, comm.RANKS_PER_NODE):
                    wait_chunk(comm, call.rounds, chunk)
                    since = trace_time(comm.context)
                    _forward(comm, call, chunk, COPY_ROWS)
            trace(comm.context, INTRA, PUSH_CHUNK, source, chunk.index, since)
            for i in range(1, comm.RANKS_PER_NODE):
                peer = base + (rank + i) % comm.RANKS_PER_NODE
                if is_seen(call.mask, peer, source, chunk.key, chunk.height):
                    if call.rounds.PACED:
                        _wait_paced_chunk(comm, call, chunk)
                    notify_chunk(comm, call.rounds, chunk, peer)
            if call.rounds.CREDITS and SEVERAL_NODES:
                if source != rank:
                    finish_task(comm, call.rounds, round_index, INTRA)


@triton.jit
def _forward(comm, call, chunk, COPY_ROWS: tl.constexpr):
    """Push a chunk that has arrived from another node to the other ranks of this node."""
    rank = rank_of(comm.context)
    segment = segment_of(comm.context, rank, call.k.pointer.dtype.element_ty)
    start = segment + tl.multiple_of(chunk_offset(comm, call.rounds, chunk, rank), 16)
    height = 2 * chunk.height
    width = call.rounds.slots.row_stride
    COPY_ROWS(
        comm, call, Rows(start, width, 1, height, width, True, call.k.WIDTH), chunk, 2 * (chunk.key - chunk.begin),
        height, False,
    )  # fmt: skip


@triton.jit
def _wait_paced_chunk(comm, call, chunk):
    """Wait until the emulated link would have transferred a chunk."""
    ELEMENT: tl.constexpr = call.k.pointer.dtype.element_ty.primitive_bitwidth // 8
    size = chunk.height.to(tl.int64) * (call.k.columns + call.v.columns) * ELEMENT
    wait_link(reserve_link(comm.context, size, call.rounds.nanoseconds_per_mib))
