"""The search space for tuning ring_attention_backward."""

from __future__ import annotations

from typing import Any

from mkernel.runtime.group import Group
from mkernel.tuning.spaces import COPY_BYTES, Axes, Space, copiers_near, ctas_near, near, without


def space(group: Group, plan: Any) -> Space:
    # without `steps`: how much memory a call may use is for the caller to decide
    c = plan.config
    several = group.size > 1
    between: Axes = dict(
        ctas=ctas_near(group, plan, helpers=True),
        chunk_rows=near(c.chunk_rows, c.tile_n, plan.part_rows) if several else (),
        send_ctas=copiers_near(group, c.send_ctas),
        copy_bytes=COPY_BYTES if several else (),
    )
    between = without(between, c)  # applies to both kernels
    # in the Hopper kernel, all CTAs copy
    copiers: Axes = dict(intra_ctas=copiers_near(group, min(c.intra_ctas, 2) if plan.hopper else c.intra_ctas))
    tiles: Axes = dict(tile_n=near(c.tile_n, 16, 128), tile_m=near(c.tile_m, 16, 128), stages=(1, 2, 3), warps=(4, 8))
    return Space(without(tiles, c) | between | without(copiers, c), hopper=between, portable_stages=2)
