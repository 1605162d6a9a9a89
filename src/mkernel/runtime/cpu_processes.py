"""Ranks as processes on CPUs: each runs the CTAs of its own rank on the interpreter.

What the ranks of a node share lies in shared memory; nodes talk over TCP or RDMA, through the same native proxy
that serves GPUs. So everything but the GPU itself is the real thing, and can be tried on a laptop.
Shared memory has no name in the file system (peers open it through its owner's /proc entry), so
nothing is left behind, however a process ends.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from mkernel.net.config import TransportConfig
from mkernel.runtime.group import Group
from mkernel.runtime.processes import Processes, host_name
from mkernel.runtime.world import exchange_addresses
from mkernel.sim.scheduler import Options, RealTimeScheduler
from mkernel.sim.world import InlineWorld

IDLES_BETWEEN_LOOKS = 50  # idle moments between two looks at the network's health


class ProcessWorld(Processes, InlineWorld):
    """The world of processes on CPUs; see runtime/world.py for what each method promises."""

    scheduler_type = RealTimeScheduler

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        transport: TransportConfig | str,
        timeout: float,
    ):
        seed = dist.get_rank(process_group)
        InlineWorld.__init__(self, dist.get_world_size(process_group), 1, seed, Options())
        Processes.__init__(self, process_group, gpus_per_node, transport, timeout)
        self._files: dict[int, int] = {}  # address of shared memory -> its file descriptor
        self._mapped: dict[Hashable, list[torch.Tensor]] = {}  # peers' memory, by group and segment
        self._just_mapped: list[torch.Tensor] = []
        self._told: set[Hashable] = set()  # connections whose failure the waiting CTAs were told
        self._flagged = False  # a rank was lost, and the waiting CTAs were not told yet
        self._idles = 0
        assert isinstance(self.scheduler, RealTimeScheduler)
        self.scheduler.on_idle = self._watch_proxies

    # -- places

    def device(self, rank: int) -> torch.device:
        return {self.rank: torch.device("cpu")}[rank]  # a process knows no other's, as on GPUs

    # -- memory

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        handle = os.memfd_create("mkernel")
        os.ftruncate(handle, max(nbytes, 1))
        memory = self._map(handle, nbytes)
        self._files[memory.data_ptr()] = handle
        weakref.finalize(memory.untyped_storage(), _close, self._files, memory.data_ptr())
        return memory

    def _map(self, handle: int, nbytes: int) -> torch.Tensor:
        memory = torch.frombuffer(mmap.mmap(handle, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        self._allow(memory, None)
        return memory

    def host_words(self, rank: int, count: int) -> torch.Tensor:
        return super().allocate(rank, count * 8).view(torch.int64)

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        shared = os.getpid(), self._files[memory.data_ptr()], memory.data_ptr(), memory.numel()
        return exchange_addresses(group, shared, self._address_of)

    def _address_of(self, shared: Any) -> int:
        process, file, address, nbytes = shared
        if process == os.getpid():
            return address
        handle = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        try:
            self._just_mapped.append(self._map(handle, nbytes))
        finally:
            os.close(handle)
        return self._just_mapped[-1].data_ptr()

    def register(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        InlineWorld.register(self, group, segment, memory)
        if memory is None:
            self._mapped.pop((group.name, segment), None)
        else:
            self._mapped[group.name, segment] = self._just_mapped
            self._just_mapped = []
        self.attach(group, segment, memory)

    # -- time

    def clock(self, rank: int) -> Hashable:
        return host_name()

    def compare_clocks(self, rank: int) -> list[tuple[int, int, int]]:
        now = time.monotonic_ns()
        return [(now, now, now)]

    # -- ranks that are lost

    def opened(self, group: Group) -> None:
        InlineWorld.opened(self, group)
        Processes.opened(self, group)

    def abort(self, group: Group) -> None:
        group._control.memory[:8].view(torch.int64)[0] = 1
        self._flagged = True

    def idle(self) -> bool:
        return not self.scheduler.tasks

    # -- the network

    def _watch_proxies(self) -> None:
        """When the network fails, the proxy raises the abort flags of this node's ranks; the scheduler has to be
        told that it did, so that the CTAs look."""
        if self._flagged:
            self._flagged = False
            self.scheduler.memory.changed(progress=True)
        self._idles += 1
        if self._idles % IDLES_BETWEEN_LOOKS:
            return
        for name, connection in self._connections.items():
            if name not in self._told and connection.proxy.error is not None:
                self._told.add(name)
                self.scheduler.memory.changed(progress=True)


def _close(files: dict[int, int], address: int) -> None:
    os.close(files.pop(address))
