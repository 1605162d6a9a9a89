"""The Triton kernel of ring_attention_backward: for every shape and dtype, any number of nodes, and any GPU.

CTAs are numbered by role: send, intra, compute. The package's docstring says what each role does, and why they cannot
deadlock. Everywhere, `call` is a `Call` (call.py). Tensors are read through pointers.

Weights are recomputed from the log-sum-exp: p = exp(scale * q k^T - lse). With dp = dout v^T and a number per row,
delta = sum(dout * out) - dlse, the gradient of the scores is ds = p * (dp - delta), and

    dv = p^T dout        dk = scale * ds^T q        dq = scale * ds k

If scores are capped, p is that of the capped scores, softcap * t with t = tanh(scale * q k^T / softcap), and ds has the
factor 1 - t^2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import Comm, current_epoch, rank_of
from mkernel.lang.entries import announce
from mkernel.lang.partials import load_partial, store_partial
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import finish
from mkernel.lang.trace import REDUCE, TILE, TILES, trace, trace_time
from mkernel.ops.attention.backward.call import task_at, value_dim_of
from mkernel.ops.attention.backward.protocol import (
    add_block,
    block_at,
    node_sum_index,
    notify_prepared,
    partial_index,
    post_node_sum,
    push_partial,
    store_block,
    wait_node_sum,
    wait_partial,
    wait_posted,
    wait_prepared,
    wait_reducible,
    wait_sum_writable,
)
from mkernel.ops.attention.call import head_of
from mkernel.ops.attention.mask import (
    is_seen,
    is_seen_in_node,
    key_blocks,
    keys_below,
    keys_of,
    rows_of,
    seen_by,
    seen_by_tile,
)
from mkernel.ops.attention.protocol import (
    Panel,
    chunks_with,
    finish_task,
    poll_all_arrived,
    slot_row,
    source_at,
    wait_own_round,
    wait_panel,
)
from mkernel.ops.attention.rows import copy_rows, read_slot_rows, read_some_rows
from mkernel.ops.attention.softmax import cap_scores, through_cap
from mkernel.ops.attention.transfer import intra, send

LOG2_E = tl.constexpr(1.4426950408889634)


class Queries(NamedTuple):
    """A tile of queries, the gradient of its result, and per row: the log-sum-exp in units of log2, and delta."""

    query: Any
    dout: Any
    lse: Any
    delta: Any


class Keys(NamedTuple):
    """TILE_N keys of a rank, starting at `key`, and the rows of this rank that see some of them: `first`..`end`-1. Rows
    `full`..`full_end`-1 see all of them."""

    source: Any
    key: Any
    first: Any
    end: Any
    full: Any
    full_end: Any


# -- delta


@triton.jit
def _read_rows(call, heads, batch, head, row, DIM: tl.constexpr):
    """TILE_M rows of queries, or of what has as many rows; zeros outside the tensor."""
    return read_some_rows(heads, batch, head, row, rows_of(call.mask), ROWS=call.TILE_M, DIM=DIM)


@triton.jit
def _prepare(comm, call, first, step):
    """Compute delta of tiles first, first + step, and so on, of all heads."""
    for index in range(first, call.batch * call.heads * call.blocks, step):
        head = index // call.blocks
        row = index % call.blocks * call.TILE_M
        dout = _read_rows(call, call.dout, head // call.heads, head % call.heads, row, call.VALUE_DIM)
        out = _read_rows(call, call.out, head // call.heads, head % call.heads, row, call.VALUE_DIM)
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
        i = row + tl.arange(0, call.TILE_M)
        line = tl.cast(head, tl.int64) * rows_of(call.mask)
        if call.DLSE:
            delta -= tl.load(call.dlse + line + i, mask=i < rows_of(call.mask), other=0.0)
        tl.store(call.delta + line + i, delta, mask=i < rows_of(call.mask))


# -- weights


@triton.jit
def _read_queries(call, batch, head, row):
    """A tile of queries. Rows beyond the last one have weights of zero: their log-sum-exp is infinite. So does a row
    that saw no key; its log-sum-exp is -inf."""
    query = _read_rows(call, call.q, batch, head, row, call.DIM)
    dout = _read_rows(call, call.dout, batch, head, row, call.VALUE_DIM)
    i = row + tl.arange(0, call.TILE_M)
    inside = i < rows_of(call.mask)
    line = tl.cast(batch * call.heads + head, tl.int64) * rows_of(call.mask)
    lse = tl.load(call.lse + line + i, mask=inside, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    delta = tl.load(call.delta + line + i, mask=inside, other=0.0)
    return Queries(query, dout, lse, delta)


@triton.jit
def _keys_seen(call, rank, source, row):
    """(lower, upper): each row of a tile sees the source's keys lower..upper-1."""
    rows = tl.minimum(row + tl.arange(0, call.TILE_M), rows_of(call.mask) - 1)
    starts, ends = seen_by(call.mask, rank, rows)
    return keys_below(call.mask, starts, source), keys_below(call.mask, ends, source)


