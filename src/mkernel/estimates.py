"""How long the simulator will take, and its progress: for commands that simulate what a user asks for.

The simulator interprets every operation of a kernel, roughly ten thousand times slower than a GPU, and holds the
memory of all ranks. So a shape for GPUs would take days, and many ranks more memory than the machine has.
`Workload.cost` gives the tiles, tile k-steps and copies of a call. How long each of these takes on this machine is
measured with two small calls, unless the simulation is short on any machine.
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

LONG = 240.0  # seconds; a longer simulation needs confirmation
SHORT = 10.0  # seconds that a proposed shape takes at most
SLOWEST = (0.1, 0.01)  # seconds per tile and per tile k-step: no machine is slower
MOST_RANKS = 65_534  # a trace numbers ranks in 16 bits
RANK_BYTES = 1 << 20  # per rank, without tensors: wait records, stacks of CTAs
CTAS = 6  # per simulated launch, see sim.scheduler.Options
CROWD = 100  # number of ranks that doubles all times: the scheduler iterates over all tasks
FIRST_LINE, NEXT_LINE = 10.0, 1.5  # seconds until the first progress line; factor from each line to the next


@dataclass(frozen=True)
class Speed:
    """Seconds per tile (without its k-steps) and per tile k-step on this machine."""

    tile: float
    step: float

    def seconds(self, cost: Cost, ranks: int) -> float:
        return (_tiles(cost) * self.tile + cost.dots * self.step) * (1 + ranks / CROWD)


def _tiles(cost: Cost) -> float:
    """Tiles, plus copies converted to tiles: a copy takes a quarter of the time of a tile, on all machines."""
    return cost.tiles + cost.copies / 4


def larger(workload: Workload, ranks: int) -> Shape:
    """A shape for the simulator with more k-steps per tile."""
    return tuple(size * factor for size, factor in zip(workload.smallest(ranks), workload.deeper))


@functools.cache
def measure(workload: Workload) -> Speed:
    """Measure the operator's speed in the simulator on this machine, with two small calls; takes a few seconds."""
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
    determinant = small * steps[1] - large * steps[0]
    # 0 if both calls have the same number of k-steps per tile, or none: then attribute all time to the tiles
    tile = (first * steps[1] - second * steps[0]) / determinant if determinant else first / small
    # a hiccup of the machine can lead to absurd values: clamp to between 10% and 100% of the first call
    tile = min(max(tile, 0.1 * first / small), first / small)
    return Speed(tile, max((second - tile * large) / steps[1], 0.01 * tile) if steps[1] else 0.0)


def text_of(seconds: float) -> str:
    """A duration for humans."""
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
    """Memory that this process can still allocate."""
    found = math.inf
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit may be "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found = min(found, limit - used)
    return int(found) if found < math.inf else sys.maxsize


@dataclass(frozen=True)
class Simulation:
    """What a command would simulate: (workload, shape, number of calls) for each job.

    events: trace events kept per lane of a CTA.
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
        """Tile k-steps of all calls."""
        return sum(cost.dots * calls for _, cost, calls in self.costs)

    @property
    def nbytes(self) -> int:
        held = max(cost.elements for _, cost, _ in self.costs) * self.itemsize
        return held + self.ranks * (RANK_BYTES + CTAS * LANES * (self.events + 1) * WORDS * 8)

    def seconds(self, speed: Callable[[Workload], Speed] = measure) -> float:
        return sum(speed(workload).seconds(cost, self.ranks) * calls for workload, cost, calls in self.costs)

    def check_fits(self) -> None:
        """Reject what exceeds the limits of traces or the memory of this machine, without running anything."""
        if self.ranks > MOST_RANKS:
            raise ArgumentError(f"there can be {MOST_RANKS} ranks at most, not {self.ranks}")
        if self.nbytes > (free := available_bytes()):
            raise ArgumentError(
                f"the simulator holds the memory of all {self.ranks} ranks: about {_bytes_text(self.nbytes)}, and "
                f"{_bytes_text(max(free, 0))} are free here"
            )

    def is_surely_short(self) -> bool:
        """Is it short on any machine, so that no measurement is needed?"""
        return self.seconds(lambda _: Speed(*SLOWEST)) < LONG


def shorter(workload: Workload, shape: Shape, ranks: int) -> Shape:
    """A similar shape that takes seconds. Repeatedly halves the size that exceeds its minimum by the largest factor,
    until the shape is fast enough or all sizes are minimal."""
    speed = measure(workload)
    least = workload.smallest(ranks)
    shared = [name in workload.operator.shared for name in workload.operator.dimensions]
    current = tuple(shape)
    while speed.seconds(workload.cost(current, ranks), ranks) > SHORT:
        excess = [size / small for size, small in zip(current, least)]
        i = excess.index(max(excess))
        if excess[i] <= 1:
            break
        half = current[i] // 2
        half = max(half // ranks * ranks if shared[i] else half, least[i])
        current = (*current[:i], half, *current[i + 1 :])
    return current


def smallest_call(workload: Workload) -> str:
    """The command line of a trace that takes seconds on any machine."""
    return _command(workload, workload.smallest(4), 1, 4)


def shorter_call(workload: Workload, shape: Shape, nodes: int, ranks: int) -> str:
    """The command line of a similar trace that takes seconds: with a smaller shape or, if there are too many ranks for
    any shape, with fewer ranks."""
    smaller = shorter(workload, shape, nodes * ranks)
    if nodes * ranks > 4 and Simulation([(workload, smaller, 1)], nodes * ranks).seconds() > 3 * SHORT:
        return smallest_call(workload)
    return _command(workload, smaller, nodes, ranks)


def _command(workload: Workload, shape: Shape, nodes: int, ranks: int) -> str:
    several = f" --nodes {nodes}" if nodes > 1 else ""
    return f"mkernel trace {workload.op} {'x'.join(map(str, shape))} --device cpu --ranks {ranks}{several}"


class Watch:
    """Tracks the progress of a simulation. Every rank calls `begin` first."""

    def __init__(self, simulation: Simulation, show: Callable[[float], None]):
        self._dots = simulation.dots
        self._show = show
        self._done = 0  # tile k-steps of clusters that have finished
        self._traffic: Any = None

    def begin(self, group: Group) -> None:
        traffic = group.world.traffic  # type: ignore[attr-defined]
        if traffic is not self._traffic:
            self._done += self._steps_now()
            self._traffic = traffic
            traffic.on_progress = self._update

    def _steps_now(self) -> int:
        return sum(self._traffic.multiplications) if self._traffic is not None else 0

    def _update(self) -> None:
        self._show(min((self._done + self._steps_now()) / max(self._dots, 1), 0.99))


@contextlib.contextmanager
def progress(simulation: Simulation, seconds: float | None = None) -> Iterator[Watch]:
    """Show the progress of a simulation on stderr, with its expected duration: a bar on a terminal, otherwise
    occasional lines."""
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
