"""Bringing the experts' results back: a weighted sum at the token's rank, in a fixed order.

Three steps, each over chunks of a source's tokens:

- `sum_chunk`, on the ranks of the experts: the rows that a token has on this rank, times their weights, summed in the
  order of the token's slots. One row per token and rank, in this rank's memory (a partial sum).
- `relay_chunk`, between nodes: the counterpart of the token's rank sums the partial sums of the ranks of its node, in
  rank order, and sends the sum. One row per token and node crosses the network.
- `collect_chunk`, on the token's rank: the sums of other nodes and the partial sums of the ranks of its own node, read
  over NVLink, summed in the order of nodes and ranks.

All sums are fp32. What is handed on, in memory or over a link, is rounded to the type of the rows. Which rows there are
follows from the routing alone, so the same input gives the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.copy import await_link, reserve_link
from mkernel.lang.layout import row_of, word_of
from mkernel.lang.matrix import Block
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify, wait
from mkernel.lang.trace import GATHER, REDUCE, SEND_CHUNK, TILES, trace, trace_time
from mkernel.ops.moe.kinds import BACK, RETURNED
from mkernel.ops.moe.protocol import HEADER, signal_of
from mkernel.ops.moe.routing import SUMMARY, named_in, table_of, tokens_of


class Combine(NamedTuple):
    """What is combined. partial, send, recv: `Buffer`s of the workspace, see protocol.py."""

    y: Any  # Block: what this rank's experts made of their rows
    out: Any  # Block: the result
    columns: Any
    partial: Any
    send: Any
    recv: Any
    ROWS: Any  # rows and columns that a CTA has in flight
    COLUMNS: Any
    PACED: Any  # links are emulated


@triton.jit
def combine_order(comm, item, chunks):
    """(source, chunk): the tokens of other nodes first, chunk by chunk, then those of this node."""
    others: tl.constexpr = comm.WORLD_SIZE - comm.RANKS_PER_NODE
    first = (rank_of(comm.context) // comm.RANKS_PER_NODE + 1) * comm.RANKS_PER_NODE
    far = item < chunks * others
    left = item - chunks * others
    source = tl.where(far, item % max(others, 1), others + left % comm.RANKS_PER_NODE)
    chunk = tl.where(far, item // max(others, 1), left // comm.RANKS_PER_NODE)
    return (first + source) % comm.WORLD_SIZE, chunk


@triton.jit
def _weights_of(comm, routing, batch, source):
    """Pointer to the weights in the published table of a rank."""
    weights = table_of(comm, routing, source) + HEADER
    if routing.HAS_IDS:
        weights += batch.max_tokens * routing.K
    return weights.to(tl.pointer_type(tl.float32))


@triton.jit
def _rows(block, line, j, columns):
    """Columns j of some rows in fp32; zeros of row -1."""
    pointers = block.data + line.to(tl.int64)[:, None] * block.row_stride + j.to(tl.int64) * block.column_stride
    return tl.load(pointers, mask=(line >= 0)[:, None] & (j < columns), other=0.0).to(tl.float32)


@triton.jit
def _factor(weights, token, slot, mask, K: tl.constexpr):
    """The weights of some tokens' experts, K of each token, in a slot."""
    return tl.load(weights + token * K + slot, mask=mask, other=0.0)


