"""CTAs of Gluon kernels: warps that take different roles, and what they synchronize by.

`gl.warp_specialize` makes every role but the first a task of its own (`WarpTask`), which runs concurrently with the
others. Tasks of a CTA share its memory (`shared.py`), its mbarriers and its named barriers.

What is asynchronous on a GPU takes effect at once here, and the race detector knows when it may have happened. A load
by TMA belongs to a thread of its own (`order.Thread`), whose events are known to those who have waited for its
mbarrier; a product reads its operands until `warpgroup_mma_wait`, a store by TMA reads its source until
`tma.store_wait`. So a stage that is overwritten or read too early is found in every schedule. An arrival at an mbarrier
covers everything that its warps did before: Triton puts a barrier of the warps in front of it.

TMA and the tensor cores access shared memory through the async proxy. What a warp has stored there with ordinary
instructions is known to them only after `fence_async_shared`. Therefore everyone has two clocks: what its ordinary
accesses know, and what its asynchronous accesses know (`WarpOrder.knows`); mbarriers pass on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mkernel.sim.dtypes import KernelError
from mkernel.sim.interpreter import run as run_kernel
from mkernel.sim.order import EVERYTHING, NOTHING, Clock, Cta, Thread, joined, only
from mkernel.sim.races import Actor, Races
from mkernel.sim.scheduler import CtaTask
from mkernel.sim.shared import Allocation

ASYNC_FENCE = "fence_async_shared"
WARP = 32  # threads


class WarpOrder(Cta):
    """What happened before, for the warps that have a role.

    stored: their ordinary stores to shared memory. fetches: reads of TMA from global memory. loads: its writes to
    shared memory. stores: its reads from there. products: reads of the tensor cores. knows: the clock of what TMA and
    the tensor cores do next in shared memory.
    """

    def __init__(self, threads: Sequence[Thread], asynchronous: Sequence[Thread]):
        self.stored, self.fetches, self.loads, self.stores, self.products = asynchronous
        self.knows: Clock = NOTHING
        threads[0].acquire(only(self.stored, EVERYTHING))
        super().__init__(*threads)
        self.descriptor_reads = self.fetches
        for thread in asynchronous:
            thread.speaker = self.main
            thread.asynchronous = thread is not self.stored
        self.fetches.completed_by = self.loads.completed_by = "mbarrier.wait"
        self.stores.completed_by = "tma.store_wait"
        self.products.completed_by = "warpgroup_mma_wait"
        self.store_groups: list[int] = []  # last events of the stores by TMA that may not have read their source yet
        self.product_groups: list[int] = []  # the same of products

    def _release_clock(self, up_to: int | None = None) -> Clock:
        clock = super()._release_clock(up_to)
        clock[self.stored.number] = self.stored.last
        return clock

    def everything(self) -> Clock:
        """All that it knows of, with all of its own ordinary accesses."""
        self.settle()
        return self._release_clock()

    def asynchronous(self, thread: Thread) -> Actor:
        """What accesses shared memory as this thread."""
        return Actor(thread, self.knows, self, ASYNC_FENCE)

    def fence_shared(self) -> None:
        """TMA and the tensor cores get to know what the warps know."""
        self.knows = joined(self.knows, self.everything())

    def arrival(self) -> tuple[Clock, Clock]:
        """The clocks that an arrival at a barrier passes on: to ordinary and to asynchronous accesses. The latter may
        overwrite what was loaded before, without a fence."""
        return self.everything(), joined(self.knows, only(self.main, self.main.last))

    def acquire_barrier(self, clocks: tuple[Clock, Clock]) -> None:
        self.main.acquire(clocks[0])
        self.knows = joined(self.knows, clocks[1])

    def complete(self, groups: list[int], thread: Thread, left: int) -> None:
        """All but the last `left` groups of accesses of a thread have completed."""
        done = len(groups) - left
        if done > 0:
            self.acquire_barrier((only(thread, groups[done - 1]),) * 2)
            del groups[:done]

    def complete_descriptors(self) -> None:
        super().complete_descriptors()
        self.complete(self.store_groups, self.stores, 0)

    def ended(self) -> Clock:
        for thread in (self.fetches, self.loads, self.stores, self.products):
            self.main.acquire(only(thread, thread.last))
        return super().ended()


def order_of_warps(races: Races, key: Any, name: str, clock: Clock) -> WarpOrder:
    """The threads of warps that start with this clock."""
    names = ("plain", "atomic", "descriptor", "multicast"), ("stored", "fetches", "loads", "stores", "products")
    threads, asynchronous = ([races.thread((key, part), name) for part in group] for group in names)
    for thread in (*threads, *asynchronous):
        thread.begin(clock)
    return WarpOrder(threads, asynchronous)


class Barrier:
    """An mbarrier, or a named barrier: phases that end when enough have arrived, and everything expected was loaded."""

    def __init__(self, name: str, count: int, word: int = 0):
        self.name = name
        self.word = word  # its address; 0 for a named barrier
        self.count = count  # arrivals of a phase
        self.left = count
        self.nbytes = 0  # that are expected, and were not loaded yet
        self.phase = 0  # completed phases
        self.time = 0.0  # when the last phase ended, see `Scheduler.trace_time`
        self._arrived = (NOTHING, NOTHING)
        self._arrival_time = 0.0
        self.clocks = (NOTHING, NOTHING)  # of the last phase
        self._waiting: list[CtaTask] = []

    def pass_on(self, clocks: tuple[Clock, Clock]) -> None:
        """Those who wait for the phase will know of this."""
        self._arrived = joined(self._arrived[0], clocks[0]), joined(self._arrived[1], clocks[1])

    def arrive(self, task: CtaTask, count: int) -> None:
        order, races = task.checked, task.scheduler.memory.races
        if isinstance(order, WarpOrder):
            clocks = order.arrival()
            self.pass_on(clocks)
            if self.word and races is not None:
                races.told(order.main, clocks[0], self.word, self.phase + 1)
        self._arrival_time = max(self._arrival_time, task.time)
        self.left -= count
        if self.left < 0:
            raise KernelError(f"{-self.left} more arrivals at {self.name} than the {self.count} of a phase")
        self.end_phase(task)

    def end_phase(self, task: CtaTask) -> None:
        """End the phase, if everybody and everything is there."""
        if self.left or self.nbytes:
            return
        self.phase += 1
        self.left = self.count
        self.clocks, self._arrived = self._arrived, (NOTHING, NOTHING)
        self.time, self._arrival_time = max(self.time, self._arrival_time), 0.0
        task.scheduler.memory.progress += 1
        for waiting in self._waiting:
            waiting.wake()
        self._waiting.clear()

    def wait(self, task: WarpTask | GluonCta, ended: Callable[[], bool]) -> None:
        """Let others run until a phase has ended."""
        task.scheduler.pause(task)
        while not ended():
            task.waits_for = self
            self._waiting.append(task)
            task.asleep = True
            task.scheduler.hub.switch()
        task.waits_for = None
        task.time = max(task.time, self.time)
        order, races = task.checked, task.scheduler.memory.races
        if isinstance(order, WarpOrder):
            order.acquire_barrier(self.clocks)
            if self.word and races is not None:
                races.heard(order.main, self.word, self.phase)


class _Warps(CtaTask):
    """Warps of a CTA that run one function."""

    waits_for: Barrier | None = None
    products_started = 0
    block: GluonCta  # the CTA
    warps: int  # how many they are

    def where(self) -> str:
        return f"{self.name} waits for {self.waits_for.name}" if self.waits_for else super().where()


class GluonCta(_Warps):
    """A CTA of a Gluon kernel, and those of its warps that have the first role."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.block = self
        self.warps = int(self.launch.spec.options.get("num_warps", 4))
        self.allocations: list[Allocation] = []
        self.barriers: dict[int, Barrier] = {}  # mbarriers by address, named barriers by their negative number - 1
        self._workers: list[WarpTask] = []

    def run(self) -> None:
        try:
            super().run()
        finally:
            for each in self.allocations:
                each.free(self.scheduler.memory)
            self.allocations.clear()

    def specialize(self, roles: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Sequence[int]) -> Any:
        """Run a function in these warps, and others in more of them; return what the first one returns."""
        if self._workers:
            raise KernelError("gl.warp_specialize inside of gl.warp_specialize is not supported")
        if len(warps) != len(roles) - 1:
            raise KernelError(f"gl.warp_specialize needs numbers of warps for {len(roles) - 1} roles, got {len(warps)}")
        for place, ((function, arguments), count) in enumerate(zip(roles[1:], warps)):
            self._workers.append(WarpTask(self, place, count, function, arguments))
        for worker in self._workers:
            self.scheduler.add(worker)
        function, arguments = roles[0]
        result = function(*arguments)
        while not all(worker.done for worker in self._workers):
            self.asleep = True
            self.scheduler.hub.switch()
        self.time = max(self.time, *(worker.time for worker in self._workers))
        if isinstance(self.order, WarpOrder):
            for worker in self._workers:
                assert isinstance(worker.order, WarpOrder)
                self.order.acquire_barrier((worker.order.ended(), worker.order.knows))
            self.order.barrier()
        self._workers.clear()
        return result


class WarpTask(_Warps):
    """Warps of a CTA with a role of their own."""

    def __init__(self, block: GluonCta, place: int, warps: int, function: Callable[..., Any], arguments: Any):
        order = None
        races, before = block.scheduler.memory.races, block.order
        name = f"{function.__name__} of rank {block.rank}, CTA {block.program_id} of {block.launch.op}"
        if races is not None and isinstance(before, WarpOrder):
            key = (block.rank, block.launch.stream, block.program_id, place)
            order = order_of_warps(races, key, name, before.everything())
            order.knows = before.knows
        super().__init__(
            block.scheduler, block.rank, block.launch, block.program_id, block.num_programs, block.time, order
        )
        self.name = name
        self.label = f"{block.label}w{place}"
        self.aborted = block.aborted
        self.unused_from = block.unused_from
        self.block, self.warps = block, warps
        self._function, self._arguments = function, arguments

    def run(self) -> None:
        try:
            run_kernel(self, self._function, *self._arguments)
        finally:
            self.block.wake()
