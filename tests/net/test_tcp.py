"""Ranks of one process over 127.0.0.1: every byte arrives, before its signal; a lost peer is not one that has left."""

import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
import torch
from support.patience import HANG

from mkernel.net import TcpTransport
from mkernel.runtime.errors import TransportError

from .harness import CAPACITY, SECRET, Rank, connect, eventually, stop_all, tcp_job, together

MIB = 1 << 20


def noise(rank: Rank, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    rank.data[:] = torch.randint(0, 256, rank.data.shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("streams", [1, 4])
def test_sizes(streams):
    with tcp_job(2, 9 * MIB, streams) as (zero, one):
        noise(zero)
        for i, size in enumerate([0, 1, 7, 64 << 10, MIB, MIB + 1, 8 * MIB]):
            one.data.zero_()
            zero.put(1, 11, 13, size, signal=i, value=i + 1)
            one.wait(i, i + 1)
            assert torch.equal(one.data[13 : 13 + size], zero.data[11 : 11 + size])
            assert not one.data[:13].any()
            assert not one.data[13 + size :].any()
        statistics = zero.proxy.statistics
        assert statistics.requests == 7
        assert statistics.bytes == 8 + (64 << 10) + 10 * MIB + 1


def test_random_writes():
    """2,000 writes of one rank to two others, each to a place of its own."""
    rng = random.Random(0)
    with tcp_job(3, 8 * MIB) as ranks:
        zero = ranks[0]
        noise(zero)
        expected = [torch.zeros_like(zero.data) for _ in ranks]
        at, count = [0, 0, 0], [0, 0, 0]
        for _ in range(2000):
            peer, size = rng.choice((1, 2)), rng.choice((0, rng.randrange(64), rng.randrange(8000)))
            source, target = rng.randrange(zero.data.numel() - size), at[peer] + rng.randrange(20)
            at[peer] = target + size
            assert at[peer] <= zero.data.numel()
            expected[peer][target : target + size] = zero.data[source : source + size]
            count[peer] += 1
            zero.put(peer, source, target, size, signal=count[peer] % 512, value=count[peer])
        for peer in (1, 2):
            for number in range(count[peer] - 511, count[peer] + 1):
                ranks[peer].wait(number % 512, number)
        # signals of earlier writes were raised again by later ones, so let everything come in
        for peer in (1, 2):
            eventually(lambda p=peer: torch.equal(ranks[p].data, expected[p]), f"the data of rank {peer}")


def test_all_to_all_at_the_same_time():
    size, rounds = 700_000, 12
    with tcp_job(3, 8 * MIB) as ranks:
        for rank in ranks:
            noise(rank, rank.transport.rank)

        def work(rank: Rank) -> None:
            me = rank.transport.rank
            for i in range(rounds):
                for peer in range(3):
                    if peer != me:
                        rank.put(peer, i * 1000, 2 * MIB + me * 2 * MIB, size, signal=me, value=i + 1)
                for peer in range(3):
                    if peer != me:
                        rank.wait(peer, i + 1)
                        came = rank.data[2 * MIB + peer * 2 * MIB :][:size]
                        assert torch.equal(came, ranks[peer].data[i * 1000 :][:size])
                        # tell the sender that its block may be overwritten
                        rank.put(peer, 0, 0, 0, signal=10 + me, value=i + 1)
                for peer in range(3):
                    if peer != me:
                        rank.wait(10 + peer, i + 1)

        together(*(lambda r=rank: work(r) for rank in ranks))


def test_a_source_may_be_written_again_once_it_was_sent():
    with tcp_job(2, 4 * MIB) as (zero, one):
        for i in range(10):
            zero.data[: 2 * MIB] = i + 1
            zero.producer.wait_sent(zero.put(1, 0, 2 * MIB, 2 * MIB, value=i + 1))
            zero.data[: 2 * MIB] = 255
            one.wait(0, i + 1)
            assert (one.data[2 * MIB :] == i + 1).all()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
def test_ipv6():
    with tcp_job(2, host="::1") as (zero, one):
        zero.data[:8] = 5
        zero.put(1, 0, 0, 8)
        one.wait(0, 1)
        assert (one.data[:8] == 5).all()


def end(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.proxy.stop(0)
        rank.transport.close(0)


def test_a_rank_that_leaves_in_order_is_not_a_loss():
    with tcp_job(3) as ranks:
        zero, one, two = ranks
        two.data[:8] = 9
        two.put(0, 0, 0, 8)
        two.put(1, 0, 0, 8)
        stop_all([two])
        for rank in (zero, one):
            rank.wait(0, 1)
            assert (rank.data[:8] == 9).all()
        for i in range(20):  # the others go on
            zero.put(1, 0, 0, 8, signal=1, value=i + 1)
            one.wait(1, i + 1)
        zero.polls_again()
        one.polls_again()
        assert (zero.proxy.error, one.proxy.error) == (None, None)
        zero.put(2, 0, 0, 8)
        assert "rank 2 at 127.0.0.1:" in zero.failure()
        assert "has left the job" in zero.failure()
        end([zero])
        assert "rank 0 at 127.0.0.1:" in one.failure()  # which did not say good-bye
        end([one])
        ranks.clear()


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_peer_is_named(forks):
    """Also if a child lives on that it has forked, such as a worker of a data loader."""
    program = f"""
import os, sys, time, torch
from mkernel.net import Proxy, TcpTransport
transport = TcpTransport(1, 2, {SECRET!r}, streams=3)
transport.attach(0, torch.zeros(1 << 16, dtype=torch.uint8))
ring = torch.zeros(72, dtype=torch.int64)
ring[{CAPACITY}] = 8
transport.connect({{0: ("127.0.0.1", int(sys.argv[1]))}}, {HANG})
proxy = Proxy(ring, transport)
child = os.fork() if {forks} else -1
if child == 0:
    time.sleep({HANG})
    os._exit(0)
print("ready", child, flush=True)
sys.stdin.read()
"""
    forked = -1
    zero = Rank(TcpTransport(0, 2, SECRET, streams=3, peer_timeout=2 * HANG))  # not what tells of the loss
    command = [sys.executable, "-c", program, str(zero.transport.port)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        zero.transport.connect({1: ("127.0.0.1", 0)}, HANG)
        ready, forked = child.stdout.readline().split()
        assert ready == "ready"
        for i in range(50):
            zero.producer.wait_sent(zero.put(1, 0, 0, 1000, value=i + 1))
        assert zero.proxy.error is None
        os.kill(child.pid, signal.SIGKILL)
        assert "network proxy of rank 0: rank 1 at 127.0.0.1:" in zero.failure()
    finally:
        child.kill()
        if int(forked) > 0:
            os.kill(int(forked), signal.SIGKILL)
        child.communicate()
        end([zero])


def test_a_peer_that_takes_nothing_is_lost_after_its_timeout():
    transports = [TcpTransport(rank, 2, SECRET, peer_timeout=1.0) for rank in range(2)]
    connect(transports)
    zero, one = (Rank(transport, 8 * MIB) for transport in transports)
    one.proxy.stop()
    for i in range(30):
        zero.put(1, 0, 0, 8 * MIB, value=i + 1)
    assert "rank 1 at 127.0.0.1:" in zero.failure()
    assert "timed out" in zero.failure()
    end([zero, one])


def test_a_peer_that_takes_nothing_does_not_hold_up_the_others():
    """More requests than one peer may have in flight, to one that reads none; those behind go to another."""
    transports = [TcpTransport(rank, 3, SECRET, peer_timeout=2 * HANG) for rank in range(3)]
    connect(transports)
    zero, slow, quick = (Rank(transport, 8 * MIB, capacity=1024) for transport in transports)
    slow.proxy.stop()
    for i in range(800):
        zero.put(1, 0, 0, 64 << 10, value=i + 1)
    for i in range(800):
        zero.put(2, 0, 0, 1000, value=i + 1)
    quick.wait(0, 800)
    assert zero.producer.completed < 800
    end([zero, slow, quick])


def test_requests_that_have_arrived_are_counted():
    with tcp_job(2, 4 * MIB) as (zero, one):
        for i, size in enumerate((0, 8, 3 * MIB)):
            zero.put(1, 0, 0, size, signal=i)
        one.put(0, 0, 0, 8)
        eventually(lambda: one.transport.counts(0) == (1, 3), "all arrive")
        assert list(one.signals[:3]) == [1, 1, 1]
        eventually(lambda: zero.transport.counts(1) == (3, 1), "all arrive")


def test_stop_while_busy():
    transports = [TcpTransport(rank, 2, SECRET, peer_timeout=2 * HANG) for rank in range(2)]
    connect(transports)
    zero, one = (Rank(transport, 8 * MIB) for transport in transports)
    one.proxy.stop()  # nobody takes the bytes out at the other end
    for i in range(30):
        zero.put(1, 0, 0, 8 * MIB, value=i + 1)
    start = time.monotonic()
    assert not zero.proxy.stop(0.3)
    assert zero.producer.consumed > zero.producer.completed
    zero.transport.close(0.3)
    one.transport.close(0.3)
    assert time.monotonic() - start < HANG


def test_closing_under_a_running_proxy():
    with tcp_job(2, 8 * MIB) as ranks:
        zero, one = ranks
        for i in range(30):
            zero.put(1, 0, 0, 8 * MIB, value=i + 1)
        zero.transport.close(0)
        assert "rank 0 has left the job" in zero.failure()
        assert "rank 0 at 127.0.0.1:" in one.failure()
        end(ranks)
        ranks.clear()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"target": 1 << 40}, "target: 8 bytes from 1099511627776 are not inside of rank 1's segment 0"),
        ({"segment": 77}, "target: segment 77 is not attached on rank 1"),
        ({"signal": 4}, "signal: byte 4 of segment 0 on rank 1 is not aligned"),
    ],
)
def test_the_receiver_believes_nothing(wrong, words):
    with tcp_job(2) as ranks:
        zero, one = ranks
        one.memory[:] = 3
        zero.producer.post(**{"peer": 1, "size": 8, **wrong})
        assert "network proxy of rank 1: rank 0 at 127.0.0.1:" in one.failure()
        assert words in one.failure()
        assert (one.memory == 3).all()
        end([one])
        assert "rank 1 at 127.0.0.1:" in zero.failure()
        end([zero])
        ranks.clear()


