"""moe_ffn: a whole mixture-of-experts layer, one kernel per rank: dispatch, SwiGLU FFN of the experts, combine.

What it computes. For each token of this rank the sum, over the experts e that it names, of its weight times
(silu(x @ gate_e) * (x @ up_e)) @ down_e. Tokens go to the ranks of their experts, results come back.

Who does what. One persistent launch per rank; a CTA takes its role from its program id, as in
moe_dispatch_matmul, and goes on where that operator ends:

- CTA 0 announces the launch and publishes the rank's routing table: ids and weights.
- `send`, `intra`: bring the tokens to their experts' ranks (lang/dispatching.py).
- all but send count rows and order blocks of rows (lang/routing.py).
- `compute`, and the others when all tokens are in place: tiles of both GEMMs in one sequence (lang/order.py,
  `interleaved`), which a counter hands out. A tile of the first multiplies
  a block of rows by columns of gate and up, and stores silu(gate) * up; a tile of the second multiplies that block
  by columns of down. The rows of the second take the place of the tokens in memory, which nobody needs any more.
- The way back (lang/combining.py) is cut into pieces: chunk by chunk of other nodes' tokens with the sums that are
  sent there, then sums of chunks of tokens of this node, then the chunks of the rank's own tokens. They go, in
  this order, to whoever is free.
  Blocks with rows of other nodes are computed before half of those with rows of this node only; the other half is
  computed while the network brings rows. When their tiles have been handed out, all CTAs turn to the pieces of other
  nodes' tokens (phase 0), then to the other tiles, while results are on their way over the network, then to the other
  pieces (phase 1).

What is signalled. As in moe_dispatch_matmul and in moe_combine. Within the rank: each block of rows counts rows
that have been placed, tiles of the first GEMM and tiles of the second; they start at zero, before `counted`.
`settled[parity, source, chunk]`: the tables of this rank say where the rows of that chunk are. A piece of the way
back waits for this, and for the second GEMM's tiles of all blocks that hold its rows.

Why buffers are safe. Two halves by the epoch's parity, written after their readers have entered e-1, as in the
other two operators. In the rank's own memory: tiles of the second GEMM overwrite a block of tokens when all tiles
of the first have read it; a tile at the end of an expert reads rows of the next block, too, but stores nothing of
what it makes of them.

Why it cannot deadlock. Sends wait for entries and routing tables; intra for sends; tiles of the first GEMM for
intra, tiles of the second for tiles of the first, which come before them in the one sequence and so were handed out
before; pieces of the way back for tiles and for pieces before them, on any rank. Sends and intra never wait for
tiles, and tiles never for the way back. Pieces of phase 0 wait only for tiles of phase 0: rows of other nodes' tokens
are in no other blocks. So a CTA may keep a tile of phase 1 that it was handed in phase 0. There is no barrier between
the stages. All CTAs must be resident: the launch
checks that. Waits have a timeout all the same.

When the input is impossible (no room, ids beyond the last expert), all ranks find that, fill the result with NaN
and leave; the host raises, and the group can be used again.

What it costs. FLOPs 6*rows*hidden*inter. Over links: what moe_dispatch_matmul and moe_combine cost. Memory of the
rank: rows*(hidden + inter) elements; workspace for each half (ranks + 4*nodes - 3)*tokens*hidden elements.

Ways that lost, on paper. All of the first GEMM, then all of the second: the way back, as long as the way there,
would start when most of the arithmetic is over. gate and up as one GEMM with 2*inter columns: silu needs both in
one tile, and the columns of w_gate_up would have to be interleaved, which is a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from mkernel.lang.combining import collect_chunk, relay_chunk, return_chunk, tokens_of
from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.device import acquire_for_descriptors, complete_descriptor_stores
from mkernel.lang.dispatching import dispatch, fill_with_nan
from mkernel.lang.grouped import multiply_gated, multiply_rows, store_rows, store_rows_through_pointers
from mkernel.lang.hints import used_below
from mkernel.lang.order import interleaved, interleaved_until
from mkernel.lang.roles import COMPUTE, take
from mkernel.lang.routing import (
    BEFORE_NODE,
    BLOCKS,
    COMPUTED,
    ENTRY,
    FIRST_EXPERT,
    FITS,
    NUMBERED,
    PLACED,
    SCHEDULED,
    SETTLED,
    TICKETS,
    TILES_TAKEN,
    VERDICT,
    node_has_entered,
    other_nodes_have_entered,
    own_signal,
    settled_signal,
)
from mkernel.lang.signals import finish, wait, wait_again, wait_all
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.runtime import experts as host
from mkernel.runtime import planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.experts import Routing
from mkernel.runtime.group import Group, Uses, Workspace, collective, current
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import BYTES, descriptor, layout, matmul_precision
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable("moe_ffn", agreed=("tokens", "k", "hidden"), own=("inter", "experts"), shared=("chunk_rows",))

# Blocks of rows in a group, by default: about as many as an expert has in a class, if ranks have thousands of tokens.
# 4 ranks, 8192 tokens of 7168, H200: groups of 8 took 14.95 ms, of 4 14.11.
GROUPED = 4

# Counters of a block of rows.
COUNTERS = tl.constexpr(3)
GATED = tl.constexpr(1)  # tiles of the first GEMM
DONE = tl.constexpr(2)  # tiles of the second


@triton.jit
def _compute(
    context, packed, packed_store, inner, inner_rows, inner_stride,
    w_gate_up, gate_expert_stride, gate_row_stride, gate_column_stride,
    w_down, down_expert_stride, down_row_stride, down_column_stride,
    hidden, inter, schedule, placed, summary, tile, phase,
    GATE_DESCRIPTOR: tl.constexpr, GATE_TRANSPOSED: tl.constexpr,
    DOWN_DESCRIPTOR: tl.constexpr, DOWN_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles of both GEMMs, in one sequence: `tile`, and those that are handed out next. In phase 0 up to those that
    other nodes' tokens need, and one more for each CTA, so that nobody waits for them afterwards. Returns the
    first tile that was left."""
    half: tl.constexpr = TILE_N // 2  # columns of gate, and as many of up
    gates = tl.cdiv(inter, half)
    downs = tl.cdiv(hidden, TILE_N)
    blocks = tl.load(summary + BLOCKS)
    tiles = blocks * (gates + downs)
    if phase == 0:
        early = interleaved_until(tl.load(summary + BEFORE_NODE), blocks, gates, downs, GROUP)
        tiles = tl.minimum(early + tl.num_programs(0), tiles)
    while tile < tiles:
        second, place, column_block = interleaved(tile, blocks, gates, downs, GROUP)
        expert = tl.load(schedule + place * ENTRY)
        row = tl.load(schedule + place * ENTRY + 1)
        rows = tl.load(schedule + place * ENTRY + 2)
        block = tl.load(schedule + place * ENTRY + 3)
        counters = placed + block * COUNTERS
        if second:
            here = wait_again(context, counters + GATED, gates, COMPUTE, COMPUTED, -1, block)
            since = trace_time(context)
            acquire_for_descriptors()
            used_below(inner, row + rows)
            accumulator = multiply_rows(
                inner, row, w_down, expert, column_block * TILE_N, hidden, inter,
                down_expert_stride, down_row_stride, down_column_stride,
                TILE_M, TILE_N, TILE_K, DOWN_DESCRIPTOR, DOWN_TRANSPOSED, PRECISION,
            )  # fmt: skip
            accumulator += tl.where(here, 0.0, float("nan"))
            store_rows(packed_store, row, rows, column_block * TILE_N, accumulator, TILE_M, TILE_N)
            trace(context, TILES, TILE, -1, tile, since)
        else:
            here = wait_again(context, counters, rows, COMPUTE, PLACED, -1, block)
            since = trace_time(context)
            acquire_for_descriptors()
            used_below(packed, row + rows)
            gated = multiply_gated(
                packed, row, w_gate_up, expert, column_block * half, inter, hidden,
                gate_expert_stride, gate_row_stride, gate_column_stride,
                TILE_M, half, TILE_K, GATE_DESCRIPTOR, GATE_TRANSPOSED, PRECISION,
            )  # fmt: skip
            gated += tl.where(here, 0.0, float("nan"))
            store_rows_through_pointers(
                inner_rows, row, rows, column_block * half, inter, inner_stride, gated, TILE_M, half
            )
            trace(context, TILES, TILE, -1, tile, since)
        complete_descriptor_stores()
        tl.debug_barrier()
        tl.atomic_add(counters + tl.where(second, DONE, GATED), 1, sem="release", scope="gpu")
        tile = take(summary + TILES_TAKEN)
    return tile


