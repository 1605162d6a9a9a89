"""torch.ops.mkernel.moe_dispatch_scaled_matmul: with the group by name, and tables for a handle (registration.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.routing import table_words
from mkernel.ops.moe.sizes import row_stride_of

OP = "moe_dispatch_scaled_matmul"
E4M3 = torch.float8_e4m3fn
SCHEMA = (
    "(Tensor x, Tensor topk_ids, Tensor w, Tensor? scale_x, Tensor scale_w, Tensor? bias, str group, int[] numbers, "
    "ScalarType out_dtype, bool use_fast_accum, int[]? config=None, str? recipe_x=None, ScalarType? dtype_x=None) "
    "-> (Tensor, Tensor)"
)


FFN = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, Tensor? scale_x, "
    "Tensor scale_gate_up, Tensor scale_down, str group, int? capacity, int? max_tokens, str activation"
)


def define_ffn(function: Callable[..., torch.Tensor]) -> None:
    """Register scaled_moe_ffn, which `function` computes."""

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
        )  # fmt: skip

    def run_into(*arguments: Any) -> None:
        run(*arguments)

    library.define(
        "scaled_moe_ffn", f"({FFN}, int[]? config=None, str? recipe_x=None, ScalarType? dtype_x=None) -> Tensor",
        run, lambda x, *_, **more: x.new_empty(x.shape, dtype=torch.bfloat16),
        backward=library.no_backward("scaled_moe_ffn"),
    )  # fmt: skip
    library.define(
        "scaled_moe_ffn_out",
        f"({FFN}, int[]? config, str? recipe_x, ScalarType? dtype_x, Tensor(a!) out) -> ()",
        run_into, lambda *_: None,
    )  # fmt: skip


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
        k, experts, capacity, max_tokens, _, tile_m = numbers
        out = w.shape[2]
        words = table_words(library.size_of(group), max_tokens, k, experts, capacity)
        # as `empty_rows` makes it
        y = x.new_empty(tile_m + capacity, row_stride_of(out, out_dtype), dtype=out_dtype)[tile_m:, :out]
        return y, x.new_empty(words, dtype=torch.int32)

    library.define(OP, SCHEMA, run, fake, backward=library.no_backward(OP))
