"""The combine of moe_ffn, in pieces that a counter assigns to CTAs as they become free.

For each chunk of tokens there are pieces of three kinds, those of reduction.py: the partial sum of this rank's rows,
the sum over the node that goes to another node, and the result of the rank's own tokens. The order of the pieces, what
each waits for, and why that ends, are in ffn.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import rank_of
from mkernel.lang.matrix import Block
from mkernel.lang.roles import COMPUTE, take
from mkernel.lang.signals import wait, wait_all
from mkernel.ops.moe.dispatch import fill_with_nan
from mkernel.ops.moe.kinds import COMPUTED, SETTLED
from mkernel.ops.moe.protocol import signal_of, wait_node_entered, wait_numbered, wait_other_nodes_entered
from mkernel.ops.moe.reduction import collect_chunk, relay_chunk, sum_chunk
from mkernel.ops.moe.routing import FIRST_EXPERT, PIECES_TAKEN, block_of, tokens_of

# Counters of a block of rows. The first one counts rows in place.
COUNTERS = tl.constexpr(3)
GATED = tl.constexpr(1)  # counts tiles of the first GEMM
DONE = tl.constexpr(2)  # counts tiles of the second GEMM


@triton.jit
def _wait_settled(comm, batch, source, chunk):
    """Wait until the tables of this rank say where the rows of a chunk are; false if the group gave up."""
    settled = signal_of(comm, rank_of(comm.context), batch.signals.settled, source, chunk)
    return wait(comm.context, settled, comm.epoch, COMPUTE, SETTLED, source, chunk)


@triton.jit
def _wait_tiles(context, done, mask, tiles):
    """Wait until `tiles` tiles of the second GEMM are done in each of some blocks; false if the group gave up."""
    return wait_all(context, done, mask, tiles, COMPUTE, COMPUTED, -1, -1)


@triton.jit
def _wait_computed(comm, routing, gemms, batch, source, chunk):
    """Wait until this rank's experts have computed all rows of a chunk of `source`'s tokens; false if the group gave
    up."""
    K: tl.constexpr = routing.K
    CHUNK: tl.constexpr = routing.CHUNK
    tables = routing.tables
    good = _wait_settled(comm, batch, source, chunk)
    if good:
        t = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
        slot = tl.arange(0, routing.SLOTS)[None, :]
        inside = (t < tokens_of(tables, source)) & (slot < K)
        offsets = (source * batch.max_tokens).to(tl.int64) * K + t * K + slot
        row = tl.load(tables.destinations + offsets, mask=inside, other=-1)
        mine = row >= 0
        expert = tl.load(tables.all_topk_ids + offsets, mask=mine, other=0) - tl.load(tables.summary + FIRST_EXPERT)
        block = block_of(comm, tables, expert, row, mine, gemms.tiling.M)
        done = tables.placed + block * COUNTERS + DONE
        downs = tl.cdiv(gemms.hidden, gemms.tiling.N)
        good = _wait_tiles(comm.context, done, mine, downs)
    return good


@triton.jit
def _collect(comm, routing, combine, batch, chunk):
    """The last piece for a chunk of this rank's own tokens: stores their result, or NaN if the group gave up."""
    CHUNK: tl.constexpr = routing.CHUNK
    rank = rank_of(comm.context)
    ready = _wait_settled(comm, batch, rank, chunk)
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        numbered = signal_of(comm, rank, batch.signals.numbered, 0, 0)
        ready &= wait_numbered(comm, numbered, COMPUTE)
    if ready:
        collect_chunk(comm, routing, combine, batch, chunk)
    else:
        out = combine.out.data + (chunk * CHUNK).to(tl.int64) * combine.out.row_stride
        fill_with_nan(
            Block(out, combine.out.row_stride, combine.out.column_stride),
            tl.minimum(batch.tokens - chunk * CHUNK, CHUNK), combine.columns, 0, 1,
        )  # fmt: skip


@triton.jit
def combine_pieces(comm, routing, gemms, combine, batch, piece, phase):
    """Combine `piece`, then pieces that the counter assigns; in phase 0, only those for tokens of other nodes. Returns
    the first piece that was taken but not combined."""
    CHUNK: tl.constexpr = routing.CHUNK
    others: tl.constexpr = comm.WORLD_SIZE - comm.RANKS_PER_NODE
    nodes: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    far_pieces: tl.constexpr = others + nodes - 1  # pieces per chunk that concern other nodes
    rank = rank_of(comm.context)
    tables = routing.tables
    chunks = batch.chunks
    ready = wait_node_entered(comm, batch.signals, comm.epoch - 1, COMPUTE)
    ready &= wait_other_nodes_entered(comm, batch.signals, comm.epoch - 1, COMPUTE)
    pieces = tl.where(phase == 0, chunks * far_pieces, chunks * (comm.RANKS_PER_NODE + far_pieces + 1))
    while piece < pieces:
        near_piece = piece - chunks * far_pieces  # among those for tokens of this node
        own_chunk = near_piece - chunks * comm.RANKS_PER_NODE
        if (own_chunk < 0) & ((near_piece >= 0) | (piece % max(far_pieces, 1) < others)):
            chunk = tl.where(near_piece >= 0, near_piece // comm.RANKS_PER_NODE, piece // max(far_pieces, 1))
            base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
            other = (base + comm.RANKS_PER_NODE + piece % max(far_pieces, 1)) % comm.WORLD_SIZE
            source = tl.where(near_piece >= 0, base + near_piece % comm.RANKS_PER_NODE, other)
            if ready & (chunk * CHUNK < tokens_of(tables, source)):
                if _wait_computed(comm, routing, gemms, batch, source, chunk):
                    sum_chunk(comm, routing, combine, batch, source, chunk)
        elif own_chunk < 0:
            if nodes > 1:
                chunk = piece // max(far_pieces, 1)
                away = piece % max(far_pieces, 1) - others + 1
                source = (rank + away * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
                if ready & (chunk * CHUNK < tokens_of(tables, source)):
                    if _wait_settled(comm, batch, source, chunk):
                        relay_chunk(comm, routing, combine, batch, away, chunk)
        elif own_chunk * CHUNK < batch.tokens:
            _collect(comm, routing, combine, batch, own_chunk)
        piece = take(tables.summary + PIECES_TAKEN)
    return piece
