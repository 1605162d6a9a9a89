"""A tile of the grouped GEMM: rows of one expert times the matrix of that expert.

The rows of all experts are contiguous in the rank's own memory, grouped by expert, so they are always read through a
descriptor. A tile at the end of an expert also reads rows of the next expert; their products are not stored. Matrices
are [experts, k, n], or a transposed view of [experts, n, k].

Stores must end where the expert ends. A descriptor clips at the end of a dimension, but where an expert ends is unknown
before the launch. So the result has tile_m extra rows before its first one, and its descriptor is [ends, tile_m, n],
with a stride of one row in both of the first two dimensions. Index [end, tile_m - rows] is then the first of the `rows`
rows before `end`, and the second dimension ends exactly where these rows end.
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
from mkernel.lang.scaling import multiply_scaled_step, quantize_tile, scale_tile
from mkernel.lang.signals import wait_again
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.moe.kinds import PLACED
from mkernel.ops.moe.routing import ENTRY
from mkernel.ops.moe.schedule import tile_of
from mkernel.ops.moe.sizes import row_stride_of
from mkernel.runtime.gpus import Target
from mkernel.runtime.group import Group
from mkernel.runtime.operands import BYTES, constants, describable, descriptor, layout

GELU, GELU_CUBE = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)  # sqrt(2 / pi), and of the cubic term
ROWS_BEFORE = 64  # extra rows before the first, of rows that a weight gradient is computed from (weight_grad.py)


class WeightStrides(NamedTuple):
    """How a kernel reads the matrices of the experts. USES_TMA: through a descriptor (if TRANSPOSED, a descriptor of
    the [n, k] matrices that they are views of); otherwise through a pointer, with these strides."""

    expert: Any
    row: Any
    column: Any
    USES_TMA: Any
    TRANSPOSED: Any


class Weights(NamedTuple):
    """The matrices of the experts. data: a descriptor or a pointer, see `WeightStrides`.

    Triton passes descriptors to a kernel only as separate parameters, not inside structures. So the kernel's entry
    builds this structure, and the others that hold descriptors.
    """

    data: Any
    strides: Any


class WeightLayout(NamedTuple):
    """How the host lets kernels read matrices [experts, k, n]. uses_tma: through a descriptor. transposed: the
    descriptor is of the [experts, n, k] tensor that they are a view of."""

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
        """The layout for matrices whose two halves of columns are read separately. A block of a descriptor starts at a
        multiple of 16 bytes, so the second half must too."""
        found = WeightLayout.of(w)
        aligned = w.shape[2] // 2 * w.element_size() % BYTES == 0
        return found if found.transposed or aligned else WeightLayout(False, False)

    def operand(self, w: torch.Tensor, tile_k: int, tile_n: int) -> Any:
        """What the kernel reads the matrices through: a descriptor, or a pointer."""
        if not self.uses_tma:
            return w
        rows = w.transpose(1, 2) if self.transposed else w
        block = [1, tile_n, tile_k] if self.transposed else [1, tile_k, tile_n]
        return descriptor(rows, list(rows.shape), list(rows.stride()), block)

    def strides(self, w: torch.Tensor) -> WeightStrides:
        return WeightStrides(*w.stride(), *constants(self.uses_tma, self.transposed))


def empty_rows(group: Group, rows: int, columns: int, dtype: torch.dtype, tile_m: int) -> torch.Tensor:
    """Memory for a result of the grouped GEMM, [rows, columns]: with aligned rows, and tile_m more rows before the
    first."""
    whole = group.world.memory.empty(group.world_rank, (tile_m + rows, row_stride_of(columns, dtype)), dtype)
    return whole[tile_m:, :columns]


def whole_of(rows: torch.Tensor, tile_m: int) -> torch.Tensor:
    """The memory of a result of `empty_rows`, from the tile_m rows before the first on."""
    stride = rows.stride(0)
    return rows.as_strided((rows.shape[0] + tile_m, stride), (stride, 1), rows.storage_offset() - tile_m * stride)


def rows_descriptor(rows: torch.Tensor, tile_m: int, tile_k: int) -> Any:
    """The descriptor through which the grouped GEMM reads rows."""
    return descriptor(rows, list(rows.shape), [rows.stride(0), 1], [tile_m, tile_k])


def result_descriptor(rows: torch.Tensor, tile_m: int, tile_n: int) -> Any:
    """The descriptor through which `store_rows` stores to a result of `empty_rows`."""
    stride = rows.stride(0)
    whole = whole_of(rows, tile_m)  # including the extra rows before the first
    return descriptor(whole, [rows.shape[0] + 1, tile_m, rows.shape[1]], [stride, stride, 1], [1, tile_m, tile_n])


def short_tile(device: Target, tile_m: int) -> int:
    """The height of tiles for blocks that fill at most half of a tile; tile_m if a shorter tile would save nothing.
    Hopper's tensor cores multiply at least 64 rows."""
    least = 64 if device.type == "cuda" else 8
    return max(tile_m // 2, min(least, tile_m))


class Biases(NamedTuple):
    """The biases of the experts of a layer, if they have any: [experts, 2*inter], gate, then up, and [experts,
    hidden]."""

    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None

    @property
    def layouts(self) -> tuple:
        """What a binary depends on."""
        return tuple(None if bias is None else layout(bias) for bias in self)


def bias_block(bias: torch.Tensor | None) -> Block | None:
    """A bias [experts, columns] as kernels get it."""
    return None if bias is None else Block(bias, bias.stride(0), bias.stride(1))


class Operands(NamedTuple):
    """What the grouped GEMM reads and writes: each row of y is a row of `rows` times the matrix of its expert."""

    rows: Any  # descriptor of the rows of all experts, for tiles of full height
    short_rows: Any  # the same for tiles of SHORT_M rows
    w: Any  # Weights
    y: Any  # descriptor, see `result_descriptor`


class ExpertScales(NamedTuple):
    """The scales of rows in fp8, and of the matrices of the experts: each a `Matrix` without data. Rows have one part,
    matrices one for each expert."""

    rows: Any
    w: Any
    SCALED: Any  # True: a structure ends in a constant of its own


class Gemm(NamedTuple):
    """The grouped GEMM of a call, except for its `Operands`."""

    w_strides: Any  # WeightStrides
    y_rows: Any  # Block: the rows of y, for stores through pointers
    k: Any
    n: Any
    bias: Any  # Block [expert, column], or None
    scales: Any  # ExpertScales; None unless SCALED
    tiling: Any  # Tiling
    SHORT_M: Any  # height of short tiles, see `short_tile`
    SCALED: Any  # rows and matrices are fp8, and have scales


@triton.jit
def _weights_at(w, expert, depth, column, k, n, tiling):
    """The K x N block of an expert's matrix at (depth, column)."""
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
def biased(values, bias, tile, first):
    """A tile of products plus the bias of its expert, elements from `first` on for its columns; as it is without a
    bias."""
    if bias is not None:
        j = tile.column + tl.arange(0, values.shape[1])
        pointers = bias.data + tl.cast(tile.part, tl.int64) * bias.row_stride
        pointers += (first + j).to(tl.int64) * bias.column_stride
        values += tl.load(pointers, mask=j < tile.columns, other=0.0).to(tl.float32)[None, :]
    return values


@triton.jit
def multiply_rows(rows, w, tile, k, tiling):
    """The fp32 accumulator of a tile of rows @ w[expert]; the expert is the part of the tile."""
    accumulator = tl.zeros((tiling.M, tiling.N), tl.float32)
    for step in range(tl.cdiv(k, tiling.K)):
        depth = step * tiling.K
        x = rows.load([tile.row, depth])
        y = _weights_at(w, tile.part, depth, tile.column, k, tile.columns, tiling)
        accumulator = tl.dot(x, y, accumulator, input_precision=tiling.PRECISION)
    return accumulator


@triton.jit
def multiply_scaled_rows(rows, w, tile, k, tiling, scales):
    """`multiply_rows` in fp8, times the scales. Rows of the next expert in the tile have the scale 0."""
    accumulator = tl.zeros((tiling.M, tiling.N), tl.float32)
    for step in range(tl.cdiv(k, tiling.K)):
        depth = step * tiling.K
        x = rows.load([tile.row, depth])
        y = _weights_at(w, tile.part, depth, tile.column, k, tile.columns, tiling)
        accumulator = multiply_scaled_step(accumulator, x, y, scales.rows, scales.w, tile, depth, tiling)
    return scale_tile(accumulator, scales.rows, scales.w, tile)


@triton.jit
def _multiply(rows, w, tile, gemm, tiling):
    """The fp32 accumulator of a tile, times the scales if there are any."""
    if gemm.SCALED:
        accumulator = multiply_scaled_rows(rows, w, tile, gemm.k, tiling, gemm.scales)
    else:
        accumulator = multiply_rows(rows, w, tile, gemm.k, tiling)
    return accumulator


@triton.jit
def multiply_gated(rows, w, tile, k, tiling):
    """(rows @ gate, rows @ up). w[expert] is [k, 2*n]: gate, then up; n: the columns of the tile."""
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
    return gate, up


@triton.jit
def multiply_scaled_gated(rows, w, tile, k, tiling, scales):
    """`multiply_gated` in fp8, times the scales."""
    gate = tl.zeros((tiling.M, tiling.N), tl.float32)
    up = tl.zeros((tiling.M, tiling.N), tl.float32)
    n = tile.columns
    of_up = Tile(tile.part, tile.row, tile.rows, n + tile.column, 2 * n)
    for step in range(tl.cdiv(k, tiling.K)):
        depth = step * tiling.K
        x = rows.load([tile.row, depth])
        y = _weights_at(w, tile.part, depth, tile.column, k, n, tiling)
        gate = multiply_scaled_step(gate, x, y, scales.rows, scales.w, tile, depth, tiling)
        z = _weights_at(w, tile.part, depth, n + tile.column, k, 2 * n, tiling)
        up = multiply_scaled_step(up, x, z, scales.rows, scales.w, of_up, depth, tiling)
    return scale_tile(gate, scales.rows, scales.w, tile), scale_tile(up, scales.rows, scales.w, of_up)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """The inner activations of a gated FFN: activation(gate) * up."""
    if ACTIVATION == "silu":
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        # the approximation with tanh: z * (1 + tanh(u)) / 2 is z * sigmoid(2 * u)
        y = gate / (1.0 + tl.exp(-2.0 * GELU * gate * (1.0 + GELU_CUBE * gate * gate))) * up
    elif ACTIVATION == "relu":
        y = tl.maximum(gate, 0.0) * up
    elif ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0)
        y = positive * positive * up
    else:
        tl.static_assert(ACTIVATION == "none")
        y = gate * up
    return y


