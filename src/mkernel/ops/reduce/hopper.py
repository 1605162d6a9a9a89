"""What the kernels for Hopper of both operators share: their shared memory, loads, and partials.

Both have the same warp roles (see reduce_scatter/hopper.py). Partials are laid out as everywhere else
(lang/partials.py), so that ranks that run a kernel for Hopper and ranks that do not can exchange them. Each warpgroup
stores and adds its own 64 rows.

Operands are 16-bit, or fp8 with scales. These are multiplied by lang/hopper_scaled.py, in steps of 128 of k. A rank
applies its scales to its own partial.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mkernel.lang.context import rank_of
from mkernel.lang.device import acquire_for_descriptors
from mkernel.lang.gluon_compat import async_load, reinterpret
from mkernel.lang.grid import sync_steps
from mkernel.lang.hopper import ROWS, STAGES, STORED, TILE_M, TILE_N, Stages, multiply_rows
from mkernel.lang.hopper_scaled import COLUMNS, Factors, half_layout, join_halves, multiply_halves, split_halves
from mkernel.lang.layout import slot_of
from mkernel.ops.reduce.call import Sum
from mkernel.ops.reduce.protocol import slot_at
from mkernel.runtime.group import Workspace
from mkernel.runtime.hopper import tma_descriptor
from mkernel.runtime.operands import constants

LINE = tl.constexpr(64)  # elements of a cache line
SLOT_ROW = tl.constexpr(64)  # elements of a slot that are a row to TMA


class Operands(NamedTuple):
    """Tensor descriptors. Parameters of the kernel: Triton cannot launch one with descriptors in structures."""

    a: Any
    b: Any
    c: Any
    partials: Any  # see `partials_descriptor`


class OperandScales(NamedTuple):
    """The `Scales` of fp8 operands. Without scales, only SCALED matters."""

    a: Any
    b: Any
    SCALED: Any
    BLOCKWISE: Any
    FAST: Any


class Added(NamedTuple):
    """What is added to the sum, through pointers: a bias [n] and a residual like the result."""

    bias: Any  # None unless BIAS
    bias_stride: Any
    residual: Any  # None unless RESIDUAL
    row_stride: Any
    column_stride: Any
    BIAS: Any
    RESIDUAL: Any


class Extent(NamedTuple):
    """The sizes of a matrix product."""

    rows: Any
    n: Any
    k: Any


class Pushes(NamedTuple):
    """Barriers between the warpgroups and the signal warp, double buffered: both warpgroups have stored a pushed tile;
    its signal has been sent."""

    stored: Any
    signalled: Any


class Arrivals(NamedTuple):
    """Barriers between the wait warp and the load warp, double buffered: the partials of one of the rank's own tiles
    have arrived; the load warp knows."""

    ready: Any
    taken: Any


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER new mbarriers that complete a phase after ARRIVALS arrivals. A fence must follow before they are used."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def allocate_stages(operands):
    """(the `Stages` of the multiplication, shared memory for what each warpgroup stores)."""
    a, b, c = operands.a, operands.b, operands.c
    stages = Stages(
        gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout),
        gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
    )
    return stages, gl.allocate_shared_memory(c.dtype, [2] + c.block_type.shape, c.layout)


@gluon.jit
def load_tile(comm, operands, stages, step, position, common_tiles, row, column, k, B_TRANSPOSED: gl.constexpr):
    """Load all steps through k of the tile at (row, column). Returns the number of filled stages so far. position: the
    number of tiles before this one; common_tiles: how many tiles every CTA has, at least."""
    DEPTH: gl.constexpr = operands.a.block_type.shape[1]
    steps = tl.cdiv(k, DEPTH)
    for i in range(steps):
        sync_steps(comm, position * steps + i, common_tiles * steps)
        stage = step % STAGES
        filled = stages.filled.index(stage)
        mbarrier.wait(stages.freed.index(stage), (step // STAGES + 1) & 1)
        mbarrier.expect(filled, operands.a.block_type.nbytes + operands.b.block_type.nbytes)
        async_load(operands.a, [row, i * DEPTH], filled, stages.a.index(stage))
        if B_TRANSPOSED:
            async_load(operands.b, [column, i * DEPTH], filled, stages.b.index(stage))
        else:
            async_load(operands.b, [i * DEPTH, column], filled, stages.b.index(stage))
        step += 1
    return step


@gluon.jit
def multiply_tile(scales, stages, step, extent, row, column, WARPGROUP: gl.constexpr, B_TRANSPOSED: gl.constexpr):
    """(this warpgroup's rows of the product of the tile at (row, column) in fp32, the number of steps so far)."""
    if scales.SCALED:
        data = scales.a.data + row.to(tl.int64) * scales.a.row
        stride, block = tl.cast(scales.a.row, tl.int64), tl.cast(scales.a.block, tl.int64)
        factors = Factors(data, stride, block, extent.rows - row, scales.b, column, extent.n, extent.k)
        left, right, step = multiply_halves(
            stages, step, factors, WARPGROUP, False, BLOCKWISE=scales.BLOCKWISE, FAST=scales.FAST
        )
        total = join_halves(left, right)
    else:
        total, step = multiply_rows(stages, step, extent.k, WARPGROUP, B_TRANSPOSED)
    return total, step


@gluon.jit
def _add_to_half(added, half, extent, row, column):
    """Add bias and residual to the ROWS x COLUMNS elements at (row, column) of the result."""
    i = row + gl.arange(0, ROWS, gl.SliceLayout(1, half_layout()))
    j = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, half_layout()))
    if added.BIAS:
        bias = gl.load(added.bias + j.to(gl.int64) * added.bias_stride, mask=j < extent.n, other=0.0)
        half += gl.expand_dims(bias.to(gl.float32), 0)
    if added.RESIDUAL:
        rows = gl.expand_dims(i.to(gl.int64) * added.row_stride, 1)
        there = added.residual + rows + gl.expand_dims(j.to(gl.int64) * added.column_stride, 0)
        inside = gl.expand_dims(i < extent.rows, 1) & gl.expand_dims(j < extent.n, 0)
        half += gl.load(there, mask=inside, other=0.0).to(gl.float32)
    return half


