"""The kernel of ring_attention for Hopper GPUs, in Gluon: the same roles, rounds and signals, another inside.

Everything between ranks is ring_attention.py's: who sends what, who waits for whom, the schedule. The
functions for it are the same ones, since they work on scalars. What differs is who does it: a CTA has
four kinds of warps.

- One warp *loads*: it waits for the chunks that a tile needs and brings queries, keys and values into
  shared memory by TMA, two blocks ahead.
- Two warpgroups *attend*, each with 64 rows of the tile. The scores of the next block are started before
  the values of this one are multiplied, so that the exponentials of one warpgroup run beside the tensor
  cores' work of the other and of its own values.
- One warp *pushes*: it is the role `intra`, for this CTA's share of the chunks. No CTA is set aside for that. It
  waits only for peers and never for a warp of its own CTA, and has the time of the whole launch.

Order of a tile's blocks: the first one of the rank's own keys (there is one, since every row sees itself),
then all that need no mask, source by source, then those that do. So the long loop has no branch in it; a
branch while a product is under way would make the compiler wait for it. A tile's result leaves shared memory while the
next tile is computed. (With one rank, 24 blocks a tile, a tile took 2.5 us beside its blocks' 1.52 us each when it
waited for that, and divided each element instead of multiplying: estimated from 3072 and 16384 positions.) With one
rank the first scores of the next tile are computed while this one's result is stored; behind the last tile they are
computed of whatever is loaded, rather than having a branch.

Synchronisation inside the CTA, by mbarriers: `full` when TMA has written a stage, `empty` when both
warpgroups have read it; the same for the queries. Between the warps and other CTAs: the loading warp
acquires what has arrived and fences (TMA reads another way than the acquire went); a warpgroup says that
its half of a tile is done, so a round counts two for each tile. That its reads are over follows from the
`full` barriers that it has seen.

CTAs that send to other nodes do it with the four warps of the first warpgroup, before the CTA splits.

Whether chunks have arrived: when a tile begins, one look at the signals of all chunks that it will read. After
the first tiles they are all there. To ask chunk by chunk takes the loading warp longer than it is ahead.

Meetings. Where a head's keys and values are many, it matters that the CTAs of a rank read the same ones at the same
time, so that they come from memory once and from the L2 cache afterwards. Left alone, CTAs drift apart, if only by 0.1%
(estimated), and read from everywhere in the end. So the schedule marks tiles that all of them begin at the same time,
and there the loading warps wait for each other, LOOKS_FOR_OTHERS looks at most. Nothing depends on it but speed. (On an
H200, one rank, 16 x 196608 positions, causal, with meetings every 1024 blocks: from 24% to 3% of the memory's rate, 187
to 179 J, 270 to 253 ms. Asking chunk by chunk seems to have kept CTAs together as well: whoever was ahead found nothing
in the cache, and had to wait for it.) Packed documents have no meetings: their tiles read different keys anyway.

Ways that lost. CTAs set aside for pushing, which join the compute when they are done: the schedule must say when
that is. It was told 33 GB/s of each of them. The times of 4 ranks (zigzag 82 ms for 67 ms of computing) would fit 18 to
22 (estimated): it waited for each block before it stored it, and in the end all others waited for its tiles.
Loading the keys of a block before the values of the last one, as their place is free earlier: without a mask 158.0 ms
instead of 158.8 at 1200 MHz, zigzag 83.4 instead of 81.8. CTAs that meet and wait for as long as it takes: zigzag 83.2
ms instead of 81.6.

Not here: heads in parts (the state in `partial`), fp32, tensors that TMA cannot read. Then the Triton
kernel runs; ranks may differ in that, as they share everything that others see.
"""

import functools

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.lang.attention import key_blocks, keys_below, seen_by, seen_by_rank
from mkernel.lang.context import IN_STEP, TABLE, current_epoch, rank_of, segment_of, state_of
from mkernel.lang.context import SIZE as SIZE_WORD
from mkernel.lang.device import acquire_for_descriptors, agreed, prefetch
from mkernel.lang.entries import announce
from mkernel.lang.roles import COMPUTE
from mkernel.lang.rounds import is_seen, may_begin, one_done, panel_is_here, slot_of, slot_row
from mkernel.lang.signals import finish
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.ring_attention import chunks_of, everything_is_here, intra, send, source_at, tile_at
from mkernel.runtime import sequences