@triton.jit
def _chunk_is_computed(
    context, epoch, source, chunk, chunks, destinations, everyones_ids, bases, first_blocks, placed, summary, experts,
    hidden, most_tokens, signals,
    K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Wait until this rank's experts are done with a chunk of `source`'s tokens."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    settled = segment_of(context, rank, tl.int64) + settled_signal(parity, source, chunk, chunks, signals, SIZE, GPUS)
    good = wait(context, settled, epoch, COMPUTE, SETTLED, source, chunk)
    if good:
        t = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
        slot = tl.arange(0, SLOTS)[None, :]
        inside = (t < tokens_of(summary, source)) & (slot < K)
        places = (source * most_tokens).to(tl.int64) * K + t * K + slot
        row = tl.load(destinations + places, mask=inside, other=-1)
        mine = row >= 0
        expert = tl.load(everyones_ids + places, mask=mine, other=0) - tl.load(summary + FIRST_EXPERT)
        block = tl.load(first_blocks + expert, mask=mine, other=0)
        block += (row - tl.load(bases + expert * SIZE, mask=mine, other=0)) // TILE_M
        done = placed + block * COUNTERS + DONE
        good = wait_all(context, done, mine, tl.cdiv(hidden, TILE_N), COMPUTE, COMPUTED, -1, -1)
    return good


@triton.jit
def _way_back(
    context, epoch, packed_rows, out, out_stride, out_column_stride, hidden, chunks, destinations, everyones_ids, bases,
    first_blocks, placed, slots, departed, summary, experts, tokens, most_tokens,
    tables_at, half_words, table_words, row_stride, partial_at, returning_at, returned_at, half, signals,
    nanoseconds_per_mib, piece, phase,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHUNK: tl.constexpr, PACED: tl.constexpr,
    COPY_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pieces of the way back: `piece`, and those that are handed out next; in phase 0 those of other nodes' tokens.
    Returns the first piece that was left."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    mine = segment_of(context, rank, tl.int64)
    before = 1 + 2 * chunks
    others: tl.constexpr = SIZE - GPUS
    nodes: tl.constexpr = SIZE // GPUS
    far: tl.constexpr = others + nodes - 1  # pieces of a chunk that have to do with other nodes
    left = node_has_entered(context, epoch - 1, COMPUTE, GPUS)
    left &= other_nodes_have_entered(context, epoch - 1, COMPUTE, SIZE, GPUS)
    pieces = tl.where(phase == 0, chunks * far, chunks * (GPUS + far + 1))
    while piece < pieces:
        within = piece - chunks * far  # this node
        own = within - chunks * GPUS
        if (own < 0) & ((within >= 0) | (piece % max(far, 1) < others)):
            chunk = tl.where(within >= 0, within // GPUS, piece // max(far, 1))
            node = rank // GPUS * GPUS
            source = tl.where(within >= 0, node + within % GPUS, (node + GPUS + piece % max(far, 1)) % SIZE)
            if left & (chunk * CHUNK < tokens_of(summary, source)):
                if _chunk_is_computed(
                    context, epoch, source, chunk, chunks, destinations, everyones_ids, bases, first_blocks, placed,
                    summary, experts, hidden, most_tokens, signals, K, SLOTS, SIZE, GPUS, TILE_M, TILE_N, CHUNK,
                ):  # fmt: skip
                    return_chunk(
                        context, epoch, packed_rows, row_stride, 1, hidden, source, chunk, chunks, destinations,
                        summary,
                        most_tokens * K, most_tokens, tables_at, half_words, table_words, row_stride, partial_at, half,
                        before, signals, DTYPE, K, SLOTS, SIZE, GPUS, CHUNK, COPY_ROWS, SUM_COLUMNS,
                    )  # fmt: skip
        elif own < 0:
            if SIZE > GPUS:
                chunk = piece // max(far, 1)
                away = piece % max(far, 1) - others + 1
                source = (rank + away * GPUS) % SIZE
                settled = settled_signal(parity, source, chunk, chunks, signals, SIZE, GPUS)
                if left & (chunk * CHUNK < tokens_of(summary, source)):
                    if wait(context, mine + settled, epoch, COMPUTE, SETTLED, source, chunk):
                        relay_chunk(
                            context, epoch, hidden, away, chunk, chunks, everyones_ids, slots, summary, most_tokens,
                            row_stride, partial_at, returning_at, returned_at, half, before, signals,
                            nanoseconds_per_mib, DTYPE, K, SLOTS, SIZE, GPUS, RANKS, CHUNK, PACED,
                            COPY_ROWS, SUM_COLUMNS,
                        )  # fmt: skip
        elif own * CHUNK < tokens:
            settled = settled_signal(parity, rank, own, chunks, signals, SIZE, GPUS)
            ready = wait(context, mine + settled, epoch, COMPUTE, SETTLED, rank, own)
            if SIZE > GPUS:
                ready &= wait(context, own_signal(mine, 2, SIZE, GPUS), epoch, COMPUTE, NUMBERED, -1, 0)
            if ready:
                collect_chunk(
                    context, epoch, out, out_stride, out_column_stride, hidden, own, chunks, everyones_ids, departed,
                    summary, most_tokens, row_stride, partial_at, returned_at, half, before, signals,
                    nanoseconds_per_mib, DTYPE, K, SLOTS, SIZE, GPUS, RANKS, CHUNK, PACED, COPY_ROWS, SUM_COLUMNS,
                )  # fmt: skip
            else:
                rows = out + (own * CHUNK).to(tl.int64) * out_stride
                count = tl.minimum(tokens - own * CHUNK, CHUNK)
                fill_with_nan(rows, count, hidden, out_stride, out_column_stride, 0, 1)
        piece = take(summary + TICKETS)
    return piece


@triton.jit
def _is_scheduled(context, summary, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Wait for the order of blocks; false if the input is impossible, or the group gave up."""
    scheduled = own_signal(segment_of(context, rank_of(context), tl.int64), 1, SIZE, GPUS)
    fits = wait(context, scheduled, current_epoch(context), COMPUTE, SCHEDULED, -1, 0)
    if fits:
        fits = tl.load(summary + VERDICT) == FITS
    return fits


# numbers that follow the batch: another binary for each would be compiled while a model is being served
VARYING = ["tokens", "most_tokens", "experts", "room", "chunks", "signals", "nanoseconds_per_mib"]


@triton.jit(do_not_specialize=VARYING)
def moe_ffn_kernel(
    context, x, x_stride, x_column_stride, ids, ids_stride, ids_column_stride,
    weights, weights_stride, weights_column_stride,
    w_gate_up, gate_expert_stride, gate_row_stride, gate_column_stride,
    w_down, down_expert_stride, down_row_stride, down_column_stride,
    packed, packed_store, packed_rows, inner, inner_rows, inner_stride, out, out_stride, out_column_stride,
    positions, destinations, everyones_ids, counts, above, bases, first_blocks, expert_counts, placed, slots, departed,
    unsorted, schedule, summary, row_source, row_token,
    tokens, most_tokens, experts, room, hidden, inter, chunks, signals, nanoseconds_per_mib,
    tables_at, half_words, table_words, row_stride, staged_at, departing_at, landing_at,
    partial_at, returning_at, returned_at, half,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, SENDERS: tl.constexpr, INTRAS: tl.constexpr, NEAR_INTRAS: tl.constexpr,
    FAR_INTRAS: tl.constexpr, PACED: tl.constexpr,
    GATE_DESCRIPTOR: tl.constexpr, GATE_TRANSPOSED: tl.constexpr,
    DOWN_DESCRIPTOR: tl.constexpr, DOWN_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr, SUM_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring for the roles and the signals."""
    cta = tl.program_id(0)
    epoch = current_epoch(context)
    dispatch(
        context, epoch, x, x_stride, x_column_stride, ids, ids_stride, ids_column_stride,
        weights, weights_stride, weights_column_stride, packed_rows,
        positions, destinations, everyones_ids, counts, above, bases, first_blocks, expert_counts, placed, slots,
        departed, unsorted, schedule, summary, row_source, row_token,
        tokens, most_tokens, experts, room, hidden, chunks, signals, nanoseconds_per_mib,
        tables_at, half_words, table_words, row_stride, staged_at, departing_at, landing_at, half,
        DTYPE, K, SLOTS, SIZE, GPUS, RANKS, SENDERS, INTRAS, NEAR_INTRAS, FAR_INTRAS, PACED, True, TILE_M, GROUP,
        COUNTERS, CHUNK, COPY_ROWS, COPY_COLUMNS,
    )  # fmt: skip

    if _is_scheduled(context, summary, SIZE, GPUS):
        tile = take(summary + TILES_TAKEN)
        piece = take(summary + TICKETS)
        for phase in range(0 if SIZE > GPUS else 1, 2):
            tile = _compute(
                context, packed, packed_store, inner, inner_rows, inner_stride,
                w_gate_up, gate_expert_stride, gate_row_stride, gate_column_stride,
                w_down, down_expert_stride, down_row_stride, down_column_stride,
                hidden, inter, schedule, placed, summary, tile, phase,
                GATE_DESCRIPTOR, GATE_TRANSPOSED, DOWN_DESCRIPTOR, DOWN_TRANSPOSED, PRECISION,
                TILE_M, TILE_N, TILE_K, GROUP,
            )  # fmt: skip
            piece = _way_back(
                context, current_epoch(context), packed_rows, out, out_stride, out_column_stride, hidden, chunks,
                destinations, everyones_ids, bases, first_blocks, placed, slots, departed, summary, experts, tokens,
                most_tokens, tables_at, half_words, table_words, row_stride, partial_at, returning_at, returned_at,
                half, signals, nanoseconds_per_mib, piece, phase,
                DTYPE, K, SLOTS, SIZE, GPUS, RANKS, TILE_M, TILE_N, CHUNK, PACED, COPY_ROWS, SUM_COLUMNS,
            )  # fmt: skip
    else:
        fill_with_nan(out, tokens, hidden, out_stride, out_column_stride, cta, tl.num_programs(0))
    finish(context, current_epoch(context), SIZE)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    config: Settings
    routing: Routing
    copying: host.Copying
    row_stride: int
    gate_read: tuple[bool, bool]  # through descriptors, of transposed matrices
    down_read: tuple[bool, bool]
    precision: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        c, r = self.config, self.routing
        head = (
            f"moe_ffn: tiles {c.tile_m}x{c.tile_n}x{c.tile_k}, {c.ctas} CTAs ({c.send_ctas} send, "
            f"{c.intra_ctas} intra, which then bring results back), chunks of {c.chunk_rows} tokens, room for "
            f"{r.room} rows of {r.experts} experts"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


def _how_gate_is_read(w_gate_up: torch.Tensor) -> tuple[bool, bool]:
    """As host.how_read; but a block of a descriptor begins at a multiple of 16 bytes, and so must up."""
    described, transposed = host.how_read(w_gate_up)
    aligned = w_gate_up.shape[2] // 2 * w_gate_up.element_size() % BYTES == 0
    return (described, transposed) if transposed or aligned else (False, False)


def plan(
    group: Group,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    routing: Routing,
    config: Config | None,
) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    hidden, inter = w_down.shape[2], w_down.shape[1]
    reasons = []
    gate_read, down_read = _how_gate_is_read(w_gate_up), host.how_read(w_down)
    for name, read in (("w_gate_up", gate_read), ("w_down", down_read)):
        if not read[0]:
            reasons.append(f"{name} has no contiguous, 16-byte aligned rows: it is read through pointers")
    both = gate_read[0] and down_read[0]
    tiles_of = planning.default_tiles(group.device, x.dtype, hidden, both)
    tiles_of = replace(tiles_of, group_m=min(tiles_of.group_m, GROUPED))
    pick = planning.chooser(config)
    tile_n = pick("tile_n", tiles_of.tile_n)
    if tile_n < 32:
        raise ArgumentError(f"config.tile_n must be at least 32: half of it is gate, half is up; got {tile_n}")
    most = group.world.ctas(group.world_rank)
    rows = routing.expected_rows
    seconds = 6 * rows * hidden * inter / planning.CTA_RATE[x.dtype] / most
    share = host.Copying.of(group, routing, hidden * x.element_size(), pick)
    reasons.append(f"{share}, if the rows are even; the arithmetic is estimated to take {seconds * 1e3:.3g} ms")
    resolved = host.settings(group, routing, tiles_of, share, pick("ctas", most), x.dtype, both, pick)
    return Plan(
        config=resolved,
        routing=routing,
        copying=share,
        row_stride=host.row_stride_of(hidden, x.dtype),
        gate_read=gate_read,
        down_read=down_read,
        precision=matmul_precision(x.dtype),
        reasons=tuple(reasons),
    )


def _areas(routing: Routing, row_bytes: int) -> host.Areas:
    """The parts of a half of the workspace."""
    rows = routing.most_tokens * row_bytes
    return host.Areas.of(
        tables=routing.size * routing.table_words(True) * 4,
        staged=rows if routing.gpus > 1 else 0,
        departing=(routing.nodes - 1) * rows,
        landing=(routing.nodes - 1) * rows,
        partial=routing.size * rows,
        returning=(routing.nodes - 1) * rows,
        returned=(routing.nodes - 1) * rows,
    )


def _launch(
    group: Group, plan: Plan, workspace: Workspace, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor, w_down: torch.Tensor, out: torch.Tensor,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan."""
    c, routing = plan.config, plan.routing
    _, inter, hidden = w_down.shape
    element = x.element_size()
    areas = _areas(routing, plan.row_stride * element)
    packed = host.rows_of_tile(group, max(routing.room, 1), hidden, x.dtype, c.tile_m)
    inner_shape = (max(routing.room, 1), host.row_stride_of(inter, x.dtype))
    inner = group.world.empty(group.world_rank, inner_shape, x.dtype)[:, :inter]
    arguments = dict(
        **host.surroundings(group, workspace, routing, areas, x.dtype, plan.row_stride, True, c.copy_bytes),
        **host.dispatching(x, topk_ids, routing, c, plan.copying),
        **host.routing_tables(group, routing, c.tile_m, COUNTERS.value),
        weights=topk_weights, weights_stride=topk_weights.stride(0), weights_column_stride=topk_weights.stride(1),
        w_gate_up=_operand(w_gate_up, plan.gate_read, c.tile_k, c.tile_n // 2),
        gate_expert_stride=w_gate_up.stride(0), gate_row_stride=w_gate_up.stride(1),
        gate_column_stride=w_gate_up.stride(2),
        w_down=_operand(w_down, plan.down_read, c.tile_k, c.tile_n),
        down_expert_stride=w_down.stride(0), down_row_stride=w_down.stride(1), down_column_stride=w_down.stride(2),
        packed=descriptor(packed, list(packed.shape), [packed.stride(0), 1], [c.tile_m, c.tile_k]),
        packed_store=host.rows_descriptor(packed, c.tile_m, c.tile_n), packed_rows=packed,
        inner=descriptor(inner, list(inner.shape), [inner.stride(0), 1], [c.tile_m, c.tile_k]),
        inner_rows=inner, inner_stride=inner.stride(0),
        out=out, out_stride=out.stride(0), out_column_stride=out.stride(1),
        inter=inter,
        GATE_DESCRIPTOR=plan.gate_read[0], GATE_TRANSPOSED=plan.gate_read[1],
        DOWN_DESCRIPTOR=plan.down_read[0], DOWN_TRANSPOSED=plan.down_read[1], PRECISION=plan.precision,
        SUM_COLUMNS=max(c.copy_bytes // element // 16, 1),
    )  # fmt: skip
    return Launch(
        op="moe_ffn",
        group=group,
        kernel=moe_ffn_kernel,
        grid=c.ctas,
        arguments=arguments,
        options=dict(num_warps=c.warps, num_stages=c.stages),
        variant=plan,
        uses=Uses(workspace, areas.arrays(workspace, routing, ("held", "settled", "returned", "back"))),
        inputs=("x", "ids", "weights", "w_gate_up", "w_down"),
        results=("out",),
    )


def _operand(w: torch.Tensor, read: tuple[bool, bool], tile_k: int, tile_n: int) -> object:
    return host.matrices_descriptor(w, read[1], tile_k, tile_n) if read[0] else w


def _check(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, capacity: int | None, max_tokens: int | None, out: torch.Tensor | None, config: Config | None,
) -> None:  # fmt: skip
    """Refuse what can not be computed, naming the argument and the rule."""
    host.check_config("moe_ffn", config)
    host.check_tokens("moe_ffn", group, x, topk_ids)
    check_tensor("moe_ffn", group, "topk_weights", topk_weights)
    host.check_weights(topk_weights, x.shape[0], topk_ids.shape[1])
    host.check_matrices("moe_ffn", group, "w_gate_up", w_gate_up, x.dtype, x.shape[1], "the size of a token")
    if w_gate_up.shape[2] % 2:
        raise ArgumentError(f"w_gate_up is {tuple(w_gate_up.shape)}: half of its columns are gate, half are up")
    inter = w_gate_up.shape[2] // 2
    host.check_matrices("moe_ffn", group, "w_down", w_down, x.dtype, inter, "half of the columns of w_gate_up")
    if w_down.shape[0] != w_gate_up.shape[0] or w_down.shape[2] != x.shape[1]:
        raise ArgumentError(
            f"w_down is {tuple(w_down.shape)}, but must be {(w_gate_up.shape[0], inter, x.shape[1])}: as many experts "
            f"as w_gate_up has, and columns as many as a token has elements"
        )
    host.check_bounds(x.shape[0], capacity, max_tokens)
    if out is not None:
        check_tensor("moe_ffn", group, "out", out)
        inputs = dict(x=x, topk_ids=topk_ids, topk_weights=topk_weights, w_gate_up=w_gate_up, w_down=w_down)
        check_out(out, tuple(x.shape), "tokens, hidden", x.dtype, inputs)


@collective
def moe_ffn(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    group: Group | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """A mixture-of-experts layer: tokens to their experts, SwiGLU there, weighted sums back; in one kernel.

    Args:
        x: [tokens, hidden], this rank's tokens; how many may differ between ranks, also be none. Any strides.
        topk_ids: [tokens, k], k from 1 to 16, int32 or int64: the experts of each token, numbered over all ranks
            in rank order. Negative: dropped.
        topk_weights: [tokens, k], floating point.
        w_gate_up: [experts, hidden, 2*inter], gate, then up, of this rank's experts; how many may differ between
            ranks, also be none. A transposed view of [experts, 2*inter, hidden] is read as it is.
        w_down: [experts, inter, hidden], likewise.
        group, capacity, max_tokens, config: as in moe_dispatch_matmul; capacity is in rows, one for each token and
            expert on this rank.
        out: [tokens, hidden], where to put the result; must not overlap an input.

    Returns:
        [tokens, hidden] in x's type. Products are accumulated in fp32; the activations, the experts' results and the
        sums that leave a rank or a node are rounded to x's type. The same input gives the same bits. A token whose
        ids were all dropped gets zeros.

    Raises:
        ArgumentError: before anything is launched.
        CapacityError, RoutingError: as in moe_dispatch_matmul; the result is NaN.
        CommTimeout: a peer did not come within the group's timeout.
    """
    assert group is not None
    _check(group, x, topk_ids, topk_weights, w_gate_up, w_down, capacity, max_tokens, out, config)
    routing = agree(group, x, topk_ids, w_down, capacity, max_tokens, config)
    if out is None:
        out = group.world.empty(group.world_rank, tuple(x.shape), x.dtype)
    group.launch(prepare(group, x, topk_ids, topk_weights, w_gate_up, w_down, out, routing, config))
    return out


def agree(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w_down: torch.Tensor, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> Routing:  # fmt: skip
    """The sizes of a call whose arguments are in order. Collective."""
    return host.agree(
        "moe_ffn", group, x, topk_ids, w_down.shape[0], capacity, max_tokens, config,
        lambda most: _choose(group, x, topk_ids, w_down, most, config),
    )  # fmt: skip


def _choose(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w_down: torch.Tensor, most_tokens: int, given: Config | None
) -> Config | None:
    """The configuration of a call in which no rank has more tokens. Chunks follow from what is the same on every
    rank, whether they were tuned or not."""
    experts, inter, hidden = w_down.shape
    return TUNABLE.choose(
        group, x.dtype, given, tokens=most_tokens, k=topk_ids.shape[1], hidden=hidden, inter=inter, experts=experts
    )


def prepare(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, out: torch.Tensor, routing: Routing, config: Config | None,
) -> Launch:  # fmt: skip
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    config = _choose(group, x, topk_ids, w_down, routing.most_tokens, config)
    key = (
        "moe_ffn", layout(x), layout(out), layout(topk_weights), _how_gate_is_read(w_gate_up), host.how_read(w_down),
        w_down.shape, routing, config, matmul_precision(x.dtype),
    )  # fmt: skip
    decided = group.planned(key, lambda: plan(group, x, w_gate_up, w_down, routing, config))
    workspace = group.workspace(
        "moe_ffn",
        signal_words=routing.signal_words(1 + 4 * routing.chunks),
        half_bytes=_areas(routing, decided.row_stride * x.element_size()).nbytes,
    )
    return _launch(group, decided, workspace, x, topk_ids, topk_weights, w_gate_up, w_down, out)


def explain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    group: Group | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `moe_ffn` with these arguments would carry out, if no rank had more tokens."""
    group = current(group)
    _check(group, x, topk_ids, topk_weights, w_gate_up, w_down, capacity, max_tokens, out, config)
    most = max(x.shape[0] if max_tokens is None else max_tokens, 1)
    chosen = _choose(group, x, topk_ids, w_down, most, config)
    routing = host.sized(group, topk_ids, w_down.shape[0], capacity, most, group.size * most, chosen)
    decided = plan(group, x, w_gate_up, w_down, routing, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
