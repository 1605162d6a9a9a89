"""Bringing the experts' results back: a weighted sum at the token's rank, in a fixed order.

Three steps, each over chunks of a source's tokens:

- `return_chunk`, on the ranks of the experts: the rows that a token has on this rank, times their weights,
  summed in the order of the token's slots. One row per token and rank, in this rank's memory.
- `relay_chunk`, between nodes: the counterpart of the token's rank sums the rows that the ranks of its node
  have for the token, in rank order, and sends the sum. One row per token and node crosses the network.
- `collect_chunk`, on the token's rank: the sums of other nodes and the rows of the ranks of its own node, read
  over NVLink, summed in the order of nodes and ranks.

All sums are fp32. What is handed on, in memory or over a link, is rounded to the type of the rows. Which rows
there are follows from the routing alone, so the same input gives the same bits.
"""

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.copy import await_link, reserve_link
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.routing import HEADER, SUMMARY, arrivals, named_in, table_of
from mkernel.lang.signals import notify, wait
from mkernel.lang.trace import GATHER, REDUCE, SEND_CHUNK, TILES, trace, trace_time

RETURNED = tl.constexpr(30)  # the peer has summed what its experts made of a chunk of tokens
BACK = tl.constexpr(31)  # what the peer's node made of a chunk of my tokens is here


