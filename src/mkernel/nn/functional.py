"""Linear layers of which every rank has a part, as functions; the modules of this package call them.

All of them are differentiable. A gradient that all ranks contribute to is summed in the backward pass, by the operator
that also computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mkernel.nn import fp8 as in_fp8
from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.ops.library import autocast, check_dim
from mkernel.ops.reduce import matmul_all_reduce, matmul_reduce_scatter
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Any = None,
    sequence_parallel: bool = True,
    sequence_dim: int = 0,
    save: str = "sharded",
    fp8: str | None = None,
    fp8_gradients: torch.dtype | None = None,
) -> torch.Tensor:
    """A linear layer whose output features are divided among the ranks.

    Args:
        x: [..., in_features]. With sequence_parallel, this rank's part of the sequence; otherwise the whole input, the
            same on every rank.
        weight: [out_features/world, in_features], this rank's rows of the plain layer's weight.
        bias: [out_features/world].
        sequence_dim: the dimension of x in which the ranks' parts of the sequence are gathered.
        save: what the backward pass keeps of the gathered input, see `mk.all_gather_matmul`. With fp8, "sharded".
        fp8: quantize x and weight, and multiply them in fp8: "TensorWise", "RowWise" or "BlockWise", for what shares a
            scale (see `mkernel.nn.fp8`). None: no.
        fp8_gradients: torch.float8_e5m2 or torch.float8_e4m3fn: also quantize the gradient of the result, to this
            dtype, and multiply it by the weight in fp8. None: gradients are computed in the dtype of x.

    Returns:
        [..., out_features/world], for the whole sequence.
    """
    return column_parallel_linears(
        x, [weight], [bias], group=group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, save=save,
        fp8=fp8, fp8_gradients=fp8_gradients,
    )[0]  # fmt: skip


def column_parallel_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    group: Any = None,
    sequence_parallel: bool = True,
    sequence_dim: int = 0,
    save: str = "sharded",
    fp8: str | None = None,
    fp8_gradients: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """`column_parallel_linear` with several weights and the same input: it is gathered once, and its gradient summed
    once. In fp8, the weights are quantized as one."""
    check_fp8(fp8, fp8_gradients, save)
    x, *others = autocast(x, *weights, *biases)
    weights, biases = others[: len(weights)], others[len(weights) :]
    if fp8 is not None:
        gathered = check_dim("sequence_dim", sequence_dim, x, "x") if sequence_parallel else None
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        y = in_fp8.column_parallel_linear(
            x, weight, _side_by_side(weights, biases), fp8, fp8_gradients, group, gathered
        )
        return [y] if len(weights) == 1 else list(y.split([len(weight) for weight in weights], -1))
    if sequence_parallel:
        dim = check_dim("sequence_dim", sequence_dim, x, "x")
        if len(weights) == 1:
            return [all_gather_matmul(x, weights[0].t(), bias=biases[0], group=group, gather_dim=dim, save=save)]
        products = all_gather_matmul(x, [weight.t() for weight in weights], group=group, gather_dim=dim, save=save)
        return [product if bias is None else product + bias for product, bias in zip(products, biases)]
    if not (torch.is_grad_enabled() and x.requires_grad):
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
    if len(weights) == 1:
        return [_ReplicatedLinear.apply(x, weights[0], biases[0], group)]
    return list(_ReplicatedLinears.apply(x, group, *weights, *biases))


def check_fp8(fp8: str | None, fp8_gradients: torch.dtype | None, save: str = "sharded") -> None:
    """Refuse options that do not go together."""
    in_fp8.check_recipe(fp8, fp8_gradients)
    if fp8 is not None and save != "sharded":
        raise ArgumentError(f"fp8 needs save='sharded', got {save!r}: the input is kept in fp8, and only this rank's")


def _side_by_side(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The biases of several layers as one; zeros for those that have none."""
    if all([bias is None for bias in biases]):
        return None
    return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases)])


