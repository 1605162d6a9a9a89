"""Attention backward for Hopper in one pass (5 products), one rank, dq added in turns. See README.md."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mkernel.lang.device import acquire_for_descriptors, complete_descriptor_stores
from mkernel.lang.gluon_compat import async_load, async_store, reinterpret

KEYS = gl.constexpr(128)  # of a block
ROWS = gl.constexpr(64)  # keys per warpgroup
STAGES = gl.constexpr(2)
MAX_SPINS = gl.constexpr(400_000)
FIELDS = gl.constexpr(8)


@builtin
def async_add(tensor_desc, coord, src, _semantic=None):
    """Start to add a tile of shared memory to global memory, by TMA. Triton 3.9 has it as tma.async_atomic_add."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


class Args(NamedTuple):
    records: Any  # FIELDS words per task
    starts: Any  # first task of each CTA
    accumulated: Any  # fp32 sums of dq, in the order of the accumulator's registers
    turns: Any  # adds so far to each tile of dq
    stats: Any  # [head, tile, 2, M]: log-sum-exp in units of log2, delta
    out: Any
    dout: Any
    lse: Any
    dq: Any
    sync: Any  # words: [0] grid sync counter, [1] failures
    numbers: Any  # heads, kv_heads, batch, length, tiles, blocks
    scale: Any  # times log2(e)
    factor: Any
    heads: Any
    kv_heads: Any
    batch: Any
    length: Any
    tiles: Any
    blocks: Any
    M: Any
    DIM: Any
    CAUSAL: Any
    DQ: Any  # 0: products without dq; 1: with the product, nothing stored; 2: everything
    ORDERED: Any
    CONVERT: Any


class Products(NamedTuple):
    """What the warpgroups that multiply need."""

    records: Any
    scale: Any
    factor: Any
    group: Any
    kv_heads: Any
    length: Any
    M: Any
    DIM: Any
    CAUSAL: Any
    DQ: Any


class Task(NamedTuple):
    unit: Any
    block: Any
    low: Any
    high: Any
    full: Any
    kind: Any
    first: Any  # rotation kind: first block of the gang
    last: Any  # rotation kind: last block of the gang + 1


class Shared(NamedTuple):
    k: Any
    v: Any
    q: Any
    dout: Any
    stats: Any
    ds: Any
    dq: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    q_full: Any
    dout_full: Any
    empty: Any
    ds_full: Any
    dq_full: Any
    dq_empty: Any


@gluon.constexpr_function
def product_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def dq_layout():
    """Shared memory of half a tile of dq, [64, 64] in fp32: four registers of a thread are 16 bytes, and those of a
    warp are contiguous."""
    return gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]], [], 128
    )


@gluon.constexpr_function
def linear_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.constexpr_function
def vector_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def _task_at(args, entry):
    at = args.records + entry * FIELDS
    return Task(
        gl.load(at),
        gl.load(at + 1),
        gl.load(at + 2),
        gl.load(at + 3),
        gl.load(at + 4),
        gl.load(at + 5),
        gl.load(at + 6),
        gl.load(at + 7),
    )


