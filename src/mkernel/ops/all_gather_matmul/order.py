"""In which order chunks travel between and within nodes."""

import triton
import triton.language as tl

MANY_NODES = tl.constexpr(4)  # from here on, the chunks of all nodes come in turn: modelled, see docs/scale.md


@triton.jit
def destination_at(turn, NODES: tl.constexpr):
    """How many nodes on the destination of a chunk's request number `turn` is; both from 1 to NODES - 1.

    From MANY_NODES on, the last node comes first: then the chunks of the nodes that follow a rank's own arrive in the
    order in which it computes (`arrival_order`).
    """
    if NODES >= MANY_NODES:
        offset = NODES - turn
    else:
        offset = turn
    return offset


@triton.jit
def forwarded_at(item, chunks, NODES: tl.constexpr):
    """(chunk, node offset): which chunk is item number `item` of what a rank pushes to its node, and how many nodes on
    it comes from; 0 for the rank's own, which come first.

    Senders send a chunk to all nodes before the next chunk. So from MANY_NODES on, the first chunk of every node comes
    before the second one of any. With fewer nodes, a node comes after the other: that is the same with two. With three,
    it was not measured.
    """
    if NODES >= MANY_NODES:
        far = tl.maximum(item - chunks, 0)
        chunk = tl.where(item < chunks, item, far // (NODES - 1))
        offset = tl.where(item < chunks, 0, 1 + far % (NODES - 1))
    else:
        chunk = item % chunks
        offset = item // chunks
    return chunk, offset
