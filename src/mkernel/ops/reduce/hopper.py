"""What the kernels for Hopper of both operators share: their shared memory, loads, and partials.

Both have the same warp roles (see reduce_scatter/hopper.py). Partials are laid out as everywhere else
(lang/partials.py), so that ranks that run a kernel for Hopper and ranks that do not can exchange them. Each warpgroup
stores and adds its own 64 rows.
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
from mkernel.lang.hopper import ROWS, STAGES, STORED, TILE_K, TILE_M, TILE_N, Stages
from mkernel.lang.layout import slot_of
from mkernel.ops.reduce.protocol import slot_at
from mkernel.runtime.group import Workspace
from mkernel.runtime.hopper import tma_descriptor

LINE = tl.constexpr(64)  # elements of a cache line
SLOT_ROW = tl.constexpr(64)  # elements of a slot that are a row to TMA


class Operands(NamedTuple):
    """Tensor descriptors. Parameters of the kernel: Triton cannot launch one with descriptors in structures."""

    a: Any
    b: Any
    c: Any
    partials: Any  # see `partials_descriptor`


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
    steps = tl.cdiv(k, TILE_K)
    for i in range(steps):
        sync_steps(comm, position * steps + i, common_tiles * steps)
        stage = step % STAGES
        filled = stages.filled.index(stage)
        mbarrier.wait(stages.freed.index(stage), (step // STAGES + 1) & 1)
        mbarrier.expect(filled, operands.a.block_type.nbytes + operands.b.block_type.nbytes)
        async_load(operands.a, [row, i * TILE_K], filled, stages.a.index(stage))
        if B_TRANSPOSED:
            async_load(operands.b, [column, i * TILE_K], filled, stages.b.index(stage))
        else:
            async_load(operands.b, [i * TILE_K, column], filled, stages.b.index(stage))
        step += 1
    return step


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


def partials_descriptor(workspace: Workspace, dtype: torch.dtype) -> Any:
    """A descriptor of the whole workspace, as rows of SLOT_ROW elements; its blocks hold half a partial."""
    memory = workspace.segment.memory.view(dtype)
    rows = TILE_M.value * STORED.value // SLOT_ROW.value
    return tma_descriptor(
        memory, memory.numel() // SLOT_ROW.value, SLOT_ROW.value, SLOT_ROW.value, [rows, SLOT_ROW.value]
    )
