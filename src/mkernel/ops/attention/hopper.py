"""The kernel of ring_attention for Hopper GPUs, in Gluon: the same roles, rounds and signals, another inside.

Everything between ranks is the same: who sends what (transfer.py), who waits for whom (protocol.py), the
schedule. The functions for it are the same ones, since they work on scalars. What differs is who does it: a
CTA has four kinds of warps.

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

What the loading warp waits for, and when: hopper_load.py.

Ways that lost. CTAs set aside for pushing, which join the compute when they are done: the schedule must say when
that is. It was told 33 GB/s of each of them. The times of 4 ranks (zigzag 82 ms for 67 ms of computing) would fit 18 to
22 (estimated): it waited for each block before it stored it, and in the end all others waited for its tiles.
Loading the keys of a block before the values of the last one, as their place is free earlier: without a mask 158.0 ms
instead of 158.8 at 1200 MHz, zigzag 83.4 instead of 81.8. A grid sync that waits for as long as it takes: zigzag 83.2
ms instead of 81.6.

Not here: heads in parts (the state in `partial`), fp32, tensors that TMA cannot read. Then the Triton
kernel (kernel.py) runs; ranks may differ in that, as they share everything that others see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from mkernel.lang.context import SIZE_WORD, Comm, current_epoch, rank_of, segment_of
from mkernel.lang.device import prefetch
from mkernel.lang.entries import announce
from mkernel.lang.gluon_compat import async_store, reinterpret
from mkernel.lang.layout import row_of
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import finish, gave_up
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.attention.call import Descriptors, tile_at
from mkernel.ops.attention.hopper_load import ROWS, STAGES, WARPGROUPS, Shared, Stages, blocks_of, load, query_stages
from mkernel.ops.attention.mask import is_seen, keys_below, seen_by
from mkernel.ops.attention.protocol import finish_task, slot_row, source_at
from mkernel.ops.attention.transfer import intra, send

# Registers of a thread of the second warpgroup, and of the warps that load and push; the first warpgroup gets what is
# left, as many as the second. 216 are enough for the loops without a mask; a rank with nobody to push to has more.
ATTEND_REGISTERS = gl.constexpr(216)
COPY_REGISTERS = gl.constexpr(72)
ATTEND_REGISTERS_ALONE = gl.constexpr(232)
COPY_REGISTERS_ALONE = gl.constexpr(40)
PUSHED = gl.constexpr(512)  # elements that the pushing warp loads at a time
PREFETCHED = gl.constexpr(4)


class Attended(NamedTuple):
    """A warpgroup's rows of a tile: the online softmax so far, and the weights whose values come next."""

    weights: Any
    accumulator: Any
    total: Any
    row_max: Any


class Masked(NamedTuple):
    """A block of the source's keys, from key `key` on, that not all of this rank's `rows` see."""

    rank: Any
    source: Any
    rows: Any
    key: Any


@gluon.constexpr_function
def has_room_for_out(dim):
    """Is there room for the result beside the queries?"""
    return dim <= 128


@gluon.constexpr_function
def score_layout(tile_n):
    """How the threads of a warpgroup hold scores."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tile_n, 16])


@gluon.jit
def _copy_rows(comm, call, source, chunk, row, height, STAGED: gl.constexpr):
    """See transfer.py; for rows whose elements are contiguous, 16 bytes a thread. Rows are brought into the L2 cache
    PREFETCHED steps before they are loaded: what one warp has in flight is little, so it should not take long."""
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
def _push(comm, call):
    """The pushing warp: this CTA's share of what the rank copies to its node."""
    cta = gl.program_id(0)
    if comm.RANKS_PER_NODE > 1:
        if (cta >= call.SENDERS) & (cta < call.SENDERS + call.INTRAS):
            intra(comm, call, cta - call.SENDERS, call.INTRAS, _copy_rows)


