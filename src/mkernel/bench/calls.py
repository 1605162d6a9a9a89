"""Latency of calls, `mkernel bench --latency`: what an eager call costs the host, and how long its kernel takes.

- *Host time*: from call to return, over many calls in a row; of the operator, and of the library's call for the same
  problem on one GPU with everything in place (torch.mm, F.scaled_dot_product_attention, torch._grouped_mm). Calls are
  issued in batches that fit into the GPU's queue, and the GPU finishes a batch before the next one begins, so that the
  host never waits for it.
- *Kernel time*: of one rank only: many calls are captured into a graph and replayed, so that the host does not matter.

Several ranks are threads of this process; under torchrun, processes:

    mkernel bench --latency --ranks 4
    torchrun --nproc-per-node 4 -m mkernel.bench.calls
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from mkernel import operators
from mkernel.bench.benchmark import Latency
from mkernel.environment import one_of_several_processes
from mkernel.operators import Shape
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.tables import show
from mkernel.workloads import DTYPES

WARM_UP = 5
BATCH = 50  # calls that the host issues without waiting
BATCHES = 6  # the fastest one counts: others share the machine
CAPTURED = 20  # calls in a graph
REPLAYS = 10
TIMEOUT = 60.0
COLUMNS = ("host us", "library", "ratio", "kernel us", "library", "fraction")


def measure(group: Group, op: str, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds of a call of one shape. Collective."""
    latency: Latency = operators.find(op, "bench").load("bench").latency(group, shape, dtype)
    found: dict[str, Any] = {"op": op, "shape": list(shape), "ranks": group.size, "library": latency.name}
    for name, call in (("host_us", latency.call), ("library_host_us", latency.library)):
        found[name] = host_time(group, call)
    if group.size == 1 and group.device.type == "cuda":
        for name, call in (("kernel_us", latency.call), ("library_kernel_us", latency.library)):
            found[name] = kernel_time(group, call)
    return found


def host_time(group: Group, call: Callable[[], object]) -> float:
    """Microseconds from call to return."""
    for _ in range(WARM_UP):
        call()
    best = float("inf")
    for _ in range(BATCHES):
        group.synchronize()
        group.barrier()
        begun = time.perf_counter()
        for _ in range(BATCH):
            call()
        best = min(best, (time.perf_counter() - begun) / BATCH * 1e6)
    group.synchronize()
    return max(group.exchange("host time", best))


def kernel_time(group: Group, call: Callable[[], object]) -> float:
    """Microseconds of a call in a graph of many."""
    stream = torch.cuda.Stream(group.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    group.synchronize()
    torch.cuda.synchronize(group.device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CAPTURED):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(group.device)
        times.append(start.elapsed_time(end) / CAPTURED * 1e3)
    group.check()
    return sorted(times)[len(times) // 2]


def cases(op: str | None, shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
    """What to measure: these shapes of an operator, or the default ones of all operators."""
    found = []
    for operator in operators.registered("bench").values():
        benchmark = operator.load("bench")
        if benchmark.latency is not None and op in (None, operator.name):
            found += [(operator.name, shape) for shape in shapes or benchmark.latency_shapes]
    return found


def run(group: Group, wanted: Sequence[tuple[str, Shape]], dtype: torch.dtype) -> list[dict[str, Any]]:
    """The figures of all cases. Collective."""
    with torch.no_grad():
        return [measure(group, op, shape, dtype) for op, shape in wanted]


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """The figures, with a line for each case."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("operator", "shape", *COLUMNS, ""):
        table.add_column(name, justify="left" if name in ("operator", "") else "right", no_wrap=True)
    for result in results:
        cells = [f"{result['host_us']:.1f}", f"{result['library_host_us']:.1f}"]
        cells.append(f"{result['host_us'] / result['library_host_us']:.2f}")
        if "kernel_us" in result:
            cells += [f"{result['kernel_us']:.1f}", f"{result['library_kernel_us']:.1f}"]
            cells.append(f"{result['library_kernel_us'] / result['kernel_us']:.2f}")
        else:
            cells += ["-"] * 3
        table.add_row(result["op"], "x".join(map(str, result["shape"])), *cells, f"beside {result['library']}")
    return table


def main(
    wanted: Sequence[tuple[str, Shape]] | None = None, ranks: int = 1, dtype: str = "bf16", device: str = "cuda"
) -> list[dict[str, Any]]:
    """Measure and print. Returns the figures, on one of the processes."""
    wanted = cases(None, ()) if wanted is None else wanted
    console = Console(highlight=False)
    if one_of_several_processes():
        import mkernel as mk

        group = mk.init(timeout=TIMEOUT)
        results, rank, how = run(group, wanted, DTYPES[dtype]), group.rank, f"{group.size} processes"
        group.close()
        torch.distributed.destroy_process_group()
    else:
        results = spawn(run, wanted, DTYPES[dtype], gpus_per_node=ranks, device=device, timeout=TIMEOUT)[0]
        rank, how = 0, f"{ranks} rank" + (ranks > 1) * "s, threads of this process"
    if rank == 0:
        console.print(f"{how}, {dtype}; ratio: host time over the library's; fraction: the library's kernel over ours")
        show(table_of(results), console)
    return results


def command(
    op: str | None, wanted: Sequence[tuple[str, Shape]], ranks: int, nodes: int, dtype: str, path: Path | None
) -> None:
    """`mkernel bench --latency`. wanted: operators and shapes that were asked for; none means the default shapes."""
    if nodes > 1:
        raise ArgumentError("the latency of calls is measured on one node: leave out --nodes")
    known = cases(op, ())
    if not known:
        raise ArgumentError(f"{op} has no call whose latency is measured")
    results = main(wanted or known, ranks=ranks, dtype=dtype)
    if path is not None:
        from mkernel.bench import machine

        path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("mkernel.bench.calls measures time, which needs a GPU; this machine has none")
    main()
