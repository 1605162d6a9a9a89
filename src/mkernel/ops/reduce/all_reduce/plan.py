"""The plan of a matmul_all_reduce call: the tile, the number of CTAs, and the kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mkernel.ops.reduce.all_reduce.order import FEWEST_WITH_HOMES
from mkernel.ops.reduce.call import Plan, Sum, for_hopper, has_wide_tiles, plan_of, plan_of_few_rows
from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.matmul import RhsLayout
from mkernel.runtime.operands import describable

OP = "matmul_all_reduce"

LARGEST_SLICED = 2**24  # bytes of the result: more than one large tile for each CTA of a GPU
LEAST_COLUMNS = 16  # of a slice
# Ranks. With multicast, each rank also receives its own tiles: 1/4 of the result with 4 ranks, 1/2 with 2. That this
# pays off from 4 ranks on follows from the traffic; it was not measured.
FEWEST_FOR_MULTICAST = 4


def why_no_multicast(group: Group, small: bool) -> str | None:
    """Why a call does not use multicast; None if it does. `small`: the result is small."""
    if not group.multicast:
        if group.target.type != "cuda":
            return "CPUs have none"
        if group.nodes > 1:
            return "the ranks are on several nodes"
        if len({group.world.gpu_ids[member] for member in group.members}) < group.size:
            return "several ranks share a GPU"
        return (
            "symmetric memory provides none here; it requires processes (torchrun) with one GPU each, and NVSwitch "
            "between them (run `mkernel doctor`)"
        )
    if group.size < FEWEST_FOR_MULTICAST:
        return f"with fewer than {FEWEST_FOR_MULTICAST} ranks, each would receive far more data than it needs"
    return "the result is small" if small else None


def sliced_tile(group: Group, m: int, n: int, dtype: torch.dtype, config: Config | None) -> tuple[int, int] | None:
    """The tile of a result whose tiles are split into slices: the smallest tile with at most one per CTA. None if there
    are too many tiles, or if the group is not 2, 4 or 8 ranks of one node."""
    gpus = group.gpus_per_node
    if group.nodes > 1 or gpus not in (2, 4, 8) or (config is not None and config.ctas is not None):
        return None
    if not 0 < m * n * dtype.itemsize <= LARGEST_SLICED:
        return None
    choose = planning.chooser(config)
    default = planning.default_tiles(group.target, dtype, n, uses_tma=True)
    tiles = [(default.tile_m, default.tile_n)]
    if group.target.type == "cuda" and dtype != torch.float32:
        height = min(max(1 << (m - 1).bit_length(), 16), 64)
        tiles += [(128, 128), *([(height, 256)] if height < 64 else []), (height, 128), (height, 64)]
    found = None
    for tile_m, tile_n in ((choose("tile_m", tile_m), choose("tile_n", tile_n)) for tile_m, tile_n in tiles):
        few = math.ceil(m / tile_m) * math.ceil(n / tile_n) <= planning.common_ctas(group)
        if few and tile_n // gpus >= LEAST_COLUMNS:
            found = tile_m, tile_n
    return found


def cut(group: Group, call: Sum) -> tuple[int, int, int]:
    """(tile_m, tile_n, CTAs). They determine owners and slots, so they follow from what is the same on every rank."""
    m, n, dtype = call.a.shape[0], call.b.shape[1], call.a.dtype
    choose = planning.chooser(call.config)
    most = planning.common_ctas(group)
    sliced = sliced_tile(group, m, n, dtype, call.config)
    if sliced is not None:
        return *sliced, math.ceil(m / sliced[0]) * math.ceil(n / sliced[1])
    # the kernel for multicast is a portable one
    wide = has_wide_tiles(group, call, m) and why_no_multicast(group, small=False) is not None
    tile_m, tile_n = planning.tile_of_sum(group.target, dtype, m, n, most, wide)
    tile_m, tile_n = choose("tile_m", tile_m), choose("tile_n", tile_n)
    return tile_m, tile_n, choose("ctas", min(most, max(math.ceil(m / tile_m) * math.ceil(n / tile_n), 1)))


def decide(group: Group, call: Sum, try_multicast: bool = True) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    m, n, gpus = call.a.shape[0], call.b.shape[1], group.gpus_per_node
    few = plan_of_few_rows(OP, group, call, call.a.shape[1]) if group.size == 1 else None
    if few is not None:
        return few
    tile_m, tile_n, ctas = cut(group, call)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    elements = tiles * tile_m * tile_n
    sliced = sliced_tile(group, m, n, call.a.dtype, call.config) is not None
    if sliced and group.target.type == "cuda" and tile_m <= 64:
        call = replace(call, config=_deep_stages(call, tile_m, tile_n))
    how = "every tile is split into slices, one for each rank: there is only one tile per CTA"
    missing = why_no_multicast(group, small=sliced or tiles == 0) if try_multicast else "the workspace has none"
    multicast = missing is None
    # `load_sum` must load only once, which needs the accumulator layout of the tensor cores: see multimem.py
    in_switch = multicast and not call.fixed_order and call.a.dtype != torch.float32
    pushed = 2 * elements * (gpus - 1) // gpus
    if multicast:
        pushed = elements * (gpus + 1) // gpus if in_switch else elements
    about_homes = []
    if group.nodes >= FEWEST_WITH_HOMES.value:
        about_homes = [
            f"{group.nodes} nodes: one of them adds the sums of all nodes for a tile, and sends the finished tile "
            "back: as little as possible crosses the network"
        ]
    decided = plan_of(
        OP,
        group,
        call,
        tile=(tile_m, tile_n),
        tiles=tiles,
        computed=tiles,
        ctas=ctas,
        pushed=pushed,
        sent=2 * elements * (group.nodes - 1) // (group.nodes * gpus),
        reasons=(*([how] if sliced else []), *about_homes, _about_multicast(missing, in_switch)),
    )
    decided = replace(decided, multicast=multicast, in_switch=in_switch)
    if sliced:
        # slices are narrower than the descriptors' blocks
        return replace(decided, sliced=True, out_uses_tma=False, residual_uses_tma=False)
    several = group.size > 1 or call.scaling is not None
    return for_hopper(group, call, decided) if several and not multicast and n % 8 == 0 else decided


def _deep_stages(call: Sum, tile_m: int, tile_n: int) -> Config | None:
    """The configuration for a tile of few rows: b is read at the speed of memory only if much of it is in flight."""
    if not (describable(call.a) and RhsLayout.of(call.b, True).uses_tma):
        return call.config
    choose = planning.chooser(call.config)
    depth = choose("tile_k", 128)
    stages = max(min(180 * 1024 // ((tile_m + tile_n) * depth * call.a.element_size()), 6), 2)
    settings = dict(tile_k=depth, stages=choose("stages", stages), warps=choose("warps", 4))
    return replace(call.config or Config(), **settings)


def _about_multicast(missing: str | None, in_switch: bool) -> str:
    """What a plan says about multicast."""
    if missing is not None:
        return f"multicast is not used: {missing}"
    if in_switch:
        return "the switch reduces the partials, in an unspecified order, and delivers finished tiles (multicast)"
    return "the switch delivers finished tiles (multicast); the ranks reduce the partials themselves, in rank order"