@gluon.jit
def _online_softmax_step(scores, total, row_max, scale, DIM: gl.constexpr, DTYPE: gl.constexpr, MASKED: gl.constexpr):
    """As softmax.online_softmax_step; the weights as an operand of the product with the values."""
    value: gl.constexpr = score_layout(DIM)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    pivot = new_max
    if MASKED:
        pivot = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale - gl.expand_dims(pivot, 1))
    alpha = gl.exp2(row_max - pivot)
    total = total * alpha + gl.sum(weights, 1)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=value, k_width=2)
    return gl.convert_layout(weights.to(DTYPE), operand), total, new_max, alpha


@gluon.jit
def _mask_scores(mask, scores, masked, TILE_N: gl.constexpr):
    """Scores with a block of keys; -inf where a row does not see the key."""
    starts, ends = seen_by(mask, masked.rank, gl.minimum(masked.rows, mask.length - 1))
    index = gl.expand_dims(masked.key + gl.arange(0, TILE_N, gl.SliceLayout(0, score_layout(TILE_N))), 0)
    upper = keys_below(mask, ends, masked.source)
    scores = gl.where(index < gl.expand_dims(upper, 1), scores, float("-inf"))
    if mask.PACKED:
        lower = keys_below(mask, starts, masked.source)
        scores = gl.where(index >= gl.expand_dims(lower, 1), scores, float("-inf"))
    return scores


@gluon.jit
def _start_scores(query, stages, step, TILE_N: gl.constexpr):
    """Begin to multiply queries with block `step` of the keys."""
    zeros = gl.zeros([ROWS, TILE_N], gl.float32, score_layout(TILE_N))
    mbarrier.wait(stages.full.index(step % STAGES), (step // STAGES) & 1)
    key = stages.data.index(step % STAGES).permute((1, 0))
    return warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_tile(comm, call, shared, number, step, GROUP: gl.constexpr):
    """Begin to multiply the queries of this CTA's tile `number` with their first block of keys."""
    stage = number % query_stages(comm.WORLD_SIZE, call.DIM)
    phase = (number // query_stages(comm.WORLD_SIZE, call.DIM)) & 1
    mbarrier.wait(shared.q.full.index(stage), phase)
    return _start_scores(shared.q.data.index(stage * WARPGROUPS + GROUP), shared.k, step, call.TILE_N)


@gluon.jit
def _first_scores(comm, call, shared, number, step, GROUP: gl.constexpr):
    """The scores of a tile's first block."""
    token = _start_tile(comm, call, shared, number, step, GROUP)
    scores = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(shared.k.empty.index(step % STAGES), count=1)
    return scores


@gluon.jit
def _begin_tile(call, scores, masked):
    """`Attended` after the first block of a tile: its weights, and no values yet."""
    scores = _mask_scores(call.mask, scores, masked, call.TILE_N)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout(call.TILE_N)))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, score_layout(call.TILE_N)))
    weights, total, row_max, _ = _online_softmax_step(
        scores, total, row_max, call.scale, call.DIM, call.q.pointer.dtype.element_ty, MASKED=True
    )  # fmt: skip
    accumulator = gl.zeros([ROWS, call.DIM], gl.float32, score_layout(call.DIM))
    return Attended(weights, accumulator, total, row_max)


@gluon.jit
def _attend_block(call, shared, query, attended, step, masked, MASKED: gl.constexpr):
    """Attend to block `step`: its scores are computed beside the product with the values of the block before."""
    before = (step - 1) % STAGES
    token = _start_scores(query, shared.k, step, call.TILE_N)
    mbarrier.wait(shared.v.full.index(before), ((step - 1) // STAGES) & 1)
    product = warpgroup_mma(attended.weights, shared.v.data.index(before), attended.accumulator, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[token])
    mbarrier.arrive(shared.k.empty.index(step % STAGES), count=1)
    if MASKED:
        scores = _mask_scores(call.mask, scores, masked, call.TILE_N)
    weights, total, row_max, alpha = _online_softmax_step(
        scores, attended.total, attended.row_max, call.scale, call.DIM, call.q.pointer.dtype.element_ty, MASKED=MASKED
    )  # fmt: skip
    accumulator, _ = warpgroup_mma_wait(0, deps=[product, attended.weights])
    mbarrier.arrive(shared.v.empty.index(before), count=1)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, score_layout(call.DIM)))
    return Attended(weights, accumulator * gl.expand_dims(alpha, 1), total, row_max)


