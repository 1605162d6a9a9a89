"""Linear layers of which every rank has a part, multiplied in fp8: what `mkernel.nn.functional` does with `fp8=`.

This is also how these operators with scales are differentiated. They multiply quantized operands, and quantizing has no
derivative, so they have no gradients themselves. These functions quantize and multiply, and their gradients treat the
quantization as the identity (the straight-through estimator).

Forward: every pass quantizes input and weight along the features that are multiplied. Let x8 and w8 be the dequantized
operands; then y = x8 @ w8.t().

Backward, in one of two ways:

- In the dtype of the input (`gradients=None`): dx = dy @ w8, and dw = dy.t() @ x8.
- In fp8, by the same recipe (`gradients` is an fp8 dtype): dx = dy8 @ w8'. dy8 is dy, quantized along the output
  features, along which w8' is the weight, too. With scales of blocks or of the tensor, it is the numbers of w8; with
  those of rows, others. dw and the gradient of the bias stay in the dtype of the input: their sums are over rows, which
  have scales of their own. But where all ranks' dy is gathered, it comes in fp8: dw = dy8.t() @ x8.

| layer | forward | dx | dw |
|---|---|---|---|
| column, sequence | AG + GEMM | GEMM + RS | AG (of x) + GEMM |
| column | a local GEMM | GEMM + AR | local |
| row, sequence | GEMM + RS | AG (of dy) + GEMM | local, from gathered dy |
| row | GEMM + AR | a local GEMM | local |

The forward pass keeps x in fp8, half of what the layers in bf16 keep, and the weight in fp8 or, with fp8 gradients,
unquantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.ops.all_gather_matmul.scaled import all_gather_scaled_matmul
from mkernel.ops.library import as_rows, dense
from mkernel.ops.reduce import (
    matmul_all_reduce,
    matmul_reduce_scatter,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group_names import name_in_graph
from mkernel.runtime.quantization import dequantize, multiply_quantized, quantize
from mkernel.runtime.scaling import FP8

# of what has rows (input, gradient) and of the weight
RECIPES = {
    "TensorWise": ("TensorWise", "TensorWise"),
    "RowWise": ("RowWise", "RowWise"),
    "BlockWise": ("BlockWise1x128", "BlockWise128x128"),
}


def check_recipe(recipe: str | None, gradients: torch.dtype | None) -> None:
    """Reject an unknown recipe, and gradients in a dtype other than fp8 or of a layer that is not in fp8."""
    if recipe is not None and recipe not in RECIPES:
        raise ArgumentError(f"fp8 must be None or one of {', '.join(RECIPES)}; got {recipe!r}")
    if gradients is None:
        return
    if gradients not in FP8:
        raise ArgumentError(f"fp8_gradients must be None, {' or '.join(map(str, FP8))}; got {gradients!r}")
    if recipe is None:
        raise ArgumentError(f"fp8_gradients={gradients} needs a recipe: pass fp8 as well, one of {', '.join(RECIPES)}")


def column_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str, gradients: torch.dtype | None,
    group: Any, dim: int | None,
) -> torch.Tensor:  # fmt: skip
    """dim: the dimension of x in which the ranks' parts are gathered; None: x is the same on every rank."""
    return _Column.apply(x, weight, bias, recipe, gradients, group, dim)


def row_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, recipe: str,
    gradients: torch.dtype | None, group: Any, dim: int | None, reduce_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    """dim: the dimension of x that is divided among the ranks; None: the result is the same on every rank."""
    return _Row.apply(x, weight, bias, residual, recipe, gradients, group, dim, reduce_dtype)


def _transposed(scale: torch.Tensor) -> torch.Tensor:
    return scale.t() if scale.dim() else scale


