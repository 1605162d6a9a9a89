"""The launch of ring_attention_backward: builds the arguments of the kernel from a plan and the caller's tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from mkernel.lang.context import Ranks
from mkernel.ops.attention.backward import kernel
from mkernel.ops.attention.backward.call import Call, Exchange
from mkernel.ops.attention.backward.plan import Plan
from mkernel.ops.attention.backward.protocol import OP
from mkernel.ops.attention.launch import (
    POLL_WIDTH,
    WARP_POLL_WIDTH,
    factors,
    heads_of,
    mask_of,
    scale_of,
    shared_layout,
)
from mkernel.ops.attention.protocol import Rounds
from mkernel.ops.attention.sequences import Scoring
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, descriptor, named_constants
from mkernel.runtime.world import Launch


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call: inputs, and where the results go."""

    dout: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Those with a row for each position."""
        return dict(dout=self.dout, query=self.query, key=self.key, value=self.value, out=self.out)


def launch(
    group: Group, plan: Plan, memory: Layout, tensors: Tensors, scoring: Scoring, variant: Hashable
) -> Launch:  # fmt: skip
    """The launch that executes a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    query = tensors.query
    batch, heads, rows, dim = query.shape
    kv_heads, length = tensors.key.shape[1:3]
    value_dim = tensors.value.shape[3]
    c, size = plan.config, group.size
    blocks = math.ceil(rows / c.tile_m)
    empty = group.world.memory.empty
    slots = memory.tensor_in(workspace, "slots", query.dtype) if size > 1 else None
    # a number per row; in the Gluon kernel two, of whole tiles
    prepared = (batch, heads, 2 * blocks * c.tile_m) if plan.hopper else (batch, heads, rows)
    delta = empty(group.world_rank, prepared, torch.float32)
    partial = None
    if plan.parts > 1:
        kept = heads // kv_heads * blocks * c.tile_m * c.tile_k
        partial = empty(group.world_rank, (kept,), torch.float32)
    polled = min(triton.next_power_of_2(max((size - 1) * plan.chunks, 1)), POLL_WIDTH)
    rounds, reductions = _rounds(group, plan, memory, workspace, tiles_of_dq=heads // kv_heads * blocks)
    call = Call(
        q=heads_of(query), k=heads_of(tensors.key, plan.width), v=heads_of(tensors.value, plan.width),
        out=heads_of(tensors.out),
        dout=heads_of(tensors.dout), dq=heads_of(tensors.dq), dk=heads_of(tensors.dk), dv=heads_of(tensors.dv),
        lse=tensors.lse, dlse=tensors.dlse, delta=delta, slots=None if plan.hopper else slots, partial=partial,
        schedule=plan.schedule, ranges=plan.ranges,
        mask=mask_of(plan, rows, length),
        rounds=rounds, reductions=reductions, exchange=_exchange(memory, workspace),
        preparing=memory.words_in(workspace, "preparing"), prepared=memory.words_in(workspace, "prepared"),
        **factors(scoring, dim), factor=scale_of(scoring, dim), batch=batch, heads=heads, kv_heads=kv_heads, dim=dim,
        value_dim=None if value_dim == dim else value_dim, blocks=blocks, tiles=plan.blocks,
        **named_constants(
            SENDERS=c.send_ctas, INTRAS=c.intra_ctas, PARTS=plan.parts > 1, DLSE=tensors.dlse is not None,
            SOFTCAP=scoring.softcap > 0, PRECISION=plan.precision, TILE_M=c.tile_m, TILE_N=c.tile_n, DIM=c.tile_k,
            VALUE_DIM=plan.value_columns,
            COPY=max(c.copy_bytes // query.element_size(), triton.next_power_of_2(plan.width)),
            POLL_WIDTH=WARP_POLL_WIDTH if plan.hopper else polled,
        ),
    )  # fmt: skip
    read = [f"call.{name}.pointer" for name in ("q", "k", "v", "out", "dout")]
    written = ("dq", "dk", "dv")
    if plan.hopper:
        read += ["q", "k", "v", "dout"]
    return Launch(
        op=OP,
        group=group,
        kernel=_hopper_kernel() if plan.hopper else kernel.ring_attention_backward_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(size, group.gpus_per_node)),
            **(_descriptors(plan, tensors, slots, delta) if plan.hopper else {}),
            call=call,
        ),
        options=dict(num_warps=c.warps) if plan.hopper else dict(num_warps=c.warps, num_stages=c.stages),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(variant, workspace.signal_words),
        uses=memory.uses(workspace, free=_received(group, plan)),
        inputs=(*read, "call.lse", "call.dlse", "call.mask.spans", "call.mask.places", "call.schedule", "call.ranges"),
        results=(*(f"call.{name}.pointer" for name in written), *(written if plan.hopper else ())),
    )


