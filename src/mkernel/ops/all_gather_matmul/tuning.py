"""The search space for tuning all_gather_matmul."""

from __future__ import annotations

from typing import Any

from mkernel.runtime.group import Group
from mkernel.tuning.spaces import COPY_BYTES, TILES, Axes, Space, ctas_near, most_copiers


def portable_space(group: Group, plan: Any) -> Axes:
    """What is searched for the kernel that runs everywhere."""
    copiers = [count for count in (1, 2, 3, 4, 6) if count <= most_copiers(group)] if group.gpus_per_node > 1 else []
    return dict(
        ctas=ctas_near(group, plan, helpers=True), intra_ctas=copiers,
        join_tiles=(0, 1, 2, 4, 8) if group.size > 1 else (), chunk_rows=(32, 64, 128, 256), **TILES,
        group_m=(4, 8, 16), copy_bytes=COPY_BYTES,
    )  # fmt: skip


def space(group: Group, plan: Any) -> Space:
    ctas = ctas_near(group, plan, helpers=True)
    return Space(portable_space(group, plan), hopper=dict(ctas=ctas, chunk_rows=(32, 64, 128, 8), group_m=(4, 16)))
