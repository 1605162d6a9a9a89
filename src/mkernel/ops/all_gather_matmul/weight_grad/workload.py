"""The all_gather_matmul_weight_grad workload of `mkernel trace`, `tune` and `compile`."""

from __future__ import annotations

import torch

from mkernel.operators import Shape
from mkernel.ops.all_gather_matmul.weight_grad import TUNABLE, all_gather_matmul_weight_grad, explain, prepare
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.workloads import Call, Cost, Tried, Workload, blocks, empty, pieces, randn


def make(group: Group, shape: Shape, dtype: torch.dtype) -> Call:
    m_total, n, k = shape
    a = randn(group, m_total // group.size, k, dtype=dtype, seed=0)
    dy = randn(group, m_total, n, dtype=dtype, seed=1)
    out = empty(group, n, k, dtype=dtype).t()  # laid out like the weight of a linear layer

    def run(config: Config | None) -> torch.Tensor:
        return all_gather_matmul_weight_grad(a, dy, group=group, out=out, config=config)

    tried = Tried(
        prepare=lambda config: prepare(group, a, dy, out, config),
        explain=lambda config: explain(a, dy, group=group, out=out, config=config),
        sizes=dict(m=a.shape[0], n=n, k=k),
    )
    return Call(run, tried)


def cost(shape: Shape, ranks: int) -> Cost:
    m_total, n, k = shape
    m = m_total // ranks
    tiles = ranks * blocks(k, n)
    return Cost(
        tiles, tiles * ranks * blocks(m), ranks * (ranks - 1) * pieces(m, k),
        ranks * (m * k + n * k + m_total * (n + 2 * k)),
    )  # fmt: skip


WORKLOAD = Workload(TUNABLE.op, (256, 128, 128), (8, 1, 1), make, cost, TUNABLE)
