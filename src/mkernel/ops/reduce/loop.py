"""The loop of the kernels that sum over ranks: tiles and steps through k are one loop.

So Triton loads the first steps of a tile while the tile before is pushed or added. Kernels differ in the tiles they
take and in what they do with a finished product, so each gives the loop four device functions:

    TAKE(comm, call, sequence, place)                the tile at a place of this CTA's sequence, a structure
    LOCATE(call, taken)                              where that tile lies: a `Tile`
    PREFETCH(comm, call, taken)                      after the first step of a tile
    END(comm, call, sequence, total, taken, progress)  after its last step; returns the new `Progress`

END must use `total` on every path: then the product has been computed when the accumulator becomes zero again, and
the tensor cores may still be at work on it everywhere else in the loop.

HOIST lets Triton move what does not change out of the loop, into registers that are taken through all tiles. That
saves spills in some kernels and costs some in others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mkernel.lang.copy import pace
from mkernel.lang.device import clock
from mkernel.lang.gemm import multiply_step
from mkernel.ops.reduce.operands import count_steps
from mkernel.ops.reduce.protocol import notify_partial


class Progress(NamedTuple):
    """What a CTA keeps from one tile to the next."""

    signal: Any  # address of the signal of the partial that was stored last, if it is due; else 0
    moved: Any  # bytes moved over NVLink so far
    start: Any  # when the CTA began, if the link is paced


@triton.jit
def start_progress(link):
    """The progress of a CTA that begins."""
    start = tl.full((), 0, tl.int64)
    if link.PACED:
        start = clock()
    return Progress(tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), start)


@triton.jit
def pace_progress(link, progress):
    """Wait until a paced link has had the time for what was moved so far."""
    if link.PACED:
        pace(progress.start, progress.moved, link.nanoseconds_per_mib)


@triton.jit
def notify_due(comm, signal):
    """Raise the signal that is due, if there is one."""
    if signal != 0:
        notify_partial(comm, signal, True)


@triton.jit
def for_each_tile(
    comm, call, sequence, TAKE: tl.constexpr, LOCATE: tl.constexpr, PREFETCH: tl.constexpr, END: tl.constexpr,
    HOIST: tl.constexpr,
):  # fmt: skip
    """Multiply the `sequence.length` tiles of this CTA, one after the other. Returns the progress after the last."""
    M: tl.constexpr = call.product.tiling.M
    N: tl.constexpr = call.product.tiling.N
    steps = count_steps(call.product)
    place = -1
    step = steps - 1
    taken = TAKE(comm, call, sequence, 0)
    progress = start_progress(call.link)
    total = tl.zeros((M, N), tl.float32)
    for _ in tl.range(sequence.length * steps, disable_licm=not HOIST):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            place += 1
            taken = TAKE(comm, call, sequence, place)
        total = multiply_step(
            total, call.product.a, call.product.b, LOCATE(call, taken), step * call.product.tiling.K, call.product.k,
            call.product.tiling,
        )  # fmt: skip
        if step == 0:
            PREFETCH(comm, call, taken)
        if step == steps - 1:
            progress = END(comm, call, sequence, total, taken, progress)
            total = tl.zeros((M, N), tl.float32)
    return progress
