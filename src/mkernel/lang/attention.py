"""Attention tiles: which keys a tile of queries sees, and the running softmax.

Where rows lie. A sequence of world*length positions is cut over the ranks. Contiguous: rank r holds
positions r*length and on. Zigzag: of 2*world equal pieces it holds pieces r and 2*world-1-r, in this
order, which gives every rank as much causal work. In both, a rank's rows are in the order of their
positions; everything below rests on that.

Who sees whom. The row at a position sees the keys of one interval of positions: all of them; with a
causal mask those up to its own; in a packed sequence those of its document. Both ends of the interval
grow with the row. So of one rank's keys, a tile of rows sees one range; inside of it lies one range
that every row of the tile sees. Key blocks in the inner range need no mask, the others do, and what is
outside is not looked at.

The softmax runs along: `largest` is the largest score of a row so far, in powers of two, `total` the
sum of the weights relative to it, `accumulator` their products with the values. A row that has seen no key
has largest = -inf, total = 0.
"""

import triton
import triton.language as tl

from mkernel.lang.flat_gemm import masked_block


@triton.jit
def position_of(rank, index, length, SIZE: tl.constexpr, ZIGZAG: tl.constexpr):
    """The position in the whole sequence of row `index` of a rank."""
    if ZIGZAG:
        half = length // 2
        return tl.where(index < half, rank * half + index, (2 * SIZE - 2 - rank) * half + index)
    else:
        return rank * length + index


@triton.jit
def keys_below(position, rank, length, SIZE: tl.constexpr, ZIGZAG: tl.constexpr):
    """How many of a rank's rows lie at positions below the given one."""
    if ZIGZAG:
        half = length // 2
        first = tl.minimum(tl.maximum(position - rank * half, 0), half)
        return first + tl.minimum(tl.maximum(position - (2 * SIZE - 1 - rank) * half, 0), half)
    else:
        return tl.minimum(tl.maximum(position - rank * length, 0), length)


@triton.jit
def seen_by(
    bounds, rank, row, length, SIZE: tl.constexpr, ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr
):
    """(start, end): this rank's row sees the keys at positions start..end-1. PACKED: `bounds` holds the
    start of every row, then the end of every row."""
    if PACKED:
        start = tl.load(bounds + row).to(tl.int32)
        end = tl.load(bounds + length + row).to(tl.int32)
        return start, end
    else:
        start = row * 0
        end = start + SIZE * length
        if CAUSAL:
            end = position_of(rank, row, length, SIZE, ZIGZAG) + 1
        return start, end


@triton.jit
def seen_by_rank(
    spans, rank, length, SIZE: tl.constexpr, ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr
):
    """(start, end) of what the rows of any rank see together. PACKED: `spans` holds it for each rank."""
    if PACKED:
        return tl.load(spans + 2 * rank).to(tl.int32), tl.load(spans + 2 * rank + 1).to(tl.int32)
    else:
        return seen_by(spans, rank, length - 1 + rank * 0, length, SIZE, ZIGZAG, CAUSAL, PACKED)


