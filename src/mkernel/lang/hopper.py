"""The tile GEMM of the kernels for Hopper, in Gluon: a load warp, and two warpgroups that multiply.

A CTA has STAGES stages in shared memory, each holding one step through k of both operands. The load warp fills them by
TMA. The barriers `filled` tell the two warpgroups when a stage is ready, the barriers `freed` tell the load warp when
it may be filled again. Each warpgroup multiplies 64 rows of the 128x256 tile. They need not run in lockstep: while one
stores its rows, the other continues to multiply, as far ahead as the stages allow.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from mkernel.lang.gluon_compat import async_store

TILE_M = tl.constexpr(128)
TILE_N = tl.constexpr(256)
TILE_K = tl.constexpr(64)
STAGES = tl.constexpr(4)  # with 16 KB of each warpgroup for its result they fill the shared memory
ROWS = tl.constexpr(64)  # of the tile, for each warpgroup
STORED = tl.constexpr(128)  # columns of the result that a warpgroup stores at a time


@gluon.constexpr_function
def accumulator_layout():
    """The register layout of a warpgroup's rows of a tile."""
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])


class Stages(NamedTuple):
    """The stages of the pipeline in shared memory.

    Attributes:
        a: STAGES steps of the left operand.
        b: STAGES steps of the right operand.
        filled: one mbarrier per stage; the load warp arrives.
        freed: one mbarrier per stage; both warpgroups arrive.
    """

    a: Any
    b: Any
    filled: Any
    freed: Any


@gluon.jit
def multiply_rows(stages, step, k, WARPGROUP: gl.constexpr, B_TRANSPOSED: gl.constexpr):
    """(the product of this warpgroup's rows of a tile in fp32, the number of steps so far). `step` continues from tile
    to tile: it determines the stage and the phase of its barriers."""
    layout: gl.constexpr = accumulator_layout()
    total = warpgroup_mma_init(gl.zeros([ROWS, TILE_N], gl.float32, layout))
    for depth in range(0, k, TILE_K):
        stage = step % STAGES
        mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
        x = stages.a.index(stage).slice(WARPGROUP * ROWS, ROWS)
        if B_TRANSPOSED:
            y = stages.b.index(stage).permute((1, 0))
        else:
            y = stages.b.index(stage)
        total = warpgroup_mma(x, y, total, use_acc=depth > 0, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        total = warpgroup_mma_init(total)
        if depth > 0:
            # the step before this one is done, so its stage is free
            mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(stages.freed.index((step + STAGES - 1) % STAGES), count=1)
    return total, step


@gluon.jit
def store_rows(c, c_stage, total, row, column, WARPGROUP: gl.constexpr):
    """Store this warpgroup's rows of the tile at (row, column) by TMA, one half of the columns after the other. The
    last store may still be in flight afterwards: call `tma.store_wait(0)` before the kernel ends."""
    layout: gl.constexpr = accumulator_layout()
    left, right = total.reshape([ROWS, 2, STORED]).permute(0, 2, 1).split()
    tma.store_wait(0)
    c_stage.store(gl.convert_layout(left, layout).to(c.dtype))
    fence_async_shared()
    async_store(c, [row + WARPGROUP * ROWS, column], c_stage)
    tma.store_wait(0)
    c_stage.store(gl.convert_layout(right, layout).to(c.dtype))
    fence_async_shared()
    async_store(c, [row + WARPGROUP * ROWS, column + STORED], c_stage)
