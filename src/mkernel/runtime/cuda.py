"""Memory and launches on GPUs, for ranks that are threads and for ranks that are processes.

Ranks that share a GPU share its SMs: a launch has as many CTAs as leave room for those of all other ranks on the GPU.

A spinning kernel constrains how launches are made:

- Loading a kernel, any kernel, waits for the kernels that run in the process (measured: the first call of a Triton or
  torch kernel waits until a spinning one ends; cudaMalloc and pinned memory do not). So a rank's kernel must not spin
  for a peer that still has to load something before its own launch. Threads of one process therefore gather the
  launches of a call: the last thread to arrive compiles and loads them all, then starts them all.
- A kernel cannot start while the SMs it needs are held by kernels that wait for it. So the operators of a rank run one
  after the other, in the order of the calls, even on different streams. All ranks make their calls in the same
  order, so the oldest call can always finish.
- Memory that peers may still write to must not be reused: see runtime/heap.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime.errors import OutOfResources

from mkernel.lang.device import write_time
from mkernel.runtime import cuda_driver
from mkernel.runtime.cuda_capture import CapturedLaunches, apart, relaxed
from mkernel.runtime.cuda_repeater import CudaRepeater, Repeated
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.gpus import check_gpu
from mkernel.runtime.group import Group
from mkernel.runtime.network import NativeNetwork
from mkernel.runtime.world import Launch, Part, exchange_addresses

if TYPE_CHECKING:
    from mkernel.runtime.cuda_threads import ThreadExchange

CLOCK_READINGS = 20  # the quickest one counts
LOADED_KEPT = 4096


class DeviceMemory:
    """The Memory of ranks that are threads of one process, which share an address space."""

    def __init__(self, devices: Mapping[int, torch.device]):
        for device in dict.fromkeys(devices.values()):
            check_gpu(device)
        self._devices = devices

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        device = self._devices[rank]
        return apart(device, lambda: torch.zeros(nbytes, dtype=torch.uint8, device=device))

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        return exchange_addresses(group, memory.data_ptr())

    def unmap(self, memory: torch.Tensor) -> None:
        pass

    def map_multicast(self, group: Group, memory: torch.Tensor, addresses: Sequence[int]) -> int:
        return 0  # only symmetric memory has multicast objects

    def upload(self, rank: int, words: Sequence[int]) -> torch.Tensor:
        device = self._devices[rank]
        return apart(device, lambda: torch.tensor(words, dtype=torch.int64, device="cpu").to(device))

    def host_words(self, rank: int, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device="cpu").pin_memory()

    def describe(self, group: Group, segment: int, memory: torch.Tensor, parts: Sequence[Part]) -> None:
        pass  # only the simulator checks it

    def empty(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._devices[rank])

    def maker(self, rank: int, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        shape, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, self._devices[rank]
        allocate: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # what compiled graphs call
        if allocate is None:
            return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
        current_device, index = torch._C._cuda_getDevice, device.index

        def make() -> torch.Tensor:
            if current_device() == index:  # where it allocates. Its twin for CPUs takes 1.3 us less than torch.empty
                return allocate(shape, strides, dtype)
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

        return make


class CudaClock:
    """The global timer of a GPU."""

    def __init__(self, device: torch.device):
        self._device = device

    @property
    def name(self) -> Hashable:
        properties: Any = torch.cuda.get_device_properties(self._device)
        return str(properties.uuid)

    def compare(self) -> list[tuple[int, int, int]]:
        readings = []
        for _ in range(CLOCK_READINGS):
            word = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
            before = time.monotonic_ns()
            with torch.cuda.device(self._device):
                write_time[(1,)](word, num_warps=1)
            while not word[0]:
                pass
            readings.append((before, int(word[0]), time.monotonic_ns()))
        torch.cuda.current_stream(self._device).synchronize()
        return readings


class KernelLoader:
    """Compiles kernels and loads them onto GPUs."""

    def __init__(self, devices: Mapping[int, torch.device], network: NativeNetwork, synchronize: Callable[[int], None]):
        self._devices, self._network, self._synchronize = devices, network, synchronize
        self._loaded: set[Hashable] = set()

    def load(self, rank: int, launch: Launch, stream: torch.cuda.Stream) -> bool:
        """Compile the kernel of a launch and load it onto the GPU, unless it is loaded already. Return whether it was
        new."""
        key = (self._devices[rank], launch.kernel, launch.variant)
        if key in self._loaded:
            return False
        if self._network.connections and not torch.cuda.is_current_stream_capturing():
            # Loading waits for running kernels while it holds the driver. Those kernels may wait for a proxy that needs
            # the driver. So wait for them here, where nothing holds it.
            for other in self._devices:
                self._synchronize(other)
        with torch.cuda.device(self._devices[rank]), torch.cuda.stream(stream), relaxed():
            try:
                compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
                compiled._init_handles()
            except OutOfResources as problem:
                raise ArgumentError(
                    f"{launch.op}: this configuration needs more {problem.name} ({problem.required}) than the GPU has "
                    f"({problem.limit}); give config smaller tiles, fewer stages or fewer warps"
                ) from problem
        if len(self._loaded) >= LOADED_KEPT:
            self._loaded.clear()  # the kernels stay loaded; loading them again is cheap
        self._loaded.add(key)
        return True


class CudaLauncher:
    """The Launcher of ranks on GPUs.

    Args:
        ctas: how many CTAs of one launch each rank may have.
        network: of this process; its proxies constrain when kernels may be loaded (`KernelLoader.load`).
        threads: the exchange of ranks that are threads of this process; None if this process is one rank.
    """

    def __init__(
        self,
        devices: Mapping[int, torch.device],
        ctas: Mapping[int, int],
        network: NativeNetwork,
        threads: ThreadExchange | None = None,
    ):
        self._devices = devices
        self._indices = {rank: device.index for rank, device in devices.items()}
        self._ctas = ctas
        self._network = network
        self._threads = threads
        self.last: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}  # each rank's last launch
        self._in_graphs = CapturedLaunches()
        self._streams: dict[int, set[torch.cuda.Stream]] = {rank: set() for rank in devices}
        self.loader = KernelLoader(devices, network, self.synchronize)
        self._abort_streams: dict[int, tuple[torch.cuda.Stream, torch.Tensor]] = {}
        self.repeater = CudaRepeater(self, devices, threads) if cuda_driver.driver() is not None else None

    def ctas(self, rank: int) -> int:
        return self._ctas[rank]

    def open(self, group: Group) -> None:
        # `abort` cannot create its stream when it needs it: creating a stream waits for kernels that spin
        rank = group.world_rank
        if rank not in self._abort_streams:
            one = torch.ones(1, dtype=torch.int64, device="cpu").pin_memory()
            self._abort_streams[rank] = torch.cuda.Stream(self._devices[rank]), one

    def stream_key(self, rank: int) -> Hashable:
        return torch._C._cuda_getCurrentRawStream(self._indices[rank])

    def capturing(self, rank: int) -> bool:
        return torch._C._cuda_isCurrentStreamCapturing()

    def launch(self, rank: int, launch: Launch) -> None:
        group = launch.group
        stream = torch.cuda.current_stream(self._devices[rank])
        if self._threads is None:
            group.fresh |= self.loader.load(rank, launch, stream)
            group.confirm()
            self.start(rank, launch, stream)
        else:
            self._threads.run_together(group, launch.op, launch.call, (launch, stream), self.launch_together)
        if self.sync_after_first_call(rank, group) and self._threads is not None:
            group.barrier()  # the other ranks' kernels run in this process, too

    def launch_together(self, launches: Mapping[int, tuple[Launch | Repeated, torch.cuda.Stream]]) -> None:
        """Load the kernels of several ranks, then start them all."""
        made = []
        loaded = False
        for rank, (launch, stream) in launches.items():
            if isinstance(launch, Launch):
                loaded |= self.loader.load(rank, launch, stream)
                made.append(launch)
        if loaded and len(made) == len(launches):  # ranks that repeat a launch do not wait for the others afterwards
            for new in made:
                new.group.fresh = True
        for rank, (launch, stream) in launches.items():
            if isinstance(launch, Repeated):
                assert self.repeater is not None
                self.repeater.start(rank, launch.ready, launch.addresses)
            else:
                self.start(rank, launch, stream)

    def start(self, rank: int, launch: Launch, stream: torch.cuda.Stream) -> None:
        """Queue a loaded kernel behind the rank's last one."""
        if torch._C._cuda_getDevice() != self._indices[rank]:
            with torch.cuda.device(self._devices[rank]):
                self.start(rank, launch, stream)
            return
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                with self._in_graphs.in_order(rank, stream):
                    launch.kernel[(launch.grid,)](**launch.arguments, **launch.options)
                return
            last = self.last.get(rank)
            if last is not None and last[0] != stream:
                stream.wait_event(last[1])
            launch.kernel[(launch.grid,)](**launch.arguments, **launch.options)
            event = last[1] if last is not None else torch.cuda.Event()
            event.record(stream)
            self.last[rank] = (stream, event)
            self._streams[rank].add(stream)

    def sync_after_first_call(self, rank: int, group: Group) -> bool:
        """Synchronize if this was the first call since the ranks agreed on new shapes, or the first one of a kernel.
        Return whether it was.

        What follows such a call often runs for the first time, too, and has to be loaded. While the driver loads it, it
        waits for our kernels, and may block the proxy that they wait for. So where there is a proxy, the first call
        returns only when it has finished.
        """
        first, group.fresh = group.fresh, False
        if not (first and self._network.connections) or torch.cuda.is_current_stream_capturing():
            return False
        self.synchronize(rank)
        group.check()
        return True

    def synchronize(self, rank: int) -> None:
        torch.cuda.current_stream(self._devices[rank]).synchronize()
        for stream in list(self._streams[rank]):
            stream.synchronize()

    def poll_idle(self, rank: int) -> bool:
        try:
            return all(stream.query() for stream in self._streams[rank])
        except RuntimeError:  # the device has failed
            return False

    def abort(self, group: Group) -> None:
        if group.abort_flag is None or group.world_rank not in self._abort_streams:
            return  # the group has launched nothing yet
        stream, one = self._abort_streams[group.world_rank]
        with torch.cuda.device(group.device), torch.cuda.stream(stream):
            group.abort_flag.copy_(one, non_blocking=True)

    def clock(self, rank: int) -> CudaClock:
        return CudaClock(self._devices[rank])
