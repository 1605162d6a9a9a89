"""The protocol of ring_attention: keys and values of all ranks, streamed through a window of slots.

A *panel* is a part of one head's keys and values on one rank. In a *round* every rank gives one panel to all others;
rounds follow each other, head by head. A rank has slots for the panels of `window` rounds: round t uses those of round
t - window again. A panel travels in *chunks*, which are signalled one by one: blocks of TILE_N keys, each followed by
its values.

Signals hold stamps, epoch and round in one number, so they only grow. `place` is a round's place in the window,
t % window. Both kernels, in Triton and in Gluon, follow this protocol with the same functions.
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


def layout(plan: Plan, dim: int, dtype: torch.dtype) -> Layout:
    """The workspace of a call; a rank alone keeps nothing there. Nothing is double buffered: a rank writes to a peer
    only when the peer has entered the epoch.

    entered[rank]: that rank has entered the epoch (lang/entries.py: the first words of the segment).
    done[place]: how many tasks of this rank's round are done; back at zero when all are.
    freed[rank, place]: that rank reads nothing of the round any more.
    arrived[place * sources + slot, chunk]: the chunk is in my slot. Of the slots, my own gets no signal.
    slots: rows of keys and values, [place, slot, row of the panel].
    """
    size = plan.sequences.size
    window = plan.window if size > 1 else 0
    memory = Layout("ring_attention", double_buffered=False)
    memory.words("entered", size)
    memory.counters("done", window)
    memory.signals("freed", size, window)
    memory.signals("arrived", window * (size - 1), plan.chunks)
    memory.buffer("slots", dtype, window * plan.slots * 2 * plan.part_rows, dim)
    return memory


class Rounds(NamedTuple):
    """How a call's keys and values are streamed. done, freed, arrived, slots: see `layout`."""

    count: Any
    window: Any
    parts: Any  # rounds of a head
    part_rows: Any  # keys of a panel
    padded: Any  # keys of a head, with those that fill its last block
    chunk_rows: Any
    chunks: Any  # of a panel
    tasks: Any  # what a rank does in a round: tiles that it computes, chunks that it passes on
    done: Any
    freed: Any
    arrived: Any
    slots: Any
    nanoseconds_per_mib: Any  # of an emulated link
    SLOTS: Any  # of a round
    CREDITS: Any  # slots are used more than once in a call
    PACED: Any  # links are emulated


class Panel(NamedTuple):
    """What a round brings of every rank: its keys begin..until-1."""

    round_index: Any
    begin: Any
    until: Any


class Chunk(NamedTuple):
    """A chunk of the source's panel that begins at key `begin`: `height` keys from `key` on, with padding."""

    round_index: Any
    source: Any
    index: Any
    begin: Any
    key: Any
    height: Any


@triton.jit
def stamp(epoch, round_index):
    """What signals of a round grow to."""
    return epoch * 4294967296 + round_index + 1


@triton.jit
def slot_of(source, rank, WORLD_SIZE: tl.constexpr):
    """The slot of a source's panels on a rank. The last one, its own, is for panels on their way to other nodes."""
    return (source - rank + WORLD_SIZE - 1) % WORLD_SIZE


@triton.jit
def slot_row(comm, rounds, round_index, source, rank):
    """The first row of the source's slot on a rank. A panel has part_rows rows of keys and as many of values."""
    slot = slot_of(source, rank, comm.WORLD_SIZE)
    return (round_index % rounds.window * rounds.SLOTS + slot) * 2 * rounds.part_rows


@triton.jit
def chunk_offset(comm, rounds, chunk, rank):
    """Where a chunk lies in a rank's segment, in elements."""
    row = slot_row(comm, rounds, chunk.round_index, chunk.source, rank) + 2 * (chunk.key - chunk.begin)
    return row_of(rounds.slots, comm.epoch, row)


@triton.jit
def arrived_word(comm, rounds, round_index, source, rank, chunk):
    """Offset in a rank's segment: a chunk of the source's panel has arrived."""
    slot = slot_of(source, rank, comm.WORLD_SIZE)
    return single_word_of(rounds.arrived, round_index % rounds.window * (comm.WORLD_SIZE - 1) + slot, chunk)


@triton.jit
def freed_word(rounds, rank, round_index):
    """Offset in a segment: `rank` has freed the round."""
    return single_word_of(rounds.freed, rank, round_index % rounds.window)


@triton.jit
def chunk_at(rounds, round_index, source, index):
    """A chunk of a source's panel. Its height is 0 behind the end of the panel."""
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
    """Wait until the peer has freed the slots of the round, which the round a window before has used. mine: this rank's
    segment."""
    if round_index >= rounds.window:
        before = round_index - rounds.window
        word = freed_word(rounds, peer, round_index)
        wait(comm.context, mine + word, stamp(comm.epoch, before), ROLE, FREED, peer, before)


@triton.jit
def wait_writable(comm, rounds, round_index, peer, ROLE: tl.constexpr):
    """Wait until the peer's slots of the round may be written."""
    mine = segment_of(comm.context, rank_of(comm.context), tl.int64)
    if round_index == 0:
        wait_entered(comm, mine, peer, ROLE)
    if rounds.CREDITS:
        wait_freed(comm, rounds, mine, peer, round_index, ROLE)


@triton.jit
def wait_own_round(comm, rounds, round_index, ROLE: tl.constexpr):
    """Wait until this rank's own round `round_index` - window is over. It keeps the CTAs of a rank within a window, so
    that one signal or counter for each place in the window is enough."""
    if round_index >= rounds.window:
        before = round_index - rounds.window
        rank = rank_of(comm.context)
        word = segment_of(comm.context, rank, tl.int64) + freed_word(rounds, rank, round_index)
        wait(comm.context, word, stamp(comm.epoch, before), ROLE, FREED, rank, before)


