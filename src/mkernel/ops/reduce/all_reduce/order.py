"""Which tiles a CTA takes, in which order, and who owns them.

CTA c computes tiles c, c + CTAs, c + 2 * CTAs, ... in its rounds 0, 1, 2, ... A block is as many rounds as the node
has ranks; each rank owns one tile of a block. On three or more nodes, one of a tile's owners is its home: see home.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import rank_of
from mkernel.lang.matrix import Tile
from mkernel.ops.reduce.operands import tile_corner

# On fewer nodes, tiles have no home: two nodes exchange their sums, which moves as much, and takes one step less.
FEWEST_WITH_HOMES = tl.constexpr(3)


class Sequence(NamedTuple):
    """The tiles that a CTA takes, one per round."""

    length: Any


class Taken(NamedTuple):
    """The tile that a CTA is working on: its position in the CTA's sequence, its round, the local rank that owns it,
    its number, and its upper left corner."""

    position: Any
    round: Any
    owner: Any
    tile: Any
    row: Any
    column: Any


@triton.jit
def count_rounds(tiles):
    """The number of rounds, and so of tiles, of this CTA."""
    return tl.cdiv(tl.maximum(tiles - tl.program_id(0), 0), tl.num_programs(0))


@triton.jit
def round_at(position, rounds, local, RANKS_PER_NODE: tl.constexpr):
    """(round, owner) at this position of the CTA's sequence: the round whose tile it takes, and the local rank that
    owns that tile. In every block, each rank owns one tile, and takes it last."""
    cta = tl.program_id(0)
    start = position // RANKS_PER_NODE * RANKS_PER_NODE
    size = tl.maximum(tl.minimum(rounds - start, RANKS_PER_NODE), 1)  # the last block may be shorter
    own = (local + RANKS_PER_NODE - cta % RANKS_PER_NODE) % RANKS_PER_NODE
    within = (own + 1 + position - start) % size
    return start + within, (cta + within) % RANKS_PER_NODE


@triton.jit
def round_of(block, owner, RANKS_PER_NODE: tl.constexpr):
    """The round of a block whose tile the local rank `owner` owns."""
    return block * RANKS_PER_NODE + (owner + RANKS_PER_NODE - tl.program_id(0) % RANKS_PER_NODE) % RANKS_PER_NODE


@triton.jit
def tile_of(product, round):
    """(tile, row, column): this CTA's tile of a round, and its upper left corner."""
    tile = round * tl.num_programs(0) + tl.program_id(0)
    row, column = tile_corner(product, tile)
    return tile, row, column


@triton.jit
def slot_number(block):
    """The number of this CTA's tile of a block among the tiles that a rank owns: the last index of slots and
    signals."""
    return block * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def home_of(block, NODES: tl.constexpr):
    """The node that is the home of this CTA's tile of a block. Of as many consecutive blocks as there are nodes, each
    node is the home of one; so it is of CTAs with consecutive program ids."""
    return (block + tl.program_id(0)) % NODES


@triton.jit
def number_at_home(block, NODES: tl.constexpr):
    """`slot_number`, but among the tiles that have the same home."""
    return slot_number(block // NODES)


@triton.jit
def take(comm, call, sequence, position):
    """The tile at a position of the sequence."""
    local = rank_of(comm.context) % comm.RANKS_PER_NODE
    round, owner = round_at(position, sequence.length, local, comm.RANKS_PER_NODE)
    tile, row, column = tile_of(call.product, round)
    return Taken(position, round, owner, tile, row, column)


@triton.jit
def locate(call, taken):
    """Where a tile is, in the product and in the result."""
    return Tile(0, taken.row, call.product.rows, taken.column, call.product.n)
