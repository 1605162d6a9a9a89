"""Tile order: a rank computes tiles in the order in which their data arrives.

Rows come in blocks of a tile's height. A rank starts with its own rows. Then come the other ranks of its node, which
all push at the same time, so their blocks alternate (the first block of every peer, the second of every peer, and so
on), and then the ranks of the other nodes in the same way. Along this sequence of row blocks, tiles are grouped by
`GROUP` row blocks times all columns, so that CTAs that run at the same time share what they load. Every other group
goes through the columns in reverse, so that its first tiles find the previous group's last columns in the cache. With
4 ranks on an H200, 16384 x 2048 x 8192: groups of 8 took 3.14 ms, of 4 3.24, of 16 3.31; with every other group
reversed 3.10. Reversing k as well, in every other wave, gained nothing.
"""

import triton
import triton.language as tl


@triton.jit
def swizzle_tile(tile, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Tile number -> (position in the sequence of row blocks, column block). Groups GROUP row blocks for L2
    locality, and reverses the columns of every other group."""
    in_group = GROUP * column_blocks
    group = tile // in_group
    first = group * GROUP
    # at least 1: a loop that is pipelined looks at tiles behind the last one, and does nothing with them
    height = tl.maximum(tl.minimum(row_blocks - first, GROUP), 1)
    within = tile % in_group
    column = within // height
    return first + within % height, tl.where(group % 2 == 1, column_blocks - 1 - column, column)


@triton.jit
def arrival_order(position, rank, blocks, WORLD_SIZE: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    """Position in the sequence of row blocks -> (source rank, row block of that source). `position` may be a tensor.

    `blocks` is the number of row blocks of one rank. There is no branch in it, so that Triton pipelines loops that
    load by it.
    """
    node = rank // RANKS_PER_NODE
    local = rank % RANKS_PER_NODE
    # the ranks of this node, in turn
    peers: tl.constexpr = max(RANKS_PER_NODE - 1, 1)
    turn = tl.maximum(position - blocks, 0)
    source = tl.where(position < blocks, rank, node * RANKS_PER_NODE + (local + 1 + turn % peers) % RANKS_PER_NODE)
    block = tl.where(position < blocks, position, turn // peers)
    if WORLD_SIZE > RANKS_PER_NODE:
        # the ranks of the other nodes, in turn; of each node my own counterpart first, since its rows reach me straight
        # from the network
        others: tl.constexpr = WORLD_SIZE - RANKS_PER_NODE
        nodes: tl.constexpr = WORLD_SIZE // RANKS_PER_NODE
        turn = tl.maximum(position - blocks * RANKS_PER_NODE, 0)
        which = turn % others
        other_node = (node + 1 + which % (nodes - 1)) % nodes
        other = other_node * RANKS_PER_NODE + (local + which // (nodes - 1)) % RANKS_PER_NODE
        far = position >= blocks * RANKS_PER_NODE
        source = tl.where(far, other, source)
        block = tl.where(far, turn // others, block)
    return source, block
