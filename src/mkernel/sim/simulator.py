"""What the parts of a simulated cluster share: the scheduler, its memory, and what is known about kernels."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from mkernel.sim.memory import call_when_freed
from mkernel.sim.order import NOTHING, Clock, Thread
from mkernel.sim.races import Races
from mkernel.sim.scheduler import Options, Scheduler
from mkernel.sim.traffic import Traffic


class Simulator:
    """The state of a simulation. In a process that is one rank among others, that of this rank."""

    def __init__(self, size: int, scheduler: Scheduler, options: Options):
        self.size = size
        self.scheduler = scheduler
        self.options = options
        self.traffic = Traffic(size)
        self.abort_flags: dict[int, Hashable] = {}  # address of an abort flag -> its group
        self.given_up: set[Hashable] = set()  # groups in which a wait was given up
        self.allocated = 0  # bytes
        self._stream_clocks: dict[tuple[int, Hashable], Clock] = {}  # by rank and stream

    @property
    def races(self) -> Races | None:
        return self.scheduler.memory.races

    def allow(self, tensor: torch.Tensor, owner: int | None) -> None:
        """Let kernels access a tensor for as long as it lives."""
        self.scheduler.memory.add(tensor.data_ptr(), tensor.numel() * tensor.element_size(), owner)
        call_when_freed(tensor, self.scheduler.memory.remove, tensor.data_ptr())

    # -- happens-before, for the race detector

    def host_thread(self, rank: int) -> Thread | None:
        """The Python code of a rank, as the race detector knows it."""
        return self.races.thread(("host", rank), f"rank {rank}, Python") if self.races is not None else None

    def stream_clock(self, rank: int, stream: Hashable) -> Clock:
        """What happened before the end of all launches on a stream."""
        return self._stream_clocks.get((rank, stream), NOTHING)

    def set_stream_clock(self, rank: int, stream: Hashable, clock: Clock) -> None:
        self._stream_clocks[rank, stream] = clock

    def host_waited_for(self, rank: int, *streams: Hashable) -> None:
        """The Python code of a rank has waited for everything launched on these streams."""
        host = self.host_thread(rank)
        if host is not None:
            for stream in streams:
                host.acquire(self.stream_clock(rank, stream))
