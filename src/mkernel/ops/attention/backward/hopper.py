"""The Gluon kernel of ring_attention_backward, for Hopper GPUs.

Tasks, schedule, rounds, partials and signals are those of the Triton kernel (kernel.py), and both kernels call the same
functions for what is between ranks. What differs is who does the work. A CTA has four kinds of warps:

- One warp *loads* by TMA: the rows of the next task, and up to STAGES steps ahead (hopper_load.py).
- Two warpgroups *multiply*, each with 64 of the 128 rows of a task: of a tile of dq, or of a block of keys. They also
  add up partials, each those of its own 64 keys (hopper_sums.py).
- One warp *pushes* keys and values to the node, so no CTA is reserved for it (ops/attention/hopper_push.py).

A tile of the protocol has 64 keys: what a warpgroup has of a block of keys. So both warpgroups push, signal and reduce
independently. Slots have the same layout as in the Triton kernel with tiles of 64 keys, which is its default for as
many columns, and ranks may run different kernels.

A step multiplies the 64 held rows of a warpgroup with 64 rows of a stage. In a block of keys, scores are transposed:
weights and gradients of scores are then where the tensor cores want the left operand of the products that make dv and
dk, in registers. In a tile of dq the same is true of the gradients of scores. So shared memory has nothing but inputs.
Products of a step overlap with its exponentials, and those of one warpgroup with the exponentials of the other. Between
two steps no product is in flight, so there may be branches.

The log-sum-exp, in units of log2, and delta of 64 queries are next to each other in memory (`_prepare`), and travel
with the queries. All CTAs but those that send compute them. The loading warps and the warpgroups wait until all have;
the pushing warps do not.

Synchronization within a CTA is by mbarriers: `full` when TMA has written rows, `empty` when both warpgroups have read
them. dq, and with one rank dk and dv, are stored by TMA from the place of the held rows, because there is no room left:
with 128 columns, two tasks and three steps take 225 KiB.

Rejected alternatives. One pass with five products, and dq added in memory in turns (docs/experiments.md): adding is
limited by the bytes that it moves, and several ranks need turns over all of their keys. 128 keys at a time for dq would
read less shared memory, but two sums of scores of 64 x 128 leave no registers. Tiles of 128 queries with 64 columns:
the same, and the loop spills nothing as it is.

Not supported: units in several parts, fp32, softcap, more than 128 columns, values with another number of columns than
keys, tensors that TMA cannot read, a single key on each of several ranks. Such calls run the Triton kernel.
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
from mkernel.lang.trace import REDUCE, TILE, TILES, trace, trace_time
from mkernel.ops.attention.backward.call import task_at
from mkernel.ops.attention.backward.hopper_load import (
    ROWS,
    STAGES,
    STATS,
    TILE_M,
    WARPGROUPS,
    Descriptors,
    Held,
    Ring,
    Shared,
    block_layout,
    has_partial,
    held_at,
    keys_of_tile,
    load,
    rows_of_block,
    segment,
)
from mkernel.ops.attention.backward.hopper_sums import product_layout, push_partial, reduce
from mkernel.ops.attention.backward.protocol import notify_prepared, wait_posted, wait_prepared
from mkernel.ops.attention.call import head_of
from mkernel.ops.attention.hopper_push import copy_rows, push
from mkernel.ops.attention.mask import keys_below, rows_of, seen_by
from mkernel.ops.attention.protocol import finish_task, source_at
from mkernel.ops.attention.transfer import send

LOG2_E = gl.constexpr(1.4426950408889634)
# Registers per thread: of the second warpgroup, and of the warps that load and push. The first warpgroup gets the rest,
# which is as many as the second. With 216 for the warpgroups, as in the forward kernel, the assembler serialises the
# products of 128 columns with several ranks; the loops that copy fit into 40.
REGISTERS = gl.constexpr(232)
COPY_REGISTERS = gl.constexpr(40)


class Place(NamedTuple):
    """Where the keys and the queries of a step begin."""

    rank: Any
    source: Any
    key: Any
    row: Any


# -- delta


@gluon.jit
def _rows_at(call, tile, LAYOUT: gl.constexpr):
    """(result, its gradient) of a tile of ROWS queries; zeros outside the tensors."""
    head = tile // (WARPGROUPS * call.blocks)
    row = tile % (WARPGROUPS * call.blocks) * ROWS
    i = row + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    j = gl.expand_dims(gl.arange(0, call.DIM, gl.SliceLayout(0, LAYOUT)), 0)
    inside = (i < rows_of(call.mask)) & (j < call.dim) & (head < call.batch * call.heads)
    out = head_of(call.out, head // call.heads, head % call.heads) + (i.to(gl.int64) * call.out.row_stride + j)
    dout = head_of(call.dout, head // call.heads, head % call.heads) + (i.to(gl.int64) * call.dout.row_stride + j)
    return gl.load(out, mask=inside, other=0.0), gl.load(dout, mask=inside, other=0.0)


@gluon.jit
def _prepare(comm, call, first, step):
    """Compute `stats` of tiles first, first + step, and so on, of all heads. Rows beyond the last one have weights of
    zero: their log-sum-exp is infinite. So does a row that saw no key; its log-sum-exp is -inf."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // call.DIM, call.DIM // 8], [4, 1], [1, 0])
    tiles = WARPGROUPS * call.blocks
    place = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    out, dout = _rows_at(call, first, LAYOUT)
    for tile in range(first, call.batch * call.heads * tiles, step):
        later = _rows_at(call, tile + step, LAYOUT)  # the next rows are on their way while these are summed
        delta = gl.sum(dout.to(gl.float32) * out.to(gl.float32), 1)
        i = tile % tiles * ROWS + place
        inside = i < rows_of(call.mask)
        line = tl.cast(tile // tiles, tl.int64) * rows_of(call.mask)
        if call.DLSE:
            delta -= gl.load(call.dlse + line + i, mask=inside, other=0.0)
        lse = gl.load(call.lse + line + i, mask=inside, other=float("inf"))
        lse = gl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        stats = call.delta + tl.cast(tile, tl.int64) * STATS
        gl.store(stats + place, lse)
        gl.store(stats + ROWS + place, delta)
        out, dout = later


# -- a step


@gluon.jit
def _where_seen(mask, weights, place, TRANSPOSED: gl.constexpr):
    """Weights, zero where a query does not see a key. TRANSPOSED: the rows of the matrix are keys."""
    LAYOUT: gl.constexpr = weights.type.layout
    QUERIES: gl.constexpr = 0 if TRANSPOSED else 1
    rows = gl.minimum(place.row + gl.arange(0, ROWS, gl.SliceLayout(QUERIES, LAYOUT)), rows_of(mask) - 1)
    starts, ends = seen_by(mask, place.rank, rows)
    key = gl.expand_dims(place.key + gl.arange(0, ROWS, gl.SliceLayout(1 - QUERIES, LAYOUT)), 1 - QUERIES)
    seen = key < gl.expand_dims(keys_below(mask, ends, place.source), QUERIES)
    if mask.PACKED:
        seen &= key >= gl.expand_dims(keys_below(mask, starts, place.source), QUERIES)
    return gl.where(seen, weights, 0.0)


@gluon.jit
def _start_products(shared, number, step, GROUP: gl.constexpr):
    """Start both products of a step with the held rows. Returns (scores, the other product, which is in flight)."""
    ring = shared.ring
    stage = step % STAGES
    phase = (step // STAGES) & 1
    zeros = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    mbarrier.wait(ring.first_full.index(stage), phase)
    left = held_at(shared.held, number, 0, GROUP)
    scores = warpgroup_mma(left, ring.first.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(ring.second_full.index(stage), phase)
    left = held_at(shared.held, number, 1, GROUP)
    dp = warpgroup_mma(left, ring.second.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(1, deps=[scores]), dp


@gluon.jit
def _operand(values, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """Values of a step, rounded, as the left operand of a product with DIM columns. This moves nothing."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(DIM), k_width=2)
    return gl.convert_layout(values.to(DTYPE), layout)


@gluon.jit
def _stats_of(ring, stage, WHICH: gl.constexpr):
    """The log-sum-exp (WHICH=0) or delta of the queries of a step, one per column."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stats = reinterpret(ring.stats.index(stage), gl.float32, [2, ROWS], layout)
    return gl.expand_dims(stats.index(WHICH).load(gl.SliceLayout(0, product_layout(ROWS))), 0)


@gluon.jit
def _add_queries(call, shared, number, step, dk, dv, place, GROUP: gl.constexpr, MASKED: gl.constexpr):
    """(dk, dv) of a warpgroup's keys, plus what the queries of a step contribute."""
    ring = shared.ring
    stage = step % STAGES
    DTYPE: gl.constexpr = ring.first.dtype
    scores, dp = _start_products(shared, number, step, GROUP)
    weights = gl.exp2(scores * call.scale - _stats_of(ring, stage, 0))
    if MASKED:
        weights = _where_seen(call.mask, weights, place, True)
    if call.DIM <= 64:
        left = _operand(weights, DTYPE, call.DIM)
        dv = warpgroup_mma(left, ring.second.index(stage), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = _operand(weights * (dp - _stats_of(ring, stage, 1)), DTYPE, call.DIM)
    else:  # there are no registers for `left` while gradients of scores are computed
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = _operand(weights * (dp - _stats_of(ring, stage, 1)), DTYPE, call.DIM)
        left = _operand(weights, DTYPE, call.DIM)
        dv = warpgroup_mma(left, ring.second.index(stage), dv, is_async=True)
    dk = warpgroup_mma(ds, ring.first.index(stage), dk, is_async=True)
    dv, dk, left, ds = warpgroup_mma_wait(0, deps=[dv, dk, left, ds])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _add_keys(call, shared, number, step, dq, stats, place, GROUP: gl.constexpr, MASKED: gl.constexpr):
    """dq of a warpgroup's queries, plus what the keys of a step contribute. stats: the log-sum-exp and delta of its
    queries."""
    ring = shared.ring
    stage = step % STAGES
    scores, dp = _start_products(shared, number, step, GROUP)
    weights = gl.exp2(scores * call.scale - gl.expand_dims(stats[0], 1))
    if MASKED:
        weights = _where_seen(call.mask, weights, place, False)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = _operand(weights * (dp - gl.expand_dims(stats[1], 1)), ring.first.dtype, call.DIM)
    dq = warpgroup_mma(ds, ring.first.index(stage), dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return dq


# -- tasks


@gluon.jit
def _begin(comm, shared, number):
    """Wait for the held rows of task `number`."""
    mbarrier.wait(shared.held.full.index(number % 2), (number // 2) & 1)


@gluon.jit
def _missing(comm):
    """NaN if the group gave up, since a task may then have read chunks that never arrived; else 0."""
    return gl.where(gave_up(comm.context), float("nan"), 0.0)


@gluon.jit
def _store_rows(out, stage, batch, head, row, rows):
    """Start to store a warpgroup's rows of a result, through shared memory."""
    stage.store(rows.to(out.dtype))
    fence_async_shared()
    async_store(out, [batch, head, row, 0], reinterpret(stage, out.dtype, out.block_type.shape, out.layout))


@gluon.jit
def _release(shared, number):
    """Let the held rows of task `number` be overwritten, once what took their place is stored."""
    tma.store_wait(0)
    tl.debug_barrier()
    mbarrier.arrive(shared.held.empty.index(number % 2), count=1)


@gluon.jit
def _query_gradient(comm, call, descriptors, shared, task, number, step, GROUP: gl.constexpr):
    """Compute a warpgroup's rows of a tile of dq: over the keys of all ranks, the rank's own first. Returns the next
    step."""
    rank = rank_of(comm.context)
    head = task.kv_head * (call.heads // call.kv_heads) + task.within // call.blocks
    row = task.within % call.blocks * TILE_M
    mine = row + GROUP * ROWS
    line = (task.batch * call.heads + head) * (WARPGROUPS * call.blocks) + mine // ROWS
    numbers = call.delta + line.to(gl.int64) * STATS + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(ROWS)))
    stats = (gl.load(numbers), gl.load(numbers + ROWS))
    dq = gl.zeros([ROWS, call.DIM], gl.float32, product_layout(call.DIM))
    _begin(comm, shared, number)
    parts = 3
    if comm.WORLD_SIZE > 1:
        parts = 3 * tl.load(comm.context + SIZE_WORD).to(gl.int32)  # not unrolled: see ops/attention/hopper_load.py
    for part in range(parts):
        source = source_at(comm, rank, part // 3)
        begin, end = segment(keys_of_tile(call, rank, source, row), part % 3)
        for block in range(begin, gl.where(part % 3 == 1, begin, end)):
            place = Place(rank, source, block * ROWS, mine)
            dq = _add_keys(call, shared, number, step, dq, stats, place, GROUP=GROUP, MASKED=True)
            step += 1
        for _ in range(gl.where(part % 3 == 1, end - begin, 0)):
            dq = _add_keys(call, shared, number, step, dq, stats, None, GROUP=GROUP, MASKED=False)
            step += 1
    dq *= call.factor
    if comm.WORLD_SIZE > 1:
        dq += _missing(comm)
    _store_rows(descriptors.dq, held_at(shared.held, number, 0, GROUP), task.batch, head, mine, dq)
    _release(shared, number)
    return step


@gluon.jit
def _key_gradients(comm, call, descriptors, shared, task, number, step, which, GROUP: gl.constexpr):
    """Compute this rank's partial of dk and dv of a warpgroup's rows of a block of keys of any rank, and push it.
    Returns the next step."""
    rank = rank_of(comm.context)
    source = which // call.tiles
    key = which % call.tiles * TILE_M + GROUP * ROWS
    dk = gl.zeros([ROWS, call.DIM], gl.float32, product_layout(call.DIM))
    dv = gl.zeros([ROWS, call.DIM], gl.float32, product_layout(call.DIM))
    _begin(comm, shared, number)
    blocks = rows_of_block(call, rank, which)
    for part in range(3 * (call.heads // call.kv_heads)):
        begin, end = segment(blocks, part % 3)
        for tile in range(begin, gl.where(part % 3 == 1, begin, end)):
            place = Place(rank, source, key, tile * ROWS)
            dk, dv = _add_queries(call, shared, number, step, dk, dv, place, GROUP=GROUP, MASKED=True)
            step += 1
        for _ in range(gl.where(part % 3 == 1, end - begin, 0)):
            dk, dv = _add_queries(call, shared, number, step, dk, dv, None, GROUP=GROUP, MASKED=False)
            step += 1
    dk *= call.factor
    if comm.WORLD_SIZE > 1:
        _release(shared, number)
        if has_partial(call, rank, source, key):
            missing = _missing(comm)
            tile = which % call.tiles * WARPGROUPS + GROUP
            push_partial(comm, call, task.round_index, source, tile, dk + missing, dv + missing)
    else:
        _store_rows(descriptors.dk, held_at(shared.held, number, 0, GROUP), task.batch, task.kv_head, key, dk)
        _store_rows(descriptors.dv, held_at(shared.held, number, 1, GROUP), task.batch, task.kv_head, key, dv)
        _release(shared, number)
    return step


@gluon.jit
def _do_tasks(comm, context, call, descriptors, shared, first_entry, end_entry, GROUP: gl.constexpr):
    """A warpgroup's rows of the tasks in entries first_entry..end_entry-1 of the schedule. context: of `comm`, but
    traced if the launch is."""
    rank = rank_of(context)
    wait_prepared(comm, call)
    tiles_of_dq = call.heads // call.kv_heads * call.blocks
    posted = tl.cast(-1, tl.int64)
    step = first_entry * 0
    number = first_entry * 0  # of tasks with loads
    for entry in range(first_entry, end_entry):
        task = task_at(comm, call, entry)
        since = trace_time(context)
        if task.within < tiles_of_dq + comm.WORLD_SIZE * call.tiles:
            if task.within < tiles_of_dq:
                step = _query_gradient(comm, call, descriptors, shared, task, number, step=step, GROUP=GROUP)
            else:
                step = _key_gradients(
                    comm, call, descriptors, shared, task, number, step=step, which=task.within - tiles_of_dq,
                    GROUP=GROUP,
                )  # fmt: skip
            number += 1
            if GROUP == 0:
                trace(context, TILES, TILE, rank, entry, since)
            if call.rounds.CREDITS:
                finish_task(comm, call.rounds, task.round_index, COMPUTE)
        else:
            if comm.WORLD_SIZE > 1:
                which = task.within - tiles_of_dq - comm.WORLD_SIZE * call.tiles
                posted = tl.maximum(posted, reduce(comm, call, task, which, GROUP))
                if GROUP == 0:
                    trace(context, TILES, REDUCE, rank, entry, since)
                if call.rounds.CREDITS:
                    finish_task(comm, call.reductions, task.round_index, COMPUTE)
    if comm.WORLD_SIZE > comm.RANKS_PER_NODE:
        wait_posted(comm, posted)


@gluon.jit
def _multiply(comm, call, descriptors, shared, first_entry, end_entry, GROUP: gl.constexpr):
    """A warpgroup. Its waits are not traced: the lane of their role is the loading warp's (lang/trace.py)."""
    untraced = comm.context.to(tl.pointer_type(tl.int64), bitcast=True)
    _do_tasks(
        Comm(untraced, comm.epoch, comm.WORLD_SIZE, comm.RANKS_PER_NODE), comm.context, call, descriptors, shared,
        first_entry, end_entry=end_entry, GROUP=GROUP,
    )  # fmt: skip


# -- the whole


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT new mbarriers that complete a phase after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def _allocate(call, stats, DTYPE: gl.constexpr):
    """The shared memory of a CTA. A fence must follow before it is used."""
    held = Held(
        gl.allocate_shared_memory(DTYPE, [4 * WARPGROUPS, ROWS, call.DIM], block_layout()),
        _barriers(2, 1),
        _barriers(2, WARPGROUPS),
    )
    ring = Ring(
        gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, call.DIM], block_layout()),
        gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, call.DIM], block_layout()),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, STATS], stats.layout),
        _barriers(STAGES, 1),
        _barriers(STAGES, 1),
        _barriers(STAGES, WARPGROUPS),
    )
    return Shared(held, ring)


@gluon.jit
def _run(comm, call, descriptors):
    cta = gl.program_id(0)
    if comm.WORLD_SIZE > 1:
        if cta == 0:
            announce(comm.context, comm.epoch, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
    if cta < call.SENDERS:
        send(comm, call, cta, call.SENDERS, copy_rows)
    else:
        compute = gl.num_programs(0) - call.SENDERS
        _prepare(comm, call, cta - call.SENDERS, compute)
        notify_prepared(comm, call, compute)

    shared = _allocate(call, descriptors.stats, call.q.pointer.dtype.element_ty)
    fence_async_shared()
    first = gl.load(call.schedule + cta).to(gl.int32)
    end = gl.load(call.schedule + cta + 1).to(gl.int32)
    gl.warp_specialize(
        [
            (_multiply, (comm, call, descriptors, shared, first, end, 0)),
            (_multiply, (comm, call, descriptors, shared, first, end, 1)),
            (load, (comm, call, descriptors, shared, first, end)),
            (push, (comm, call)),
        ],
        [4, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@gluon.jit
def ring_attention_backward_hopper_kernel(context, ranks, q, k, v, dout, dq, dk, dv, slots, stats, call):
    """The whole operator. ranks: `Ranks`; call: `Call`; the others: see `Descriptors`."""
    _run(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        call,
        Descriptors(q, k, v, dout, dq, dk, dv, slots, stats),
    )
