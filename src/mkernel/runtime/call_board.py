"""How the ranks of one machine compare calls that they have made before: each writes its call on a page of shared
memory, which the others read. This takes microseconds; an exchange through the process group's store takes hundreds.

All exchanges of a group are numbered, alike on all ranks. A page holds a record of the last exchange with an even
number and one of the last with an odd number. A record has the number and a digest of the call, or IN_STORE if this
rank uses the store for this exchange. To compare calls in exchange n, a rank waits until every other rank has reached
it. If all digests are equal, all ranks see that, and the call is confirmed. Otherwise every rank sees a digest other
than its own, or IN_STORE, and goes to the store, which has the calls themselves. So no rank waits on the board for one
that waits in the store.

A rank that refuses its arguments writes so into the store and waits for nobody. It may then be several exchanges ahead,
and have overwritten its record of exchange n while a slow rank still waits for it. So each record also has the number
of the last exchange that its writer has confirmed on the board. If that is n, the writer has seen that all ranks agree,
including the slow one. If not, the writer refused exchange n, and the slow rank finds the refusal in the store.

Nothing orders a reader's view of the words of a record, so a record counts only if its checksum is right. A reader that
finds one half written looks again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

from mkernel.runtime import messages

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

PAGE_BYTES = mmap.PAGESIZE
SPIN_SECONDS = 2e-4  # of polling before the first pause
DIGEST_BYTES = 16
DIGESTS_KEPT = 1024
IN_STORE = bytes(DIGEST_BYTES)  # in place of a digest

_BODY = struct.Struct(f"<QQ{DIGEST_BYTES}s")  # number, last number that was confirmed on the board, digest
_CHECKSUM = struct.Struct("<I")
_RECORD_BYTES = _BODY.size + _CHECKSUM.size
_TOKEN = slice(0, 16)  # tells this page from whatever else a process number and a file descriptor may lead to
_RECORDS = tuple(slice(start, start + _RECORD_BYTES) for start in (64, 128))  # of even and odd numbers


@functools.lru_cache(DIGESTS_KEPT)
def digest_of(call: Hashable) -> bytes:
    """The same for calls that are the same message in the store. Calls that are equal, but not the same message, such
    as those with 1 and True, may differ here; the store finds them equal."""
    return hashlib.blake2b(messages.encode(call, b"", ""), digest_size=DIGEST_BYTES).digest()


def open_board(group: Group) -> CallBoard | None:
    """The board of a new group whose ranks are all on this machine; None on all of them if one cannot map the others'
    pages. Collective."""
    pages: dict[int, mmap.mmap] = {}
    token, handle = os.urandom(16), -1
    try:
        with contextlib.suppress(OSError, ValueError):
            handle = os.memfd_create("mkernel calls")
            os.ftruncate(handle, PAGE_BYTES)
            pages[group.rank] = mmap.mmap(handle, PAGE_BYTES)
            pages[group.rank][_TOKEN] = token
        everyone = group.exchange("call board", (os.getpid(), handle, token))
        with contextlib.suppress(OSError, ValueError):
            for rank, address in enumerate(everyone):
                if rank != group.rank:
                    pages[rank] = _map_page(*address)
        if all(group.exchange("call board", len(pages) == group.size)):
            return CallBoard(group.rank, pages)
    except BaseException:
        _close(pages)
        raise
    finally:
        if handle >= 0:
            os.close(handle)  # by now, all ranks have mapped the page
    _close(pages)
    return None


def _map_page(process: int, handle: int, token: bytes) -> mmap.mmap:
    """The page of another process, to read. Raises OSError or ValueError if it cannot be mapped."""
    opened = os.open(f"/proc/{process}/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        page = mmap.mmap(opened, PAGE_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(opened)
    if page[_TOKEN] != token:  # of another PID namespace
        page.close()
        raise ValueError(f"file descriptor {handle} of process {process} is something else")
    return page


def _close(pages: Mapping[int, mmap.mmap]) -> None:
    for page in pages.values():
        page.close()


class CallBoard:
    """The pages of a group's ranks, as one of them sees them. `pages`: by rank; it writes only its own."""

    def __init__(self, rank: int, pages: Mapping[int, mmap.mmap]):
        self._pages = pages
        self._own = pages[rank]
        self._peers = [(peer, page) for peer, page in pages.items() if peer != rank]
        self._number = 0
        self._digest = self._record = IN_STORE
        self._waiting: list[tuple[int, mmap.mmap]] = []  # those that have not reached this number yet
        self._confirmed = 0  # the last number that was confirmed on the board

    def write(self, number: int, digest: bytes) -> None:
        """This rank has reached the exchange of this number, with a call of this digest, or IN_STORE."""
        body = _BODY.pack(number, self._confirmed, digest)
        self._number, self._digest, self._record = number, digest, body + _CHECKSUM.pack(zlib.crc32(body))
        self._waiting = self._peers
        self._own[_RECORDS[number % 2]] = self._record

    def poll(self) -> bool | None:
        """Do all ranks make the call that this one wrote last? None while that is unknown; False if the store has to
        tell."""
        slot, record, waiting = _RECORDS[self._number % 2], self._record, []
        for peer, page in self._waiting:
            if page[slot] == record:
                continue
            number, confirmed, digest = _read(page, slot)
            if number < self._number:
                waiting.append((peer, page))
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
        return [peer for peer, _ in self._waiting] if self.poll() is None else []

    def close(self) -> None:
        _close(self._pages)


def _read(page: mmap.mmap, slot: slice) -> tuple[int, int, bytes]:
    """A record: number, last number confirmed, digest. Number 0 if it has not been written, or is being written."""
    found = page[slot]
    body = found[: _BODY.size]
    # Reading the same twice makes it unlikely that a record was half written, the checksum next to impossible.
    if _CHECKSUM.unpack_from(found, _BODY.size)[0] != zlib.crc32(body) or page[slot] != found:
        return 0, 0, IN_STORE
    number, confirmed, digest = _BODY.unpack(body)
    return number, confirmed, digest
