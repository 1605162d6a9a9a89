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
def announce(context, epoch, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Tell the other ranks of the node, and this rank's counterparts in other nodes, that it has entered the epoch:
    they may write to its buffers. One CTA of the launch calls it."""
    rank = rank_of(context)
    notify_entered(context, epoch, rank, GPUS)
    post_entered(context, epoch, rank, SIZE, GPUS)


@triton.jit
def notify_entered(context, epoch, rank, GPUS: tl.constexpr):
    """Notify the other ranks of this node that this rank has entered the epoch."""
    node = rank // GPUS
    for i in range(1, GPUS):
        peer = node * GPUS + (rank + i) % GPUS
        notify(segment_of(context, peer, tl.int64) + rank, epoch)


@triton.jit
def post_entered(context, epoch, rank, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Post a request to each counterpart in the other nodes that raises its entry signal."""
    segment = tl.load(context + SEGMENT)
    for i in range(1, SIZE // GPUS):
        peer = (rank + i * GPUS) % SIZE
        post(context, Transfer(peer, segment, 0, segment, 0, 0), rank * 8, epoch, SEND)
