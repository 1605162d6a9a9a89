"""torch.ops.mkernel.moe_dispatch_scaled_matmul and scaled_moe_ffn: with the group by name, and tables for a handle
(registration.py).

Gradients. Quantizing has no derivative, so gradients pass through it as if it changed nothing (the straight-through
estimator). They are those of the operators without scales, of what the fp8 stands for: matrices, and tokens, of which
the backward pass of the layer needs gate and up again, are dequantized, and everything goes along the handle in the
dtype of the tokens before they were quantized (bf16, if they were in fp8 already). Inner activations are not quantized
there. What is in fp8 has no gradient itself. Layers (nn/fp8_experts.py) have those of matrices before they are
quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.routing import table_words
from mkernel.ops.moe.sizes import row_stride_of
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.quantization import dequantize, quantize
from mkernel.runtime.scaling import FP8

OP, FFN_OP = "moe_dispatch_scaled_matmul", "scaled_moe_ffn"
E4M3 = torch.float8_e4m3fn
QUANTIZES = "int[]? config=None, str? recipe_x=None, ScalarType? dtype_x=None"
SCHEMA = (
    "(Tensor x, Tensor topk_ids, Tensor w, Tensor? scale_x, Tensor scale_w, Tensor? bias, str group, int[] numbers, "
    f"ScalarType out_dtype, bool use_fast_accum, {QUANTIZES}) -> (Tensor, Tensor)"
)
LAYER = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, Tensor? scale_x, "
    "Tensor scale_gate_up, Tensor scale_down, str group"
)
FFN = f"{LAYER}, int? capacity, int? max_tokens, str activation"


def dtype_of_gradients(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a backward pass computes. x: the tokens of the forward pass."""
    return torch.bfloat16 if x.dtype in FP8 else x.dtype


def refuse_gradients(x: Any, recipe_x: Any, **in_fp8: Any) -> None:
    """Refuse gradients of tensors in fp8 and of scales. Tokens have gradients if the kernel quantizes them."""
    for name, tensor in (({} if recipe_x is not None else {"x": x}) | in_fp8).items():
        if isinstance(tensor, torch.Tensor) and library.needs_gradients(tensor):
            raise ArgumentError(
                f"{name} requires grad, but neither what is in fp8 nor scales have gradients: pass {name}.detach(). "
                f"Tokens have gradients if the kernel quantizes them (recipe_x), and the matrices of "
                f"mk.nn.ExpertParallelMoE(fp8=...) have them"
            )


def stands_for(x: torch.Tensor, scale_x: torch.Tensor | None, recipe: str | None, dtype_x: torch.dtype) -> torch.Tensor:
    """The tokens that were multiplied: what their fp8 stands for."""
    narrow, scale = quantize(x, recipe, dtype=dtype_x) if scale_x is None else (x, scale_x)
    return dequantize(narrow, scale, dtype_of_gradients(x))


