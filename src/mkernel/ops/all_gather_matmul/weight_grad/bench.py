"""Benchmark of all_gather_matmul_weight_grad against what it replaces: copy everything, then call cuBLAS."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.bench.benchmark import Benchmark
from mkernel.ops.all_gather_matmul.bench import Gathering, measure_gathering, sent_from
from mkernel.ops.all_gather_matmul.weight_grad import TUNABLE, all_gather_matmul_weight_grad, explain, prepare
from mkernel.ops.all_gather_matmul.weight_grad.baselines import draw
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group


def measure(
    group: Group, m_total: int, n: int, k: int, dtype: torch.dtype, config: Config | None, repeats: int
) -> dict[str, Any]:
    """Measure one shape. Runs on every rank and returns the same figures on each."""
    a, dy = draw(group.rank, m_total // group.size, m_total, n, k, dtype, group.device)
    a = sent_from(group, a)
    out = torch.empty(n, k, device=group.device, dtype=dtype).t()  # laid out like the weight of a linear layer
    measured = Gathering(
        op=TUNABLE.op,
        shape=(m_total, n, k),
        a=a,
        out=out,
        multiply=lambda gathered: torch.mm(dy.t(), gathered, out=out.t()),
        prepare=lambda: prepare(group, a, dy, out, config),
        call=lambda: all_gather_matmul_weight_grad(a, dy, out=out, config=config),
        explain=lambda: explain(a, dy, out=out, config=config),
        exact=lambda gathered: gathered.t() @ dy.double(),
        depth=m_total,
    )
    return measure_gathering(group, measured, repeats)


BENCHMARK = Benchmark(measure, problem="mkernel.ops.all_gather_matmul.weight_grad.baselines:WeightGrad")
