"""scaled_matmul_reduce_scatter: matmul_reduce_scatter of fp8 matrices with scales.

Kernels, workspace, order of sums and signals are those of matmul_reduce_scatter. Scales are applied to this rank's
partial before it is sent: every rank has its own scales, and needs no others. Partials travel in the dtype of
the result, or in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.reduce import registration
from mkernel.ops.reduce.call import Plan, Scaled, call_of, scaled_tunable
from mkernel.ops.reduce.reduce_scatter import call, check_scatter, plan
from mkernel.runtime.collective import collective, traceable
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current

OP = "scaled_matmul_reduce_scatter"
TUNABLE = scaled_tunable(call.TUNABLE)

__all__ = ["TUNABLE", "explain", "prepare", "scaled_matmul_reduce_scatter"]

prepare = call.prepare


@collective
def _call(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None, use_fast_accum: bool = False, group: Any, out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """A call on matrices."""
    passed = (a, b, out, bias, residual, scale_a, scale_b)
    rest = (out_dtype, reduce_dtype, use_fast_accum, config)
    key, made = group.prepared.repeat(OP, passed, rest, out=2)
    if made is not None:
        return made[0] if out is None else out
    asked = call_of(
        call.TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=True, scaled=Scaled(scale_a, scale_b, out_dtype, use_fast_accum),
    )  # fmt: skip
    call.agree(group, OP, asked, out_dtype=asked.out.dtype)
    call.launch(group, asked, key, passed, out)
    return asked.out


def _repeat(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, group: Group,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None, use_fast_accum: bool = False, out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The result of a prepared call of `mk.scaled_matmul_reduce_scatter`; None for others."""
    rest = (out_dtype, reduce_dtype, use_fast_accum, config)
    _, made = group.prepared.repeat(OP, (a, b, out, bias, residual, scale_a, scale_b), rest, out=2)
    return None if made is None else made[0] if out is None else out


registration.define_scaled_reduce_scatter(_call)


@traceable(_repeat)
def scaled_matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    group: Any = None,
    out: torch.Tensor | None = None,
    scatter_dim: int = 0,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply fp8 matrices with scales on every rank, add all ranks' products, and return this rank's rows of the sum.

    `mk.quantize` makes such matrices. There is no backward pass.

    Args:
        a: [..., k_local] in torch.float8_e4m3fn or torch.float8_e5m2: this rank's slice of k. Its other dimensions and
            the dtype must be the same on every rank; k_local may differ. Any strides.
        b: [k_local, n], in one of these dtypes. A transposed view (`w.t()`) is read fastest.
        scale_a: what a must be multiplied by, in fp32: one element, or [..., 1], one for each row, or
            [..., k_local/128], rounded up, one for each block of 1 x 128. Each rank has its own.
        scale_b: what b must be multiplied by: one element, or [1, n], one for each column, or, if scale_a has blocks,
            [k_local/128, n/128], rounded up, one for each block of 128 x 128.
        bias: [n], added to every row of the sum, in the dtype of the result; the same on every rank.
        residual: added to this rank's rows of the sum, in the shape and dtype of the result. It may be `out` itself.
        out_dtype: the dtype of the result: torch.bfloat16 (default), torch.float16 or torch.float32.
        reduce_dtype: the dtype in which partials travel between ranks: torch.float32, or that of the result (default).
        use_fast_accum: keep sums in the tensor cores, with fewer bits. By default, they are added up in fp32 every 128
            of k. Not with scales of blocks.
        group: the group to reduce over: a mk.Group, a ProcessGroup, a DeviceMesh of one dimension, or the name of a
            group; the current group by default.
        out: the tensor to write the result to; must not overlap an input.
        scatter_dim: the dimension of the sum that is divided among the ranks; not the last one. Its size must be
            divisible by the number of ranks.
        config: tiles and CTAs; None selects defaults. tile_m, tile_n and ctas must be the same on every rank.

    Returns:
        [..., n], where scatter_dim is divided by the number of ranks: rank r has the r-th part of the sum. The same
        inputs give the same bits.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before they are
            done, the next call on the group or `group.synchronize()` raises it.
    """
    library.refuse_gradients(OP, a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias, residual=residual)
    rows, matrix, added, dim, shape = a, out, residual, 0, None
    if not library.are_operands(a, b, bias, residual, out):
        rows = library.rows_to_refuse(a)
    elif a.dim() != 2 or scatter_dim != 0:
        dim, shape = check_scatter(a, b, scatter_dim, group)
        if residual is not None and tuple(residual.shape) != shape:
            raise ArgumentError(f"residual has shape {tuple(residual.shape)}, but the result has {shape}")
        added = None if residual is None else library.as_rows(residual, dim)
        matrix, scale_a = library.out_as_rows(out, shape, dim), library.scale_as_rows(scale_a, a, dim)
        rows = library.as_rows(a, dim)
    library.refuse_transforms(bias=bias, residual=residual)
    given: dict[str, Any] = dict(bias=bias, residual=added, out_dtype=out_dtype, reduce_dtype=reduce_dtype)
    if not library.needs_dispatcher(a, b, scale_a, scale_b, bias, residual, out):
        y = _call(
            rows, b, scale_a, scale_b, **given, use_fast_accum=use_fast_accum, group=group, out=matrix, config=config
        )
    else:
        arguments = (
            rows, b, scale_a, scale_b, bias, added, library.name_of(group), out_dtype, reduce_dtype, use_fast_accum,
            library.encoded(config),
        )  # fmt: skip
        if matrix is None:
            y = torch.ops.mkernel.scaled_matmul_reduce_scatter(*arguments)
        else:
            torch.ops.mkernel.scaled_matmul_reduce_scatter_out(*arguments, matrix)
    if out is not None:
        return out
    return y if shape is None else library.from_rows(y, a.shape[:-1], dim, shape[dim])


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    group: Any = None,
    out: torch.Tensor | None = None,
    scatter_dim: int = 0,
    config: Config | None = None,
) -> Plan:
    """The plan of a `scaled_matmul_reduce_scatter` call with these arguments."""
    group = current(group)
    if not library.are_operands(a, b, bias, residual, out):
        a = library.rows_to_refuse(a)
    elif a.dim() != 2 or scatter_dim != 0:
        dim, shape = check_scatter(a, b, scatter_dim, group)
        out, scale_a = library.out_as_rows(out, shape, dim), library.scale_as_rows(scale_a, a, dim)
        residual = None if residual is None else library.as_rows(residual, dim)
        a = library.as_rows(a, dim)
    asked = call_of(
        call.TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=True, scaled=Scaled(scale_a, scale_b, out_dtype, use_fast_accum),
    )  # fmt: skip
    decided = plan.decide(group, asked)
    head = decided.head.replace(plan.OP, OP, 1)
    return replace(decided, head=head, reasons=(*decided.reasons, TUNABLE.origin(config, asked.config)))
