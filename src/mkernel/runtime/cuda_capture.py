"""Captured graphs on GPUs: what must stay out of a graph, and captures by several ranks at once.

A captured launch refers to memory that has to outlive it: the workspace of its operator, the signals, and what the
kernel reads besides the caller's tensors. While PyTorch captures, or warms up what it is about to capture
(`torch.compile(mode="reduce-overhead")`), memory comes from a pool that belongs to the graph, and what is written to it
is captured instead of done. So such memory is allocated and written in a thread of its own (`apart`), to which neither
applies.

CUDA forbids many functions while a thread captures, and unless told otherwise in all other threads, too. It cannot know
which of them are safe. Ours are: they concern nothing that is captured (`relaxed`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mkernel.runtime import cuda_driver
from mkernel.runtime.errors import ArgumentError

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

RELAXED = 2  # of CUstreamCaptureMode
# Ranks that share a GPU share its random generator. To begin or end a capture changes it, in some versions of PyTorch
# without a lock, and neither holds the interpreter.
_generators = threading.Lock()
Result = TypeVar("Result")


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """This thread may call whatever it wants while a graph is being captured, by itself or by another thread."""
    cuda = cuda_driver.driver()
    if cuda is None:
        yield
        return
    mode = ctypes.c_int(RELAXED)
    cuda.check(cuda.exchange_capture_mode(ctypes.byref(mode)))
    try:
        yield
    finally:
        cuda.exchange_capture_mode(ctypes.byref(mode))


def apart(device: torch.device, function: Callable[..., Result], *args: Any) -> Result:
    """Call a function in a thread of its own, on the device's default stream, and return what it returns. What it
    queues has been done, and what it allocates belongs to no graph."""
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with relaxed(), torch.cuda.device(device):
                results.append(function(*args))
                torch.cuda.current_stream(device).synchronize()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="mkernel memory")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def capture_number(stream: torch.cuda.Stream) -> int:
    """Identifies the capture that a stream takes part in; 0 if there is none."""
    cuda = cuda_driver.driver()
    if cuda is None:
        return int(torch.cuda.is_current_stream_capturing())
    status, number = ctypes.c_int(), ctypes.c_uint64()
    pointer = ctypes.c_void_p(stream.cuda_stream)
    cuda.check(cuda.capture_info(pointer, ctypes.byref(status), ctypes.byref(number), None, None, None))
    return number.value if status.value else 0


class CapturedLaunches:
    """Keeps the launches of a rank in order within a graph, also if it has several streams."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, torch.cuda.Stream, torch.cuda.Event]] = {}  # capture, its stream, an event

    @contextlib.contextmanager
    def in_order(self, rank: int, stream: torch.cuda.Stream) -> Iterator[None]:
        """What is launched inside comes behind the rank's last launch in the same graph."""
        number = capture_number(stream)
        last = self._last.get(rank)
        if last is not None and last[0] == number and last[1] != stream:
            stream.wait_event(last[2])
        yield
        event = torch.cuda.Event()
        event.record(stream)
        self._last[rank] = (number, stream, event)


@contextlib.contextmanager
def capture(group: Group, graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """See `Group.capture`."""
    if group.device.type != "cuda":
        raise ArgumentError(f"CUDA graphs need a GPU, but this group's ranks run on {group.device}")
    try:
        with torch.cuda.device(group.device):
            group.synchronize()
            stream = torch.cuda.Stream(group.device) if stream is None else stream
            # Whatever a rank does between its last call and its capture could wait for the other ranks' kernels, or be
            # forbidden while they capture. So all ranks begin together.
            group.barrier()
            with torch.cuda.stream(stream):
                with _generators:
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with contextlib.suppress(RuntimeError), _generators:  # what has failed in the block matters
                        graph.capture_end()
                    raise
                with _generators:
                    graph.capture_end()
            # To end a capture is to load and allocate what the graph needs, which must not wait for a replay that waits
            # for this rank's.
            group.barrier()
    except BaseException as failure:
        group.failed("capture", failure)
        raise
