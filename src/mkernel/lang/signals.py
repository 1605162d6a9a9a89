"""Signals: how one CTA tells another, on any rank, that data is there.

A signal is a 64-bit counter in the symmetric heap that only grows. Whoever has written the data
sets it to the epoch (`notify`); whoever needs the data waits until it is at least the epoch
(`wait`). Nobody resets it.

What holds: everything that any thread of the notifying CTA stored before `notify` is visible to
every thread of the waiting CTA after `wait` returned true; reads through tensor descriptors need
`acquire_for_descriptors` in between.

Every wait ends. After the group's timeout, or as soon as another CTA of the group has given up, the
waiter writes down what it waited for (its wait record), and returns false. The one that timed out
also raises the abort flag of every rank it can reach. A kernel then runs to its end without waiting
any more, and marks what it could not compute with NaN; the host finds the record and raises
`mk.CommTimeout`.
"""

import triton
import triton.language as tl

from mkernel.lang.context import OP, RANK, RECORD_WORDS, RECORDS, SIZE, TABLE, TIMEOUT
from mkernel.lang.device import barrier, now
from mkernel.lang.roles import COMPUTE, SEND
from mkernel.lang.trace import WAIT, trace, trace_time

# Why a record was written.
TIMED_OUT = tl.constexpr(1)
TOLD_TO_LEAVE = tl.constexpr(2)

# What was waited for.
ENTERED = tl.constexpr(0)  # the peer has entered the epoch before this one: its buffers may be written
ARRIVED = tl.constexpr(1)  # a chunk of the peer's rows is here
RING_SPACE = tl.constexpr(2)  # the proxy has taken an old request out of the ring
SENT = tl.constexpr(3)  # the proxy has finished reading what it was asked to send
PARTIAL = tl.constexpr(16)  # the peer's part of a tile's sum is here
FINISHED_TILE = tl.constexpr(17)  # a tile that the peer has summed up is here
FREED = tl.constexpr(4)  # the peer reads nothing of that round any more


@triton.jit
def notify(signal, value):
    """Data first, then signal: all threads' stores, a barrier, one release at system scope."""
    tl.debug_barrier()
    tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit
def notify_in_loop(signal, value):
    """`notify` in a loop that Triton shall pipeline (see `barrier`)."""
    barrier()
    tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit
def wait(context, signal, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index):
    """True once `signal >= expected`; false if the group gave up. The last four arguments say who
    waits for what, and cost nothing unless the wait fails."""
    since = trace_time(context)
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    if seen < expected:
        seen = _wait_longer(context, signal, expected, ROLE, KIND, peer, index)
    if KIND == RING_SPACE or KIND == SENT:
        # several warps of a CTA may ask the network for something, whatever their role
        trace(context, SEND, WAIT + KIND, peer, index, since)
    else:
        trace(context, ROLE, WAIT + KIND, peer, index, since)
    return seen >= expected


@triton.jit
def gave_up(context):
    """Has the group given up? Once a wait of this CTA has returned false, it has."""
    flag = tl.load(context + TABLE + tl.load(context + SIZE) + tl.load(context + RANK))
    return tl.load(flag.to(tl.pointer_type(tl.int64)), volatile=True) != 0


@triton.jit
def _wait_longer(context, signal, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index):
    aborted = tl.load(context + TABLE + tl.load(context + SIZE) + tl.load(context + RANK))
    aborted = aborted.to(tl.pointer_type(tl.int64))
    timeout = tl.load(context + TIMEOUT)
    start = now(context)
    reason = 0
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    while (seen < expected) & (reason == 0):
        if tl.atomic_add(aborted, 0, sem="relaxed", scope="sys") != 0:
            reason = TOLD_TO_LEAVE
        elif now(context) - start > timeout:
            reason = TIMED_OUT
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    if seen < expected:
        _record(context, reason, ROLE, KIND, peer, index, seen, expected, start)
        if reason == TIMED_OUT:
            _raise_abort(context)
    return seen


@triton.jit
def wait_all(context, signals, mask, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index):
    """`wait` for many signals between CTAs of this rank at once: those that the mask chooses."""
    since = trace_time(context)
    seen = tl.min(tl.where(mask, tl.atomic_add(signals, 0, mask=mask, sem="acquire", scope="gpu"), expected))
    if seen < expected:
        aborted = tl.load(context + TABLE + tl.load(context + SIZE) + tl.load(context + RANK))
        aborted = aborted.to(tl.pointer_type(tl.int64))
        timeout = tl.load(context + TIMEOUT)
        start = now(context)
        reason = 0
        while (seen < expected) & (reason == 0):
            if tl.atomic_add(aborted, 0, sem="relaxed", scope="sys") != 0:
                reason = TOLD_TO_LEAVE
            elif now(context) - start > timeout:
                reason = TIMED_OUT
            seen = tl.min(tl.where(mask, tl.atomic_add(signals, 0, mask=mask, sem="acquire", scope="gpu"), expected))
        if seen < expected:
            _record(context, reason, ROLE, KIND, peer, index, seen, expected, start)
            if reason == TIMED_OUT:
                _raise_abort(context)
    tl.debug_barrier()  # what one thread has acquired all may read
    trace(context, ROLE, WAIT + KIND, peer, index, since)
    return seen >= expected


@triton.jit
def _record(context, reason, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index, seen, expected, start):
    cta = tl.program_id(0)
    record = tl.load(context + RECORDS).to(tl.pointer_type(tl.int64)) + cta * RECORD_WORDS
    # the first wait that a CTA gives up tells the story; later ones only follow from it
    if tl.atomic_add(record, 0, sem="relaxed", scope="sys") == 0:
        tl.store(record + 1, tl.load(context + OP))
        tl.store(record + 2, tl.load(context + RANK))
        tl.store(record + 3, ROLE)
        tl.store(record + 4, cta)
        tl.store(record + 5, KIND)
        tl.store(record + 6, peer)
        tl.store(record + 7, index)
        tl.store(record + 8, seen)
        tl.store(record + 9, expected)
        tl.store(record + 10, now(context) - start)
        # one thread stores all scalars, so its release needs no barrier; `notify` has one, which would keep
        # Triton from pipelining a loop with a wait in it
        tl.atomic_xchg(record, reason, sem="release", scope="sys")


@triton.jit
def _raise_abort(context):
    size = tl.load(context + SIZE).to(tl.int32)
    for rank in range(size):
        flag = tl.load(context + TABLE + size + rank)
        if flag != 0:
            tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), 1, sem="release", scope="sys")


@triton.jit
def refuse(context, reason, peer, seen, expected):
    """Write down that the kernel found its input impossible. Nobody is told to leave: the kernel goes on to
    its end, on all ranks, and the group can be used again."""
    _record(context, reason, COMPUTE, ENTERED, peer, 0, seen, expected, now(context))


@triton.jit
def given_up(context):
    """Has the group given up? What an earlier launch on this rank should have left may be missing then."""
    flag = tl.load(context + TABLE + tl.load(context + SIZE) + tl.load(context + RANK))
    return tl.atomic_add(flag.to(tl.pointer_type(tl.int64)), 0, sem="relaxed", scope="sys") != 0
