"""The Exchange of ranks that are processes: through the store of their process group.

Calls that they have made before, ranks compare in shared memory and by messages between machines instead
(`runtime/call_board.py`). They then use the store only if their calls differ.

A rank that waits for others polls the store, or the shared memory. Now and then it checks whether the missing ranks are
still there: the processes of one machine watch each other (`runtime/liveness.py`), the network proxy notices ranks on
other machines, and a rank that finds a group broken writes this into the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mkernel.runtime import call_board, liveness, records
from mkernel.runtime.call_board import CallBoard, Machines
from mkernel.runtime.errors import CommTimeout, MKernelError, RankLost, TransportError
from mkernel.runtime.group import Group
from mkernel.runtime.printable import printable
from mkernel.runtime.store import STORE_ERRORS, SignedStore

if TYPE_CHECKING:
    from mkernel.runtime.call_link import CallLink
    from mkernel.runtime.shared_files import Page

log = logging.getLogger("mkernel")

CHECK_SECONDS = 0.5  # between two checks whether the missing ranks are still there
LONGEST_PAUSE = 0.02  # seconds between two polls of the store
LONGEST_BOARD_PAUSE = 0.001  # seconds between two polls of a board: a GPU may be idle meanwhile
REPORT_SECONDS = 1.0  # for another rank to report why it has given up
CLOSE_SECONDS = 1.0  # for the last messages to other machines
WARN_SECONDS = 30.0  # of waiting before a rank logs for whom it waits


class StoreExchange:
    """The Exchange of processes. `lost` knows which of them are gone."""

    def __init__(self, rank: int, messages: SignedStore):
        self.rank = rank
        self.messages = messages
        self.lost = LostRanks(messages)
        self.on_last_leave: Callable[[], None] = lambda: None  # called when the last group was closed
        self.hosts: Sequence[Hashable] = ()  # identifies the machine of every rank
        self.address = ""  # of this one, for the others; empty if there is none
        self.open_link: Callable[[Group, Machines, Page], CallLink | None] = lambda *_: None
        self._boards: dict[Hashable, CallBoard] = {}  # by the name of the group
        self._process = os.getpid()

    def all_gather(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        names = self.messages.names(members, key)
        own = list(members).index(rank)
        wait = Wait(self.lost, members, own, key, what, timeout)
        self._mark_in_store(key)
        try:
            written = self.messages.put(names[own], value)
            # The store's own wait would lock out other threads, and log a warning whenever it times out.
            while not self.messages.store.check(list(names)):
                wait.pause(lambda: [i for i, name in enumerate(names) if not self.messages.poll(name)], LONGEST_PAUSE)
            values = self.messages.get(names)
            self.messages.retire(members, written)
        except STORE_ERRORS as problem:
            if isinstance(problem, MKernelError):
                raise
            # the process that hosts the store has exited
            missing = [i for i, name in enumerate(names) if i != own and not self.messages.poll(name)]
            raise wait.timed_out(missing or [own]) from problem
        return values

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        self._mark_in_store(key)
        name = self.messages.names(members, key)[list(members).index(rank)]
        self.messages.keep(members, self.messages.put(name, value))

    def _mark_in_store(self, key: Hashable) -> None:
        """Ranks that wait on the board for this one have to go to the store."""
        name, number = key if isinstance(key, tuple) and len(key) == 2 else (None, 0)
        if name in self._boards:
            self._boards[name].write(number, call_board.IN_STORE)

    def confirm(self, group: Group, call: Any) -> None:
        key, usable = None, not group.broken and os.getpid() == self._process
        if usable and group.size == 1:
            return
        board = self._boards.get(group.name)
        if usable and board is not None:
            key = group.next_exchange()
            board.write(key[1], call_board.digest_of(call))
            agreed = board.spin()
            if agreed is None:
                wait = Wait(self.lost, group.members, group.rank, key, call[0], group.timeout, board)
                while (agreed := board.poll()) is None:
                    wait.pause(board.poll_missing, LONGEST_BOARD_PAUSE)
            if agreed:
                return
        group.exchange(call[0], None, call, key)

    def join(self, group: Group) -> None:
        self.lost.add(group)
        if group.size > 1:
            board = call_board.open_board(group, [self.hosts[member] for member in group.members], self.open_link)
            if board is not None:
                self._boards[group.name] = board
                # for a group that is never closed, or that another rank fails to make
                weakref.finalize(group, self._close_board, group.name).atexit = False

    def _close_board(self, name: Hashable, seconds: float = 0.0) -> None:
        board = self._boards.pop(name, None)
        if board is not None and os.getpid() == self._process:
            board.close(seconds)

    def shut_down(self) -> None:
        """The process exits with groups that are still open: what it wrote must still reach other machines."""
        for name in [*self._boards]:
            self._close_board(name, CLOSE_SECONDS)

    def leave(self, group: Group) -> None:
        self._close_board(group.name, 0.0 if group.broken else CLOSE_SECONDS)
        self.lost.remove(group)
        if not self.lost.groups:
            self.lost.close()
            with contextlib.suppress(*STORE_ERRORS):  # the process that hosts the store has exited
                self.messages.delete_retired()
            self.on_last_leave()

    def abandon(self, group: Group, why: str) -> None:
        liveness.presence().leave(self.lost.identity_of(group.name), why)
        group.world.launcher.abort(group)
        group.world.network.abort(group)
        self.lost.report(group, group.rank, why)

    def report_failure(self, group: Group, failure: MKernelError) -> None:
        lost = failure.__cause__ if isinstance(failure, TransportError) else failure
        if isinstance(lost, RankLost):
            self.lost.report(group, lost.rank, lost.why)
        else:
            self.lost.report(group, -1, f"rank {group.rank} has given up: {str(failure).removesuffix('.')}")

    def wait_for_lost_rank(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        return self.lost.wait_for_cause(group, 0.0 if timed_out else REPORT_SECONDS)


@dataclass
class Wait:
    """A rank, number `own` of the members, waits for the others to make the same call."""

    lost: LostRanks
    members: Sequence[int]
    own: int
    key: Hashable
    what: str
    timeout: float
    board: CallBoard | None = None  # on which it waits
    _begun: float = field(default_factory=time.monotonic)
    _warned: bool = False
    _pause: float = 5e-5
    _next_check: float = CHECK_SECONDS

    def timed_out(self, missing: Sequence[int]) -> CommTimeout:
        return records.absent(self.what, self.own, missing, len(self.members), time.monotonic() - self._begun)

    def pause(self, poll_missing: Callable[[], list[int]], longest: float) -> None:
        """Sleep a little, longer every time. Raise after the timeout, or when a missing rank is lost."""
        waited = time.monotonic() - self._begun
        if waited < min(self._next_check, self.timeout):
            time.sleep(self._pause)
            self._pause = min(1.5 * self._pause, longest)
            return
        self._next_check = waited + CHECK_SECONDS
        missing = poll_missing()
        if not missing:
            return
        timed_out = self.timed_out(missing)
        self.lost.check(self.key, self.members, missing, timed_out)
        if self.board is not None and self.board.error is not None:
            raise TransportError(f"{self.board.error}. What waited for it: {timed_out}") from timed_out
        if waited >= self.timeout:
            raise timed_out
        if waited >= WARN_SECONDS and not self._warned:
            self._warned = True
            log.warning(
                "%s: rank %d has waited %.0f s for %s to make the same call, and will wait up to %.0f s",
                self.what, self.own, waited, _ranks(missing), self.timeout,
            )  # fmt: skip


class LostRanks:
    """What is known about ranks that are gone, by group.

    Groups are identified by a hash of the job and the group's name: the same on all of its ranks.
    """

    def __init__(self, messages: SignedStore):
        self.groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self._messages = messages
        self._first: dict[str, tuple[int, str]] = {}  # group -> the rank of it that was lost first, and why
        self._lock = threading.Lock()
        self.peers: Mapping[int, tuple[int, int]] = {}  # the other ranks of this machine
        self._watch: liveness.Watch | None = None

    def identity_of(self, name: Hashable) -> str:
        return hashlib.sha256(f"{self._messages.job} {name!r}".encode()).hexdigest()[:32]

    def watch(self, peers: Mapping[int, tuple[int, int]]) -> None:
        """Watch these ranks of this machine: rank -> its process and the file descriptor of its page."""
        self.peers = peers
        this = weakref.ref(self)

        def lost(rank: int, why: str) -> None:
            alive = this()
            if alive is not None:
                for group in list(alive.groups.values()):
                    alive._mark_lost(group, rank, why)

        def left(rank: int, identity: str, why: str) -> None:
            alive = this()
            group = alive.groups.get(identity) if alive is not None else None
            if alive is not None and group is not None:
                alive._mark_lost(group, rank, why)

        self._watch = liveness.Watch(peers, lost, left)
        weakref.finalize(self, self._watch.close)

    def add(self, group: Group) -> None:
        self.groups[self.identity_of(group.name)] = group
        if self._watch is None:
            self.watch(self.peers)
        assert self._watch is not None
        for rank, why in list(self._watch.gone.items()):  # lost while the group was being made
            self._mark_lost(group, rank, why)

    def remove(self, group: Group) -> None:
        self.groups.pop(self.identity_of(group.name), None)
        self._first.pop(self.identity_of(group.name), None)

    def close(self) -> None:
        """Stop the watch. A new group starts it again."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _mark_lost(self, group: Group, rank: int, why: str) -> None:
        """A rank of this machine was lost: abort our kernels, which may wait for it. Runs in the watch's thread."""
        if rank in group.members:
            with self._lock:
                first = self._first.setdefault(self.identity_of(group.name), (group.members.index(rank), why))
            if first == (group.members.index(rank), why):
                group.world.launcher.abort(group)

    def broken_groups(self) -> list[str]:
        """The identities of the open groups that are broken."""
        return [identity for identity, group in self.groups.items() if group.broken]

    def report(self, group: Group, lost: int, why: str) -> None:
        """Write into the store, once, that a group is broken: for ranks that wait there and notice nothing of it."""
        name = f"broken/{self.identity_of(group.name)}"
        try:
            if not self._messages.poll(name):
                self._messages.put(name, (lost, why))
        except STORE_ERRORS:
            log.debug("the store is gone, too", exc_info=True)

    def _poll_report(self, identity: str) -> tuple[int, str] | None:
        """What another rank has reported: who was lost (-1 if unknown), and why."""
        if not self._messages.poll(f"broken/{identity}"):
            return None
        try:
            rank, why = self._messages.get([f"broken/{identity}"])[0]
        except STORE_ERRORS as problem:
            if isinstance(problem, MKernelError):
                raise
            return None  # the process that hosts the store has exited meanwhile
        return int(rank), printable(str(why))

    def check(self, key: Hashable, members: Sequence[int], missing: Sequence[int], timed_out: CommTimeout) -> None:
        """Raise if it is known that the missing ranks will not arrive."""
        identity = self.identity_of(key[0] if isinstance(key, tuple) else None)
        lost, why = self._poll_report(identity) or (-1, "")
        if why and lost < 0:
            self._wait_for_watch([members[i] for i in missing])  # which may know which rank it was
        gone = self._watch.gone if self._watch is not None else {}
        waited_for = {members[i]: i for i in missing}
        for member, how in list(gone.items()):  # in the order in which they ended: others may have ended because of it
            if lost < 0 and member in waited_for:
                lost, why = waited_for[member], how
        if lost >= 0:
            raise RankLost(f"rank {lost} is lost: {why}. {timed_out}", timed_out.records, lost, why)
        if why:
            raise CommTimeout(f"{why}. {timed_out}", timed_out.records)
        group = self.groups.get(identity)
        error = group.world.network.error(group) if group is not None else None
        if error is not None:
            raise TransportError(f"{error}. What waited for it: {timed_out}") from timed_out

    def _wait_for_watch(self, missing: Sequence[int]) -> None:
        """Give the system time to report that one of these ranks, if they are on this machine, has ended."""
        deadline = time.monotonic() + REPORT_SECONDS
        watched = self.peers.keys() & set(missing)
        while watched and self._watch is not None and not watched & self._watch.gone.keys():
            if time.monotonic() > deadline:
                return
            time.sleep(LONGEST_PAUSE)

    def wait_for_cause(self, group: Group, seconds: float) -> tuple[int, str] | None:
        """The rank that was lost (-1 if unknown) and why. Wait so long for a report of another rank."""
        identity = self.identity_of(group.name)
        deadline = time.monotonic() + seconds
        report = None
        while identity not in self._first and time.monotonic() < deadline:
            report = self._poll_report(identity)
            if report is not None and report[0] >= 0:
                return report
            time.sleep(LONGEST_PAUSE)
        return self._first.get(identity, report)


def _ranks(numbers: Sequence[int]) -> str:
    some = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank {some}" if len(numbers) == 1 else f"ranks {some}{more}"
