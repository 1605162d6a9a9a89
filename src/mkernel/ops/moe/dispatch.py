"""Dispatch: tokens move to the ranks of their experts, to where the grouped GEMM reads them.

`_stage_tokens` copies a rank's tokens to a buffer in its own memory, from which the ranks of its node fetch them.
`_send_tokens` sends each other node the tokens that it needs, to the rank's counterpart there. `place_tokens`
(placing.py) brings each token that names an expert of this rank to the rows that it makes, at the row numbers of
routing.py. The signal of a chunk is in the same memory as its tokens, and the ranks of the node poll it over NVLink.

A dispatch with a known routing (`Dispatch.KNOWN`) moves other rows to where an earlier dispatch moved its tokens. It
reads the tables that the earlier launch has written, so it publishes no ids, and neither counts nor schedules.

Tokens in fp8 are packed when they are staged (packing.py): a packed token is one row of 32-bit words, whose meaning
this module does not use. All CTAs read packed tokens from the staging buffer. `_send_tokens` first waits for the
`held` signal of a chunk. `place_tokens` need not wait for the rank's own tokens: a CTA stages before it counts, so all
of them are packed once `counted` is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.layout import row_of, word_of
from mkernel.lang.matrix import Block
from mkernel.lang.requests import Transfer
from mkernel.lang.roles import COMPUTE, INTRA, SEND
from mkernel.lang.signals import notify
from mkernel.lang.trace import PUSH_CHUNK, SEND_CHUNK, trace, trace_time
from mkernel.ops.moe import protocol
from mkernel.ops.moe.packing import Packed, pack_tokens
from mkernel.ops.moe.placing import place_tokens
from mkernel.ops.moe.protocol import (
    TOKENS,
    announce,
    announce_node,
    notify_held,
    post_held,
    signal_of,
    wait_counted,
    wait_node_entered,
    wait_numbered,
    wait_other_nodes_entered,
    wait_staged,
)
from mkernel.ops.moe.routing import (
    count_rows,
    counted_last,
    lay_out_rows,
    may_place,
    number_crossings,
    publish,
    table_of,
    wait_routing,
)
from mkernel.ops.moe.schedule import schedule_blocks
from mkernel.runtime.operands import constants, named_constants

if TYPE_CHECKING:
    from mkernel.runtime.group import Group, Workspace
    from mkernel.runtime.layout import Layout


class Roles(NamedTuple):
    """CTAs of each role, all constants. The first SENDERS CTAs send to other nodes. The next INTRAS CTAs place tokens
    of their own rank; if OWN_INTRAS is not 0, only so many of them do, row by row (placing.py). The first FAR_INTRAS of
    them also place tokens of other nodes, and the next NEAR_INTRAS (wrapping around) tokens of the node."""

    SENDERS: Any
    INTRAS: Any
    OWN_INTRAS: Any
    NEAR_INTRAS: Any
    FAR_INTRAS: Any


class Dispatch(NamedTuple):
    """What to dispatch, and where to. staged, send, recv: `Buffer`s of the workspace, see protocol.py."""

    x: Any  # Block: this rank's tokens, as the caller has them
    ids: Any  # Block: their experts
    weights: Any  # Block: the weights of these experts; None if tables hold no weights
    rows: Any  # Block: the rows of this rank's experts, grouped by expert
    hidden: Any  # elements per token; 32-bit words if tokens are packed
    staged: Any
    send: Any
    recv: Any
    roles: Any  # Roles
    ROWS: Any  # rows that a CTA has in flight
    COLUMNS: Any  # columns that a CTA has in flight
    PACED: Any  # whether links are emulated
    TILE_M: Any  # rows per block
    GROUP: Any  # blocks per group, approximately
    COUNTERS: Any  # counters per block
    COMBINES: Any  # the launch also combines: weights are published, and `settled` is signalled for each chunk
    row_weights: Any  # with a known routing: pointer to [row], where the published weight of each row goes; or None
    packing: Any  # Packing; None unless PACKS
    PACKS: Any  # tokens are in fp8, and travel with their scales (packing.py)
    KNOWN: Any  # the routing is that of an earlier launch, which has written the tables


def dispatch_of(
    group: Group, plan: Any, memory: Layout, workspace: Workspace, x: torch.Tensor, rows: torch.Tensor, *,
    ids: torch.Tensor | None = None, weights: torch.Tensor | None = None, packed: Packed | None = None,
    row_weights: torch.Tensor | None = None, counters: int = 1, combines: bool = False,
) -> Dispatch:  # fmt: skip
    """The `Dispatch` of a launch. plan: has a configuration and `Copying`. rows: of this rank's experts. ids: None if
    the routing is that of an earlier launch."""
    c, copying = plan.config, plan.copying
    return Dispatch(
        x=strided_block(x),
        ids=None if ids is None else strided_block(ids),
        weights=None if weights is None else strided_block(weights),
        rows=Block(rows, rows.stride(0), 1),
        hidden=x.shape[1] if packed is None else constants(packed.words)[0],
        staged=memory.buffer_in(workspace, "staged"),
        send=memory.buffer_in(workspace, "send"),
        recv=memory.buffer_in(workspace, "recv"),
        roles=Roles(
            *constants(
                c.send_ctas, c.intra_ctas, copying.own_intra_ctas, copying.near_intra_ctas, copying.far_intra_ctas
            )
        ),
        **protocol.copies_of(group, c.copy_bytes, rows.dtype),
        row_weights=row_weights,
        packing=None if packed is None else packed.packing(),
        **named_constants(
            TILE_M=c.tile_m,
            GROUP=c.group_m,
            COUNTERS=counters,
            COMBINES=combines,
            PACKS=packed is not None,
            KNOWN=ids is None,
        ),
    )


def strided_block(x: torch.Tensor) -> Block:
    """A matrix of the caller's, as kernels read it."""
    return Block(x, x.stride(0), x.stride(1))