@triton.jit
def returned_signal(parity, source, chunk, chunks, before, signals, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Word of the signal that this rank has its rows of a chunk of `source`'s tokens ready. `before`:
    arrival signals per rank of the steps before."""
    return arrivals(parity, signals, SIZE, GPUS) + SIZE * before + source.to(tl.int64) * chunks + chunk


@triton.jit
def back_signal(parity, peer, chunk, chunks, before, signals, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Word of the signal that the sums of the peer's node for a chunk of my tokens are here."""
    return arrivals(parity, signals, SIZE, GPUS) + SIZE * (before + chunks) + peer.to(tl.int64) * chunks + chunk


@triton.jit
def homeward(item, rank, chunks, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """(source, chunk): the tokens of other nodes first, chunk by chunk, then those of this node."""
    others: tl.constexpr = SIZE - GPUS
    first = (rank // GPUS + 1) * GPUS
    far = item < chunks * others
    left = item - chunks * others
    source = tl.where(far, item % max(others, 1), others + left % GPUS)
    chunk = tl.where(far, item // max(others, 1), left // GPUS)
    return (first + source) % SIZE, chunk


@triton.jit
def tokens_of(summary, source):
    """How many tokens a rank has."""
    return tl.load(summary + SUMMARY + source)


@triton.jit
def _rows(rows, stride, column_stride, line, j, columns):
    """Columns j of some rows in fp32; zeros of row -1."""
    pointers = rows + line.to(tl.int64)[:, None] * stride + j.to(tl.int64) * column_stride
    return tl.load(pointers, mask=(line >= 0)[:, None] & (j < columns), other=0.0).to(tl.float32)


@triton.jit
def return_chunk(
    context, epoch, y, y_stride, y_column_stride, columns, source, chunk, chunks, destinations, summary,
    weights_at, most_tokens, tables_at, half_words, table_words, row_stride, partial_at, half, before, signals,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    CHUNK: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum what this rank's experts made of a chunk of `source`'s tokens. y and the weights must be here;
    all ranks of my node must have entered the epoch before this one."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    table = table_of(context, source, parity, tables_at, half_words, table_words, GPUS)
    weights = (table + HEADER + weights_at).to(tl.pointer_type(tl.float32))
    places = (source * most_tokens).to(tl.int64) * K
    partial = segment_of(context, rank, DTYPE) + partial_at + parity.to(tl.int64) * half
    partial += (source * most_tokens).to(tl.int64) * row_stride
    end = tl.minimum((chunk + 1) * CHUNK, tokens_of(summary, source))
    since = trace_time(context)
    for row in range(chunk * CHUNK, end, COPY_ROWS):
        i = row + tl.arange(0, COPY_ROWS)
        for column in range(0, columns, COPY_COLUMNS):
            j = column + tl.arange(0, COPY_COLUMNS)[None, :]
            total = tl.zeros((COPY_ROWS, COPY_COLUMNS), tl.float32)
            mine = i < 0
            # each thread loads what it has to know of a token: to ask others for it takes longer
            for slot in tl.static_range(K):
                line = tl.load(destinations + places + i * K + slot, mask=i < end, other=-1)
                # weights of rows that are not here, or nowhere, may be anything
                factor = tl.load(weights + i * K + slot, mask=line >= 0, other=0.0)
                total += factor[:, None] * _rows(y, y_stride, y_column_stride, line, j, columns)
                mine |= line >= 0
            target = partial + i.to(tl.int64)[:, None] * row_stride + j
            tl.store(target, total.to(DTYPE), mask=mine[:, None] & (j < columns))
    trace(context, TILES, REDUCE, source, chunk, since)
    signal = returned_signal(parity, source, chunk, chunks, before, signals, SIZE, GPUS)
    notify(segment_of(context, rank, tl.int64) + signal, epoch)


@triton.jit
def _wait_for_node(context, epoch, source, chunk, chunks, before, signals, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Wait until all ranks of my node have their rows of a chunk of `source`'s tokens ready."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    here = tl.full((), True, tl.int1)
    for peer in range(rank // GPUS * GPUS, rank // GPUS * GPUS + GPUS):
        signal = returned_signal(parity, source, chunk, chunks, before, signals, SIZE, GPUS)
        here &= wait(context, segment_of(context, peer, tl.int64) + signal, epoch, COMPUTE, RETURNED, peer, chunk)
    return here


@triton.jit
def _pay_for_link(
    context, source, chunk, end, columns, everyones_ids, summary, most_tokens, nanoseconds_per_mib,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, GPUS: tl.constexpr, RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Wait as long as a paced link takes for the rows of a chunk that come from other ranks of the node."""
    rank = rank_of(context)
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    places = (source * most_tokens).to(tl.int64) * K + token * K + slot
    ids = tl.load(everyones_ids + places, mask=(token < end) & (slot < K), other=-1)
    rows = tl.full((), 0, tl.int64)
    for peer in range(rank // GPUS * GPUS, rank // GPUS * GPUS + GPUS):
        low = tl.load(summary + SUMMARY + RANKS + peer)
        high = tl.load(summary + SUMMARY + RANKS + peer + 1)
        rows += tl.where(peer == rank, 0, tl.sum(named_in(ids, low, high))).to(tl.int64)
    await_link(reserve_link(context, rows * columns * (DTYPE.primitive_bitwidth // 8), nanoseconds_per_mib))


@triton.jit
def _ranks_named(
    context, everyones_ids, source, i, end, summary, most_tokens,
    K: tl.constexpr, SLOTS: tl.constexpr, GPUS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A bit for each rank of my node that has an expert of a token."""
    tl.static_assert(GPUS <= 64)
    slot = tl.arange(0, SLOTS)[None, :]
    places = (source * most_tokens).to(tl.int64) * K + i[:, None] * K + slot
    ids = tl.load(everyones_ids + places, mask=(i < end)[:, None] & (slot < K), other=-1)
    bits = tl.zeros(i.shape, tl.int64)
    base = rank_of(context) // GPUS * GPUS
    for peer in range(GPUS):
        low = tl.load(summary + SUMMARY + RANKS + base + peer)
        high = tl.load(summary + SUMMARY + RANKS + base + peer + 1)
        bits |= named_in(ids, low, high).to(tl.int64) << peer
    return bits


@triton.jit
def _add_node(
    context, total, bits, i, j, columns, source, most_tokens, row_stride, partial_at, half, parity,
    DTYPE: tl.constexpr, GPUS: tl.constexpr,
):  # fmt: skip
    """Add the rows that the ranks of my node have for some tokens of `source`, in rank order."""
    base = rank_of(context) // GPUS * GPUS
    for peer in tl.static_range(GPUS):
        partial = segment_of(context, base + peer, DTYPE) + partial_at + parity.to(tl.int64) * half
        partial += (source * most_tokens).to(tl.int64) * row_stride
        total += _rows(partial, row_stride, 1, tl.where(bits >> peer & 1 == 1, i, -1), j, columns)
    return total


@triton.jit
def relay_chunk(
    context, epoch, columns, away, chunk, chunks, everyones_ids, slots, summary, most_tokens,
    row_stride, partial_at, returning_at, landing_at, half, before, signals, nanoseconds_per_mib,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, CHUNK: tl.constexpr, PACED: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum what my node made of a chunk of the tokens of my counterpart `away` nodes on, and send it. That
    node must have entered the epoch before this one."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    segment = tl.load(context + SEGMENT)
    source = (rank + away * GPUS) % SIZE
    area = most_tokens.to(tl.int64) * row_stride
    end = tl.minimum((chunk + 1) * CHUNK, tokens_of(summary, source))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(slots + source * most_tokens + token, mask=token < end, other=-1)
    count = tl.sum((numbers >= 0).to(tl.int64))
    first = tl.min(tl.where(numbers >= 0, numbers, 0x7FFFFFFF)).to(tl.int64)
    if count > 0:
        here = _wait_for_node(context, epoch, source, chunk, chunks, before, signals, SIZE, GPUS)
        if here:
            since = trace_time(context)
            mine = segment_of(context, rank, DTYPE) + parity.to(tl.int64) * half + returning_at + (away - 1) * area
            for row in range(chunk * CHUNK, end, COPY_ROWS):
                i = row + tl.arange(0, COPY_ROWS)
                number = tl.load(slots + source * most_tokens + i, mask=i < end, other=-1)
                bits = _ranks_named(context, everyones_ids, source, i, end, summary, most_tokens, K, SLOTS, GPUS, RANKS)
                for column in range(0, columns, COPY_COLUMNS):
                    j = column + tl.arange(0, COPY_COLUMNS)[None, :]
                    total = _add_node(
                        context, tl.zeros((COPY_ROWS, COPY_COLUMNS), tl.float32), bits, i, j, columns, source,
                        most_tokens, row_stride, partial_at, half, parity, DTYPE, GPUS,
                    )  # fmt: skip
                    target = mine + number.to(tl.int64)[:, None] * row_stride + j
                    tl.store(target, total.to(DTYPE), mask=(number >= 0)[:, None] & (j < columns))
            if PACED:
                _pay_for_link(
                    context, source, chunk, end, columns, everyones_ids, summary, most_tokens, nanoseconds_per_mib,
                    DTYPE, K, SLOTS, GPUS, RANKS, CHUNK,
                )  # fmt: skip
            element: tl.constexpr = DTYPE.primitive_bitwidth // 8
            there = parity.to(tl.int64) * half + first * row_stride
            origin = (returning_at + (away - 1) * area + there) * element
            target = (landing_at + (SIZE // GPUS - 1 - away) * area + there) * element
            size = ((count - 1) * row_stride + columns) * element
            signal = back_signal(parity, rank, chunk, chunks, before, signals, SIZE, GPUS) * 8
            post(context, Transfer(source, segment, origin, segment, target, size), signal, epoch, COMPUTE)
            trace(context, TILES, SEND_CHUNK, source, chunk, since)


@triton.jit
def collect_chunk(
    context, epoch, out, out_stride, out_column_stride, columns, chunk, chunks, everyones_ids, departed, summary,
    most_tokens, row_stride, partial_at, landing_at, half, before, signals, nanoseconds_per_mib,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, CHUNK: tl.constexpr, PACED: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum what all nodes made of a chunk of my tokens, in the order of nodes."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    nodes: tl.constexpr = SIZE // GPUS
    mine = segment_of(context, rank, tl.int64)
    landed = segment_of(context, rank, DTYPE) + landing_at + parity.to(tl.int64) * half
    end = tl.minimum((chunk + 1) * CHUNK, tokens_of(summary, rank))
    here = _wait_for_node(context, epoch, rank, chunk, chunks, before, signals, SIZE, GPUS)
    for away in range(1, nodes):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        numbers = tl.load(departed + (away - 1) * most_tokens + token, mask=token < end, other=-1)
        if tl.max(numbers) >= 0:
            peer = (rank + away * GPUS) % SIZE
            signal = back_signal(parity, peer, chunk, chunks, before, signals, SIZE, GPUS)
            here &= wait(context, mine + signal, epoch, COMPUTE, BACK, peer, chunk)
    missing = tl.where(here, 0.0, float("nan"))
    since = trace_time(context)
    if PACED:
        _pay_for_link(
            context, rank, chunk, end, columns, everyones_ids, summary, most_tokens, nanoseconds_per_mib,
            DTYPE, K, SLOTS, GPUS, RANKS, CHUNK,
        )  # fmt: skip
    for row in range(chunk * CHUNK, end, COPY_ROWS):
        i = row + tl.arange(0, COPY_ROWS)
        bits = _ranks_named(context, everyones_ids, rank, i, end, summary, most_tokens, K, SLOTS, GPUS, RANKS)
        for column in range(0, columns, COPY_COLUMNS):
            j = column + tl.arange(0, COPY_COLUMNS)[None, :]
            total = tl.zeros((COPY_ROWS, COPY_COLUMNS), tl.float32)
            for node in tl.static_range(nodes):
                distance = (node - rank // GPUS + nodes) % nodes
                if distance == 0:
                    total = _add_node(
                        context, total, bits, i, j, columns, rank, most_tokens, row_stride, partial_at, half, parity,
                        DTYPE, GPUS,
                    )  # fmt: skip
                else:
                    number = tl.load(departed + (distance - 1) * most_tokens + i, mask=i < end, other=-1)
                    # where what comes from so many nodes on lands
                    lines = landed + (distance - 1) * most_tokens.to(tl.int64) * row_stride
                    total += _rows(lines, row_stride, 1, number, j, columns)
            pointers = out + i.to(tl.int64)[:, None] * out_stride + j.to(tl.int64) * out_column_stride
            inside = (i < end)[:, None] & (j < columns)
            tl.store(pointers, (total + missing).to(out.dtype.element_ty), mask=inside)
    trace(context, TILES, GATHER, rank, chunk, since)
