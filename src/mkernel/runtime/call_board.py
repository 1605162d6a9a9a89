"""How ranks compare calls that they have made before: each writes its call on a page of shared memory, which the ranks
of its machine read. For every other machine, it sends the call to one rank there, into that rank's page
(`runtime/call_link.py`). This takes microseconds on one machine, and a message between several; an exchange through the
process group's store takes hundreds of microseconds.

All exchanges of a group are numbered, alike on all ranks. A page holds a record of the last exchange with an even
number and one of the last with an odd number. A record has the number and a digest of the call, or IN_STORE if this
rank uses the store for this exchange. To compare calls in exchange n, a rank waits until every other rank has reached
it. If all digests are equal, all ranks see that, and the call is confirmed. Otherwise every rank sees a digest other
than its own, or IN_STORE, and uses the store, which has the calls themselves. So no rank waits on the board for a rank
that waits in the store.

A rank that refuses its arguments writes so into the store and waits for nobody. It may then be several exchanges ahead,
and have overwritten its record of exchange n while a slow rank still waits for it. So each record also has the number
of the last exchange that its writer has confirmed on the board. If that is n, the writer has seen that all ranks agree,
including the slow one. If not, the writer refused exchange n, and the slow rank finds the refusal in the store.

Nothing orders a reader's view of the words of a record, so a record counts only if its checksum is right. A reader that
finds a record half written reads it again. Records of one rank arrive on another machine in the order in which it wrote
them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mkernel.runtime import messages, shared_files
from mkernel.runtime.shared_files import Page

if TYPE_CHECKING:
    from mkernel.runtime.call_link import CallLink
    from mkernel.runtime.group import Group

PAGE_BYTES = mmap.PAGESIZE  # of a rank that keeps no records of ranks on other machines
SPIN_SECONDS = 2e-4  # of polling before the first pause
DIGEST_BYTES = 16
DIGESTS_KEPT = 1024
IN_STORE = bytes(DIGEST_BYTES)  # in place of a digest

_BODY = struct.Struct(f"<QQ{DIGEST_BYTES}s")  # number, last number that was confirmed on the board, digest
_CHECKSUM = struct.Struct("<I")
_RECORD_BYTES = _BODY.size + _CHECKSUM.size
_TOKEN = slice(0, 16)  # tells this page from whatever else a process number and a file descriptor may lead to
_LINE = 64  # bytes of a cache line; a record has one to itself
_OWN = _LINE  # where a page has the records of its owner; those of ranks on other machines follow


class Place(NamedTuple):
    """Where a page has the records of a rank, and the signal that the network raises with them."""

    records: tuple[slice, slice]  # of even and odd numbers
    signal: int

    @staticmethod
    def number(index: int) -> Place:
        """0: of the page's owner; from 1 on: of the ranks on other machines that send it their records."""
        start = _OWN + index * 2 * _LINE
        even, odd = (slice(at, at + _RECORD_BYTES) for at in (start, start + _LINE))
        return Place((even, odd), start + _LINE - 8)


_RECORDS = Place.number(0).records


@functools.lru_cache(DIGESTS_KEPT)
def digest_of(call: Hashable) -> bytes:
    """The same for calls that are the same message in the store. Calls that are equal, but not the same message, such
    as those with 1 and True, may differ here; the store finds them equal."""
    return hashlib.blake2b(messages.encode(call, b"", ""), digest_size=DIGEST_BYTES).digest()


class Machines:
    """Which ranks of a group are on which machine, and who sends its records to whom.

    A rank sends its records to one rank of every other machine: the one with the same index there, modulo the number of
    ranks on that machine.
    """

    def __init__(self, rank: int, hosts: Sequence[Hashable]):
        """`hosts`: identifies the machine of every rank."""
        self._hosts = hosts
        self._ranks: dict[Hashable, list[int]] = {}
        for each, host in enumerate(hosts):
            self._ranks.setdefault(host, []).append(each)
        self.local = self._ranks[hosts[rank]]  # the ranks of this machine
        self.others = len(self._ranks) - 1  # machines besides this one
        self.readers = [self._reader(rank, host) for host in self._ranks if host != hosts[rank]]

    def _reader(self, rank: int, host: Hashable) -> int:
        """The rank of a machine to which this rank sends its records."""
        ranks = self._ranks[host]
        return ranks[self._ranks[self._hosts[rank]].index(rank) % len(ranks)]

    def writers(self, reader: int) -> list[int]:
        """The ranks that send their records to this one, in the order in which its page has them."""
        host = self._hosts[reader]
        count, own = len(self._ranks[host]), self._ranks[host].index(reader)
        return [
            rank for other, ranks in self._ranks.items() if other != host
            for index, rank in enumerate(ranks) if index % count == own
        ]  # fmt: skip


