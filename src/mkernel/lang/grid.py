"""Bounded grid sync: CTAs of a rank that load the same data should load it at the same time.

The first CTA that loads some rows or columns gets them from memory, and the others find them in L2, if they come soon
enough. Left alone, CTAs drift apart, and data is loaded from memory repeatedly. Where that matters, the warps that load
wait for each other now and then, for a bounded number of polls. Only speed depends on it.
"""

import triton
import triton.language as tl

from mkernel.lang.context import GRID_SYNC, state_of

MAX_SPINS = tl.constexpr(64)  # maximum polls of a sync; about 50 us (estimated)
SYNC_STEPS = tl.constexpr(32)  # steps through k from one sync of a GEMM to the next; about 20 us


@triton.jit
def sync_grid(comm, syncs, ctas):
    """Wait until `ctas` CTAs of this rank have come to sync number `syncs` of this launch (0, 1, ...), for at most
    MAX_SPINS polls. Every one of them must call it with the same numbers."""
    word = state_of(comm.context) + GRID_SYNC
    begin = comm.epoch * 4294967296
    tl.atomic_max(word, begin, sem="relaxed", scope="gpu")
    seen = tl.atomic_add(word, 1, sem="relaxed", scope="gpu") + 1
    spins = 0
    while (seen < begin + (syncs + 1) * ctas) & (spins < MAX_SPINS):
        seen = tl.atomic_add(word, 0, sem="relaxed", scope="gpu")
        spins += 1


@triton.jit
def sync_steps(comm, step, common_steps):
    """Sync the load warps of a GEMM before every SYNC_STEPS-th of their steps through k. common_steps: how many steps
    every CTA of the launch has, at least."""
    if (step % SYNC_STEPS == SYNC_STEPS - 1) & (step < common_steps):
        sync_grid(comm, step // SYNC_STEPS, tl.num_programs(0))