@gluon.jit
def _blocks_without_mask(comm, call, rank, row, ranks):
    """How many blocks of all ranks' keys every row of a tile sees."""
    own = blocks_of(call.mask, rank, rank, row, call.TILE_N)
    count = own.full_end - own.full
    for i in range(1, ranks):
        other = blocks_of(call.mask, rank, source_at(comm, rank, i), row, call.TILE_N)
        count += other.full_end - other.full
    return count


@gluon.jit
def _store_tile(call, out, shared, tile, accumulator, total, row_max, GROUP: gl.constexpr):
    """Store a warpgroup's rows of a tile. The store may still be under way afterwards."""
    nothing = total == 0.0
    inverse = gl.convert_layout(1.0 / gl.where(nothing, 1.0, total), gl.SliceLayout(1, score_layout(call.DIM)))
    result = accumulator * gl.expand_dims(inverse, 1)
    if has_room_for_out(call.DIM):
        # the result of the tile before is stored while this one is computed; nobody writes over it before
        tma.store_wait(0)
        tl.debug_barrier()
    stage = shared.out.index(GROUP)
    stage.store(result.to(out.dtype))
    fence_async_shared()
    row = tile.row + GROUP * ROWS
    block = reinterpret(stage, out.dtype, [1, 1, ROWS, call.DIM], out.layout)
    async_store(out, [tile.batch, tile.head, row, 0], block)
    if call.LSE:
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout(call.TILE_N)))
        logarithm = (row_max + gl.log2(gl.where(nothing, 1.0, total))) * 0.6931471805599453
        line = (tile.batch * call.heads + tile.head).to(gl.int64) * call.mask.length
        gl.store(
            call.lse + line + rows, gl.where(nothing, float("-inf"), logarithm), mask=rows < call.mask.length
        )  # fmt: skip


