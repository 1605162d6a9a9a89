"""The protocol of ring_attention: keys and values of all ranks stream through a window of slots.

A *panel* is the keys and values that one rank contributes to one round: one unit's, or a part of them. In each *round*,
every rank sends one panel to all other ranks that need it. Rounds follow each other in the order of units. A rank has
slots for the panels of `window` rounds: round t reuses the slots of round t - window. A panel is transferred in
*chunks*, each with its own signal. Within a panel, every block of TILE_N keys is followed by its values.

Signals hold stamps: an epoch and a round in one number, so that signals only grow (see `stamp`). A signal or slot that
exists once for each round in the window belongs to round t at index t % window. The Triton and the Gluon kernel both
follow this protocol, with the functions below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.layout import row_of, single_word_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE, INTRA, SEND
from mkernel.lang.signals import ARRIVED, ENTERED, notify, wait, wait_again
from mkernel.ops.attention.kinds import FREED
from mkernel.ops.attention.mask import keys_below
from mkernel.runtime.layout import Layout

if TYPE_CHECKING:
    from mkernel.ops.attention.plan import Plan


def layout(plan: Plan, dtype: torch.dtype) -> Layout:
    """The workspace of a call; unused with one rank. It is not double buffered, because a rank writes to a peer only
    after the peer has entered the epoch. For round t, with w = t % window:

    entered[rank]: that rank has entered the epoch (lang/entries.py: the first words of the segment).
    done[w]: how many tasks of the round this rank has finished; reset to zero by the last one.
    freed[rank, w]: that rank no longer reads the round.
    arrived[w * (world size - 1) + slot, chunk]: the chunk is in this rank's slot. The slot of the rank itself has no
        signals.
    slots: rows of keys and values, [w, slot, row of the panel]. If keys and values differ in their columns, the rows of
        one of them are not filled.
    """
    size = plan.sequences.size
    window = plan.window if size > 1 else 0
    memory = Layout("ring_attention", double_buffered=False)
    memory.words("entered", size)
    memory.counters("done", window)
    memory.signals("freed", size, window)
    memory.signals("arrived", window * (size - 1), plan.chunks)
    memory.buffer("slots", dtype, window * plan.slots * 2 * plan.part_rows, plan.width)
    return memory


class Rounds(NamedTuple):
    """How a call streams keys and values. done, freed, arrived, slots: see `layout`."""

    count: Any
    window: Any
    parts: Any  # rounds of a unit
    part_rows: Any  # keys of a panel
    padded: Any  # keys of a unit, rounded up to whole blocks
    chunk_rows: Any
    chunks: Any  # of a panel
    tasks: Any  # tasks of a rank in a round: tiles that it computes, chunks that it forwards
    done: Any
    freed: Any
    arrived: Any
    slots: Any
    nanoseconds_per_mib: Any  # of an emulated link
    SLOTS: Any  # of a round
    CREDITS: Any  # slots are reused within a call
    PACED: Any  # links are emulated


class Panel(NamedTuple):
    """The panels of a round: keys begin..until-1 of every rank's unit."""

    round_index: Any
    begin: Any
    until: Any


class Chunk(NamedTuple):
    """A chunk of the source's panel: `height` keys, with padding, from `key` on. The panel starts at key `begin`."""

    round_index: Any
    source: Any
    index: Any
    begin: Any
    key: Any
    height: Any


@triton.jit
def stamp(epoch, round_index):
    """The value of a round's signals: the epoch in the upper 32 bits, the round plus one in the lower ones."""
    return epoch * 4294967296 + round_index + 1


@triton.jit
def slot_of(source, rank, WORLD_SIZE: tl.constexpr):
    """The slot of a source's panels on a rank. In the last slot, the rank stages its own panels for other nodes."""
    return (source - rank + WORLD_SIZE - 1) % WORLD_SIZE


@triton.jit
def slot_row(comm, rounds, round_index, source, rank):
    """The first row of the source's slot on a rank. A panel has part_rows rows of keys, and as many of values."""
    slot = slot_of(source, rank, comm.WORLD_SIZE)
    return (round_index % rounds.window * rounds.SLOTS + slot) * 2 * rounds.part_rows


@triton.jit
def chunk_offset(comm, rounds, chunk, rank):
    """Offset of a chunk in a rank's segment, in elements."""
    row = slot_row(comm, rounds, chunk.round_index, chunk.source, rank) + 2 * (chunk.key - chunk.begin)
    return row_of(rounds.slots, comm.epoch, row)


@triton.jit
def arrived_word(comm, rounds, round_index, source, rank, chunk):
    """Offset of a signal in a rank's segment: a chunk of the source's panel has arrived."""
    slot = slot_of(source, rank, comm.WORLD_SIZE)
    return single_word_of(rounds.arrived, round_index % rounds.window * (comm.WORLD_SIZE - 1) + slot, chunk)


