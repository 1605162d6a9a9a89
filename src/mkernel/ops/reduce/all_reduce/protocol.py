"""The protocol of matmul_all_reduce: workspace layout and signals. All its kernels follow it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.gemm import store_tile
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.partials import load_partial, store_partial
from mkernel.lang.requests import Transfer
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify_in_loop, wait_again
from mkernel.ops.reduce.all_reduce.order import FEWEST_WITH_HOMES, slot_number
from mkernel.ops.reduce.call import Plan, Sum
from mkernel.ops.reduce.epilogue import add_to_tile, halves, move_right
from mkernel.ops.reduce.kinds import FINISHED_TILE, PARTIAL
from mkernel.ops.reduce.protocol import (
    add_partials,
    peer_behind,
    post_node_sum,
    prefetch_partials,
    signal_at,
    slot_at,
    slot_bytes,
    wait_partials,
)
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants


class Exchange(NamedTuple):
    """The arrays of a call in its workspace: see `layout`. Those that a kernel does not use are None."""

    partial: Any  # Words
    partials: Any  # Slots
    own_partial: Any  # Words
    node_sum: Any  # Words
    node_sums: Any  # Slots
    own_sums: Any  # Slots
    from_home: Any  # Words
    finished: Any  # Words
    finished_tiles: Any  # Slots
    IN_SWITCH: Any  # the switch reduces the partials


def layout(group: Group, plan: Plan, call: Sum) -> Layout:
    """The workspace of a call. Signals hold epochs. The slots of a rank are numbered like the tiles that it owns
    (`slot_number`); each holds a tile, or a slice of one. The rank i + 1 after another one is meant cyclically, within
    the node.

    partial[i, number]: partials[i, number] on the owner holds the partial of the rank i + 1 after the owner. If the
        switch reduces, every rank keeps its partials in its own memory, in partials[owner, number], and
        own_partial[0, number] is the owner's signal to itself.
    node_sum[node, number]: on two nodes, node_sums[node, number] holds that node's sum. A node's own sum is sent from
        there.
    node_sum[i, number]: on more nodes, at a tile's home: node_sums[i, number] holds the sum of the node i + 1 after
        this one, cyclically. Slots are numbered like the tiles that have this home (`number_at_home`).
        own_sums[0, number] of every owner holds its own node's sum, and is sent from there.
    from_home[0, number]: finished_tiles[0, number] holds the finished tile that the tile's home has sent.
    finished[i, number]: the rank i + 1 after this one has finished its tile. The tile is in the owner's
        finished_tiles[0, number]; with multicast, in every rank's finished_tiles[owner, number].
    """
    c, gpus, nodes = plan.config, group.gpus_per_node, group.nodes
    memory = Layout("matmul_all_reduce")
    size = c.tile_m * c.tile_n // (gpus if plan.sliced else 1)
    owned = math.ceil(math.ceil(plan.tiles / c.ctas) / gpus) * c.ctas
    memory.signals("partial", gpus - 1, owned)
    memory.buffer("partials", call.wire_dtype, gpus if plan.in_switch else gpus - 1, owned, size)
    if plan.in_switch:
        memory.signals("own_partial", 1, owned)
    has_homes = nodes >= FEWEST_WITH_HOMES.value
    if has_homes:
        at_home = math.ceil(owned // c.ctas / nodes) * c.ctas
        memory.signals("node_sum", nodes - 1, at_home)
        memory.buffer("node_sums", call.wire_dtype, nodes - 1, at_home, size)
        memory.buffer("own_sums", call.wire_dtype, 1, owned, size)
        memory.signals("from_home", 1, owned)
    elif nodes > 1:
        memory.signals("node_sum", nodes, owned)
        memory.buffer("node_sums", call.wire_dtype, nodes, owned, size)
    memory.signals("finished", gpus - 1, owned)
    kept = gpus if plan.multicast else 1 if gpus > 1 or has_homes else 0
    memory.buffer("finished_tiles", call.out.dtype, kept, owned, size)
    return memory


def free_of(group: Group, plan: Plan, memory: Layout) -> dict[str, tuple[tuple[int, int], ...] | None]:
    """The buffers, or ranges of them, that nobody reads any more once this rank's launch has ended."""
    free: dict[str, tuple[tuple[int, int], ...] | None] = {"partials": None}
    if "own_sums" in memory:
        free["node_sums"] = None  # not own_sums: the network may still be reading them
    elif "node_sums" in memory:
        # except this node's: the network may still be reading it
        free["node_sums"] = ((0, group.node), (group.node + 1, group.nodes))
    if plan.multicast:
        # only this rank reads them. Without multicast, other ranks may still be reading them
        free["finished_tiles"] = None
    return free


def exchange_of(memory: Layout, workspace: Workspace, plan: Plan) -> Exchange:
    """The workspace of a call as a kernel argument."""

    def structure(name: str) -> Any:
        if name not in memory:
            return None
        return (memory.slots_in if name.endswith("s") else memory.words_in)(workspace, name)

    return Exchange(*(structure(name) for name in Exchange._fields[:-1]), *constants(plan.in_switch))


