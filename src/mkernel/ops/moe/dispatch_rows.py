"""moe_dispatch: tokens move to the ranks of their experts, and nothing else happens to them there.

What it computes. The rows of this rank's experts, [capacity, hidden]: each token, once for every time that it names an
expert of this rank, grouped by expert, within an expert by source rank, then token. These are the rows that
moe_dispatch_matmul multiplies. Callers apply a grouped GEMM or other experts of their own to them; moe_combine sends
the results back.

Who does what. One launch per rank, which is the first half of moe_dispatch_matmul (dispatch.py). CTA 0 announces the
launch, `send` and `intra` move tokens, and all CTAs except `send` publish the routing table and count rows. The one
with the highest program id makes the schedule of blocks, which is a part of the handle.

What is signalled, why buffers are safe, and why it cannot deadlock: as in dispatch_matmul.py. The two operators share a
workspace. After the dispatch, a CTA waits only for the schedule, which is made by CTAs that never wait for tiles. Rows
are complete when the launch has ended.

If the routing is invalid, all ranks find the same problem, fill the rows with NaN and finish; the host raises an error.

What it costs. The traffic of a dispatch: a token crosses once to each other node that needs it, and once over NVLink to
each rank that does. It reads tokens*hidden elements and writes rows*hidden. The gradient is a moe_combine with weights
of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.signals import finish
from mkernel.ops.moe import protocol, redispatch
from mkernel.ops.moe.arguments import check_bounds, check_config, check_experts, check_tokens
from mkernel.ops.moe.dispatch import dispatch_of, dispatch_tokens, fill_with_nan
from mkernel.ops.moe.handle import Handle, new_handle
from mkernel.ops.moe.plan import Allocation, RowsPlan, bytes_of, bytes_of_tables, plan_rows
from mkernel.ops.moe.protocol import Batch, decode
from mkernel.ops.moe.routing import Tables, routing_of
from mkernel.ops.moe.schedule import wait_scheduled
from mkernel.ops.moe.sizes import Sizes, capacity_of, row_stride_of, sized, slots_of
from mkernel.ops.moe.sizes import agree as agree_on_sizes
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group, current
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, layout
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

OP = "moe_dispatch"
TUNABLE = Tunable(OP, agreed=("tokens", "k", "hidden"), own=("experts",), shared=("chunk_rows",))


@triton.jit
def _run(comm, routing, dispatch, batch):
    """Dispatch tokens; NaN if the routing is invalid, or the group gave up before it was known."""
    dispatch_tokens(comm, routing, dispatch, batch)
    if not wait_scheduled(comm, routing.tables, batch.signals):
        fill_with_nan(dispatch.rows, batch.capacity, dispatch.hidden, tl.program_id(0), tl.num_programs(0))
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def moe_dispatch_kernel(context, ranks, routing, dispatch, batch):
    """The whole operator. ranks: `Ranks`; routing: `Routing`; dispatch: `Dispatch`; batch: `Batch`, encoded."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), routing, dispatch,
        Batch(
            decode(batch.tokens), decode(batch.max_tokens), decode(batch.experts), decode(batch.capacity),
            decode(batch.chunks), batch.nanoseconds_per_mib, batch.signals,
        ),
    )  # fmt: skip


def _launch(
    group: Group, plan: RowsPlan, memory: Layout, x: torch.Tensor, topk_ids: torch.Tensor, rows: torch.Tensor,
    tables: Tables,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    c = plan.config
    dispatch = dispatch_of(group, plan, memory, workspace, x, rows, ids=topk_ids)
    return Launch(
        op=OP,
        group=group,
        kernel=moe_dispatch_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.gpus_per_node)),
            routing=routing_of(plan.sizes, memory, workspace, tables, ids=True),
            dispatch=dispatch,
            batch=protocol.batch_of(group, plan.sizes, memory, workspace),
        ),
        options=dict(num_warps=c.warps),
        # including the size of the workspace: Triton compiles another binary for 64-bit integers
        variant=(plan, workspace.half_bytes),
        uses=memory.uses(workspace),
        inputs=("dispatch.x.data", "dispatch.ids.data"),
    )


def check(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, capacity: int | None, max_tokens: int | None,
    config: Config | None,
) -> None:  # fmt: skip
    """Reject arguments that cannot be dispatched; the error names the argument and the rule."""
    check_config(OP, config)
    check_tokens(OP, group, x, topk_ids)
    check_experts("experts", experts)
    check_bounds(x.shape[0], capacity, max_tokens)


@collective
def moe_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    *,
    group: Group | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, Handle]:
    """`mk.moe_dispatch`, without PyTorch's dispatcher."""
    assert group is not None
    check(group, x, topk_ids, experts, capacity, max_tokens, config)
    sizes = agree(group, x, topk_ids, experts, capacity, max_tokens, config)
    launch, rows, handle = prepare(group, x, topk_ids, sizes, config)
    group.launch(launch)
    return rows, handle


def agree(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> Sizes:  # fmt: skip
    """The sizes of a call with valid arguments. Collective."""
    return agree_on_sizes(
        OP, group, x, topk_ids, experts, capacity, max_tokens, config,
        lambda most: choose(group, x, topk_ids, experts, most, config),
    )  # fmt: skip


def choose(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, max_tokens: int, given: Config | None
) -> Config | None:
    """The configuration of a call in which no rank has more than max_tokens tokens. Its chunk size depends only on
    values that are the same on every rank, whether it is tuned or not."""
    return TUNABLE.choose(
        group, x.dtype, given, tokens=max_tokens, k=topk_ids.shape[1], hidden=x.shape[1], experts=experts
    )


def prepare(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, sizes: Sizes, config: Config | None
) -> tuple[Launch, torch.Tensor, Handle]:
    """The launch of a call with valid arguments, its result and its handle. Collective if the workspace must grow."""
    config = choose(group, x, topk_ids, sizes.experts, sizes.max_tokens, config)
    key = (OP, layout(x), layout(topk_ids), sizes, config)
    decided = group.planned(key, lambda: plan_rows(group, x, sizes, config))
    memory = protocol.layout(redispatch.OP, sizes, x.dtype, decided.row_stride, dispatches=True)
    shape = (max(sizes.capacity, 1), row_stride_of(x.shape[1], x.dtype))
    rows = group.world.memory.empty(group.world_rank, shape, x.dtype)[: sizes.capacity, : x.shape[1]]
    handle = new_handle(group, sizes, decided.config.tile_m)
    return _launch(group, decided, memory, x, topk_ids, rows, handle.tables), rows, handle


def explain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    *,
    group: Any = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
) -> RowsPlan:
    """The plan that `moe_dispatch` would carry out with these arguments, if no rank had more than max_tokens tokens (by
    default, more than this rank)."""
    group = current(group)
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), group.size)
    check(group, x, topk_ids, experts, capacity, max_tokens, config)
    most = max(x.shape[0] if max_tokens is None else max_tokens, 1)
    chosen = choose(group, x, topk_ids, experts, most, config)
    sizes = sized(group, topk_ids, experts, capacity, most, group.size * most, chosen)
    decided = plan_rows(group, x, sizes, chosen)
    allocated = Allocation(
        bytes_of(max(sizes.capacity, 1), x.shape[1], x.dtype), 0, bytes_of_tables(sizes),
        protocol.layout(redispatch.OP, sizes, x.dtype, decided.row_stride, dispatches=True).nbytes,
    )  # fmt: skip
    return replace(
        decided, reasons=(*decided.reasons, str(allocated), TUNABLE.origin(config, chosen)), memory=allocated
    )
