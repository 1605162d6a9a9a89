"""Offsets between the clocks of a group's ranks.

Ranks on one GPU read the same timer. Otherwise each rank compares its GPU's timer with its host's clock: it reads the
timer, and the host's clock before and after. Hosts compare their clocks at barriers: no rank leaves a barrier before
all have entered it, so each barrier bounds the difference of two hosts' clocks from both sides, and several barriers
narrow the bounds. Both methods give an offset and a bound of its error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

BARRIERS = 20


@dataclass(frozen=True)
class Offset:
    """What to subtract from a rank's clock to get rank 0's, and a bound of the error, in nanoseconds."""

    nanoseconds: int
    error: int


def between(readings: Sequence[tuple[int, int, int]]) -> Offset:
    """The offset of a clock from the host's, from readings (host before, clock, host after)."""
    before, clock, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return Offset(clock - (before + after) // 2, (after - before + 1) // 2)


def hosts_between(mine: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> Offset:
    """The offset of my host's clock from theirs, from the times at which each entered and left barriers."""
    highest = min(left - came for (_, left), (came, _) in zip(mine, theirs))
    lowest = max(came - left for (came, _), (_, left) in zip(mine, theirs))
    return Offset((highest + lowest) // 2, max((highest - lowest + 1) // 2, 0))


def offsets(group: Group) -> list[Offset]:
    """The offset of every rank's clock from rank 0's. Collective."""
    clock_here = group.world.launcher.clock(group.world_rank)
    clocks = group.exchange("clocks", clock_here.name)
    if len(set(clocks)) == 1:
        return [Offset(0, 0)] * group.size
    from mkernel.runtime.processes import host_name

    own = between(clock_here.compare())
    barriers = []
    for _ in range(BARRIERS):
        came = time.monotonic_ns()
        group.barrier()
        barriers.append((came, time.monotonic_ns()))
    everyone = group.exchange("clocks", (host_name(), own.nanoseconds, own.error, barriers))
    offsets = [(name, Offset(nanoseconds, error), at) for name, nanoseconds, error, at in everyone]
    host, first, its_barriers = offsets[0]
    found = []
    for clock in clocks:
        name, theirs, their_barriers = offsets[clocks.index(clock)]  # ranks that share a clock have the same offset
        apart = Offset(0, 0) if name == host else hosts_between(their_barriers, its_barriers)
        if clock == clocks[0]:
            found.append(Offset(0, 0))
        else:
            lead = theirs.nanoseconds - first.nanoseconds + apart.nanoseconds
            found.append(Offset(lead, theirs.error + first.error + apart.error))
    return found
