"""Benchmark of matmul_all_reduce against what it replaces: cuBLAS, then an all-reduce of the products."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.bench.benchmark import FEW_ROWS, SHARED_GPU_ROWS, Benchmark, Published
from mkernel.bench.published import NODES, RANKS
from mkernel.bench.timing import Link, wires
from mkernel.operators import Shape
from mkernel.ops.reduce import all_reduce
from mkernel.ops.reduce.all_reduce import matmul_all_reduce, scaled
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
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.operands import DTYPES


def measure(
    group: Group, m: int, n: int, k: int, dtype: torch.dtype, config: Config | None, repeats: int
) -> dict[str, Any]:
    """Measure one shape; k is the total over all ranks. Collective; returns the same figures on every rank."""
    return _measure(group, (m, n, k), dtype, config, repeats, plain(group, all_reduce, (m, n, k), dtype))


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
    device, size, gpus = group.device, group.size, group.gpus_per_node
    k_local = k // size
    out = torch.empty(m, n, device=device, dtype=dtype)
    product = torch.empty(m, n, device=device, dtype=dtype)
    torch.cuda.current_stream(device).synchronize()
    parts = torch.tensor(group.exchange("products", product.data_ptr()), dtype=torch.int64, device="cpu").to(device)
    results = group.exchange("results", out.view(-1))
    nbytes = m * n * out.element_size()
    # reduce-scatter, then all-gather: every byte goes over NVLink twice
    wire = wires(group, 2 * (gpus - 1) * nbytes // gpus, 2 * (group.nodes - 1) * nbytes // (group.nodes * gpus))
    share = -(-m * n // size // 8) * 8
    cuts = [min(rank * share, m * n) for rank in range(size + 1)]
    link = Link(device)

    def multiply() -> None:
        measured.multiply(product)

    def reduce_share() -> None:
        link.open()
        add_up(parts, size, out.view(-1)[cuts[group.rank] : cuts[group.rank + 1]], cuts[group.rank], DTYPES[dtype])
        link.hold(int(wire.ms * 1e6 / 2))

    def gather_shares() -> None:
        link.open()
        for rank, theirs in enumerate(results):
            if rank != group.rank:
                out.view(-1)[cuts[rank] : cuts[rank + 1]].copy_(theirs[cuts[rank] : cuts[rank + 1]])
        link.hold(int(wire.ms * 1e6 / 2))

    def reduce_all() -> None:
        link.open()
        add_up(parts, size, out.view(-1), 0, DTYPES[dtype])
        link.hold(int(wire.ms * 1e6 * gpus / 2))

    launch = all_reduce.prepare(group, measured.sum(out, config))
    stream = torch.cuda.current_stream(device)
    mine = OnRank(launch, stream, multiply, [[reduce_share, gather_shares], [reduce_all]])
    times, sustained = measure_together(group, mine, repeats)

    out.fill_(float("nan"))
    measured.call(*measured.operands, out=out, config=config, **measured.options)
    group.synchronize()
    everyone = group.exchange("inputs", measured.numbers)
    worst = 0.0
    for first in range(0, m, 4096):  # float64 takes a lot of memory
        some = slice(first, first + 4096)
        exact = sum(x[some].to(device).double() @ y.to(device).double().t() for x, y in everyone)
        error = (out[some].double() - exact).abs().max().item()
        worst = max(worst, error) if error == error else float("inf")
    same = all(torch.equal(out.view(-1), theirs.to(device)) for theirs in results)
    worst = max(group.exchange("errors", worst if same else float("inf")))
    bound = bound_of(k, k_local, size, dtype, fast=measured.options.get("use_fast_accum", False))
    plan = measured.explain(*measured.operands, out=out, config=config, **measured.options)
    return figures(measured.op, group, (m, n, k), dtype, times, sustained, wire, worst, bound, plan)


def _traffic(size: int) -> tuple[float, float]:
    # in-switch reduction and multicast: a GPU sends its partial of every other GPU's rows, and the sum of its own rows
    return size * size * 2, 2 * (NODES - 1) * (size // RANKS * size * 2)


BENCHMARK = Benchmark(
    measure,
    problem="mkernel.ops.reduce.baselines:AllReduce",
    published=Published(shape=lambda size, ranks: (size, size, size // 16 * ranks), traffic=_traffic),
    latency=latency_of(matmul_all_reduce),
    latency_shapes=FEW_ROWS,
    shared_gpu_shapes=SHARED_GPU_ROWS,
)
SCALED_BENCHMARK = Benchmark(measure_scaled)
