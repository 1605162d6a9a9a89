"""Many schedules of one program, in an order that finds bugs early, and what they covered.

The first ones are the extremes: each rank slow, the network newest first and oldest first, one CTA at a time, tasks
reversed and alternating. Then come stalls: one task is stalled at one point of its run until no other task can run.
There are thousands of such points, and most of them are alike, so every *place* in the code (the call stack of a CTA)
is tried once before any of them is tried again, at another time of the run and for another task. When all points have
been tried, schedules with two stalls follow. Stalls alternate with ranks that are late in every call, or ahead of all
others. The sequence does not depend on how many schedules are run: more of them only go further.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import check_cluster, spawn
from mkernel.sim.choices import (
    AHEAD,
    ALTERNATING,
    IN_ORDER,
    LATE,
    NEWEST_FIRST,
    OLDEST_FIRST,
    ONE_CTA,
    RANDOM,
    REVERSED,
    SLOW,
    STALL,
    Point,
    Schedule,
    Systematic,
)
from mkernel.sim.scheduler import Options
from mkernel.sim.world import SimWorld

GOLDEN = 0.618  # rotates the points of each place, so that stalls are spread over the run
BOUND = 2  # stalls of a schedule
CO_RESIDENT = (
    f"{ONE_CTA} starts a CTA of a launch when the one before has ended. To check a kernel whose CTAs wait for each "
    f"other, and are all resident on a GPU, pass without={[ONE_CTA]}."
)
SHOWN = 20  # pairs and waits that a report lists


def spread(count: int) -> Iterator[int]:
    """The numbers below `count`, in an order whose beginnings, however long, are spread evenly."""
    bits = max(count - 1, 0).bit_length()
    for number in range(1 << bits):
        place = int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
        if place < count:
            yield place


def round_robin(points: Sequence[tuple[Point, Hashable]]) -> list[Point]:
    """The points of a run in the order in which they are stalled: round-robin over the places in the code."""
    places: dict[Hashable, list[Point]] = {}
    for point, place in points:
        places.setdefault(place, []).append(point)
    turns = []
    for number, group in enumerate(places.values()):
        first = int(GOLDEN * number % 1 * len(group))
        turns.append([group[(first + step) % len(group)] for step in spread(len(group))])
    return [point for turn in itertools.zip_longest(*turns) for point in turn if point is not None]


def _combinations(count: int, size: int) -> Iterator[tuple[int, ...]]:
    """All combinations of `size` of the first `count` numbers, sorted by their largest number."""
    if size == 0:
        yield ()
        return
    for last in range(size - 1, count):
        for others in _combinations(last, size - 1):
            yield (*others, last)


def stalls(points: Sequence[tuple[Point, Hashable]], bound: int) -> Iterator[str]:
    """The names of all schedules with up to `bound` stalls at the points of a run."""
    turns = round_robin(points)
    when = {point: number for number, (point, _) in enumerate(points)}
    for size in range(1, bound + 1):
        for chosen in _combinations(len(turns), size):
            stalled = sorted((turns[number] for number in chosen), key=when.__getitem__)
            yield f"{STALL}:{'+'.join(map(str, stalled))}"


def names(points: Sequence[tuple[Point, Hashable]], ranks: int, bound: int = BOUND) -> Iterator[str]:
    """The names of all schedules of a program except the first one, `in-order`, whose points these are."""
    yield from (f"{SLOW}:{rank}" for rank in range(ranks) if ranks > 1)
    if any(point.task.endswith(".net") for point, _ in points):
        yield from (NEWEST_FIRST, OLDEST_FIRST)
    yield from (ONE_CTA, REVERSED, ALTERNATING)
    others = (f"{kind}:{rank}" for kind in (LATE, AHEAD) for rank in range(ranks) if ranks > 1)
    stalled = stalls(points, bound)
    while some := [*itertools.islice(stalled, 2), *itertools.islice(others, 1)]:
        yield from some


@dataclass
class Report:
    """What schedules have covered.

    ran: the names of the schedules that have ended. failed: the one that failed. complete: are there no others within
    the bound of stalls?
    points, places: points at which a task could be stalled in the schedule `in-order`, and their places in the code.
    stalled: points at which a task was stalled. unreached: stalls that a run never reached.
    orders: (line, line) of two conflicting accesses -> how often they occurred in that order; None if the race detector
    is off. waits: line of a wait -> how often it was satisfied at once, and how often it had to wait.
    """

    nodes: int
    gpus_per_node: int
    ran: list[str] = field(default_factory=list)
    failed: str | None = None
    complete: bool = False
    seconds: float = 0.0
    points: int = 0
    places: int = 0
    stalled: set[Point] = field(default_factory=set)
    unreached: set[Point] = field(default_factory=set)
    orders: Counter[tuple[str, str]] | None = None
    waits: dict[str, list[int]] | None = None

    @property
    def both_orders(self) -> list[tuple[str, str]]:
        """Pairs of lines whose conflicting accesses were seen in both orders, including a line with itself."""
        orders = self.orders or Counter()
        return sorted(pair for pair in orders if pair[0] <= pair[1] and pair[::-1] in orders)

    @property
    def one_order(self) -> list[tuple[str, str]]:
        """Pairs of lines whose conflicting accesses were seen in this order only: the protocol orders them, or the
        other order was not explored."""
        orders = self.orders or Counter()
        return sorted(pair for pair in orders if pair[::-1] not in orders)

    @property
    def waited(self) -> list[str]:
        """Lines of waits that had to wait at least once."""
        return sorted(line for line, (_, late) in (self.waits or {}).items() if late)

    @property
    def never_waited(self) -> list[str]:
        """Lines of waits that were always satisfied at once: without them, nothing would have changed."""
        return sorted(line for line, (_, late) in (self.waits or {}).items() if not late)

    def add(self, world: SimWorld) -> None:
        """Add what a run has covered."""
        choices = world.scheduler.choices
        if isinstance(choices, Systematic):
            self.stalled |= choices.reached
            self.unreached |= choices.schedule.stalls - choices.reached
            if choices.points:
                self.points, self.places = len(choices.points), len({place for _, place in choices.points})
        races: Any = getattr(world, "races", None)
        if races is None:
            return
        self.orders = self.orders or Counter()
        self.orders.update(races.orders)
        self.waits = self.waits or {}
        for line, (at_once, late) in races.waits.items():
            before = self.waits.get(line, [0, 0])
            self.waits[line] = [before[0] + at_once, before[1] + late]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        kinds = Counter(
            kind if kind in (STALL, RANDOM) else "named" for kind in (name.partition(":")[0] for name in self.ran)
        )
        of_kinds = ", ".join(
            f"{kinds[kind]} {words}"
            for kind, words in (("named", "named"), (STALL, "with stalls"), (RANDOM, "random"))
            if kinds[kind]
        )
        end = f"; {self.failed} failed" if self.failed else ", all passed" if self.ran else ""
        yield (
            f"{len(self.ran)} schedules of {self.nodes} x {self.gpus_per_node} ranks in {self.seconds:.1f} s"
            f"{f' ({of_kinds})' if of_kinds else ''}{end}"
        )
        if self.complete:
            yield "these are all schedules with this many stalls"
        if self.points:
            yield (
                f"preemption points: {self.points} in schedule {IN_ORDER}, at {self.places} places in the code; tasks "
                f"were stalled at {len(self.stalled)}"
            )
        for point in sorted(self.unreached, key=str) if len(self.ran) <= 1 else ():
            yield f"no task reached {point}: is this another program, or another version of it?"
        if self.orders is None or self.waits is None:
            yield "conflicting accesses and waits: not recorded, since the race detector is off"
            return
        both, one = self.both_orders, self.one_order
        yield f"pairs of lines with conflicting accesses: {len(both)} seen in both orders, {len(one)} in one order only"
        if one:
            yield "  one order only (the protocol orders them, or the other order was not explored):"
            yield from _some([f"{first}, then {second} ({self.orders[first, second]} times)" for first, second in one])
        waited, never = self.waited, self.never_waited
        yield f"lines at which a CTA waits: at {len(waited)} it had to, at {len(never)} it never had to"
        if never:
            yield "  never (the signal was always set already: the wait is needless, or no schedule made it late):"
            yield from _some([f"{line} ({self.waits[line][0]} times)" for line in never])


def _some(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"    {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"    and {len(lines) - SHOWN} more"


class Exploration:
    """Runs `fn(group, *args)` on every rank of a simulated cluster, under one schedule after the other. Iterating runs
    them, and yields the name of each that has passed; a failure is raised unchanged, with the name of its schedule as
    the attribute `schedule`. `report` has what was covered so far.

    schedules: the most systematic schedules. random: how many random ones follow, with seeds from `seed` on.
    only: the name of the one schedule to run. without: names of schedules to skip. bound: stalls per schedule.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), *, nodes: int = 1, gpus_per_node: int = 2,
        schedules: int = 50, random: int = 0, seed: int = 0, timeout: float = 30.0, sim: Options | None = None,
        only: str | None = None, without: Sequence[str] = (), bound: int = BOUND,
    ):  # fmt: skip
        for name, value in (("schedules", schedules), ("random", random), ("bound", bound)):
            if not isinstance(value, int) or value < 0:
                raise ArgumentError(f"{name} must be a whole number, 0 or more; got {value!r}")
        if schedules + random == 0:
            raise ArgumentError("schedules and random are both 0: nothing would run")
        if not isinstance(seed, int):
            raise ArgumentError(f"seed must be an integer, got {seed!r}")
        if isinstance(without, str):
            raise ArgumentError(
                f"without must be a list of the names of schedules, such as [{without!r}]; got a string"
            )
        sim = Options() if sim is None else sim
        if not isinstance(sim, Options):
            raise ArgumentError(f"sim must be a mkernel.sim.scheduler.Options, got {type(sim).__name__}")
        for name in ("slow", "late"):
            if getattr(sim, name):
                raise ArgumentError(
                    f"sim.{name} must be empty: each rank is {name} in a schedule of its own, such as {name}:0; got "
                    f"{getattr(sim, name)}"
                )
        if sim.schedule is not None:
            raise ArgumentError(f"sim.schedule must be None; to run one schedule, pass schedule={sim.schedule!r}")
        check_cluster(nodes, gpus_per_node)
        size = nodes * gpus_per_node
        for given in (*without, *([only] if only is not None else [])):
            Schedule.parse(given).check_ranks(size)
        if IN_ORDER in without:
            raise ArgumentError(f"without must not name {IN_ORDER!r}: the stalls of others are at points of its run")
        self._fn, self._args, self._size, self._options, self._bound = fn, args, size, sim, bound
        self._spawn = dict(nodes=nodes, gpus_per_node=gpus_per_node, timeout=timeout, device="cpu")
        self._schedules, self._seeds, self._only = schedules, range(seed, seed + random), only
        self._without = frozenset(without)
        self._points: list[tuple[Point, Hashable]] = []
        self.report = Report(nodes, gpus_per_node)
        self.planned = 1 if only is not None else schedules + random  # or fewer, if there are not as many

    def __iter__(self) -> Iterator[str]:
        begun = time.monotonic()
        for name in self._names():
            try:
                self._run(name)
            except Exception as failure:
                self.report.failed = name
                with contextlib.suppress(AttributeError):  # of an exception with slots
                    failure.schedule = name  # type: ignore[attr-defined]
                if name == ONE_CTA and hasattr(failure, "add_note"):
                    failure.add_note(CO_RESIDENT)
                raise
            finally:
                self.report.seconds = time.monotonic() - begun
            self.report.ran.append(name)
            yield name

    def _names(self) -> Iterator[str]:
        if self._only is not None:
            yield self._only
            return
        if self._schedules:
            yield IN_ORDER
            every = (name for name in names(self._points, self._size, self._bound) if name not in self._without)
            chosen = list(itertools.islice(every, self._schedules - 1))
            self.planned = 1 + len(chosen) + len(self._seeds)
            yield from chosen
            self.report.complete = next(every, None) is None
        yield from (f"{RANDOM}:{seed}" for seed in self._seeds)

    def _run(self, name: str) -> None:
        worlds: list[SimWorld] = []

        def on_rank(group: Group, *args: Any) -> Any:
            world = group.world
            assert isinstance(world, SimWorld)
            if not worlds:
                worlds.append(world)
                races: Any = getattr(world, "races", None)
                if races is not None:
                    races.record_orders = True
            return self._fn(group, *args)

        options = dataclasses.replace(self._options, schedule=name)
        try:
            spawn(on_rank, *self._args, sim=options, **self._spawn)  # type: ignore[arg-type]
        finally:
            for world in worlds:
                self.report.add(world)
                if isinstance(world.scheduler.choices, Systematic):
                    self._points = self._points or world.scheduler.choices.points
