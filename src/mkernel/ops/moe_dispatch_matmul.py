"""moe_dispatch_matmul: tokens go to the ranks of their experts and are multiplied there, in one kernel per rank.

What it computes. Every rank holds tokens x [tokens, hidden] with k expert ids each, and the matrices of its
experts, w [experts, hidden, out]; experts are numbered over the ranks in rank order. The result on a rank
are the rows of its experts times their matrices, one expert behind the other; the rows of an expert are
ordered by source rank, then token. Nobody knows before the launch how many there are.

Who does what. One persistent launch per rank; a CTA takes its role from its program id:

- CTA 0 announces the launch and publishes the rank's routing table (lang/routing.py).
- `send` (with more than one node): copies the tokens that another node needs, chunk by chunk, one behind the other,
  to where the network can read them; one request per chunk and node. A token crosses to another node once, if an
  expert of it is there, and lands at the rank's counterpart; that rank need not do anything for it.
- All others copy the rank's tokens to where its node can fetch them, while the tables are on their way. Then they
  count rows (lang/routing.py); the last of them lays them out and orders the blocks.
- `intra`: fetches the tokens that name an expert of this rank, chunk by chunk in the order in which they
  become available: own ones, those of the node, those of other nodes from the counterparts in the node. A
  token is read once, over NVLink or not, and stored once for each of its rows. All of them place the rank's own rows,
  and start to multiply; some go on with those of others, as many as keep pace with the links.
- `compute`: takes tiles, in about the order in which the blocks of rows become complete. A counter hands them out to
  whoever is free; so send and intra CTAs join when they are done, be it early or late.

What is signalled. `entered[rank]`: that rank of my node has begun epoch e; `entered[node]`: all ranks of
that node have. `routed[parity, source]`: the source's routing table is in this rank's memory.
`held[parity, source, chunk]`: so is that chunk of its tokens; the ranks of the node look at these signals
over NVLink. All hold epochs and only grow. Within the rank: `counted` and `scheduled` hold epochs; each
block of rows has a counter of rows that have been placed, which is set to zero before `counted` is
signalled, and is waited for until it is the block's height.

Why buffers are safe. Tables, tokens and arrival signals have two halves, by the epoch's parity. What a rank
writes into its own half in epoch e is read by its node, what it sends to a counterpart is read by the
counterpart's node. So it writes after all ranks of these nodes have entered e-1, and have left e-2. A
rank leaves an epoch only when all routing tables have arrived, and every chunk that was sent has an
expert's rank that waits for it; so nothing of e-2 is in flight then, and what was sent has been read. (All tables
of an epoch are waited for, so the waits for entries hardly ever block; they state the rule.)

Why it cannot deadlock. Entries, tables and what is staged for the node wait for nothing but entries of the epoch
before; send and counting for tables; intra for counting, and for what any rank stages or sends; compute for intra.
All CTAs that count wait for each other, so all CTAs of a launch must be resident: the launch checks that. Waits have a
timeout all the same.

When the input is impossible. All ranks see all tables, so all find the same ranks that have no room for
their rows, or ids that no rank has an expert for. Then no row is placed and y is filled with NaN, on all
ranks; transfers are waited for as always. The host raises, and the group can be used again.

Why tiles are handed out, and not dealt as in all_gather_matmul. When a CTA is done with its copies depends on the
routing and on the others. A tile's bits do not depend on who computes it. Who holds a number waits only for rows that
are being placed, by CTAs that hold none.

What it costs. FLOPs 2*rows*hidden*out. Each token is copied once on its rank, if others need it, crosses
NVLink once for each rank that has an expert of it, the network once for each such node. Every row is stored
once more, grouped by expert, because TMA needs rows that lie together: rows*hidden elements, beside the
2*nodes*tokens*hidden of the workspace. The last block of an expert is not full; it is computed as a tile, or as
one of half the height if that is enough.

Ways that lost, on paper. Pushing tokens to their ranks needs memory for the tokens of all ranks on every rank,
or the sender must know the receiver's layout; and a receiver's second row of a token needs a copy of its own.
Exchanging counts instead of ids saves little and needs a second exchange for the order of rows. Loading
rows through an index in the GEMM saves the copy and loses TMA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.device import acquire_for_descriptors
from mkernel.lang.dispatching import dispatch, fill_with_nan
from mkernel.lang.grouped import multiply_rows, store_rows, store_rows_through_pointers
from mkernel.lang.hints import used_below
from mkernel.lang.roles import COMPUTE, take
from mkernel.lang.routing import (
    BLOCKS,
    ENTRY,
    FITS,
    PLACED,
    SCHEDULED,
    TILES_TAKEN,
    VERDICT,
    own_signal,
    tile_of,
)
from mkernel.lang.signals import finish, wait, wait_again
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.runtime import experts as host
from mkernel.runtime import planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.experts import Handle, Routing
from mkernel.runtime.group import Group, Uses, Workspace, collective, current
from mkernel.runtime.operands import descriptor, layout, matmul_precision
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(
    "moe_dispatch_matmul", agreed=("tokens", "k", "hidden", "out"), own=("experts",), shared=("chunk_rows",)
)


@triton.jit
def multiply_block(
    context, packed, packed_short, w, y, y_rows, y_stride, n, k, w_expert_stride, w_row_stride, w_column_stride,
    schedule, placed, tile,
    W_DESCRIPTOR: tl.constexpr, W_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, SHORT_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile, when the rows of its block have been placed; NaN if they have not. If these are no more than SHORT_M, as
    in the last block of an expert, it is of that height."""
    place, column_block = tile_of(schedule, tile, tl.cdiv(n, TILE_N))
    expert = tl.load(schedule + place * ENTRY)
    row = tl.load(schedule + place * ENTRY + 1)
    rows = tl.load(schedule + place * ENTRY + 2)
    block = tl.load(schedule + place * ENTRY + 3)
    column = column_block * TILE_N
    here = wait_again(context, placed + block, rows, COMPUTE, PLACED, -1, block)
    acquire_for_descriptors()
    used_below(packed, row + rows)
    since = trace_time(context)
    if rows > (SHORT_M if SHORT_M < TILE_M else 0):
        accumulator = multiply_rows(
            packed, row, w, expert, column, n, k, w_expert_stride, w_row_stride, w_column_stride,
            TILE_M, TILE_N, TILE_K, W_DESCRIPTOR, W_TRANSPOSED, PRECISION,
        )  # fmt: skip
        accumulator += tl.where(here, 0.0, float("nan"))
        store_rows(y, row, rows, column, accumulator, TILE_M, TILE_N)
    elif SHORT_M < TILE_M:
        used_below(packed_short, row + rows)
        short = multiply_rows(
            packed_short, row, w, expert, column, n, k, w_expert_stride, w_row_stride, w_column_stride,
            SHORT_M, TILE_N, TILE_K, W_DESCRIPTOR, W_TRANSPOSED, PRECISION,
        )  # fmt: skip
        short += tl.where(here, 0.0, float("nan"))
        # a descriptor would take another place in shared memory
        store_rows_through_pointers(y_rows, row, rows, column, n, y_stride, short, SHORT_M, TILE_N)
    trace(context, TILES, TILE, -1, tile, since)


