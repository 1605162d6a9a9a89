"""Quantizes activations and weights to fp8, in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.scaling import FP8, SIDE, SMALLEST, blocks_of, for_library

RECIPES = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")


def quantize(
    x: torch.Tensor, recipe: Any = "RowWise", *, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Quantize a tensor to fp8 such that the largest element that shares a scale becomes the largest number of fp8.

    What cannot be represented is never hidden: NaN and infinity make all elements that share their scale NaN. Zeros
    alone have the scale 1. No scale is less than 2**-126, so that no GPU takes one for 0.

    Activations a [..., k] and weights w [n, k], as torch.nn.Linear has them, are quantized alike, along k. Then

        mk.scaled_matmul_all_reduce(a8, w8.t(), scale_a, scale_w.t())

    multiplies a by w.t().

    Args:
        x: [..., rows, k] in bf16, fp16 or fp32.
        recipe: what shares a scale: a member of torch.nn.functional.ScalingType, or its name. "TensorWise": all
            elements. "RowWise": k elements of a row. "BlockWise1x128", for activations: 128 elements of a row.
            "BlockWise128x128", for weights: 128 elements of 128 rows.
        dtype: torch.float8_e4m3fn, or torch.float8_e5m2, which has more range and less precision, for gradients.

    Returns:
        The quantized tensor, and its scales in fp32, by which it must be multiplied: of shape [], [..., rows, 1],
        [..., rows, k/128] or [..., rows/128, k/128], rounded up.
    """
    name = getattr(recipe, "name", recipe)
    if name not in RECIPES:
        raise ArgumentError(f"recipe must be one of {', '.join(RECIPES)}, got {name}")
    if dtype not in FP8:
        raise ArgumentError(f"dtype must be {' or '.join(map(str, FP8))}, got {dtype}")
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        got = str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ArgumentError(f"x must be a tensor of floating-point numbers, got {got}")
    if x.dim() < (2 if name == "BlockWise128x128" else 1):
        raise ArgumentError(f"x has shape {tuple(x.shape)}, which has too few dimensions for {name}")
    if name == "TensorWise":
        largest = x.abs().amax() if x.numel() else x.new_zeros(())
    elif name == "RowWise":
        largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    else:
        largest = _largest_of_blocks(x, 1 if name == "BlockWise1x128" else SIDE)
    # Products, in place of quotients, so that GPUs, on which PyTorch multiplies by the reciprocal of a number, give the
    # same bits. The largest element may exceed the largest number of fp8 by some 2**-22 of it, and is rounded to it.
    scale = (largest.float() * (1 / torch.finfo(dtype).max)).clamp_min(SMALLEST)
    scale = torch.where(largest == 0, 1.0, scale)
    return (x.float() * _spread(scale.reciprocal(), x.shape)).to(dtype), scale


def dequantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that an fp8 tensor with scales stands for. The scales are those of any recipe of `quantize`, or what
    an operator takes as scale_a for a, or as scale_b for b."""
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) * _spread(scale.to(wide), x.shape)).to(dtype)


def multiply_quantized(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    """a [..., k] @ b [k, n] on this rank alone: the library's product where it takes such operands, and otherwise that
    of what they stand for, in fp32. The library mixes no recipes, and takes no blocks on CPUs; on GPUs, results of
    others than TensorWise are bf16."""
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    of_rows = scale_a if scale_a.numel() == 1 else scale_a.reshape(rows.shape[0], scale_a.shape[-1])
    if scale_a.numel() == 1 != scale_b.numel():
        of_rows = scale_a.reshape(1, 1).expand(rows.shape[0], 1)
    elif scale_a.numel() != 1 == scale_b.numel():
        scale_b = scale_b.reshape(1, 1).expand(1, b.shape[1])
    blocks = of_rows.dim() > 1 and of_rows.shape[1] > 1
    alike = of_rows.numel() == scale_b.numel() == 1 or (of_rows.shape[-1:] == (1,) and scale_b.shape == (1, b.shape[1]))
    suits = _suits_library(rows, b) and (of_rows.numel() == 1 or not a.is_cuda or out_dtype == torch.bfloat16)
    if suits and (alike or (blocks and a.is_cuda)):
        scales = for_library(of_rows, blocks), for_library(scale_b, blocks)
        y = torch._scaled_mm(rows, b, *scales, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    else:
        y = (dequantize(rows, of_rows) @ dequantize(b, scale_b)).to(out_dtype)
    y = y.view(*a.shape[:-1], b.shape[1])
    return y if bias is None else y.add_(bias)


def _suits_library(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Does the library multiply such matrices?"""
    if not a.is_cuda:
        return a.numel() > 0 and b.numel() > 0
    laid_out = a.is_contiguous() and b.t().is_contiguous()
    return laid_out and a.numel() > 0 and a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0


def quantize_operands(
    a: torch.Tensor, w: torch.Tensor, *, tensorwise: bool = False, blockwise: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """a [m, k] and w [n, k] as operands of a product: (a, b, scale_a, scale_b), where b is w.t(). Scales are those of
    rows and columns, unless others are asked for."""
    if tensorwise and blockwise:
        raise ArgumentError("scales cannot be tensorwise and blockwise at once")
    of_a, of_w = ("BlockWise1x128", "BlockWise128x128") if blockwise else ("RowWise", "RowWise")
    a, scale_a = quantize(a, "TensorWise" if tensorwise else of_a)
    w, scale_w = quantize(w, "TensorWise" if tensorwise else of_w)
    return a, w.t(), scale_a, scale_w if tensorwise else scale_w.t()


def empty_operands(
    a: torch.Tensor, w: torch.Tensor, *, tensorwise: bool = False, blockwise: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `quantize_operands` would return, with any values: for calls that are only compiled."""
    (m, k), n = a.shape, w.shape[0]
    of_a, of_w = ((m, blocks_of(k)), (blocks_of(n), blocks_of(k))) if blockwise else ((m, 1), (n, 1))
    scales = [a.new_empty(() if tensorwise else shape, dtype=torch.float32) for shape in (of_a, of_w)]
    b = w.new_empty(n, k, dtype=torch.float8_e4m3fn).t()
    return a.new_empty(m, k, dtype=torch.float8_e4m3fn), b, scales[0], scales[1] if tensorwise else scales[1].t()


def _largest_of_blocks(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The largest absolute value of each block of `rows` rows and SIDE columns."""
    columns, height = x.shape[-1], x.shape[-2] if rows > 1 else 1
    if not x.numel():
        outer = x.shape[:-1] if rows == 1 else (*x.shape[:-2], blocks_of(height))
        return x.new_zeros(*outer, blocks_of(columns))
    below = (0, blocks_of(height) * rows - height) if rows > 1 else ()
    padded = torch.nn.functional.pad(x.abs(), (0, blocks_of(columns) * SIDE - columns, *below))
    largest = padded.unflatten(-1, (-1, SIDE)).amax(-1)
    return largest.unflatten(-2, (-1, rows)).amax(-2) if rows > 1 else largest


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each element of a tensor of this shape, or of what broadcasts to it."""
    if scale.numel() == 1:
        return scale.reshape(())
    for dimension in (-1, -2):
        size = shape[dimension]
        if scale.dim() >= -dimension and scale.shape[dimension] not in (1, size):
            scale = scale.repeat_interleave(SIDE, dimension).narrow(dimension, 0, size)
    return scale
