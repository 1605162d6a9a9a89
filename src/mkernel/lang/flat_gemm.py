"""The tile GEMM core that every GEMM operator calls.

Operands are read through tensor descriptors (TMA) where the tensor allows it, and else through
masked pointers: for a descriptor a tensor's rows must be contiguous and 16-byte aligned. Any shape
is right either way: descriptors fill with zeros outside the tensor, pointers are masked.

a and c have parts: [parts, rows, columns], a tile lies in one part. So a tile at the ragged end of a
part does not reach into the next one.
"""

import triton
import triton.language as tl

from mkernel.lang.hints import used_below


@triton.jit
def masked_block(
    tensor, row, column, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """ROWS x COLUMNS elements from (row, column); zeros outside of rows x columns."""
    i = row + tl.arange(0, ROWS)[:, None]
    j = column + tl.arange(0, COLUMNS)[None, :]
    pointers = tensor + i.to(tl.int64) * row_stride + j.to(tl.int64) * column_stride
    return tl.load(pointers, mask=(i < rows) & (j < columns), other=0.0)


@triton.jit
def multiply_tile(
    a, part, row, rows, part_stride, row_stride,
    b, column, n, k, b_row_stride, b_column_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr, column_stride=1,
):  # fmt: skip
    """fp32 accumulator of a[part, row : row + TILE_M, :] @ b[:, column : column + TILE_N].

    b is [k, n]; B_TRANSPOSED: its descriptor is one of the [n, k] tensor that b is a view of.
    `column_stride` is that of a, where it is read through pointers.

    The accumulator must start as a constant: with a value known only at run time (NaN for a tile
    whose inputs never came) the loop ran 20% slower. Marking the finished tile costs nothing that
    could be measured, if it is done by adding; a select over the tile costs as much again.
    """
    accumulator = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(tl.cdiv(k, TILE_K)):
        accumulator = multiply_step(
            accumulator, a, part, row, rows, part_stride, row_stride, column_stride,
            b, column, n, step * TILE_K, k, b_row_stride, b_column_stride,
            TILE_M, TILE_N, TILE_K, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, PRECISION,
        )  # fmt: skip
    return accumulator


@triton.jit
def multiply_step(
    accumulator, a, part, row, rows, part_stride, row_stride, column_stride,
    b, column, n, depth, k, b_row_stride, b_column_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of `multiply_tile`: accumulator + the product of TILE_K columns of a and rows of b from
    `depth`. Operators whose loop over tiles and steps is one loop call it themselves."""
    if A_DESCRIPTOR:
        used_below(a, rows)
        x = a.load([part, row, depth]).reshape(TILE_M, TILE_K)
    else:
        x = masked_block(
            a + tl.cast(part, tl.int64) * part_stride, row, depth, rows, k, row_stride, column_stride, TILE_M, TILE_K
        )
    if B_DESCRIPTOR:
        if B_TRANSPOSED:
            y = b.load([column, depth]).T
        else:
            y = b.load([depth, column])
    else:
        y = masked_block(b, depth, column, k, n, b_row_stride, b_column_stride, TILE_K, TILE_N)
    return tl.dot(x, y, accumulator, input_precision=PRECISION)


@triton.jit
def store_tile(
    c, part, row, column, rows, columns, row_stride, column_stride, tile,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Store a tile into part `part` of c, parts being rows x columns one below the other; what
    sticks out of the part is dropped."""
    if DESCRIPTOR:
        c.store([part, row, column], tile.to(c.dtype).reshape(1, TILE_M, TILE_N))
    else:
        i = row + tl.arange(0, TILE_M)[:, None]
        j = column + tl.arange(0, TILE_N)[None, :]
        line = (tl.cast(part, tl.int64) * rows + i) * row_stride
        tl.store(
            c + line + j.to(tl.int64) * column_stride, tile.to(c.dtype.element_ty), mask=(i < rows) & (j < columns)
        )
