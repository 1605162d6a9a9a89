"""torch.ops.mkernel.matmul_reduce_scatter and matmul_all_reduce: on matrices, with the group by name.

Gradients of y = RS(a @ b) + bias + residual. Every rank has the gradient dy of its own rows of y. One fused all-gather
+ GEMM computes da = AG(dy) @ b^T and also returns AG(dy), of which db = a^T @ AG(dy) and the gradient of the bias are
local. If a needs no gradient, db is computed by `all_gather_matmul_weight_grad`, as (AG(dy)^T @ a)^T.

Gradients of y = AR(a @ b) + bias + residual. y, and therefore dy, is the same on every rank, so da = dy @ b^T and
db = a^T @ dy are local. `matmul_all_reduce_each` is a copy of dy that makes the gradient of this gradient right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.runtime.group_names import size_of

Numbers = Sequence[int] | None  # an encoded configuration
ADDED = "Tensor a, Tensor b, Tensor? bias, Tensor? residual, str group, ScalarType? reduce_dtype"
SCALED = (
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, Tensor? residual, str group, "
    "ScalarType? out_dtype, ScalarType? reduce_dtype, bool use_fast_accum"
)


def _bias_gradient(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum(0, dtype=torch.float32).to(rows.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, _, _, ctx.group, *_ = inputs
    ctx.by_columns = library.by_columns(b)
    ctx.save_for_backward(*library.saved_for_product(a, b))


def _backward_scatter(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    rows = library.dense(dy)
    da = db = dbias = None
    if needs_a or needs_bias:
        right = b.t() if needs_a else rows.new_empty(rows.shape[1], 0)
        product, gathered = library.registered("all_gather_matmul", "_gathered")(rows, right, ctx.group, None)
        da = product if needs_a else None
        db = library.weight_gradient(a, gathered, ctx.by_columns) if needs_b else None
        dbias = _bias_gradient(gathered) if needs_bias else None
    elif needs_b:
        weight_grad = library.registered("all_gather_matmul", "_weight_grad")
        db = weight_grad(rows, a, not ctx.by_columns, ctx.group, None).t()
    return da, db, dbias, dy if needs_residual else None, None, None, None


def _backward_all(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    # For gradients of gradients: every rank uses dy for its own da and db, so the gradient of dy is the sum of theirs.
    each = torch.ops.mkernel.matmul_all_reduce_each(dy, ctx.group) if torch.is_grad_enabled() else dy
    return (
        each @ b.t() if needs_a else None,
        library.weight_gradient(a, each, ctx.by_columns) if needs_b else None,
        _bias_gradient(dy) if needs_bias else None,
        dy if needs_residual else None,
        None, None, None, None,
    )  # fmt: skip


def _save_each(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group = inputs[1]


def _backward_each(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    identity = torch.eye(gradient.shape[1], dtype=gradient.dtype, device=gradient.device)
    gradient = library.dense(gradient)
    return torch.ops.mkernel.matmul_all_reduce(gradient, identity, None, None, ctx.group, None, True, None), None


def define_reduce_scatter(function: Callable[..., torch.Tensor]) -> None:
    """Register matmul_reduce_scatter, which `function` computes."""

    def run(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, group: str,
        reduce_dtype: torch.dtype | None, config: Numbers = None, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        given = library.decoded(config)
        return function(
            a, b, bias=bias, residual=residual, reduce_dtype=reduce_dtype, group=group, out=out, config=given
        )

    def fake(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: Any,
        residual: Any,
        group: str,
        reduce_dtype: Any,
        config: Numbers = None,
    ) -> torch.Tensor:
        library.check_fake(a, b)
        return a.new_empty(a.shape[0] // size_of(group), b.shape[-1])

    def run_into(*arguments: Any) -> None:
        run(*arguments)

    library.define(
        "matmul_reduce_scatter", f"({ADDED}, int[]? config=None) -> Tensor", run, fake,
        save=_save, backward=_backward_scatter,
    )  # fmt: skip
    library.define(
        "matmul_reduce_scatter_out", f"({ADDED}, int[]? config, Tensor(a!) out) -> ()", run_into, lambda *_: None
    )


def define_all_reduce(function: Callable[..., torch.Tensor]) -> None:
    """Register matmul_all_reduce, which `function` computes."""

    def run(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, group: str,
        reduce_dtype: torch.dtype | None, fixed_order: bool = True, config: Numbers = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        given = library.decoded(config)
        return function(
            a, b, bias=bias, residual=residual, reduce_dtype=reduce_dtype, group=group, out=out,
            fixed_order=fixed_order, config=given,
        )  # fmt: skip

    def fake(
        a: torch.Tensor, b: torch.Tensor, bias: Any, residual: Any, group: str, reduce_dtype: Any,
        fixed_order: bool = True, config: Numbers = None,
    ) -> torch.Tensor:  # fmt: skip
        library.check_fake(a, b)
        return a.new_empty(a.shape[0], b.shape[-1])

    def run_into(*arguments: Any) -> None:
        run(*arguments)

    library.define(
        "matmul_all_reduce", f"({ADDED}, bool fixed_order=True, int[]? config=None) -> Tensor", run, fake,
        save=_save, backward=_backward_all,
    )  # fmt: skip
    library.define(
        "matmul_all_reduce_out", f"({ADDED}, bool fixed_order, int[]? config, Tensor(a!) out) -> ()", run_into,
        lambda *_: None,
    )  # fmt: skip
    library.define(
        "matmul_all_reduce_each", "(Tensor x, str group) -> Tensor",
        lambda x, group: x.clone(), lambda x, group: torch.empty_like(x), save=_save_each, backward=_backward_each,
    )  # fmt: skip


def define_scaled_reduce_scatter(function: Callable[..., torch.Tensor]) -> None:
    """Register scaled_matmul_reduce_scatter, which `function` computes."""

    def run(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
        residual: torch.Tensor | None, group: str, out_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None,
        use_fast_accum: bool, config: Numbers = None, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return function(
            a, b, scale_a, scale_b, bias=bias, residual=residual, out_dtype=out_dtype, reduce_dtype=reduce_dtype,
            use_fast_accum=use_fast_accum, group=group, out=out, config=library.decoded(config),
        )  # fmt: skip

    def fake(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any, residual: Any, group: str,
        out_dtype: torch.dtype | None, *others: Any, **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        library.check_scaled_fake(a, b)
        return a.new_empty(a.shape[0] // size_of(group), b.shape[-1], dtype=out_dtype or torch.bfloat16)

    _define_scaled("scaled_matmul_reduce_scatter", "", run, fake)


def define_scaled_all_reduce(function: Callable[..., torch.Tensor]) -> None:
    """Register scaled_matmul_all_reduce, which `function` computes."""

    def run(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
        residual: torch.Tensor | None, group: str, out_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None,
        use_fast_accum: bool, fixed_order: bool = True, config: Numbers = None, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return function(
            a, b, scale_a, scale_b, bias=bias, residual=residual, out_dtype=out_dtype, reduce_dtype=reduce_dtype,
            use_fast_accum=use_fast_accum, fixed_order=fixed_order, group=group, out=out,
            config=library.decoded(config),
        )  # fmt: skip

    def fake(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any, residual: Any, group: str,
        out_dtype: torch.dtype | None, *others: Any, **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        library.check_scaled_fake(a, b)
        return a.new_empty(a.shape[0], b.shape[-1], dtype=out_dtype or torch.bfloat16)

    _define_scaled("scaled_matmul_all_reduce", ", bool fixed_order", run, fake)


def _define_scaled(name: str, more: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator with scales, which has no gradients, and its variant that writes to a given result. more:
    the arguments before the configuration."""

    def run_into(*arguments: Any) -> None:
        run(*arguments)

    optional = f"{more}=True" if more else ""
    library.define(
        name, f"({SCALED}{optional}, int[]? config=None) -> Tensor", run, fake,
        backward=library.no_backward(name),
    )  # fmt: skip
    library.define(f"{name}_out", f"({SCALED}{more}, int[]? config, Tensor(a!) out) -> ()", run_into, lambda *_: None)