@gluon.jit
def _attend(comm, call, out, shared, first_place, end_of_places, GROUP: gl.constexpr):
    """A warpgroup: rows GROUP*ROWS and on of this CTA's tiles. With room for the queries of two tiles the first scores
    of the next tile are computed while this one ends; they are those of any queries and keys after the last tile."""
    QUERIES: gl.constexpr = query_stages(comm.WORLD_SIZE, call.DIM)
    AHEAD: gl.constexpr = QUERIES > 1
    TILE_N: gl.constexpr = call.TILE_N
    rank = rank_of(comm.context)
    ranks = tl.load(comm.context + SIZE_WORD).to(gl.int32)
    step = first_place * 0  # blocks that were taken so far
    scores = gl.zeros([ROWS, TILE_N], gl.float32, score_layout(TILE_N))
    if AHEAD:
        if first_place < end_of_places:
            scores = _first_scores(comm, call, shared, first_place * 0, step, GROUP)
    for place in range(first_place, end_of_places):
        tile = tile_at(call, place)
        since = trace_time(comm.context)
        rows = tile.row + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout(TILE_N)))
        own = blocks_of(call.mask, rank, rank, tile.row, TILE_N)
        count = _blocks_without_mask(comm, call, rank, tile.row, ranks)
        query = shared.q.data.index((place - first_place) % QUERIES * WARPGROUPS + GROUP)
        if not AHEAD:
            scores = _first_scores(comm, call, shared, place - first_place, step, GROUP)
        attended = _begin_tile(call, scores, Masked(rank, rank, rows, (own.first - 1) * TILE_N))
        step += 1
        for _ in range(count):
            attended = _attend_block(call, shared, query, attended, step, None, MASKED=False)
            step += 1
        for i in range(2 * ranks):
            source = source_at(comm, rank, i // 2)
            blocks = blocks_of(call.mask, rank, source, tile.row, TILE_N)
            begin = gl.where(i % 2 == 0, blocks.first, blocks.full_end)
            for block in range(begin, gl.where(i % 2 == 0, blocks.full, blocks.end)):
                masked = Masked(rank, source, rows, block * TILE_N)
                attended = _attend_block(call, shared, query, attended, step, masked, MASKED=True)
                step += 1
        before = (step - 1) % STAGES
        mbarrier.wait(shared.v.full.index(before), ((step - 1) // STAGES) & 1)
        product = warpgroup_mma(attended.weights, shared.v.data.index(before), attended.accumulator, is_async=True)
        if has_room_for_out(call.DIM):
            mbarrier.arrive(shared.q.empty.index((place - first_place) % QUERIES), count=1)  # the next ones may come
        if AHEAD:
            token = _start_tile(comm, call, shared, place + 1 - first_place, step, GROUP)
        accumulator, _ = warpgroup_mma_wait(AHEAD, deps=[product, attended.weights])
        mbarrier.arrive(shared.v.empty.index(before), count=1)

        total = attended.total
        if comm.WORLD_SIZE > 1:
            # chunks that never came were read all the same: if the group gave up, the tile is not right
            total += gl.where(gave_up(comm.context), float("nan"), 0.0)
        _store_tile(call, out, shared, tile, accumulator, total, attended.row_max, GROUP)
        if AHEAD:
            scores = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(shared.k.empty.index(step % STAGES), count=1)
        if not has_room_for_out(call.DIM):
            tma.store_wait(0)
            mbarrier.arrive(shared.q.empty.index(0), count=1)
        if GROUP == 0:
            trace(comm.context, TILES, TILE, rank, place, since)
        if call.rounds.CREDITS:
            finish_task(comm, call.rounds, tile.round_index, COMPUTE)
        elif not has_room_for_out(call.DIM):
            tl.debug_barrier()  # nobody writes the next tile's result before this one was read
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """(full, empty) for stages that one warp fills and both warpgroups read."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    return full, empty


@gluon.jit
def _run(comm, call, descriptors):
    DTYPE: gl.constexpr = call.q.pointer.dtype.element_ty
    BLOCKS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    QUERIES: gl.constexpr = query_stages(comm.WORLD_SIZE, call.DIM)
    ATTEND: gl.constexpr = ATTEND_REGISTERS if comm.RANKS_PER_NODE > 1 else ATTEND_REGISTERS_ALONE
    COPIES: gl.constexpr = COPY_REGISTERS if comm.RANKS_PER_NODE > 1 else COPY_REGISTERS_ALONE
    cta = gl.program_id(0)
    if comm.WORLD_SIZE > 1:
        if cta == 0:
            announce(comm.context, comm.epoch, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
    if cta < call.SENDERS:
        send(comm, call, cta, call.SENDERS, _copy_rows)

    q = gl.allocate_shared_memory(DTYPE, [QUERIES * WARPGROUPS, ROWS, call.DIM], BLOCKS)
    k = gl.allocate_shared_memory(DTYPE, [STAGES, call.TILE_N, call.DIM], BLOCKS)
    v = gl.allocate_shared_memory(DTYPE, [STAGES, call.TILE_N, call.DIM], BLOCKS)
    out = q
    if has_room_for_out(call.DIM):
        out = gl.allocate_shared_memory(DTYPE, [WARPGROUPS, ROWS, call.DIM], BLOCKS)
    q_full, q_empty = _barriers(QUERIES)
    k_full, k_empty = _barriers(STAGES)
    v_full, v_empty = _barriers(STAGES)
    fence_async_shared()
    shared = Shared(Stages(q, q_full, q_empty), Stages(k, k_full, k_empty), Stages(v, v_full, v_empty), out)
    first = gl.load(call.schedule + cta).to(gl.int32)
    end = gl.load(call.schedule + cta + 1).to(gl.int32)
    gl.warp_specialize(
        [
            (_attend, (comm, call, descriptors.out, shared, first, end, 0)),
            (_attend, (comm, call, descriptors.out, shared, first, end, 1)),
            (load, (comm, call, descriptors, shared, first, end)),
            (_push, (comm, call)),
        ],
        [4, 1, 1],
        [ATTEND, COPIES, COPIES],
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def ring_attention_hopper_kernel(context, ranks, q, k, v, out, slots, call):
    """The whole operator. ranks: `Ranks`, call: `Call`, the others: see `Descriptors`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Descriptors(q, k, v, out, slots),
    )
