"""all_gather_scaled_matmul in the demo."""

from __future__ import annotations

import torch

from mkernel.demo.case import DTYPE, EPS, Case, Demo, everyones, random
from mkernel.operators import Shape
from mkernel.ops.all_gather_matmul.scaled import all_gather_scaled_matmul
from mkernel.runtime.group import Group
from mkernel.runtime.quantization import dequantize, quantize_operands


def case(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    m_total, n, k = shape
    m = m_total // group.size
    operands = quantize_operands(random(group, seed, m, k), random(group, seed, n, k, what=1))
    a, b, scale_a, scale_b = operands
    gathered = torch.zeros(group.size * m, k, dtype=DTYPE, device=group.device)
    wide = b.to(DTYPE)
    row = k + 4  # bytes of a row and its scale

    def exact() -> tuple[torch.Tensor, float]:
        rows = torch.cat(everyones(group, "a", dequantize(a, scale_a, torch.float64)))
        return rows @ dequantize(b, scale_b, torch.float64), 4 * k**0.5 * EPS

    return Case(
        inputs=f"a {m} x {k} in fp8, its rows of a taller matrix, b {k} x {n} in fp8, and scales of rows and columns",
        call=lambda: all_gather_scaled_matmul(*operands),
        exact=exact,
        library=lambda: gathered @ wide,
        sends=None if group.nodes > 1 else (m * row, 0),
    )


DEMO = Demo(case, simulated=lambda ranks: (16 * ranks, 32, 128), large=lambda ranks: (1024 * ranks, 2048, 4096))
