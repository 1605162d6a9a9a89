"""The Gluon kernel of ring_attention, for Hopper GPUs: the same roles, rounds and signals, distributed over warps.

Everything between ranks is as in the Triton kernel: what is sent (transfer.py), who waits for whom (protocol.py), the
schedule. Both kernels call the same functions for it, which is possible because these work on scalars. What differs is
who does the work. A CTA has four kinds of warps:

- One warp *loads*: it waits for the chunks that a tile needs, and loads queries, keys and values into shared memory by
  TMA, two blocks ahead (hopper_load.py).
- Two warpgroups *attend*, each with 64 rows of the tile. A warpgroup starts the product that gives the scores of the
  next block before it multiplies the weights and values of this one. So its exponentials overlap with the tensor core
  work of the other warpgroup, and of its own values.
- One warp *pushes* (hopper_push.py): it has the role `intra`, for this CTA's share of the chunks. No CTA is reserved
  for pushing. The warp waits only for peers, never for a warp of its own CTA, and has the whole duration of the launch.

Order of a tile's blocks: the first block of the rank's own keys (there always is one, because every row sees itself),
then all blocks that need no mask, source by source, then those that do. So the long loop has no branch. A branch while
a wgmma is in flight would make the compiler wait for it. The result of a tile is stored from shared memory while the
next tile is computed. (With one rank and 24 blocks per tile, a tile took 2.5 us on top of 1.52 us per block when it
waited for that store and divided each element instead of multiplying by the inverse; estimated from 3072 and 16384
positions.) With one rank, the first scores of the next tile are computed while the result of this one is stored. After
the last tile, the same code multiplies a dummy load, which avoids a branch.

One rank without packed documents or windows (`in_turns`) has a faster form. A tile begins with the *last* block that it
sees: with a causal mask, the only one that needs the mask, because blocks are as large as tiles, so all others are in
the long loop. The warpgroups start their products in turns, so that one computes exponentials while the other
multiplies, and a warpgroup waits for the product with the values only after its exponentials (`_computed`); written
without that, ptxas moves the wait in front of them. Threads add up the weights of their own columns only, until the
tile ends. What the next tile is, a warpgroup reads one tile ahead. With several ranks this form has not been verified
on a GPU, so it is not used; the code for several ranks does not depend on it. (docs/experiments.md has the figures.)

Synchronization within a CTA is by mbarriers: `full` when TMA has written a stage, `empty` when both warpgroups have
read it; likewise for the queries. Turns are named barriers, one per warpgroup, at which both arrive; Triton uses those
with the lowest numbers. Towards other CTAs and ranks: the loading warp acquires what has arrived, then fences, because
TMA reads through another proxy than the acquire. Each warpgroup reports that its half of a tile is done
(`finish_task`), so a round has two tasks per tile. Its reads are over by then: it has waited for the `full` barriers of
all blocks.

CTAs that send to other nodes do so with the four warps of the first warpgroup, before the CTA splits into roles.

Rejected alternatives. CTAs that are reserved for pushing and join the compute afterwards: the schedule must know when
that is. It assumed 33 GB/s per pushing CTA, but the times with 4 ranks (zigzag: 82 ms for 67 ms of compute) suggest 18
to 22 GB/s (estimated), because such a CTA waited for each block before it stored it. In the end, all other CTAs waited
for the tiles of these. Loading the keys of a block before the values of the previous one, because the stage of the keys
becomes free earlier: 158.0 ms instead of 158.8 without a mask at 1200 MHz, but 83.4 instead of 81.8 for zigzag. A grid
sync without a limit: 83.2 ms instead of 81.6 for zigzag.

Not supported: units in several parts (state in `partial`), fp32, tensors that TMA cannot read. Such calls run the
Triton kernel (kernel.py). Ranks may run different kernels, because everything that other ranks see is the same.
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

from mkernel.lang.context import SIZE_WORD, Comm, current_epoch, rank_of
from mkernel.lang.entries import announce
from mkernel.lang.gluon_compat import async_store, reinterpret
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import finish, gave_up
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.attention.call import Descriptors, tile_at, tile_of
from mkernel.ops.attention.hopper_load import (
    ROWS,
    STAGES,
    WARPGROUPS,
    Shared,
    Stages,
    blocks_of,
    first_block,
    in_turns,
    load,
    query_stages,
)
from mkernel.ops.attention.hopper_push import copy_rows, push
from mkernel.ops.attention.mask import keys_below, rows_of, seen_by
from mkernel.ops.attention.protocol import finish_task, source_at
from mkernel.ops.attention.transfer import send

# Registers per thread: of the second warpgroup, and of the warps that load and push. The first warpgroup gets the rest,
# which is as many as the second. 216 are enough for the loops without a mask; a rank without peers has more.
ATTEND_REGISTERS = gl.constexpr(216)
COPY_REGISTERS = gl.constexpr(72)
ATTEND_REGISTERS_ALONE = gl.constexpr(232)
COPY_REGISTERS_ALONE = gl.constexpr(40)
TURNS = gl.constexpr(14)  # the first of the named barriers, one per warpgroup, that say whose turn it is


class Attended(NamedTuple):
    """The state of a warpgroup's rows of a tile: the online softmax so far, and the weights of the latest block, whose
    product with the values comes next."""

    weights: Any
    accumulator: Any
    total: Any  # of each row; with `in_turns`, the four parts of it that four threads have added up
    row_max: Any


class Masked(NamedTuple):
    """A block of the source's keys, starting at `key`, that not all of this rank's `rows` see."""

    rank: Any
    source: Any
    rows: Any
    key: Any


@gluon.constexpr_function
def has_room_for_out(dim):
    """Whether shared memory has room for the result in addition to the queries."""
    return dim <= 128


@gluon.constexpr_function
def score_layout(tile_n):
    """The register layout of a warpgroup's scores, or of another product with tile_n columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tile_n, 16])


