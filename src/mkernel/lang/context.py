"""The context: a table of 64-bit words that tells a kernel about its group.

Every launch gets a pointer `context` to such a table in its own device's memory. The table holds the rank, the timeout
and the addresses of everything that ranks share: their segments of the symmetric heap, their abort flags, the request
ring. Rank and addresses are data instead of kernel arguments so that all ranks run the same binary. Triton specializes
for integer arguments that are 1 or divisible by 16, and loading a second binary while a peer already spins blocks until
that peer is done: a deadlock.

The host writes the table in `mkernel.runtime.group`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.trace import BEGUN, LAUNCHES, trace, trace_time

# Words of the table.
RANK = tl.constexpr(0)
SIZE_WORD = tl.constexpr(1)
TIMEOUT = tl.constexpr(2)  # nanoseconds a single wait may last
STATE = tl.constexpr(3)  # address of the state words below
RECORDS = tl.constexpr(4)  # address of the wait records, host-visible
RING = tl.constexpr(5)  # address of the request ring, 0 when the group has one node
SEGMENT = tl.constexpr(6)  # number of the heap segment that the table describes
OP = tl.constexpr(7)  # which operator, for the records
ABORTED = tl.constexpr(8)  # address of this rank's abort flag
POSTING = tl.constexpr(9)  # address of what the producers of the request ring share, 0 when there is none
MULTICAST = tl.constexpr(10)  # address of all ranks' copies of the segment at once, 0 when there is none
CTAS = tl.constexpr(11)  # how many CTAs a launch of this rank may have
# 14 and 15: where a traced launch writes its events, see lang/trace.py
TABLE = tl.constexpr(16)  # from here: the addresses of the segment on every rank, then those of abort flags

# Words of the state, private to a rank and to one workspace.
CLOCK = tl.constexpr(2)  # the newest time that a waiting CTA has seen
# 3 and 6: COUNTERS_DONE and PUBLISHERS_DONE of ops/moe/routing.py, 4: LINK_FREE of lang/copy.py
GRID_SYNC = tl.constexpr(5)  # CTAs that have come to bounded grid syncs (lang/grid.py), and the epoch
EPOCH = tl.constexpr(8)  # from here, a word for every CTA: the last epoch that it completed
MAX_CTAS = tl.constexpr(512)  # of a launch; no GPU has that many SMs
READY = tl.constexpr(8 + 512)  # from here, a word for every CTA: see lang/team.py
STATE_WORDS = tl.constexpr(8 + 2 * 512)

# Words of a wait record. A CTA owns two: at twice its program id, and the next.
RECORD_WORDS = tl.constexpr(16)
CLAIMED = tl.constexpr(11)  # 1 once a wait writes the record: several warps of a CTA may give up at the same time
RECORDED = tl.constexpr(15)  # of the first record only: 1 once any record was written, for the host to poll


class Comm(NamedTuple):
    """The group and the epoch of a running kernel, passed to every function that communicates.

    Build it inside the call of the kernel's body, `body(Comm(context, current_epoch(context), ranks.WORLD_SIZE,
    ranks.RANKS_PER_NODE), ...)`. A structure that is assigned to a name first loses its constants.

    Attributes:
        context: pointer to the context table.
        epoch: the epoch of this launch, see `current_epoch`.
        WORLD_SIZE: ranks in the group, a constant.
        RANKS_PER_NODE: ranks in each node, a constant.
    """

    context: Any
    epoch: Any
    WORLD_SIZE: Any
    RANKS_PER_NODE: Any


class Ranks(NamedTuple):
    """How many ranks the group has. The host passes it to a kernel.

    Attributes:
        WORLD_SIZE: ranks in the group, a constant.
        RANKS_PER_NODE: ranks in each node, a constant.
    """

    WORLD_SIZE: Any
    RANKS_PER_NODE: Any


@triton.jit
def rank_of(context):
    """This rank's number in the group, as a 32-bit integer. Reads it from the context table."""
    return tl.load(context + RANK).to(tl.int32)


@triton.jit
def segment_of(context, rank, DTYPE: tl.constexpr):
    """Pointer to the start of `rank`'s copy of the segment, aligned to 16 bytes.

    `rank` must be in this node: memory of other nodes is not mapped, and only `post` reaches it.
    """
    address = tl.load(context + TABLE + rank)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def state_of(context):
    """Pointer to the state words of this workspace: the epoch and counters, private to this rank."""
    return tl.load(context + STATE).to(tl.pointer_type(tl.int64))


@triton.jit
def current_epoch(context):
    """The epoch of the running launch: one more than the last completed one.

    Call it once, at the beginning. Every CTA has a word of its own for it, which only `finish` changes, so all CTAs of
    the launch get the same epoch. A launch that calls it must call `finish`.
    """
    epoch = tl.load(state_of(context) + EPOCH + tl.program_id(0)) + 1
    trace(context, LAUNCHES, BEGUN, 0, epoch, trace_time(context))
    return epoch
