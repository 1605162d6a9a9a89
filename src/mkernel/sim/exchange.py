"""How the Python code of simulated ranks exchanges values."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from mkernel.runtime import records
from mkernel.runtime.errors import MKernelError
from mkernel.runtime.group import Group
from mkernel.sim.ahead import Ahead
from mkernel.sim.simulator import Simulator


class SimExchange:
    """The Exchange of simulated ranks."""

    def __init__(self, simulator: Simulator):
        self._simulator = simulator
        self.groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self.ahead = Ahead()
        self._boxes: dict[Hashable, dict[int, Any]] = {}  # exchange -> rank -> its value
        self._readers: dict[Hashable, int] = {}  # exchange -> how many ranks are done with it
        self._refused: dict[Hashable, dict[int, Any]] = {}  # group and rank -> the exchange of what it refused last

    def all_gather(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        box = self._put(rank, members, key, value)
        thread, races = self._simulator.host_thread(rank), self._simulator.races
        if races is not None and thread is not None:
            races.release_exchange(key, thread)
        self._wait_for_all(box, members, rank, what, timeout)
        if races is not None and thread is not None:
            races.acquire_exchange(key, thread)
        self._release(key, len(members))
        return [box[member] for member in members]

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        self._refused[key[0], rank] = self._put(rank, members, key, value)  # type: ignore[index]
        self._release(key, len(members))

    def confirm(self, group: Group, call: Hashable) -> None:
        refused = self._refused.pop((group.name, group.world_rank), None)
        if refused is not None:  # others may have launched what this rank refused: they roll it back first
            what = "the other ranks to make the call that this one refused"
            self._simulator.scheduler.current_host().wait_until(lambda: len(refused) == group.size, what, group.timeout)
        self.ahead.settle(group)
        key = group.next_exchange()
        box = self._put(group.world_rank, group.members, key, (call, None))
        self._release(key, group.size)
        if any(theirs != call for theirs, _ in box.values()):
            self._wait_for_all(box, group.members, group.world_rank, str(call[0]), group.timeout)  # type: ignore[index]
            group.check_same_call([box[member][0] for member in group.members])

    def poll_pending(self, exchange: Hashable, group: Group) -> bool:
        """Are ranks of the group still missing in an exchange?"""
        return len(self._boxes.get(exchange, range(group.size))) < group.size

    def _put(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> dict[int, Any]:
        """Leave a value in the box of this exchange, and return the box."""
        box = self._boxes.setdefault(key, {})
        box[rank] = value
        self.ahead.compare(key, members, box)
        return box

    def _wait_for_all(self, box: dict[int, Any], members: Sequence[int], rank: int, what: str, timeout: float) -> None:
        host = self._simulator.scheduler.current_host()
        if not host.wait_until(lambda: len(box) == len(members), f"the other ranks to call {what}", timeout):
            missing = [i for i, member in enumerate(members) if member not in box]
            raise records.absent(what, members.index(rank), missing, len(members), timeout)

    def _release(self, key: Hashable, members: int) -> None:
        """A member is done with an exchange; the last one deletes it."""
        self._readers[key] = self._readers.get(key, 0) + 1
        if self._readers[key] == members:
            del self._boxes[key], self._readers[key]
            if self._simulator.races is not None:
                self._simulator.races.forget_exchange(key)

    def join(self, group: Group) -> None:
        self.groups.add(group)

    def leave(self, group: Group) -> None:
        pass

    def abandon(self, group: Group, why: str) -> None:
        pass  # an exception that leaves the code of a rank ends the whole simulation

    def report_failure(self, group: Group, failure: MKernelError) -> None:
        pass  # ranks that wait for this one notice by their timeout, or when it ends

    def wait_for_lost_rank(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        return None


class SoloExchange:
    """The Exchange of a single rank."""

    def all_gather(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        return [value]

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        pass

    def confirm(self, group: Group, call: Hashable) -> None:
        pass

    def join(self, group: Group) -> None:
        pass

    def leave(self, group: Group) -> None:
        pass

    def abandon(self, group: Group, why: str) -> None:
        pass

    def report_failure(self, group: Group, failure: MKernelError) -> None:
        pass

    def wait_for_lost_rank(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        return None