@gluon.jit
def _online_softmax_step(scores, total, row_max, scale, DIM: gl.constexpr, DTYPE: gl.constexpr, MASKED: gl.constexpr):
    """Like softmax.online_softmax_step, but returns the weights as an operand of the product with the values. total:
    None before the first block if it is to be added up in parts (`_part_sums`)."""
    value: gl.constexpr = score_layout(DIM)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    pivot = new_max
    if MASKED:
        pivot = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale - gl.expand_dims(pivot, 1))
    alpha = gl.exp2(row_max - pivot)
    if total is None:
        total = _part_sums(weights)
    elif len(total.shape) == 2:
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))
        total = total * gl.expand_dims(factor, 1) + _part_sums(weights)
    else:
        total = total * alpha + gl.sum(weights, 1)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=value, k_width=2)
    return gl.convert_layout(weights.to(DTYPE), operand), total, new_max, alpha


@gluon.jit
def _part_sums(weights):
    """The four parts of the sum of each row that four threads have. They are added together when the tile ends."""
    parts = gl.reshape(weights, [weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def _mask_scores(mask, scores, masked, TILE_N: gl.constexpr):
    """The scores of a block of keys, set to -inf where a row does not see the key."""
    starts, ends = seen_by(mask, masked.rank, gl.minimum(masked.rows, rows_of(mask) - 1))
    index = gl.expand_dims(masked.key + gl.arange(0, TILE_N, gl.SliceLayout(0, score_layout(TILE_N))), 0)
    upper = keys_below(mask, ends, masked.source)
    if in_turns(mask.WORLD_SIZE, mask.PACKED, TILE_N):
        scores = _where_below(scores, index, gl.expand_dims(upper, 1))
    else:
        scores = gl.where(index < gl.expand_dims(upper, 1), scores, float("-inf"))
    if mask.PACKED:
        lower = keys_below(mask, starts, masked.source)
        scores = gl.where(index >= gl.expand_dims(lower, 1), scores, float("-inf"))
    return scores


@gluon.jit
def _where_below(scores, index, bound):
    """gl.where(index < bound, scores, -inf), but each comparison just before its selection. With all comparisons first,
    the compiler packs their results, 64 per thread, into registers, and unpacks them one by one."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }", "=r,r,r,r",
        [scores, index, bound], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _start_scores(query, stages, step, TILE_N: gl.constexpr):
    """Start the product of the queries and block `step` of the keys."""
    zeros = gl.zeros([ROWS, TILE_N], gl.float32, score_layout(TILE_N))
    mbarrier.wait(stages.full.index(step % STAGES), (step // STAGES) & 1)
    key = stages.data.index(step % STAGES).permute((1, 0))
    return warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_tile(comm, call, shared, number, step, GROUP: gl.constexpr):
    """Start the product of the queries of this CTA's tile `number` and their first block of keys."""
    stage = number % query_stages(comm.WORLD_SIZE, call.DIM)
    phase = (number // query_stages(comm.WORLD_SIZE, call.DIM)) & 1
    mbarrier.wait(shared.q.full.index(stage), phase)
    return _start_scores(shared.q.data.index(stage * WARPGROUPS + GROUP), shared.k, step, call.TILE_N)


@gluon.jit
def _first_scores(comm, call, shared, number, step, GROUP: gl.constexpr):
    """Compute the scores of a tile's first block."""
    token = _start_tile(comm, call, shared, number, step, GROUP)
    scores = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(shared.k.empty.index(step % STAGES), count=1)
    return scores


@gluon.jit
def _begin_tile(call, scores, masked):
    """`Attended` after the scores of a tile's first block; no values are accumulated yet."""
    scores = _mask_scores(call.mask, scores, masked, call.TILE_N)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout(call.TILE_N)))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, score_layout(call.TILE_N)))
    weights, total, row_max, _ = _online_softmax_step(
        scores, total, row_max, call.scale, call.DIM, call.q.pointer.dtype.element_ty, MASKED=True
    )  # fmt: skip
    accumulator = gl.zeros([ROWS, call.DIM], gl.float32, score_layout(call.DIM))
    return Attended(weights, accumulator, total, row_max)


