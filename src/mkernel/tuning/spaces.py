"""Which configurations of an operator are worth a try: the neighbourhood of what the cost model takes.

An operator's package says which, as a `Space`; here is what they have in common. Every configuration runs for every
call that it may be used for: numbers of CTAs leave some that compute, whatever the cost model takes for the roles that
are not given.
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
    """The values of each field that are tried; first the fields that need no other binary, because they are measured in
    less time.

    portable, hopper: of the kernel that runs everywhere, and of the one for Hopper.
    portable_stages: with which the portable kernel begins where the other one is the default. That one has its own
        tiles and stages: whoever asks for a number of stages gets the portable one.
    """

    portable: Axes
    hopper: Axes = field(default_factory=dict)
    portable_stages: int = 3


def families_of(operator: Operator, group: Group, plan: Any) -> list[Family]:
    """The families of an operator for a call whose default plan is this one."""
    space: Space = operator.load("space")(group, plan)
    default = getattr(plan, "config", plan)
    if not getattr(plan, "hopper", False):
        return [Family(Config(), without(space.portable, default))]
    start = Config(stages=space.portable_stages)
    return [Family(Config(), without(space.hopper, default)), Family(start, space.portable)]


# -- fields


def ctas_near(group: Group, plan: Any, helpers: bool) -> Sequence[int]:
    """Numbers of CTAs: all that fit, and fewer, down to three quarters of what the cost model takes, but more than
    those that send and copy can be."""
    most, default = common_ctas(group), plan.config.ctas
    few = min(max(3 * default // 4, 2 * most_copiers(group) + 1 if helpers else 1), most)
    return sorted({most, few, max(most - 1, few)} - {default}, reverse=True)


def copiers_near(group: Group, default: int) -> Sequence[int]:
    """Numbers of CTAs that send, or that copy; none where there is nothing to do for them."""
    around = {default // 2, default - 1, default, default + 1, 2 * default} if default else set()
    return sorted(count for count in around if 1 <= count <= most_copiers(group))


def most_copiers(group: Group) -> int:
    """A quarter of all, which is also the most that the cost model takes."""
    return max(common_ctas(group) // 4, 1)


def near(value: int, least: int, most: int) -> Sequence[int]:
    """A quarter of a value, half of it, itself, and twice."""
    return [near for near in (value // 4, value // 2, value, 2 * value) if least <= near <= most]


def without(axes: Mapping[str, Iterable[int]], default: Any) -> Axes:
    """The axes without what the default has anyhow."""
    return {name: [value for value in values if value != getattr(default, name)] for name, values in axes.items()}
