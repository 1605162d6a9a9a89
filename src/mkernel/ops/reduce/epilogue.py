"""The end of a sum over ranks: bias, residual, and the tile's way into the result."""

import triton
import triton.language as tl

from mkernel.lang.gemm import masked_block, store_tile
from mkernel.lang.matrix import Block, Tile


@triton.jit
def halves(values):
    """The left and the right half of a tile's columns. What is stored or read by rows goes through
    shared memory; half a tile at a time leaves it to the operands."""
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    return values.reshape(M, 2, N // 2).permute(0, 2, 1).split()


@triton.jit
def move_right(tile, columns):
    """The tile that begins so many columns further right."""
    return Tile(tile.part, tile.row, tile.rows, tile.column + columns, tile.columns)


@triton.jit
def add_to_tile(result, tile, values):
    """The values of a tile, plus the bias [n], plus the residual [rows, n]."""
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    if result.BIAS:
        j = tile.column + tl.arange(0, N)
        values += tl.load(result.bias + j, mask=j < tile.columns, other=0.0).to(tl.float32)[None, :]
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
    """Add bias and residual to a tile, and store it into the result, one half of its columns after the other."""
    left, right = halves(values)
    store_tile(result.c, tile, add_to_tile(result, tile, left))
    beside = move_right(tile, left.shape[1])
    store_tile(result.c, beside, add_to_tile(result, beside, right))
