"""Which configurations of an operator are worth a try: the neighbourhood of what the cost model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mkernel.runtime.config import Config, Settings
from mkernel.runtime.group import Group
from mkernel.runtime.planning import common_ctas
from mkernel.tuning.search import Family

TILES = dict(tile_n=(64, 128, 256), tile_m=(64, 128), stages=(2, 3, 4, 5), warps=(4, 8))


def families_of(op: str, group: Group, plan: Any) -> list[Family]:
    """The families of an operator for a call whose default plan is this one."""
    settings: Settings = plan.config
    most = common_ctas(group)
    ctas = _ctas(settings, most)
    # first what needs no other binary: it is measured in less time
    if op == "all_gather_matmul":
        by_warps = dict(ctas=ctas, chunk_rows=(32, 64, 128, 8), group_m=(4, 16))
        portable = dict(
            ctas=ctas, intra_ctas=(1, 2, 3, 4, 6) if group.gpus_per_node > 1 else (),
            join_tiles=(0, 1, 2, 4, 8) if group.size > 1 else (), chunk_rows=(32, 64, 128, 256),
            **TILES, group_m=(4, 8, 16), copy_bytes=(16384, 32768, 65536),
        )  # fmt: skip
    else:
        by_warps = dict(ctas=ctas, group_m=(4, 16))
        portable = dict(ctas=ctas, **TILES, group_m=(4, 8, 16), tile_k=(32, 64))
    if not getattr(plan, "hopper", False):
        return [Family(Config(), _without(portable, settings))]
    # that kernel has its own tiles and stages: whoever asks for a number of stages gets the portable one
    return [Family(Config(), _without(by_warps, settings)), Family(Config(stages=3), portable)]


def _ctas(settings: Settings, most: int) -> list[int]:
    """Numbers of CTAs: all that fit, and fewer, down to three quarters of what the cost model takes."""
    few = max(3 * settings.ctas // 4, settings.send_ctas + settings.intra_ctas + 1)
    return sorted({most, few, max(most - 1, few)} - {settings.ctas}, reverse=True)


def _without(axes: Mapping[str, Sequence[int]], settings: Settings) -> dict[str, Sequence[int]]:
    """The axes without what the default has anyhow."""
    return {name: [value for value in values if value != getattr(settings, name)] for name, values in axes.items()}