WARPGROUPS = gl.constexpr(2)  # that attend
ROWS = gl.constexpr(64)  # of queries, of each of them
TILE_M = gl.constexpr(128)
STAGES = gl.constexpr(2)  # blocks of keys, and of values, in shared memory
# Registers of a thread of the second warpgroup, and of the warps that load and push; the first warpgroup gets what is
# left, as many as the second. 216 are enough for the loops without a mask; a rank with nobody to push to has more.
ATTEND_REGISTERS = gl.constexpr(216)
COPY_REGISTERS = gl.constexpr(72)
ATTEND_REGISTERS_ALONE = gl.constexpr(232)
COPY_REGISTERS_ALONE = gl.constexpr(40)
PUSHED = gl.constexpr(512)  # elements that the pushing warp loads at a time
PREFETCHED = gl.constexpr(4)
LOOKS_FOR_OTHERS = gl.constexpr(64)  # of CTAs that meet; some 50 us (estimated)
MEETING = gl.constexpr(sequences.MEETING)
LOOKS = gl.constexpr(128)  # signals that the loading warp looks at at a time


def descriptor_of(plain: TensorDescriptor) -> GluonDescriptor:
    """A Triton tensor descriptor as a Gluon one: the same, and how its block lies in shared memory."""
    return GluonDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, _layout(len(plain.block_shape)))


