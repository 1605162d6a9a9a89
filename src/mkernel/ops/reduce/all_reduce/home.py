"""Sums on three or more nodes: one of the owners of a tile is its home.

If every owner sent its node's sum of a tile to the owners in all other nodes, each rank would send (nodes-1)/gpus of
the result. Instead, all owners send their sums to the tile's home; the home adds the sums of all nodes, and sends the
finished tile back to the other owners. This takes 2*(nodes-1)/nodes/gpus of the result, which is the least that an
all-reduce can send, and one step more: a CTA has multiplied two more blocks of tiles by the time at which it needs the
finished tile. Homes alternate from block to block and from CTA to CTA, so that all nodes send and add alike.

Who waits for whom. The home waits for the sums of the other nodes one block after their owners have sent them. The
other owners wait for the finished tile another block later, store it in the result, and signal it to their node. All of
these are CTAs with the same program id, and each step waits only for steps of earlier blocks.

The order of sums is that of `sum_nodes`: from node 0 on, each node's sum rounded to the dtype in which it travels. The
result has the same bits as if every owner had added all sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.partials import load_partial, store_partial
from mkernel.lang.requests import Transfer
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import wait_again
from mkernel.ops.reduce.all_reduce.order import home_of, number_at_home, slot_number
from mkernel.ops.reduce.kinds import FINISHED_TILE, PARTIAL
from mkernel.ops.reduce.protocol import post_node_sum, signal_at, slot_at, slot_bytes


@triton.jit
def is_home(comm, block):
    """Whether this node is the home of this CTA's tile of a block."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    return home_of(block, NODES) == rank_of(comm.context) // comm.RANKS_PER_NODE


@triton.jit
def _owner_in(comm, node):
    """The rank of a node that owns the same tiles as this one."""
    return node * comm.RANKS_PER_NODE + rank_of(comm.context) % comm.RANKS_PER_NODE


@triton.jit
def send_to_home(comm, exchange, total, block):
    """Store the node's sum of a tile in its slot and, unless this node is the tile's home, post a request to write it
    to the home."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    DTYPE: tl.constexpr = exchange.own_sums.DTYPE
    ELEMENT: tl.constexpr = DTYPE.primitive_bitwidth // 8
    rank = rank_of(comm.context)
    source = slot_of(exchange.own_sums, comm.epoch, 0, slot_number(block))
    store_partial(segment_of(comm.context, rank, DTYPE) + source, total, total.shape[0], total.shape[1])
    home = home_of(block, NODES)
    if not is_home(comm, block):
        i = (rank // comm.RANKS_PER_NODE - home + NODES - 1) % NODES
        number = number_at_home(block, NODES)
        target = slot_of(exchange.node_sums, comm.epoch, i, number)
        segment = tl.load(comm.context + SEGMENT)
        transfer = Transfer(
            _owner_in(comm, home), segment, source * ELEMENT, segment, target * ELEMENT, slot_bytes(exchange.own_sums)
        )
        post_node_sum(comm, transfer, word_of(exchange.node_sum, comm.epoch, i, number) * 8)


@triton.jit
def sum_at_home(comm, exchange, block, tile, M: tl.constexpr, N: tl.constexpr):
    """At the home: wait for the sums of the other nodes, and add those of all nodes in node order; NaN if the group
    gave up."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    rank = rank_of(comm.context)
    node = rank // comm.RANKS_PER_NODE
    number = number_at_home(block, NODES)
    missing = 0.0
    for i in range(NODES - 1):
        source = _owner_in(comm, (node + 1 + i) % NODES)
        signal = signal_at(comm, exchange.node_sum, rank, i, number)
        if not wait_again(comm.context, signal, comm.epoch, COMPUTE, PARTIAL, source, tile):
            missing = float("nan")
    own = slot_at(comm, exchange.own_sums, rank, 0, slot_number(block))
    total = tl.zeros((M, N), tl.float32)
    for other in range(NODES):
        received = slot_at(comm, exchange.node_sums, rank, (other - node + NODES - 1) % NODES, number)
        total += load_partial(tl.where(other == node, own, received), M, N)
    return total + missing


@triton.jit
def send_finished(comm, exchange, block):
    """At the home: post requests to write the finished tile of a block to its owners in the other nodes."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    DTYPE: tl.constexpr = exchange.finished_tiles.DTYPE
    node = rank_of(comm.context) // comm.RANKS_PER_NODE
    offset = slot_of(exchange.finished_tiles, comm.epoch, 0, slot_number(block)) * (DTYPE.primitive_bitwidth // 8)
    segment = tl.load(comm.context + SEGMENT)
    for i in range(NODES - 1):
        peer = _owner_in(comm, (node + 1 + i) % NODES)
        transfer = Transfer(peer, segment, offset, segment, offset, slot_bytes(exchange.finished_tiles))
        post_node_sum(comm, transfer, word_of(exchange.from_home, comm.epoch, 0, slot_number(block)) * 8)


@triton.jit
def wait_from_home(comm, exchange, block, tile):
    """At the other owners: wait for the finished tile of a block. Returns 0.0, or NaN if the group gave up."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    missing = 0.0
    signal = signal_at(comm, exchange.from_home, rank_of(comm.context), 0, slot_number(block))
    home = _owner_in(comm, home_of(block, NODES))
    if not wait_again(comm.context, signal, comm.epoch, COMPUTE, FINISHED_TILE, home, tile):
        missing = float("nan")
    return missing
