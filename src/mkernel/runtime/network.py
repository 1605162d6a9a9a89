"""What worlds with the native network have in common: a transport and a proxy for each group and rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mkernel.lang import requests
from mkernel.runtime.errors import CommTimeout, MKernelError, TransportError

if TYPE_CHECKING:
    from mkernel.net import Statistics
    from mkernel.runtime.group import Group
    from mkernel.runtime.world import Transfer

# For how long a proxy looks for the next request before it sleeps. A GPU's should not be asleep when the
# next operator begins; the cores of CPU ranks have other things to do.
SPIN_SECONDS = {"cuda": 1e-3, "cpu": 20e-6}


GOODBYE_SECONDS = 5.0


class Connection:
    """A group's way to other nodes, on one rank."""

    def __init__(self, group: Group, ring: torch.Tensor, transport: Any, devices: list[torch.device]):
        from mkernel.net import Proxy

        self.transport = transport
        with near(group.device):
            self.proxy = Proxy(ring, transport, spin=SPIN_SECONDS[group.device.type])
        # kernels of this node that wait for the network leave when it fails
        self.control = group._control
        for address, device in zip(self.control.addresses, devices):
            if address:
                self.proxy.set_abort_flag(address, device)


def drained(ring: torch.Tensor) -> bool:
    """Has the proxy completed every request in the ring? Nobody posts meanwhile."""
    consumed, capacity = int(ring[requests.CONSUMED.value]), int(ring[requests.CAPACITY.value])
    slot = requests.HEADER_WORDS.value + consumed % capacity * requests.REQUEST_WORDS.value
    due = int(ring[slot + requests.TURN.value]) == consumed // capacity + 1
    return not due and int(ring[requests.COMPLETED.value]) == consumed


class Networked:
    """The part of a world that has to do with connections. The world says which transport, in `start_proxy`."""

    def __init__(self) -> None:
        self._connections: dict[Hashable, Connection] = {}

    def connection(self, group: Group) -> Connection | None:
        """The group's connection on its rank; None if it has but one node."""
        return self._connections.get((group.name, group.world_rank))

    def connect(self, group: Group, ring: torch.Tensor, transport: Any, devices: list[torch.device]) -> None:
        """Serve the ring with a transport that knows the group's segments. `devices`: where the ranks' control
        words are."""
        self._connections[group.name, group.world_rank] = Connection(group, ring, transport, devices)

    def network_statistics(self, group: Group) -> Statistics | None:
        """What the group's proxy on this rank has done so far."""
        connection = self.connection(group)
        return connection.proxy.statistics if connection is not None else None

    def drain(self, rank: int, ring: torch.Tensor, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not drained(ring) and time.monotonic() < deadline:
            time.sleep(1e-4)

    def watch_transfers(self, group: Group, watch: bool) -> list[Transfer]:
        return []  # the native proxy does not write down when it does what

    def cause_of(self, group: Group, timeout: CommTimeout) -> MKernelError:
        connection = self.connection(group)
        error = connection.proxy.error if connection is not None else None
        if error is None:
            return timeout
        failure = TransportError(f"{error}. What waited for it: {timeout}")
        failure.__cause__ = timeout
        return failure

    def say_goodbye(self) -> None:
        """This process ends, with groups that nobody has closed: what its kernels asked for is still served, and the
        peers, which may be in their last call, do not take its end for a loss."""
        for connection in self._connections.values():
            connection.proxy.stop(GOODBYE_SECONDS)
            with contextlib.suppress(TransportError):
                connection.transport.close()
        self._connections.clear()

    def closed(self, group: Group) -> None:
        connection = self._connections.pop((group.name, group.world_rank), None)
        if connection is None:
            return
        if group.broken:
            connection.proxy.stop(0)
            connection.transport.close(0)
            return
        connection.proxy.stop(group.timeout)
        with contextlib.suppress(CommTimeout):
            group.barrier()  # nobody leaves while another one still sends
        connection.transport.close()


@contextlib.contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Threads that are started inside run on cores near the GPU, if the system knows which these are."""
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
