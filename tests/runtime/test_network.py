"""The native network of a group, and the addresses at which machines reach each other."""

import time
from types import SimpleNamespace

import pytest
import torch
from support.patience import HANG

from mkernel.lang import requests
from mkernel.runtime import processes
from mkernel.runtime.network import NativeNetwork
from mkernel.runtime.processes import address_among


def test_nobody_waits_for_a_network_that_has_failed():
    ring = torch.zeros(16, dtype=torch.int64)
    ring[requests.CAPACITY.value] = 1
    ring[requests.HEADER_WORDS.value + requests.TURN.value] = 1  # a request that nobody takes
    group = SimpleNamespace(name="group", world_rank=0, timeout=HANG)
    network = NativeNetwork(SimpleNamespace())
    network.connections["group", 0] = SimpleNamespace(proxy=SimpleNamespace(error="rank 1 is gone"))
    begun = time.monotonic()
    network.wait_until_drained(group, ring)
    assert time.monotonic() - begun < HANG / 2


@pytest.fixture
def routes(monkeypatch):
    monkeypatch.setattr(processes, "address_towards", lambda address: f"way to {address}")


@pytest.mark.parametrize(
    ("hosts", "addresses", "expected"),
    [
        ("ab", ("10.0.0.1", "10.0.0.2"), "10.0.0.1"),
        ("aab", ("127.0.0.1", "127.0.0.1", "10.0.0.2"), "way to 10.0.0.2"),  # the store's host, by its own name
        ("ab", ("", "10.0.0.2"), "way to 10.0.0.2"),  # it cannot resolve the name
        ("ab", ("::1", "fd00::2%eth0"), "way to fd00::2%eth0"),
        ("ab", ("127.0.0.1", "127.0.0.1"), "127.0.0.1"),  # containers on one machine
        ("ab", ("", ""), ""),
    ],
)
def test_an_address_that_other_machines_reach(routes, hosts, addresses, expected):
    assert address_among(0, hosts, addresses) == expected


def test_the_address_of_a_machine_towards_another():
    assert processes.address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"not known|No address|Temporary failure"):
        processes.address_towards("no such host")


def test_the_first_address_of_a_name_may_be_out_of_reach(monkeypatch):
    """As ::1 on a machine without IPv6."""
    found = [(10, 2, 17, "", ("::ffff:0:0:1%nowhere", 1, 0, 0)), (2, 2, 17, "", ("127.0.0.1", 1))]
    monkeypatch.setattr(processes.socket, "getaddrinfo", lambda *_, **__: found)
    assert processes.address_towards("localhost") == "127.0.0.1"


def test_containers_are_machines_of_their_own(monkeypatch):
    here = processes.host_name()
    assert processes.host_name() == here
    monkeypatch.setattr(processes.os, "readlink", lambda path: f"another {path}")
    assert processes.host_name() != here


def test_no_address_at_all(monkeypatch):
    exchange = SimpleNamespace(hosts="ab", address="", messages=SimpleNamespace(key=b""))
    connector = processes.ProcessConnector("tcp", exchange)
    monkeypatch.setattr(processes, "_store_host", lambda: "head-node")
    with pytest.raises(processes.TransportError, match=r"cannot resolve or reach 'head-node'.*Set MASTER_ADDR"):
        connector._address(SimpleNamespace(members=[0, 1]))
    assert connector._address(SimpleNamespace(members=[0])) == "127.0.0.1"
