"""A dispatch with a known routing: other rows go where an earlier dispatch sent its tokens.

The backward passes send gradients of tokens, and tokens once more, to where the forward pass has sent the tokens. The
tables of the earlier launch say where: no ids are published, nothing is counted, and no block is scheduled. Two
kernels:

- `moe_redispatch_kernel` moves rows, and the weights of their slots with them if there are any.
- `moe_redispatch_matmul_kernel` also multiplies them, block by block as they arrive, as moe_dispatch_matmul does.

Roles, signals and the reuse of buffers are those of moe_dispatch_matmul, and the two share a workspace. Every rank
announces the launch and publishes a table, with a header and, if there are any, weights. CTAs that send or place rows
wait for the tables of all ranks. `counted`, `scheduled` and `numbered` are not used. So the argument of
dispatch_matmul.py for buffers holds, and the chain of waits is a part of the one described there: no CTA waits for
others to count.

Two tables of the earlier launch would change while rows are placed and multiplied: `placed`, and the counter that
assigns tiles. Each launch gets new ones, which the host sets to zero. So the handle of a dispatch can be used any
number of times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.matrix import Block, Tiling
from mkernel.lang.roles import take
from mkernel.lang.signals import finish, gave_up
from mkernel.ops.moe import protocol
from mkernel.ops.moe.dispatch import dispatch_of, dispatch_tokens, fill_with_nan
from mkernel.ops.moe.grouped import (
    ROWS_BEFORE,
    Gemm,
    Operands,
    WeightLayout,
    Weights,
    bias_block,
    empty_rows,
    multiply_block,
    result_descriptor,
    rows_descriptor,
)
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.plan import DispatchPlan, RowsPlan, plan_dispatch, plan_rows, tile_width
from mkernel.ops.moe.protocol import Batch, decode
from mkernel.ops.moe.routing import BLOCKS, Tables, routing_of
from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, layout, matmul_precision, named_constants
from mkernel.runtime.world import Launch

OP = "moe_dispatch_matmul"
# tables of the earlier launch that these kernels read
READ = (
    "destinations", "all_topk_ids", "bases", "first_blocks", "recv_index", "send_index", "schedule", "summary",
)  # fmt: skip
COUNTER_WORDS = 16  # of the counter that assigns tiles, which `Tables.unsorted` is here


class Moved(NamedTuple):
    """What a dispatch with a known routing returns. rows: [capacity, columns], the rows themselves; y: their products;
    weights: [capacity], the weight of each row; placed: the counters of the blocks."""

    rows: torch.Tensor
    y: torch.Tensor | None
    weights: torch.Tensor | None
    placed: torch.Tensor


@triton.jit
def _run(comm, routing, dispatch, batch):
    """Move rows, unless the group has given up: then the earlier launch may not have written its tables."""
    if not gave_up(comm.context):
        dispatch_tokens(comm, routing, dispatch, batch)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def _run_and_multiply(comm, operands, routing, dispatch, gemm, batch):
    """Move rows, then compute tiles as long as there are any; NaN if the group has given up before."""
    if gave_up(comm.context):
        fill_with_nan(gemm.y_rows, batch.capacity, gemm.n, tl.program_id(0), tl.num_programs(0))
    else:
        dispatch_tokens(comm, routing, dispatch, batch)
        tables = routing.tables
        tiles = tl.load(tables.summary + BLOCKS) * tl.cdiv(gemm.n, gemm.tiling.N)
        tile = take(tables.unsorted)
        while tile < tiles:
            multiply_block(comm.context, operands, gemm, tables, tile)
            tile = take(tables.unsorted)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def moe_redispatch_kernel(context, ranks, routing, dispatch, batch):
    """Move rows. ranks: `Ranks`; routing: `Routing`; dispatch: `Dispatch`; batch: `Batch`, encoded."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), routing, dispatch,
        Batch(
            decode(batch.tokens), decode(batch.max_tokens), decode(batch.experts), decode(batch.capacity),
            decode(batch.chunks), batch.nanoseconds_per_mib, batch.signals,
        ),
    )  # fmt: skip


@triton.jit
def moe_redispatch_matmul_kernel(context, ranks, rows, short_rows, w, y, routing, dispatch, gemm, batch):
    """Move rows and multiply them. The parameters are those of `moe_dispatch_matmul_kernel`."""
    _run_and_multiply(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        Operands(rows, short_rows, Weights(w, gemm.w_strides), y),
        routing, dispatch, gemm,
        Batch(
            decode(batch.tokens), decode(batch.max_tokens), decode(batch.experts), decode(batch.capacity),
            decode(batch.chunks), batch.nanoseconds_per_mib, batch.signals,
        ),
    )  # fmt: skip