@triton.jit
def freed_word(rounds, rank, round_index):
    """Offset of a signal in any segment: `rank` has freed the round."""
    return single_word_of(rounds.freed, rank, round_index % rounds.window)


@triton.jit
def chunk_at(rounds, round_index, source, index):
    """Chunk `index` of a source's panel. Its height is 0 beyond the end of the panel."""
    begin = round_index % rounds.parts * rounds.part_rows
    rows = tl.minimum(rounds.padded - begin, rounds.part_rows) - index * rounds.chunk_rows
    height = tl.maximum(tl.minimum(rows, rounds.chunk_rows), 0)
    return Chunk(round_index, source, index, begin, begin + index * rounds.chunk_rows, height)


@triton.jit
def wait_entered(comm, mine, peer, ROLE: tl.constexpr):
    """Wait until the peer has entered the epoch. mine: this rank's segment."""
    wait(comm.context, mine + peer, comm.epoch, ROLE, ENTERED, peer, 0)


@triton.jit
def wait_freed(comm, rounds, mine, peer, round_index, ROLE: tl.constexpr):
    """Wait until the peer has freed the slots that the round will use, which round `round_index` - window used before.
    mine: this rank's segment."""
    if round_index >= rounds.window:
        before = round_index - rounds.window
        word = freed_word(rounds, peer, round_index)
        wait(comm.context, mine + word, stamp(comm.epoch, before), ROLE, FREED, peer, before)


@triton.jit
def wait_writable(comm, rounds, round_index, peer, ROLE: tl.constexpr):
    """Wait until this rank may write the peer's slots of the round."""
    mine = segment_of(comm.context, rank_of(comm.context), tl.int64)
    if round_index == 0:
        wait_entered(comm, mine, peer, ROLE)
    if rounds.CREDITS:
        wait_freed(comm, rounds, mine, peer, round_index, ROLE)


@triton.jit
def wait_own_round(comm, rounds, round_index, ROLE: tl.constexpr):
    """Wait until this rank has freed its own round `round_index` - window. This keeps the CTAs of a rank within one
    window, so that one signal or counter per round of the window is enough."""
    if round_index >= rounds.window:
        before = round_index - rounds.window
        rank = rank_of(comm.context)
        word = segment_of(comm.context, rank, tl.int64) + freed_word(rounds, rank, round_index)
        wait(comm.context, word, stamp(comm.epoch, before), ROLE, FREED, rank, before)


@triton.jit
def is_last_task(comm, rounds, done):
    """Count a finished task of this rank. True if it is the last of its round; everything that the other tasks did is
    then visible."""
    return tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == rounds.tasks - 1


@triton.jit
def is_reused(rounds, round_index):
    """Whether a later round of the call uses the slots of this one."""
    return round_index + rounds.window < rounds.count


@triton.jit
def post_freed(comm, rank, word, round_index, ROLE: tl.constexpr):
    """Tell this rank's counterparts that it no longer reads the round, with requests that transfer only a signal."""
    number = tl.load(comm.context + SEGMENT)
    for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        nothing = Transfer(peer, number, 0, number, 0, 0)
        post(comm.context, nothing, word * 8, stamp(comm.epoch, round_index), ROLE)


@triton.jit
def notify_freed(comm, rank, word, round_index):
    """Tell the ranks of this node, and this rank itself, that it no longer reads the round."""
    node = rank // comm.RANKS_PER_NODE
    for i in range(comm.RANKS_PER_NODE):
        peer = node * comm.RANKS_PER_NODE + (rank + i) % comm.RANKS_PER_NODE
        notify(segment_of(comm.context, peer, tl.int64) + word, stamp(comm.epoch, round_index))


@triton.jit
def finish_task(comm, rounds, round_index, ROLE: tl.constexpr):
    """Finish one of this rank's tasks of a round. The last task frees the slots of the round, if another round will use
    them: a signal for which nobody waits could arrive in a later call, where the word may be another signal."""
    tl.debug_barrier()
    rank = rank_of(comm.context)
    segment = segment_of(comm.context, rank, tl.int64)
    done = segment + single_word_of(rounds.done, round_index % rounds.window, 0)
    if is_last_task(comm, rounds, done):
        tl.atomic_xchg(done, 0, sem="relaxed", scope="gpu")
        if is_reused(rounds, round_index):
            word = freed_word(rounds, rank, round_index)
            post_freed(comm, rank, word, round_index, ROLE)
            notify_freed(comm, rank, word, round_index)


