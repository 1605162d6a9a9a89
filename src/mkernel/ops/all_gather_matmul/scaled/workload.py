"""The all_gather_scaled_matmul workload of `mkernel trace`, `tune` and `compile`."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.operators import Shape
from mkernel.ops.all_gather_matmul.scaled import OP, TUNABLE, all_gather_scaled_matmul, explain, prepare
from mkernel.ops.all_gather_matmul.workload import cost
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.scaling import recipe_of, scaling_of, scaling_of_recipe
from mkernel.workloads import Call, Tried, Workload, empty, quantized, randn


def make(
    group: Group, shape: Shape, dtype: torch.dtype, tensorwise: bool = False, blockwise: bool = False,
    fast_accum: bool = False, quantize: bool = False,
) -> Call:  # fmt: skip
    """dtype: that of the result. quantize: the kernel quantizes a."""
    m_total, n, k = shape
    m = m_total // group.size
    a, b, scale_a, scale_b = quantized(group, m, n, k, tensorwise=tensorwise, blockwise=blockwise)
    out = empty(group, m_total, n, dtype=dtype)
    given: dict[str, Any] = dict(use_fast_accum=fast_accum, group=group, out=out)
    scaling = scaling_of(group, a, b, scale_a, scale_b, fast_accum)
    operands: Any = a, b, scale_a, scale_b
    if quantize:
        recipe = recipe_of(tensorwise=tensorwise, blockwise=blockwise)
        a = randn(group, m, k, dtype=torch.bfloat16, seed=0)
        operands, given = (a, b, None, scale_b), given | dict(recipe_a=recipe)
        scaling = scaling_of_recipe(group, a, b, recipe, torch.float8_e4m3fn, scale_b, fast_accum)

    def run(config: Config | None) -> torch.Tensor:
        return all_gather_scaled_matmul(*operands, **given, config=config)

    tried = Tried(
        prepare=lambda config: prepare(group, a, b, out, None, config, scaling),
        explain=lambda config: explain(*operands, **given, config=config),
        sizes=dict(m=m, n=n, k=k, blockwise=scaling.blockwise, quantizes=quantize),
    )
    return Call(run, tried)


WORKLOAD = Workload(OP, (256, 128, 128), (1, 1, 8), make, cost, TUNABLE)
