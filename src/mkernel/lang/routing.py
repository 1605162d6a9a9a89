"""Routing: which token goes to which expert, told to everybody and counted inside the launch.

Expert ids are data: nobody knows before the launch how many rows an expert gets. So each rank publishes
its routing table, a header (how many tokens, experts and rows of room it has) and its expert ids. A table
lies in the memory of its rank, and the network brings a copy to the counterparts of that rank, one in
every other node. The ranks of a node read tables where they lie, over NVLink: those of their node at
their owners, those of other nodes at the owner's counterpart. A table is small beside its rows: 4 bytes
beside 2*hidden/k for each.

With all tables every rank finds out for itself, with no more talk:

- `count_rows`: the place of each row among those of its (expert, source); how many rows each rank gets;
  which of another node's tokens came over to this node. Pieces of this go round all CTAs that count.
- `lay_out_rows`: the CTA that counted last turns counts into places: rows are ordered by expert, then
  source rank, then token, then slot of the token. It is the first to know whether every rank has room and
  every id an expert (the verdict), and as all ranks see the same tables, all come to the same verdict.
- `schedule_blocks`: the same CTA cuts each expert's rows into blocks of a tile's height and puts the
  blocks into an order. In general it is that in which their last rows arrive: those with own rows only, those of the
  node, those of other nodes, earlier pieces of these first. But blocks of one expert that are computed at the same
  time read its matrix once, so there are few such classes, and within a class the blocks are in the order of experts.
  (With every block in the order of its arrival, an H200 read 484 MB of matrices for a round of tiles, in the
  100 us that its memory needs for that; the tiles themselves take 80. With 4 ranks on the GPU, classes with 2 blocks of
  each expert took 120 to 140 us a tile, with 4 blocks 100.) Blocks of an expert and a class are a group, whose tiles
  go column by column: all of them read the same columns of the matrix.

A token that names an expert twice makes two rows. Ids below zero are dropped.
"""

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, TABLE, rank_of, segment_of, state_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import SEND
from mkernel.lang.signals import ENTERED, notify, refuse, wait

# What is waited for; the numbers go into wait records.
ROUTED = tl.constexpr(20)  # the routing table of the peer is here
COUNTED = tl.constexpr(21)  # the CTAs of this rank have counted the rows
SCHEDULED = tl.constexpr(22)  # the blocks of this rank have an order
HELD = tl.constexpr(23)  # a chunk of the peer's rows lies where it can be fetched
PLACED = tl.constexpr(24)  # the rows of a block are where the GEMM reads them
SETTLED = tl.constexpr(25)  # the tables of this rank say where the rows of a chunk are
COMPUTED = tl.constexpr(26)  # the tiles of a block are computed
NUMBERED = tl.constexpr(27)  # the tokens of this rank that go to other nodes have numbers

# Why a call was refused by the kernel itself; see `lay_out_rows`.
FITS = tl.constexpr(0)
NO_ROOM = tl.constexpr(3)
NO_SUCH_EXPERT = tl.constexpr(4)

# Words of a routing table: the header, then the ids.
TOKENS = tl.constexpr(0)
EXPERTS = tl.constexpr(1)
ROOM = tl.constexpr(2)
HEADER = tl.constexpr(16)

# Words of the summary that `lay_out_rows` leaves for all CTAs.
VERDICT = tl.constexpr(0)
BLOCKS = tl.constexpr(1)
FIRST_EXPERT = tl.constexpr(2)
TICKETS = tl.constexpr(3)  # pieces of the way back that have been handed out: they go to whoever is free
TILES_TAKEN = tl.constexpr(4)  # tiles that have been handed out, likewise
BEFORE_NODE = tl.constexpr(5)  # blocks that come before the last ones, which have rows of the node only
SUMMARY = tl.constexpr(16)  # from here: tokens by source, then the first expert by rank

# A word of the workspace's state: CTAs of the running launch that have counted.
COUNTERS_DONE = tl.constexpr(3)

# Words of an entry of the schedule: expert, first row, rows and number of the block; then where its group begins, and
# how many blocks it has.
ENTRY = tl.constexpr(6)

