"""For the tests of operators, inside this package and outside: many schedules of a simulated cluster in one call.

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
    """Run `fn(group, *args)` on every rank of a simulated cluster under many schedules; what they covered.

    `fn` raises if something is wrong, such as a result. What it raises under the first schedule that fails is raised
    here, with the name of that schedule as the attribute `schedule` and, from Python 3.11 on, as a note;
    `schedule=` runs that one alone. Inputs must be the same in every run: seed their generators.

    Args:
        nodes, gpus_per_node, timeout, sim: as for `mk.spawn`. `sim.slow` and `sim.late` must be empty: every rank is
            slow, and late, in schedules of their own. `sim.replace` breaks a protocol on purpose.
        schedules: how many systematic ones to run, at most: first the extremes (each rank slow, the network newest
            first, one CTA at a time, ...), then stalls of one task at one point, all over the run.
        random: how many random ones to run behind them, with the seeds from `seed` on.
        schedule: the name of the one schedule to run, such as "stall:0.cta3@17".
        without: names of schedules to leave out, such as "one-cta" for a kernel whose CTAs wait for each other.
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
