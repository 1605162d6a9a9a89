"""Benchmark of all_gather_matmul and of its gradients against what they replace: copy everything, then call cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.bench.backward import Backward, Transfer, beside, error_of, named
from mkernel.bench.backward import measure as measure_backward_pass
from mkernel.bench.benchmark import FEW_ROWS, SHARED_GPU_ROWS, Benchmark, Latency, Published
from mkernel.bench.problems import draw, fast_accumulation_bound, product_bound, worst_of
from mkernel.bench.published import RANKS, gathered
from mkernel.bench.timing import BARRIER, Link, time_ways
from mkernel.operators import Shape
from mkernel.ops.all_gather_matmul import all_gather_matmul, explain, prepare, weight_grad
from mkernel.ops.reduce import reduce_scatter
from mkernel.ops.reduce.bench import add_up, bound_of
from mkernel.ops.reduce.call import Sum
from mkernel.runtime.config import Config
from mkernel.runtime.cuda_threads import CudaThreads
from mkernel.runtime.group import Group
from mkernel.runtime.operands import DTYPES
from mkernel.runtime.world import Launch


@dataclass(frozen=True)
class Gathering:
    """What is measured of an operator that gathers a and multiplies: this rank's part of one shape.

    a, out: its first operand, and the result. multiply: computes the result from the gathered a, by the library.
    prepare: the launch of the fused call. call: makes it. explain: its plan.
    exact: the result in float64, from the gathered a in float64. depth: how many products an element is the sum of.
    more_bytes: of a row that travel besides its elements. first: what the baseline does before it copies. fast:
    accumulation is fast, and has fewer bits.
    """

    op: str
    shape: tuple[int, int, int]  # m_total, n, k
    a: torch.Tensor
    out: torch.Tensor
    multiply: Callable[[torch.Tensor], object]
    prepare: Callable[[], Launch]
    call: Callable[[], object]
    explain: Callable[[], object]
    exact: Callable[[torch.Tensor], torch.Tensor]
    depth: int
    more_bytes: int = 0
    first: Callable[[], object] | None = None
    fast: bool = False


def sent_from(group: Group, a: torch.Tensor) -> torch.Tensor:
    """a, from where it is sent fastest: with several nodes directly from the symmetric heap."""
    return group.empty(*a.shape, dtype=a.dtype).copy_(a) if group.nodes > 1 else a


def measure_gathering(group: Group, measured: Gathering, repeats: int) -> dict[str, Any]:
    """Measure one shape. Runs on every rank and returns the same figures on each."""
    device = group.device
    world = group.world
    assert isinstance(world, CudaThreads)
    m_total, n, k = measured.shape
    a, out, dtype = measured.a, measured.out, measured.a.dtype
    rows = m_total // group.size
    torch.cuda.current_stream(device).synchronize()
    parts = group.exchange("a", a)
    gathered = torch.empty(m_total, k, device=device, dtype=dtype)

    links = world.links
    rate = links.nvlink
    row_bytes = rows * (k * a.element_size() + measured.more_bytes)
    wire_ms = (group.gpus_per_node - 1) * group.nodes * row_bytes / (rate * 1e6) if rate else 0.0
    crossing = (group.nodes - 1) * row_bytes  # bytes that a rank must send to other nodes
    network_ms = crossing / (links.network * 1e6) + links.network_latency * 1e3 if links.network else 0.0
    link = Link(device)

    def library() -> None:
        measured.multiply(gathered)

    def host_driven() -> None:
        if measured.first is not None:
            measured.first()
        link.open()
        for source, part in enumerate(parts):
            gathered[source * rows : (source + 1) * rows].copy_(part)
        link.hold(int(max(wire_ms, network_ms) * 1e6))  # as if both links were used at the same time
        measured.multiply(gathered)

    host_driven()
    torch.cuda.current_stream(device).synchronize()
    times, sustained = time_ways(
        group, dict(library=library, fused=measured.prepare(), host_driven=host_driven), repeats
    )  # fmt: skip

    out.fill_(float("nan"))
    group.quiet()
    before = world.network.statistics(group)
    measured.call()
    group.synchronize()
    group.quiet()
    after = world.network.statistics(group)
    sent = after.bytes - before.bytes if after is not None and before is not None else 0
    exact = measured.exact(torch.cat([part.to(device) for part in parts]).double())
    error = worst_of(group.exchange("errors", (out.double() - exact).abs().max().item()))
    bound = product_bound(measured.depth, out.dtype)
    if measured.fast:
        bound += fast_accumulation_bound(measured.depth)
    floor_ms = max(times["library"], wire_ms, network_ms)
    return {
        "op": measured.op,
        "m_total": m_total,
        "n": n,
        "k": k,
        "dtype": str(out.dtype).removeprefix("torch."),
        "ranks": group.size,
        "nodes": group.nodes,
        "gpus": torch.cuda.device_count(),
        "link_gb_per_s": rate,
        "network_gb_per_s": links.network,
        "emulated": group.size > torch.cuda.device_count() or rate is not None or group.nodes > 1,
        "fused_ms": times["fused"],
        "library_ms": times["library"],
        "wire_ms": wire_ms,
        "network_ms": network_ms,
        "network_bytes": group.exchange("bytes", sent),  # of one call, per rank
        "network_bytes_if_once": crossing,
        "host_driven_ms": times["host_driven"],
        "speedup": times["host_driven"] / times["fused"],
        "floor_fraction": floor_ms / times["fused"],
        "sustained_fused_ms": sustained["fused"],
        "sustained_library_ms": sustained["library"],
        "sustained_host_driven_ms": sustained["host_driven"],
        "sustained_floor_fraction": max(sustained["library"], wire_ms, network_ms) / sustained["fused"],
        "max_error": error,
        "error_bound": bound,
        "plan": str(measured.explain()),
    }


def measure(
    group: Group, m_total: int, n: int, k: int, dtype: torch.dtype, config: Config | None, repeats: int, *,
    backward: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measure one shape. Runs on every rank and returns the same figures on each."""
    if backward:
        return measure_backward(group, (m_total, n, k), dtype, repeats)
    a, w = draw(group.rank, m_total // group.size, n, k, dtype, group.device)
    a = sent_from(group, a)
    out = torch.empty(m_total, n, device=group.device, dtype=dtype)
    measured = Gathering(
        op="all_gather_matmul",
        shape=(m_total, n, k),
        a=a,
        out=out,
        multiply=lambda gathered: torch.mm(gathered, w.t(), out=out),
        prepare=lambda: prepare(group, a, w.t(), out, None, config),
        call=lambda: all_gather_matmul(a, w.t(), out=out, config=config),
        explain=lambda: explain(a, w.t(), out=out, config=config),
        exact=lambda gathered: gathered @ w.double().t(),
        depth=k,
    )
    return measure_gathering(group, measured, repeats)


def measure_backward(group: Group, shape: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Measure both gradients: that of a by matmul_reduce_scatter, that of b by all_gather_matmul_weight_grad."""
    m_total, n, k = shape
    device, size = group.device, group.size
    rows = m_total // size
    a, w = draw(group.rank, rows, n, k, dtype, device)
    dy, _ = draw(size + group.rank, m_total, 0, n, dtype, device)
    da, dw, product = torch.empty_like(a), torch.empty_like(w), torch.empty(m_total, k, dtype=dtype, device=device)
    gathered = torch.empty_like(product)
    torch.cuda.current_stream(device).synchronize()
    everyone = group.exchange("operands", (a, w, dy))
    products = torch.tensor(group.exchange("products", product.data_ptr()), dtype=torch.int64, device="cpu").to(device)
    block = rows * k * a.element_size()
    bytes_of = dict(nvlink=group.nodes * (group.gpus_per_node - 1) * block, network=(group.nodes - 1) * block)

    def gather() -> None:
        for source, (part, _, _) in enumerate(everyone):
            gathered[source * rows : (source + 1) * rows].copy_(part)

    def reduce() -> None:
        add_up(products, size, da.view(-1), group.rank * rows * k, DTYPES[dtype])

    def multiply_for_a() -> None:
        torch.mm(dy, w, out=product)

    def multiply_for_b() -> None:
        torch.mm(dy.t(), gathered, out=dw)

    def errors() -> dict[str, float]:
        leaves = [a.clone().requires_grad_(), w.clone().requires_grad_()]
        y = all_gather_matmul(leaves[0], leaves[1].t())
        found = torch.autograd.grad(y, leaves, dy)
        group.synchronize()
        own = slice(group.rank * rows, (group.rank + 1) * rows)
        of_a: Any = sum(theirs[own].double() @ weight.double() for _, weight, theirs in everyone)
        of_w = dy.double().t() @ torch.cat([part for part, _, _ in everyone]).double()
        return {
            "a": error_of(found[0], of_a, bound_of(size * n, n, size, dtype)),
            "b": error_of(found[1], of_w, product_bound(m_total, dtype)),
        }

    gathering, reducing = Transfer(gather, **bytes_of), Transfer(reduce, **bytes_of)
    copy, add = gathering.paced(group), reducing.paced(group)
    measured = Backward(
        op="all_gather_matmul",
        dimensions=named(shape),
        dtype=dtype,
        library=[multiply_for_a, multiply_for_b],
        fused=[
            reduce_scatter.prepare(group, Sum(dy, w, da)),
            weight_grad.prepare(group, a, dy, dw.t(), None),
        ],
        host_driven={
            "in order": [multiply_for_a, BARRIER, add, BARRIER, copy, multiply_for_b],
            "overlapped": [beside(device, copy, multiply_for_a), BARRIER, beside(device, add, multiply_for_b)],
        },
        transfers=[gathering, reducing],
        errors=errors,
        plans=[reduce_scatter.explain(dy, w, out=da), weight_grad.explain(a, dy, out=dw.t())],
    )
    return measure_backward_pass(group, measured, repeats)


def _traffic(size: int) -> tuple[float, float]:
    block = size // RANKS * size * 2
    return gathered(block)


def _latency(group: Group, shape: Shape, dtype: torch.dtype) -> Latency:
    m_total, n, k = shape
    a, w = draw(group.rank, -(-m_total // group.size), n, k, dtype, group.device)
    gathered = a.repeat(group.size, 1)
    b = w.t()
    return Latency(lambda: all_gather_matmul(a, b, group=group), lambda: torch.mm(gathered, b), "torch.mm")


BENCHMARK = Benchmark(
    measure,
    problem="mkernel.ops.all_gather_matmul.baselines:Gather",
    published=Published(shape=lambda size, ranks: (size, size // 16, size), traffic=_traffic),
    latency=_latency,
    latency_shapes=FEW_ROWS,
    shared_gpu_shapes=(*((m, 2048, 8192) for m in (16384, 4096, 512)), *SHARED_GPU_ROWS),
)
