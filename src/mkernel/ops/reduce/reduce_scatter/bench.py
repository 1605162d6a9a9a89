"""Benchmark of matmul_reduce_scatter against what it replaces: cuBLAS, then a reduce-scatter of the products. Its
gradients are measured against copying everything, then calling cuBLAS twice."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.bench.backward import Backward, Transfer, error_of, named
from mkernel.bench.backward import measure as measure_backward_pass
from mkernel.bench.benchmark import FEW_ROWS, SHARED_GPU_ROWS, Benchmark, Published
from mkernel.bench.problems import draw, product_bound, worst_of
from mkernel.bench.published import RANKS, gathered
from mkernel.bench.timing import Link, wires
from mkernel.operators import Shape
from mkernel.ops import all_gather_matmul
from mkernel.ops.reduce import reduce_scatter
from mkernel.ops.reduce.bench import (
    Measured,
    OnRank,
    add_up,
    bound_of,
    figures,
    latency_of,
    measure_together,
    plain,
    quantized,
)
from mkernel.ops.reduce.reduce_scatter import matmul_reduce_scatter, scaled
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.operands import DTYPES


def measure(
    group: Group, m: int, n: int, k: int, dtype: torch.dtype, config: Config | None, repeats: int, *,
    backward: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measure one shape; k is the total over all ranks. Collective; returns the same figures on every rank."""
    if backward:
        return measure_backward(group, (m, n, k), dtype, repeats)
    return _measure(group, (m, n, k), dtype, config, repeats, plain(group, reduce_scatter, (m, n, k), dtype))


def measure_scaled(
    group: Group, m: int, n: int, k: int, dtype: torch.dtype, config: Config | None, repeats: int, *,
    tensorwise: bool = False, blockwise: bool = False, fast_accum: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The same on fp8, beside torch._scaled_mm; dtype: that of the result, and of what travels."""
    measured = quantized(
        group, scaled, (m, n, k), tensorwise=tensorwise, blockwise=blockwise, fast_accum=fast_accum
    )  # fmt: skip
    return _measure(group, (m, n, k), dtype, config, repeats, measured)


def _measure(
    group: Group, shape: Shape, dtype: torch.dtype, config: Config | None, repeats: int, measured: Measured
) -> dict[str, Any]:  # fmt: skip
    m, n, k = shape
    device, size = group.device, group.size
    k_local, rows = k // size, m // size
    out = torch.empty(rows, n, device=device, dtype=dtype)
    product = torch.empty(m, n, device=device, dtype=dtype)
    torch.cuda.current_stream(device).synchronize()
    parts = torch.tensor(group.exchange("products", product.data_ptr()), dtype=torch.int64, device="cpu").to(device)
    tile = rows * n * out.element_size()
    wire = wires(group, group.nodes * (group.gpus_per_node - 1) * tile, (group.nodes - 1) * tile)
    link = Link(device)

    def multiply() -> None:
        measured.multiply(product)

    def reduce() -> None:
        link.open()
        add_up(parts, size, out.view(-1), group.rank * rows * n, DTYPES[dtype])
        link.hold(int(wire.ms * 1e6))

    launch = reduce_scatter.prepare(group, measured.sum(out, config))
    stream = torch.cuda.current_stream(device)
    mine = OnRank(launch, stream, multiply, [[reduce]])
    times, sustained = measure_together(group, mine, repeats)

    out.fill_(float("nan"))
    measured.call(*measured.operands, out=out, config=config, **measured.options)
    group.synchronize()
    own_rows = slice(group.rank * rows, (group.rank + 1) * rows)
    everyone = group.exchange("inputs", measured.numbers)
    exact = sum(x[own_rows].to(device).double() @ y.to(device).double().t() for x, y in everyone)
    error = (out.double() - exact).abs().max().item()
    worst = worst_of(group.exchange("errors", error))
    bound = bound_of(k, k_local, size, dtype, fast=measured.options.get("use_fast_accum", False))
    plan = measured.explain(*measured.operands, out=out, config=config, **measured.options)
    return figures(measured.op, group, (m, n, k), dtype, times, sustained, wire, worst, bound, plan)


def measure_backward(group: Group, shape: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Measure both gradients: that of a by all_gather_matmul, which also returns the rows for that of b, by cuBLAS."""
    m, n, k = shape
    device, size = group.device, group.size
    k_local, rows = k // size, m // size
    a, w = draw(group.rank, m, n, k_local, dtype, device)
    dy, _ = draw(size + group.rank, rows, 0, n, dtype, device)
    da, dw, gathered = torch.empty_like(a), torch.empty_like(w), torch.empty(m, n, dtype=dtype, device=device)
    torch.cuda.current_stream(device).synchronize()
    parts = group.exchange("gradients", dy)
    block = rows * n * a.element_size()

    def gather() -> None:
        for source, part in enumerate(parts):
            gathered[source * rows : (source + 1) * rows].copy_(part)

    def multiply_for_a() -> None:
        torch.mm(gathered, w, out=da)

    def multiply_for_b() -> None:
        torch.mm(gathered.t(), a, out=dw)

    def errors() -> dict[str, float]:
        leaves = [a.clone().requires_grad_(), w.clone().requires_grad_()]
        y = matmul_reduce_scatter(leaves[0], leaves[1].t())
        found = torch.autograd.grad(y, leaves, dy)
        group.synchronize()
        whole = torch.cat(parts).double()
        return {
            "a": error_of(found[0], whole @ w.double(), product_bound(n, dtype)),
            "b": error_of(found[1], whole.t() @ a.double(), product_bound(m, dtype)),
        }

    gathering = Transfer(gather, group.nodes * (group.gpus_per_node - 1) * block, (group.nodes - 1) * block)
    measured = Backward(
        op="matmul_reduce_scatter",
        dimensions=named(shape),
        dtype=dtype,
        library=[multiply_for_a, multiply_for_b],
        fused=[all_gather_matmul.prepare(group, dy, w, da, gathered, None), multiply_for_b],
        host_driven={"in order": [gathering.paced(group), multiply_for_a, multiply_for_b]},
        transfers=[gathering],
        errors=errors,
        plans=[all_gather_matmul.explain(dy, w, out=da, return_gathered=True)],
    )
    return measure_backward_pass(group, measured, repeats)


def _traffic(size: int) -> tuple[float, float]:
    """The same number of bytes as all_gather_matmul, in the opposite direction."""
    block = size // RANKS * size * 2
    return gathered(block)


BENCHMARK = Benchmark(
    measure,
    problem="mkernel.ops.reduce.baselines:ReduceScatter",
    published=Published(shape=lambda size, ranks: (size, size, size // 16 * ranks), traffic=_traffic),
    latency=latency_of(matmul_reduce_scatter),
    latency_shapes=FEW_ROWS,
    shared_gpu_shapes=(*((m, 8192, 8192) for m in (16384, 4096)), *SHARED_GPU_ROWS),
)
SCALED_BENCHMARK = Benchmark(measure_scaled)
