"""The demo of matmul_reduce_scatter and matmul_all_reduce."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mkernel.demo.case import DTYPE, EPS, Case, Demo, everyones, random
from mkernel.operators import Shape
from mkernel.ops.reduce import matmul_all_reduce, matmul_reduce_scatter
from mkernel.runtime.group import Group


def _case(
    group: Group, shape: Shape, seed: int, call: Callable[..., torch.Tensor], rows: slice, *, scattered: bool
) -> Case:
    m, n, k_total = shape
    k = k_total // group.size
    block = m // group.size * n * DTYPE.itemsize
    a, b = random(group, seed, m, k), random(group, seed, k, n, what=1)

    def exact() -> tuple[torch.Tensor, float]:
        pairs = zip(everyones(group, "a", a), everyones(group, "b", b))
        total = sum((x[rows].double() @ y.double() for x, y in pairs), torch.zeros((), device=group.device))
        # the error of one product over all of k, plus one rounding of each rank's partial
        parts = (group.size - 1) ** 0.5 * 5 * k**0.5 * EPS / 2
        return total, 4 * (group.size * k) ** 0.5 * EPS + parts

    return Case(
        inputs=f"a {m} x {k} and b {k} x {n}, its slice of a product with larger k",
        call=lambda: call(a, b),
        exact=exact,
        library=lambda: a @ b,
        sends=(group.nodes * block, block) if scattered else None,
    )


def _scatter(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    rows = shape[0] // group.size
    mine = slice(group.rank * rows, (group.rank + 1) * rows)
    return _case(group, shape, seed, matmul_reduce_scatter, mine, scattered=True)


def _all_reduce(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    return _case(group, shape, seed, matmul_all_reduce, slice(None), scattered=False)


REDUCE_SCATTER = Demo(
    _scatter,
    simulated=lambda ranks: (32 * ranks, 64, 32 * ranks),
    large=lambda ranks: (1024 * ranks, 2048, 1024 * ranks),
)
ALL_REDUCE = Demo(
    _all_reduce, simulated=lambda ranks: (96, 64, 32 * ranks), large=lambda ranks: (4096, 2048, 1024 * ranks)
)
