"""The epilogue of a sum over ranks: add bias and residual, and store the tile in the result."""

import triton
import triton.language as tl

from mkernel.lang.gemm import masked_block, store_tile
from mkernel.lang.matrix import Block, Tile


@triton.jit
def halves(values):
    """The left and the right half of a tile's columns. Row-major loads and stores go through shared memory; half a tile
    at a time leaves enough of it to the operands."""
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    return values.reshape(M, 2, N // 2).permute(0, 2, 1).split()


@triton.jit
def move_right(tile, columns):
    """The tile that begins this many columns further to the right."""
    return Tile(tile.part, tile.row, tile.rows, tile.column + columns, tile.columns)


@triton.jit
def add_to_tile(result, tile, values):
    """Add the bias [n] and the residual [rows, n] to the values of a tile."""
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    if result.BIAS:
        j = tile.column + tl.arange(0, N)
        bias = result.bias + j.to(tl.int64) * result.bias_stride
        values += tl.load(bias, mask=j < tile.columns, other=0.0).to(tl.float32)[None, :]
    if result.RESIDUAL:
        if result.residual.strides.USES_TMA:
            more = result.residual.data.load([0, tile.row, tile.column]).reshape(M, N)
        else:
            block = Block(result.residual.data, result.residual.strides.row, result.residual.strides.column)
            more = masked_block(block, tile.row, tile.column, tile.rows, tile.columns, M, N)
        values += more.to(tl.float32)
    return values


@triton.jit
def store_result(result, tile, values):
    """Add bias and residual to a tile and store it in the result, half of its columns at a time."""
    left, right = halves(values)
    store_tile(result.c, tile, add_to_tile(result, tile, left))
    right_tile = move_right(tile, left.shape[1])
    store_tile(result.c, right_tile, add_to_tile(result, right_tile, right))
