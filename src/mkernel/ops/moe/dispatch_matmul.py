"""moe_dispatch_matmul: send tokens to the ranks of their experts and multiply them there, in one kernel per rank.

What it computes. Every rank holds tokens x [tokens, hidden], k expert ids for each token, and the matrices of its
experts, w [experts, hidden, out]. Experts are numbered across ranks, in rank order. The result on a rank is the rows of
its experts times their matrices, grouped by expert. The rows of an expert are ordered by source rank, then token. How
many rows there are is unknown before the launch.

Who does what. One persistent launch per rank; a CTA takes its role from its program id:

- CTA 0 announces the launch.
- `send` (only with several nodes): copies the tokens that another node needs to contiguous rows that the network can
  read, chunk by chunk, and posts one request per chunk and node. A token crosses to another node at most once, if that
  node has one of its experts, and arrives at the rank's counterpart, which takes no part in the transfer.
- All other CTAs publish the rank's routing table (routing.py), and stage the rank's tokens for its node while the
  tables are in flight. Then they count rows; the last one to finish computes row numbers. The CTA with the highest
  program id then computes the schedule of blocks (schedule.py), while others place rows.
- `intra`: fetches the tokens that name an expert of this rank, chunk by chunk, in the order in which they become
  available: the rank's own tokens, those of the node, and those of other nodes, which it reads from their counterparts
  in the node. It reads a token once, over NVLink unless it is on this rank, and stores it once for each of its rows.
  All intra CTAs place the rank's own tokens. Then as many as it takes to keep up with the links continue with the
  tokens of other ranks, and the rest start to compute. On a rank that is alone, half of all CTAs place rows, in the
  order of the tiles, while the others compute (placing.py).
- `compute`: takes tiles, roughly in the order in which blocks of rows become complete. A counter assigns tiles to CTAs
  as they become free. So `send` and `intra` CTAs join the compute whenever their transfers are done.

What is signalled. `entered`, `node_entered`, `routed` and `held` (protocol.py); the ranks of a node poll the last two
over NVLink. Within the rank: `counted`, `scheduled` and `numbered`, and counters of the CTAs that have published and
that have counted, of which the last one goes on. Each block of rows has a counter of the rows that are in place. It is
set to zero before `counted` is signalled, and a tile waits until it equals the number of rows of the block.

Why buffers are safe. They have two halves, selected by the parity of the epoch (protocol.py). A rank leaves an epoch
only after all routing tables have arrived, and for every chunk that was sent, some rank with an expert waits until it
has arrived. So when epoch e begins, nothing of e-2 is in flight, and everything that was sent has been read. (Since a
rank waits for all tables of an epoch anyway, the waits for entry signals hardly ever block; they make the rule
explicit.)

Why it cannot deadlock. The waits form a chain. Announcing the launch to the node waits for nothing; announcing to other
nodes that the whole node has entered waits for those announcements. Publishing and staging wait only for entries into
the previous epoch. Sending and counting wait for routing tables; senders also wait for the first of them, which numbers
the tokens. `intra` and the CTA that makes the schedule wait for counting, and `intra` for what any rank stages or
sends. On a rank that is alone, `intra` places rows after all of them have settled their chunks, which waits only for
counting. `compute` waits for the schedule and for `intra`. The CTAs that publish, count and settle wait for each other,
so all CTAs of a launch must be resident, which the launch checks. Still, every wait has a timeout.

If the routing is invalid. All ranks see all tables, so all of them find the same ranks whose rows exceed their
capacity, or the same ids without an expert. Then no rank places rows, and y is filled with NaN on all ranks; ranks
still wait for transfers as usual. The host raises an error, and the group remains usable.

Why tiles are assigned dynamically, unlike in all_gather_matmul. When a CTA finishes its copies depends on the routing
and on other ranks. The bits of a tile do not depend on which CTA computes it. And it adds no cycle of waits: a CTA
takes tiles only after it has placed its share of the rows, so a CTA that has taken a tile waits only for CTAs that are
still placing rows and have not taken any.

What it costs. 2*rows*hidden*out FLOPs. A token is copied once on its rank for the other ranks of its node, if there are
any, and once for each other node that needs it. It crosses NVLink at most once for each rank that has one of its
experts, and the network once for each other node that does. Every row is stored once more, grouped by expert, because
TMA needs contiguous rows: rows*hidden elements, in addition to the 2*nodes*tokens*hidden of the workspace. The last
block of an expert is usually partial; it is computed as a full tile, or as one of half the height if that is enough.

Alternatives that were rejected without a measurement. Pushing tokens to their ranks requires memory for the tokens of
all ranks on every rank, or that the sender knows the receiver's layout; and the second row of a token on a rank needs
another copy. Exchanging counts instead of ids saves little and requires a second exchange for the order of rows.
Loading rows through an index in the GEMM avoids the copy but rules out TMA.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.matrix import Block, Tiling
from mkernel.lang.roles import take
from mkernel.lang.signals import finish
from mkernel.ops.moe import protocol
from mkernel.ops.moe.arguments import check_bias, check_bounds, check_config, check_matrices, check_save, check_tokens
from mkernel.ops.moe.dispatch import dispatch_of, dispatch_tokens, fill_with_nan
from mkernel.ops.moe.grouped import (
    ROWS_BEFORE,
    Gemm,
    Operands,
    Weights,
    bias_block,
    empty_rows,
    multiply_block,
    result_descriptor,
    rows_descriptor,
)
from mkernel.ops.moe.handle import Handle, new_handle
from mkernel.ops.moe.packing import Packed
from mkernel.ops.moe.plan import Allocation, DispatchPlan, bytes_of, bytes_of_tables, plan_dispatch
from mkernel.ops.moe.protocol import Batch, decode
from mkernel.ops.moe.routing import BLOCKS, TILES_TAKEN, Tables, routing_of
from mkernel.ops.moe.schedule import wait_scheduled
from mkernel.ops.moe.sizes import Sizes, capacity_of, sized, slots_of
from mkernel.ops.moe.sizes import agree as agree_on_sizes
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group, current
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, layout, matmul_precision, named_constants
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(
    "moe_dispatch_matmul", agreed=("tokens", "k", "hidden", "out"), own=("experts",), shared=("chunk_rows",)
)
TILES_AT_ONCE = tl.constexpr(16)
# for the simulator: scales, which kernels only read
OF_SCALES = ("dispatch.packing.scales.data", "gemm.scales.w.strides.scales.data")


@triton.jit
def _run(comm, operands, routing, dispatch, gemm, batch):
    """Dispatch tokens, then compute tiles as long as there are any."""
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
            # only in a loop with a trip count does Triton overlap the store of a tile with the start of the next one
            for _ in range(TILES_AT_ONCE):
                if tile < tiles:
                    multiply_block(comm.context, operands, gemm, tables, tile)
                    tile = take(tables.summary + TILES_TAKEN)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def moe_dispatch_matmul_kernel(context, ranks, rows, short_rows, w, y, routing, dispatch, gemm, batch):
    """The whole operator. ranks: `Ranks`; rows, short_rows, w, y: see `Operands`; routing: `Routing`; dispatch:
    `Dispatch`; gemm: `Gemm`; batch: `Batch`, encoded."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        Operands(rows, short_rows, Weights(w, gemm.w_strides), y),
        routing, dispatch, gemm,
        Batch(
            decode(batch.tokens), decode(batch.max_tokens), decode(batch.experts), decode(batch.capacity),
            decode(batch.chunks), batch.nanoseconds_per_mib, batch.signals,
        ),
    )  # fmt: skip


