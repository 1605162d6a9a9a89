"""moe_dispatch_matmul: tokens go to the ranks of their experts and are multiplied there, in one kernel per rank.

What it computes. Every rank holds tokens x [tokens, hidden] with k expert ids each, and the matrices of its
experts, w [experts, hidden, out]; experts are numbered over the ranks in rank order. The result on a rank
are the rows of its experts times their matrices, one expert behind the other; the rows of an expert are
ordered by source rank, then token. Nobody knows before the launch how many there are.

Who does what. One persistent launch per rank; a CTA takes its role from its program id:

- CTA 0 announces the launch and publishes the rank's routing table (routing.py).
- `send` (with more than one node): copies the tokens that another node needs, chunk by chunk, one behind the other,
  to where the network can read them; one request per chunk and node. A token crosses to another node once, if an
  expert of it is there, and lands at the rank's counterpart; that rank need not do anything for it.
- All others copy the rank's tokens to where its node can fetch them, while the tables are on their way. Then they
  count rows (routing.py); the last of them lays them out and orders the blocks (schedule.py).
- `intra`: fetches the tokens that name an expert of this rank, chunk by chunk in the order in which they
  become available: own ones, those of the node, those of other nodes from the counterparts in the node. A
  token is read once, over NVLink or not, and stored once for each of its rows. All of them place the rank's own rows,
  and start to multiply; some go on with those of others, as many as keep pace with the links.
- `compute`: takes tiles, in about the order in which the blocks of rows become complete. A counter hands them out to
  whoever is free; so send and intra CTAs join when they are done, be it early or late.

What is signalled: `entered`, `node_entered`, `routed` and `held` of protocol.py; the ranks of the node look at the last
two over NVLink. Within the rank: `counted` and `scheduled`; each block of rows has a counter of rows that have been
placed, which is set to zero before `counted` is signalled, and is waited for until it is the block's height.

Why buffers are safe. Two halves by the epoch's parity, see protocol.py. A rank leaves an epoch only when all routing
tables have arrived, and every chunk that was sent has an expert's rank that waits for it; so nothing of e-2 is in
flight when e begins, and what was sent has been read. (All tables of an epoch are waited for, so the waits for entries
hardly ever block; they state the rule.)

Why it cannot deadlock. Entries, tables and what is staged for the node wait for nothing but entries of the epoch
before; send and counting for tables; intra for counting, and for what any rank stages or sends; compute for intra.
All CTAs that count wait for each other, so all CTAs of a launch must be resident: the launch checks that. Waits have a
timeout all the same.

When the routing cannot be carried out. All ranks see all tables, so all find the same ranks whose rows exceed their
capacity, or ids that no rank has an expert for. Then no row is placed and y is filled with NaN, on all
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

from dataclasses import replace

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.matrix import Block, Tiling
from mkernel.lang.roles import take
from mkernel.lang.signals import finish
from mkernel.ops.moe import protocol
from mkernel.ops.moe.arguments import check_bounds, check_config, check_matrices, check_tokens
from mkernel.ops.moe.dispatch import Dispatch, Roles, dispatch_tokens, fill_with_nan
from mkernel.ops.moe.grouped import (
    Gemm,
    Operands,
    WeightLayout,
    Weights,
    empty_rows,
    multiply_block,
    result_descriptor,
    rows_descriptor,
)
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.plan import DispatchPlan, plan_dispatch
from mkernel.ops.moe.protocol import Batch, decode
from mkernel.ops.moe.routing import BLOCKS, TILES_TAKEN, Tables, routing_of, tables_for
from mkernel.ops.moe.schedule import wait_scheduled
from mkernel.ops.moe.sizes import Sizes, sized
from mkernel.ops.moe.sizes import agree as agree_on_sizes
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group, collective, current
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, layout, matmul_precision
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(
    "moe_dispatch_matmul", agreed=("tokens", "k", "hidden", "out"), own=("experts",), shared=("chunk_rows",)
)
TILES_AT_ONCE = tl.constexpr(16)


@triton.jit
def _run(comm, operands, routing, dispatch, gemm, batch):
    dispatch_tokens(comm, routing, dispatch, batch)
    tables = routing.tables
    blocks = tl.full((), 0, tl.int32)
    if wait_scheduled(comm, tables, batch.signals):
        blocks = tl.load(tables.summary + BLOCKS)
    else:
        fill_with_nan(gemm.y_rows, batch.capacity, gemm.n, tl.program_id(0), tl.num_programs(0))
    if blocks > 0:
        tiles = blocks * tl.cdiv(gemm.n, gemm.tiling.N)
        tile = take(tables.summary + TILES_TAKEN)
        while tile < tiles:
            # in a loop with a count Triton lets the result of one tile leave while the next one begins
            for _ in range(TILES_AT_ONCE):
                if tile < tiles:
                    multiply_block(comm.context, operands, gemm, tables, tile)
                    tile = take(tables.summary + TILES_TAKEN)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def moe_dispatch_matmul_kernel(context, ranks, rows, short_rows, w, y, routing, dispatch, gemm, batch):
    """The whole operator. ranks: `Ranks`; rows, short_rows, w, y: see `Operands`; routing: `Routing`, dispatch:
    `Dispatch`, gemm: `Gemm`, batch: `Batch`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        Operands(rows, short_rows, Weights(w, gemm.w_strides), y),
        routing, dispatch, gemm,
        Batch(
            decode(batch.tokens), decode(batch.max_tokens), decode(batch.experts), decode(batch.capacity),
            decode(batch.chunks), batch.nanoseconds_per_mib, batch.signals,
        ),
    )  # fmt: skip


