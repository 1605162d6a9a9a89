"""Teams: the CTAs that compute one tile together, each with a part of k.

A product with few rows and columns has fewer tiles than a GPU has SMs, and the time goes into reading b. A team of SIZE
CTAs reads it SIZE times as fast: each member multiplies the tile for its part of k, and stores the partial sum in fp32
for the others. Then each member adds SIZE partial sums of its own M // SIZE rows, in the order of members, so the bits
do not depend on who is first.

Members wait for each other, so all CTAs of the launch must be resident, which the launcher guarantees.

Measured on an H200, one rank, 16x1024x8192, tiles of 16x64, the kernel alone: teams of 4 take 8.4 us, teams of 8 take
6.2, and cuBLAS 7.5. A single member that adds all rows would read SIZE times as much, while the others are idle.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.device import prefetch
from mkernel.lang.gemm import multiply_step, multiply_tile
from mkernel.lang.roles import COMPUTE
from mkernel.lang.scaling import scale_tile
from mkernel.lang.signals import PARTIAL_SUM, wait_all


class Team(NamedTuple):
    """How CTAs share tiles.

    Attributes:
        ready: pointer to a word for each worker, in the state of the workspace (READY of lang/context.py): the last
            epoch in which its partial sum was stored. The host passes it: reading it from the context table takes two
            loads, which nothing would hide. Words in the segment would not do: calls of other shapes have signals of
            other ranks in their place, which are atomic for all GPUs and not for this one alone.
        sums: pointer to M * N elements in fp32 for each worker; None if SIZE is 1.
        SIZE: CTAs of a team, a power of two and at most M; a constant.
    """

    ready: Any
    sums: Any
    SIZE: Any


@triton.jit
def notify_team(comm, team, worker):
    """Tell the other members that this worker's partial sum is stored."""
    tl.debug_barrier()
    tl.atomic_xchg(team.ready + worker, comm.epoch, sem="release", scope="gpu")


@triton.jit
def wait_team(comm, team, worker):
    """Wait for the partial sums of all members of this worker's team; false if the group gave up."""
    member = tl.arange(0, team.SIZE)
    words = team.ready + worker // team.SIZE * team.SIZE + member
    return wait_all(comm.context, words, member < team.SIZE, comm.epoch, COMPUTE, PARTIAL_SUM, -1, worker)


@triton.jit
def first_row_in_team(team, worker, M: tl.constexpr):
    """The first row of its tile that `multiply_in_team` leaves to this worker."""
    return worker % team.SIZE * (M // team.SIZE)


@triton.jit
def _multiply_part(a, b, tile, k, tiling, part, PARTS: tl.constexpr):
    """`multiply_tile` for one of several parts of k."""
    steps = tl.cdiv(k, tiling.K)
    share = tl.cdiv(steps, PARTS)
    accumulator = tl.zeros((tiling.M, tiling.N), tl.float32)
    for step in range(part * share, tl.minimum((part + 1) * share, steps)):
        accumulator = multiply_step(accumulator, a, b, tile, step * tiling.K, k, tiling)
    return scale_tile(accumulator, a, b, tile)


@triton.jit
def _prefetch_scales(scales, part, first, end, SIZE: tl.constexpr):
    """Prefetch the scales of SIZE rows or columns into the cache: with few rows, nothing hides the latency of loads
    after the last step. Those of blocks are loaded in every step."""
    if not scales.BLOCKWISE:
        i = tl.minimum(first + tl.arange(0, SIZE), end - 1)
        offset = (i // scales.GROUP).to(tl.int64) * scales.row + tl.cast(part, tl.int64) * scales.part
        prefetch(scales.data + offset)


@triton.jit
def _add_rows(team, tile, worker, tiling):
    """The sum over all members of the rows that are left to this worker. All partial sums must be stored."""
    ROWS: tl.constexpr = tiling.M // team.SIZE
    i = worker % team.SIZE * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, tiling.N)[None, :]
    inside = (tile.row + i < tile.rows) & (tile.column + j < tile.columns)
    first = team.sums + worker // team.SIZE * team.SIZE * (tiling.M * tiling.N) + i * tiling.N + j
    total = tl.zeros((ROWS, tiling.N), tl.float32)
    for member in tl.static_range(team.SIZE):
        total += tl.load(first + member * (tiling.M * tiling.N), mask=inside, other=0.0)
    return total


@triton.jit
def multiply_in_team(comm, a, b, tile, k, tiling, team, worker):
    """The product of a tile, as `multiply_tile` computes it, by the team of this worker. Workers are numbered from 0,
    those of a team consecutively. Returns the M // SIZE rows that are left to this worker, from `first_row_in_team` on;
    NaN if the group gave up."""
    if a.strides.SCALED:
        _prefetch_scales(a.strides.scales, tile.part, tile.row, tile.rows, tiling.M)
        _prefetch_scales(b.strides.scales, tile.part, tile.column, tile.columns, tiling.N)
    if team.SIZE == 1:
        total = multiply_tile(a, b, tile, k, tiling)
    else:
        partial = _multiply_part(a, b, tile, k, tiling, worker % team.SIZE, team.SIZE)
        i = tl.arange(0, tiling.M)[:, None]
        j = tl.arange(0, tiling.N)[None, :]
        inside = (tile.row + i < tile.rows) & (tile.column + j < tile.columns)
        tl.store(team.sums + worker * (tiling.M * tiling.N) + i * tiling.N + j, partial, mask=inside)
        notify_team(comm, team, worker)
        complete = wait_team(comm, team, worker)
        total = _add_rows(team, tile, worker, tiling) + tl.where(complete, 0.0, float("nan"))
    return total
