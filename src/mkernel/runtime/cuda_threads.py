"""Ranks as threads of one process, on the visible GPUs.

Every rank is a thread with a stream of its own. Nodes are groups of these ranks. Between nodes a native proxy per rank
copies on streams of its own (the loopback transport), and can be paced to the rate and latency of a network.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mkernel.runtime import chains, records
from mkernel.runtime.cuda import CudaLauncher, DeviceMemory
from mkernel.runtime.errors import ArgumentError, CommTimeout, MKernelError
from mkernel.runtime.gpus import SimulatedGpu
from mkernel.runtime.group import Group, set_current
from mkernel.runtime.network import NativeNetwork
from mkernel.runtime.world import Links

_worlds = itertools.count()


class Box:
    """What the members of a group leave for each other in one exchange."""

    __slots__ = ("bells", "outcome", "values")

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.bells: list[threading.Lock] = []  # of the threads that wait, each held until it is to wake
        self.outcome: Outcome | None = None  # of `run_together`

    def wake_next(self) -> None:
        """Wake one of the threads that wait. It wakes the next one when it runs: only one thread at a time can hold the
        interpreter, and more of them awake would only take it from each other."""
        if self.bells:
            self.bells.pop().release()


class Outcome(NamedTuple):
    """What `run_together` came to."""

    calls: dict[int, Any]  # what the ranks called, if they called different things
    failure: Exception | None


class Mailbox:
    """Where threads leave values for each other: a box per key. Callers hold the lock, except in `wait`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended: dict[int, BaseException | None] = {}  # ranks whose thread has ended, and with which exception
        self.interrupted = False
        self._boxes: dict[Hashable, Box] = {}

    def put(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> Box:
        """Leave a value in a box, and return the box. The last of the members removes it from the mailbox."""
        box = self._boxes.get(key)
        if box is None:
            box = self._boxes[key] = Box()
        box.values[rank] = value
        if len(box.values) >= len(members):
            self.remove(key)
        return box

    def remove(self, key: Hashable) -> None:
        """Nobody else will ask for this box."""
        self._boxes.pop(key, None)

    def wait(
        self, rank: int, members: Sequence[int], box: Box, done: Callable[[], bool], what: str, timeout: float
    ) -> None:
        """Wait until done(), which is asked under the lock. Raise once waiting has become pointless. Whoever comes last
        finds that it is done, and wakes the first of the others: until then there is nothing for them to do."""
        begun = time.monotonic()
        waited = 0.0
        while True:
            with self.lock:
                if done():
                    break
                if self.interrupted:
                    raise KeyboardInterrupt
                missing = [member for member in members if member not in box.values]
                failed = next((self.ended[member] for member in missing if self.ended.get(member) is not None), None)
                all_ended = missing and all(member in self.ended for member in missing)
                if failed is not None or waited >= timeout or all_ended:
                    ranks = [members.index(member) for member in missing]
                    raise records.absent(what, members.index(rank), ranks, len(members), waited) from failed
                bell = threading.Lock()
                bell.acquire()
                box.bells.append(bell)
            if not bell.acquire(timeout=timeout - waited):
                with contextlib.suppress(ValueError):  # somebody was about to ring it
                    box.bells.remove(bell)
            waited = time.monotonic() - begun
        box.wake_next()

    def wake_all(self) -> None:
        """Let all threads that wait check again."""
        for box in self._boxes.values():
            while box.bells:
                box.bells.pop().release()


class ThreadExchange:
    """The Exchange of ranks that are threads of this process."""

    def __init__(self, size: int):
        self._mail = Mailbox()
        self.groups: dict[int, weakref.WeakSet[Group]] = {rank: weakref.WeakSet() for rank in range(size)}

    def all_gather(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        mail, count = self._mail, len(members)
        with mail.lock:
            box = mail.put(rank, members, key, value)
        mail.wait(rank, members, box, lambda: len(box.values) == count, what, timeout)
        return [box.values[member] for member in members]

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        with self._mail.lock:
            box = self._mail.put(rank, members, key, value)
        if len(box.values) == len(members):
            box.wake_next()

    def run_together(
        self, group: Group, what: str, call: Hashable, value: Any, function: Callable[[dict[int, Any]], None]
    ) -> None:
        """Wait until all ranks of the group whose threads still run have come here; the thread of the last one then
        calls `function` with the values of all, by rank. Whatever it raises is raised on all ranks. Raise ArgumentError
        on all ranks, and call nothing, unless all give the same `call`."""
        rank, members, mail = group.world_rank, group.members, self._mail
        key = group.next_exchange()
        with mail.lock:
            box = mail.put(rank, members, key, (call, value))

        def done() -> bool:
            if box.outcome is None:
                # a rank whose thread has ended will not come: the others find out in the kernel
                if len(box.values) < len(members) and not all(
                    member in box.values or mail.ended.get(member, self) is None for member in members
                ):
                    return False
                mail.remove(key)
                box.outcome = _run_together(box.values, function)
            return True

        try:
            mail.wait(rank, members, box, done, what, group.timeout)
        except CommTimeout as late:
            group.mark_out_of_sync(late)
            raise
        assert box.outcome is not None
        calls, failure = box.outcome
        if calls:
            group.check_same_call([calls.get(member, call) for member in members])
        if failure is not None:
            failure.on_every_rank = True  # type: ignore[attr-defined]
            raise failure

    def confirm(self, group: Group, call: Any) -> None:
        group.exchange(call[0], None, call=call)

    def join(self, group: Group) -> None:
        self.groups[group.world_rank].add(group)

    def leave(self, group: Group) -> None:
        pass

    def abandon(self, group: Group, why: str) -> None:
        group.world.launcher.abort(group)  # the others notice when this rank's thread ends

    def report_failure(self, group: Group, failure: MKernelError) -> None:
        pass  # the others notice by their timeout, or when this rank's thread ends

    def wait_for_lost_rank(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        return None

    def mark_ended(self, rank: int, failure: BaseException | None) -> None:
        """The thread of a rank has ended."""
        with self._mail.lock:
            self._mail.ended[rank] = failure
            self._mail.wake_all()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in ranks that wait for others, and end the waits of their kernels."""
        with self._mail.lock:
            self._mail.interrupted = True
            self._mail.wake_all()
        for groups in self.groups.values():
            for group in list(groups):
                group.world.launcher.abort(group)


def _run_together(given: Mapping[int, tuple[Any, Any]], function: Callable[[dict[int, Any]], None]) -> Outcome:
    """Call the function with the values of all ranks, if they make the same call. given: call and value of each."""
    calls = {rank: call for rank, (call, _) in given.items()}
    first = next(iter(calls.values()))
    if any(call != first for call in calls.values()):
        return Outcome(calls, None)
    try:
        function({rank: value for rank, (_, value) in given.items()})
    except Exception as failure:
        return Outcome({}, failure)
    return Outcome({}, None)


class LoopbackConnector:
    """Opens loopback transports, which copy between the GPUs of this process."""

    def __init__(self, name: str, links: Links, devices: Mapping[int, torch.device]):
        self._name, self._links, self._devices = name, links, devices

    def open(self, group: Group) -> Any:
        from mkernel.net import LoopbackTransport

        transport = LoopbackTransport(
            f"{self._name}, group {group.name!r}",
            group.rank,
            rate=self._links.network * 1e9 if self._links.network is not None else None,
            latency=self._links.network_latency,
        )
        for segment, memory in group.heap.segments():
            transport.attach(segment, memory)
        return transport

    def attach(self, group: Group, transport: Any, segment: int, memory: torch.Tensor) -> None:
        transport.attach(segment, memory)

    def detach(self, transport: Any, segment: int) -> None:
        transport.detach(segment)

    def flag_devices(self, group: Group) -> list[torch.device]:
        return [self._devices[member] for member in group.members]


class CudaThreads:
    """The world of one process with CUDA, whose ranks are threads: spread over its GPUs, or all on `device`."""

    def __init__(self, nodes: int, gpus_per_node: int, links: Links, device: torch.device | None = None):
        self.size = size = nodes * gpus_per_node
        self.links = links
        self.label = "world"
        self.simulated_gpu: SimulatedGpu | None = None
        count = torch.cuda.device_count()
        self.devices = {rank: device or torch.device("cuda", rank * min(count, size) // size) for rank in range(size)}
        self.node_ids = [rank // gpus_per_node for rank in range(size)]
        self.gpu_ids = list(self.devices.values())
        enable_peer_access(self.gpu_ids)
        self.exchange = ThreadExchange(size)
        self.memory = DeviceMemory(self.devices)
        self.network = NativeNetwork(LoopbackConnector(f"spawn {next(_worlds)}", links, self.devices))
        self.launcher = CudaLauncher(self.devices, _shares(self.devices, nodes), self.network, self.exchange)

    def close(self, seconds: float) -> None:
        """All ranks have ended: stop what they left running. Proxies get `seconds` seconds to serve what is in their
        rings, while there is memory to write to."""
        for rank in self.devices:
            with contextlib.suppress(RuntimeError):  # a device error, which was raised before
                self.launcher.synchronize(rank)
        connections = self.network.connections
        for connection in connections.values():
            connection.proxy.stop(seconds)
        for connection in connections.values():
            connection.transport.close(0)
        connections.clear()


def enable_peer_access(devices: Sequence[torch.device]) -> None:
    """Let these GPUs address each other's memory."""
    used = sorted({device.index for device in devices})
    for one, other in itertools.permutations(used, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            raise ArgumentError(f"GPU {one} cannot access the memory of GPU {other}; use fewer ranks")
        # torch enables peer access at the first copy
        torch.zeros(1, device=f"cuda:{one}").copy_(torch.zeros(1, device=f"cuda:{other}"))


def _shares(devices: Mapping[int, torch.device], nodes: int) -> dict[int, int]:
    """How many CTAs each rank may have, so that all ranks' launches fit on their GPUs at the same time.

    With several nodes some SMs stay free for the copies between nodes: a copy from a GPU to itself is a kernel, which
    could not start while ours hold all SMs and wait for it (see net/native/cuda.h). Four SMs of an H200 copy far more
    than the network that they emulate.
    """
    shares = {}
    for rank, device in devices.items():
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        free = max(sms // 32, 1) if nodes > 1 else 0
        shares[rank] = max((sms - free) // list(devices.values()).count(device), 1)
    return shares


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    nodes: int,
    gpus_per_node: int,
    timeout: float,
    links: Links,
) -> list[Any]:
    """Run function(group, *args) in a thread per rank; results by rank."""
    if not torch.cuda.is_available():
        raise ArgumentError("device='cuda' needs a GPU, but torch sees no GPU; device='cpu' is the simulator")
    world = CudaThreads(nodes, gpus_per_node, links)
    everyone = range(world.size)
    results: list[Any] = [None] * world.size
    failures: list[tuple[float, int, BaseException]] = []

    def run(rank: int) -> None:
        failure: BaseException | None = None
        try:
            device = world.devices[rank]
            torch.cuda.set_device(device)
            # PyTorch runs the backward passes of a device in one thread, where ranks that share the device would wait
            # for each other for ever; without its threads, a backward pass runs in the thread that asks for it.
            with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(torch.cuda.Stream(device)):
                group = Group(world, everyone, rank, timeout=timeout, name="world")
                set_current(group)
                results[rank] = function(group, *args)
                world.launcher.synchronize(rank)
                for made in list(world.exchange.groups[rank]):
                    made.check_unseen()
        except BaseException as error:
            failure = error
            failures.append((time.monotonic(), rank, error))
        finally:
            world.exchange.mark_ended(rank, failure)

    # threads hand over to each other in every call; the default interval of 5 ms is longer than a call
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    threads = [threading.Thread(target=run, args=(rank,), name=f"mkernel rank {rank}") for rank in everyone]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # only this thread gets Ctrl-C
        world.exchange.interrupt()
        for thread in threads:
            thread.join()
        raise
    finally:
        sys.setswitchinterval(interval)
        world.close(0.0 if failures else timeout)
    if failures:
        _, rank, failure = min(failures, key=lambda entry: (not getattr(entry[2], "is_cause", True), entry[0]))
        if isinstance(failure, CommTimeout):
            chains.join(failure, [other for _, _, other in failures if isinstance(other, CommTimeout)])
        if hasattr(failure, "add_note"):
            failure.add_note(f"raised on rank {rank}")
        raise failure
    return results
