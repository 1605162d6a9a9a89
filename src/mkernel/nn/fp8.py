"""Linear layers of which every rank has a part, multiplied in fp8.

Input and weight are quantized in each forward pass. The backward pass is not: gradients are computed in the dtype of
the input, from what the fp8 numbers stand for, and pass through the quantization as if it changed nothing (the
straight-through estimator). What is kept for it is fp8, half of what the layers in bf16 keep.
"""

from __future__ import annotations

from typing import Any

import torch

from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.ops.all_gather_matmul.scaled import all_gather_scaled_matmul
from mkernel.ops.library import as_rows, autocast, check_dim, dense
from mkernel.ops.reduce import matmul_reduce_scatter, scaled_matmul_all_reduce, scaled_matmul_reduce_scatter
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group_names import name_in_graph
from mkernel.runtime.quantization import dequantize, quantize

# of the input and of the weight
RECIPES = {
    "TensorWise": ("TensorWise", "TensorWise"),
    "RowWise": ("RowWise", "RowWise"),
    "BlockWise": ("BlockWise1x128", "BlockWise128x128"),
}


def check_recipe(recipe: str | None) -> None:
    """Refuse what is no recipe; None is for layers that are not in fp8."""
    if recipe is not None and recipe not in RECIPES:
        raise ArgumentError(f"fp8 must be None or one of {', '.join(RECIPES)}; got {recipe!r}")


def column_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, recipe: str = "RowWise",
    group: Any = None, sequence_dim: int = 0,
) -> torch.Tensor:  # fmt: skip
    """`mkernel.nn.functional.column_parallel_linear` in fp8, with sequence_parallel. recipe: what shares a scale."""
    check_recipe(recipe)
    x, weight, bias = autocast(x, weight, bias)
    dim = check_dim("sequence_dim", sequence_dim, x, "x")
    return _Column.apply(x, weight, bias, recipe, group, dim)


def row_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, *,
    recipe: str = "RowWise", group: Any = None, sequence_parallel: bool = True, sequence_dim: int = 0,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """`mkernel.nn.functional.row_parallel_linear` in fp8. recipe: what shares a scale."""
    check_recipe(recipe)
    x, weight, bias, residual = autocast(x, weight, bias, residual)
    dim = check_dim("sequence_dim", sequence_dim, x, "x") if sequence_parallel else None
    return _Row.apply(x, weight, bias, residual, recipe, group, dim, reduce_dtype)


def _quantized(x: torch.Tensor, weight: torch.Tensor, recipe: str) -> tuple[torch.Tensor, ...]:
    """(x, weight, their scales) in fp8."""
    of_x, of_weight = RECIPES[recipe]
    (x, scale), (weight, scale_w) = quantize(x.detach(), of_x), quantize(weight.detach(), of_weight)
    return x, weight, scale, scale_w


def _transposed(scale: torch.Tensor) -> torch.Tensor:
    return scale.t() if scale.dim() else scale


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str, group: Any, dim: int
    ) -> torch.Tensor:  # fmt: skip
        ctx.group, ctx.dim, ctx.dtype = group, dim, x.dtype
        x, weight, scale, scale_w = _quantized(x, weight, recipe)
        ctx.save_for_backward(x, weight, scale, scale_w)
        return all_gather_scaled_matmul(
            x, weight.t(), scale, _transposed(scale_w), bias=None if bias is None else bias.detach(),
            out_dtype=ctx.dtype, group=group, gather_dim=dim,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, scale, scale_w = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            numbers = dequantize(weight, scale_w, ctx.dtype)
            dx = matmul_reduce_scatter(dense(grad), numbers, group=ctx.group, scatter_dim=ctx.dim)
        rows = dense(as_rows(grad, ctx.dim))
        if ctx.needs_input_grad[1]:
            own = as_rows(dequantize(x, scale, ctx.dtype), ctx.dim)
            # the registered operator, so that a graph can have it; laid out like the weight
            name = name_in_graph(ctx.group)
            dweight = torch.ops.mkernel.all_gather_matmul_weight_grad(own, rows, True, name, None).t()
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dx, dweight, dbias, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
        recipe: str, group: Any, dim: int | None, reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.group, ctx.dim, ctx.dtype = group, dim, x.dtype
        x, weight, scale, scale_w = _quantized(x, weight, recipe)
        ctx.save_for_backward(x, weight, scale, scale_w)
        operands = x, weight.t(), scale, _transposed(scale_w)
        given: dict[str, Any] = dict(
            bias=None if bias is None else bias.detach(), residual=None if residual is None else residual.detach(),
            out_dtype=ctx.dtype, reduce_dtype=reduce_dtype, group=group,
        )  # fmt: skip
        if dim is None:
            return scaled_matmul_all_reduce(*operands, **given)
        return scaled_matmul_reduce_scatter(*operands, **given, scatter_dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, scale, scale_w = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        numbers, everyones, dx = dequantize(weight, scale_w, ctx.dtype), grad, None
        if ctx.dim is None:  # the same on every rank
            dx = grad @ numbers if needs_x else None
        elif needs_x or needs_weight or needs_bias:
            dx, everyones = all_gather_matmul(
                dense(grad), numbers, group=ctx.group, gather_dim=ctx.dim, return_gathered=True
            )
        rows = everyones.reshape(-1, everyones.shape[-1])
        dweight = rows.t() @ dequantize(x, scale, ctx.dtype).reshape(-1, x.shape[-1]) if needs_weight else None
        dbias = rows.sum(0) if needs_bias else None
        return dx, dweight, dbias, grad if needs_residual else None, None, None, None, None