class _ReplicatedLinear(torch.autograd.Function):
    """F.linear of an input that is the same on every rank. Its gradient is the sum over all ranks of grad @ weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = matmul_all_reduce(grad, weight, group=ctx.group)
        return dx, *_local_gradients(x, grad, needs_weight, needs_bias), None


class _ReplicatedLinears(torch.autograd.Function):
    """The same for several weights: one sum over the ranks, of the product with all of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, *parameters: Any) -> tuple[torch.Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.group = group
        return tuple([F.linear(x, weight, bias) for weight, bias in zip(weights, biases)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        count = len(weights)
        dx = matmul_all_reduce(torch.cat(grads, -1), torch.cat(weights), group=ctx.group)
        needs = ctx.needs_input_grad[2:]
        own = [_local_gradients(x, grads[i], needs[i], needs[count + i]) for i in range(count)]
        return (dx, None, *[dweight for dweight, _ in own], *[dbias for _, dbias in own])


def _local_gradients(x: torch.Tensor, grad: torch.Tensor, needs_weight: bool, needs_bias: bool) -> tuple[Any, Any]:
    """The gradients of weight and bias, which need no communication: every rank has all rows."""
    grads = grad.reshape(-1, grad.shape[-1])
    dweight = grads.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
    return dweight, grads.sum(0) if needs_bias else None


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    group: Any = None,
    sequence_parallel: bool = True,
    sequence_dim: int = 0,
    reduce_dtype: torch.dtype | None = None,
    fp8: str | None = None,
    fp8_gradients: torch.dtype | None = None,
) -> torch.Tensor:
    """A linear layer whose input features are divided among the ranks.

    Args:
        x: [..., in_features/world], this rank's features of the whole input.
        weight: [out_features, in_features/world], this rank's columns of the plain layer's weight.
        bias: [out_features], the same on every rank; added once.
        residual: added to the result; it has the shape of the result.
        sequence_dim: with sequence_parallel, the dimension of x that is divided among the ranks.
        reduce_dtype: see `mk.matmul_reduce_scatter`.
        fp8, fp8_gradients: as in `column_parallel_linear`.

    Returns:
        [..., out_features]: with sequence_parallel, this rank's part of the sequence; otherwise all of it, the same on
        every rank. The backward pass then expects the same gradient on every rank, as it is if all ranks compute the
        same loss.
    """
    check_fp8(fp8, fp8_gradients)
    x, weight, bias, residual = autocast(x, weight, bias, residual)
    if fp8 is not None:
        dim = check_dim("sequence_dim", sequence_dim, x, "x") if sequence_parallel else None
        return in_fp8.row_parallel_linear(
            x, weight, bias, residual, fp8, fp8_gradients, group, dim, reduce_dtype
        )  # fmt: skip
    if sequence_parallel:
        return matmul_reduce_scatter(
            x, weight.t(), bias=bias, residual=residual, reduce_dtype=reduce_dtype, group=group,
            scatter_dim=check_dim("sequence_dim", sequence_dim, x, "x"),
        )  # fmt: skip
    return matmul_all_reduce(x, weight.t(), bias=bias, residual=residual, reduce_dtype=reduce_dtype, group=group)


def gather_features(x: torch.Tensor, *, group: Group) -> torch.Tensor:
    """All ranks' features: [..., features/world] -> [..., features], the same on every rank.

    An all-gather of its own, with which nothing overlaps, and a copy into place. The backward pass expects the same
    gradient on every rank, and takes this rank's features of it, without communication.
    """
    return _GatherFeatures.apply(x, group)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.features, ctx.first = x.shape[-1], group.rank * x.shape[-1]
        rows = x.reshape(-1, x.shape[-1])
        # without columns to multiply by, all_gather_matmul only gathers
        _, gathered = all_gather_matmul(rows.t(), rows.new_empty(rows.shape[0], 0), group=group, return_gathered=True)
        return gathered.t().reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad.narrow(-1, ctx.first, ctx.features), None