@gluon.jit
def _tile_at(args, task, i):
    """The tile of queries of step i of a task (within a head)."""
    masked = task.full - task.low
    count = gl.maximum(task.high - task.full, 1)
    start = gl.where(task.kind == 0, task.block * (KEYS // args.M), 0)
    rotated = gl.where(
        i < masked, task.low + (start + i) % gl.maximum(masked, 1), task.full + (start + i - masked) % count
    )
    return gl.where(task.kind == 2, task.high - 1 - i, rotated)


@gluon.jit
def _turn_at(args, task, tile):
    """(how many blocks add to this tile before, how many add in all)"""
    newest = tile * args.M // KEYS
    if args.CAUSAL:
        newest = gl.minimum(newest, args.blocks - 1)
        turn = gl.where(task.kind == 2, task.block, newest - task.block)
        return turn, newest + 1
    else:
        reached = gl.minimum(newest, task.last - 1)
        behind = gl.maximum(reached - task.first + 1, 0) + task.last - 1 - task.block
        turn = task.first + gl.where(task.block <= newest, reached - task.block, behind)
        return turn, args.blocks


@gluon.jit
def _load_rows(source, memory, full, batch, head, row):
    target = reinterpret(memory, source.dtype, source.block_shape, source.layout)
    async_load(source, [batch, head, row, 0], full, target)


@gluon.jit
def _load_keys(source, memory, full, empty, batch, head, row, phase):
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, 2 * source.block_type.nbytes)
    for half in gl.static_range(2):
        _load_rows(source, memory.index(half), full, batch, head, row + half * ROWS)


@gluon.jit
def _load(args, q, k, v, dout, stats, shared, first, end):
    acquire_for_descriptors()
    M: gl.constexpr = args.M
    group = args.heads // args.kv_heads
    step = first * 0
    for entry in range(first, end):
        task = _task_at(args, entry)
        phase = (entry - first) & 1
        batch = task.unit // args.kv_heads
        kv_head = task.unit % args.kv_heads
        count = task.high - task.low
        key = task.block * KEYS
        _load_keys(k, shared.k, shared.k_full.index(0), shared.k_empty.index(0), batch, kv_head, key, phase)
        for i in range(group * count):
            head = kv_head * group + i // count
            tile = _tile_at(args, task, i % count)
            stage = step % STAGES
            full = shared.q_full.index(stage)
            mbarrier.wait(shared.empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, q.block_type.nbytes + stats.block_type.nbytes)
            _load_rows(q, shared.q.index(stage), full, batch, head, tile * M)
            line = (batch * args.heads + head) * args.tiles + tile
            async_load(stats, [line, 0], full, shared.stats.index(stage))
            if i == 0:
                _load_keys(v, shared.v, shared.v_full.index(0), shared.v_empty.index(0), batch, kv_head, key, phase)
            full_dout = shared.dout_full.index(stage)
            mbarrier.expect(full_dout, dout.block_type.nbytes)
            _load_rows(dout, shared.dout.index(stage), full_dout, batch, head, tile * M)
            step += 1


@gluon.jit
def _weights(args, task, scores, stats, row, COLUMN: gl.constexpr, W: gl.constexpr, MASKED: gl.constexpr):
    """The transposed weights of 64 queries, which start at column COLUMN of the tile that starts at `row`."""
    SCORES: gl.constexpr = product_layout(64)
    lse = stats.index(COLUMN // 64).load(gl.SliceLayout(0, SCORES))
    weights = gl.exp2(scores * args.scale - gl.expand_dims(lse, 0))
    if MASKED:
        key = task.block * KEYS + W * ROWS + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), 1)
        seen = key < args.length
        if args.CAUSAL:
            seen = seen & (key <= row + COLUMN + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, SCORES)), 0))
        weights = gl.where(seen, weights, 0.0)
    return weights


