"""Requests to the network: the producer's side of the ring between a kernel and its proxy.

The ring is an array of 64-byte requests in memory that the GPU and the host both see, behind a
header of 64-bit words. Many CTAs write requests, one proxy takes them out:

- a producer takes a ticket (`TAKEN` grows by one); its slot is ticket % capacity;
- the slot is free once the proxy has taken the request of one turn before (`CONSUMED` > ticket -
  capacity); a full ring is waited for, with the group's timeout;
- the request's words are stored, then its turn number (ticket // capacity + 1) with a release: the
  proxy knows a full slot by the turn number that is due, so nothing has to be cleared.

What only producers need is in the device's own memory: tickets, and up to which of them slots were free when one
of them last looked (`FREE`). A read over PCIe takes 1 to 2 us, and atomics on one word of the host come one after
the other: with tickets in the ring's header a request took 6.7 us, and 26 to 30 when 32 CTAs had one at a time. Now
a producer reads from the host only when the ring seems full; what it finds, it leaves to the others by a
release. Stores to the host are waited for once, by the release of the turn number.

`COMPLETED` counts requests whose source may be written again, in order. The proxy alone writes it and
`CONSUMED`; a kernel waits for them as for signals, by adding nothing, which Triton makes a load. (A test
looks: an operation that wrote what it had read would undo what the host wrote in between, where
PCIe has no atomics.)

A request asks for `size` bytes at `source` (offset in this rank's segment `source_segment`) to be
written to `target` in the peer's segment `segment`; when they are there, the peer's signal at byte
`signal` of that segment grows to `value`. A request of zero bytes only sets the signal. All offsets
have 64 bits. A signal must have one sending rank: over InfiniBand and RoCE the sender's device writes the
value, and can not look for a larger one of somebody else.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import POSTING, RING
from mkernel.lang.roles import SEND
from mkernel.lang.signals import RING_SPACE, SENT, gave_up, notify, notify_in_loop, wait, wait_value
from mkernel.lang.trace import POST, trace, trace_time

# Words of the ring's header.
CONSUMED = tl.constexpr(0)
COMPLETED = tl.constexpr(1)
CAPACITY = tl.constexpr(2)
HEADER_WORDS = tl.constexpr(8)

# The producers' own words. An empty ring's are 0, capacity, capacity.
TAKEN = tl.constexpr(0)
FREE = tl.constexpr(1)
SLOTS = tl.constexpr(2)  # the capacity once more

# Words of a request.
REQUEST_WORDS = tl.constexpr(8)
TURN = tl.constexpr(0)
PEER_AND_SEGMENTS = tl.constexpr(1)  # peer | segment << 16 | source_segment << 40
SOURCE = tl.constexpr(2)
TARGET = tl.constexpr(3)
BYTES = tl.constexpr(4)
SIGNAL = tl.constexpr(5)
VALUE = tl.constexpr(6)


class Transfer(NamedTuple):
    """What the network shall copy: `size` bytes of this rank's source_segment, from byte `source`, into the peer's
    `segment`, from byte `target`."""

    peer: Any
    source_segment: Any
    source: Any
    segment: Any
    target: Any
    size: Any


@triton.jit
def share_free(posting, free):
    """Tell the other producers that slots of tickets below `free` are free."""
    tl.atomic_max(posting + FREE, free, sem="release", scope="gpu")


@triton.jit
def wait_free(context, ring, posting, ticket, capacity, peer, ROLE: tl.constexpr):
    """Wait until the slot of a ticket is free. Returns below which ticket slots are free: above this one, unless the
    group gave up."""
    free = tl.atomic_add(posting + FREE, 0, sem="acquire", scope="gpu")
    if ticket >= free:
        free = wait_value(context, ring + CONSUMED, ticket - capacity + 1, ROLE, RING_SPACE, peer, ticket) + capacity
        share_free(posting, free)
    return free


@triton.jit
def write_words(request, transfer, signal, value):
    """Store the words of a request, but for its turn number."""
    addressee = (
        transfer.peer.to(tl.int64)
        | (transfer.segment.to(tl.int64) << 16)
        | (transfer.source_segment.to(tl.int64) << 40)
    )
    tl.store(request + PEER_AND_SEGMENTS, addressee)
    tl.store(request + SOURCE, transfer.source)
    tl.store(request + TARGET, transfer.target)
    tl.store(request + BYTES, transfer.size)
    tl.store(request + SIGNAL, signal)
    tl.store(request + VALUE, value)


@triton.jit
def notify_proxy(request, turn, IN_LOOP: tl.constexpr):
    """Tell the proxy that a request is in its slot."""
    if IN_LOOP:
        notify_in_loop(request + TURN, turn)
    else:
        notify(request + TURN, turn)


@triton.jit
def write_request(request, transfer, signal, value, turn, IN_LOOP: tl.constexpr):
    """Words first, then the turn number."""
    write_words(request, transfer, signal, value)
    notify_proxy(request, turn, IN_LOOP)


@triton.jit
def post(context, transfer, signal, value, ROLE: tl.constexpr, IN_LOOP: tl.constexpr = False):
    """Ask for one transfer, after which byte `signal` of the peer's segment gets a value. Returns the
    ticket, to wait for with `wait_sent`; -1 if the group gave up. IN_LOOP: inside a loop that Triton shall pipeline."""
    since = trace_time(context)
    # if so, the data may be missing, and nobody could tell the peer
    leave = gave_up(context)
    ring = tl.load(context + RING).to(tl.pointer_type(tl.int64))
    posting = tl.load(context + POSTING).to(tl.pointer_type(tl.int64))
    peer = transfer.peer
    capacity = tl.load(posting + SLOTS)
    ticket = tl.atomic_add(posting + TAKEN, 1, sem="relaxed", scope="gpu")
    free = wait_free(context, ring, posting, ticket, capacity, peer, ROLE)
    if (ticket < free) & (not leave):
        request = ring + HEADER_WORDS + (ticket % capacity) * REQUEST_WORDS
        write_request(request, transfer, signal, value, ticket // capacity + 1, IN_LOOP)
    else:
        ticket = tl.cast(-1, tl.int64)
    trace(context, SEND, POST, peer, ticket, since)
    return ticket


@triton.jit
def wait_sent(context, ticket, ROLE: tl.constexpr):
    """Wait until the proxy has read the source of the request with this ticket, and of all before."""
    ring = tl.load(context + RING).to(tl.pointer_type(tl.int64))
    return wait(context, ring + COMPLETED, ticket + 1, ROLE, SENT, -1, ticket)
