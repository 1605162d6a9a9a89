"""Cooperative tasks in a reproducible order: CTAs, the Python code of ranks, and network proxies.

One task runs at a time. Another one may run at every atomic operation of a CTA, every read of the clock and every
blocking call in the Python code of a rank. `sim/choices.py` picks the next task, from a seed or by the name of a
schedule: the same seed or name gives the same order, so any failure can be replayed. CTAs and proxies are greenlets of
the thread that runs the scheduler. The Python code of each rank has a thread of its own (`sim/rank_thread.py`).

A CTA that waits sleeps until one of the words that it polls, or the clock, has changed; the Python code of a rank and
proxies sleep until something has happened that they may wait for. So waiting costs nothing. When no task can run, late
ranks start; then the clock advances, so that timeouts expire. Otherwise the clock stands still: a rank that is slow but
alive never times out.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import greenlet
from triton._C.libtriton import interpreter as _native

from mkernel.runtime.errors import ArgumentError, Deadlock
from mkernel.sim.choices import ONE_CTA, Choices, Schedule, choices_of
from mkernel.sim.interpreter import run as run_kernel
from mkernel.sim.memory import DESCRIPTOR, PLAIN, Memory
from mkernel.sim.order import Cta
from mkernel.sim.races import Races
from mkernel.sim.replacements import check_replacements
from mkernel.sim.tasks import HostTask, Task

FIRST_TICK = 1_000  # nanoseconds the clock advances when nothing else can happen; doubled each time ...
LONGEST_TICK = 2**40  # ... up to this, 18 minutes
PATIENCE = 500  # polls, or ticks, without progress after which there will be none
REPEATED = 1000  # of this many loads of constants, one is not cached
SPINS = 64  # equal loads in a row that count as polling
IDLE_SECONDS = 1e-4
CLOCK_SECONDS = 0.05  # seconds between two reads of the clock by CTAs that wait
START_OF_TIME = 1_800_000_000 * 10**9  # like a GPU's timer: far from zero

# Speeds in a trace. Invented: only their proportions resemble a GPU's.
PRODUCTS_PER_NANOSECOND = 64  # computed by a CTA
BYTES_PER_NANOSECOND = 8  # loaded or stored by a CTA


@dataclass(frozen=True)
class Options:
    """How the simulator runs a cluster.

    slow: rank -> the likelihood of its tasks to be chosen, relative to 1.0.
    late: rank -> how many steps the others take before its first one.
    resident: how many CTAs of a launch run at the same time; None means all of them.
    ctas: how many CTAs a launch has by default.
    multicast: is there multicast between the ranks of a node?
    races: detect races, which takes time; see docs/testing.md.
    capability: plan calls as for a GPU of this compute capability, with its kernels and tiles: (9, 0) for Hopper, on
        which some calls run Gluon kernels; None for small tiles and the portable kernels.
    schedule: the name of a schedule (see sim/choices.py), instead of a seed.
    replace: @triton.jit functions and those that kernels call instead, to see that a broken protocol is found. A run
        that never calls one of them is an error.
    """

    def __post_init__(self) -> None:
        check_replacements(self.replace)
        if self.schedule is not None and Schedule.parse(self.schedule).kind == ONE_CTA:
            object.__setattr__(self, "resident", 1)
        for name in ("slow", "late"):
            if not isinstance(getattr(self, name), Mapping):
                raise ArgumentError(
                    f"{name} must be a dict, such as {{0: ...}} for rank 0; got {getattr(self, name)!r}"
                )
        for rank, share in self.slow.items():
            if not isinstance(share, int | float) or not 0 < share < math.inf:
                raise ArgumentError(
                    f"slow[{rank}] must be finite and more than 0 (or the rank would never run), got {share!r}"
                )
        for rank, steps in self.late.items():
            if not isinstance(steps, int) or steps < 0:
                raise ArgumentError(f"late[{rank}] must be a whole number of steps, 0 or more; got {steps!r}")
        for name, value in (("ctas", self.ctas), ("resident", 1 if self.resident is None else self.resident)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name} must be a whole number, 1 or more; got {value!r}")

    def check_ranks(self, size: int) -> None:
        """Refuse options for ranks that a cluster of this size does not have: they would change nothing."""
        for name in ("slow", "late"):
            for rank in getattr(self, name):
                if rank not in range(size):
                    raise ArgumentError(f"{name} names rank {rank!r}, but the ranks are 0 to {size - 1}")
        if self.schedule is not None:
            Schedule.parse(self.schedule).check_ranks(size)

    slow: dict[int, float] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    resident: int | None = None
    ctas: int = 6
    multicast: bool = False
    races: bool = True
    capability: tuple[int, int] | None = None
    schedule: str | None = None
    replace: Mapping[Any, Any] = field(default_factory=dict)


class CtaTask(Task):
    """One CTA of a launch; all effects of the interpreted kernel go through here."""

    def __init__(
        self, scheduler: Scheduler, rank: int, launch: Any, program_id: int, num_programs: int, time: float = 0.0,
        order: Cta | None = None,
    ):  # fmt: skip
        super().__init__(scheduler, rank, f"rank {rank}, {launch.op}, CTA {program_id}")
        self.label = f"{rank}.cta{program_id}"
        self.time = time  # see Scheduler.trace_time
        self.launch = launch
        self.program_id = program_id
        self.num_programs = num_programs
        self.order = order  # what happened before; None if races are not detected
        self.unused_from: dict[Any, int] = {}  # descriptor -> its first row that is not used
        self.replaced = scheduler.replaced
        self.poll_counts: dict[int, int] = {}  # word -> how often it was polled since the last wait for it ended
        self.polled: dict[Any, int] = {}  # address -> value, since the CTA last did something else
        self.seen_nothing_new: tuple[int, int] | None = None
        self.last_poll: tuple[int, int] | None = None
        self.polls_now = 0  # at this state of memory and clock
        self.extra_polls = 0  # how often it was allowed to poll again while the clock stood still
        self.aborted = False  # all its waits end at once, without waiting for the clock
        self.last_load: tuple[int, bytes] | None = None
        self.repeated = 0  # loads of constants
        self.spins = 0

    def run(self) -> None:
        run_kernel(self, self.launch.function, **self.launch.arguments)

    def ready(self) -> bool:
        return self.aborted or self.seen_nothing_new != (self.scheduler.memory.writes, self.scheduler.clock)

    def wake(self) -> None:
        if self.asleep:
            self.asleep = False
            self.scheduler.forget_watch(self, self.polled)
            self.seen_nothing_new = None

    def where(self) -> str:
        polls = ", ".join(
            f"{self.scheduler.memory.describe(a)} = {v}" for a, v in self.polled.items() if isinstance(a, int)
        )
        return f"{self.name} polls {polls}" if polls else self.name

    # what the interpreter calls

    @property
    def checked(self) -> Cta | None:
        """What happened before, for the race detector. None once its group has given up: nothing is ordered then."""
        return None if self.launch.given_up() else self.order

    def constant(self, address: np.uint64, dtype: np.dtype) -> Any:
        """A cached number that this or another CTA of the launch has loaded from memory that no kernel changes; None if
        it must be loaded. Now and then it must, so that an endless loop is found."""
        value = self.launch.constants.get((address, dtype))
        self.repeated += 1
        if value is None or self.repeated % REPEATED == 0:
            return None
        self.time += dtype.itemsize / BYTES_PER_NANOSECOND
        return value

    def load(
        self, addresses: Any, mask: Any, other: Any, dtype: np.dtype, descriptor: bool, volatile: bool = False
    ) -> np.ndarray:
        path = DESCRIPTOR if descriptor else PLAIN
        result, touched = self.scheduler.memory.load(self.checked, addresses, mask, other, dtype, path, volatile)
        if not descriptor:  # loads through descriptors are asynchronous
            self.time += result.nbytes / BYTES_PER_NANOSECOND
        if result.size == 1:
            if touched and touched[0].shadow.constant:
                self.launch.constants[addresses.reshape(-1)[0], dtype] = result.reshape(-1)[0]
            self._loaded_one(int(np.ravel(addresses)[0]), result)
        else:
            self.launch.on_load(touched)
        return result

    def _loaded_one(self, address: int, result: np.ndarray) -> None:
        """Kernels should not poll with plain loads; one that does must not hang the simulator."""
        self.launch.on_load_one(address)
        same = self.last_load == (address, result.tobytes())
        self.spins = self.spins + 1 if same else 0
        self.last_load = (address, result.tobytes())
        if self.spins > SPINS:
            self.scheduler.pause(self)
            # not as a watched word: it may have another size
            self._polled({("load", address): int(result.view(np.uint8).sum())})

    def store(self, addresses: Any, values: Any, mask: Any, descriptor: bool = False) -> None:
        self._stores(np.size(addresses) * values.itemsize)
        path = DESCRIPTOR if descriptor else PLAIN
        self.launch.on_store(self.scheduler.memory.store(self.checked, addresses, values, mask, path))

    def _stores(self, nbytes: int) -> None:
        self.polled.clear()
        self.extra_polls = 0
        self.time += nbytes / BYTES_PER_NANOSECOND

    def store_everywhere(self, addresses: np.ndarray, values: np.ndarray) -> None:
        self._stores(values.nbytes)
        self.launch.on_store_everywhere(values.nbytes)
        self.scheduler.memory.store_everywhere(self.checked, addresses, values)

    def load_from_all(self, addresses: np.ndarray, dtype: np.dtype) -> list[np.ndarray]:
        nbytes = addresses.size * dtype.itemsize
        self.time += nbytes / BYTES_PER_NANOSECOND
        self.launch.on_load_sum(nbytes)
        return self.scheduler.memory.load_from_all(self.checked, addresses, dtype)

    def fence_aliases(self) -> None:
        if self.order is not None:
            self.order.fence_multicast()

    def barrier(self) -> None:
        if self.order is not None:
            self.order.barrier()

    def acquire_for_descriptors(self) -> None:
        if self.order is not None:
            self.order.fence_descriptors()

    def complete_descriptor_stores(self) -> None:
        if self.order is not None:
            self.order.complete_descriptors()

    def waited_for(self, addresses: np.ndarray, mask: np.ndarray, expected: np.ndarray) -> None:
        """A wait has ended: these words have reached the expected values."""
        races, order = self.scheduler.memory.races, self.checked
        addresses, mask, expected = np.broadcast_arrays(addresses, mask, expected)
        words = addresses[mask].tolist()
        late = any(self.poll_counts.pop(word, 1) > 1 for word in words)
        if races is not None and order is not None:
            races.waited(order, words, expected[mask].tolist(), addresses.size == 1, late)

    def trace_time(self) -> int:
        return self.scheduler.trace_time(self)

    def on_dot(self, products: int) -> None:
        self.time += products / PRODUCTS_PER_NANOSECOND
        self.scheduler.memory.progress += 1
        self.extra_polls = 0
        self.launch.on_dot()

    def clock(self) -> int:
        self.scheduler.pause(self)
        now = self.scheduler.time_now()
        self._polled({"clock": now})
        return now

    def atomic(
        self, addresses: np.ndarray, mask: np.ndarray, size: int, acquire: bool, release: bool, one_gpu: bool,
        only_looks: bool, act: Callable[[], Any],
    ) -> Any:  # fmt: skip
        scheduler, memory = self.scheduler, self.scheduler.memory
        scheduler.pause(self)
        chosen = addresses[mask]  # these may lie in the memory of different ranks
        words = chosen.tolist()
        order = self.checked
        if words:
            memory.atomic(order, chosen, size, changes=not only_looks)
        before = act()
        if len(words) == addresses.size == 1:
            old = [before.item()]
            now = [np.frombuffer(ctypes.string_at(words[0], size), dtype=before.dtype).item()]
        else:
            old = before[mask].tolist()
            fill = np.zeros(addresses.shape, dtype=before.dtype)
            now = _native.load(addresses, mask, fill, before.dtype)[mask].tolist()
        seen = dict(zip(words, old, strict=True))
        if only_looks and now != old:  # a maximum that was one
            memory.atomic(order, chosen, size, changes=True)
        if order is not None and memory.races is not None:
            memory.races.scopes(self.rank, words, one_gpu)
            self._orders(memory.races, order, words, addresses.size == 1, old, now, acquire, release)
        if now == old:
            self._polled(seen)
        else:
            if release:
                for address in seen:
                    scheduler.signalled(address, self.time)
            memory.changed(not only_looks, words)
            if not only_looks:
                self.polled.clear()
                self.launch.on_change(words)
        if acquire:
            self.time = max(self.time, *(scheduler.times.get(address, 0.0) for address in seen), 0.0)
        return before

    def _orders(
        self, races: Races, order: Cta, words: list[int], by_all: bool, before: list[int], now: list[int],
        acquire: bool, release: bool,
    ) -> None:  # fmt: skip
        """The acquires and releases of an atomic operation. by_all: it is a scalar operation."""
        if acquire:
            for word, old, value in zip(words, before, now):
                order.acquired(word, races.clock_of(word), by_all, max(old, value))
                self.poll_counts[word] = self.poll_counts.get(word, 0) + 1
        if release:
            clock = order.released()
            for word, old, value in zip(words, before, now):
                races.release(order.main, clock, word, old, value)

    def _polled(self, seen: Mapping[Any, int]) -> None:
        """It has polled these words. Once it has polled everything that it waits for, including the clock, and nothing
        has changed, it sleeps."""
        now = (self.scheduler.memory.writes, self.scheduler.clock)
        self.polls_now = self.polls_now + 1 if now == self.last_poll else 1
        self.last_poll = now
        same = all(self.polled.get(address) == value for address, value in seen.items())
        if any(self.polled.get(address, value) != value for address, value in seen.items()):
            self.polled.clear()  # a new value: it may do something else now
        self.polled.update(seen)
        # if it polls several words, another one may have changed: let it poll each of them
        if same and (self.polls_now > len(self.polled) or not self.sees_a_change()):
            if "clock" in self.polled and not self.aborted and not self.sees_a_change():
                self.asleep = True
                self.scheduler.watch(self, self.polled)
            else:
                self.seen_nothing_new = now

    def sees_a_change(self) -> bool:
        """Has a word changed that the CTA waits for? Then it may run again."""
        for address, value in self.polled.items():
            if isinstance(address, int) and ctypes.c_int64.from_address(address).value != value:
                self.seen_nothing_new = None
                return True
        return self.polled.get("clock", self.scheduler.clock) != self.scheduler.clock

    def may_poll_again(self) -> bool:
        """A CTA that never reads the clock may just be polling many signals that have arrived, so it may poll a few
        more times without progress. One that reads the clock is waiting."""
        if self.asleep or "clock" in self.polled or self.extra_polls >= PATIENCE:
            return False
        self.extra_polls += 1
        self.seen_nothing_new = None
        return True


class Scheduler:
    """Runs tasks until the Python code of all ranks has ended."""

    sees_all_accesses = True  # to memory, so that it can detect races

    def __init__(self, seed: int, options: Options):
        self.choices: Choices = choices_of(options.schedule, seed)
        self.rng = self.choices.rng
        self.options = options
        self.memory = Memory(self.rng, Races() if options.races and self.sees_all_accesses else None)
        self.clock = START_OF_TIME
        self.steps = 0
        self.replaced: set[Any] = set()  # functions of `Options.replace` that were called
        self.tasks: list[Task] = []
        self.late = dict(options.late)
        self.hub = greenlet.getcurrent()
        self._removed: list[Task] = []  # by the Python code of ranks
        self._added = 0
        self._tick, self._ticks = FIRST_TICK, 0
        self._progress_at_tick = -1
        self.poll_interrupt: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None
        self._watched: list[int] = []  # addresses that sleeping tasks wait for, sorted
        self._watchers: dict[int, list[Task]] = {}  # by address
        self.memory.on_change = self._changed
        self.times: dict[int, float] = {}  # address of a signal -> the trace time at which it was raised last

    def time_now(self) -> int:
        """What a CTA reads from the clock."""
        return self.clock

    def trace_time(self, task: CtaTask) -> int:
        """The time in a trace, in nanoseconds. Every CTA has a clock of its own, as if all ran at the same time:
        computing and copying advance it, and seeing a signal moves it to at least the time at which the signal was
        raised."""
        return START_OF_TIME + int(task.time)

    def signalled(self, address: int, time: float) -> None:
        """A signal was raised at this trace time."""
        self.times[address] = max(time, self.times.get(address, 0.0))

    # -- sleep

    def watch(self, task: Task, addresses: Iterable[Any]) -> None:
        """Wake the task when one of these words has changed."""
        for address in addresses:
            if isinstance(address, int):
                if address not in self._watchers:
                    self._watchers[address] = []
                    bisect.insort(self._watched, address)
                self._watchers[address].append(task)

    def forget_watch(self, task: Task, addresses: Iterable[Any]) -> None:
        for address in addresses:
            watchers = self._watchers.get(address)
            if watchers is not None and task in watchers:
                watchers.remove(task)
                if not watchers:
                    del self._watchers[address]
                    del self._watched[bisect.bisect_left(self._watched, address)]

    def _changed(self, where: Sequence[int] | range | None) -> None:
        """Memory has changed: these words, somewhere in this range, or anywhere."""
        if not self._watched:
            return
        if where is None:
            self.wake_all()
        elif isinstance(where, range):
            first = bisect.bisect_left(self._watched, where.start)
            for address in self._watched[first : bisect.bisect_left(self._watched, where.stop)]:
                self._wake(address)
        else:
            for address in where:
                if address in self._watchers:
                    self._wake(address)

    def _wake(self, address: int) -> None:
        for task in list(self._watchers.get(address, ())):
            task.wake()

    def wake_all(self) -> None:
        for task in self.tasks:
            task.wake()

    def advance(self, clock: int) -> None:
        """Advance the clock, and wake everything that waits."""
        self.clock = clock
        self.wake_all()

    def add(self, task: Task) -> None:
        task.number = self._added
        self._added += 1
        self.tasks.append(task)

    def remove(self, task: Task) -> None:
        """End a task without running any more of its code. Called by the Python code of a rank."""
        host = self.current_host()
        self.tasks.remove(task)
        task.wake()  # removes its watches
        self._removed.append(task)  # only the thread of a greenlet can end it
        host.thread.wait()

    def current_host(self) -> HostTask:
        for task in self.tasks:
            if isinstance(task, HostTask) and task.thread.is_current():
                return task
        raise RuntimeError("this must be called from the Python code of a rank")

    def pause(self, task: CtaTask) -> None:
        """A point where another task may run."""
        self.steps += 1
        if not task.asleep and task.ready() and self.choices.stays(task):
            return
        self.hub.switch()

    def run(self, finished: Callable[[], bool], on_done: Callable[[Task], None]) -> None:
        """Run tasks until `finished`, and call `on_done` with each task that ends."""
        self.hub = greenlet.getcurrent()
        while not finished():
            self.poll_interrupt()
            self.on_step()
            ready = [t for t in self.tasks if not t.asleep and (t.seen_nothing_new is None or t.ready())]
            if self.late:
                ready = [task for task in ready if self.late.get(task.rank, 0) <= self.steps]
            if not ready:
                self._nothing_can_run()
                continue
            task = self.choices.pick(ready, self.options.slow)
            self.steps += 1
            task.resume()
            while self._removed:
                self._removed.pop().end()
            if task.done:
                self.tasks.remove(task)
                on_done(task)
            if task.done or task.seen_nothing_new == ():  # only these can do what the Python code of a rank waits for
                for host in self.tasks:
                    if host.asleep and isinstance(host, HostTask):
                        host.asleep = False

    def _nothing_can_run(self) -> None:
        ctas = [task for task in self.tasks if isinstance(task, CtaTask)]
        if any([task.may_poll_again() for task in ctas]):
            return
        if any(steps > self.steps for steps in self.late.values()):
            self.steps = min(steps for steps in self.late.values() if steps > self.steps)
            return
        if self.memory.progress != self._progress_at_tick:
            self._tick, self._ticks = FIRST_TICK, 0
        if self._ticks > PATIENCE:
            raise Deadlock(
                "no task can run, and none that waits reads the clock, so no timeout will end this (use `wait` of "
                "lang/signals.py). Tasks: " + "; ".join(task.where() for task in self.tasks)
            )
        self.advance(self.clock + self._tick)
        self._tick = min(2 * self._tick, LONGEST_TICK)
        self._ticks += 1
        self._progress_at_tick = self.memory.progress

    def close(self) -> None:
        """End all remaining tasks without running any of their code."""
        with contextlib.ExitStack() as ends:  # Ctrl-C may interrupt one of them, but not those behind it
            ends.callback(self.tasks.clear)
            ends.callback(self._removed.clear)
            for task in reversed(self.tasks + self._removed):
                ends.callback(task.wake)  # removes its watches
                ends.callback(task.end)


class RealTimeScheduler(Scheduler):
    """For a rank whose peers are other processes: when none of its tasks can run, it waits for them. It polls the words
    that its CTAs wait for without running the CTAs, so that a waiting rank leaves the CPU to others. The clock is the
    real one."""

    sees_all_accesses = False

    def __init__(self, seed: int, options: Options):
        super().__init__(seed, options)
        self.clock = time.monotonic_ns()
        self.on_idle: Callable[[], None] = lambda: None

    def time_now(self) -> int:
        # The clock must be fresh when a wait begins, or the wait would seem to have started earlier. But it advances in
        # steps, since every change wakes the CTAs that read it.
        if time.monotonic_ns() - self.clock > CLOCK_SECONDS * 1e9:
            self.advance(time.monotonic_ns())
        return self.clock

    def trace_time(self, task: CtaTask) -> int:
        return time.monotonic_ns()  # the same in all processes of this machine

    def _nothing_can_run(self) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < CLOCK_SECONDS:
            self.on_idle()
            changed = [task for task in self.tasks if isinstance(task, CtaTask) and task.sees_a_change()]
            if changed:
                for task in changed:
                    task.wake()
                return
            time.sleep(IDLE_SECONDS)
        self.advance(time.monotonic_ns())
