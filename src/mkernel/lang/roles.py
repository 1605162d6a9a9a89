"""Roles: what a CTA does follows from its program id, and who computes which tile from a schedule.

The CTAs of a launch are numbered by role, those that others wait for first: `send` (post requests
to other nodes), `intra` (copy over NVLink), then `compute`. Within a rank no CTA waits for one with
a higher program id, so a launch would finish even if its CTAs ran one after the other.

A CTA whose transfers are done joins the compute. Who computes what is fixed before the launch: in
the first `join_round` rounds the tiles go round the compute CTAs only, afterwards round all CTAs.
The alternative, an atomic counter that hands out tiles, was measured and lost: its `while` loop
keeps Triton from overlapping one tile's store with the next tile's loads (0.86-0.89 of the floor
against 0.92 for 4 ranks), and it makes the order of tiles differ from run to run.
"""

import triton
import triton.language as tl

SEND = tl.constexpr(0)
INTRA = tl.constexpr(1)
COMPUTE = tl.constexpr(2)


@triton.jit
def worker_of(cta, helpers):
    """The CTA's number among the workers: the compute CTAs come first, the helpers (send and intra
    CTAs, which have the lowest program ids) behind them."""
    return tl.where(cta < helpers, tl.num_programs(0) - helpers + cta, cta - helpers)


@triton.jit
def first_round(cta, helpers, join_round):
    """The round in which this CTA computes its first tile."""
    return tl.where(cta < helpers, join_round, 0)


@triton.jit
def tile_in_round(round, worker, helpers, join_round):
    """The number of the tile that `worker` computes in `round`."""
    ctas = tl.num_programs(0)
    early = round * (ctas - helpers) + worker
    late = join_round * (ctas - helpers) + (round - join_round) * ctas + worker
    return tl.where(round < join_round, early, late)


@triton.jit
def rounds_before(tile, cta, helpers, join_round):
    """How many rounds this CTA's tiles with numbers below `tile` take, counted from round 0; so
    `range(first_round, rounds_before(tiles))` are its rounds in a launch of `tiles` tiles."""
    ctas = tl.num_programs(0)
    worker = worker_of(cta, helpers)
    alone = ctas - helpers
    shared = join_round * alone
    late = join_round + (tl.maximum(tile - shared - worker, 0) + ctas - 1) // ctas
    early = (tl.maximum(tile - worker, 0) + tl.maximum(alone, 1) - 1) // tl.maximum(alone, 1)
    rounds = tl.where(tile > shared, late, early)
    return tl.where((tile <= shared) & (cta < helpers), first_round(cta, helpers, join_round), rounds)
