"""What can go wrong, in words that help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkernel.runtime.records import WaitRecord


class MKernelError(Exception):
    """Base of all errors of this package."""


class ArgumentError(MKernelError, ValueError):
    """A call was refused before anything was launched; the message names the argument and the rule."""


class CommTimeout(MKernelError, RuntimeError):
    """A rank waited longer than the group's timeout for another one.

    `record` is the wait that ran out first, `records` are all that were given up on this rank. The
    group cannot be used any more; the process and its GPU can: make a new group with those ranks
    that are still there (`group.subset`).
    """

    def __init__(self, message: str, records: Sequence[WaitRecord] = ()):
        super().__init__(message)
        self.records = tuple(records)

    @property
    def record(self) -> WaitRecord | None:
        return self.records[0] if self.records else None

    @property
    def is_cause(self) -> bool:
        """Did a wait of this rank run out, rather than end because another rank's had?"""
        return self.record is not None and self.record.timed_out


class RoutingError(MKernelError, RuntimeError):
    """A kernel found that its tokens can not be routed. Nothing was computed, on any rank of the group, and
    the group can be used again."""


class CapacityError(RoutingError):
    """More rows go to a rank than it has room for."""


class TransportError(MKernelError, RuntimeError):
    """The network could not do what it was asked to do."""


class SimulatorError(MKernelError, RuntimeError):
    """The simulator found a kernel doing something that no GPU would forgive."""


class Deadlock(SimulatorError):
    """Every task of the simulated cluster waits for another one, and none of them looks at the clock."""
