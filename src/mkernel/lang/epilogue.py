"""The end of a sum over ranks: bias, residual, and the tile's way into the result."""

import triton
import triton.language as tl

from mkernel.lang.flat_gemm import masked_block, store_tile


@triton.jit
def halves(tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The left and the right half of a tile's columns. What is stored or read by rows goes through
    shared memory; half a tile at a time leaves it to the operands."""
    return tile.reshape(TILE_M, 2, TILE_N // 2).permute(0, 2, 1).split()


@triton.jit
def add_to_tile(
    tile, bias, residual, row, column, rows, n, residual_row_stride, residual_column_stride,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of TILE_M x COLUMNS from (row, column), plus the bias [n], plus the residual [rows, n]."""
    if BIAS:
        j = column + tl.arange(0, COLUMNS)
        tile += tl.load(bias + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        if RESIDUAL_DESCRIPTOR:
            more = residual.load([0, row, column]).reshape(TILE_M, COLUMNS)
        else:
            more = masked_block(
                residual, row, column, rows, n, residual_row_stride, residual_column_stride, TILE_M, COLUMNS
            )
        tile += more.to(tl.float32)
    return tile


@triton.jit
def store_result(
    c, bias, residual, tile, row, column, rows, n,
    c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Add bias and residual to a tile, and store it into c [rows, n], one half of its columns after the
    other. Descriptors of c and the residual are [1, rows, n], their blocks half a tile."""
    HALF: tl.constexpr = TILE_N // 2
    left, right = halves(tile, TILE_M, TILE_N)
    left = add_to_tile(
        left, bias, residual, row, column, rows, n, residual_row_stride, residual_column_stride,
        BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, TILE_M, HALF,
    )  # fmt: skip
    store_tile(c, 0, row, column, rows, n, c_row_stride, c_column_stride, left, TILE_M, HALF, C_DESCRIPTOR)
    right = add_to_tile(
        right, bias, residual, row, column + HALF, rows, n, residual_row_stride, residual_column_stride,
        BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, TILE_M, HALF,
    )  # fmt: skip
    store_tile(c, 0, row, column + HALF, rows, n, c_row_stride, c_column_stride, right, TILE_M, HALF, C_DESCRIPTOR)