def _quantize(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: str, gradients: torch.dtype | None
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The operands of x @ weight.t() in fp8. Keeps what the backward pass needs."""
    of_x, of_weight = RECIPES[recipe]
    narrow, scale = quantize(x.detach(), of_x)
    its_weight, scale_w = quantize(weight.detach(), of_weight)
    ctx.dtype, ctx.recipe, ctx.gradients = x.dtype, recipe, gradients
    ctx.save_for_backward(narrow, scale, *((its_weight, scale_w) if gradients is None else (weight,)))
    return narrow, its_weight.t(), scale, _transposed(scale_w)


def _input(ctx: Any) -> torch.Tensor:
    """What the quantized input stands for."""
    narrow, scale = ctx.saved_tensors[:2]
    return dequantize(narrow, scale, ctx.dtype)


def _times_weight(
    ctx: Any, grad: torch.Tensor, plain: Callable[..., Any], scaled: Callable[..., Any], **more: Any
) -> Any:  # fmt: skip
    """grad @ weight, by one of two operators, of which the second one is for fp8."""
    weight = ctx.saved_tensors[2]
    if ctx.gradients is None:
        return plain(dense(grad), dequantize(weight, ctx.saved_tensors[3], ctx.dtype), **more)
    of_grad, of_weight = RECIPES[ctx.recipe]
    narrow, scale = quantize(grad, of_grad, dtype=ctx.gradients)
    # [in_features, out_features], because tensor cores read fp8 along what is multiplied
    turned, scale_w = quantize(weight.t(), of_weight)
    operands = dense(narrow), turned.contiguous().t(), scale, _transposed(scale_w)
    return scaled(*operands, out_dtype=ctx.dtype, **more)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str,
        gradients: torch.dtype | None, group: Any, dim: int | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.group, ctx.dim = group, dim
        operands = _quantize(ctx, x, weight, recipe, gradients)
        its_bias = None if bias is None else bias.detach()
        if dim is None:
            return multiply_quantized(*operands, bias=its_bias, out_dtype=ctx.dtype)
        return all_gather_scaled_matmul(*operands, bias=its_bias, out_dtype=ctx.dtype, group=group, gather_dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dim, dx, dweight = ctx.dim, None, None
        if needs_x and dim is None:
            dx = _times_weight(ctx, grad, matmul_all_reduce, scaled_matmul_all_reduce, group=ctx.group)
        elif needs_x:
            operators = matmul_reduce_scatter, scaled_matmul_reduce_scatter
            dx = _times_weight(ctx, grad, *operators, group=ctx.group, scatter_dim=dim)
        rows = dense(as_rows(grad, dim or 0))
        if needs_weight and dim is None:
            dweight = rows.t() @ as_rows(_input(ctx))
        elif needs_weight:
            # the registered operator, so that a graph can have it; laid out like the weight
            name = name_in_graph(ctx.group)
            dweight = torch.ops.mkernel.all_gather_matmul_weight_grad(
                as_rows(_input(ctx), dim), rows, True, name, None
            ).t()
        return dx, dweight, rows.sum(0) if needs_bias else None, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
        recipe: str, gradients: torch.dtype | None, group: Any, dim: int | None, reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.group, ctx.dim = group, dim
        operands = _quantize(ctx, x, weight, recipe, gradients)
        given: dict[str, Any] = dict(
            bias=None if bias is None else bias.detach(), residual=None if residual is None else residual.detach(),
            out_dtype=ctx.dtype, reduce_dtype=reduce_dtype, group=group,
        )  # fmt: skip
        if dim is None:
            return scaled_matmul_all_reduce(*operands, **given)
        return scaled_matmul_reduce_scatter(*operands, **given, scatter_dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        everyones, dx = grad, None
        if ctx.dim is None:  # the same on every rank
            dx = _times_weight(ctx, grad, torch.matmul, multiply_quantized) if needs_x else None
        elif needs_x or needs_weight or needs_bias:
            operators = all_gather_matmul, all_gather_scaled_matmul
            given = dict(group=ctx.group, gather_dim=ctx.dim, return_gathered=True)
            dx, everyones, *scales = _times_weight(ctx, grad, *operators, **given)
            if scales:
                everyones = dequantize(everyones, scales[0], ctx.dtype)
        rows = everyones.reshape(-1, everyones.shape[-1])
        dweight = rows.t() @ as_rows(_input(ctx)) if needs_weight else None
        dbias = rows.sum(0) if needs_bias else None
        return dx, dweight, dbias, grad if needs_residual else None, None, None, None, None, None
