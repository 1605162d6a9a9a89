"""mkernel behind `torch.ops.symm_mem.fused_all_gather_scaled_matmul` and `fused_scaled_matmul_reduce_scatter`: fp8.

`mkernel.integrations.symm_mem.enable()` registers both. Scales of A are those that PyTorch takes: one; one for each of
this rank's rows, which are gathered with them; or one for each row of all ranks, of which this rank has all. Besides,
scales of blocks of 1 x 128, with those of 128 x 128 of B. What is written there on dimensions, and on what decides
between mkernel and PyTorch, holds here, too.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from mkernel.integrations import calls
from mkernel.integrations.symm_mem import (
    TORCH,
    as_rows,
    check_dimension,
    fall_back,
    from_rows,
    why_not_here,
)
from mkernel.ops.all_gather_matmul.scaled import all_gather_scaled_matmul
from mkernel.ops.reduce import scaled_matmul_reduce_scatter
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, named
from mkernel.runtime.quantization import multiply_quantized
from mkernel.runtime.scaling import FP8, RESULTS

GATHER, SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"


def fused_all_gather_scaled_matmul(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], A_scale: torch.Tensor, B_scales: list[torch.Tensor],
    gather_dim: int, group_name: str, biases: list[torch.Tensor | None], result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any], use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """The all-gather of A along a dimension, and its products with all Bs."""
    check_dimension("gather_dim", gather_dim, "A_shard", A_shard)
    given: tuple[list[Any], ...] = (B_scales, biases, result_scales, out_dtypes, use_fast_accum)
    for name, values in zip(("B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum"), given):
        if len(values) != len(Bs):
            raise ArgumentError(f"{name} must have one entry for each of the {len(Bs)} Bs, got {len(values)}")
    dtypes = importlib.import_module(TORCH)._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    why = _why_not(A_shard, group_name, dtypes, result_scales)
    if not Bs:
        why = "Bs is empty: there is nothing to multiply"
    elif gather_dim == A_shard.dim() - 1:
        why = "gather_dim is the last dimension of A: each rank's columns meet other rows of B"
    if why:
        return fall_back(GATHER, why, A_shard.device)(
            A_shard, Bs, A_scale, B_scales, gather_dim, group_name, *given[1:]
        )
    group = named(group_name)
    rows, leading = as_rows(A_shard, gather_dim)
    own = _own_part(A_scale, A_shard, gather_dim, group)
    # the scale of a single row may be another one on every rank
    is_common = own.numel() == 1 and own.shape[:-1] != A_shard.shape[:-1]
    scales = _of_rows(own, A_shard, gather_dim)
    largest = max(range(len(Bs)), key=lambda index: Bs[index].numel())
    products: list[Any] = [None] * len(Bs)
    gathered = everyones = torch.empty(0)
    for index in sorted(range(len(Bs)), key=lambda index: index != largest):
        B, B_scale, dtype = Bs[index], B_scales[index], dtypes[index]
        fast = use_fast_accum[index] and not _has_blocks(scales)
        bias = None if biases[index] is None else biases[index].to(dtype)  # type: ignore[union-attr]
        if index == largest:
            products[index], gathered, everyones = all_gather_scaled_matmul(
                rows, B, scales, B_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast, group=group,
                return_gathered=True,
            )  # fmt: skip
        else:
            its = scales.reshape(()) if B_scale.numel() == 1 and is_common else everyones
            products[index] = multiply_quantized(
                gathered, B, its, B_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast
            )
    calls.count_fused(f"symm_mem.{GATHER}")
    leading[0] *= group.size
    results = [from_rows(product, leading, gather_dim) for product in products]
    return from_rows(gathered, leading, gather_dim), results


def fused_scaled_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor, reduce_op: str,
    orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int, group_name: str,
    output_shape: list[int] | None = None, bias: torch.Tensor | None = None, result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The sum, or the average, of all ranks' A @ B, of which this rank gets its part of a dimension."""
    shape = [*A.shape[:-1], B.shape[-1]] if output_shape is None else list(output_shape)
    why = _why_not(A, group_name, [out_dtype], [result_scale])
    if reduce_op not in ("sum", "avg"):
        why = f"reduce_op is {reduce_op!r}: sum and avg are fused"
    elif reduce_op == "avg" and out_dtype == torch.float16:
        why = "the average of torch.float16: the sum before it can overflow"
    elif B.dim() != 2:
        why = f"B has {B.dim()} dimensions: it must be a matrix"
    elif bias is not None:
        why = "a bias, which PyTorch adds to the product of every rank"
    elif orig_scatter_dim == len(shape) - 1:
        why = "the scatter dimension is the last one: scales of fp8 are those of the rows of A"
    if why:
        return fall_back(SCATTER, why, A.device)(
            A, B, A_scale, B_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape, group_name, shape,
            bias, result_scale, out_dtype, use_fast_accum,
        )  # fmt: skip
    group = named(group_name)
    viewed = A.reshape(*shape[:-1], A.shape[-1])
    check_dimension("orig_scatter_dim", orig_scatter_dim, "the result", viewed)
    if shape[orig_scatter_dim] % group.size:
        raise ArgumentError(
            f"dimension {orig_scatter_dim} of the result has size {shape[orig_scatter_dim]}: reduce-scatter needs a "
            f"multiple of the group's {group.size} ranks"
        )
    if A_scale.numel() != 1 and A_scale.shape[:-1] == A.shape[:-1]:
        A_scale = A_scale.reshape(*shape[:-1], A_scale.shape[-1])
    rows, leading = as_rows(viewed, orig_scatter_dim)
    leading[0] //= group.size
    product = scaled_matmul_reduce_scatter(
        rows, B, _of_rows(A_scale, viewed, orig_scatter_dim), B_scale, out_dtype=out_dtype,
        use_fast_accum=use_fast_accum and not _has_blocks(A_scale), group=group,
    )  # fmt: skip
    if reduce_op == "avg":
        product = product.div_(group.size)
    calls.count_fused(f"symm_mem.{SCATTER}")
    return from_rows(product, leading, orig_scatter_dim).contiguous()


def _why_not(A: torch.Tensor, group_name: str, out_dtypes: list[Any], result_scales: list[Any]) -> str:
    """Why mkernel has no kernel for a call with this A, or "". Only by what is the same on all ranks."""
    if A.dtype not in FP8:
        return f"A is {A.dtype}: {', '.join(map(str, FP8))} are fused"
    for dtype in out_dtypes:
        if dtype not in RESULTS:
            return f"out_dtype is {dtype}: {', '.join(map(str, RESULTS))} are fused"
    if any(scale is not None for scale in result_scales):
        return "a result_scale: scales of results are not fused"
    return why_not_here(A, group_name)


def _own_part(A_scale: torch.Tensor, A_shard: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The scales of this rank's rows, of those of all ranks if that is what there is."""
    size = A_shard.shape[dim]
    if A_scale.numel() == 1 or A_scale.dim() != A_shard.dim() or A_scale.shape[dim] == size:
        return A_scale
    return A_scale.narrow(dim, group.rank * size, size) if A_scale.shape[dim] == group.size * size else A_scale


def _of_rows(scale: torch.Tensor, A: torch.Tensor, dim: int) -> torch.Tensor:
    """Scales of A for its `as_rows`; others as they are, to be refused on all ranks."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.shape[:-1] != A.shape[:-1]:
        return scale
    return as_rows(scale, dim)[0]


def _has_blocks(A_scale: torch.Tensor) -> bool:
    """Sums over blocks leave the tensor cores whether or not accumulation is to be fast."""
    return A_scale.dim() > 0 and A_scale.shape[-1] > 1
