"""Launches in the simulator: their CTAs, what they may touch, and what they move."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mkernel.lang import context as words
from mkernel.runtime.errors import SimulatorError
from mkernel.runtime.world import Launch
from mkernel.sim.interpreter import kernel_arguments, python_function
from mkernel.sim.memory import Keeps
from mkernel.sim.order import NOTHING, Clock, joined
from mkernel.sim.scheduler import CtaTask
from mkernel.sim.shadow import Access

if TYPE_CHECKING:
    from mkernel.sim.world import SimWorld


class Traffic:
    """What moved where, and what was computed meanwhile."""

    def __init__(self, size: int):
        self.nvlink = [[0] * size for _ in range(size)]  # bytes from rank to rank, inside a node
        self.network = [[0] * size for _ in range(size)]  # bytes from rank to rank, between nodes
        self.to_switch = [0] * size  # bytes that a rank gives for multicast stores and sums
        self.from_switch = [0] * size  # and takes
        self.on_progress: Callable[[], None] | None = None  # called now and then, while a launch goes on
        self.multiplications = [0] * size  # tile steps that a rank has computed
        self.before_last_arrival = [0] * size  # how many of them before its last byte came in

    def progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress()

    def arrived(self, rank: int) -> None:
        self.before_last_arrival[rank] = self.multiplications[rank]


class RunningLaunch:
    """A launch whose CTAs are tasks."""

    def __init__(self, world: SimWorld, rank: int, launch: Launch):
        self.world = world
        self.rank = rank
        self.op = launch.op
        self.spec = launch
        self.grid = launch.grid
        self.function = python_function(launch.kernel, world.options.replace)
        self.arguments = kernel_arguments(launch.kernel, launch.arguments, world.options.replace)
        self.stream: Hashable = "default"
        self.clock: Clock = NOTHING  # what was known when it was launched
        self.end: Clock = NOTHING  # what its CTAs know that have ended
        self.first_event = 0
        self.started = 0
        self.ended = 0
        self.done = False
        self.number = 0  # of the exchange in which its ranks compare what they call
        self.exchange: Hashable = None  # that exchange, if not all had come to it
        self.leaves = False  # its ranks called different things
        self.loans: list[Any] = []  # what it was given
        self.constants: dict[tuple[np.uint64, np.dtype], Any] = {}  # what its CTAs have loaded that no kernel changes
        uses = launch.uses
        segment = (launch.group.name, uses.workspace.segment.number) if uses is not None and uses.arrays else None
        self.keeps = Keeps(segment, uses.arrays if uses is not None else ())
        table = launch.arguments.get("context")
        self._epoch = int(table[words.STATE.value]) if isinstance(table, torch.Tensor) else 0  # address of its epoch
        self._epoch_before: int | None = None  # if the kernel asked for it

    def leave(self) -> None:
        """Let all waits of the launch end."""
        self.leaves = True
        self.world.given_up.add(self.spec.group.name)
        self.spec.group._control.memory[:8].view(torch.int64)[0] = 1
        for task in self.world.scheduler.tasks:
            if isinstance(task, CtaTask) and task.launch is self:
                task.leaves = True

    def start_more(self, time: float) -> None:
        """Start as many CTAs as may be resident, at that time of a trace."""
        resident = self.world.options.resident or self.grid
        races = self.world.races
        while self.started < self.grid and self.started - self.ended < resident:
            order = None
            if races is not None:
                name = f"rank {self.rank}, CTA {self.started} of {self.op}"
                known = joined(self.clock, self.world.clock_of_stream(self.rank, self.stream))
                order = races.cta((self.rank, self.stream, self.started), name, known)
            task = CtaTask(self.world.scheduler, self.rank, self, self.started, self.grid, time, order)
            task.leaves = self.leaves
            self.world.scheduler.add(task)
            self.started += 1

    def given_up(self) -> bool:
        """Has its group given up a wait? Then nothing is in order any more."""
        return self.spec.group.name in self.world.given_up

    def on_change(self, changed: Sequence[int]) -> None:
        """Words were changed by an atomic operation."""
        for word in changed:
            if word in self.world.flags:
                self.world.given_up.add(self.world.flags[word])

    def on_load_one(self, address: int) -> None:
        if address == self._epoch:
            self._epoch_before = ctypes.c_int64.from_address(address).value

    def check_epoch(self) -> None:
        """A kernel that asked for the epoch must have completed it."""
        if self._epoch_before is not None and ctypes.c_int64.from_address(self._epoch).value == self._epoch_before:
            raise SimulatorError(
                f"{self.op}: the launch on rank {self.rank} has ended, but its epoch has not: every CTA must call "
                f"finish(context, epoch, SIZE) last. The next launch would take old signals for its own"
            )

    def on_store(self, touched: Sequence[Access]) -> None:
        self.world.traffic.progress()
        for owner, size in self._remote(touched):
            if size > 8:  # more than a signal
                self.world.traffic.nvlink[self.rank][owner] += size
            self.world.traffic.arrived(owner)

    def on_load(self, touched: Sequence[Access]) -> None:
        for owner, size in self._remote(touched):
            self.world.traffic.nvlink[owner][self.rank] += size
            self.world.traffic.arrived(self.rank)

    def _remote(self, touched: Sequence[Access]) -> Iterator[tuple[int, int]]:
        """Which of it is in other ranks' memory, and how many bytes."""
        for access in touched:
            owner = access.shadow.owner
            if owner is not None and owner != self.rank:
                yield owner, access.addresses.size * access.size

    def on_store_everywhere(self, nbytes: int) -> None:
        traffic = self.world.traffic
        traffic.to_switch[self.rank] += nbytes
        for member in self.spec.group.members:
            traffic.from_switch[member] += nbytes
            traffic.arrived(member)

    def on_load_sum(self, nbytes: int) -> None:
        traffic = self.world.traffic
        for member in self.spec.group.members:
            traffic.to_switch[member] += nbytes
        traffic.from_switch[self.rank] += nbytes
        traffic.arrived(self.rank)

    def on_dot(self) -> None:
        self.world.traffic.multiplications[self.rank] += 1
        self.world.traffic.progress()


def tensors_in(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a kernel, in structures too, and their names."""
    for name, value in arguments.items():
        tensor = getattr(value, "base", value)  # of a descriptor
        if isinstance(tensor, torch.Tensor):
            yield prefix + name, tensor
        elif isinstance(value, tuple):
            names = getattr(value, "_fields", map(str, range(len(value))))
            yield from tensors_in(dict(zip(names, value)), f"{prefix}{name}.")
