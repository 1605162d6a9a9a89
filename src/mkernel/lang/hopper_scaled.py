"""The tile GEMM of fp8 with scales of the kernels for Hopper, in Gluon.

It is that of hopper.py, with steps of 128 of k, which are as many bytes as 64 of bf16. A warpgroup's part of a tile is
two halves of ROWS x COLUMNS: one below the other if the tile is 256 x 128 (BY_ROWS), or side by side if it is
128 x 256.

Hopper's tensor cores add products of fp8 with few bits. So a half starts each step from zero, and its sums are added
to the total in fp32, multiplied by the scales of the step's block if blocks have scales. With one half after the other,
the sums of only one step are in registers beside the totals. While a warpgroup adds, the other one multiplies. With
fast accumulation the totals stay in the tensor cores. Scales of rows and columns are multiplied once, at the end.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from mkernel.lang.hopper import ROWS, STAGES, TILE_N, accumulator_layout
from mkernel.lang.scaling import BLOCK

COLUMNS = tl.constexpr(128)  # of a half


class Factors(NamedTuple):
    """What the sums of a warpgroup's part of a tile are multiplied by.

    Attributes:
        data: pointer to the scales of the tile's rows.
        row: from the scale of a row to that of the next.
        block: from a scale to that of the next block of k.
        rows: how many rows there are from the tile's first one on. The scale of the last one stands for rows behind it.
        b: `Scales` of b.
        column: the tile's first column.
        columns: of b.
        k: of both operands.
    """

    data: Any
    row: Any
    block: Any
    rows: Any
    b: Any
    column: Any
    columns: Any
    k: Any


@gluon.constexpr_function
def half_layout():
    """The register layout of a half."""
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])


@gluon.jit
def _of_rows(factors, block, first):
    """The scales of the ROWS rows from `first` on, in a block of k."""
    i = tl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, half_layout())), factors.rows - 1)
    return gl.load(factors.data + i.to(gl.int64) * factors.row + block * factors.block)


@gluon.jit
def _of_columns(factors, first):
    """The scales of COLUMNS columns from `first` on; zeros behind the last one."""
    j = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, half_layout()))
    return gl.load(factors.b.data + j.to(gl.int64) * factors.b.row, mask=j < factors.columns, other=0.0)


@gluon.jit
def _scales_of_step(factors, block, WARPGROUP: gl.constexpr, BY_ROWS: gl.constexpr):
    """(the scales of the two halves' rows, times that of their columns) in a block of k. Behind the last block, those
    of the last one."""
    block = tl.minimum(block, tl.cdiv(factors.k, BLOCK) - 1)
    of_b = factors.b.data + block.to(tl.int64) * factors.b.block
    of_columns = gl.load(of_b + (factors.column // BLOCK).to(tl.int64) * factors.b.row)
    if BY_ROWS:
        first = _of_rows(factors, block, WARPGROUP * 2 * ROWS) * of_columns
        second = _of_rows(factors, block, WARPGROUP * 2 * ROWS + ROWS) * of_columns
    else:
        # the right half may be behind the last column
        right = tl.minimum(factors.column + COLUMNS, factors.columns - 1) // BLOCK
        of_rows = _of_rows(factors, block, WARPGROUP * ROWS)
        first = of_rows * of_columns
        second = of_rows * gl.load(of_b + right.to(tl.int64) * factors.b.row)
    return first, second


@gluon.jit
def _operands(stages, stage, HALF: gl.constexpr, WARPGROUP: gl.constexpr, BY_ROWS: gl.constexpr):
    """The operands of a half of a warpgroup's part, in a stage. b is there as [n, k]."""
    if BY_ROWS:
        x = stages.a.index(stage).slice((WARPGROUP * 2 + HALF) * ROWS, ROWS)
        y = stages.b.index(stage).permute((1, 0))
    else:
        x = stages.a.index(stage).slice(WARPGROUP * ROWS, ROWS)
        y = stages.b.index(stage).slice(HALF * COLUMNS, COLUMNS).permute((1, 0))
    return x, y


@gluon.jit
def _multiply_promoted(
    stages, step, factors, WARPGROUP: gl.constexpr, BY_ROWS: gl.constexpr, BLOCKWISE: gl.constexpr
):  # fmt: skip
    """(the sums of the two halves of a warpgroup's part of a tile, the number of steps so far): each step is added to
    them in fp32. `step` continues from tile to tile."""
    first = gl.zeros([ROWS, COLUMNS], gl.float32, half_layout())
    second = gl.zeros([ROWS, COLUMNS], gl.float32, half_layout())
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, half_layout())
    if BLOCKWISE:
        # once the first step of a tile is here, so are all scales of its rows; loaded a step ahead
        mbarrier.wait(stages.filled.index(step % STAGES), (step // STAGES) & 1)
        of_first, of_second = _scales_of_step(factors, step * 0, WARPGROUP, BY_ROWS)
    for block in range(0, tl.cdiv(factors.k, BLOCK)):
        stage = step % STAGES
        mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
        x, y = _operands(stages, stage, 0, WARPGROUP, BY_ROWS)
        part = warpgroup_mma_wait(0, deps=[warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)])
        if BLOCKWISE:
            part = part * gl.expand_dims(of_first, 1)
        first += part
        x, y = _operands(stages, stage, 1, WARPGROUP, BY_ROWS)
        part = warpgroup_mma_wait(0, deps=[warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)])
        mbarrier.arrive(stages.freed.index(stage), count=1)
        if BLOCKWISE:
            part = part * gl.expand_dims(of_second, 1)
            of_first, of_second = _scales_of_step(factors, block + 1, WARPGROUP, BY_ROWS)
        second += part
        step += 1
    return first, second, step


