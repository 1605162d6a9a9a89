"""Signals: how a CTA tells another CTA, on any rank, that data is ready.

A signal is a 64-bit counter in the symmetric heap that only grows. The writer of the data sets it to the epoch
(`notify`); a reader waits until it is at least the epoch (`wait`). It is never reset.

Guarantee: everything that any thread of the notifying CTA stored before `notify` is visible to every thread of the
waiting CTA after `wait` has returned true. Reads through tensor descriptors also need `acquire_for_descriptors` after
the wait.

Every wait ends. After the group's timeout, or as soon as another CTA of the group has given up, the waiting CTA writes
a wait record, raises the abort flag of every rank it can reach, and returns false. The kernel then runs to its end
without waiting any more and marks what it could not compute with NaN. The host finds the record and raises
`mk.CommTimeout`.

No rank returns a wrong result because of that. A CTA that has given up may still pass on data that it never received,
and signal it. But it has raised the abort flags before. Within the node, the receiver finds its own flag raised at the
end of its launch and leaves a record (`finish`), even if all its waits succeeded. The flags of other nodes are out of
reach, so nothing is sent to other nodes any more (`post`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import (
    ABORTED,
    CLAIMED,
    CTAS,
    EPOCH,
    OP,
    RANK,
    RECORD_WORDS,
    RECORDED,
    RECORDS,
    SIZE_WORD,
    TABLE,
    TIMEOUT,
    state_of,
)
from mkernel.lang.device import barrier, now
from mkernel.lang.hints import waited_for
from mkernel.lang.roles import COMPUTE, INTRA, SEND
from mkernel.lang.trace import ENDED, LAUNCHES, WAIT, trace, trace_time

# Why a record was written.
TIMED_OUT = tl.constexpr(1)
TOLD_TO_LEAVE = tl.constexpr(2)
# ... or why a kernel refused its input, see `refuse`.
OVER_CAPACITY = tl.constexpr(3)  # more rows go to a rank than it can take
INVALID_ID = tl.constexpr(4)  # an expert id is beyond the last expert

# How often a wait for a block of signals polls them before it checks the abort flag and the clock again. These checks
# take three times as long as a poll, and a signal that arrives meanwhile is seen late. This matters to short launches,
# which wait this way. Other waits poll once: large kernels have many of them, and an inner loop in each takes time to
# compile.
POLLS = tl.constexpr(16)

# What was waited for. Kinds from 16 on belong to single operators: see kinds.py in their packages.
ENTERED = tl.constexpr(0)  # the peer has entered the epoch before this one: its buffers may be written
ARRIVED = tl.constexpr(1)  # a chunk of the peer's rows has arrived
RING_SPACE = tl.constexpr(2)  # the proxy has taken an old request out of the ring
SENT = tl.constexpr(3)  # the proxy has finished reading what it was asked to send
PARTIAL_SUM = tl.constexpr(4)  # another CTA of this rank has stored its partial sum, see lang/team.py
NOTHING = tl.constexpr(5)  # no wait failed, but the group had given up when the launch ended


class Awaited(NamedTuple):
    """What a wait record says about a wait. None of it affects the wait.

    Attributes:
        ROLE: the role of the waiting CTA, a constant.
        KIND: the kind of signal, such as ARRIVED, a constant.
        peer: the rank that is to raise the signal, or -1.
        index: which signal of that kind: the chunk, tile or ticket.
    """

    ROLE: Any
    KIND: Any
    peer: Any
    index: Any


@triton.jit
def raise_signal(signal, value):
    """Set a signal with a release at system scope, after all earlier stores of this thread. `notify` is for all threads
    of the CTA."""
    tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit
def notify(signal, value):
    """Set a signal, in this node's memory, after all earlier stores: a CTA barrier, then one release at system scope.

    Stores through tensor descriptors must be completed first (`complete_descriptor_stores`).
    """
    tl.debug_barrier()
    raise_signal(signal, value)


@triton.jit
def notify_in_loop(signal, value):
    """`notify` inside a loop that Triton should pipeline (see `barrier`)."""
    barrier()
    raise_signal(signal, value)


@triton.jit
def notify_each(signals, value, mask):
    """`notify` for a block of signals: those selected by the mask, each set by its own thread."""
    tl.debug_barrier()
    tl.atomic_xchg(signals, value, mask=mask, sem="release", scope="sys")


@triton.jit
def poll(signal):
    """Read a signal with an acquire at system scope. (Triton compiles an addition of zero to a load.)"""
    return tl.atomic_add(signal, 0, sem="acquire", scope="sys")


@triton.jit
def poll_each(signals, mask, SCOPE: tl.constexpr):
    """`poll` for a block of signals: those selected by the mask, each read by its own thread."""
    return tl.atomic_add(signals, 0, mask=mask, sem="acquire", scope=SCOPE)


@triton.jit
def share_acquired():
    """Make what one thread has acquired visible to all threads of the CTA: a barrier."""
    tl.debug_barrier()


@triton.jit
def wait(context, signal, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index):
    """Wait until `signal >= expected`. Returns true then, and false if the group gave up.

    ROLE, KIND, peer and index describe the wait in its record (see `Awaited`) and cost nothing unless it fails.
    """
    reached = wait_value(context, signal, expected, ROLE, KIND, peer, index)
    waited_for(signal, True, expected)
    return reached >= expected


@triton.jit
def wait_value(context, signal, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index):
    """`wait` that returns the value it saw, for callers that use more than they asked for. The value is less than
    `expected` if the group gave up."""
    since = trace_time(context)
    seen = poll(signal)
    if seen < expected:
        seen = _wait_longer(context, signal, expected, ROLE, KIND, peer, index)
    if KIND == RING_SPACE or KIND == SENT:
        # several warps of a CTA may ask the network for something, whatever their role
        trace(context, SEND, WAIT + KIND, peer, index, since)
    else:
        trace(context, ROLE, WAIT + KIND, peer, index, since)
    return seen


@triton.jit
def wait_again(context, signal, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index):
    """`wait` for signals that are usually set already, such as those that many tiles check in turn. Only waits that had
    to wait are traced; tracing all of them would cost more than the waits."""
    seen = poll(signal)
    if seen < expected:
        since = trace_time(context)
        seen = _wait_longer(context, signal, expected, ROLE, KIND, peer, index)
        trace(context, ROLE, WAIT + KIND, peer, index, since)
    waited_for(signal, True, expected)
    return seen >= expected


@triton.jit
def gave_up(context):
    """Whether the group has given up. True if a wait of this CTA, or of any CTA whose signal it has seen, returned
    false."""
    return tl.load(tl.load(context + ABORTED).to(tl.pointer_type(tl.int64)), volatile=True) != 0


@triton.jit
def _wait_longer(context, signal, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index):
    aborted = tl.load(context + ABORTED).to(tl.pointer_type(tl.int64))
    timeout = tl.load(context + TIMEOUT)
    start = now(context)
    reason = 0
    seen = poll(signal)
    while (seen < expected) & (reason == 0):
        if tl.atomic_add(aborted, 0, sem="relaxed", scope="sys") != 0:
            reason = TOLD_TO_LEAVE
        elif now(context) - start > timeout:
            reason = TIMED_OUT
        seen = poll(signal)
    if seen < expected:
        _record(context, reason, Awaited(ROLE, KIND, peer, index), seen, expected, now(context) - start)
        _raise_abort(context)
    return seen


@triton.jit
def wait_all(context, signals, mask, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peer, index):
    """`wait` for a block of signals between CTAs of this rank: those selected by the mask. Acquires at GPU scope, and
    ends with a CTA barrier."""
    return _wait_all(context, signals, mask, expected, Awaited(ROLE, KIND, peer, index), "gpu")


@triton.jit
def wait_peers(context, signals, mask, expected, ROLE: tl.constexpr, KIND: tl.constexpr, peers, index):
    """`wait` for a block of signals, one from each of several peers: those selected by the mask. Acquires at system
    scope, and ends with a CTA barrier. The record names one of the peers that are furthest behind."""
    return _wait_all(context, signals, mask, expected, Awaited(ROLE, KIND, peers, index), "sys")


@triton.jit
def _wait_all(context, signals, mask, expected, awaited, SCOPE: tl.constexpr):
    since = trace_time(context)
    seen = tl.where(mask, poll_each(signals, mask, SCOPE), expected)
    least = tl.min(seen)
    if least < expected:
        aborted = tl.load(context + ABORTED).to(tl.pointer_type(tl.int64))
        timeout = tl.load(context + TIMEOUT)
        start = now(context)
        reason = 0
        while (least < expected) & (reason == 0):
            polls = 0
            while (least < expected) & (polls < POLLS):
                seen = tl.where(mask, poll_each(signals, mask, SCOPE), expected)
                least = tl.min(seen)
                polls += 1
            if least < expected:
                if tl.atomic_add(aborted, 0, sem="relaxed", scope="sys") != 0:
                    reason = TOLD_TO_LEAVE
                elif now(context) - start > timeout:
                    reason = TIMED_OUT
                seen = tl.where(mask, poll_each(signals, mask, SCOPE), expected)
                least = tl.min(seen)
        if least < expected:
            late = tl.max(tl.where(seen == least, awaited.peer, -1))  # one of those that are furthest behind
            _record(
                context, reason, Awaited(awaited.ROLE, awaited.KIND, late, awaited.index), least, expected,
                now(context) - start,
            )  # fmt: skip
            _raise_abort(context)
    waited_for(signals, mask, expected)
    share_acquired()
    trace(context, awaited.ROLE, WAIT + awaited.KIND, -1, awaited.index, since)
    return least >= expected


@triton.jit
def _record(context, reason, awaited, seen, expected, nanoseconds):
    cta = tl.program_id(0)
    # warps that copy within the node may wait beside others of their CTA: they have a record of their own
    row = 2 * cta + (1 if awaited.ROLE == INTRA else 0)
    records = tl.load(context + RECORDS).to(tl.pointer_type(tl.int64))
    record = records + row * RECORD_WORDS
    # the first wait that is given up tells the story; later ones only follow from it
    if tl.atomic_xchg(record + CLAIMED, 1, sem="relaxed", scope="sys") == 0:
        tl.store(record + 1, tl.load(context + OP))
        tl.store(record + 2, tl.load(context + RANK))
        tl.store(record + 3, awaited.ROLE)
        tl.store(record + 4, cta)
        tl.store(record + 5, awaited.KIND)
        tl.store(record + 6, awaited.peer)
        tl.store(record + 7, awaited.index)
        tl.store(record + 8, seen)
        tl.store(record + 9, expected)
        tl.store(record + 10, nanoseconds)
        # one thread stores all scalars, so its release needs no barrier; `notify` has one, which would keep
        # Triton from pipelining a loop with a wait in it
        tl.atomic_xchg(record, reason, sem="release", scope="sys")
        tl.atomic_xchg(records + RECORDED, 1, sem="release", scope="sys")  # last: the host then reads the records


@triton.jit
def _raise_abort(context):
    # A CTA that found its own flag raised does this, too: the CTA that raised it may not have raised all others yet.
    # What a CTA stores afterwards comes after the flags, hence the acquire.
    size = tl.load(context + SIZE_WORD).to(tl.int32)
    for rank in range(size):
        flag = tl.load(context + TABLE + size + rank)
        if flag != 0:
            tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), 1, sem="acq_rel", scope="sys")


@triton.jit
def refuse(context, reason, peer, seen, expected):
    """Record that the kernel cannot process its input. No abort flag is raised: the kernel runs to its end on all
    ranks, every rank raises, and the group remains usable."""
    _record(context, reason, Awaited(COMPUTE, ENTERED, peer, 0), seen, expected, 0)


@triton.jit
def finish(context, epoch, WORLD_SIZE: tl.constexpr):
    """End the launch. Every CTA calls this last, once.

    If the group has given up, the CTA leaves a record, because its inputs may never have arrived.

    The CTA writes the epoch into its word of the state, and into those of CTAs that this launch does not have, so the
    next launch (or the next replay of a captured graph) continues from there without the host. No CTA waits for another
    one or for its own stores, as it would to count the CTAs that are done (docs/experiments.md, 2026-11-18).
    """
    epochs = state_of(context) + EPOCH
    tl.debug_barrier()  # all warps have read the old one
    if WORLD_SIZE > 1:
        if gave_up(context):
            _record(context, TOLD_TO_LEAVE, Awaited(COMPUTE, NOTHING, -1, 0), 0, 0, 0)
    trace(context, LAUNCHES, ENDED, 0, epoch, trace_time(context))
    cta = tl.program_id(0)
    tl.store(epochs + cta, epoch)
    for other in range(cta + tl.num_programs(0), tl.load(context + CTAS).to(tl.int32), tl.num_programs(0)):
        tl.store(epochs + other, epoch)
