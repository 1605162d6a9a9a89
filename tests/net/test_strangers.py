"""Who does not know the secret is kept out, at a small and bounded cost, while the job goes on."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from support.patience import HANG

from mkernel.net import TcpTransport
from mkernel.runtime.errors import TransportError

from .harness import SECRET, Rank, connect, eventually, stop_all, together

HOST = "127.0.0.1"


def hello(dialer: int, acceptor: int = 0, size: int = 3, stream: int = 0, streams: int = 2) -> bytes:
    """The first message of a handshake, as native/handshake.h has it."""
    return struct.pack("<8s6I", b"MKNET/01", dialer, acceptor, size, stream, streams, 0) + os.urandom(32)


def refused(stranger: socket.socket) -> bool:
    """Was the connection closed, with nothing said before?"""
    stranger.settimeout(HANG)
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True


@contextlib.contextmanager
def waiting_job() -> Iterator[tuple[list[Rank], int]]:
    """Ranks 0 and 1 of three, busy with each other, while rank 0 listens for rank 2. At the end, rank 2
    connects, and all transfers must have succeeded."""
    transports = [TcpTransport(rank, 3, SECRET, streams=2) for rank in range(3)]
    connect(transports[:2])
    ranks = [Rank(transport) for transport in transports]
    stopping = threading.Event()
    errors: list[BaseException] = []

    def traffic() -> None:
        try:
            turn = 0
            while turn < 20 or not stopping.is_set():
                turn += 1
                ranks[0].data[:1000] = turn % 256
                ranks[0].put(1, 0, 0, 1000, value=turn)
                ranks[1].wait(0, turn)
                assert (ranks[1].data[:1000] == turn % 256).all()
        except BaseException as error:
            errors.append(error)

    def wait_for_two(rank: int) -> None:
        try:
            transports[rank].connect({2: (HOST, 0)}, timeout=2 * HANG)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=traffic)]
    threads += [threading.Thread(target=wait_for_two, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield ranks, transports[0].port
        transports[2].connect({rank: (HOST, transports[rank].port) for rank in range(2)}, timeout=HANG)
    finally:
        stopping.set()
        for thread in threads:
            thread.join(HANG)
            assert not thread.is_alive()
    assert not errors, errors
    ranks[2].put(0, 0, 0, 0, signal=1, value=3)
    ranks[0].wait(1, 3)
    stop_all(ranks)


def test_garbage_wrong_secrets_and_wrong_numbers():
    rng = random.Random(0)
    first_messages = [
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n".ljust(64),
        b"\xff" * 4096,
        rng.randbytes(100_000),
        hello(2)[:8] + b"\xff" * 56,  # numbers beyond all bounds
        hello(dialer=2, acceptor=1),
        hello(dialer=0),
        hello(dialer=3),
        hello(dialer=2, stream=2),
        hello(dialer=2, streams=64),
        hello(dialer=2, size=4),
        hello(dialer=2)[:-40],  # and then no more
    ]
    with waiting_job() as (_, port):
        for message in first_messages:
            with socket.create_connection((HOST, port), timeout=HANG) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(message)
                    stranger.shutdown(socket.SHUT_WR)
                assert refused(stranger)
        for proof in (bytes(32), rng.randbytes(32), None):
            with socket.create_connection((HOST, port), timeout=HANG) as stranger:
                stranger.sendall(hello(dialer=2))
                challenge = stranger.recv(64, socket.MSG_WAITALL)
                assert len(challenge) == 64
                stranger.sendall(challenge[32:] if proof is None else proof)  # None: give back what it said
                assert refused(stranger)


@pytest.mark.thorough
def test_silent_and_half_open_connections_do_not_stay():
    with waiting_job() as (_, port):
        start = time.monotonic()
        silent = [socket.create_connection((HOST, port), timeout=HANG) for _ in range(20)]
        for stranger in silent[10:]:
            stranger.sendall(hello(dialer=2)[:30])
        assert all(refused(stranger) for stranger in silent)
        assert time.monotonic() - start > 4  # they had time to speak
        for stranger in silent:
            stranger.close()


def test_a_flood_of_connections():
    with waiting_job() as (_, port):
        stopping = threading.Event()
        held: list[socket.socket] = []
        before, made = len(os.listdir("/proc/self/fd")), 0

        def flood() -> None:
            nonlocal made
            while not stopping.is_set():
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection((HOST, port), timeout=1))
                    made += 1
                if len(held) > 300:
                    held.pop(random.randrange(300)).close()

        flooder = threading.Thread(target=flood)
        flooder.start()
        try:
            eventually(lambda: made > 1000, "a flood")
            for _ in range(10):
                time.sleep(0.05)
                # those of the flood, and at most 128 at the other end
                assert len(os.listdir("/proc/self/fd")) - before < 301 + 128 + 10
        except BaseException:
            stopping.set()
            raise
    stopping.set()  # rank 2 came in while the flood went on
    flooder.join(HANG)
    assert not flooder.is_alive()
    for stranger in held:
        stranger.close()


def test_too_few_file_descriptors_are_named():
    """What connects is not refused, but waits in the system's queue."""
    zero, limits = TcpTransport(0, 2, SECRET), resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection((HOST, zero.port), timeout=HANG):
        free = os.dup(0)  # the lowest number that is
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            with pytest.raises(TransportError, match="connections could not be accepted: Too many open files"):
                zero.connect({1: (HOST, 0)}, timeout=0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    zero.close()


def test_nobody_listens_once_all_are_there():
    transports = [TcpTransport(rank, 2, SECRET) for rank in range(2)]
    connect(transports)
    for transport in transports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, transport.port), timeout=HANG)
    for transport in transports:
        transport.close()


