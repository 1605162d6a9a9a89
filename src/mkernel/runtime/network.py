"""The native network: a transport and a proxy for each group and rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mkernel.lang import requests
from mkernel.runtime.errors import CommTimeout, TransportError

if TYPE_CHECKING:
    from mkernel.net import Statistics
    from mkernel.runtime.group import Group
    from mkernel.runtime.world import Transfer

# How long a proxy spins for the next request before it sleeps. On a GPU it should be awake when the next operator
# starts; on CPUs the ranks need the cores.
SPIN_SECONDS = {"cuda": 1e-3, "cpu": 20e-6}
EXIT_SECONDS = 5.0  # to send what is left when the process exits, in all groups together
LAST_SECONDS = 0.05  # for the last message of a group after that


class Connector(Protocol):
    """Opens the transports of a backend."""

    def open(self, group: Group) -> Any:
        """A transport that is connected to the other nodes and knows the segments of the group's heap. Collective."""

    def attach(self, group: Group, transport: Any, segment: int, memory: torch.Tensor) -> None:
        """Let the transport access a segment. Collective."""

    def detach(self, transport: Any, segment: int) -> None:
        """All ranks are done with the segment, and all requests that used it have completed."""

    def flag_devices(self, group: Group) -> list[torch.device]:
        """The device through which this process writes the abort flag of each rank."""


class Connection:
    """A group's transport and proxy on one rank."""

    def __init__(self, group: Group, ring: torch.Tensor, transport: Any, flag_devices: list[torch.device]):
        from mkernel.net import Proxy

        self.transport = transport
        with near(group.device):
            self.proxy = Proxy(ring, transport, spin=SPIN_SECONDS[group.device.type])
        # when the network fails, the proxy ends the waits of this node's kernels
        self.control = group._control
        for address, device in zip(self.control.addresses, flag_devices):
            if address:
                self.proxy.set_abort_flag(address, device)

    def close(self, seconds: float) -> None:
        """Stop the proxy within this many seconds, and close the transport without waiting."""
        self.proxy.stop(seconds)
        self.transport.close(0)


def poll_drained(ring: torch.Tensor) -> bool:
    """Has the proxy completed every request in the ring? Nobody may post meanwhile."""
    consumed, capacity = int(ring[requests.CONSUMED.value]), int(ring[requests.CAPACITY.value])
    slot = requests.HEADER_WORDS.value + consumed % capacity * requests.REQUEST_WORDS.value
    due = int(ring[slot + requests.TURN.value]) == consumed // capacity + 1
    return not due and int(ring[requests.COMPLETED.value]) == consumed


class NativeNetwork:
    """The Network of backends whose ranks have native proxies. The connector decides on the transport."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self.connections: dict[Hashable, Connection] = {}  # by group and rank

    def connection(self, group: Group) -> Connection | None:
        """The group's connection on its rank; None if the group has only one node."""
        return self.connections.get((group.name, group.world_rank))

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        transport = self._connector.open(group)
        devices = self._connector.flag_devices(group)
        self.connections[group.name, group.world_rank] = Connection(group, ring, transport, devices)

    def register(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        connection = self.connection(group)
        if connection is None:
            return  # ranks of one node access each other's memory by address
        if memory is not None:
            self._connector.attach(group, connection.transport, segment, memory)
        else:
            self._connector.detach(connection.transport, segment)

    def wait_until_drained(self, group: Group, ring: torch.Tensor) -> None:
        deadline = time.monotonic() + group.timeout
        while not poll_drained(ring) and self.error(group) is None and time.monotonic() < deadline:
            time.sleep(1e-4)

    def wait_until_arrived(self, group: Group) -> None:
        connection = self.connection(group)
        if connection is None:
            return group.barrier()
        from mkernel.runtime import connect

        connect.wait_until_arrived(group, connection.transport, lambda: connection.proxy.error is not None)

    def error(self, group: Group) -> str | None:
        connection = self.connection(group)
        return connection.proxy.error if connection is not None else None

    def statistics(self, group: Group) -> Statistics | None:
        connection = self.connection(group)
        return connection.proxy.statistics if connection is not None else None

    def record_transfers(self, group: Group, record: bool) -> list[Transfer]:
        return []  # the native proxy keeps no times

    def disconnect(self, group: Group) -> None:
        connection = self.connections.pop((group.name, group.world_rank), None)
        if connection is None:
            return
        if group.broken:
            connection.close(0)
            return
        try:
            connection.proxy.stop(EXIT_SECONDS)  # the group has waited for its requests before
            with contextlib.suppress(CommTimeout, TransportError):
                group.barrier()  # a rank must not close its transport while another one still sends
        finally:
            connection.transport.close()

    def abort(self, group: Group) -> None:
        connection = self.connections.pop((group.name, group.world_rank), None)
        if connection is not None:
            connection.close(0)

    def shut_down(self) -> None:
        """The process exits with groups that are still open. Send what its kernels have posted, and close transports in
        order: peers may be in their last call, and must not take the exit for a loss."""
        deadline = time.monotonic() + EXIT_SECONDS
        for connection in self.connections.values():
            connection.proxy.stop(max(deadline - time.monotonic(), 0.0))
            with contextlib.suppress(TransportError):
                connection.transport.close(min(max(deadline - time.monotonic(), LAST_SECONDS), 1.0))
        self.connections.clear()


@contextlib.contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Threads started inside run on the cores near the GPU, if the system knows which these are."""
    cores = _cores_near(device)
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cores_near(device: torch.device) -> set[int]:
    if device.type != "cuda":
        return set()
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        with open(f"/sys/bus/pci/devices/{place}/local_cpulist") as file:
            text = file.read().strip()
    except (AttributeError, OSError):
        return set()
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores & os.sched_getaffinity(0)
