"""Python bindings of the native network library: transports and the proxy.

All objects are context managers. An object that is dropped without being closed, or is still open when the interpreter
exits, ends without notifying the peers. Calls release the GIL.

The order at the end of a job: every rank stops its proxy, which serves the remaining requests; the ranks synchronize at
a barrier; every rank closes its transport.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mkernel.net.build import library_file
from mkernel.runtime.errors import ArgumentError, TransportError

if TYPE_CHECKING:
    from typing_extensions import Self

Handle = ctypes.c_void_p


class _Statistics(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("requests", "bytes", "completions", "busy_loops", "idle_loops", "most_in_flight")
    ]


class _Address(ctypes.Structure):
    _fields_ = [("peer", ctypes.c_int32), ("port", ctypes.c_int32), ("host", ctypes.c_char_p)]


class RdmaPortEntry(ctypes.Structure):
    _fields_ = [("device", ctypes.c_char_p), ("port", ctypes.c_int32), ("gid_index", ctypes.c_int32)]


@dataclass(frozen=True)
class Statistics:
    """What a proxy has done so far."""

    requests: int  # accepted by the transport
    bytes: int  # of those
    completions: int  # requests whose source may be overwritten
    busy_loops: int  # iterations of the proxy's thread that made progress
    idle_loops: int  # iterations that did not
    most_in_flight: int  # the largest number of requests in flight at the same time


# name: (result, arguments); as in native/mkernel_net.h
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "last_error": (ctypes.c_char_p, []),
    "constant": (ctypes.c_int64, [ctypes.c_char_p]),
    "hmac": (None, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]),
    "loopback_create": (
        Handle,
        [ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_int64],
    ),
    "tcp_create": (
        Handle,
        [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        + [ctypes.c_int64],
    ),
    "tcp_port": (ctypes.c_int, [Handle]),
    "tcp_connect": (ctypes.c_int, [Handle, ctypes.POINTER(_Address), ctypes.c_int, ctypes.c_int64]),
    "rdma_create": (
        Handle,
        [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(RdmaPortEntry), ctypes.c_int, ctypes.c_int, ctypes.c_int]
        + [ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p],
    ),
    "describe": (ctypes.c_int64, [Handle, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]),
    "connect": (ctypes.c_int, [Handle, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]),
    "describe_segment": (ctypes.c_int64, [Handle, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]),
    "learn_segment": (
        ctypes.c_int,
        [Handle, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t],
    ),
    "attach": (ctypes.c_int, [Handle, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]),
    "detach": (ctypes.c_int, [Handle, ctypes.c_uint32]),
    "counts": (
        ctypes.c_int,
        [Handle, ctypes.c_uint32, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)],
    ),
    "descriptors": (ctypes.c_int, [Handle, ctypes.POINTER(ctypes.c_int), ctypes.c_int]),
    "post": (ctypes.c_int, [Handle, ctypes.c_char_p]),
    "poll": (ctypes.c_int, [Handle]),
    "transport_stop": (ctypes.c_int, [Handle, ctypes.c_int64]),
    "transport_destroy": (None, [Handle]),
    "proxy_start": (Handle, [ctypes.c_void_p, ctypes.c_uint64, Handle, ctypes.c_int, ctypes.c_int, ctypes.c_int]),
    "proxy_set_abort_flag": (ctypes.c_int, [Handle, ctypes.c_void_p, ctypes.c_int]),
    "proxy_stop": (ctypes.c_int, [Handle, ctypes.c_int64]),
    "proxy_error": (ctypes.c_size_t, [Handle, ctypes.c_char_p, ctypes.c_size_t]),
    "proxy_statistics": (None, [Handle, ctypes.POINTER(_Statistics)]),
    "proxy_destroy": (None, [Handle]),
}


class _Library:
    """The functions of the C interface, without their prefix."""

    def __init__(self, path: str):
        library = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"mkernel_net_{name}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    def check(self, result: Any) -> Any:
        """Return the result of a call, or raise if it says that the call failed."""
        if result is None or result == -1:
            raise TransportError(self.last_error().decode(errors="replace"))
        return result


@functools.cache
def library() -> _Library:
    """The native library; compiled on first use unless the package has it."""
    return _Library(str(library_file()))


def milliseconds(seconds: float) -> int:
    """Seconds as milliseconds, which the C interface takes."""
    return max(0, int(seconds * 1000))


def _check_process(what: str, process: int) -> None:
    """Raise in a forked child: it has the handles of its parent's native objects, but not their threads."""
    if os.getpid() != process:
        raise TransportError(f"{what} belongs to process {process}, which forked this one ({os.getpid()})")


def _finalize(owner: Any, destroy: Callable[[Any], None], handle: Any, keep: Any) -> weakref.finalize:
    """Destroy the handle with its owner, or when the interpreter exits; `keep` lives until then. A forked child, which
    has the handle but not its threads, leaves it alone."""
    process = os.getpid()

    def end(keep: Any) -> None:
        if os.getpid() == process:
            destroy(handle)

    return weakref.finalize(owner, end, keep)


