"""The search space for tuning all_gather_scaled_matmul."""

from __future__ import annotations

from typing import Any

from mkernel.ops.all_gather_matmul.tuning import portable_space
from mkernel.runtime.group import Group
from mkernel.tuning.spaces import Space, ctas_near


def space(group: Group, plan: Any) -> Space:
    """With scales of blocks, a step lies in one of 128."""
    axes = portable_space(group, plan) | dict(tile_k=(64, 128))
    if plan.access.rows.quantized:  # by CTAs that nothing else needs, and that do not join the compute
        axes |= dict(send_ctas=(1, 2, 4, 8, 16), join_tiles=())
    ctas = ctas_near(group, plan, helpers=True)
    return Space(axes, hopper=dict(ctas=ctas, chunk_rows=(32, 64, 128, 8), group_m=(4, 8, 16)))
