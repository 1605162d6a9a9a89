"""Memory, launches and network of simulated ranks; how they exchange values is in sim/exchange.py."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from mkernel.runtime.group import RING_CAPACITY, Group
from mkernel.runtime.network import poll_drained
from mkernel.runtime.world import Clock, Launch, Part, Transfer, exchange_addresses
from mkernel.sim.interrupts import deferred
from mkernel.sim.launches import DEFAULT_STREAM, Execution, RunningLaunch
from mkernel.sim.memory import Keeps, call_when_freed
from mkernel.sim.network import InFlight, Proxy
from mkernel.sim.scheduler import START_OF_TIME
from mkernel.sim.simulator import Simulator

if TYPE_CHECKING:
    from mkernel.net import Statistics
    from mkernel.sim.exchange import SimExchange

MULTICAST = 1 << 56  # where multicast ranges begin: addresses that no memory has


class SimMemory:
    """The Memory of simulated ranks."""

    def __init__(self, simulator: Simulator):
        self._simulator = simulator
        self._next_multicast = MULTICAST

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        self._simulator.allocated += nbytes
        memory = torch.zeros(nbytes + 16, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % 16
        memory = memory[start : start + nbytes]
        self._simulator.allow(memory, rank)
        return memory

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        return exchange_addresses(group, memory.data_ptr())

    def unmap(self, memory: torch.Tensor) -> None:
        pass

    def map_multicast(self, group: Group, memory: torch.Tensor, addresses: Sequence[int]) -> int:
        if not self._simulator.options.multicast or group.nodes > 1 or group.size == 1:
            return 0
        start = self._next_multicast
        self._next_multicast += memory.numel()
        simulated = self._simulator.scheduler.memory
        simulated.allow_multicast(start, memory.numel(), addresses)
        call_when_freed(memory, simulated.forbid_multicast, start)
        return start

    def upload(self, rank: int, words: Sequence[int]) -> torch.Tensor:
        table = self.host_words(rank, len(words))
        table.copy_(torch.tensor(words, dtype=torch.int64, device="cpu"))
        return table

    def host_words(self, rank: int, count: int) -> torch.Tensor:
        return self.allocate(rank, count * 8).view(torch.int64)

    def describe(self, group: Group, segment: int, memory: torch.Tensor, parts: Sequence[Part]) -> None:
        self._simulator.scheduler.memory.mark_segment(memory.data_ptr(), (group.name, segment), parts)

    def empty(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.full(tuple(shape), float("nan"), dtype=dtype, device="cpu")
        self._simulator.scheduler.memory.mark_uninitialized(tensor)
        return tensor

    def maker(self, rank: int, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        return functools.partial(self.empty, rank, like.shape, like.dtype)


class SimClock:
    """The simulated clock, which all ranks share."""

    name: Hashable = "simulated"

    def compare(self) -> list[tuple[int, int, int]]:
        raise AssertionError("there is only one simulated clock")


class SimLauncher:
    """The Launcher of simulated ranks. A call on the default stream returns when it has finished, as calls on CPU
    tensors do; a call on another stream (`Execution.stream`) returns before, as on a GPU."""

    def __init__(self, simulator: Simulator, exchange: SimExchange, network: SimNetwork):
        self.repeater = None
        self.simulator = simulator
        self.execution = Execution(simulator)
        self.calls: dict[Hashable, dict[int, list[str]]] = {}  # group -> rank in it -> what it has launched
        self._exchange, self._network = exchange, network

    def ctas(self, rank: int) -> int:
        return self.simulator.options.ctas

    def open(self, group: Group) -> None:
        assert group.abort_flag is not None
        self.simulator.abort_flags[group.abort_flag.data_ptr()] = group.name

    def stream_key(self, rank: int) -> Hashable:
        return self.execution.stream_key(rank)

    def capturing(self, rank: int) -> bool:
        return False

    def launch(self, rank: int, launch: Launch) -> None:
        group, ahead = launch.group, self._exchange.ahead
        group.confirm()
        self.calls.setdefault(group.name, {}).setdefault(group.rank, []).append(launch.op)
        running = RunningLaunch(self.simulator, rank, launch)
        if launch.uses is not None:
            self._network.allow(group, launch.uses.workspace.segment.number, running.keeps)
        last = group.last_exchange
        running.number = last[1]
        if self._exchange.poll_pending(last, group):
            ahead.add(last, running)
        stream = self.stream_key(rank)
        self.execution.start(running, stream)
        host = self.simulator.scheduler.current_host()
        if stream == DEFAULT_STREAM:
            host.wait_until(lambda: running.done, f"its {launch.op}")
            self.execution.finish_call(running)
            group.check()
        else:
            # nothing may be queued behind a launch that may still be rolled back
            host.wait_until(
                lambda: running.done or not (self._exchange.poll_pending(last, group) or ahead.differs(last)),
                f"the other ranks to call {launch.op}",
            )
            group.check_calls()

    def synchronize(self, rank: int) -> None:
        if not self.poll_idle(rank):
            self.simulator.scheduler.current_host().wait_until(lambda: self.poll_idle(rank), "its streams")
        self.simulator.host_waited_for(rank, *self.execution.streams_of(rank))

    def poll_idle(self, rank: int) -> bool:
        return self.execution.poll_idle(rank)

    def abort(self, group: Group) -> None:
        pass  # an exception that leaves the code of a rank ends the whole simulation

    def clock(self, rank: int) -> Clock:
        return SimClock()


class InlineLauncher:
    """The Launcher of one rank whose CTAs run inside the call, with no tasks beside them."""

    def __init__(self, simulator: Simulator, clock: Clock):
        self.repeater = None
        self._simulator = simulator
        self.execution = Execution(simulator)
        self._clock = clock
        self._aborted = False  # the abort flag was raised, and waiting CTAs have not seen it yet

    def ctas(self, rank: int) -> int:
        return self._simulator.options.ctas

    def open(self, group: Group) -> None:
        assert group.abort_flag is not None
        self._simulator.abort_flags[group.abort_flag.data_ptr()] = group.name

    def stream_key(self, rank: int) -> Hashable:
        return self.execution.stream_key(rank)

    def capturing(self, rank: int) -> bool:
        return False

    def launch(self, rank: int, launch: Launch) -> None:
        launch.group.confirm()
        scheduler = self._simulator.scheduler
        with deferred() as scheduler.poll_interrupt:
            running = RunningLaunch(self._simulator, rank, launch)
            self.execution.start(running, DEFAULT_STREAM)
            try:
                scheduler.run(lambda: running.done, self.execution.task_done)
            except BaseException:
                scheduler.close()  # other groups will use it
                self.execution.queues.clear()
                raise
        self.execution.finish_call(running)
        launch.group.check()

    def synchronize(self, rank: int) -> None:
        pass

    def poll_idle(self, rank: int) -> bool:
        return not self._simulator.scheduler.tasks

    def abort(self, group: Group) -> None:
        if group.abort_flag is not None:
            group.abort_flag[0] = 1
            self._aborted = True

    def poll_abort(self) -> None:
        """Called by the scheduler when all CTAs wait: wake them if `abort` was called, perhaps by another thread."""
        if self._aborted:
            self._aborted = False
            self.wake_all()

    def wake_all(self) -> None:
        """Let all waiting CTAs look at their abort flags."""
        self._simulator.scheduler.memory.changed(progress=True)

    def clock(self, rank: int) -> Clock:
        return self._clock


class SimNetwork:
    """The Network of simulated ranks."""

    def __init__(self, simulator: Simulator):
        self._simulator = simulator
        self._proxies: dict[Hashable, Proxy] = {}  # by group and rank
        self._segments: dict[tuple[Hashable, int, int], torch.Tensor] = {}  # by group, segment and rank
        # what the last launches of a rank keep in a workspace: requests may access this and nothing else
        self._keeps: dict[tuple[Hashable, int, int], deque[Keeps]] = {}
        self._transfers: dict[Hashable, list[Transfer]] = {}  # of groups that are traced

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        # the proxy must not keep the group alive
        name, members, me, rank = group.name, group.members, group.world_rank, group.rank
        simulator = self._simulator

        def segment(rank: int, number: int) -> torch.Tensor | None:
            return self._segments.get((name, number, members[rank])) if rank < len(members) else None

        def check(number: int, start: int, size: int, what: str, posted_by: Callable[[], str]) -> None:
            keeps = self._keeps.get((name, number, me), ())
            simulator.scheduler.memory.check_request(keeps, start, size, what, posted_by)

        def delivered(peer: int, size: int) -> None:
            simulator.traffic.network[me][members[peer]] += size
            simulator.traffic.arrived(members[peer])

        def arrived(request: InFlight) -> None:
            if (name, me) in self._transfers:
                start, end = (START_OF_TIME + int(time) for time in (request.posted, request.arrives))
                size = request.target.numel()
                self._transfers[name, me].append(Transfer(rank, request.peer, size, request.ticket, start, end))

        proxy = Proxy(
            simulator.scheduler, me, rank, ring, segment, check, delivered, arrived, lambda: name in simulator.given_up
        )
        self._proxies[name, me] = proxy
        simulator.scheduler.add(proxy)

    def register(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        key = (group.name, segment, group.world_rank)
        if memory is None:
            del self._segments[key]
            self._keeps.pop(key, None)
        else:
            self._segments[key] = memory

    def allow(self, group: Group, segment: int, keeps: Keeps) -> None:
        """Let requests access what a launch keeps in a segment. Requests of the launch before may still be in the ring,
        but none of earlier ones."""
        self._keeps.setdefault((group.name, segment, group.world_rank), deque(maxlen=2)).append(keeps)

    def reset_ring(self, group: Group) -> None:
        """Reset the request ring of a rank; nothing is in flight. A CTA that posts while its launch is rolled back
        takes a ticket but writes no request, and the proxy would wait for that request for ever."""
        if group._ring is not None and group._posting is not None:
            self._proxies[group.name, group.world_rank].reset()
            memory = self._simulator.scheduler.memory
            memory.reset(group._ring.data_ptr())
            memory.reset(group._posting.data_ptr())
            group._posting.copy_(torch.tensor([0, RING_CAPACITY, RING_CAPACITY], device="cpu"))

    def wait_until_drained(self, group: Group, ring: torch.Tensor) -> None:
        self._simulator.scheduler.current_host().wait_until(lambda: poll_drained(ring), "the network", group.timeout)

    def wait_until_arrived(self, group: Group) -> None:
        group.barrier()  # a request completes when it arrives

    def error(self, group: Group) -> str | None:
        return None

    def statistics(self, group: Group) -> Statistics | None:
        return None

    def record_transfers(self, group: Group, record: bool) -> list[Transfer]:
        seen = self._transfers.pop((group.name, group.world_rank), [])
        if record:
            self._transfers[group.name, group.world_rank] = []
        return seen

    def disconnect(self, group: Group) -> None:
        proxy = self._proxies.pop((group.name, group.world_rank), None)
        if proxy is not None:
            self._simulator.scheduler.remove(proxy)

    def abort(self, group: Group) -> None:
        pass  # an exception that leaves the code of a rank ends the whole simulation
