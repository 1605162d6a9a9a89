"""Measuring configurations on GPUs: all ranks prepare the same one, rank 0 launches and times them together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton

from mkernel.runtime import tuned
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Launch, Links
from mkernel.tuning.search import Result, Search
from mkernel.tuning.spaces import families_of
from mkernel.workloads import Call, Workload

REPEATS = 8  # launches that a measurement is the median of
TIMEOUT = 60.0
# too much shared memory, or too much for Triton's passes (a RuntimeError)
DOES_NOT_COMPILE = (triton.errors.TritonError, RuntimeError)


@dataclass(frozen=True)
class Found:
    """What tuning found for one shape."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    result: Result
    entries: tuned.Entries


def tune(
    workload: Workload,
    shape: tuple[int, ...],
    *,
    nodes: int,
    gpus_per_node: int,
    dtype: torch.dtype,
    links: Links,
    seconds: float,
    options: Mapping[str, int] | None = None,
    tell: Callable[[Result], None] = lambda result: None,
) -> Found:
    """Search for the best configuration of a shape, for at most so many seconds (and what is being measured
    then), and keep it. `options`: what else the workload shall be told."""
    said = dict(options or {})
    tunable = workload.tunable
    if tunable is None:
        raise ArgumentError(f"{workload.op} takes no configuration: its Workload has no tunable")
    tuned.write(tuned.path(), {})  # what could not be kept in the end is not measured

    def on_rank(group: Group) -> Found | None:
        call = workload.make(group, shape, dtype, **said)
        trial = Trial(group, call)
        tried = trial.tried
        if group.rank:
            trial.follow()
            return None
        families = families_of(workload.operator, group, tried.explain(Config()))
        try:
            result = Search(trial.measure, seconds, tell=tell, compile=trial.compile).run(families)
            trial.compare(result.best)
        finally:
            trial.end()
        measured = {
            "milliseconds": result.best_time,
            "default_milliseconds": result.default,
            "shape": list(shape),
            **({"options": said} if said else {}),
            "trials": len(result.trials),
            "complete": result.complete,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        place = tuned.place_of(group)
        entries = tunable.entries(place, dtype, result.best, measured, **tried.sizes)
        return Found(workload.op, shape, dtype, result, entries)

    found = spawn(on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device="cuda", links=links, timeout=TIMEOUT)[0]
    assert found is not None
    tuned.write(tuned.path(), found.entries)
    return found


class Trial:
    """Measurements of one call. Rank 0 says what is done next; the others follow until it ends."""

    def __init__(self, group: Group, call: Call):
        self._group = group
        self._call = call
        self.tried = call.tried
        self._stopwatch: Any = None

    def follow(self) -> None:
        """What ranks other than 0 do."""
        steps: dict[str, Callable[[Any], Any]]
        steps = {"compile": self._compile, "measure": self._measure, "compare": self._compare}
        while True:
            kind, what = self._group.exchange("tune", None)[0]
            if kind == "end":
                return
            steps[kind](what)

    def compile(self, configs: Sequence[Config]) -> None:
        """Compile what these configurations run, as many of them at a time as there are cores: so nobody waits for
        rank 0 much longer than it takes to compile one."""
        cores = len(os.sched_getaffinity(0))
        for first in range(0, len(configs), cores):
            some = configs[first : first + cores]
            self._group.exchange("tune", ("compile", some))
            self._compile(some)

    def measure(self, config: Config) -> float | None:
        """Milliseconds of a configuration; None if it does not run."""
        self._group.exchange("tune", ("measure", config))
        return self._measure(config)

    def compare(self, config: Config) -> None:
        """Raise if a configuration gives another result than the default."""
        self._group.exchange("tune", ("compare", config))
        self._compare(config)

    def end(self) -> None:
        self._group.exchange("tune", ("end", None))

    def _prepared(self, config: Config) -> Launch | None:
        """The launch of a configuration; None if it is refused."""
        with contextlib.suppress(ArgumentError):
            return self.tried.prepare(config)  # an empty one is the default: what is tuned has no say in it
        return None

    def _compile(self, configs: Sequence[Config]) -> None:
        """Rank 0 compiles what all ranks would launch, every binary once. The launches themselves are not kept: to
        prepare the next one may give back memory that they use. What does not compile is found when it is measured."""
        with ThreadPoolExecutor(len(configs)) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                everyone = self._group.exchange("tune", self._prepared(config))
                if self._group.rank == 0:
                    for launch in filter(None, everyone):
                        begin_to_compile(launch)

    def _measure(self, config: Config) -> float | None:
        group = self._group
        launch, stream = self._prepared(config), torch.cuda.current_stream(group.device)
        everyone = group.exchange("tune", (launch, stream))
        measured = None
        if group.rank == 0 and all(entry[0] is not None for entry in everyone):
            measured = self._time(everyone)
        return group.exchange("tune", measured)[0]

    def _time(self, everyone: list[Any]) -> float | None:
        from mkernel.bench.timing import Stopwatch

        world: Any = self._group.world
        launches = dict(enumerate(everyone))
        if self._stopwatch is None:
            self._stopwatch = Stopwatch([stream for _, stream in everyone])
        try:
            for rank, (launch, stream) in launches.items():
                world.launcher.loader.load(rank, launch, stream)
        except DOES_NOT_COMPILE:
            return None
        return self._stopwatch.bursts({"fused": lambda: world.launcher.launch_together(launches)}, REPEATS)["fused"]

    def _compare(self, config: Config) -> None:
        """Two ways to add up the same products differ by rounding, and by no more."""
        default = self._call.run(Config()).clone()
        result = self._call.run(config)
        self._group.synchronize()
        error = (result.double() - default.double()).abs().max().item()
        allowed = 8 * torch.finfo(default.dtype).eps * default.abs().max().item()
        if not error <= allowed:  # nor if it is NaN
            raise MKernelError(
                f"{self.tried.sizes}: {config} gives another result than the default: it differs by {error:.3g}, "
                f"{allowed:.3g} could be rounding"
            )


def begin_to_compile(launch: Launch) -> None:
    """Compile the kernel of a launch in the background, inside of an AsyncCompileMode of Triton's."""
    with torch.cuda.device(launch.group.device):
        launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
