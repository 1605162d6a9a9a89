"""What the protocols of both operators have in common: how the ranks of a node push partials to the one that adds.

A rank that adds has a slot and a signal for the partial of every other rank of its node. `exchange` is the operator's
own structure; here two of its fields matter, `partials` (Slots) and `partial` (Words), both [first + place, j]: what
the rank that is place + 1 behind the adding one has pushed. `first` and `j` say of which tile.
"""

import triton
import triton.language as tl

from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.requests import post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify, notify_in_loop, wait_again
from mkernel.ops.reduce.kinds import PARTIAL
from mkernel.ops.reduce.partials import load_partial, prefetch_partial, store_partial


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
    """The rank that is so many behind this one in its node, cyclically."""
    rank = rank_of(comm.context)
    return rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE + (rank + distance) % comm.RANKS_PER_NODE


@triton.jit
def push_partial(comm, exchange, total, distance, first, j):
    """Push this rank's partial of a tile to the rank that is `distance` behind it, which adds it. Returns the address
    of the signal that is due then."""
    adder = peer_behind(comm, distance)
    place = first + comm.RANKS_PER_NODE - 1 - distance
    store_partial(slot_at(comm, exchange.partials, adder, place, j), total, total.shape[0], total.shape[1])
    return signal_at(comm, exchange.partial, adder, place, j).to(tl.int64)


@triton.jit
def notify_partial(comm, signal, IN_LOOP: tl.constexpr):
    """Raise the signal at an address that `push_partial` has returned. IN_LOOP: inside a loop that Triton shall
    pipeline."""
    if IN_LOOP:
        notify_in_loop(signal.to(tl.pointer_type(tl.int64)), comm.epoch)
    else:
        notify(signal.to(tl.pointer_type(tl.int64)), comm.epoch)


@triton.jit
def post_node_sum(comm, transfer, signal):
    """Ask the network for the transfer of a node's sum of a tile, and for its signal at the peer."""
    post(comm.context, transfer, signal, comm.epoch, COMPUTE, True)


@triton.jit
def prefetch_partials(comm, exchange, first, j, M: tl.constexpr, N: tl.constexpr):
    """Bring what the node has pushed of a tile into the cache."""
    rank = rank_of(comm.context)
    for i in range(comm.RANKS_PER_NODE - 1):
        prefetch_partial(slot_at(comm, exchange.partials, rank, first + i, j), M, N)


@triton.jit
def wait_partials(comm, exchange, first, j, tile):
    """Wait for what the node pushes of a tile; 0.0, or NaN if the group gave up."""
    rank = rank_of(comm.context)
    missing = 0.0
    for i in range(comm.RANKS_PER_NODE - 1):
        signal = signal_at(comm, exchange.partial, rank, first + i, j)
        if not wait_again(comm.context, signal, comm.epoch, COMPUTE, PARTIAL, peer_behind(comm, 1 + i), tile):
            missing = float("nan")
    return missing


@triton.jit
def add_partials(comm, exchange, total, first, j):
    """This rank's own partial of a tile plus those that the node has pushed, which are here."""
    rank = rank_of(comm.context)
    for i in range(comm.RANKS_PER_NODE - 1):
        slot = slot_at(comm, exchange.partials, rank, first + i, j)
        total += load_partial(slot, total.shape[0], total.shape[1])
    return total
