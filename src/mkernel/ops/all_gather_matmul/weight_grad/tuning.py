"""The search space for tuning all_gather_matmul_weight_grad."""

from __future__ import annotations

from typing import Any

from mkernel.runtime.group import Group
from mkernel.tuning.spaces import COPY_BYTES, TILES, Axes, Space, copiers_near, ctas_near


def space(group: Group, plan: Any) -> Space:
    several = group.size > 1
    portable: Axes = dict(
        ctas=ctas_near(group, plan, helpers=True), held_tiles=(1, 2, 3, 4, 6, 8) if several else (),
        join_tiles=(0, 1, 2, 4, 8) if several else (), chunk_rows=(64, 128, 256),
        intra_ctas=copiers_near(group, plan.config.intra_ctas), passes=(1, 2, 3, 4, 6) if several else (),
        **TILES, group_m=(4, 8, 16), copy_bytes=COPY_BYTES,
    )  # fmt: skip
    hopper: Axes = dict(
        ctas=ctas_near(group, plan, helpers=True), chunk_rows=(8, 16, 32, 64), group_m=(4, 8, 16),
        passes=(1, 2, 3, 4, 6, 8) if several else (), held_tiles=(1, 2, 4, 8, 12, 16) if several else (),
    )  # fmt: skip
    return Space(portable, hopper=hopper)
