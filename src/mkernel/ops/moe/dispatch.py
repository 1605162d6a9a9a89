"""Dispatch: tokens go to the ranks of their experts, and are put where the grouped GEMM reads them.

`_stage_tokens` copies a rank's tokens to where its node finds them, in the rank's own memory; `_send_tokens` sends
other nodes those that they need, to the rank's counterpart there. `_place_tokens` fetches the tokens that name an
expert of this rank, each once, and stores each once for every row that it makes; routing.py says where.
Chunks of tokens are signalled where they lie, and the ranks of the node look there, over NVLink.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.copy import await_link, reserve_link
from mkernel.lang.layout import row_of, word_of
from mkernel.lang.matrix import Block
from mkernel.lang.order import arrival_order
from mkernel.lang.requests import Transfer
from mkernel.lang.roles import COMPUTE, INTRA, SEND
from mkernel.lang.signals import notify
from mkernel.lang.trace import GATHER, PUSH_CHUNK, SEND_CHUNK, trace, trace_time
from mkernel.ops.moe.protocol import (
    TOKENS,
    announce,
    announce_node,
    holder_of,
    notify_held,
    post_held,
    signal_of,
    wait_counted,
    wait_held,
    wait_node_entered,
    wait_numbered,
    wait_other_nodes_entered,
)
from mkernel.ops.moe.routing import (
    FIRST_EXPERT,
    OK,
    STATUS,
    count_rows,
    counted_last,
    ids_of,
    lay_out_rows,
    number_crossings,
    publish,
    table_of,
    wait_routing,
)
from mkernel.ops.moe.schedule import schedule_blocks


class Roles(NamedTuple):
    """CTAs of each role, all constants. The first SENDERS CTAs send to other nodes; the next INTRAS place tokens of
    their own rank, the first FAR_INTRAS of these also those of other nodes, the next NEAR_INTRAS those of the node."""

    SENDERS: Any
    INTRAS: Any
    NEAR_INTRAS: Any
    FAR_INTRAS: Any


class Dispatch(NamedTuple):
    """What is dispatched, and where it goes. staged, send, recv: `Buffer`s of the workspace, see protocol.py."""

    x: Any  # Block: this rank's tokens
    ids: Any  # Block: their experts
    weights: Any  # Block: the experts' weights; None if tables are published without
    rows: Any  # Block: the rows of this rank's experts, one expert behind the other
    hidden: Any  # elements of a token
    staged: Any
    send: Any
    recv: Any
    roles: Any  # Roles
    ROWS: Any  # rows and columns that a CTA has in flight
    COLUMNS: Any
    PACED: Any  # links are emulated
    TILE_M: Any  # rows of a block
    GROUP: Any  # blocks of a group, about
    COUNTERS: Any  # of a block
    COMBINES: Any  # results come back in the same launch: weights are published, and `settled` signals each chunk


@triton.jit
def _copy_tokens(dispatch, target, token, end, numbers):
    """Copy tokens token..end-1 to rows of `target`: those of their own numbers; or, unless it is None, of `numbers`,
    and tokens with the number -1 nowhere."""
    for row in range(token, end, dispatch.ROWS):
        i = row + tl.arange(0, dispatch.ROWS)
        line = i
        if numbers is not None:
            line = tl.load(numbers + i, mask=i < end, other=-1)
        for column in range(0, dispatch.hidden, dispatch.COLUMNS):
            j = column + tl.arange(0, dispatch.COLUMNS)[None, :]
            inside = ((i < end) & (line >= 0))[:, None] & (j < dispatch.hidden)
            pointers = dispatch.x.data + i.to(tl.int64)[:, None] * dispatch.x.row_stride
            values = tl.load(pointers + j.to(tl.int64) * dispatch.x.column_stride, mask=inside)
            tl.store(target.data + line.to(tl.int64)[:, None] * target.row_stride + j, values, mask=inside)


@triton.jit
def _stage_tokens(comm, routing, dispatch, batch, first, step):
    """Copy this rank's tokens to where the ranks of its node can fetch them. That needs no routing table: it is done
    while these are on their way."""
    DTYPE: tl.constexpr = dispatch.x.data.dtype.element_ty
    rank = rank_of(comm.context)
    staged = segment_of(comm.context, rank, DTYPE) + row_of(dispatch.staged, comm.epoch, 0)
    if wait_node_entered(comm, batch.signals, comm.epoch - 1, INTRA):
        for chunk in range(first, tl.cdiv(batch.tokens, routing.CHUNK), step):
            since = trace_time(comm.context)
            end = tl.minimum((chunk + 1) * routing.CHUNK, batch.tokens)
            target = Block(staged, dispatch.staged.row_stride, 1)
            _copy_tokens(dispatch, target, chunk * routing.CHUNK, end, None)
            trace(comm.context, INTRA, PUSH_CHUNK, rank, chunk, since)
            notify_held(comm, batch.signals, rank, chunk)


@triton.jit
def _send_chunk(comm, routing, dispatch, batch, away, chunk, tokens):
    """Send those tokens of a chunk that the node `away` nodes on needs, if there are any: copied to where the network
    can read them, one behind the other, and one request."""
    DTYPE: tl.constexpr = dispatch.x.data.dtype.element_ty
    element: tl.constexpr = DTYPE.primitive_bitwidth // 8
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    send_index = routing.tables.send_index + (away - 1) * batch.max_tokens
    token = chunk * routing.CHUNK
    end = tl.minimum(token + routing.CHUNK, tokens)
    i = token + tl.arange(0, routing.CHUNK)
    number = tl.load(send_index + i, mask=i < end, other=-1)
    count = tl.sum((number >= 0).to(tl.int64))
    first = tl.min(tl.where(number >= 0, number, 0x7FFFFFFF)).to(tl.int64)
    if count > 0:
        row_stride = dispatch.send.row_stride
        send_offset = row_of(dispatch.send, comm.epoch, (away - 1) * batch.max_tokens)
        target = Block(segment_of(comm.context, rank, DTYPE) + send_offset, row_stride, 1)
        _copy_tokens(dispatch, target, token, end, send_index)
        others = comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1
        recv_offset = row_of(dispatch.recv, comm.epoch, (others - away) * batch.max_tokens)
        begin = first * row_stride
        size = ((count - 1) * row_stride + dispatch.hidden) * element
        signal = word_of(batch.signals.held, comm.epoch, rank, chunk) * 8
        peer = (rank + away * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        transfer = Transfer(
            peer, segment, (send_offset + begin) * element, segment, (recv_offset + begin) * element, size
        )
        post_held(comm, transfer, signal)


@triton.jit
def _send_tokens(comm, routing, dispatch, batch, first, step):
    """Send to each other node the tokens that it needs. The first sender numbers all tokens; their chunks go round the
    senders."""
    nodes: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    rank = rank_of(comm.context)
    good = wait_routing(comm, batch.signals, SEND)
    good &= wait_other_nodes_entered(comm, batch.signals, comm.epoch - 1, SEND)
    if good:
        table = table_of(comm, routing, rank)
        tokens = tl.load(table + TOKENS)
        numbered = signal_of(comm, rank, batch.signals.numbered, 0, 0)
        if first == 0:
            for away in range(1, nodes):
                node = (rank // comm.RANKS_PER_NODE + away) % nodes
                numbers = routing.tables.send_index + (away - 1) * batch.max_tokens
                number_crossings(comm, routing, table, tokens, node, numbers)
            notify(numbered, comm.epoch)
        elif not wait_numbered(comm, numbered, SEND):
            tokens = 0
        for chunk in range(first, tl.cdiv(tokens, routing.CHUNK), step):
            since = trace_time(comm.context)
            for away in range(1, nodes):
                _send_chunk(comm, routing, dispatch, batch, away, chunk, tokens)
            trace(comm.context, SEND, SEND_CHUNK, rank, chunk, since)


@triton.jit
def _lines_of(goes, numbers, far, first, end, K: tl.constexpr, ROWS: tl.constexpr):
    """Where some tokens lie; -1 for those that have no row here. goes[token, slot]: its rows, or -1;
    numbers[token]: where it lies, if it is `far`. What a thread needs to know of a token it loads itself: to ask other
    threads takes as long as the copy."""
    i = first + tl.arange(0, ROWS)
    wanted = i < 0
    for slot in tl.static_range(K):
        wanted |= tl.load(goes + i * K + slot, mask=i < end, other=-1) >= 0
    number = tl.load(numbers + i, mask=wanted & far, other=-1)
    return tl.where(wanted & ~far, i, number)


@triton.jit
def _copy_to_rows(dispatch, origin, goes, numbers, far, token, end, K: tl.constexpr):
    """Copy tokens token..end-1, which lie in `origin`, to their rows; goes, numbers, far: see `_lines_of`."""
    ROWS: tl.constexpr = dispatch.ROWS
    COLUMNS: tl.constexpr = dispatch.COLUMNS
    lines = _lines_of(goes, numbers, far, token, end, K, ROWS)
    for some in range(token, end, ROWS):
        i = some + tl.arange(0, ROWS)
        following = lines
        for column in range(0, dispatch.hidden, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            pointers = origin.data + lines.to(tl.int64)[:, None] * origin.row_stride
            values = tl.load(
                pointers + j.to(tl.int64) * origin.column_stride, mask=(lines >= 0)[:, None] & (j < dispatch.hidden)
            )
            # what is needed next is asked for meanwhile: beside a GEMM, memory takes a microsecond to answer
            rows = ()
            for slot in tl.static_range(K):
                rows = rows + (tl.load(goes + i * K + slot, mask=i < end, other=-1),)  # type: ignore[assignment]
            following = _lines_of(goes, numbers, far, some + ROWS, end, K, ROWS)
            for slot in tl.static_range(K):
                target = dispatch.rows.data + rows[slot].to(tl.int64)[:, None] * dispatch.rows.row_stride + j
                tl.store(target, values, mask=(rows[slot] >= 0)[:, None] & (j < dispatch.hidden))
        lines = following


@triton.jit
def _may_place(tables):
    """Is there a place for every row?"""
    return tl.load(tables.summary + STATUS) == OK


@triton.jit
def _first_row(comm, tables, expert, source, mask):
    """Where the rows of some experts begin that come from a source."""
    return tl.load(tables.bases + expert * comm.WORLD_SIZE + source, mask=mask, other=0)


@triton.jit
def _count_placed(counters, mask):
    """Count rows that are in place, each in the counter of its block."""
    tl.debug_barrier()
    tl.atomic_add(counters, 1, mask=mask, sem="release", scope="gpu")


@triton.jit
def _place_chunk(comm, routing, dispatch, batch, source, chunk, tokens):
    """Fetch those tokens of a chunk that name an expert of this rank. Returns how many tokens came from
    another rank's memory."""
    K: tl.constexpr = routing.K
    DTYPE: tl.constexpr = dispatch.x.data.dtype.element_ty
    tables = routing.tables
    rank = rank_of(comm.context)
    holder = holder_of(comm, source)
    table = table_of(comm, routing, source)
    places = (source * batch.max_tokens).to(tl.int64) * K
    token = chunk * routing.CHUNK
    end = tl.minimum(token + routing.CHUNK, tokens)

    # where the rows of the chunk go
    ids = ids_of(routing, table, token, tokens, routing.CHUNK)
    t = token + tl.arange(0, routing.CHUNK)[:, None]
    slot = tl.arange(0, routing.SLOTS)[None, :]
    inside = (t < end) & (slot < K)
    expert = ids - tl.load(tables.summary + FIRST_EXPERT)
    named = (expert >= 0) & (expert < batch.experts)
    ok = _may_place(tables)
    goes_here = named & ok
    position = tl.load(tables.positions + places + t * K + slot, mask=goes_here, other=0)
    position += _first_row(comm, tables, expert, source, goes_here)
    position = tl.where(goes_here, position, -1)
    tl.store(tables.destinations + places + t * K + slot, position, mask=inside)
    tl.store(tables.all_topk_ids + places + t * K + slot, ids, mask=inside)
    tl.store(tables.row_source + position, source + 0 * position, mask=goes_here)
    tl.store(tables.row_token + position, t + 0 * position, mask=goes_here)
    wanted = tl.sum(tl.max(named.to(tl.int32), axis=1))
    tl.debug_barrier()

    # where the tokens come from
    here = tl.full((), True, tl.int1)
    origin = dispatch.x.data
    row_stride = tl.cast(dispatch.x.row_stride, tl.int64)
    column_stride = tl.cast(dispatch.x.column_stride, tl.int64)
    far = source // comm.RANKS_PER_NODE != rank // comm.RANKS_PER_NODE
    if source != rank:
        origin = segment_of(comm.context, holder, DTYPE) + row_of(dispatch.staged, comm.epoch, 0)
        if far:
            nodes: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
            away = (rank // comm.RANKS_PER_NODE - source // comm.RANKS_PER_NODE + nodes) % nodes
            recv_offset = row_of(dispatch.recv, comm.epoch, (nodes - 1 - away) * batch.max_tokens)
            origin = segment_of(comm.context, holder, DTYPE) + recv_offset
        row_stride = tl.cast(dispatch.staged.row_stride, tl.int64)
        column_stride = tl.cast(1, tl.int64)
        if wanted > 0:
            here = wait_held(comm, batch.signals, holder, source, chunk)

    if here & ok & (wanted > 0):
        since = trace_time(comm.context)
        _copy_to_rows(
            dispatch, Block(origin, row_stride, column_stride), tables.destinations + places,
            tables.recv_index + source * batch.max_tokens, far, token, end, K,
        )  # fmt: skip
        block = tl.load(tables.first_blocks + expert, mask=goes_here, other=0)
        base = tl.load(tables.bases + expert * comm.WORLD_SIZE, mask=goes_here, other=0)
        block += (position - base) // dispatch.TILE_M
        trace(comm.context, INTRA, GATHER, source, chunk, since)
        _count_placed(tables.placed + block * dispatch.COUNTERS, goes_here)
    return tl.where(source != rank, wanted, 0)


@triton.jit
def _share(items, worker, WORKERS: tl.constexpr):
    """How many of some items this worker gets, if they go round the first WORKERS."""
    return tl.where(worker < WORKERS, tl.cdiv(tl.maximum(items - worker, 0), WORKERS), 0)


@triton.jit
def _place_tokens(comm, routing, dispatch, batch, worker):
    """Fetch all tokens that name an expert of this rank, in the order in which they become available. Chunks of the
    rank's own go round all intra CTAs; those of other nodes, which the network brings one by one, round the first
    FAR_INTRAS, those of its node round the next NEAR_INTRAS."""
    WORKERS: tl.constexpr = dispatch.roles.INTRAS
    NEAR: tl.constexpr = dispatch.roles.NEAR_INTRAS
    FAR: tl.constexpr = dispatch.roles.FAR_INTRAS
    DTYPE: tl.constexpr = dispatch.x.data.dtype.element_ty
    rank = rank_of(comm.context)
    chunks = batch.chunks
    near_worker = worker
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        near_worker = (worker + WORKERS - FAR) % WORKERS  # the others first
    own = _share(chunks, worker, WORKERS)
    near = own + _share(chunks * (comm.RANKS_PER_NODE - 1), near_worker, NEAR)
    for turn in range(near + _share(chunks * (comm.WORLD_SIZE - comm.RANKS_PER_NODE), worker, FAR)):
        item = turn * WORKERS
        if turn >= own:
            item = chunks + (turn - own) * NEAR + (near_worker - worker)
        if turn >= near:
            item = chunks * comm.RANKS_PER_NODE + (turn - near) * FAR
        item += worker
        source, chunk = arrival_order(tl.cast(item, tl.int32), rank, chunks, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
        tokens = tl.load(table_of(comm, routing, source) + TOKENS)
        if chunk * routing.CHUNK < tokens:
            fetched = _place_chunk(comm, routing, dispatch, batch, source, chunk, tokens)
            if dispatch.COMBINES:
                notify(signal_of(comm, rank, batch.signals.settled, source, chunk), comm.epoch)
            if dispatch.PACED:
                size = fetched.to(tl.int64) * dispatch.hidden * (DTYPE.primitive_bitwidth // 8)
                await_link(reserve_link(comm.context, size, batch.nanoseconds_per_mib))


@triton.jit
def dispatch_tokens(comm, routing, dispatch, batch):
    """The whole dispatch, by all CTAs: senders send, the others stage and count, and of these some place rows (see
    `Roles`). When the rank's own signals `counted` and `scheduled` are up, rows have places and blocks an order."""
    SENDERS: tl.constexpr = dispatch.roles.SENDERS
    cta = tl.program_id(0)
    rank = rank_of(comm.context)
    counted = signal_of(comm, rank, batch.signals.counted, 0, 0)
    scheduled = signal_of(comm, rank, batch.signals.scheduled, 0, 0)
    counters = tl.num_programs(0) - SENDERS
    if cta == 0:
        announce(comm, batch.signals)
        publish(comm, routing, batch, dispatch.ids, dispatch.weights)
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        if cta == SENDERS:
            announce_node(comm, batch.signals, INTRA)
    if cta < SENDERS:
        _send_tokens(comm, routing, dispatch, batch, cta, SENDERS)
    else:
        if comm.RANKS_PER_NODE > 1:
            _stage_tokens(comm, routing, dispatch, batch, cta - SENDERS, counters)
        if wait_routing(comm, batch.signals, COMPUTE):
            count_rows(comm, routing, batch, cta - SENDERS, counters)
            if counted_last(comm.context, counters):
                lay_out_rows(comm, routing, batch.experts, dispatch.TILE_M, dispatch.COUNTERS)
                notify(counted, comm.epoch)
                schedule_blocks(comm, routing.tables, batch.experts, dispatch.TILE_M, dispatch.GROUP, dispatch.COMBINES)
                notify(scheduled, comm.epoch)
        if cta < SENDERS + dispatch.roles.INTRAS:
            if wait_counted(comm, counted):
                _place_tokens(comm, routing, dispatch, batch, cta - SENDERS)


@triton.jit
def fill_with_nan(c, rows, columns, first, step):
    """Mark rows first, first + step, ... of a `Block` as not computed."""
    for row in range(first, rows, step):
        for column in range(0, columns, 1024):
            j = column + tl.arange(0, 1024)
            nothing = tl.full((1024,), float("nan"), tl.float32).to(c.data.dtype.element_ty)
            pointers = c.data + tl.cast(row, tl.int64) * c.row_stride + j.to(tl.int64) * c.column_stride
            tl.store(pointers, nothing, mask=j < columns)
