"""The gradient of the experts' biases: sums over the rows of an expert, without communication.

What it computes. rows [rows, columns] are grouped by expert, as in a dispatch. The result [experts, columns] is, for
each expert, the sum of its rows, or of its rows times their weights. An expert without rows gets zeros.

Who does what. A tile is some columns of an expert. The CTAs share the tiles round-robin. A CTA goes through the rows of
a tile's expert in order, a few at a time, in fp32, so the same input gives the same bits. No CTA waits: the tables of
the dispatch say where an expert's rows begin and end. Every row is read once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.matrix import Block
from mkernel.lang.trace import BEGUN, ENDED, LAUNCHES, trace, trace_time
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.routing import missing_rows
from mkernel.runtime.group import Group
from mkernel.runtime.operands import layout, named_constants
from mkernel.runtime.world import Launch

OP = "moe_bias_grad"
WARPS = 4
COLUMNS = 128  # of a tile
ROWS = 32  # that a CTA has in flight


class BiasGrad(NamedTuple):
    """The sums of a call."""

    bases: Any  # pointer to `Tables.bases`
    summary: Any  # of `Tables`
    rows: Any  # Block: the rows of all experts
    weights: Any  # pointer to [row], or None
    sums: Any  # pointer to [expert, columns]
    experts: Any
    columns: Any
    RANKS: Any  # sources of rows
    ROWS: Any
    COLUMNS: Any


@triton.jit
def _sum_rows(grad, first, end, j):
    """The sum of rows first..end-1 in columns j."""
    total = tl.zeros((grad.ROWS, grad.COLUMNS), tl.float32)
    for start in range(first, end, grad.ROWS):
        i = start + tl.arange(0, grad.ROWS)
        pointers = grad.rows.data + i.to(tl.int64)[:, None] * grad.rows.row_stride
        pointers += j.to(tl.int64)[None, :] * grad.rows.column_stride
        values = tl.load(pointers, mask=(i < end)[:, None] & (j < grad.columns)[None, :], other=0.0).to(tl.float32)
        if grad.weights is not None:
            values *= tl.load(grad.weights + i, mask=i < end, other=0.0)[:, None]
        total += values
    return tl.sum(total, axis=0)


@triton.jit
def _run(grad, missing):
    """All tiles of this CTA. missing: see `missing_rows`."""
    of_expert = tl.cdiv(grad.columns, grad.COLUMNS)
    for tile in range(tl.program_id(0), grad.experts * of_expert, tl.num_programs(0)):
        expert = tile // of_expert
        j = tile % of_expert * grad.COLUMNS + tl.arange(0, grad.COLUMNS)
        first = tl.load(grad.bases + expert * grad.RANKS)
        end = tl.load(grad.bases + (expert + 1) * grad.RANKS)
        if missing != 0.0:
            first = end
        sums = _sum_rows(grad, first, end, j) + missing
        pointers = grad.sums + tl.cast(expert, tl.int64) * grad.columns + j
        tl.store(pointers, sums.to(grad.sums.dtype.element_ty), mask=j < grad.columns)


@triton.jit
def moe_bias_grad_kernel(context, grad):
    """The whole operator. grad: `BiasGrad`."""
    trace(context, LAUNCHES, BEGUN, 0, 0, trace_time(context))
    _run(grad, missing_rows(context, grad))
    trace(context, LAUNCHES, ENDED, 0, 0, trace_time(context))


def prepare(
    group: Group, context: torch.Tensor, handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None
) -> tuple[Launch, torch.Tensor]:
    """The launch, and the sums [experts, columns]. rows: [capacity, columns]; weights: [capacity] in fp32, or None."""
    experts, columns = handle.sizes.experts, rows.shape[1]
    sums = group.world.memory.empty(group.world_rank, (experts, columns), rows.dtype)
    grad = BiasGrad(
        bases=handle.tables.bases,
        summary=handle.tables.summary,
        rows=Block(rows, rows.stride(0), rows.stride(1)),
        weights=weights,
        sums=sums,
        experts=experts,
        columns=columns,
        **named_constants(RANKS=group.size, ROWS=ROWS, COLUMNS=COLUMNS),
    )
    launch = Launch(
        op=OP,
        group=group,
        kernel=moe_bias_grad_kernel,
        grid=max(min(experts * triton.cdiv(columns, COLUMNS), group.world.launcher.ctas(group.world_rank)), 1),
        arguments=dict(context=context, grad=grad),
        options=dict(num_warps=WARPS),
        variant=(experts, columns, layout(rows)[1:], weights is None),
        inputs=("grad.rows.data", "grad.weights", "grad.bases", "grad.summary"),
        results=("grad.sums",) if sums.numel() else (),
    )
    return launch, sums
