"""Which transport a group takes, and that all ranks take the same: ranks as threads, over a stand-in for libibverbs."""

import threading

import pytest
import torch
from support.patience import HANG

from mkernel.net import Efa, Proxy, Tcp, TcpTransport, Verbs, VerbsTransport, devices
from mkernel.net.config import transport_config
from mkernel.net.rdma import EfaTransport
from mkernel.runtime import connect
from mkernel.runtime.errors import ArgumentError, TransportError
from mkernel.runtime.topology import Topology

from .harness import SECRET, Producer, eventually, together
from .test_rdma import control, fake, has_headers  # noqa: F401


class Rendezvous:
    """The exchanges of some ranks."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values = [None] * size


class FakeGroup:
    """As much of a group as connecting needs."""

    def __init__(self, rendezvous, rank, gpus_per_node):
        self.rendezvous, self.rank, self.size = rendezvous, rank, rendezvous.size
        self.topology = Topology(rendezvous.size // gpus_per_node, gpus_per_node)
        self.local_rank = self.topology.local_rank_of(rank)
        self.timeout = HANG
        self.device = torch.device("cpu")

    def exchange(self, what, value):
        self.rendezvous.values[self.rank] = value
        self.rendezvous.barrier.wait(HANG)
        values = list(self.rendezvous.values)
        self.rendezvous.barrier.wait(HANG)
        return values

    def agree(self, what, **values):
        assert len({tuple(theirs.items()) for theirs in self.exchange(what, values)}) == 1


def open_all(requested, gpus_per_node=1):
    """Each rank's transport, or its error."""
    rendezvous = Rendezvous(len(requested))
    results = [None] * len(requested)
    groups = [FakeGroup(rendezvous, rank, gpus_per_node) for rank in range(len(requested))]

    def one(rank):
        try:
            results[rank] = connect.open_transport(
                groups[rank], transport_config(requested[rank]), lambda: "127.0.0.1", SECRET
            )
        except TransportError as error:
            results[rank] = error

    together(*(lambda r=rank: one(r) for rank in range(len(requested))))
    return groups, results


def close_all(transports):
    for transport in transports:
        transport.close()


def port(name, efa=False, layer="Ethernet"):
    gid = devices.Gid(0, __import__("ipaddress").IPv6Address("::ffff:10.0.0.1"), "RoCE v2")
    kind = ("7: unknown", "efa") if efa else ("1: CA", "mlx5_core")
    return devices.Port(name, 1, True, layer, kind[0], kind[1], 100.0, (gid,), devices.Location())


@pytest.fixture
def machine(monkeypatch, fake):  # noqa: F811
    """The stand-in's devices, as sysfs would show them."""
    if not has_headers():
        pytest.skip("libibverbs-dev is not installed")
    found = [port("fake0"), port("fake1"), port("efa0", True, "Unspecified"), port("efa1", True, "Unspecified")]
    monkeypatch.setattr(devices, "find_ports", lambda: list(found))
    for kind in (VerbsTransport, EfaTransport):
        plain = kind.__init__

        def patched(self, *args, plain=plain, **kwargs):
            plain(self, *args, verbs_library=fake, efa_library=fake, **kwargs)

        monkeypatch.setattr(kind, "__init__", patched)
    return found


