"""all_gather_matmul_weight_grad in the demo."""

from __future__ import annotations

import torch

from mkernel.demo.case import DTYPE, EPS, Case, Demo, everyones, random
from mkernel.operators import Shape
from mkernel.ops.all_gather_matmul.weight_grad import all_gather_matmul_weight_grad
from mkernel.runtime.group import Group


def case(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    m_total, n, k = shape
    m = m_total // group.size
    rows = m * group.size
    a, dy = random(group, seed, m, k), random(group, seed, rows, n, what=1)
    gathered = torch.zeros(rows, k, dtype=DTYPE, device=group.device)
    block = m * k * DTYPE.itemsize

    def exact() -> tuple[torch.Tensor, float]:
        return torch.cat(everyones(group, "a", a)).double().t() @ dy.double(), 4 * rows**0.5 * EPS

    return Case(
        inputs=f"a {m} x {k}, its rows of a taller matrix, and dy {rows} x {n}",
        call=lambda: all_gather_matmul_weight_grad(a, dy),
        exact=exact,
        library=lambda: gathered.t() @ dy,
        sends=(group.nodes * block, block),
    )


DEMO = Demo(case, simulated=lambda ranks: (64 * ranks, 64, 128), large=lambda ranks: (1024 * ranks, 2048, 4096))
