"""Benchmarks: an operator beside the library and beside the host-driven way, in one run."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from typing import Any

import torch
import triton

from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_SHAPES = {
    "all_gather_matmul": [(16384, 2048, 8192), (8192, 2048, 8192), (8192, 8192, 8192)],
    "matmul_all_reduce": [(16384, 8192, 8192), (128, 8192, 8192)],
    "matmul_reduce_scatter": [(16384, 8192, 8192), (4096, 8192, 8192)],
}
REPEATS = 40
TIMEOUT = 120.0  # seconds; of a wait, so far more than any shape takes
NETWORK_LATENCY = 5e-6  # seconds, of a paced network


def run(
    op: str,
    shapes: Sequence[tuple[int, int, int]],
    *,
    ranks: int,
    nodes: int = 1,
    dtype: torch.dtype,
    link: float | None,
    network: float | None = None,
    config: Config | None = None,
    repeats: int = REPEATS,
) -> list[dict[str, Any]]:
    """Measure shapes (m_total, n, k) on nodes x ranks. `link`, `network`: GB/s of a whole GPU's NVLink and
    of its way to other nodes; ranks that share a GPU get their share of it, as they get their share of
    its SMs. None does not pace."""
    from mkernel.bench import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

    measure = {
        "all_gather_matmul": all_gather_matmul.measure,
        "matmul_all_reduce": matmul_all_reduce.measure,
        "matmul_reduce_scatter": matmul_reduce_scatter.measure,
    }[op]
    sharing = -(-ranks * nodes // torch.cuda.device_count())
    links = Links(
        nvlink=link / sharing if link and ranks > 1 else None,
        network=network / sharing if network and nodes > 1 else None,
        network_latency=NETWORK_LATENCY if network and nodes > 1 else 0.0,
    )

    def on_rank(group: Group, shape: tuple[int, int, int]) -> dict[str, Any]:
        return measure(group, *shape, dtype, config, repeats)

    results = []
    for shape in shapes:
        results.append(
            spawn(on_rank, shape, nodes=nodes, gpus_per_node=ranks, device="cuda", links=links, timeout=TIMEOUT)[0]
        )
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
    op: str,
    shapes: list[tuple[int, int, int]] | None,
    ranks: int,
    nodes: int,
    dtype: str,
    link: float | None,
    network: float | None,
    json_path: str | None,
) -> int:
    """What `mkernel bench` does. Returns the exit code."""
    if not torch.cuda.is_available():
        print("mkernel bench measures time, which needs a GPU; there is none here. `mkernel demo` runs without.")
        return 1
    columns = "{:>8} {:>6} {:>6} {:>8} {:>8} {:>8} {:>8} {:>11} {:>8} {:>14} {:>10} {:>9} {:>7}"
    names = "m_total n k fused cuBLAS wire network host-driven speed-up floor_fraction sustained max_error bound"
    print("times in ms, medians of short bursts; sustained: the floor fraction under a long load")
    print(columns.format(*(name.replace("_f", " f").replace("_e", " e") for name in names.split())))
    results = []
    for shape in shapes or DEFAULT_SHAPES[op]:
        result = run(op, [shape], ranks=ranks, nodes=nodes, dtype=DTYPES[dtype], link=link, network=network)[0]
        results.append(result)
        mark = "  emulated" if result["emulated"] else ""
        wrong = "" if result["max_error"] <= result["error_bound"] else "  WRONG RESULT"
        figures = [
            *(str(result[name]) for name in ("m_total", "n", "k")),
            *(f"{result[name]:.3f}" for name in ("fused_ms", "library_ms", "wire_ms", "network_ms", "host_driven_ms")),
            *(f"{result[name]:.3f}" for name in ("speedup", "floor_fraction", "sustained_floor_fraction")),
            *(f"{result[name]:.2g}" for name in ("max_error", "error_bound")),
        ]
        print(columns.format(*figures) + mark + wrong, flush=True)
    if json_path is not None:
        with open(json_path, "w") as file:
            json.dump({"machine": machine(), "results": results}, file, indent=1)
    return 0 if all(result["max_error"] <= result["error_bound"] for result in results) else 1
