"""Dispatch: tokens go to the ranks of their experts, and are put where the grouped GEMM reads them.

`stage_tokens` copies a rank's tokens to where its node finds them, in the rank's own memory; `send_tokens` sends
other nodes those that they need, to the rank's counterpart there. `place_tokens` fetches the tokens that name an
expert of this rank, each once, and stores each once for every row that it makes; lang/routing.py says where.
Chunks of tokens are signalled where they lie, and the ranks of the node look there, over NVLink.
"""

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.copy import await_link, reserve_link
from mkernel.lang.order import arrival_order
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE, INTRA, SEND
from mkernel.lang.routing import (
    COUNTED,
    FIRST_EXPERT,
    FITS,
    HELD,
    NUMBERED,
    TOKENS,
    VERDICT,
    announce,
    announce_node,
    count_rows,
    counted_last,
    experts_before,
    held_signal,
    holder_of,
    ids_of,
    lay_out_rows,
    node_has_entered,
    number_crossings,
    other_nodes_have_entered,
    own_signal,
    publish,
    routing_is_here,
    schedule_blocks,
    settled_signal,
    table_of,
)
from mkernel.lang.signals import notify, wait
from mkernel.lang.trace import GATHER, PUSH_CHUNK, SEND_CHUNK, trace, trace_time


@triton.jit
def _copy_chunk(
    x, x_stride, x_column_stride, token, end, hidden, target, numbers, row_stride,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr, NUMBERED: tl.constexpr,
):  # fmt: skip
    """Copy some tokens to rows of a workspace: those of their own numbers, or of `numbers`, unless that is -1."""
    for row in range(token, end, COPY_ROWS):
        i = row + tl.arange(0, COPY_ROWS)
        line = i
        if NUMBERED:
            line = tl.load(numbers + i, mask=i < end, other=-1)
        for column in range(0, hidden, COPY_COLUMNS):
            j = column + tl.arange(0, COPY_COLUMNS)[None, :]
            inside = ((i < end) & (line >= 0))[:, None] & (j < hidden)
            pointers = x + i.to(tl.int64)[:, None] * x_stride + j.to(tl.int64) * x_column_stride
            tl.store(target + line.to(tl.int64)[:, None] * row_stride + j, tl.load(pointers, mask=inside), mask=inside)