@triton.jit
def key_blocks(
    low, lowest_end, high, highest_end, source, begin, until, length,
    SIZE: tl.constexpr, ZIGZAG: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """(first, full, full_end, end): blocks of TILE_N of the source's keys begin..until-1 that a tile of
    rows looks at; those in full..full_end-1 are seen by every row, the others must be masked.

    The tile's first row sees positions low..lowest_end-1, its last one high..highest_end-1.
    `begin` is the start of a block.
    """
    visible = tl.maximum(keys_below(low, source, length, SIZE, ZIGZAG), begin)
    visible_end = tl.minimum(keys_below(highest_end, source, length, SIZE, ZIGZAG), until)
    everyone = tl.maximum(keys_below(high, source, length, SIZE, ZIGZAG), begin)
    everyone_end = tl.minimum(keys_below(lowest_end, source, length, SIZE, ZIGZAG), until)
    first = visible // TILE_N
    end = tl.where(visible < visible_end, tl.cdiv(visible_end, TILE_N), first)
    full = tl.minimum(tl.maximum(tl.cdiv(everyone, TILE_N), first), end)
    full_end = tl.minimum(tl.maximum(everyone_end // TILE_N, full), end)
    return first, full, full_end, end


@triton.jit
def rows_of(
    tensor, batch, head, row, length, dim, batch_stride, head_stride, row_stride, column_stride,
    ROWS: tl.constexpr, DIM: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """ROWS x DIM elements of a [batch, heads, length, dim] tensor; zeros outside of it."""
    if DESCRIPTOR:
        return tensor.load([batch, head, row, 0]).reshape(ROWS, DIM)
    else:
        start = tensor + tl.cast(batch, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride
        return masked_block(start, row, 0, length, dim, row_stride, column_stride, ROWS, DIM)


@triton.jit
def slot_rows(slots, row, rows, dim, ROWS: tl.constexpr, DIM: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """ROWS x DIM elements from row `row` of the slots, which are `rows` rows of dim elements."""
    if DESCRIPTOR:
        return slots.load([row, 0])
    else:
        return masked_block(slots, row, 0, rows, dim, dim, 1, ROWS, DIM)


@triton.jit
def take_in(scores, total, largest, scale):
    """One block of scores more: (weights, total, largest, fade); what was accumulated must be
    multiplied by `fade`. A row that has seen no key so far keeps largest = -inf."""
    newest = tl.maximum(largest, tl.max(scores, 1) * scale)
    pivot = tl.where(newest == float("-inf"), 0.0, newest)
    weights = tl.exp2(scores * scale - pivot[:, None])
    fade = tl.exp2(largest - pivot)
    return weights, total * fade + tl.sum(weights, 1), newest, fade


@triton.jit
def attend(
    query, accumulator, total, largest, bounds, rank, row, scale,
    key, value, batch, head, key_strides, value_strides, slots_row, slots_rows,
    source, begin, length, dim, first, full, full_end, end,
    OWN: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Attend with this rank's queries from `row` on to key blocks first..end-1 of a source; those in
    full..full_end-1 need no mask. OWN: key and value are the caller's tensors; else both are the slots,
    where the source's panel starts at row `slots_row` with key `begin`: TILE_N keys, then their values,
    then the next.

    One loop that asks for each block whether it must be masked: with two loops, one for masked blocks,
    the kernel for several ranks needed more registers than there are (24 bytes were spilled)."""
    rows = tl.minimum(row + tl.arange(0, TILE_M), length - 1)
    starts, ends = seen_by(bounds, rank, rows, length, SIZE, ZIGZAG, CAUSAL, PACKED)
    # of the source's keys a row sees one range, too: two numbers a row, where positions would be one a key
    lower = keys_below(starts, source, length, SIZE, ZIGZAG)
    upper = keys_below(ends, source, length, SIZE, ZIGZAG)
    for block in range(first, end):
        at = block * TILE_N
        if OWN:
            keys = rows_of(
                key, batch, head, at, length, dim, key_strides[0], key_strides[1], key_strides[2], key_strides[3],
                TILE_N, DIM, DESCRIPTOR,
            )  # fmt: skip
        else:
            place = slots_row + 2 * (at - begin)
            keys = slot_rows(key, place, slots_rows, dim, TILE_N, DIM, DESCRIPTOR)
        scores = tl.dot(query, keys.T, input_precision=PRECISION)
        if (block < full) | (block >= full_end):
            index = at + tl.arange(0, TILE_N)[None, :]
            scores = tl.where(index < upper[:, None], scores, float("-inf"))
            if PACKED:
                scores = tl.where(index >= lower[:, None], scores, float("-inf"))
        weights, total, largest, fade = take_in(scores, total, largest, scale)
        accumulator = accumulator * fade[:, None]
        if OWN:
            values = rows_of(
                value, batch, head, at, length, dim,
                value_strides[0], value_strides[1], value_strides[2], value_strides[3], TILE_N, DIM, DESCRIPTOR,
            )  # fmt: skip
        else:
            values = slot_rows(value, place + TILE_N, slots_rows, dim, TILE_N, DIM, DESCRIPTOR)
        accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision=PRECISION)
    return accumulator, total, largest


@triton.jit
def attention_of(accumulator, total, largest):
    """(result, log-sum-exp) of rows that have seen all their keys; zeros and -inf where there was none."""
    nothing = total == 0.0
    result = accumulator / tl.where(nothing, 1.0, total)[:, None]
    logarithm = (largest + tl.log2(tl.where(nothing, 1.0, total))) * 0.6931471805599453
    return result, tl.where(nothing, float("-inf"), logarithm)
