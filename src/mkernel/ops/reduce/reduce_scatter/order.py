"""Which tiles a CTA takes, and in which order."""

import triton
import triton.language as tl

from mkernel.lang.roles import this_cta


@triton.jit
def deal_tiles(tiles, WORLD_SIZE: tl.constexpr):
    """(rounds, early, late): how many full rounds of each kind of tile this CTA has, and whether it has
    one more tile of some kind, first of all, or one more of its own rows, last of all.

    If the tiles that are left over go round once for all kinds together, CTA cta gets one of kind
    cta // left; kinds are numbered so that no CTA waits for a higher one (see `tile_at`)."""
    cta = this_cta()
    ctas = tl.num_programs(0)
    left = tiles % ctas
    apart = left * WORLD_SIZE <= ctas
    rounds = tiles // ctas + tl.where(apart, 0, tl.where(cta < left, 1, 0))
    early = tl.where(apart & (cta < left * (WORLD_SIZE - 1)), 1, 0)
    late = tl.where(apart & (cta >= left * (WORLD_SIZE - 1)) & (cta < left * WORLD_SIZE), 1, 0)
    return rounds, early, late


@triton.jit
def tile_at(place, tiles, rounds, early, WORLD_SIZE: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    """(node offset, rank offset, tile): which tile this CTA takes at a place of its sequence: one of the rows of
    the rank that is so many nodes and so many local ranks behind this one, cyclically."""
    cta = this_cta()
    ctas = tl.num_programs(0)
    PEERS: tl.constexpr = RANKS_PER_NODE - 1
    OTHERS: tl.constexpr = WORLD_SIZE // RANKS_PER_NODE - 1  # nodes
    left = tiles % ctas
    last = tiles - left
    node_offset = place * 0
    rank_offset = place * 0
    tile = place * 0
    if place < early:
        # a tile of the last round; kinds: pushed for other nodes, pushed in the node, summed for other nodes
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
        turn = place - early
        if turn < rounds * OTHERS * RANKS_PER_NODE:
            which = turn % max(OTHERS * RANKS_PER_NODE, 1)
            tile = turn // max(OTHERS * RANKS_PER_NODE, 1) * ctas + cta
            if which < OTHERS * PEERS:
                node_offset = 1 + which // max(PEERS, 1)
                rank_offset = 1 + which % max(PEERS, 1)
            else:
                node_offset = 1 + which - OTHERS * PEERS
        else:
            turn -= rounds * OTHERS * RANKS_PER_NODE
            if turn < rounds * PEERS:
                rank_offset = 1 + turn % max(PEERS, 1)
                tile = turn // max(PEERS, 1) * ctas + cta
            else:
                turn -= rounds * PEERS
                tile = tl.where(turn < rounds, turn * ctas + cta, last + cta - left * (WORLD_SIZE - 1))
    return node_offset, rank_offset, tile
