"""A grouped GEMM without communication: rows that are in place already times the matrices of their experts.

The blocks are those of an earlier dispatch, in the order of its schedule, and the tiles those of moe_dispatch_matmul.
Their counters of rows in place have reached their ends, so no tile waits. CTAs share the tiles round-robin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mkernel.lang.matrix import Block, Tiling
from mkernel.lang.signals import gave_up
from mkernel.lang.trace import BEGUN, ENDED, LAUNCHES, trace, trace_time
from mkernel.ops.moe.grouped import (
    Gemm,
    Operands,
    WeightLayout,
    Weights,
    empty_rows,
    multiply_block,
    result_descriptor,
    rows_descriptor,
    short_tile,
)
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.plan import tile_width
from mkernel.ops.moe.routing import BLOCKS
from mkernel.runtime import planning
from mkernel.runtime.group import Group
from mkernel.runtime.operands import constants, layout, matmul_precision, named_constants
from mkernel.runtime.world import Launch

OP = "moe_grouped_matmul"


@triton.jit
def _run(context, operands, gemm, tables):
    if not gave_up(context):  # the tables are there
        tiles = tl.load(tables.summary + BLOCKS) * tl.cdiv(gemm.n, gemm.tiling.N)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            multiply_block(context, operands, gemm, tables, tile)


@triton.jit
def moe_grouped_matmul_kernel(context, rows, short_rows, w, y, gemm, tables):
    """The whole operator. rows, short_rows, w, y: see `Operands`; gemm: `Gemm`; tables: `Tables`."""
    trace(context, LAUNCHES, BEGUN, 0, 0, trace_time(context))
    _run(context, Operands(rows, short_rows, Weights(w, gemm.w_strides), y), gemm, tables)
    trace(context, LAUNCHES, ENDED, 0, 0, trace_time(context))


def prepare(
    group: Group, context: torch.Tensor, handle: Handle, placed: torch.Tensor, rows: torch.Tensor, w: torch.Tensor
) -> tuple[Launch, torch.Tensor]:
    """The launch, and its result [capacity, n], in memory of `empty_rows`.

    Args:
        placed: the counters of the blocks, one for each, of a dispatch that has ended.
        rows: [capacity, k], grouped by expert, which TMA can read.
        w: [experts, k, n].
    """
    _, k, n = w.shape
    weights = WeightLayout.of(w)
    tiles = planning.default_tiles(group.target, rows.dtype, n, weights.uses_tma)
    tile_m, short_m = handle.tile_m, short_tile(group.target, handle.tile_m)
    tile_n = tile_width(tiles, tile_m)
    y = empty_rows(group, rows.shape[0], n, rows.dtype, tile_m)
    precision = matmul_precision(rows.dtype)
    unused = dict.fromkeys(handle.tables._fields)
    tables = handle.tables._replace(**unused)._replace(
        placed=placed, schedule=handle.tables.schedule, summary=handle.tables.summary
    )
    launch = Launch(
        op=OP,
        group=group,
        kernel=moe_grouped_matmul_kernel,
        grid=group.world.launcher.ctas(group.world_rank),
        arguments=dict(
            context=context,
            rows=rows_descriptor(rows, tile_m, tiles.tile_k),
            short_rows=rows_descriptor(rows, short_m, tiles.tile_k),
            w=weights.operand(w, tiles.tile_k, tile_n),
            y=result_descriptor(y, tile_m, tile_n),
            gemm=Gemm(
                w_strides=weights.strides(w),
                y_rows=Block(y, y.stride(0), 1),
                k=k,
                n=n,
                bias=None,
                scales=None,
                tiling=Tiling(*constants(tile_m, tile_n, tiles.tile_k, tiles.group_m, precision)),
                **named_constants(SHORT_M=short_m, SCALED=False),
            ),
            tables=tables,
        ),
        options=dict(num_warps=tiles.warps, num_stages=tiles.stages),
        variant=(tile_m, tiles, weights, layout(w), layout(rows)[1:], precision),
        inputs=("rows", "short_rows", "w", "tables.schedule", "tables.summary"),
    )
    return launch, y