@gluon.jit
def _gradients(weights, dp, stats, COLUMN: gl.constexpr, DTYPE: gl.constexpr):
    """The gradient of the scores, rounded."""
    HALVES: gl.constexpr = stats.shape[0] // 2
    delta = stats.index(HALVES + COLUMN // 64).load(gl.SliceLayout(0, product_layout(64)))
    return (weights * (dp - gl.expand_dims(delta, 0))).to(DTYPE)


@gluon.jit
def _wait_staging(shared, step):
    mbarrier.wait(shared.dq_empty.index(step % 2), ((step // 2) & 1) ^ 1)


@gluon.jit
def _stage(args, shared, step, dq, W: gl.constexpr):
    if args.DQ > 1:
        shared.dq.index((step % 2) * 2 + W).store(dq)
        fence_async_shared()
        tl.debug_barrier()
    mbarrier.arrive(shared.dq_full.index(step % 2), count=1)


@gluon.jit
def _step(args, shared, task, number, dk, dv, step, row, W: gl.constexpr, MASKED: gl.constexpr):
    """Add a tile of queries, starting at `row`, to dk and dv; compute and stage its dq."""
    M: gl.constexpr = args.M
    DIM: gl.constexpr = args.DIM
    DTYPE: gl.constexpr = shared.q.dtype
    HALVES: gl.constexpr = M // 64
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(DIM), k_width=2)
    stage = step % STAGES
    phase = (step // STAGES) & 1
    buffer = step % 2
    query = reinterpret(shared.q.index(stage), DTYPE, [HALVES, 64, DIM], blocks_layout())
    dout = reinterpret(shared.dout.index(stage), DTYPE, [HALVES, 64, DIM], blocks_layout())
    stats = reinterpret(shared.stats.index(stage), gl.float32, [2 * HALVES, 64], vector_layout())
    zeros = gl.zeros([ROWS, 64], gl.float32, product_layout(64))
    key = shared.k.index(W)
    value = shared.v.index(W)
    mbarrier.wait(shared.q_full.index(stage), phase)
    scores = warpgroup_mma(key, query.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(shared.v_full.index(0), number & 1)
    mbarrier.wait(shared.dout_full.index(stage), phase)
    dp = warpgroup_mma(value, dout.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if HALVES == 1:
        scores = warpgroup_mma_wait(1, deps=[scores])
        weights = _weights(args, task, scores, stats, row, 0, W, MASKED)
        left = gl.convert_layout(weights.to(DTYPE), operand)
        dv = warpgroup_mma(left, dout.index(0), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = _gradients(weights, dp, stats, 0, DTYPE)
        ds_left = gl.convert_layout(ds, operand)
        if args.DQ > 0:
            shared.ds.index(buffer * 2 + W).store(ds)
    else:
        # two halves, the products of one during the exponentials of the other
        scores2 = warpgroup_mma(key, query.index(1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(2, deps=[scores])
        weights = _weights(args, task, scores, stats, row, 0, W, MASKED)
        left1 = gl.convert_layout(weights.to(DTYPE), operand)
        dv = warpgroup_mma(left1, dout.index(0), dv, is_async=True)
        dp2 = warpgroup_mma(value, dout.index(1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(3, deps=[dp])
        ds = _gradients(weights, dp, stats, 0, DTYPE)
        ds_left1 = gl.convert_layout(ds, operand)
        halves = reinterpret(shared.ds.index(buffer * 2 + W), DTYPE, [2, ROWS, 64], blocks_layout())
        if args.DQ > 0:
            halves.index(0).store(ds)
        dk = warpgroup_mma(ds_left1, query.index(0), dk, is_async=True)
        scores2 = warpgroup_mma_wait(3, deps=[scores2])
        weights = _weights(args, task, scores2, stats, row, 64, W, MASKED)
        left = gl.convert_layout(weights.to(DTYPE), operand)
        dv = warpgroup_mma(left, dout.index(1), dv, is_async=True)
        dp2, left1 = warpgroup_mma_wait(2, deps=[dp2, left1])
        ds = _gradients(weights, dp2, stats, 64, DTYPE)
        ds_left = gl.convert_layout(ds, operand)
        if args.DQ > 0:
            halves.index(1).store(ds)
    if args.DQ > 0:
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(shared.ds_full.index(buffer), count=1)
    dk = warpgroup_mma(ds_left, query.index(HALVES - 1), dk, is_async=True)
    if args.DQ > 0:
        mbarrier.wait(shared.ds_full.index(buffer), (step // 2) & 1)
        dq = gl.zeros([64, 64], gl.float32, product_layout(64))
        for half in gl.static_range(2):
            a = shared.ds.index(buffer * 2 + half)
            b = shared.k.index(half)
            if M == 128:
                a = reinterpret(a, DTYPE, [2, ROWS, 64], blocks_layout()).index(W)
            if DIM == 128:
                b = reinterpret(b, DTYPE, [2, ROWS, 64], blocks_layout()).index(W)
            dq = warpgroup_mma(a.permute((1, 0)), b, dq, use_acc=half > 0, is_async=True)
        if HALVES == 1:
            dv, dk, left, ds_left = warpgroup_mma_wait(2, deps=[dv, dk, left, ds_left])
        else:
            dv, dk, left, ds_left, ds_left1 = warpgroup_mma_wait(2, deps=[dv, dk, left, ds_left, ds_left1])
        mbarrier.arrive(shared.empty.index(stage), count=1)
        _wait_staging(shared, step)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _stage(args, shared, step, dq, W)
    else:
        if HALVES == 1:
            dv, dk, left, ds_left = warpgroup_mma_wait(0, deps=[dv, dk, left, ds_left])
        else:
            dv, dk, left, ds_left, ds_left1 = warpgroup_mma_wait(0, deps=[dv, dk, left, ds_left, ds_left1])
        mbarrier.arrive(shared.empty.index(stage), count=1)
    return dk, dv


@gluon.constexpr_function
def blocks_layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _store(stage, out, task, kv_heads, value, W: gl.constexpr):
    """Start to store this warpgroup's rows of dk or dv through shared memory."""
    stage.store(value.to(out.dtype))
    fence_async_shared()
    block = reinterpret(stage, out.dtype, out.block_shape, out.layout)
    async_store(out, [task.unit // kv_heads, task.unit % kv_heads, task.block * KEYS + W * ROWS, 0], block)


@gluon.jit
def _multiply(args, dk_out, dv_out, shared, first, end, W: gl.constexpr):
    DIM: gl.constexpr = args.DIM
    step = first * 0
    for entry in range(first, end):
        task = _task_at(args, entry)
        number = entry - first
        dk = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
        dv = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
        mbarrier.wait(shared.k_full.index(0), number & 1)
        for part in range(2 * args.group):
            descending = (task.kind == 2).to(gl.int32)
            for i in range(gl.where(part % 2 == descending, task.full - task.low, 0)):
                tile = gl.where(task.kind == 2, task.full - 1 - i, task.low + i)
                dk, dv = _step(args, shared, task, number, dk, dv, step, tile * args.M, W=W, MASKED=True)
                step += 1
            for _ in range(gl.where(part % 2 == 0, task.high - task.full, 0)):
                dk, dv = _step(args, shared, task, number, dk, dv, step, 0, W=W, MASKED=False)
                step += 1
        mbarrier.arrive(shared.k_empty.index(0), count=1)
        # Through the memory of this warpgroup's values, and that of ds once both warpgroups have multiplied it. Both
        # are in use again only after the next values have arrived.
        _store(shared.v.index(W), dv_out, task, args.kv_heads, dv, W)
        mbarrier.wait(shared.k_empty.index(0), number & 1)
        free = reinterpret(shared.ds, shared.ds.dtype, [4 * args.M // DIM, ROWS, DIM], blocks_layout())
        _store(free.index(W * (2 * args.M // DIM)), dk_out, task, args.kv_heads, dk * args.factor, W)
        tma.store_wait(0)
        tl.debug_barrier()
        mbarrier.arrive(shared.v_empty.index(0), count=1)


@gluon.jit
def _wait_turn(args, flag, turn):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    spins = 0
    if seen != turn:  # noqa: SIM102
        if tl.atomic_add(args.sync + 1, 0, sem="relaxed", scope="gpu") != 0:
            spins = MAX_SPINS
    while (seen != turn) & (spins < MAX_SPINS):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
        spins += 1
    if seen != turn:
        tl.atomic_add(args.sync + 1, 1, sem="relaxed", scope="gpu")


@gluon.jit
def _add_dq(args, sums, shared, first, end, PART: gl.constexpr):
    """The warp that adds every second tile of dq, in turns."""
    group = args.heads // args.kv_heads
    step = first * 0
    if args.DQ == 0:
        end = first
    for entry in range(first, end):
        task = _task_at(args, entry)
        count = task.high - task.low
        # the steps of this task with the parity of this warp
        for i in range((step + PART) % 2, group * count, 2):
            head = task.unit // args.kv_heads * args.heads + task.unit % args.kv_heads * group + i // count
            tile = _tile_at(args, task, i % count)
            turn, turns = _turn_at(args, task, tile)
            index = head * args.tiles + tile
            if args.DQ > 1 and args.ORDERED:
                _wait_turn(args, args.turns + index, turn)
                tl.debug_barrier()
            mbarrier.wait(shared.dq_full.index(PART), ((step + i) // 2) & 1)
            if args.DQ > 1:
                acquire_for_descriptors()
                staging = reinterpret(shared.dq, gl.float32, [2, 32, 256], sums.layout)
                staged = staging.index(PART)
                if turn == 0:
                    async_store(sums, [index * 32, 0], staged)
                else:
                    async_add(sums, [index * 32, 0], staged)
                tma.store_wait(0)
            mbarrier.arrive(shared.dq_empty.index(PART), count=1)
            if args.DQ > 1:
                complete_descriptor_stores()
                tl.debug_barrier()
                if args.ORDERED:
                    passed = turn + 1
                    if not args.CONVERT:
                        passed = gl.where(passed < turns, passed, 0)
                    tl.atomic_xchg(args.turns + index, passed, sem="release", scope="gpu")
        step += group * count


@gluon.jit
def _convert_dq(args, first, end):
    """The warp that rounds finished tiles of dq."""
    group = args.heads // args.kv_heads
    M: gl.constexpr = args.M
    DIM: gl.constexpr = args.DIM
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    if args.DQ < 2 or not args.ORDERED or not args.CONVERT:
        end = first
    for entry in range(first, end):
        task = _task_at(args, entry)
        count = task.high - task.low
        for i in range(group * count):
            head = task.unit // args.kv_heads * args.heads + task.unit % args.kv_heads * group + i // count
            tile = _tile_at(args, task, i % count)
            turn, turns = _turn_at(args, task, tile)
            index = head * args.tiles + tile
            if turn + 1 == turns:
                _wait_turn(args, args.turns + index, turns)
                tl.debug_barrier()
                base = args.accumulated + index.to(gl.int64) * (M * DIM)
                result = args.dq + (head.to(gl.int64) * args.length + tile * M) * DIM
                for piece in range(16):
                    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, VECTORS)), 1)
                    j = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, VECTORS)), 0)
                    value = gl.load(base + (piece * 512 + c * 4 + j), cache_modifier=".cg")
                    value = (value * args.factor).to(args.dq.dtype.element_ty)
                    value = value.reshape([4, 8, 4, 2, 2]).permute((0, 3, 1, 2, 4)).reshape([64, 8])
                    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, value.type.layout)), 1)
                    column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, value.type.layout)), 0) + piece % 8 * 8
                    if M == 128:
                        row += piece // 8 * 64
                    else:
                        column += piece // 8 * 64
                    gl.store(result + (row * DIM + column), value, mask=tile * M + row < args.length)
                tl.debug_barrier()
                tl.atomic_xchg(args.turns + index, 0, sem="relaxed", scope="gpu")


@gluon.jit
def _rows_of(args, index, LAYOUT: gl.constexpr):
    """(out, dout, log-sum-exp) of a tile, as they are in memory."""
    M: gl.constexpr = args.M
    DIM: gl.constexpr = args.DIM
    j = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT)), 0)
    row = index % args.tiles * M + gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    inside = (row < args.length) & (index < args.batch * args.heads * args.tiles)
    line = (index // args.tiles).to(gl.int64) * args.length
    at = (line + gl.expand_dims(row, 1)) * DIM + j
    wide = gl.expand_dims(inside, 1)
    out = gl.load(args.out + at, mask=wide, other=0.0)
    dout = gl.load(args.dout + at, mask=wide, other=0.0)
    return out, dout, gl.load(args.lse + line + row, mask=inside, other=float("inf"))


@gluon.jit
def _prepare(args):
    """stats of this CTA's share of all tiles, then a grid sync."""
    M: gl.constexpr = args.M
    DIM: gl.constexpr = args.DIM
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    i = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    out, dout, lse = _rows_of(args, gl.program_id(0), LAYOUT)
    for index in range(gl.program_id(0), args.batch * args.heads * args.tiles, gl.num_programs(0)):
        # the next tile's rows are on their way while this one's are summed
        later = _rows_of(args, index + gl.num_programs(0), LAYOUT)
        lse = gl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
        gl.store(args.stats + index * (2 * M) + i, lse)
        gl.store(args.stats + index * (2 * M) + M + i, gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1))
        out, dout, lse = later
    tl.debug_barrier()
    ticket = tl.atomic_add(args.sync, 1, sem="acq_rel", scope="gpu")
    target = (ticket // gl.num_programs(0) + 1) * gl.num_programs(0)
    seen = ticket + 1
    spins = 0
    while (seen < target) & (spins < MAX_SPINS):
        seen = tl.atomic_add(args.sync, 0, sem="acquire", scope="gpu")
        spins += 1
    if seen < target:
        tl.atomic_add(args.sync + 1, 1, sem="relaxed", scope="gpu")
    tl.debug_barrier()


@gluon.jit
def _barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def backward_kernel(q, k, v, dout, stats, dk, dv, sums, args, REGISTERS: gl.constexpr, OTHERS: gl.constexpr):
    n = args.numbers
    _run(
        q,
        k,
        v,
        dout,
        stats,
        dk,
        dv,
        sums,
        Args(
            args.records,
            args.starts,
            args.accumulated,
            args.turns,
            args.stats,
            args.out,
            args.dout,
            args.lse,
            args.dq,
            args.sync,
            n,
            args.scale,
            args.factor,
            gl.load(n),
            gl.load(n + 1),
            gl.load(n + 2),
            gl.load(n + 3),
            gl.load(n + 4),
            gl.load(n + 5),
            args.M,
            args.DIM,
            args.CAUSAL,
            args.DQ,
            args.ORDERED,
            args.CONVERT,
        ),
        REGISTERS,
        OTHERS,
    )


@gluon.jit
def _run(q, k, v, dout, stats, dk, dv, sums, args, REGISTERS: gl.constexpr, OTHERS: gl.constexpr):
    M: gl.constexpr = args.M
    DIM: gl.constexpr = args.DIM
    DTYPE: gl.constexpr = args.out.dtype.element_ty
    _prepare(args)
    shared = Shared(
        k=gl.allocate_shared_memory(DTYPE, [2, ROWS, DIM], blocks_layout()),
        v=gl.allocate_shared_memory(DTYPE, [2, ROWS, DIM], blocks_layout()),
        q=gl.allocate_shared_memory(DTYPE, [STAGES, M, DIM], blocks_layout()),
        dout=gl.allocate_shared_memory(DTYPE, [STAGES, M, DIM], blocks_layout()),
        stats=gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * M], stats.layout),
        ds=gl.allocate_shared_memory(DTYPE, [4, ROWS, M], blocks_layout()),
        dq=gl.allocate_shared_memory(gl.float32, [4, 64, 64], dq_layout()),
        k_full=_barriers(1, 1),
        k_empty=_barriers(1, 2),
        v_full=_barriers(1, 1),
        v_empty=_barriers(1, 2),
        q_full=_barriers(STAGES, 1),
        dout_full=_barriers(STAGES, 1),
        empty=_barriers(STAGES, 2),
        ds_full=_barriers(2, 2),
        dq_full=_barriers(2, 2),
        dq_empty=_barriers(2, 1),
    )
    fence_async_shared()
    first = gl.load(args.starts + gl.program_id(0))
    end = gl.load(args.starts + gl.program_id(0) + 1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    Products(
                        args.records,
                        args.scale,
                        args.factor,
                        args.heads // args.kv_heads,
                        args.kv_heads,
                        args.length,
                        args.M,
                        args.DIM,
                        args.CAUSAL,
                        args.DQ,
                    ),
                    dk,
                    dv,
                    shared,
                    first,
                    end,
                    0,
                ),
            ),
            (
                _multiply,
                (
                    Products(
                        args.records,
                        args.scale,
                        args.factor,
                        args.heads // args.kv_heads,
                        args.kv_heads,
                        args.length,
                        args.M,
                        args.DIM,
                        args.CAUSAL,
                        args.DQ,
                    ),
                    dk,
                    dv,
                    shared,
                    first,
                    end,
                    1,
                ),
            ),
            (_load, (args, q, k, v, dout, stats, shared, first, end)),
            (_add_dq, (args, sums, shared, first, end, 0)),
            (_add_dq, (args, sums, shared, first, end, 1)),
            (_convert_dq, (args, first, end)),
        ],
        [4, 1, 1, 1, 1],
        [REGISTERS, OTHERS, OTHERS, OTHERS, OTHERS],
    )


# -- host


def schedule(units, length, tile_m, group, causal, ctas):
    """(starts, records)"""
    tiles = math.ceil(length / tile_m)
    blocks = math.ceil(length / 128)
    per_block = 128 // tile_m
    lists = [[] for _ in range(ctas)]

    def masked_from(block, low):
        """First tile that needs no mask."""
        if (block + 1) * 128 > length:
            return tiles
        return min(low + per_block, tiles) if causal else low

    if not causal:
        for number in range(units * blocks):
            unit, block = divmod(number, blocks)
            wave = number // ctas
            first = max(wave * ctas - unit * blocks, 0)
            last = min((wave + 1) * ctas - unit * blocks, blocks)
            lists[number % ctas].append((unit, block, 0, tiles, masked_from(block, 0), 0, first, last))
    else:

        def record(unit, block, kind):
            low = block * per_block
            return (unit, block, low, tiles, masked_from(block, low), kind, 0, 0)

        # Units in pairs. A CTA has a block of the first, in ascending order of queries, and the block of the second
        # that makes the sum of their lengths the same for all CTAs, in descending order. So blocks of a unit always
        # come to a tile at different times.
        for number in range((units + 1) // 2 * blocks):
            pair, nth = divmod(number, blocks)
            lists[number % ctas].append(record(2 * pair, blocks - 1 - nth, 1))
            if 2 * pair + 1 < units:
                lists[number % ctas].append(record(2 * pair + 1, nth, 2))
    starts = [0]
    for each in lists:
        starts.append(starts[-1] + len(each))
    return starts, [word for each in lists for record in each for word in record]


def descriptor(tensor, block, width=128):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * tensor.element_size(), rank=len(block))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


class Backward:
    """A prepared call. Tensors are contiguous [batch, heads, length, dim]."""

    def __init__(
        self,
        q,
        k,
        v,
        out,
        dout,
        lse,
        causal,
        scale=None,
        ctas=132,
        tile_m=None,
        dq_product=2,
        ordered=True,
        convert=True,
        registers=232,
        others=40,
        empty=False,
    ):
        batch, heads, length, dim = q.shape
        kv_heads = k.shape[1]
        tile_m = tile_m or (64 if dim == 128 else 128)
        self.tiles, self.blocks = math.ceil(length / tile_m), math.ceil(length / 128)
        device = q.device
        scale = dim**-0.5 if scale is None else scale
        starts, records = schedule(batch * kv_heads, length, tile_m, heads // kv_heads, causal, ctas)
        if empty:  # only delta and the grid sync
            starts = [0] * (ctas + 1)
        words = dict(dtype=torch.int32, device=device)
        self.dq, self.dk, self.dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.stats = torch.empty(batch * heads * self.tiles, 2 * tile_m, dtype=torch.float32, device=device)
        self.sync = torch.zeros(2, **words)
        self.turns = torch.zeros(batch * heads * self.tiles, **words)
        self.accumulated = torch.empty(batch * heads * self.tiles * tile_m * dim, dtype=torch.float32, device=device)
        self.ctas = ctas
        self.args = Args(
            records=torch.tensor(records, **words),
            starts=torch.tensor(starts, **words),
            accumulated=self.accumulated,
            turns=self.turns,
            stats=self.stats,
            out=out,
            dout=dout,
            lse=lse,
            dq=self.dq,
            sync=self.sync,
            numbers=torch.tensor([heads, kv_heads, batch, length, self.tiles, self.blocks], **words),
            scale=scale * math.log2(math.e),
            factor=scale,
            heads=None,
            kv_heads=None,
            batch=None,
            length=None,
            tiles=None,
            blocks=None,
            M=gl.constexpr(tile_m),
            DIM=gl.constexpr(dim),
            CAUSAL=gl.constexpr(causal),
            DQ=gl.constexpr(dq_product),
            ORDERED=gl.constexpr(ordered),
            CONVERT=gl.constexpr(convert),
        )
        self.named = dict(
            q=descriptor(q, [1, 1, tile_m, dim]),
            k=descriptor(k, [1, 1, 64, dim]),
            v=descriptor(v, [1, 1, 64, dim]),
            dout=descriptor(dout, [1, 1, tile_m, dim]),
            stats=descriptor(self.stats, [1, 2 * tile_m], 0),
            dk=descriptor(self.dk, [1, 1, 64, dim]),
            dv=descriptor(self.dv, [1, 1, 64, dim]),
            sums=descriptor(self.accumulated.view(-1, 256), [32, 256], 0),
            REGISTERS=registers,
            OTHERS=others,
            num_warps=4,
        )

    def __call__(self):
        backward_kernel[(self.ctas,)](args=self.args, **self.named)
        return self.dq, self.dk, self.dv