TILES_AT_ONCE = tl.constexpr(16)

# numbers that follow the batch: another binary for each would be compiled while a model is being served
VARYING = ["tokens", "most_tokens", "experts", "room", "chunks", "signals", "nanoseconds_per_mib"]


@triton.jit(do_not_specialize=VARYING)
def moe_dispatch_matmul_kernel(
    context, x, x_stride, x_column_stride, ids, ids_stride, ids_column_stride,
    w, w_expert_stride, w_row_stride, w_column_stride, packed, packed_short, packed_rows, y, y_rows, y_stride,
    positions, destinations, everyones_ids, counts, above, bases, first_blocks, expert_counts, placed, slots, departed,
    unsorted, schedule, summary, row_source, row_token,
    tokens, most_tokens, experts, room, hidden, n, chunks, signals, nanoseconds_per_mib,
    tables_at, half_words, table_words, row_stride, staged_at, departing_at, landing_at, half,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, SENDERS: tl.constexpr, INTRAS: tl.constexpr, NEAR_INTRAS: tl.constexpr,
    FAR_INTRAS: tl.constexpr, PACED: tl.constexpr,
    W_DESCRIPTOR: tl.constexpr, W_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, SHORT_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring for the roles and the signals."""
    cta = tl.program_id(0)
    epoch = current_epoch(context)
    dispatch(
        context, epoch, x, x_stride, x_column_stride, ids, ids_stride, ids_column_stride,
        ids, 0, 0, packed_rows,
        positions, destinations, everyones_ids, counts, above, bases, first_blocks, expert_counts, placed, slots,
        departed, unsorted, schedule, summary, row_source, row_token,
        tokens, most_tokens, experts, room, hidden, chunks, signals, nanoseconds_per_mib,
        tables_at, half_words, table_words, row_stride, staged_at, departing_at, landing_at, half,
        DTYPE, K, SLOTS, SIZE, GPUS, RANKS, SENDERS, INTRAS, NEAR_INTRAS, FAR_INTRAS, PACED, False, TILE_M, GROUP, 1,
        CHUNK, COPY_ROWS, COPY_COLUMNS,
    )  # fmt: skip

    blocks = tl.full((), 0, tl.int32)
    scheduled = own_signal(segment_of(context, rank_of(context), tl.int64), 1, SIZE, GPUS)
    fits = wait(context, scheduled, epoch, COMPUTE, SCHEDULED, -1, 0)
    if fits:
        blocks = tl.load(summary + BLOCKS)
        fits = tl.load(summary + VERDICT) == FITS
    if not fits:
        fill_with_nan(y_rows, room, n, y_stride, 1, cta, tl.num_programs(0))
    if blocks > 0:
        tiles = blocks * tl.cdiv(n, TILE_N)
        tile = take(summary + TILES_TAKEN)
        while tile < tiles:
            # in a loop with a count Triton lets the result of one tile leave while the next one begins
            for _ in range(TILES_AT_ONCE):
                if tile < tiles:
                    multiply_block(
                        context, packed, packed_short, w, y, y_rows, y_stride, n, hidden,
                        w_expert_stride, w_row_stride, w_column_stride, schedule, placed, tile,
                        W_DESCRIPTOR, W_TRANSPOSED, PRECISION, TILE_M, SHORT_M, TILE_N, TILE_K,
                    )  # fmt: skip
                    tile = take(summary + TILES_TAKEN)
    finish(context, epoch, SIZE)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    config: Settings
    routing: Routing
    copying: host.Copying
    row_stride: int
    short_m: int  # blocks of no more rows are tiles of that height
    described: bool  # w is read through descriptors
    transposed: bool
    precision: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        c, r = self.config, self.routing
        head = (
            f"moe_dispatch_matmul: tiles {c.tile_m}x{c.tile_n}x{c.tile_k}, {c.ctas} CTAs ({c.send_ctas} send, "
            f"{c.intra_ctas} intra, which compute when they are done), chunks of "
            f"{c.chunk_rows} tokens, room for {r.room} rows of {r.experts} experts"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


def plan(group: Group, x: torch.Tensor, w: torch.Tensor, routing: Routing, config: Config | None) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    hidden, n = w.shape[1], w.shape[2]
    reasons = []
    described, transposed = host.how_read(w)
    if not described:
        reasons.append("w has no contiguous, 16-byte aligned rows: it is read through pointers")
    tiles_of = planning.default_tiles(group.device, x.dtype, n, described)
    pick = planning.chooser(config)
    tile_m, tile_n = pick("tile_m", tiles_of.tile_m), pick("tile_n", tiles_of.tile_n)
    most = group.world.ctas(group.world_rank)
    rows = routing.expected_rows
    tiles = (math.ceil(rows / tile_m) + routing.experts) * math.ceil(n / tile_n)
    compute_seconds = tiles * 2 * tile_m * tile_n * hidden / planning.CTA_RATE[x.dtype] / most
    share = host.Copying.of(group, routing, hidden * x.element_size(), pick)
    reasons.append(
        f"{share} while about {tiles} tiles are computed, if the rows are even: estimated "
        f"{compute_seconds * 1e3:.3g} ms"
    )
    resolved = host.settings(group, routing, tiles_of, share, pick("ctas", most), x.dtype, described, pick)
    short_m = host.short_tile(group.device, tile_m)
    if short_m < tile_m:
        reasons.append(
            f"a block of at most {short_m} rows, as the last one of an expert may be, is a tile of that height"
        )
    return Plan(
        config=resolved,
        routing=routing,
        copying=share,
        row_stride=host.row_stride_of(hidden, x.dtype),
        short_m=short_m,
        described=described,
        transposed=transposed,
        precision=matmul_precision(x.dtype),
        reasons=tuple(reasons),
    )


def _areas(routing: Routing, row_bytes: int) -> host.Areas:
    """The parts of a half of the workspace."""
    rows = routing.most_tokens * row_bytes
    return host.Areas.of(
        tables=routing.size * routing.table_words(False) * 4,
        staged=rows if routing.gpus > 1 else 0,
        departing=(routing.nodes - 1) * rows,
        landing=(routing.nodes - 1) * rows,
    )


def _launch(
    group: Group, plan: Plan, workspace: Workspace, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor,
    y: torch.Tensor, tables: dict[str, torch.Tensor],
) -> Launch:  # fmt: skip
    """The launch that carries out a plan."""
    c, routing = plan.config, plan.routing
    _, hidden, n = w.shape
    areas = _areas(routing, plan.row_stride * x.element_size())
    packed = group.world.empty(group.world_rank, (max(routing.room, 1), plan.row_stride), x.dtype)
    arguments = dict(
        **host.surroundings(group, workspace, routing, areas, x.dtype, plan.row_stride, False, c.copy_bytes),
        **host.dispatching(x, topk_ids, routing, c, plan.copying),
        **tables,
        w=host.matrices_descriptor(w, plan.transposed, c.tile_k, c.tile_n) if plan.described else w,
        w_expert_stride=w.stride(0), w_row_stride=w.stride(1), w_column_stride=w.stride(2),
        packed=descriptor(packed, [packed.shape[0], hidden], [plan.row_stride, 1], [c.tile_m, c.tile_k]),
        packed_short=descriptor(packed, [packed.shape[0], hidden], [plan.row_stride, 1], [plan.short_m, c.tile_k]),
        packed_rows=packed,
        y=host.rows_descriptor(y, c.tile_m, c.tile_n), y_rows=y, y_stride=y.stride(0),
        n=n,
        W_DESCRIPTOR=plan.described, W_TRANSPOSED=plan.transposed, PRECISION=plan.precision, SHORT_M=plan.short_m,
    )  # fmt: skip
    return Launch(
        op="moe_dispatch_matmul",
        group=group,
        kernel=moe_dispatch_matmul_kernel,
        grid=c.ctas,
        arguments=arguments,
        options=dict(num_warps=c.warps, num_stages=c.stages),
        variant=plan,
        uses=Uses(workspace, areas.arrays(workspace, routing, ("held",))),
        inputs=("x", "ids", "w"),
    )


def _check(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> None:  # fmt: skip
    """Refuse what can not be computed, naming the argument and the rule."""
    host.check_config("moe_dispatch_matmul", config)
    host.check_tokens("moe_dispatch_matmul", group, x, topk_ids)
    host.check_matrices("moe_dispatch_matmul", group, "w", w, x.dtype, x.shape[1], "the size of a token")
    host.check_bounds(x.shape[0], capacity, max_tokens)


@collective
def moe_dispatch_matmul(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    *,
    group: Group | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, Handle]:
    """Bring every token to the ranks of its experts and multiply it there, overlapped, in one kernel.

    Args:
        x: [tokens, hidden], this rank's tokens; how many may differ between ranks, also be none. Any strides.
        topk_ids: [tokens, k], k from 1 to 16, int32 or int64: the experts of each token, numbered over all ranks
            in rank order. Negative: dropped. A token that names an expert twice makes two rows.
        w: [experts, hidden, out], the matrices of this rank's experts; how many may differ between ranks, also be
            none. A transposed view of [experts, out, hidden] is read as it is.
        group: the group; the current one by default.
        capacity: how many rows this rank has room for; may differ between ranks. None is room for whatever the
            routing is: the tokens of all ranks times k, or none without experts. If the ids of a token are all
            different, as torch.topk gives them, the tokens of all ranks times min(k, experts) are enough.
        max_tokens: the most tokens that any rank has, the same on every rank. Workspaces are sized by it. None:
            the ranks tell each other on the host at every call, which costs time and keeps the call from
            returning before the others have made it.
        config: tiles, chunks and CTAs; None takes good defaults.

    Returns:
        (y, handle): y [capacity, out] has the rows of this rank's experts, grouped by expert, within an expert by
        source rank, then token; `handle.counts` says how many rows each expert has, `handle.source` and
        `handle.token` where a row came from. Rows of y beyond the sum of counts are not written. bf16, fp16 or
        fp32, accumulated in fp32.

    Raises:
        ArgumentError: before anything is launched.
        CapacityError: some rank has more rows than room. All ranks raise it, nothing was computed (y is NaN), and the
            group can be used again. RoutingError: an id is beyond the last expert; likewise. On a GPU, where calls
            return before they are done, the next call on the group or `group.synchronize()` raises them.
        CommTimeout: a peer did not come within the group's timeout.
    """
    assert group is not None
    _check(group, x, topk_ids, w, capacity, max_tokens, config)
    routing = agree(group, x, topk_ids, w, capacity, max_tokens, config)
    launch, y, handle = prepare(group, x, topk_ids, w, routing, config)
    group.launch(launch)
    return y, handle


def agree(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> Routing:  # fmt: skip
    """The sizes of a call whose arguments are in order. Collective."""
    return host.agree(
        "moe_dispatch_matmul", group, x, topk_ids, w.shape[0], capacity, max_tokens, config,
        lambda most: _choose(group, x, topk_ids, w, most, config), out=w.shape[2],
    )  # fmt: skip


def _choose(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, most_tokens: int, given: Config | None
) -> Config | None:
    """The configuration of a call in which no rank has more tokens. Chunks follow from what is the same on every
    rank, whether they were tuned or not."""
    experts, hidden, out = w.shape
    return TUNABLE.choose(
        group, x.dtype, given, tokens=most_tokens, k=topk_ids.shape[1], hidden=hidden, out=out, experts=experts
    )


def prepare(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, routing: Routing, config: Config | None
) -> tuple[Launch, torch.Tensor, Handle]:
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    config = _choose(group, x, topk_ids, w, routing.most_tokens, config)
    key = ("moe_dispatch_matmul", layout(x), host.how_read(w), w.shape, routing, config, matmul_precision(x.dtype))
    decided = group.planned(key, lambda: plan(group, x, w, routing, config))
    workspace = group.workspace(
        "moe_dispatch_matmul",
        signal_words=routing.signal_words(1 + routing.chunks),
        half_bytes=_areas(routing, decided.row_stride * x.element_size()).nbytes,
    )
    tile_m = decided.config.tile_m
    y = host.rows_of_tile(group, routing.room, w.shape[2], x.dtype, tile_m)
    tables = host.routing_tables(group, routing, tile_m)
    handle = Handle(
        group=group,
        counts=tables["expert_counts"][: routing.experts],
        source=tables["row_source"][: routing.room],
        token=tables["row_token"][: routing.room],
        routing=routing,
        tables=tables,
    )
    return _launch(group, decided, workspace, x, topk_ids, w, y, tables), y, handle


def explain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    *,
    group: Group | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `moe_dispatch_matmul` with these arguments would carry out, if no rank had more tokens."""
    group = current(group)
    _check(group, x, topk_ids, w, capacity, max_tokens, config)
    most = max(x.shape[0] if max_tokens is None else max_tokens, 1)
    chosen = _choose(group, x, topk_ids, w, most, config)
    routing = host.sized(group, topk_ids, w.shape[0], capacity, most, group.size * most, chosen)
    decided = plan(group, x, w, routing, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