@gluon.jit
def _multiply_fast(stages, step, k, WARPGROUP: gl.constexpr, BY_ROWS: gl.constexpr):
    """Like `_multiply_promoted`, but the sums stay in the tensor cores."""
    first = warpgroup_mma_init(gl.zeros([ROWS, COLUMNS], gl.float32, half_layout()))
    second = warpgroup_mma_init(gl.zeros([ROWS, COLUMNS], gl.float32, half_layout()))
    for depth in range(0, k, BLOCK):
        stage = step % STAGES
        mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
        x, y = _operands(stages, stage, 0, WARPGROUP, BY_ROWS)
        first = warpgroup_mma(x, y, first, use_acc=depth > 0, is_async=True)
        x, y = _operands(stages, stage, 1, WARPGROUP, BY_ROWS)
        second = warpgroup_mma(x, y, second, use_acc=depth > 0, is_async=True)
        first, second = warpgroup_mma_wait(2, deps=[first, second])
        first = warpgroup_mma_init(first)
        second = warpgroup_mma_init(second)
        if depth > 0:
            # the step before this one is done, so its stage is free
            mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
    return first, second, step


@gluon.jit
def _scale_halves(first, second, factors, WARPGROUP: gl.constexpr, BY_ROWS: gl.constexpr):
    """The finished sums of both halves, times the scales that are the same for all of k: one after the other, see
    `scale_tile`."""
    of_columns = _of_columns(factors, factors.column)
    if BY_ROWS:
        of_first = _of_rows(factors, 0, WARPGROUP * 2 * ROWS)
        of_second = _of_rows(factors, 0, WARPGROUP * 2 * ROWS + ROWS)
        of_right = of_columns
    else:
        of_first = _of_rows(factors, 0, WARPGROUP * ROWS)
        of_second = of_first
        of_right = _of_columns(factors, factors.column + COLUMNS)
    first = first * gl.expand_dims(of_first, 1) * gl.expand_dims(of_columns, 0)
    second = second * gl.expand_dims(of_second, 1) * gl.expand_dims(of_right, 0)
    return first, second


@gluon.jit
def multiply_halves(
    stages, step, factors, WARPGROUP: gl.constexpr, BY_ROWS: gl.constexpr, BLOCKWISE: gl.constexpr, FAST: gl.constexpr
):  # fmt: skip
    """(the product of the two halves of a warpgroup's part of a tile in fp32, the number of steps so far)."""
    if FAST:
        first, second, step = _multiply_fast(stages, step, factors.k, WARPGROUP, BY_ROWS)
    else:
        first, second, step = _multiply_promoted(stages, step, factors, WARPGROUP, BY_ROWS, BLOCKWISE)
    if not BLOCKWISE:
        first, second = _scale_halves(first, second, factors, WARPGROUP, BY_ROWS)
    return first, second, step


@gluon.jit
def join_halves(left, right):
    """Two halves side by side as the rows that `store_rows` of hopper.py stores. This only renames registers."""
    joined = gl.join(left, right).permute(0, 2, 1).reshape([ROWS, TILE_N])
    return gl.convert_layout(joined, accumulator_layout())


@gluon.jit
def split_halves(total):
    """The inverse of `join_halves`."""
    left, right = total.reshape([ROWS, 2, COLUMNS]).permute(0, 2, 1).split()
    return gl.convert_layout(left, half_layout()), gl.convert_layout(right, half_layout())
