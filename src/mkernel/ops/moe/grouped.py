"""The tile of a grouped GEMM: rows of one expert times that expert's matrix.

Rows of all experts lie one expert behind the other in memory of the rank itself, so they are always read through a
descriptor. A tile at the end of an expert reads into the rows of the next one; what it computes of them is not stored.
Matrices are [experts, k, n], or a view of [experts, n, k].

Stores end with the expert. A descriptor clips at the end of a dimension, and where an expert ends is not known before
the launch; so the result has tile_m rows in front of its first one, and its descriptor is [ends, tile_m, n] with the
strides of the first two dimensions both one row: [end, tile_m - rows] is the first of the `rows` rows before `end`, and
the second dimension ends where they do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.device import acquire_for_descriptors
from mkernel.lang.gemm import masked_block
from mkernel.lang.hints import used_below
from mkernel.lang.matrix import Block, Tile, Tiling
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import wait_again
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.moe.kinds import PLACED
from mkernel.ops.moe.routing import ENTRY
from mkernel.ops.moe.schedule import tile_of
from mkernel.ops.moe.sizes import row_stride_of
from mkernel.runtime.group import Group
from mkernel.runtime.operands import BYTES, constants, describable, descriptor


class WeightStrides(NamedTuple):
    """How the matrices of the experts are read. USES_TMA: through a descriptor, of the [n, k] tensors that the matrices
    are views of if TRANSPOSED; else through a pointer, with these strides."""

    expert: Any
    row: Any
    column: Any
    USES_TMA: Any
    TRANSPOSED: Any


class Weights(NamedTuple):
    """The matrices of the experts. data: a descriptor or a pointer, see `WeightStrides`.

    Triton passes a descriptor to a kernel only as a parameter of its own, not inside of a structure: the kernel's entry
    builds this one, and the others that hold descriptors."""

    data: Any
    strides: Any


class WeightLayout(NamedTuple):
    """How matrices [experts, k, n] are read: through a descriptor or not; transposed: of the [experts, n, k] that they
    are a view of."""

    uses_tma: bool
    transposed: bool

    @staticmethod
    def of(w: torch.Tensor) -> WeightLayout:
        if describable(w):
            return WeightLayout(True, False)
        transposed = describable(w.transpose(1, 2))
        return WeightLayout(transposed, transposed)

    @staticmethod
    def of_halves(w: torch.Tensor) -> WeightLayout:
        """Of matrices of which both halves of the columns are read. A block of a descriptor begins at a multiple of 16
        bytes, and so must the second half."""
        found = WeightLayout.of(w)
        aligned = w.shape[2] // 2 * w.element_size() % BYTES == 0
        return found if found.transposed or aligned else WeightLayout(False, False)

    def operand(self, w: torch.Tensor, tile_k: int, tile_n: int) -> Any:
        """The matrices, as the kernel reads them: a descriptor, or a pointer."""
        if not self.uses_tma:
            return w
        rows = w.transpose(1, 2) if self.transposed else w
        block = [1, tile_n, tile_k] if self.transposed else [1, tile_k, tile_n]
        return descriptor(rows, list(rows.shape), list(rows.stride()), block)

    def strides(self, w: torch.Tensor) -> WeightStrides:
        return WeightStrides(*w.stride(), *constants(self.uses_tma, self.transposed))


def empty_rows(group: Group, rows: int, columns: int, dtype: torch.dtype, tile_m: int) -> torch.Tensor:
    """A result of the grouped GEMM, [rows, columns]: rows are aligned, and tile_m more lie in front of the first."""
    whole = group.world.memory.empty(group.world_rank, (tile_m + rows, row_stride_of(columns, dtype)), dtype)
    return whole[tile_m:, :columns]


def rows_descriptor(rows: torch.Tensor, tile_m: int, tile_k: int) -> Any:
    """The descriptor that the grouped GEMM reads rows through."""
    return descriptor(rows, list(rows.shape), [rows.stride(0), 1], [tile_m, tile_k])


def result_descriptor(rows: torch.Tensor, tile_m: int, tile_n: int) -> Any:
    """The descriptor that `store_rows` stores through, of what `empty_rows` gave."""
    stride = rows.stride(0)
    whole = rows.as_strided((rows.shape[0] + tile_m, stride), (stride, 1), 0)  # with what lies in front
    return descriptor(whole, [rows.shape[0] + 1, tile_m, rows.shape[1]], [stride, stride, 1], [1, tile_m, tile_n])


def short_tile(device: torch.device, tile_m: int) -> int:
    """The height of a tile for a block that fills only half of one: tile_m if nothing would be won. Hopper's tensor
    cores multiply 64 rows at least."""
    least = 64 if device.type == "cuda" else 8
    return max(tile_m // 2, min(least, tile_m))


class Operands(NamedTuple):
    """What the grouped GEMM reads and writes: y = rows @ w of each row's expert."""

    rows: Any  # descriptor of the rows of all experts, for tiles of the full height
    short_rows: Any  # the same for tiles of SHORT_M rows
    w: Any  # Weights
    y: Any  # descriptor, see `result_descriptor`


class Gemm(NamedTuple):
    """The grouped GEMM of a call, but for its `Operands`."""

    w_strides: Any  # WeightStrides
    y_rows: Any  # Block: the rows of y, for stores through pointers
    k: Any
    n: Any
    tiling: Any  # Tiling
    SHORT_M: Any