def page_bytes(writers: int) -> int:
    """Bytes of a page with the records of this many ranks on other machines."""
    return -(-Place.number(1 + writers).records[0].start // PAGE_BYTES) * PAGE_BYTES


def open_board(
    group: Group, hosts: Sequence[Hashable], open_link: Callable[[Group, Machines, Page], CallLink | None]
) -> CallBoard | None:
    """The board of a new group; None on all ranks if one cannot map the pages of the others on its machine, or if ranks
    of several machines cannot be connected. Collective.

    Args:
        hosts: identifies the machine of every rank.
        open_link: connects the ranks of several machines; collective, and None on all ranks if it fails on one.
    """
    machines = Machines(group.rank, hosts)
    pages: dict[int, Page] = {}
    token, handle = os.urandom(16), -1
    try:
        with contextlib.suppress(OSError):
            own_bytes = page_bytes(len(machines.writers(group.rank)))
            handle = shared_files.create("calls", own_bytes)
            pages[group.rank] = shared_files.map_page(os.getpid(), handle, own_bytes)
            pages[group.rank][_TOKEN] = token
        everyone = group.exchange("call board", (os.getpid(), handle, token))
        with contextlib.suppress(OSError):
            for rank in machines.local:
                if rank != group.rank:
                    process, opened, its_token = everyone[rank]
                    pages[rank] = _map_page(process, opened, its_token, page_bytes(len(machines.writers(rank))))
        if all(group.exchange("call board", len(pages) == len(machines.local))):
            link = open_link(group, machines, pages[group.rank]) if machines.others else None
            if link is not None or not machines.others:
                return CallBoard(group.rank, pages, machines, link)
    finally:
        if handle >= 0:
            os.close(handle)  # by now, all ranks have mapped the page
    return None


def _map_page(process: int, handle: int, token: bytes, nbytes: int = PAGE_BYTES) -> Page:
    """The page of another process, to read. Raises OSError if it cannot be mapped."""
    page = shared_files.map_page(process, handle, nbytes)
    if page[_TOKEN] != token:  # of another PID namespace
        raise OSError(errno.EBADF, f"file descriptor {handle} of process {process} is something else")
    return page


class CallBoard:
    """The records of a group's ranks, as one of them sees them.

    Args:
        pages: of the ranks of this machine; a rank writes only its own, the network only what other machines send.
        machines: where the ranks are; None: all of them here.
        link: sends this rank's records to the other machines.
    """

    def __init__(
        self, rank: int, pages: Mapping[int, Page], machines: Machines | None = None, link: CallLink | None = None
    ):
        self._pages = pages
        self._own = pages[rank]
        self._link = link
        self._peers = [(peer, page, _RECORDS) for peer, page in pages.items() if peer != rank]
        for reader in pages:
            for index, writer in enumerate(machines.writers(reader) if machines is not None else (), 1):
                self._peers.append((writer, pages[reader], Place.number(index).records))
        self._number = 0
        self._digest = self._record = IN_STORE
        self._waiting = self._peers[:0]  # those that have not reached this number yet
        self._confirmed = 0  # the last number that was confirmed on the board

    def write(self, number: int, digest: bytes) -> None:
        """This rank has reached the exchange of this number, with a call of this digest, or IN_STORE."""
        body = _BODY.pack(number, self._confirmed, digest)
        self._number, self._digest, self._record = number, digest, body + _CHECKSUM.pack(zlib.crc32(body))
        self._waiting = self._peers
        self._own[_RECORDS[number % 2]] = self._record
        if self._link is not None:
            self._link.send(number)

    def poll(self) -> bool | None:
        """Do all ranks make the call that this one wrote last? None while that is unknown; False if the ranks have to
        compare their calls in the store."""
        parity, record, waiting = self._number % 2, self._record, []
        if self._link is not None and self._waiting:
            self._link.poll()
        for entry in self._waiting:
            page, slot = entry[1], entry[2][parity]
            if page[slot] == record:
                continue
            number, confirmed, digest = _read(page, slot)
            if number < self._number:
                waiting.append(entry)
            elif digest != self._digest if number == self._number else confirmed < self._number:
                return False
        self._waiting = waiting
        if waiting:
            return None
        self._confirmed = self._number
        return True

    def spin(self) -> bool | None:
        """Poll without sleeping, but not for long."""
        agreed = self.poll()
        deadline = time.monotonic() + SPIN_SECONDS
        while agreed is None and time.monotonic() < deadline:
            os.sched_yield()  # costs 0.3 us; without it, waits are 2 to 5 times as long if ranks share cores
            agreed = self.poll()
        return agreed

    def poll_missing(self) -> list[int]:
        """The ranks that this one waits for."""
        return [entry[0] for entry in self._waiting] if self.poll() is None else []

    @property
    def error(self) -> str | None:
        """Why records no longer reach other machines; None if they do."""
        return self._link.error if self._link is not None else None

    def close(self, seconds: float = 0.0) -> None:
        """`seconds`: how long to wait until what was written has reached the other machines."""
        if self._link is not None:
            self._link.close(seconds)


def _read(page: Page, slot: slice) -> tuple[int, int, bytes]:
    """A record: number, last number confirmed, digest. Number 0 if it has not been written, or is being written."""
    found = page[slot]
    body = found[: _BODY.size]
    # Reading the same twice makes it unlikely that a record was half written, the checksum next to impossible.
    if _CHECKSUM.unpack_from(found, _BODY.size)[0] != zlib.crc32(body) or page[slot] != found:
        return 0, 0, IN_STORE
    number, confirmed, digest = _BODY.unpack(body)
    return number, confirmed, digest