@functools.cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@gluon.jit
def copy_rows(
    context, start, row_stride, column_stride, rows, height, dim, data_start, row, turn, source,
    spans, key, keys, length, window, part_rows, offset,
    DTYPE: gl.constexpr, SIZE: gl.constexpr, GPUS: gl.constexpr, SLOTS: gl.constexpr, COUNT: gl.constexpr,
    SEEN_ONLY: gl.constexpr, ZIGZAG: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr,
    FLAT: gl.constexpr, COPY: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """As ring_attention._copy_rows, for rows whose elements are contiguous: 16 bytes a thread. Rows are brought into
    the L2 cache PREFETCHED steps before they are loaded: what one warp has in flight is little, so it should not
    take long."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    rank = rank_of(context)
    base = rank // GPUS * GPUS
    peers = gl.minimum(tl.load(context + SIZE_WORD).to(gl.int32), COUNT)  # not unrolled: see _load
    line = gl.arange(0, COPY // 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * 64
    for step in range(0, height, COPY // DIM):
        ahead = gl.minimum(step + PREFETCHED * (COPY // DIM) + line // DIM, rows - 1)
        prefetch(start + (ahead.to(gl.int64) * row_stride + line % DIM))
        i = step + gl.expand_dims(gl.arange(0, COPY // DIM, gl.SliceLayout(1, layout)), 1)
        j = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
        inside = (i < height) & (j < dim)
        block = gl.load(start + (i.to(gl.int64) * row_stride + j), mask=inside & (i < rows), other=0.0)
        for which in range(peers):
            peer = base + (rank - base + offset + which) % GPUS
            wanted = inside
            if SEEN_ONLY:
                wanted = inside & is_seen(spans, peer, source, key, keys, length, SIZE, ZIGZAG, CAUSAL, PACKED)
            first = slot_row(turn, slot_of(source, peer, SIZE), window, part_rows, SLOTS) + row
            target = segment_of(context, peer, DTYPE) + data_start + tl.multiple_of(first.to(gl.int64) * dim, 16)
            gl.store(target + (i * dim + j), block, mask=wanted)


@gluon.jit
def _load_queries(
    q, q_smem, q_full, q_empty, batch, head, row, turn, DIM: gl.constexpr, QUERIES: gl.constexpr
):  # fmt: skip
    """Load the queries of this CTA's tile number `turn`."""
    place = turn % QUERIES
    mbarrier.wait(q_empty.index(place), ((turn // QUERIES) & 1) ^ 1)
    mbarrier.expect(q_full.index(place), WARPGROUPS * q.block_type.nbytes)
    for which in gl.static_range(WARPGROUPS):
        target = q_smem.index(place * WARPGROUPS + which)._reinterpret(q.dtype, [1, 1, ROWS, DIM], q.layout)
        tma.async_copy_global_to_shared(q, [batch, head, row + which * ROWS, 0], q_full.index(place), target)


@gluon.jit
def _load_block(source, smem, full, empty, batch, head, block, loaded, TILE_N: gl.constexpr, DIM: gl.constexpr):
    """Load a block of the rank's own keys, or values, into the stage for number `loaded`."""
    stage = loaded % STAGES
    mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), source.block_type.nbytes)
    place = smem.index(stage)._reinterpret(source.dtype, [1, 1, TILE_N, DIM], source.layout)
    tma.async_copy_global_to_shared(source, [batch, head, block * TILE_N, 0], full.index(stage), place)


@gluon.jit
def _load_own(
    k, v, k_smem, v_smem, k_full, k_empty, v_full, v_empty, batch, head, first, end, loaded,
    TILE_N: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Load blocks first..end-1 of the rank's own keys and values; returns how many were loaded so far."""
    for block in range(first, end):
        _load_block(k, k_smem, k_full, k_empty, batch, head, block, loaded, TILE_N, DIM)
        _load_block(v, v_smem, v_full, v_empty, batch, head, block, loaded, TILE_N, DIM)
        loaded += 1
    return loaded


@gluon.jit
def _load_slots(
    context, epoch, turn, source, slots, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    first, end, loaded, all_here, chunk_rows, stamps, window, chunks, part_rows,
    SIZE: gl.constexpr, SLOTS: gl.constexpr, TILE_N: gl.constexpr,
):  # fmt: skip
    """The same for blocks of another rank's keys and values: as their chunks arrive, unless they are all there."""
    row = slot_row(turn, slot_of(source, rank_of(context), SIZE), window, part_rows, SLOTS)
    for block in range(first, end):
        if (not all_here) & ((block == first) | (block * TILE_N % chunk_rows == 0)):
            chunk = block * TILE_N // chunk_rows
            panel_is_here(context, epoch, turn, source, chunk, chunk + 1, stamps, window, chunks, SIZE, SLOTS)
            acquire_for_descriptors()
        stage = loaded % STAGES
        phase = (loaded // STAGES) & 1
        place = row + 2 * block * TILE_N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), slots.block_type.nbytes)
        tma.async_copy_global_to_shared(slots, [place, 0], k_full.index(stage), k_smem.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), slots.block_type.nbytes)
        tma.async_copy_global_to_shared(slots, [place + TILE_N, 0], v_full.index(stage), v_smem.index(stage))
        loaded += 1
    return loaded


@gluon.jit
def _blocks(
    bounds, rank, source, row, length,
    SIZE: gl.constexpr, ZIGZAG: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr,
    TILE_N: gl.constexpr,
):  # fmt: skip
    """(first, full, full_end, end) of a source for the tile of queries from `row` on; see key_blocks. The
    first block of the rank's own keys is left out: it comes before all others."""
    low, lowest_end = seen_by(bounds, rank, row, length, SIZE, ZIGZAG, CAUSAL, PACKED)
    last = gl.minimum(row + TILE_M, length) - 1
    high, highest_end = seen_by(bounds, rank, last, length, SIZE, ZIGZAG, CAUSAL, PACKED)
    first, full, full_end, end = key_blocks(
        low, lowest_end, high, highest_end, source, 0, length, length, SIZE, ZIGZAG, TILE_N
    )
    first += (source == rank).to(gl.int32)
    full = gl.maximum(full, first)
    return first, full, gl.maximum(full_end, full), end


@gluon.jit
def _meet(context, epoch, meetings, ctas):
    """Wait for the rank's other CTAs to come to this meeting, number `meetings`, but not for long: it is for speed
    alone."""
    word = state_of(context) + IN_STEP
    begin = epoch * 4294967296
    tl.atomic_max(word, begin, sem="relaxed", scope="gpu")
    seen = tl.atomic_add(word, 1, sem="relaxed", scope="gpu") + 1
    looks = 0
    while (seen < begin + (meetings + 1) * ctas) & (looks < LOOKS_FOR_OTHERS):
        seen = tl.atomic_add(word, 0, sem="relaxed", scope="gpu")
        looks += 1


@gluon.jit
def _load(
    context, epoch, q, k, v, slots, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    spans, schedule, heads, kv_heads, length, blocks, window, part_rows, chunk_rows, chunks, stamps,
    place, end_of_places,
    SIZE: gl.constexpr, GPUS: gl.constexpr, SLOTS: gl.constexpr, SENDERS: gl.constexpr, CREDITS: gl.constexpr,
    ZIGZAG: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr,
    MEETS: gl.constexpr, TILE_N: gl.constexpr, DIM: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """The loading warp: what the tiles of this CTA need, in the order in which it is needed. A tile's queries and first
    keys, which are the rank's own, wait for nobody but at a meeting: with one rank they are multiplied while the tile
    before ends. Whatever a tile must wait for comes before its first values, without which it can not be done."""
    rank = rank_of(context)
    bounds = spans + 2 * SIZE
    # loops over ranks go to a number that the compiler does not know, or it unrolls them and keeps what every
    # rank needs in registers
    ranks = tl.load(context + SIZE_WORD).to(gl.int32)
    loaded = place * 0
    meetings = place * 0
    for at in range(place, end_of_places):
        turn, within, batch, head, kv_head, block = tile_at(schedule, at, 1, heads, kv_heads, blocks)
        if MEETS:
            if tl.load(schedule + at) >= MEETING:
                _meet(context, epoch, meetings, gl.num_programs(0) - SENDERS)
                meetings += 1
        row = block * TILE_M
        first, full, full_end, end = _blocks(bounds, rank, rank, row, length, SIZE, ZIGZAG, CAUSAL, PACKED, TILE_N)
        _load_queries(q, q_smem, q_full, q_empty, batch, head, row, at - place, DIM, QUERIES)
        _load_block(k, k_smem, k_full, k_empty, batch, kv_head, first - 1, loaded, TILE_N, DIM)
        if CREDITS:
            may_begin(context, epoch, turn, stamps, window, COMPUTE)
        if SIZE > 1 and PACKED:
            # one tile of the round waits for all that was sent, before it can be done: the slots are not free before
            if (within // blocks == 0) & (block == blocks - 1):
                need, need_end = seen_by_rank(spans, rank, length, SIZE, ZIGZAG, CAUSAL, PACKED)
                for i in range(1, ranks):
                    source = source_at(rank, i, SIZE, GPUS)
                    chunk, behind = chunks_of(need, need_end, source, 0, length, chunk_rows, length, SIZE, ZIGZAG)
                    panel_is_here(context, epoch, turn, source, chunk, behind, stamps, window, chunks, SIZE, SLOTS)
        _load_block(v, v_smem, v_full, v_empty, batch, kv_head, first - 1, loaded, TILE_N, DIM)
        if SIZE > 1:
            low, _end = seen_by(bounds, rank, row, length, SIZE, ZIGZAG, CAUSAL, PACKED)
            _low, behind = seen_by(
                bounds, rank, gl.minimum(row + TILE_M, length) - 1, length, SIZE, ZIGZAG, CAUSAL, PACKED
            )
            all_here = everything_is_here(
                context, epoch, turn, low, behind, 0, length, chunk_rows, length, stamps, window, chunks,
                gl.arange(0, LOOKS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])),
                SIZE, GPUS, SLOTS, ZIGZAG, LOOKS,
            )  # fmt: skip
            all_here = agreed(all_here)
            tl.debug_barrier()  # what one thread has acquired all may read
            acquire_for_descriptors()
        loaded = _load_own(
            k, v, k_smem, v_smem, k_full, k_empty, v_full, v_empty, batch, kv_head, full, full_end, loaded + 1,
            TILE_N, DIM,
        )  # fmt: skip
        if SIZE > 1:
            for i in range(1, ranks):
                source = source_at(rank, i, SIZE, GPUS)
                _first, other, other_end, _end = _blocks(
                    bounds, rank, source, row, length, SIZE, ZIGZAG, CAUSAL, PACKED, TILE_N
                )
                loaded = _load_slots(
                    context, epoch, turn, source, slots, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    other, other_end, loaded, all_here, chunk_rows, stamps, window, chunks, part_rows,
                    SIZE, SLOTS, TILE_N,
                )  # fmt: skip
        for side in range(2):
            loaded = _load_own(
                k, v, k_smem, v_smem, k_full, k_empty, v_full, v_empty, batch, kv_head,
                gl.where(side == 0, first, full_end), gl.where(side == 0, full, end), loaded, TILE_N, DIM,
            )  # fmt: skip
        if SIZE > 1:
            for i in range(2, 2 * ranks):
                source = source_at(rank, i // 2, SIZE, GPUS)
                first, full, full_end, end = _blocks(
                    bounds, rank, source, row, length, SIZE, ZIGZAG, CAUSAL, PACKED, TILE_N
                )
                loaded = _load_slots(
                    context, epoch, turn, source, slots, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    gl.where(i % 2 == 0, first, full_end), gl.where(i % 2 == 0, full, end), loaded,
                    all_here, chunk_rows, stamps, window, chunks, part_rows, SIZE, SLOTS, TILE_N,
                )  # fmt: skip
    if QUERIES > 1:
        # what the last tile takes for the beginning of another one
        if place < end_of_places:
            _turn, _within, batch, head, kv_head, block = tile_at(
                schedule, end_of_places - 1, 1, heads, kv_heads, blocks
            )
            _load_queries(q, q_smem, q_full, q_empty, batch, head, block * TILE_M, end_of_places - place, DIM, QUERIES)
            _load_block(k, k_smem, k_full, k_empty, batch, kv_head, 0, loaded, TILE_N, DIM)


@gluon.jit
def _push(
    context, epoch, k, v, k_batch, k_head, k_row, v_batch, v_head, v_row,
    spans, kv_heads, length, padded, dim, data_start,
    rounds, window, part_rows, chunk_rows, chunks, stamps, tasks, nanoseconds_per_mib,
    DTYPE: gl.constexpr, SIZE: gl.constexpr, GPUS: gl.constexpr, SLOTS: gl.constexpr,
    SENDERS: gl.constexpr, INTRAS: gl.constexpr, CREDITS: gl.constexpr, PACED: gl.constexpr,
    ZIGZAG: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr, TILE_N: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """The pushing warp: this CTA's share of what the rank copies to its node."""
    cta = gl.program_id(0)
    if GPUS > 1:
        if (cta >= SENDERS) & (cta < SENDERS + INTRAS):
            intra(
                context, epoch, k, (k_batch, k_head, k_row, 1), v, (v_batch, v_head, v_row, 1),
                spans, kv_heads, length, padded, dim, data_start,
                rounds, window, 1, part_rows, chunk_rows, chunks, stamps, tasks, nanoseconds_per_mib,
                cta - SENDERS, INTRAS,
                DTYPE, SIZE, GPUS, SLOTS, CREDITS, PACED, ZIGZAG, CAUSAL, PACKED,
                True, True, PUSHED, TILE_N, DIM, copy_rows,
            )  # fmt: skip


@gluon.jit
def _take_in(scores, total, largest, scale, operand: gl.constexpr, DTYPE: gl.constexpr, MASKED: gl.constexpr):
    """As lang/attention.take_in; the weights as an operand of the product with the values."""
    newest = gl.maximum(largest, gl.max(scores, 1) * scale)
    pivot = newest
    if MASKED:
        pivot = gl.where(newest == float("-inf"), 0.0, newest)
    weights = gl.exp2(scores * scale - gl.expand_dims(pivot, 1))
    fade = gl.exp2(largest - pivot)
    total = total * fade + gl.sum(weights, 1)
    return gl.convert_layout(weights.to(DTYPE), operand), total, newest, fade


@gluon.jit
def _masked(
    scores, bounds, rank, source, rows, at, length, layout: gl.constexpr,
    SIZE: gl.constexpr, ZIGZAG: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr, TILE_N: gl.constexpr,
):  # fmt: skip
    """Scores with the source's keys from `at` on; -inf where a row does not see the key."""
    starts, ends = seen_by(bounds, rank, gl.minimum(rows, length - 1), length, SIZE, ZIGZAG, CAUSAL, PACKED)
    index = gl.expand_dims(at + gl.arange(0, TILE_N, gl.SliceLayout(0, layout)), 0)
    upper = keys_below(ends, source, length, SIZE, ZIGZAG)
    scores = gl.where(index < gl.expand_dims(upper, 1), scores, float("-inf"))
    if PACKED:
        lower = keys_below(starts, source, length, SIZE, ZIGZAG)
        scores = gl.where(index >= gl.expand_dims(lower, 1), scores, float("-inf"))
    return scores


@gluon.jit
def _start_first_scores(
    q_smem, k_smem, q_full, k_full, turn, step, zeros, GROUP: gl.constexpr, QUERIES: gl.constexpr
):  # fmt: skip
    """Begin to multiply the queries of this CTA's tile number `turn` with block `step` of the keys."""
    place = turn % QUERIES
    mbarrier.wait(q_full.index(place), (turn // QUERIES) & 1)
    mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
    query = q_smem.index(place * WARPGROUPS + GROUP)
    key = k_smem.index(step % STAGES).permute((1, 0))
    return warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)


@gluon.jit
def _first_scores(
    q_smem, k_smem, q_full, k_full, k_empty, turn, step, zeros, GROUP: gl.constexpr, QUERIES: gl.constexpr
):  # fmt: skip
    """The scores of a tile's first block."""
    token = _start_first_scores(q_smem, k_smem, q_full, k_full, turn, step, zeros, GROUP, QUERIES)
    scores = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(k_empty.index(step % STAGES), count=1)
    return scores


@gluon.jit
def _attend(
    context, epoch, out, lse, q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    spans, schedule, scale, heads, kv_heads, length, blocks, window, stamps, tasks, place, end_of_places,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr, GPUS: gl.constexpr, CREDITS: gl.constexpr, ZIGZAG: gl.constexpr, CAUSAL: gl.constexpr,
    PACKED: gl.constexpr, LSE: gl.constexpr, TILE_N: gl.constexpr, DIM: gl.constexpr,
    OWN_OUT: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows GROUP*ROWS and on of this CTA's tiles. With room for the queries of two tiles the first scores
    of the next tile are computed while this one ends; they are those of any queries and keys after the last tile."""
    AHEAD: gl.constexpr = QUERIES > 1
    score: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_N, 16])
    value: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=value, k_width=2)
    dtype: gl.constexpr = q_smem.dtype
    rank = rank_of(context)
    bounds = spans + 2 * SIZE
    zeros = gl.zeros([ROWS, TILE_N], gl.float32, score)
    ranks = tl.load(context + SIZE_WORD).to(gl.int32)
    step = place * 0  # blocks that were taken so far
    scores = zeros
    if AHEAD:
        if place < end_of_places:
            scores = _first_scores(q_smem, k_smem, q_full, k_full, k_empty, place * 0, step, zeros, GROUP, QUERIES)
    for at in range(place, end_of_places):
        turn, _within, batch, head, _kv_head, block = tile_at(schedule, at, 1, heads, kv_heads, blocks)
        row = block * TILE_M
        since = trace_time(context)
        rows = row + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score))
        first, full, full_end, end = _blocks(bounds, rank, rank, row, length, SIZE, ZIGZAG, CAUSAL, PACKED, TILE_N)
        count = full_end - full
        for i in range(1, ranks):
            _first, other, other_end, _end = _blocks(
                bounds, rank, source_at(rank, i, SIZE, GPUS), row, length, SIZE, ZIGZAG, CAUSAL, PACKED, TILE_N
            )
            count += other_end - other

        query = q_smem.index((at - place) % QUERIES * WARPGROUPS + GROUP)
        if not AHEAD:
            scores = _first_scores(q_smem, k_smem, q_full, k_full, k_empty, at - place, step, zeros, GROUP, QUERIES)
        scores = _masked(
            scores, bounds, rank, rank, rows, (first - 1) * TILE_N, length, score,
            SIZE, ZIGZAG, CAUSAL, PACKED, TILE_N,
        )  # fmt: skip
        largest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score))
        total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, score))
        weights, total, largest, fade = _take_in(scores, total, largest, scale, operand, dtype, True)
        accumulator = gl.zeros([ROWS, DIM], gl.float32, value)
        step += 1
        for _ in range(count):
            stage = step % STAGES
            before = (step - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
            token = warpgroup_mma(query, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
            product = warpgroup_mma(weights, v_smem.index(before), accumulator, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[token])
            mbarrier.arrive(k_empty.index(stage), count=1)
            next_weights, total, largest, fade = _take_in(scores, total, largest, scale, operand, dtype, False)
            accumulator, weights = warpgroup_mma_wait(0, deps=[product, weights])
            mbarrier.arrive(v_empty.index(before), count=1)
            accumulator = accumulator * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, value)), 1)
            weights = next_weights
            step += 1
        for i in range(2 * ranks):
            source = source_at(rank, i // 2, SIZE, GPUS)
            first, full, full_end, end = _blocks(
                bounds, rank, source, row, length, SIZE, ZIGZAG, CAUSAL, PACKED, TILE_N
            )
            for masked in range(gl.where(i % 2 == 0, first, full_end), gl.where(i % 2 == 0, full, end)):
                stage = step % STAGES
                before = (step - 1) % STAGES
                mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                token = warpgroup_mma(query, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
                product = warpgroup_mma(weights, v_smem.index(before), accumulator, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[token])
                mbarrier.arrive(k_empty.index(stage), count=1)
                scores = _masked(
                    scores, bounds, rank, source, rows, masked * TILE_N, length, score,
                    SIZE, ZIGZAG, CAUSAL, PACKED, TILE_N,
                )  # fmt: skip
                next_weights, total, largest, fade = _take_in(scores, total, largest, scale, operand, dtype, True)
                accumulator, weights = warpgroup_mma_wait(0, deps=[product, weights])
                mbarrier.arrive(v_empty.index(before), count=1)
                accumulator = accumulator * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, value)), 1)
                weights = next_weights
                step += 1
        before = (step - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
        product = warpgroup_mma(weights, v_smem.index(before), accumulator, is_async=True)
        if OWN_OUT:
            mbarrier.arrive(q_empty.index((at - place) % QUERIES), count=1)  # the next ones may come
        if AHEAD:
            token = _start_first_scores(
                q_smem, k_smem, q_full, k_full, at + 1 - place, step, zeros, GROUP, QUERIES
            )  # fmt: skip
        accumulator, weights = warpgroup_mma_wait(AHEAD, deps=[product, weights])
        mbarrier.arrive(v_empty.index(before), count=1)

        if SIZE > 1:
            # chunks that never came were read all the same: if the group gave up, the tile is not right
            aborted = tl.load(context + TABLE + SIZE + rank).to(tl.pointer_type(tl.int64))
            total += gl.where(tl.load(aborted, volatile=True) == 0, 0.0, float("nan"))
        nothing = total == 0.0
        inverse = gl.convert_layout(1.0 / gl.where(nothing, 1.0, total), gl.SliceLayout(1, value))
        result = accumulator * gl.expand_dims(inverse, 1)
        if OWN_OUT:
            # the result of the tile before is stored while this one is computed; nobody writes over it before
            tma.store_wait(0)
            tl.debug_barrier()
        out_smem.index(GROUP).store(result.to(dtype))
        fence_async_shared()
        source_of_out = out_smem.index(GROUP)._reinterpret(dtype, [1, 1, ROWS, DIM], out.layout)
        tma.async_copy_shared_to_global(out, [batch, head, row + GROUP * ROWS, 0], source_of_out)
        if LSE:
            logarithm = (largest + gl.log2(gl.where(nothing, 1.0, total))) * 0.6931471805599453
            line = (batch * heads + head).to(gl.int64) * length
            gl.store(lse + line + rows, gl.where(nothing, float("-inf"), logarithm), mask=rows < length)
        if AHEAD:
            scores = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(k_empty.index(step % STAGES), count=1)
        if not OWN_OUT:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(0), count=1)
        if GROUP == 0:
            trace(context, TILES, TILE, rank, at, since)
        if CREDITS:
            one_done(context, epoch, turn, tasks, stamps, window, SIZE, GPUS, COMPUTE)
        elif not OWN_OUT:
            tl.debug_barrier()  # nobody writes the next tile's result before this one was read
    tma.store_wait(0)


@gluon.jit
def ring_attention_hopper_kernel(
    context, q, own_k, own_v, slots, out, lse, spans, schedule, k, v,
    k_batch, k_head, k_row, v_batch, v_head, v_row,
    scale, heads, kv_heads, length, padded, dim, blocks, data_start,
    rounds, window, part_rows, chunk_rows, chunks, stamps, tasks, nanoseconds_per_mib,
    DTYPE: gl.constexpr, SIZE: gl.constexpr, GPUS: gl.constexpr, SLOTS: gl.constexpr,
    SENDERS: gl.constexpr, INTRAS: gl.constexpr, CREDITS: gl.constexpr, PACED: gl.constexpr,
    ZIGZAG: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr, LSE: gl.constexpr, MEETS: gl.constexpr,
    TILE_N: gl.constexpr, DIM: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring and ring_attention.py's."""
    SMEM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    OWN_OUT: gl.constexpr = DIM <= 128  # is there room for the result beside the queries?
    # Tiles whose queries are there at a time. With two, scores are kept from one tile to the next, in registers that a
    # rank with others needs.
    QUERIES: gl.constexpr = 2 if OWN_OUT and SIZE == 1 else 1
    ATTEND: gl.constexpr = ATTEND_REGISTERS if GPUS > 1 else ATTEND_REGISTERS_ALONE
    COPIES: gl.constexpr = COPY_REGISTERS if GPUS > 1 else COPY_REGISTERS_ALONE
    cta = gl.program_id(0)
    epoch = current_epoch(context)
    if SIZE > 1:
        if cta == 0:
            announce(context, epoch, SIZE, GPUS)
    if cta < SENDERS:
        send(
            context, epoch, k, (k_batch, k_head, k_row, 1), v, (v_batch, v_head, v_row, 1),
            spans, kv_heads, length, padded, dim, data_start,
            rounds, window, 1, part_rows, chunk_rows, chunks, stamps, cta, SENDERS,
            DTYPE, SIZE, GPUS, SLOTS, CREDITS, ZIGZAG, CAUSAL, PACKED, True, True, COPY, TILE_N, DIM, copy_rows,
        )  # fmt: skip

    q_smem = gl.allocate_shared_memory(DTYPE, [QUERIES * WARPGROUPS, ROWS, DIM], SMEM_LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, TILE_N, DIM], SMEM_LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, TILE_N, DIM], SMEM_LAYOUT)
    out_smem = q_smem
    if OWN_OUT:
        out_smem = gl.allocate_shared_memory(DTYPE, [WARPGROUPS, ROWS, DIM], SMEM_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=WARPGROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WARPGROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    place = gl.load(schedule + cta).to(gl.int32)
    end = gl.load(schedule + cta + 1).to(gl.int32)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    context, epoch, out, lse, q_smem, k_smem, v_smem, out_smem,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    spans, schedule, scale, heads, kv_heads, length, blocks, window, stamps, tasks, place, end, 0,
                    SIZE, GPUS, CREDITS, ZIGZAG, CAUSAL, PACKED, LSE, TILE_N, DIM, OWN_OUT, QUERIES,
                ),
            ),
            (
                _attend,
                (
                    context, epoch, out, lse, q_smem, k_smem, v_smem, out_smem,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    spans, schedule, scale, heads, kv_heads, length, blocks, window, stamps, tasks, place, end, 1,
                    SIZE, GPUS, CREDITS, ZIGZAG, CAUSAL, PACKED, LSE, TILE_N, DIM, OWN_OUT, QUERIES,
                ),
            ),
            (
                _load,
                (
                    context, epoch, q, own_k, own_v, slots, q_smem, k_smem, v_smem,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    spans, schedule, heads, kv_heads, length, blocks, window, part_rows, chunk_rows, chunks, stamps,
                    place, end,
                    SIZE, GPUS, SLOTS, SENDERS, CREDITS, ZIGZAG, CAUSAL, PACKED, MEETS, TILE_N, DIM, QUERIES,
                ),
            ),
            (
                _push,
                (
                    context, epoch, k, v, k_batch, k_head, k_row, v_batch, v_head, v_row,
                    spans, kv_heads, length, padded, dim, data_start,
                    rounds, window, part_rows, chunk_rows, chunks, stamps, tasks, nanoseconds_per_mib,
                    DTYPE, SIZE, GPUS, SLOTS, SENDERS, INTRAS, CREDITS, PACED, ZIGZAG, CAUSAL, PACKED, TILE_N, DIM,
                ),
            ),
        ],
        [4, 1, 1],
        [ATTEND, COPIES, COPIES],
    )  # fmt: skip
    finish(context, epoch, SIZE)
