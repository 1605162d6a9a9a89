"""What the kernels of ring_attention are told about a call, and how they find their tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Heads(NamedTuple):
    """A [batch, heads, length, dim] tensor."""

    pointer: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any
    column_stride: Any
    FLAT: Any  # the rows of a head are contiguous


class Descriptors(NamedTuple):
    """Tensor descriptors, all None unless the call USES_TMA. Each is a parameter of the kernel by itself: Triton 3.6
    compiles descriptors inside of structures, but its launcher does not pass them. The kernel's entry builds this."""

    q: Any
    k: Any
    v: Any
    out: Any
    slots: Any  # None if there is one rank


class Call(NamedTuple):
    """A call. A *unit* is one batch and one head of keys."""

    q: Any  # Heads
    k: Any
    v: Any
    out: Any
    lse: Any  # pointer, None unless LSE
    slots: Any  # pointer to the panels of other ranks, None if there is one rank or the call USES_TMA
    partial: Any  # state of tiles between the parts of a head; None unless PARTS
    schedule: Any  # which CTA computes what: see schedule.py
    mask: Any  # Mask
    rounds: Any  # Rounds
    scale: Any  # of scores, times log2(e)
    heads: Any
    kv_heads: Any
    dim: Any
    blocks: Any  # tiles of queries of a head
    SENDERS: Any  # CTAs of the role
    INTRAS: Any
    PARTS: Any  # a head takes several rounds
    LSE: Any
    USES_TMA: Any  # all tensors have tensor descriptors
    SYNCS_GRID: Any  # there are grid syncs in the schedule (Gluon only)
    PRECISION: Any
    TILE_M: Any
    TILE_N: Any
    DIM: Any  # dim, rounded up to a power of two
    COPY: Any  # elements that a copying CTA has in flight
    POLL_WIDTH: Any  # signals that are polled at a time


class TileAt(NamedTuple):
    """A tile of queries: number `within` of its round, from row `row` of the rank's rows on."""

    round_index: Any
    within: Any
    batch: Any
    head: Any
    kv_head: Any
    row: Any


@triton.jit
def head_of(heads, batch, head):
    """Pointer to the first row of a head."""
    return heads.pointer + tl.cast(batch, tl.int64) * heads.batch_stride + tl.cast(head, tl.int64) * heads.head_stride


@triton.jit
def tile_at(call, place):
    """The tile at a place of the schedule."""
    entry = tl.load(call.schedule + place).to(tl.int32)
    group = call.heads // call.kv_heads
    round_index = entry // (group * call.blocks)
    within = entry % (group * call.blocks)
    unit = round_index // call.rounds.parts
    kv_head = unit % call.kv_heads
    head = kv_head * group + within // call.blocks
    return TileAt(round_index, within, unit // call.kv_heads, head, kv_head, within % call.blocks * call.TILE_M)


@triton.jit
def awaits_whole_panels(call, tile):
    """Is it the tile of its round that waits for all that is sent to this rank in it? In a packed sequence there may be
    chunks that no tile reads, and the slots are not free before these have arrived."""
    return (tile.within // call.blocks == 0) & (tile.row == (call.blocks - 1) * call.TILE_M)
