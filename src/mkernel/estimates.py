"""How long the simulator will take, and how far it is: for commands that simulate what a user asks for.

The simulator interprets every operation of a kernel, some ten thousand times slower than a GPU, and holds the memory
of all ranks. So a shape for GPUs would take days, and many ranks more memory than there is. A call costs as many tiles,
tile steps and copies as its `Workload.cost` says; what each of these takes on this machine is measured with two small
calls, if there is any doubt.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from mkernel.operators import Shape
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.runtime.tracer import EVENTS, LANES, WORDS
from mkernel.tracing.session import trace
from mkernel.workloads import Cost, Workload

LONG = 180.0  # seconds above which a simulation is not started without being asked for
SHORT = 10.0  # seconds that a proposed shape takes at most
SLOWEST = (0.1, 0.01)  # seconds of a tile and of a tile step: no machine is slower
MOST_RANKS = 65_534  # a trace numbers ranks in 16 bits
RANK_BYTES = 1 << 20  # of a rank without its tensors: wait records, stacks of CTAs
CTAS = 6  # of a simulated launch, see sim.scheduler.Options
CROWD = 100  # ranks with which everything takes twice as long: the scheduler looks at every task
FIRST_LINE, NEXT_LINE = 10.0, 1.5  # seconds until the first line of progress; how much later each next one comes


@dataclass(frozen=True)
class Speed:
    """Seconds that a tile without its steps, and a tile step, take on this machine."""

    tile: float
    step: float

    def seconds(self, cost: Cost, ranks: int) -> float:
        return (_tiles(cost) * self.tile + cost.dots * self.step) * (1 + ranks / CROWD)


def _tiles(cost: Cost) -> float:
    """Tiles, and copies as tiles: a copy takes a quarter of what a tile does, on all machines."""
    return cost.tiles + cost.copies / 4


def larger(workload: Workload, ranks: int) -> Shape:
    """A shape for the simulator with more steps to each tile."""
    return tuple(size * factor for size, factor in zip(workload.smallest(ranks), workload.deeper))


@functools.cache
def measure(workload: Workload) -> Speed:
    """What a call of the operator costs on this machine, from two small ones; a second or a few."""
    ranks = 2
    shapes = (workload.smallest(ranks), larger(workload, ranks))

    def on_rank(group: Group) -> list[float]:
        calls = [workload.make(group, shape, torch.bfloat16) for shape in shapes]
        calls[0].run(None)  # the first call reads the source of the kernel
        times = []
        with trace(group):
            for call in calls:
                group.barrier()
                start = time.process_time()
                call.run(None)
                group.barrier()
                times.append(time.process_time() - start)
        return times

    times = spawn(on_rank, gpus_per_node=ranks, device="cpu")[0]
    return _solve([workload.cost(shape, ranks) for shape in shapes], times, ranks)


def _solve(costs: Sequence[Cost], times: Sequence[float], ranks: int) -> Speed:
    """The speed that explains the times of two calls."""
    (small, large), (first, second) = (tuple(map(_tiles, costs)), (time / (1 + ranks / CROWD) for time in times))
    steps = [cost.dots for cost in costs]
    apart = small * steps[1] - large * steps[0]
    # 0 where both have as many steps to a tile, or none at all: then it is all in the tiles
    tile = (first * steps[1] - second * steps[0]) / apart if apart else first / small
    # a pause of the machine may make nonsense of it: tiles take some part of the first call
    tile = min(max(tile, 0.1 * first / small), first / small)
    return Speed(tile, max((second - tile * large) / steps[1], 0.01 * tile) if steps[1] else 0.0)


def text_of(seconds: float) -> str:
    """A time as people say it."""
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "a second"


def _bytes_text(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} bytes"


def available_bytes() -> int:
    """Memory that this process can have."""
    found = math.inf
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found = min(found, limit - used)
    return int(found) if found < math.inf else sys.maxsize


@dataclass(frozen=True)
class Simulation:
    """What a command would simulate: calls of shapes, each so often.

    events: that a trace keeps of each lane of a CTA.
    """

    jobs: Sequence[tuple[Workload, Shape, int]]
    ranks: int
    itemsize: int = 2
    events: int = EVENTS

    @property
    def costs(self) -> list[tuple[Workload, Cost, int]]:
        return [(workload, workload.cost(shape, self.ranks), calls) for workload, shape, calls in self.jobs]

    @property
    def dots(self) -> int:
        """Tile steps of all calls."""
        return sum(cost.dots * calls for _, cost, calls in self.costs)

    @property
    def nbytes(self) -> int:
        held = max(cost.elements for _, cost, _ in self.costs) * self.itemsize
        return held + self.ranks * (RANK_BYTES + CTAS * LANES * (self.events + 1) * WORDS * 8)

    def seconds(self, speed: Callable[[Workload], Speed] = measure) -> float:
        return sum(speed(workload).seconds(cost, self.ranks) * calls for workload, cost, calls in self.costs)

    def check_fits(self) -> None:
        """Refuse what no trace, or not this machine, can hold; nothing is run or measured for that."""
        if self.ranks > MOST_RANKS:
            raise ArgumentError(f"there can be {MOST_RANKS} ranks at most, not {self.ranks}")
        if self.nbytes > (free := available_bytes()):
            raise ArgumentError(
                f"the simulator holds the memory of all {self.ranks} ranks: about {_bytes_text(self.nbytes)}, and "
                f"{_bytes_text(max(free, 0))} are free here"
            )

    def is_surely_short(self) -> bool:
        """Is it short on any machine, so that nothing needs to be measured?"""
        return self.seconds(lambda _: Speed(*SLOWEST)) < LONG


def shorter(workload: Workload, shape: Shape, ranks: int) -> Shape:
    """A shape like the given one that takes seconds: the sizes that are furthest above the smallest ones are
    halved until it does, or until none is."""
    speed = measure(workload)
    least = workload.smallest(ranks)
    shared = [name in workload.operator.shared for name in workload.operator.dimensions]
    current = tuple(shape)
    while speed.seconds(workload.cost(current, ranks), ranks) > SHORT:
        excess = [size / small for size, small in zip(current, least)]
        place = excess.index(max(excess))
        if excess[place] <= 1:
            break
        half = current[place] // 2
        half = max(half // ranks * ranks if shared[place] else half, least[place])
        current = (*current[:place], half, *current[place + 1 :])
    return current


def smallest_call(workload: Workload) -> str:
    """The command line of a trace that takes seconds everywhere."""
    return _command(workload, workload.smallest(4), 1, 4)


def shorter_call(workload: Workload, shape: Shape, nodes: int, ranks: int) -> str:
    """The command line of a trace like that one which takes seconds: of a smaller shape or, if the ranks are too many
    for any shape, of fewer ranks."""
    smaller = shorter(workload, shape, nodes * ranks)
    if nodes * ranks > 4 and Simulation([(workload, smaller, 1)], nodes * ranks).seconds() > 3 * SHORT:
        return smallest_call(workload)
    return _command(workload, smaller, nodes, ranks)


def _command(workload: Workload, shape: Shape, nodes: int, ranks: int) -> str:
    several = f" --nodes {nodes}" if nodes > 1 else ""
    return f"mkernel trace {workload.op} {'x'.join(map(str, shape))} --device cpu --ranks {ranks}{several}"


class Watch:
    """How far a simulation is. Ranks call `begin` before they do anything."""

    def __init__(self, simulation: Simulation, show: Callable[[float], None]):
        self._dots = simulation.dots
        self._show = show
        self._done = 0  # tile steps of clusters that have ended
        self._traffic: Any = None

    def begin(self, group: Group) -> None:
        traffic = group.world.traffic  # type: ignore[attr-defined]
        if traffic is not self._traffic:
            self._done += self._steps_now()
            self._traffic = traffic
            traffic.on_progress = self._look

    def _steps_now(self) -> int:
        return sum(self._traffic.multiplications) if self._traffic is not None else 0

    def _look(self) -> None:
        self._show(min((self._done + self._steps_now()) / max(self._dots, 1), 0.99))


@contextlib.contextmanager
def progress(simulation: Simulation, seconds: float | None = None) -> Iterator[Watch]:
    """Show on stderr how far a simulation is that is expected to take so long: a bar on a terminal, else a line now and
    then."""
    console = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    shown = 0.0
    next_line = FIRST_LINE

    def on_terminal(share: float) -> None:
        nonlocal shown
        if time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            bar.update(task, completed=share)

    def in_lines(share: float) -> None:
        nonlocal next_line
        spent = time.monotonic() - begun
        if spent > next_line:
            next_line = spent * NEXT_LINE
            print(f"mkernel: simulating, {share:.0%} done after {text_of(spent)}", file=sys.stderr, flush=True)

    about = f"of about {text_of(seconds)}" if seconds is not None else ""
    columns = (TextColumn("simulating"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn(about))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield Watch(simulation, on_terminal if console.is_terminal else in_lines)
