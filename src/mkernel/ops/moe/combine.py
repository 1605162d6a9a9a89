"""moe_combine: the weighted sum of each token's expert results, on the token's rank.

What it computes. y holds rows in the order of a moe_dispatch_matmul, of any width: what this rank's experts computed
for the tokens that they received. The result on a rank has a row for each of its own tokens: the sum, over the experts
that the token names, of its weight times the expert's row.

Who does what. One launch per rank. All CTAs do the same, each for its share of the chunks (reduction.py):

1. CTA 0 announces the launch. All CTAs publish the weights as a routing table (routing.py).
2. Every rank sums its rows of tokens of other nodes.
3. The counterpart of a token's rank sums the results of step 2 over its node, and sends the sums.
4. Every rank sums its rows of tokens of this node, while those sums are in flight.
5. The token's rank sums what the ranks of its node and other nodes computed.

What is signalled. `entered`, `node_entered`, `routed` (the table holds the weights), `returned` and `back`
(protocol.py).

Why buffers are safe. They have two halves, selected by the parity of the epoch (protocol.py). A rank leaves an epoch
only after the weights of all ranks have arrived (every CTA waits for them), and all sums that were sent to it.

Why it cannot deadlock. Step 1 waits for entries into the previous epoch (and, before it announces to other nodes that
the whole node has entered, for the entries of its node, which wait for nothing), step 2 for weights, step 3 for step 2
on the ranks of the node, step 4 for weights, step 5 for steps 3 and 4. Every CTA finishes its share of a step before it
starts the next one, and all CTAs are resident, which the launch checks.

What it costs. It reads rows*columns elements. It writes one row for each token and each rank with one of its experts,
and reads it again, over NVLink if it is on another rank. One row per token and node crosses the network. Each half of
the workspace has one row for every token of every rank, and 2*(nodes-1) rows for every token of a rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.matrix import Block
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import finish, gave_up
from mkernel.ops import library
from mkernel.ops.moe import protocol
from mkernel.ops.moe.arguments import check_weights
from mkernel.ops.moe.dispatch import fill_with_nan
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.plan import Allocation, CombinePlan, plan_combine
from mkernel.ops.moe.protocol import (
    Batch,
    announce,
    announce_node,
    decode,
    wait_node_entered,
    wait_other_nodes_entered,
)
from mkernel.ops.moe.reduction import collect_chunk, combine_of, combine_order, relay_chunk, sum_chunk
from mkernel.ops.moe.routing import Tables, may_place, publish, routing_of, tokens_of, wait_routing
from mkernel.runtime import planning
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current
from mkernel.runtime.layout import Layout
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import DTYPES, constants, layout
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

OP = "moe_combine"
# shared: nothing, because the chunks are those of the dispatch
TUNABLE = Tunable("moe_combine", agreed=("tokens", "k", "columns"), own=("experts",), shared=())
KEPT = (
    "destinations",
    "all_topk_ids",
    "recv_index",
    "send_index",
    "summary",
)  # tables of the dispatch that the combine reads


@triton.jit
def _sum_and_relay(comm, routing, combine, batch, good):
    """Steps 2 to 4. good: the group has not given up."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    others: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1
    far = batch.chunks * (comm.WORLD_SIZE - comm.RANKS_PER_NODE)
    for step in range(2):
        begin = tl.where(step == 0, 0, far)
        end = tl.where(step == 0, far, batch.chunks * comm.WORLD_SIZE)
        for item in range(begin + cta, end, ctas):
            source, chunk = combine_order(comm, tl.cast(item, tl.int32), batch.chunks)
            if good & (chunk * routing.CHUNK < tokens_of(routing.tables, source)):
                sum_chunk(comm, routing, combine, batch, source, chunk)
        if others > 0:
            if step == 0:
                for item in range(cta, batch.chunks * others, ctas):
                    if good:
                        relay_chunk(comm, routing, combine, batch, item % others + 1, item // others)


@triton.jit
def _combine(comm, routing, combine, batch):
    """Steps 2 to 5. If the routing of the dispatch was invalid, which all ranks know, the result is NaN instead."""
    good = wait_routing(comm, batch.signals, COMPUTE)
    good &= wait_node_entered(comm, batch.signals, comm.epoch - 1, COMPUTE)
    good &= wait_other_nodes_entered(comm, batch.signals, comm.epoch - 1, COMPUTE)
    if may_place(routing.tables):
        _sum_and_relay(comm, routing, combine, batch, good)
        for chunk in range(tl.program_id(0), tl.cdiv(batch.tokens, routing.CHUNK), tl.num_programs(0)):
            collect_chunk(comm, routing, combine, batch, tl.cast(chunk, tl.int32))
    else:
        fill_with_nan(combine.out, batch.tokens, combine.columns, tl.program_id(0), tl.num_programs(0))


@triton.jit
def _run(comm, routing, combine, weights, batch):
    """All steps, or NaN if the group has given up already."""
    cta = tl.program_id(0)
    if gave_up(comm.context):
        # the dispatch may not have written its tables
        fill_with_nan(combine.out, batch.tokens, combine.columns, cta, tl.num_programs(0))
    else:
        if cta == 0:
            announce(comm, batch.signals)
        publish(comm, routing, batch, None, weights, cta, tl.num_programs(0))
        if cta == 0:
            if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
                announce_node(comm, batch.signals, COMPUTE)
        _combine(comm, routing, combine, batch)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def moe_combine_kernel(context, ranks, routing, combine, weights, batch):
    """The whole operator. ranks: `Ranks`; routing: `Routing`; combine: `Combine`; weights: `Block`, the weights of this
    rank's tokens; batch: `Batch`, encoded."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), routing, combine, weights,
        Batch(
            decode(batch.tokens), decode(batch.max_tokens), decode(batch.experts), decode(batch.capacity),
            decode(batch.chunks), batch.nanoseconds_per_mib, batch.signals,
        ),
    )  # fmt: skip


def _launch(
    group: Group, plan: CombinePlan, memory: Layout, y: torch.Tensor, handle: Handle, weights: torch.Tensor,
    out: torch.Tensor,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    tables = Tables(*(getattr(handle.tables, name) if name in KEPT else None for name in Tables._fields))
    combine = combine_of(group, memory, workspace, y, out, plan.copy_bytes)
    return Launch(
        op="moe_combine",
        group=group,
        kernel=moe_combine_kernel,
        grid=plan.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.gpus_per_node)),
            routing=routing_of(handle.sizes, memory, workspace, tables, weights=True),
            combine=combine,
            weights=Block(weights, weights.stride(0), weights.stride(1)),
            batch=protocol.batch_of(group, handle.sizes, memory, workspace),
        ),
        options=dict(num_warps=plan.warps),
        # including the size of the workspace: Triton compiles another binary for 64-bit integers
        variant=(plan, workspace.half_bytes),
        uses=memory.uses(workspace),
        inputs=("combine.y.data", "weights.data", *(f"routing.tables.{name}" for name in KEPT)),
        results=("combine.out.data",),
    )


def check_handle(handle: Any, group: Any, topk_weights: torch.Tensor) -> None:
    """Reject anything but a handle of this group, and weights that are not those of its tokens. While a graph is
    traced, groups are names, of which a group can have several; then the sizes of the groups are compared."""
    if not isinstance(handle, Handle):
        raise ArgumentError(f"handle must be the handle that a dispatch returned; got {type(handle).__name__}")
    named = isinstance(group, str) or isinstance(handle.group, str)
    if library.size_of(handle.group) != library.size_of(group) if named else handle.group is not group:
        raise ArgumentError("handle comes from a dispatch on another group: pass the group of the dispatch")
    check_weights(topk_weights, handle.tokens, handle.numbers[0])


def _check(
    group: Group, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor, out: torch.Tensor | None,
    config: Config | None,
) -> None:  # fmt: skip
    """Reject arguments that cannot be computed with; the error names the argument and the rule."""
    planning.check_given(config)
    check_tensor("moe_combine", group, "y", y)
    check_tensor("moe_combine", group, "topk_weights", topk_weights)
    check_handle(handle, group, topk_weights)
    if y.dtype not in DTYPES:
        raise ArgumentError(f"y has dtype {y.dtype}; supported are {', '.join(str(d) for d in DTYPES)}")
    if y.shape[0] != handle.capacity or y.shape[1] < 1:
        raise ArgumentError(
            f"y is {tuple(y.shape)}, but must have all {handle.capacity} rows of the dispatch (its capacity), "
            f"and at least 1 column"
        )
    if out is not None:
        check_tensor("moe_combine", group, "out", out)
        inputs = dict(y=y, topk_weights=topk_weights) | {
            f"handle ({name})": getattr(handle.tables, name) for name in KEPT
        }
        check_out(out, (handle.sizes.tokens, y.shape[1]), "tokens, columns", y.dtype, inputs)


@collective
def moe_combine(
    y: torch.Tensor,
    handle: Handle,
    topk_weights: torch.Tensor,
    *,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """`mk.moe_combine`, without PyTorch's dispatcher."""
    assert group is not None
    _check(group, y, handle, topk_weights, out, config)
    sizes = handle.sizes
    group.agree(
        "moe_combine", columns=y.shape[1], dtype=y.dtype, k=sizes.k, max_tokens=sizes.max_tokens,
        chunk_rows=sizes.chunk_rows,
    )  # fmt: skip
    if out is None:
        out = group.world.memory.empty(group.world_rank, (sizes.tokens, y.shape[1]), y.dtype)
    group.launch(prepare(group, y, handle, topk_weights, out, config))
    return out


def _choose(group: Group, y: torch.Tensor, handle: Handle, given: Config | None) -> Config | None:
    """The configuration of a call. Nothing in it must be the same on every rank."""
    sizes = handle.sizes
    return TUNABLE.choose(
        group, y.dtype, given, tokens=sizes.max_tokens, k=sizes.k, columns=y.shape[1], experts=sizes.experts
    )


def prepare(
    group: Group, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor, out: torch.Tensor, config: Config | None
) -> Launch:
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    config = _choose(group, y, handle, config)
    key = ("moe_combine", layout(y), layout(out), layout(topk_weights), handle.sizes, config)
    decided = group.planned(key, lambda: plan_combine(group, y, handle.sizes, config))
    memory = protocol.layout("moe_combine", handle.sizes, y.dtype, decided.row_stride, combines=True)
    return _launch(group, decided, memory, y, handle, topk_weights, out)


def explain(
    y: torch.Tensor,
    handle: Handle,
    topk_weights: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> CombinePlan:
    """The plan that `moe_combine` would carry out with these arguments."""
    group = current(group)
    _check(group, y, handle, topk_weights, out, config)
    chosen = _choose(group, y, handle, config)
    decided = plan_combine(group, y, handle.sizes, chosen)
    memory = protocol.layout(OP, handle.sizes, y.dtype, decided.row_stride, combines=True)
    result = handle.sizes.tokens * y.shape[1] * y.itemsize if out is None else 0
    allocated = Allocation(result, 0, 0, memory.nbytes)
    return replace(decided, reasons=(str(allocated), TUNABLE.origin(config, chosen)), memory=allocated)