@triton.jit
def notify_chunk(comm, rounds, chunk, peer):
    """Tell a rank of this node that a chunk is in its slot."""
    word = arrived_word(comm, rounds, chunk.round_index, chunk.source, peer, chunk.index)
    notify(segment_of(comm.context, peer, tl.int64) + word, stamp(comm.epoch, chunk.round_index))


@triton.jit
def post_chunk(comm, rounds, chunk, peer, ELEMENT: tl.constexpr):
    """Post a chunk of this rank's keys and values, staged in its own slot, to a counterpart in another node. Returns
    the request's ticket. ELEMENT: bytes of an element."""
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    source_offset = chunk_offset(comm, rounds, chunk, rank) * ELEMENT
    target_offset = chunk_offset(comm, rounds, chunk, peer) * ELEMENT
    size = (2 * chunk.height).to(tl.int64) * rounds.slots.row_stride * ELEMENT
    signal = arrived_word(comm, rounds, chunk.round_index, rank, peer, chunk.index) * 8
    transfer = Transfer(peer, segment, source_offset, segment, target_offset, size)
    return post(comm.context, transfer, signal, stamp(comm.epoch, chunk.round_index), SEND)


@triton.jit
def wait_chunk(comm, rounds, chunk):
    """Wait for a chunk from another node that this rank forwards."""
    rank = rank_of(comm.context)
    word = arrived_word(comm, rounds, chunk.round_index, chunk.source, rank, chunk.index)
    signal = segment_of(comm.context, rank, tl.int64) + word
    wait(comm.context, signal, stamp(comm.epoch, chunk.round_index), INTRA, ARRIVED, chunk.source, chunk.index)


@triton.jit
def wait_panel(comm, rounds, round_index, source, first, end):
    """Wait for chunks first..end-1 of a source's panel; false if the group gave up."""
    rank = rank_of(comm.context)
    complete = True
    for chunk in range(first, end):
        word = arrived_word(comm, rounds, round_index, source, rank, chunk)
        signal = segment_of(comm.context, rank, tl.int64) + word
        complete &= wait_again(comm.context, signal, stamp(comm.epoch, round_index), COMPUTE, ARRIVED, source, chunk)
    return complete


@triton.jit
def source_at(comm, rank, index):
    """The `index`-th rank in the order in which `rank` attends to keys: first the rank itself, then its node, then the
    other nodes. Of each other node the counterpart comes first, because its keys come directly from the network."""
    node = (rank // comm.RANKS_PER_NODE + index // comm.RANKS_PER_NODE) % (comm.WORLD_SIZE // comm.RANKS_PER_NODE)
    return node * comm.RANKS_PER_NODE + (rank + index) % comm.RANKS_PER_NODE


@triton.jit
def chunks_with(rounds, mask, panel, source, low, end):
    """(first, last + 1): the chunks of a source's panel that hold keys at positions low..end-1."""
    key = tl.maximum(keys_below(mask, low, source), panel.begin)
    key_end = tl.minimum(keys_below(mask, end, source), panel.until)
    first = (key - panel.begin) // rounds.chunk_rows
    return first, tl.where(key < key_end, tl.cdiv(key_end - panel.begin, rounds.chunk_rows), first)


@triton.jit
def poll_arrived(rounds, signals, needed, expected):
    """Whether all needed signals are at least `expected`. Reads each signal once."""
    seen = tl.atomic_add(signals, needed.to(tl.int64) * 0, mask=needed, sem="acquire", scope="sys")
    return tl.min(tl.where(needed, seen, expected), 0) >= expected


@triton.jit
def poll_all_arrived(comm, rounds, mask, panel, low, end, offsets):
    """Whether all chunks of all other ranks with keys at positions low..end-1 have arrived. Reads many signals at a
    time: waiting for one after the other would take as long as several key blocks. offsets: an arange of as many
    elements as signals are to be polled at a time, in a register layout that suits the calling kernel."""
    WIDTH: tl.constexpr = offsets.shape[0]
    rank = rank_of(comm.context)
    mine = segment_of(comm.context, rank, tl.int64)
    chunks = rounds.chunks
    expected = stamp(comm.epoch, panel.round_index)
    complete = low == low  # true, as a tensor, because that is its type after the loop
    for start in range(0, (comm.WORLD_SIZE - 1) * chunks, WIDTH):
        i = start + offsets
        source = source_at(comm, rank, i // chunks + 1)
        first, chunk_end = chunks_with(rounds, mask, panel, source, low, end)
        needed = (i < (comm.WORLD_SIZE - 1) * chunks) & (i % chunks >= first) & (i % chunks < chunk_end)
        word = arrived_word(comm, rounds, panel.round_index, source, rank, i % chunks)
        complete &= poll_arrived(rounds, mine + word, needed, expected)
    return complete
