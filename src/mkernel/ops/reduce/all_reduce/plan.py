"""The plan of a matmul_all_reduce call: the tile, the number of CTAs, and the kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mkernel.ops.reduce.call import Plan, Sum, plan_of
from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group

OP = "matmul_all_reduce"

LARGEST_SLICED = 2**24  # bytes: more than one large tile for each CTA of a GPU
LEAST_COLUMNS = 16  # of a slice
# ranks: with multicast each takes in its own tiles, too, 1/4 of the result with 4 ranks and 1/2 with 2; that 4 are
# enough to make up for it follows from what moves, and was not measured
FEWEST_FOR_MULTICAST = 4


def why_no_multicast(group: Group, small: bool) -> str | None:
    """Why the switch does not take part in a call whose result is small, or not; None if it does."""
    if not group.multicast:
        if group.device.type != "cuda":
            return "there is none between CPUs"
        if group.nodes > 1:
            return "the ranks are on several nodes"
        if len({group.world.gpu_ids[member] for member in group.members}) < group.size:
            return "several ranks share a GPU"
        return (
            "symmetric memory has none here; it takes processes (torchrun) with a GPU each, and NVSwitch between "
            "them (`mkernel doctor` tells)"
        )
    if group.size < FEWEST_FOR_MULTICAST:
        return f"with fewer than {FEWEST_FOR_MULTICAST} ranks each would take in far more than it has to"
    return "the result is small" if small else None


def sliced_tile(group: Group, m: int, n: int, dtype: torch.dtype, config: Config | None) -> tuple[int, int] | None:
    """The tile of a result that is cut into slices: the smallest of which there is one for each CTA; None
    if there are too many tiles, or the ranks are not 2, 4 or 8 of one node."""
    gpus = group.gpus_per_node
    if group.nodes > 1 or gpus not in (2, 4, 8) or (config is not None and config.ctas is not None):
        return None
    if not 0 < m * n * dtype.itemsize <= LARGEST_SLICED:
        return None
    choose = planning.chooser(config)
    default = planning.default_tiles(group.device, dtype, n, uses_tma=True)
    tiles = [(default.tile_m, default.tile_n)]
    if group.device.type == "cuda" and dtype != torch.float32:
        tiles += [(128, 128), (64, 128)]
    found = None
    for tile_m, tile_n in ((choose("tile_m", tile_m), choose("tile_n", tile_n)) for tile_m, tile_n in tiles):
        few = math.ceil(m / tile_m) * math.ceil(n / tile_n) <= planning.common_ctas(group)
        if few and tile_n // gpus >= LEAST_COLUMNS:
            found = tile_m, tile_n
    return found


def cut(
    group: Group, m: int, n: int, dtype: torch.dtype, config: Config | None
) -> tuple[int, int, int]:  # fmt: skip
    """(tile_m, tile_n, CTAs): from what is the same on every rank, since owners and slots follow from them."""
    choose = planning.chooser(config)
    most = planning.common_ctas(group)
    sliced = sliced_tile(group, m, n, dtype, config)
    if sliced is not None:
        return *sliced, math.ceil(m / sliced[0]) * math.ceil(n / sliced[1])
    tile_m, tile_n = planning.tile_of_sum(group.device, dtype, m, n, most)
    tile_m, tile_n = choose("tile_m", tile_m), choose("tile_n", tile_n)
    return tile_m, tile_n, choose("ctas", min(most, max(math.ceil(m / tile_m) * math.ceil(n / tile_n), 1)))


def decide(group: Group, call: Sum, try_multicast: bool = True) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    m, n, gpus = call.a.shape[0], call.b.shape[1], group.gpus_per_node
    tile_m, tile_n, ctas = cut(group, m, n, call.a.dtype, call.config)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    elements = tiles * tile_m * tile_n
    sliced = sliced_tile(group, m, n, call.a.dtype, call.config) is not None
    how = "every tile is cut into slices, one for each rank: there is one tile for each CTA"
    missing = why_no_multicast(group, small=sliced or tiles == 0) if try_multicast else "the workspace got none"
    multicast = missing is None
    # a sum is loaded once only if the tensor cores say how threads hold it, see multimem.py
    in_switch = multicast and not call.fixed_order and call.a.dtype != torch.float32
    pushed = 2 * elements * (gpus - 1) // gpus
    if multicast:
        pushed = elements * (gpus + 1) // gpus if in_switch else elements
    decided = plan_of(
        OP,
        group,
        call,
        tile=(tile_m, tile_n),
        tiles=tiles,
        computed=tiles,
        ctas=ctas,
        pushed=pushed,
        sent=elements * (group.nodes - 1) // gpus,
        reasons=(*([how] if sliced else []), _about_multicast(missing, in_switch)),
    )
    decided = replace(decided, multicast=multicast, in_switch=in_switch)
    # slices are narrower than the blocks of descriptors
    return replace(decided, sliced=True, out_uses_tma=False, residual_uses_tma=False) if sliced else decided


def _about_multicast(missing: str | None, in_switch: bool) -> str:
    """What a plan says of multicast."""
    if missing is not None:
        return f"multicast is not used: {missing}"
    if in_switch:
        return "the switch adds the parts, in an order of its own, and hands out finished tiles (multicast)"
    return "the switch hands out finished tiles (multicast); the ranks add the parts themselves, in their order"
