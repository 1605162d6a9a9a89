"""The launch of ring_attention: builds the arguments of a kernel from a plan and the caller's tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
import triton

from mkernel.lang.context import READY, Ranks
from mkernel.ops.attention import kernel
from mkernel.ops.attention.call import Call, Descriptors, Heads
from mkernel.ops.attention.mask import Mask
from mkernel.ops.attention.merge import Spans
from mkernel.ops.attention.plan import Plan
from mkernel.ops.attention.protocol import Rounds
from mkernel.ops.attention.sequences import Scoring
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, descriptor
from mkernel.runtime.world import Launch

if TYPE_CHECKING:
    from mkernel.ops.attention.backward.plan import Plan as BackwardPlan

POLL_WIDTH = 256  # maximum number of signals that a CTA of the Triton kernel polls at a time
WARP_POLL_WIDTH = 128  # signals that the loading warp of the Gluon kernel polls at a time


def launch(
    group: Group, plan: Plan, memory: Layout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor | None, scoring: Scoring, variant: Hashable,
) -> Launch:  # fmt: skip
    """The launch that executes a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    heads, rows, dim = query.shape[1:]
    kv_heads, length = key.shape[1:3]
    value_dim = triton.next_power_of_2(value.shape[3])
    c, size = plan.config, group.size
    blocks = math.ceil(rows / c.tile_m)
    partial = None
    if plan.parts > 1 or c.team_ctas > 1:
        states = heads // kv_heads * blocks if plan.parts > 1 else query.shape[0] * heads * blocks * c.team_ctas
        words = states * c.tile_m * (value_dim + 2)
        partial = group.world.memory.empty(group.world_rank, (words,), torch.float32)
    polled = min(triton.next_power_of_2(max((size - 1) * plan.chunks, 1)), POLL_WIDTH)
    slots = memory.tensor_in(workspace, "slots", query.dtype) if size > 1 else None
    call = Call(
        q=heads_of(query), k=heads_of(key, plan.width), v=heads_of(value, plan.width), out=heads_of(out), lse=lse,
        slots=None if plan.uses_tma else slots, partial=partial,
        schedule=plan.schedule, mask=mask_of(plan, rows, length),
        rounds=_rounds(group, plan, memory, workspace, tiles=heads // kv_heads * blocks),
        spans=Spans(workspace.state[READY.value :], plan.span_keys, *constants(c.team_ctas)),
        **factors(scoring, dim), heads=heads, kv_heads=kv_heads, dim=dim, blocks=blocks,
        **_constants(
            SENDERS=c.send_ctas, INTRAS=c.intra_ctas, PARTS=plan.parts > 1, LSE=lse is not None,
            USES_TMA=plan.uses_tma, SYNCS_GRID=plan.syncs_grid, SOFTCAP=scoring.softcap > 0,
            PRECISION=plan.precision,
            TILE_M=c.tile_m, TILE_N=c.tile_n, DIM=c.tile_k, VALUE_DIM=value_dim,
            COPY=max(c.copy_bytes // query.element_size(), triton.next_power_of_2(plan.width)),
            POLL_WIDTH=WARP_POLL_WIDTH if plan.hopper else polled,
        ),
    )  # fmt: skip
    return Launch(
        op="ring_attention",
        group=group,
        kernel=_hopper_kernel() if plan.hopper else kernel.ring_attention_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context, ranks=Ranks(*constants(size, group.gpus_per_node)),
            **_descriptors(plan, query, key, value, out, slots)._asdict(), call=call,
        ),
        options=dict(num_warps=4) if plan.hopper else dict(num_warps=c.warps, num_stages=c.stages),
        # sizes of the workspace included: Triton specializes a binary for the divisibility of integers
        variant=(variant, workspace.signal_words),
        uses=memory.uses(workspace, free={"slots": _received(plan)}),
        inputs=(*"qkv", "call.q.pointer", "call.k.pointer", "call.v.pointer", "call.mask.spans", "call.mask.places",
            "call.schedule"),
        results=("out", "call.out.pointer", "call.lse"),
        scratch=() if partial is None else (partial,),
    )  # fmt: skip


def mask_of(plan: Plan | BackwardPlan, rows: int, length: int) -> Mask:
    """The mask of a call on a rank with this many queries and keys."""
    sequences = plan.sequences
    flags = constants(sequences.size, sequences.zigzag, sequences.causal, plan.spans is not None)
    if plan.places is None:
        return Mask(length, plan.spans, *flags)._replace(rows=None if rows == length else rows)
    return Mask(sequences.length, plan.spans, *flags)._replace(rows=rows, places=plan.places, own=length)


def factors(scoring: Scoring, dim: int) -> dict[str, float | None]:
    """scale and cap_scale of a `Call`."""
    log2_e, scale = math.log2(math.e), scale_of(scoring, dim)
    if not scoring.softcap:
        return dict(scale=scale * log2_e, cap_scale=None)
    return dict(scale=scoring.softcap * log2_e, cap_scale=2 * log2_e * scale / scoring.softcap)


def scale_of(scoring: Scoring, dim: int) -> float:
    return dim**-0.5 if scoring.scale is None else float(scoring.scale)


def _constants(**values: Any) -> dict[str, Any]:
    return dict(zip(values, constants(*values.values())))


def _rounds(group: Group, plan: Plan, memory: Layout, workspace: Workspace, tiles: int) -> Rounds:
    """tiles: the number of tiles that this rank computes in a round."""
    c = plan.config
    link = group.world.links.nvlink if c.intra_ctas else None
    forwarded = (group.nodes - 1) * plan.chunks if c.intra_ctas else 0
    return Rounds(
        count=plan.rounds, window=plan.window, parts=plan.parts, part_rows=plan.part_rows, padded=plan.padded,
        chunk_rows=c.chunk_rows, chunks=plan.chunks,
        # each warpgroup finishes its half of a tile, and each CTA its part of the keys
        tasks=tiles * (2 if plan.hopper else c.team_ctas) + forwarded,
        done=memory.words_in(workspace, "done"),
        freed=memory.words_in(workspace, "freed"),
        arrived=memory.words_in(workspace, "arrived"),
        slots=memory.buffer_in(workspace, "slots"),
        nanoseconds_per_mib=round(2**20 / link) if link else 0,
        **_constants(SLOTS=plan.slots, CREDITS=plan.credits, PACED=link is not None),
    )  # fmt: skip


def _received(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The rows of `slots` that receive other ranks' panels. The remaining rows stage chunks for other nodes, and the
    network may still read them when the launch has finished."""
    if plan.sequences.size == 1:
        return ()
    panel = 2 * plan.part_rows
    starts = [index * plan.slots * panel for index in range(plan.window)]
    return tuple((start, start + (plan.sequences.size - 1) * panel) for start in starts)


def heads_of(tensor: torch.Tensor, width: int | None = None) -> Heads:
    """A tensor, as the kernels take it. width: columns of the slots; those of the tensor by default."""
    columns = tensor.shape[3]
    width = columns if width is None else width
    flat = tensor.stride()[2:] == (columns, 1) and columns == width
    flags = constants(flat, triton.next_power_of_2(width))
    return Heads(*(tensor, *tensor.stride(), columns, *flags))


def _descriptors(
    plan: Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    slots: torch.Tensor | None,
) -> Descriptors:  # fmt: skip
    if not plan.uses_tma:
        return Descriptors(None, None, None, None, None)
    c = plan.config
    queries = [1, 1, c.tile_m // 2 if plan.hopper else c.tile_m, c.tile_k]  # each warpgroup has half a tile
    keys = [1, 1, c.tile_n, c.tile_k]
    value_dim = triton.next_power_of_2(value.shape[3])
    return Descriptors(
        q=_descriptor(plan, query, queries),
        k=_descriptor(plan, key, keys),
        v=_descriptor(plan, value, [*keys[:3], value_dim]),
        out=_descriptor(plan, out, [*queries[:3], value_dim]),
        slots=None if slots is None else _descriptor(plan, slots, keys[2:]),
    )


def _descriptor(plan: Plan, tensor: torch.Tensor, block: list[int]) -> Any:
    """A tensor descriptor for the plan's kernel."""
    plain = descriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
    if not plan.hopper:
        return plain
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # Gluon is imported only where it runs

    layout = shared_layout(len(block), tensor.dtype)
    return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout)


@functools.cache
def shared_layout(rank: int, dtype: torch.dtype) -> Any:
    """The shared-memory layout of a block: of 16-bit floats as wgmma reads them, of fp32 as in memory."""
    from triton.experimental.gluon import language as gl

    swizzle = 128 if dtype.itemsize == 2 else 0
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=rank)


def _hopper_kernel() -> Any:
    from mkernel.ops.attention.hopper import ring_attention_hopper_kernel

    return ring_attention_hopper_kernel
