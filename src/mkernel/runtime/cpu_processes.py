"""Ranks as processes on CPUs: each interprets the CTAs of its own rank.

The ranks of a node share memory; nodes talk over TCP or RDMA, through the same native proxy that serves GPUs. So
everything but the GPU itself is real, and runs on a laptop.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from mkernel.net.config import TransportConfig
from mkernel.runtime import shared_files
from mkernel.runtime.errors import MKernelError
from mkernel.runtime.gpus import SimulatedGpu
from mkernel.runtime.group import Group
from mkernel.runtime.network import NativeNetwork
from mkernel.runtime.processes import ProcessConnector, host_name, introduce, label_of
from mkernel.runtime.world import Links, exchange_addresses
from mkernel.sim.backend import InlineLauncher, SimMemory
from mkernel.sim.scheduler import Options, RealTimeScheduler
from mkernel.sim.simulator import Simulator

IDLES_PER_POLL = 50  # idle moments of the scheduler between two polls of the network's health


class CpuProcesses:
    """The world of processes on CPUs."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        transport: TransportConfig | str,
        timeout: float,
    ):
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.links = Links()
        self.exchange, self.node_ids = introduce(process_group, gpus_per_node, transport, "cpu", timeout)
        self.label = label_of(process_group, self.exchange.messages.number)
        self.simulated_gpu: SimulatedGpu | None = None
        self.gpu_ids = list(range(self.size))
        self.devices = {self.rank: torch.device("cpu")}
        scheduler = RealTimeScheduler(self.rank, Options())
        simulator = Simulator(self.size, scheduler, Options())
        self.memory = SharedMemory(simulator)
        self.network = NativeNetwork(ProcessConnector(transport, self.exchange))
        self.launcher = InlineLauncher(simulator, HostClock())
        self.stream = self.launcher.execution.stream  # as in the simulator, but calls return when they have finished
        scheduler.on_idle = ProxyMonitor(self.launcher, self.network).poll


class ProxyMonitor:
    """Wakes the CTAs of this process when somebody else has raised its abort flags: the proxy, when the network fails,
    or the thread that watches the other processes."""

    def __init__(self, launcher: InlineLauncher, network: NativeNetwork):
        self._launcher, self._network = launcher, network
        self._failed: set[Hashable] = set()  # connections whose failure was noticed
        self._idles = 0

    def poll(self) -> None:
        """Called by the scheduler when all CTAs wait."""
        self._launcher.poll_abort()
        self._idles += 1
        if self._idles % IDLES_PER_POLL:
            return
        for name, connection in list(self._network.connections.items()):  # another thread may make a group
            if name not in self._failed and connection.proxy.error is not None:
                self._failed.add(name)
                self._launcher.wake_all()


class HostClock:
    """The clock of this machine, which interpreted kernels read."""

    @property
    def name(self) -> Hashable:
        return host_name()

    def compare(self) -> list[tuple[int, int, int]]:
        now = time.monotonic_ns()
        return [(now, now, now)]


class SharedMemory:
    """The Memory of processes on CPUs: files in memory, which the other processes of the node map."""

    def __init__(self, simulator: Simulator):
        self._allow = simulator.allow
        self._files: dict[int, int] = {}  # address of shared memory -> its file descriptor
        self._mapped: dict[int, list[torch.Tensor]] = {}  # address of shared memory -> the peers' memory beside it
        plain = SimMemory(simulator)
        self.upload, self.host_words = plain.upload, plain.host_words
        self.describe, self.map_multicast = plain.describe, plain.map_multicast
        self.empty, self.maker = plain.empty, plain.maker

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        handle = shared_files.create("memory", max(nbytes, 1))
        try:
            memory = self._map(os.getpid(), handle, nbytes)
        except OSError:
            os.close(handle)
            raise
        self._files[memory.data_ptr()] = handle
        weakref.finalize(memory.untyped_storage(), _release, self._files, self._mapped, memory.data_ptr())
        return memory

    def unmap(self, memory: torch.Tensor) -> None:
        self._mapped.pop(memory.data_ptr(), None)

    def _map(self, process: int, handle: int, nbytes: int) -> torch.Tensor:
        memory = shared_files.map_bytes(process, handle, max(nbytes, 1))[:nbytes]
        self._allow(memory, None)
        return memory

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        own = memory.data_ptr()
        peers: list[torch.Tensor] = []
        self._mapped[own] = peers

        def address_of(shared: Any) -> int:
            process, file, address, nbytes = shared
            if process == os.getpid():
                return address
            try:
                peers.append(self._map(process, file, nbytes))
            except OSError as problem:
                raise MKernelError(
                    f"the memory of process {process} cannot be mapped: {problem}. Ranks of one node are processes of "
                    f"the same user, in one container; mk.init(gpus_per_node=1) makes every rank a node of its own"
                ) from problem
            return peers[-1].data_ptr()

        return exchange_addresses(group, (os.getpid(), self._files[own], own, memory.numel()), address_of)


def _release(files: dict[int, int], mapped: dict[int, list[torch.Tensor]], address: int) -> None:
    os.close(files.pop(address))
    mapped.pop(address, None)
