"""The workloads of matmul_reduce_scatter and matmul_all_reduce for `mkernel trace`, `tune` and `compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mkernel.operators import Shape
from mkernel.ops.reduce import all_reduce, reduce_scatter
from mkernel.ops.reduce.all_reduce import scaled as scaled_all_reduce
from mkernel.ops.reduce.call import Sum
from mkernel.ops.reduce.reduce_scatter import scaled as scaled_reduce_scatter
from mkernel.runtime.group import Group
from mkernel.runtime.scaling import scaling_of
from mkernel.workloads import COPY, Call, Cost, Tried, Workload, blocks, empty, quantized, randn


def _making(operator: Any, function: Callable[..., torch.Tensor], scatter: bool) -> Callable[..., Call]:
    def make(group: Group, shape: Shape, dtype: torch.dtype) -> Call:
        m, n, k = shape
        a = randn(group, m, k // group.size, dtype=dtype, seed=0)
        b = randn(group, n, k // group.size, dtype=dtype, seed=1).t()
        out = empty(group, m // group.size if scatter else m, n, dtype=dtype)
        tried = Tried(
            prepare=lambda config: operator.prepare(group, Sum(a, b, out, config=config)),
            explain=lambda config: operator.explain(a, b, group=group, out=out, config=config),
            sizes=dict(m=m, n=n, k=a.shape[1]),
        )
        return Call(lambda config: function(a, b, group=group, out=out, config=config), tried)

    return make


def _making_scaled(operator: Any, function: Callable[..., torch.Tensor], scatter: bool) -> Callable[..., Call]:
    def make(
        group: Group, shape: Shape, dtype: torch.dtype, tensorwise: bool = False, blockwise: bool = False,
        fast_accum: bool = False,
    ) -> Call:  # fmt: skip
        m, n, k = shape
        operands = quantized(group, m, n, k // group.size, tensorwise=tensorwise, blockwise=blockwise)
        a, b, *_ = operands
        out = empty(group, m // group.size if scatter else m, n, dtype=dtype)
        scaling = scaling_of(group, *operands, fast_accum)
        given: dict[str, Any] = dict(use_fast_accum=fast_accum, group=group, out=out)
        tried = Tried(
            prepare=lambda config: operator.prepare(group, Sum(a, b, out, config=config, scaling=scaling)),
            explain=lambda config: operator.explain(*operands, **given, config=config),
            sizes=dict(m=m, n=n, k=a.shape[1], blockwise=scaling.blockwise),
        )
        return Call(lambda config: function(*operands, **given, config=config), tried)

    return make


def _cost_of_scatter(shape: Shape, ranks: int) -> Cost:
    m_total, n, k = shape
    tiles = ranks * ranks * blocks(m_total // ranks, n)
    held = (m_total + n) * k // ranks + 3 * m_total * n
    return Cost(tiles, tiles * blocks(k // ranks), ranks * m_total * n // COPY, ranks * held)


def _cost_of_all_reduce(shape: Shape, ranks: int) -> Cost:
    m, n, k = shape
    tiles = ranks * blocks(m, n)
    # copies: an upper bound, as if every rank received all ranks' partials
    return Cost(
        tiles, tiles * blocks(k // ranks), ranks * ranks * m * n // COPY,
        ranks * ((m + n) * k // ranks + (1 + 2 * min(ranks, 4)) * m * n),
    )  # fmt: skip


REDUCE_SCATTER = Workload(
    "matmul_reduce_scatter",
    (256, 128, 128),
    (1, 1, 8),
    _making(reduce_scatter, reduce_scatter.matmul_reduce_scatter, scatter=True),
    _cost_of_scatter,
    reduce_scatter.TUNABLE,
)
ALL_REDUCE = Workload(
    "matmul_all_reduce",
    (128, 128, 128),
    (1, 1, 8),
    _making(all_reduce, all_reduce.matmul_all_reduce, scatter=False),
    _cost_of_all_reduce,
    all_reduce.TUNABLE,
)
SCALED_REDUCE_SCATTER = Workload(
    scaled_reduce_scatter.OP,
    (256, 128, 128),
    (1, 1, 8),
    _making_scaled(scaled_reduce_scatter, scaled_reduce_scatter.scaled_matmul_reduce_scatter, scatter=True),
    _cost_of_scatter,
    scaled_reduce_scatter.TUNABLE,
)
SCALED_ALL_REDUCE = Workload(
    scaled_all_reduce.OP,
    (128, 128, 128),
    (1, 1, 8),
    _making_scaled(scaled_all_reduce, scaled_all_reduce.scaled_matmul_all_reduce, scatter=False),
    _cost_of_all_reduce,
    scaled_all_reduce.TUNABLE,
)
