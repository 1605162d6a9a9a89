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
from typing import Any

import torch

from mkernel.runtime import chains, records
from mkernel.runtime.cuda import CudaLauncher, DeviceMemory
from mkernel.runtime.errors import ArgumentError, CommTimeout, MKernelError
from mkernel.runtime.group import Group, set_current
from mkernel.runtime.network import NativeNetwork
from mkernel.runtime.world import Links

_worlds = itertools.count()


class Mailbox:
    """Where threads leave values for each other: a box per key. Callers hold the lock `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ended: dict[int, BaseException | None] = {}  # ranks whose thread has ended, and with which exception
        self.interrupted = False
        self._boxes: dict[Hashable, dict[Any, Any]] = {}

    def put(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> dict[Any, Any]:
        """Leave a value in a box, and return the box. Only the last of the members wakes the others: until then there
        is nothing for them to do, and each would take the interpreter from a thread that has."""
        box = self._boxes.setdefault(key, {})
        box[rank] = value
        if len(box) >= len(members):
            self.changed.notify_all()
        return box

    def wait(
        self, rank: int, members: Sequence[int], box: dict[Any, Any], done: Callable[[], bool], what: str,
        timeout: float,
    ) -> None:  # fmt: skip
        """Wait until done(). Raise once waiting has become pointless."""
        begun = time.monotonic()
        while not done():
            if self.interrupted:
                raise KeyboardInterrupt
            missing = [member for member in members if member not in box]
            waited = time.monotonic() - begun
            failed = next((self.ended[member] for member in missing if self.ended.get(member) is not None), None)
            all_ended = missing and all(member in self.ended for member in missing)
            if failed is not None or waited >= timeout or all_ended:
                ranks = [members.index(member) for member in missing]
                raise records.absent(what, members.index(rank), ranks, len(members), waited) from failed
            self.changed.wait(timeout - waited)

    def release(self, key: Hashable, box: dict[Any, Any], members: int) -> None:
        """A member is done with a box; the last one deletes it."""
        box["left"] = box.get("left", 0) + 1
        if box["left"] == members:
            self._boxes.pop(key, None)


class ThreadExchange:
    """The Exchange of ranks that are threads of this process."""

    def __init__(self, size: int):
        self._mail = Mailbox()
        self.groups: dict[int, weakref.WeakSet[Group]] = {rank: weakref.WeakSet() for rank in range(size)}

    def all_gather(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        with self._mail.changed:
            box = self._mail.put(rank, members, key, value)
            self._mail.wait(rank, members, box, lambda: all(member in box for member in members), what, timeout)
            self._mail.release(key, box, len(members))
            return [box[member] for member in members]

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        with self._mail.changed:
            self._mail.release(key, self._mail.put(rank, members, key, value), len(members))

    def run_together(
        self, group: Group, what: str, call: Hashable, value: Any, function: Callable[[dict[int, Any]], None]
    ) -> None:
        """Wait until all ranks of the group whose threads still run have come here; the thread of the last one then
        calls `function` with the values of all, by rank. Whatever it raises is raised on all ranks. Raise ArgumentError
        on all ranks, and call nothing, unless all give the same `call`."""
        rank, members, mail = group.world_rank, group.members, self._mail
        key = group.next_exchange()
        with mail.changed:
            box = mail.put(rank, members, key, (call, value))

            def ready() -> bool:
                # a rank whose thread has ended will not come: the others find out in the kernel
                if "count" not in box and all(m in box or mail.ended.get(m, self) is None for m in members):
                    present = {member: box[member] for member in members if member in box}
                    box["count"], box["alike"] = len(present), all(theirs == call for theirs, _ in present.values())
                    if box["alike"]:
                        try:
                            function({member: theirs for member, (_, theirs) in present.items()})
                        except Exception as failure:
                            box["failure"] = failure
                    mail.changed.notify_all()
                return "count" in box

            try:
                mail.wait(rank, members, box, ready, what, group.timeout)
            except CommTimeout as late:
                group.mark_out_of_sync(late)
                raise
            mail.release(key, box, box["count"])
        if not box["alike"]:
            group.check_same_call([box[member][0] if member in box else call for member in members])
        if "failure" in box:
            box["failure"].on_every_rank = True
            raise box["failure"]

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
        with self._mail.changed:
            self._mail.ended[rank] = failure
            self._mail.changed.notify_all()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in ranks that wait for others, and end the waits of their kernels."""
        with self._mail.changed:
            self._mail.interrupted = True
            self._mail.changed.notify_all()
        for groups in self.groups.values():
            for group in list(groups):
                group.world.launcher.abort(group)


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
        """All ranks have ended: stop what they left running. Proxies get so many seconds to serve what is in their
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