def launch_of(
    group: Group, plan: DispatchPlan, memory: Layout, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor,
    bias: torch.Tensor | None, y: torch.Tensor, rows: torch.Tensor, tables: Tables, packed: Packed | None = None,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan. Collective if the workspace must grow. packed: tokens and matrices in fp8;
    then rows are packed tokens."""
    workspace = memory.workspace(group)
    c, sizes = plan.config, plan.sizes
    _, hidden, n = w.shape
    elements = rows if packed is None else packed.rows(rows)
    dispatch = dispatch_of(group, plan, memory, workspace, x, rows, ids=topk_ids, packed=packed)
    gemm = Gemm(
        w_strides=plan.weights.strides(w),
        y_rows=Block(y, y.stride(0), 1),
        k=hidden,
        n=n,
        bias=bias_block(bias),
        scales=None if packed is None else packed.expert_scales(rows),
        tiling=Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision)),
        **named_constants(SHORT_M=plan.short_m, SCALED=packed is not None),
    )
    return Launch(
        op=plan.op,
        group=group,
        kernel=moe_dispatch_matmul_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.gpus_per_node)),
            rows=rows_descriptor(elements, c.tile_m, c.tile_k),
            short_rows=rows_descriptor(elements, plan.short_m, c.tile_k),
            w=plan.weights.operand(w, c.tile_k, c.tile_n),
            y=result_descriptor(y, c.tile_m, c.tile_n),
            routing=routing_of(sizes, memory, workspace, tables, ids=True),
            dispatch=dispatch,
            gemm=gemm,
            batch=protocol.batch_of(group, sizes, memory, workspace),
        ),
        options=dict(num_warps=c.warps, num_stages=c.stages),
        # including the size of the workspace: Triton compiles another binary for 64-bit integers
        variant=(plan, workspace.half_bytes, None if bias is None else layout(bias)),
        uses=memory.uses(workspace),
        inputs=("dispatch.x.data", "dispatch.ids.data", "w", "gemm.bias.data", *(() if packed is None else OF_SCALES)),
    )


def check(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
    capacity: int | None, max_tokens: int | None, config: Config | None,
) -> None:  # fmt: skip
    """Reject arguments that cannot be computed with; the error names the argument and the rule."""
    check_config("moe_dispatch_matmul", config)
    check_tokens("moe_dispatch_matmul", group, x, topk_ids)
    check_matrices("moe_dispatch_matmul", group, "w", w, x.dtype, x.shape[1], "the size of a token")
    check_bias("moe_dispatch_matmul", group, "bias", bias, w, "w")
    check_bounds(x.shape[0], capacity, max_tokens)


@collective
def moe_dispatch_matmul(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    *,
    group: Group | None = None,
    bias: torch.Tensor | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, Handle]:
    """`mk.moe_dispatch_matmul`, without PyTorch's dispatcher."""
    assert group is not None
    check(group, x, topk_ids, w, bias, capacity, max_tokens, config)
    sizes = agree(group, x, topk_ids, w, capacity, max_tokens, config)
    launch, y, handle = prepare(group, x, topk_ids, w, sizes, config, bias)
    group.launch(launch)
    return y, handle


def agree(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> Sizes:  # fmt: skip
    """The sizes of a call with valid arguments. Collective."""
    return agree_on_sizes(
        "moe_dispatch_matmul", group, x, topk_ids, w.shape[0], capacity, max_tokens, config,
        lambda most: choose(group, x, topk_ids, w, most, config), out=w.shape[2],
    )  # fmt: skip


def choose(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, max_tokens: int, given: Config | None
) -> Config | None:
    """The configuration of a call in which no rank has more than max_tokens tokens. Its chunk size depends only on
    values that are the same on every rank, whether it is tuned or not."""
    experts, hidden, out = w.shape
    return TUNABLE.choose(
        group, x.dtype, given, tokens=max_tokens, k=topk_ids.shape[1], hidden=hidden, out=out, experts=experts
    )


def prepare(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, sizes: Sizes, config: Config | None,
    bias: torch.Tensor | None = None,
) -> tuple[Launch, torch.Tensor, Handle]:  # fmt: skip
    """The launch of a call with valid arguments, its result and its handle. Collective if the workspace must grow."""
    launch, y, handle, _ = prepare_kept(group, x, topk_ids, w, sizes, config, "", bias)
    return launch, y, handle


def prepare_kept(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, sizes: Sizes, config: Config | None,
    keep: str, bias: torch.Tensor | None = None,
) -> tuple[Launch, torch.Tensor, Handle, torch.Tensor]:  # fmt: skip
    """The same, with the rows that are multiplied, for a backward pass if they are kept. keep: see backward.py."""
    config = choose(group, x, topk_ids, w, sizes.max_tokens, config)
    key = ("moe_dispatch_matmul", layout(x), layout(topk_ids), layout(w), sizes, config, matmul_precision(x.dtype))
    decided = group.planned(key, lambda: plan_dispatch(group, x, w, sizes, config))
    memory = protocol.layout("moe_dispatch_matmul", sizes, x.dtype, decided.row_stride, dispatches=True)
    tile_m, before = decided.config.tile_m, ROWS_BEFORE if keep == "activations" else 0
    y = empty_rows(group, sizes.capacity, w.shape[2], x.dtype, tile_m)
    rows = empty_rows(group, max(sizes.capacity, 1), w.shape[1], x.dtype, before)
    handle = new_handle(group, sizes, tile_m)
    return launch_of(group, decided, memory, x, topk_ids, w, bias, y, rows, handle.tables), y, handle, rows


def explain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    save: str = "inputs",
    config: Config | None = None,
) -> DispatchPlan:
    """The plan that `moe_dispatch_matmul` would carry out with these arguments, if no rank had more than max_tokens
    tokens (by default, more than this rank)."""
    group = current(group)
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), group.size)
    check_save(save)
    check(group, x, topk_ids, w, bias, capacity, max_tokens, config)
    most = max(x.shape[0] if max_tokens is None else max_tokens, 1)
    chosen = choose(group, x, topk_ids, w, most, config)
    sizes = sized(group, topk_ids, w.shape[0], capacity, most, group.size * most, chosen)
    decided = plan_dispatch(group, x, w, sizes, chosen)
    before = ROWS_BEFORE if save == "activations" else 0
    allocated = Allocation(
        bytes_of(decided.config.tile_m + sizes.capacity, w.shape[2], x.dtype),
        bytes_of(before + max(sizes.capacity, 1), w.shape[1], x.dtype),
        bytes_of_tables(sizes),
        protocol.layout("moe_dispatch_matmul", sizes, x.dtype, decided.row_stride, dispatches=True).nbytes,
    )
    return replace(
        decided, reasons=(*decided.reasons, str(allocated), TUNABLE.origin(config, chosen)), memory=allocated
    )
