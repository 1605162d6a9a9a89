"""torch.ops.mkernel.all_gather_scaled_matmul and its variants: on matrices, with the group by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mkernel.ops import library
from mkernel.runtime.group_names import size_of
from mkernel.runtime.scaling import blocks_of

OP = "all_gather_scaled_matmul"
E4M3 = torch.float8_e4m3fn
Gathered = tuple[torch.Tensor, torch.Tensor]  # rows of all ranks, and their scales
ARGUMENTS = "Tensor a, Tensor b, Tensor? scale_a, Tensor scale_b, str group, ScalarType out_dtype, bool use_fast_accum"
QUANTIZES = "str? recipe_a=None, ScalarType? dtype_a=None"


def count_of(a: torch.Tensor, scale_a: torch.Tensor | None, recipe_a: str | None) -> int:
    """How many scales a gathered row has."""
    if scale_a is not None:
        return scale_a.shape[1] if scale_a.dim() == 2 else 1
    return 1 if recipe_a == "RowWise" else blocks_of(a.shape[1])


def _check_fake(a: torch.Tensor, b: torch.Tensor, recipe_a: str | None) -> None:
    if recipe_a is None:
        library.check_scaled_fake(a, b)
    else:
        library.check_scaled_fake(a.new_empty(a.shape, dtype=E4M3), b)


def _fake_gathered(
    a: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor, group: str, recipe_a: str | None,
    dtype_a: torch.dtype | None,
) -> Gathered:  # fmt: skip
    rows, dtype = size_of(group) * a.shape[0], a.dtype if recipe_a is None else dtype_a or E4M3
    return a.new_empty(rows, a.shape[1], dtype=dtype), scale_b.new_empty(rows, count_of(a, scale_a, recipe_a))


def define(function: Callable[..., tuple[torch.Tensor, Gathered | None]]) -> None:
    """Register the operator, which `function` computes: the result, and what was gathered if it is wanted."""

    def run(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor, group: str,
        out_dtype: torch.dtype, use_fast_accum: bool, config: Any = None, recipe_a: str | None = None,
        dtype_a: torch.dtype | None = None, *, return_gathered: bool = False, out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Gathered | None]:  # fmt: skip
        return function(
            a, b, scale_a, scale_b, group=group, out_dtype=out_dtype, use_fast_accum=use_fast_accum, out=out,
            return_gathered=return_gathered, config=library.decoded(config), recipe_a=recipe_a,
            dtype_a=dtype_a or E4M3,
        )  # fmt: skip

    def multiply(*arguments: Any, **named: Any) -> torch.Tensor:
        return run(*arguments, **named)[0]

    def multiply_gathered(*arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, gathered = run(*arguments, **named, return_gathered=True)
        assert gathered is not None
        return y, *gathered

    def multiply_into(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor, group: str,
        out_dtype: torch.dtype, use_fast_accum: bool, return_gathered: bool, config: Any, out: torch.Tensor,
        recipe_a: str | None = None, dtype_a: torch.dtype | None = None,
    ) -> Gathered:  # fmt: skip
        arguments = a, b, scale_a, scale_b, group, out_dtype, use_fast_accum, config, recipe_a, dtype_a
        gathered = run(*arguments, return_gathered=return_gathered, out=out)[1]
        return gathered or (a.new_empty(0), scale_b.new_empty(0))

    def fake(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, group: str, out_dtype: torch.dtype,
        use_fast_accum: bool, config: Any = None, recipe_a: str | None = None, dtype_a: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        _check_fake(a, b, recipe_a)
        return a.new_empty(size_of(group) * a.shape[0], b.shape[-1], dtype=out_dtype)

    def fake_gathered(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, group: str, out_dtype: torch.dtype,
        use_fast_accum: bool, config: Any = None, recipe_a: str | None = None, dtype_a: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        y = fake(a, b, scale_a, scale_b, group, out_dtype, use_fast_accum, config, recipe_a, dtype_a)
        return y, *_fake_gathered(a, scale_a, scale_b, group, recipe_a, dtype_a)

    def fake_into(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, group: str, out_dtype: torch.dtype,
        use_fast_accum: bool, return_gathered: bool, config: Any, out: torch.Tensor, recipe_a: str | None = None,
        dtype_a: torch.dtype | None = None,
    ) -> Gathered:  # fmt: skip
        if return_gathered:
            return _fake_gathered(a, scale_a, scale_b, group, recipe_a, dtype_a)
        return a.new_empty(0), scale_b.new_empty(0)

    backward = library.no_backward(OP)
    given = f"{ARGUMENTS}, int[]? config=None, {QUANTIZES}"
    library.define(OP, f"({given}) -> Tensor", multiply, fake, backward=backward)
    library.define(
        f"{OP}_gathered", f"({given}) -> (Tensor, Tensor, Tensor)", multiply_gathered, fake_gathered, backward=backward
    )
    library.define(
        f"{OP}_out",
        f"({ARGUMENTS}, bool return_gathered, int[]? config, Tensor(a!) out, {QUANTIZES}) -> (Tensor, Tensor)",
        multiply_into, fake_into,
    )  # fmt: skip