@gluon.jit
def _begin_tile_in_turns(call, scores, masked):
    """Like `_begin_tile`, if the kernel runs `in_turns`: masks only where needed, and adds up the weights in parts."""
    if call.mask.CAUSAL:
        scores = _mask_scores(call.mask, scores, masked, call.TILE_N)
    elif masked.key + call.TILE_N > call.mask.length:
        scores = _mask_scores(call.mask, scores, masked, call.TILE_N)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout(call.TILE_N)))
    weights, total, row_max, _ = _online_softmax_step(
        scores, None, row_max, call.scale, call.DIM, call.q.pointer.dtype.element_ty, MASKED=True
    )  # fmt: skip
    accumulator = gl.zeros([ROWS, call.DIM], gl.float32, score_layout(call.DIM))
    return Attended(weights, accumulator, total, row_max)


@gluon.constexpr_function
def _turn_code(what, barrier):
    return f"bar.{what} {barrier}, 256; mov.b32 $0, $1;"


@gluon.jit
def _wait_turn(step, GROUP: gl.constexpr):
    """Wait until it is this warpgroup's turn to start products. Returns `step`."""
    code: gl.constexpr = _turn_code("sync", TURNS + GROUP)
    return gl.inline_asm_elementwise(code, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(step, GROUP: gl.constexpr):
    """Let the other warpgroup than GROUP start its products. Returns `step`."""
    code: gl.constexpr = _turn_code("arrive", TURNS + WARPGROUPS - 1 - GROUP)
    return gl.inline_asm_elementwise(code, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _computed(total):
    """`total`, computed before the wait that follows. The assembler would move the wait, but not over an instruction
    that it does not know to be harmless: here one that is never executed, because sums of weights are not negative."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.geu.f32 p, $1, 0f00000000; @!p pmevent 0; mov.b32 $0, $1; }", "=r,r", [total],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _attend_block_in_turn(call, shared, query, attended, step, GROUP: gl.constexpr):
    """Like `_attend_block` for a block without a mask, but starts both products only in this warpgroup's turn, and
    waits for the second one only after the exponentials."""
    before = (step - 1) % STAGES
    step = _wait_turn(step, GROUP)
    token = _start_scores(query, shared.k, step, call.TILE_N)
    mbarrier.wait(shared.v.full.index(before), ((step - 1) // STAGES) & 1)
    product = warpgroup_mma(attended.weights, shared.v.data.index(before), attended.accumulator, is_async=True)
    step = _pass_turn(step, GROUP)
    scores = warpgroup_mma_wait(1, deps=[token])
    mbarrier.arrive(shared.k.empty.index(step % STAGES), count=1)
    weights, total, row_max, alpha = _online_softmax_step(
        scores, attended.total, attended.row_max, call.scale, call.DIM, call.q.pointer.dtype.element_ty, MASKED=False
    )  # fmt: skip
    total = _computed(total)
    accumulator, _ = warpgroup_mma_wait(0, deps=[product, attended.weights])
    mbarrier.arrive(shared.v.empty.index(before), count=1)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, score_layout(call.DIM)))
    return Attended(weights, accumulator * gl.expand_dims(alpha, 1), total, row_max)


@gluon.jit
def _attend_blocks_in_turns(call, shared, query, attended, step, count, GROUP: gl.constexpr):
    """Attend to `count` blocks. Returns (`Attended`, the next step)."""
    for _ in range(count):
        attended = _attend_block_in_turn(call, shared, query, attended, step, GROUP)
        step += 1
    return attended, step


@gluon.jit
def _attend_block(call, shared, query, attended, step, masked, MASKED: gl.constexpr):
    """Attend to block `step`: compute its scores while the values of the previous block are multiplied."""
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
    """The number of key blocks, of all ranks, that every row of a tile sees."""
    own = blocks_of(call.mask, rank, rank, row, call.TILE_N)
    count = own.full_end - own.full
    for i in range(1, ranks):
        other = blocks_of(call.mask, rank, source_at(comm, rank, i), row, call.TILE_N)
        count += other.full_end - other.full
    return count


@gluon.jit
def _store_tile(call, out, shared, tile, accumulator, total, row_max, GROUP: gl.constexpr):
    """Start to store a warpgroup's rows of a tile. The store may still be in flight on return."""
    nothing = total == 0.0
    inverse = gl.convert_layout(1.0 / gl.where(nothing, 1.0, total), gl.SliceLayout(1, score_layout(call.DIM)))
    result = accumulator * gl.expand_dims(inverse, 1)
    if has_room_for_out(call.DIM):
        # the store of the previous tile overlapped with this one; it must have read its stage before that is rewritten
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
        line = (tile.batch * call.heads + tile.head).to(gl.int64) * rows_of(call.mask)
        gl.store(
            call.lse + line + rows, gl.where(nothing, float("-inf"), logarithm), mask=rows < rows_of(call.mask)
        )  # fmt: skip


@gluon.jit
def _attend(comm, call, out, shared, first_entry, end_entry, GROUP: gl.constexpr):
    """A warpgroup: computes rows GROUP*ROWS to (GROUP+1)*ROWS-1 of this CTA's tiles. If there is room for the queries
    of two tiles, it computes the first scores of the next tile while this one ends; after the last tile, those of a
    dummy load."""
    QUERIES: gl.constexpr = query_stages(comm.WORLD_SIZE, call.DIM)
    AHEAD: gl.constexpr = QUERIES > 1
    IN_TURNS: gl.constexpr = in_turns(comm.WORLD_SIZE, call.mask.PACKED, call.TILE_N)
    TILE_N: gl.constexpr = call.TILE_N
    rank = rank_of(comm.context)
    ranks = tl.load(comm.context + SIZE_WORD).to(gl.int32)
    step = first_entry * 0  # blocks processed so far
    scores = gl.zeros([ROWS, TILE_N], gl.float32, score_layout(TILE_N))
    if IN_TURNS and GROUP == 1:
        step = _pass_turn(step, GROUP)  # the first turn is that of the first warpgroup
    if AHEAD:
        if first_entry < end_entry:
            scores = _first_scores(comm, call, shared, first_entry * 0, step, GROUP)
    if IN_TURNS:
        tile = tile_of(call, tl.load(call.schedule + first_entry, mask=first_entry < end_entry, other=0))
    for entry in range(first_entry, end_entry):
        if IN_TURNS:
            following = tl.load(call.schedule + entry + 1, mask=entry + 1 < end_entry, other=0)
        else:
            tile = tile_at(call, entry)
        since = trace_time(comm.context)
        rows = tile.row + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout(TILE_N)))
        own = blocks_of(call.mask, rank, rank, tile.row, TILE_N)
        count = _blocks_without_mask(comm, call, rank, tile.row, ranks)
        query = shared.q.data.index((entry - first_entry) % QUERIES * WARPGROUPS + GROUP)
        if not AHEAD:
            scores = _first_scores(comm, call, shared, entry - first_entry, step, GROUP)
        initial = Masked(rank, rank, rows, first_block(call.mask, own, TILE_N) * TILE_N)
        if IN_TURNS:
            attended = _begin_tile_in_turns(call, scores, initial)
            attended, step = _attend_blocks_in_turns(call, shared, query, attended, step + 1, count, GROUP)
        else:
            attended = _begin_tile(call, scores, initial)
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
            mbarrier.arrive(shared.q.empty.index((entry - first_entry) % QUERIES), count=1)  # the next may be loaded
        if AHEAD:
            token = _start_tile(comm, call, shared, entry + 1 - first_entry, step, GROUP)
        if IN_TURNS:
            next_tile = tile_of(call, following)  # while the products are computed
        accumulator, _ = warpgroup_mma_wait(AHEAD, deps=[product, attended.weights])
        mbarrier.arrive(shared.v.empty.index(before), count=1)

        total = attended.total
        if IN_TURNS:
            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, score_layout(TILE_N)))
        if comm.WORLD_SIZE > 1:
            # if the group gave up, the tile may have read chunks that never arrived: mark it with NaN
            total += gl.where(gave_up(comm.context), float("nan"), 0.0)
        _store_tile(call, out, shared, tile, accumulator, total, attended.row_max, GROUP)
        if AHEAD:
            scores = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(shared.k.empty.index(step % STAGES), count=1)
        if not has_room_for_out(call.DIM):
            tma.store_wait(0)
            mbarrier.arrive(shared.q.empty.index(0), count=1)
        if GROUP == 0:
            trace(comm.context, TILES, TILE, rank, entry, since)
        if call.rounds.CREDITS:
            finish_task(comm, call.rounds, tile.round_index, COMPUTE)
        elif not has_room_for_out(call.DIM):
            tl.debug_barrier()  # no thread writes the next tile's result before this one has been read
        if IN_TURNS:
            tile = next_tile
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """(full, empty): the barriers of stages that one warp fills and both warpgroups read."""
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
        send(comm, call, cta, call.SENDERS, copy_rows)

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
            (push, (comm, call)),
        ],
        [4, 1, 1],
        [ATTEND, COPIES, COPIES],
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def ring_attention_hopper_kernel(context, ranks, q, k, v, out, slots, call):
    """The whole operator. ranks: `Ranks`; call: `Call`; q, k, v, out, slots: see `Descriptors`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Descriptors(q, k, v, out, slots),
    )
