"""How the Triton kernels of attention read and copy rows: through pointers, for tensors of any strides."""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.gemm import masked_block
from mkernel.lang.layout import row_of
from mkernel.lang.matrix import Block
from mkernel.ops.attention.call import head_of
from mkernel.ops.attention.mask import is_seen
from mkernel.ops.attention.protocol import slot_row


@triton.jit
def read_flat(source, place):
    """Elements of contiguous rows at the offsets `place`; zeros beyond the last row."""
    return tl.load(source.pointer + place, mask=place < source.count * source.columns, other=0.0)


@triton.jit
def copy_rows(comm, call, source, chunk, row, height, STAGED: tl.constexpr):
    """See transfer.py."""
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    DTYPE: tl.constexpr = source.pointer.dtype.element_ty
    ROWS: tl.constexpr = max(call.COPY // source.WIDTH, 1)
    PEERS: tl.constexpr = 1 if STAGED else comm.RANKS_PER_NODE - 1
    FIRST: tl.constexpr = 0 if STAGED else 1
    width = call.rounds.slots.row_stride
    steps = tl.cdiv(height * width, call.COPY) if source.FLAT else tl.cdiv(height, ROWS)
    for step in range(steps):
        if source.FLAT:
            offsets = step * call.COPY + tl.arange(0, call.COPY)
            inside = offsets < height * width
            block = read_flat(source, offsets)
        else:
            i = step * ROWS + tl.arange(0, ROWS)[:, None]
            j = tl.arange(0, source.WIDTH)[None, :]
            offsets = i * width + j
            # the network sends whole rows
            inside = (i < height) & (j < (width if STAGED else source.columns))
            pointers = source.pointer + i.to(tl.int64) * source.row_stride + j.to(tl.int64) * source.column_stride
            block = tl.load(pointers, mask=inside & (i < source.count) & (j < source.columns), other=0.0)
        for which in tl.static_range(PEERS):
            peer = base + (rank - base + FIRST + which) % comm.RANKS_PER_NODE
            wanted = inside
            if not STAGED:
                wanted &= is_seen(call.mask, peer, chunk.source, chunk.key, chunk.height)
            first = slot_row(comm, call.rounds, chunk.round_index, chunk.source, peer) + row
            target = segment_of(comm.context, peer, DTYPE)
            target += tl.multiple_of(row_of(call.rounds.slots, comm.epoch, first), 16)
            tl.store(target + offsets, block, mask=wanted)


@triton.jit
def read_some_rows(heads, batch, head, row, count, ROWS: tl.constexpr, DIM: tl.constexpr):
    """ROWS rows of a head that has `count`; zeros outside the tensor."""
    block = Block(head_of(heads, batch, head), heads.row_stride, heads.column_stride)
    return masked_block(block, row, 0, count, heads.columns, ROWS, DIM)


@triton.jit
def read_slot_rows(call, row, columns, DIM: tl.constexpr):
    """The first `columns` columns of TILE_N rows of the slots. Rows have no bounds, because panels consist of whole
    blocks."""
    i = row + tl.arange(0, call.TILE_N)[:, None]
    j = tl.arange(0, DIM)[None, :]
    line = call.slots + i.to(tl.int64) * call.rounds.slots.row_stride
    return tl.load(line + j, mask=j < columns, other=0.0)
