"""The all_gather_matmul workload of `mkernel trace`, `tune` and `compile`."""

from __future__ import annotations

import torch

from mkernel.operators import Shape
from mkernel.ops.all_gather_matmul import TUNABLE, all_gather_matmul, explain, prepare
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.workloads import Call, Cost, Tried, Workload, blocks, empty, pieces, randn


def make(group: Group, shape: Shape, dtype: torch.dtype) -> Call:
    m_total, n, k = shape
    a = randn(group, m_total // group.size, k, dtype=dtype, seed=0)
    b = randn(group, n, k, dtype=dtype, seed=1).t()
    out = empty(group, m_total, n, dtype=dtype)

    def run(config: Config | None) -> torch.Tensor:
        result = all_gather_matmul(a, b, group=group, out=out, config=config)
        assert isinstance(result, torch.Tensor)
        return result

    tried = Tried(
        prepare=lambda config: prepare(group, a, b, out, None, config),
        explain=lambda config: explain(a, b, group=group, out=out, config=config),
        sizes=dict(m=a.shape[0], n=n, k=k),
    )
    return Call(run, tried)


def cost(shape: Shape, ranks: int) -> Cost:
    m_total, n, k = shape
    m = m_total // ranks
    tiles = ranks * ranks * blocks(m, n)
    return Cost(
        tiles, tiles * blocks(k), ranks * (ranks - 1) * pieces(m, k), ranks * (m * k + n * k + m_total * (n + 2 * k))
    )


WORKLOAD = Workload("all_gather_matmul", (256, 128, 128), (1, 1, 8), make, cost, TUNABLE)
