"""The row-by-row steps of the backward passes: local kernels, bound by memory bandwidth.

- `moe_gated_backward_kernel`: the gradients of gate and up of each row, the weighted inner activations, which the
  gradient of w_down needs, and the gradient of the row's weight, to which the bias of the second GEMM contributes.
- `moe_combine_backward_kernel`: the gradient of each row that was combined, and that of its weight.
- `moe_nothing_kernel`: nothing, in the place of a gradient that other ranks need.

A CTA takes a few rows at a time and goes through their columns in order, so the gradient of a weight, which is a sum
over columns, has the same bits in every run. The CTA stores it as a row [k] in fp32, which is zero in all slots except
that of the row. Combining these rows without weights gives the gradient of topk_weights, without rounding in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.matrix import Block
from mkernel.lang.signals import gave_up
from mkernel.lang.trace import BEGUN, ENDED, LAUNCHES, trace, trace_time
from mkernel.ops.moe.grouped import slope_of
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.protocol import decode, encode
from mkernel.ops.moe.routing import FIRST_EXPERT
from mkernel.ops.moe.sizes import power_above
from mkernel.runtime.group import Group
from mkernel.runtime.operands import layout, named_constants
from mkernel.runtime.world import Launch

READ = ("destinations", "bases", "row_source", "row_token")  # tables of the dispatch that these kernels read
WARPS = 8
ELEMENTS = 4096  # that a CTA has in flight, of each tensor


class Rows(NamedTuple):
    """The rows of this rank's experts, and where their weights' gradients go."""

    destinations: Any  # of `Tables`
    bases: Any
    row_source: Any
    row_token: Any
    weights: Any  # pointer, [row]
    gradients: Any  # pointer, [row, k]
    max_tokens: Any  # encoded, as in `Batch`
    capacity: Any  # encoded
    total_at: Any  # index of the number of all rows in `bases`
    K: Any
    SLOTS: Any  # a power of two, at least K
    ROWS: Any  # that a CTA has in flight
    COLUMNS: Any


class DownBias(NamedTuple):
    """The bias of the second GEMM: its product with the gradient of a row's result is a part of the gradient of the
    row's weight."""

    bias: Any  # Block [expert, column]
    dout: Any  # Block [row, column]: the gradients of the results of the rows' tokens
    columns: Any
    all_topk_ids: Any  # of `Tables`
    summary: Any
    COLUMNS: Any  # that a CTA has in flight


@triton.jit
def _pointers(block, i, j):
    return block.data + i.to(tl.int64)[:, None] * block.row_stride + j.to(tl.int64) * block.column_stride


@triton.jit
def _total(context, rows):
    """How many rows there are; none if the group has given up, because then the tables may be missing."""
    total = tl.full((), 0, tl.int32)
    if not gave_up(context):
        total = tl.load(rows.bases + rows.total_at)
    return total


