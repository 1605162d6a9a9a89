"""The plan of a matmul_reduce_scatter call: the tile, the number of CTAs, and the kernel."""

from __future__ import annotations

import math

from mkernel.ops.reduce.call import Plan, Sum, few_rows, for_hopper, has_wide_tiles, plan_of, plan_of_few_rows
from mkernel.ops.reduce.reduce_scatter.order import MANY_NODES
from mkernel.runtime import hopper, planning
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group

OP = "matmul_reduce_scatter"
SPREAD = (
    "many nodes: sums are sent node by node, each behind the pushes for the next node, so that requests spread over "
    "the launch"
)


def tile_of(group: Group, call: Sum) -> tuple[int, int, int]:
    """(tile_m, tile_n, CTAs that compute a tile of few rows or 0). Slots hold whole tiles, or what a CTA of several has
    of them, so they depend only on what is the same on every rank."""
    rows, n, dtype = call.a.shape[0] // group.size, call.b.shape[1], call.a.dtype
    choose = planning.chooser(call.config)
    few = few_rows(group, rows * group.size, n, dtype, call.config) if group.size > 1 else None
    if few is not None:
        return few.tile_m, few.tile_n, few.team
    wanted = planning.common_ctas(group) / group.size
    wide = _fills_tiles(group, call) and has_wide_tiles(group, call, rows)
    tile_m, tile_n = planning.tile_of_sum(group.target, dtype, rows, n, wanted, wide)
    return choose("tile_m", tile_m), choose("tile_n", tile_n), 0


def _fills_tiles(group: Group, call: Sum) -> bool:
    """Do tiles of the kernel for Hopper end where the rows of a rank do? With one rank, they need not."""
    return call.a.shape[0] // group.size % hopper.TILE_M == 0 or (group.size == 1 and call.scaling is not None)


def ctas_of(group: Group, rows: int, n: int, tile: tuple[int, int], config: Config | None) -> int:
    """CTAs of a launch. The same on every rank, since they determine the order of tiles."""
    tiles = math.ceil(rows / tile[0]) * math.ceil(n / tile[1]) * group.size
    return planning.chooser(config)("ctas", min(planning.common_ctas(group), max(tiles, 1)))


def decide(group: Group, call: Sum) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    rows, n = call.a.shape[0] // group.size, call.b.shape[1]
    few = plan_of_few_rows(OP, group, call, call.a.shape[1] if group.size == 1 else None)
    if few is not None:
        return few
    tile_m, tile_n, _ = tile_of(group, call)
    tiles = math.ceil(rows / tile_m) * math.ceil(n / tile_n)
    elements = tiles * tile_m * tile_n
    portable = plan_of(
        OP,
        group,
        call,
        tile=(tile_m, tile_n),
        tiles=tiles,
        computed=tiles * group.size,
        ctas=ctas_of(group, rows, n, (tile_m, tile_n), call.config),
        pushed=elements * group.nodes * (group.gpus_per_node - 1),
        sent=elements * (group.nodes - 1),
        reasons=(SPREAD,) if group.nodes >= MANY_NODES.value else (),
    )
    return for_hopper(group, call, portable) if _fills_tiles(group, call) else portable
