"""Rounds: keys and values of all ranks, streamed through a window of slots.

A *panel* is a part of one head's keys and values on one rank. In a *round* every rank gives one panel to
all others; rounds follow each other, head by head. A rank has slots for the panels of `window` rounds:
round t uses those of round t - window again. A panel travels in *chunks*, which are signalled one by one.

In the segment of each rank, in 64-bit words (`stamps` is where the fourth begins):

- entered[rank]: that rank has entered the epoch (`lang/entries.py`);
- done[t % window]: what was done in my round t, counted; back at zero when all was;
- freed[rank, t % window]: that rank reads nothing of round t any more;
- arrived[t % window, slot, chunk]: the chunk is in my slot.

freed and arrived hold stamps, epoch and round in one number, so they only grow. `done` never shares
words with them, whatever the shapes of two calls are.

Nothing here is a tensor: kernels in Triton and in Gluon call the same functions.
"""

import triton
import triton.language as tl

from mkernel.lang.attention import keys_below, seen_by_rank
from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import ARRIVED, ENTERED, FREED, notify, wait, wait_again


@triton.jit
def stamp(epoch, turn):
    """What signals of round `turn` grow to."""
    return epoch * 4294967296 + turn + 1


@triton.jit
def slot_of(source, rank, SIZE: tl.constexpr):
    """The slot of a source's panels on a rank. The last one, its own, is for panels on their way to
    other nodes."""
    return (source - rank + SIZE - 1) % SIZE


@triton.jit
def done_word(context, turn, window, SIZE: tl.constexpr):
    """My counter of a round."""
    return segment_of(context, rank_of(context), tl.int64) + SIZE + turn % window


@triton.jit
def freed_word(rank, turn, stamps, window):
    """Offset in a segment: `rank` has freed the round."""
    return stamps + rank * window + turn % window


@triton.jit
def arrived_word(turn, slot, chunk, stamps, window, chunks, SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """Offset in a segment: a chunk of a round has arrived in the slot."""
    return stamps + SIZE * window + (turn % window * SLOTS + slot) * chunks + chunk


@triton.jit
def slot_row(turn, slot, window, part_rows, SLOTS: tl.constexpr):
    """The first row of a slot. A panel has part_rows rows of keys and as many of values."""
    return (turn % window * SLOTS + slot) * 2 * part_rows


@triton.jit
def chunk_height(begin, chunk, chunk_rows, part_rows, padded):
    """Rows of keys in a chunk of the panel that starts at key `begin`, with padding; 0 behind the end."""
    rows = tl.minimum(padded - begin, part_rows) - chunk * chunk_rows
    return tl.maximum(tl.minimum(rows, chunk_rows), 0)


@triton.jit
def may_write(context, epoch, turn, peer, stamps, window, ROLE: tl.constexpr, CREDITS: tl.constexpr):
    """Wait until the peer's slots of the round may be written."""
    mine = segment_of(context, rank_of(context), tl.int64)
    if turn == 0:
        wait(context, mine + peer, epoch, ROLE, ENTERED, peer, 0)
    if CREDITS:
        if turn >= window:
            word = freed_word(peer, turn, stamps, window)
            wait(context, mine + word, stamp(epoch, turn - window), ROLE, FREED, peer, turn - window)


@triton.jit
def may_begin(context, epoch, turn, stamps, window, ROLE: tl.constexpr):
    """Wait until my own round `turn` - window is over. It keeps the CTAs of a rank within a window, so
    that one signal or counter for each place in the window is enough."""
    if turn >= window:
        rank = rank_of(context)
        word = segment_of(context, rank, tl.int64) + freed_word(rank, turn, stamps, window)
        wait(context, word, stamp(epoch, turn - window), ROLE, FREED, rank, turn - window)


@triton.jit
def one_done(
    context, epoch, turn, parts, stamps, window, SIZE: tl.constexpr, GPUS: tl.constexpr, ROLE: tl.constexpr
):  # fmt: skip
    """One of the `parts` of what my rank does in a round is done; the last one frees the round's slots."""
    tl.debug_barrier()
    done = done_word(context, turn, window, SIZE)
    if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.atomic_xchg(done, 0, sem="relaxed", scope="gpu")
        rank = rank_of(context)
        word = freed_word(rank, turn, stamps, window)
        node = rank // GPUS
        segment = tl.load(context + SEGMENT)
        for i in range(1, SIZE // GPUS):
            peer = (rank + i * GPUS) % SIZE
            post(context, Transfer(peer, segment, 0, segment, 0, 0), word * 8, stamp(epoch, turn), ROLE)
        for i in range(GPUS):
            peer = node * GPUS + (rank + i) % GPUS
            notify(segment_of(context, peer, tl.int64) + word, stamp(epoch, turn))


@triton.jit
def is_seen(
    spans, rank, source, key, keys, length,
    SIZE: tl.constexpr, ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Does a rank get the source's keys key..key+keys-1? It does if its rows may see any of them."""
    if not CAUSAL and not PACKED:
        return key < length
    start, end = seen_by_rank(spans, rank, length, SIZE, ZIGZAG, CAUSAL, PACKED)
    first = keys_below(start, source, length, SIZE, ZIGZAG)
    behind = keys_below(end, source, length, SIZE, ZIGZAG)
    return (first < behind) & (first < tl.minimum(key + keys, length)) & (behind > key)


@triton.jit
def is_seen_in_node(
    spans, node, source, key, keys, length,
    SIZE: tl.constexpr, GPUS: tl.constexpr, ZIGZAG: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Does any rank of a node get them?"""
    if not CAUSAL and not PACKED:
        return key < length
    seen = key < 0
    for i in range(GPUS):
        seen |= is_seen(spans, node * GPUS + i, source, key, keys, length, SIZE, ZIGZAG, CAUSAL, PACKED)
    return seen


@triton.jit
def panel_is_here(
    context, epoch, turn, source, first, end, stamps, window, chunks, SIZE: tl.constexpr, SLOTS: tl.constexpr
):
    """Wait for chunks first..end-1 of a source's panel; false if the group gave up."""
    rank = rank_of(context)
    here = True
    for chunk in range(first, end):
        word = arrived_word(turn, slot_of(source, rank, SIZE), chunk, stamps, window, chunks, SIZE, SLOTS)
        here &= wait_again(
            context, segment_of(context, rank, tl.int64) + word, stamp(epoch, turn), COMPUTE, ARRIVED, source, chunk
        )
    return here
