"""ring_attention: attention over a sequence that is cut over the ranks, in one kernel per rank.

What it computes. Every rank holds its part of the sequence: query, key and value [batch, heads, length,
dim]. The result on each rank is the attention of its queries over the keys and values of all ranks, as
F.scaled_dot_product_attention would give for the whole sequence. Where the parts lie in the sequence
(contiguous, zigzag) and who sees whom (causal, packed documents): lang/attention.py.

How the work is cut. A *unit* is one batch and one head of keys. Everything goes unit by unit: a rank
sends unit 0 to all others, then unit 1, and so on, and attends in the same order. The running maximum, sum
and product of a tile of queries stay in registers while it goes through the keys of all ranks. The other
way, rank by rank as in a ring, would need all keys of one rank, for all heads, before any of the next: the
state of every tile would have to be stored and loaded at each step. Unit by unit, a few units in flight
are enough to overlap, so the buffer can be small without costing anything. With 4 ranks, 64 units
and 3072 keys each on an H200, a unit takes 119 us to compute and 42 us on its way (estimated).

Who does what. One persistent launch per rank; a CTA takes its role from its program id:

- `send` (only with several nodes): copies the rank's chunks of keys and values into a slot of its own and
  asks the network to write them to the rank of the same local index in every node that needs them.
- `intra`: pushes the rank's chunks to the ranks of its node that need them, and then those that arrive
  from other nodes, so a chunk crosses between two nodes once.
- `compute`: tiles of queries, in the order of a schedule that the host makes: a tile goes to the CTA that
  would be done first if every key block took as long as any other. Each tile starts with the rank's own
  keys, which are read where the caller has them.
- send and intra CTAs join the compute when they are done; the schedule says when that will be. In the kernel for
  Hopper intra is a warp of each CTA instead (ops/ring_attention_hopper.py).

What is signalled: see lang/rounds.py. A round is a unit, or, where the buffer is too small for two units
of all ranks, a part of a unit's keys; then a tile's state is kept in fp32 in `partial` between two
parts, by the CTA that owns the tile. What nobody's causal mask or document lets see is neither sent nor
computed.

Why buffers are safe. There are no two halves: a rank writes to a peer in epoch e only when the peer has
entered e. It has left e-1 then, so it has read all that was sent to it before: every chunk that is sent is
waited for by a tile (the one that sees it; in packed sequences one tile of each round waits for all that
its rank gets), or by an intra CTA that passes it on. For the same reason nothing of an older epoch is in
flight, and the slot in which chunks were staged for the network may be written. Within an epoch, round t
uses the slots of round t - window, and is written only when the reader has freed that round: all its
tiles of the round are done, and all its chunks that were to be passed on.

Why it cannot deadlock. All CTAs of a launch are resident: the plan refuses more than fit. Say that all
rounds before t end. Then round t - window is freed everywhere, since a tile or a chunk of it waits only
for chunks of its own round and for earlier rounds to be freed, and compute CTAs take their tiles in the
order of rounds. So round t is sent, passed on, and computed: all rounds end. A CTA that sends first must not
have tiles that this needs: it gets only tiles of the last `window` rounds, which nobody has to free for
anything to be sent. (Where the window holds all rounds, nothing waits for a tile at all, and a launch with one
copying CTA ends even if its CTAs run one after the other.) Waits have a timeout all the same.

What it costs. FLOPs 4*length*dim for each query, head and rank that is seen; each rank writes its keys and
values (gpus-1)*nodes times over NVLink and nodes-1 times over the network, at most. Workspace: `steps`
times the keys and values of one rank; two steps by default, more if a rank has fewer units than there are
other ranks, since the state would have to be stored then. Beside it, where units are cut in
parts, one fp32 state for the rows of one unit.

How exact it is. Scores, sums and products are accumulated in fp32; weights are rounded to the input's
dtype before they are multiplied with the values, as in every flash attention. A result is a weighted mean
of values: its error is at most about eps times the largest |value| that the row sees, whatever the length,
and the tests ask for 3 eps (weights, their sum and the result are rounded). fp32 is multiplied as fp32.
The order of the sum over the keys depends on the rank, not on the schedule: the same input gives the
same bits.

Ways that lost. Steps by rank with partial sums: above. Two halves of the workspace, as in
all_gather_matmul: a rank would have to wait for a late peer's keys anyway. Handing out tiles by an atomic
counter would balance as well as the schedule, but the warps of the Hopper kernel would have to tell each
other. Waiting for chunk after chunk: see everything_is_here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang.attention import attend, attention_of, key_blocks, keys_below, rows_of, seen_by, seen_by_rank
from mkernel.lang.context import SEGMENT, current_epoch, rank_of, segment_of
from mkernel.lang.copy import await_link, reserve_link
from mkernel.lang.device import acquire_for_descriptors
from mkernel.lang.entries import announce
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE, INTRA, SEND
from mkernel.lang.rounds import (
    arrived_word,
    chunk_height,
    is_seen,
    is_seen_in_node,
    may_begin,
    may_write,
    one_done,
    panel_is_here,
    slot_of,
    slot_row,
    stamp,
)
from mkernel.lang.signals import ARRIVED, finish, notify, wait
from mkernel.lang.trace import PUSH_CHUNK, SEND_CHUNK, TILE, TILES, trace, trace_time
from mkernel.runtime import planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import PLANS_KEPT, Group, Uses, Workspace, collective, current
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import BYTES, DTYPES, descriptor, has_descriptors, layout, matmul_precision
from mkernel.runtime.sequences import MEETING, Sequences, documents_of, scheduled
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Array, Launch

HEAD_DIMS = (64, 96, 128, 256)
LAYOUTS = ("contiguous", "zigzag")
STRIDES = ("batch", "head", "row", "column")
CHUNK_BYTES = 256 * 1024
HOPPER_TILE_M = 128  # queries of a tile of the Gluon kernel
WARP_PUSH_RATE = 3e9  # bytes/s that the pushing warp of the Gluon kernel writes, to all peers together; estimated
MEETING_BYTES = 8 * 2**20  # of a head's keys and values: with more it matters that CTAs read the same ones at a time
PACKED_PLANS_KEPT = 32  # such a plan holds 16 bytes of device memory for every row
TUNABLE = Tunable(
    "ring_attention", agreed=("batch", "heads", "kv_heads", "length", "dim", "causal", "zigzag"), own=(), shared=()
)


@triton.jit
def _copy_rows(
    context, start, row_stride, column_stride, rows, height, dim, data_start, row, turn, source,
    spans, key, keys, length, window, part_rows, offset,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, SLOTS: tl.constexpr, COUNT: tl.constexpr,
    SEEN_ONLY: tl.constexpr, ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    FLAT: tl.constexpr, COPY: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Copy `rows` rows to row `row` of the source's slot on COUNT ranks of my node, which are those
    `offset` and more behind me; zeros up to row `height`. SEEN_ONLY: only to ranks that see the source's
    keys key..key+keys-1. FLAT: rows are contiguous."""
    rank = rank_of(context)
    base = rank // GPUS * GPUS
    steps = tl.cdiv(height * dim, COPY) if FLAT else tl.cdiv(height, COPY // DIM)
    for step in range(steps):
        if FLAT:
            place = step * COPY + tl.arange(0, COPY)
            inside = place < height * dim
            block = tl.load(start + place, mask=place < rows * dim, other=0.0)
        else:
            i = step * (COPY // DIM) + tl.arange(0, COPY // DIM)[:, None]
            j = tl.arange(0, DIM)[None, :]
            place = i * dim + j
            inside = (i < height) & (j < dim)
            pointers = start + i.to(tl.int64) * row_stride + j.to(tl.int64) * column_stride
            block = tl.load(pointers, mask=inside & (i < rows), other=0.0)
        for which in tl.static_range(COUNT):
            peer = base + (rank - base + offset + which) % GPUS
            wanted = inside
            if SEEN_ONLY:
                wanted &= is_seen(spans, peer, source, key, keys, length, SIZE, ZIGZAG, CAUSAL, PACKED)
            first = slot_row(turn, slot_of(source, peer, SIZE), window, part_rows, SLOTS) + row
            target = segment_of(context, peer, DTYPE) + data_start + tl.multiple_of(first.to(tl.int64) * dim, 16)
            tl.store(target + place, block, mask=wanted)


@triton.jit
def copy_own(
    context, k, k_strides, v, v_strides, batch, head, turn, begin, chunk, height, spans, offset,
    length, dim, data_start, window, part_rows, chunk_rows,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, SLOTS: tl.constexpr, COUNT: tl.constexpr,
    SEEN_ONLY: tl.constexpr, ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    K_FLAT: tl.constexpr, V_FLAT: tl.constexpr, COPY: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr,
    COPY_ROWS: tl.constexpr,
):  # fmt: skip
    """Copy a chunk of this rank's own keys and values into slots, a block of TILE_N keys and then its values;
    see _copy_rows."""
    start = begin + chunk * chunk_rows
    k_start = k + tl.cast(batch, tl.int64) * k_strides[0] + tl.cast(head, tl.int64) * k_strides[1]
    v_start = v + tl.cast(batch, tl.int64) * v_strides[0] + tl.cast(head, tl.int64) * v_strides[1]
    for key in range(start, start + height, TILE_N):
        rows = tl.minimum(length - key, TILE_N)
        COPY_ROWS(
            context, k_start + tl.cast(key, tl.int64) * k_strides[2], k_strides[2], k_strides[3], rows, TILE_N, dim,
            data_start, 2 * (key - begin), turn, rank_of(context), spans, start, height, length, window, part_rows,
            offset, DTYPE, SIZE, GPUS, SLOTS, COUNT, SEEN_ONLY, ZIGZAG, CAUSAL, PACKED, K_FLAT, COPY, DIM,
        )  # fmt: skip
        COPY_ROWS(
            context, v_start + tl.cast(key, tl.int64) * v_strides[2], v_strides[2], v_strides[3], rows, TILE_N, dim,
            data_start, 2 * (key - begin) + TILE_N, turn, rank_of(context), spans, start, height, length, window,
            part_rows, offset, DTYPE, SIZE, GPUS, SLOTS, COUNT, SEEN_ONLY, ZIGZAG, CAUSAL, PACKED, V_FLAT, COPY, DIM,
        )  # fmt: skip


@triton.jit
def send(
    context, epoch, k, k_strides, v, v_strides, spans, kv_heads, length, padded, dim, data_start,
    rounds, window, parts, part_rows, chunk_rows, chunks, stamps, first, step,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, SLOTS: tl.constexpr, CREDITS: tl.constexpr,
    ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    K_FLAT: tl.constexpr, V_FLAT: tl.constexpr, COPY: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr,
    COPY_ROWS: tl.constexpr,
):  # fmt: skip
    """Stage this rank's chunks in its own slot and post them to its counterparts in other nodes."""
    rank = rank_of(context)
    node = rank // GPUS
    segment = tl.load(context + SEGMENT)
    element: tl.constexpr = DTYPE.primitive_bitwidth // 8
    for turn in range(rounds):
        unit = turn // parts
        begin = turn % parts * part_rows
        for i in range(1, SIZE // GPUS):
            may_write(context, epoch, turn, (rank + i * GPUS) % SIZE, stamps, window, SEND, CREDITS)
        for chunk in range((first - turn * chunks % step + step) % step, chunks, step):
            height = chunk_height(begin, chunk, chunk_rows, part_rows, padded)
            key = begin + chunk * chunk_rows
            staged = key < 0
            since = trace_time(context)
            for i in range(1, SIZE // GPUS):
                other = (node + i) % (SIZE // GPUS)
                if is_seen_in_node(spans, other, rank, key, height, length, SIZE, GPUS, ZIGZAG, CAUSAL, PACKED):
                    if not staged:
                        copy_own(
                            context, k, k_strides, v, v_strides, unit // kv_heads, unit % kv_heads, turn, begin,
                            chunk, height, spans, 0, length, dim, data_start, window, part_rows, chunk_rows,
                            DTYPE, SIZE, GPUS, SLOTS, 1, False, ZIGZAG, CAUSAL, PACKED,
                            K_FLAT, V_FLAT, COPY, TILE_N, DIM, COPY_ROWS,
                        )  # fmt: skip
                        staged = key >= 0
                    peer = (rank + i * GPUS) % SIZE
                    here = slot_row(turn, slot_of(rank, rank, SIZE), window, part_rows, SLOTS)
                    there = slot_row(turn, slot_of(rank, peer, SIZE), window, part_rows, SLOTS)
                    row = 2 * chunk * chunk_rows
                    signal = arrived_word(
                        turn, slot_of(rank, peer, SIZE), chunk, stamps, window, chunks, SIZE, SLOTS
                    )  # fmt: skip
                    post(
                        context,
                        Transfer(
                            peer,
                            segment,
                            (data_start + (here + row).to(tl.int64) * dim) * element,
                            segment,
                            (data_start + (there + row).to(tl.int64) * dim) * element,
                            (2 * height).to(tl.int64) * dim * element,
                        ),
                        signal * 8,
                        stamp(epoch, turn),
                        SEND,
                    )
            trace(context, SEND, SEND_CHUNK, rank, chunk, since)


@triton.jit
def intra(
    context, epoch, k, k_strides, v, v_strides, spans, kv_heads, length, padded, dim, data_start,
    rounds, window, parts, part_rows, chunk_rows, chunks, stamps, tasks, nanoseconds_per_mib, first, step,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, SLOTS: tl.constexpr, CREDITS: tl.constexpr,
    PACED: tl.constexpr, ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    K_FLAT: tl.constexpr, V_FLAT: tl.constexpr, COPY: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr,
    COPY_ROWS: tl.constexpr,
):  # fmt: skip
    """Push this rank's chunks to its node, and those of its counterparts in other nodes as they arrive."""
    rank = rank_of(context)
    node = rank // GPUS
    mine = segment_of(context, rank, tl.int64)
    own_slots = segment_of(context, rank, DTYPE) + data_start
    count = chunks * (SIZE // GPUS)  # chunks of a round that this rank pushes
    for turn in range(rounds):
        unit = turn // parts
        begin = turn % parts * part_rows
        for i in range(1, GPUS):
            may_write(context, epoch, turn, node * GPUS + (rank + i) % GPUS, stamps, window, INTRA, CREDITS)
        if CREDITS and SIZE > GPUS:
            may_begin(context, epoch, turn, stamps, window, INTRA)
        for item in range((first - turn * count % step + step) % step, count, step):
            chunk = item % chunks
            source = (rank + item // chunks * GPUS) % SIZE
            height = chunk_height(begin, chunk, chunk_rows, part_rows, padded)
            key = begin + chunk * chunk_rows
            since = trace_time(context)
            if source == rank:
                copy_own(
                    context, k, k_strides, v, v_strides, unit // kv_heads, unit % kv_heads, turn, begin,
                    chunk, height, spans, 1, length, dim, data_start, window, part_rows, chunk_rows,
                    DTYPE, SIZE, GPUS, SLOTS, GPUS - 1, True, ZIGZAG, CAUSAL, PACKED,
                    K_FLAT, V_FLAT, COPY, TILE_N, DIM, COPY_ROWS,
                )  # fmt: skip
            elif SIZE > GPUS:
                if is_seen_in_node(spans, node, source, key, height, length, SIZE, GPUS, ZIGZAG, CAUSAL, PACKED):
                    slot = slot_of(source, rank, SIZE)
                    word = arrived_word(turn, slot, chunk, stamps, window, chunks, SIZE, SLOTS)
                    wait(context, mine + word, stamp(epoch, turn), INTRA, ARRIVED, source, chunk)
                    since = trace_time(context)
                    row = 2 * chunk * chunk_rows
                    here = slot_row(turn, slot, window, part_rows, SLOTS) + row
                    COPY_ROWS(
                        context, own_slots + tl.multiple_of(here.to(tl.int64) * dim, 16), dim, 1, 2 * height,
                        2 * height, dim, data_start, row, turn, source, spans, key, height, length, window, part_rows,
                        1, DTYPE, SIZE, GPUS, SLOTS, GPUS - 1, True, ZIGZAG, CAUSAL, PACKED, True, COPY, DIM,
                    )  # fmt: skip
            trace(context, INTRA, PUSH_CHUNK, source, chunk, since)
            for i in range(1, GPUS):
                peer = node * GPUS + (rank + i) % GPUS
                if is_seen(spans, peer, source, key, height, length, SIZE, ZIGZAG, CAUSAL, PACKED):
                    if PACED:
                        size = (2 * height).to(tl.int64) * dim * (DTYPE.primitive_bitwidth // 8)
                        await_link(reserve_link(context, size, nanoseconds_per_mib))
                    slot = slot_of(source, peer, SIZE)
                    word = arrived_word(turn, slot, chunk, stamps, window, chunks, SIZE, SLOTS)
                    notify(segment_of(context, peer, tl.int64) + word, stamp(epoch, turn))
            if CREDITS and SIZE > GPUS:
                if source != rank:
                    one_done(context, epoch, turn, tasks, stamps, window, SIZE, GPUS, INTRA)


@triton.jit
def source_at(rank, place, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """The rank whose keys are attended to at that place: its own, its node, the other nodes, of each of
    them the counterpart first, whose keys come straight from the network."""
    node = (rank // GPUS + place // GPUS) % (SIZE // GPUS)
    return node * GPUS + (rank + place) % GPUS


@triton.jit
def chunks_of(
    low, end, source, begin, until, chunk_rows, length, SIZE: tl.constexpr, ZIGZAG: tl.constexpr
):  # fmt: skip
    """(first, behind): chunks of a panel with keys at positions low..end-1."""
    key = tl.maximum(keys_below(low, source, length, SIZE, ZIGZAG), begin)
    behind = tl.minimum(keys_below(end, source, length, SIZE, ZIGZAG), until)
    first = (key - begin) // chunk_rows
    return first, tl.where(key < behind, tl.cdiv(behind - begin, chunk_rows), first)


@triton.jit
def everything_is_here(
    context, epoch, turn, low, end, begin, until, chunk_rows, length, stamps, window, chunks, places,
    SIZE: tl.constexpr, GPUS: tl.constexpr, SLOTS: tl.constexpr, ZIGZAG: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """One look at the signals of all sources' chunks with keys at positions low..end-1. To ask for one
    after the other would take as long as several key blocks. places: 0, 1, ..., LOOKS-1, as the calling kernel lays
    them out."""
    rank = rank_of(context)
    mine = segment_of(context, rank, tl.int64)
    expected = stamp(epoch, turn)
    here = low == low  # true, as a tensor: the loop makes one of it
    for look in range(0, (SIZE - 1) * chunks, LOOKS):
        i = look + places
        source = source_at(rank, i // chunks + 1, SIZE, GPUS)
        first, behind = chunks_of(low, end, source, begin, until, chunk_rows, length, SIZE, ZIGZAG)
        needed = (i < (SIZE - 1) * chunks) & (i % chunks >= first) & (i % chunks < behind)
        word = arrived_word(turn, slot_of(source, rank, SIZE), i % chunks, stamps, window, chunks, SIZE, SLOTS)
        seen = tl.atomic_add(mine + word, places.to(tl.int64) * 0, mask=needed, sem="acquire", scope="sys")
        here &= tl.min(tl.where(needed, seen, expected), 0) >= expected
    return here


@triton.jit
def tile_at(schedule, at, parts, heads, kv_heads, blocks):
    """(round, number in it, batch, head, head of its keys, block of queries) at a place of the schedule."""
    entry = tl.load(schedule + at).to(tl.int32)
    group = heads // kv_heads
    turn = entry // (group * blocks)
    within = entry % (group * blocks)
    unit = turn // parts
    kv_head = unit % kv_heads
    return turn, within, unit // kv_heads, kv_head * group + within // blocks, kv_head, within % blocks


@triton.jit
def _compute(
    context, epoch, q, q_strides, own_k, k_strides, own_v, v_strides, slots, out, out_strides, lse, partial,
    spans, schedule, scale, heads, kv_heads, length, padded, dim, blocks, slots_rows,
    window, parts, part_rows, chunk_rows, chunks, stamps, tasks, place, end_of_places,
    SIZE: tl.constexpr, GPUS: tl.constexpr, SLOTS: tl.constexpr, CREDITS: tl.constexpr, PARTS: tl.constexpr,
    ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, LSE: tl.constexpr,
    DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """Attend with the tiles of queries at places place..end_of_places-1 of the schedule."""
    rank = rank_of(context)
    bounds = spans + 2 * SIZE
    for at in range(place, end_of_places):
        turn, within, batch, head, kv_head, block = tile_at(schedule, at, parts, heads, kv_heads, blocks)
        part = turn % parts
        row = block * TILE_M
        since = trace_time(context)
        begin = part * part_rows
        until = tl.minimum(begin + part_rows, length)

        query = rows_of(
            q, batch, head, row, length, dim, q_strides[0], q_strides[1], q_strides[2], q_strides[3],
            TILE_M, DIM, DESCRIPTOR,
        )  # fmt: skip
        low, lowest_end = seen_by(bounds, rank, row, length, SIZE, ZIGZAG, CAUSAL, PACKED)
        last = tl.minimum(row + TILE_M, length) - 1
        high, highest_end = seen_by(bounds, rank, last, length, SIZE, ZIGZAG, CAUSAL, PACKED)

        largest = tl.full((TILE_M,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_M,), tl.float32)
        accumulator = tl.zeros((TILE_M, DIM), tl.float32)
        if PARTS:
            mine = partial + tl.cast(within, tl.int64) * (TILE_M * (DIM + 2))
            kept = mine + 2 * TILE_M + tl.arange(0, TILE_M)[:, None] * DIM + tl.arange(0, DIM)[None, :]
            if part > 0:
                tl.debug_barrier()
                largest = tl.load(mine + tl.arange(0, TILE_M))
                total = tl.load(mine + TILE_M + tl.arange(0, TILE_M))
                accumulator = tl.load(kept)

        first, full, full_end, end = key_blocks(
            low, lowest_end, high, highest_end, rank, begin, until, length, SIZE, ZIGZAG, TILE_N
        )
        accumulator, total, largest = attend(
            query, accumulator, total, largest, bounds, rank, row, scale,
            own_k, own_v, batch, kv_head, k_strides, v_strides, 0, 0,
            rank, begin, length, dim, first, full, full_end, end,
            True, PRECISION, SIZE, ZIGZAG, CAUSAL, PACKED, TILE_M, TILE_N, DIM, DESCRIPTOR,
        )  # fmt: skip

        missing = 0.0
        if SIZE > 1:
            if CREDITS:
                may_begin(context, epoch, turn, stamps, window, COMPUTE)
            need = low
            need_end = highest_end
            if PACKED:
                # one tile of the round waits for all that was sent: the slots are not free before
                if (within // blocks == 0) & (block == blocks - 1):
                    need, need_end = seen_by_rank(spans, rank, length, SIZE, ZIGZAG, CAUSAL, PACKED)
            here = everything_is_here(
                context, epoch, turn, need, need_end, begin, until, chunk_rows, length, stamps, window, chunks,
                tl.arange(0, LOOKS), SIZE, GPUS, SLOTS, ZIGZAG, LOOKS,
            )  # fmt: skip
            for place_of_source in range(1, SIZE):
                source = source_at(rank, place_of_source, SIZE, GPUS)
                if not here:
                    chunk, behind = chunks_of(
                        need, need_end, source, begin, until, chunk_rows, length, SIZE, ZIGZAG
                    )  # fmt: skip
                    got = panel_is_here(
                        context, epoch, turn, source, chunk, behind, stamps, window, chunks, SIZE, SLOTS
                    )
                    missing += tl.where(got, 0.0, float("nan"))
                if DESCRIPTOR:
                    acquire_for_descriptors()
                slots_row = slot_row(turn, slot_of(source, rank, SIZE), window, part_rows, SLOTS)
                first, full, full_end, end = key_blocks(
                    low, lowest_end, high, highest_end, source, begin, until, length, SIZE, ZIGZAG, TILE_N
                )
                accumulator, total, largest = attend(
                    query, accumulator, total, largest, bounds, rank, row, scale,
                    slots, slots, batch, kv_head, k_strides, v_strides, slots_row, slots_rows,
                    source, begin, length, dim, first, full, full_end, end,
                    False, PRECISION, SIZE, ZIGZAG, CAUSAL, PACKED, TILE_M, TILE_N, DIM, DESCRIPTOR,
                )  # fmt: skip

        if PARTS:
            if part < parts - 1:
                tl.store(mine + tl.arange(0, TILE_M), largest)
                tl.store(mine + TILE_M + tl.arange(0, TILE_M), total + missing)
                tl.store(kept, accumulator)
        if part == parts - 1:
            result, logarithm = attention_of(accumulator, total + missing, largest)
            i = row + tl.arange(0, TILE_M)
            if DESCRIPTOR:
                out.store([batch, head, row, 0], result.to(out.dtype).reshape(1, 1, TILE_M, DIM))
            else:
                j = tl.arange(0, DIM)[None, :]
                line = tl.cast(batch, tl.int64) * out_strides[0] + tl.cast(head, tl.int64) * out_strides[1]
                target = out + line + i[:, None].to(tl.int64) * out_strides[2] + j.to(tl.int64) * out_strides[3]
                tl.store(target, result.to(out.dtype.element_ty), mask=(i < length)[:, None] & (j < dim))
            if LSE:
                tl.store(lse + tl.cast(batch * heads + head, tl.int64) * length + i, logarithm, mask=i < length)
        trace(context, TILES, TILE, rank, at, since)
        if CREDITS:
            one_done(context, epoch, turn, tasks, stamps, window, SIZE, GPUS, COMPUTE)


@triton.jit
def ring_attention_kernel(
    context, q, own_k, own_v, slots, out, lse, partial, spans, schedule, k, v,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    out_batch, out_head, out_row, out_column,
    scale, heads, kv_heads, length, padded, dim, blocks, data_start, slots_rows,
    rounds, window, parts, part_rows, chunk_rows, chunks, stamps, tasks, nanoseconds_per_mib,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, SLOTS: tl.constexpr,
    SENDERS: tl.constexpr, INTRAS: tl.constexpr, CREDITS: tl.constexpr, PARTS: tl.constexpr, PACED: tl.constexpr,
    ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, LSE: tl.constexpr,
    DESCRIPTOR: tl.constexpr, K_FLAT: tl.constexpr, V_FLAT: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, COPY: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring for the roles and the signals."""
    cta = tl.program_id(0)
    epoch = current_epoch(context)
    if SIZE > 1:
        if cta == 0:
            announce(context, epoch, SIZE, GPUS)
    if cta < SENDERS:
        send(
            context, epoch, k, (k_batch, k_head, k_row, k_column), v, (v_batch, v_head, v_row, v_column),
            spans, kv_heads, length, padded, dim, data_start,
            rounds, window, parts, part_rows, chunk_rows, chunks, stamps, cta, SENDERS,
            DTYPE, SIZE, GPUS, SLOTS, CREDITS, ZIGZAG, CAUSAL, PACKED, K_FLAT, V_FLAT, COPY, TILE_N, DIM, _copy_rows,
        )  # fmt: skip
    elif cta < SENDERS + INTRAS:
        intra(
            context, epoch, k, (k_batch, k_head, k_row, k_column), v, (v_batch, v_head, v_row, v_column),
            spans, kv_heads, length, padded, dim, data_start,
            rounds, window, parts, part_rows, chunk_rows, chunks, stamps, tasks, nanoseconds_per_mib,
            cta - SENDERS, INTRAS,
            DTYPE, SIZE, GPUS, SLOTS, CREDITS, PACED, ZIGZAG, CAUSAL, PACKED,
            K_FLAT, V_FLAT, COPY, TILE_N, DIM, _copy_rows,
        )  # fmt: skip
    first = tl.load(schedule + cta).to(tl.int32)
    end = tl.load(schedule + cta + 1).to(tl.int32)
    _compute(
        context, epoch, q, (q_batch, q_head, q_row, q_column),
        own_k, (k_batch, k_head, k_row, k_column), own_v, (v_batch, v_head, v_row, v_column), slots,
        out, (out_batch, out_head, out_row, out_column), lse, partial,
        spans, schedule, scale, heads, kv_heads, length, padded, dim, blocks, slots_rows,
        window, parts, part_rows, chunk_rows, chunks, stamps, tasks, first, end,
        SIZE, GPUS, SLOTS, CREDITS, PARTS, ZIGZAG, CAUSAL, PACKED, LSE,
        DESCRIPTOR, PRECISION, TILE_M, TILE_N, DIM, LOOKS,
    )  # fmt: skip
    finish(context, epoch, SIZE)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    config: Settings
    kernel: str  # "triton" or "gluon"
    described: bool  # tensors are read and written through tensor descriptors
    sequences: Sequences
    padded: int  # keys of a panel, with those that fill its last block
    slots: int  # panels of a round that a rank has room for
    parts: int  # rounds of a unit
    part_rows: int
    window: int  # rounds that there are slots for
    rounds: int
    chunks: int  # of a panel
    precision: str
    schedule: torch.Tensor
    meets: bool  # may there be meetings in the schedule? The same on all ranks, which run one binary
    spans: torch.Tensor | None  # packed: what each rank sees, then what each row of this one sees
    reasons: tuple[str, ...]

    @property
    def hopper(self) -> bool:
        """Is it the kernel for Hopper?"""
        return self.kernel == "gluon"

    @property
    def credits(self) -> bool:
        """Are slots used more than once in a call?"""
        return self.sequences.size > 1 and self.rounds > self.window

    def __str__(self) -> str:
        c = self.config
        head = (
            f"ring_attention: {self.kernel} kernel, tiles of {c.tile_m} queries x {c.tile_n} keys, {c.ctas} CTAs "
            f"({c.send_ctas} send, {c.intra_ctas} intra), {self.rounds} rounds of {self.chunks} chunks of "
            f"{c.chunk_rows} keys, room for {self.window} rounds"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


@dataclass(frozen=True)
class Tiles:
    """How the keys are cut. Ranks must agree on it: it says where in a slot a key lies."""

    tile_m: int
    tile_n: int
    stages: int
    warps: int
    chunk_rows: int
    steps: int


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _tiles(group: Group, query: torch.Tensor, key: torch.Tensor, config: Config | None) -> Tiles:
    """The given tile and chunk, or a good one. Depends on nothing that differs between ranks."""
    given = config or Config()
    dim, element = query.shape[3], query.element_size()
    if group.device.type != "cuda":
        tile_m, tile_n, stages, warps = 32, 32, 1, 4
    elif query.dtype == torch.float32:
        tile_m, tile_n, stages, warps = (
            (32, 32, 2, 8) if dim == 64 else (32, 16, 2, 8) if dim <= 128 else (16, 16, 2, 8)
        )
    elif has_descriptors(group.device):
        tile_m, tile_n, stages, warps = (128, 128, 2, 8) if dim <= 128 else (64, 64, 2, 8)
    else:
        tile_m, tile_n, stages, warps = (128, 64, 2, 8) if dim <= 128 else (64, 32, 2, 8)
    tile_n = tile_n if given.tile_n is None else given.tile_n
    chunk_rows = given.chunk_rows
    if chunk_rows is None:
        chunk_rows = max(CHUNK_BYTES // (2 * dim * element), tile_n) if group.device.type == "cuda" else tile_n
    units = key.shape[0] * key.shape[1]
    slots = group.size - 1 if group.nodes == 1 else group.size
    return Tiles(
        tile_m=tile_m if given.tile_m is None else given.tile_m,
        tile_n=tile_n,
        stages=stages if given.stages is None else given.stages,
        warps=warps if given.warps is None else given.warps,
        chunk_rows=_round_up(chunk_rows, tile_n),
        steps=max(2, math.ceil(min(2, units) * slots / max(units, 1))) if given.steps is None else given.steps,
    )


def _described(tensor: torch.Tensor) -> bool:
    """Can a descriptor be made of a [batch, heads, length, dim] tensor?"""
    size = tensor.element_size()
    return (
        tensor.stride(3) == 1
        and tensor.data_ptr() % BYTES == 0
        and all(n == 1 or (s > 0 and s * size % BYTES == 0) for n, s in zip(tensor.shape[:3], tensor.stride()[:3]))
    )


def _cut_rounds(units: int, padded: int, slots: int, tiles: Tiles) -> tuple[int, int, int]:
    """(parts, part_rows, window): whole units if the buffer holds two of them, else parts of units."""
    room = tiles.steps * units * padded  # rows of keys; as many of values go with them
    parts = 1
    if min(2, units) * slots * padded > room:
        most = room // (2 * slots) // tiles.tile_n * tiles.tile_n
        if most == 0:
            least = math.ceil(2 * slots * tiles.tile_n / (units * padded))
            raise ArgumentError(
                f"config.steps is {tiles.steps}, but must be at least {least} for {units} heads of {padded} keys: "
                f"of every rank, two blocks of {tiles.tile_n} keys and values must fit"
            )
        parts = math.ceil(padded / most)
    part_rows = _round_up(math.ceil(padded / parts), tiles.tile_n)
    parts = math.ceil(padded / part_rows)
    return parts, part_rows, min(units * parts, room // (slots * part_rows))


def _why_not_gluon(group: Group, query: torch.Tensor, described: bool, parts: int, config: Config | None) -> str | None:
    """Why the kernel for Hopper can not be taken; None if it can."""
    if group.device.type != "cuda" or torch.cuda.get_device_capability(group.device)[0] != 9:
        return "the Gluon kernel runs on Hopper GPUs only"
    if query.dtype == torch.float32:
        return "the Gluon kernel has no fp32"
    if not described:
        return "the Gluon kernel reads and writes by TMA only, and not all tensors have rows for that"
    if parts > 1:
        return "the Gluon kernel does not keep a tile's state between the parts of a head"
    chosen = [name for name in ("tile_m", "tile_n", "stages", "warps") if config and getattr(config, name) is not None]
    if chosen:
        return f"the Gluon kernel has a tile of its own, and the configuration gives {', '.join(chosen)}"
    return None


def plan(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    is_causal: bool, layout: str, documents: tuple[int, ...] | None, config: Config | None,
) -> Plan:  # fmt: skip
    """Decide how to run a call. Depends only on shapes, strides, alignment, documents and the group."""
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    units = batch * kv_heads
    given = config or Config()
    size, nodes, gpus = group.size, group.nodes, group.gpus_per_node
    element = query.element_size()
    tiles = _tiles(group, query, key, config)
    sequences = Sequences(size, length, layout == "zigzag", is_causal, documents)
    reasons = []

    padded = _round_up(length, tiles.tile_n)
    slots = max(size - 1 if nodes == 1 else size, 1)
    whole = size == 1 or not query.numel()
    parts, part_rows, window = (1, padded, units) if whole else _cut_rounds(units, padded, slots, tiles)
    rounds = units * parts
    chunks = math.ceil(part_rows / tiles.chunk_rows)

    described = has_descriptors(group.device) and all(_described(x) for x in (query, key, value, out))
    why_not = _why_not_gluon(group, query, described, parts, config)
    tile_m = tiles.tile_m if why_not else HOPPER_TILE_M
    reasons.append("Gluon: a Hopper GPU, 16-bit floats, rows for TMA" if why_not is None else f"Triton: {why_not}")
    if not has_descriptors(group.device):
        reasons.append("the device has no tensor descriptors (TMA): tensors are read through pointers")
    elif not described:
        uneven = [n for n, x in (("query", query), ("key", key), ("value", value), ("out", out)) if not _described(x)]
        reasons.append(
            f"{', '.join(uneven)}: rows are not contiguous and 16-byte aligned: all tensors are read through pointers"
        )

    if size > 1:
        mib = window * slots * part_rows * 2 * dim * element / 2**20
        reasons.append(
            f"keys and values of other ranks go through {mib:.3g} MiB, room for {window} of {rounds} rounds"
            + (f"; a head's keys come in {parts} parts, its state is kept in between" if parts > 1 else "")
        )

    def pick(name: str, default: int) -> int:
        value = getattr(given, name)
        return default if value is None else value

    most = group.world.ctas(group.world_rank)
    costs = sequences.key_blocks(group.rank, tile_m, tiles.tile_n)
    work = int(costs.sum() + len(costs)) * heads * batch  # key blocks, and one for each tile's start and end
    block_seconds = 4 * tile_m * tiles.tile_n * dim / (0.8 * planning.CTA_RATE[query.dtype])
    node = [group.node * gpus + i for i in range(gpus) if i != group.local_rank]
    brought = range(group.local_rank, size, gpus)  # ranks whose keys this one pushes to its node
    pushed = sum(sequences.keys_sent(s, peer) for s in brought for peer in node) * units * 2 * dim * element
    link = group.world.links.nvlink * 1e9 if group.world.links.nvlink else planning.NVLINK_RATE
    seconds = work * block_seconds / most
    tiles_in_all = batch * heads * len(costs)
    send_ctas = pick("send_ctas", 1 if nodes > 1 else 0)
    if why_not is None:  # a warp of each CTA pushes, beside those that compute
        rate = WARP_PUSH_RATE
        busy = max(tiles_in_all, units * chunks if gpus > 1 else 1)
        ctas = pick("ctas", min(most, busy + send_ctas))
        intra_ctas = pick("intra_ctas", ctas - send_ctas if gpus > 1 else 0)
        helpers = send_ctas
    else:
        rate = planning.push_rate(gpus - 1)
        intra_ctas = pick("intra_ctas", planning.copiers_for(pushed, rate, seconds, link, most) if gpus > 1 else 0)
        helpers = send_ctas + intra_ctas
        ctas = pick("ctas", min(most, max(tiles_in_all, 1) + helpers))
    push_seconds = pushed / min(rate * max(intra_ctas, 1), link)
    if gpus > 1:
        reasons.append(
            f"{intra_ctas} CTAs push {pushed} bytes over NVLink: estimated {push_seconds * 1e3:.3g} ms, "
            f"beside {seconds * 1e3:.3g} ms of computing"
        )
    resolved = Settings(
        tile_m=tile_m, tile_n=tiles.tile_n, tile_k=triton.next_power_of_2(dim), group_m=1,
        stages=tiles.stages, warps=tiles.warps, ctas=ctas, send_ctas=send_ctas, intra_ctas=intra_ctas, join_tiles=0,
        chunk_rows=tiles.chunk_rows, copy_bytes=pick("copy_bytes", 32768 if group.device.type == "cuda" else 4096),
        steps=tiles.steps,
    )  # fmt: skip
    planning.check_tile(
        resolved, query.dtype, described, columns=max(resolved.tile_n, resolved.tile_k), staged=(tiles.tile_n,) * 2
    )
    planning.check(
        resolved, max_ctas=most, least_send=1 if nodes > 1 else 0, least_intra=1 if gpus > 1 else 0,
        copiers_compute=why_not is None,
    )  # fmt: skip
    # helpers are done when all is pushed, which the last rounds can not be before they have slots; rather let them
    # idle for a while than be late: the whole launch would wait for their tiles
    ready = max(1.25 * push_seconds / block_seconds, work / ctas * (rounds - window) / max(rounds, 1))
    unit_bytes = size * length * 2 * dim * element
    meet = why_not is None and documents is None and unit_bytes > MEETING_BYTES
    schedule = scheduled(
        costs.tolist(), heads // max(kv_heads, 1), units, parts, ctas, helpers, ready, max(rounds - window, 0), meet
    )
    if max(schedule, default=0) >= MEETING:
        reasons.append(f"CTAs meet now and then, to read the same keys at a time: a head's are {unit_bytes} bytes")
    spans = None
    if documents is not None:
        ranges = [edge for rank in range(size) for edge in sequences.span(rank)]
        starts, ends = sequences.seen(group.rank)
        spans = group.world.upload(group.world_rank, [*ranges, *starts.tolist(), *ends.tolist()])
    return Plan(
        config=resolved,
        kernel="triton" if why_not else "gluon",
        described=described,
        sequences=sequences,
        padded=padded,
        slots=slots,
        parts=parts,
        part_rows=part_rows,
        window=window,
        rounds=rounds,
        chunks=chunks,
        precision=matmul_precision(query.dtype),
        schedule=group.world.upload(group.world_rank, schedule),
        meets=meet,
        spans=spans,
        reasons=tuple(reasons),
    )


def _stamps_of(workspace: Workspace, size: int) -> int:
    """Where the stamps begin, in words: behind the counters, which take half of the rest."""
    return size + (workspace.signal_words - size) // 2


def _hopper_kernel() -> Any:
    # imported when it is needed: it imports this module, and Gluon
    from mkernel.ops.ring_attention_hopper import ring_attention_hopper_kernel

    return ring_attention_hopper_kernel


def _descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int], gluon: bool) -> Any:
    """A tensor descriptor for either kernel."""
    plain = descriptor(tensor, shape, strides, block)
    if not gluon:
        return plain
    from mkernel.ops.ring_attention_hopper import descriptor_of

    return descriptor_of(plain)


def _launch(
    group: Group, plan: Plan, workspace: Workspace, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor | None, scale: float, variant: Hashable,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan."""
    heads, length, dim = query.shape[1:]
    kv_heads = key.shape[1]
    c = plan.config
    size, element = group.size, query.element_size()
    wide = c.tile_k
    blocks = math.ceil(length / c.tile_m)
    slots_rows = plan.window * plan.slots * 2 * plan.part_rows
    spread = (group.nodes - 1) * plan.chunks if c.intra_ctas else 0
    link = group.world.links.nvlink if c.intra_ctas else None
    gluon = plan.kernel == "gluon"
    slots: Any = workspace.data.view(query.dtype) if size > 1 else None
    operands: dict[str, Any] = dict(q=query, own_k=key, own_v=value, out=out, slots=slots)
    if plan.described:
        rows = c.tile_m // 2 if gluon else c.tile_m
        for name, tensor, height in (("q", query, rows), ("out", out, rows), ("own_k", key, 0), ("own_v", value, 0)):
            block = [1, 1, height or c.tile_n, wide]
            operands[name] = _descriptor(tensor, list(tensor.shape), list(tensor.stride()), block, gluon)
        if size > 1:
            operands["slots"] = _descriptor(slots, [slots_rows, dim], [dim, 1], [c.tile_n, wide], gluon)
    arguments = dict(
        context=workspace.context, **operands, lse=lse,
        spans=plan.schedule if plan.spans is None else plan.spans, schedule=plan.schedule, k=key, v=value,
        scale=scale * math.log2(math.e), heads=heads, kv_heads=kv_heads, length=length, padded=plan.padded, dim=dim,
        blocks=blocks, data_start=workspace.data_start // element,
        rounds=plan.rounds, window=plan.window, part_rows=plan.part_rows,
        chunk_rows=c.chunk_rows, chunks=plan.chunks, stamps=_stamps_of(workspace, size),
        tasks=heads // kv_heads * blocks * (2 if gluon else 1) + spread,
        nanoseconds_per_mib=round(2**20 / link) if link else 0,
        DTYPE=DTYPES[query.dtype], SIZE=size, GPUS=group.gpus_per_node, SLOTS=plan.slots,
        SENDERS=c.send_ctas, INTRAS=c.intra_ctas, CREDITS=plan.credits, PACED=link is not None,
        ZIGZAG=plan.sequences.zigzag, CAUSAL=plan.sequences.causal, PACKED=plan.spans is not None,
        LSE=lse is not None, TILE_N=c.tile_n, DIM=wide, COPY=max(c.copy_bytes // element, wide),
    )  # fmt: skip
    strided = [("k", key), ("v", value), *([] if gluon else [("q", query), ("out", out)])]
    for name, tensor in strided:
        for which, stride in zip(("batch", "head", "row") if gluon else STRIDES, tensor.stride()):
            arguments[f"{name}_{which}"] = stride
    if gluon:
        arguments["MEETS"] = plan.meets
    else:
        partial = None
        if plan.parts > 1:
            words = heads // kv_heads * blocks * c.tile_m * (wide + 2)
            partial = group.world.empty(group.world_rank, (words,), torch.float32)
        arguments |= dict(
            partial=partial, slots_rows=slots_rows, parts=plan.parts, PARTS=plan.parts > 1, DESCRIPTOR=plan.described,
            K_FLAT=key.stride()[2:] == (dim, 1), V_FLAT=value.stride()[2:] == (dim, 1), PRECISION=plan.precision,
            TILE_M=c.tile_m, LOOKS=min(triton.next_power_of_2(max((size - 1) * plan.chunks, 1)), 256),
        )  # fmt: skip
    panel = 2 * plan.part_rows * dim * element
    # what is staged for other nodes may still be read by the network
    foreign = [
        ((turn * plan.slots + slot) * panel, (turn * plan.slots + slot + 1) * panel)
        for turn in range(plan.window)
        for slot in range(min(size - 1, plan.slots))
    ]
    return Launch(
        op="ring_attention",
        group=group,
        kernel=_hopper_kernel() if gluon else ring_attention_kernel,
        grid=c.ctas,
        arguments=arguments,
        options=dict(num_warps=4) if gluon else dict(num_warps=c.warps, num_stages=c.stages),
        variant=variant,
        uses=Uses(workspace, _arrays(workspace, plan, size, dim, element), foreign if size > 1 else [], whole=True),
        inputs=("q", "own_k", "own_v", "k", "v", "spans", "schedule"),
        results=("out", "lse"),
    )


def _arrays(workspace: Workspace, plan: Plan, size: int, dim: int, element: int) -> list[Array]:
    """What a call keeps in the workspace."""
    entered = Array("entered", 0, (size,), 8)
    if size == 1:
        return [entered]
    window, stamps = plan.window, 8 * _stamps_of(workspace, size)
    slots = (window, plan.slots, 2 * plan.part_rows, dim)
    return [
        entered,
        Array("done", 8 * size, (window,), 8),
        Array("freed", stamps, (size, window), 8),
        Array("arrived", stamps + 8 * size * window, (window, size - 1, plan.chunks), 8,
              (plan.slots * plan.chunks, plan.chunks, 1)),
        Array("slots", workspace.data_start, slots, element),
    ]  # fmt: skip


def _check(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor | None,
    layout: str, enable_gqa: bool, scale: float | None, config: Config | None,
) -> None:  # fmt: skip
    """Refuse what can not be computed, naming the argument and the rule."""
    planning.check_given(config)
    for name in ("tile_k", "group_m", "join_tiles"):
        if config is not None and getattr(config, name) is not None:
            raise ArgumentError(f"config.{name} means nothing to ring_attention: leave it out")
    if config is not None and config.steps == 0:
        raise ArgumentError("config.steps must be at least 1; got 0")
    given = dict(query=query, key=key, value=value) | ({} if out is None else dict(out=out))
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 4:
            raise ArgumentError(f"{name} must be [batch, heads, seq_local, dim], got shape {tuple(tensor.shape)}")
        check_tensor("ring_attention", group, name, tensor, dimensions=4)
        if query.dtype not in DTYPES:
            raise ArgumentError(f"query has dtype {query.dtype}; supported are {', '.join(str(d) for d in DTYPES)}")
        if tensor.dtype != query.dtype:
            raise ArgumentError(f"{name} has dtype {tensor.dtype}, but query has {query.dtype}: they must be the same")
    batch, heads, length, dim = query.shape
    if dim not in HEAD_DIMS:
        raise ArgumentError(
            f"query has head dimension {dim}; supported are {', '.join(map(str, HEAD_DIMS))}. "
            f"Pad query, key and value with zeros to one of them, and give scale={dim}**-0.5"
        )
    if key.shape != value.shape:
        raise ArgumentError(f"key is {tuple(key.shape)} and value is {tuple(value.shape)}: they must be the same")
    if (key.shape[0], key.shape[2], key.shape[3]) != (batch, length, dim):
        raise ArgumentError(
            f"key is {tuple(key.shape)} and query is {tuple(query.shape)}: batch, seq_local and dim must be the same"
        )
    if key.shape[1] != heads:
        if not enable_gqa:
            raise ArgumentError(
                f"query has {heads} heads and key has {key.shape[1]}: they must be the same, or give enable_gqa=True"
            )
        if key.shape[1] == 0 or heads % key.shape[1]:
            raise ArgumentError(f"query has {heads} heads, which is no multiple of key's {key.shape[1]}")
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}; got {layout!r}")
    if layout == "zigzag" and length % 2:
        raise ArgumentError(
            f"seq_local is {length}, but must be even for layout='zigzag': a rank holds two equal pieces"
        )
    if group.size * length >= 2**31:
        raise ArgumentError(f"the sequence has {group.size * length} positions; there may be at most {2**31 - 1}")
    if scale is not None and not (
        isinstance(scale, (int, float)) and not isinstance(scale, bool) and 1e-30 < scale < 1e30
    ):
        raise ArgumentError(
            f"scale must be a number greater than 0 and finite; got {scale!r}. For a negative one, negate query"
        )
    if out is not None:
        check_out(out, tuple(query.shape), "as query", query.dtype, dict(query=query, key=key, value=value))


@collective
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the keys and values of all ranks, in one kernel.

    Args:
        query: [batch, heads, seq_local, dim], this rank's part of the sequence; dim 64, 96, 128 or 256.
            The same shapes and dtype on every rank, any strides.
        key, value: [batch, kv_heads, seq_local, dim].
        is_causal: a position sees only itself and those before it, in the whole sequence.
        scale: what scores are multiplied with, greater than 0; dim**-0.5 by default.
        enable_gqa: heads may be a multiple of kv_heads; that many heads in a row share one.
        layout: "contiguous": rank r holds positions r*seq_local and on. "zigzag": of 2*world equal
            pieces of the sequence it holds pieces r and 2*world-1-r (see `mk.to_zigzag`), so that
            causal work is the same on all ranks.
        cu_seqlens: boundaries of packed documents in the whole sequence, from 0 to world*seq_local, the
            same on every rank; a document may span ranks. A position sees only its own document. They are
            read by the host: a tensor on a GPU costs a synchronisation.
        return_lse: also return the log-sum-exp of the scores of each row.
        group: the group that holds the sequence; the current one by default.
        out: where to put the result; must not overlap query, key or value.
        config: tiles, chunks, CTAs, and `steps`: how much memory is used for what comes from other ranks.

    Returns:
        [batch, heads, seq_local, dim], in query's dtype; with return_lse a pair (result, lse), lse
        [batch, heads, seq_local] in fp32, natural logarithm. A row that sees no key gives zeros and -inf.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout. On a GPU, where calls return
            before they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    _check(group, query, key, value, out, layout, enable_gqa, scale, config)
    documents = documents_of(group, cu_seqlens, query.shape[2])
    config = _choose(group, query, key, bool(is_causal), layout, documents, config)
    tiles = _tiles(group, query, key, config)
    group.agree(
        "ring_attention", query=tuple(query.shape), key=tuple(key.shape), dtype=query.dtype, is_causal=bool(is_causal),
        layout=layout, cu_seqlens=documents, tile_n=tiles.tile_n, chunk_rows=tiles.chunk_rows, steps=tiles.steps,
    )  # fmt: skip
    if out is None:
        out = group.world.empty(group.world_rank, query.shape, query.dtype)
    lse = group.world.empty(group.world_rank, query.shape[:3], torch.float32) if return_lse else None
    if query.numel():
        group.launch(prepare(group, query, key, value, out, lse, bool(is_causal), scale, layout, documents, config))
    else:
        group.confirm()
    return (out, lse) if lse is not None else out


def _choose(
    group: Group, query: torch.Tensor, key: torch.Tensor, is_causal: bool, layout: str,
    documents: tuple[int, ...] | None, given: Config | None,
) -> Config | None:  # fmt: skip
    """The configuration of a call: the same on every rank, as all that it follows from is. Packed documents can be
    cut in any way, so that nothing is tuned for them."""
    if documents is not None:
        return given
    batch, heads, length, dim = query.shape
    return TUNABLE.choose(
        group, query.dtype, given, batch=batch, heads=heads, kv_heads=key.shape[1], length=length, dim=dim,
        causal=is_causal, zigzag=layout == "zigzag",
    )  # fmt: skip


def prepare(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, is_causal: bool, scale: float | None, layout_of_ranks: str,
    documents: tuple[int, ...] | None, config: Config | None,
) -> Launch:  # fmt: skip
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    config = _choose(group, query, key, is_causal, layout_of_ranks, documents, config)
    layouts = tuple(layout(tensor) for tensor in (query, key, value, out))
    cut = ("ring_attention", layouts, is_causal, layout_of_ranks, config, matmul_precision(query.dtype))
    decided = group.planned(
        # documents may be others at every call, and such a plan has memory of its own: it stays on its stream
        (*cut, documents, group.world.stream_key(group.world_rank) if documents is not None else None),
        lambda: plan(group, query, key, value, out, is_causal, layout_of_ranks, documents, config),
        kept=PLANS_KEPT if documents is None else PACKED_PLANS_KEPT,
    )
    group.keep_if_captured(decided)
    size = group.size
    stamps = size * decided.window + decided.window * decided.slots * decided.chunks
    workspace = group.workspace(
        "ring_attention",
        signal_words=size + (2 * stamps if size > 1 else 0),
        half_bytes=_buffer_bytes(decided, query) // 2,
    )
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    # documents are data to the kernel, and their plans shall not be kept for as long as its binary
    variant = (cut, documents is not None, decided.config, lse is not None, workspace.signal_words)
    return _launch(group, decided, workspace, query, key, value, out, lse, scale, variant)


def _buffer_bytes(plan: Plan, query: torch.Tensor) -> int:
    """Bytes for the keys and values of other ranks."""
    if plan.sequences.size == 1:
        return 0
    return plan.window * plan.slots * 2 * plan.part_rows * query.shape[3] * query.element_size()


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `ring_attention` with these arguments would carry out."""
    group = current(group)
    _check(group, query, key, value, out, layout, enable_gqa, scale, config)
    documents = documents_of(group, cu_seqlens, query.shape[2])
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    chosen = _choose(group, query, key, bool(is_causal), layout, documents, config)
    decided = plan(group, query, key, value, out, bool(is_causal), layout, documents, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
