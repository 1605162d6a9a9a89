"""The native consumer of the ring, against a producer in Python that goes by lang/requests.py."""

import ctypes
import hashlib
import hmac
import mmap
import random
import threading
import time

import numpy as np
import pytest
import torch
import triton.language as tl
from support.patience import HANG

from mkernel.lang import requests as layout
from mkernel.net import LoopbackTransport, Proxy
from mkernel.net.library import library
from mkernel.runtime.errors import ArgumentError, TransportError
from mkernel.runtime.network import poll_drained

from .harness import CAPACITY, COMPLETED, CONSUMED, HEADER, WORDS, Producer, Rank, eventually, tcp_job


@pytest.fixture
def pair(request):
    """Two ranks of a job of their own."""
    job = request.node.name
    ranks = [Rank(LoopbackTransport(job, rank)) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.proxy.stop(0)
        rank.transport.close()


def test_the_layout_is_that_of_the_kernels():
    constants = {name: value.value for name, value in vars(layout).items() if isinstance(value, tl.constexpr)}
    own = {
        name: value
        for name, value in constants.items()
        if name in ("CONSUMED", "COMPLETED", "CAPACITY", "HEADER_WORDS", "REQUEST_WORDS", "TURN")
        or name in ("PEER_AND_SEGMENTS", "SOURCE", "TARGET", "BYTES", "SIGNAL", "VALUE")
    }
    assert len(own) == 12
    assert {name: library().constant(name.encode()) for name in own} == own
    assert library().constant(b"SOMETHING") == -1


def test_the_keyed_hash_is_the_standard_one():
    def ours(key: bytes, data: bytes) -> str:
        out = ctypes.create_string_buffer(32)
        library().hmac(key, len(key), data, len(data), out)
        return out.raw.hex()

    # RFC 4231, test case 2
    known = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert ours(b"Jefe", b"what do ya want for nothing?") == known
    rng = random.Random(0)
    for size in [*range(130), 1000, 100_000]:
        key, data = rng.randbytes(size % 150), rng.randbytes(size)
        assert ours(key, data) == hmac.new(key, data, hashlib.sha256).hexdigest()


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_the_ring_goes_round(capacity, request):
    with LoopbackTransport(request.node.name, 0) as transport:
        rank = Rank(transport, capacity=capacity)
        for i in range(100):
            rank.put(0, 0, 0, 0, signal=i, value=i + 7)
        assert rank.proxy.stop(HANG)
        assert rank.signals[:100].tolist() == list(range(7, 107))
        assert (rank.producer.consumed, rank.producer.completed) == (100, 100)


def test_a_full_ring_waits_for_a_slow_consumer(request):
    with LoopbackTransport(request.node.name, 0, latency=1.0) as transport:
        rank = Rank(transport, capacity=4)
        start = time.monotonic()
        for i in range(1024 + 1024 + 4 + 8):  # more than the transport has in flight, the proxy keeps, the ring holds
            rank.put(0, 0, 0, 0, signal=i % 512, value=i + 1)
        assert time.monotonic() - start > 0.2
        assert rank.proxy.stop(HANG)
        assert rank.producer.completed == 2060
        assert rank.proxy.statistics.most_in_flight <= 1024


def test_so_many_requests_are_in_flight_and_no_more(request):
    with LoopbackTransport(request.node.name, 0, latency=1.0) as transport:
        rank = Rank(transport, capacity=4096)
        assert rank.proxy.stop(HANG)
        for i in range(2060):  # all there before anybody takes them
            rank.put(0, 0, 0, 0, signal=i % 512, value=i + 1)
        with Proxy(rank.producer.ring, transport) as proxy:
            eventually(lambda: rank.producer.completed == 2060, "all done")
        assert proxy.statistics.most_in_flight == 1024


def test_many_producers(pair):
    zero, one = pair
    each, threads = 500, 8

    def produce(which: int) -> None:
        for i in range(each):
            zero.put(1, which * 8, which * 8, 8, signal=which, value=i + 1)

    zero.data[:64].view(torch.int64)[:] = torch.arange(100, 108)
    workers = [threading.Thread(target=produce, args=(which,)) for which in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(HANG)
    assert zero.proxy.stop(HANG)
    assert one.signals[:threads].tolist() == [each] * threads
    assert one.data[:64].view(torch.int64).tolist() == list(range(100, 108))
    assert zero.producer.completed == each * threads == zero.proxy.statistics.requests


def test_a_million_requests(request):
    """In batches of half a ring, written with numpy."""
    total, capacity = 1_000_000, 8192
    with LoopbackTransport(request.node.name, 0) as transport:
        memory = torch.zeros(2 * capacity * 8, dtype=torch.uint8)
        transport.attach(0, memory)
        words64 = memory.view(torch.int64).numpy()
        words64[:capacity] = np.arange(capacity)
        producer = Producer(capacity)
        slots = producer.words[HEADER:].reshape(capacity, WORDS)
        with Proxy(producer.ring, transport) as proxy:
            for first in range(0, total, capacity // 2):
                tickets = np.arange(first, min(first + capacity // 2, total))
                eventually(lambda: producer.consumed > tickets[-1] - capacity, "room")
                rows = slots[tickets[0] % capacity :][: len(tickets)]
                place = tickets % capacity * 8
                rows[:, layout.SOURCE.value] = place
                rows[:, layout.TARGET.value] = place + capacity * 8
                rows[:, layout.BYTES.value] = 8
                rows[:, layout.SIGNAL.value] = 0
                rows[:, layout.VALUE.value] = tickets + 1
                rows[:, layout.TURN.value] = tickets // capacity + 1
            eventually(lambda: producer.completed == total, "all done")
        assert producer.consumed == producer.completed == total
        assert words64[0] == total
        assert (words64[capacity + 1 :] == np.arange(1, capacity)).all()
        assert (proxy.statistics.requests, proxy.statistics.bytes) == (total, total * 8)


def far_memory() -> torch.Tensor:
    """6 GiB of which only what is touched exists."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, 6 << 30, flags=flags), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["loopback", "tcp"])
def test_offsets_beyond_32_bits(kind, pair):
    def check(zero: Rank, one: Rank) -> None:
        here, there = far_memory(), far_memory()
        source, target, signal = (4 << 30) + 12345, (5 << 30) + 4321, (6 << 30) - 8
        here[source : source + 1000] = torch.arange(1000).to(torch.uint8)
        zero.transport.attach(0xFFFFFF, here)
        one.transport.attach(0xABCDEF, there)
        at = {"source": source, "target": target, "size": 1000, "signal": signal, "value": 1 << 40}
        zero.producer.post(1, segment=0xABCDEF, source_segment=0xFFFFFF, **at)
        grown = there[signal:].view(torch.int64)
        eventually(lambda: grown.item() == 1 << 40, "the signal")
        assert torch.equal(there[target : target + 1000], here[source : source + 1000])
        assert not there[target - 8 : target].any()
        assert not there[target + 1000 : target + 1008].any()
        assert not there[target & 0xFFFFFFFF : (target & 0xFFFFFFFF) + 1000].any()

    if kind == "loopback":
        check(*pair)
    else:
        with tcp_job(2) as ranks:
            check(*ranks)


def test_rings_that_are_refused(pair):
    transport = pair[0].transport
    large, left = Producer(8).ring, Producer(8).ring
    large[CAPACITY] = 9
    left[CONSUMED], left[COMPLETED] = 5, 3
    with pytest.raises(TransportError, match="capacity is 9 requests, its memory has space for 8"):
        Proxy(large, transport)
    with pytest.raises(TransportError, match="capacity is 0"):
        Proxy(torch.zeros(64, dtype=torch.int64), transport)
    with pytest.raises(TransportError, match="too small for its header"):
        Proxy(torch.zeros(4, dtype=torch.int64), transport)
    with pytest.raises(TransportError, match="left with 2 requests in flight"):
        Proxy(left, transport)
    with pytest.raises(ArgumentError, match="int64"):
        Proxy(torch.zeros(64), transport)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_ring_is_drained_when_all_in_it_is_completed(count, request):
    for latency in (10 * HANG, 0.1):  # nothing completes before the check; everything does
        with LoopbackTransport(f"{request.node.name} {latency}", 0, latency=latency) as transport:
            rank = Rank(transport, capacity=4)
            assert poll_drained(rank.producer.ring)
            for i in range(count):
                rank.put(0, 0, 0, 0, signal=i)
            if latency > HANG:
                assert not poll_drained(rank.producer.ring)
                eventually(lambda ring=rank.producer: ring.consumed == count, "all taken")
                assert not poll_drained(rank.producer.ring)
                assert not rank.proxy.stop(0)
            else:
                eventually(lambda ring=rank.producer.ring: poll_drained(ring), "all done")
                assert rank.signals[:count].tolist() == [1] * count
                assert rank.proxy.stop(HANG)


def test_a_ring_is_taken_over_where_it_was_left(pair):
    zero, one = pair
    for i in range(10):
        zero.put(1, 0, 0, 0, value=i + 1)
    assert zero.proxy.stop(HANG)
    zero.put(1, 0, 0, 0, value=11)
    with Proxy(zero.producer.ring, zero.transport) as second:
        one.wait(0, 11)
    assert zero.producer.completed == 11
    assert second.statistics.requests == 1