def test_requests_to_nobody():
    with tcp_job(2) as ranks:
        zero, one = ranks
        zero.producer.post(5, size=8)
        assert "there is no rank 5 in a job of 2" in zero.failure()
        one.producer.post(1, size=8)
        assert "rank 1 is not connected to rank 1" in one.failure()
        end(ranks)
        ranks.clear()


def test_what_is_refused():
    for rank, size, secret, words in [
        (2, 2, SECRET, "rank must be from 0 to 1, got 2"),
        (0, 1, SECRET, "size must be from 2"),
        (0, 2, b"short", "secret must have at least 16 bytes, got 5"),
    ]:
        with pytest.raises(TransportError, match=words):
            TcpTransport(rank, size, secret)
    with pytest.raises(TransportError, match="'localhost' is not a numeric IPv4 or IPv6 address"):
        TcpTransport(0, 2, SECRET, listen="localhost")
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1:0: .*errno"):
        TcpTransport(0, 2, SECRET, listen="192.0.2.1")
    with TcpTransport(0, 2, SECRET) as transport:
        with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{transport.port}"):
            TcpTransport(1, 2, SECRET, port=transport.port)
        with pytest.raises(TransportError, match="rank 0 of 2 has no peer 2"):
            transport.connect({2: ("127.0.0.1", 1)})
        with pytest.raises(TransportError, match="no port 65536"):
            transport.connect({1: ("127.0.0.1", 65536)})