_transports: weakref.WeakSet[Transport] = weakref.WeakSet()  # of this process


def _close_in_child() -> None:
    """A forked child would keep the connections of its parent open, and peers would not notice when the parent ends."""
    for transport in _transports:
        transport._close_copies()
    _transports.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _inode(descriptor: int) -> int:
    """Tells what a file descriptor stands for; -1: nothing."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


def _device_of(memory: torch.Tensor) -> int:
    """The number of a tensor's CUDA device; -1 for the host."""
    return memory.get_device() if memory.device.type == "cuda" else -1


class Transport:
    """Base class of transports, which move the bytes."""

    def __init__(self, handle: Any, rank: int):
        self.rank = rank
        self._handle = handle
        self._process = os.getpid()
        self._segments: dict[int, torch.Tensor] = {}
        self._descriptors: dict[int, int] = {}  # that a forked child closes, with what they stand for
        _transports.add(self)
        self._end = _finalize(self, library().transport_destroy, handle, self._segments)

    @property
    def _open(self) -> Any:
        _check_process(f"the transport of rank {self.rank}", self._process)
        if not self._end.alive:
            raise TransportError(f"the transport of rank {self.rank} was closed")
        return self._handle

    def attach(self, segment: int, memory: torch.Tensor) -> None:
        """Let requests access this memory, of the host or of a CUDA device. It stays alive until it is detached."""
        if memory.device.type not in ("cpu", "cuda") or not memory.is_contiguous():
            raise ArgumentError(f"memory must be a contiguous tensor on a CPU or a GPU, got one on {memory.device}")
        if not 0 <= segment < 1 << 24:
            raise ArgumentError(f"segment must be from 0 to {(1 << 24) - 1}, got {segment}")
        device = _device_of(memory)
        library().check(library().attach(self._open, segment, memory.data_ptr(), memory.nbytes, device))
        self._segments[segment] = memory

    def detach(self, segment: int) -> None:
        """Release the memory: when this returns, nobody accesses it any more."""
        library().check(library().detach(self._open, segment))
        self._segments.pop(segment, None)

    def counts(self, peer: int) -> tuple[int, int]:
        """How many requests to this peer were posted, and how many of its requests have arrived in full. (0, 0) if
        requests are complete only when they have arrived."""
        sent, arrived = ctypes.c_int64(), ctypes.c_int64()
        library().check(library().counts(self._open, peer, ctypes.byref(sent), ctypes.byref(arrived)))
        return sent.value, arrived.value

    def _note_descriptors(self) -> None:
        found = (ctypes.c_int * library().check(library().descriptors(self._open, None, 0)))()
        count = min(library().check(library().descriptors(self._open, found, len(found))), len(found))
        self._descriptors = {each: _inode(each) for each in found[:count]}

    def _close_copies(self) -> None:
        """In a forked child. A number that stands for something else by now was closed before."""
        for each, inode in self._descriptors.items():
            if inode >= 0 and _inode(each) == inode:
                os.close(each)

    def post(self, request: bytes) -> bool:
        """Without a proxy: start a transfer, with the words of a request as in `mkernel.lang.requests`. False if the
        peer is busy: poll and try again. Only one thread may post and poll."""
        return bool(library().check(library().post(self._open, request)))

    def poll(self) -> bool:
        """Without a proxy: make progress, sending and receiving. False if there was nothing to do."""
        return bool(library().check(library().poll(self._open)))

    def close(self, timeout: float = 1.0) -> None:
        """Leave the job in order, after the proxy has stopped. Peers that send to this rank afterwards get an error.
        With timeout 0 the peers are not notified, and consider this rank lost."""
        _check_process(f"the transport of rank {self.rank}", self._process)
        if self._end.alive:
            self._descriptors = {}
            library().check(library().transport_stop(self._handle, milliseconds(timeout)))
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.close(timeout=0)