@triton.jit
def _slots_of(rows, i, inside):
    """The slots of the tokens of rows i, [rows, SLOTS]: where the tables of all slots have them, and their rows, -1
    beyond K and for those on other ranks."""
    slot = tl.arange(0, rows.SLOTS)[None, :]
    source = tl.load(rows.row_source + i, mask=inside, other=0).to(tl.int64)
    token = tl.load(rows.row_token + i, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (slot < rows.K)
    first = (source * decode(rows.max_tokens) + token) * rows.K
    row = tl.load(rows.destinations + first[:, None] + slot, mask=mask, other=-1)
    return first[:, None] + slot, row


@triton.jit
def _with_bias(rows, down, i, inside):
    """The products of the gradients of rows i with the bias of the second GEMM."""
    offsets, row = _slots_of(rows, i, inside)
    mine = (row == i[:, None]) & inside[:, None]
    expert = tl.sum(tl.load(down.all_topk_ids + offsets, mask=mine, other=0), axis=1)
    expert = tl.where(inside, expert - tl.load(down.summary + FIRST_EXPERT), 0)
    sums = tl.zeros((rows.ROWS,), tl.float32)
    for column in range(0, down.columns, down.COLUMNS):
        j = column + tl.arange(0, down.COLUMNS)[None, :]
        mask = inside[:, None] & (j < down.columns)
        gradient = tl.load(_pointers(down.dout, i, j), mask=mask, other=0.0).to(tl.float32)
        sums += tl.sum(gradient * tl.load(_pointers(down.bias, expert, j), mask=mask, other=0.0).to(tl.float32), axis=1)
    return sums


@triton.jit
def _store_weight_gradients(rows, i, inside, gradients):
    """Store the gradients of the weights of rows i, each in the slot of its row."""
    slot = tl.arange(0, rows.SLOTS)[None, :]
    mask = inside[:, None] & (slot < rows.K)
    _, row = _slots_of(rows, i, inside)
    own = tl.where(row == i[:, None], gradients[:, None], 0.0)
    tl.store(rows.gradients + i.to(tl.int64)[:, None] * rows.K + slot, own, mask=mask)


@triton.jit
def _gated_backward(context, rows, pre, dinner, dpre, inter, down, ACTIVATION: tl.constexpr):
    total = _total(context, rows)
    for start in range(tl.program_id(0) * rows.ROWS, total, tl.num_programs(0) * rows.ROWS):
        i = start + tl.arange(0, rows.ROWS)
        inside = i < total
        weight = tl.load(rows.weights + i, mask=inside, other=0.0)[:, None]
        sums = tl.zeros((rows.ROWS,), tl.float32)
        if down is not None:
            sums += _with_bias(rows, down, i, inside)
        for column in range(0, inter, rows.COLUMNS):
            j = column + tl.arange(0, rows.COLUMNS)[None, :]
            mask = inside[:, None] & (j < inter)
            gate = tl.load(_pointers(pre, i, j), mask=mask, other=0.0).to(tl.float32)
            up = tl.load(_pointers(pre, i, inter + j), mask=mask, other=0.0).to(tl.float32)
            gradient = tl.load(_pointers(dinner, i, j), mask=mask, other=0.0).to(tl.float32)
            value, slope = slope_of(gate, ACTIVATION)
            sums += tl.sum(gradient * value * up, axis=1)
            weighted = gradient * weight
            dgate = weighted * up * slope
            DTYPE: tl.constexpr = pre.data.dtype.element_ty
            tl.store(_pointers(dpre, i, j), dgate.to(DTYPE), mask=mask)
            tl.store(_pointers(dpre, i, inter + j), (weighted * value).to(DTYPE), mask=mask)
            tl.store(_pointers(dinner, i, j), (weight * value * up).to(DTYPE), mask=mask)
        _store_weight_gradients(rows, i, inside, sums)


@triton.jit
def moe_gated_backward_kernel(context, rows, pre, dinner, dpre, inter, down, ACTIVATION: tl.constexpr):
    """rows: `Rows`. pre: `Block` [row, 2*inter], gate, then up. dinner: `Block` [row, inter]: the gradient of the inner
    activations before weights; the inner activations times the weight of the row take its place. dpre: `Block` [row,
    2*inter]: the gradient of pre; may be pre. down: `DownBias`, or None."""
    trace(context, LAUNCHES, BEGUN, 0, 0, trace_time(context))
    _gated_backward(context, rows, pre, dinner, dpre, inter, down, ACTIVATION)
    trace(context, LAUNCHES, ENDED, 0, 0, trace_time(context))


@triton.jit
def _combine_backward(context, rows, y, dout, dy, columns):
    total = _total(context, rows)
    capacity = decode(rows.capacity)
    for start in range(tl.program_id(0) * rows.ROWS, capacity, tl.num_programs(0) * rows.ROWS):
        i = start + tl.arange(0, rows.ROWS)
        inside = i < total
        weight = tl.load(rows.weights + i, mask=inside, other=0.0)[:, None]
        sums = tl.zeros((rows.ROWS,), tl.float32)
        for column in range(0, columns, rows.COLUMNS):
            j = column + tl.arange(0, rows.COLUMNS)[None, :]
            mask = inside[:, None] & (j < columns)
            gradient = tl.load(_pointers(dout, i, j), mask=mask, other=0.0).to(tl.float32)
            value = tl.load(_pointers(y, i, j), mask=mask, other=0.0).to(tl.float32)
            sums += tl.sum(gradient * value, axis=1)
            # what is not a row gets zeros: its gradient may flow on
            dvalue = (weight * gradient).to(dy.data.dtype.element_ty)
            tl.store(_pointers(dy, i, j), dvalue, mask=(i < capacity)[:, None] & (j < columns))
        _store_weight_gradients(rows, i, inside, sums)


@triton.jit
def moe_combine_backward_kernel(context, rows, y, dout, dy, columns):
    """rows: `Rows`. y: `Block` [row, columns], the rows that were combined; dout: `Block`, the gradients of the results
    of their tokens; dy: `Block` [capacity, columns], the gradient of y."""
    trace(context, LAUNCHES, BEGUN, 0, 0, trace_time(context))
    _combine_backward(context, rows, y, dout, dy, columns)
    trace(context, LAUNCHES, ENDED, 0, 0, trace_time(context))


@triton.jit
def moe_nothing_kernel(context):
    """In the place of a kernel that other ranks launch."""
    trace(context, LAUNCHES, BEGUN, 0, 0, trace_time(context))
    trace(context, LAUNCHES, ENDED, 0, 0, trace_time(context))


def _rows_of(group: Group, handle: Handle, weights: torch.Tensor, gradients: torch.Tensor, columns: int) -> Rows:
    sizes, tables = handle.sizes, handle.tables
    wide = min(power_above(columns), ELEMENTS)
    tall = ELEMENTS // wide if group.target.type == "cuda" else 16
    return Rows(
        **{name: getattr(tables, name) for name in READ},
        weights=weights,
        gradients=gradients,
        max_tokens=encode(sizes.max_tokens),
        capacity=encode(sizes.capacity),
        total_at=sizes.experts * sizes.world_size,
        **named_constants(K=sizes.k, SLOTS=power_above(sizes.k), ROWS=min(tall, 16), COLUMNS=wide),
    )


def _block(rows: torch.Tensor) -> Block:
    return Block(rows, rows.stride(0), rows.stride(1))


def _launch(
    group: Group, kernel: Any, handle: Handle, arguments: dict[str, Any], read: tuple[str, ...], variant: tuple
) -> Launch:
    """read: tensors that are only read."""
    blocks = {name: value for name, value in arguments.items() if isinstance(value, Block)}
    return Launch(
        op=kernel.fn.__name__.removesuffix("_kernel"),
        group=group,
        kernel=kernel,
        grid=group.world.launcher.ctas(group.world_rank),
        arguments=arguments,
        options=dict(num_warps=WARPS),
        variant=(variant, handle.sizes.k, handle.sizes.experts, *(layout(block.data)[1:] for block in blocks.values())),
        inputs=(*(f"{name}.data" for name in read), "rows.weights", *(f"rows.{name}" for name in READ)),
    )


def empty_weight_gradients(group: Group, handle: Handle) -> torch.Tensor:
    """Memory for the gradients of the rows' weights, [capacity, k]."""
    shape = (max(handle.capacity, 1), handle.sizes.k)
    return group.world.memory.empty(group.world_rank, shape, torch.float32)


def gated_backward(
    group: Group, context: torch.Tensor, handle: Handle, weights: torch.Tensor, pre: torch.Tensor,
    dinner: torch.Tensor, dpre: torch.Tensor, activation: str = "silu",
    biased: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[Launch, torch.Tensor]:  # fmt: skip
    """The launch of `moe_gated_backward_kernel`, and the gradients of the weights, [capacity, k]. biased: the bias of
    the second GEMM, and the gradients of the rows' results."""
    gradients, inter = empty_weight_gradients(group, handle), dinner.shape[1]
    rows = _rows_of(group, handle, weights, gradients, inter)
    arguments = dict(
        context=context, rows=rows, pre=_block(pre),
        dinner=_block(dinner), dpre=_block(dpre), inter=inter, down=None, ACTIVATION=activation,
    )  # fmt: skip
    read = () if pre.data_ptr() == dpre.data_ptr() else ("pre",)
    variant: tuple = (inter, activation)
    if biased is not None:
        bias, dout = biased
        wide = min(power_above(bias.shape[1]), ELEMENTS // rows.ROWS.value)
        arguments["down"] = DownBias(
            _block(bias), _block(dout), bias.shape[1], handle.tables.all_topk_ids, handle.tables.summary,
            **named_constants(COLUMNS=wide),
        )  # fmt: skip
        variant = (*variant, layout(bias), layout(dout)[1:])
    return _launch(group, moe_gated_backward_kernel, handle, arguments, read, variant), gradients


def combine_backward(
    group: Group, context: torch.Tensor, handle: Handle, weights: torch.Tensor, y: torch.Tensor, dout: torch.Tensor
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """The launch of `moe_combine_backward_kernel`, dy [capacity, columns], and the gradients of the weights,
    [capacity, k]."""
    gradients, columns = empty_weight_gradients(group, handle), y.shape[1]
    dy = group.world.memory.empty(group.world_rank, (handle.capacity, columns), y.dtype)
    arguments = dict(
        context=context, rows=_rows_of(group, handle, weights, gradients, columns), y=_block(y), dout=_block(dout),
        dy=_block(dy), columns=columns,
    )  # fmt: skip
    return _launch(group, moe_combine_backward_kernel, handle, arguments, ("y", "dout"), (columns,)), dy, gradients


def nothing(group: Group, context: torch.Tensor, op: str) -> Launch:
    """A launch in the place of one of `op`, for a rank that does not need it: all ranks make the same launches."""
    return Launch(op=op, group=group, kernel=moe_nothing_kernel, grid=1, arguments=dict(context=context))