@triton.jit
def is_last_task(comm, rounds, done):
    """Count a task; is it the last one of its round on this rank? Then all that the others did is known."""
    return tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == rounds.tasks - 1


@triton.jit
def post_freed(comm, rank, word, round_index, ROLE: tl.constexpr):
    """Tell this rank's counterparts that it reads nothing of the round any more."""
    number = tl.load(comm.context + SEGMENT)
    for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        nothing = Transfer(peer, number, 0, number, 0, 0)
        post(comm.context, nothing, word * 8, stamp(comm.epoch, round_index), ROLE)


@triton.jit
def notify_freed(comm, rank, word, round_index):
    """Tell the ranks of its node, and itself, the same."""
    node = rank // comm.RANKS_PER_NODE
    for i in range(comm.RANKS_PER_NODE):
        peer = node * comm.RANKS_PER_NODE + (rank + i) % comm.RANKS_PER_NODE
        notify(segment_of(comm.context, peer, tl.int64) + word, stamp(comm.epoch, round_index))


@triton.jit
def finish_task(comm, rounds, round_index, ROLE: tl.constexpr):
    """One of this rank's tasks of a round is done; the last one frees the round's slots."""
    tl.debug_barrier()
    rank = rank_of(comm.context)
    segment = segment_of(comm.context, rank, tl.int64)
    done = segment + single_word_of(rounds.done, round_index % rounds.window, 0)
    if is_last_task(comm, rounds, done):
        tl.atomic_xchg(done, 0, sem="relaxed", scope="gpu")
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
    """Send a chunk of this rank's keys and values, which is in its own slot, to a counterpart in another node.
    ELEMENT: bytes of an element."""
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    here = chunk_offset(comm, rounds, chunk, rank) * ELEMENT
    there = chunk_offset(comm, rounds, chunk, peer) * ELEMENT
    size = (2 * chunk.height).to(tl.int64) * rounds.slots.row_stride * ELEMENT
    signal = arrived_word(comm, rounds, chunk.round_index, rank, peer, chunk.index) * 8
    transfer = Transfer(peer, segment, here, segment, there, size)
    post(comm.context, transfer, signal, stamp(comm.epoch, chunk.round_index), SEND)


@triton.jit
def wait_chunk(comm, rounds, chunk):
    """Wait for a chunk from another node that this rank passes on."""
    rank = rank_of(comm.context)
    word = arrived_word(comm, rounds, chunk.round_index, chunk.source, rank, chunk.index)
    signal = segment_of(comm.context, rank, tl.int64) + word
    wait(comm.context, signal, stamp(comm.epoch, chunk.round_index), INTRA, ARRIVED, chunk.source, chunk.index)


@triton.jit
def wait_panel(comm, rounds, round_index, source, first, end):
    """Wait for chunks first..end-1 of a source's panel; false if the group gave up."""
    rank = rank_of(comm.context)
    here = True
    for chunk in range(first, end):
        word = arrived_word(comm, rounds, round_index, source, rank, chunk)
        signal = segment_of(comm.context, rank, tl.int64) + word
        here &= wait_again(comm.context, signal, stamp(comm.epoch, round_index), COMPUTE, ARRIVED, source, chunk)
    return here


@triton.jit
def source_at(comm, rank, place):
    """The rank whose keys are attended to at that place: the rank itself, its node, the other nodes, of each of them
    the counterpart first, whose keys come straight from the network."""
    node = (rank // comm.RANKS_PER_NODE + place // comm.RANKS_PER_NODE) % (comm.WORLD_SIZE // comm.RANKS_PER_NODE)
    return node * comm.RANKS_PER_NODE + (rank + place) % comm.RANKS_PER_NODE


@triton.jit
def chunks_with(rounds, mask, panel, source, low, end):
    """(first, behind): chunks of a source's panel with keys at positions low..end-1."""
    key = tl.maximum(keys_below(mask, low, source), panel.begin)
    behind = tl.minimum(keys_below(mask, end, source), panel.until)
    first = (key - panel.begin) // rounds.chunk_rows
    return first, tl.where(key < behind, tl.cdiv(behind - panel.begin, rounds.chunk_rows), first)


@triton.jit
def poll_arrived(rounds, signals, needed, expected):
    """Have those of the signals that are needed grown to what is expected?"""
    seen = tl.atomic_add(signals, needed.to(tl.int64) * 0, mask=needed, sem="acquire", scope="sys")
    return tl.min(tl.where(needed, seen, expected), 0) >= expected


@triton.jit
def poll_all_arrived(comm, rounds, mask, panel, low, end, places):
    """Have all sources' chunks with keys at positions low..end-1 arrived? One look at many signals at a time: to wait
    for one after the other would take as long as several key blocks. places: 0, 1, ..., as many as are polled at a
    time, as the calling kernel lays them out."""
    WIDTH: tl.constexpr = places.shape[0]
    rank = rank_of(comm.context)
    mine = segment_of(comm.context, rank, tl.int64)
    chunks = rounds.chunks
    expected = stamp(comm.epoch, panel.round_index)
    here = low == low  # true, as a tensor: the loop makes one of it
    for start in range(0, (comm.WORLD_SIZE - 1) * chunks, WIDTH):
        i = start + places
        source = source_at(comm, rank, i // chunks + 1)
        first, behind = chunks_with(rounds, mask, panel, source, low, end)
        needed = (i < (comm.WORLD_SIZE - 1) * chunks) & (i % chunks >= first) & (i % chunks < behind)
        word = arrived_word(comm, rounds, panel.round_index, source, rank, i % chunks)
        here &= poll_arrived(rounds, mine + word, needed, expected)
    return here
