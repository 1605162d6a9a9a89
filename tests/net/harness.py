"""What the tests of the network share: a ring's producer in Python, and ranks with everything they need."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch
from support.patience import HANG

from mkernel.lang import requests as layout
from mkernel.net import Proxy, TcpTransport, Transport

CONSUMED, COMPLETED = layout.CONSUMED.value, layout.COMPLETED.value
CAPACITY, HEADER, WORDS = layout.CAPACITY.value, layout.HEADER_WORDS.value, layout.REQUEST_WORDS.value
SECRET = b"only the ranks of this job know!"


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {HANG:g} s"
        time.sleep(0.0002)


class Producer:
    """Writes requests into a ring as kernels do; may be used by many threads."""

    def __init__(self, capacity: int = 256):
        self.ring = torch.zeros(HEADER + capacity * WORDS, dtype=torch.int64)
        self.ring[CAPACITY] = capacity
        self.words = self.ring.numpy()
        self.capacity = capacity
        self.taken = 0
        self._lock = threading.Lock()

    @property
    def consumed(self) -> int:
        return int(self.words[CONSUMED])

    @property
    def completed(self) -> int:
        return int(self.words[COMPLETED])

    def post(
        self, peer: int, *, source=0, target=0, size=0, signal=0, value=1, segment=0, source_segment=0, proxy=None
    ) -> int:
        with self._lock:
            ticket = self.taken
            self.taken += 1
        eventually(lambda: self.consumed > ticket - self.capacity or bool(proxy and proxy.error), "room in the ring")
        slot = self.words[HEADER + ticket % self.capacity * WORDS :][:WORDS]
        addressee = peer | segment << 16 | source_segment << 40
        slot[layout.PEER_AND_SEGMENTS.value] = addressee - (addressee >> 63 << 64)  # its bits as a signed word
        slot[layout.SOURCE.value] = source
        slot[layout.TARGET.value] = target
        slot[layout.BYTES.value] = size
        slot[layout.SIGNAL.value] = signal
        slot[layout.VALUE.value] = value
        with self._lock:  # the words before the turn, on every machine
            slot[layout.TURN.value] = ticket // self.capacity + 1
        return ticket

    def wait_sent(self, ticket: int) -> None:
        eventually(lambda: self.completed > ticket, f"request {ticket} sent")


class Rank:
    """A transport, a ring with its proxy, and one segment: 4 KiB of signals, then data."""

    SIGNALS = 4096

    def __init__(self, transport: Transport, nbytes: int = 1 << 16, capacity: int = 256):
        self.transport = transport
        self.memory = torch.zeros(self.SIGNALS + nbytes, dtype=torch.uint8)
        self.signals = self.memory[: self.SIGNALS].view(torch.int64).numpy()
        self.data = self.memory[self.SIGNALS :]
        transport.attach(0, self.memory)
        self.producer = Producer(capacity)
        self.proxy = Proxy(self.producer.ring, transport)

    def put(self, peer: int, source: int, target: int, size: int, signal: int = 0, value: int = 1) -> int:
        """Data [source, source + size) to the peer's data from target on; then its signal number `signal`."""
        return self.producer.post(
            peer,
            source=self.SIGNALS + source,
            target=self.SIGNALS + target,
            size=size,
            signal=signal * 8,
            value=value,
            proxy=self.proxy,
        )

    def wait(self, signal: int, value: int) -> None:
        eventually(lambda: self.signals[signal] >= value, f"signal {signal} at {value}")

    def failure(self) -> str:
        eventually(lambda: self.proxy.error is not None, "an error")
        return str(self.proxy.error)

    def polls_again(self) -> None:
        """Wait until the proxy has polled a hundred times more: what has not happened then will not happen."""
        first = self.proxy.statistics
        before = first.busy_loops + first.idle_loops
        eventually(
            lambda: (now := self.proxy.statistics).busy_loops + now.idle_loops >= before + 100, "a hundred more polls"
        )


def stop_all(ranks: list[Rank]) -> None:
    """As a job ends: all are served, then all leave."""
    for rank in ranks:
        assert rank.proxy.stop(HANG), rank.proxy.error
    for rank in ranks:
        rank.transport.close()


def together(*calls: Callable[[], None]) -> None:
    """Each in a thread of its own; the first error is raised here."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def connect(transports: list[TcpTransport], host: str = "127.0.0.1") -> None:
    table = {transport.rank: (host, transport.port) for transport in transports}

    def one(transport: TcpTransport) -> None:
        transport.connect({rank: place for rank, place in table.items() if rank != transport.rank}, HANG)

    together(*(lambda t=transport: one(t) for transport in transports))


@contextlib.contextmanager
def tcp_job(size: int, nbytes: int = 1 << 16, streams: int = 3, host: str = "127.0.0.1") -> Iterator[list[Rank]]:
    """Connected ranks; at the end all must have gone well."""
    transports = [TcpTransport(rank, size, SECRET, listen=host, streams=streams) for rank in range(size)]
    connect(transports, host)
    ranks = [Rank(transport, nbytes) for transport in transports]
    yield ranks
    stop_all(ranks)