@triton.jit
def sum_node(comm, exchange, total, block, tile):
    """Wait for the partials that the node pushes for this rank's own tile, and add them to its own; NaN if the group
    gave up."""
    if comm.RANKS_PER_NODE > 1:
        total += wait_partials(comm, exchange, 0, slot_number(block), tile)
    return add_partials(comm, exchange, total, 0, slot_number(block))


@triton.jit
def send_node_sum(comm, exchange, total, block):
    """Store the node's sum of a tile in its slot, and post requests to write it to the owners in the other nodes."""
    DTYPE: tl.constexpr = exchange.node_sums.DTYPE
    rank = rank_of(comm.context)
    node = rank // comm.RANKS_PER_NODE
    slot = slot_of(exchange.node_sums, comm.epoch, node, slot_number(block))
    store_partial(segment_of(comm.context, rank, DTYPE) + slot, total, total.shape[0], total.shape[1])
    signal = word_of(exchange.node_sum, comm.epoch, node, slot_number(block)) * 8
    segment = tl.load(comm.context + SEGMENT)
    offset = slot * (DTYPE.primitive_bitwidth // 8)
    for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        transfer = Transfer(peer, segment, offset, segment, offset, slot_bytes(exchange.node_sums))
        post_node_sum(comm, transfer, signal)


@triton.jit
def sum_nodes(comm, exchange, block, tile, M: tl.constexpr, N: tl.constexpr):
    """Wait for the sums of all nodes, and add them in node order; NaN if the group gave up."""
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    rank = rank_of(comm.context)
    missing = 0.0
    for node in range(NODES):
        if node != rank // comm.RANKS_PER_NODE:
            source = node * comm.RANKS_PER_NODE + rank % comm.RANKS_PER_NODE
            signal = signal_at(comm, exchange.node_sum, rank, node, slot_number(block))
            if not wait_again(comm.context, signal, comm.epoch, COMPUTE, PARTIAL, source, tile):
                missing = float("nan")
    total = tl.zeros((M, N), tl.float32)
    for node in range(NODES):
        total += load_partial(slot_at(comm, exchange.node_sums, rank, node, slot_number(block)), M, N)
    return total + missing


@triton.jit
def prefetch(comm, call, taken):
    """Prefetch the partials that the node pushes for a tile that this rank owns."""
    if comm.RANKS_PER_NODE > 1:
        if taken.owner == rank_of(comm.context) % comm.RANKS_PER_NODE:
            block = taken.round // comm.RANKS_PER_NODE
            prefetch_partials(
                comm, call.exchange, 0, slot_number(block), call.product.tiling.M, call.product.tiling.N
            )  # fmt: skip


@triton.jit
def finished_slot(comm, exchange, owner, block):
    """Pointer to the slot in which an owner keeps its finished tile of a block."""
    return slot_at(comm, exchange.finished_tiles, owner, 0, slot_number(block))


@triton.jit
def finish_tile(comm, call, total, tile, block):
    """Add bias and residual to a sum; store it in the result and, for those that are to read it, in its slot."""
    M: tl.constexpr = total.shape[0]
    HALF: tl.constexpr = total.shape[1] // 2
    IS_READ: tl.constexpr = comm.RANKS_PER_NODE > 1 or comm.WORLD_SIZE // comm.RANKS_PER_NODE >= FEWEST_WITH_HOMES
    slot = finished_slot(comm, call.exchange, rank_of(comm.context), block)
    left, right = halves(total)
    left = add_to_tile(call.result, tile, left)
    if IS_READ:
        store_partial(slot, left, M, HALF)
    store_tile(call.result.c, tile, left)
    right_tile = move_right(tile, HALF)
    right = add_to_tile(call.result, right_tile, right)
    if IS_READ:
        store_partial(slot + M * HALF, right, M, HALF)
    store_tile(call.result.c, right_tile, right)


@triton.jit
def copy_finished(result, slot, tile, missing, M: tl.constexpr, N: tl.constexpr):
    """Copy a finished tile from its slot to the result. `missing` is NaN if the tile never arrived, else 0.0."""
    HALF: tl.constexpr = N // 2
    store_tile(result.c, tile, load_partial(slot, M, HALF) + missing)
    store_tile(result.c, move_right(tile, HALF), load_partial(slot + M * HALF, M, HALF) + missing)


@triton.jit
def notify_finished(comm, exchange, block):
    """Signal to the other ranks of the node that this rank's tile of a block is finished."""
    for offset in range(1, comm.RANKS_PER_NODE):
        i = comm.RANKS_PER_NODE - 1 - offset
        notify_in_loop(signal_at(comm, exchange.finished, peer_behind(comm, offset), i, slot_number(block)), comm.epoch)


@triton.jit
def wait_finished(comm, exchange, i, block, tile):
    """Wait for a finished tile of the rank `i` + 1 after this one. Returns 0.0, or NaN if the group gave up."""
    missing = 0.0
    signal = signal_at(comm, exchange.finished, rank_of(comm.context), i, slot_number(block))
    if not wait_again(comm.context, signal, comm.epoch, COMPUTE, FINISHED_TILE, peer_behind(comm, 1 + i), tile):
        missing = float("nan")
    return missing
