"""The kernel for few rows in one node, of matmul_reduce_scatter and, with one rank, of matmul_all_reduce.

With few rows, the time goes into reading b, so it is read once: a tile covers the rows of several ranks. (The other
kernels of matmul_reduce_scatter have tiles of each rank's rows, and would read b once per rank.) A team of CTAs
computes a tile, each with a part of k (lang/team.py), and leaves some rows of it to each member. Such a block of rows
is a *unit*. For each of its units, a CTA

- pushes the rows that belong to other ranks to them, and signals each of these ranks;
- if some rows belong to this rank: waits for the partials of all other ranks, adds them to its own in the order of
  ranks, cyclically from the next one on, adds bias and residual, and stores the result.

Unit u is the same rows and columns on every rank, since all ranks have the same tiles and teams.

Signals, rounding and the reuse of buffers are described in the docstrings of the packages. Every rank has rows, which
need partials of all ranks.

Why it cannot deadlock. A CTA waits for the members of its team, which are resident and wait for nothing before that. It
also waits for the pushes of the same unit by the CTAs with the same program id. A CTA pushes a unit before it waits for
that unit, and after it has waited for earlier units only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import TABLE, Comm, Ranks, current_epoch, rank_of
from mkernel.lang.copy import wait_paced
from mkernel.lang.device import clock
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.matrix import Tile
from mkernel.lang.roles import COMPUTE, this_cta
from mkernel.lang.signals import finish, notify_each, wait_peers
from mkernel.lang.team import first_row_in_team, multiply_in_team
from mkernel.lang.trace import LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.reduce.call import Plan, Sum
from mkernel.ops.reduce.kinds import PARTIAL
from mkernel.ops.reduce.operands import (
    INPUTS,
    RESULTS,
    call_of,
    count_tiles,
    matrices_of,
    tile_corner,
    variant_of,
    with_matrices,
)
from mkernel.ops.reduce.protocol import signal_at, slot_at
from mkernel.runtime.group import Group
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants
from mkernel.runtime.teams import scratch_of, team_of
from mkernel.runtime.world import Launch


class Exchange(NamedTuple):
    """The arrays of a call in its workspace: see `layout`."""

    partial: Any  # Words; with one rank, this and the following are None
    partials: Any  # Slots
    team: Any  # Team
    RANKS: Any  # of the group, rounded up to a power of two


def layout(group: Group, plan: Plan, op: str, dtype: torch.dtype) -> Layout:
    """The workspace of a call. Signals hold epochs.

    partial[i, unit]: partials[i, unit] holds the partial of the rank i + 1 after this one, cyclically: the rows of the
        unit that belong to this rank.
    """
    c, memory = plan.config, Layout(op)
    if group.size > 1:
        units = plan.tiles * c.team_ctas
        memory.signals("partial", group.size - 1, units)
        memory.buffer("partials", dtype, group.size - 1, units, c.tile_m // c.team_ctas * c.tile_n)
    return memory


@triton.jit
def owned_rows(comm, product):
    """Rows of the sum that each rank gets."""
    return product.rows // comm.WORLD_SIZE


@triton.jit
def push_unit(comm, call, total, row, column, unit):
    """Push the rows of a unit, from (row, column) of the sum on, that belong to other ranks."""
    ROWS: tl.constexpr = total.shape[0]
    COLUMNS: tl.constexpr = total.shape[1]
    DTYPE: tl.constexpr = call.exchange.partials.DTYPE
    rank = rank_of(comm.context)
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    inside = row + i < call.product.rows
    owner = tl.where(inside, (row + i) // owned_rows(comm, call.product), rank)
    segments = tl.load(comm.context + TABLE + owner).to(tl.pointer_type(DTYPE))
    source = (rank - owner - 1 + comm.WORLD_SIZE) % comm.WORLD_SIZE  # this rank, counted from the one after the owner
    starts = segments + slot_of(call.exchange.partials, comm.epoch, source, unit) + i * COLUMNS
    pushed = (owner != rank)[:, None] & (column + j < call.product.n)[None, :]
    tl.store(starts[:, None] + j[None, :], total.to(DTYPE), mask=pushed)


@triton.jit
def notify_owners(comm, call, row, unit, ROWS: tl.constexpr):
    """Signal the partial of a unit to the other ranks that have rows in it."""
    rank = rank_of(comm.context)
    peer = tl.arange(0, call.exchange.RANKS)
    first = row // owned_rows(comm, call.product)
    last = (tl.minimum(row + ROWS, call.product.rows) - 1) // owned_rows(comm, call.product)
    notified = (peer >= first) & (peer <= last) & (peer != rank)
    segments = tl.load(comm.context + TABLE + peer, mask=notified, other=0).to(tl.pointer_type(tl.int64))
    source = (rank - peer - 1 + comm.WORLD_SIZE) % comm.WORLD_SIZE
    notify_each(segments + word_of(call.exchange.partial, comm.epoch, source, unit), comm.epoch, notified)


@triton.jit
def wait_units(comm, call, unit):
    """Wait for the other ranks' partials of a unit; false if the group gave up."""
    rank = rank_of(comm.context)
    i = tl.arange(0, call.exchange.RANKS)
    peers = (rank + 1 + i) % comm.WORLD_SIZE
    signals = signal_at(comm, call.exchange.partial, rank, i, unit)
    return wait_peers(comm.context, signals, i < comm.WORLD_SIZE - 1, comm.epoch, COMPUTE, PARTIAL, peers, unit)


