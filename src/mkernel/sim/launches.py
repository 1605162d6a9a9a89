"""Launches in the simulator: their CTAs, what they may access, and the queues of streams."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mkernel.lang import context as words
from mkernel.runtime.errors import CommTimeout, SimulatorError
from mkernel.runtime.world import Launch
from mkernel.sim.interpreter import is_gluon, kernel_arguments, python_function
from mkernel.sim.memory import Keeps
from mkernel.sim.order import NOTHING, Clock, joined
from mkernel.sim.races import Actor, Races
from mkernel.sim.scheduler import CtaTask
from mkernel.sim.shadow import SPENT, Access
from mkernel.sim.tasks import Task
from mkernel.sim.warps import GluonCta, WarpOrder, WarpTask

DEFAULT_STREAM = "default"
POISON = 0xFF  # bytes of NaN in bf16, fp16 and fp32

if TYPE_CHECKING:
    from mkernel.sim.simulator import Simulator


class RunningLaunch:
    """A launch whose CTAs are tasks."""

    def __init__(self, simulator: Simulator, rank: int, launch: Launch):
        self.simulator = simulator
        self.rank = rank
        self.op = launch.op
        self.spec = launch
        self.grid = launch.grid
        self.is_gluon = is_gluon(launch.kernel)
        self.function = python_function(launch.kernel, simulator.options.replace)
        self.arguments = kernel_arguments(launch.kernel, launch.arguments, simulator.options.replace)
        self.stream: Hashable = DEFAULT_STREAM
        self.clock: Clock = NOTHING  # what happened before it was launched
        self.end: Clock = NOTHING  # the clocks of its CTAs that have ended
        self.first_event = 0
        self.started = 0
        self.ended = 0
        self.done = False
        self.number = 0  # of the exchange in which its ranks compare their calls
        self.exchange: Hashable = None  # that exchange, if ranks were missing when it was launched
        self.aborted = False  # its ranks made different calls
        self.loans: list[Any] = []  # of the tensors it was given
        self.constants: dict[tuple[np.uint64, np.dtype], Any] = {}  # constants that its CTAs have loaded
        uses = launch.uses
        segment = (launch.group.name, uses.workspace.segment.number) if uses is not None and uses.arrays else None
        self.keeps = Keeps(segment, uses.arrays if uses is not None else ())
        table = launch.arguments.get("context")
        state = int(table[words.STATE.value]) if isinstance(table, torch.Tensor) else 0
        self._epoch = state + words.EPOCH.value * 8  # address of the epoch of its first CTA
        self._epoch_before: int | None = None  # if the kernel has loaded it

    def abort(self) -> None:
        """End all waits of the launch."""
        self.aborted = True
        self.simulator.given_up.add(self.spec.group.name)
        flag = self.spec.group.abort_flag
        assert flag is not None
        flag[0] = 1
        for task in self.simulator.scheduler.tasks:
            if isinstance(task, CtaTask) and task.launch is self:
                task.aborted = True

    def start_more(self, time: float) -> None:
        """Start as many CTAs as may be resident, at this trace time."""
        resident = self.simulator.options.resident or self.grid
        races = self.simulator.races
        while self.started < self.grid and self.started - self.ended < resident:
            order = None
            if races is not None:
                name = f"rank {self.rank}, CTA {self.started} of {self.op}"
                known = joined(self.clock, self.simulator.stream_clock(self.rank, self.stream))
                of_cta = WarpOrder if self.is_gluon else Races.cta
                order = of_cta(races, (self.rank, self.stream, self.started), name, known)
            make = GluonCta if self.is_gluon else CtaTask
            task = make(self.simulator.scheduler, self.rank, self, self.started, self.grid, time, order)
            task.aborted = self.aborted
            self.simulator.scheduler.add(task)
            self.started += 1

    def given_up(self) -> bool:
        """Has its group given up a wait? Then nothing is ordered any more."""
        return self.spec.group.name in self.simulator.given_up

    def on_change(self, changed: Sequence[int]) -> None:
        """An atomic operation has changed these words."""
        for word in changed:
            if word in self.simulator.abort_flags:
                self.simulator.given_up.add(self.simulator.abort_flags[word])

    def on_load_one(self, address: int) -> None:
        if address == self._epoch:  # every kernel that loads the epoch has a first CTA
            self._epoch_before = ctypes.c_int64.from_address(address).value

    def check_epoch(self) -> None:
        """A kernel that has loaded the epoch must complete it."""
        if self._epoch_before is None:
            return
        epochs = (ctypes.c_int64 * self.grid).from_address(self._epoch)
        if min(epochs) <= self._epoch_before:
            raise SimulatorError(
                f"{self.op}: the launch on rank {self.rank} has ended, but its epoch has not: every CTA must call "
                f"finish(context, epoch, WORLD_SIZE) last. The next launch would mistake old signals for its own"
            )

    def on_store(self, touched: Sequence[Access]) -> None:
        self.simulator.traffic.progress()
        for owner, size in self._remote(touched):
            if size > 8:  # more than a signal
                self.simulator.traffic.nvlink[self.rank][owner] += size
            self.simulator.traffic.arrived(owner)

    def on_load(self, touched: Sequence[Access]) -> None:
        for owner, size in self._remote(touched):
            self.simulator.traffic.nvlink[owner][self.rank] += size
            self.simulator.traffic.arrived(self.rank)

    def _remote(self, touched: Sequence[Access]) -> Iterator[tuple[int, int]]:
        """The accesses to memory of other ranks: the rank, and how many bytes."""
        for access in touched:
            owner = access.shadow.owner
            if owner is not None and owner != self.rank:
                yield owner, access.addresses.size * access.size

    def on_store_everywhere(self, nbytes: int) -> None:
        traffic = self.simulator.traffic
        traffic.to_switch[self.rank] += nbytes
        for member in self.spec.group.members:
            traffic.from_switch[member] += nbytes
            traffic.arrived(member)

    def on_load_sum(self, nbytes: int) -> None:
        traffic = self.simulator.traffic
        for member in self.spec.group.members:
            traffic.to_switch[member] += nbytes
        traffic.from_switch[self.rank] += nbytes
        traffic.arrived(self.rank)

    def on_dot(self) -> None:
        self.simulator.traffic.multiplications[self.rank] += 1
        self.simulator.traffic.progress()


class Execution:
    """Runs the launches on the streams of this process's ranks."""

    def __init__(self, simulator: Simulator):
        self.simulator = simulator
        self.queues: dict[tuple[int, Hashable], deque[RunningLaunch]] = {}  # by rank and stream
        self.launches_done = 0
        self.timeouts: list[CommTimeout] = []  # that ended the Python code of ranks
        self.on_launch_done: Callable[[RunningLaunch], None] = lambda running: None
        self._entered: dict[int, list[Hashable]] = {}  # rank -> the streams it has entered
        self._times: dict[int, float] = {}  # rank -> when its last CTA ended, in trace time

    def start(self, running: RunningLaunch, stream: Hashable) -> None:
        """Queue a launch on a stream. While it runs, the kernel may access the tensors it was given."""
        self._lend(running, stream)
        queue = self.queues.setdefault((running.rank, stream), deque())
        queue.append(running)
        if len(queue) == 1:
            running.start_more(self._times.get(running.rank, 0.0))

    @contextlib.contextmanager
    def stream(self, rank: int, name: Hashable) -> Iterator[None]:
        """Inside, `stream_key` of the rank is this name."""
        self._entered.setdefault(rank, []).append(name)
        try:
            yield
        finally:
            self._entered[rank].pop()

    def stream_key(self, rank: int) -> Hashable:
        entered = self._entered.get(rank)
        return entered[-1] if entered else DEFAULT_STREAM

    def poll_idle(self, rank: int) -> bool:
        return not any(queue for (owner, _), queue in self.queues.items() if owner == rank)

    def streams_of(self, rank: int) -> list[Hashable]:
        """The streams that a rank has launched on."""
        return [stream for owner, stream in self.queues if owner == rank]

    def _lend(self, running: RunningLaunch, stream: Hashable) -> None:
        """Let the kernel access the tensors it was given, while it runs."""
        host = self.simulator.host_thread(running.rank)
        running.stream = stream
        if host is not None and self.simulator.races is not None:
            running.clock = host.release_clock()
            running.first_event = self.simulator.races.now
        launch = running.spec
        tensors = dict(tensors_in(launch.arguments))
        running.loans = self.simulator.scheduler.memory.lend(
            tensors, running.rank, lambda name: name != "context" and name not in launch.inputs
        )

    def finish_call(self, running: RunningLaunch) -> None:
        """A call has returned, so the Python code of the rank may do anything with its tensors: nobody may still access
        those in the symmetric heap, which kernels of other ranks can reach."""
        self.simulator.host_waited_for(running.rank, running.stream)
        host = self.simulator.host_thread(running.rank)
        if host is None or self.simulator.races is None or running.given_up():
            return
        site = self.simulator.races.sites.named("Python code, after the call has returned")
        for piece, region in running.loans:
            if piece.belongs_to_user:
                access = self.simulator.scheduler.memory.span(region.start, region.end - region.start, "Python code")
                self.simulator.races.store(Actor(host, host.clock), access, site)

    def task_done(self, task: Task) -> None:
        if task.failure is not None:
            # ranks time out together: collect all timeouts, and then raise one that is a cause
            if not isinstance(task.failure, CommTimeout):
                raise task.failure
            self.timeouts.append(task.failure)
        if not isinstance(task, CtaTask) or isinstance(task, WarpTask):
            return
        running: RunningLaunch = task.launch
        running.ended += 1
        if task.order is not None:
            running.end = joined(running.end, task.order.ended())
        self._times[running.rank] = max(self._times.get(running.rank, 0.0), task.time)
        running.start_more(task.time)
        if running.ended == running.grid:
            self._launch_done(running)

    def _launch_done(self, running: RunningLaunch) -> None:
        if not running.given_up():
            running.check_epoch()
            self._check_results(running)
        self.simulator.set_stream_clock(running.rank, running.stream, running.end)
        uses = running.spec.uses
        if uses is not None:
            workspace = uses.workspace
            used = workspace.data if uses.whole else workspace.half(int(workspace.state[words.EPOCH.value]) % 2)
            for start, end in uses.free:
                if end > start:
                    used[start:end] = POISON
                    self._spend(running, used[start:end])
        self.simulator.scheduler.memory.take_back(running.loans)
        running.done = True
        self.launches_done += 1
        for queue in self.queues.values():
            if queue and queue[0] is running:
                queue.popleft()
                if queue:
                    queue[0].start_more(self._times.get(running.rank, 0.0))
        self.on_launch_done(running)

    def _spend(self, running: RunningLaunch, used: torch.Tensor) -> None:
        """Mark this memory as spent: nobody may use its contents, or still be reading it."""
        races, start, size = self.simulator.races, used.data_ptr(), used.numel()
        piece = self.simulator.scheduler.memory.piece_of(start)
        if races is None or piece is None or running.given_up():
            return
        key = running.rank, running.stream
        thread = races.thread(("end", key), f"rank {running.rank}, the end of {running.op}")
        thread.begin(self.simulator.stream_clock(*key))
        access = self.simulator.scheduler.memory.span(start, size, "the end of a launch")
        site = races.sites.named("the workspace of a launch is overwritten when it has ended")
        races.store(Actor(thread, thread.clock), access, site)
        piece.set(start, start + size, SPENT)
        self.simulator.set_stream_clock(*key, thread.release_clock())

    def _check_results(self, running: RunningLaunch) -> None:
        """Every element of a result must have been written."""
        if self.simulator.races is None:
            return
        for piece, region in running.loans:
            if region.name in running.spec.results:
                missing = piece.unwritten_since(region, running.first_event)
                if missing is not None:
                    raise SimulatorError(
                        f"{running.op}: the launch on rank {running.rank} has ended, and nobody has written "
                        f"{region.name}{region.place(missing)}"
                    )


def tensors_in(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a kernel, also inside structures, and their names."""
    for name, value in arguments.items():
        tensor = getattr(value, "base", value)  # of a descriptor
        if isinstance(tensor, torch.Tensor):
            yield prefix + name, tensor
        elif isinstance(value, tuple):
            names = getattr(value, "_fields", map(str, range(len(value))))
            yield from tensors_in(dict(zip(names, value)), f"{prefix}{name}.")
