"""Arguments of the ring_attention kernels, and how a CTA finds its tiles in the schedule."""

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
    columns: Any
    FLAT: Any  # the rows of a head are contiguous, and as wide as those of the slots
    WIDTH: Any  # columns of the slots, rounded up to a power of two


class Descriptors(NamedTuple):
    """Tensor descriptors, all None unless the call USES_TMA. Each descriptor is a separate parameter of the kernel, and
    the kernel builds this structure: Triton 3.6 compiles descriptors inside structures, but its launcher does not pass
    them."""

    q: Any
    k: Any
    v: Any
    out: Any
    slots: Any  # None with one rank


class Call(NamedTuple):
    """A call. A *unit* is one batch entry and one head of keys."""

    q: Any  # Heads
    k: Any
    v: Any
    out: Any
    lse: Any  # pointer, None unless LSE
    slots: Any  # pointer to the panels of other ranks; None with one rank, or if the call USES_TMA
    partial: Any  # states of tiles between two parts of a unit, or of spans; None unless PARTS or several spans
    schedule: Any  # which CTA computes which tiles: see schedule.py
    mask: Any  # Mask
    rounds: Any  # Rounds
    spans: Any  # Spans
    scale: Any  # what products or, with SOFTCAP, their tanh are multiplied by, times log2(e)
    cap_scale: Any  # of products in front of tanh, times 2 * log2(e); None unless SOFTCAP
    heads: Any
    kv_heads: Any
    dim: Any  # of queries and keys
    blocks: Any  # tiles of queries per head
    SENDERS: Any  # number of send CTAs
    INTRAS: Any  # number of intra CTAs
    PARTS: Any  # a unit takes several rounds
    LSE: Any
    USES_TMA: Any  # all tensors have tensor descriptors
    SYNCS_GRID: Any  # the schedule has grid syncs (Gluon only)
    SOFTCAP: Any  # scores are softcap * tanh(score / softcap)
    PRECISION: Any
    TILE_M: Any
    TILE_N: Any
    DIM: Any  # dim, rounded up to a power of two
    VALUE_DIM: Any  # the same of values
    COPY: Any  # elements that a copying CTA has in flight
    POLL_WIDTH: Any  # signals polled at a time


class TileAt(NamedTuple):
    """A tile of queries: number `within` of its round and `number` of the launch, starting at row `row` of the rank.
    span: which part of its keys, see merge.py."""

    round_index: Any
    within: Any
    number: Any
    span: Any
    batch: Any
    head: Any
    kv_head: Any
    row: Any


@triton.jit
def head_of(heads, batch, head):
    """Pointer to the first row of a head."""
    return heads.pointer + tl.cast(batch, tl.int64) * heads.batch_stride + tl.cast(head, tl.int64) * heads.head_stride


@triton.jit
def tile_at(call, index):
    """The tile that entry `index` of the schedule names."""
    return tile_of(call, tl.load(call.schedule + index))


@triton.jit
def tile_of(call, entry):
    """The tile that an entry of the schedule names."""
    entry = entry.to(tl.int32)
    span = entry % call.spans.COUNT
    entry = entry // call.spans.COUNT
    group = call.heads // call.kv_heads
    round_index = entry // (group * call.blocks)
    within = entry % (group * call.blocks)
    unit = round_index // call.rounds.parts
    kv_head = unit % call.kv_heads
    head = kv_head * group + within // call.blocks
    row = within % call.blocks * call.TILE_M
    return TileAt(round_index, within, entry, span, unit // call.kv_heads, head, kv_head, row)


@triton.jit
def awaits_whole_panels(call, tile):
    """Whether this is the tile that waits for everything that this rank is sent in the tile's round. In a packed
    sequence there may be chunks that no tile reads, and the slots are not free before these have arrived."""
    return (tile.within // call.blocks == 0) & (tile.row == (call.blocks - 1) * call.TILE_M)
