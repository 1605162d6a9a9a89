"""The experts of a mixture-of-experts layer in fp8: what `mkernel.nn.ParallelExperts` does with `fp8=`.

As in fp8.py, gradients begin at what is quantized, and pass through the quantization as if it changed nothing.

Forward: each pass quantizes the matrices, along the features that are multiplied, and the kernel quantizes tokens and
inner activations (`mk.scaled_moe_ffn`). Those of the second GEMM have scales of blocks, whatever those of tokens are,
and so does its matrix.

Backward, in the dtype of the input: `mk.moe_ffn`'s, of what the fp8 of tokens and matrices stands for, along the
routing of the forward pass (ops/moe/scaled_registration.py). What is kept for it: the tokens as they were, which the
router keeps, too; the matrices in fp8; and the tables of the routing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mkernel.nn.fp8 import RECIPES
from mkernel.ops import library
from mkernel.ops.moe.scaled_ffn import scaled_moe_ffn, scaled_moe_ffn_kept
from mkernel.ops.moe.scaled_registration import E4M3, ffn_gradients, stands_for
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.quantization import dequantize, quantize
from mkernel.runtime.scaling import SIDE

OF_EXPERTS = ("RowWise", "BlockWise")  # of RECIPES; TensorWise, a kernel would read all tokens before it sends one
OF_DOWN = "BlockWise128x128"


def check_experts_recipe(recipe: str | None, bias: bool, save: str, intermediate_size: int) -> None:
    """Refuse what is no recipe of experts, and what they do not have in fp8."""
    if recipe is None:
        return
    if recipe not in OF_EXPERTS:
        raise ArgumentError(f"fp8 must be None or one of {', '.join(OF_EXPERTS)} for experts; got {recipe!r}")
    if bias:
        raise ArgumentError("fp8 needs bias=False: mk.scaled_moe_ffn adds no biases")
    if save != "inputs":
        raise ArgumentError(f"fp8 needs save='inputs', got {save!r}: activations are not kept in fp8")
    if recipe == "BlockWise" and intermediate_size % SIDE:
        raise ArgumentError(
            f"intermediate_size is {intermediate_size}, but must be a multiple of {SIDE} with fp8='BlockWise', whose "
            f"blocks belong to gate or up; pass fp8='RowWise'"
        )


def moe_ffn(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, recipe: str,
    *, group: Any, capacity: int | None, max_tokens: int | None, activation: str,
) -> torch.Tensor:  # fmt: skip
    """`mk.moe_ffn` in fp8, with matrices that are quantized here. gate_up: [experts, 2*inter, hidden]; down: [experts,
    hidden, inter]. The result has the dtype of x, but the precision of bf16."""
    (x,) = library.autocast(x)
    if library.needs_gradients(x, weights, gate_up, down):
        return _Experts.apply(x, ids, weights, gate_up, down, recipe, group, capacity, max_tokens, activation)
    (gate_up, scale_gate_up), (down, scale_down) = _quantized(gate_up, down, recipe)
    return scaled_moe_ffn(
        x, ids, weights, gate_up, down, None, scale_gate_up, scale_down, group=group, capacity=capacity,
        max_tokens=max_tokens, activation=activation, recipe_x=RECIPES[recipe][0],
    ).to(x.dtype)  # fmt: skip


def _quantized(gate_up: torch.Tensor, down: torch.Tensor, recipe: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The matrices of both GEMMs and their scales, as `mk.scaled_moe_ffn` takes them."""
    pairs = quantize(gate_up.detach(), RECIPES[recipe][1]), quantize(down.detach(), OF_DOWN)
    return [(matrices.transpose(1, 2), scales.transpose(1, 2)) for matrices, scales in pairs]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor,
        down: torch.Tensor, recipe: str, group: Any, capacity: int | None, max_tokens: int | None, activation: str,
    ) -> torch.Tensor:  # fmt: skip
        ctx.dtypes, ctx.activation, ctx.recipe = (gate_up.dtype, down.dtype), activation, RECIPES[recipe][0]
        (gate_up_8, scale_gate_up), (down_8, scale_down) = _quantized(gate_up, down, recipe)
        kept = scaled_moe_ffn_kept(
            x.detach(), ids, weights.detach(), gate_up_8, down_8, None, scale_gate_up, scale_down, group=group,
            capacity=capacity, max_tokens=max_tokens, activation=activation, recipe_x=ctx.recipe,
        )  # fmt: skip
        ctx.group, ctx.numbers = kept.group, kept.numbers
        ctx.save_for_backward(x, weights, gate_up_8, scale_gate_up, down_8, scale_down, kept.tables)
        return kept.out.to(x.dtype)  # so that the gradient of the result is not rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        x, weights, gate_up, scale_gate_up, down, scale_down, tables = ctx.saved_tensors
        needs = ctx.needs_input_grad
        tokens = stands_for(x, None, ctx.recipe, E4M3)
        matrices = dequantize(gate_up, scale_gate_up, x.dtype), dequantize(down, scale_down, x.dtype)
        dx, dweights, *others = ffn_gradients(
            dout, tokens, weights, *matrices, tables, ctx.group, ctx.numbers, ctx.activation, needs[3:5]
        )
        dgate_up, ddown = (
            gradient.transpose(1, 2).to(dtype) if needed else None
            for gradient, dtype, needed in zip(others, ctx.dtypes, needs[3:5])
        )
        return (
            dx if needs[0] else None, None, dweights if needs[2] else None, dgate_up, ddown, None, None, None, None,
            None,
        )  # fmt: skip
