"""The all_gather_scaled_matmul workload of `mkernel trace`, `tune` and `compile`."""

from __future__ import annotations

import torch

from mkernel.operators import Shape
from mkernel.ops.all_gather_matmul.scaled import OP, TUNABLE, all_gather_scaled_matmul, explain, prepare
from mkernel.ops.all_gather_matmul.workload import cost
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.scaling import scaling_of
from mkernel.workloads import Call, Tried, Workload, empty, quantized


def make(
    group: Group, shape: Shape, dtype: torch.dtype, tensorwise: bool = False, blockwise: bool = False,
    fast_accum: bool = False,
) -> Call:  # fmt: skip
    """dtype: that of the result."""
    m_total, n, k = shape
    operands = quantized(group, m_total // group.size, n, k, tensorwise=tensorwise, blockwise=blockwise)
    out = empty(group, m_total, n, dtype=dtype)
    a, b, *_ = operands
    scaling = scaling_of(group, *operands, fast_accum)

    def run(config: Config | None) -> torch.Tensor:
        return all_gather_scaled_matmul(*operands, use_fast_accum=fast_accum, group=group, out=out, config=config)

    tried = Tried(
        prepare=lambda config: prepare(group, a, b, out, None, config, scaling),
        explain=lambda config: explain(*operands, use_fast_accum=fast_accum, group=group, out=out, config=config),
        sizes=dict(m=a.shape[0], n=n, k=k, blockwise=scaling.blockwise),
    )
    return Call(run, tried)


WORKLOAD = Workload(OP, (256, 128, 128), (1, 1, 8), make, cost, TUNABLE)
