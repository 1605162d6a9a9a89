"""The tile GEMM of the GEMM operators.

Operands are read through tensor descriptors (TMA) if their rows are contiguous and 16-byte aligned, else through masked
pointers. Both handle any shape: descriptors return zeros outside the tensor, pointers are masked.

a and c have parts: [parts, rows, columns]. A tile lies in one part, so a tile at the ragged end of a part does not
reach into the next one.
"""

import triton
import triton.language as tl

from mkernel.lang.hints import used_below
from mkernel.lang.matrix import Block
from mkernel.lang.scaling import multiply_scaled_step, scale_tile


@triton.jit
def masked_block(block, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load ROWS x COLUMNS elements from (row, column) of a `Block`; zeros outside rows x columns."""
    i = row + tl.arange(0, ROWS)[:, None]
    j = column + tl.arange(0, COLUMNS)[None, :]
    pointers = block.data + i.to(tl.int64) * block.row_stride + j.to(tl.int64) * block.column_stride
    return tl.load(pointers, mask=(i < rows) & (j < columns), other=0.0)


@triton.jit
def multiply_tile(a, b, tile, k, tiling):
    """The product of a tile in fp32: a[part, row : row + M, :] @ b[:, column : column + N].

    The accumulator must start from a constant: with a run-time value (NaN for a tile whose inputs never arrived) the
    loop ran 20% slower. Adding the NaN to the finished tile costs nothing measurable; a select over the tile costs as
    much as the run-time start.
    """
    accumulator = tl.zeros((tiling.M, tiling.N), tl.float32)
    for step in range(tl.cdiv(k, tiling.K)):
        accumulator = multiply_step(accumulator, a, b, tile, step * tiling.K, k, tiling)
    return scale_tile(accumulator, a, b, tile)


@triton.jit
def multiply_step(accumulator, a, b, tile, depth, k, tiling):
    """One step of `multiply_tile`: the accumulator plus the product of K columns of a and K rows of b, from `depth` on.
    Operators that run tiles and steps in a single loop call it directly, and `scale_tile` after the last step."""
    if a.strides.USES_TMA:
        used_below(a.data, tile.rows)
        x = a.data.load([tile.part, tile.row, depth]).reshape(tiling.M, tiling.K)
    else:
        start = a.data + tl.cast(tile.part, tl.int64) * a.strides.part
        block = Block(start, a.strides.row, a.strides.column)
        x = masked_block(block, tile.row, depth, tile.rows, k, tiling.M, tiling.K)
    if b.strides.USES_TMA:
        if b.strides.TRANSPOSED:
            y = b.data.load([tile.column, depth]).T
        else:
            y = b.data.load([depth, tile.column])
    else:
        block = Block(b.data, b.strides.row, b.strides.column)
        y = masked_block(block, depth, tile.column, k, tile.columns, tiling.K, tiling.N)
    if a.strides.SCALED:
        accumulator = multiply_scaled_step(accumulator, x, y, a, b, tile, depth, tiling)
    else:
        accumulator = tl.dot(x, y, accumulator, input_precision=tiling.PRECISION)
    return accumulator


@triton.jit
def store_tile(c, tile, values):
    """Store a tile, converted to the type of c. Elements outside its part are dropped. A store through a descriptor is
    not in memory yet when this returns: see `complete_descriptor_stores`."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    if c.strides.USES_TMA:
        c.data.store([tile.part, tile.row, tile.column], values.to(c.data.dtype).reshape(1, ROWS, COLUMNS))
    else:
        i = tile.row + tl.arange(0, ROWS)[:, None]
        j = tile.column + tl.arange(0, COLUMNS)[None, :]
        start = c.data + tl.cast(tile.part, tl.int64) * c.strides.part
        tl.store(
            start + i.to(tl.int64) * c.strides.row + j.to(tl.int64) * c.strides.column,
            values.to(c.data.dtype.element_ty),
            mask=(i < tile.rows) & (j < tile.columns),
        )
