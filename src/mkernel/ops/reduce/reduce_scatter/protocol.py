"""The protocol of matmul_reduce_scatter: workspace layout and signals. Both kernels follow it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.partials import load_partial, prefetch_partial, store_partial
from mkernel.lang.requests import Transfer
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import wait_again
from mkernel.ops.reduce.call import Plan
from mkernel.ops.reduce.kinds import PARTIAL
from mkernel.ops.reduce.protocol import post_node_sum, prefetch_partials, signal_at, slot_at, slot_bytes
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.layout import Layout


class Exchange(NamedTuple):
    """The arrays of a call in its workspace: see `layout`."""

    partial: Any  # Words
    partials: Any  # Slots
    node_sum: Any  # Words; with one node, this and the following are None
    node_sums: Any  # Slots
    outgoing: Any  # Slots


def layout(group: Group, plan: Plan, dtype: torch.dtype) -> Layout:
    """The workspace of a call. Signals hold epochs.

    partial[first + i, tile]: partials[first + i, tile] holds the partial of the rank i + 1 after this one, cyclically
        within the node; `first_partial` is `first`, which depends on the node of the tile's owner.
    node_sum[i, tile]: node_sums[i, tile] holds the sum of the node i + 1 after this one, cyclically.
    outgoing[i, tile]: this node's sum, for the node i + 1 after this one; the network reads it.
    """
    gpus, others, tiles = group.gpus_per_node, group.nodes - 1, plan.tiles
    elements = plan.config.tile_m * plan.config.tile_n
    memory = Layout("matmul_reduce_scatter")
    memory.signals("partial", group.nodes * (gpus - 1), tiles)
    memory.buffer("partials", dtype, group.nodes * (gpus - 1), tiles, elements)
    if others:
        memory.signals("node_sum", others, tiles)
        memory.buffer("node_sums", dtype, others, tiles, elements)
        memory.buffer("outgoing", dtype, others, tiles, elements)
    return memory


def exchange_of(memory: Layout, workspace: Workspace) -> Exchange:
    """The workspace of a call as a kernel argument."""
    several = "node_sums" in memory
    return Exchange(
        partial=memory.words_in(workspace, "partial"),
        partials=memory.slots_in(workspace, "partials"),
        node_sum=memory.words_in(workspace, "node_sum") if several else None,
        node_sums=memory.slots_in(workspace, "node_sums") if several else None,
        outgoing=memory.slots_in(workspace, "outgoing") if several else None,
    )


@triton.jit
def first_partial(comm, node_offset):
    """First index of the partials for rows of the node `node_offset` after this one."""
    return node_offset * (comm.RANKS_PER_NODE - 1)


@triton.jit
def send_node_sum(comm, exchange, total, node_offset, tile):
    """Store this node's sum of a tile, and post a request to write it to the owner."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    DTYPE: tl.constexpr = exchange.outgoing.DTYPE
    ELEMENT: tl.constexpr = DTYPE.primitive_bitwidth // 8
    rank = rank_of(comm.context)
    source = slot_of(exchange.outgoing, comm.epoch, node_offset - 1, tile)
    store_partial(segment_of(comm.context, rank, DTYPE) + source, total, total.shape[0], total.shape[1])
    i = NODES - 1 - node_offset
    target = slot_of(exchange.node_sums, comm.epoch, i, tile)
    segment = tl.load(comm.context + SEGMENT)
    owner = (rank + node_offset * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    signal = word_of(exchange.node_sum, comm.epoch, i, tile) * 8
    transfer = Transfer(owner, segment, source * ELEMENT, segment, target * ELEMENT, slot_bytes(exchange.outgoing))
    post_node_sum(comm, transfer, signal)


@triton.jit
def wait_node_sums(comm, exchange, tile):
    """Wait for the other nodes' sums of a tile. Returns 0.0, or NaN if the group gave up."""
    rank = rank_of(comm.context)
    missing = 0.0
    for i in range(comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1):
        source = (rank + (i + 1) * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        signal = signal_at(comm, exchange.node_sum, rank, i, tile)
        if not wait_again(comm.context, signal, comm.epoch, COMPUTE, PARTIAL, source, tile):
            missing = float("nan")
    return missing


@triton.jit
def add_node_sums(comm, exchange, total, tile):
    """Add the other nodes' sums of a tile to this node's. They must have arrived."""
    rank = rank_of(comm.context)
    for i in range(comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1):
        slot = slot_at(comm, exchange.node_sums, rank, i, tile)
        total += load_partial(slot, total.shape[0], total.shape[1])
    return total


@triton.jit
def prefetch(comm, exchange, node_offset, tile, M: tl.constexpr, N: tl.constexpr):
    """Prefetch what is to be added to this rank's partial of a tile."""
    prefetch_partials(comm, exchange, first_partial(comm, node_offset), tile, M, N)
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        for i in range(tl.where(node_offset == 0, comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1, 0)):
            prefetch_partial(slot_at(comm, exchange.node_sums, rank_of(comm.context), i, tile), M, N)
