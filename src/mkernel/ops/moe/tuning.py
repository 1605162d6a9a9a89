"""Search spaces of the mixture-of-experts operators for `mkernel tune`."""

from __future__ import annotations

from typing import Any

from mkernel.runtime.group import Group
from mkernel.runtime.planning import common_ctas
from mkernel.tuning.spaces import COPY_BYTES, Space, copiers_near, ctas_near, near


def space(group: Group, plan: Any) -> Space:
    """The search space of moe_dispatch_matmul and moe_ffn."""
    c = plan.config
    return Space(
        dict(
            ctas=ctas_near(group, plan, helpers=True),
            intra_ctas=copiers_near(group, c.intra_ctas), send_ctas=copiers_near(group, c.send_ctas),
            chunk_rows=near(c.chunk_rows, 8, plan.sizes.max_tokens),
            tile_n=near(c.tile_n, 64, 256), tile_m=near(c.tile_m, 64, 128), stages=(2, 3, 4), warps=(4, 8),
            group_m=(4, 8, 16), copy_bytes=COPY_BYTES,
        )
    )  # fmt: skip


def space_of_scaled(group: Group, plan: Any) -> Space:
    """The search space of moe_dispatch_scaled_matmul. With scales of blocks, a step lies in one of 128."""
    return Space(space(group, plan).portable | dict(tile_n=near(plan.config.tile_n, 64, 128), tile_k=(64, 128)))


def space_of_scaled_ffn(group: Group, plan: Any) -> Space:
    """The search space of scaled_moe_ffn. A tile of the first GEMM has 128 columns, whatever tile_n is."""
    return Space(space(group, plan).portable | dict(tile_n=(64, 128), tile_k=(64, 128)))


def space_of_dispatch(group: Group, plan: Any) -> Space:
    """The search space of moe_dispatch."""
    c = plan.config
    return Space(
        dict(
            ctas=ctas_near(group, plan, helpers=True),
            intra_ctas=copiers_near(group, c.intra_ctas), send_ctas=copiers_near(group, c.send_ctas),
            chunk_rows=near(c.chunk_rows, 8, plan.sizes.max_tokens), warps=(4, 8, 16), copy_bytes=COPY_BYTES,
        )
    )  # fmt: skip


def space_of_combine(group: Group, plan: Any) -> Space:
    """The search space of moe_combine."""
    most = common_ctas(group)
    ctas = [most * quarters // 4 for quarters in (4, 3, 2, 1) if most * quarters // 4]
    return Space(dict(ctas=ctas, warps=(4, 8, 16), copy_bytes=near(plan.copy_bytes, 1024, 32768)))
