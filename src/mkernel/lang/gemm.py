"""The tile GEMM of the GEMM operators.

Operands are read through tensor descriptors (TMA) where the tensor allows it, and else through masked pointers: for a
descriptor a tensor's rows must be contiguous and 16-byte aligned. Any shape is right either way: descriptors fill with
zeros outside the tensor, pointers are masked.

a and c have parts: [parts, rows, columns]. A tile lies in one part, so a tile at the ragged end of a part does not
reach into the next one.
"""

import triton
import triton.language as tl

from mkernel.lang.hints import used_below
from mkernel.lang.matrix import Block


@triton.jit
def masked_block(block, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS elements from (row, column) of a block; zeros outside of rows x columns."""
    i = row + tl.arange(0, ROWS)[:, None]
    j = column + tl.arange(0, COLUMNS)[None, :]
    pointers = block.data + i.to(tl.int64) * block.row_stride + j.to(tl.int64) * block.column_stride
    return tl.load(pointers, mask=(i < rows) & (j < columns), other=0.0)


@triton.jit
def multiply_tile(a, b, tile, k, tiling):
    """fp32 accumulator of a[part, row : row + M, :] @ b[:, column : column + N].

    The accumulator must start as a constant: with a value known only at run time (NaN for a tile whose inputs never
    came) the loop ran 20% slower. Marking the finished tile costs nothing that could be measured if it is done by
    adding; a select over the tile costs as much again.
    """
    accumulator = tl.zeros((tiling.M, tiling.N), tl.float32)
    for step in range(tl.cdiv(k, tiling.K)):
        accumulator = multiply_step(accumulator, a, b, tile, step * tiling.K, k, tiling)
    return accumulator


@triton.jit
def multiply_step(accumulator, a, b, tile, depth, k, tiling):
    """One step of `multiply_tile`: accumulator + the product of K columns of a and rows of b from `depth`. Operators
    whose loop over tiles and steps is one loop call it themselves."""
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
    return tl.dot(x, y, accumulator, input_precision=tiling.PRECISION)


@triton.jit
def store_tile(c, tile, values):
    """Store the values of a tile; what sticks out of its part is dropped."""
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
