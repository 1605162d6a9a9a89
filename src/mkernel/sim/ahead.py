"""How simulated ranks compare their calls without waiting for each other.

On GPUs, hosts run ahead of kernels: one rank's kernel may be in epoch e+1 while another's is still in e, and whatever
guards the buffers has to stand that. A simulated call returns when it is done. If ranks also waited for each other
before each launch, all kernels of an epoch would have ended before the next began, and no schedule would ever show a
missing guard. So a rank launches as soon as it comes, and the calls are compared when the last rank has come. If they
differ, what was launched is told to leave, all ranks raise, and the group's workspaces and request rings are made as
new, so that it can be used again. On a side stream, where calls return before they are done, a rank launches as soon as
it comes, too, but then waits until all have come: it queues nothing behind what may be taken back.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mkernel.runtime.network import drained

if TYPE_CHECKING:
    from mkernel.runtime.group import Group
    from mkernel.sim.launches import RunningLaunch
    from mkernel.sim.world import SimWorld


class Ahead:
    """The launches that were made before all ranks had come."""

    def __init__(self, world: SimWorld):
        self._world = world
        self._launches: dict[Hashable, list[RunningLaunch]] = {}  # exchange -> those that launched
        self._differ: dict[Any, list[Any]] = {}  # exchange -> what its ranks called, by rank
        self._spoiled: dict[Hashable, Hashable] = {}  # group -> the exchange at which its calls differed

    def launched(self, key: Hashable, running: RunningLaunch) -> None:
        """A rank has launched what it told in an exchange."""
        running.exchange = key
        self._launches.setdefault(key, []).append(running)

    def differ(self, key: Hashable) -> bool:
        """Did all ranks come to an exchange, with different calls?"""
        return key in self._differ

    def compare(self, key: Any, members: Sequence[int], box: dict[int, Any]) -> None:
        """Somebody came to an exchange: if it was the last one, end what was launched if calls differ."""
        if len(box) < len(members):
            return
        called = [box[member][0] for member in members]
        if key in self._launches and any(call != called[0] for call in called):
            self._differ[key] = called
            self._spoiled[key[0]] = key
            for launch in [each for each in self._launches[key] if each.done]:
                self._take_back(launch)
            self._tell_to_leave()
        else:
            self._launches.pop(key, None)

    def _tell_to_leave(self) -> None:
        """Those whose calls differ, as soon as all calls before them are done."""
        running = [launch for queue in self._world._queues.values() for launch in queue]
        for key in self._differ:
            earlier = [each for each in running if each.spec.group.name == key[0] and each.number < key[1]]
            if not earlier:
                for launch in self._launches[key]:
                    launch.leave()
                self._world.scheduler.memory.changed(progress=True)

    def done(self, running: RunningLaunch) -> None:
        """A launch has ended. If its call was not that of the others, its rank is told when it looks."""
        if running.exchange in self._differ:
            self._take_back(running)
        if self._differ:
            self._tell_to_leave()

    def _take_back(self, running: RunningLaunch) -> None:
        group = running.spec.group
        group._records.zero_()
        group.differs(self._differ[running.exchange])
        self._launches[running.exchange].remove(running)

    def settle(self, group: Group) -> None:
        """Before the next call of a group whose calls differed: all workspaces and rings as new, on all ranks."""
        key = self._spoiled.get(group.name)
        if key is None:
            return
        groups = [each for each in self._world._groups if each.name == group.name]
        rings = [each._ring for each in groups if each._ring is not None]
        self._world.scheduler.current_host().block(
            lambda: group.name not in self._spoiled or (not self._launches[key] and all(map(drained, rings))),
            "what differed to end",
        )
        if group.name not in self._spoiled:
            return  # another rank was here first
        for each in groups:
            _flag(each)[0] = 0
            self._world.empty_ring(each)
            for workspace in each._workspaces.values():
                workspace.segment.memory[: workspace.data_start] = 0
                workspace.state.zero_()
                self._world.scheduler.memory.made_as_new(workspace.segment.memory.data_ptr())
                self._world.scheduler.memory.made_as_new(workspace.state.data_ptr())
            self._world.scheduler.memory.made_as_new(each._control.memory.data_ptr())
        self._world.given_up.discard(group.name)
        del self._spoiled[group.name], self._launches[key], self._differ[key]
        self._world.scheduler.memory.changed(progress=True)


def _flag(group: Group) -> torch.Tensor:
    return group._control.memory[:8].view(torch.int64)