@triton.jit
def _weights_at(w, expert, depth, column, k, n, tiling):
    """K x N elements of an expert's matrix, from (depth, column) on."""
    if w.strides.USES_TMA:
        if w.strides.TRANSPOSED:
            y = w.data.load([expert, column, depth]).reshape(tiling.N, tiling.K).T
        else:
            y = w.data.load([expert, depth, column]).reshape(tiling.K, tiling.N)
    else:
        matrix = w.data + tl.cast(expert, tl.int64) * w.strides.expert
        block = Block(matrix, w.strides.row, w.strides.column)
        y = masked_block(block, depth, column, k, n, tiling.K, tiling.N)
    return y


@triton.jit
def multiply_rows(rows, w, tile, k, tiling):
    """fp32 accumulator of a tile of rows @ w[expert], the part of the tile."""
    accumulator = tl.zeros((tiling.M, tiling.N), tl.float32)
    for step in range(tl.cdiv(k, tiling.K)):
        depth = step * tiling.K
        x = rows.load([tile.row, depth])
        y = _weights_at(w, tile.part, depth, tile.column, k, tile.columns, tiling)
        accumulator = tl.dot(x, y, accumulator, input_precision=tiling.PRECISION)
    return accumulator


@triton.jit
def multiply_gated(rows, w, tile, k, tiling):
    """SwiGLU: silu(rows @ gate) * (rows @ up), where w[expert] is [k, 2*n]: gate, then up; n: columns of the tile."""
    gate = tl.zeros((tiling.M, tiling.N), tl.float32)
    up = tl.zeros((tiling.M, tiling.N), tl.float32)
    n = tile.columns
    for step in range(tl.cdiv(k, tiling.K)):
        depth = step * tiling.K
        x = rows.load([tile.row, depth])
        y = _weights_at(w, tile.part, depth, tile.column, k, n, tiling)
        z = _weights_at(w, tile.part, depth, n + tile.column, k, 2 * n, tiling)
        gate = tl.dot(x, y, gate, input_precision=tiling.PRECISION)
        up = tl.dot(x, z, up, input_precision=tiling.PRECISION)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_rows(c, tile, values):
    """Store the rows of a tile that belong to its expert; c: see `result_descriptor`."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    stored = values.to(c.dtype).reshape(1, ROWS, COLUMNS)
    c.store([tile.rows, ROWS - (tile.rows - tile.row), tile.column], stored)


@triton.jit
def store_rows_through_pointers(c, tile, values):
    """The same through pointers, for a kernel that has no shared memory left for another tile to be stored from."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    i = tl.arange(0, ROWS)[:, None]
    j = tile.column + tl.arange(0, COLUMNS)[None, :]
    pointers = c.data + (tile.row + i).to(tl.int64) * c.row_stride + j
    tl.store(pointers, values.to(c.data.dtype.element_ty), mask=(i < tile.rows - tile.row) & (j < tile.columns))


@triton.jit
def wait_placed(context, counter, rows, block):
    """Wait until so many rows of a block are in place; false if the group gave up. counter: that of the block."""
    return wait_again(context, counter, rows, COMPUTE, PLACED, -1, block)


@triton.jit
def _is_tall(rows, M: tl.constexpr, SHORT_M: tl.constexpr):
    """Do so many rows need a tile of the full height?"""
    return rows > (SHORT_M if SHORT_M < M else 0)


@triton.jit
def multiply_block(context, operands, gemm, tables, tile):
    """A tile, when the rows of its block have been placed; NaN if they have not. If these are no more than SHORT_M, as
    in the last block of an expert, it is of that height."""
    M: tl.constexpr = gemm.tiling.M
    SHORT_M: tl.constexpr = gemm.SHORT_M
    place, column_block = tile_of(tables.schedule, tile, tl.cdiv(gemm.n, gemm.tiling.N))
    entry = tables.schedule + place * ENTRY
    expert = tl.load(entry)
    row = tl.load(entry + 1)
    rows = tl.load(entry + 2)
    block = tl.load(entry + 3)
    where = Tile(expert, row, row + rows, column_block * gemm.tiling.N, gemm.n)
    here = wait_placed(context, tables.placed + block, rows, block)
    acquire_for_descriptors()
    used_below(operands.rows, row + rows)
    since = trace_time(context)
    if _is_tall(rows, M, SHORT_M):
        accumulator = multiply_rows(operands.rows, operands.w, where, gemm.k, gemm.tiling)
        accumulator += tl.where(here, 0.0, float("nan"))
        store_rows(operands.y, where, accumulator)
    elif SHORT_M < M:
        used_below(operands.short_rows, row + rows)
        short = multiply_rows(
            operands.short_rows, operands.w, where, gemm.k,
            Tiling(SHORT_M, gemm.tiling.N, gemm.tiling.K, gemm.tiling.GROUP, gemm.tiling.PRECISION),
        )  # fmt: skip
        short += tl.where(here, 0.0, float("nan"))
        # a descriptor would take another place in shared memory
        store_rows_through_pointers(gemm.y_rows, where, short)
    trace(context, TILES, TILE, -1, tile, since)