def _interruptible(call: Callable[[], Any], give_up: Callable[[], None]) -> None:
    """Make a call of the native library that may take long. While it runs, no handler of a signal does: so it runs in a
    thread, and what a handler raises ends it by `give_up`."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        give_up()
        thread.join()
        raise
    if errors:
        raise errors.pop()


class LoopbackTransport(Transport):
    """A transport between ranks of one process.

    Args:
        job: ranks with the same job name are connected.
        rank: this rank's number in the job.
        latency: seconds from request to signal.
        rate: bytes per second that this rank can send; None: as fast as memory allows.
        shuffle: a seed; requests then overtake each other at random, piece by piece.
    """

    def __init__(
        self, job: str, rank: int, *, latency: float = 0.0, rate: float | None = None, shuffle: int | None = None
    ):
        if latency < 0 or (rate is not None and rate <= 0) or (shuffle is not None and shuffle < 0):
            raise ArgumentError(
                "latency and shuffle must not be negative and rate must be positive, "
                f"got {latency=}, {rate=}, {shuffle=}"
            )
        create = library().loopback_create
        seed = -1 if shuffle is None else shuffle
        super().__init__(library().check(create(job.encode(), rank, int(latency * 1e9), rate or 0.0, seed)), rank)


class TcpTransport(Transport):
    """A transport over TCP, with several streams to each peer. Listens as soon as it is created.

    Args:
        rank, size: of this process in the job.
        secret: known only to the ranks of the job, at least 16 bytes (`secrets.token_bytes(32)` on one
            rank, sent to the others over the process group).
        listen: the numeric IPv4 or IPv6 address to listen on.
        port: the port to listen on; 0 picks a free one, see the attribute `port`.
        streams: connections to each peer.
        peer_timeout: seconds after which a peer that does not answer counts as lost.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        secret: bytes,
        *,
        listen: str = "127.0.0.1",
        port: int = 0,
        streams: int = 4,
        peer_timeout: float = 30.0,
    ):
        create = library().tcp_create
        patience = milliseconds(peer_timeout)
        handle = create(rank, size, secret, len(secret), streams, listen.encode(), port, patience)
        super().__init__(library().check(handle), rank)
        self.size = size
        self._note_descriptors()
        self.port: int = library().check(library().tcp_port(handle))

    def connect(self, peers: Mapping[int, tuple[str, int]], timeout: float = 30.0) -> None:
        """Connect to peers: rank -> host and port. They must do the same. Returns when all streams are connected. The
        higher of two ranks dials, so the address of a higher rank is not used."""
        table = (_Address * len(peers))()
        for entry, (peer, (host, port)) in zip(table, peers.items()):
            entry.peer, entry.host, entry.port = peer, host.encode(), port
        _interruptible(
            lambda: library().check(library().tcp_connect(self._open, table, len(peers), milliseconds(timeout))),
            lambda: self.close(0),
        )
        self._note_descriptors()


class Proxy:
    """A thread that serves one rank's request ring with a transport.

    Args:
        ring: 64-bit words as `mkernel.lang.requests` lays them out, with CAPACITY set.
        cpu: the core to pin the thread to.
        idle_sleep: the most seconds that the thread sleeps when there is nothing to do; 20 times as long after a second
            in which there was nothing. 0: it never sleeps.
        spin: seconds that the thread polls for work before it sleeps for the first time.
    """

    def __init__(
        self,
        ring: torch.Tensor,
        transport: Transport,
        *,
        cpu: int | None = None,
        idle_sleep: float = 50e-6,
        spin: float = 20e-6,
    ):
        if ring.dtype != torch.int64 or not ring.is_contiguous() or ring.device.type != "cpu":
            raise ArgumentError(f"ring must be contiguous int64 words on the host, got {ring.dtype} on {ring.device}")
        if cpu is not None and cpu < 0:
            raise ArgumentError(f"cpu must be the number of a core, got {cpu}")
        self.transport = transport
        core = -1 if cpu is None else cpu
        start = library().proxy_start
        pauses = int(idle_sleep * 1e6), int(spin * 1e6)
        handle = start(ring.data_ptr(), ring.numel(), transport._open, core, *pauses)
        self._handle = library().check(handle)
        self._process = os.getpid()
        self._last_error: str | None = None
        self._last_statistics: Statistics | None = None
        self._served = False
        self._end = _finalize(self, library().proxy_destroy, handle, (ring, transport))

    def set_abort_flag(self, address: int, device: torch.device) -> None:
        """If the proxy stops serving because of an error, the 64-bit word at this address becomes 1."""
        if not self._end.alive:
            raise TransportError(f"the proxy of rank {self.transport.rank} was stopped")
        number = (device.index or 0) if device.type == "cuda" else -1
        library().check(library().proxy_set_abort_flag(self._handle, address, number))

    @property
    def error(self) -> str | None:
        """Why the proxy has stopped serving; None if it works."""
        if self._end.alive:
            text = ctypes.create_string_buffer(4096)
            found = library().proxy_error(self._handle, text, len(text))
            self._last_error = text.value.decode(errors="replace") if found else None
        return self._last_error

    @property
    def statistics(self) -> Statistics:
        if self._end.alive or self._last_statistics is None:
            raw = _Statistics()
            library().proxy_statistics(self._handle, ctypes.byref(raw))
            self._last_statistics = Statistics(*(getattr(raw, field[0]) for field in _Statistics._fields_))
        return self._last_statistics

    def check(self) -> None:
        """Raise if the proxy has stopped serving because of an error."""
        error = self.error
        if error:
            raise TransportError(error)

    def stop(self, timeout: float = 5.0) -> bool:
        """Serve what is in the ring and in flight, for at most `timeout` seconds, and end the thread. Return whether
        everything was served; not if there was an error before."""
        _check_process(f"the proxy of rank {self.transport.rank}", self._process)
        if self._end.alive:
            self._served = bool(library().proxy_stop(self._handle, milliseconds(timeout)))
            _ = self.error, self.statistics  # still available afterwards
            self._end()
        return self._served

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        served = self.stop(0 if kind is not None else 5.0)
        if kind is None:
            self.check()
            if not served:
                raise TransportError(f"the proxy of rank {self.transport.rank} was stopped before all was served")
