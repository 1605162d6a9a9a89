"""Requests to the network: the producer side of the ring between a kernel and its proxy.

The ring is an array of 64-byte requests in memory that GPU and host share, after a header of 64-bit words. It has many
producers, the CTAs, and one consumer, the proxy:

- A producer takes a ticket (`TAKEN` grows by one). Its slot is ticket % capacity.
- The slot is free once the proxy has consumed the request of the previous turn (`CONSUMED` > ticket - capacity). A
  producer waits while the ring is full, up to the group's timeout.
- The producer stores the words of the request, then its turn number (ticket // capacity + 1) with a release. The proxy
  recognizes a full slot by the expected turn number, so slots need not be cleared.

State that only producers need is in device memory: the tickets, and up to which ticket slots were free when a producer
last checked (`FREE`). A read over PCIe takes 1 to 2 us, and atomics on one word of host memory are serialized: with
the tickets in the ring's header, a request took 6.7 us, and 26 to 30 us when 32 CTAs posted at once. Now a producer
reads host memory only when the ring seems full, and publishes what it found with a release. Stores to the host are
waited for once, by the release of the turn number.

`COMPLETED` counts, in order, the requests whose source may be overwritten. Only the proxy writes `COMPLETED` and
`CONSUMED`. A kernel polls them like signals, with an atomic add of zero, which Triton turns into a load. (A test checks
this: where PCIe has no atomics, a read-modify-write would undo what the host wrote in between.)

A request asks for `size` bytes at `source`, an offset in this rank's segment `source_segment`, to be written to
`target` in the peer's segment `segment`. Once all bytes are there, the peer's signal at byte `signal` of that segment
grows to `value`. A request of zero bytes only sets the signal. All offsets have 64 bits. Each signal must have a single
sending rank: over InfiniBand and RoCE the sender's device writes the value without comparing.
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
    """One copy over the network. All offsets and sizes are in bytes.

    Attributes:
        peer: the rank that receives, one of this rank's counterparts.
        source_segment: number of the segment to read from, on this rank.
        source: offset in that segment.
        segment: number of the segment to write to, on the peer. The signal is in this segment too.
        target: offset in that segment.
        size: how many bytes to copy; 0 only sets the signal.
    """

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
    """Store the words of a request, all but its turn number."""
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
    """Write a request into its slot: the words first, then the turn number, which the proxy waits for."""
    write_words(request, transfer, signal, value)
    notify_proxy(request, turn, IN_LOOP)


@triton.jit
def post(context, transfer, signal, value, ROLE: tl.constexpr, IN_LOOP: tl.constexpr = False):
    """Ask the network for one transfer, and then for the peer's signal at byte `signal` to grow to `value`.

    Returns the request's ticket for `wait_sent`, or -1 if the group gave up; nothing is sent then. The request covers
    all earlier stores of the CTA. The source must stay unchanged until the proxy has read it (`wait_sent`). Requests
    may overtake each other. IN_LOOP: the call is inside a loop that Triton should pipeline.
    """
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
    """Wait until the proxy has read the sources of this request and all earlier ones: they may be overwritten. It does
    not say that the data has arrived. Returns false if the group gave up."""
    ring = tl.load(context + RING).to(tl.pointer_type(tl.int64))
    return wait(context, ring + COMPLETED, ticket + 1, ROLE, SENT, -1, ticket)
