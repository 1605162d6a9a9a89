"""What the benchmarks of the operators that sum over ranks share: the host-driven baseline, timing, and figures.

The host-driven baseline is the library's GEMM, followed by a reduction over the same links. It is a strong baseline: a
single kernel reads all ranks' products and adds them in fp32, and its time counts only where it exceeds what the bytes
would take on the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.bench.benchmark import Latency
from mkernel.bench.problems import draw, fast_accumulation_bound
from mkernel.bench.timing import Stopwatch, Wires
from mkernel.operators import Shape
from mkernel.ops.reduce.call import Sum
from mkernel.runtime.config import Config
from mkernel.runtime.cuda_threads import CudaThreads
from mkernel.runtime.group import Group
from mkernel.runtime.quantization import dequantize, quantize_operands
from mkernel.runtime.scaling import Scaling, for_library, scaling_of
from mkernel.runtime.world import Launch

BLOCK = 4096


@triton.jit
def _add_up(parts, out, offset, count, RANKS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = the sum over all ranks of element offset + i of their partial products."""
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):
            partial = tl.multiple_of(tl.load(parts + rank).to(tl.pointer_type(DTYPE)), 16)
            total += tl.load(partial + offset + i, mask=i < count, other=0.0).to(tl.float32)
        tl.store(out + i, total.to(DTYPE), mask=i < count)


def add_up(parts: torch.Tensor, size: int, out: torch.Tensor, offset: int, dtype: Any) -> None:
    """Sum the elements from `offset` on of all ranks' products, whose addresses are `parts`, into the flat `out`."""
    ctas = torch.cuda.get_device_properties(out.device).multi_processor_count * 4
    _add_up[(ctas,)](parts, out, offset, out.numel(), size, dtype, BLOCK, num_warps=8)


@dataclass(frozen=True)
class Measured:
    """An operator, and this rank's part of a problem.

    operands: what it takes; scaling: their scales, if they are fp8. numbers: a [m, k] and w [n, k] as what they stand
    for. multiply: the library's product, into a given tensor.
    """

    op: str
    call: Callable[..., torch.Tensor]
    explain: Callable[..., object]
    operands: tuple[torch.Tensor, ...]
    numbers: tuple[torch.Tensor, torch.Tensor]
    multiply: Callable[[torch.Tensor], object]
    options: dict[str, Any] = field(default_factory=dict)
    scaling: Scaling | None = None

    def sum(self, out: torch.Tensor, config: Config | None) -> Sum:
        """The call of which the launch is prepared."""
        return Sum(self.operands[0], self.operands[1], out, config=config, scaling=self.scaling)


