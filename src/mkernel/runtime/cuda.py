"""Ranks as threads of one process, on the GPUs that are there.

Every rank is a thread with a stream of its own. Ranks that share a GPU share its SMs: a launch has
so many CTAs that all ranks' launches fit on the GPU at the same time.

Nodes are groups of these ranks; between them a native proxy per rank copies on streams of its own (the
loopback transport), and can be paced to the rate and latency of a network.

Three things that a spinning kernel does not forgive decide how launches are made:

- Loading a kernel, any kernel, waits for those that run (measured: a first call of a Triton or a
  torch kernel waits until a spinning one ends; cudaMalloc and pinned memory do not). So a rank's
  launch may not spin for a peer whose thread still has something to load before its own launch: the
  launches of one call are gathered, compiled and loaded for all ranks, and then made together by
  the thread that came last.
- A kernel can not start while the SMs it needs are held by kernels that wait for it. So the
  operators of one rank run one after the other, in the order of the calls, also on different
  streams; as all ranks make their calls in the same order, the oldest call can always finish.
- Memory that peers may still write to must not be handed out again: see runtime/heap.py.
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
from triton.runtime.errors import OutOfResources

from mkernel.lang.device import write_time
from mkernel.runtime import chains, records
from mkernel.runtime.errors import ArgumentError, CommTimeout, MKernelError
from mkernel.runtime.gpus import check_gpu
from mkernel.runtime.group import Group, set_current
from mkernel.runtime.network import Networked
from mkernel.runtime.world import Launch, Links, Part, exchange_addresses

CLOCK_READINGS = 20  # of which the quickest counts
VARIANTS_KNOWN = 4096


class CudaRanks(Networked):
    """What ranks on GPUs have in common, be they threads or processes: memory, streams and launches."""

    def __init__(self, size: int, links: Links, devices: Mapping[int, torch.device], shares: Mapping[int, int]):
        """`shares`: how many CTAs of one launch a rank may have."""
        for device in dict.fromkeys(devices.values()):
            check_gpu(device)
        Networked.__init__(self)
        self.size = size
        self.links = links
        self._devices = devices
        self._shares = shares
        self._last: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._streams: dict[int, set[torch.cuda.Stream]] = {rank: set() for rank in devices}
        self._loaded: set[Hashable] = set()
        self._aborting: dict[int, tuple[torch.cuda.Stream, torch.Tensor]] = {}

    # -- places

    def device(self, rank: int) -> torch.device:
        return self._devices[rank]

    def gpu(self, rank: int) -> Hashable:
        return self._devices[rank]

    def ctas(self, rank: int) -> int:
        return self._shares[rank]

    # -- memory

    def multicast(self, group: Group, memory: torch.Tensor, addresses: Sequence[int]) -> int:
        return 0  # what a process allocates for itself has no multicast object; symmetric memory has

    def upload(self, rank: int, words: Sequence[int]) -> torch.Tensor:
        return torch.tensor(words, dtype=torch.int64).to(self._devices[rank])

    def host_words(self, rank: int, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64).pin_memory()

    def name(self, memory: torch.Tensor, parts: Sequence[Part]) -> None:
        pass  # only the simulator looks

    def empty(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._devices[rank])

    def be_able_to_abort(self, rank: int) -> None:
        """Have a stream for `abort`: to make one waits for kernels that spin."""
        if rank not in self._aborting:
            one = torch.ones(1, dtype=torch.int64).pin_memory()
            self._aborting[rank] = torch.cuda.Stream(self._devices[rank]), one

    def abort(self, group: Group) -> None:
        """Let the group's kernels on this rank end, which may be spinning now: by a copy on a stream of its own."""
        if group.world_rank not in self._aborting:
            return  # no group was opened yet
        stream, one = self._aborting[group.world_rank]
        with torch.cuda.device(group.device), torch.cuda.stream(stream):
            group._control.memory[:8].view(torch.int64).copy_(one, non_blocking=True)

    # -- time

    def clock(self, rank: int) -> Hashable:
        properties: Any = torch.cuda.get_device_properties(self._devices[rank])
        return str(properties.uuid)

    def compare_clocks(self, rank: int) -> list[tuple[int, int, int]]:
        readings = []
        for _ in range(CLOCK_READINGS):
            word = self.host_words(rank, 1)
            before = time.monotonic_ns()
            with torch.cuda.device(self._devices[rank]):
                write_time[(1,)](word, num_warps=1)
            while not word[0]:
                pass
            readings.append((before, int(word[0]), time.monotonic_ns()))
        self.synchronize(rank)
        return readings

    # -- launches

    def stream_key(self, rank: int) -> Hashable:
        return torch.cuda.current_stream(self._devices[rank]).cuda_stream

    def capturing(self, rank: int) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def load(self, rank: int, launch: Launch, stream: torch.cuda.Stream) -> None:
        """Compile the kernel of a launch and load it onto the GPU, unless that was done before."""
        key = (self._devices[rank], launch.kernel, launch.variant)
        if key in self._loaded:
            return
        if self._connections and not torch.cuda.is_current_stream_capturing():
            # loading waits for the kernels that run, and those wait for a proxy, which has to get at the driver:
            # so wait for them here, where nothing is held up
            for other in self._devices:
                self.synchronize(other)
        with torch.cuda.device(self._devices[rank]), torch.cuda.stream(stream):
            try:
                compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
                compiled._init_handles()
            except OutOfResources as problem:
                raise ArgumentError(
                    f"{launch.op}: this configuration needs more {problem.name} ({problem.required}) than the GPU has "
                    f"({problem.limit}); give config smaller tiles, fewer stages or fewer warps"
                ) from problem
        if len(self._loaded) >= VARIANTS_KNOWN:
            self._loaded.clear()  # they stay loaded; to ask again costs a little
        self._loaded.add(key)

    def start(self, rank: int, launch: Launch, stream: torch.cuda.Stream) -> None:
        """Queue the kernel, after the rank's last one."""
        with torch.cuda.device(self._devices[rank]), torch.cuda.stream(stream):
            last = self._last.get(rank)
            capturing = torch.cuda.is_current_stream_capturing()
            if last is not None and last[0] != stream and not capturing:
                stream.wait_event(last[1])
            launch.kernel[(launch.grid,)](**launch.arguments, **launch.options)
            if not capturing:
                event = last[1] if last is not None else torch.cuda.Event()
                event.record(stream)
                self._last[rank] = (stream, event)
            self._streams[rank].add(stream)

    def synchronize(self, rank: int) -> None:
        torch.cuda.current_stream(self._devices[rank]).synchronize()
        for stream in list(self._streams[rank]):
            stream.synchronize()

    def first_call_is_done(self, rank: int, group: Group) -> bool:
        """Was this the first call since ranks have agreed on new shapes, and is it done now?

        What follows such a call is often used for the first time too, so it has to be loaded; and while the
        driver does that, and waits for our kernels, it may keep the proxy out that they wait for. So, where there
        is a proxy that needs the driver, a first call returns when it is done.
        """
        first, group.fresh = group.fresh, False
        if not (first and self._connections) or torch.cuda.is_current_stream_capturing():
            return False
        self.synchronize(rank)
        group.check()
        return True


