"""What decides the order of events in the simulator.

The scheduler and the network leave every choice to a `Choices`: which task runs next, whether a task continues at a
preemption point, which request the network moves. `Choices` itself makes all of them at random, from a seed.
`Systematic` follows a named schedule; `mkernel.sim.explore` decides which ones are worth running. What a name does not
determine (the pieces of transfers) comes from a generator seeded with the name, so the name alone replays the run.

Stalls are delays as in delay-bounded scheduling (Emmi, Qadeer, Rakamaric: Delay-Bounded Scheduling, POPL 2011). A
preemption in the sense of CHESS must also choose which of the other tasks, 30 or more here, runs instead, so there are
some 30 times as many schedules with one preemption as with one delay. A stalled task stays stalled until no other task
can run: the longest possible delay, in which all others get as far as they can without it.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mkernel.runtime.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from types import FrameType

    from mkernel.sim.tasks import Task

Request = TypeVar("Request")

IN_ORDER, REVERSED, ALTERNATING = "in-order", "reversed", "alternating"
OLDEST_FIRST, NEWEST_FIRST, ONE_CTA = "oldest-first", "newest-first", "one-cta"
SLOW, LATE, AHEAD, STALL, RANDOM = "slow", "late", "ahead", "stall", "random"
FIXED = (IN_ORDER, REVERSED, ALTERNATING, OLDEST_FIRST, NEWEST_FIRST, ONE_CTA)
OF_A_RANK = (SLOW, LATE, AHEAD)
POINT = r"\d+\.(?:host|net|cta\d+(?:w\d+)?)@\d+"

UNBROKEN = 1_000  # points that a task may pass in a row before another one runs, in case it spins without waiting
STARVED = 10_000  # points after which a task that was passed over runs, in case the others spin


@dataclass(frozen=True)
class Point:
    """A point of a run at which a task can be stalled: the task, such as "1.cta3", and how often it was resumed
    before."""

    task: str
    count: int

    def __str__(self) -> str:
        return f"{self.task}@{self.count}"


@dataclass(frozen=True)
class Schedule:
    """A schedule, from its name.

    kind: the name up to a colon. number: a rank, or the seed of a random schedule. stalls: where tasks are stalled.
    """

    name: str
    kind: str
    number: int | None = None
    stalls: frozenset[Point] = frozenset()

    @staticmethod
    def parse(name: str) -> Schedule:
        kind, _, rest = str(name).partition(":")
        if name in FIXED:
            return Schedule(name, kind)
        if kind in (*OF_A_RANK, RANDOM) and re.fullmatch(r"\d+" if kind != RANDOM else r"-?\d+", rest):
            return Schedule(name, kind, int(rest))
        if kind == STALL and re.fullmatch(rf"{POINT}(\+{POINT})*", rest):
            points = (point.split("@") for point in rest.split("+"))
            return Schedule(name, kind, stalls=frozenset(Point(task, int(count)) for task, count in points))
        raise ArgumentError(
            f"there is no schedule {name!r}; a schedule is one of {', '.join(FIXED)}, or like slow:0, late:0, ahead:0 "
            "(a rank), stall:0.cta3@17 or stall:0.cta3@17+1.net@5 (a task of a rank, and how often it was resumed "
            "before), or random:17 (a seed)"
        )

    def check_ranks(self, size: int) -> None:
        """Refuse a schedule that names ranks which a cluster of this size does not have."""
        ranks = {int(point.task.partition(".")[0]) for point in self.stalls}
        if self.kind in OF_A_RANK and self.number is not None:
            ranks.add(self.number)
        if any(rank >= size for rank in ranks):
            raise ArgumentError(f"schedule {self.name!r} names rank {max(ranks)}, but the ranks are 0 to {size - 1}")


class Choices:
    """Random choices, the same ones for the same seed."""

    def __init__(self, seed: int | str):
        self.rng = random.Random(seed)
        # with some seeds tasks run for long, with others they switch at nearly every point
        self.stay = self.rng.choice((0.1, 0.5, 0.9))

    def stays(self, task: Task) -> bool:
        """Does a task that could continue at a preemption point do so?"""
        return self.rng.random() < self.stay

    def pick(self, ready: Sequence[Task], slow: Mapping[int, float]) -> Task:
        """The task that runs next; `slow` is that of the simulator's options."""
        if not slow:
            return ready[int(self.rng.random() * len(ready))]
        return self.rng.choices(ready, [slow.get(task.rank, 1.0) for task in ready])[0]

    def takes(self) -> bool:
        """Does the network take another request before it moves those in flight?"""
        return self.rng.random() < 0.5

    def moves(self, flying: Sequence[Request]) -> Request:
        """The request in flight that moves next. `flying` is sorted by age, the oldest first."""
        return self.rng.choice(flying)