def test_peers_that_do_not_come():
    with TcpTransport(0, 3, SECRET) as zero, pytest.raises(TransportError) as caught:
        zero.connect({1: ("127.0.0.1", 1), 2: ("127.0.0.1", 1)}, timeout=0.3)
    waited = re.match(r"rank 0 waited ([\d.]+) s for rank", str(caught.value))
    assert waited, caught.value
    assert 0.3 <= float(waited[1]) < HANG
    assert "for rank 1 (0 of 4 streams came), rank 2 (0 of 4 streams came)" in str(caught.value)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with TcpTransport(1, 2, SECRET) as one, pytest.raises(TransportError) as caught:
            one.connect({0: ("127.0.0.1", port)}, timeout=0.3)
    assert f"rank 0 at 127.0.0.1:{port} (0 of 4 streams came; the last try: cannot connect" in str(caught.value)


def test_a_signal_ends_the_wait_for_peers():
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        zero = TcpTransport(0, 2, SECRET)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            zero.connect({1: ("127.0.0.1", 0)}, timeout=HANG)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_peer_that_listens_later_is_waited_for():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    one = TcpTransport(1, 2, SECRET)

    def later() -> None:
        time.sleep(0.3)  # time for the other to find nobody; if it comes later, so be it
        zero = TcpTransport(0, 2, SECRET, port=port)
        zero.connect({1: ("127.0.0.1", 0)}, timeout=HANG)
        zero.close()

    together(later, lambda: one.connect({0: ("127.0.0.1", port)}, timeout=HANG))
    one.close()


def test_without_a_proxy():
    """One stream keeps the order of requests. A peer that does not receive makes `post` refuse, and loses nothing."""
    transports = [TcpTransport(rank, 2, SECRET, streams=1) for rank in range(2)]
    connect(transports)
    zero, one = transports
    memories = [torch.zeros(64, dtype=torch.int64) for _ in transports]
    for transport, memory in zip(transports, memories):
        transport.attach(0, memory)
    posted = 0

    def post():
        nonlocal posted
        memories[0][1] = posted + 1
        accepted = zero.post(struct.pack("=8q", 0, 1, 8, 16, 8, 24, posted + 1, 0))
        posted += accepted
        return accepted

    while post():
        assert posted < 100_000
    assert posted >= 500
    seen = []

    def receive():
        zero.poll()
        one.poll()
        seen.append(tuple(memories[1][2:4].tolist()))
        return seen[-1][1] == posted

    eventually(receive, "all requests arrive")
    assert seen == sorted(seen)
    assert post()
    eventually(receive, "there is space again")
    assert memories[1].tolist() == [0, 0, memories[0][1], posted] + [0] * 60
    one.close()

    def post_and_poll():
        while True:
            post()
            zero.poll()

    with pytest.raises(TransportError, match=r"rank 1 at .* has left"):
        post_and_poll()
    with pytest.raises(TransportError, match="the transport of rank 1 was closed"):
        one.poll()
    zero.close(timeout=0)
