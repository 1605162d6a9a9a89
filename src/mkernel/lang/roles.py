"""Roles: the program id of a CTA determines what it does and which tiles it computes.

The CTAs of a launch are numbered by role, those that others wait for first: `send` (posts requests to other nodes),
`intra` (copies over NVLink), then `compute`. Within a rank, no CTA waits for one with a higher program id, so a launch
would finish even if its CTAs ran one after the other.

A CTA whose transfers are done joins the compute. It takes tiles of the rank's own rows that were reserved for it, which
depend on nothing. If it took tiles of other ranks' rows, it would wait for copies made by higher program ids of those
ranks, and two ranks could wait for each other.

In general, the assignment of tiles is static. The alternative, an atomic counter that hands out tiles, lost in a
prototype (floor fraction 0.86-0.89 with 4 ranks): its `while` loop keeps Triton from overlapping one tile's store with
the next tile's loads, and the order of tiles differs from run to run. The mixture-of-experts operators use a counter
all the same (`take`), because there it is unknown before the launch which CTA will be free when.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

SEND = tl.constexpr(0)
INTRA = tl.constexpr(1)
COMPUTE = tl.constexpr(2)


class Share(NamedTuple):
    """The tiles of a CTA: first, first + step, and so on, below end.

    Attributes:
        first: the first tile.
        end: all tiles are below it.
        step: from one tile to the next.
    """

    first: Any
    end: Any
    step: Any


@triton.jit
def this_cta():
    """The number of this CTA: no CTA waits for one with a higher number."""
    return tl.program_id(0)


@triton.jit
def own_tiles_of(cta, helpers, own, left):
    """(first, end, step): which of the `own` tiles of this rank's rows the CTA computes.

    The helpers, the CTAs with the lowest program ids, share the last `left` of them. The compute CTAs share the others,
    round-robin.
    """
    compute = tl.num_programs(0) - helpers
    helps = cta < helpers
    first = tl.where(helps, own - left + cta, cta - helpers)
    end = tl.where(helps, own, own - left)
    step = tl.where(helps, max(helpers, 1), compute)
    return first, end, step


@triton.jit
def other_tiles_of(cta, helpers, before, tiles):
    """(first, end, step): which of the `tiles` of other ranks' rows the CTA computes. The round-robin over the compute
    CTAs continues where the first `before` tiles ended. Helpers get none."""
    compute = tl.num_programs(0) - helpers
    turn = (cta - helpers + compute - before % compute) % compute
    first = tl.where(cta < helpers, tiles, turn)
    return first, tiles, compute


@triton.jit
def take(tickets):
    """The next ticket, starting with the value of the counter: an atomic increment. Orders nothing else (relaxed)."""
    return tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
