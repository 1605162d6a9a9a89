"""How a rank's records of calls reach the ranks of other machines (see call_board.py).

They take connections of their own, over TCP with one stream to each peer: a request copies a record to its place on the
reader's page. No thread serves them. A rank sends its record when it writes it, and receives while it waits for the
others. That is enough: who needs what a rank receives is on its machine, and waits for this rank as well, which has
either received everything, or waits in the store and says so on its page, or has not come to the exchange.

One stream keeps the order of a rank's records, so an earlier one never overwrites a later one. Records of every second
exchange share a place, so the record on the rank's own page may change before it is sent. The later record then goes
twice, or first in a mixture whose checksum is wrong.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from mkernel.net.config import Tcp
from mkernel.net.library import TcpTransport
from mkernel.runtime import connect
from mkernel.runtime.call_board import Machines, Place
from mkernel.runtime.errors import MKernelError, TransportError
from mkernel.runtime.shared_files import Page

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

log = logging.getLogger("mkernel")

SEGMENT = 0  # the page, on all ranks
SEGMENTS = SEGMENT << 16 | SEGMENT << 40
BUSY_SECONDS = 5.0  # to send a record, which takes longer only if hundreds wait to be received
_REQUEST = struct.Struct("=8q")  # as in lang/requests.py


class CallLink:
    """Sends one rank's records to its readers on other machines, and receives theirs.

    Attributes:
        error: why that no longer works; None if it does.
    """

    def __init__(self, transport: TcpTransport, page: Page, readers: Sequence[tuple[int, Place]]):
        """`readers`: the ranks to send to, and where their pages have this rank's records."""
        self.error: str | None = None
        self._transport: TcpTransport | None = transport
        self._own = Place.number(0).records
        self._readers = [(reader | SEGMENTS, place) for reader, place in readers]
        transport.attach(SEGMENT, torch.frombuffer(page, dtype=torch.uint8))

    def send(self, number: int) -> None:
        """Send this rank's record of the exchange of this number."""
        if self._transport is None or self.error is not None:
            return
        source = self._own[number % 2]
        size = source.stop - source.start
        try:
            for peer, place in self._readers:
                target = place.records[number % 2].start
                request = _REQUEST.pack(0, peer, source.start, target, size, place.signal, number, 0)
                deadline = time.monotonic() + BUSY_SECONDS
                while not self._transport.post(request):
                    self._transport.poll()
                    if time.monotonic() > deadline:
                        raise TransportError(f"rank {peer & 0xFFFF} has received no call for {BUSY_SECONDS:g} s")
            self._transport.poll()
        except TransportError as problem:
            self.error = str(problem)

    def poll(self) -> None:
        """Receive what has arrived."""
        if self._transport is not None and self.error is None:
            try:
                self._transport.poll()
            except TransportError as problem:
                self.error = str(problem)

    def close(self, seconds: float) -> None:
        """Close the connections. Wait so long for the peers to receive what was sent."""
        if self._transport is not None:
            with contextlib.suppress(TransportError):
                self._transport.close(seconds)
            self._transport = None  # and with it the page


def open_link(group: Group, machines: Machines, page: Page, address: str, key: bytes) -> CallLink | None:
    """Connect the ranks of several machines; None on all of them if that fails on one. Collective.

    Args:
        page: this rank's.
        address: at which other machines reach this one; empty if that is unknown.
        key: known only to the ranks of the group.
    """
    transport: TcpTransport | None = None
    link: CallLink | None = None
    try:
        with _warned(group):
            transport = connect.listen(group, Tcp(streams=1), address, key)
        endpoints = group.exchange("call board", None if transport is None else (address, transport.port))
        if transport is not None and None not in endpoints:
            with _warned(group):
                peers = {*machines.readers, *machines.writers(group.rank)}
                transport.connect({peer: endpoints[peer] for peer in peers}, min(group.timeout, connect.TEST_SECONDS))
                places = {reader: machines.writers(reader).index(group.rank) + 1 for reader in machines.readers}
                readers = [(reader, Place.number(index)) for reader, index in places.items()]
                link = CallLink(transport, page, readers)
        if all(group.exchange("call board", link is not None)):
            return link
    except BaseException:
        _give_up(link, transport)
        raise
    _give_up(link, transport)
    return None


@contextlib.contextmanager
def _warned(group: Group) -> Iterator[None]:
    """Log a failure and go on: the other ranks learn of it in the exchange that follows."""
    try:
        yield
    except MKernelError as problem:
        log.warning(
            "rank %d cannot compare calls with other machines directly: %s. The ranks of this group compare them "
            "through the process group's store, which takes longer.", group.rank, problem,
        )  # fmt: skip


def _give_up(link: CallLink | None, transport: TcpTransport | None) -> None:
    if link is not None:
        link.close(0)
    elif transport is not None:
        transport.close(0)