@triton.jit
def _add_units(comm, call, total, inside, unit):
    """Add the other ranks' partials of a unit, where `inside`, to this rank's."""
    COLUMNS: tl.constexpr = total.shape[1]
    offsets = tl.arange(0, total.shape[0])[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for i in range(comm.WORLD_SIZE - 1):
        slot = slot_at(comm, call.exchange.partials, rank_of(comm.context), i, unit)
        total += tl.load(slot + offsets, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _store_unit(result, total, i, j, inside):
    """Add bias and residual to rows i and columns j of the result, and store them where `inside`."""
    if result.BIAS:
        bias = result.bias + j.to(tl.int64) * result.bias_stride
        total += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    if result.RESIDUAL:
        strides = result.residual.strides
        more = result.residual.data + i.to(tl.int64) * strides.row + j.to(tl.int64) * strides.column
        total += tl.load(more, mask=inside, other=0.0).to(tl.float32)
    target = result.c.data + i.to(tl.int64) * result.c.strides.row + j.to(tl.int64) * result.c.strides.column
    tl.store(target, total.to(result.c.data.dtype.element_ty), mask=inside)


@triton.jit
def _reduce_unit(comm, call, total, row, column, unit):
    """Reduce and store the rows of a unit that belong to this rank, if there are any."""
    rank = rank_of(comm.context)
    owned = owned_rows(comm, call.product)
    i = row - rank * owned + tl.arange(0, total.shape[0])[:, None]  # rows of the result
    j = column + tl.arange(0, total.shape[1])[None, :]
    inside = (i >= 0) & (i < owned) & (j < call.product.n)
    if (row < (rank + 1) * owned) & (row + total.shape[0] > rank * owned):
        if comm.WORLD_SIZE > 1:
            total += tl.where(wait_units(comm, call, unit), 0.0, float("nan"))
            total = _add_units(comm, call, total, inside, unit)
        _store_unit(call.result, total, i, j, inside)


@triton.jit
def _run(comm, call):
    M: tl.constexpr = call.product.tiling.M
    SIZE: tl.constexpr = call.exchange.team.SIZE
    worker = this_cta()
    begun = tl.cast(0, tl.int64)
    pushed = tl.cast(0, tl.int64)
    if call.link.PACED:
        begun = clock()
    for tile in tl.range(worker // SIZE, count_tiles(call.product), tl.num_programs(0) // SIZE):
        row, column = tile_corner(call.product, tile)
        total = multiply_in_team(
            comm, call.product.a, call.product.b, Tile(0, row, call.product.rows, column, call.product.n),
            call.product.k, call.product.tiling, call.exchange.team, worker,
        )  # fmt: skip
        trace(comm.context, TILES, TILE, 0, tile, LAST)
        first = row + first_row_in_team(call.exchange.team, worker, M)
        unit = tile * SIZE + worker % SIZE
        if comm.WORLD_SIZE > 1:
            push_unit(comm, call, total, first, column, unit)
            if call.link.PACED:
                pushed += total.shape[0] * total.shape[1] * (call.exchange.partials.DTYPE.primitive_bitwidth // 8)
                wait_paced(begun, pushed, call.link.nanoseconds_per_mib)
            trace(comm.context, TILES, PUSH_CHUNK, 0, tile, LAST)
            notify_owners(comm, call, first, unit, total.shape[0])
        _reduce_unit(comm, call, total, first, column, unit)
        trace(comm.context, TILES, REDUCE, 0, tile, LAST)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def reduce_few_rows_kernel(context, ranks, a, b, c, residual, call):
    """The whole operator. ranks: `Ranks`; a, b: tensors or descriptors; c, residual: tensors; call: `Call`."""
    with_matrices(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), call, a, b, c, residual, _run
    )  # fmt: skip


def launch(group: Group, plan: Plan, op: str, call: Sum) -> Launch:
    """The launch for a plan. Collective if the workspace must grow."""
    memory = layout(group, plan, op, call.wire_dtype)
    workspace = memory.workspace(group)
    c, several = plan.config, group.size > 1
    team = team_of(group, workspace, c)
    exchange = Exchange(
        partial=memory.words_in(workspace, "partial") if several else None,
        partials=memory.slots_in(workspace, "partials") if several else None,
        team=team,
        RANKS=constants(1 << math.ceil(math.log2(group.size)))[0],
    )
    return Launch(
        op=op,
        group=group,
        kernel=reduce_few_rows_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.gpus_per_node)),
            call=call_of(group, plan, call, 1, exchange),
            **matrices_of(plan, call, 1),
        ),
        options=dict(num_warps=c.warps, num_stages=c.stages),
        variant=variant_of(plan, workspace),
        uses=memory.uses(workspace, free={"partials": None} if several else None),
        inputs=INPUTS,
        results=RESULTS,
        scratch=scratch_of(team),
    )
