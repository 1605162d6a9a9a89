"""Routing: every rank publishes which token goes to which expert, and counts its rows inside the launch.

Expert ids are data, so how many rows an expert gets is unknown before the launch. Each rank publishes a routing table:
a header (its number of tokens, its number of experts, its capacity) and its expert ids. The table is in the memory of
its rank, and the network copies it to the counterparts of that rank, one in every other node. The ranks of a node read
tables over NVLink from where they are: tables of their node from the owner, tables of other nodes from the owner's
counterpart. A table is small compared with the tokens: 4 bytes per id, against 2*hidden/k bytes of bf16 per row.

From the tables, every rank derives the following on its own, with no further exchange:

- `count_rows` counts the rows of each expert in every segment of a table, a number of consecutive chunks. It also
  computes the position of each row among those of its expert in the segment, how many rows each rank gets, and which
  tokens of other nodes are sent to this node. All CTAs that count share the segments, and read each id once.
- `lay_out_rows` turns counts into row numbers. Rows are ordered by expert, then source rank, then token, then slot. The
  last CTA to finish counting runs it, and is the first to know the status: whether every rank has the capacity for its
  rows, and every id an expert. All ranks see the same tables, so all find the same status.

What the time before the first tile consists of. Loading ids, counting them and laying out rows are chains of loads and
CTA-wide sums, each of which takes one to two microseconds, whether it is about one number or a thousand. So every step
is divided among all CTAs, such that most of them load once. Between two steps, CTAs wait for each other, which takes
two to three microseconds. A rank that is alone saves one such wait: every CTA counts the ids that it has copied itself.

schedule.py then divides the rows of this rank into blocks and orders the blocks.

A token that names an expert twice makes two rows. Negative ids are dropped.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import MAX_CTAS, SEGMENT, TABLE, rank_of, segment_of, state_of
from mkernel.lang.layout import row_of, word_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import SEND
from mkernel.lang.signals import INVALID_ID, OVER_CAPACITY, gave_up, refuse, wait
from mkernel.ops.moe.kinds import ROUTED
from mkernel.ops.moe.protocol import (
    CAPACITY,
    EXPERTS,
    HEADER,
    TOKENS,
    holder_of,
    notify_routed,
    signal_of,
    wait_node_entered,
    wait_other_nodes_entered,
)
from mkernel.ops.moe.sizes import Sizes, power_above, round_up
from mkernel.runtime.group import Workspace
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants

OK = tl.constexpr(0)  # the status of a valid routing; otherwise OVER_CAPACITY or INVALID_ID

# Words of the summary that `lay_out_rows` writes for all CTAs.
STATUS = tl.constexpr(0)
BLOCKS = tl.constexpr(1)
FIRST_EXPERT = tl.constexpr(2)
PIECES_TAKEN = tl.constexpr(3)  # counter that assigns pieces of the combine to CTAs as they become free
TILES_TAKEN = tl.constexpr(4)  # counter that assigns tiles, likewise
BEFORE_NODE = tl.constexpr(5)  # schedule entries before the final blocks with rows of the node only (NODE_LAST)
CTAS_SETTLED = tl.constexpr(6)  # counts the CTAs that have settled their share of the rank's own chunks
SUMMARY = tl.constexpr(16)  # here begin: tokens of each source, then the first expert of each rank

# Words of an entry of the schedule: expert, first row, number of rows and number of the block; then the first entry of
# its group, and the number of blocks in the group.
ENTRY = tl.constexpr(6)

# Words of the workspace's state: how many CTAs of the current launch have finished counting, and publishing.
COUNTERS_DONE = tl.constexpr(3)
PUBLISHERS_DONE = tl.constexpr(6)

LEAST_TILE_M = 16  # of a configuration
MOST_COUNTERS = 3  # of a block, see `Dispatch.COUNTERS`

UNIT_ROWS = tl.constexpr(32)  # of the rank's own tokens, which are placed and counted together (placing.py)
MOST_SEGMENTS = tl.constexpr(128)  # of all tables, unless there are more tables: about as many as a GPU has SMs

BLOCK = tl.constexpr(1024)  # words that a CTA processes at a time
LONG_BLOCK = tl.constexpr(4096)  # the same for counts of segments
IDS_AT_ONCE = tl.constexpr(512)  # the same for ids that are counted, for this many experts at a time
EXPERTS_AT_ONCE = tl.constexpr(16)


class Tables(NamedTuple):
    """What a rank derives from the routing: 32-bit numbers in its own memory, written anew by every launch."""

    positions: Any  # [source, token, slot]: position of the row in its (expert, segment); only for my experts
    destinations: Any  # [source, token, slot]: its row number on this rank, or -1
    all_topk_ids: Any  # [source, token, slot]: the ids of all ranks
    counts: Any  # [expert, source, segment]: rows
    first_rows: Any  # [expert, source, segment]: number of the first of these rows
    rank_rows: Any  # [CTA that counts, rank]: how many rows go to that rank; behind the last rank, invalid ids
    bases: Any  # [expert, source]: number of the first of these rows; then the number of all rows
    own_units: Any  # [expert]: number of the expert's first unit (see placing.py); then the number of all units
    first_blocks: Any  # [expert]: number of the expert's first block; then the number of all blocks
    expert_counts: Any  # [expert]: rows
    placed: Any  # [block, counter]: the first counter of a block counts its rows that are in place
    recv_index: Any  # [source, token]: its number among the tokens that the source sends to my node, or -1
    send_index: Any  # [away - 1, token]: its number among my tokens that are sent to that node, or -1
    unsorted: Any  # scratch memory of `schedule_blocks`
    schedule: Any  # [index, word of ENTRY]: the blocks, in the order in which they are computed
    summary: Any  # STATUS, BLOCKS and the other words above
    row_source: Any  # [row]: the rank that its token came from
    row_token: Any  # [row]: the number of that token on its rank


class Segments(NamedTuple):
    """How routing tables are divided among the CTAs that count: into `each` segments of `chunks` chunks per table."""

    each: Any
    chunks: Any


class Routing(NamedTuple):
    """How the tokens of a call are routed. published: `Buffer`, the routing tables of all ranks, in the workspace."""

    tables: Any  # Tables
    published: Any
    K: Any  # experts per token
    SLOTS: Any  # a power of two, at least K
    RANKS: Any  # a power of two, greater than the number of ranks
    CHUNK: Any  # tokens per chunk
    HAS_IDS: Any  # published tables hold ids
    HAS_WEIGHTS: Any  # published tables hold weights


def _table_lengths(world_size: int, max_tokens: int, k: int, experts: int, capacity: int) -> Tables:
    """The words of each table. They are bounds for any tile and any number of nodes, so that they depend only on what
    is known while a graph is traced."""
    all_tokens = world_size * max_tokens
    sections = experts * world_size
    segments = sections * min(math.ceil(MOST_SEGMENTS.value / world_size), max_tokens)  # see `segments_of`
    ranks = power_above(world_size + 1)
    blocks = capacity // LEAST_TILE_M + experts  # the last block of every expert may be partial
    return Tables(
        positions=all_tokens * k,
        destinations=all_tokens * k,
        all_topk_ids=all_tokens * k,
        counts=segments,
        first_rows=segments,
        rank_rows=MAX_CTAS.value * ranks,
        bases=sections + 1,
        own_units=experts + 1,
        first_blocks=experts + 1,
        expert_counts=experts,
        placed=blocks * MOST_COUNTERS,
        recv_index=all_tokens,
        send_index=all_tokens,
        unsorted=blocks * ENTRY.value,
        schedule=blocks * ENTRY.value,
        summary=SUMMARY.value + 2 * ranks,
        row_source=capacity,
        row_token=capacity,
    )


def table_words(world_size: int, max_tokens: int, k: int, experts: int, capacity: int) -> int:
    """The words of all tables."""
    lengths = _table_lengths(world_size, max_tokens, k, experts, capacity)
    return sum(round_up(max(length, 1), 16) for length in lengths)


def tables_in(memory: torch.Tensor, world_size: int, max_tokens: int, k: int, experts: int, capacity: int) -> Tables:
    """The tables in memory of `table_words` words."""
    lengths = _table_lengths(world_size, max_tokens, k, experts, capacity)
    parts = torch.split(memory, [round_up(max(length, 1), 16) for length in lengths])
    return Tables(*(part[: max(length, 1)] for part, length in zip(parts, lengths, strict=True)))


def routing_of(
    sizes: Sizes, memory: Layout, workspace: Workspace, tables: Tables, *, ids: bool = False, weights: bool = False
) -> Routing:
    """The `Routing` of a launch. ids, weights: whether the ranks publish them."""
    return Routing(
        tables, memory.buffer_in(workspace, "tables"),
        *constants(sizes.k, power_above(sizes.k), power_above(sizes.world_size + 1), sizes.chunk_rows, ids, weights),
    )  # fmt: skip


# -- routing tables


@triton.jit
def table_of(comm, routing, source):
    """Pointer to the published routing table of `source`, in the memory of the rank that holds it."""
    segment = segment_of(comm.context, holder_of(comm, source), tl.int32)
    return segment + row_of(routing.published, comm.epoch, source)


@triton.jit
def segments_of(comm, batch):
    """The `Segments` of a call: about MOST_SEGMENTS of all tables together, and at least one of each."""
    chunks = tl.maximum(tl.cdiv(batch.chunks * comm.WORLD_SIZE, MOST_SEGMENTS), 1)
    chunks = tl.minimum(chunks, tl.maximum(batch.chunks, 1))
    return Segments(tl.cdiv(batch.chunks, chunks), chunks)


@triton.jit
def _write_words(table, words, begin, end, K: tl.constexpr, FLOAT: tl.constexpr):
    """Copy words begin..end-1 of [tokens, K] ids, or of weights as the bits of fp32 numbers, to a table."""
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        pointers = words.data + (i // K).to(tl.int64) * words.row_stride + (i % K).to(tl.int64) * words.column_stride
        value = tl.load(pointers, mask=inside)
        if FLOAT:
            value = value.to(tl.float32).to(tl.int32, bitcast=True)
        else:
            # clamp 64-bit ids, so that truncation cannot turn one into a valid id; 2**31 - 1 is never an expert
            value = tl.minimum(tl.maximum(value, -1), 0x7FFFFFFF).to(tl.int32)
        tl.store(table + i, value, mask=inside)


@triton.jit
def _write_part(comm, routing, batch, ids, weights, begin, end):
    """Write the words of tokens begin..end-1 to my routing table: ids and weights, each a `Block` or None."""
    K: tl.constexpr = routing.K
    table = table_of(comm, routing, rank_of(comm.context))
    if routing.HAS_IDS:
        _write_words(table + HEADER, ids, begin * K, end * K, K, False)
    if routing.HAS_WEIGHTS:
        weights_table = table + HEADER
        if routing.HAS_IDS:
            weights_table += batch.max_tokens * K
        _write_words(weights_table, weights, begin * K, end * K, K, True)


@triton.jit
def _write_header(comm, routing, batch):
    """Write the header of my routing table."""
    word = tl.arange(0, 16)
    header = tl.where(word == TOKENS, batch.tokens, 0) + tl.where(word == EXPERTS, batch.experts, 0)
    tl.store(
        table_of(comm, routing, rank_of(comm.context)) + word, header + tl.where(word == CAPACITY, batch.capacity, 0)
    )


@triton.jit
def _post_table(comm, routing, batch, rank):
    """Post my routing table to my counterparts. rank: mine."""
    segment = tl.load(comm.context + SEGMENT)
    size = HEADER + batch.tokens * routing.K
    if routing.HAS_IDS and routing.HAS_WEIGHTS:
        size += batch.max_tokens * routing.K
    signal = word_of(batch.signals.routed, comm.epoch, rank, 0) * 8
    offset = row_of(routing.published, comm.epoch, rank) * 4
    for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        transfer = Transfer(peer, segment, offset, segment, offset, size.to(tl.int64) * 4)
        post(comm.context, transfer, signal, comm.epoch, SEND)


@triton.jit
def publish(comm, routing, batch, ids, weights, worker, workers):
    """This worker's share of publishing my routing table; all workers call it once. The last one to finish signals the
    table to my node, and posts it to my counterparts. ids, weights: `Block`s, or None.

    A rank that is alone signals no ids: a worker counts those that it has written (`count_rows` divides them in the
    same way), and all others read the table after they have waited for what is counted."""
    ALONE: tl.constexpr = comm.WORLD_SIZE == 1 and routing.HAS_IDS
    rank = rank_of(comm.context)
    ready = wait_node_entered(comm, batch.signals, comm.epoch - 1, SEND)
    ready &= wait_other_nodes_entered(comm, batch.signals, comm.epoch - 1, SEND)
    if ready:
        chunks = segments_of(comm, batch).chunks if ALONE else tl.cdiv(batch.chunks, workers)
        tokens = chunks * routing.CHUNK
        for begin in range(worker * tokens, batch.tokens, workers * tokens):
            _write_part(comm, routing, batch, ids, weights, begin, tl.minimum(begin + tokens, batch.tokens))
        if ALONE:
            if worker == 0:
                _write_header(comm, routing, batch)
            tl.debug_barrier()  # other threads of this CTA count what this thread has written
        elif _published_last(comm.context, workers):
            _write_header(comm, routing, batch)
            notify_routed(comm, batch.signals, rank)
            _post_table(comm, routing, batch, rank)


@triton.jit
def wait_routing(comm, signals, ROLE: tl.constexpr):
    """Wait for the routing tables of all ranks; false if the group gave up."""
    rank = rank_of(comm.context)
    good = tl.full((), True, tl.int1)
    for i in range(comm.WORLD_SIZE):
        source = (rank + i) % comm.WORLD_SIZE
        signal = signal_of(comm, holder_of(comm, source), signals.routed, source, 0)
        good &= wait(comm.context, signal, comm.epoch, ROLE, ROUTED, source, 0)
    return good


@triton.jit
def _headers(comm, routing, WORD: tl.constexpr):
    """One word of the headers of all ranks, by rank; 0 beyond the last rank."""
    source = tl.arange(0, routing.RANKS)
    inside = source < comm.WORLD_SIZE
    address = tl.load(comm.context + TABLE + holder_of(comm, source), mask=inside, other=0)
    offset = row_of(routing.published, comm.epoch, source) + WORD
    return tl.load(address.to(tl.pointer_type(tl.int32)) + offset, mask=inside, other=0)


@triton.jit
def experts_before(comm, routing, rank):
    """The number of experts of the ranks below `rank`, which is the id of the first expert of `rank`."""
    experts = _headers(comm, routing, EXPERTS)
    return tl.sum(tl.where(tl.arange(0, routing.RANKS) < rank, experts, 0))


@triton.jit
def ids_of(routing, table, token, tokens, ROWS: tl.constexpr):
    """ROWS x SLOTS ids from a routing table, starting with those of `token`; -1 beyond `tokens` and beyond K."""
    t = token + tl.arange(0, ROWS)[:, None]
    slot = tl.arange(0, routing.SLOTS)[None, :]
    return tl.load(table + HEADER + t * routing.K + slot, mask=(t < tokens) & (slot < routing.K), other=-1)


@triton.jit
def named_in(ids, low, high):
    """For each row of a block of ids: 1 if it names an expert in low..high-1, else 0."""
    return tl.max(((ids >= low) & (ids < high)).to(tl.int32), axis=1)


@triton.jit
def may_place(tables):
    """Whether rows may be placed: every row has a row number within the capacity. Valid after `lay_out_rows`."""
    return tl.load(tables.summary + STATUS) == OK


@triton.jit
def missing_rows(context, tables):
    """What a later launch of this rank adds to sums of rows: 0, or NaN if there are none, because the group has given
    up, and with it the tables, or because the routing is invalid."""
    missing = tl.full((), float("nan"), tl.float32)
    if not gave_up(context):
        if may_place(tables):
            missing = tl.full((), 0.0, tl.float32)
    return missing


@triton.jit
def tokens_of(tables, source):
    """The number of tokens of a rank. Valid after `lay_out_rows`."""
    return tl.load(tables.summary + SUMMARY + source)


@triton.jit
def block_of(comm, tables, expert, row, mask, TILE_M: tl.constexpr):
    """The number of the block that holds each row of these experts. Valid after `lay_out_rows`."""
    block = tl.load(tables.first_blocks + expert, mask=mask, other=0)
    base = tl.load(tables.bases + expert * comm.WORLD_SIZE, mask=mask, other=0)
    return block + (row - base) // TILE_M


# -- counting


@triton.jit
def _number_rows(table, begin, end, first, last, positions):
    """Number the words begin..end-1 of a table that name one of the experts first..last-1, in order; at most
    EXPERTS_AT_ONCE experts. Returns how many there are of each."""
    expert = first + tl.arange(0, EXPERTS_AT_ONCE)[None, :]
    before = tl.zeros((EXPERTS_AT_ONCE,), tl.int32)
    for start in range(begin, end, IDS_AT_ONCE):
        i = start + tl.arange(0, IDS_AT_ONCE)
        ids = tl.load(table + HEADER + i, mask=i < end, other=-1)
        named = ((ids[:, None] == expert) & (expert < last)).to(tl.int32)
        number = before[None, :] + tl.cumsum(named, 0) - named
        tl.store(positions + i, tl.sum(named * number, axis=1), mask=(ids >= first) & (ids < last))
        before += tl.sum(named, axis=0)
    return before


@triton.jit
def _count_between(table, begin, end, bounds, ends, RANKS: tl.constexpr):
    """For each rank, how many of the words begin..end-1 of a table are ids from its bound to its end."""
    between = tl.zeros((RANKS,), tl.int32)
    AT_ONCE: tl.constexpr = min(max(8192 // RANKS, 16), IDS_AT_ONCE)
    for start in range(begin, end, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        ids = tl.load(table + HEADER + i, mask=i < end, other=-1)[:, None]
        between += tl.sum(((ids >= bounds[None, :]) & (ids <= ends[None, :])).to(tl.int32), axis=0)
    return between


@triton.jit
def number_crossings(comm, routing, table, tokens, node, numbers):
    """Number the tokens that name an expert of a node, in order; the others get -1."""
    low = experts_before(comm, routing, node * comm.RANKS_PER_NODE)
    high = experts_before(comm, routing, (node + 1) * comm.RANKS_PER_NODE)
    before = tl.full((), 0, tl.int32)
    AT_ONCE: tl.constexpr = max(2 * LONG_BLOCK // routing.SLOTS, 16)
    for start in range(0, tokens, AT_ONCE):
        crosses = named_in(ids_of(routing, table, start, tokens, AT_ONCE), low, high)
        t = start + tl.arange(0, AT_ONCE)
        number = before + tl.cumsum(crosses, 0) - crosses
        tl.store(numbers + t, tl.where(crosses == 1, number, -1), mask=t < tokens)
        before += tl.sum(crosses)


@triton.jit
def _count_segment(comm, routing, batch, first, source, segment):
    """Write positions and counts of `Tables` for a segment. Returns the words of the segment: (begin, end). first: my
    first expert."""
    tables = routing.tables
    segments = segments_of(comm, batch)
    table = table_of(comm, routing, source)
    tokens = batch.tokens
    if comm.WORLD_SIZE > 1:
        tokens = tl.load(table + TOKENS)
    length = segments.chunks * routing.CHUNK * routing.K
    begin = segment * length
    end = tl.minimum(begin + length, tokens * routing.K)
    positions = tables.positions + (source * batch.max_tokens).to(tl.int64) * routing.K
    for start in range(0, batch.experts, EXPERTS_AT_ONCE):
        rows = _number_rows(table, begin, end, first + start, first + batch.experts, positions)
        expert = start + tl.arange(0, EXPERTS_AT_ONCE)
        counts = tables.counts + (expert * comm.WORLD_SIZE + source) * segments.each + segment
        tl.store(counts, rows, mask=expert < batch.experts)
    return begin, end


@triton.jit
def _take_none(summary):
    """Reset the counters that assign pieces and tiles."""
    tl.store(summary + PIECES_TAKEN, 0)
    tl.store(summary + TILES_TAKEN, 0)


@triton.jit
def _write_summary(comm, routing, first, bounds):
    """Write what the summary says about the ranks, and set its counters to zero. first: my first expert; bounds: those
    of all ranks."""
    summary = routing.tables.summary
    i = tl.arange(0, routing.RANKS)
    tl.store(summary + FIRST_EXPERT, first)
    tl.store(summary + CTAS_SETTLED, 0)
    _take_none(summary)
    tl.store(summary + SUMMARY + i, _headers(comm, routing, TOKENS))
    tl.store(summary + SUMMARY + routing.RANKS + i, bounds)


@triton.jit
def count_rows(comm, routing, batch, worker, workers):
    """This worker's share of the counting: writes positions, counts, rank_rows, recv_index and most of the summary
    of `Tables`. All routing tables must have arrived; if the rank is alone, what this worker has published of them."""
    tables = routing.tables
    rank = rank_of(comm.context)
    node = rank // comm.RANKS_PER_NODE
    i = tl.arange(0, routing.RANKS)
    owned = tl.where(i == 0, batch.experts, 0)
    if comm.WORLD_SIZE > 1:
        owned = _headers(comm, routing, EXPERTS)
        for item in range(workers - 1 - worker, comm.WORLD_SIZE - comm.RANKS_PER_NODE, workers):
            source = ((node + 1) * comm.RANKS_PER_NODE + item) % comm.WORLD_SIZE
            table = table_of(comm, routing, source)
            numbers = tables.recv_index + source * batch.max_tokens
            number_crossings(comm, routing, table, tl.load(table + TOKENS), node, numbers)
    bounds = tl.cumsum(owned, 0) - owned
    ends = tl.where(i < comm.WORLD_SIZE, bounds + owned - 1, 0x7FFFFFFF)
    first = tl.sum(tl.where(i == rank, bounds, 0))
    rank_rows = tl.zeros((routing.RANKS,), tl.int32)
    each = segments_of(comm, batch).each
    for item in range(worker, comm.WORLD_SIZE * each, workers):
        source = item // each
        begin, end = _count_segment(comm, routing, batch, first, source, item % each)
        rank_rows += _count_between(table_of(comm, routing, source), begin, end, bounds, ends, routing.RANKS)
    tl.store(tables.rank_rows + worker * routing.RANKS + i, rank_rows)
    if worker == 0:
        _write_summary(comm, routing, first, bounds)


@triton.jit
def _count_counter(state):
    """Count a CTA that has finished counting. Returns how many had finished before. The last one has acquired the
    counts of all others."""
    return tl.atomic_add(state + COUNTERS_DONE, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _count_publisher(state):
    """Count a CTA that has finished publishing. Returns how many had finished before. The last one has acquired what
    all others have written."""
    return tl.atomic_add(state + PUBLISHERS_DONE, 1, sem="acq_rel", scope="gpu")


@triton.jit
def counted_last(context, workers):
    """Whether this CTA is the last to finish counting. Every CTA that counts calls this once."""
    state = state_of(context)
    tl.debug_barrier()
    before = _count_counter(state)
    tl.debug_barrier()
    last = before == workers - 1
    if last:
        tl.atomic_xchg(state + COUNTERS_DONE, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def _published_last(context, workers):
    """Whether this CTA is the last to finish publishing. Every CTA that publishes calls this once."""
    state = state_of(context)
    tl.debug_barrier()
    before = _count_publisher(state)
    tl.debug_barrier()
    last = before == workers - 1
    if last:
        tl.atomic_xchg(state + PUBLISHERS_DONE, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def _find_status(comm, routing, workers):
    """Determine whether every rank has the capacity for its rows, and every id an expert. All ranks find the same
    status, and each records it. workers: CTAs that have counted."""
    i = tl.arange(0, routing.RANKS)
    capacity = _headers(comm, routing, CAPACITY)
    rows = tl.zeros((routing.RANKS,), tl.int32)
    AT_ONCE: tl.constexpr = max(2048 // routing.RANKS, 1)
    for start in range(0, workers, AT_ONCE):
        worker = start + tl.arange(0, AT_ONCE)[:, None]
        counted = routing.tables.rank_rows + worker * routing.RANKS + i[None, :]
        rows += tl.sum(tl.load(counted, mask=worker < workers, other=0), axis=0)
    invalid_ids = tl.sum(tl.where(i == comm.WORLD_SIZE, rows, 0))
    rows = tl.where(i < comm.WORLD_SIZE, rows, 0)
    excess = tl.max(rows - capacity)
    status = tl.where(invalid_ids > 0, INVALID_ID, tl.where(excess > 0, OVER_CAPACITY, OK))
    if status == INVALID_ID:
        refuse(comm.context, INVALID_ID, 0, invalid_ids, tl.sum(_headers(comm, routing, EXPERTS)))
    elif status == OVER_CAPACITY:
        full = tl.min(tl.where(rows - capacity == excess, i, routing.RANKS))
        needed = tl.sum(tl.where(i == full, rows, 0))
        refuse(comm.context, OVER_CAPACITY, full, needed, tl.sum(tl.where(i == full, capacity, 0)))
    return status


@triton.jit
def lay_out_rows(comm, routing, batch, workers, TILE_M: tl.constexpr, COUNTERS: tl.constexpr):
    """Turn counts into row numbers and blocks of TILE_M rows: writes first_rows, bases, own_units, first_blocks,
    expert_counts and the rest of the summary of `Tables`. Each block has COUNTERS counters, which are set to zero.
    If the routing is invalid, there are no rows: launches that have been enqueued before the host finds out read
    these tables, and would read beyond the capacity. workers: CTAs that have counted."""
    tables = routing.tables
    experts = batch.experts
    each = segments_of(comm, batch).each
    status = _find_status(comm, routing, workers)
    total = tl.full((), 0, tl.int32)
    for start in range(0, experts * comm.WORLD_SIZE * each, LONG_BLOCK):
        i = start + tl.arange(0, LONG_BLOCK)
        inside = i < experts * comm.WORLD_SIZE * each
        count = tl.load(tables.counts + i, mask=inside & (status == OK), other=0)
        row = total + tl.cumsum(count, 0) - count
        tl.store(tables.first_rows + i, row, mask=inside)
        tl.store(tables.bases + i // each, row, mask=inside & (i % each == 0))
        total += tl.sum(count)
    tl.store(tables.bases + experts * comm.WORLD_SIZE, total)
    tl.debug_barrier()
    blocks = tl.full((), 0, tl.int32)
    own_units = tl.full((), 0, tl.int32)
    own_bases = tables.bases + rank_of(comm.context)
    for start in range(0, experts, BLOCK):
        expert = start + tl.arange(0, BLOCK)
        inside = expert < experts
        rows = tl.load(tables.bases + (expert + 1) * comm.WORLD_SIZE, mask=inside, other=0)
        rows -= tl.load(tables.bases + expert * comm.WORLD_SIZE, mask=inside, other=0)
        own = tl.load(own_bases + expert * comm.WORLD_SIZE + 1, mask=inside, other=0)
        own -= tl.load(own_bases + expert * comm.WORLD_SIZE, mask=inside, other=0)
        tl.store(tables.expert_counts + expert, rows, mask=inside)
        expert_blocks = (rows + TILE_M - 1) // TILE_M
        tl.store(tables.first_blocks + expert, blocks + tl.cumsum(expert_blocks, 0) - expert_blocks, mask=inside)
        blocks += tl.sum(expert_blocks)
        units = (own + UNIT_ROWS - 1) // UNIT_ROWS
        tl.store(tables.own_units + expert, own_units + tl.cumsum(units, 0) - units, mask=inside)
        own_units += tl.sum(units)
    tl.store(tables.first_blocks + experts, blocks)
    tl.store(tables.own_units + experts, own_units)
    for start in range(0, blocks * COUNTERS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(tables.placed + i, tl.zeros((BLOCK,), tl.int32), mask=i < blocks * COUNTERS)
    tl.store(tables.summary + STATUS, status)
    tl.store(tables.summary + BLOCKS, blocks)