@triton.jit
def _is_seen_by_rows(call, index, lower, upper):
    """Which rows see which keys. lower, upper: from `_keys_seen`, with the dimension of the keys added."""
    seen = index < upper
    if call.mask.PACKED:
        seen &= index >= lower
    return seen


# -- dq


@triton.jit
def _read_keys(call, task, source_is_own, row, OFFSET: tl.constexpr):
    """A block of keys, or with OFFSET=1 of values. row: the first row in the slots, or in the caller's tensor."""
    count = keys_of(call.mask)
    if OFFSET == 0:
        if source_is_own:
            block = read_some_rows(call.k, task.batch, task.kv_head, row, count, ROWS=call.TILE_N, DIM=call.DIM)
        else:
            block = read_slot_rows(call, row, call.dim, call.DIM)
    else:
        if source_is_own:
            block = read_some_rows(call.v, task.batch, task.kv_head, row, count, ROWS=call.TILE_N, DIM=call.VALUE_DIM)
        else:
            block = read_slot_rows(call, row + call.TILE_N, value_dim_of(call), call.VALUE_DIM)
    return block


@triton.jit
def _add_keys(call, task, queries, row, dq, source, panel_row, blocks, OWN: tl.constexpr):
    """dq of a tile of queries, unscaled, plus what `blocks` of a source's keys contribute. row: the first row of the
    tile. OWN: keys and values are read from the caller's tensors. Otherwise they are read from the slots, where key 0
    of the source would be at row `panel_row`, and the source is a pair (this rank, source)."""
    lower, upper = _keys_seen(call, source[0], source[1], row)
    for block in range(blocks.first, blocks.end):
        at = block * call.TILE_N
        place = at if OWN else panel_row + 2 * at
        keys = _read_keys(call, task, OWN, place, 0)
        values = _read_keys(call, task, OWN, place, 1)
        scores = cap_scores(call, tl.dot(queries.query, keys.T, input_precision=call.PRECISION))
        weights = tl.exp2(scores * call.scale - queries.lse[:, None])
        if (block < blocks.full) | (block >= blocks.full_end):
            index = at + tl.arange(0, call.TILE_N)[None, :]
            weights = tl.where(_is_seen_by_rows(call, index, lower[:, None], upper[:, None]), weights, 0.0)
        dp = tl.dot(queries.dout, values.T, input_precision=call.PRECISION)
        ds = through_cap(call, weights * (dp - queries.delta[:, None]), scores)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=call.PRECISION)
    return dq


@triton.jit
def _add_others(comm, call, task, queries, row, dq):
    """(dq, missing): dq of a tile of queries plus what the panels of all other ranks contribute. missing: NaN if the
    group gave up before all chunks arrived, else 0."""
    rank = rank_of(comm.context)
    visible = seen_by_tile(call.mask, rank, row, call.TILE_M)
    panel = Panel(task.round_index, task.begin, task.until)
    offsets = tl.arange(0, call.POLL_WIDTH)
    all_arrived = poll_all_arrived(
        comm, call.rounds, call.mask, panel, visible.low, visible.highest_end, offsets
    )  # fmt: skip
    missing = 0.0
    for i in range(1, comm.WORLD_SIZE):
        source = source_at(comm, rank, i)
        if not all_arrived:
            chunk, chunk_end = chunks_with(call.rounds, call.mask, panel, source, visible.low, visible.highest_end)
            complete = wait_panel(comm, call.rounds, task.round_index, source, chunk, chunk_end)
            missing += tl.where(complete, 0.0, float("nan"))
        panel_row = slot_row(comm, call.rounds, task.round_index, source, rank) - 2 * task.begin
        blocks = key_blocks(call.mask, visible, source, task.begin, task.until, call.TILE_N)
        dq = _add_keys(call, task, queries, row, dq, (rank, source), panel_row, blocks=blocks, OWN=False)
    return dq, missing


