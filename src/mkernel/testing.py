"""For tests of operators, inside and outside this package: run many schedules of a simulated cluster in one call.

from mkernel.testing import check

def test_my_operator():
    check(on_rank, nodes=2, gpus_per_node=2, schedules=50)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mkernel.runtime.spawn import require_simulator

if TYPE_CHECKING:
    from mkernel.sim.explore import Report
    from mkernel.sim.scheduler import Options

__all__ = ["check"]


def check(
    fn: Callable[..., Any],
    *args: Any,
    nodes: int = 1,
    gpus_per_node: int = 2,
    schedules: int = 50,
    random: int = 0,
    seed: int = 0,
    timeout: float = 30.0,
    sim: Options | None = None,
    schedule: str | None = None,
    without: Sequence[str] = (),
) -> Report:
    """Run `fn(group, *args)` on every rank of a simulated cluster under many schedules. Returns what they covered.

    `fn` raises if something is wrong, such as a result. The exception of the first schedule that fails propagates, with
    the name of that schedule as its attribute `schedule` and, from Python 3.11 on, as a note; `schedule=` runs that
    schedule alone. Inputs must be the same in every run: seed their generators.

    Args:
        nodes, gpus_per_node, timeout, sim: as for `mk.spawn`. `sim.slow` and `sim.late` must be empty: the schedules
            make every rank slow, and late, in turn. `sim.replace` breaks a protocol on purpose.
        schedules: the largest number of systematic schedules: first the extremes (each rank slow, the network newest
            first, one CTA at a time, ...), then stalls of one task at one point, spread over the run.
        random: the number of random schedules to run after them, with seeds from `seed` on.
        schedule: the name of the only schedule to run, such as "stall:0.cta3@17".
        without: names of schedules to skip, such as "one-cta" for a kernel whose CTAs wait for each other.
    """
    with require_simulator():
        from mkernel.sim.explore import Exploration

    exploration = Exploration(
        fn, args, nodes=nodes, gpus_per_node=gpus_per_node, schedules=schedules, random=random, seed=seed,
        timeout=timeout, sim=sim, only=schedule, without=without,
    )  # fmt: skip
    for _ in exploration:
        pass
    return exploration.report