def ffn_gradients(
    dout: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    tables: torch.Tensor, group: str, numbers: Sequence[int], activation: str, needed: Sequence[bool],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The gradients of x, topk_weights, w_gate_up and w_down, of which those that are not needed are empty. The
    operands are what their fp8 stands for, in one dtype."""
    nothing = x.new_empty(0)
    return torch.ops.mkernel.moe_ffn_backward(
        library.dense(dout.to(x.dtype)), x, topk_weights, w_gate_up, w_down, None, None, tables, nothing, nothing,
        group, list(numbers), activation, [*needed, False, False],
    )[:4]  # fmt: skip


def _fake_tables(x: torch.Tensor, numbers: Sequence[int], group: str) -> torch.Tensor:
    k, experts, capacity, max_tokens = numbers[:4]
    return x.new_empty(table_words(library.size_of(group), max_tokens, k, experts, capacity), dtype=torch.int32)


# -- the layer


def define_ffn(function: Callable[..., tuple[torch.Tensor, Handle]]) -> None:
    """Register scaled_moe_ffn, of which `function` computes the result and the handle."""

    def run(
        x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
        w_down: torch.Tensor, scale_x: torch.Tensor | None, scale_gate_up: torch.Tensor, scale_down: torch.Tensor,
        group: str, capacity: int | None, max_tokens: int | None, activation: str,
        config: Sequence[int] | None = None, recipe_x: str | None = None, dtype_x: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return function(
            x, topk_ids, topk_weights, w_gate_up, w_down, scale_x, scale_gate_up, scale_down, group=group,
            capacity=capacity, max_tokens=max_tokens, activation=activation, out=out, config=library.decoded(config),
            recipe_x=recipe_x, dtype_x=dtype_x or E4M3,
        )[0]  # fmt: skip

    def run_kept(
        x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
        w_down: torch.Tensor, scale_x: torch.Tensor | None, scale_gate_up: torch.Tensor, scale_down: torch.Tensor,
        group: str, numbers: Sequence[int], activation: str, config: Sequence[int] | None = None,
        recipe_x: str | None = None, dtype_x: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out, handle = function(
            x, topk_ids, topk_weights, w_gate_up, w_down, scale_x, scale_gate_up, scale_down, group=group,
            activation=activation, config=library.decoded(config), recipe_x=recipe_x, dtype_x=dtype_x or E4M3,
            numbers=numbers,
        )  # fmt: skip
        return out, handle.memory

    def run_into(*arguments: Any) -> None:
        run(*arguments)

    library.define(
        FFN_OP, f"({FFN}, {QUANTIZES}) -> Tensor", run, lambda x, *_, **more: _fake_result(x),
        backward=library.no_backward("torch.ops.mkernel.scaled_moe_ffn, unlike mk.scaled_moe_ffn,"),
    )  # fmt: skip
    library.define(
        f"{FFN_OP}_out", f"({FFN}, int[]? config, str? recipe_x, ScalarType? dtype_x, Tensor(a!) out) -> ()",
        run_into, lambda *_: None,
    )  # fmt: skip
    library.define(
        f"{FFN_OP}_kept", f"({LAYER}, int[] numbers, str activation, {QUANTIZES}) -> (Tensor, Tensor)", run_kept,
        _fake_kept, save=_save_ffn, backward=_differentiate_ffn,
    )  # fmt: skip


def _fake_result(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _fake_kept(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, scale_x: Any, scale_gate_up: Any, scale_down: Any, group: str, numbers: Sequence[int],
    *more: Any, **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _fake_result(x), _fake_tables(x, numbers, group)


def _save_ffn(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.group, ctx.numbers, ctx.activation, _, ctx.recipe, ctx.dtype_x = inputs
    del tensors[1]  # ids are in the tables
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate_ffn(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """All ranks compute the gradients of tokens and weights, whichever of them a rank needs: it is one call."""
    x, weights, gate_up, down, scale_x, scale_gate_up, scale_down, tables = ctx.saved_tensors
    dtype, needs = dtype_of_gradients(x), ctx.needs_input_grad
    tokens = stands_for(x, scale_x, ctx.recipe, ctx.dtype_x or E4M3)
    matrices = dequantize(gate_up, scale_gate_up, dtype), dequantize(down, scale_down, dtype)
    found = ffn_gradients(
        dout, tokens, weights, *matrices, tables, ctx.group, ctx.numbers, ctx.activation, [False, False]
    )
    return found[0] if needs[0] else None, None, found[1] if needs[2] else None, *[None] * 11


# -- the dispatch


def define(function: Callable[..., tuple[torch.Tensor, Handle]]) -> None:
    """Register the operator, which `function` computes: the result, and the handle, of which tables are returned."""

    def run(
        x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor | None, scale_w: torch.Tensor,
        bias: torch.Tensor | None, group: str, numbers: Sequence[int], out_dtype: torch.dtype, use_fast_accum: bool,
        config: Sequence[int] | None = None, recipe_x: str | None = None, dtype_x: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        y, handle = function(
            x, topk_ids, w, scale_x, scale_w, group=group, bias=bias, out_dtype=out_dtype,
            use_fast_accum=use_fast_accum, config=library.decoded(config), recipe_x=recipe_x, dtype_x=dtype_x or E4M3,
            numbers=numbers,
        )  # fmt: skip
        return y, handle.memory

    def fake(
        x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, scale_x: Any, scale_w: Any, bias: Any, group: str,
        numbers: Sequence[int], out_dtype: torch.dtype, *more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        capacity, tile_m, out = numbers[2], numbers[5], w.shape[2]
        # as `empty_rows` makes it
        y = x.new_empty(tile_m + capacity, row_stride_of(out, out_dtype), dtype=out_dtype)[tile_m:, :out]
        return y, _fake_tables(x, numbers, group)

    library.define(OP, SCHEMA, run, fake, save=_save, backward=_differentiate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, w, _, scale_w, bias, ctx.group, ctx.numbers, *_ = inputs
    ctx.save_for_backward(x, w, scale_w, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, w, scale_w, bias, tables = ctx.saved_tensors
    dtype, needs = dtype_of_gradients(x), ctx.needs_input_grad
    dx, _, dbias = torch.ops.mkernel.moe_dispatch_matmul_backward(
        dy.to(dtype), x.to(dtype), dequantize(w, scale_w, dtype), tables, x.new_empty(0), ctx.group, ctx.numbers,
        [False, needs[5]], True, bias is not None,
    )  # fmt: skip
    return dx if needs[0] else None, *[None] * 4, dbias.to(bias.dtype) if needs[5] else None, *[None] * 7