@triton.jit
def _store_rows(heads, batch, head, row, values, count, columns):
    """Store rows of a result, which has `count` rows of `columns` columns."""
    i = row + tl.arange(0, values.shape[0])[:, None]
    j = tl.arange(0, values.shape[1])[None, :]
    target = head_of(heads, batch, head) + i.to(tl.int64) * heads.row_stride + j.to(tl.int64) * heads.column_stride
    tl.store(target, values.to(heads.pointer.dtype.element_ty), mask=(i < count) & (j < columns))


@triton.jit
def _store_key_gradients(call, task, key, dk, dv):
    """Store dk and dv of a block of this rank's keys."""
    _store_rows(call.dk, task.batch, task.kv_head, key, dk, keys_of(call.mask), call.dim)
    _store_rows(call.dv, task.batch, task.kv_head, key, dv, keys_of(call.mask), value_dim_of(call))


@triton.jit
def _resume(kept, TILE_M: tl.constexpr, DIM: tl.constexpr):
    """The sum of a tile of dq after the previous part of its unit, which this CTA has stored."""
    tl.debug_barrier()
    return load_partial(kept, TILE_M, DIM)


@triton.jit
def _query_gradient(comm, call, task):
    """Compute a tile of dq: of one tile of queries over the keys of all ranks, the rank's own first."""
    rank = rank_of(comm.context)
    head = task.kv_head * (call.heads // call.kv_heads) + task.within // call.blocks
    row = task.within % call.blocks * call.TILE_M
    queries = _read_queries(call, task.batch, head, row)
    part = task.round_index % call.rounds.parts
    dq = tl.zeros((call.TILE_M, call.DIM), tl.float32)
    if call.PARTS:
        kept = call.partial + tl.cast(task.within, tl.int64) * (call.TILE_M * call.DIM)
        if part > 0:
            dq = _resume(kept, call.TILE_M, call.DIM)
    visible = seen_by_tile(call.mask, rank, row, call.TILE_M)
    blocks = key_blocks(call.mask, visible, rank, task.begin, task.until, call.TILE_N)
    dq = _add_keys(call, task, queries, row, dq, (rank, rank), 0, blocks=blocks, OWN=True)
    if comm.WORLD_SIZE > 1:
        dq, missing = _add_others(comm, call, task, queries, row, dq)
        dq += missing
    if call.PARTS:
        if part < call.rounds.parts - 1:
            store_partial(kept, dq, call.TILE_M, call.DIM)
    if part == call.rounds.parts - 1:
        _store_rows(call.dq, task.batch, head, row, dq * call.factor, rows_of(call.mask), call.dim)


# -- dk, dv


@triton.jit
def _keys_at(call, task, source, key):
    """A block of keys, and the rows that see it."""
    entry = call.ranges + 4 * (source * tl.cdiv(call.rounds.padded, call.TILE_N) + key // call.TILE_N)
    first = tl.load(entry).to(tl.int32)
    end = tl.load(entry + 1).to(tl.int32)
    full = tl.load(entry + 2).to(tl.int32)
    full_end = tl.load(entry + 3).to(tl.int32)
    return Keys(source, key, first, end, full, full_end)


@triton.jit
def _add_queries(call, task, rank, seen, keys, values):
    """(dk, dv) of a block of keys over the rows of this rank that see it, of all heads of the group. Scores are
    transposed, so that products of weights with rows need no transposition."""
    dk = tl.zeros((call.TILE_N, call.DIM), tl.float32)
    dv = tl.zeros((call.TILE_N, call.VALUE_DIM), tl.float32)
    group = call.heads // call.kv_heads
    first = seen.first // call.TILE_M
    count = tl.maximum(tl.cdiv(seen.end, call.TILE_M) - first, 0)
    index = seen.key + tl.arange(0, call.TILE_N)[:, None]
    for step in range(group * count):
        head = task.kv_head * group + step // count
        row = (first + step % count) * call.TILE_M
        queries = _read_queries(call, task.batch, head, row)
        scores = cap_scores(call, tl.dot(keys, queries.query.T, input_precision=call.PRECISION))
        weights = tl.exp2(scores * call.scale - queries.lse[None, :])
        if (row < seen.full) | (row + call.TILE_M > seen.full_end):
            lower, upper = _keys_seen(call, rank, seen.source, row)
            weights = tl.where(_is_seen_by_rows(call, index, lower[None, :], upper[None, :]), weights, 0.0)
        dv = tl.dot(weights.to(keys.dtype), queries.dout, dv, input_precision=call.PRECISION)
        dp = tl.dot(values, queries.dout.T, input_precision=call.PRECISION)
        ds = through_cap(call, weights * (dp - queries.delta[None, :]), scores)
        dk = tl.dot(ds.to(keys.dtype), queries.query, dk, input_precision=call.PRECISION)
    return dk * call.factor, dv


@triton.jit
def _key_gradients(comm, call, task, which):
    """Compute this rank's partial of dk and dv of a block of keys of any rank, and push it. which: the block's number
    among all blocks of the round."""
    rank = rank_of(comm.context)
    source = which // call.tiles
    tile = which % call.tiles
    key = task.begin + tile * call.TILE_N
    if key < task.until:
        if is_seen(call.mask, rank, source, key, call.TILE_N):
            missing = 0.0
            place = key
            if source != rank:
                chunk = (key - task.begin) // call.rounds.chunk_rows
                complete = wait_panel(comm, call.rounds, task.round_index, source, chunk, chunk + 1)
                missing = tl.where(complete, 0.0, float("nan"))
                place = slot_row(comm, call.rounds, task.round_index, source, rank) + 2 * (key - task.begin)
            keys, values = _read_block(comm, call, task, source == rank, place)
            dk, dv = _add_queries(call, task, rank, _keys_at(call, task, source, key), keys, values)
            if comm.WORLD_SIZE > 1:
                push_partial(comm, call, task.round_index, source, tile, dk + missing, dv + missing)
            else:
                _store_key_gradients(call, task, key, dk, dv)


@triton.jit
def _read_block(comm, call, task, own, row):
    """(keys, values): TILE_N of each, starting at row `row` of the slots or, if own, of the caller's tensors."""
    if comm.WORLD_SIZE == 1:
        keys = _read_keys(call, task, True, row, 0)
        values = _read_keys(call, task, True, row, 1)
    elif own:
        keys = _read_keys(call, task, True, row, 0)
        values = _read_keys(call, task, True, row, 1)
    else:
        keys = _read_keys(call, task, False, row, 0)
        values = _read_keys(call, task, False, row, 1)
    return keys, values


@triton.jit
def _sum_of_node(comm, call, task, owner, tile, key):
    """(dk, dv): the sum of this node's partials of a block of the owner's keys, in the order of ranks."""
    rank = rank_of(comm.context)
    dk = tl.zeros((call.TILE_N, call.DIM), tl.float32)
    dv = tl.zeros((call.TILE_N, call.VALUE_DIM), tl.float32)
    for i in range(comm.RANKS_PER_NODE):
        source = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE + i
        if is_seen(call.mask, source, owner, key, call.TILE_N):
            index = partial_index(comm, call.rounds, task.round_index, owner, rank, source)
            missing = wait_partial(comm, call, task.round_index, source, index, tile)
            place = block_at(comm, call.exchange.partials, rank, index, tile)
            dk, dv = add_block(place, dk + missing, dv + missing)
    return dk, dv


@triton.jit
def _add_other_nodes(comm, call, task, tile, key, dk, dv):
    """(dk, dv): the sum of this node's partials of a block of this rank's keys, plus the sums of other nodes, in the
    order of nodes."""
    rank = rank_of(comm.context)
    for node in range(comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        if node != rank // comm.RANKS_PER_NODE:
            if is_seen_in_node(call.mask, node, rank, key, call.TILE_N, comm.RANKS_PER_NODE):
                index = node_sum_index(comm, call.rounds, task.round_index, rank, node)
                missing = wait_node_sum(comm, call, task.round_index, node, index, tile)
                place = block_at(comm, call.exchange.node_sums, rank, index, tile)
                dk, dv = add_block(place, dk + missing, dv + missing)
    return dk, dv


@triton.jit
def _reduce(comm, call, task, which):
    """Add up the partials of a block of keys: of this rank's own, which completes dk and dv, or of its counterpart's in
    another node. which: the number of the reduction in its round. Returns the ticket of what was posted, or -1."""
    rank = rank_of(comm.context)
    node = rank // comm.RANKS_PER_NODE
    owner = (rank + which // call.tiles * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    tile = which % call.tiles
    key = task.begin + tile * call.TILE_N
    wait_reducible(comm, call, task.round_index, which)
    ticket = tl.cast(-1, tl.int64)
    if key < task.until:
        if owner == rank:
            dk, dv = _sum_of_node(comm, call, task, owner, tile, key)
            if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
                dk, dv = _add_other_nodes(comm, call, task, tile, key, dk, dv)
            _store_key_gradients(call, task, key, dk, dv)
        elif is_seen_in_node(call.mask, node, owner, key, call.TILE_N, comm.RANKS_PER_NODE):
            dk, dv = _sum_of_node(comm, call, task, owner, tile, key)
            index = partial_index(comm, call.rounds, task.round_index, owner, rank, rank)
            wait_sum_writable(comm, call, task.round_index, owner)
            tl.debug_barrier()  # this rank's own partial, which other threads may still load, is in the same place
            store_block(block_at(comm, call.exchange.partials, rank, index, tile), dk, dv)
            ticket = post_node_sum(comm, call, task.round_index, owner, tile)
    return ticket


# -- the whole


@triton.jit
def _compute(comm, call, first, end):
    """Do the tasks in entries first..end-1 of the schedule."""
    rank = rank_of(comm.context)
    posted = tl.cast(-1, tl.int64)
    tiles_of_dq = call.heads // call.kv_heads * call.blocks
    for entry in range(first, end):
        task = task_at(comm, call, entry)
        since = trace_time(comm.context)
        if task.within < tiles_of_dq + comm.WORLD_SIZE * call.tiles:
            if call.rounds.CREDITS:
                wait_own_round(comm, call.rounds, task.round_index, COMPUTE)
            if task.within < tiles_of_dq:
                _query_gradient(comm, call, task)
            else:
                _key_gradients(comm, call, task, task.within - tiles_of_dq)
            trace(comm.context, TILES, TILE, rank, entry, since)
            if call.rounds.CREDITS:
                finish_task(comm, call.rounds, task.round_index, COMPUTE)
        else:
            if comm.WORLD_SIZE > 1:
                ticket = _reduce(comm, call, task, task.within - tiles_of_dq - comm.WORLD_SIZE * call.tiles)
                posted = tl.maximum(posted, ticket)
                trace(comm.context, TILES, REDUCE, rank, entry, since)
                if call.rounds.CREDITS:
                    finish_task(comm, call.reductions, task.round_index, COMPUTE)
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        wait_posted(comm, posted)


@triton.jit
def _run(comm, call):
    cta = tl.program_id(0)
    helpers: tl.constexpr = call.SENDERS + call.INTRAS
    if comm.WORLD_SIZE > 1:
        if cta == 0:
            announce(comm.context, comm.epoch, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
    if cta < call.SENDERS:
        send(comm, call, cta, call.SENDERS, copy_rows)
    elif cta < helpers:
        intra(comm, call, cta - call.SENDERS, call.INTRAS, copy_rows)
    else:
        compute = tl.num_programs(0) - helpers
        _prepare(comm, call, cta - helpers, compute)
        notify_prepared(comm, call, compute)
    wait_prepared(comm, call)
    first = tl.load(call.schedule + cta).to(tl.int32)
    end = tl.load(call.schedule + cta + 1).to(tl.int32)
    _compute(comm, call, first, end)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def ring_attention_backward_kernel(context, ranks, call):
    """The whole operator. ranks: `Ranks`; call: `Call`."""
    _run(Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), call)
