"""Timing of ranks that share this process: one call on every rank's stream, timed together.

(`baselines` times ranks in separate processes with the same stopwatch.)

Rank 0 drives the streams of all ranks, so that no hand-over between threads is measured. The host issues calls without
waiting for any of them. Each call is timed from a common start on all ranks' streams to the end of the last rank. The
L2 cache is cleared before the start. Every call is a new epoch.

There are two regimes, because a GPU that multiplies for more than about 20 ms reaches its power limit and lowers its
clocks: `bursts` are short and reproducible within 1%; `sustained` is what a long training step sees, and varies by 3%
from run to run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang.device import clock
from mkernel.runtime.cuda_threads import CudaThreads
from mkernel.runtime.errors import MKernelError
from mkernel.runtime.group import Group
from mkernel.runtime.world import Launch

HEAD_START = 20_000_000  # clock cycles, about 10 ms: the GPU waits while the host runs ahead


@triton.jit
def _record_start(start):
    tl.store(start, clock())


@triton.jit
def _hold(start, nanoseconds):
    begun = tl.load(start)
    while clock() - begun < nanoseconds:
        pass


class Link:
    """A paced link for host-driven transfers: `hold` extends what ran since `open` to the time that the bytes would
    take at the link's rate."""

    def __init__(self, device: torch.device):
        self._start = torch.zeros(1, dtype=torch.int64, device=device)

    def open(self) -> None:
        _record_start[(1,)](self._start, num_warps=1)

    def hold(self, nanoseconds: int) -> None:
        _hold[(1,)](self._start, nanoseconds, num_warps=1)


@dataclass(frozen=True)
class Wires:
    """Milliseconds that one rank's bytes take on its paced links; 0 for a link that is not paced."""

    nvlink: float
    network: float

    @property
    def ms(self) -> float:
        """The time of both links, used concurrently."""
        return max(self.nvlink, self.network)


def wires(group: Group, nvlink_bytes: int, network_bytes: int) -> Wires:
    """How long this many bytes of one rank take."""
    links = group.world.links
    nvlink = nvlink_bytes / (links.nvlink * 1e6) if links.nvlink and group.gpus_per_node > 1 else 0.0
    network = 0.0
    if links.network and group.nodes > 1:
        network = network_bytes / (links.network * 1e6) + links.network_latency * 1e3
    return Wires(nvlink, network)


class Stopwatch:
    """Times calls on the streams of all ranks."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]):
        self.streams = streams
        self._main = torch.cuda.Stream(streams[0].device)
        with torch.cuda.stream(self._main):
            self._cache = torch.empty(256 * 2**20, dtype=torch.uint8, device=streams[0].device)

    def time(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Milliseconds of each of `repeats` calls, after the same number of warm-up calls."""
        spans = []
        with torch.cuda.stream(self._main):
            torch.cuda._sleep(HEAD_START)
        for _ in range(2 * repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._main):
                self._cache.zero_()
                self.barrier()
            start.record(self._main)
            for stream in self.streams:
                stream.wait_event(start)
            call()
            for stream in self.streams:
                self._main.wait_stream(stream)
            end.record(self._main)
            spans.append((start, end))
        self._main.synchronize()
        return [start.elapsed_time(end) for start, end in spans[repeats:]]

    def barrier(self) -> object:
        """Delay the start until all ranks have arrived. Not needed if all of them are in this process."""

    def bursts(self, calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        """The median time of each call at full clocks, in short, interleaved bursts."""
        return self._medians(calls, 4, repeats // 4)

    def sustained(self, calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        """The median time of each call at the clocks that the GPU can sustain."""
        return self._medians(calls, repeats, 1)

    def _medians(self, calls: Mapping[str, Callable[[], object]], length: int, rounds: int) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name] += self.time(call, length)
        return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def BARRIER() -> None:
    """A step of a way: a barrier between the streams of all ranks."""


Step = Launch | Callable[[], object]


def check_current(launch: Launch) -> None:
    """Refuse a launch that was prepared with a workspace which has been freed since."""
    if launch.uses is not None and not launch.group.heap.holds(launch.uses.workspace.segment):
        raise MKernelError(
            f"this launch of {launch.op} uses a workspace that was freed: preparing another call replaced it by a "
            f"larger one. Prepare the call with the largest workspace first, or each call again before it is launched"
        )


def time_ways(
    group: Group, ways: Mapping[str, Step | Sequence[Step]], repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of every way on the streams of all ranks, in bursts and sustained. A way is a launch or a
    function on each rank, or a sequence of those and of `BARRIER`: as many on every rank. Collective; returns the same
    figures on every rank."""
    steps = {name: list(way) if isinstance(way, Sequence) else [way] for name, way in ways.items()}
    for step in itertools.chain(*steps.values()):
        if isinstance(step, Launch):
            check_current(step)
    everyone = group.exchange("ready", (torch.cuda.current_stream(group.device), steps))
    measured: tuple[dict[str, float], dict[str, float]] = ({}, {})
    if group.rank == 0:
        world = group.world
        assert isinstance(world, CudaThreads)
        streams = [stream for stream, _ in everyone]

        def take(steps_of_all: Sequence[Any]) -> None:
            if isinstance(steps_of_all[0], Launch):
                world.launcher.launch_together(dict(enumerate(zip(steps_of_all, streams))))
            elif steps_of_all[0] is BARRIER:
                done = [stream.record_event() for stream in streams]
                for stream in streams:
                    for event in done:
                        stream.wait_event(event)
            else:
                for stream, step in zip(streams, steps_of_all):
                    with torch.cuda.stream(stream):
                        step()

        def on_all(name: str) -> Callable[[], None]:
            in_order = list(zip(*(theirs[name] for _, theirs in everyone), strict=True))

            def call() -> None:
                for steps_of_all in in_order:
                    take(steps_of_all)

            return call

        calls = {name: on_all(name) for name in ways}
        stopwatch = Stopwatch(streams)
        measured = stopwatch.bursts(calls, repeats), stopwatch.sustained(calls, repeats)
    return group.exchange("times", measured)[0]
