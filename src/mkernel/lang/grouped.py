"""The tile of a grouped GEMM: rows of one expert times that expert's matrix.

Rows of all experts lie one expert behind the other in memory of the rank itself, so they are always read
through a descriptor. A tile at the end of an expert reads into the rows of the next one; what it computes
of them is not stored. Matrices are [experts, k, n], or a view of [experts, n, k].

Stores end with the expert. A descriptor clips at the end of a dimension, and where an expert ends is not
known before the launch; so the result has TILE_M rows in front of its first one, and its descriptor is
[ends, TILE_M, n] with the strides of the first two dimensions both one row: [end, TILE_M - rows] is the
first of the `rows` rows before `end`, and the second dimension ends where they do.
"""

import triton
import triton.language as tl

from mkernel.lang.flat_gemm import masked_block


@triton.jit
def multiply_rows(
    rows, row, w, expert, column, n, k, w_expert_stride, w_row_stride, w_column_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    W_DESCRIPTOR: tl.constexpr, W_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 accumulator of rows[row : row + TILE_M] @ w[expert][:, column : column + TILE_N]."""
    accumulator = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(tl.cdiv(k, TILE_K)):
        depth = step * TILE_K
        x = rows.load([row, depth])
        if W_DESCRIPTOR:
            if W_TRANSPOSED:
                y = w.load([expert, column, depth]).reshape(TILE_N, TILE_K).T
            else:
                y = w.load([expert, depth, column]).reshape(TILE_K, TILE_N)
        else:
            matrix = w + tl.cast(expert, tl.int64) * w_expert_stride
            y = masked_block(matrix, depth, column, k, n, w_row_stride, w_column_stride, TILE_K, TILE_N)
        accumulator = tl.dot(x, y, accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def store_rows(c, row, rows, column, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Store the first `rows` rows of a tile from `row` on; c is a descriptor as described above."""
    c.store([row + rows, TILE_M - rows, column], tile.to(c.dtype).reshape(1, TILE_M, TILE_N))


@triton.jit
def store_rows_through_pointers(
    c, row, rows, column, columns, stride, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """The same through pointers, for a kernel that has no shared memory left for another tile to be stored from."""
    i = tl.arange(0, TILE_M)[:, None]
    j = column + tl.arange(0, TILE_N)[None, :]
    pointers = c + (row + i).to(tl.int64) * stride + j
    tl.store(pointers, tile.to(c.dtype.element_ty), mask=(i < rows) & (j < columns))


@triton.jit
def multiply_gated(
    rows, row, w, expert, column, n, k, w_expert_stride, w_row_stride, w_column_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    W_DESCRIPTOR: tl.constexpr, W_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """SwiGLU: silu(rows @ gate) * (rows @ up), where w[expert] is [k, 2*n]: gate, then up."""
    gate = tl.zeros((TILE_M, TILE_N), tl.float32)
    up = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(tl.cdiv(k, TILE_K)):
        depth = step * TILE_K
        x = rows.load([row, depth])
        if W_DESCRIPTOR:
            if W_TRANSPOSED:
                y = w.load([expert, column, depth]).reshape(TILE_N, TILE_K).T
                z = w.load([expert, n + column, depth]).reshape(TILE_N, TILE_K).T
            else:
                y = w.load([expert, depth, column]).reshape(TILE_K, TILE_N)
                z = w.load([expert, depth, n + column]).reshape(TILE_K, TILE_N)
        else:
            matrix = w + tl.cast(expert, tl.int64) * w_expert_stride
            y = masked_block(matrix, depth, column, k, n, w_row_stride, w_column_stride, TILE_K, TILE_N)
            matrix += tl.cast(n, tl.int64) * w_column_stride
            z = masked_block(matrix, depth, column, k, n, w_row_stride, w_column_stride, TILE_K, TILE_N)
        gate = tl.dot(x, y, gate, input_precision=PRECISION)
        up = tl.dot(x, z, up, input_precision=PRECISION)
    return gate / (1.0 + tl.exp(-gate)) * up