@pytest.mark.parametrize(
    ("transport", "kind", "ports"),
    [
        ("auto", VerbsTransport, ["fake0", "fake1"]),
        ("verbs", VerbsTransport, ["fake0", "fake1"]),
        (Verbs(devices=("fake1",), queues=3), VerbsTransport, ["fake1"]),
        ("efa", EfaTransport, ["efa0", "efa1"]),
        (Efa(devices=("efa1",)), EfaTransport, ["efa1"]),
        ("tcp", TcpTransport, None),
        (Tcp(streams=2), TcpTransport, None),
    ],
    ids=str,
)
def test_what_is_asked_for_carries_requests(machine, transport, kind, ports):
    """Four ranks, two nodes: counterparts are connected, and segments that come later are known to them."""
    groups, transports = open_all([transport] * 4, gpus_per_node=2)
    memory = [[torch.zeros(8192, dtype=torch.uint8) for _ in range(4)] for _ in range(2)]
    producers = [Producer() for _ in range(4)]
    for transport in transports:
        assert isinstance(transport, kind), transport
        if ports is not None:
            assert [name for name, _, _ in transport.ports] == ports
    for segment in range(2):
        together(
            *(lambda r=r: connect.attach(groups[r], transports[r], {segment: memory[segment][r]}) for r in range(4))
        )
    proxies = [Proxy(producers[rank].ring, transports[rank]) for rank in range(4)]
    for segment in range(2):
        for rank in range(4):
            memory[segment][rank][4096 : 4096 + 100] = 10 * segment + rank + 1
            producers[rank].post((rank + 2) % 4, source=4096, target=6000, size=100, signal=8, segment=segment,
                                 source_segment=segment)  # fmt: skip
    for segment in range(2):
        for rank in range(4):
            words = memory[segment][rank].view(torch.int64).numpy()
            eventually(lambda: words[1] == 1, f"signal of rank {rank}")
            assert (memory[segment][rank][6000:6100] == 10 * segment + (rank + 2) % 4 + 1).all()
    together(*(lambda r=r: connect.wait_until_arrived(groups[r], transports[r], lambda: False) for r in range(4)))
    assert all(proxy.stop(10) for proxy in proxies)
    for transport in transports:
        transport.detach(1)
    with pytest.raises(TransportError, match="segment 1 is not attached"):
        transports[0].detach(1)
    close_all(transports)


def test_auto_is_tcp_where_one_rank_has_no_device(machine, monkeypatch):
    calls = []

    def find():
        calls.append(threading.get_ident())
        return list(machine) if len(calls) > 1 else []

    monkeypatch.setattr(devices, "find_ports", find)
    _, transports = open_all(["auto"] * 3)
    assert len(calls) == 3
    assert [type(transport) for transport in transports] == [TcpTransport] * 3
    close_all(transports)


def test_auto_is_tcp_where_a_device_does_not_work(machine, control):  # noqa: F811
    machine[:] = [port("down0")]  # sysfs says it is active, the library that it is not
    _, transports = open_all(["auto"] * 2)
    assert [type(transport) for transport in transports] == [TcpTransport] * 2
    close_all(transports)


@pytest.mark.parametrize("how", ["silent", "hold"])
def test_devices_that_do_not_reach_each_other(machine, control, monkeypatch, how):  # noqa: F811
    monkeypatch.setattr(connect, "TEST_SECONDS", 0.5)
    control(how, 1)
    _, transports = open_all(["auto"] * 2)
    assert [type(transport) for transport in transports] == [TcpTransport] * 2
    close_all(transports)
    _, errors = open_all(["verbs"] * 2)
    words = "transport retry counter exceeded" if how == "silent" else "over fake0, fake1 nothing came from rank"
    assert all(words in str(error) for error in errors), errors


def test_what_one_rank_can_not_do_is_told_to_all(machine):
    _, results = open_all([Verbs(), Verbs(devices=("mlx5_0",)), Verbs()])
    for error in results:
        assert isinstance(error, TransportError)
        assert "rank 1: there is no RDMA device 'mlx5_0' here; there are: fake0:1 (Ethernet), " in str(error)


def test_different_queues_are_refused_on_all(machine):
    _, results = open_all([Verbs(queues=2), Verbs(queues=3)])
    for error in results:
        assert isinstance(error, TransportError)
        assert "queue pairs on each rail" in str(error)


def test_memory_that_one_rank_can_not_register_is_told_to_all(machine, control):  # noqa: F811
    groups, transports = open_all(["verbs"] * 2)
    errors = [None, None]

    def attach(rank):
        try:
            connect.attach(groups[rank], transports[rank], {0: torch.zeros(1024, dtype=torch.uint8)})
        except TransportError as error:
            errors[rank] = error

    control("refuse_memory", 12)
    together(lambda: attach(0), lambda: attach(1))
    control("refuse_memory", 0)
    assert all("cannot be registered" in str(error) for error in errors)
    close_all(transports)
    transports.clear()


@pytest.mark.parametrize("wrong", ["infiniband", "", None, 3])
def test_transports_that_are_refused(wrong):
    with pytest.raises(ArgumentError, match="transport must be 'auto', 'tcp', 'verbs', 'efa' or a Tcp, Verbs or Efa"):
        transport_config(wrong)
