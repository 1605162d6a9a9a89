"""What both operators' protocols share: how the ranks of a node push partials to the rank that reduces them.

The reducing rank has a slot and a signal for the partial of every other rank of its node. `exchange` is a structure of
the operator. Two of its fields matter here, `partials` (Slots) and `partial` (Words). Both are indexed by [first + i,
j], where `first` and `j` select the tile, and i the source: the rank i + 1 after the reducing one, cyclically within
the node.
"""

import triton
import triton.language as tl

from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.partials import load_partial, prefetch_partial, store_partial
from mkernel.lang.requests import post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify, notify_in_loop, wait_again
from mkernel.ops.reduce.kinds import PARTIAL


@triton.jit
def slot_at(comm, slots, rank, i, j):
    """Pointer to slot [i, j] in the workspace of a rank of this node."""
    return segment_of(comm.context, rank, slots.DTYPE) + slot_of(slots, comm.epoch, i, j)


@triton.jit
def signal_at(comm, words, rank, i, j):
    """Pointer to signal [i, j] in the workspace of a rank of this node."""
    return segment_of(comm.context, rank, tl.int64) + word_of(words, comm.epoch, i, j)


@triton.jit
def slot_bytes(slots):
    """The size of a slot."""
    return slots.SIZE * (slots.DTYPE.primitive_bitwidth // 8)


@triton.jit
def peer_behind(comm, distance):
    """The rank that follows this one at this distance in its node, cyclically."""
    rank = rank_of(comm.context)
    return rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE + (rank + distance) % comm.RANKS_PER_NODE


@triton.jit
def push_partial(comm, exchange, total, distance, first, j):
    """Push this rank's partial of a tile to the rank that reduces it, the one `distance` after this rank. Returns the
    address of the signal, which the caller must send with `notify_partial`."""
    reducer = peer_behind(comm, distance)
    i = first + comm.RANKS_PER_NODE - 1 - distance
    store_partial(slot_at(comm, exchange.partials, reducer, i, j), total, total.shape[0], total.shape[1])
    return signal_at(comm, exchange.partial, reducer, i, j).to(tl.int64)


@triton.jit
def notify_partial(comm, signal, IN_LOOP: tl.constexpr):
    """Send the signal whose address `push_partial` returned. IN_LOOP: the call is inside a loop that Triton should
    pipeline."""
    if IN_LOOP:
        notify_in_loop(signal.to(tl.pointer_type(tl.int64)), comm.epoch)
    else:
        notify(signal.to(tl.pointer_type(tl.int64)), comm.epoch)


@triton.jit
def post_node_sum(comm, transfer, signal):
    """Post a request to transfer a node's sum of a tile, and to set its signal on the peer."""
    post(comm.context, transfer, signal, comm.epoch, COMPUTE, True)


@triton.jit
def prefetch_partials(comm, exchange, first, j, M: tl.constexpr, N: tl.constexpr):
    """Prefetch the partials of a tile that the other ranks of the node push."""
    rank = rank_of(comm.context)
    for i in range(comm.RANKS_PER_NODE - 1):
        prefetch_partial(slot_at(comm, exchange.partials, rank, first + i, j), M, N)


@triton.jit
def wait_partials(comm, exchange, first, j, tile):
    """Wait for the partials of a tile from the other ranks of the node. Returns 0.0, or NaN if the group gave up."""
    rank = rank_of(comm.context)
    missing = 0.0
    for i in range(comm.RANKS_PER_NODE - 1):
        signal = signal_at(comm, exchange.partial, rank, first + i, j)
        if not wait_again(comm.context, signal, comm.epoch, COMPUTE, PARTIAL, peer_behind(comm, 1 + i), tile):
            missing = float("nan")
    return missing


@triton.jit
def add_partials(comm, exchange, total, first, j):
    """Add the partials of a tile that the other ranks of the node have pushed to this rank's. They must have
    arrived."""
    rank = rank_of(comm.context)
    for i in range(comm.RANKS_PER_NODE - 1):
        slot = slot_at(comm, exchange.partials, rank, first + i, j)
        total += load_partial(slot, total.shape[0], total.shape[1])
    return total
