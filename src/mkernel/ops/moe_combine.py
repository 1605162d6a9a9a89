"""moe_combine: the weighted sum of what the experts made of each token, back at the token's rank.

What it computes. y are rows in the order of a moe_dispatch_matmul, of any width: what this rank's experts made
of the tokens that came to them. The result on a rank are its own tokens: for each the sum, over the experts that
it named, of the weight times the expert's row.

Who does what. One launch per rank; all CTAs do the same, each its share of the chunks (lang/combining.py):

1. CTA 0 announces the launch and publishes the weights as a table (lang/routing.py).
2. Rows of tokens of other nodes are summed on this rank.
3. The counterpart of a token's rank sums them over its node, and sends the sums.
4. Rows of tokens of this node are summed, while those sums travel.
5. The token's rank collects.

What is signalled. `entered[rank]`, `entered[node]` and `routed[parity, source]` as in moe_dispatch_matmul, the
table being the weights. `returned[parity, source, chunk]`: this rank has its rows of that chunk of the source's
tokens ready; its node looks at it. `back[parity, peer, chunk]`: what the peer's node made of my chunk is here.

Why buffers are safe. Two halves by the epoch's parity. What a rank writes into its own half is read by its node,
what it sends by the counterpart; it writes when these have entered e-1, and have left e-2. A rank leaves an epoch
when the weights of all ranks have arrived (every CTA waits for them), and all sums that were sent to it.

Why it cannot deadlock. Step 1 waits for entries of the epoch before, step 2 for weights, 3 for step 2 of the
node, 4 for weights, 5 for steps 3 and 4. Every CTA does its share of a step before that of the next, and all
CTAs are resident: the launch checks that.

What it costs. rows*columns elements are read, one row per token and rank of its experts written and read again,
over NVLink if it is another rank; one row per token and node crosses the network. Workspace: for each half one row
for every token of every rank, and 2*(nodes-1) for every token of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from mkernel.lang.combining import collect_chunk, homeward, relay_chunk, return_chunk, tokens_of
from mkernel.lang.context import current_epoch, rank_of
from mkernel.lang.dispatching import fill_with_nan
from mkernel.lang.roles import COMPUTE
from mkernel.lang.routing import (
    announce,
    announce_node,
    node_has_entered,
    other_nodes_have_entered,
    publish,
    routing_is_here,
)
from mkernel.lang.signals import finish, gave_up
from mkernel.runtime import experts as host
from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.experts import Handle
from mkernel.runtime.group import Group, Uses, Workspace, collective, current
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import DTYPES, layout
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

# chunks are those of the dispatch
# Of a CTA on a GPU: it waits for memory all the time, and more warps wait for more. 4 ranks on an H200, tokens of 4096:
# 16384 tokens took 1.88 ms with 8 warps and 1.43 with 16, 4096 tokens 0.54 and 0.41.
WARPS = 16

TUNABLE = Tunable("moe_combine", agreed=("tokens", "k", "columns"), own=("experts",), shared=())


@triton.jit
def _combine(
    context, epoch, y, y_stride, y_column_stride, out, out_stride, out_column_stride,
    destinations, everyones_ids, slots, departed, summary, tokens, most_tokens, columns, chunks, signals,
    nanoseconds_per_mib, tables_at, half_words, table_words, row_stride, partial_at, returning_at, landing_at, half,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, CHUNK: tl.constexpr, PACED: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Steps 2 to 5."""
    rank = rank_of(context)
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    far = chunks * (SIZE - GPUS)
    good = routing_is_here(context, epoch, signals, COMPUTE, SIZE, GPUS)
    good &= node_has_entered(context, epoch - 1, COMPUTE, GPUS)
    good &= other_nodes_have_entered(context, epoch - 1, COMPUTE, SIZE, GPUS)
    for step in range(2):
        begin = tl.where(step == 0, 0, far)
        end = tl.where(step == 0, far, chunks * SIZE)
        for item in range(begin + cta, end, ctas):
            source, chunk = homeward(tl.cast(item, tl.int32), rank, chunks, SIZE, GPUS)
            if good & (chunk * CHUNK < tokens_of(summary, source)):
                return_chunk(
                    context, epoch, y, y_stride, y_column_stride, columns, source, chunk, chunks, destinations, summary,
                    0, most_tokens, tables_at, half_words, table_words, row_stride, partial_at, half, 1, signals,
                    DTYPE, K, SLOTS, SIZE, GPUS, CHUNK, COPY_ROWS, COPY_COLUMNS,
                )  # fmt: skip
        if SIZE > GPUS:
            if step == 0:
                for item in range(cta, chunks * (SIZE // GPUS - 1), ctas):
                    away = item % (SIZE // GPUS - 1) + 1
                    if good:
                        relay_chunk(
                            context, epoch, columns, away, item // (SIZE // GPUS - 1), chunks, everyones_ids, slots,
                            summary, most_tokens, row_stride, partial_at, returning_at, landing_at, half, 1, signals,
                            nanoseconds_per_mib, DTYPE, K, SLOTS, SIZE, GPUS, RANKS, CHUNK, PACED,
                            COPY_ROWS, COPY_COLUMNS,
                        )  # fmt: skip
    for chunk in range(cta, tl.cdiv(tokens, CHUNK), ctas):
        collect_chunk(
            context, epoch, out, out_stride, out_column_stride, columns, tl.cast(chunk, tl.int32), chunks,
            everyones_ids, departed, summary, most_tokens, row_stride, partial_at, landing_at, half, 1, signals,
            nanoseconds_per_mib, DTYPE, K, SLOTS, SIZE, GPUS, RANKS, CHUNK, PACED, COPY_ROWS, COPY_COLUMNS,
        )  # fmt: skip


# they follow the batch: another binary for each would be compiled while a model is being served
VARYING = ["tokens", "most_tokens", "chunks", "signals", "nanoseconds_per_mib"]


@triton.jit(do_not_specialize=VARYING)
def moe_combine_kernel(
    context, y, y_stride, y_column_stride, weights, weights_stride, weights_column_stride,
    out, out_stride, out_column_stride, destinations, everyones_ids, slots, departed, summary,
    tokens, most_tokens, columns, chunks, signals,
    nanoseconds_per_mib, tables_at, half_words, table_words, row_stride, partial_at, returning_at, landing_at, half,
    DTYPE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr, CHUNK: tl.constexpr, PACED: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring for the steps and the signals."""
    cta = tl.program_id(0)
    epoch = current_epoch(context)
    if gave_up(context):
        # the dispatch may not have left its tables
        fill_with_nan(out, tokens, columns, out_stride, out_column_stride, cta, tl.num_programs(0))
    else:
        if cta == 0:
            announce(context, epoch, GPUS)
            publish(
                context, epoch, weights, 0, 0, weights, weights_stride, weights_column_stride, tokens, most_tokens,
                0, 0, tables_at, half_words, table_words, signals, K, False, True, SIZE, GPUS,
            )  # fmt: skip
            if SIZE > GPUS:
                announce_node(context, epoch, COMPUTE, SIZE, GPUS)
        _combine(
            context, epoch, y, y_stride, y_column_stride, out, out_stride, out_column_stride,
            destinations, everyones_ids, slots, departed, summary, tokens, most_tokens, columns, chunks, signals,
            nanoseconds_per_mib, tables_at, half_words, table_words, row_stride, partial_at, returning_at,
            landing_at, half,
            DTYPE, K, SLOTS, SIZE, GPUS, RANKS, CHUNK, PACED, COPY_ROWS, COPY_COLUMNS,
        )  # fmt: skip
    finish(context, epoch, SIZE)


KEPT = ("destinations", "everyones_ids", "slots", "departed", "summary")  # tables of the dispatch that are read
# what fits into the registers, with the rows of 8 slots at a time
COPY_BYTES = {torch.bfloat16: 16384, torch.float16: 16384, torch.float32: 8192}


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    ctas: int
    warps: int
    copy_bytes: int
    row_stride: int
    chunks: int
    chunk_rows: int
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = (
            f"moe_combine: {self.ctas} CTAs, {self.chunks} chunks of {self.chunk_rows} tokens per rank, "
            f"{self.copy_bytes} bytes at a time"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


def plan(group: Group, y: torch.Tensor, handle: Handle, config: Config | None) -> Plan:
    """Decide how to run a call."""
    given = config or Config()
    cuda = group.device.type == "cuda"
    most = group.world.ctas(group.world_rank)
    ctas = most if given.ctas is None else given.ctas
    copy_bytes = given.copy_bytes if given.copy_bytes is not None else COPY_BYTES[y.dtype] if cuda else 1024
    if not 1 <= ctas <= most:
        raise ArgumentError(
            f"config.ctas is {ctas}, but must be 1 to {most}: so many CTAs of this rank can run at the same time, "
            f"and they wait for each other"
        )
    return Plan(
        ctas=ctas,
        warps=given.warps or (WARPS if cuda else 4),
        copy_bytes=copy_bytes,
        row_stride=host.row_stride_of(y.shape[1], y.dtype),
        chunks=handle.routing.chunks,
        chunk_rows=handle.routing.chunk_rows,
    )


def _areas(handle: Handle, row_bytes: int) -> host.Areas:
    """The parts of a half of the workspace."""
    routing = handle.routing
    rows = routing.most_tokens * row_bytes
    return host.Areas.of(
        tables=routing.size * routing.table_words(False) * 4,
        partial=routing.size * rows,
        returning=(routing.nodes - 1) * rows,
        landing=(routing.nodes - 1) * rows,
    )


def _launch(
    group: Group, plan: Plan, workspace: Workspace, y: torch.Tensor, handle: Handle, weights: torch.Tensor,
    out: torch.Tensor,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan."""
    routing = handle.routing
    areas = _areas(handle, plan.row_stride * y.element_size())
    arguments = dict(
        **host.surroundings(group, workspace, routing, areas, y.dtype, plan.row_stride, False, plan.copy_bytes),
        y=y, y_stride=y.stride(0), y_column_stride=y.stride(1),
        weights=weights, weights_stride=weights.stride(0), weights_column_stride=weights.stride(1),
        out=out, out_stride=out.stride(0), out_column_stride=out.stride(1),
        **{name: handle.tables[name] for name in KEPT},
        columns=y.shape[1],
    )  # fmt: skip
    return Launch(
        op="moe_combine",
        group=group,
        kernel=moe_combine_kernel,
        grid=plan.ctas,
        arguments=arguments,
        options=dict(num_warps=plan.warps),
        variant=plan,
        uses=Uses(workspace, areas.arrays(workspace, routing, ("returned", "back"))),
        inputs=("y", "weights", *KEPT),
        results=("out",),
    )


def _check(
    group: Group, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor, out: torch.Tensor | None,
    config: Config | None,
) -> None:  # fmt: skip
    """Refuse what can not be computed, naming the argument and the rule."""
    planning.check_given(config)
    if not isinstance(handle, Handle):
        raise ArgumentError(f"handle must be what moe_dispatch_matmul returned, got {type(handle).__name__}")
    if handle.group is not group:
        raise ArgumentError("handle comes from a dispatch on another group")
    check_tensor("moe_combine", group, "y", y)
    check_tensor("moe_combine", group, "topk_weights", topk_weights)
    if y.dtype not in DTYPES:
        raise ArgumentError(f"y has dtype {y.dtype}; supported are {', '.join(str(d) for d in DTYPES)}")
    if y.shape[0] != handle.capacity or y.shape[1] < 1:
        raise ArgumentError(
            f"y is {tuple(y.shape)}, but the dispatch had {handle.capacity} rows: all of them must be passed, "
            f"with 1 column or more"
        )
    host.check_weights(topk_weights, handle.routing.tokens, handle.routing.k)
    if out is not None:
        check_tensor("moe_combine", group, "out", out)
        inputs = dict(y=y, topk_weights=topk_weights) | {f"handle ({name})": handle.tables[name] for name in KEPT}
        check_out(out, (handle.routing.tokens, y.shape[1]), "tokens, columns", y.dtype, inputs)


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
    """Bring the experts' rows back to their tokens' ranks: the weighted sum of each token's rows.

    Args:
        y: [capacity, columns], what this rank's experts made of the rows of a dispatch, in the same order; any
            width, the same on every rank.
        handle: what that dispatch returned.
        topk_weights: [tokens, k], floating point: the weight of each of this rank's token's experts. Those of
            dropped ids do not matter.
        group: the group of the dispatch; the current one by default.
        out: [tokens, columns], where to put the result; must not overlap an input.
        config: `ctas`, `warps` and `copy_bytes`; None takes good defaults.

    Returns:
        [tokens, columns] in y's type: the sums in fp32, in a fixed order. Sums that leave a rank, or a node, are
        rounded to y's type on the way. A token whose ids were all dropped gets zeros.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout.
    """
    assert group is not None
    _check(group, y, handle, topk_weights, out, config)
    routing = handle.routing
    group.agree(
        "moe_combine", columns=y.shape[1], dtype=y.dtype, k=routing.k, most_tokens=routing.most_tokens,
        chunk_rows=routing.chunk_rows,
    )  # fmt: skip
    if out is None:
        out = group.world.empty(group.world_rank, (routing.tokens, y.shape[1]), y.dtype)
    group.launch(prepare(group, y, handle, topk_weights, out, config))
    return out


def _choose(group: Group, y: torch.Tensor, handle: Handle, given: Config | None) -> Config | None:
    """The configuration of a call; nothing in it needs to be the same on every rank."""
    routing = handle.routing
    return TUNABLE.choose(
        group, y.dtype, given, tokens=routing.most_tokens, k=routing.k, columns=y.shape[1], experts=routing.experts
    )


def prepare(
    group: Group, y: torch.Tensor, handle: Handle, topk_weights: torch.Tensor, out: torch.Tensor, config: Config | None
) -> Launch:
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    config = _choose(group, y, handle, config)
    key = ("moe_combine", layout(y), layout(out), layout(topk_weights), handle.routing, config)
    decided = group.planned(key, lambda: plan(group, y, handle, config))
    workspace = group.workspace(
        "moe_combine",
        signal_words=handle.routing.signal_words(1 + 2 * handle.routing.chunks),
        half_bytes=_areas(handle, decided.row_stride * y.element_size()).nbytes,
    )
    return _launch(group, decided, workspace, y, handle, topk_weights, out)


def explain(
    y: torch.Tensor,
    handle: Handle,
    topk_weights: torch.Tensor,
    *,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `moe_combine` with these arguments would carry out."""
    group = current(group)
    _check(group, y, handle, topk_weights, out, config)
    chosen = _choose(group, y, handle, config)
    return replace(plan(group, y, handle, chosen), reasons=(TUNABLE.origin(config, chosen),))
