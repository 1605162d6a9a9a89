"""Roles: what a CTA does follows from its program id, and so do the tiles that it computes.

The CTAs of a launch are numbered by role, those that others wait for first: `send` (post requests
to other nodes), `intra` (copy over NVLink), then `compute`. Within a rank no CTA waits for one with
a higher program id, so a launch would finish even if its CTAs ran one after the other.

A CTA whose transfers are done joins the compute. It takes tiles of the rank's own rows, which were
left for it: those need nothing from anybody. If it took tiles of other ranks' rows, it would wait for
copies that higher program ids of those ranks make, and two ranks could wait for each other.

In general, who computes what is fixed before the launch. The alternative, an atomic counter that hands out
tiles, lost in a prototype (floor fraction 0.86-0.89 with 4 ranks): its `while` loop keeps Triton from
overlapping one tile's store with the next tile's loads, and it makes the order of tiles differ from run
to run. Mixture of experts does so all the same (`take`): there nobody knows before the launch who is free when.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

SEND = tl.constexpr(0)
INTRA = tl.constexpr(1)
COMPUTE = tl.constexpr(2)


class Share(NamedTuple):
    """The tiles first, first + step, ... below end."""

    first: Any
    end: Any
    step: Any


@triton.jit
def this_cta():
    """The number of this CTA: no CTA waits for one with a higher number."""
    return tl.program_id(0)


@triton.jit
def own_tiles_of(cta, helpers, own, left):
    """(first, end, step): which of the rank's `own` tiles this CTA computes. The last `left` of them
    are for the helpers, the CTAs with the lowest program ids; the others go round the compute CTAs."""
    compute = tl.num_programs(0) - helpers
    helps = cta < helpers
    first = tl.where(helps, own - left + cta, cta - helpers)
    end = tl.where(helps, own, own - left)
    step = tl.where(helps, max(helpers, 1), compute)
    return first, end, step


@triton.jit
def other_tiles_of(cta, helpers, before, tiles):
    """(first, end, step): which of the other `tiles` this CTA computes. They go on round the compute
    CTAs where the first `before` tiles ended; helpers get none."""
    compute = tl.num_programs(0) - helpers
    turn = (cta - helpers + compute - before % compute) % compute
    first = tl.where(cta < helpers, tiles, turn)
    return first, tiles, compute


@triton.jit
def take(tickets):
    """The next number that nobody in this rank has taken."""
    return tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
