"""`mkernel plan --calibrate`: measures what it can on this machine, and writes it to a file.

For the network, it measures the path of a request between two ranks of this process, over RDMA if there are devices,
else over TCP: the time from a request in the ring until the peer sees its signal, the time that the proxy needs for
each of many requests, and the rate of large transfers. Both ranks are on the same machine, so switches and cables are
not included.

For GPUs, see calibrate_gpu.py. Everything else is taken from the machine that the file is based on, and `sources` says
so.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mkernel.lang import requests as words
from mkernel.net import Proxy, TcpTransport, Transport, VerbsTransport, devices
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
MEASURED_WHOLE = {"network_share": 1.0, "rails": 1, "split_bytes": 0}  # the rate is that of requests, as they travel


class _Rank:
    """A rank with a ring, a proxy and memory, in this process. Nobody else writes into its ring."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self.memory = torch.zeros(SIGNALS + LARGE, dtype=torch.uint8, device="cpu")
        self.signals = self.memory[:SIGNALS].view(torch.int64).numpy()
        self.transport.attach(0, self.memory)
        ring = torch.zeros(
            words.HEADER_WORDS.value + CAPACITY * words.REQUEST_WORDS.value, dtype=torch.int64, device="cpu"
        )
        ring[words.CAPACITY.value] = CAPACITY
        self.ring = ring.numpy()
        self.slots = self.ring[words.HEADER_WORDS.value :].reshape(CAPACITY, words.REQUEST_WORDS.value)
        self.taken = 0
        self.proxy = Proxy(ring, self.transport, spin=SPIN_SECONDS["cpu"])

    def post(self, peer: int, size: int, signal: int, value: int, count: int = 1) -> None:
        """Post requests; the turn numbers, which the proxy waits for, last. The ring must have free slots for them."""
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


def _over_tcp() -> tuple[TcpTransport, TcpTransport]:
    """Two connected transports."""
    first, second = (TcpTransport(rank, 2, SECRET, streams=4) for rank in range(2))
    other = threading.Thread(target=second.connect, args=({0: ("127.0.0.1", first.port)},), kwargs={"timeout": 10})
    other.start()
    first.connect({1: ("127.0.0.1", second.port)}, timeout=10)
    other.join()
    return first, second


def _over_rdma(ports: Sequence[devices.Port]) -> tuple[VerbsTransport, VerbsTransport]:
    """Two connected transports: between two devices if there are two, else from a device to itself."""
    rails = [(port.device, port.number, devices.choose_gid(port)) for port in (ports[0], ports[-1])]
    first, second = (VerbsTransport(rank, [rail]) for rank, rail in enumerate(rails))
    of_first, of_second = first.describe(1), second.describe(0)
    first.connect(1, of_second)
    second.connect(0, of_first)
    return first, second


def _let_write(ranks: Sequence[_Rank]) -> None:
    """Let each of two ranks write to the other one's memory."""
    for rank, (one, other) in enumerate(zip(ranks, ranks[::-1])):
        if isinstance(one.transport, VerbsTransport) and isinstance(other.transport, VerbsTransport):
            one.transport.learn_segment(1 - rank, 0, other.transport.describe_segment(0))


def measure_network(progress: Callable[[str], None] = lambda what: None) -> tuple[dict[str, float], str]:
    """network (bytes/s), network_seconds and request_seconds on this machine, and over what they were measured."""
    ports = [port for port in devices.find_ports() if port.active and port.speaks_verbs]
    how = f"RDMA ({', '.join(dict.fromkeys(port.name for port in (ports[0], ports[-1])))})" if ports else "TCP"
    ranks = [_Rank(transport) for transport in (_over_rdma(ports) if ports else _over_tcp())]
    try:
        _let_write(ranks)
        sender, receiver = ranks
        progress("the latency of a request")
        latencies = []
        for i in range(ROUNDS):
            begun = time.perf_counter()
            sender.post(1, SMALL, 0, i + 1)
            _until(lambda: receiver.signals[0] > i)
            latencies.append(time.perf_counter() - begun)
        progress("the rate of large transfers")
        rates = []
        for i in range(TRANSFERS):
            begun = time.perf_counter()
            sender.post(1, LARGE, 1, i + 1)
            _until(lambda: receiver.signals[1] > i)
            rates.append(LARGE / (time.perf_counter() - begun))
        progress("many requests")
        floods = []
        for _ in range(FLOODS):
            begun = time.perf_counter()
            sender.post(1, SMALL, 2, 1, CAPACITY - 1)
            _until(lambda: sender.ring[words.COMPLETED.value] >= sender.taken)
            floods.append((time.perf_counter() - begun) / (CAPACITY - 1))
    finally:
        for rank in ranks:
            rank.close()
    found = {"network": median(rates), "network_seconds": median(latencies), "request_seconds": median(floods)}
    return found, how


def calibrate(
    path: Path, based_on: str, progress: Callable[[str], None] = lambda what: None
) -> tuple[dict[str, float], str]:
    """Measure this machine, and write the figures to a file. `progress` is called with what is measured next. Returns
    the figures of the network, and over what and on which GPU they were measured."""
    base = load(based_on)  # refuses an unknown machine
    found, over = measure_network(progress)
    how = f"measured: two ranks of one process over {over} on this machine"
    given: dict[str, Any] = {
        "based_on": based_on,
        "name": path.stem,
        "about": f"{base.about} That is {based_on}: the GPU of the machine of this file was not measured.",
        "network_about": f"{over} within one process of the machine of this file, measured",
        **MEASURED_WHOLE,
        **{name: float(f"{value:.4g}") for name, value in found.items()},
        "sources": {**dict.fromkeys(found, how), **dict.fromkeys(MEASURED_WHOLE, "the rate was measured")},
    }
    gpu = "no GPU"
    if torch.cuda.is_available():
        from mkernel.scale.calibrate_gpu import measure_gpu

        gpu = torch.cuda.get_device_name()
        machine, names = measure_gpu(base, progress)
        fields = dict.fromkeys(name.partition(".")[0] for name in names)
        given |= {field: getattr(machine, field) for field in fields}
        given["about"] = f"{gpu}, measured; what `sources` does not call measured is that of {based_on}."
        given["gpus_per_node"] = torch.cuda.device_count()
        given["sources"] |= {field: f"measured: {gpu}, by mkernel plan --calibrate" for field in fields}
    path.write_text(json.dumps(given, indent=2) + "\n")
    return found, f"{over}; {gpu}"
