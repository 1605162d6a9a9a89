"""Which configurations of an operator to try: those near the one that the cost model selects.

An operator's package defines them as a `Space`; this module has what the spaces share. Every configuration must run
for every call that it may be used for. In particular, its number of CTAs must leave some for compute, however many the
cost model gives to the other roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mkernel.operators import Operator
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.planning import common_ctas
from mkernel.tuning.search import Family

Axes = dict[str, Sequence[int]]

TILES: Axes = dict(tile_n=(64, 128, 256), tile_m=(64, 128), stages=(2, 3, 4, 5), warps=(4, 8))
COPY_BYTES = (16384, 32768, 65536)


@dataclass(frozen=True)
class Space:
    """The values to try for each field. Fields that do not change the binary come first, because they are faster to
    measure.

    portable, hopper: for the kernel that runs everywhere, and for the one for Hopper.
    portable_stages: the initial number of stages for the portable kernel where the Hopper kernel is the default. The
        Hopper kernel has fixed tiles and stages, so a configuration with a number of stages selects the portable one.
    """

    portable: Axes
    hopper: Axes = field(default_factory=dict)
    portable_stages: int = 3


def families_of(operator: Operator, group: Group, plan: Any) -> list[Family]:
    """The families of an operator for a call with this default plan."""
    space: Space = operator.load("space")(group, plan)
    default = getattr(plan, "config", plan)
    if not getattr(plan, "hopper", False):
        return [Family(Config(), without(space.portable, default))]
    start = Config(stages=space.portable_stages)
    return [Family(Config(), without(space.hopper, default)), Family(start, space.portable)]


# -- fields


def ctas_near(group: Group, plan: Any, helpers: bool) -> Sequence[int]:
    """Numbers of CTAs to try: all that fit, and fewer, down to three quarters of what the cost model selects, but more
    than can be needed for sending and copying."""
    most, default = common_ctas(group), plan.config.ctas
    few = min(max(3 * default // 4, 2 * most_copiers(group) + 1 if helpers else 1), most)
    return sorted({most, few, max(most - 1, few)} - {default}, reverse=True)


def copiers_near(group: Group, default: int) -> Sequence[int]:
    """Numbers of CTAs to try for sending, or for copying; none if the default is 0."""
    around = {default // 2, default - 1, default, default + 1, 2 * default} if default else set()
    return sorted(count for count in around if 1 <= count <= most_copiers(group))


def most_copiers(group: Group) -> int:
    """A quarter of all CTAs, which is also the most that the cost model selects."""
    return max(common_ctas(group) // 4, 1)


def near(value: int, least: int, most: int) -> Sequence[int]:
    """A quarter of a value, half of it, the value itself, and twice the value."""
    return [near for near in (value // 4, value // 2, value, 2 * value) if least <= near <= most]


def without(axes: Mapping[str, Iterable[int]], default: Any) -> Axes:
    """The axes without the default's values."""
    return {name: [value for value in values if value != getattr(default, name)] for name, values in axes.items()}