@triton.jit
def _copy_tokens(dispatch, origin, target, token, end, numbers):
    """Copy tokens token..end-1 of `origin` to rows of `target`. Token i goes to row i if `numbers` is None; otherwise
    to row numbers[i], or nowhere if that is -1."""
    for start in range(token, end, dispatch.ROWS):
        i = start + tl.arange(0, dispatch.ROWS)
        target_row = i
        if numbers is not None:
            target_row = tl.load(numbers + i, mask=i < end, other=-1)
        for column in range(0, dispatch.hidden, dispatch.COLUMNS):
            j = column + tl.arange(0, dispatch.COLUMNS)[None, :]
            inside = ((i < end) & (target_row >= 0))[:, None] & (j < dispatch.hidden)
            pointers = origin.data + i.to(tl.int64)[:, None] * origin.row_stride
            values = tl.load(pointers + j.to(tl.int64) * origin.column_stride, mask=inside)
            tl.store(target.data + target_row.to(tl.int64)[:, None] * target.row_stride + j, values, mask=inside)


@triton.jit
def _stage_tokens(comm, routing, dispatch, batch, first, step):
    """Copy this rank's tokens to where the ranks of its node can fetch them; packed, if they are sent packed. This
    needs no routing table, so it overlaps with the exchange of the tables."""
    DTYPE: tl.constexpr = dispatch.rows.data.dtype.element_ty
    rank = rank_of(comm.context)
    staged = segment_of(comm.context, rank, DTYPE) + row_of(dispatch.staged, comm.epoch, 0)
    if wait_node_entered(comm, batch.signals, comm.epoch - 1, INTRA):
        for chunk in range(first, tl.cdiv(batch.tokens, routing.CHUNK), step):
            since = trace_time(comm.context)
            end = tl.minimum((chunk + 1) * routing.CHUNK, batch.tokens)
            if dispatch.PACKS:
                pack_tokens(comm, dispatch, chunk * routing.CHUNK, end)
            else:
                target = Block(staged, dispatch.staged.row_stride, 1)
                _copy_tokens(dispatch, dispatch.x, target, chunk * routing.CHUNK, end, None)
            trace(comm.context, INTRA, PUSH_CHUNK, rank, chunk, since)
            notify_held(comm, batch.signals, rank, chunk)


