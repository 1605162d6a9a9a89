"""Partials of dk and dv in the Hopper kernel: how a warpgroup pushes its rows of a block of keys, and adds up partials.

The protocol is that of the Triton kernel (protocol.py). The rows of a warpgroup are a tile of the protocol. They are
laid out in memory as everywhere else (lang/partials.py), so that ranks that run this kernel and ranks that do not can
exchange them.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mkernel.lang.context import rank_of
from mkernel.ops.attention.backward.call import value_dim_of
from mkernel.ops.attention.backward.hopper_load import ROWS, TILE_M
from mkernel.ops.attention.backward.protocol import (
    block_at,
    node_sum_index,
    notify_pushed,
    partial_index,
    post_node_sum,
    wait_node_sum,
    wait_partial,
    wait_partial_writable,
    wait_reducible,
    wait_sum_writable,
)
from mkernel.ops.attention.call import head_of
from mkernel.ops.attention.mask import is_seen, is_seen_in_node, keys_of


@gluon.constexpr_function
def product_layout(columns):
    """The register layout of a warpgroup's rows of a product."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _slot_layout():
    """The register layout of rows in the order of a slot: 16 bytes of one thread, then 16 bytes of the next."""
    return gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])


@gluon.jit
def _offsets_in_slot(DIM: gl.constexpr):
    """Where rows in the order of a slot are."""
    layout: gl.constexpr = _slot_layout()
    run = gl.expand_dims(gl.arange(0, DIM // 8, gl.SliceLayout(1, layout)), 1)
    return run * (8 * ROWS) + gl.expand_dims(gl.arange(0, 8 * ROWS, gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _store_rows(slot, rows, DIM: gl.constexpr):
    """Store a warpgroup's rows of dk or dv in a slot. Threads store what they have: see lang/partials.py."""
    slot = gl.multiple_of(slot, 16)
    split = rows.reshape([ROWS // 16, 2, 8, DIM // 16, 2, 4, 2])
    packed = gl.convert_layout(split.permute(3, 1, 0, 2, 5, 4, 6).reshape([DIM // 8, 8 * ROWS]), _slot_layout())
    gl.store(slot + _offsets_in_slot(DIM), packed)


@gluon.jit
def _load_rows(slot, DIM: gl.constexpr):
    """The inverse of `_store_rows`."""
    slot = gl.multiple_of(slot, 16)
    split = gl.load(slot + _offsets_in_slot(DIM)).reshape([DIM // 16, 2, ROWS // 16, 8, 4, 2, 2])
    return gl.convert_layout(split.permute(2, 1, 3, 0, 5, 4, 6).reshape([ROWS, DIM]), product_layout(DIM))


@gluon.jit
def _add_block(call, place, dk, dv):
    """(dk, dv) plus a partial or a sum that has arrived."""
    dk += _load_rows(place, call.DIM)
    dv += _load_rows(place + ROWS * call.DIM, call.DIM)
    return dk, dv


@gluon.jit
def _store_block(call, place, dk, dv):
    """Store a partial or a sum."""
    _store_rows(place, dk, call.DIM)
    _store_rows(place + ROWS * call.DIM, dv, call.DIM)


@gluon.jit
def push_partial(comm, call, round_index, owner, tile, dk, dv):
    """`protocol.push_partial`, by a warpgroup."""
    rank = rank_of(comm.context)
    reducer = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE + owner % comm.RANKS_PER_NODE
    index = partial_index(comm, call.rounds, round_index, owner, reducer, rank)
    wait_partial_writable(comm, call, round_index, owner, reducer)
    _store_block(call, block_at(comm, call.exchange.partials, reducer, index, tile), dk, dv)
    notify_pushed(comm, call, round_index, reducer, index, tile)


@gluon.jit
def _sum_of_node(comm, call, task, owner, tile, key):
    """(dk, dv): the sum of this node's partials of a tile of the owner's keys, in the order of ranks."""
    rank = rank_of(comm.context)
    dk = gl.zeros([ROWS, call.DIM], gl.float32, product_layout(call.DIM))
    dv = gl.zeros([ROWS, call.DIM], gl.float32, product_layout(call.DIM))
    for i in range(comm.RANKS_PER_NODE):
        source = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE + i
        if is_seen(call.mask, source, owner, key, ROWS):
            index = partial_index(comm, call.rounds, task.round_index, owner, rank, source)
            missing = wait_partial(comm, call, task.round_index, source, index, tile)
            dk, dv = _add_block(call, block_at(comm, call.exchange.partials, rank, index, tile), dk, dv)
            dk += missing
            dv += missing
    return dk, dv


@gluon.jit
def _add_other_nodes(comm, call, task, tile, key, dk, dv):
    """(dk, dv): the sum of this node's partials of a tile of this rank's keys, plus the sums of other nodes, in the
    order of nodes."""
    rank = rank_of(comm.context)
    for node in range(comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        if node != rank // comm.RANKS_PER_NODE:
            if is_seen_in_node(call.mask, node, rank, key, ROWS, comm.RANKS_PER_NODE):
                index = node_sum_index(comm, call.rounds, task.round_index, rank, node)
                missing = wait_node_sum(comm, call, task.round_index, node, index, tile)
                dk, dv = _add_block(call, block_at(comm, call.exchange.node_sums, rank, index, tile), dk, dv)
                dk += missing
                dv += missing
    return dk, dv


@gluon.jit
def _store_result(heads, task, key, rows, count, columns):
    """Store rows of dk or dv, of which there are `count` of so many columns, from registers: shared memory belongs to
    the tasks that are loaded meanwhile."""
    i = key + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, rows.type.layout)), 1)
    j = gl.expand_dims(gl.arange(0, rows.shape[1], gl.SliceLayout(0, rows.type.layout)), 0)
    target = head_of(heads, task.batch, task.kv_head) + (i.to(gl.int64) * heads.row_stride + j)
    gl.store(target, rows.to(heads.pointer.dtype.element_ty), mask=(i < count) & (j < columns))


@gluon.jit
def reduce(comm, call, task, which, GROUP: gl.constexpr):
    """Add up the partials of a warpgroup's rows of a block of keys: of this rank's own, which completes dk and dv, or
    of its counterpart's in another node. which: the number of the reduction in its round. Returns the ticket of what
    was posted, or -1."""
    rank = rank_of(comm.context)
    owner = (rank + which // call.tiles * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    tile = which % call.tiles * 2 + GROUP
    key = which % call.tiles * TILE_M + GROUP * ROWS
    wait_reducible(comm, call, task.round_index, which)
    ticket = tl.cast(-1, tl.int64)
    if key < task.until:
        if owner == rank:
            dk, dv = _sum_of_node(comm, call, task, owner, tile, key)
            if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
                dk, dv = _add_other_nodes(comm, call, task, tile, key, dk, dv)
            _store_result(call.dk, task, key, dk, keys_of(call.mask), call.dim)
            _store_result(call.dv, task, key, dv, keys_of(call.mask), value_dim_of(call))
        elif comm.WORLD_SIZE > comm.RANKS_PER_NODE:
            if is_seen_in_node(call.mask, rank // comm.RANKS_PER_NODE, owner, key, ROWS, comm.RANKS_PER_NODE):
                dk, dv = _sum_of_node(comm, call, task, owner, tile, key)
                index = partial_index(comm, call.rounds, task.round_index, owner, rank, rank)
                wait_sum_writable(comm, call, task.round_index, owner)
                tl.debug_barrier()  # this rank's own partial, which other threads may still load, is in the same place
                _store_block(call, block_at(comm, call.exchange.partials, rank, index, tile), dk, dv)
                ticket = post_node_sum(comm, call, task.round_index, owner, tile)
    return ticket
