"""Products of fp8 matrices with scales.

An element of an fp8 matrix stands for itself times its scale, a number in fp32. Either all elements of a row of a (of
a column of b) have the same scale, and the finished sums are multiplied by both; or each BLOCK of k has scales of its
own, and so the sum over each block is multiplied by them before it is added to the others.

Hopper's tensor cores add products of fp8 numbers with fewer bits than fp32 has. Therefore their sums are added up in
fp32 outside of the tensor cores, once every BLOCK of k or more often, unless a call asks for fast accumulation. That
takes the registers for a second tile of sums.

A kernel can also quantize rows on their way (`quantize_rows`), to the bits that PyTorch computes in `mkernel.quantize`:
it multiplies by reciprocals that are rounded right, and takes absolute values as integers, so that the largest of NaN
and others is NaN.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)  # elements of k with a scale of their own, and rows of b [n, k] that share it
SMALLEST_SCALE = tl.constexpr(2.0**-126)  # of quantized rows: the smallest normal number, as others may be flushed to 0


class Scales(NamedTuple):
    """The scales of a matrix: a [parts, rows, k], or b [k, columns], of which each part of a may have its own.

    Attributes:
        data: pointer to the scales, in fp32.
        part: scales from one part to the next; a constant 0 if all parts have the same.
        row: from the scale of a row of a, or of a column of b, to that of the next; or of the next GROUP of them. 0 if
            they all have the same.
        block: from a scale to that of the next BLOCK of k.
        GROUP: rows of a, or columns of b, that share a scale; a constant.
        BLOCKWISE: each BLOCK of k has scales of its own; a constant, the same for a and b.
        FAST: sums stay in the tensor cores; a constant, the same for a and b.
    """

    data: Any
    part: Any
    row: Any
    block: Any
    GROUP: Any
    BLOCKWISE: Any
    FAST: Any


@triton.jit
def load_scales(scales, part, first, end, block, SIZE: tl.constexpr):
    """The scales of SIZE rows of a, or columns of b, from `first` on, in a block of k; zeros from `end` on."""
    i = first + tl.arange(0, SIZE)
    offset = (i // scales.GROUP).to(tl.int64) * scales.row + tl.cast(part, tl.int64) * scales.part
    return tl.load(scales.data + offset + tl.cast(block, tl.int64) * scales.block, mask=i < end, other=0.0)


@triton.jit
def multiply_scaled_step(accumulator, x, y, a, b, tile, depth, tiling):
    """The accumulator plus x @ y, which are blocks of a and b from `depth` of k on. With scales for each block of k,
    all K columns of x must lie in the same one."""
    if a.strides.scales.BLOCKWISE:
        block = depth // BLOCK
        factor = load_scales(a.strides.scales, tile.part, tile.row, tile.rows, block, tiling.M)
        product = tl.dot(x, y)
        if b.strides.scales.GROUP % tiling.N == 0:  # all columns of the tile have the same scale
            group = (tile.column // b.strides.scales.GROUP).to(tl.int64)
            offset = group * b.strides.scales.row + tl.cast(block, tl.int64) * b.strides.scales.block
            offset += tl.cast(tile.part, tl.int64) * b.strides.scales.part
            factor *= tl.load(b.strides.scales.data + offset, mask=tile.column < tile.columns, other=0.0)
            accumulator += product * factor[:, None]
        else:
            others = load_scales(b.strides.scales, tile.part, tile.column, tile.columns, block, tiling.N)
            accumulator += product * (factor[:, None] * others[None, :])
    elif a.strides.scales.FAST:
        accumulator = tl.dot(x, y, accumulator)
    elif tiling.K <= BLOCK:
        # not max_num_imprecise_acc=K, which is the same: ptxas then serialized the products of one kernel
        accumulator += tl.dot(x, y)
    else:
        accumulator = tl.dot(x, y, accumulator, max_num_imprecise_acc=BLOCK)
    return accumulator


@triton.jit
def scale_tile(total, a, b, tile):
    """The finished sums of a tile, times the scales that are the same for all of k. One after the other: their product
    may be too small for fp32, where that of all three is not. (Those of blocks are multiplied first, which saves a
    product for each element in the loop; theirs must not be.)"""
    if a.strides.SCALED:
        if not a.strides.scales.BLOCKWISE:
            of_rows = load_scales(a.strides.scales, tile.part, tile.row, tile.rows, 0, total.shape[0])
            of_columns = load_scales(b.strides.scales, tile.part, tile.column, tile.columns, 0, total.shape[1])
            total = total * of_rows[:, None] * of_columns[None, :]
    return total


# -- quantizing


@triton.jit
def _bits_of_size(x):
    """The absolute values of numbers in fp32, as integers that are ordered alike; NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of_largest(bits, MOST: tl.constexpr):
    """The scale of elements of which the largest has these bits. MOST: the largest number of fp8."""
    INVERSE: tl.constexpr = 1.0 / MOST
    scale = bits.to(tl.float32, bitcast=True) * INVERSE
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)  # NaN stays
    return tl.where(bits == 0, 1.0, scale)


