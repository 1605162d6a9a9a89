"""Placing rows: tokens move from where they are held to where the grouped GEMM reads them, grouped by expert.

Tokens are placed chunk by chunk, as chunks arrive: a token is fetched once, and stored once for every row that it
makes. Every block of rows has rows of many chunks, so nearly all blocks are complete at about the same time.

A rank that is alone (`Roles.OWN_INTRAS`) places its tokens row by row, in the order of the rows. So the first blocks
are complete when a fraction of the rows has been placed, and CTAs that place no rows multiply them meanwhile. First,
every CTA *settles* a share of the chunks: it stores in `Tables` where their rows go. Then CTAs place *units* of up to
UNIT_ROWS rows of one expert. A token that makes several rows is read several times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.copy import reserve_link, wait_link
from mkernel.lang.layout import row_of
from mkernel.lang.matrix import Block
from mkernel.lang.order import arrival_order
from mkernel.lang.roles import INTRA
from mkernel.lang.signals import notify, wait_again
from mkernel.lang.trace import GATHER, trace, trace_time
from mkernel.ops.moe.kinds import SETTLED
from mkernel.ops.moe.protocol import TOKENS, holder_of, signal_of, wait_held
from mkernel.ops.moe.reduction import weights_of
from mkernel.ops.moe.routing import (
    CTAS_SETTLED,
    FIRST_EXPERT,
    UNIT_ROWS,
    block_of,
    ids_of,
    may_place,
    segments_of,
    table_of,
)


@triton.jit
def _origin_rows(destinations, numbers, far, first, end, K: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a buffer that hold some tokens; -1 for tokens that have no row on this rank. destinations[token,
    slot]: its rows on this rank, or -1; numbers[token]: its row in the buffer, if the tokens are `far`. Each thread
    loads what it needs to know about a token itself: exchanging it between threads takes as long as the copy."""
    i = first + tl.arange(0, ROWS)
    wanted = i < 0
    for slot in tl.static_range(K):
        wanted |= tl.load(destinations + i * K + slot, mask=i < end, other=-1) >= 0
    number = tl.load(numbers + i, mask=wanted & far, other=-1)
    return tl.where(wanted & ~far, i, number)


