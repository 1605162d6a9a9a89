"""The Triton kernel of ring_attention: for every shape and dtype, any number of nodes, and the simulator.

CTAs are numbered by role: send, intra, compute. The package's docstring says what each role does, and why they cannot
deadlock. Everywhere, `call` is a `Call` and `tma` are `Descriptors` (call.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import Comm, current_epoch, rank_of
from mkernel.lang.device import acquire_for_descriptors
from mkernel.lang.entries import announce
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import finish
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.attention.call import Descriptors, awaits_whole_panels, head_of, tile_at
from mkernel.ops.attention.mask import key_blocks, keys_below, keys_of, rows_of, seen_by, seen_by_rank, seen_by_tile
from mkernel.ops.attention.merge import is_last_span, load_state, merged_state, state_pointers, store_state
from mkernel.ops.attention.protocol import (
    Panel,
    chunks_with,
    finish_task,
    poll_all_arrived,
    slot_row,
    source_at,
    wait_own_round,
    wait_panel,
)
from mkernel.ops.attention.rows import copy_rows, read_slot_rows, read_some_rows
from mkernel.ops.attention.softmax import State, cap_scores, normalize, online_softmax_step
from mkernel.ops.attention.transfer import intra, send


@triton.jit
def _read_queries(call, tma, tile):
    """The queries of a tile; zeros outside the tensor."""
    if call.USES_TMA:
        return tma.q.load([tile.batch, tile.head, tile.row, 0]).reshape(call.TILE_M, call.DIM)
    else:
        return read_some_rows(
            call.q, tile.batch, tile.head, tile.row, rows_of(call.mask), ROWS=call.TILE_M, DIM=call.DIM
        )


@triton.jit
def _read_own(call, heads, tma, tile, key, DIM: tl.constexpr):
    """TILE_N of the rank's own keys or values, starting at `key`; zeros outside the tensor. tma: its descriptor."""
    if call.USES_TMA:
        return tma.load([tile.batch, tile.kv_head, key, 0]).reshape(call.TILE_N, DIM)
    else:
        return read_some_rows(
            heads, tile.batch, tile.kv_head, key, keys_of(call.mask), ROWS=call.TILE_N, DIM=DIM
        )  # fmt: skip


@triton.jit
def _read_slots(call, heads, tma, row, DIM: tl.constexpr):
    """TILE_N keys or values of another rank, starting at a row of the slots. heads: the rank's own ones."""
    if call.USES_TMA:
        return tma.slots.load([row, 0])
    else:
        return read_slot_rows(call, row, heads.columns, DIM)


@triton.jit
def _mask_scores(call, scores, key, lower, upper):
    """Scores of TILE_N keys starting at `key`, set to -inf where the row does not see the key: a row sees keys
    lower..upper-1."""
    index = key + tl.arange(0, call.TILE_N)[None, :]
    scores = tl.where(index < upper[:, None], scores, float("-inf"))
    if call.mask.PACKED:
        scores = tl.where(index >= lower[:, None], scores, float("-inf"))
    return scores


@triton.jit
def _attend(call, tma, tile, rank, query, state, source, panel_row, blocks, OWN: tl.constexpr):
    """The state after a tile's queries have attended to `blocks` of a source. OWN: keys and values are read from the
    caller's tensors. Otherwise they are read from the slots, where every TILE_N keys are followed by their values, and
    key 0 of the source would be at row `panel_row`.

    A single loop checks for each block whether it must be masked. With a separate loop for masked blocks, the kernel
    for several ranks spilled 24 bytes of registers."""
    accumulator = state.accumulator
    total = state.total
    row_max = state.row_max
    rows = tl.minimum(tile.row + tl.arange(0, call.TILE_M), rows_of(call.mask) - 1)
    starts, ends = seen_by(call.mask, rank, rows)
    # a row sees one range of the source's keys: two numbers per row, where positions would take one per key
    lower = keys_below(call.mask, starts, source)
    upper = keys_below(call.mask, ends, source)
    for block in range(blocks.first, blocks.end):
        at = block * call.TILE_N
        if OWN:
            keys = _read_own(call, call.k, tma.k, tile, at, call.DIM)
        else:
            keys = _read_slots(call, call.k, tma, panel_row + 2 * at, call.DIM)
        scores = cap_scores(call, tl.dot(query, keys.T, input_precision=call.PRECISION))
        if (block < blocks.full) | (block >= blocks.full_end):
            scores = _mask_scores(call, scores, at, lower, upper)
        weights, total, row_max, alpha = online_softmax_step(scores, total, row_max, call.scale)
        accumulator = accumulator * alpha[:, None]
        if OWN:
            values = _read_own(call, call.v, tma.v, tile, at, call.VALUE_DIM)
        else:
            values = _read_slots(call, call.v, tma, panel_row + 2 * at + call.TILE_N, call.VALUE_DIM)
        accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision=call.PRECISION)
    return State(accumulator, total, row_max)


