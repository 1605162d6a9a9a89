"""Entry signals: a rank tells the ranks that write to it that it has entered an epoch, and so has left all earlier
ones.

They are the first words of each rank's segment: word r holds the epoch that rank r has entered. Operators whose data
already implies this (see the docstring of ops/all_gather_matmul) do not need them.
"""

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import SEND
from mkernel.lang.signals import notify


@triton.jit
def announce(context, epoch, WORLD_SIZE: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    """Tell the other ranks of the node, and this rank's counterparts in other nodes, that it has entered the epoch:
    they may write to its buffers. One CTA of the launch calls it."""
    rank = rank_of(context)
    notify_entered(context, epoch, rank, RANKS_PER_NODE)
    post_entered(context, epoch, rank, WORLD_SIZE, RANKS_PER_NODE)


@triton.jit
def notify_entered(context, epoch, rank, RANKS_PER_NODE: tl.constexpr):
    """Notify the other ranks of this node that this rank has entered the epoch."""
    node = rank // RANKS_PER_NODE
    for i in range(1, RANKS_PER_NODE):
        peer = node * RANKS_PER_NODE + (rank + i) % RANKS_PER_NODE
        notify(segment_of(context, peer, tl.int64) + rank, epoch)


@triton.jit
def post_entered(context, epoch, rank, WORLD_SIZE: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    """Post a request to each counterpart in the other nodes that raises its entry signal."""
    segment = tl.load(context + SEGMENT)
    for i in range(1, WORLD_SIZE // RANKS_PER_NODE):
        peer = (rank + i * RANKS_PER_NODE) % WORLD_SIZE
        post(context, Transfer(peer, segment, 0, segment, 0, 0), rank * 8, epoch, SEND)
