"""Which tiles a CTA takes, in which order, and who owns them.

CTA c computes tiles c, c + CTAs, c + 2 * CTAs, ...: its rounds 0, 1, 2, ... As many rounds as the node has ranks are a
block, in which each rank owns one tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import rank_of
from mkernel.lang.matrix import Tile
from mkernel.ops.reduce.operands import tile_corner


class Sequence(NamedTuple):
    """The tiles that a CTA takes: as many as it has rounds."""

    length: Any


class Taken(NamedTuple):
    """The tile that a CTA is at: the place in its sequence, the round, the local rank that owns the tile, its number,
    and where it begins."""

    place: Any
    round: Any
    owner: Any
    tile: Any
    row: Any
    column: Any


@triton.jit
def count_rounds(tiles):
    """How many tiles this CTA has."""
    return tl.cdiv(tl.maximum(tiles - tl.program_id(0), 0), tl.num_programs(0))


@triton.jit
def round_at(place, rounds, local, RANKS_PER_NODE: tl.constexpr):
    """(round, owner): which of its tiles this CTA takes at a place of its sequence, and the local rank that
    owns it. In every block each rank owns one tile, which it takes last."""
    cta = tl.program_id(0)
    start = place // RANKS_PER_NODE * RANKS_PER_NODE
    size = tl.maximum(tl.minimum(rounds - start, RANKS_PER_NODE), 1)  # the last block may be shorter
    own = (local + RANKS_PER_NODE - cta % RANKS_PER_NODE) % RANKS_PER_NODE
    within = (own + 1 + place - start) % size
    return start + within, (cta + within) % RANKS_PER_NODE


@triton.jit
def round_of(block, owner, RANKS_PER_NODE: tl.constexpr):
    """The round of a block in which a local rank owns this CTA's tile."""
    return block * RANKS_PER_NODE + (owner + RANKS_PER_NODE - tl.program_id(0) % RANKS_PER_NODE) % RANKS_PER_NODE


@triton.jit
def tile_of(product, round):
    """(tile, row, column): this CTA's tile of a round, and where it begins."""
    tile = round * tl.num_programs(0) + tl.program_id(0)
    row, column = tile_corner(product, tile)
    return tile, row, column


@triton.jit
def slot_number(block):
    """Which of the tiles that a rank owns this CTA's tile of a block is: the last index of slots and signals."""
    return block * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def take(comm, call, sequence, place):
    """The tile at a place of the sequence."""
    local = rank_of(comm.context) % comm.RANKS_PER_NODE
    round, owner = round_at(place, sequence.length, local, comm.RANKS_PER_NODE)
    tile, row, column = tile_of(call.product, round)
    return Taken(place, round, owner, tile, row, column)


@triton.jit
def locate(call, taken):
    """Where a tile lies, in the product as in the result."""
    return Tile(0, taken.row, call.product.rows, taken.column, call.product.n)
