"""The gradient of the experts' matrices: a grouped GEMM whose reduction runs over the rows of an expert.

What it computes. left [rows, m] and right [rows, n] hold the rows of this rank's experts, grouped by expert as in a
dispatch: dw[expert] = left[rows of the expert].T @ right[rows of the expert], accumulated in fp32. An expert without
rows gets zeros.

Who does what. Tiles of all experts form one sequence, expert by expert, that the CTAs share round-robin. A tile goes
through the rows of its expert in order, so the same input gives the same bits. There is no communication, and no CTA
waits: the tables of the dispatch say where an expert's rows begin and end.

Where an expert ends is unknown before the launch. After its last row come the rows of the next expert or, after the
last expert, unwritten memory. Neither may enter the sum. As in `store_rows` (grouped.py), the descriptors are [ends, K,
columns], with a stride of one row in both of the first two dimensions. Index [end, K - rows] is the first of the `rows`
rows before `end`, and the second dimension ends where they end, so the hardware fills the rest of a block of K rows
with zeros. The last block needs neither a mask nor separate code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.gemm import store_tile
from mkernel.lang.matrix import Matrix, Strides, Tile, Tiling
from mkernel.lang.trace import BEGUN, ENDED, LAUNCHES, trace, trace_time
from mkernel.ops.moe.grouped import ROWS_BEFORE
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.routing import missing_rows
from mkernel.runtime import planning
from mkernel.runtime.group import Group
from mkernel.runtime.operands import constants, describable, descriptor, matmul_precision
from mkernel.runtime.world import Launch

OP = "moe_weight_grad"


class WeightGrad(NamedTuple):
    """The product of a call, except for its operands, which are descriptors."""

    bases: Any  # pointer to `Tables.bases`
    summary: Any  # of `Tables`
    experts: Any
    m: Any
    n: Any
    strides: Any  # Strides of dw
    tiling: Any  # Tiling
    RANKS: Any  # sources of rows


@triton.jit
def _rows_before(x, end, rows, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The `rows` rows before `end`, then zeros. x: see `rows_to_sum`."""
    return x.load([end, ROWS - rows, column]).reshape(ROWS, COLUMNS)


@triton.jit
def _sum_rows(left, right, first, end, row, column, tiling):
    """The fp32 accumulator of a tile: columns from `row` on of left, those from `column` on of right."""
    accumulator = tl.zeros((tiling.M, tiling.N), tl.float32)
    for step in range(tl.cdiv(end - first, tiling.K)):
        rows = tl.minimum(end - first - step * tiling.K, tiling.K)
        until = first + step * tiling.K + rows
        x = _rows_before(left, until, rows, row, tiling.K, tiling.M)
        y = _rows_before(right, until, rows, column, tiling.K, tiling.N)
        accumulator = tl.dot(x.T, y, accumulator, input_precision=tiling.PRECISION)
    return accumulator


@triton.jit
def _run(left, right, dw, grad, missing):
    """All tiles of this CTA. missing: see `missing_rows`."""
    row_blocks = tl.cdiv(grad.m, grad.tiling.M)
    of_expert = row_blocks * tl.cdiv(grad.n, grad.tiling.N)
    for tile in range(tl.program_id(0), grad.experts * of_expert, tl.num_programs(0)):
        expert = tile // of_expert
        row = tile % of_expert % row_blocks * grad.tiling.M
        column = tile % of_expert // row_blocks * grad.tiling.N
        first = tl.load(grad.bases + expert * grad.RANKS)
        end = tl.load(grad.bases + (expert + 1) * grad.RANKS)
        if missing != 0.0:
            first = end
        accumulator = _sum_rows(left, right, first, end, row, column, grad.tiling)
        store_tile(dw, Tile(expert, row, grad.m, column, grad.n), accumulator + missing)


@triton.jit
def moe_weight_grad_kernel(context, left, right, dw, grad):
    """The whole operator. left, right: descriptors, see `rows_to_sum`; dw: a descriptor or a pointer; grad:
    `WeightGrad`."""
    trace(context, LAUNCHES, BEGUN, 0, 0, trace_time(context))
    _run(left, right, Matrix(dw, grad.strides), grad, missing_rows(context, grad))
    trace(context, LAUNCHES, ENDED, 0, 0, trace_time(context))


def rows_to_sum(rows: torch.Tensor, tile_k: int, columns: int) -> Any:
    """The descriptor through which the kernel reads rows, in memory of `empty_rows` with ROWS_BEFORE extra rows
    before the first."""
    stride = rows.stride(0)
    start = rows.storage_offset() - tile_k * stride
    whole = rows.as_strided((rows.shape[0] + tile_k, stride), (stride, 1), start)
    return descriptor(whole, [rows.shape[0] + 1, tile_k, rows.shape[1]], [stride, stride, 1], [1, tile_k, columns])


def prepare(
    group: Group, context: torch.Tensor, handle: Handle, left: torch.Tensor, right: torch.Tensor
) -> tuple[Launch, torch.Tensor]:
    """The launch, and dw [experts, m, n]. left, right: [capacity, m] and [capacity, n], of `empty_rows`."""
    experts, m, n = handle.sizes.experts, left.shape[1], right.shape[1]
    dw = group.world.memory.empty(group.world_rank, (experts, m, n), left.dtype)
    uses_tma = describable(dw)
    tiles = planning.default_tiles(group.target, left.dtype, n, uses_tma)
    tile_k = min(tiles.tile_k, ROWS_BEFORE)
    precision = matmul_precision(left.dtype)
    count = experts * triton.cdiv(m, tiles.tile_m) * triton.cdiv(n, tiles.tile_n)
    grad = WeightGrad(
        bases=handle.tables.bases,
        summary=handle.tables.summary,
        experts=experts,
        m=m,
        n=n,
        strides=Strides(dw.stride(0), dw.stride(1), 1, *constants(uses_tma, False)),
        tiling=Tiling(*constants(tiles.tile_m, tiles.tile_n, tile_k, tiles.group_m, precision)),
        RANKS=constants(group.size)[0],
    )
    written = descriptor(dw, list(dw.shape), list(dw.stride()), [1, tiles.tile_m, tiles.tile_n]) if uses_tma else dw
    launch = Launch(
        op=OP,
        group=group,
        kernel=moe_weight_grad_kernel,
        grid=max(min(count, group.world.launcher.ctas(group.world_rank)), 1),
        arguments=dict(
            context=context,
            left=rows_to_sum(left, tile_k, tiles.tile_m),
            right=rows_to_sum(right, tile_k, tiles.tile_n),
            dw=written,
            grad=grad,
        ),
        options=dict(num_warps=tiles.warps, num_stages=tiles.stages),
        variant=(experts, m, n, left.dtype, tiles, tile_k, uses_tma, precision, left.stride(0), right.stride(0)),
        inputs=("left", "right", "grad.bases", "grad.summary"),
        results=("dw",) if dw.numel() else (),
    )
    return launch, dw
