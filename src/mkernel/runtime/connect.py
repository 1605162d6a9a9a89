"""How the ranks of a group choose and connect a transport between nodes.

Between nodes each rank talks only to the ranks with the same local rank, its counterparts. What these must know about
each other goes through exchanges of the group, thus over the store of the process group: addresses for TCP,
descriptions of queue pairs for RDMA, and a description of every segment when it is attached (so attaching is
collective, as the symmetric heap is). The secret of the connections never does (`runtime/secret.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mkernel.lang import requests
from mkernel.net import devices
from mkernel.net.config import Auto, Efa, Tcp, TransportConfig, Verbs
from mkernel.net.library import Proxy, TcpTransport, Transport
from mkernel.net.rdma import EfaTransport, RdmaTransport, VerbsTransport
from mkernel.runtime.errors import MKernelError, TransportError
from mkernel.runtime.printable import printable

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

TEST_SEGMENT = (1 << 23) - 1  # the heap numbers its segments from 0
TEST_SECONDS = 10.0
CONNECT_SECONDS = 60.0  # all ranks come to this at the same time, after an exchange: only a lost one takes longer
PEER_SECONDS = 30.0  # without a sign of life from a machine; a rank that is late but alive gives one


def counterparts(group: Group) -> list[int]:
    """The ranks on other nodes that this one talks to."""
    topology = group.topology
    ranks = range(group.size)
    return [rank for rank in ranks if rank != group.rank and topology.local_rank_of(rank) == group.local_rank]


def open_transport(group: Group, config: TransportConfig, address: Callable[[], str], secret: bytes) -> Transport:
    """A transport connected to this rank's counterparts. Collective.

    Args:
        address: returns the address at which the other ranks reach this one.
        secret: known only to the ranks of the group.
    """
    group.agree("mk.init", transport=type(config).__name__)
    if isinstance(config, Tcp):
        return _open_tcp(group, config, address(), secret)
    try:
        return _open_rdma(group, Verbs() if isinstance(config, Auto) else config)
    except TransportError:
        if isinstance(config, Auto):  # on all ranks, see _raise_on_all_ranks
            return _open_tcp(group, Tcp(), address(), secret)
        raise


def attach(group: Group, transport: Transport, segments: Mapping[int, torch.Tensor]) -> None:
    """Let this rank's transport, and those of its counterparts, access these segments. Collective: all ranks attach the
    same numbers."""
    problem = None
    try:
        for number, memory in segments.items():
            transport.attach(number, memory)
    except MKernelError as error:
        problem = error
    if isinstance(transport, RdmaTransport):
        _raise_on_all_ranks(group, problem)
        described = group.exchange("network", {number: transport.describe_segment(number) for number in segments})
        for peer in counterparts(group):
            for number, description in described[peer].items():
                transport.learn_segment(peer, number, description)
    elif problem is not None:
        raise problem


def wait_until_arrived(group: Group, transport: Transport, failed: Callable[[], bool]) -> None:
    """Once this rank's requests have completed: wait until those of its counterparts have arrived. Until then, their
    last ones may be in flight: those that nobody waits for. Collective."""

    def counts(peer: int) -> tuple[int, int]:
        try:
            return transport.counts(peer)
        except TransportError:  # the network has failed: nothing arrives any more
            return 0, 0

    sent = group.exchange("network", {peer: counts(peer)[0] for peer in counterparts(group)})
    deadline = time.monotonic() + group.timeout
    for peer in counterparts(group):
        while counts(peer)[1] < sent[peer][group.rank] and not failed() and time.monotonic() < deadline:
            time.sleep(1e-4)


def _open_tcp(group: Group, config: Tcp, here: str, secret: bytes) -> Transport:
    transport = listen(group, config, here, secret)
    endpoints = group.exchange("network", (here, transport.port))
    timeout = min(group.timeout, CONNECT_SECONDS)
    transport.connect({rank: endpoints[rank] for rank in counterparts(group)}, timeout)
    return transport


def listen(group: Group, config: Tcp, here: str, secret: bytes) -> TcpTransport:
    """A transport of this rank, not yet connected."""
    peer_timeout = min(group.timeout, PEER_SECONDS)
    return TcpTransport(group.rank, group.size, secret, listen=here, streams=config.streams, peer_timeout=peer_timeout)


def _open_rdma(group: Group, config: Verbs | Efa) -> Transport:
    transport: RdmaTransport | None = None
    descriptions: dict[int, bytes] = {}
    problem: MKernelError | None = None
    try:
        try:
            transport = _make_rdma(group, config)
            descriptions = {peer: transport.describe(peer) for peer in counterparts(group)}
        except MKernelError as error:
            problem = error
        _raise_on_all_ranks(group, problem)
        assert transport is not None
        theirs = group.exchange("network", descriptions)
        try:
            for peer in counterparts(group):
                transport.connect(peer, theirs[peer][group.rank])
        except MKernelError as error:
            problem = error
        _raise_on_all_ranks(group, problem)
        _test_transport(group, transport)
    except BaseException:
        if transport is not None:
            transport.close(timeout=0)
        raise
    return transport


def _test_transport(group: Group, transport: RdmaTransport) -> None:
    """Send a signal to every counterpart, and wait for theirs. Devices that are set up may still not reach each other;
    this finds out before the first operator does. Collective."""
    peers = counterparts(group)
    ring = torch.zeros(
        requests.HEADER_WORDS.value + len(peers) * requests.REQUEST_WORDS.value, dtype=torch.int64, device="cpu"
    )
    ring[requests.CAPACITY.value] = len(peers)
    for slot, peer in zip(ring[requests.HEADER_WORDS.value :].view(-1, requests.REQUEST_WORDS.value), peers):
        slot[requests.PEER_AND_SEGMENTS.value] = peer | TEST_SEGMENT << 16 | TEST_SEGMENT << 40
        slot[requests.SIGNAL.value] = 8 * group.rank
        slot[requests.VALUE.value] = slot[requests.TURN.value] = 1
    signals = torch.zeros(group.size, dtype=torch.int64, device="cpu")
    attach(group, transport, {TEST_SEGMENT: signals})
    proxy = Proxy(ring, transport)
    deadline = time.monotonic() + min(group.timeout, TEST_SECONDS)
    while not all(signals[peer] for peer in peers) and proxy.error is None and time.monotonic() < deadline:
        time.sleep(1e-3)
    served = proxy.stop(max(deadline - time.monotonic(), 0.0))
    silent = [peer for peer in peers if not signals[peer]]
    problem = None
    if proxy.error is not None:
        problem = TransportError(proxy.error)
    elif silent or not served:
        who = ", ".join(f"rank {peer}" for peer in silent or peers)
        problem = TransportError(
            f"over {', '.join(name for name, _, _ in transport.ports)} nothing came from {who} within "
            f"{TEST_SECONDS:g} s; are these devices on the same network, with addresses (GIDs) of the same kind?"
        )
    _raise_on_all_ranks(group, problem)
    transport.detach(TEST_SEGMENT)


def _make_rdma(group: Group, config: Verbs | Efa) -> RdmaTransport:
    peer_timeout = min(group.timeout, PEER_SECONDS)
    efa = isinstance(config, Efa)
    ports = devices.choose_ports(devices.find_ports(), efa=efa, gpu=_gpu_location(group.device), names=config.devices)
    if isinstance(config, Efa):
        return EfaTransport(group.rank, [(port.device, port.number, 0) for port in ports], peer_timeout=peer_timeout)
    rails = [
        (port.device, port.number, devices.choose_gid(port) if config.gid_index is None else config.gid_index)
        for port in ports
    ]
    return VerbsTransport(
        group.rank,
        rails,
        queues=config.queues,
        traffic_class=config.traffic_class,
        peer_timeout=peer_timeout,
    )


def _raise_on_all_ranks(group: Group, problem: MKernelError | None) -> None:
    """Raise the problem of any rank on all ranks, so that none waits for one that has given up."""
    for rank, reason in enumerate(group.exchange("network", None if problem is None else str(problem))):
        if reason is not None:
            failure = TransportError(f"rank {rank}: {printable(str(reason))}")
            failure.on_every_rank = True
            raise failure from problem


def _gpu_location(device: torch.device) -> devices.Location | None:
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return devices.gpu_location(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