def _rounds(group: Group, plan: Plan, memory: Layout, workspace: Workspace, tiles_of_dq: int) -> tuple[Rounds, Rounds]:
    """How keys and values stream, and how their gradients are reduced."""
    c = plan.config
    warpgroups = 2 if plan.hopper else 1  # each finishes its half of a task
    link = group.world.links.nvlink if c.intra_ctas else None
    forwarded = (group.nodes - 1) * plan.chunks if c.intra_ctas else 0
    rounds = Rounds(
        count=plan.rounds, window=plan.window, parts=plan.parts, part_rows=plan.part_rows, padded=plan.padded,
        chunk_rows=c.chunk_rows, chunks=plan.chunks,
        tasks=warpgroups * (tiles_of_dq + group.size * plan.blocks) + forwarded,
        done=memory.words_in(workspace, "done"),
        freed=memory.words_in(workspace, "freed"),
        arrived=memory.words_in(workspace, "arrived"),
        slots=memory.buffer_in(workspace, "slots"),
        nanoseconds_per_mib=round(2**20 / link) if link else 0,
        **named_constants(SLOTS=plan.slots, CREDITS=plan.credits, PACED=link is not None),
    )  # fmt: skip
    reductions = rounds._replace(
        tasks=warpgroups * group.nodes * plan.blocks,
        done=memory.words_in(workspace, "adding"),
        freed=memory.words_in(workspace, "added"),
    )
    return rounds, reductions


def _exchange(memory: Layout, workspace: Workspace) -> Exchange:
    return Exchange(
        partials=memory.slots_in(workspace, "partials"),
        partial=memory.words_in(workspace, "partial"),
        node_sums=memory.slots_in(workspace, "node_sums"),
        node_sum=memory.words_in(workspace, "node_sum"),
    )


def _received(group: Group, plan: Plan) -> dict[str, tuple[tuple[int, int], ...] | None]:
    """The rows of the buffers that nobody reads after the launch. In the others, chunks and sums are staged for other
    nodes, and the network may still read them."""
    if group.size == 1:
        return {}
    size, gpus = group.size, group.gpus_per_node
    panel = 2 * plan.part_rows
    starts = [index * plan.slots * panel for index in range(plan.window)]
    partials = [
        (index * size + node * gpus + (node != group.node), index * size + (node + 1) * gpus)
        for index in range(plan.window)
        for node in range(group.nodes)
    ]
    return {
        "slots": tuple((start, start + (size - 1) * panel) for start in starts),
        "partials": tuple((first, end) for first, end in partials if first < end),
        "node_sums": None,
    }


def _descriptors(
    plan: Plan, tensors: Tensors, slots: torch.Tensor | None, stats: torch.Tensor
) -> dict[str, Any]:  # fmt: skip
    """The tensor descriptors of the Gluon kernel: all tensors are read and written in rows of one warpgroup."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # Gluon is imported only where it runs

    block = [1, 1, plan.config.tile_n, plan.config.tile_k]

    def described(tensor: torch.Tensor, block: list[int]) -> Any:
        plain = descriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
        layout = shared_layout(len(block), tensor.dtype)
        return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout)

    names = dict(q="query", k="key", v="value", dout="dout", dq="dq", dk="dk", dv="dv")
    numbers = 2 * plan.config.tile_n  # of as many queries
    return dict(
        **{name: described(getattr(tensors, field), block) for name, field in names.items()},
        slots=None if slots is None else described(slots, block[2:]),
        stats=described(stats.view(-1, numbers), [1, numbers]),
    )


def _hopper_kernel() -> Any:
    from mkernel.ops.attention.backward.hopper import ring_attention_backward_hopper_kernel

    return ring_attention_backward_hopper_kernel