@gluon.jit
def add_to_rows(added, total, extent, row, column, WARPGROUP: gl.constexpr):
    """Add bias and residual to this warpgroup's rows of the tile at (row, column) of the result, whose size is that of
    `extent`."""
    if added.BIAS or added.RESIDUAL:
        left, right = split_halves(total)
        first = row + WARPGROUP * ROWS
        left = _add_to_half(added, left, extent, first, column)
        right = _add_to_half(added, right, extent, first, column + COLUMNS)
        total = join_halves(left, right)
    return total


@gluon.jit
def load_partials(comm, operands, slots, stages, step, j, arrivals, summed):
    """Wait until the wait warp has seen the partials of one of this rank's own tiles, and load them into the next
    stages: half a partial into each. Returns the number of filled stages so far."""
    partials = operands.partials
    mbarrier.wait(arrivals.ready.index(summed % 2), (summed // 2) & 1)
    acquire_for_descriptors()
    mbarrier.arrive(arrivals.taken.index(summed % 2), count=1)
    for i in range(2 * (comm.RANKS_PER_NODE - 1)):
        offset = slot_of(slots, comm.epoch, i // 2, j) + i % 2 * (TILE_M * STORED)
        stage = step % STAGES
        filled = stages.filled.index(stage)
        mbarrier.wait(stages.freed.index(stage), (step // STAGES + 1) & 1)
        mbarrier.expect(filled, partials.block_type.nbytes)
        async_load(partials, [(offset // SLOT_ROW).to(tl.int32), 0], filled, _half_in(stages, stage, partials))
        step += 1
    return step


@gluon.jit
def _half_in(stages, stage, partials):
    """The memory of a stage that holds half a partial."""
    return reinterpret(stages.b.index(stage), partials.dtype, partials.block_type.shape, partials.layout)


@gluon.constexpr_function
def slot_layout():
    """The register layout of a packed half: 16 bytes of one thread, then 16 bytes of the next, as in the slot."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [0, 128]],
        warp_bases=[[0, 256], [0, 512]],
        block_bases=[],
        shape=[8, 1024],
    )


@gluon.jit
def _packed(half):
    """Half of a warpgroup's columns in the order of a slot (see lang/partials.py): as runs that each hold 8 rows of
    every 16, and 32 columns. This only renames registers."""
    layout: gl.constexpr = slot_layout()
    split = half.reshape([ROWS // 16, 2, 8, STORED // 32, 4, 4, 2])
    return gl.convert_layout(split.permute(3, 1, 0, 2, 5, 4, 6).reshape([8, 1024]), layout)


@gluon.jit
def _unpacked(block):
    """The inverse of `_packed`."""
    split = block.reshape([STORED // 32, 2, ROWS // 16, 8, 4, 4, 2])
    return split.permute(2, 1, 3, 0, 5, 4, 6).reshape([ROWS, STORED])


@gluon.jit
def _offsets_in_slot(WARPGROUP: gl.constexpr):
    """Offsets of the elements of a packed left half in a slot: the runs of the two warpgroups alternate."""
    layout: gl.constexpr = slot_layout()
    run = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
    i = gl.expand_dims(gl.arange(0, 1024, gl.SliceLayout(0, layout)), 0)
    return run * 2048 + WARPGROUP * 1024 + i


@gluon.jit
def store_rows_of_partial(slot, total, WARPGROUP: gl.constexpr):
    """Store this warpgroup's rows of a partial in its slot."""
    slot = gl.multiple_of(slot, 16)
    left, right = total.to(slot.dtype.element_ty).reshape([ROWS, 2, STORED]).permute(0, 2, 1).split()
    i = _offsets_in_slot(WARPGROUP)
    gl.store(slot + i, _packed(left))
    gl.store(slot + TILE_M * STORED + i, _packed(right))


@gluon.constexpr_function
def staged_layout():
    """`slot_layout` for half a partial in a stage, [run, warpgroup, 16, SLOT_ROW], of which a warpgroup reads its
    part."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        lane_bases=[[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 0, 32], [0, 0, 1, 0], [0, 0, 2, 0]],
        warp_bases=[[0, 0, 4, 0], [0, 0, 8, 0]],
        block_bases=[],
        shape=[8, 1, 16, 64],
    )


@gluon.jit
def _staged_rows(stages, step, partials, WARPGROUP: gl.constexpr):
    """This warpgroup's rows of the half of a partial that is in the stage of this step. Frees the stage."""
    stage = step % STAGES
    mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
    half = _half_in(stages, stage, partials).reshape([8, 2, 16, SLOT_ROW]).slice(WARPGROUP, 1, dim=1)
    rows = gl.convert_layout(half.load(staged_layout()).reshape([8, 1024]), slot_layout())
    mbarrier.arrive(stages.freed.index(stage), count=1)
    return _unpacked(rows).to(gl.float32)


@gluon.jit
def add_staged_partial(total, stages, step, partials, WARPGROUP: gl.constexpr):
    """Add this warpgroup's rows of a partial, from the stages of this step and the next, to those of a tile."""
    left, right = total.reshape([ROWS, 2, STORED]).permute(0, 2, 1).split()
    layout: gl.constexpr = left.type.layout
    total_layout: gl.constexpr = total.type.layout
    left += gl.convert_layout(_staged_rows(stages, step, partials, WARPGROUP), layout)
    right += gl.convert_layout(_staged_rows(stages, step + 1, partials, WARPGROUP), layout)
    joined = gl.join(left, right).permute(0, 2, 1).reshape([ROWS, TILE_N])
    return gl.convert_layout(joined, total_layout)


@gluon.jit
def _prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def prefetch_arrived(comm, exchange, j, arrivals, summed):
    """The wait warp, after the partials of one of the rank's own tiles have arrived: prefetch them into L2, and let the
    load warp load them. summed: how many of the rank's own tiles came before."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lines = gl.arange(0, exchange.partials.SIZE // LINE, layout) * LINE
    mbarrier.wait(arrivals.taken.index(summed % 2), (summed // 2 + 1) & 1)
    for i in range(comm.RANKS_PER_NODE - 1):
        _prefetch(slot_at(comm, exchange.partials, rank_of(comm.context), i, j) + lines)
    mbarrier.arrive(arrivals.ready.index(summed % 2), count=1)


def scales_of(call: Sum) -> OperandScales:
    """The scales of a call's operands, if they are fp8."""
    if call.scaling is None:
        return OperandScales(None, None, *constants(False, False, False))
    scaling = call.scaling
    return OperandScales(
        scaling.of_a(call.a.shape[0]), scaling.of_b(), *constants(True, scaling.blockwise, scaling.fast)
    )  # fmt: skip


def added_of(call: Sum) -> Added:
    """The bias and the residual of a call."""
    bias, residual = call.bias, call.residual
    return Added(
        bias, 0 if bias is None else bias.stride(0), residual, *((0, 0) if residual is None else residual.stride()),
        *constants(bias is not None, residual is not None),
    )  # fmt: skip


# For the simulator: which tensors the kernels only read.
INPUTS = ("a", "b", "call.scales.a.data", "call.scales.b.data", "call.added.bias", "call.added.residual")


def partials_descriptor(workspace: Workspace, dtype: torch.dtype) -> Any:
    """A descriptor of the whole workspace, as rows of SLOT_ROW elements; its blocks hold half a partial."""
    memory = workspace.segment.memory.view(dtype)
    rows = TILE_M.value * STORED.value // SLOT_ROW.value
    return tma_descriptor(
        memory, memory.numel() // SLOT_ROW.value, SLOT_ROW.value, SLOT_ROW.value, [rows, SLOT_ROW.value]
    )
