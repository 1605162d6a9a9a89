"""The demo of matmul_reduce_scatter and matmul_all_reduce, and of the same for fp8."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mkernel.demo.case import DTYPE, EPS, Case, Demo, everyones, random
from mkernel.operators import Shape
from mkernel.ops.reduce import (
    matmul_all_reduce,
    matmul_reduce_scatter,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)
from mkernel.runtime.group import Group
from mkernel.runtime.quantization import dequantize, quantize_operands


def _case(
    group: Group, shape: Shape, seed: int, call: Callable[..., torch.Tensor], rows: slice, *, scattered: bool
) -> Case:
    m, n, k_total = shape
    k = k_total // group.size
    block = m // group.size * n * DTYPE.itemsize
    a, b = random(group, seed, m, k), random(group, seed, k, n, what=1)
    return _case_of(group, (a, b), (a, b), call, rows, k, block if scattered else None)


def _scaled_case(
    group: Group, shape: Shape, seed: int, call: Callable[..., torch.Tensor], rows: slice, *, scattered: bool
) -> Case:
    m, n, k_total = shape
    k = k_total // group.size
    block = m // group.size * n * DTYPE.itemsize
    operands = quantize_operands(random(group, seed, m, k), random(group, seed, n, k, what=1))
    a, b, scale_a, scale_b = operands
    pair = dequantize(a, scale_a), dequantize(b, scale_b)
    return _case_of(group, operands, pair, call, rows, k, block if scattered else None, " in fp8, with scales")


def _case_of(
    group: Group, operands: tuple[torch.Tensor, ...], pair: tuple[torch.Tensor, torch.Tensor],
    call: Callable[..., torch.Tensor], rows: slice, k: int, block: int | None, how: str = "",
) -> Case:  # fmt: skip
    """pair: the numbers that the operands stand for. block: bytes of a rank's rows of the result, if it gets some."""
    a, b = pair
    (m, _), n = a.shape, b.shape[1]

    def exact() -> tuple[torch.Tensor, float]:
        pairs = zip(everyones(group, "a", a), everyones(group, "b", b))
        total = sum((x[rows].double() @ y.double() for x, y in pairs), torch.zeros((), device=group.device))
        # the error of one product over all of k, plus one rounding of each rank's partial
        parts = (group.size - 1) ** 0.5 * 5 * k**0.5 * EPS / 2
        return total, 4 * (group.size * k) ** 0.5 * EPS + parts

    return Case(
        inputs=f"a {m} x {k} and b {k} x {n}{how}, its slice of a product with larger k",
        call=lambda: call(*operands),
        exact=exact,
        library=lambda: a @ b,
        sends=(group.nodes * block, block) if block is not None else None,
    )


def _scatter(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    rows = shape[0] // group.size
    mine = slice(group.rank * rows, (group.rank + 1) * rows)
    return _case(group, shape, seed, matmul_reduce_scatter, mine, scattered=True)


def _all_reduce(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    return _case(group, shape, seed, matmul_all_reduce, slice(None), scattered=False)


def _scaled_scatter(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    rows = shape[0] // group.size
    mine = slice(group.rank * rows, (group.rank + 1) * rows)
    return _scaled_case(group, shape, seed, scaled_matmul_reduce_scatter, mine, scattered=True)


def _scaled_all_reduce(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    return _scaled_case(group, shape, seed, scaled_matmul_all_reduce, slice(None), scattered=False)


def _large(ranks: int) -> Shape:
    return 1024 * ranks, 2048, 1024 * ranks


REDUCE_SCATTER = Demo(_scatter, simulated=lambda ranks: (32 * ranks, 64, 32 * ranks), large=_large)
ALL_REDUCE = Demo(
    _all_reduce, simulated=lambda ranks: (96, 64, 32 * ranks), large=lambda ranks: (4096, 2048, 1024 * ranks)
)
SCALED_REDUCE_SCATTER = Demo(_scaled_scatter, simulated=lambda ranks: (32 * ranks, 32, 32 * ranks), large=_large)
SCALED_ALL_REDUCE = Demo(
    _scaled_all_reduce, simulated=lambda ranks: (32, 32, 32 * ranks), large=lambda ranks: (4096, 2048, 1024 * ranks)
)