@triton.jit
def _copy_to_rows(dispatch, origin, destinations, numbers, far, token, end, K: tl.constexpr):
    """Copy tokens token..end-1 from `origin` to their rows; destinations, numbers, far: see `_origin_rows`."""
    ROWS: tl.constexpr = dispatch.ROWS
    COLUMNS: tl.constexpr = dispatch.COLUMNS
    origin_rows = _origin_rows(destinations, numbers, far, token, end, K, ROWS)
    for start in range(token, end, ROWS):
        i = start + tl.arange(0, ROWS)
        next_origin_rows = origin_rows
        for column in range(0, dispatch.hidden, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            pointers = origin.data + origin_rows.to(tl.int64)[:, None] * origin.row_stride
            values = tl.load(
                pointers + j.to(tl.int64) * origin.column_stride,
                mask=(origin_rows >= 0)[:, None] & (j < dispatch.hidden),
            )
            # load what is needed next in the meantime: while a GEMM runs, memory latency is about a microsecond
            rows = ()
            for slot in tl.static_range(K):
                rows = rows + (tl.load(destinations + i * K + slot, mask=i < end, other=-1),)  # type: ignore[assignment]
            next_origin_rows = _origin_rows(destinations, numbers, far, start + ROWS, end, K, ROWS)
            for slot in tl.static_range(K):
                target = dispatch.rows.data + rows[slot].to(tl.int64)[:, None] * dispatch.rows.row_stride + j
                tl.store(target, values, mask=(rows[slot] >= 0)[:, None] & (j < dispatch.hidden))
        origin_rows = next_origin_rows


@triton.jit
def _first_row(tables, segments, sections, chunk, mask):
    """The first row of each section, an (expert, source), that comes from the segment of a chunk."""
    return tl.load(tables.first_rows + sections * segments.each + chunk // segments.chunks, mask=mask, other=0)


@triton.jit
def _count_placed(counters, mask):
    """Count rows that are in place, each in the counter of its block."""
    tl.debug_barrier()
    tl.atomic_add(counters, 1, mask=mask, sem="release", scope="gpu")


@triton.jit
def _wait_origin(comm, dispatch, batch, rank, holder, source, chunk, wanted):
    """Wait until `holder` holds the tokens of a chunk of `source` for my node, if any of them are wanted. Returns from
    where to read tokens of this source (pointer, row stride, column stride, whether they are of another node), and
    whether those of the chunk have arrived. Only tokens that are not packed are read from the caller's tensor. rank:
    mine."""
    DTYPE: tl.constexpr = dispatch.rows.data.dtype.element_ty
    arrived = tl.full((), True, tl.int1)
    if dispatch.PACKS:
        origin = segment_of(comm.context, rank, DTYPE) + row_of(dispatch.staged, comm.epoch, 0)
        row_stride = tl.cast(dispatch.staged.row_stride, tl.int64)
        column_stride = tl.cast(1, tl.int64)
    else:
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
            arrived = wait_held(comm, batch.signals, holder, source, chunk)
    return origin, row_stride, column_stride, far, arrived


@triton.jit
def _settle_chunk(comm, routing, batch, source, chunk, tokens):
    """Store in `Tables` where the rows of a chunk go, and where they come from. Returns, for each slot, the row and its
    expert, and how many tokens name an expert of this rank. Slots without a row here have row -1, as all have if the
    routing is invalid."""
    K: tl.constexpr = routing.K
    tables = routing.tables
    source_offset = (source * batch.max_tokens).to(tl.int64) * K
    token = chunk * routing.CHUNK
    ids = ids_of(routing, table_of(comm, routing, source), token, tokens, routing.CHUNK)
    t = token + tl.arange(0, routing.CHUNK)[:, None]
    slot = tl.arange(0, routing.SLOTS)[None, :]
    inside = (t < tl.minimum(token + routing.CHUNK, tokens)) & (slot < K)
    expert = ids - tl.load(tables.summary + FIRST_EXPERT)
    named = (expert >= 0) & (expert < batch.experts)
    goes_here = named & may_place(tables)
    row = tl.load(tables.positions + source_offset + t * K + slot, mask=goes_here, other=0)
    row += _first_row(tables, segments_of(comm, batch), expert * comm.WORLD_SIZE + source, chunk, goes_here)
    row = tl.where(goes_here, row, -1)
    tl.store(tables.destinations + source_offset + t * K + slot, row, mask=inside)
    tl.store(tables.all_topk_ids + source_offset + t * K + slot, ids, mask=inside)
    tl.store(tables.row_source + row, source + 0 * row, mask=goes_here)
    tl.store(tables.row_token + row, t + 0 * row, mask=goes_here)
    return row, expert, tl.sum(tl.max(named.to(tl.int32), axis=1))


@triton.jit
def _place_chunk(comm, routing, dispatch, batch, source, chunk, tokens):
    """Fetch and place the tokens of a chunk that name an expert of this rank. Returns how many tokens came from the
    memory of another rank."""
    K: tl.constexpr = routing.K
    tables = routing.tables
    rank = rank_of(comm.context)
    holder = holder_of(comm, source)
    source_offset = (source * batch.max_tokens).to(tl.int64) * K
    token = chunk * routing.CHUNK
    end = tl.minimum(token + routing.CHUNK, tokens)
    row, expert, wanted = _settle_chunk(comm, routing, batch, source, chunk, tokens)
    goes_here = row >= 0
    tl.debug_barrier()

    origin, row_stride, column_stride, far, arrived = _wait_origin(
        comm, dispatch, batch, rank, holder, source, chunk, wanted
    )  # fmt: skip

    if arrived & may_place(tables) & (wanted > 0):
        since = trace_time(comm.context)
        _copy_to_rows(
            dispatch, Block(origin, row_stride, column_stride), tables.destinations + source_offset,
            tables.recv_index + source * batch.max_tokens, far, token, end, K,
        )  # fmt: skip
        block = block_of(comm, tables, expert, row, goes_here, dispatch.TILE_M)
        trace(comm.context, INTRA, GATHER, source, chunk, since)
        _count_placed(tables.placed + block * dispatch.COUNTERS, goes_here)
    return tl.where(source != rank, wanted, 0)


@triton.jit
def _place_known_chunk(comm, routing, dispatch, batch, source, chunk, tokens):
    """`_place_chunk` with a known routing: the tables say already where rows go. Also stores the weights of the rows,
    if they were published."""
    K: tl.constexpr = routing.K
    tables = routing.tables
    rank = rank_of(comm.context)
    holder = holder_of(comm, source)
    source_offset = (source * batch.max_tokens).to(tl.int64) * K
    token = chunk * routing.CHUNK
    end = tl.minimum(token + routing.CHUNK, tokens)
    t = token + tl.arange(0, routing.CHUNK)[:, None]
    slot = tl.arange(0, routing.SLOTS)[None, :]
    row = tl.load(tables.destinations + source_offset + t * K + slot, mask=(t < end) & (slot < K), other=-1)
    goes_here = row >= 0
    wanted = tl.sum(tl.max(goes_here.to(tl.int32), axis=1))
    if dispatch.row_weights is not None:
        weights = weights_of(comm, routing, batch, source)
        weight = tl.load(weights + t * K + slot, mask=goes_here, other=0.0)
        tl.store(dispatch.row_weights + row, weight, mask=goes_here)
    origin, row_stride, column_stride, far, arrived = _wait_origin(
        comm, dispatch, batch, rank, holder, source, chunk, wanted
    )  # fmt: skip
    if arrived & (wanted > 0):
        since = trace_time(comm.context)
        _copy_to_rows(
            dispatch, Block(origin, row_stride, column_stride), tables.destinations + source_offset,
            tables.recv_index + source * batch.max_tokens, far, token, end, K,
        )  # fmt: skip
        trace(comm.context, INTRA, GATHER, source, chunk, since)
        expert = tl.load(tables.all_topk_ids + source_offset + t * K + slot, mask=goes_here, other=0)
        expert -= tl.load(tables.summary + FIRST_EXPERT)
        block = block_of(comm, tables, expert, row, goes_here, dispatch.TILE_M)
        _count_placed(tables.placed + block * dispatch.COUNTERS, goes_here)
    return tl.where(source != rank, wanted, 0)


@triton.jit
def _share(items, worker, WORKERS: tl.constexpr):
    """How many of some items this worker gets if the first WORKERS workers share them, round-robin."""
    return tl.where(worker < WORKERS, tl.cdiv(tl.maximum(items - worker, 0), WORKERS), 0)


@triton.jit
def _notify_settled(comm, batch, rank, source, chunk):
    """Signal that `Tables` say where the rows of a chunk are. rank: mine."""
    notify(signal_of(comm, rank, batch.signals.settled, source, chunk), comm.epoch)


@triton.jit
def _count_settled(counter):
    """Count a CTA that has settled its share of the rank's own chunks."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _wait_own_settled(context, counter, ctas, rank):
    """Wait until `ctas` CTAs have settled all chunks of this rank's own tokens; false if the group gave up."""
    return wait_again(context, counter, ctas, INTRA, SETTLED, rank, -1)


@triton.jit
def _settle_own(comm, routing, dispatch, batch, worker):
    """Settle this worker's share of the rank's own chunks."""
    rank = rank_of(comm.context)
    for chunk in range(worker, tl.cdiv(batch.tokens, routing.CHUNK), dispatch.roles.INTRAS):
        _settle_chunk(comm, routing, batch, rank, chunk, batch.tokens)
        if dispatch.COMBINES:
            _notify_settled(comm, batch, rank, rank, chunk)
    _count_settled(routing.tables.summary + CTAS_SETTLED)


@triton.jit
def _rows_of_unit(comm, tables, experts, unit, rank):
    """(expert, first, end): the rows of a unit, which is up to UNIT_ROWS rows of this rank's own tokens, of one expert.
    rank: mine."""
    expert = tl.full((), -1, tl.int32)
    for start in range(0, experts, 64):
        i = start + tl.arange(0, 64)
        first_unit = tl.load(tables.own_units + i, mask=i < experts, other=0x7FFFFFFF)
        expert += tl.sum((first_unit <= unit).to(tl.int32))
    section = tables.bases + expert * comm.WORLD_SIZE + rank
    first = tl.load(section) + (unit - tl.load(tables.own_units + expert)) * UNIT_ROWS
    return expert, first, tl.minimum(first + UNIT_ROWS, tl.load(section + 1))


@triton.jit
def _copy_own_rows(dispatch, origin, row_token, first, end):
    """Copy the tokens of rows first..end-1, whose numbers are in row_token, from `origin`."""
    ROWS: tl.constexpr = dispatch.ROWS
    COLUMNS: tl.constexpr = dispatch.COLUMNS
    i = first + tl.arange(0, ROWS)
    token = tl.load(row_token + i, mask=i < end, other=0)
    for start in range(first, end, ROWS):
        i = start + tl.arange(0, ROWS)
        next_token = token
        for column in range(0, dispatch.hidden, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            inside = (i < end)[:, None] & (j < dispatch.hidden)
            pointers = origin.data + token.to(tl.int64)[:, None] * origin.row_stride
            values = tl.load(pointers + j.to(tl.int64) * origin.column_stride, mask=inside)
            next_token = tl.load(row_token + i + ROWS, mask=i + ROWS < end, other=0)  # in the meantime
            tl.store(dispatch.rows.data + i.to(tl.int64)[:, None] * dispatch.rows.row_stride + j, values, mask=inside)
        token = next_token


@triton.jit
def _place_own(comm, routing, dispatch, batch, worker):
    """Place this worker's share of the rows of the rank's own tokens, expert by expert."""
    tables = routing.tables
    rank = rank_of(comm.context)
    if _wait_own_settled(comm.context, tables.summary + CTAS_SETTLED, dispatch.roles.INTRAS, rank):
        origin, row_stride, column_stride, _, _ = _wait_origin(comm, dispatch, batch, rank, rank, rank, 0, 0)
        for unit in range(worker, tl.load(tables.own_units + batch.experts), dispatch.roles.OWN_INTRAS):
            since = trace_time(comm.context)
            expert, first, end = _rows_of_unit(comm, tables, batch.experts, unit, rank)
            _copy_own_rows(dispatch, Block(origin, row_stride, column_stride), tables.row_token, first, end)
            trace(comm.context, INTRA, GATHER, rank, unit, since)
            row = first + tl.arange(0, UNIT_ROWS)
            block = block_of(comm, tables, expert + 0 * row, row, row < end, dispatch.TILE_M)
            _count_placed(tables.placed + block * dispatch.COUNTERS, row < end)


@triton.jit
def place_tokens(comm, routing, dispatch, batch, worker):
    """Fetch and place all tokens that name an expert of this rank, in the order in which they become available. All
    intra CTAs share the chunks of the rank itself, round-robin; if these tokens are placed row by row, they settle
    the chunks, and the first OWN_INTRAS of them place the rows. The first FAR_INTRAS share the chunks of other
    nodes, which the network delivers one by one. The next NEAR_INTRAS share those of the node."""
    WORKERS: tl.constexpr = dispatch.roles.INTRAS
    NEAR: tl.constexpr = dispatch.roles.NEAR_INTRAS
    FAR: tl.constexpr = dispatch.roles.FAR_INTRAS
    DTYPE: tl.constexpr = dispatch.rows.data.dtype.element_ty
    rank = rank_of(comm.context)
    chunks = batch.chunks
    near_worker = worker
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        near_worker = (worker + WORKERS - FAR) % WORKERS  # start with CTAs that place no tokens of other nodes
    own_items = _share(chunks, worker, WORKERS)
    near_end = own_items + _share(chunks * (comm.RANKS_PER_NODE - 1), near_worker, NEAR)
    done = 0
    BY_ROW: tl.constexpr = dispatch.roles.OWN_INTRAS > 0 and not dispatch.KNOWN
    if BY_ROW:
        _settle_own(comm, routing, dispatch, batch, worker)
        if worker < dispatch.roles.OWN_INTRAS:
            _place_own(comm, routing, dispatch, batch, worker)
        done = own_items
    for step in range(done, near_end + _share(chunks * (comm.WORLD_SIZE - comm.RANKS_PER_NODE), worker, FAR)):
        item = step * WORKERS
        if step >= own_items:
            item = chunks + (step - own_items) * NEAR + (near_worker - worker)
        if step >= near_end:
            item = chunks * comm.RANKS_PER_NODE + (step - near_end) * FAR
        item += worker
        source, chunk = arrival_order(tl.cast(item, tl.int32), rank, chunks, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
        tokens = tl.load(table_of(comm, routing, source) + TOKENS)
        if chunk * routing.CHUNK < tokens:
            if dispatch.KNOWN:
                fetched = _place_known_chunk(comm, routing, dispatch, batch, source, chunk, tokens)
            else:
                fetched = _place_chunk(comm, routing, dispatch, batch, source, chunk, tokens)
            if dispatch.COMBINES:
                _notify_settled(comm, batch, rank, source, chunk)
            if dispatch.PACED:
                size = fetched.to(tl.int64) * dispatch.hidden * (DTYPE.primitive_bitwidth // 8)
                wait_link(reserve_link(comm.context, size, batch.nanoseconds_per_mib))
