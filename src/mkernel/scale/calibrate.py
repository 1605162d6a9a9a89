"""`mkernel plan --calibrate`: what can be measured on this machine, and a file of it.

So far, that is the path of a request over TCP between two ranks of this process: how long it takes from a request in
the ring until the peer sees its signal, what the proxy needs for each of many requests, and the rate of large
transfers. It needs no GPU, and measures none. Everything else is taken from the machine that it is based on, and
`sources` says so.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mkernel.lang import requests as words
from mkernel.runtime.errors import MKernelError
from mkernel.runtime.network import SPIN_SECONDS
from mkernel.scale.machine import load
from mkernel.scale.validation import median

SECRET = b"two ranks of one process, to measure"
SIGNALS = 4096  # bytes in front of the data
LARGE, SMALL = 16 << 20, 0
CAPACITY = 256
ROUNDS, TRANSFERS, FLOODS = 200, 12, 8
PATIENCE = 30.0


class _Rank:
    """A rank with a ring, a proxy and memory, in this process. Nobody else writes into its ring."""

    def __init__(self, rank: int):
        from mkernel.net import Proxy, TcpTransport

        self.transport = TcpTransport(rank, 2, SECRET, streams=4)
        self.memory = torch.zeros(SIGNALS + LARGE, dtype=torch.uint8)
        self.signals = self.memory[:SIGNALS].view(torch.int64).numpy()
        self.transport.attach(0, self.memory)
        ring = torch.zeros(words.HEADER_WORDS.value + CAPACITY * words.REQUEST_WORDS.value, dtype=torch.int64)
        ring[words.CAPACITY.value] = CAPACITY
        self.ring = ring.numpy()
        self.slots = self.ring[words.HEADER_WORDS.value :].reshape(CAPACITY, words.REQUEST_WORDS.value)
        self.taken = 0
        self.proxy = Proxy(ring, self.transport, spin=SPIN_SECONDS["cpu"])

    def post(self, peer: int, size: int, signal: int, value: int, count: int = 1) -> None:
        """Post requests; the turn numbers, which the proxy waits for, last. There must be room for them."""
        tickets = np.arange(self.taken, self.taken + count)
        slots = tickets % CAPACITY
        for word, content in (
            (words.PEER_AND_SEGMENTS, peer), (words.SOURCE, SIGNALS), (words.TARGET, SIGNALS), (words.BYTES, size),
            (words.SIGNAL, 8 * signal), (words.VALUE, value),
        ):  # fmt: skip
            self.slots[slots, word.value] = content
        self.slots[slots, words.TURN.value] = tickets // CAPACITY + 1
        self.taken += count

    def close(self) -> None:
        self.proxy.stop(PATIENCE)
        self.transport.close()


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        time.sleep(0)  # the proxies need the cores
        if time.monotonic() > deadline:
            raise MKernelError("a request did not arrive: the network between two ranks of this process does not work")


def measure_tcp(tell: Callable[[str], None] = lambda what: None) -> dict[str, float]:
    """network (bytes/s), network_seconds and request_seconds over TCP on this machine."""
    ranks = [_Rank(0), _Rank(1)]
    try:
        sender, receiver = ranks
        address = {1: ("127.0.0.1", receiver.transport.port)}
        other = threading.Thread(
            target=receiver.transport.connect, args=({0: ("127.0.0.1", sender.transport.port)},), kwargs={"timeout": 10}
        )
        other.start()
        sender.transport.connect(address, timeout=10)
        other.join()
        tell("the latency of a request")
        latencies = []
        for i in range(ROUNDS):
            begun = time.perf_counter()
            sender.post(1, SMALL, 0, i + 1)
            _until(lambda: receiver.signals[0] > i)
            latencies.append(time.perf_counter() - begun)
        tell("the rate of large transfers")
        rates = []
        for i in range(TRANSFERS):
            begun = time.perf_counter()
            sender.post(1, LARGE, 1, i + 1)
            _until(lambda: receiver.signals[1] > i)
            rates.append(LARGE / (time.perf_counter() - begun))
        tell("many requests")
        floods = []
        for _ in range(FLOODS):
            begun = time.perf_counter()
            sender.post(1, SMALL, 2, 1, CAPACITY - 1)
            _until(lambda: sender.ring[words.COMPLETED.value] >= sender.taken)
            floods.append((time.perf_counter() - begun) / (CAPACITY - 1))
    finally:
        for rank in ranks:
            rank.close()
    return {"network": median(rates), "network_seconds": median(latencies), "request_seconds": median(floods)}


def calibrate(path: Path, based_on: str, tell: Callable[[str], None] = lambda what: None) -> dict[str, float]:
    """Measure this machine, and write a file of it. tell: is told what is measured next."""
    load(based_on)  # refuses an unknown machine
    found = measure_tcp(tell)
    how = "measured: two ranks of one process over TCP on this machine"
    given = {
        "based_on": based_on,
        "name": path.stem,
        "about": f"{load(based_on).about} That is {based_on}: the GPU of the machine of this file was not measured.",
        "network_about": "TCP within one process of the machine of this file, measured",
        "network_share": 1.0,
        **{name: float(f"{value:.4g}") for name, value in found.items()},
        "sources": {**dict.fromkeys(found, how), "network_share": "the rate was measured"},
    }
    path.write_text(json.dumps(given, indent=2) + "\n")
    return found