@triton.jit
def slope_of(gate, ACTIVATION: tl.constexpr):
    """(activation(gate), its derivative)."""
    if ACTIVATION == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        value = gate * sigmoid
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))  # not 1 + gate - value, which loses digits of large gates
    elif ACTIVATION == "gelu":
        square = GELU_CUBE * gate * gate
        sigmoid = 1.0 / (1.0 + tl.exp(-2.0 * GELU * gate * (1.0 + square)))
        value = gate * sigmoid
        slope = sigmoid + 2.0 * GELU * value * (1.0 - sigmoid) * (1.0 + 3.0 * square)
    elif ACTIVATION == "relu":
        value = tl.maximum(gate, 0.0)
        slope = tl.where(gate > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        slope = 2.0 * tl.maximum(gate, 0.0)
        value = 0.25 * slope * slope
    else:
        tl.static_assert(ACTIVATION == "none")
        value = gate
        slope = tl.full(gate.shape, 1.0, tl.float32)
    return value, slope


@triton.jit
def store_rows(c, tile, values):
    """Store the rows of a tile that belong to its expert. c: see `result_descriptor`."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    stored = values.to(c.dtype).reshape(1, ROWS, COLUMNS)
    c.store([tile.rows, ROWS - (tile.rows - tile.row), tile.column], stored)


@triton.jit
def store_rows_through_pointers(c, tile, values):
    """Like `store_rows`, but through pointers, for kernels without shared memory to spare for a TMA store."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    i = tl.arange(0, ROWS)[:, None]
    j = tile.column + tl.arange(0, COLUMNS)[None, :]
    pointers = c.data + (tile.row + i).to(tl.int64) * c.row_stride + j
    tl.store(pointers, values.to(c.data.dtype.element_ty), mask=(i < tile.rows - tile.row) & (j < tile.columns))


@triton.jit
def store_quantized_rows(c, scales, tile, values):
    """Quantize the rows of a tile, whose columns share a scale, and store them, and the scales."""
    narrow, scale = quantize_tile(values, c.data.dtype.element_ty)
    store_rows_through_pointers(c, tile, narrow)
    i = tl.arange(0, values.shape[0])
    place = (tile.row + i).to(tl.int64) * scales.row_stride + tile.column // values.shape[1]
    tl.store(scales.data + place, scale, mask=i < tile.rows - tile.row)


@triton.jit
def wait_placed(context, counter, rows, block):
    """Wait until `rows` rows of a block are in place; false if the group gave up. counter: that of the block."""
    return wait_again(context, counter, rows, COMPUTE, PLACED, -1, block)


@triton.jit
def _is_tall(rows, M: tl.constexpr, SHORT_M: tl.constexpr):
    """Whether this many rows need a tile of the full height."""
    return rows > (SHORT_M if SHORT_M < M else 0)


@triton.jit
def multiply_block(context, operands, gemm, tables, tile):
    """Compute a tile once the rows of its block are in place; NaN if the group gave up. The tile has SHORT_M rows if
    that is enough, as it can be for the last block of an expert."""
    M: tl.constexpr = gemm.tiling.M
    SHORT_M: tl.constexpr = gemm.SHORT_M
    index, column_block = tile_of(tables.schedule, tile, tl.cdiv(gemm.n, gemm.tiling.N))
    entry = tables.schedule + index * ENTRY
    expert = tl.load(entry)
    row = tl.load(entry + 1)
    rows = tl.load(entry + 2)
    block = tl.load(entry + 3)
    tile_at = Tile(expert, row, row + rows, column_block * gemm.tiling.N, gemm.n)
    placed = wait_placed(context, tables.placed + block, rows, block)
    acquire_for_descriptors()
    used_below(operands.rows, row + rows)
    since = trace_time(context)
    if _is_tall(rows, M, SHORT_M):
        accumulator = _multiply(operands.rows, operands.w, tile_at, gemm, gemm.tiling)
        accumulator = biased(accumulator, gemm.bias, tile_at, 0)
        accumulator += tl.where(placed, 0.0, float("nan"))
        store_rows(operands.y, tile_at, accumulator)
    elif SHORT_M < M:
        used_below(operands.short_rows, row + rows)
        short = _multiply(
            operands.short_rows, operands.w, tile_at, gemm,
            Tiling(SHORT_M, gemm.tiling.N, gemm.tiling.K, gemm.tiling.GROUP, gemm.tiling.PRECISION),
        )  # fmt: skip
        short = biased(short, gemm.bias, tile_at, 0)
        short += tl.where(placed, 0.0, float("nan"))
        # storing through a descriptor would need more shared memory
        store_rows_through_pointers(gemm.y_rows, tile_at, short)
    trace(context, TILES, TILE, -1, tile, since)
