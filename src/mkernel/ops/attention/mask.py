"""Masks: which keys a tile of queries attends to.

Where rows are. A sequence of world*length positions is sharded over the ranks. Contiguous: rank r holds positions
r*length to (r+1)*length-1. Zigzag: the sequence is divided into 2*world pieces, and rank r holds pieces r and
2*world-1-r, in this order, which gives every rank the same amount of causal work. In both layouts, the rows of a rank
are sorted by position. Everything below relies on that.

Different numbers on each rank. Contiguous: any numbers. Zigzag: if the length is not a multiple of 2*world, the first
pieces have one position more. The kernels then read from memory which pieces a rank holds (`Mask.places`), and what
each row sees.

Different numbers of queries and keys. A rank may hold more keys than queries, as with a cache of earlier positions, or
fewer; in the contiguous layout only. The last query of the whole sequence then has the position of the last key, as
with `causal_lower_right` in PyTorch: query i has position i + (all keys - all queries), which may be negative.

What a row sees. The row at a position sees the keys of one interval of positions: all positions; with a causal mask,
those up to its own; in a packed sequence, those of its document; with a window, those near its own. Both ends of the
interval grow with the row. So a tile of rows sees one range of each rank's keys, and inside it is one range that every
row of the tile sees. Key blocks in the inner range need no mask, the other blocks of the range do, and blocks outside
the range are skipped.

sequences.py computes the same on the host. No function here depends on a register layout, so the Triton and the Gluon
kernel call the same ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Mask(NamedTuple):
    """Which positions the ranks hold, and which they see. length: keys of a rank. rows: queries of this rank; None for
    as many as keys. PACKED, of packed sequences and of windows: `spans` holds the (start, end) that each rank sees,
    then the start for every row of this rank, then the end for every row. Otherwise it is None.

    places: None, unless ranks hold different numbers of positions, or pieces of different sizes. Then it holds, for
    each rank, where its first piece starts and how many keys that has, and the same of its second piece; length is that
    of the rank with most keys, own that of this rank, and the sequence is PACKED."""

    length: Any
    spans: Any
    WORLD_SIZE: Any
    ZIGZAG: Any
    CAUSAL: Any
    PACKED: Any
    rows: Any = None
    places: Any = None
    own: Any = None


class Visible(NamedTuple):
    """What a tile of queries sees: its first row positions low..lowest_end-1, its last row high..highest_end-1."""

    low: Any
    lowest_end: Any
    high: Any
    highest_end: Any


class Blocks(NamedTuple):
    """The key blocks first..end-1 of one rank that a tile attends to. Every row sees all keys of blocks
    full..full_end-1; the others must be masked."""

    first: Any
    full: Any
    full_end: Any
    end: Any


@triton.jit
def rows_of(mask):
    """The number of queries of a rank."""
    if mask.rows is None:
        return mask.length
    else:
        return mask.rows


@triton.jit
def keys_of(mask):
    """The number of keys of this rank."""
    if mask.own is None:
        return mask.length
    else:
        return mask.own


@triton.jit
def position_of(mask, rank, index):
    """The position of a rank's row `index` in the whole sequence."""
    if mask.ZIGZAG:
        half = mask.length // 2
        return tl.where(index < half, rank * half + index, (2 * mask.WORLD_SIZE - 2 - rank) * half + index)
    else:
        rows = rows_of(mask)
        return rank * rows + index + mask.WORLD_SIZE * (mask.length - rows)


@triton.jit
def keys_below(mask, position, rank):
    """The number of a rank's keys whose position is below the given one."""
    if mask.places is not None:
        place = mask.places + 4 * rank
        first = tl.maximum(position - tl.load(place).to(tl.int32), 0)
        first = tl.minimum(first, tl.load(place + 1).to(tl.int32))
        second = tl.maximum(position - tl.load(place + 2).to(tl.int32), 0)
        return first + tl.minimum(second, tl.load(place + 3).to(tl.int32))
    elif mask.ZIGZAG:
        half = mask.length // 2
        first = tl.minimum(tl.maximum(position - rank * half, 0), half)
        return first + tl.minimum(tl.maximum(position - (2 * mask.WORLD_SIZE - 1 - rank) * half, 0), half)
    else:
        return tl.minimum(tl.maximum(position - rank * mask.length, 0), mask.length)


@triton.jit
def seen_by(mask, rank, row):
    """(start, end): a row of this rank sees the keys at positions start..end-1."""
    if mask.PACKED:
        bounds = mask.spans + 2 * mask.WORLD_SIZE
        start = tl.load(bounds + row).to(tl.int32)
        end = tl.load(bounds + rows_of(mask) + row).to(tl.int32)
        return start, end
    else:
        start = row * 0
        end = start + mask.WORLD_SIZE * mask.length
        if mask.CAUSAL:
            end = position_of(mask, rank, row) + 1
        return start, end


@triton.jit
def seen_by_rank(mask, rank):
    """(start, end): the rows of a rank, which may be another one, see keys at positions start..end-1 at most."""
    if mask.PACKED:
        return tl.load(mask.spans + 2 * rank).to(tl.int32), tl.load(mask.spans + 2 * rank + 1).to(tl.int32)
    else:
        return seen_by(mask, rank, rows_of(mask) - 1 + rank * 0)


@triton.jit
def seen_by_tile(mask, rank, row, ROWS: tl.constexpr):
    """What a tile sees: ROWS rows of this rank, starting at `row`."""
    low, lowest_end = seen_by(mask, rank, row)
    high, highest_end = seen_by(mask, rank, tl.minimum(row + ROWS, rows_of(mask)) - 1)
    return Visible(low, lowest_end, high, highest_end)


@triton.jit
def key_blocks(mask, visible, source, begin, until, TILE_N: tl.constexpr):
    """The `Blocks` of TILE_N keys that a tile attends to, among the source's keys begin..until-1. `begin` is the start
    of a block."""
    seen = tl.maximum(keys_below(mask, visible.low, source), begin)
    seen_end = tl.minimum(keys_below(mask, visible.highest_end, source), until)
    shared = tl.maximum(keys_below(mask, visible.high, source), begin)
    shared_end = tl.minimum(keys_below(mask, visible.lowest_end, source), until)
    first = seen // TILE_N
    end = tl.where(seen < seen_end, tl.cdiv(seen_end, TILE_N), first)
    full = tl.minimum(tl.maximum(tl.cdiv(shared, TILE_N), first), end)
    full_end = tl.minimum(tl.maximum(shared_end // TILE_N, full), end)
    return Blocks(first, full, full_end, end)


@triton.jit
def is_seen(mask, rank, source, key, keys):
    """Whether a rank needs the source's keys key..key+keys-1: its rows may see at least one of them."""
    if not mask.CAUSAL and not mask.PACKED:
        return key < mask.length
    start, end = seen_by_rank(mask, rank)
    first = keys_below(mask, start, source)
    first_unseen = keys_below(mask, end, source)
    return (first < first_unseen) & (first < tl.minimum(key + keys, mask.length)) & (first_unseen > key)


@triton.jit
def is_seen_in_node(mask, node, source, key, keys, RANKS_PER_NODE: tl.constexpr):
    """Whether any rank of a node needs the source's keys key..key+keys-1."""
    if not mask.CAUSAL and not mask.PACKED:
        return key < mask.length
    seen = key < 0
    for i in range(RANKS_PER_NODE):
        seen |= is_seen(mask, node * RANKS_PER_NODE + i, source, key, keys)
    return seen
