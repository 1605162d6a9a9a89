"""Trace: what a CTA did and when, recorded by the kernel itself.

    since = trace_time(context)
    ...                                             # push a chunk, multiply a tile
    trace(context, INTRA, PUSH_CHUNK, peer, chunk, since)

A launch is traced if its context table consists of unsigned words. The type of `context` thus carries the switch to
every function that has a context, and the compiler knows it: in a launch that is not traced, `trace_time` and `trace`
compile to nothing, and the machine code is the same as without them.

The functions of this package trace, for every operator, each launch of a CTA (`current_epoch` and `finish`), each wait
(`wait`) and each request to the network (`post`). Operators add what only they know: tiles and chunks.

Where events go. A CTA has several lanes of events in device memory, and each lane has one writer at a time: the warps
of a role write the lane of that role, the warps that multiply write TILES, and the code around the roles writes
LAUNCHES. So concurrent warps (Gluon) never write to the same lane. The first word of a lane counts its events; events
beyond its capacity are only counted. The thread that stores the scalars of its warps is always the same one, and the
only one that needs the count. It reads what it wrote itself, so no atomics are needed.

Cost when on: two reads of the timer and 40 bytes of stores per event. Nothing waits for the stores; the load of the
count takes a few hundred cycles.
"""

import triton
import triton.language as tl

# Words of the context table, next to those in lang/context.py.
TRACE = tl.constexpr(14)  # address of the lanes
LANE_WORDS = tl.constexpr(15)  # words from one lane to the next

# Lanes of a CTA. The first ones belong to the roles and have their numbers.
TILES = tl.constexpr(6)
LAUNCHES = tl.constexpr(7)
LANES = tl.constexpr(8)

# Kinds of events. `peer` is the rank whose data it is about, `index` a number that the operator chooses.
BEGUN = tl.constexpr(0)  # the CTA has begun a launch; index is the epoch
ENDED = tl.constexpr(1)  # it has ended it
TILE = tl.constexpr(2)  # a tile was computed
PUSH_CHUNK = tl.constexpr(3)  # a chunk was written to ranks of this node, and is signalled next
SEND_CHUNK = tl.constexpr(4)  # a chunk was staged and given to the network
POST = tl.constexpr(5)  # one request to the network; index is its ticket
REDUCE = tl.constexpr(6)  # what arrived was added up
GATHER = tl.constexpr(7)  # what a rank of this node has finished was read
# 64 + kind of signal: waited for it; it was seen at the end. Maybe it took no time at all, but where a tile waits.
WAIT = tl.constexpr(64)

# In place of a time: since the last event of the lane, or since the CTA began the launch.
LAST = tl.constexpr(0)

# Words of an event, and of what stands before the first event of a lane.
EVENT_WORDS = tl.constexpr(4)


@triton.jit
def _stamp():
    return tl.inline_asm_elementwise(
        "/* trace */ mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def trace_time(context):
    """The time at which an event begins, for `trace`. 0 in a launch that is not traced."""
    if context.dtype.element_ty == tl.uint64:
        time = _stamp()
    else:
        time = tl.cast(0, tl.int64)
    return time


@triton.jit
def _fits(offset, words):
    """Does an event at this offset end before the lane does?"""
    return offset + EVENT_WORDS <= words


@triton.jit
def trace(context, LANE: tl.constexpr, KIND: tl.constexpr, peer, index, since):
    """Record an event of this KIND that lasted from `since` until now. Where the start time cannot be carried along,
    as in a single loop over tiles and steps, pass LAST: the event then starts at the end of the lane's last one."""
    if context.dtype.element_ty == tl.uint64:
        now = _stamp()
        words = tl.load(context + LANE_WORDS).to(tl.int64)
        lane = tl.load(context + TRACE).to(tl.pointer_type(tl.int64)) + (tl.program_id(0) * LANES + LANE) * words
        count = tl.load(lane)
        tl.store(lane, count + 1)
        offset = (count + 1) * EVENT_WORDS
        inside = _fits(offset, words)
        tl.store(lane + offset, tl.cast(since, tl.int64), mask=inside)
        tl.store(lane + offset + 1, now, mask=inside)
        tl.store(lane + offset + 2, ((tl.cast(peer, tl.int64) & 0xFFFF) << 16) | KIND, mask=inside)
        tl.store(lane + offset + 3, tl.cast(index, tl.int64), mask=inside)
