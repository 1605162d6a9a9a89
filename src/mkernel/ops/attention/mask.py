"""Who sees whom: which keys a tile of queries attends to.

Where rows lie. A sequence of world*length positions is cut over the ranks. Contiguous: rank r holds positions r*length
and on. Zigzag: of 2*world equal pieces it holds pieces r and 2*world-1-r, in this order, which gives every rank as much
causal work. In both, a rank's rows are in the order of their positions; everything below rests on that.

Who sees whom. The row at a position sees the keys of one interval of positions: all of them; with a causal mask those
up to its own; in a packed sequence those of its document. Both ends of the interval grow with the row. So of one rank's
keys, a tile of rows sees one range; inside of it lies one range that every row of the tile sees. Key blocks in the
inner range need no mask, the others do, and blocks outside are skipped.

sequences.py computes the same on the host. Nothing here needs a layout, so kernels in Triton and in Gluon call the same
functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Mask(NamedTuple):
    """Where the ranks' rows lie, and which positions they see. PACKED: `spans` holds the (start, end) that each rank
    sees, then the start of every row of this rank, then the end of every row; else it is None."""

    length: Any
    spans: Any
    WORLD_SIZE: Any
    ZIGZAG: Any
    CAUSAL: Any
    PACKED: Any


class Visible(NamedTuple):
    """What a tile of queries sees: its first row the positions low..lowest_end-1, its last row high..highest_end-1."""

    low: Any
    lowest_end: Any
    high: Any
    highest_end: Any


class Blocks(NamedTuple):
    """Key blocks first..end-1 of one rank, which a tile attends to. Every row sees all of full..full_end-1; the others
    must be masked."""

    first: Any
    full: Any
    full_end: Any
    end: Any


@triton.jit
def position_of(mask, rank, index):
    """The position in the whole sequence of row `index` of a rank."""
    if mask.ZIGZAG:
        half = mask.length // 2
        return tl.where(index < half, rank * half + index, (2 * mask.WORLD_SIZE - 2 - rank) * half + index)
    else:
        return rank * mask.length + index


@triton.jit
def keys_below(mask, position, rank):
    """How many of a rank's rows lie at positions below the given one."""
    if mask.ZIGZAG:
        half = mask.length // 2
        first = tl.minimum(tl.maximum(position - rank * half, 0), half)
        return first + tl.minimum(tl.maximum(position - (2 * mask.WORLD_SIZE - 1 - rank) * half, 0), half)
    else:
        return tl.minimum(tl.maximum(position - rank * mask.length, 0), mask.length)


@triton.jit
def seen_by(mask, rank, row):
    """(start, end): this rank's row sees the keys at positions start..end-1."""
    if mask.PACKED:
        bounds = mask.spans + 2 * mask.WORLD_SIZE
        start = tl.load(bounds + row).to(tl.int32)
        end = tl.load(bounds + mask.length + row).to(tl.int32)
        return start, end
    else:
        start = row * 0
        end = start + mask.WORLD_SIZE * mask.length
        if mask.CAUSAL:
            end = position_of(mask, rank, row) + 1
        return start, end


@triton.jit
def seen_by_rank(mask, rank):
    """(start, end) of what the rows of any rank see together."""
    if mask.PACKED:
        return tl.load(mask.spans + 2 * rank).to(tl.int32), tl.load(mask.spans + 2 * rank + 1).to(tl.int32)
    else:
        return seen_by(mask, rank, mask.length - 1 + rank * 0)


@triton.jit
def seen_by_tile(mask, rank, row, ROWS: tl.constexpr):
    """What the tile of ROWS of this rank's rows from `row` on sees."""
    low, lowest_end = seen_by(mask, rank, row)
    high, highest_end = seen_by(mask, rank, tl.minimum(row + ROWS, mask.length) - 1)
    return Visible(low, lowest_end, high, highest_end)


@triton.jit
def key_blocks(mask, visible, source, begin, until, TILE_N: tl.constexpr):
    """`Blocks` of TILE_N of the source's keys begin..until-1 for a tile of rows. `begin` is the start of a block."""
    seen = tl.maximum(keys_below(mask, visible.low, source), begin)
    seen_end = tl.minimum(keys_below(mask, visible.highest_end, source), until)
    everyone = tl.maximum(keys_below(mask, visible.high, source), begin)
    everyone_end = tl.minimum(keys_below(mask, visible.lowest_end, source), until)
    first = seen // TILE_N
    end = tl.where(seen < seen_end, tl.cdiv(seen_end, TILE_N), first)
    full = tl.minimum(tl.maximum(tl.cdiv(everyone, TILE_N), first), end)
    full_end = tl.minimum(tl.maximum(everyone_end // TILE_N, full), end)
    return Blocks(first, full, full_end, end)


@triton.jit
def is_seen(mask, rank, source, key, keys):
    """Does a rank need the source's keys key..key+keys-1? It does if its rows may see any of them."""
    if not mask.CAUSAL and not mask.PACKED:
        return key < mask.length
    start, end = seen_by_rank(mask, rank)
    first = keys_below(mask, start, source)
    behind = keys_below(mask, end, source)
    return (first < behind) & (first < tl.minimum(key + keys, mask.length)) & (behind > key)


@triton.jit
def is_seen_in_node(mask, node, source, key, keys, RANKS_PER_NODE: tl.constexpr):
    """Does any rank of a node need them?"""
    if not mask.CAUSAL and not mask.PACKED:
        return key < mask.length
    seen = key < 0
    for i in range(RANKS_PER_NODE):
        seen |= is_seen(mask, node * RANKS_PER_NODE + i, source, key, keys)
    return seen
