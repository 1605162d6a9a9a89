"""Which configurations of an operator are worth a try: the neighbourhood of what the cost model takes.

Every one of them runs for every call that it may be used for: numbers of CTAs leave some that compute, whatever
the cost model takes for the roles that are not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.planning import common_ctas
from mkernel.tuning.search import Family

Axes = dict[str, Sequence[int]]

TILES: Axes = dict(tile_n=(64, 128, 256), tile_m=(64, 128), stages=(2, 3, 4, 5), warps=(4, 8))
COPY_BYTES = (16384, 32768, 65536)


def families_of(op: str, group: Group, plan: Any) -> list[Family]:
    """The families of an operator for a call whose default plan is this one."""
    portable, hopper = SPACES[op](group, plan)
    default = getattr(plan, "config", plan)
    if not getattr(plan, "hopper", False):
        return [Family(Config(), _without(portable, default))]
    # that kernel has its own tiles and stages: whoever asks for a number of stages gets the portable one
    start = Config(stages=2 if op == "ring_attention" else 3)
    return [Family(Config(), _without(hopper, default)), Family(start, portable)]


# -- for each operator: (the fields of the portable kernel, those of the kernel for Hopper); first what needs no
# other binary, because it is measured in less time


def _gather(group: Group, plan: Any) -> tuple[Axes, Axes]:
    ctas = _ctas(group, plan, helpers=True)
    copiers = [count for count in (1, 2, 3, 4, 6) if count <= _most_copiers(group)] if group.gpus_per_node > 1 else []
    hopper: Axes = dict(ctas=ctas, chunk_rows=(32, 64, 128, 8), group_m=(4, 16))
    portable: Axes = dict(
        ctas=ctas, intra_ctas=copiers, join_tiles=_joins(group),
        chunk_rows=(32, 64, 128, 256), **TILES, group_m=(4, 8, 16), copy_bytes=COPY_BYTES,
    )  # fmt: skip
    return portable, hopper


def _sum(group: Group, plan: Any) -> tuple[Axes, Axes]:
    ctas = _ctas(group, plan, helpers=False)
    portable: Axes = dict(ctas=ctas, **TILES, group_m=(4, 8, 16), tile_k=(32, 64))
    return portable, dict(ctas=ctas, group_m=(4, 16))


def _attention(group: Group, plan: Any) -> tuple[Axes, Axes]:
    # not `steps`: how much memory a call may take is the caller's to say
    c = plan.config
    between: Axes = dict(
        ctas=_ctas(group, plan, helpers=True),
        chunk_rows=_near(c.chunk_rows, c.tile_n, plan.part_rows) if group.size > 1 else (),
        send_ctas=_copiers(group, c.send_ctas),
        copy_bytes=COPY_BYTES if group.size > 1 else (),
    )
    between = _without(between, c)  # of which both kernels have the same
    # in the kernel for Hopper all CTAs copy
    copiers: Axes = dict(intra_ctas=_copiers(group, min(c.intra_ctas, 2) if plan.hopper else c.intra_ctas))
    tiles: Axes = dict(tile_n=_near(c.tile_n, 16, 128), tile_m=_near(c.tile_m, 16, 128), stages=(2, 3, 4), warps=(4, 8))
    return between | _without(copiers, c) | tiles, between


def _dispatch(group: Group, plan: Any) -> tuple[Axes, Axes]:
    c = plan.config
    portable: Axes = dict(
        ctas=_ctas(group, plan, helpers=True),
        intra_ctas=_copiers(group, c.intra_ctas), send_ctas=_copiers(group, c.send_ctas),
        chunk_rows=_near(c.chunk_rows, 8, plan.sizes.max_tokens),
        tile_n=_near(c.tile_n, 64, 256), tile_m=_near(c.tile_m, 64, 128), stages=(2, 3, 4), warps=(4, 8),
        group_m=(4, 8, 16), copy_bytes=COPY_BYTES,
    )  # fmt: skip
    return portable, {}


def _combine(group: Group, plan: Any) -> tuple[Axes, Axes]:
    most = common_ctas(group)
    ctas = [most * quarters // 4 for quarters in (4, 3, 2, 1) if most * quarters // 4]
    return dict(ctas=ctas, warps=(4, 8, 16), copy_bytes=_near(plan.copy_bytes, 1024, 32768)), {}


SPACES: dict[str, Callable[[Group, Any], tuple[Axes, Axes]]] = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _sum,
    "matmul_all_reduce": _sum,
    "ring_attention": _attention,
    "moe_dispatch_matmul": _dispatch,
    "moe_combine": _combine,
    "moe_ffn": _dispatch,
}


# -- fields


def _ctas(group: Group, plan: Any, helpers: bool) -> Sequence[int]:
    """Numbers of CTAs: all that fit, and fewer, down to three quarters of what the cost model takes, but more than
    those that send and copy can be."""
    most, default = common_ctas(group), plan.config.ctas
    few = min(max(3 * default // 4, 2 * _most_copiers(group) + 1 if helpers else 1), most)
    return sorted({most, few, max(most - 1, few)} - {default}, reverse=True)


def _copiers(group: Group, default: int) -> Sequence[int]:
    """Numbers of CTAs that send, or that copy; none where there is nothing to do for them."""
    around = {default // 2, default - 1, default, default + 1, 2 * default} if default else set()
    return sorted(count for count in around if 1 <= count <= _most_copiers(group))


def _most_copiers(group: Group) -> int:
    """A quarter of all, which is also the most that the cost model takes."""
    return max(common_ctas(group) // 4, 1)


def _joins(group: Group) -> Sequence[int]:
    return (0, 1, 2, 4, 8) if group.size > 1 else ()


def _near(value: int, least: int, most: int) -> Sequence[int]:
    """A quarter of a value, half of it, itself, and twice."""
    return [near for near in (value // 4, value // 2, value, 2 * value) if least <= near <= most]


def _without(axes: Mapping[str, Iterable[int]], default: Any) -> Axes:
    """The axes without what the default has anyhow."""
    return {name: [value for value in values if value != getattr(default, name)] for name, values in axes.items()}
