"""The errors of this package."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkernel.runtime.records import WaitRecord


class MKernelError(Exception):
    """Base of all errors of this package."""

    # Do all ranks of the group raise this in the same call? If not, the others have to be notified.
    on_every_rank = False


class ArgumentError(MKernelError, ValueError):
    """A call was refused before anything was launched; the message names the argument and the rule."""


class CommTimeout(MKernelError, RuntimeError):
    """A rank waited longer than the group's timeout for another one.

    `records` are the waits that were given up on this rank, `record` is the most telling one. The group can no longer
    be used; the process and its GPU can: make a new group of the ranks that are still alive (`group.subset`). `others`
    are the records of the other ranks, if these are in the same process (`mk.spawn`).
    """

    def __init__(self, message: str, records: Sequence[WaitRecord] = ()):
        super().__init__(message)
        self.records = tuple(records)
        self.others: tuple[WaitRecord, ...] = ()
        self.group: Hashable = None  # the name of the group whose ranks the records number

    def save(self, path: str | Path) -> None:
        """Write the records to a file, as JSON lines. Give each rank a file of its own; `mkernel why FILE...` then
        shows who waited for whom."""
        from mkernel.runtime import record_files

        record_files.write(path, self.records + self.others)

    @property
    def record(self) -> WaitRecord | None:
        return self.records[0] if self.records else None

    @property
    def is_cause(self) -> bool:
        """Did a wait of this rank time out, rather than end because a wait of another rank had?"""
        return any(record.timed_out for record in self.records)


class RankLost(CommTimeout):
    """A rank of the group has exited, or has left the group in the middle of a call. Raised without waiting for the
    timeout.

    `rank` is its number in the group, `why` is what is known about its loss. As after any CommTimeout, the others can
    continue with `group.subset`.
    """

    def __init__(self, message: str, records: Sequence[WaitRecord] = (), rank: int = -1, why: str = ""):
        super().__init__(message, records)
        self.rank = rank
        self.why = why


class RoutingError(MKernelError, RuntimeError):
    """A kernel found that its tokens cannot be routed. No rank of the group has computed anything, and the group can be
    used again."""


class CapacityError(RoutingError):
    """More rows are routed to a rank than its capacity."""


class TransportError(MKernelError, RuntimeError):
    """The network failed."""

    def save(self, path: str | Path) -> None:
        """Write the failure, and the waits that it ended, to a file, as `CommTimeout.save` does."""
        from mkernel.runtime import chains, record_files

        records = self.__cause__.records if isinstance(self.__cause__, CommTimeout) else ()
        failures = [chains.NetworkFailure(records[0].rank, str(self.args[0]))] if records else []
        record_files.write(path, records, failures)


class SimulatorError(MKernelError, RuntimeError):
    """The simulator found an error in a kernel."""


class RaceError(SimulatorError):
    """Two unordered accesses to the same memory, at least one of which is a store: on a GPU either may come first. The
    message names both lines, who ran them, and what would have ordered them."""


class Deadlock(SimulatorError):
    """All tasks of the simulated cluster wait for each other, and none of them has a timeout."""
