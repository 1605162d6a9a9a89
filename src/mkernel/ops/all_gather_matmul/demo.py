"""all_gather_matmul in the demo."""

from __future__ import annotations

import torch

from mkernel.demo.case import DTYPE, EPS, Case, Demo, everyones, random
from mkernel.operators import Shape
from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.runtime.group import Group


def case(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    m_total, n, k = shape
    m = m_total // group.size
    a, b = random(group, seed, m, k), random(group, seed, k, n, what=1)
    gathered = torch.zeros(group.size * m, k, dtype=DTYPE, device=group.device)
    block = m * k * DTYPE.itemsize

    def exact() -> tuple[torch.Tensor, float]:
        return torch.cat(everyones(group, "a", a)).double() @ b.double(), 4 * k**0.5 * EPS

    return Case(
        inputs=f"a {m} x {k}, its rows of a taller matrix, and b {k} x {n}",
        call=lambda: all_gather_matmul(a, b),
        exact=exact,
        library=lambda: gathered @ b,
        sends=(group.nodes * block, block),
    )


DEMO = Demo(case, simulated=lambda ranks: (64 * ranks, 32, 128), large=lambda ranks: (1024 * ranks, 2048, 4096))
