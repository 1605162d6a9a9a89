"""Benchmark of all_gather_scaled_matmul against what it replaces: copy everything, then call torch._scaled_mm."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.bench.benchmark import Benchmark
from mkernel.bench.problems import draw
from mkernel.ops.all_gather_matmul.bench import Gathering, measure_gathering
from mkernel.ops.all_gather_matmul.scaled import OP, all_gather_scaled_matmul, explain, prepare
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.quantization import dequantize, quantize_operands
from mkernel.runtime.scaling import for_library, scaling_of


def measure(
    group: Group, m_total: int, n: int, k: int, dtype: torch.dtype, config: Config | None, repeats: int, *,
    tensorwise: bool = False, blockwise: bool = False, fast_accum: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measure one shape; dtype: that of the result. Runs on every rank and returns the same figures on each. The
    host-driven baseline has the scales in place, and copies the rows alone."""
    drawn = draw(group.rank, m_total // group.size, n, k, torch.float32, group.device)
    operands = quantize_operands(*drawn, tensorwise=tensorwise, blockwise=blockwise)
    a, b, scale_a, scale_b = operands
    scaling = scaling_of(group, *operands, fast_accum)
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
    measured = Gathering(
        op=OP,
        shape=(m_total, n, k),
        a=a,
        out=out,
        multiply=multiply,
        prepare=lambda: prepare(group, a, b, out, None, config, scaling),
        call=lambda: all_gather_scaled_matmul(*operands, **given),
        explain=lambda: explain(*operands, **given),
        exact=lambda gathered: dequantize(gathered, own, torch.float64) @ dequantize(b, scale_b, torch.float64),
        depth=k,
        more_bytes=4 * scaling.count,
    )
    return measure_gathering(group, measured, repeats)


BENCHMARK = Benchmark(measure)