class Systematic(Choices):
    """The choices of a named schedule. Unless its name says otherwise, a task runs until it has to wait, and then the
    next one that can run, in the order of their creation; the network moves the oldest request.

    reversed: in the opposite order of tasks. alternating: another task at every point. one-cta: a launch starts a CTA
    when the one before has ended. slow:R: a task of rank R runs only when no other task can. late:R: the same for its
    Python code alone, so that it is the last to make every call. ahead:R: others run only when no task of rank R can.
    oldest-first: the network moves whenever it can. newest-first: it moves only when no other task can, and then the
    request that it took last, so that later requests overtake earlier ones. stall:POINT+...: a task that comes to one
    of the points is stalled until no other task can run; the network moves any request.
    """

    def __init__(self, schedule: Schedule):
        super().__init__(schedule.name)
        self.schedule = schedule
        self.counts: Counter[str] = Counter()  # how often each task was resumed
        self.reached: set[Point] = set()  # of the schedule's stalls
        self.points: list[tuple[Point, Hashable]] = []  # of the schedule `in-order`, with their locations in the code
        self._stalled: list[Task] = []  # the first task that was stalled is the first to resume
        self._current: Task | None = None
        self._last = -1  # number of the task that ran last
        self._unbroken = 0
        self._passed_over = 0

    def stays(self, task: Task) -> bool:
        self._passed_over += 1
        if self._stalls(task):
            return False
        if self.schedule.kind not in (IN_ORDER, REVERSED, ONE_CTA, STALL, LATE) or self._passed_over > STARVED:
            return False  # `pick` decides
        self._unbroken += 1
        if self._unbroken > UNBROKEN:
            self._current = None
            return False
        return True

    def pick(self, ready: Sequence[Task], slow: Mapping[int, float]) -> Task:
        self._passed_over += 1
        task = self._next(ready)
        while self._stalls(task):
            task = self._next(ready)
        self._current, self._last, self._unbroken = task, task.number, 0
        return task

    def _stalls(self, task: Task) -> bool:
        """Count a point at which a task would resume. Is it stalled there?"""
        point = Point(task.label, self.counts[task.label])
        self.counts[task.label] += 1
        if self.schedule.kind == IN_ORDER:
            self.points.append((point, _place(task, point.count > 0)))
        if point not in self.schedule.stalls or point in self.reached:
            return False
        self.reached.add(point)
        if not self._stalled:
            self._passed_over = 0
        self._stalled.append(task)
        return True

    def _next(self, ready: Sequence[Task]) -> Task:
        if self._passed_over > STARVED:
            self._stalled, self._passed_over = [], 0
            return self._after(ready)
        free = [task for task in ready if task not in self._stalled]
        if not free:
            stalled = next(task for task in self._stalled if task in ready)
            self._stalled.remove(stalled)
            return stalled
        best = min(map(self._precedence, free))
        first = [task for task in free if self._precedence(task) == best]
        if len(first) == len(ready):
            self._passed_over = 0
        if self._current in first and self.schedule.kind != ALTERNATING:
            return self._current
        return self._after(first)

    def _precedence(self, task: Task) -> bool:
        """False for tasks that run whenever they can, True for those that wait until no other task can run."""
        kind, number = self.schedule.kind, self.schedule.number
        if kind in (SLOW, AHEAD):
            return (task.rank == number) == (kind == SLOW)
        if kind == LATE:
            return task.label == f"{number}.host"
        if kind in (OLDEST_FIRST, NEWEST_FIRST):
            return task.label.endswith(".net") == (kind == NEWEST_FIRST)
        return False

    def _after(self, tasks: Sequence[Task]) -> Task:
        """The task after the one that ran last, cyclically."""
        size = 1 + max(self._last, max(task.number for task in tasks))
        if self.schedule.kind == REVERSED:
            last = size if self._last < 0 else self._last
            return min(tasks, key=lambda task: (last - task.number - 1) % size)
        return min(tasks, key=lambda task: (task.number - self._last - 1) % size)

    def takes(self) -> bool:
        return self.schedule.kind != STALL or super().takes()

    def moves(self, flying: Sequence[Request]) -> Request:
        if self.schedule.kind == STALL:
            return super().moves(flying)
        return flying[-1 if self.schedule.kind == NEWEST_FIRST else 0]


def _place(task: Task, started: bool) -> Hashable:
    """The location of a task in the code: the call stack of a CTA at a preemption point, or else the kind of task."""
    frame: FrameType | None = sys._getframe(2)  # of `stays` or `pick`
    if frame is None or frame.f_code.co_name != "stays":
        return task.label.partition(".")[2].rstrip("0123456789"), started
    lines = []
    while frame is not None and frame.f_code.co_name != "_start":
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def choices_of(schedule: str | None, seed: int) -> Choices:
    """The choices of a schedule or, if there is none, of a seed."""
    if schedule is None:
        return Choices(seed)
    parsed = Schedule.parse(schedule)
    if parsed.kind == RANDOM and parsed.number is not None:
        return Choices(parsed.number)
    return Systematic(parsed)
