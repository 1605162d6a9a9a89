"""A cluster inside this process: ranks, CTAs and network proxies are tasks of one scheduler."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from mkernel.runtime import chains
from mkernel.runtime.errors import CommTimeout
from mkernel.runtime.gpus import SimulatedGpu
from mkernel.runtime.group import Group, set_current
from mkernel.runtime.world import Links
from mkernel.sim.backend import InlineLauncher, SimClock, SimLauncher, SimMemory, SimNetwork
from mkernel.sim.exchange import SimExchange, SoloExchange
from mkernel.sim.progress import Line
from mkernel.sim.races import Races
from mkernel.sim.replacements import check_reached
from mkernel.sim.scheduler import Options, Scheduler
from mkernel.sim.simulator import Simulator
from mkernel.sim.tasks import HostTask

MUCH_MEMORY = 256 << 20  # bytes of a simulated cluster that are worth a garbage collection
_left_behind: list[int] = []  # bytes of the clusters that were simulated last


class SimWorld:
    """The world of simulated ranks."""

    def __init__(self, nodes: int, gpus_per_node: int, seed: int, options: Options):
        self.size = nodes * gpus_per_node
        self.links = Links()
        self.label = "world"
        self.simulated_gpu = SimulatedGpu(options.capability) if options.capability else None
        self.node_ids = [rank // gpus_per_node for rank in range(self.size)]
        self.gpu_ids = list(range(self.size))
        self.devices = dict.fromkeys(range(self.size), torch.device("cpu"))
        self.seed = seed
        self.simulator = Simulator(self.size, Scheduler(seed, options), options)
        self.scheduler = self.simulator.scheduler
        self.traffic = self.simulator.traffic
        self.exchange = SimExchange(self.simulator)
        self.memory = SimMemory(self.simulator)
        self.network = SimNetwork(self.simulator)
        self.launcher = SimLauncher(self.simulator, self.exchange, self.network)
        self.exchange.ahead.connect(self.exchange, self.launcher.execution, self.network)

    @property
    def options(self) -> Options:
        return self.simulator.options

    @property
    def races(self) -> Races | None:
        return self.simulator.races

    def stream(self, rank: int, name: Hashable) -> contextlib.AbstractContextManager[None]:
        """Inside, the rank's launches go to a stream of that name, and calls return before they have finished, as on a
        GPU; `group.synchronize()` waits for them. Outside, a call returns when it has finished, as calls on CPU tensors
        do."""
        return self.launcher.execution.stream(rank, name)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the function of each rank, and everything they launch, to the end."""
        hosts = [HostTask(self.scheduler, rank, function) for rank, function in enumerate(functions)]
        for host in hosts:
            self.scheduler.add(host)
        execution = self.launcher.execution
        line = Line(execution)
        self.scheduler.on_step = line.step
        thresholds = gc.get_threshold()
        try:
            gc.set_threshold(10_000, *thresholds[1:])  # a simulation makes many objects, and little garbage in cycles
            self.scheduler.run(
                lambda: all(host.done for host in hosts) and not any(execution.queues.values()), execution.task_done
            )
        finally:
            gc.set_threshold(*thresholds)
            line.end()
            self.scheduler.close()
        timeouts = execution.timeouts
        for group in list(self.exchange.groups):
            try:
                group.check_unseen()
            except CommTimeout as timeout:
                timeouts.append(timeout)
        if timeouts:
            cause = min(timeouts, key=lambda timeout: not timeout.is_cause)
            raise chains.join(cause, timeouts, self.launcher.calls.get(cause.group))
        return [host.result for host in hosts]


class SoloWorld:
    """The world of one simulated rank in the caller's own code, with no tasks around it: for mk.init()."""

    def __init__(self) -> None:
        self.size = 1
        self.links = Links()
        self.label = "world"
        self.simulated_gpu: SimulatedGpu | None = None
        self.node_ids, self.gpu_ids = [0], [0]
        self.devices = {0: torch.device("cpu")}
        self.simulator = simulator = Simulator(1, Scheduler(0, Options()), Options())
        self.exchange = SoloExchange()
        self.memory = SimMemory(simulator)
        self.network = SimNetwork(simulator)
        self.launcher = InlineLauncher(simulator, SimClock())


def single_rank(timeout: float) -> Group:
    """A group of one simulated rank."""
    return Group(SoloWorld(), [0], 0, timeout=timeout, name="world")


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    nodes: int,
    gpus_per_node: int,
    seed: int,
    timeout: float,
    options: Options | None,
) -> list[Any]:
    """Run function(group, *args) on every rank of a simulated cluster; results by rank."""
    if _left_behind and max(_left_behind) > MUCH_MEMORY:
        gc.collect()  # a world has cycles of few but large objects
    _left_behind.clear()
    options = options or Options()
    options.check_ranks(nodes * gpus_per_node)
    world = SimWorld(nodes, gpus_per_node, seed, options)
    everyone = range(world.size)

    def of(rank: int) -> Callable[[], Any]:
        def run() -> Any:
            group = Group(world, everyone, rank, timeout=timeout, name="world")
            set_current(group)
            return function(group, *args)

        return run

    try:
        results = world.run([of(rank) for rank in everyone])
    except Exception as failure:
        check_reached(world.options.replace, world.scheduler.replaced, failure)
        schedule = world.options.schedule
        which = f"seed={seed}" if schedule is None else f"sim=Options(schedule={schedule!r})"
        how = f"mkernel simulator: {nodes} x {gpus_per_node} ranks failed with {which}, which reproduces the failure"
        print(how, file=sys.stderr)
        if hasattr(failure, "add_note"):
            failure.add_note(how)
        raise
    else:
        check_reached(world.options.replace, world.scheduler.replaced)
        return results
    finally:
        _left_behind.append(world.simulator.allocated)
