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

from collections.abc import Callable, Mapping, Sequence

import torch
import triton
import triton.language as tl

from mkernel.lang.device import clock
from mkernel.runtime.cuda_threads import CudaThreads
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
                self.meet()
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

    def meet(self) -> object:
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


def time_ways(
    group: Group, ways: Mapping[str, Launch | Callable[[], object]], repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of every way on the streams of all ranks, in bursts and sustained. A way is a launch or a
    function on each rank. Collective; returns the same figures on every rank."""
    everyone = group.exchange("ready", (torch.cuda.current_stream(group.device), ways))
    measured: tuple[dict[str, float], dict[str, float]] = ({}, {})
    if group.rank == 0:
        world = group.world
        assert isinstance(world, CudaThreads)

        def on_all(name: str) -> Callable[[], None]:
            def launch() -> None:
                world.launcher.launch_together(
                    {rank: (theirs[name], stream) for rank, (stream, theirs) in enumerate(everyone)}
                )

            def call() -> None:
                for stream, theirs in everyone:
                    with torch.cuda.stream(stream):
                        theirs[name]()

            return launch if isinstance(ways[name], Launch) else call

        calls = {name: on_all(name) for name in ways}
        stopwatch = Stopwatch([stream for stream, _ in everyone])
        measured = stopwatch.bursts(calls, repeats), stopwatch.sustained(calls, repeats)
    return group.exchange("times", measured)[0]