@triton.jit
def _attend_others(comm, call, tma, tile, keys, visible, query, state):
    """(state, missing) after a tile has attended to `keys`, a `Panel`, of all other ranks. missing: NaN if the group
    gave up before all chunks arrived, else 0."""
    rank = rank_of(comm.context)
    begin = tile.round_index % call.rounds.parts * call.rounds.part_rows
    panel = Panel(tile.round_index, begin, tl.minimum(begin + call.rounds.part_rows, call.mask.length))
    if call.rounds.CREDITS:
        wait_own_round(comm, call.rounds, tile.round_index, COMPUTE)
    need = visible.low
    need_end = visible.highest_end
    if call.mask.PACKED:
        if awaits_whole_panels(call, tile):
            need, need_end = seen_by_rank(call.mask, rank)
    offsets = tl.arange(0, call.POLL_WIDTH)
    all_arrived = poll_all_arrived(comm, call.rounds, call.mask, panel, need, need_end, offsets)
    missing = 0.0
    for i in range(1, comm.WORLD_SIZE):
        source = source_at(comm, rank, i)
        if not all_arrived:
            chunk, chunk_end = chunks_with(call.rounds, call.mask, panel, source, need, need_end)
            complete = wait_panel(comm, call.rounds, tile.round_index, source, chunk, chunk_end)
            missing += tl.where(complete, 0.0, float("nan"))
        if call.USES_TMA:
            acquire_for_descriptors()
        panel_row = slot_row(comm, call.rounds, tile.round_index, source, rank) - 2 * panel.begin
        blocks = key_blocks(call.mask, visible, source, keys.begin, keys.until, call.TILE_N)
        state = _attend(call, tma, tile, rank, query, state, source, panel_row, blocks=blocks, OWN=False)
    return state, missing


@triton.jit
def _store_result(call, tma, tile, state):
    """Normalize and store the result of a tile after all its keys."""
    result, logarithm = normalize(state.accumulator, state.total, state.row_max)
    i = tile.row + tl.arange(0, call.TILE_M)
    if call.USES_TMA:
        block = result.to(tma.out.dtype).reshape(1, 1, call.TILE_M, call.VALUE_DIM)
        tma.out.store([tile.batch, tile.head, tile.row, 0], block)
    else:
        j = tl.arange(0, call.VALUE_DIM)[None, :]
        line = head_of(call.out, tile.batch, tile.head) + i[:, None].to(tl.int64) * call.out.row_stride
        target = line + j.to(tl.int64) * call.out.column_stride
        inside = (i < rows_of(call.mask))[:, None] & (j < call.out.columns)
        tl.store(target, result.to(call.out.pointer.dtype.element_ty), mask=inside)
    if call.LSE:
        line = tl.cast(tile.batch * call.heads + tile.head, tl.int64) * rows_of(call.mask)
        tl.store(call.lse + line + i, logarithm, mask=i < rows_of(call.mask))


@triton.jit
def _compute(comm, call, tma, first, end):
    """Compute the tiles of queries in entries first..end-1 of the schedule."""
    rank = rank_of(comm.context)
    for entry in range(first, end):
        tile = tile_at(call, entry)
        part = tile.round_index % call.rounds.parts
        since = trace_time(comm.context)
        begin = part * call.rounds.part_rows
        until = tl.minimum(begin + call.rounds.part_rows, call.mask.length)
        if call.spans.COUNT > 1:
            begin = tile.span * call.spans.keys
            until = tl.minimum(begin + call.spans.keys, call.mask.length)

        query = _read_queries(call, tma, tile)
        visible = seen_by_tile(call.mask, rank, tile.row, call.TILE_M)
        accumulator = tl.zeros((call.TILE_M, call.VALUE_DIM), tl.float32)
        total = tl.zeros((call.TILE_M,), tl.float32)
        row_max = tl.full((call.TILE_M,), float("-inf"), tl.float32)
        if call.PARTS:
            kept = state_pointers(call, tile.within)
            if part > 0:
                tl.debug_barrier()
                before = load_state(kept)
                row_max = before.row_max
                total = before.total
                accumulator = before.accumulator

        blocks = key_blocks(call.mask, visible, rank, begin, until, call.TILE_N)
        state = State(accumulator, total, row_max)
        state = _attend(call, tma, tile, rank, query, state, rank, 0, blocks=blocks, OWN=True)
        missing = 0.0
        if comm.WORLD_SIZE > 1:
            keys = Panel(tile.round_index, begin, until)
            state, missing = _attend_others(comm, call, tma, tile, keys, visible, query, state)
        state = State(state.accumulator, state.total + missing, state.row_max)

        if call.PARTS:
            if part < call.rounds.parts - 1:
                store_state(kept, state)
        if call.spans.COUNT > 1:
            store_state(state_pointers(call, tile.number * call.spans.COUNT + tile.span), state)
            if is_last_span(call, tile):
                _store_result(call, tma, tile, merged_state(call, tile))
        elif part == call.rounds.parts - 1:
            _store_result(call, tma, tile, state)
        trace(comm.context, TILES, TILE, rank, entry, since)
        if call.rounds.CREDITS:
            finish_task(comm, call.rounds, tile.round_index, COMPUTE)


@triton.jit
def _run(comm, call, tma):
    cta = tl.program_id(0)
    if comm.WORLD_SIZE > 1:
        if cta == 0:
            announce(comm.context, comm.epoch, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
    if cta < call.SENDERS:
        send(comm, call, cta, call.SENDERS, copy_rows)
    elif cta < call.SENDERS + call.INTRAS:
        intra(comm, call, cta - call.SENDERS, call.INTRAS, copy_rows)
    first = tl.load(call.schedule + cta).to(tl.int32)
    end = tl.load(call.schedule + cta + 1).to(tl.int32)
    _compute(comm, call, tma, first, end)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def ring_attention_kernel(context, ranks, q, k, v, out, slots, call):
    """The whole operator. ranks: `Ranks`; call: `Call`; q, k, v, out, slots: see `Descriptors`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Descriptors(q, k, v, out, slots),
    )
