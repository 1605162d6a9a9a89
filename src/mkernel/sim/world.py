"""A cluster inside this process: ranks, CTAs and network proxies as tasks of one scheduler."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from greenlet import greenlet

from mkernel.runtime import chains, records
from mkernel.runtime.errors import CommTimeout, MKernelError, SimulatorError
from mkernel.runtime.group import RING_CAPACITY, Group, set_current
from mkernel.runtime.network import drained
from mkernel.runtime.world import Launch, Links, Part, Transfer, exchange_addresses
from mkernel.sim.ahead import Ahead
from mkernel.sim.interrupts import noted
from mkernel.sim.launches import RunningLaunch, Traffic, tensors_in
from mkernel.sim.memory import Keeps, call_when_freed
from mkernel.sim.network import InFlight, Proxy
from mkernel.sim.order import NOTHING, Clock, Thread, joined
from mkernel.sim.progress import Line
from mkernel.sim.races import Actor, Races
from mkernel.sim.replacements import check_reached
from mkernel.sim.scheduler import START_OF_TIME, CtaTask, HostTask, Options, Scheduler, Task
from mkernel.sim.shadow import SPENT

MUCH_MEMORY = 256 << 20  # bytes of a simulated cluster that are worth a collection of garbage
_left_behind: list[int] = []  # bytes of the clusters that were simulated last
MULTICAST = 1 << 56  # where multicast ranges begin: addresses that no memory has
POISON = 0xFF  # bytes of NaN in bf16, fp16 and fp32


class SimWorld:
    """The simulator's world; see runtime/world.py for what each method promises."""

    scheduler_type = Scheduler

    def __init__(self, nodes: int, gpus_per_node: int, seed: int, options: Options):
        self.size = nodes * gpus_per_node
        self.gpus_per_node = gpus_per_node
        self.links = Links()
        self.seed = seed
        self.options = options
        self.scheduler = self.scheduler_type(seed, options)
        self.traffic = Traffic(self.size)
        self._timeouts: list[CommTimeout] = []
        self._calls: dict[Hashable, dict[int, list[str]]] = {}  # group -> rank in it -> what it has launched
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._proxies: dict[Hashable, Proxy] = {}
        self._mail: dict[Hashable, dict[int, Any]] = {}
        self._refused: dict[Hashable, dict[int, Any]] = {}  # group and rank -> the exchange of what it refused last
        self._ahead = Ahead(self)
        self.launches_done = 0
        self._read: dict[Hashable, int] = {}
        self._queues: dict[tuple[int, Hashable], deque[RunningLaunch]] = {}
        self._segments: dict[tuple[Hashable, int, int], torch.Tensor] = {}
        self.flags: dict[int, Hashable] = {}  # address of an abort flag -> its group
        self.given_up: set[Hashable] = set()  # groups in which a wait was given up
        self._streams_know: dict[tuple[int, Hashable], Clock] = {}  # rank and stream -> of what was done on it
        self._next_multicast = MULTICAST
        self._streams: dict[int, list[Hashable]] = {rank: [] for rank in range(self.size)}
        self._times = [0.0] * self.size  # when each rank's last CTA ended, in the time of a trace
        self.allocated = 0  # bytes
        # what the last launches of a rank kept: by group, segment and rank
        self._keeps: dict[tuple[Hashable, int, int], deque[Keeps]] = {}
        self._transfers: dict[Hashable, list[Transfer]] = {}  # of groups that are traced

    # -- what comes before what

    @property
    def races(self) -> Races | None:
        return self.scheduler.memory.races

    def _host(self, rank: int) -> Thread | None:
        """A rank's Python code, as the race detector knows it."""
        return self.races.thread(("host", rank), f"rank {rank}, Python") if self.races is not None else None

    def clock_of_stream(self, rank: int, stream: Hashable) -> Clock:
        return self._streams_know.get((rank, stream), NOTHING)

    def _waited_for_streams(self, rank: int, *streams: Hashable) -> None:
        """The rank's Python code has waited for all that was launched on these."""
        host = self._host(rank)
        if host is not None:
            for stream in streams:
                host.learn(self.clock_of_stream(rank, stream))

    # -- places

    def device(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def gpu(self, rank: int) -> Hashable:
        return rank  # simulated ranks share nothing

    def node_of(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def ctas(self, rank: int) -> int:
        return self.options.ctas

    # -- the ranks' Python code

    def exchange(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        box = self._tell(rank, members, key, value)
        thread, races = self._host(rank), self.races
        if races is not None and thread is not None:
            races.tell(key, thread)
        host = self.scheduler.current_host()
        if not host.block(lambda: len(box) == len(members), f"the other ranks to call {what}", timeout):
            missing = [place for place, member in enumerate(members) if member not in box]
            raise records.absent(what, members.index(rank), missing, len(members), timeout)
        if races is not None and thread is not None:
            races.hear(key, thread)
        self._has_read(key, len(members))
        return [box[member] for member in members]

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        self._refused[key[0], rank] = self._tell(rank, members, key, value)  # type: ignore[index]
        self._has_read(key, len(members))

    def _tell(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> dict[int, Any]:
        box = self._mail.setdefault(key, {})
        box[rank] = value
        self._ahead.compare(key, members, box)
        return box

    def confirm(self, group: Group, call: Hashable) -> None:
        refused = self._refused.pop((group.name, group.world_rank), None)
        if refused is not None:  # others may have launched what this rank refused: they take it back first
            what = "the other ranks to make the call that this one refused"
            self.scheduler.current_host().block(lambda: len(refused) == group.size, what, group.timeout)
        self._ahead.settle(group)
        key = group.next_exchange()
        box = self._tell(group.world_rank, group.members, key, (call, None))
        self._has_read(key, group.size)
        if any(theirs != call for theirs, _ in box.values()):
            what, host = str(call[0]), self.scheduler.current_host()  # type: ignore[index]
            if not host.block(lambda: len(box) == group.size, f"the other ranks to call {what}", group.timeout):
                missing = [place for place, member in enumerate(group.members) if member not in box]
                raise records.absent(what, group.rank, missing, group.size, group.timeout)
            group.compare([box[member][0] for member in group.members])

    def _has_read(self, key: Hashable, members: int) -> None:
        """The last of the members to read what was exchanged throws it away."""
        self._read[key] = self._read.get(key, 0) + 1
        if self._read[key] == members:
            del self._mail[key], self._read[key]
            if self.races is not None:
                self.races.forget_mail(key)

    def leave(self, group: Group, why: str) -> None:
        pass  # what a rank's code lets through ends all of the simulation

    def broke(self, group: Group, failure: MKernelError) -> None:
        pass  # who waits for a rank that does not come hears of it by its timeout, or by its end

    def lost(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        return None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run each rank's function to its end, and everything that they launched."""
        hosts = [HostTask(self.scheduler, rank, function) for rank, function in enumerate(functions)]
        for host in hosts:
            self.scheduler.add(host)
        line = Line(self)
        self.scheduler.on_step = line.step
        thresholds = gc.get_threshold()
        try:
            gc.set_threshold(10_000, *thresholds[1:])  # a simulation makes many objects, and little garbage in cycles
            self.scheduler.run(
                lambda: all(host.done for host in hosts) and not any(self._queues.values()), self._task_done
            )
        finally:
            gc.set_threshold(*thresholds)
            line.end()
            self.scheduler.close()
        for group in list(self._groups):
            try:
                group.check_unseen()
            except CommTimeout as timeout:
                self._timeouts.append(timeout)
        if self._timeouts:
            cause = min(self._timeouts, key=lambda timeout: not timeout.is_cause)
            raise chains.join(cause, self._timeouts, self._calls.get(cause.group))
        return [host.result for host in hosts]

    # -- memory

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        self.allocated += nbytes
        memory = torch.zeros(nbytes + 16, dtype=torch.uint8)
        start = -memory.data_ptr() % 16
        memory = memory[start : start + nbytes]
        self._allow(memory, rank)
        return memory

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        return exchange_addresses(group, memory.data_ptr())

    def multicast(self, group: Group, memory: torch.Tensor, addresses: Sequence[int]) -> int:
        if not self.options.multicast or group.nodes > 1 or group.size == 1:
            return 0
        start = self._next_multicast
        self._next_multicast += memory.numel()
        self.scheduler.memory.allow_multicast(start, memory.numel(), addresses)
        call_when_freed(memory, self.scheduler.memory.forbid_multicast, start)
        return start

    def upload(self, rank: int, words: Sequence[int]) -> torch.Tensor:
        table = self.host_words(rank, len(words))
        table.copy_(torch.tensor(words, dtype=torch.int64))
        return table

    def host_words(self, rank: int, count: int) -> torch.Tensor:
        return self.allocate(rank, count * 8).view(torch.int64)

    def _allow(self, tensor: torch.Tensor, owner: int | None) -> None:
        self.scheduler.memory.add(tensor.data_ptr(), tensor.numel() * tensor.element_size(), owner)
        call_when_freed(tensor, self.scheduler.memory.remove, tensor.data_ptr())

    def empty(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.full(tuple(shape), float("nan"), dtype=dtype)
        self.scheduler.memory.fresh(tensor)
        return tensor

    def name(self, memory: torch.Tensor, parts: Sequence[Part]) -> None:
        self.scheduler.memory.name(memory.data_ptr(), parts)

    def opened(self, group: Group) -> None:
        self._groups.add(group)
        self.flags[group._control.memory.data_ptr()] = group.name

    def closed(self, group: Group) -> None:
        proxy = self._proxies.pop((group.name, group.world_rank), None)
        if proxy is not None:
            self.scheduler.remove(proxy)

    def register(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        key = (group.name, segment, group.world_rank)
        if memory is None:
            del self._segments[key]
            self._keeps.pop(key, None)
        else:
            self._segments[key] = memory
            self.scheduler.memory.is_segment(memory.data_ptr(), (group.name, segment))

    # -- the network

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        # no reference to the group itself: it shall end with the last one that its user has
        name, members, me = group.name, group.members, group.world_rank

        def segment(rank: int, number: int) -> torch.Tensor | None:
            return self._segments.get((name, number, members[rank])) if rank < len(members) else None

        def check(number: int, start: int, size: int, what: str, posted_by: Callable[[], str]) -> None:
            keeps = self._keeps.get((name, number, me), ())
            self.scheduler.memory.check_request(keeps, start, size, what, posted_by)

        def delivered(peer: int, size: int) -> None:
            self.traffic.network[me][members[peer]] += size
            self.traffic.arrived(members[peer])

        def arrived(request: InFlight) -> None:
            if (name, me) in self._transfers:
                start, end = (START_OF_TIME + int(time) for time in (request.posted, request.arrives))
                size = request.target.numel()
                self._transfers[name, me].append(Transfer(rank, request.peer, size, request.ticket, start, end))

        rank = group.rank
        proxy = Proxy(
            self.scheduler, me, group.rank, ring, segment, check, delivered, arrived, lambda: name in self.given_up
        )
        self._proxies[name, me] = proxy
        self.scheduler.add(proxy)

    def empty_ring(self, group: Group) -> None:
        """Make the request ring of a rank as new. Nothing is in flight. Who posts after it was told to leave takes a
        ticket and writes no request: the proxy would wait for that one for ever."""
        if group._ring is not None and group._posting is not None:
            self._proxies[group.name, group.world_rank].reset()
            self.scheduler.memory.made_as_new(group._ring.data_ptr())
            self.scheduler.memory.made_as_new(group._posting.data_ptr())
            group._posting.copy_(torch.tensor([0, RING_CAPACITY, RING_CAPACITY]))

    def drain(self, rank: int, ring: torch.Tensor, timeout: float) -> None:
        self.scheduler.current_host().block(lambda: drained(ring), "the network", timeout)

    def watch_transfers(self, group: Group, watch: bool) -> list[Transfer]:
        seen = self._transfers.pop((group.name, group.world_rank), [])
        if watch:
            self._transfers[group.name, group.world_rank] = []
        return seen

    def cause_of(self, group: Group, timeout: CommTimeout) -> MKernelError:
        return timeout

    # -- time

    def clock(self, rank: int) -> Hashable:
        return "simulated"

    def compare_clocks(self, rank: int) -> list[tuple[int, int, int]]:
        raise AssertionError("there is only one simulated clock")

    # -- launches

    @contextlib.contextmanager
    def stream(self, rank: int, name: Hashable) -> Iterator[None]:
        """Inside, the rank's launches go to a stream of that name, and calls return before they are
        done, as on a GPU; `group.synchronize()` waits for them. Outside, a call returns when it is
        done, as calls on CPU tensors do."""
        self._streams[rank].append(name)
        try:
            yield
        finally:
            self._streams[rank].pop()

    def stream_key(self, rank: int) -> Hashable:
        stack = self._streams[rank]
        return stack[-1] if stack else "default"

    def capturing(self, rank: int) -> bool:
        return False

    def launch(self, rank: int, launch: Launch) -> None:
        launch.group.confirm()
        self._calls.setdefault(launch.group.name, {}).setdefault(launch.group.rank, []).append(launch.op)
        running = RunningLaunch(self, rank, launch)
        if launch.uses is not None:
            key = (launch.group.name, launch.uses.workspace.segment.number, rank)
            # requests of the launch before may still be in the ring, but of none before that
            self._keeps.setdefault(key, deque(maxlen=2)).append(running.keeps)
        last = launch.group.last_exchange
        running.number = last[1]
        if self._not_all_came(last, launch.group):
            self._ahead.launched(last, running)
        self._lend(running, self.stream_key(rank))
        place = (rank, running.stream)
        queue = self._queues.setdefault(place, deque())
        queue.append(running)
        if len(queue) == 1:
            running.start_more(self._times[rank])
        host = self.scheduler.current_host()
        if place[1] == "default":
            host.block(lambda: running.done, f"its {launch.op}")
            self._returned(running)
            launch.group.check()
        else:
            # what is queued next must not run beside what may be taken back
            host.block(
                lambda: running.done or not (self._not_all_came(last, launch.group) or self._ahead.differ(last)),
                f"the other ranks to call {launch.op}",
            )
            launch.group.check_calls()

    def _not_all_came(self, exchange: Hashable, group: Group) -> bool:
        return len(self._mail.get(exchange, range(group.size))) < group.size

    def _lend(self, running: RunningLaunch, stream: Hashable) -> None:
        """The kernel may touch the tensors it was given, while it runs."""
        host = self._host(running.rank)
        running.stream = stream
        if host is not None and self.races is not None:
            running.clock = host.told()
            running.first_event = self.races.now
        launch = running.spec
        tensors = dict(tensors_in(launch.arguments))
        running.loans = self.scheduler.memory.lend(
            tensors, running.rank, lambda name: name != "context" and name not in launch.inputs
        )

    def _returned(self, running: RunningLaunch) -> None:
        """A call has returned: the rank's Python code may do with its tensors what it likes. Those in the symmetric
        heap other ranks' kernels can reach, too."""
        self._waited_for_streams(running.rank, running.stream)
        host = self._host(running.rank)
        if host is None or self.races is None or running.given_up():
            return
        site = self.races.sites.named("Python code, after the call has returned")
        for piece, region in running.loans:
            if piece.is_user_s:
                access = self.scheduler.memory.span(region.start, region.end - region.start, "Python code")
                self.races.store(Actor(host, host.clock), access, site)

    def synchronize(self, rank: int) -> None:
        def idle() -> bool:
            return not any(queue for (owner, _), queue in self._queues.items() if owner == rank)

        if not idle():
            self.scheduler.current_host().block(idle, "its streams")
        self._waited_for_streams(rank, *(stream for owner, stream in self._queues if owner == rank))

    def _task_done(self, task: Task) -> None:
        if task.failure is not None:
            # ranks that time out together: all may tell, then the one whose wait ran out is raised
            if not isinstance(task.failure, CommTimeout):
                raise task.failure
            self._timeouts.append(task.failure)
        if not isinstance(task, CtaTask):
            return
        running: RunningLaunch = task.launch
        running.ended += 1
        if task.order is not None:
            running.end = joined(running.end, task.order.ended())
        self._times[running.rank] = max(self._times[running.rank], task.time)
        running.start_more(task.time)
        if running.ended == running.grid:
            self._launch_done(running)

    def _launch_done(self, running: RunningLaunch) -> None:
        if not running.given_up():
            running.check_epoch()
            self._check_results(running)
        self._streams_know[running.rank, running.stream] = running.end
        uses = running.spec.uses
        if uses is not None:
            workspace = uses.workspace
            used = workspace.data if uses.whole else workspace.half(int(workspace.state[0]) % 2)
            for start, end in uses.free:
                if end > start:
                    used[start:end] = POISON
                    self._spend(running, used[start:end])
        self.scheduler.memory.take_back(running.loans)
        running.done = True
        self.launches_done += 1
        for queue in self._queues.values():
            if queue and queue[0] is running:
                queue.popleft()
                if queue:
                    queue[0].start_more(self._times[running.rank])
        self._ahead.done(running)

    def _spend(self, running: RunningLaunch, used: torch.Tensor) -> None:
        """Nobody may rely on this any more, and nobody may still be reading it."""
        races, start, size = self.races, used.data_ptr(), used.numel()
        piece = self.scheduler.memory.piece_of(start)
        if races is None or piece is None or running.given_up():
            return
        key = running.rank, running.stream
        thread = races.thread(("end", key), f"rank {running.rank}, the end of {running.op}")
        thread.begin(self._streams_know[key])
        access = self.scheduler.memory.span(start, size, "the end of a launch")
        site = races.sites.named("what a launch was given for itself is overwritten when it has ended")
        races.store(Actor(thread, thread.clock), access, site)
        piece.set(start, start + size, SPENT)
        self._streams_know[key] = thread.told()

    def _check_results(self, running: RunningLaunch) -> None:
        """Every element of a result must have been written."""
        if self.races is None:
            return
        for piece, region in running.loans:
            if region.name in running.spec.results:
                missing = piece.unwritten_since(region, running.first_event)
                if missing is not None:
                    raise SimulatorError(
                        f"{running.op}: the launch on rank {running.rank} has ended, and nobody has written "
                        f"{region.name}{region.place(missing)}"
                    )


class InlineWorld(SimWorld):
    """One simulated rank in the caller's own code, with no tasks around it: for mk.init()."""

    def exchange(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        return [value]

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        pass  # there is nobody else

    def confirm(self, group: Group, call: Hashable) -> None:
        pass

    def launch(self, rank: int, launch: Launch) -> None:
        launch.group.confirm()
        with noted() as self.scheduler.look_for_interrupt:
            self.scheduler.hub = greenlet.getcurrent()
            running = RunningLaunch(self, rank, launch)
            self._lend(running, "default")
            self._queues[(rank, "default")] = deque([running])
            running.start_more(self._times[rank])
            try:
                self.scheduler.run(lambda: running.done, self._task_done)
            except BaseException:
                self.scheduler.close()  # other groups of this world will use it
                raise
        self._returned(running)
        launch.group.check()

    def synchronize(self, rank: int) -> None:
        pass


def single_rank(timeout: float) -> Group:
    """A group of one simulated rank."""
    world = InlineWorld(1, 1, 0, Options())
    return Group(world, [0], 0, timeout=timeout, name="world")


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
        gc.collect()  # a world is full of cycles, few objects but large ones
    _left_behind.clear()
    world = SimWorld(nodes, gpus_per_node, seed, options or Options())
    everyone = range(world.size)

    def of(rank: int) -> Callable[[], Any]:
        def run() -> Any:
            group = Group(world, everyone, rank, timeout=timeout, name="world")
            set_current(group)
            return function(group, *args)

        return run

    try:
        with (  # as they were, when the last rank has ended
            torch.set_grad_enabled(torch.is_grad_enabled()),
            torch.inference_mode(torch.is_inference_mode_enabled()),
        ):
            results = world.run([of(rank) for rank in everyone])
    except Exception as failure:
        check_reached(world.options.replace, world.scheduler.replaced, failure)
        schedule = world.options.schedule
        which = f"seed={seed}" if schedule is None else f"sim=Options(schedule={schedule!r})"
        how = f"mkernel simulator: {nodes} x {gpus_per_node} ranks failed with {which}, and will again with it"
        print(how, file=sys.stderr)
        if hasattr(failure, "add_note"):
            failure.add_note(how)
        raise
    else:
        check_reached(world.options.replace, world.scheduler.replaced)
        return results
    finally:
        _left_behind.append(world.allocated)
