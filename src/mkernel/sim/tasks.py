"""Tasks of the scheduler: what all of them have in common, and the Python code of ranks.

CTAs are in `sim/scheduler.py`, network proxies in `sim/network.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import greenlet

from mkernel.sim.rank_thread import RankThread

if TYPE_CHECKING:
    from mkernel.sim.scheduler import Scheduler


class Task:
    """Something that the scheduler runs, step by step."""

    asleep = False  # it cannot run until it is woken
    seen_nothing_new: Any = ()  # if this is not None, `ready` says whether it can run
    label = ""  # in the names of schedules: the rank and what the task is
    number = 0  # in the order in which tasks are added

    def __init__(self, scheduler: Scheduler, rank: int, name: str):
        self.scheduler = scheduler
        self.rank = rank
        self.name = name
        self._greenlet: greenlet | None = None  # made in the scheduler's thread: a launch is made in that of a rank
        self.failure: BaseException | None = None
        self.done = False

    def _start(self) -> None:
        try:
            self.run()
        except BaseException as failure:
            self.failure = failure
        self.done = True

    def run(self) -> None:
        raise NotImplementedError

    def ready(self) -> bool:
        """Can it run now? Only called while it is not asleep."""
        return True

    def wake(self) -> None:
        """Something has happened that it may have waited for."""
        self.asleep = False

    def resume(self) -> None:
        if self._greenlet is None:
            self._greenlet = greenlet(self._start, parent=self.scheduler.hub)
        self._greenlet.switch()

    def end(self) -> None:
        """End it without running any more of its code."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw()

    def where(self) -> str:
        """What the task waits for, in readable form."""
        return self.name


class HostTask(Task):
    """The Python code of a rank."""

    def __init__(self, scheduler: Scheduler, rank: int, function: Callable[[], Any]):
        super().__init__(scheduler, rank, f"rank {rank}, Python")
        self.label = f"{rank}.host"
        self.function = function
        self.result: Any = None
        self.condition: Callable[[], bool] = lambda: True
        self.deadline = float("inf")
        self.waits_for = ""
        self.thread = RankThread(f"mkernel rank {rank}", self._start)

    def run(self) -> None:
        self.result = self.function()

    def resume(self) -> None:
        self.thread.resume()

    def end(self) -> None:
        self.thread.end()

    def ready(self) -> bool:
        ready = self.scheduler.clock >= self.deadline or self.condition()
        self.asleep = not ready
        return ready

    def wait_until(self, condition: Callable[[], bool], waits_for: str, seconds: float = float("inf")) -> bool:
        """Let others run until the condition holds. Return False if the timeout expires first."""
        self.condition, self.waits_for = condition, waits_for
        self.deadline = self.scheduler.clock + seconds * 1e9
        try:
            self.thread.wait()
        finally:
            self.condition, self.deadline = (lambda: True), float("inf")
        return condition()

    def where(self) -> str:
        return f"{self.name} waits for {self.waits_for}"