BLOCK = tl.constexpr(1024)  # words that are looked at together
LONG_BLOCK = tl.constexpr(4096)  # the same where there are as many words as a rank has ids
TOKENS_AT_ONCE = tl.constexpr(256)
MOST_BINS = tl.constexpr(8)  # pieces of a source's tokens that the order of blocks tells apart, at the most
KEYS = tl.constexpr(16)  # a power of two above MOST_BINS + 2
FEW_BINS = tl.constexpr(4)  # if there are fewer, classes are made otherwise
SORTED_AT_ONCE = tl.constexpr(256)


# -- signals, in 64-bit words of a segment: entries, then the rank's own, then two halves of arrivals


@triton.jit
def node_entered(segment, node, SIZE: tl.constexpr):
    """Signal: all ranks of that node have entered the epoch it holds."""
    return segment + SIZE + node


@triton.jit
def own_signal(segment, index, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """A signal between CTAs of one rank; there are 8."""
    return segment + SIZE + SIZE // GPUS + index


@triton.jit
def arrivals(parity, signals, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Where one half of the arrival signals begins: word of the segment."""
    return SIZE + SIZE // GPUS + 8 + parity.to(tl.int64) * signals


@triton.jit
def routed_signal(parity, source, signals, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Word of the signal that `source`'s routing table is in this segment."""
    return arrivals(parity, signals, SIZE, GPUS) + source


@triton.jit
def held_signal(parity, source, chunk, chunks, signals, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Word of the signal that a chunk of `source`'s rows is in this segment."""
    return arrivals(parity, signals, SIZE, GPUS) + SIZE + source.to(tl.int64) * chunks + chunk


@triton.jit
def settled_signal(parity, source, chunk, chunks, signals, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Word of the signal, within a rank, that its tables say where the rows of a chunk are."""
    return arrivals(parity, signals, SIZE, GPUS) + SIZE * (1 + chunks) + source.to(tl.int64) * chunks + chunk


# -- entries


@triton.jit
def announce(context, epoch, GPUS: tl.constexpr):
    """Tell the ranks of my node that I have entered the epoch."""
    rank = rank_of(context)
    base = rank // GPUS * GPUS
    for i in range(1, GPUS):
        notify(segment_of(context, base + (rank + i) % GPUS, tl.int64) + rank, epoch)


@triton.jit
def announce_node(context, epoch, ROLE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Tell my counterparts that all ranks of my node have entered the epoch: they all read what the
    counterparts write into my memory."""
    rank = rank_of(context)
    segment = tl.load(context + SEGMENT)
    if node_has_entered(context, epoch, ROLE, GPUS):
        for i in range(1, SIZE // GPUS):
            signal = node_entered(tl.cast(0, tl.int64), rank // GPUS, SIZE) * 8
            post(context, Transfer((rank + i * GPUS) % SIZE, segment, 0, segment, 0, 0), signal, epoch, ROLE)


@triton.jit
def node_has_entered(context, epoch, ROLE: tl.constexpr, GPUS: tl.constexpr):
    """Wait until all ranks of my node have entered an epoch; false if the group gave up."""
    rank = rank_of(context)
    base = rank // GPUS * GPUS
    mine = segment_of(context, rank, tl.int64)
    good = tl.full((), True, tl.int1)
    for i in range(1, GPUS):
        peer = base + (rank + i) % GPUS
        good &= wait(context, mine + peer, epoch, ROLE, ENTERED, peer, 0)
    return good


@triton.jit
def other_nodes_have_entered(context, epoch, ROLE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Wait until all ranks of all other nodes have entered an epoch; false if the group gave up."""
    rank = rank_of(context)
    mine = segment_of(context, rank, tl.int64)
    good = tl.full((), True, tl.int1)
    for i in range(1, SIZE // GPUS):
        peer = (rank + i * GPUS) % SIZE
        good &= wait(context, node_entered(mine, peer // GPUS, SIZE), epoch, ROLE, ENTERED, peer, 0)
    return good


# -- routing tables


@triton.jit
def holder_of(source, rank, GPUS: tl.constexpr):
    """The rank of my node that has what comes from `source`: itself, or its counterpart here."""
    return tl.where(source // GPUS == rank // GPUS, source, rank // GPUS * GPUS + source % GPUS)


@triton.jit
def table_of(context, source, parity, tables_at, half_words, table_words, GPUS: tl.constexpr):
    """Pointer to the routing table of `source`, in the memory of whoever holds it."""
    segment = segment_of(context, holder_of(source, rank_of(context), GPUS), tl.int32)
    return segment + tables_at + parity.to(tl.int64) * half_words + source.to(tl.int64) * table_words


@triton.jit
def write_words(table, words, stride, column_stride, count, K: tl.constexpr, FLOAT: tl.constexpr):
    """Copy [count, K] ids, or weights as the bits of fp32 numbers, into a table."""
    for start in range(0, count * K, LONG_BLOCK):
        i = start + tl.arange(0, LONG_BLOCK)
        inside = i < count * K
        value = tl.load(words + (i // K).to(tl.int64) * stride + (i % K).to(tl.int64) * column_stride, mask=inside)
        if FLOAT:
            value = value.to(tl.float32).to(tl.int32, bitcast=True)
        else:
            # ids of 64 bits must not become others when they are cut; the largest of 32 bits are no experts
            value = tl.minimum(tl.maximum(value, -1), 0x7FFFFFFF).to(tl.int32)
        tl.store(table + i, value, mask=inside)


@triton.jit
def publish(
    context, epoch, ids, ids_stride, ids_column_stride, weights, weights_stride, weights_column_stride,
    tokens, most_tokens, experts, room, tables_at, half_words, table_words, signals,
    K: tl.constexpr, IDS: tl.constexpr, WEIGHTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
):  # fmt: skip
    """Write this rank's routing table and send it to my counterparts. It has ids, or weights, or both."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    segment = tl.load(context + SEGMENT)
    left = node_has_entered(context, epoch - 1, SEND, GPUS)
    left &= other_nodes_have_entered(context, epoch - 1, SEND, SIZE, GPUS)
    if left:
        table = table_of(context, rank, parity, tables_at, half_words, table_words, GPUS)
        word = tl.arange(0, 16)
        header = tl.where(word == TOKENS, tokens, 0) + tl.where(word == EXPERTS, experts, 0)
        tl.store(table + word, header + tl.where(word == ROOM, room, 0))
        size = HEADER + tokens * K
        if IDS:
            write_words(table + HEADER, ids, ids_stride, ids_column_stride, tokens, K, False)
        if WEIGHTS:
            behind = table + HEADER
            if IDS:
                behind += most_tokens * K
                size += most_tokens * K
            write_words(behind, weights, weights_stride, weights_column_stride, tokens, K, True)
        signal = routed_signal(parity, rank, signals, SIZE, GPUS)
        notify(segment_of(context, rank, tl.int64) + signal, epoch)
        place = (tables_at + parity.to(tl.int64) * half_words + rank.to(tl.int64) * table_words) * 4
        for i in range(1, SIZE // GPUS):
            peer = (rank + i * GPUS) % SIZE
            post(
                context, Transfer(peer, segment, place, segment, place, size.to(tl.int64) * 4), signal * 8, epoch, SEND
            )


@triton.jit
def routing_is_here(context, epoch, signals, ROLE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Wait for the routing tables of all ranks; false if the group gave up."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    good = tl.full((), True, tl.int1)
    for i in range(SIZE):
        source = (rank + i) % SIZE
        segment = segment_of(context, holder_of(source, rank, GPUS), tl.int64)
        signal = segment + routed_signal(parity, source, signals, SIZE, GPUS)
        good &= wait(context, signal, epoch, ROLE, ROUTED, source, 0)
    return good


@triton.jit
def headers(
    context, parity, tables_at, half_words, table_words, WORD: tl.constexpr,
    SIZE: tl.constexpr, GPUS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A word of all headers, by rank; RANKS is a power of two above SIZE, what is too much is 0."""
    source = tl.arange(0, RANKS)
    there = source < SIZE
    holder = holder_of(source, rank_of(context), GPUS)
    address = tl.load(context + TABLE + holder, mask=there, other=0).to(tl.pointer_type(tl.int32))
    offset = tables_at + parity.to(tl.int64) * half_words + source.to(tl.int64) * table_words + WORD
    return tl.load(address + offset, mask=there, other=0)


@triton.jit
def experts_before(
    context, rank, parity, tables_at, half_words, table_words, SIZE: tl.constexpr, GPUS: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """How many experts the ranks below `rank` have: the id of its first one."""
    experts = headers(context, parity, tables_at, half_words, table_words, EXPERTS, SIZE, GPUS, RANKS)
    return tl.sum(tl.where(tl.arange(0, RANKS) < rank, experts, 0))


@triton.jit
def ids_of(table, token, tokens, K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """ROWS x SLOTS ids from a routing table, from `token` on; -1 beyond `tokens` and beyond K."""
    t = token + tl.arange(0, ROWS)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    return tl.load(table + HEADER + t * K + slot, mask=(t < tokens) & (slot < K), other=-1)


@triton.jit
def named_in(ids, low, high):
    """Which rows of a block of ids name an expert in low..high-1: 1 or 0."""
    return tl.max(((ids >= low) & (ids < high)).to(tl.int32), axis=1)


# -- counting


@triton.jit
def _rank_rows(table, words, expert, positions):
    """Number the ids that name an expert, in order; returns how many there are."""
    before = tl.full((), 0, tl.int32)
    for start in range(0, words, LONG_BLOCK):
        i = start + tl.arange(0, LONG_BLOCK)
        named = (tl.load(table + HEADER + i, mask=i < words, other=-1) == expert).to(tl.int32)
        tl.store(positions + i, before + tl.cumsum(named, 0) - named, mask=named == 1)
        before += tl.sum(named)
    return before


@triton.jit
def _count_at_or_above(table, words, bounds, RANKS: tl.constexpr):
    """For every bound: how many ids are at least that."""
    above = tl.zeros((RANKS,), tl.int32)
    at_once: tl.constexpr = max(8192 // RANKS, 16)
    for start in range(0, words, at_once):
        i = start + tl.arange(0, at_once)
        ids = tl.load(table + HEADER + i, mask=i < words, other=-1)
        above += tl.sum((ids[:, None] >= bounds[None, :]).to(tl.int32), axis=0)
    return above


@triton.jit
def number_crossings(table, tokens, low, high, slots, K: tl.constexpr, SLOTS: tl.constexpr):
    """Number the tokens that name an expert in low..high-1, in order; the others get -1."""
    before = tl.full((), 0, tl.int32)
    for start in range(0, tokens, TOKENS_AT_ONCE):
        crosses = named_in(ids_of(table, start, tokens, K, SLOTS, TOKENS_AT_ONCE), low, high)
        t = start + tl.arange(0, TOKENS_AT_ONCE)
        number = before + tl.cumsum(crosses, 0) - crosses
        tl.store(slots + t, tl.where(crosses == 1, number, -1), mask=t < tokens)
        before += tl.sum(crosses)


@triton.jit
def count_rows(
    context, epoch, experts, positions, counts, above, slots, most_tokens,
    tables_at, half_words, table_words, worker, workers,
    K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """This worker's share of the counting. All routing tables must be here.

    positions[source, token, slot]: the row's number among those of its (expert, source), for my experts;
    counts[expert, source]; above[source, rank]: ids that are at least the first expert of that rank;
    slots[source, token]: the token's number among those that come over to my node, for other nodes'.
    """
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    first = experts_before(context, rank, parity, tables_at, half_words, table_words, SIZE, GPUS, RANKS)
    for item in range(worker, (experts + 1) * SIZE, workers):
        source = item % SIZE
        expert = item // SIZE - 1
        table = table_of(context, source, parity, tables_at, half_words, table_words, GPUS)
        tokens = tl.load(table + TOKENS)
        if expert >= 0:
            places = positions + (source * most_tokens).to(tl.int64) * K
            tl.store(counts + expert * SIZE + source, _rank_rows(table, tokens * K, first + expert, places))
        else:
            owned = headers(context, parity, tables_at, half_words, table_words, EXPERTS, SIZE, GPUS, RANKS)
            bounds = tl.cumsum(owned, 0) - owned
            at_least = _count_at_or_above(table, tokens * K, bounds, RANKS)
            tl.store(above + source * RANKS + tl.arange(0, RANKS), at_least)
            if source // GPUS != rank // GPUS:
                base = rank // GPUS * GPUS
                low = experts_before(context, base, parity, tables_at, half_words, table_words, SIZE, GPUS, RANKS)
                high = experts_before(
                    context, base + GPUS, parity, tables_at, half_words, table_words, SIZE, GPUS, RANKS
                )
                number_crossings(table, tokens, low, high, slots + source * most_tokens, K, SLOTS)


@triton.jit
def counted_last(context, workers):
    """Every CTA that counts calls this when it is done; true for the one that is the last."""
    state = state_of(context)
    tl.debug_barrier()
    before = tl.atomic_add(state + COUNTERS_DONE, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    last = before == workers - 1
    if last:
        tl.atomic_xchg(state + COUNTERS_DONE, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def _verdict(
    context, parity, above, tables_at, half_words, table_words,
    SIZE: tl.constexpr, GPUS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Does every rank have room for its rows, and every id an expert? All ranks come to the same verdict,
    and each writes it down."""
    i = tl.arange(0, RANKS)
    at_least = tl.zeros((RANKS,), tl.int32)
    at_next = tl.zeros((RANKS,), tl.int32)
    for source in range(SIZE):
        at_least += tl.load(above + source * RANKS + i)
        at_next += tl.load(above + source * RANKS + i + 1, mask=i < SIZE, other=0)
    rows = tl.where(i < SIZE, at_least - at_next, 0)
    room = headers(context, parity, tables_at, half_words, table_words, ROOM, SIZE, GPUS, RANKS)
    strangers = tl.sum(tl.where(i == SIZE, at_least, 0))
    worst = tl.max(rows - room)
    verdict = tl.where(strangers > 0, NO_SUCH_EXPERT, tl.where(worst > 0, NO_ROOM, FITS))
    if verdict == NO_SUCH_EXPERT:
        owned = headers(context, parity, tables_at, half_words, table_words, EXPERTS, SIZE, GPUS, RANKS)
        refuse(context, NO_SUCH_EXPERT, 0, strangers, tl.sum(owned))
    elif verdict == NO_ROOM:
        full = tl.min(tl.where(rows - room == worst, i, RANKS))
        refuse(context, NO_ROOM, full, tl.sum(tl.where(i == full, rows, 0)), tl.sum(tl.where(i == full, room, 0)))
    return verdict


@triton.jit
def lay_out_rows(
    context, epoch, experts, counts, above, bases, first_blocks, expert_counts, placed, summary,
    tables_at, half_words, table_words,
    SIZE: tl.constexpr, GPUS: tl.constexpr, RANKS: tl.constexpr, TILE_M: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Turn counts into places: bases[expert, source] is the first row of that source's rows, and behind
    the last of them the number of all rows; first_blocks[expert] the same in blocks of TILE_M rows.
    Each block has COUNTERS counters, which start at zero; the first counts the rows that have been placed."""
    parity = (epoch % 2).to(tl.int32)
    total = tl.full((), 0, tl.int32)
    for start in range(0, experts * SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count = tl.load(counts + i, mask=i < experts * SIZE, other=0)
        tl.store(bases + i, total + tl.cumsum(count, 0) - count, mask=i < experts * SIZE)
        total += tl.sum(count)
    tl.store(bases + experts * SIZE, total)
    tl.debug_barrier()
    blocks = tl.full((), 0, tl.int32)
    for start in range(0, experts, BLOCK):
        expert = start + tl.arange(0, BLOCK)
        there = expert < experts
        rows = tl.load(bases + (expert + 1) * SIZE, mask=there, other=0)
        rows -= tl.load(bases + expert * SIZE, mask=there, other=0)
        tl.store(expert_counts + expert, rows, mask=there)
        height = (rows + TILE_M - 1) // TILE_M
        tl.store(first_blocks + expert, blocks + tl.cumsum(height, 0) - height, mask=there)
        blocks += tl.sum(height)
    tl.store(first_blocks + experts, blocks)
    verdict = _verdict(context, parity, above, tables_at, half_words, table_words, SIZE, GPUS, RANKS)
    if verdict != FITS:
        blocks = tl.full((), 0, tl.int32)
    for start in range(0, blocks * COUNTERS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(placed + i, tl.zeros((BLOCK,), tl.int32), mask=i < blocks * COUNTERS)
    first = experts_before(context, rank_of(context), parity, tables_at, half_words, table_words, SIZE, GPUS, RANKS)
    tl.store(summary + VERDICT, verdict)
    tl.store(summary + BLOCKS, blocks)
    tl.store(summary + FIRST_EXPERT, first)
    tl.store(summary + TICKETS, 0)
    tl.store(summary + TILES_TAKEN, 0)
    i = tl.arange(0, RANKS)
    tokens = headers(context, parity, tables_at, half_words, table_words, TOKENS, SIZE, GPUS, RANKS)
    owned = headers(context, parity, tables_at, half_words, table_words, EXPERTS, SIZE, GPUS, RANKS)
    tl.store(summary + SUMMARY + i, tokens)
    tl.store(summary + SUMMARY + RANKS + i, tl.cumsum(owned, 0) - owned)
    tl.debug_barrier()


@triton.jit
def _last_at_most(values, count, wanted, WIDTH: tl.constexpr):
    """For each wanted number: the index of the last of `count` growing values that is not above it."""
    found = tl.zeros((WIDTH,), tl.int32) - 1
    for start in range(0, count, 64):
        i = start + tl.arange(0, 64)
        value = tl.load(values + i, mask=i < count, other=0x7FFFFFFF)
        found += tl.sum((value[None, :] <= wanted[:, None]).to(tl.int32), axis=1)
    return found


@triton.jit
def schedule_blocks(
    context, experts, counts, bases, first_blocks, summary, unsorted, schedule,
    SIZE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, GROUP: tl.constexpr, NODE_LAST: tl.constexpr,
):  # fmt: skip
    """schedule[place]: the block that is computed at that place. NODE_LAST: blocks with rows of the node only, for half
    of the experts, come after those with rows of other nodes, whose results have the longest way back."""
    rank = rank_of(context)
    blocks = tl.load(summary + BLOCKS)
    # classes that have a few blocks of each expert, if all is even
    WANTED: tl.constexpr = 8 if NODE_LAST else 4
    bins = tl.minimum(tl.maximum(blocks // (WANTED * tl.maximum(experts, 1)), 1), MOST_BINS)
    of_node = tl.full((), 0, tl.int32)
    for start in range(0, blocks, 128):
        block = start + tl.arange(0, 128)
        inside = block < blocks
        expert = _last_at_most(first_blocks, experts, block, 128)
        base = tl.load(bases + expert * SIZE, mask=inside, other=0)
        end = tl.load(bases + (expert + 1) * SIZE, mask=inside, other=1)
        row = base + (block - tl.load(first_blocks + expert, mask=inside, other=0)) * TILE_M
        rows = tl.minimum(end - row, TILE_M)
        low = _last_at_most(bases, experts * SIZE, row, 128)
        high = _last_at_most(bases, experts * SIZE, row + rows - 1, 128)
        own = (low % SIZE == rank) & (high % SIZE == rank)
        near = (low % SIZE // GPUS == rank // GPUS) & (high % SIZE // GPUS == rank // GPUS)
        # how far into the rows of its source the last row is; of a source before that it has the last rows
        begins = tl.load(bases + high, mask=inside, other=0)
        reached = row + rows - begins
        among = tl.maximum(tl.load(counts + high, mask=inside, other=1), 1)
        far = ((reached.to(tl.int64) * bins - 1) // among).to(tl.int32)
        far = tl.where(high % SIZE // GPUS == rank // GPUS, 0, far)
        behind_node = expert * SIZE + (rank // GPUS + 1) * GPUS
        between = (high >= behind_node) & (begins > tl.load(bases + behind_node, mask=inside, other=0))
        ends_far = (low < high) & ((low % SIZE // GPUS != rank // GPUS) | between)
        far = tl.where(ends_far, bins - 1, far)
        other_half = 2 * expert >= experts
        first = own & (4 * expert < experts)  # so that the first tiles need not wait for the node
        if NODE_LAST:
            key = tl.where(first, 0, tl.where(near, tl.where(other_half, 2 + bins, 1), 2 + far))
            of_node += tl.sum((inside & near & ~first & other_half).to(tl.int32))
        elif bins < FEW_BINS:
            # what comes first of other nodes together with the node's, for half of the experts: the other half gives it
            # time to come
            late = ends_far | (2 * reached > among)
            early = tl.where(other_half, 2, 3)
            key = tl.where(first, 0, tl.where(near, 1 + other_half.to(tl.int32), tl.where(late, 4, early)))
        else:
            key = tl.where(own, 0, tl.where(near, 1, 2 + far))
        tl.store(unsorted + block * ENTRY, expert, mask=inside)
        tl.store(unsorted + block * ENTRY + 1, row, mask=inside)
        tl.store(unsorted + block * ENTRY + 2, rows, mask=inside)
        tl.store(unsorted + block * ENTRY + 3, key, mask=inside)
    tl.store(summary + BEFORE_NODE, blocks - of_node)
    tl.debug_barrier()
    _sort(unsorted, schedule, blocks)
    _group(unsorted, schedule, blocks, GROUP)


@triton.jit
def _sort(unsorted, schedule, blocks):
    """Put blocks into the order of their keys, those with the same key in the order of their numbers."""
    keys = tl.arange(0, KEYS)[None, :]
    totals = tl.zeros((KEYS,), tl.int32)
    for start in range(0, blocks, SORTED_AT_ONCE):
        block = start + tl.arange(0, SORTED_AT_ONCE)
        key = tl.load(unsorted + block * ENTRY + 3, mask=block < blocks, other=-1)
        totals += tl.sum((key[:, None] == keys).to(tl.int32), axis=0)
    before = tl.cumsum(totals, 0) - totals
    for start in range(0, blocks, SORTED_AT_ONCE):
        block = start + tl.arange(0, SORTED_AT_ONCE)
        inside = block < blocks
        key = tl.load(unsorted + block * ENTRY + 3, mask=inside, other=-1)
        same = (key[:, None] == keys).to(tl.int32)
        entry = schedule + tl.sum(same * (before[None, :] + tl.cumsum(same, 0) - same), axis=1) * ENTRY
        for word in tl.static_range(3):
            tl.store(entry + word, tl.load(unsorted + block * ENTRY + word, mask=inside), mask=inside)
        tl.store(entry + 3, block, mask=inside)
        tl.store(entry + 4, key, mask=inside)
        before += tl.sum(same, axis=0)
    tl.debug_barrier()


@triton.jit
def _group(unsorted, schedule, blocks, GROUP: tl.constexpr):
    """Cut each run of blocks of one expert and class, whose key is in the entries, into groups of about GROUP."""
    runs = tl.full((), 0, tl.int32)
    for start in range(0, blocks, SORTED_AT_ONCE):
        place = start + tl.arange(0, SORTED_AT_ONCE)
        inside = place < blocks
        entry = schedule + place * ENTRY
        begins = place == 0
        for word in tl.static_range(0, 5, 4):
            before = tl.load(entry - ENTRY + word, mask=inside & (place > 0), other=-1)
            begins |= tl.load(entry + word, mask=inside, other=-1) != before
        begins &= inside
        run = runs + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(unsorted + run, place, mask=begins)
        tl.store(entry + 5, run, mask=inside)
        runs += tl.sum(begins.to(tl.int32))
    tl.store(unsorted + runs, blocks, mask=blocks > 0)
    tl.debug_barrier()
    for start in range(0, blocks, SORTED_AT_ONCE):
        place = start + tl.arange(0, SORTED_AT_ONCE)
        inside = place < blocks
        run = tl.load(schedule + place * ENTRY + 5, mask=inside, other=0)
        first = tl.load(unsorted + run, mask=inside, other=0)
        end = tl.load(unsorted + run + 1, mask=inside, other=1)
        groups = tl.maximum((end - first + GROUP // 2) // GROUP, 1)
        height = (end - first + groups - 1) // groups
        first += (place - first) // height * height
        tl.store(schedule + place * ENTRY + 4, first, mask=inside)
        tl.store(schedule + place * ENTRY + 5, tl.minimum(end - first, height), mask=inside)
    tl.debug_barrier()


@triton.jit
def tile_of(schedule, tile, columns):
    """(place, column): which block of the schedule and which of its columns a tile is; group by group."""
    entry = schedule + tile // columns * ENTRY
    first = tl.load(entry + 4)
    height = tl.load(entry + 5)
    within = tile - first * columns
    return first + within % height, within // height
