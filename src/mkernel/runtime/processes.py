"""Ranks as processes, started by torchrun or anything else that creates a process group.

The process group is only used to start: its store carries what ranks exchange while they set things up, and what they
call (`runtime/store_exchange.py`). Nodes talk over RDMA or TCP, through the native proxy. How the ranks of a node share
memory differs between GPUs (`cuda_processes`) and CPUs (`cpu_processes`).
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Hashable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mkernel.net.config import TransportConfig, transport_config
from mkernel.runtime import connect, liveness, secret
from mkernel.runtime.call_board import Machines
from mkernel.runtime.call_link import CallLink, open_link
from mkernel.runtime.errors import ArgumentError, MKernelError, TransportError
from mkernel.runtime.group import Group
from mkernel.runtime.printable import printable
from mkernel.runtime.shared_files import Page
from mkernel.runtime.spawn import require_simulator
from mkernel.runtime.store import SignedStore
from mkernel.runtime.store_exchange import StoreExchange
from mkernel.runtime.world import World

LOOPBACK = "127.0.0.1"


def introduce(
    process_group: dist.ProcessGroup | None,
    gpus_per_node: int | None,
    transport: TransportConfig | str,
    device_type: str,
    timeout: float,
) -> tuple[StoreExchange, list[int]]:
    """Agree with the other ranks on the job's secret, then learn who and where they are. Return the exchange through
    which they talk from now on, and the node of every rank. Collective."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    messages = SignedStore(process_group)
    exchange = StoreExchange(rank, messages)

    def all_gather(key: str, value: Any) -> list[Any]:
        return exchange.all_gather(rank, range(size), key, "mk.init", value, timeout)

    refusal = None
    try:
        transport_config(transport)
        agreement = secret.Agreement(messages.job, rank)
    except ArgumentError as problem:
        refusal = problem
    offers = all_gather("offers", str(refusal) if refusal is not None else agreement.offer())
    if refusal is not None:
        raise refusal
    for other, offer in enumerate(offers):
        if isinstance(offer, str):
            raise ArgumentError(f"rank {other} refused its call of mk.init: {printable(offer)}")
    agreement.take(offers)
    messages.key = agreement.unmask(all_gather("secret", agreement.masked() if rank == 0 else None)[0])
    presence = liveness.presence()
    everyone = all_gather("hosts", (host_name(), device_type, gpus_per_node, presence.process, presence.handle))
    for index, name in ((1, "device"), (2, "gpus_per_node")):
        given = [who[index] for who in everyone]
        if len(set(given)) > 1:
            raise ArgumentError(f"{name} must be the same on every rank; by rank: {', '.join(map(str, given))}")
    hosts = [who[0] for who in everyone]
    node_ids = [hosts.index(host) for host in hosts]
    if gpus_per_node is not None:
        if not isinstance(gpus_per_node, int) or gpus_per_node < 1 or size % gpus_per_node:
            raise ArgumentError(
                f"gpus_per_node must be a whole number that divides the {size} ranks of the group; "
                f"got {gpus_per_node!r}"
            )
        node_ids = [each // gpus_per_node for each in range(size)]
    exchange.hosts = hosts
    if len(set(hosts)) > 1:
        exchange.address = address_among(rank, hosts, all_gather("addresses", own_address()))
    exchange.open_link = functools.partial(_open_link, messages, exchange.address)
    exchange.lost.watch(
        {
            peer: (process, page)
            for peer, (host, _, _, process, page) in enumerate(everyone)
            if host == hosts[rank] and peer != rank
        }
    )
    return exchange, node_ids


def _open_link(messages: SignedStore, address: str, group: Group, machines: Machines, page: Page) -> CallLink | None:
    """Connect the call boards of several machines. Collective."""
    return open_link(group, machines, page, address, secret.derived(messages.key, f"calls of group {group.name!r}"))


class ProcessConnector:
    """Opens transports between processes: RDMA or TCP."""

    def __init__(self, transport: TransportConfig | str, exchange: StoreExchange):
        self._config = transport_config(transport)
        self._exchange = exchange

    def open(self, group: Group) -> Any:
        key = secret.derived(self._exchange.messages.key, f"connections of group {group.name!r}")
        transport = connect.open_transport(group, self._config, lambda: self._address(group), key)
        connect.attach(group, transport, dict(group.heap.segments()))
        return transport

    def attach(self, group: Group, transport: Any, segment: int, memory: torch.Tensor) -> None:
        connect.attach(group, transport, {segment: memory})

    def detach(self, transport: Any, segment: int) -> None:
        transport.detach(segment)

    def _address(self, group: Group) -> str:
        """The address at which the other ranks of the group reach this one."""
        if len({self._exchange.hosts[member] for member in group.members}) == 1:
            return LOOPBACK
        if not self._exchange.address:
            raise TransportError(
                f"this machine ({socket.gethostname()}) has no address for the others: it cannot resolve or reach "
                f"{_store_host()!r}, the host of the job's store. Set MASTER_ADDR to a name or an address of that host "
                f"that all machines can reach"
            )
        return self._exchange.address

    def flag_devices(self, group: Group) -> list[torch.device]:
        return [group.device] * group.size  # the memory of the node's other ranks is mapped into this process


def address_among(rank: int, hosts: Sequence[Hashable], addresses: Sequence[str]) -> str:
    """The address at which ranks on other machines reach this one, given the `own_address` of every rank, which is that
    of the loopback interface where the store's host has its own name for it: on many systems, /etc/hosts says so."""
    if _is_loopback(addresses[rank]):
        for host, address in zip(hosts, addresses):
            if host != hosts[rank] and not _is_loopback(address):
                with contextlib.suppress(OSError):
                    return address_towards(address)
    return addresses[rank]


def _is_loopback(address: str) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address() -> str:
    """The address from which this machine reaches the one that hosts the job's store; empty if it does not."""
    with contextlib.suppress(OSError):
        return address_towards(_store_host())
    return ""


def _store_host() -> str:
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR", "localhost")


def address_towards(target: str) -> str:
    """The address of this machine in packets to another one. Raises OSError if there is no way to it."""
    problem = OSError(f"{target} has no address")
    for family, _, _, _, address in socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
        except OSError as failure:  # no IPv6, for example
            problem = failure
    raise problem


def host_name() -> str:
    """Identifies this machine: the same in all of its processes, different on every other machine. Containers with PID
    namespaces of their own are machines of their own: their processes cannot open each other's memory."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def timeout_of(process_group: dist.ProcessGroup | None) -> float:
    """The timeout of a process group, in seconds: the longest of its backends'."""
    group = process_group if process_group is not None else dist.group.WORLD
    found = []
    for device in getattr(group, "_device_types", []):
        options = getattr(group._get_backend(device), "options", None)  # type: ignore[union-attr]
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            found.append(timeout.total_seconds())
    return max(found, default=dist.default_pg_timeout.total_seconds())


def label_of(process_group: dist.ProcessGroup | None, number: int) -> str:
    """What torch calls a process group: the same on all of its ranks. `number`: which of its worlds it is."""
    group = process_group if process_group is not None else dist.group.WORLD
    return f"process group {group.group_name}" + (f" ({number})" if number > 1 else "")  # type: ignore[union-attr]


# The default process group that a forked child has inherited; its connections belong to the parent.
_inherited: Any = None


def _after_fork() -> None:
    global _inherited
    _inherited = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


os.register_at_fork(after_in_child=_after_fork)


def init(
    process_group: dist.ProcessGroup | None,
    gpus_per_node: int | None,
    transport: TransportConfig | str,
    timeout: float | None,
) -> Group:
    """The group of all ranks of a process group: on GPUs if there are any."""
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise MKernelError(
            f"process {os.getpid()} was forked from one that had called torch.distributed.init_process_group, and can "
            f"not use its connections. Start workers with the start method 'spawn', or fork before init_process_group"
        )
    timeout = timeout_of(process_group) if timeout is None else timeout
    world: World
    if torch.cuda.is_available():
        from mkernel.runtime.cuda_processes import CudaProcesses

        world = CudaProcesses(process_group, gpus_per_node, transport, timeout)
    else:
        with require_simulator():
            from mkernel.runtime.cpu_processes import CpuProcesses

        world = CpuProcesses(process_group, gpus_per_node, transport, timeout)
    liveness.presence().worlds.add(world)
    return Group(world, range(world.size), dist.get_rank(process_group), timeout=timeout, name="world")
