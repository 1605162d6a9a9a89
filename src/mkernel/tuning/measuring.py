"""Measure configurations on GPUs: all ranks prepare the same one, and rank 0 launches and times them together."""

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

REPEATS = 8  # launches per measurement, whose median counts
TIMEOUT = 60.0
# too much shared memory, or a failure in one of Triton's passes (a RuntimeError)
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
    on_result: Callable[[Result], None] = lambda result: None,
) -> Found:
    """Search for the best configuration for a shape, and store it. Stops after `seconds`, once the measurement in
    progress is done. `options` are passed to the workload."""
    said = dict(options or {})
    tunable = workload.tunable
    if tunable is None:
        raise ArgumentError(f"{workload.op} takes no configuration: its Workload has no tunable")
    tuned.write(tuned.path(), {})  # fail now, not after all measurements, if the file cannot be written

    def on_rank(group: Group) -> Found | None:
        call = workload.make(group, shape, dtype, **said)
        trial = Trial(group, call)
        tried = trial.tried
        if group.rank:
            trial.follow()
            return None
        families = families_of(workload.operator, group, tried.explain(Config()))
        try:
            result = Search(trial.measure, seconds, on_result=on_result, compile=trial.compile).run(families)
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
    """Measurements of one call. Rank 0 decides what to do next; the others follow until it ends."""

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
        """Compile the kernels of these configurations, one per core at a time, so that the other ranks wait for rank 0
        little longer than the compilation of one kernel."""
        cores = len(os.sched_getaffinity(0))
        for first in range(0, len(configs), cores):
            some = configs[first : first + cores]
            self._group.exchange("tune", ("compile", some))
            self._compile(some)

    def measure(self, config: Config) -> float | None:
        """Milliseconds of a call with a configuration; None if it does not run."""
        self._group.exchange("tune", ("measure", config))
        return self._measure(config)

    def compare(self, config: Config) -> None:
        """Raise if the result of a configuration differs from that of the default by more than rounding."""
        self._group.exchange("tune", ("compare", config))
        self._compare(config)

    def end(self) -> None:
        self._group.exchange("tune", ("end", None))

    def _prepared(self, config: Config) -> Launch | None:
        """The launch of a configuration; None if it is rejected."""
        with contextlib.suppress(ArgumentError):
            return self.tried.prepare(config)  # an empty one is the default: stored configurations are ignored
        return None

    def _compile(self, configs: Sequence[Config]) -> None:
        """Rank 0 compiles what all ranks would launch, every binary once. The launches themselves are not kept, because
        preparing the next one may release memory that they use. A failure to compile surfaces in the measurement."""
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
        except (*DOES_NOT_COMPILE, ArgumentError):  # the latter: it needs more shared memory than there is
            return None
        return self._stopwatch.bursts({"fused": lambda: world.launcher.launch_together(launches)}, REPEATS)["fused"]

    def _compare(self, config: Config) -> None:
        """Two orders of adding the same products may differ by rounding, but by no more."""
        default = self._call.run(Config()).clone()
        result = self._call.run(config)
        self._group.synchronize()
        error = (result.double() - default.double()).abs().max().item()
        allowed = 8 * torch.finfo(default.dtype).eps * default.abs().max().item()
        if not error <= allowed:  # also if it is NaN
            raise MKernelError(
                f"{self.tried.sizes}: {config} gives a different result than the default: it differs by {error:.3g}, "
                f"but rounding explains at most {allowed:.3g}"
            )


def begin_to_compile(launch: Launch) -> None:
    """Compile the kernel of a launch in the background, inside Triton's AsyncCompileMode."""
    with torch.cuda.device(launch.group.device):
        launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