@triton.jit
def sum_chunk(comm, routing, combine, batch, source, chunk):
    """Sum what this rank's experts made of a chunk of `source`'s tokens. y and the weights must be here;
    all ranks of my node must have entered the epoch before this one."""
    K: tl.constexpr = routing.K
    ROWS: tl.constexpr = combine.ROWS
    COLUMNS: tl.constexpr = combine.COLUMNS
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    rank = rank_of(comm.context)
    weights = _weights_of(comm, routing, batch, source)
    first = source * batch.max_tokens
    goes = routing.tables.destinations + first.to(tl.int64) * K
    partial = segment_of(comm.context, rank, DTYPE) + row_of(combine.partial, comm.epoch, first)
    end = tl.minimum((chunk + 1) * routing.CHUNK, tokens_of(routing.tables, source))
    since = trace_time(comm.context)
    for row in range(chunk * routing.CHUNK, end, ROWS):
        i = row + tl.arange(0, ROWS)
        for column in range(0, combine.columns, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            mine = i < 0
            # each thread loads what it has to know of a token: to ask others for it takes longer
            for slot in tl.static_range(K):
                line = tl.load(goes + i * K + slot, mask=i < end, other=-1)
                # weights of rows that are not here, or nowhere, may be anything
                factor = _factor(weights, i, slot, line >= 0, K)
                total += factor[:, None] * _rows(combine.y, line, j, combine.columns)
                mine |= line >= 0
            target = partial + i.to(tl.int64)[:, None] * combine.partial.row_stride + j
            tl.store(target, total.to(DTYPE), mask=mine[:, None] & (j < combine.columns))
    trace(comm.context, TILES, REDUCE, source, chunk, since)
    notify(signal_of(comm, rank, batch.signals.returned, source, chunk), comm.epoch)


@triton.jit
def _wait_partials(comm, signals, source, chunk):
    """Wait until all ranks of my node have their partial sums of a chunk of `source`'s tokens ready; false if the group
    gave up."""
    base = rank_of(comm.context) // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    here = tl.full((), True, tl.int1)
    for peer in range(base, base + comm.RANKS_PER_NODE):
        signal = signal_of(comm, peer, signals.returned, source, chunk)
        here &= wait(comm.context, signal, comm.epoch, COMPUTE, RETURNED, peer, chunk)
    return here


@triton.jit
def _ids_at(routing, batch, source, token, end):
    """The ids of some tokens, [tokens, SLOTS]; -1 from token `end` on and beyond K."""
    slot = tl.arange(0, routing.SLOTS)[None, :]
    places = (source * batch.max_tokens).to(tl.int64) * routing.K + token[:, None] * routing.K + slot
    inside = (token < end)[:, None] & (slot < routing.K)
    return tl.load(routing.tables.all_topk_ids + places, mask=inside, other=-1)


@triton.jit
def _wait_link(comm, routing, combine, batch, source, chunk, end):
    """Wait as long as a paced link takes for the rows of a chunk that come from other ranks of the node."""
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
    await_link(reserve_link(comm.context, size, batch.nanoseconds_per_mib))


@triton.jit
def _ranks_named(comm, routing, batch, source, token, end):
    """A bit for each rank of my node that has an expert of a token."""
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
    """Add the partial sums of the ranks of my node, in rank order: rows first + i, where a bit says that a rank has
    one."""
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    base = rank_of(comm.context) // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    for peer in tl.static_range(comm.RANKS_PER_NODE):
        partial = segment_of(comm.context, base + peer, DTYPE) + row_of(combine.partial, comm.epoch, first)
        line = tl.where(bits >> peer & 1 == 1, i, -1)
        total += _rows(Block(partial, combine.partial.row_stride, 1), line, j, combine.columns)
    return total


@triton.jit
def _sum_node(comm, routing, combine, batch, away, chunk, end):
    """Sum the partial sums of my node for a chunk of the tokens of my counterpart `away` nodes on, where the network
    can read them, one behind the other."""
    ROWS: tl.constexpr = combine.ROWS
    COLUMNS: tl.constexpr = combine.COLUMNS
    DTYPE: tl.constexpr = combine.y.data.dtype.element_ty
    rank = rank_of(comm.context)
    source = (rank + away * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    first = source * batch.max_tokens
    sums = segment_of(comm.context, rank, DTYPE) + row_of(combine.send, comm.epoch, (away - 1) * batch.max_tokens)
    for row in range(chunk * routing.CHUNK, end, ROWS):
        i = row + tl.arange(0, ROWS)
        number = tl.load(routing.tables.recv_index + first + i, mask=i < end, other=-1)
        bits = _ranks_named(comm, routing, batch, source, i, end)
        for column in range(0, combine.columns, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            total = _add_node(comm, combine, tl.zeros((ROWS, COLUMNS), tl.float32), bits, first, i, j)
            target = sums + number.to(tl.int64)[:, None] * combine.send.row_stride + j
            tl.store(target, total.to(DTYPE), mask=(number >= 0)[:, None] & (j < combine.columns))


@triton.jit
def _post_back(comm, transfer, signal, chunk):
    """Ask the network for the transfer of my node's sums for a chunk, and for their signal at the tokens' rank."""
    post(comm.context, transfer, signal, comm.epoch, COMPUTE)


@triton.jit
def relay_chunk(comm, routing, combine, batch, away, chunk):
    """Sum what my node made of a chunk of the tokens of my counterpart `away` nodes on, and send it. That
    node must have entered the epoch before this one."""
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
    """Wait for the sums of the peer's node for a chunk of my tokens; false if the group gave up. rank: mine."""
    signal = signal_of(comm, rank, signals.back, peer, chunk)
    return wait(comm.context, signal, comm.epoch, COMPUTE, BACK, peer, chunk)


@triton.jit
def _wait_sums(comm, routing, batch, chunk, end):
    """Wait for all that other ranks and nodes have summed for a chunk of my tokens; false if the group gave up."""
    rank = rank_of(comm.context)
    here = _wait_partials(comm, batch.signals, rank, chunk)
    for away in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        token = chunk * routing.CHUNK + tl.arange(0, routing.CHUNK)
        send_index = routing.tables.send_index + (away - 1) * batch.max_tokens
        if tl.max(tl.load(send_index + token, mask=token < end, other=-1)) >= 0:
            peer = (rank + away * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
            here &= _wait_back(comm, batch.signals, rank, peer, chunk)
    return here


@triton.jit
def collect_chunk(comm, routing, combine, batch, chunk):
    """Sum what all nodes made of a chunk of my tokens, in the order of nodes."""
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
    for row in range(chunk * routing.CHUNK, end, ROWS):
        i = row + tl.arange(0, ROWS)
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
                    total += _rows(Block(recv, combine.recv.row_stride, 1), number, j, combine.columns)
            pointers = combine.out.data + i.to(tl.int64)[:, None] * combine.out.row_stride
            pointers += j.to(tl.int64) * combine.out.column_stride
            inside = (i < end)[:, None] & (j < combine.columns)
            tl.store(pointers, (total + missing).to(combine.out.data.dtype.element_ty), mask=inside)
    trace(comm.context, TILES, GATHER, rank, chunk, since)
