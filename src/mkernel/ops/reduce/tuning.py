"""The tuning space of matmul_reduce_scatter and matmul_all_reduce."""

from __future__ import annotations

from typing import Any

from mkernel.runtime.group import Group
from mkernel.tuning.spaces import TILES, Space, ctas_near


def scaled_space(group: Group, plan: Any) -> Space:
    """fp8: the products of a step of 128 have scales of their own, and sums for a wider tile may spill."""
    return Space(
        portable=dict(ctas=ctas_near(group, plan, helpers=False), **TILES, group_m=(4, 8, 16), tile_k=(64, 128))
    )


def space(group: Group, plan: Any) -> Space:
    ctas = ctas_near(group, plan, helpers=False)
    return Space(
        portable=dict(ctas=ctas, **TILES, group_m=(4, 8, 16), tile_k=(32, 64)),
        hopper=dict(ctas=ctas, group_m=(4, 16)),
    )
