"""Benchmarks: an operator against the library, host-driven copies, NCCL and PyTorch's symmetric memory, in one run."""

from __future__ import annotations

import csv
import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from rich import box
from rich.console import Console
from rich.table import Table

from mkernel import operators
from mkernel.bench import baselines, published
from mkernel.bench.shapes import Wanted
from mkernel.operators import Shape
from mkernel.report import finite
from mkernel.runtime.config import Config
from mkernel.runtime.errors import MKernelError
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links
from mkernel.tables import growing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REPEATS = 40
TIMEOUT = 120.0  # seconds for a wait: far more than any shape takes
NETWORK_LATENCY = 5e-6  # seconds, for a paced network


def run(
    op: str,
    shapes: Sequence[Shape],
    *,
    ranks: int,
    nodes: int = 1,
    dtype: torch.dtype,
    link: float | None,
    network: float | None = None,
    config: Config | None = None,
    repeats: int = REPEATS,
    against: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Measure shapes (see `mkernel.operators`) on nodes x ranks. `link` and `network` are the rates of a whole GPU's
    NVLink and network link in GB/s; ranks that share a GPU divide them, as they divide its SMs. With None, links are
    not paced. `against` lists further baselines, "nccl" and "symm_mem", which use the real links; "symm_mem" also where
    ranks share a GPU, in processes. `options` are the operator's flags that are on."""
    measure = operators.find(op, "bench").load("bench").measure
    sharing = -(-ranks * nodes // torch.cuda.device_count())
    links = Links(
        nvlink=link / sharing if link and ranks > 1 else None,
        network=network / sharing if network and nodes > 1 else None,
        network_latency=NETWORK_LATENCY if network and nodes > 1 else 0.0,
    )

    def on_rank(group: Group, shape: Shape) -> dict[str, Any]:
        return measure(group, *shape, dtype, config, repeats, **dict.fromkeys(options, True))

    results = []
    for shape in shapes:
        result = spawn(on_rank, shape, nodes=nodes, gpus_per_node=ranks, device="cuda", links=links, timeout=TIMEOUT)[0]
        for name in baselines.LIBRARIES:
            if name in against:
                result |= baselines.measure(
                    name, op, shape, ranks=ranks, dtype=dtype, bound=result["error_bound"],
                    fused_ms=result["fused_ms"], repeats=repeats, options=options,
                )  # fmt: skip
        results.append(result)
    return results


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main(
    wanted: Sequence[Wanted],
    *,
    ranks: int,
    nodes: int,
    dtype: str,
    link: float | None,
    network: float | None,
    against: Sequence[str] = (),
    options: Sequence[str] = (),
    json_path: Path | None = None,
    csv_path: Path | None = None,
    html_path: Path | None = None,
) -> int:
    """Run `mkernel bench`. Returns the exit code. Files are written after every shape, so that results are kept even if
    a later shape fails."""
    if not torch.cuda.is_available():
        print("mkernel bench measures time, which needs a GPU; this machine has none. `mkernel demo` runs without.")
        return 1
    besides = [name for name in baselines.LIBRARIES if name in against]
    for name in besides:
        if (refused := baselines.refusal(name, ranks, nodes, options)) is not None:
            print(f"mkernel bench: --against {name}: {refused}")
            return 2
    print("times in ms, medians of short bursts; sustained: the floor fraction under sustained load")
    if any(one.row for one in wanted):
        here = published.place(nodes, ranks, torch.cuda.device_count())
        print(f"published: {published.figures()['source']}")
        print(f"  {published.SAME}\n  {published.DIFFERENT.format(here=here)}")
        for op in dict.fromkeys(one.op for one in wanted if one.row):
            if note := operators.find(op).load("bench").published.note:
                print(f"  {note}")
    results: list[dict[str, Any]] = []
    console = Console(highlight=False)
    for op, some in itertools.groupby(wanted, key=lambda one: one.op):
        console.print(f"\n[bold]{op}[/bold]")
        shown = list(some)
        columns = _columns(shown[0], against)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in (*operators.find(op).dimensions, *columns, ""):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        remarks: list[str] = []
        with growing(table, console) as grown:
            for one in shown:
                result = _figures_of(
                    one, ranks=ranks, nodes=nodes, dtype=DTYPES[dtype], link=link, network=network,
                    against=against, options=options,
                )  # fmt: skip
                results.append(result)
                table.add_row(*_row(one, result, columns))
                grown()
                remarks += _remarks(one, result)
                _write({"machine": machine(), "results": results}, json_path, csv_path, html_path)
        for remark in remarks:
            console.print(remark, markup=False, soft_wrap=True)
    return 0 if all(is_right(result) and baselines.is_right(result) for result in results) else 1


def _figures_of(one: Wanted, **how: Any) -> dict[str, Any]:
    """The figures of one shape, with those published for it; or why the measurement failed."""
    said = {"shape": list(one.shape)}
    try:
        result = run(one.op, [one.shape], **how)[0] | said
        if one.row is not None:
            compared = operators.find(one.op).load("bench").published
            result |= published.beside(compared, one.row, result, torch.cuda.get_device_name())
    except (MKernelError, torch.OutOfMemoryError) as problem:
        result = {"op": one.op, "failed": str(problem).partition("\n")[0]} | said
    return result


def is_right(result: dict[str, Any]) -> bool:
    """Is the fused operator's result right? False also if its error is NaN, which is None in JSON."""
    if "failed" in result or result["max_error"] is None:
        return False
    return result["max_error"] <= result["error_bound"]


# -- the table

TIMES = {"fused": "fused_ms", "library": "library_ms", "wire": "wire_ms", "network": "network_ms"}
FRACTIONS = {"speed-up": "speedup", "floor fraction": "floor_fraction", "sustained": "sustained_floor_fraction"}
PUBLISHED = {"published ms": "published_ms", "its floor fraction": "published_floor_fraction"}


def _columns(one: Wanted, against: Sequence[str]) -> dict[str, str]:
    besides = {library.TITLE: f"{name}_ms" for name, library in baselines.LIBRARIES.items() if name in against}
    times = TIMES | {"host-driven": "host_driven_ms"} | besides
    return (
        times
        | FRACTIONS
        | (PUBLISHED if one.row is not None else {})
        | {"max error": "max_error", "bound": "error_bound"}
    )


def _row(one: Wanted, result: dict[str, Any], columns: Mapping[str, str]) -> list[str]:
    """The cells of a shape's row: its sizes, its figures, and a mark."""
    cells = [str(number) for number in one.shape]
    for key in columns.values():
        value = result.get(key)
        digits = ".2g" if key in ("max_error", "error_bound") else ".3f"
        cells.append("-" if value is None else format(value, digits))
    if "failed" in result:
        return [*cells, "failed"]
    return [*cells, " ".join(["emulated"] * result["emulated"] + ["WRONG RESULT"] * (not is_right(result)))]


def _remarks(one: Wanted, result: dict[str, Any]) -> list[str]:
    """Remarks about a shape, for below the table."""
    said = list(baselines.remarks(result).values())
    if "failed" in result:
        said.insert(0, f"failed: {result['failed']}")
    if "gemm_ms" in result:
        alone = f"{result['gemm_ms']:.3f} ms, {result['gemm_against_library']:.3f} of the library"
        said.insert(0, f"the compute role alone, with all rows present: {alone}")
    return [f"{'x'.join(map(str, one.shape))}: {words}" for words in said]


# -- files


def _write(figures: dict[str, Any], json_path: Path | None, csv_path: Path | None, html_path: Path | None) -> None:
    if json_path is not None:
        json_path.write_text(json.dumps(finite(figures), indent=1, allow_nan=False))
    if csv_path is not None:
        rows = [{**result, **figures["machine"]} for result in figures["results"]]
        names = list(dict.fromkeys(name for row in rows for name in row))
        with open(csv_path, "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    if html_path is not None:
        from mkernel.bench.page import page

        html_path.write_text(page(figures), encoding="utf-8")
