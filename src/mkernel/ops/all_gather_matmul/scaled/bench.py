"""Benchmark of all_gather_scaled_matmul against what it replaces: copy everything, then call torch._scaled_mm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mkernel.bench.benchmark import Benchmark
from mkernel.bench.problems import draw
from mkernel.ops.all_gather_matmul.bench import Gathering, measure_gathering
from mkernel.ops.all_gather_matmul.scaled import OP, all_gather_scaled_matmul, explain, prepare
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.quantization import dequantize, quantize_operands
from mkernel.runtime.quantization import quantize as quantizing
from mkernel.runtime.scaling import for_library, recipe_of, scaling_of, scaling_of_recipe


def measure(
    group: Group, m_total: int, n: int, k: int, dtype: torch.dtype, config: Config | None, repeats: int, *,
    tensorwise: bool = False, blockwise: bool = False, fast_accum: bool = False, quantize: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measure one shape; dtype: that of the result. Runs on every rank and returns the same figures on each. The
    host-driven baseline has the scales in place, and copies the rows alone. quantize: the fused call begins with rows
    in bf16; so does the baseline, by `mk.quantize`; the library alone does not."""
    x, w = draw(group.rank, m_total // group.size, n, k, torch.float32, group.device)
    x = x.bfloat16() if quantize else x
    a, b, scale_a, scale_b = quantize_operands(x, w, tensorwise=tensorwise, blockwise=blockwise)
    out = torch.empty(m_total, n, device=group.device, dtype=dtype)
    torch.cuda.current_stream(group.device).synchronize()
    everyone = [each.to(group.device) for each in group.exchange("scales", scale_a)]
    scales = everyone[0] if tensorwise else torch.cat(everyone)  # the library takes one scale for all ranks
    own = torch.cat([each.expand(a.shape[0], 1) for each in everyone]) if tensorwise else scales
    of_a, of_b = for_library(scales, blockwise), for_library(scale_b, blockwise)

    def multiply(gathered: torch.Tensor) -> object:
        return torch._scaled_mm(
            gathered, b, of_a, of_b, out_dtype=dtype, use_fast_accum=fast_accum, out=out
        )  # fmt: skip

    given: dict[str, Any] = dict(use_fast_accum=fast_accum, out=out, config=config)
    operands: Any = a, b, scale_a, scale_b
    scaling, rows, first = scaling_of(group, a, b, scale_a, scale_b, fast_accum), a, None
    if quantize:
        recipe = recipe_of(tensorwise=tensorwise, blockwise=blockwise)
        operands, given = (x, b, None, scale_b), given | dict(recipe_a=recipe)
        scaling = scaling_of_recipe(group, x, b, recipe, a.dtype, scale_b, fast_accum)
        rows, first = x, partial(quantizing, x, recipe)
    measured = Gathering(
        op=OP,
        shape=(m_total, n, k),
        a=a,
        out=out,
        first=first,
        multiply=multiply,
        prepare=lambda: prepare(group, rows, b, out, None, config, scaling),
        call=lambda: all_gather_scaled_matmul(*operands, **given),
        explain=lambda: explain(*operands, **given),
        exact=lambda gathered: dequantize(gathered, own, torch.float64) @ dequantize(b, scale_b, torch.float64),
        depth=k,
        more_bytes=4 * scaling.count,
        fast=fast_accum,
    )
    return measure_gathering(group, measured, repeats)


BENCHMARK = Benchmark(measure)