@pytest.mark.thorough
def test_ranks_with_different_secrets():
    zero = TcpTransport(0, 2, SECRET)
    one = TcpTransport(1, 2, SECRET[::-1])
    messages = {}

    def attempt(transport: TcpTransport, peer: int) -> None:
        with pytest.raises(TransportError) as caught:
            transport.connect({peer: (HOST, zero.port)}, timeout=5.0)
        messages[transport.rank] = str(caught.value)

    together(lambda: attempt(zero, 1), lambda: attempt(one, 0))
    assert f"rank 1 cannot trust rank 0 at {HOST}:{zero.port}: it does not know this job's secret" == messages[1]
    assert messages[0].startswith("rank 0 waited ")
    assert " s for rank 1 (0 of 4 streams came); 4 connections were refused" in messages[0]
    zero.close()
    one.close()


def test_a_stranger_who_listens_learns_nothing_useful():
    """It gets a Hello; what it answers is no proof, and the rank does not go on."""
    with socket.socket() as trap, TcpTransport(1, 2, SECRET, streams=1) as one:
        trap.bind((HOST, 0))
        trap.listen()
        heard = []

        def listen() -> None:
            caller, _ = trap.accept()
            with caller:
                caller.settimeout(HANG)
                message = caller.recv(64, socket.MSG_WAITALL)
                caller.sendall(message)  # reflected
                heard.append((message, caller.recv(1)))

        def dial() -> None:
            with pytest.raises(TransportError, match="cannot trust rank 0"):
                one.connect({0: trap.getsockname()}, timeout=HANG)

        together(listen, dial)
        assert SECRET not in heard[0][0]
        assert heard[0][1] == b""


def proof(role: bytes, said: bytes) -> bytes:
    return hmac.new(SECRET, role + said, hashlib.sha256).digest()


@pytest.mark.thorough
def test_a_rank_that_has_proven_itself_waits_for_the_answer():
    """The acceptor may count on the stream since it has read the proof. A busy one answers late."""
    with socket.socket() as acceptor, TcpTransport(1, 2, SECRET, streams=1) as one:
        acceptor.bind((HOST, 0))
        acceptor.listen()

        def accept() -> None:
            caller, _ = acceptor.accept()
            with caller:
                caller.settimeout(HANG)
                said = caller.recv(64, socket.MSG_WAITALL) + bytes(32)
                caller.sendall(said[64:] + proof(b"accept", said))
                assert caller.recv(32, socket.MSG_WAITALL) == proof(b"dial", said)
                time.sleep(6)  # longer than it waits for a challenge
                caller.sendall(b"WELCOME\0")
                assert caller.recv(1) == b""

        def dial() -> None:
            one.connect({0: acceptor.getsockname()}, timeout=HANG)
            one.close(0)

        together(accept, dial)


def test_a_rank_that_knows_the_secret_and_talks_nonsense_is_named():
    """The handshake done by hand, then a header with a length beyond all bounds."""
    zero = Rank(TcpTransport(0, 2, SECRET, streams=1))
    zero.data[:] = 3
    with socket.create_connection((HOST, zero.transport.port), timeout=HANG) as peer:

        def dial() -> None:
            first = hello(dialer=1, size=2, streams=1)
            peer.sendall(first)
            challenge = peer.recv(64, socket.MSG_WAITALL)
            said = first + challenge[:32]
            assert challenge[32:] == proof(b"accept", said)
            peer.sendall(proof(b"dial", said))
            assert peer.recv(8, socket.MSG_WAITALL) == b"WELCOME\0"

        together(dial, lambda: zero.transport.connect({1: (HOST, 0)}, timeout=HANG))
        #            kind, segment, transfer, target, total, signal, value, index, bytes
        good = struct.pack("<4sI4QqQQ", b"PIEC", 0, 0, 4096, 4, 0, 1, 0, 4) + b"abcd"
        peer.sendall(good)
        zero.wait(0, 1)
        assert bytes(zero.data[:4].numpy()) == b"abcd"
        peer.sendall(struct.pack("<4sI4QqQQ", b"PIEC", 0, 1, 4096, 8, 0, 2, 0, (1 << 64) - 1))
        assert f"rank 1 at {HOST}:{peer.getsockname()[1]}, stream 0: fragment 0 of a transfer of 8" in zero.failure()
    assert torch.equal(zero.data[4:], torch.full_like(zero.data[4:], 3))
    zero.proxy.stop(0)
    zero.transport.close(0)
