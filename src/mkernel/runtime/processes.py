"""Ranks as processes on CPUs, started by torchrun or anything else that makes a process group.

Each process runs the CTAs of its own rank on the interpreter. What the ranks of a node share lies in
shared memory; nodes talk over the network, through the same native proxy that serves GPUs. So everything but
the GPU itself is the real thing, and can be tried on a laptop.

The process group is only used to start: its store carries what ranks tell each other while they set
things up. Shared memory has no name in the file system (peers open it through its owner's /proc
entry), so nothing is left behind, however a process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import pickle
import socket
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mkernel.net import connect
from mkernel.runtime import records
from mkernel.runtime.errors import ArgumentError, CommTimeout, TransportError
from mkernel.runtime.group import Group
from mkernel.runtime.world import Launch
from mkernel.sim.scheduler import Options, RealTimeScheduler
from mkernel.sim.world import InlineWorld

IDLES_BETWEEN_LOOKS = 50  # idle moments between two looks at the network's health


@dataclass(eq=False)
class Connection:
    """A group's way to other nodes."""

    transport: Any
    proxy: Any
    abort_flags: list[int]
    failed: bool = False


class ProcessWorld(InlineWorld):
    """The world of processes on CPUs; see runtime/world.py for what each method promises."""

    scheduler_type = RealTimeScheduler

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        transport: connect.Wish | str,
        timeout: float,
    ):
        self.rank = dist.get_rank(process_group)
        size = dist.get_world_size(process_group)
        super().__init__(size, 1, self.rank, Options(), None)
        self._store = dist.PrefixStore(_job_name(), dist.distributed_c10d._get_default_store())
        self._files: dict[int, int] = {}  # address of shared memory -> its file descriptor
        self._mapped: dict[Hashable, list[torch.Tensor]] = {}  # peers' memory, by group and segment
        self._just_mapped: list[torch.Tensor] = []
        self._last_name: dict[tuple[int, ...], str] = {}
        self._connections: dict[Hashable, Connection] = {}
        self._idles = 0
        assert isinstance(self.scheduler, RealTimeScheduler)
        self.scheduler.on_idle = self._watch_proxies
        if gpus_per_node is not None:
            if gpus_per_node < 1 or size % gpus_per_node:
                raise ArgumentError(
                    f"gpus_per_node is {gpus_per_node}, which does not divide the {size} ranks of the group"
                )
            self._nodes = [rank // gpus_per_node for rank in range(size)]
        else:
            hosts = self.exchange(self.rank, range(size), "hosts", "mk.init", _host_name(), timeout)
            self._nodes = [hosts.index(host) for host in hosts]
        self._transport = connect.wish_of(transport)

    def node_of(self, rank: int) -> int:
        return self._nodes[rank]

    def exchange(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        def name(member: int) -> str:
            return f"{key!r}/{member}"

        self._store.set(name(rank), pickle.dumps(value))  # type: ignore[arg-type]
        begun = time.monotonic()
        values = []
        for member in members:
            left = max(timeout - (time.monotonic() - begun), 0.001)
            try:
                self._store.wait([name(member)], timedelta(seconds=left))
            except (RuntimeError, dist.DistError) as silence:
                missing = [i for i, other in enumerate(members) if not self._store.check([name(other)])]
                waited = time.monotonic() - begun
                raise records.absent(what, list(members).index(rank), missing, len(members), waited) from silence
            values.append(pickle.loads(self._store.get(name(member))))
        # all members are here, so all have read what was exchanged before
        previous, self._last_name[tuple(members)] = self._last_name.get(tuple(members)), name(rank)
        if previous is not None:
            self._store.delete_key(previous)
        return values

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
        self._allow(memory)
        return memory

    def host_words(self, rank: int, count: int) -> torch.Tensor:
        return super().allocate(rank, count * 8).view(torch.int64)

    def share(self, rank: int, memory: torch.Tensor) -> Any:
        return os.getpid(), self._files[memory.data_ptr()], memory.data_ptr(), memory.numel()

    def address_of(self, rank: int, shared: Any) -> int:
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
        super().register(group, segment, memory)
        if memory is None:
            self._mapped.pop((group.name, segment), None)
            if group.name in self._connections:
                connect.drop(self._connections[group.name].transport, segment)
        else:
            self._mapped[group.name, segment] = self._just_mapped
            self._just_mapped = []
            if group.name in self._connections:
                connect.attach(group, self._connections[group.name].transport, {segment: memory})

    # -- the network

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        from mkernel.net.native import Proxy

        transport = connect.open_transport(group, self._transport, lambda: self._address(group))
        mine = {number: memory for (name, number, _), memory in self._segments.items() if name == group.name}
        connect.attach(group, transport, mine)
        self._connections[group.name] = Connection(transport, Proxy(ring, transport), group._control.addresses)

    def _address(self, group: Group) -> str:
        """The address under which the ranks of other machines reach this one."""
        hosts = group.exchange("network", _host_name())
        if len(set(hosts)) == 1:
            return "127.0.0.1"
        # the address that is used to reach the machine where the job's store is
        target = os.environ.get("MASTER_ADDR", "localhost")
        family, _, _, _, address = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]

    def _watch_proxies(self) -> None:
        """When the network fails, the CTAs of this node that wait shall leave, not wait for the timeout."""
        self._idles += 1
        if self._idles % IDLES_BETWEEN_LOOKS:
            return
        for connection in self._connections.values():
            if connection.proxy.error is not None and not connection.failed:
                connection.failed = True
                for address in connection.abort_flags:
                    if address:
                        ctypes.c_int64.from_address(address).value = 1
                self.scheduler.memory.changed(progress=True)

    def launch(self, rank: int, launch: Launch) -> None:
        try:
            super().launch(rank, launch)
        except CommTimeout as timeout:
            connection = self._connections.get(launch.group.name)
            if connection is not None and connection.proxy.error is not None:
                raise TransportError(f"{connection.proxy.error}. What waited for it: {timeout}") from timeout
            raise

    def closed(self, group: Group) -> None:
        connection = self._connections.pop(group.name, None)
        if connection is not None:
            connection.proxy.stop(group.timeout)
            with contextlib.suppress(CommTimeout):
                group.barrier()  # nobody leaves while another one still sends
            connection.transport.close()


def _close(files: dict[int, int], address: int) -> None:
    os.close(files.pop(address))


_jobs = itertools.count()


def _job_name() -> str:
    """Every mk.init() of a process has its own names in the store; ranks make them in the same order."""
    return f"mkernel/{next(_jobs)}"


def _host_name() -> str:
    """Names this machine: the same in all of its processes, different from every other machine's."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}"
    except OSError:
        return socket.gethostname()


def init(
    process_group: dist.ProcessGroup | None, gpus_per_node: int | None, transport: connect.Wish | str, timeout: float
) -> Group:
    """The group of all ranks of a process group."""
    world = ProcessWorld(process_group, gpus_per_node, transport, timeout)
    return Group(world, range(world.size), world.rank, timeout=timeout, name="world")
