"""Which tiles a CTA takes, and in which order."""

import triton
import triton.language as tl

from mkernel.lang.roles import this_cta

MANY_NODES = tl.constexpr(4)  # from here on, sums are spread over the launch: modelled, see docs/scale.md


@triton.jit
def deal_tiles(tiles, WORLD_SIZE: tl.constexpr):
    """(rounds, early, late): how many full rounds this CTA has for each rank's rows, and whether it takes one more
    tile, either before all others (`early`, a tile of other ranks' rows) or after them (`late`, a tile of its own).

    `left` tiles of each rank's rows are left over. If there are enough CTAs to give each at most one leftover tile of
    all ranks' rows, CTA c takes one of kind c // left. Kinds are numbered such that no CTA waits for one with a higher
    program id (see `tile_at`)."""
    cta = this_cta()
    ctas = tl.num_programs(0)
    left = tiles % ctas
    spread = left * WORLD_SIZE <= ctas
    rounds = tiles // ctas + tl.where(spread, 0, tl.where(cta < left, 1, 0))
    early = tl.where(spread & (cta < left * (WORLD_SIZE - 1)), 1, 0)
    late = tl.where(spread & (cta >= left * (WORLD_SIZE - 1)) & (cta < left * WORLD_SIZE), 1, 0)
    return rounds, early, late


@triton.jit
def tile_at(position, tiles, rounds, early, WORLD_SIZE: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    """(node offset, rank offset, tile) at this position of the CTA's sequence: that tile of the rows of the rank
    whose node and local rank follow this rank's by these offsets, cyclically."""
    cta = this_cta()
    ctas = tl.num_programs(0)
    PEERS: tl.constexpr = RANKS_PER_NODE - 1
    OTHERS: tl.constexpr = WORLD_SIZE // RANKS_PER_NODE - 1  # nodes
    left = tiles % ctas
    last = tiles - left
    node_offset = position * 0
    rank_offset = position * 0
    tile = position * 0
    if position < early:
        # a leftover tile; kinds, in order: pushed for other nodes, pushed within the node, reduced for other nodes
        kind = cta // tl.maximum(left, 1)
        tile = last + cta % tl.maximum(left, 1)
        if kind < OTHERS * PEERS:
            node_offset = 1 + kind // max(PEERS, 1)
            rank_offset = 1 + kind % max(PEERS, 1)
        elif kind < (OTHERS + 1) * PEERS:
            rank_offset = 1 + kind - OTHERS * PEERS
        else:
            node_offset = 1 + kind - (OTHERS + 1) * PEERS
    else:
        index = position - early
        if index < rounds * OTHERS * RANKS_PER_NODE:
            which = index % max(OTHERS * RANKS_PER_NODE, 1)
            tile = index // max(OTHERS * RANKS_PER_NODE, 1) * ctas + cta
            if OTHERS + 1 >= MANY_NODES:
                # the pushes for a node, and its sum behind those for the next one
                behind = tl.maximum(which - PEERS, 0)
                turn = behind // RANKS_PER_NODE
                is_push = (which < PEERS) | ((behind % RANKS_PER_NODE < PEERS) & (turn < OTHERS - 1))
                node_offset = tl.where(which < PEERS, 1, 1 + turn + tl.where(is_push, 1, 0))
                rank_offset = tl.where(which < PEERS, 1 + which, 1 + behind % RANKS_PER_NODE)
                rank_offset = tl.where(is_push, rank_offset, 0)
            elif which < OTHERS * PEERS:
                node_offset = 1 + which // max(PEERS, 1)
                rank_offset = 1 + which % max(PEERS, 1)
            else:
                node_offset = 1 + which - OTHERS * PEERS
        else:
            index -= rounds * OTHERS * RANKS_PER_NODE
            if index < rounds * PEERS:
                rank_offset = 1 + index % max(PEERS, 1)
                tile = index // max(PEERS, 1) * ctas + cta
            else:
                index -= rounds * PEERS
                tile = tl.where(index < rounds, index * ctas + cta, last + cta - left * (WORLD_SIZE - 1))
    return node_offset, rank_offset, tile
