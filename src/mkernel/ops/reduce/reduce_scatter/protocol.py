"""The protocol of matmul_reduce_scatter: workspace layout and signals. Both kernels follow it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.requests import Transfer
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import PARTIAL, wait_again
from mkernel.ops.reduce.call import Plan
from mkernel.ops.reduce.partials import load_partial, prefetch_partial, store_partial
from mkernel.ops.reduce.protocol import post_node_sum, prefetch_partials, signal_at, slot_at, slot_bytes
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.layout import Layout


class Exchange(NamedTuple):
    """What a call keeps in the workspace: see `layout`."""

    partial: Any  # Words
    partials: Any  # Slots
    node_sum: Any  # Words; in one node this and the following are None
    node_sums: Any  # Slots
    outgoing: Any  # Slots


def layout(group: Group, plan: Plan, dtype: torch.dtype) -> Layout:
    """The workspace of a call. Signals hold epochs.

    partial[i, tile]: the slot of `partials` with the same index is filled; i = `first_partial` + the pusher's place.
    node_sum[place, tile]: the slot of `node_sums` is filled, by the node that is place + 1 behind this one.
    outgoing[place, tile]: sums of this node, for the node that is place + 1 behind; the network reads them.
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
    """The same for a kernel."""
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
    """First index of the partials of rows of the node that is `node_offset` behind."""
    return node_offset * (comm.RANKS_PER_NODE - 1)


@triton.jit
def send_node_sum(comm, exchange, total, node_offset, tile):
    """Ask the network to write the node's sum of a tile to its owner."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    DTYPE: tl.constexpr = exchange.outgoing.DTYPE
    ELEMENT: tl.constexpr = DTYPE.primitive_bitwidth // 8
    rank = rank_of(comm.context)
    source = slot_of(exchange.outgoing, comm.epoch, node_offset - 1, tile)
    store_partial(segment_of(comm.context, rank, DTYPE) + source, total, total.shape[0], total.shape[1])
    place = NODES - 1 - node_offset
    target = slot_of(exchange.node_sums, comm.epoch, place, tile)
    segment = tl.load(comm.context + SEGMENT)
    owner = (rank + node_offset * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    signal = word_of(exchange.node_sum, comm.epoch, place, tile) * 8
    transfer = Transfer(owner, segment, source * ELEMENT, segment, target * ELEMENT, slot_bytes(exchange.outgoing))
    post_node_sum(comm, transfer, signal)


@triton.jit
def wait_node_sums(comm, exchange, tile):
    """Wait for the other nodes' sums of a tile; 0.0, or NaN if the group gave up."""
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
    """This node's sum of a tile plus those of the other nodes, which are here."""
    rank = rank_of(comm.context)
    for i in range(comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1):
        slot = slot_at(comm, exchange.node_sums, rank, i, tile)
        total += load_partial(slot, total.shape[0], total.shape[1])
    return total


@triton.jit
def prefetch(comm, exchange, node_offset, tile, M: tl.constexpr, N: tl.constexpr):
    """Bring what is to be added to this rank's partial of a tile into the cache."""
    prefetch_partials(comm, exchange, first_partial(comm, node_offset), tile, M, N)
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        for i in range(tl.where(node_offset == 0, comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1, 0)):
            prefetch_partial(slot_at(comm, exchange.node_sums, rank_of(comm.context), i, tile), M, N)
