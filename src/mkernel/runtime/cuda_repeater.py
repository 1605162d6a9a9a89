"""The Repeater of ranks on GPUs: launches that the driver repeats without Triton."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mkernel.runtime import cuda_driver
from mkernel.runtime.group import Group
from mkernel.runtime.operands import span
from mkernel.runtime.world import Launch

if TYPE_CHECKING:
    from mkernel.runtime.cuda import CudaLauncher
    from mkernel.runtime.cuda_threads import ThreadExchange

log = logging.getLogger("mkernel")


class Repeated(NamedTuple):
    """The launch of a prepared call, which waits for those of other threads."""

    ready: cuda_driver.Ready
    addresses: Sequence[int]  # of its tensors


class CudaRepeater:
    """Repeats launches.

    Args:
        launcher: of the same ranks: their launches run in the order of their calls.
        threads: the exchange of ranks that are threads of this process; None if this process is one rank.
    """

    def __init__(self, launcher: CudaLauncher, devices: Mapping[int, torch.device], threads: ThreadExchange | None):
        self._launcher, self._devices, self._threads = launcher, devices, threads
        self._indices = {rank: device.index for rank, device in devices.items()}
        self._raw_stream: Any = torch._C._cuda_getCurrentRawStream  # looked up once
        self._capturing: Any = torch._C._cuda_isCurrentStreamCapturing
        self._current_device: Any = torch._C._cuda_getDevice

    def stream_key(self, rank: int) -> Hashable | None:
        return None if self._capturing() else self._raw_stream(self._indices[rank])

    def prepare(
        self, rank: int, launch: Launch, tensors: Sequence[torch.Tensor | None]
    ) -> cuda_driver.Ready | None:  # fmt: skip
        device = self._devices[rank]
        spans = [(t.data_ptr(), span(t)) if t is not None and t.numel() else (0, 0) for t in tensors]
        with torch.cuda.device(device):
            compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
            metadata = compiled.metadata
            kernel = cuda_driver.Kernel(
                compiled.function, launch.grid, cuda_driver.WARP_THREADS * metadata.num_warps, metadata.shared
            )
            try:
                parameters = cuda_driver.parameters_of(compiled, launch.arguments)
                patches = cuda_driver.find_patches(parameters, spans)
                kept = [t for t in _tensors(tuple(launch.arguments.values())) if not _is_in(t, spans)]
                stream = torch.cuda.current_stream(device)
                return cuda_driver.Ready(kernel, stream, parameters, patches, (kept, launch.uses))
            except cuda_driver.Unknown as reason:
                log.debug("%s: Triton makes this launch every time, because of %s", launch.op, reason)
                return None

    def launch(self, rank: int, group: Group, ready: cuda_driver.Ready, addresses: Sequence[int]) -> None:
        if group.size > 1:
            if self._threads is not None:
                call: Any = group._call
                launch = Repeated(ready, addresses), ready.stream
                self._threads.run_together(group, call[0], call, launch, self._launcher.launch_together)
                return
            group.confirm()
        self.start(rank, ready, addresses)

    def start(self, rank: int, ready: cuda_driver.Ready, addresses: Sequence[int]) -> None:
        """Queue a launch behind the rank's last one."""
        if self._current_device() != self._indices[rank]:
            with torch.cuda.device(self._devices[rank]):
                self.start(rank, ready, addresses)
            return
        stream, last = ready.stream, self._launcher.last
        before, event = last[rank]
        if before is not stream:
            if before != stream:
                stream.wait_event(event)
            last[rank] = stream, event
        ready.start(addresses)
        event.record(stream)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested structures, also those of tensor descriptors."""
    if isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "block_shape"):
        yield value.base


def _is_in(tensor: torch.Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    """Does a tensor begin in one of these spans of (address, bytes)?"""
    return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in spans)
