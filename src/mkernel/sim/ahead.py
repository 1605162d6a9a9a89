"""How simulated ranks compare their calls without waiting for each other.

On GPUs, hosts run ahead of kernels: the kernel of one rank may be in epoch e+1 while that of another is still in e, and
whatever guards the buffers must cope with that. A simulated call returns when it has finished. If ranks also waited for
each other before each launch, all kernels of an epoch would end before the next one began, and no schedule would ever
reveal a missing guard. So a rank launches as soon as it arrives, and the calls are compared when the last rank has
arrived. If they differ, the launches are rolled back: they are told to leave, all ranks raise, and the workspaces and
request rings of the group are made as new, so that it can be used again. On a side stream, where calls return
before they have finished, a rank launches at once, too, but then waits for all ranks: it queues nothing behind a launch
that may be rolled back.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from mkernel.runtime.network import poll_drained

if TYPE_CHECKING:
    from mkernel.runtime.group import Group
    from mkernel.sim.backend import SimNetwork
    from mkernel.sim.exchange import SimExchange
    from mkernel.sim.launches import Execution, RunningLaunch
    from mkernel.sim.simulator import Simulator


class Ahead:
    """The launches that were made before all ranks had arrived."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, list[RunningLaunch]] = {}  # exchange -> the launches of ranks that arrived
        self._different: dict[Any, list[Any]] = {}  # exchange -> what its ranks called, by rank
        self._spoiled: dict[Hashable, Hashable] = {}  # group -> the exchange in which its calls differed

    def connect(self, exchange: SimExchange, execution: Execution, network: SimNetwork) -> None:
        """The parts of the world whose launches these are."""
        self._exchange, self._execution, self._network = exchange, execution, network
        self._simulator: Simulator = execution.simulator
        execution.on_launch_done = self.launch_done

    def add(self, key: Hashable, running: RunningLaunch) -> None:
        """A rank has launched what it announced in an exchange."""
        running.exchange = key
        self._launches.setdefault(key, []).append(running)

    def differs(self, key: Hashable) -> bool:
        """Have all ranks arrived in an exchange, with different calls?"""
        return key in self._different

    def compare(self, key: Any, members: Sequence[int], box: dict[int, Any]) -> None:
        """A rank has arrived in an exchange. If it was the last one and the calls differ, end what was launched."""
        if len(box) < len(members):
            return
        called = [box[member][0] for member in members]
        if key in self._launches and any(call != called[0] for call in called):
            self._different[key] = called
            self._spoiled[key[0]] = key
            for launch in [each for each in self._launches[key] if each.done]:
                self._roll_back(launch)
            self._end_different()
        else:
            self._launches.pop(key, None)

    def _end_different(self) -> None:
        """End the launches whose calls differ, once all calls before them are done."""
        running = [launch for queue in self._execution.queues.values() for launch in queue]
        for key in self._different:
            earlier = [each for each in running if each.spec.group.name == key[0] and each.number < key[1]]
            if not earlier:
                for launch in self._launches[key]:
                    launch.abort()
                self._simulator.scheduler.memory.changed(progress=True)

    def launch_done(self, running: RunningLaunch) -> None:
        """A launch has ended. If its call differed from that of others, its rank raises at its next check."""
        if running.exchange in self._different:
            self._roll_back(running)
        if self._different:
            self._end_different()

    def _roll_back(self, running: RunningLaunch) -> None:
        group = running.spec.group
        group._records.zero_()
        group.set_different_calls(self._different[running.exchange])
        self._launches[running.exchange].remove(running)

    def settle(self, group: Group) -> None:
        """Before the next call of a group whose calls differed: make all workspaces and rings as new, on all ranks."""
        key = self._spoiled.get(group.name)
        if key is None:
            return
        groups = [each for each in self._exchange.groups if each.name == group.name]
        rings = [each._ring for each in groups if each._ring is not None]
        self._simulator.scheduler.current_host().wait_until(
            lambda: group.name not in self._spoiled or (not self._launches[key] and all(map(poll_drained, rings))),
            "the launches of different calls to end",
        )
        if group.name not in self._spoiled:
            return  # another rank has done it
        for each in groups:
            assert each.abort_flag is not None
            each.abort_flag[0] = 0
            self._network.reset_ring(each)
            for workspace in each._workspaces.values():
                workspace.segment.memory[: workspace.data_start] = 0
                workspace.state.zero_()
                self._simulator.scheduler.memory.reset(workspace.segment.memory.data_ptr())
                self._simulator.scheduler.memory.reset(workspace.state.data_ptr())
            self._simulator.scheduler.memory.reset(each._control.memory.data_ptr())
        self._simulator.given_up.discard(group.name)
        del self._spoiled[group.name], self._launches[key], self._different[key]
        self._simulator.scheduler.memory.changed(progress=True)