@triton.jit
def quantize_tile(x, DTYPE: tl.constexpr):
    """A tile in fp32 with one scale for each row: (its elements in fp8, the scales); to the bits of
    `mkernel.quantize`."""
    MOST: tl.constexpr = 448.0 if DTYPE == tl.float8e4nv else 57344.0
    scale = _scale_of_largest(tl.max(_bits_of_size(x), 1), MOST)
    return (x * tl.math.div_rn(1.0, scale)[:, None]).to(DTYPE), scale


@triton.jit
def quantize_rows(source, target, scales, rows, columns, SHARED: tl.constexpr):
    """Quantize `rows` x `columns` elements of the block `source` to the block `target`, whose columns are contiguous,
    and store the scales of each row behind one another in `scales`; to the bits of `mkernel.quantize`.

    SHARED: all elements of a row share a scale, so each row is read twice. Otherwise each BLOCK of them has one.
    """
    DTYPE: tl.constexpr = target.data.dtype.element_ty
    MOST: tl.constexpr = 448.0 if DTYPE == tl.float8e4nv else 57344.0
    ROWS: tl.constexpr = 8 if SHARED else 64
    COLUMNS: tl.constexpr = 1024 if SHARED else BLOCK
    for row in range(0, rows, ROWS):
        i = row + tl.arange(0, ROWS)
        start = source.data + i.to(tl.int64)[:, None] * source.row_stride
        end = target.data + i.to(tl.int64)[:, None] * target.row_stride
        its_scales = scales.data + i.to(tl.int64) * scales.row_stride
        scale = tl.full([ROWS], 1.0, tl.float32)
        if SHARED:
            largest = tl.zeros([ROWS, COLUMNS], tl.int32)
            for column in range(0, columns, COLUMNS):
                j = column + tl.arange(0, COLUMNS)[None, :]
                inside = (i[:, None] < rows) & (j < columns)
                x = tl.load(start + j.to(tl.int64) * source.column_stride, mask=inside, other=0.0)
                largest = tl.maximum(largest, _bits_of_size(x.to(tl.float32)))
            scale = _scale_of_largest(tl.max(largest, 1), MOST)
            tl.store(its_scales, scale, mask=i < rows)
        for column in range(0, columns, COLUMNS):
            j = column + tl.arange(0, COLUMNS)[None, :]
            inside = (i[:, None] < rows) & (j < columns)
            x = tl.load(start + j.to(tl.int64) * source.column_stride, mask=inside, other=0.0).to(tl.float32)
            if not SHARED:
                scale = _scale_of_largest(tl.max(_bits_of_size(x), 1), MOST)
                tl.store(its_scales + column // BLOCK, scale, mask=i < rows)
            narrow = x * tl.math.div_rn(1.0, scale)[:, None]
            tl.store(end + j, narrow.to(DTYPE), mask=inside)
