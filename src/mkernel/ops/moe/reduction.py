"""The combine: results of the experts return to the rank of their token, as a weighted sum in a fixed order.

It has three steps, each over chunks of a source's tokens:

- `sum_chunk`, on the ranks of the experts: multiplies the rows that a token has on this rank by their weights and sums
  them, in the order of the token's slots. The result is one row per token and rank, a partial sum, in this rank's
  memory.
- `relay_chunk`, between nodes: the counterpart of the token's rank sums the partial sums of its node, in rank order,
  and sends the result. One row per token and node crosses the network.
- `collect_chunk`, on the token's rank: sums what other nodes sent and the partial sums of its own node, which it reads
  over NVLink, in the order of nodes and ranks.

All sums are in fp32, and are rounded to the type of the rows when they are stored for another rank or sent. Which rows
exist follows from the routing alone, so the same input gives the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.copy import reserve_link, wait_link
from mkernel.lang.layout import row_of, word_of
from mkernel.lang.matrix import Block
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify, wait
from mkernel.lang.trace import GATHER, REDUCE, SEND_CHUNK, TILES, trace, trace_time
from mkernel.ops.moe import protocol
from mkernel.ops.moe.kinds import BACK, RETURNED
from mkernel.ops.moe.protocol import HEADER, signal_of
from mkernel.ops.moe.routing import SUMMARY, named_in, table_of, tokens_of

if TYPE_CHECKING:
    from mkernel.runtime.group import Group, Workspace
    from mkernel.runtime.layout import Layout


class Combine(NamedTuple):
    """What to combine. partial, send, recv: `Buffer`s of the workspace, see protocol.py."""

    y: Any  # Block: the results of this rank's experts
    out: Any  # Block: the result
    columns: Any
    partial: Any
    send: Any
    recv: Any
    ROWS: Any  # rows that a CTA has in flight
    COLUMNS: Any  # columns that a CTA has in flight
    PACED: Any  # whether links are emulated


def combine_of(
    group: Group, memory: Layout, workspace: Workspace, y: torch.Tensor, out: torch.Tensor, copy_bytes: int
) -> Combine:
    """The `Combine` of a launch. y: the results of this rank's experts."""
    return Combine(
        y=Block(y, y.stride(0), y.stride(1)),
        out=Block(out, out.stride(0), out.stride(1)),
        columns=y.shape[1],
        partial=memory.buffer_in(workspace, "partial"),
        send=memory.buffer_in(workspace, "combine_send"),
        recv=memory.buffer_in(workspace, "combine_recv"),
        **protocol.copies_of(group, copy_bytes, y.dtype),
    )