@triton.jit
def _send_chunk(comm, routing, dispatch, batch, away, chunk, tokens):
    """Send the tokens of a chunk that the node `away` nodes on needs, if there are any: copy them to contiguous rows
    that the network can read, and post one request. Packed tokens are copied from where they are staged."""
    DTYPE: tl.constexpr = dispatch.rows.data.dtype.element_ty
    element: tl.constexpr = DTYPE.primitive_bitwidth // 8
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    send_index = routing.tables.send_index + (away - 1) * batch.max_tokens
    token = chunk * routing.CHUNK
    end = tl.minimum(token + routing.CHUNK, tokens)
    i = token + tl.arange(0, routing.CHUNK)
    number = tl.load(send_index + i, mask=i < end, other=-1)
    count = tl.sum((number >= 0).to(tl.int64))
    first = tl.min(tl.where(number >= 0, number, 0x7FFFFFFF)).to(tl.int64)
    if dispatch.PACKS:
        if count > 0:
            if not wait_staged(comm, batch.signals, rank, chunk):
                count = count * 0  # the group gave up
    if count > 0:
        row_stride = dispatch.send.row_stride
        send_offset = row_of(dispatch.send, comm.epoch, (away - 1) * batch.max_tokens)
        target = Block(segment_of(comm.context, rank, DTYPE) + send_offset, row_stride, 1)
        if dispatch.PACKS:
            staged = segment_of(comm.context, rank, DTYPE) + row_of(dispatch.staged, comm.epoch, 0)
            _copy_tokens(dispatch, Block(staged, dispatch.staged.row_stride, 1), target, token, end, send_index)
        else:
            _copy_tokens(dispatch, dispatch.x, target, token, end, send_index)
        others = comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1
        recv_offset = row_of(dispatch.recv, comm.epoch, (others - away) * batch.max_tokens)
        begin = first * row_stride
        size = ((count - 1) * row_stride + dispatch.hidden) * element
        signal = word_of(batch.signals.held, comm.epoch, rank, chunk) * 8
        peer = (rank + away * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        transfer = Transfer(
            peer, segment, (send_offset + begin) * element, segment, (recv_offset + begin) * element, size
        )
        post_held(comm, transfer, signal)


@triton.jit
def _send_tokens(comm, routing, dispatch, batch, first, step):
    """Send each other node the tokens that it needs. The first sender numbers the tokens, unless that is known; all
    senders share the chunks, round-robin."""
    nodes: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    rank = rank_of(comm.context)
    ready = wait_routing(comm, batch.signals, SEND)
    ready &= wait_other_nodes_entered(comm, batch.signals, comm.epoch - 1, SEND)
    if ready:
        table = table_of(comm, routing, rank)
        tokens = tl.load(table + TOKENS)
        if not dispatch.KNOWN:
            numbered = signal_of(comm, rank, batch.signals.numbered, 0, 0)
            if first == 0:
                for away in range(1, nodes):
                    node = (rank // comm.RANKS_PER_NODE + away) % nodes
                    numbers = routing.tables.send_index + (away - 1) * batch.max_tokens
                    number_crossings(comm, routing, table, tokens, node, numbers)
                notify(numbered, comm.epoch)
            elif not wait_numbered(comm, numbered, SEND):
                tokens = 0
        elif not may_place(routing.tables):
            tokens = 0  # nobody would wait for them
        for chunk in range(first, tl.cdiv(tokens, routing.CHUNK), step):
            since = trace_time(comm.context)
            for away in range(1, nodes):
                _send_chunk(comm, routing, dispatch, batch, away, chunk, tokens)
            trace(comm.context, SEND, SEND_CHUNK, rank, chunk, since)


@triton.jit
def _wait_tables(comm, batch):
    """With a known routing: wait for what the other ranks publish, their weights if there are any; false if the group
    gave up."""
    return wait_routing(comm, batch.signals, COMPUTE)


@triton.jit
def _count_and_place(comm, routing, dispatch, batch, worker, workers):
    """This worker's share of counting rows, and of placing them; the last worker of all makes the schedule before it
    places any. A worker that counts last only lays out the rows, because the others wait for that."""
    rank = rank_of(comm.context)
    counted = signal_of(comm, rank, batch.signals.counted, 0, 0)
    routed = True
    if comm.WORLD_SIZE > 1:
        routed = wait_routing(comm, batch.signals, COMPUTE)
    if routed:
        count_rows(comm, routing, batch, worker, workers)
        if counted_last(comm.context, workers):
            lay_out_rows(comm, routing, batch, workers, dispatch.TILE_M, dispatch.COUNTERS)
            notify(counted, comm.epoch)
    if (worker == workers - 1) | (worker < dispatch.roles.INTRAS):
        if wait_counted(comm, counted):
            if worker == workers - 1:
                schedule_blocks(comm, routing.tables, batch.experts, dispatch.TILE_M, dispatch.GROUP, dispatch.COMBINES)
                notify(signal_of(comm, rank, batch.signals.scheduled, 0, 0), comm.epoch)
            if worker < dispatch.roles.INTRAS:
                place_tokens(comm, routing, dispatch, batch, worker)


@triton.jit
def dispatch_tokens(comm, routing, dispatch, batch):
    """The whole dispatch; all CTAs call it. Senders send. All other CTAs publish, stage and count, and the intra CTAs
    among them then place rows. Once the rank's signal `counted` is set, rows have row numbers; once `scheduled` is set,
    the schedule is complete. With a known routing, nobody counts, and neither signal is set."""
    SENDERS: tl.constexpr = dispatch.roles.SENDERS
    cta = tl.program_id(0)
    if cta == 0:
        announce(comm, batch.signals)
    if cta < SENDERS:
        if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
            _send_tokens(comm, routing, dispatch, batch, cta, SENDERS)
    else:
        worker = cta - SENDERS
        workers = tl.num_programs(0) - SENDERS
        publish(comm, routing, batch, dispatch.ids, dispatch.weights, worker, workers)
        if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
            if worker == 0:
                announce_node(comm, batch.signals, INTRA)
        if comm.RANKS_PER_NODE > 1 or dispatch.PACKS:
            _stage_tokens(comm, routing, dispatch, batch, worker, workers)
        if not dispatch.KNOWN:
            _count_and_place(comm, routing, dispatch, batch, worker, workers)
        elif worker < dispatch.roles.INTRAS:
            if _wait_tables(comm, batch):
                place_tokens(comm, routing, dispatch, batch, worker)


@triton.jit
def fill_with_nan(c, rows, columns, first, step):
    """Fill rows first, first + step, ... of a `Block` with NaN, to mark them as not computed."""
    for row in range(first, rows, step):
        for column in range(0, columns, 1024):
            j = column + tl.arange(0, 1024)
            nan = tl.full((1024,), float("nan"), tl.float32).to(c.data.dtype.element_ty)
            pointers = c.data + tl.cast(row, tl.int64) * c.row_stride + j.to(tl.int64) * c.column_stride
            tl.store(pointers, nan, mask=j < columns)
