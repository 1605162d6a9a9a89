"""The main loop of the kernels that sum over ranks: the loops over tiles and over k, fused into one.

Triton's pipeliner can thus load the first k-steps of a tile while the previous tile is pushed or reduced. Kernels
differ in the tiles they take and in what they do with a product, so each passes four device functions to the loop:

    TAKE(comm, call, sequence, position)             the tile at a position of this CTA's sequence, a structure
    LOCATE(call, taken)                              where that tile is: a `Tile`
    PREFETCH(comm, call, taken)                      called after the first k-step of a tile
    END(comm, call, sequence, total, taken, progress)  called after the last k-step; returns the new `Progress`

END must use `total` on every path. Then the product is complete before the accumulator is reset to zero, and the
tensor cores may run asynchronously everywhere else in the loop.

HOIST lets Triton hoist loop invariants, which then occupy registers throughout the loop. This avoids spills in some
kernels and causes them in others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.copy import wait_paced
from mkernel.lang.device import clock
from mkernel.lang.gemm import multiply_step
from mkernel.lang.scaling import scale_tile
from mkernel.ops.reduce.operands import count_steps
from mkernel.ops.reduce.protocol import notify_partial


class Progress(NamedTuple):
    """What a CTA carries from one tile to the next."""

    signal: Any  # address of the signal of the partial that was pushed last, if it has yet to be sent; else 0
    moved: Any  # bytes moved over NVLink so far
    start: Any  # when the CTA began; only if the link is paced


@triton.jit
def start_progress(link):
    """The initial progress of a CTA."""
    start = tl.full((), 0, tl.int64)
    if link.PACED:
        start = clock()
    return Progress(tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), start)


@triton.jit
def wait_paced_progress(link, progress):
    """Wait until a paced link would have transferred what was moved so far."""
    if link.PACED:
        wait_paced(progress.start, progress.moved, link.nanoseconds_per_mib)


@triton.jit
def notify_due(comm, signal):
    """Send the pending signal, if there is one."""
    if signal != 0:
        notify_partial(comm, signal, True)


@triton.jit
def for_each_tile(
    comm, call, sequence, TAKE: tl.constexpr, LOCATE: tl.constexpr, PREFETCH: tl.constexpr, END: tl.constexpr,
    HOIST: tl.constexpr,
):  # fmt: skip
    """Multiply the `sequence.length` tiles of this CTA in order. Returns the progress after the last one."""
    M: tl.constexpr = call.product.tiling.M
    N: tl.constexpr = call.product.tiling.N
    steps = count_steps(call.product)
    position = -1
    step = steps - 1
    taken = TAKE(comm, call, sequence, 0)
    progress = start_progress(call.link)
    total = tl.zeros((M, N), tl.float32)
    for _ in tl.range(sequence.length * steps, disable_licm=not HOIST):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            position += 1
            taken = TAKE(comm, call, sequence, position)
        total = multiply_step(
            total, call.product.a, call.product.b, LOCATE(call, taken), step * call.product.tiling.K, call.product.k,
            call.product.tiling,
        )  # fmt: skip
        if step == 0:
            PREFETCH(comm, call, taken)
        if step == steps - 1:
            total = scale_tile(total, call.product.a, call.product.b, LOCATE(call, taken))
            progress = END(comm, call, sequence, total, taken, progress)
            total = tl.zeros((M, N), tl.float32)
    return progress
