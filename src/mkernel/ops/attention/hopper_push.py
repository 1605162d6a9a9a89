"""The warp of the kernels for Hopper that pushes keys and values to the node while the others compute."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mkernel.lang.context import SIZE_WORD, rank_of, segment_of
from mkernel.lang.device import prefetch
from mkernel.lang.layout import row_of
from mkernel.ops.attention.mask import is_seen
from mkernel.ops.attention.protocol import slot_row
from mkernel.ops.attention.transfer import intra

PUSHED = gl.constexpr(512)  # elements that the pushing warp loads at a time
PREFETCHED = gl.constexpr(4)  # such loads between prefetch and load


@gluon.jit
def copy_rows(comm, call, source, chunk, row, height, STAGED: gl.constexpr):
    """COPY_ROWS of transfer.py, for rows with contiguous elements, 16 bytes per thread. Rows are prefetched into L2
    PREFETCHED steps ahead: a single warp has few bytes in flight, so its loads need a short latency."""
    COPY: gl.constexpr = call.COPY if STAGED else PUSHED
    DIM: gl.constexpr = call.DIM
    DTYPE: gl.constexpr = source.pointer.dtype.element_ty
    FIRST: gl.constexpr = 0 if STAGED else 1
    PEERS: gl.constexpr = 1 if STAGED else comm.RANKS_PER_NODE - 1
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    peers = gl.minimum(tl.load(comm.context + SIZE_WORD).to(gl.int32), PEERS)  # not unrolled: see hopper_load.load
    line = gl.arange(0, COPY // 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * 64
    for step in range(0, height, COPY // DIM):
        ahead = gl.minimum(step + PREFETCHED * (COPY // DIM) + line // DIM, source.count - 1)
        prefetch(source.pointer + (ahead.to(gl.int64) * source.row_stride + line % DIM))
        i = step + gl.expand_dims(gl.arange(0, COPY // DIM, gl.SliceLayout(1, layout)), 1)
        j = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
        inside = (i < height) & (j < call.dim)
        pointers = source.pointer + (i.to(gl.int64) * source.row_stride + j)
        block = gl.load(pointers, mask=inside & (i < source.count), other=0.0)
        for which in range(peers):
            peer = base + (rank - base + FIRST + which) % comm.RANKS_PER_NODE
            wanted = inside
            if not STAGED:
                wanted = inside & is_seen(call.mask, peer, chunk.source, chunk.key, chunk.height)
            first = slot_row(comm, call.rounds, chunk.round_index, chunk.source, peer) + row
            target = segment_of(comm.context, peer, DTYPE)
            target += tl.multiple_of(row_of(call.rounds.slots, comm.epoch, first), 16)
            gl.store(target + (i * call.dim + j), block, mask=wanted)


@gluon.jit
def push(comm, call):
    """The pushing warp: pushes this CTA's share of the rank's chunks to the node."""
    cta = gl.program_id(0)
    if comm.RANKS_PER_NODE > 1:
        if (cta >= call.SENDERS) & (cta < call.SENDERS + call.INTRAS):
            intra(comm, call, cta - call.SENDERS, call.INTRAS, copy_rows)
