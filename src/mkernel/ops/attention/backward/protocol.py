"""The protocol of ring_attention_backward. Keys and values stream through slots as in ring_attention, with its protocol
(ops/attention/protocol.py). This module is about what returns: partials of dk and dv.

A *partial* is what one rank's queries contribute to dk and dv of one block of keys: TILE_N rows of each, in fp32. Its
*reducer* is the rank of the node that has the owner's local rank: the owner itself, or its counterpart. The reducer
adds up the partials of its node. If it is not the owner, it then sends the sum to the owner. So one partial per block
crosses from one node to another. The owner adds the sums of all nodes.

Which partials exist depends on the mask alone, so every rank knows whom to wait for: a rank has a partial of a block if
`is_seen`, a node has a sum if `is_seen_in_node`. A partial of a block that lies within the range of a rank's rows is
sent even if no row sees it; then it is zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.copy import reserve_link, wait_link
from mkernel.lang.layout import single_word_of, slot_of
from mkernel.lang.partials import load_partial, store_partial
from mkernel.lang.requests import Transfer, post, wait_sent
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify, raise_signal, wait, wait_again
from mkernel.ops.attention.kinds import ADDED, NODE_SUM, PARTIAL_GRADIENTS, PREPARED
from mkernel.ops.attention.protocol import freed_word, stamp
from mkernel.runtime.layout import Layout

if TYPE_CHECKING:
    from mkernel.ops.attention.backward.plan import Plan

OP = "ring_attention_backward"


def layout(plan: Plan, dtype: torch.dtype) -> Layout:
    """The workspace of a call. It is not double buffered. For round t, with w = t % window:

    entered, done, freed, arrived, slots: as in ring_attention. preparing: how many CTAs of this rank have computed
    their share of delta; reset to zero by the last one. prepared: all of them have. adding[w]: how many reductions of
    the round this rank has finished; reset to zero by the last one. added[rank, w]: that rank has finished all
    reductions of the round. partial[w * world size + first rank of the owner's node + i, block]: the partial is in this
    rank's slot of that index
        in `partials`. Rank i of the node computed it, counted from this rank on. i = 0: this rank's own, in whose place
        the sum of the node is staged for the network, if the owner is in another node.
    node_sum[w * (nodes - 1) + i, block]: the sum of the (i + 1)-th node after this one is in `node_sums`.
    """
    size, nodes = plan.sequences.size, plan.nodes
    several = size > 1
    window = plan.window if several else 0
    block = plan.config.tile_n * (plan.config.tile_k + plan.value_columns)
    memory = Layout(OP, double_buffered=False)
    memory.words("entered", size)
    memory.counters("preparing", 1)
    memory.counters("done", window)
    memory.counters("adding", window)
    memory.signals("prepared", 1)
    memory.signals("freed", size, window)
    memory.signals("added", size, window)
    memory.signals("arrived", window * (size - 1), plan.chunks)
    memory.signals("partial", window * size, plan.tiles)
    memory.signals("node_sum", window * (nodes - 1), plan.tiles)
    memory.buffer("slots", dtype, window * plan.slots * 2 * plan.part_rows, plan.width)
    memory.buffer("partials", torch.float32, window * size, plan.tiles, block)
    memory.buffer("node_sums", torch.float32, window * (nodes - 1), plan.tiles, block)
    return memory


# -- delta


@triton.jit
def notify_prepared(comm, call, count):
    """Count this CTA's share of delta as computed. The last one of `count` CTAs tells all CTAs of the rank."""
    tl.debug_barrier()
    segment = segment_of(comm.context, rank_of(comm.context), tl.int64)
    preparing = segment + single_word_of(call.preparing, 0, 0)
    if tl.atomic_add(preparing, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.atomic_xchg(preparing, 0, sem="relaxed", scope="gpu")
        raise_signal(segment + single_word_of(call.prepared, 0, 0), comm.epoch)


@triton.jit
def wait_prepared(comm, call):
    """Wait until delta is computed. Returns 0.0, or NaN if the group gave up."""
    rank = rank_of(comm.context)
    signal = segment_of(comm.context, rank, tl.int64) + single_word_of(call.prepared, 0, 0)
    complete = wait(comm.context, signal, comm.epoch, COMPUTE, PREPARED, rank, 0)
    return tl.where(complete, 0.0, float("nan"))


# -- where partials are


@triton.jit
def partial_index(comm, rounds, round_index, owner, reducer, source):
    """The first index of a partial and of its signal, on its reducer. source: the rank that computed it."""
    distance = (source - reducer + comm.RANKS_PER_NODE) % comm.RANKS_PER_NODE
    node = owner // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    return round_index % rounds.window * comm.WORLD_SIZE + node + distance


@triton.jit
def node_sum_index(comm, rounds, round_index, owner, node):
    """The first index of a node's sum and of its signal, on the owner of the keys."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    return round_index % rounds.window * (NODES - 1) + (node - owner // comm.RANKS_PER_NODE + NODES - 1) % NODES


@triton.jit
def block_at(comm, slots, rank, index, tile):
    """Pointer to a partial or a sum in the workspace of a rank of this node: dk, then dv."""
    return segment_of(comm.context, rank, slots.DTYPE) + slot_of(slots, comm.epoch, index, tile)


# -- credits


@triton.jit
def wait_added(comm, reductions, peer, round_index):
    """Wait until the peer has finished the reductions of round `round_index` - window, whose slots the round reuses."""
    if round_index >= reductions.window:
        before = round_index - reductions.window
        mine = segment_of(comm.context, rank_of(comm.context), tl.int64)
        word = freed_word(reductions, peer, round_index)
        wait(comm.context, mine + word, stamp(comm.epoch, before), COMPUTE, ADDED, peer, before)


@triton.jit
def wait_reducible(comm, call, round_index, which):
    """Wait until this rank may reduce blocks of the round: it has finished those of round `round_index` - window. So
    one counter per round of the window is enough. The first reduction of a round also waits for all ranks that tell
    this one about it, so that all their signals are here when the launch ends: in a later call the words may be other
    signals."""
    if call.rounds.CREDITS:
        rank = rank_of(comm.context)
        wait_added(comm, call.reductions, rank, round_index)
        if which == 0:
            for i in range(1, comm.RANKS_PER_NODE):
                peer = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE + (rank + i) % comm.RANKS_PER_NODE
                wait_added(comm, call.reductions, peer, round_index)
            for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
                wait_added(comm, call.reductions, (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE, round_index)


@triton.jit
def wait_partial_writable(comm, call, round_index, owner, reducer):
    """Wait until this rank may write partials of the owner's keys into the reducer's slots of the round. If it is the
    reducer itself, the network may still read there what it sent to the owner."""
    if call.rounds.CREDITS:
        wait_added(comm, call.reductions, reducer, round_index)
        if (reducer == rank_of(comm.context)) & (owner != reducer):
            wait_added(comm, call.reductions, owner, round_index)


@triton.jit
def wait_sum_writable(comm, call, round_index, owner):
    """Wait until this rank may send a node's sum to the owner of the keys."""
    if call.rounds.CREDITS:
        wait_added(comm, call.reductions, owner, round_index)


# -- partials


@triton.jit
def store_block(place, dk, dv):
    """Store a partial or a sum."""
    store_partial(place, dk, dk.shape[0], dk.shape[1])
    store_partial(place + dk.shape[0] * dk.shape[1], dv, dv.shape[0], dv.shape[1])


@triton.jit
def notify_partial(comm, call, round_index, reducer, index, tile):
    """Tell the reducer that a partial is in its slot."""
    word = single_word_of(call.exchange.partial, index, tile)
    notify(segment_of(comm.context, reducer, tl.int64) + word, stamp(comm.epoch, round_index))


@triton.jit
def notify_pushed(comm, call, round_index, reducer, index, tile):
    """`notify_partial`, when the emulated link, if there is one, would have transferred the partial."""
    if call.rounds.PACED:
        if reducer != rank_of(comm.context):
            size = tl.cast(4 * call.TILE_N * (call.DIM + call.VALUE_DIM), tl.int64)
            wait_link(reserve_link(comm.context, size, call.rounds.nanoseconds_per_mib))
    notify_partial(comm, call, round_index, reducer, index, tile)


@triton.jit
def push_partial(comm, call, round_index, owner, tile, dk, dv):
    """Push this rank's partial of a block of the owner's keys to its reducer."""
    rank = rank_of(comm.context)
    reducer = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE + owner % comm.RANKS_PER_NODE
    index = partial_index(comm, call.rounds, round_index, owner, reducer, rank)
    wait_partial_writable(comm, call, round_index, owner, reducer)
    store_block(block_at(comm, call.exchange.partials, reducer, index, tile), dk, dv)
    notify_pushed(comm, call, round_index, reducer, index, tile)


@triton.jit
def wait_partial(comm, call, round_index, source, index, tile):
    """Wait for a partial that the source pushes to this rank. Returns 0.0, or NaN if the group gave up."""
    word = single_word_of(call.exchange.partial, index, tile)
    signal = segment_of(comm.context, rank_of(comm.context), tl.int64) + word
    expected = stamp(comm.epoch, round_index)
    complete = wait_again(comm.context, signal, expected, COMPUTE, PARTIAL_GRADIENTS, source, tile)
    return tl.where(complete, 0.0, float("nan"))


@triton.jit
def wait_node_sum(comm, call, round_index, node, index, tile):
    """Wait for the sum of another node, which this rank's counterpart there sends. Returns 0.0, or NaN if the group
    gave up."""
    rank = rank_of(comm.context)
    signal = segment_of(comm.context, rank, tl.int64) + single_word_of(call.exchange.node_sum, index, tile)
    sender = node * comm.RANKS_PER_NODE + rank % comm.RANKS_PER_NODE
    complete = wait_again(comm.context, signal, stamp(comm.epoch, round_index), COMPUTE, NODE_SUM, sender, tile)
    return tl.where(complete, 0.0, float("nan"))


@triton.jit
def add_block(place, dk, dv):
    """(dk, dv) plus a partial or a sum that has arrived."""
    dk_end = place + dk.shape[0] * dk.shape[1]
    dk = dk + load_partial(place, dk.shape[0], dk.shape[1])
    return dk, dv + load_partial(dk_end, dv.shape[0], dv.shape[1])


@triton.jit
def post_node_sum(comm, call, round_index, owner, tile):
    """Post the sum of this rank's node, staged in place of this rank's own partial, to the owner of the keys. Returns
    the request's ticket."""
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    staged = partial_index(comm, call.rounds, round_index, owner, rank, rank)
    index = node_sum_index(comm, call.rounds, round_index, owner, rank // comm.RANKS_PER_NODE)
    source = slot_of(call.exchange.partials, comm.epoch, staged, tile) * 4
    target = slot_of(call.exchange.node_sums, comm.epoch, index, tile) * 4
    size = tl.cast(call.exchange.partials.SIZE * 4, tl.int64)
    signal = single_word_of(call.exchange.node_sum, index, tile) * 8
    transfer = Transfer(owner, segment, source, segment, target, size)
    return post(comm.context, transfer, signal, stamp(comm.epoch, round_index), COMPUTE)


@triton.jit
def wait_posted(comm, ticket):
    """Wait until the network has read the sums that this CTA has posted; ticket: of the last one, or -1. Calls of
    another shape may have slots there, and their writers know only that this rank has left the epoch."""
    if ticket >= 0:
        wait_sent(comm.context, ticket, COMPUTE)