def plain(group: Group, op: Any, shape: Shape, dtype: torch.dtype) -> Measured:
    """The operator of a package, on numbers of this dtype. k is the total over all ranks."""
    m, n, k = shape
    a, w = draw(group.rank, m, n, k // group.size, dtype, group.device)
    name = op.plan.OP
    return Measured(
        name, getattr(op, name), op.explain, (a, w.t()), (a, w), lambda out: torch.mm(a, w.t(), out=out)
    )  # fmt: skip


def quantized(
    group: Group, op: Any, shape: Shape, *, tensorwise: bool, blockwise: bool, fast_accum: bool
) -> Measured:  # fmt: skip
    """The operator of a module, on fp8."""
    m, n, k = shape
    drawn = draw(group.rank, m, n, k // group.size, torch.float32, group.device)
    operands = quantize_operands(*drawn, tensorwise=tensorwise, blockwise=blockwise)
    a, b, scale_a, scale_b = operands
    of_a, of_b = for_library(scale_a, blockwise), for_library(scale_b, blockwise)

    def multiply(out: torch.Tensor) -> object:
        return torch._scaled_mm(a, b, of_a, of_b, out_dtype=out.dtype, use_fast_accum=fast_accum, out=out)

    return Measured(
        op.OP, getattr(op, op.OP), op.explain, operands, (dequantize(a, scale_a), dequantize(b, scale_b).t()),
        multiply, dict(use_fast_accum=fast_accum), scaling_of(group, *operands, fast_accum),
    )  # fmt: skip


Step = Callable[[], None]


@dataclass(frozen=True)
class OnRank:
    """What is timed on one rank. `multiply` is the library's GEMM. `ways` are alternatives for the host-driven
    reduction that follows, each a list of steps that all ranks take together; the fastest one counts."""

    launch: Launch
    stream: torch.cuda.Stream
    multiply: Step
    ways: Sequence[Sequence[Step]]


def measure_together(group: Group, mine: OnRank, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of "library", "fused" and "host_driven", in bursts and sustained; the same on every rank."""
    everyone: Sequence[OnRank] = group.exchange("ready", mine)
    measured: tuple[dict[str, float], dict[str, float]] = ({}, {})
    if group.rank == 0:
        assert isinstance(group.world, CudaThreads)
        world = group.world
        streams = [each.stream for each in everyone]

        def fused() -> None:
            world.launcher.launch_together({rank: (each.launch, each.stream) for rank, each in enumerate(everyone)})

        def library() -> None:
            for each in everyone:
                with torch.cuda.stream(each.stream):
                    each.multiply()

        def barrier() -> None:
            """A barrier between the streams of all ranks."""
            done = [each.stream.record_event() for each in everyone]
            for each in everyone:
                for event in done:
                    each.stream.wait_event(event)

        def host_driven(way: int) -> Step:
            def run() -> None:
                library()
                barrier()
                for step in range(len(mine.ways[way])):
                    for each in everyone:
                        with torch.cuda.stream(each.stream):
                            each.ways[way][step]()
                    barrier()

            return run

        ways = {f"host_driven {way}": host_driven(way) for way in range(len(mine.ways))}
        for run in ways.values():
            run()
        for stream in streams:
            stream.synchronize()
        calls = {"library": library, "fused": fused, **ways}
        stopwatch = Stopwatch(streams)
        measured = stopwatch.bursts(calls, repeats), stopwatch.sustained(calls, repeats)
        for times in measured:
            times["host_driven"] = min(times.pop(name) for name in ways)
    return group.exchange("times", measured)[0]


def figures(
    op: str, group: Group, shape: tuple[int, int, int], dtype: torch.dtype,
    times: dict[str, float], sustained: dict[str, float], wire: Wires, error: float, bound: float, plan: Any,
) -> dict[str, Any]:  # fmt: skip
    """What `mkernel bench` prints and writes for one shape: m, n, and k over all ranks."""
    floor = max(times["library"], wire.ms)
    rate = group.world.links.nvlink
    return {
        "op": op,
        "m_total": shape[0],
        "n": shape[1],
        "k": shape[2],
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": group.size,
        "nodes": group.nodes,
        "gpus": torch.cuda.device_count(),
        "link_gb_per_s": rate,
        "network_gb_per_s": group.world.links.network,
        "emulated": group.size > torch.cuda.device_count() or rate is not None or group.nodes > 1,
        "fused_ms": times["fused"],
        "library_ms": times["library"],
        "wire_ms": wire.nvlink,
        "network_ms": wire.network,
        "host_driven_ms": times["host_driven"],
        "speedup": times["host_driven"] / times["fused"],
        "floor_fraction": floor / times["fused"],
        "sustained_fused_ms": sustained["fused"],
        "sustained_library_ms": sustained["library"],
        "sustained_host_driven_ms": sustained["host_driven"],
        "sustained_floor_fraction": max(sustained["library"], wire.ms) / sustained["fused"],
        "max_error": error,
        "error_bound": bound,
        "plan": str(plan),
    }


def bound_of(k: int, k_local: int, ranks: int, dtype: torch.dtype, fast: bool = False) -> float:
    """Bound for the largest error of a sum over ranks of products of normally distributed numbers: the error of one
    product over all of k, plus one rounding of each rank's partial, which rarely exceeds 5*sqrt(k_local). fast: with
    fast accumulation, each rank's product has an error of its own, with a random sign."""
    eps = torch.finfo(dtype).eps
    rounding = 4 * k * eps if dtype == torch.float32 else 0.0
    truncated = ranks**0.5 * fast_accumulation_bound(k_local) if fast else 0.0
    return 4 * k**0.5 * eps + rounding + (ranks - 1) ** 0.5 * 5 * k_local**0.5 * eps / 2 + truncated


def latency_of(operator: Callable[..., torch.Tensor]) -> Callable[[Group, Shape, torch.dtype], Latency]:
    """The latency of an operator that sums over ranks, for a shape m x n x k of all ranks."""

    def latency(group: Group, shape: Shape, dtype: torch.dtype) -> Latency:
        m, n, k = shape
        rows = -(-m // group.size) * group.size
        a, w = draw(group.rank, rows, n, k // group.size, dtype, group.device)
        b = w.t()
        return Latency(lambda: operator(a, b, group=group), lambda: torch.mm(a, b), "torch.mm")

    return latency