class CudaWorld(CudaRanks):
    """The world of one process with CUDA; see runtime/world.py for what each method promises."""

    def __init__(self, nodes: int, gpus_per_node: int, links: Links):
        size = nodes * gpus_per_node
        count = torch.cuda.device_count()
        devices = {rank: torch.device("cuda", rank * min(count, size) // size) for rank in range(size)}
        super().__init__(size, links, devices, _shares(devices, nodes))
        self.gpus_per_node = gpus_per_node
        self._name = f"spawn {next(_worlds)}"
        self._changed = threading.Condition()
        self._mail: dict[Hashable, dict[Any, Any]] = {}
        self._gone: dict[int, BaseException | None] = {}  # ranks whose thread has ended, and how
        self._interrupted = False
        self.groups: dict[int, weakref.WeakSet[Group]] = {rank: weakref.WeakSet() for rank in range(size)}
        self._let_devices_see_each_other()

    def _let_devices_see_each_other(self) -> None:
        used = sorted({device.index for device in self._devices.values()})
        for one in used:
            for other in used:
                if one != other:
                    if not torch.cuda.can_device_access_peer(one, other):
                        raise ArgumentError(f"GPU {one} can not read the memory of GPU {other}; use fewer ranks")
                    # torch enables peer access at the first copy
                    torch.zeros(1, device=f"cuda:{one}").copy_(torch.zeros(1, device=f"cuda:{other}"))

    def node_of(self, rank: int) -> int:
        return rank // self.gpus_per_node

    # -- the ranks' threads

    def ended(self, rank: int, failure: BaseException | None) -> None:
        """A rank's thread is over."""
        with self._changed:
            self._gone[rank] = failure
            self._changed.notify_all()

    def _await(
        self,
        rank: int,
        members: Sequence[int],
        box: dict[Any, Any],
        done: Callable[[], bool],
        what: str,
        timeout: float,
    ) -> None:
        """Wait, with the lock held, until done() or until waiting has become pointless."""
        begun = time.monotonic()
        while not done():
            if self._interrupted:
                raise KeyboardInterrupt
            missing = [member for member in members if member not in box]
            waited = time.monotonic() - begun
            failed = next((self._gone[member] for member in missing if self._gone.get(member) is not None), None)
            if failed is not None or waited >= timeout or (missing and all(member in self._gone for member in missing)):
                places = [members.index(member) for member in missing]
                raise records.absent(what, members.index(rank), places, len(members), waited) from failed
            self._changed.wait(timeout - waited)

    def exchange(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        with self._changed:
            box = self._mail.setdefault(key, {})
            box[rank] = value
            self._changed.notify_all()
            self._await(rank, members, box, lambda: all(member in box for member in members), what, timeout)
            self._leave(key, box, len(members))
            return [box[member] for member in members]

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        with self._changed:
            box = self._mail.setdefault(key, {})
            box[rank] = value
            self._changed.notify_all()
            self._leave(key, box, len(members))

    def confirm(self, group: Group, call: Any) -> None:
        group.exchange(call[0], None, call=call)

    def leave(self, group: Group, why: str) -> None:
        self.abort(group)  # the others hear of it when this rank's thread has ended

    def broke(self, group: Group, failure: MKernelError) -> None:
        pass  # who waits for a rank that does not come hears of it by its timeout, or by its end

    def lost(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        return None

    def interrupt(self) -> None:
        """Let all ranks end: those that wait for others, and those whose kernels do."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()
        for groups in self.groups.values():
            for group in list(groups):
                self.abort(group)

    def _leave(self, key: Hashable, box: dict[Any, Any], members: int) -> None:
        """The last of the members to leave throws the box away."""
        box["left"] = box.get("left", 0) + 1
        if box["left"] == members:
            self._mail.pop(key, None)

    # -- memory

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._devices[rank])
        torch.cuda.current_stream(self._devices[rank]).synchronize()
        return memory

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        return exchange_addresses(group, memory.data_ptr())

    def opened(self, group: Group) -> None:
        self.be_able_to_abort(group.world_rank)
        self.groups[group.world_rank].add(group)

    # -- the network

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        from mkernel.net import LoopbackTransport

        links = self.links
        transport = LoopbackTransport(
            f"{self._name}, group {group.name!r}",
            group.rank,
            rate=links.network * 1e9 if links.network is not None else None,
            latency=links.network_latency,
        )
        for number, memory in group.heap.segments():
            transport.attach(number, memory)
        self.connect(group, ring, transport, [self._devices[member] for member in group.members])

    def register(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        connection = self.connection(group)
        if connection is None:
            return  # peers read and write each other's memory by address
        if memory is not None:
            connection.transport.attach(segment, memory)
        else:
            connection.transport.detach(segment)

    def close(self, patience: float) -> None:
        """All ranks have ended: end what they left. Proxies serve what is in their rings first, while there is
        memory to write to."""
        for rank in self._devices:
            with contextlib.suppress(RuntimeError):  # an error of the device was raised before
                self.synchronize(rank)
        for connection in self._connections.values():
            connection.proxy.stop(patience)
        for connection in self._connections.values():
            connection.transport.close(0)
        self._connections.clear()

    # -- launches

    def launch(self, rank: int, launch: Launch) -> None:
        group = launch.group
        stream = torch.cuda.current_stream(self._devices[rank])
        key = group.next_exchange()
        with self._changed:
            box = self._mail.setdefault(key, {})
            box[rank] = (launch.call, (launch, stream))
            self._changed.notify_all()

            def ready() -> bool:
                # a rank that has ended will not come: the others find out in the kernel
                if "made" not in box and all(m in box or self._gone.get(m, self) is None for m in group.members):
                    present = {member: box[member] for member in group.members if member in box}
                    calls = [called for called, _ in present.values()]
                    box["made"], box["alike"] = len(present), all(called == launch.call for called in calls)
                    if box["alike"]:
                        try:
                            self.launch_together({member: ready for member, (_, ready) in present.items()})
                        except Exception as failure:
                            box["failure"] = failure
                    self._changed.notify_all()
                return "made" in box

            try:
                self._await(rank, group.members, box, ready, launch.op, group.timeout)
            except CommTimeout as late:
                group.out_of_step(late)
                raise
            self._leave(key, box, box["made"])
        if not box["alike"]:
            group.compare([box[member][0] if member in box else launch.call for member in group.members])
        if "failure" in box:
            box["failure"].on_every_rank = True
            raise box["failure"]
        if self.first_call_is_done(rank, group):
            group.barrier()  # the other ranks' kernels run in this process too

    def launch_together(self, launches: dict[int, tuple[Launch, torch.cuda.Stream]]) -> None:
        """Load what the launches need, then make them all."""
        for rank, (launch, stream) in launches.items():
            self.load(rank, launch, stream)
        for rank, (launch, stream) in launches.items():
            self.start(rank, launch, stream)


_worlds = itertools.count()


def _shares(devices: Mapping[int, torch.device], nodes: int) -> dict[int, int]:
    """How many CTAs each rank may have, so that all fit on their GPUs.

    With several nodes some SMs stay free, for the copies between nodes: from a GPU to itself they are made
    with a kernel, which could not start while ours hold all SMs and wait for it (see net/native/cuda.h).
    Four SMs of an H200 copy far more than the network that they stand for.
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
        raise ArgumentError("device='cuda' was asked for, but torch sees no GPU; device='cpu' is the simulator")
    world = CudaWorld(nodes, gpus_per_node, links)
    everyone = range(world.size)
    results: list[Any] = [None] * world.size
    failures: list[tuple[float, int, BaseException]] = []

    def run(rank: int) -> None:
        failure: BaseException | None = None
        try:
            device = world.device(rank)
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                group = Group(world, everyone, rank, timeout=timeout, name="world")
                set_current(group)
                results[rank] = function(group, *args)
                world.synchronize(rank)
                for made in list(world.groups[rank]):
                    made.check_unseen()
        except BaseException as error:
            failure = error
            failures.append((time.monotonic(), rank, error))
        finally:
            world.ended(rank, failure)

    # threads hand over to each other at every call; the usual 5 ms would be longer than the calls
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    threads = [threading.Thread(target=run, args=(rank,), name=f"mkernel rank {rank}") for rank in everyone]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C comes to this thread only
        world.interrupt()
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
