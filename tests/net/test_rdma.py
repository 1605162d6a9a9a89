"""The RDMA transports over a stand-in for libibverbs and libefa that reorders all it may (fake_verbs)."""

import contextlib
import ctypes
import gc
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from support.patience import HANG

from mkernel.net import EfaTransport, VerbsTransport
from mkernel.net import build as builder
from mkernel.net.build import RDMA_HEADERS, build, compiler
from mkernel.net.library import Transport
from mkernel.runtime.errors import TransportError

from .harness import Rank, eventually, stop_all

MIB = 1 << 20
FAKE = Path(__file__).parent / "fake_verbs" / "libibverbs.cc"
ASK = -(1 << 63)
KINDS = {"verbs": (VerbsTransport, ["fake0", "fake1"]), "efa": (EfaTransport, ["efa0", "efa1"])}


def has_headers() -> bool:
    text = "".join(f"#include <{name}>\n" for name in RDMA_HEADERS)
    done = subprocess.run([*compiler(), "-E", "-x", "c++", "-"], input=text, capture_output=True, text=True)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not has_headers(), reason="libibverbs-dev is not installed")


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    if not has_headers():  # for the tests of other files, too
        pytest.skip("libibverbs-dev is not installed")
    path = tmp_path_factory.mktemp("fake") / "libibverbs.so.1"
    flags = ["-std=c++17", "-pthread", "-fPIC", "-shared", "-O1", "-g1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*compiler(), *flags, FAKE, "-o", path], check=True, timeout=HANG)
    return str(path)


@pytest.fixture
def control(fake):
    call = ctypes.CDLL(fake).fake_control
    call.restype, call.argtypes = ctypes.c_int64, [ctypes.c_char_p, ctypes.c_int64]

    def control(what: str, value: int = ASK) -> int:
        return call(what.encode(), value)

    control("seed", 1)
    yield control
    control("silent", 0)
    control("hold", 0)
    control("refuse_memory", 0)
    control("fail_after", -1)
    gc.collect()  # what errors still hold
    eventually(lambda: control("objects") == 0, "all that was made is given back")


def make(fake: str, kind: str, rank: int, devices=None, **options) -> VerbsTransport | EfaTransport:
    transport, usual = KINDS[kind]
    ports = [(device, 1, 0) for device in (devices or usual)]
    return transport(rank, ports, verbs_library=fake, efa_library=fake, **options)


def introduce(transports: list) -> None:
    """Connect all to all, with the segments that they have."""
    described = {
        (one.rank, other.rank): one.describe(other.rank) for one in transports for other in transports if one != other
    }
    for one in transports:
        for other in transports:
            if one != other:
                one.connect(other.rank, described[other.rank, one.rank])
    for one in transports:
        share(one, 0, transports)


def share(owner, segment: int, transports: list) -> None:
    for other in transports:
        if other != owner:
            other.learn_segment(owner.rank, segment, owner.describe_segment(segment))


@contextlib.contextmanager
def job(fake: str, kind: str, size: int = 2, nbytes: int = 1 << 16, devices=None, in_order: bool = True, **options):
    transports = [make(fake, kind, rank, devices, **options) for rank in range(size)]
    ranks = [Rank(transport, nbytes) for transport in transports]
    introduce(transports)
    yield ranks
    if in_order:
        stop_all(ranks)
    else:
        for rank in ranks:
            rank.proxy.stop(0)
            rank.transport.close()
    ranks.clear()
    transports.clear()


def noise(rank: Rank, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    rank.data[:] = torch.randint(0, 256, rank.data.shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("devices", [None, 1], ids=["two rails", "one rail"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thorough
def test_sizes(fake, control, kind, devices):
    names = None if devices is None else KINDS[kind][1][:1]
    with job(fake, kind, nbytes=9 * MIB, devices=names) as (zero, one):
        noise(zero)
        for i, size in enumerate([0, 1, 7, 4096, 64 << 10, (64 << 10) + 1, MIB, MIB + 1, 8 * MIB]):
            one.data.zero_()
            zero.put(1, 11, 13, size, signal=i, value=i + 1)
            one.wait(i, i + 1)
            assert torch.equal(one.data[13 : 13 + size], zero.data[11 : 11 + size])
            assert not one.data[:13].any()
            assert not one.data[13 + size :].any()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thorough
def test_bytes_before_signals(fake, control, kind, seed):
    """Writes of one rank to two others, all under way together; a signal is looked at all the time."""
    control("seed", seed)
    rng = random.Random(seed)
    with job(fake, kind, size=3, nbytes=4 * MIB) as ranks:
        zero = ranks[0]
        noise(zero, seed)
        wrong: list[str] = []
        sent: dict[int, list] = {1: [], 2: []}
        over = threading.Event()

        def watch(peer: int) -> None:
            seen = 0
            while seen < 400 and not over.is_set():
                for number, (source, target, size) in enumerate(sent[peer][:]):
                    if number >= seen and ranks[peer].signals[number] == number + 1:
                        came = ranks[peer].data[target : target + size]
                        if not torch.equal(came, zero.data[source : source + size]):
                            wrong.append(f"write {number} to rank {peer}")
                        seen = number + 1 if number == seen else seen

        watchers = [threading.Thread(target=watch, args=(peer,)) for peer in sent]
        for watcher in watchers:
            watcher.start()
        at = {1: 0, 2: 0}
        for number in range(400):
            for peer in sent:
                size = rng.choice((1, 8, rng.randrange(1, 8000)))
                source, target = rng.randrange(zero.data.numel() - size), at[peer]
                at[peer] += size
                sent[peer].append((source, target, size))
                zero.put(peer, source, target, size, signal=number, value=number + 1)
        for peer in sent:
            for number in range(400):
                ranks[peer].wait(number, number + 1)
                source, target, size = sent[peer][number]
                assert torch.equal(ranks[peer].data[target : target + size], zero.data[source : source + size])
        over.set()
        for watcher in watchers:
            watcher.join(20)
        assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_may_be_written_again_once_it_was_sent(fake, control, kind):
    count, size = 100, 500
    with job(fake, kind) as (zero, one):
        for turn in range(5):
            noise(zero, turn)
            before = zero.data[: count * size].clone()
            tickets = [zero.put(1, i * size, i * size, size, signal=i, value=turn + 1) for i in range(count)]
            for i, ticket in enumerate(tickets):
                zero.producer.wait_sent(ticket)
                zero.data[i * size : (i + 1) * size] = 255
            for i in range(count):
                one.wait(i, turn + 1)
            assert torch.equal(one.data[: count * size], before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_never_shrinks(fake, control, kind):
    """Also where messages overtake each other, and values are asked for in another order."""
    with job(fake, kind) as (zero, one):
        for value in (9, 4, -3):
            zero.put(1, 0, 0, 0, signal=5, value=value)
        one.wait(5, 9)
        eventually(lambda: zero.proxy.statistics.completions == 3, "completions")
        one.polls_again()
        assert one.signals[5] == 9
        for value in range(1, 600):
            zero.put(1, 0, 0, value % 3 * 40, value=value)
        highest, deadline = 0, time.monotonic() + HANG
        while highest < 599:
            now = int(one.signals[0])
            assert now >= highest
            assert time.monotonic() < deadline
            highest = now


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_at_once_with_queues_that_fill(fake, control, kind):
    with job(fake, kind, nbytes=MIB, **({"queues": 1} if kind == "verbs" else {})) as ranks:
        for rank in ranks:
            noise(rank, rank.transport.rank)
        count = 1500

        def send(rank: Rank) -> None:
            for number in range(count):
                rank.put(1 - rank.transport.rank, 0, 0, 0, signal=number % 500, value=number // 500 + 1)

        threads = [threading.Thread(target=send, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        for rank in ranks:
            for signal in range(500):
                rank.wait(signal, 3)
            eventually(lambda r=rank: r.proxy.statistics.completions == count, "completions")


@pytest.mark.parametrize(("kind", "depth"), [("verbs", 256), ("efa", 64)])
def test_a_full_send_queue_is_waited_for(fake, control, kind, depth):
    """A verbs queue pair holds 512 writes, two for each request; an efa one holds what the device says."""
    with job(fake, kind, devices=KINDS[kind][1][:1], queues=1) as (zero, one):
        control("hold", 1)
        for number in range(depth + 100):
            zero.put(1, 0, 0, 1 if kind == "verbs" else 0, signal=number)
        eventually(lambda: zero.proxy.statistics.requests == depth, "a full queue")
        zero.polls_again()
        assert zero.proxy.statistics.requests == depth
        control("hold", 0)
        for number in range(depth + 100):
            one.wait(number, 1)


def test_batches_and_selective_signalling(fake, control):
    """Requests that are there together go as few lists, and few of their writes are told of."""
    with job(fake, "verbs", devices=["fake0"], queues=2) as (zero, one):
        control("posts", 0)
        control("told", 0)
        control("writes", 0)
        for number in range(256):
            zero.put(1, 0, number, 1, signal=number)
        for number in range(256):
            one.wait(number, 1)
        assert control("writes") == 512
        assert control("told") <= 300
        assert control("posts") <= 256


@pytest.mark.parametrize("kind", KINDS)
def test_segments_that_come_later_and_go(fake, control, kind):
    with job(fake, kind) as ranks:
        zero, one = ranks
        transports = [rank.transport for rank in ranks]
        for number in range(1, 12):
            memory = torch.zeros(8192, dtype=torch.uint8)
            one.transport.attach(number, memory)
            with pytest.raises(TransportError, match="attached already"):
                one.transport.attach(number, memory)
            share(one.transport, number, transports)
            zero.data[0] = number
            zero.producer.post(1, source=Rank.SIGNALS, target=4096, size=1, signal=8, value=1, segment=number)
            words = memory.view(torch.int64).numpy()
            eventually(lambda: words[1] == 1, "the signal")
            assert memory[4096] == number
            eventually(lambda: zero.producer.completed == zero.producer.consumed, "completion")
            one.transport.detach(number)
        with pytest.raises(TransportError, match="segment 3 is not attached"):
            one.transport.detach(3)
        with pytest.raises(TransportError, match="segment 3 is not attached"):
            one.transport.describe_segment(3)


@pytest.mark.parametrize("kind", KINDS)
def test_infiniband_and_one_rail_beside_two(fake, control, kind):
    """The n-th rail of one rank talks to the n-th of the other; those without a counterpart stay idle."""
    transports: list[Transport] = [make(fake, kind, 0), make(fake, kind, 1, KINDS[kind][1][:1])]
    ranks = [Rank(transport) for transport in transports]
    introduce(transports)
    for signal in range(64):
        ranks[0].put(1, 0, 0, 10, signal=signal)
        ranks[1].put(0, 0, 0, 10, signal=signal)
    for signal in range(64):
        ranks[0].wait(signal, 1)
        ranks[1].wait(signal, 1)
    stop_all(ranks)
    ranks.clear()
    transports.clear()
    if kind == "verbs":
        with job(fake, kind, devices=["fakeib"]) as (zero, one):
            zero.put(1, 0, 0, 100)
            one.wait(0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_does_not_answer(fake, control, kind):
    with job(fake, kind, in_order=False) as (zero, one):
        zero.put(1, 0, 0, 100)
        one.wait(0, 1)
        control("silent", 1)
        zero.put(1, 0, 0, 100, value=2)
        device = KINDS[kind][1]
        failure = zero.failure()
        assert "network proxy of rank 0: rank 1, by " in failure
        assert any(f"by {name}" in failure for name in device)
        assert "transport retry counter exceeded (status 12, vendor error 0x81): it does not answer" in failure
        assert one.proxy.error is None
        assert one.signals[0] == 1
        with pytest.raises(TransportError, match="transport retry counter exceeded"):
            zero.transport.describe(1)  # it is of no use any more
        zero.transport.detach(0)  # but its memory can be had back, at once


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_middle(fake, control, kind):
    with job(fake, kind, in_order=False) as (zero, _):
        control("writes", 0)
        control("fail_after", 100)
        for number in range(200):
            zero.producer.post(1, source=4096, target=4096, size=64, signal=number * 8, proxy=zero.proxy)
        assert "transport retry counter exceeded" in zero.failure()
        assert zero.producer.completed <= 100


def test_memory_that_was_taken_back_is_not_written(fake, control):
    with job(fake, "verbs", in_order=False) as (zero, one):
        one.transport.detach(0)
        one.memory[:] = 77
        zero.put(1, 0, 0, 100)
        assert "remote access error (status 10" in zero.failure()
        assert (one.memory == 77).all()


def test_detaching_waits_for_requests_but_not_for_ever(fake, control):
    with job(fake, "verbs", in_order=False, peer_timeout=2 * HANG) as (zero, one):
        control("hold", 1)
        zero.put(1, 0, 0, 100)
        eventually(lambda: zero.proxy.statistics.requests == 1, "the request")
        detaching = threading.Thread(target=zero.transport.detach, args=(0,))
        detaching.start()
        detaching.join(0.2)
        assert detaching.is_alive()
        control("hold", 0)
        detaching.join(HANG)
        assert not detaching.is_alive()
        one.wait(0, 1)
        zero.transport.attach(0, zero.memory)
        assert zero.proxy.error is None

    with job(fake, "verbs", in_order=False, peer_timeout=0.5) as (zero, _):
        control("hold", 1)
        zero.put(1, 0, 0, 100)
        eventually(lambda: zero.proxy.statistics.requests == 1, "the request")
        zero.proxy.stop(0)  # nobody polls any more
        start = time.monotonic()
        zero.transport.detach(0)
        assert 0.4 < time.monotonic() - start < HANG
        with pytest.raises(TransportError, match="segment 0 was detached with requests"):
            zero.transport.describe(1)
        control("hold", 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"source": 1 << 20}, r"source: 8 bytes from 1048576 are not inside of rank 0's segment 0 of 69632 bytes"),
        ({"target": -1}, r"target: 8 bytes from 18446744073709551615 are not inside of rank 1's segment 0"),
        ({"signal": 69632 - 4}, r"signal: 8 bytes from 69628 are not inside"),
        ({"signal": 12}, r"signal: byte 12 of segment 0 on rank 1 is not aligned"),
        ({"segment": 9}, r"target: rank 0 does not know rank 1's segment 9"),
        ({"source_segment": 9}, r"source: segment 9 is not attached on rank 0"),
        ({"peer": 7}, r"rank 0 is not connected to rank 7"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thorough
def test_requests_that_can_not_be_served(fake, control, kind, wrong, words):
    with job(fake, kind, in_order=False) as (zero, one):
        one.memory[:] = 3
        zero.producer.post(**{"peer": 1, "size": 8, **wrong})
        zero.failure()
        with pytest.raises(TransportError, match=words):
            zero.proxy.check()
        assert (one.memory == 3).all()


@pytest.mark.parametrize(
    ("kind", "devices", "words"),
    [
        ("verbs", ["mlx5_0"], "no RDMA device 'mlx5_0'; there are: fake0, fake1, fakeib, down0, efa0, efa1, oldefa0"),
        ("verbs", ["down0"], "port 1 of RDMA device down0 is not active: it is down"),
        ("verbs", ["efa0"], "efa0 is neither InfiniBand nor RoCE; EFA devices need transport='efa'"),
        ("efa", ["fake0"], "fake0 is not an EFA device"),
        ("efa", ["oldefa0"], r"oldefa0 cannot do RDMA writes \(its abilities are 0x1\)"),
    ],
)
def test_devices_that_will_not_do(fake, control, kind, devices, words):
    with pytest.raises(TransportError, match=words):
        make(fake, kind, 0, devices)


def test_what_is_refused(fake, control, tmp_path):
    with pytest.raises(TransportError, match="no RDMA device was named"):
        VerbsTransport(0, [], verbs_library=fake)
    with pytest.raises(TransportError, match="fake0 has no port 2, only 1"):
        VerbsTransport(0, [("fake0", 2, 0)], verbs_library=fake)
    with pytest.raises(TransportError, match="GID 1 of RDMA device fake0 is empty"):
        VerbsTransport(0, [("fake0", 1, 1)], verbs_library=fake)
    with pytest.raises(TransportError, match="fake0 has no GID 5"):
        VerbsTransport(0, [("fake0", 1, 5)], verbs_library=fake)
    with pytest.raises(TransportError, match="queues must be from 1 to 64"):
        make(fake, "verbs", 0, queues=0)
    with pytest.raises(TransportError, match=r"libnowhere.so cannot be opened.*apt install libibverbs1"):
        VerbsTransport(0, [("fake0", 1, 0)], verbs_library="libnowhere.so")
    with pytest.raises(TransportError, match=r"libnowhere.so cannot be opened.*apt install ibverbs-providers"):
        EfaTransport(0, [("efa0", 1, 0)], verbs_library=fake, efa_library="libnowhere.so")
    zero, one = make(fake, "verbs", 0), make(fake, "verbs", 1)
    efa = make(fake, "efa", 1)
    described = one.describe(0)
    with pytest.raises(TransportError, match="rank 0 is not connected to rank 1"):
        zero.connect(1, described)  # it was not described to it
    for rank, (description, words) in enumerate(
        [
            (described[:-1], "the description of rank 1 is too short"),
            (described + b"x", "the description of rank 1 is too long"),
            (b"", "too short"),
            (efa.describe(0), "rank 1 does not use the verbs transport"),
            (make(fake, "verbs", 1, queues=5).describe(0), "rank 1 has 5 queue pairs on each rail, rank 0 has 2"),
        ]
    ):
        fresh = make(fake, "verbs", 0)
        fresh.describe(1)
        with pytest.raises(TransportError, match=words):
            fresh.connect(1, description)
        assert rank >= 0
    with pytest.raises(TransportError, match="the description of rank 1's segment 4 is too short"):
        one.learn_segment(1, 4, b"abc")
    with pytest.raises(TransportError, match="rank 1 does not use the efa transport"):
        make(fake, "efa", 0).connect(1, described)


def test_memory_that_can_not_be_registered(fake, control):
    transport = make(fake, "verbs", 0)
    control("refuse_memory", 12)
    with pytest.raises(TransportError, match=r"4096 bytes cannot be registered with RDMA device fake0.*ulimit -l"):
        transport.attach(0, torch.zeros(4096, dtype=torch.uint8))
    control("refuse_memory", 0)
    transport.attach(0, torch.zeros(4096, dtype=torch.uint8))  # the number is still free


def test_strangers_can_not_write(fake, control):
    """An EFA queue pair takes messages from anyone who knows its key: without it nothing comes in."""
    with job(fake, "efa", in_order=False) as (zero, one):
        described = one.transport.describe(0)
        guess = bytearray(described)
        guess[8 + 20 : 8 + 24] = b"\0\0\0\1"  # the key of the first rail
        guess[8 + 44 : 8 + 48] = b"\0\0\0\1"
        stranger = make(fake, "efa", 0)
        rank = Rank(stranger)
        stranger.connect(1, bytes(guess))
        stranger.learn_segment(1, 0, one.transport.describe_segment(0))
        rank.put(1, 0, 0, 100, signal=3)
        assert "rank 1, by efa" in rank.failure()
        assert not one.signals.any()
        zero.put(1, 0, 0, 100)
        one.wait(0, 1)
        rank.proxy.stop(0)
        stranger.close()


@pytest.mark.thorough
def test_without_headers(monkeypatch):
    """Compiled where infiniband/verbs.h is not: all else works, and the message says what to install."""
    library = build(
        "without-verbs.so", (*builder.LIBRARY_FLAGS, "-O0", "-w", "-U__has_include", "-D__has_include(x)=0")
    )
    functions = ctypes.CDLL(str(library))
    functions.mkernel_net_rdma_create.restype = ctypes.c_void_p
    functions.mkernel_net_last_error.restype = ctypes.c_char_p
    for kind, header in ((b"verbs", b"infiniband/verbs.h"), (b"efa", b"infiniband/efadv.h")):
        arguments = (kind, 0, None, 0, 2, 0, ctypes.c_int64(1000), None, None)
        assert functions.mkernel_net_rdma_create(*arguments) is None
        message = functions.mkernel_net_last_error()
        assert b"compiled without " + header in message
        assert b"apt install libibverbs-dev" in message


def test_idle_ranks_end_without_a_timeout(fake, control):
    start = time.monotonic()
    with job(fake, "verbs", peer_timeout=2 * HANG), job(fake, "efa", peer_timeout=2 * HANG):
        pass
    assert time.monotonic() - start < HANG
