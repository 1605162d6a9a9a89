"""CTAs of Gluon kernels: warps that take different roles, and what they synchronize by.

`gl.warp_specialize` makes every role but the first a task of its own (`WarpTask`), which runs concurrently with the
others. Tasks of a CTA share its memory (`shared.py`), its mbarriers and its named barriers.

What is asynchronous on a GPU takes effect at once here, and the race detector knows when it may have happened. The
loads by TMA that one mbarrier counts belong to a thread of their own (`order.Thread`), whose events are known to those
who have waited for that mbarrier; a product reads its operands until `warpgroup_mma_wait`, a store by TMA reads its
source until `tma.store_wait`. So a stage that is overwritten or read too early is found in every schedule. When a CTA
ends, its shared memory belongs to another one, so all of this must be over. An arrival at an mbarrier covers everything
that its warps did before: Triton puts a barrier of the warps in front of it.

TMA and the tensor cores access shared memory through the async proxy. What a warp has stored there with ordinary
instructions is known to them only after `fence_async_shared`. Therefore everyone has two clocks: what its ordinary
accesses know, and what its asynchronous accesses know (`WarpOrder.knows`); mbarriers pass on both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mkernel.sim.dtypes import KernelError
from mkernel.sim.interpreter import run as run_kernel
from mkernel.sim.order import EVERYTHING, NOTHING, Clock, Cta, Thread, joined, only
from mkernel.sim.races import Actor, Races
from mkernel.sim.scheduler import CtaTask
from mkernel.sim.shadow import Access
from mkernel.sim.shared import Allocation

ASYNC_FENCE = "fence_async_shared"
WARP = 32  # threads
WAIT_FRAMES = 3  # of the simulator between a line of a kernel and `Barrier.wait`, or `Barrier.arrive`


class WarpOrder(Cta):
    """What happened before, for the warps that have a role.

    stored: their ordinary stores to shared memory. stores: reads of TMA from there. products: reads of the tensor
    cores. loads: by mbarrier, what TMA reads and writes when it loads. knows: the clock of what TMA and the tensor
    cores do next in shared memory.
    """

    def __init__(self, races: Races, key: tuple[Hashable, ...], name: str, clock: Clock):
        self._races, self._key, self._name, self._clock = races, key, name, clock
        threads = [self._thread(part) for part in ("plain", "atomic", "descriptor", "multicast")]
        self.stored, self.stores, self.products = map(self._thread, ("stored", "stores", "products"))
        self.loads: dict[int, Thread] = {}
        self.knows: Clock = NOTHING
        threads[0].acquire(only(self.stored, EVERYTHING))
        super().__init__(*threads)
        for thread in (self.stored, self.stores, self.products):
            thread.speaker = self.main
        self.main.warps_of = key[:3]
        self.stores.completed_by = "tma.store_wait"
        self.products.completed_by = "warpgroup_mma_wait"
        self.store_groups: list[int] = []  # last events of the stores by TMA that may not have read their source yet
        self.product_groups: list[int] = []  # the same of products

    def _thread(self, part: Hashable) -> Thread:
        thread = self._races.thread((self._key, part), self._name)
        thread.begin(self._clock)
        return thread

    def rename(self, name: str) -> None:
        """The warps have another role."""
        self._name = name
        for thread in (self.main, self.atomics, self.descriptors, self.multicast, self.stored, self.stores,
                       self.products, *self.loads.values()):  # fmt: skip
            thread.name = name

    def loads_of(self, barrier: Barrier) -> Thread:
        """The loads by TMA that this mbarrier counts."""
        thread = self.loads.get(barrier.number)
        if thread is None:
            thread = self.loads[barrier.number] = self._thread(("loads", barrier.number))
            thread.speaker, thread.counted_by = self.main, barrier
        return thread

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
        for thread in (self.stores, self.products, *self.loads.values()):
            self.main.acquire(only(thread, thread.last))
        return super().ended()


class Barrier:
    """An mbarrier, or a named barrier: phases that end when enough have arrived, and everything expected was loaded.

    Only two phases can be told apart: a task that waits for a phase must return before the next one ends, in every
    schedule.
    """

    def __init__(self, name: str, number: int, count: int, unit: str, place: Callable[[], str] = str):
        """unit: of the count; place: where it was initialized."""
        self.number = number
        self.count = count  # arrivals of a phase
        self._name, self._place, self._unit = name, place, unit
        self.left = count
        self.nbytes = 0  # that are expected, and were not loaded yet
        self.phase = 0  # completed phases
        self.time = 0.0  # when the last phase ended, see `Scheduler.trace_time`
        self._arrived = (NOTHING, NOTHING)
        self._arrival_time = 0.0
        self.clocks = (NOTHING, NOTHING)  # of the last phase
        self._waiting: list[CtaTask] = []
        self._waited: list[tuple[Thread, int]] = []  # waits for the last phase: by whom, and the event

    def pass_on(self, clocks: tuple[Clock, Clock]) -> None:
        """Let those that wait for the phase acquire what these clocks cover."""
        self._arrived = joined(self._arrived[0], clocks[0]), joined(self._arrived[1], clocks[1])

    def __str__(self) -> str:
        place = self._place()
        return f"{self._name} (initialized at {place})" if place else self._name

    def state(self) -> str:
        """What is missing, in readable form."""
        missing = [f"{count} {what}" for count, what in ((self.left, self._unit), (self.nbytes, "bytes")) if count]
        return f"{self.phase} have ended, and {' and '.join(missing)} of the next are missing"

    def arrive(self, task: CtaTask, count: int) -> None:
        order, races = task.checked, task.scheduler.memory.races
        if isinstance(order, WarpOrder) and races is not None:
            clocks = order.arrival()
            self.pass_on(clocks)
            races.arrived(order.main, self, self.phase + 1, clocks, races.sites.here(WAIT_FRAMES))
        self._arrival_time = max(self._arrival_time, task.time)
        self.left -= count
        if self.left < 0:
            raise KernelError(f"{-self.left} more {self._unit} at {self} than the {self.count} of a phase")
        self.end_phase(task)

    def end_phase(self, task: CtaTask) -> None:
        """End the phase, if all tasks and all bytes that it expects have arrived."""
        if self.left or self.nbytes:
            return
        races = task.scheduler.memory.races
        if races is not None and task.checked is not None:
            races.check_waits(self, self.phase, self._waited, self._arrived[0])
        self._waited.clear()
        self.phase += 1
        self.left = self.count
        self.clocks, self._arrived = self._arrived, (NOTHING, NOTHING)
        self.time, self._arrival_time = max(self.time, self._arrival_time), 0.0
        task.scheduler.memory.progress += 1
        for waiting in self._waiting:
            waiting.wake()
        self._waiting.clear()

    def wait(self, task: WarpTask | GluonCta, ended: Callable[[], bool], what: str) -> None:
        """Let others run until a phase has ended. what: which one, in readable form."""
        task.scheduler.pause(task)
        site = task.scheduler.memory.sites.here(WAIT_FRAMES)
        while not ended():
            task.waits_for, task.waits_at = what, (self, site)
            self._waiting.append(task)
            task.asleep = True
            task.scheduler.hub.switch()
        task.waits_for, task.waits_at = "", None
        task.time = max(task.time, self.time)
        order, races = task.checked, task.scheduler.memory.races
        if isinstance(order, WarpOrder) and races is not None:
            order.acquire_barrier(self.clocks)
            self._waited.append((order.main, races.waited_at(order.main, self, self.phase, site)))


class _Warps(CtaTask):
    """Warps of a CTA that run one function."""

    waits_for = ""
    waits_at: tuple[Barrier, int] | None = None  # and where it waits
    products_started = 0
    block: GluonCta  # the CTA
    warps: int  # how many they are

    def where(self) -> str:
        if self.waits_at is not None:
            barrier, site = self.waits_at
            place = self.scheduler.memory.sites.short(site)
            return f"{self.name} waits for {self.waits_for} of {barrier}, {place} ({barrier.state()})"
        return f"{self.name} waits for {self.waits_for}" if self.waits_for else super().where()


def _name_of(block: GluonCta, function: Callable[..., Any]) -> str:
    return f"{function.__name__} of rank {block.rank}, CTA {block.program_id} of {block.launch.op}"


class GluonCta(_Warps):
    """A CTA of a Gluon kernel, and those of its warps that have the first role."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.block = self
        self.name = f"rank {self.rank}, CTA {self.program_id} of {self.launch.op}"
        self.warps = int(self.launch.spec.options.get("num_warps", 4))
        self.allocations: list[Allocation] = []
        self.barriers: dict[int, Barrier] = {}  # mbarriers by address, named barriers by their negative number - 1
        self.mbarriers = 0  # how many were initialized
        self._workers: list[WarpTask] = []
        self._ended: list[WarpOrder] = []  # of workers

    def run(self) -> None:
        try:
            super().run()
            self._end()
        finally:
            for each in self.allocations:
                each.free(self.scheduler.memory)
            self.allocations.clear()

    def _end(self) -> None:
        """Its shared memory now belongs to another CTA: nobody may still access it."""
        order, races = self.checked, self.scheduler.memory.races
        if isinstance(order, WarpOrder) and races is not None:
            order.settle()
            site = races.sites.named("the CTA has ended, and its shared memory belongs to another one")
            for each in self.allocations:
                access = Access(each.shadow, each.data, 1, each.address, each.address + each.data.size, True)
                races.store(Actor(order.main, order.main.clock, order), access, site)
        if isinstance(self.order, WarpOrder):
            for workers in self._ended:
                self.order.main.acquire(workers.ended())

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
        before = self.name
        self._rename(_name_of(self, function))
        result = function(*arguments)
        while not all(worker.done for worker in self._workers):
            self.waits_for = "its other warps"
            self.asleep = True
            self.scheduler.hub.switch()
        self.waits_for = ""
        self._rename(before)
        self.time = max(self.time, *(worker.time for worker in self._workers))
        if isinstance(self.order, WarpOrder):
            for worker in self._workers:
                assert isinstance(worker.order, WarpOrder)
                self.order.acquire_barrier(worker.order.arrival())
                self._ended.append(worker.order)
            self.order.barrier()
        self._workers.clear()
        return result

    def _rename(self, name: str) -> None:
        self.name = name
        if isinstance(self.order, WarpOrder):
            self.order.rename(name)


class WarpTask(_Warps):
    """Warps of a CTA with a role of their own."""

    def __init__(self, block: GluonCta, place: int, warps: int, function: Callable[..., Any], arguments: Any):
        order = None
        races, before = block.scheduler.memory.races, block.order
        name = _name_of(block, function)
        if races is not None and isinstance(before, WarpOrder):
            key = (block.rank, block.launch.stream, block.program_id, place)
            order = WarpOrder(races, key, name, before.everything())
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