@triton.jit
def combine_order(comm, item, chunks):
    """(source, chunk) of an item: first the tokens of other nodes, chunk by chunk, then those of this node."""
    others: tl.constexpr = comm.WORLD_SIZE - comm.RANKS_PER_NODE
    first = (rank_of(comm.context) // comm.RANKS_PER_NODE + 1) * comm.RANKS_PER_NODE
    far = item < chunks * others
    near_item = item - chunks * others
    source = tl.where(far, item % max(others, 1), others + near_item % comm.RANKS_PER_NODE)
    chunk = tl.where(far, item // max(others, 1), near_item // comm.RANKS_PER_NODE)
    return (first + source) % comm.WORLD_SIZE, chunk


@triton.jit
def weights_of(comm, routing, batch, source):
    """Pointer to the weights in the published table of a rank."""
    weights = table_of(comm, routing, source) + HEADER
    if routing.HAS_IDS:
        weights += batch.max_tokens * routing.K
    return weights.to(tl.pointer_type(tl.float32))


@triton.jit
def _load_rows(block, row, j, columns):
    """Columns j of some rows, in fp32; zeros for row -1."""
    pointers = block.data + row.to(tl.int64)[:, None] * block.row_stride + j.to(tl.int64) * block.column_stride
    return tl.load(pointers, mask=(row >= 0)[:, None] & (j < columns), other=0.0).to(tl.float32)


@triton.jit
def _factor(weights, token, slot, mask, K: tl.constexpr):
    """The weights of some tokens for the expert in `slot`."""
    return tl.load(weights + token * K + slot, mask=mask, other=0.0)


@triton.jit
def sum_chunk(comm, routing, combine, batch, source, chunk):
    """Sum the rows that this rank's experts computed for a chunk of `source`'s tokens. y and the weights must be
    complete, and all ranks of my node must have entered the previous epoch."""
    K: tl.constexpr = routing.K
    ROWS: tl.constexpr = combine.ROWS
    COLUMNS: tl.constexpr = combine.COLUMNS
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    rank = rank_of(comm.context)
    weights = weights_of(comm, routing, batch, source)
    first = source * batch.max_tokens
    destinations = routing.tables.destinations + first.to(tl.int64) * K
    partial = segment_of(comm.context, rank, DTYPE) + row_of(combine.partial, comm.epoch, first)
    end = tl.minimum((chunk + 1) * routing.CHUNK, tokens_of(routing.tables, source))
    since = trace_time(comm.context)
    for start in range(chunk * routing.CHUNK, end, ROWS):
        i = start + tl.arange(0, ROWS)
        for column in range(0, combine.columns, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            mine = i < 0
            # each thread loads what it needs to know about a token: exchanging it between threads takes longer
            for slot in tl.static_range(K):
                row = tl.load(destinations + i * K + slot, mask=i < end, other=-1)
                # weights of other ranks' rows and of dropped ids can be anything
                factor = _factor(weights, i, slot, row >= 0, K)
                total += factor[:, None] * _load_rows(combine.y, row, j, combine.columns)
                mine |= row >= 0
            target = partial + i.to(tl.int64)[:, None] * combine.partial.row_stride + j
            tl.store(target, total.to(DTYPE), mask=mine[:, None] & (j < combine.columns))
    trace(comm.context, TILES, REDUCE, source, chunk, since)
    notify(signal_of(comm, rank, batch.signals.returned, source, chunk), comm.epoch)


@triton.jit
def _wait_partials(comm, signals, source, chunk):
    """Wait until the partial sums of all ranks of my node for a chunk of `source`'s tokens are ready; false if the
    group gave up."""
    base = rank_of(comm.context) // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    ready = tl.full((), True, tl.int1)
    for peer in range(base, base + comm.RANKS_PER_NODE):
        signal = signal_of(comm, peer, signals.returned, source, chunk)
        ready &= wait(comm.context, signal, comm.epoch, COMPUTE, RETURNED, peer, chunk)
    return ready


@triton.jit
def _ids_at(routing, batch, source, token, end):
    """The ids of some tokens, [tokens, SLOTS]; -1 from token `end` on and beyond K."""
    slot = tl.arange(0, routing.SLOTS)[None, :]
    offsets = (source * batch.max_tokens).to(tl.int64) * routing.K + token[:, None] * routing.K + slot
    inside = (token < end)[:, None] & (slot < routing.K)
    return tl.load(routing.tables.all_topk_ids + offsets, mask=inside, other=-1)


@triton.jit
def _wait_link(comm, routing, combine, batch, source, chunk, end):
    """Wait as long as a paced link needs for the rows of a chunk that come from other ranks of the node."""
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    ids = _ids_at(routing, batch, source, chunk * routing.CHUNK + tl.arange(0, routing.CHUNK), end)
    rows = tl.full((), 0, tl.int64)
    first_experts = routing.tables.summary + SUMMARY + routing.RANKS
    for peer in range(base, base + comm.RANKS_PER_NODE):
        named = named_in(ids, tl.load(first_experts + peer), tl.load(first_experts + peer + 1))
        rows += tl.where(peer == rank, 0, tl.sum(named)).to(tl.int64)
    size = rows * combine.columns * (DTYPE.primitive_bitwidth // 8)
    wait_link(reserve_link(comm.context, size, batch.nanoseconds_per_mib))


@triton.jit
def _ranks_named(comm, routing, batch, source, token, end):
    """For each token, a bit for each rank of my node that has one of its experts."""
    tl.static_assert(comm.RANKS_PER_NODE <= 64)
    ids = _ids_at(routing, batch, source, token, end)
    bits = tl.zeros(token.shape, tl.int64)
    base = rank_of(comm.context) // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    first_experts = routing.tables.summary + SUMMARY + routing.RANKS + base
    for peer in range(comm.RANKS_PER_NODE):
        named = named_in(ids, tl.load(first_experts + peer), tl.load(first_experts + peer + 1))
        bits |= named.to(tl.int64) << peer
    return bits


@triton.jit
def _add_node(comm, combine, total, bits, first, i, j):
    """Add the partial sums of the ranks of my node, in rank order: row first + i of each rank whose bit is set."""
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    base = rank_of(comm.context) // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    for peer in tl.static_range(comm.RANKS_PER_NODE):
        partial = segment_of(comm.context, base + peer, DTYPE) + row_of(combine.partial, comm.epoch, first)
        row = tl.where(bits >> peer & 1 == 1, i, -1)
        total += _load_rows(Block(partial, combine.partial.row_stride, 1), row, j, combine.columns)
    return total


@triton.jit
def _sum_node(comm, routing, combine, batch, away, chunk, end):
    """Sum the partial sums of my node for a chunk of the tokens of my counterpart `away` nodes on, and store the sums
    in contiguous rows that the network can read."""
    ROWS: tl.constexpr = combine.ROWS
    COLUMNS: tl.constexpr = combine.COLUMNS
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    rank = rank_of(comm.context)
    source = (rank + away * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    first = source * batch.max_tokens
    sums = segment_of(comm.context, rank, DTYPE) + row_of(combine.send, comm.epoch, (away - 1) * batch.max_tokens)
    for start in range(chunk * routing.CHUNK, end, ROWS):
        i = start + tl.arange(0, ROWS)
        number = tl.load(routing.tables.recv_index + first + i, mask=i < end, other=-1)
        bits = _ranks_named(comm, routing, batch, source, i, end)
        for column in range(0, combine.columns, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            total = _add_node(comm, combine, tl.zeros((ROWS, COLUMNS), tl.float32), bits, first, i, j)
            target = sums + number.to(tl.int64)[:, None] * combine.send.row_stride + j
            tl.store(target, total.to(DTYPE), mask=(number >= 0)[:, None] & (j < combine.columns))


@triton.jit
def _post_back(comm, transfer, signal, chunk):
    """Post the transfer of my node's sums for a chunk to the tokens' rank, with the `back` signal to raise there."""
    post(comm.context, transfer, signal, comm.epoch, COMPUTE)


@triton.jit
def relay_chunk(comm, routing, combine, batch, away, chunk):
    """Sum what my node computed for a chunk of the tokens of my counterpart `away` nodes on, and send it. That node
    must have entered the previous epoch."""
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    element: tl.constexpr = DTYPE.primitive_bitwidth // 8
    rank = rank_of(comm.context)
    source = (rank + away * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    end = tl.minimum((chunk + 1) * routing.CHUNK, tokens_of(routing.tables, source))
    token = chunk * routing.CHUNK + tl.arange(0, routing.CHUNK)
    numbers = tl.load(routing.tables.recv_index + source * batch.max_tokens + token, mask=token < end, other=-1)
    count = tl.sum((numbers >= 0).to(tl.int64))
    first = tl.min(tl.where(numbers >= 0, numbers, 0x7FFFFFFF)).to(tl.int64)
    if count > 0:
        if _wait_partials(comm, batch.signals, source, chunk):
            since = trace_time(comm.context)
            _sum_node(comm, routing, combine, batch, away, chunk, end)
            if combine.PACED:
                _wait_link(comm, routing, combine, batch, source, chunk, end)
            segment = tl.load(comm.context + SEGMENT)
            others = comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1
            send_offset = row_of(combine.send, comm.epoch, (away - 1) * batch.max_tokens + first)
            recv_offset = row_of(combine.recv, comm.epoch, (others - away) * batch.max_tokens + first)
            size = ((count - 1) * combine.send.row_stride + combine.columns) * element
            transfer = Transfer(source, segment, send_offset * element, segment, recv_offset * element, size)
            signal = word_of(batch.signals.back, comm.epoch, rank, chunk) * 8
            _post_back(comm, transfer, signal, chunk)
            trace(comm.context, TILES, SEND_CHUNK, source, chunk, since)


@triton.jit
def _wait_back(comm, signals, rank, peer, chunk):
    """Wait until the sums of the peer's node for a chunk of my tokens have arrived; false if the group gave up. rank:
    mine."""
    signal = signal_of(comm, rank, signals.back, peer, chunk)
    return wait(comm.context, signal, comm.epoch, COMPUTE, BACK, peer, chunk)


@triton.jit
def _wait_sums(comm, routing, batch, chunk, end):
    """Wait for the sums of all ranks of my node and of all other nodes for a chunk of my tokens; false if the group
    gave up."""
    rank = rank_of(comm.context)
    arrived = _wait_partials(comm, batch.signals, rank, chunk)
    for away in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        token = chunk * routing.CHUNK + tl.arange(0, routing.CHUNK)
        send_index = routing.tables.send_index + (away - 1) * batch.max_tokens
        if tl.max(tl.load(send_index + token, mask=token < end, other=-1)) >= 0:
            peer = (rank + away * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
            arrived &= _wait_back(comm, batch.signals, rank, peer, chunk)
    return arrived


@triton.jit
def collect_chunk(comm, routing, combine, batch, chunk):
    """Sum what all nodes computed for a chunk of my tokens, in node order, and store the result; NaN if the group gave
    up."""
    ROWS: tl.constexpr = combine.ROWS
    COLUMNS: tl.constexpr = combine.COLUMNS
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    nodes: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    rank = rank_of(comm.context)
    end = tl.minimum((chunk + 1) * routing.CHUNK, tokens_of(routing.tables, rank))
    missing = tl.where(_wait_sums(comm, routing, batch, chunk, end), 0.0, float("nan"))
    since = trace_time(comm.context)
    if combine.PACED:
        _wait_link(comm, routing, combine, batch, rank, chunk, end)
    for start in range(chunk * routing.CHUNK, end, ROWS):
        i = start + tl.arange(0, ROWS)
        bits = _ranks_named(comm, routing, batch, rank, i, end)
        for column in range(0, combine.columns, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for node in tl.static_range(nodes):
                away = (node - rank // comm.RANKS_PER_NODE + nodes) % nodes
                if away == 0:
                    total = _add_node(comm, combine, total, bits, rank * batch.max_tokens, i, j)
                else:
                    area = (away - 1) * batch.max_tokens
                    number = tl.load(routing.tables.send_index + area + i, mask=i < end, other=-1)
                    recv = segment_of(comm.context, rank, DTYPE) + row_of(combine.recv, comm.epoch, area)
                    total += _load_rows(Block(recv, combine.recv.row_stride, 1), number, j, combine.columns)
            pointers = combine.out.data + i.to(tl.int64)[:, None] * combine.out.row_stride
            pointers += j.to(tl.int64) * combine.out.column_stride
            inside = (i < end)[:, None] & (j < combine.columns)
            tl.store(pointers, (total + missing).to(combine.out.data.dtype.element_ty), mask=inside)
    trace(comm.context, TILES, GATHER, rank, chunk, since)
