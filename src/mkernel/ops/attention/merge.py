"""Tiles whose keys are divided between CTAs: for calls with few queries, such as one for each head when text is
generated.

Such a call has fewer tiles than the GPU has SMs, and the time goes into reading keys and values. So a tile's keys are
divided into COUNT spans, the same ones for every source, and each span is an entry of the schedule of its own. Its CTA
attends to the span and stores the tile's state for it. The CTA that finishes last merges the states of all spans, in
the order of spans: the bits do not depend on who is last. No CTA waits for another one.

The CTAs of a tile count themselves in a word of the workspace's state, which is private to the rank. The last one sets
it to zero again, so it is zero between calls. That holds also if the group gives up: waits end, and every CTA computes
all of its entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.ops.attention.softmax import State


class Spans(NamedTuple):
    """How the keys of a tile are divided between CTAs."""

    counts: Any  # pointer to a word for each tile: how many of its CTAs are done
    keys: Any  # keys of a span, a multiple of TILE_N
    COUNT: Any  # spans of a tile


@triton.jit
def state_pointers(call, index):
    """Pointers to state `index` in `call.partial`."""
    i = tl.arange(0, call.TILE_M)
    start = call.partial + tl.cast(index, tl.int64) * (call.TILE_M * (call.VALUE_DIM + 2))
    accumulator = start + 2 * call.TILE_M + i[:, None] * call.VALUE_DIM + tl.arange(0, call.VALUE_DIM)[None, :]
    return State(accumulator, start + call.TILE_M + i, start + i)


@triton.jit
def store_state(pointers, state):
    tl.store(pointers.row_max, state.row_max)
    tl.store(pointers.total, state.total)
    tl.store(pointers.accumulator, state.accumulator)


@triton.jit
def load_state(pointers):
    row_max = tl.load(pointers.row_max)
    total = tl.load(pointers.total)
    return State(tl.load(pointers.accumulator), total, row_max)


@triton.jit
def is_last_span(call, tile):
    """Count a span of a tile whose state is stored. True for the last one of the tile; the states of all others are
    then visible."""
    tl.debug_barrier()
    word = call.spans.counts + tile.number
    last = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == call.spans.COUNT - 1
    if last:
        tl.atomic_xchg(word, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def merge(state, other):
    """The state of rows after two parts of their keys."""
    row_max = tl.maximum(state.row_max, other.row_max)
    pivot = tl.where(row_max == float("-inf"), 0.0, row_max)
    mine = tl.exp2(state.row_max - pivot)
    others = tl.exp2(other.row_max - pivot)
    accumulator = state.accumulator * mine[:, None] + other.accumulator * others[:, None]
    return State(accumulator, state.total * mine + other.total * others, row_max)


@triton.jit
def merged_state(call, tile):
    """The state of a tile after all spans of its keys, in the order of spans."""
    tl.debug_barrier()  # what one thread has acquired is visible to all
    first = tile.number * call.spans.COUNT
    state = load_state(state_pointers(call, first))
    for span in range(1, call.spans.COUNT):
        state = merge(state, load_state(state_pointers(call, first + span)))
    return state