@triton.jit
def stage_tokens(
    context, x, x_stride, x_column_stride, epoch, tokens, hidden, chunks, row_stride, staged_at, half, signals,
    first, step,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, CHUNK: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy this rank's tokens to where the ranks of its node can fetch them. That needs no routing table: it is done
    while these are on their way."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    staged = segment_of(context, rank, DTYPE) + parity.to(tl.int64) * half + staged_at
    if node_has_entered(context, epoch - 1, INTRA, GPUS):
        for chunk in range(first, tl.cdiv(tokens, CHUNK), step):
            since = trace_time(context)
            end = tl.minimum((chunk + 1) * CHUNK, tokens)
            _copy_chunk(
                x, x_stride, x_column_stride, chunk * CHUNK, end, hidden, staged, context, row_stride,
                COPY_ROWS, COPY_COLUMNS, False,
            )  # fmt: skip
            trace(context, INTRA, PUSH_CHUNK, rank, chunk, since)
            signal = held_signal(parity, rank, chunk, chunks, signals, SIZE, GPUS)
            notify(segment_of(context, rank, tl.int64) + signal, epoch)


@triton.jit
def _send_chunk(
    context, x, x_stride, x_column_stride, epoch, away, chunk, tokens, hidden, chunks, departed, most_tokens,
    row_stride, departing_at, landing_at, half, signals,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, CHUNK: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Send those tokens of a chunk that the node `away` nodes on needs, if there are any: copied to where the network
    can read them, one behind the other, and one request. departed[token] says which of those that go there it is,
    or -1."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    segment = tl.load(context + SEGMENT)
    token = chunk * CHUNK
    end = tl.minimum(token + CHUNK, tokens)
    i = token + tl.arange(0, CHUNK)
    number = tl.load(departed + i, mask=i < end, other=-1)
    count = tl.sum((number >= 0).to(tl.int64))
    first = tl.min(tl.where(number >= 0, number, 0x7FFFFFFF)).to(tl.int64)
    if count > 0:
        area = most_tokens.to(tl.int64) * row_stride
        departing = departing_at + (away - 1) * area + parity.to(tl.int64) * half
        _copy_chunk(
            x, x_stride, x_column_stride, token, end, hidden, segment_of(context, rank, DTYPE) + departing, departed,
            row_stride, COPY_ROWS, COPY_COLUMNS, True,
        )  # fmt: skip
        element: tl.constexpr = DTYPE.primitive_bitwidth // 8
        source = (departing + first * row_stride) * element
        landing = landing_at + (SIZE // GPUS - 1 - away) * area + parity.to(tl.int64) * half
        target = (landing + first * row_stride) * element
        size = ((count - 1) * row_stride + hidden) * element
        signal = held_signal(parity, rank, chunk, chunks, signals, SIZE, GPUS) * 8
        post(
            context, Transfer((rank + away * GPUS) % SIZE, segment, source, segment, target, size), signal, epoch, SEND
        )


@triton.jit
def send_tokens(
    context, x, x_stride, x_column_stride, epoch, hidden, chunks, departed, most_tokens,
    tables_at, half_words, table_words, row_stride, departing_at, landing_at, half, signals, first, step,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, CHUNK: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Send to each other node the tokens that it needs. The first sender numbers all tokens; their chunks go round the
    senders."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    good = routing_is_here(context, epoch, signals, SEND, SIZE, GPUS)
    good &= other_nodes_have_entered(context, epoch - 1, SEND, SIZE, GPUS)
    if good:
        table = table_of(context, rank, parity, tables_at, half_words, table_words, GPUS)
        tokens = tl.load(table + TOKENS)
        numbered = own_signal(segment_of(context, rank, tl.int64), 2, SIZE, GPUS)
        if first == 0:
            for away in range(1, SIZE // GPUS):
                base = (rank // GPUS + away) % (SIZE // GPUS) * GPUS
                low = experts_before(context, base, parity, tables_at, half_words, table_words, SIZE, GPUS, RANKS)
                high = experts_before(
                    context, base + GPUS, parity, tables_at, half_words, table_words, SIZE, GPUS, RANKS
                )
                number_crossings(table, tokens, low, high, departed + (away - 1) * most_tokens, K, SLOTS)
            notify(numbered, epoch)
        elif not wait(context, numbered, epoch, SEND, NUMBERED, -1, 0):
            tokens = 0
        for chunk in range(first, tl.cdiv(tokens, CHUNK), step):
            since = trace_time(context)
            for away in range(1, SIZE // GPUS):
                _send_chunk(
                    context, x, x_stride, x_column_stride, epoch, away, chunk, tokens, hidden, chunks,
                    departed + (away - 1) * most_tokens, most_tokens, row_stride, departing_at, landing_at, half,
                    signals, DTYPE, SIZE, GPUS, CHUNK, COPY_ROWS, COPY_COLUMNS,
                )  # fmt: skip
            trace(context, SEND, SEND_CHUNK, rank, chunk, since)


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
def _place_chunk(
    context, x, x_stride, x_column_stride, packed, epoch, source, token, tokens, hidden, chunk, chunks,
    positions, destinations, everyones_ids, bases, first_blocks, placed, slots, row_source, row_token,
    summary, experts, most_tokens,
    tables_at, half_words, table_words, row_stride, staged_at, landing_at, half, signals,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    TILE_M: tl.constexpr, COUNTERS: tl.constexpr, CHUNK: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fetch those tokens of a chunk that name an expert of this rank. Returns how many tokens came from
    another rank's memory."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    holder = holder_of(source, rank, GPUS)
    table = table_of(context, source, parity, tables_at, half_words, table_words, GPUS)
    places = (source * most_tokens).to(tl.int64) * K
    end = tl.minimum(token + CHUNK, tokens)

    # where the rows of the chunk go
    ids = ids_of(table, token, tokens, K, SLOTS, CHUNK)
    t = token + tl.arange(0, CHUNK)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    inside = (t < end) & (slot < K)
    expert = ids - tl.load(summary + FIRST_EXPERT)
    named = (expert >= 0) & (expert < experts)
    fits = tl.load(summary + VERDICT) == FITS
    named_and_fits = named & fits
    position = tl.load(positions + places + t * K + slot, mask=named_and_fits, other=0)
    position += tl.load(bases + expert * SIZE + source, mask=named_and_fits, other=0)
    position = tl.where(named_and_fits, position, -1)
    tl.store(destinations + places + t * K + slot, position, mask=inside)
    tl.store(everyones_ids + places + t * K + slot, ids, mask=inside)
    tl.store(row_source + position, source + 0 * position, mask=named_and_fits)
    tl.store(row_token + position, t + 0 * position, mask=named_and_fits)
    wanted = tl.sum(tl.max(named.to(tl.int32), axis=1))
    tl.debug_barrier()

    # where the tokens come from
    here = tl.full((), True, tl.int1)
    origin = x
    stride = tl.cast(x_stride, tl.int64)
    column_stride = tl.cast(x_column_stride, tl.int64)
    if source != rank:
        origin = segment_of(context, holder, DTYPE) + staged_at + parity.to(tl.int64) * half
        if source // GPUS != rank // GPUS:
            nodes: tl.constexpr = SIZE // GPUS
            away = (rank // GPUS - source // GPUS + nodes) % nodes
            area = (nodes - 1 - away) * most_tokens.to(tl.int64) * row_stride
            origin = segment_of(context, holder, DTYPE) + landing_at + area + parity.to(tl.int64) * half
        stride = tl.cast(row_stride, tl.int64)
        column_stride = tl.cast(1, tl.int64)
        if wanted > 0:
            signal = held_signal(parity, source, chunk, chunks, signals, SIZE, GPUS)
            here = wait(context, segment_of(context, holder, tl.int64) + signal, epoch, INTRA, HELD, source, chunk)

    if here & fits & (wanted > 0):
        since = trace_time(context)
        far = source // GPUS != rank // GPUS
        goes = destinations + places
        numbers = slots + source * most_tokens
        lines = _lines_of(goes, numbers, far, token, end, K, COPY_ROWS)
        for some in range(token, end, COPY_ROWS):
            i = some + tl.arange(0, COPY_ROWS)
            following = lines
            for column in range(0, hidden, COPY_COLUMNS):
                j = column + tl.arange(0, COPY_COLUMNS)[None, :]
                pointers = origin + lines.to(tl.int64)[:, None] * stride + j.to(tl.int64) * column_stride
                block = tl.load(pointers, mask=(lines >= 0)[:, None] & (j < hidden))
                # what is needed next is asked for meanwhile: beside a GEMM, memory takes a microsecond to answer
                rows = ()
                for which in tl.static_range(K):
                    rows = rows + (tl.load(goes + i * K + which, mask=i < end, other=-1),)  # type: ignore[assignment]
                following = _lines_of(goes, numbers, far, some + COPY_ROWS, end, K, COPY_ROWS)
                for which in tl.static_range(K):
                    target = packed + rows[which].to(tl.int64)[:, None] * row_stride + j
                    tl.store(target, block, mask=(rows[which] >= 0)[:, None] & (j < hidden))
            lines = following
        number = tl.load(first_blocks + expert, mask=named_and_fits, other=0)
        number += (position - tl.load(bases + expert * SIZE, mask=named_and_fits, other=0)) // TILE_M
        trace(context, INTRA, GATHER, source, chunk, since)
        tl.debug_barrier()
        tl.atomic_add(placed + number * COUNTERS, 1, mask=named_and_fits, sem="release", scope="gpu")
    return tl.where(source != rank, wanted, 0)


@triton.jit
def _share(items, worker, WORKERS: tl.constexpr):
    """How many of some items this worker gets, if they go round the first WORKERS."""
    return tl.where(worker < WORKERS, tl.cdiv(tl.maximum(items - worker, 0), WORKERS), 0)


@triton.jit
def place_tokens(
    context, x, x_stride, x_column_stride, packed, epoch, hidden, chunks,
    positions, destinations, everyones_ids, bases, first_blocks, placed, slots, row_source, row_token,
    summary, experts, most_tokens,
    tables_at, half_words, table_words, row_stride, staged_at, landing_at, half, signals, nanoseconds_per_mib,
    worker, WORKERS: tl.constexpr, NEAR_WORKERS: tl.constexpr, FAR_WORKERS: tl.constexpr,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    TILE_M: tl.constexpr, COUNTERS: tl.constexpr, CHUNK: tl.constexpr, PACED: tl.constexpr, SETTLED: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fetch all tokens that name an expert of this rank, in the order in which they become available. Chunks of the
    rank's own go round all workers; those of other nodes, which the network brings one by one, round the first
    FAR_WORKERS, those of its node round the next NEAR_WORKERS. SETTLED: signal of each chunk that the tables say where
    its rows are."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    mine = segment_of(context, rank, tl.int64)
    near_worker = worker
    if SIZE > GPUS:
        near_worker = (worker + WORKERS - FAR_WORKERS) % WORKERS  # the others first
    own = _share(chunks, worker, WORKERS)
    near = own + _share(chunks * (GPUS - 1), near_worker, NEAR_WORKERS)
    for turn in range(near + _share(chunks * (SIZE - GPUS), worker, FAR_WORKERS)):
        item = turn * WORKERS
        if turn >= own:
            item = chunks + (turn - own) * NEAR_WORKERS + (near_worker - worker)
        if turn >= near:
            item = chunks * GPUS + (turn - near) * FAR_WORKERS
        item += worker
        source, chunk = arrival_order(tl.cast(item, tl.int32), rank, chunks, SIZE, GPUS)
        table = table_of(context, source, parity, tables_at, half_words, table_words, GPUS)
        tokens = tl.load(table + TOKENS)
        if chunk * CHUNK < tokens:
            fetched = _place_chunk(
                context, x, x_stride, x_column_stride, packed, epoch, source, chunk * CHUNK, tokens, hidden,
                chunk, chunks, positions, destinations, everyones_ids, bases, first_blocks, placed, slots,
                row_source, row_token, summary, experts, most_tokens, tables_at, half_words, table_words, row_stride,
                staged_at, landing_at, half, signals,
                DTYPE, K, SLOTS, SIZE, GPUS, TILE_M, COUNTERS, CHUNK, COPY_ROWS, COPY_COLUMNS,
            )  # fmt: skip
            if SETTLED:
                notify(mine + settled_signal(parity, source, chunk, chunks, signals, SIZE, GPUS), epoch)
            if PACED:
                size = fetched.to(tl.int64) * hidden * (DTYPE.primitive_bitwidth // 8)
                await_link(reserve_link(context, size, nanoseconds_per_mib))


@triton.jit
def fill_with_nan(c, rows, columns, stride, column_stride, first, step):
    """Mark what was not computed."""
    for row in range(first, rows, step):
        for column in range(0, columns, 1024):
            j = column + tl.arange(0, 1024)
            nothing = tl.full((1024,), float("nan"), tl.float32).to(c.dtype.element_ty)
            tl.store(c + tl.cast(row, tl.int64) * stride + j.to(tl.int64) * column_stride, nothing, mask=j < columns)


@triton.jit
def dispatch(
    context, epoch, x, x_stride, x_column_stride, ids, ids_stride, ids_column_stride,
    weights, weights_stride, weights_column_stride, packed,
    positions, destinations, everyones_ids, counts, above, bases, first_blocks, expert_counts, placed, slots, departed,
    unsorted, schedule, summary, row_source, row_token,
    tokens, most_tokens, experts, room, hidden, chunks, signals, nanoseconds_per_mib,
    tables_at, half_words, table_words, row_stride, staged_at, departing_at, landing_at, half,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, SENDERS: tl.constexpr, INTRAS: tl.constexpr, NEAR_INTRAS: tl.constexpr,
    FAR_INTRAS: tl.constexpr, PACED: tl.constexpr, LAYER: tl.constexpr, TILE_M: tl.constexpr, GROUP: tl.constexpr,
    COUNTERS: tl.constexpr, CHUNK: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The whole way there, by all CTAs: the first SENDERS of them send, the others stage and count, and of these the
    first INTRAS place rows of their own rank, the first FAR_INTRAS of these also those of other nodes, the next
    NEAR_INTRAS those of the node. When the rank's own signals `counted` and `scheduled` are up, rows have places and
    blocks an order. LAYER: the results come back, so weights travel with the ids, and places are signalled chunk by
    chunk."""
    cta = tl.program_id(0)
    mine = segment_of(context, rank_of(context), tl.int64)
    counted = own_signal(mine, 0, SIZE, GPUS)
    scheduled = own_signal(mine, 1, SIZE, GPUS)
    counters = tl.num_programs(0) - SENDERS
    if cta == 0:
        announce(context, epoch, GPUS)
        publish(
            context, epoch, ids, ids_stride, ids_column_stride, weights, weights_stride, weights_column_stride,
            tokens, most_tokens, experts, room, tables_at, half_words, table_words, signals,
            K, True, LAYER, SIZE, GPUS,
        )  # fmt: skip
    if SIZE > GPUS:
        if cta == SENDERS:
            announce_node(context, epoch, INTRA, SIZE, GPUS)
    if cta < SENDERS:
        send_tokens(
            context, x, x_stride, x_column_stride, epoch, hidden, chunks, departed, most_tokens,
            tables_at, half_words, table_words, row_stride, departing_at, landing_at, half, signals, cta, SENDERS,
            DTYPE, K, SLOTS, SIZE, GPUS, RANKS, CHUNK, COPY_ROWS, COPY_COLUMNS,
        )  # fmt: skip
    else:
        if GPUS > 1:
            stage_tokens(
                context, x, x_stride, x_column_stride, epoch, tokens, hidden, chunks, row_stride, staged_at, half,
                signals, cta - SENDERS, counters, DTYPE, SIZE, GPUS, CHUNK, COPY_ROWS, COPY_COLUMNS,
            )  # fmt: skip
        if routing_is_here(context, epoch, signals, COMPUTE, SIZE, GPUS):
            count_rows(
                context, epoch, experts, positions, counts, above, slots, most_tokens,
                tables_at, half_words, table_words, cta - SENDERS, counters, K, SLOTS, SIZE, GPUS, RANKS,
            )  # fmt: skip
            if counted_last(context, counters):
                lay_out_rows(
                    context, epoch, experts, counts, above, bases, first_blocks, expert_counts, placed, summary,
                    tables_at, half_words, table_words, SIZE, GPUS, RANKS, TILE_M, COUNTERS,
                )  # fmt: skip
                notify(counted, epoch)
                schedule_blocks(
                    context, experts, counts, bases, first_blocks, summary, unsorted, schedule,
                    SIZE, GPUS, TILE_M, GROUP, LAYER,
                )  # fmt: skip
                notify(scheduled, epoch)
        if cta < SENDERS + INTRAS:
            if wait(context, counted, epoch, INTRA, COUNTED, -1, 0):
                place_tokens(
                    context, x, x_stride, x_column_stride, packed, epoch, hidden, chunks,
                    positions, destinations, everyones_ids, bases, first_blocks, placed, slots, row_source, row_token,
                    summary, experts, most_tokens, tables_at, half_words, table_words, row_stride,
                    staged_at, landing_at, half, signals, nanoseconds_per_mib, cta - SENDERS,
                    INTRAS, NEAR_INTRAS, FAR_INTRAS, DTYPE, K, SLOTS, SIZE, GPUS, TILE_M, COUNTERS, CHUNK, PACED, LAYER,
                    COPY_ROWS, COPY_COLUMNS,
                )  # fmt: skip