def _launch(
    group: Group, plan: DispatchPlan, memory: Layout, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor,
    y: torch.Tensor, tables: Tables,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan. Collective when the workspace must grow."""
    workspace = memory.workspace(group)
    c, sizes, share = plan.config, plan.sizes, plan.copying
    _, hidden, n = w.shape
    rows = group.world.memory.empty(group.world_rank, (max(sizes.capacity, 1), plan.row_stride), x.dtype)[:, :hidden]
    dispatch = Dispatch(
        x=Block(x, x.stride(0), x.stride(1)),
        ids=Block(topk_ids, topk_ids.stride(0), topk_ids.stride(1)),
        weights=None,
        rows=Block(rows, plan.row_stride, 1),
        hidden=hidden,
        staged=memory.buffer_in(workspace, "staged"),
        send=memory.buffer_in(workspace, "send"),
        recv=memory.buffer_in(workspace, "recv"),
        roles=Roles(*constants(c.send_ctas, c.intra_ctas, share.near_intra_ctas, share.far_intra_ctas)),
        **protocol.copies_of(group, c.copy_bytes, x.dtype),
        **dict(zip(("TILE_M", "GROUP", "COUNTERS", "COMBINES"), constants(c.tile_m, c.group_m, 1, False))),
    )
    gemm = Gemm(
        w_strides=plan.weights.strides(w),
        y_rows=Block(y, y.stride(0), 1),
        k=hidden,
        n=n,
        tiling=Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision)),
        SHORT_M=constants(plan.short_m)[0],
    )
    return Launch(
        op="moe_dispatch_matmul",
        group=group,
        kernel=moe_dispatch_matmul_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.gpus_per_node)),
            rows=rows_descriptor(rows, c.tile_m, c.tile_k),
            short_rows=rows_descriptor(rows, plan.short_m, c.tile_k),
            w=plan.weights.operand(w, c.tile_k, c.tile_n),
            y=result_descriptor(y, c.tile_m, c.tile_n),
            routing=routing_of(sizes, memory, workspace, tables, ids=True),
            dispatch=dispatch,
            gemm=gemm,
            batch=protocol.batch_of(group, sizes, memory, workspace),
        ),
        options=dict(num_warps=c.warps, num_stages=c.stages),
        # the workspace too: Triton makes another binary for integers of 64 bits
        variant=(plan, workspace.half_bytes),
        uses=memory.uses(workspace),
        inputs=("dispatch.x.data", "dispatch.ids.data", "w"),
    )


def _check(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> None:  # fmt: skip
    """Refuse what can not be computed, naming the argument and the rule."""
    check_config("moe_dispatch_matmul", config)
    check_tokens("moe_dispatch_matmul", group, x, topk_ids)
    check_matrices("moe_dispatch_matmul", group, "w", w, x.dtype, x.shape[1], "the size of a token")
    check_bounds(x.shape[0], capacity, max_tokens)


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
        capacity: how many rows this rank can take; may differ between ranks. None is enough for whatever the
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
        CapacityError: some rank has more rows than its capacity. All ranks raise it, nothing was computed (y is NaN),
            and the group can be used again. RoutingError: an id is beyond the last expert; likewise. On a GPU, where
            calls return before they are done, the next call on the group or `group.synchronize()` raises them.
        CommTimeout: a peer did not come within the group's timeout.
    """
    assert group is not None
    _check(group, x, topk_ids, w, capacity, max_tokens, config)
    sizes = agree(group, x, topk_ids, w, capacity, max_tokens, config)
    launch, y, handle = prepare(group, x, topk_ids, w, sizes, config)
    group.launch(launch)
    return y, handle


def agree(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> Sizes:  # fmt: skip
    """The sizes of a call whose arguments are in order. Collective."""
    return agree_on_sizes(
        "moe_dispatch_matmul", group, x, topk_ids, w.shape[0], capacity, max_tokens, config,
        lambda most: _choose(group, x, topk_ids, w, most, config), out=w.shape[2],
    )  # fmt: skip


def _choose(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, max_tokens: int, given: Config | None
) -> Config | None:
    """The configuration of a call in which no rank has more tokens. Chunks follow from what is the same on every
    rank, whether they were tuned or not."""
    experts, hidden, out = w.shape
    return TUNABLE.choose(
        group, x.dtype, given, tokens=max_tokens, k=topk_ids.shape[1], hidden=hidden, out=out, experts=experts
    )


def prepare(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, sizes: Sizes, config: Config | None
) -> tuple[Launch, torch.Tensor, Handle]:
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    config = _choose(group, x, topk_ids, w, sizes.max_tokens, config)
    key = ("moe_dispatch_matmul", layout(x), WeightLayout.of(w), w.shape, sizes, config, matmul_precision(x.dtype))
    decided = group.planned(key, lambda: plan_dispatch(group, x, w, sizes, config))
    memory = protocol.layout("moe_dispatch_matmul", sizes, x.dtype, decided.row_stride, dispatches=True)
    tile_m = decided.config.tile_m
    y = empty_rows(group, sizes.capacity, w.shape[2], x.dtype, tile_m)
    tables = tables_for(group, sizes, tile_m, counters=1)
    handle = Handle(
        group=group,
        counts=tables.expert_counts[: sizes.experts],
        source=tables.row_source[: sizes.capacity],
        token=tables.row_token[: sizes.capacity],
        sizes=sizes,
        tables=tables,
    )
    return _launch(group, decided, memory, x, topk_ids, w, y, tables), y, handle


def explain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    *,
    group: Group | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
) -> DispatchPlan:
    """The plan that `moe_dispatch_matmul` with these arguments would carry out, if no rank had more tokens."""
    group = current(group)
    _check(group, x, topk_ids, w, capacity, max_tokens, config)
    most = max(x.shape[0] if max_tokens is None else max_tokens, 1)
    chosen = _choose(group, x, topk_ids, w, most, config)
    sizes = sized(group, topk_ids, w.shape[0], capacity, most, group.size * most, chosen)
    decided = plan_dispatch(group, x, w, sizes, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
