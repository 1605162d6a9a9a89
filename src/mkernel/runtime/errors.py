"""What can go wrong, in words that help."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkernel.runtime.records import WaitRecord


class MKernelError(Exception):
    """Base of all errors of this package."""

    # Do all ranks of the group raise this, in the same call? If not, the others have to be told.
    on_every_rank = False


class ArgumentError(MKernelError, ValueError):
    """A call was refused before anything was launched; the message names the argument and the rule."""


class CommTimeout(MKernelError, RuntimeError):
    """A rank waited longer than the group's timeout for another one.

    `record` is the wait that tells most, `records` are all that were given up on this rank. The
    group cannot be used any more; the process and its GPU can: make a new group with those ranks
    that are still there (`group.subset`). `others` are the records of the other ranks, where these are
    in the same process (`mk.spawn`).
    """

    def __init__(self, message: str, records: Sequence[WaitRecord] = ()):
        super().__init__(message)
        self.records = tuple(records)
        self.others: tuple[WaitRecord, ...] = ()
        self.group: Hashable = None  # the name of the group whose ranks the records number

    def save(self, path: str | Path) -> None:
        """Write the records to a file, as JSON lines. `mkernel why FILE...` shows from the files of all
        ranks who waited for whom; a name with the rank in it keeps them apart."""
        from mkernel.runtime import record_files

        record_files.write(path, self.records + self.others)

    @property
    def record(self) -> WaitRecord | None:
        return self.records[0] if self.records else None

    @property
    def is_cause(self) -> bool:
        """Did a wait of this rank run out, rather than end because another rank's had?"""
        return any(record.timed_out for record in self.records)


class RankLost(CommTimeout):
    """A rank of the group has ended, or has left the group in the middle of a call; nobody waited for the timeout.

    `rank` is its number in the group, `why` what is known of its end. As after any CommTimeout, the others can go on
    with `group.subset`.
    """

    def __init__(self, message: str, records: Sequence[WaitRecord] = (), rank: int = -1, why: str = ""):
        super().__init__(message, records)
        self.rank = rank
        self.why = why


class RoutingError(MKernelError, RuntimeError):
    """A kernel found that its tokens can not be routed. Nothing was computed, on any rank of the group, and
    the group can be used again."""


class CapacityError(RoutingError):
    """More rows go to a rank than its capacity."""


class TransportError(MKernelError, RuntimeError):
    """The network could not do what it was asked to do."""

    def save(self, path: str | Path) -> None:
        """Write what is known to a file, as `CommTimeout.save` does: the failure, and the waits that it ended."""
        from mkernel.runtime import chains, record_files

        records = self.__cause__.records if isinstance(self.__cause__, CommTimeout) else ()
        failures = [chains.NetworkFailure(records[0].rank, str(self.args[0]))] if records else []
        record_files.write(path, records, failures)


class SimulatorError(MKernelError, RuntimeError):
    """The simulator found a kernel doing something that no GPU would forgive."""


class RaceError(SimulatorError):
    """Two accesses to the same memory, at least one of which stores, that nothing orders: on a GPU either may come
    first. The message names both lines, who ran them, and what would have ordered them."""


class Deadlock(SimulatorError):
    """Every task of the simulated cluster waits for another one, and none of them looks at the clock."""