def redispatch(
    group: Group, handle: Handle, x: torch.Tensor, *, w: torch.Tensor | None = None,
    weights: torch.Tensor | None = None, bias: torch.Tensor | None = None,
) -> Moved:  # fmt: skip
    """Move rows [tokens, columns] with the routing of an earlier dispatch. Collective.

    Args:
        x: a row for each token of that dispatch, in a dtype that operators support.
        w: [experts, columns, n]: what to multiply the rows with, if anything.
        weights: [tokens, k]: a weight for each slot, which goes with its row.
        bias: [experts, n], added to the products.
    """
    launch, moved = prepare(group, handle, x, w, weights, bias)
    group.launch(launch)
    return moved


def prepare(
    group: Group,
    handle: Handle,
    x: torch.Tensor,
    w: torch.Tensor | None,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> tuple[Launch, Moved]:
    """The launch of `redispatch`, and what it gives. Collective if the workspace must grow."""
    sizes = handle.sizes
    n, uses_tma = (1, True) if w is None else (w.shape[2], WeightLayout.of(w).uses_tma)
    tiles = planning.default_tiles(group.target, x.dtype, n, uses_tma)
    wanted = Config(tile_m=handle.tile_m, tile_n=tile_width(tiles, handle.tile_m))
    key = (
        "moe_redispatch", layout(x), None if w is None else layout(w), sizes, wanted,
        None if weights is None else layout(weights), matmul_precision(x.dtype),
    )  # fmt: skip
    decided = group.planned(
        key,
        lambda: plan_rows(group, x, sizes, wanted) if w is None else plan_dispatch(group, x, w, sizes, wanted),
    )
    memory = protocol.layout(OP, sizes, x.dtype, decided.row_stride, dispatches=True)
    counters = new_counters(handle)
    capacity, empty = max(sizes.capacity, 1), group.world.memory.empty
    before = max(handle.tile_m, ROWS_BEFORE)
    moved = Moved(
        rows=empty_rows(group, capacity, x.shape[1], x.dtype, before),
        y=None if w is None else empty_rows(group, capacity, w.shape[2], x.dtype, before),
        weights=None if weights is None else empty(group.world_rank, (capacity,), torch.float32),
        placed=counters[COUNTER_WORDS:],
    )
    tables = Tables(*(getattr(handle.tables, name) if name in READ else None for name in Tables._fields))
    tables = tables._replace(placed=moved.placed, unsorted=counters[:COUNTER_WORDS])
    return _launch(group, decided, memory, x, w, weights, bias, moved, tables), moved


def new_counters(handle: Handle) -> torch.Tensor:
    """Counters for a launch: that of tiles, then those of blocks. They start from zero."""
    schedule = handle.tables.schedule  # more than a word for each block
    return schedule.new_zeros(COUNTER_WORDS + schedule.numel())


def _launch(
    group: Group, plan: DispatchPlan | RowsPlan, memory: Layout, x: torch.Tensor, w: torch.Tensor | None,
    weights: torch.Tensor | None, bias: torch.Tensor | None, moved: Moved, tables: Tables,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    c = plan.config
    dispatch = dispatch_of(group, plan, memory, workspace, x, moved.rows, weights=weights, row_weights=moved.weights)
    launch = Launch(
        op=OP,
        group=group,
        kernel=moe_redispatch_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.gpus_per_node)),
            routing=routing_of(plan.sizes, memory, workspace, tables, weights=weights is not None),
            dispatch=dispatch,
            batch=protocol.batch_of(group, plan.sizes, memory, workspace),
        ),
        options=dict(num_warps=c.warps),
        # including the size of the workspace: Triton compiles another binary for 64-bit integers
        variant=(plan, workspace.half_bytes),
        uses=memory.uses(workspace),
        inputs=("dispatch.x.data", "dispatch.weights.data", *(f"routing.tables.{name}" for name in READ)),
    )
    if w is None:
        return launch
    assert moved.y is not None
    assert isinstance(plan, DispatchPlan)
    product = dict(
        rows=rows_descriptor(moved.rows, c.tile_m, c.tile_k),
        short_rows=rows_descriptor(moved.rows, plan.short_m, c.tile_k),
        w=plan.weights.operand(w, c.tile_k, c.tile_n),
        y=result_descriptor(moved.y, c.tile_m, c.tile_n),
        gemm=Gemm(
            w_strides=plan.weights.strides(w),
            y_rows=Block(moved.y, moved.y.stride(0), 1),
            k=x.shape[1],
            n=w.shape[2],
            bias=bias_block(bias),
            scales=None,
            tiling=Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision)),
            **named_constants(SHORT_M=plan.short_m, SCALED=False),
        ),
    )
    return replace(
        launch,
        kernel=moe_redispatch_matmul_kernel,
        arguments={**launch.arguments, **product},
        options=dict(num_warps=c.warps, num_stages=c.stages),
        variant=(launch.variant, None if bias is None else layout(bias)),
        inputs=(*launch.inputs, "w", "gemm.bias.data"),
    )
