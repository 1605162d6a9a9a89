"""The Triton kernel of matmul_reduce_scatter: any shape, any number of nodes; also runs in the simulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of
from mkernel.lang.matrix import Tile
from mkernel.lang.signals import finish
from mkernel.lang.trace import LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.ops.reduce.call import Plan, Sum
from mkernel.ops.reduce.epilogue import store_result
from mkernel.ops.reduce.loop import Progress, for_each_tile, wait_paced_progress
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
from mkernel.ops.reduce.protocol import add_partials, notify_partial, push_partial, slot_bytes, wait_partials
from mkernel.ops.reduce.reduce_scatter.order import deal_tiles, tile_at
from mkernel.ops.reduce.reduce_scatter.protocol import (
    add_node_sums,
    exchange_of,
    first_partial,
    prefetch,
    send_node_sum,
    wait_node_sums,
)
from mkernel.runtime.group import Group
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants
from mkernel.runtime.world import Launch


class Sequence(NamedTuple):
    """The tiles that a CTA takes: their number, the number of tiles in one rank's rows, and what `deal_tiles`
    returns."""

    length: Any
    tiles: Any
    rounds: Any
    early: Any


class Taken(NamedTuple):
    """The tile that a CTA is working on: tile number `tile` of the rows of `owner`, with its upper left corner at
    (row, column) of these rows."""

    node_offset: Any
    rank_offset: Any
    owner: Any
    tile: Any
    row: Any
    column: Any


@triton.jit
def _take(comm, call, sequence, position):
    """The tile at a position of the sequence."""
    WORLD_SIZE: tl.constexpr = comm.WORLD_SIZE
    RANKS_PER_NODE: tl.constexpr = comm.RANKS_PER_NODE
    rank = rank_of(comm.context)
    node_offset, rank_offset, tile = tile_at(
        position, sequence.tiles, sequence.rounds, sequence.early, WORLD_SIZE, RANKS_PER_NODE
    )  # fmt: skip
    node = rank // RANKS_PER_NODE + node_offset
    owner = node * RANKS_PER_NODE % WORLD_SIZE + (rank + rank_offset) % RANKS_PER_NODE
    row, column = tile_corner(call.product, tile)
    return Taken(node_offset, rank_offset, owner, tile, row, column)


@triton.jit
def _locate(call, taken):
    """Where a tile is in the product."""
    return Tile(taken.owner, taken.row, call.product.rows, taken.column, call.product.n)


@triton.jit
def _prefetch(comm, call, taken):
    """Prefetch what will be added to a tile that this rank reduces."""
    if comm.WORLD_SIZE > 1:
        if taken.rank_offset == 0:
            prefetch(
                comm, call.exchange, taken.node_offset, taken.tile, call.product.tiling.M, call.product.tiling.N
            )  # fmt: skip


@triton.jit
def _reduce(comm, call, total, taken):
    """Add the partials that the node has pushed to this rank's partial of a tile. Then send the node's sum to the owner
    or, if this rank is the owner, add the sums of the other nodes and store the result."""
    first = first_partial(comm, taken.node_offset)
    if comm.RANKS_PER_NODE > 1:
        total += wait_partials(comm, call.exchange, first, taken.tile, taken.tile)
        total = add_partials(comm, call.exchange, total, first, taken.tile)
    location = Tile(0, taken.row, call.product.rows, taken.column, call.product.n)
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        if taken.node_offset != 0:
            send_node_sum(comm, call.exchange, total, taken.node_offset, taken.tile)
        else:
            total += wait_node_sums(comm, call.exchange, taken.tile)
            store_result(call.result, location, add_node_sums(comm, call.exchange, total, taken.tile))
    else:
        store_result(call.result, location, total)


@triton.jit
def _end_tile(comm, call, sequence, total, taken, progress):
    """Push the partial of a tile, or reduce it. First send the pending signal of the previous tile."""
    trace(comm.context, TILES, TILE, taken.owner, taken.tile, LAST)
    signal = progress.signal
    moved = progress.moved
    is_pushed = False  # a compile-time constant with one rank per node
    if comm.RANKS_PER_NODE > 1:
        if signal != 0:
            wait_paced_progress(call.link, progress)
            notify_partial(comm, signal, True)
            signal = tl.full((), 0, tl.int64)
        is_pushed = taken.rank_offset != 0
    if is_pushed:
        first = first_partial(comm, taken.node_offset)
        signal = push_partial(comm, call.exchange, total, taken.rank_offset, first, taken.tile)
        moved += slot_bytes(call.exchange.partials)
        trace(comm.context, TILES, PUSH_CHUNK, taken.owner, taken.tile, LAST)
    else:
        _reduce(comm, call, total, taken)
        trace(comm.context, TILES, REDUCE, taken.owner, taken.tile, LAST)
    return Progress(signal, moved, progress.start)


@triton.jit
def _run(comm, call):
    WORLD_SIZE: tl.constexpr = comm.WORLD_SIZE
    tiles = count_tiles(call.product)
    rounds, early, late = deal_tiles(tiles, WORLD_SIZE)
    sequence = Sequence(rounds * WORLD_SIZE + early + late, tiles, rounds, early)
    progress = for_each_tile(comm, call, sequence, _take, _locate, _prefetch, _end_tile, HOIST=False)
    if comm.RANKS_PER_NODE > 1:
        if progress.signal != 0:
            wait_paced_progress(call.link, progress)
            notify_partial(comm, progress.signal, False)
    finish(comm.context, comm.epoch, WORLD_SIZE)


@triton.jit
def matmul_reduce_scatter_kernel(context, ranks, a, b, c, residual, call):
    """The whole operator. ranks: `Ranks`; a, b, c, residual: tensors or descriptors; call: `Call`."""
    with_matrices(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), call, a, b, c, residual, _run
    )  # fmt: skip


def launch(group: Group, plan: Plan, memory: Layout, call: Sum) -> Launch:
    """The launch for a plan. Collective if the workspace must grow."""
    workspace = memory.workspace(group)
    arrived = {name: None for name in ("partials", "node_sums") if name in memory}
    return Launch(
        op=memory.op,
        group=group,
        kernel=matmul_reduce_scatter_kernel,
        grid=plan.config.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.gpus_per_node)),
            call=call_of(group, plan, call, group.size, exchange_of(memory, workspace)),
            **matrices_of(plan, call, group.size),
        ),
        options=dict(num_warps=plan.config.warps, num_stages=plan.config.stages),
        variant=variant_of(plan, workspace),
        # except `outgoing`: the network may still be reading it
        uses=memory.uses(workspace, free=arrived),
        inputs=INPUTS,
        results=RESULTS,
    )
