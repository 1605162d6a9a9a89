"""Benchmarks: an operator beside the library and beside the host-driven way, in one run."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from typing import Any

import torch
import triton

from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_SHAPES = [(16384, 2048, 8192), (8192, 2048, 8192), (8192, 8192, 8192)]
# tokens of all ranks, out or inter, hidden: a batch of training, then one of decoding
MOE_SHAPES = [(8192, 2048, 7168), (128, 2048, 7168)]
SHAPES = {"moe_dispatch_matmul": MOE_SHAPES, "moe_ffn": MOE_SHAPES}
REPEATS = 40


def run(
    op: str,
    shapes: Sequence[tuple[int, int, int]],
    *,
    ranks: int,
    dtype: torch.dtype,
    link: float | None,
    config: Config | None = None,
    repeats: int = REPEATS,
) -> list[dict[str, Any]]:
    """Measure shapes (m_total, n, k). `link`: GB/s of a whole GPU's link; ranks that share a GPU get
    their share of it, as they get their share of its SMs. None does not pace."""
    from mkernel.bench import all_gather_matmul, moe

    if op == "moe_combine":
        raise ArgumentError("moe_combine is measured as a part of moe_ffn")
    measure = {
        "all_gather_matmul": all_gather_matmul.measure,
        "moe_dispatch_matmul": moe.measure_dispatch,
        "moe_ffn": moe.measure_ffn,
    }[op]
    sharing = -(-ranks // torch.cuda.device_count())
    links = Links(nvlink=link / sharing) if link and ranks > 1 else Links()

    def on_rank(group: Group, shape: tuple[int, int, int]) -> dict[str, Any]:
        return measure(group, *shape, dtype, config, repeats)

    results = []
    for shape in shapes:
        results.append(
            spawn(on_rank, shape, nodes=1, gpus_per_node=ranks, device="cuda", links=links, timeout=600.0)[0]
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
    json_path: str | None,
) -> int:
    """What `mkernel bench` does. Returns the exit code."""
    if not torch.cuda.is_available():
        print("mkernel bench measures time, which needs a GPU; there is none here. `mkernel demo` runs without.")
        return 1
    if nodes != 1:
        print("mkernel bench: several nodes on CUDA are not supported yet.")
        return 2
    columns = "{:>8} {:>6} {:>6} {:>8} {:>8} {:>8} {:>11} {:>8} {:>14} {:>10} {:>9} {:>7}"
    names = "m_total n k fused cuBLAS wire host-driven speed-up floor_fraction sustained max_error bound"
    print("times in ms, medians of short bursts; sustained: the floor fraction under a long load")
    print(columns.format(*(name.replace("_f", " f").replace("_e", " e") for name in names.split())))
    results = []
    for shape in shapes or SHAPES.get(op, DEFAULT_SHAPES):
        result = run(op, [shape], ranks=ranks, dtype=DTYPES[dtype], link=link)[0]
        results.append(result)
        mark = "  emulated" if result["emulated"] else ""
        wrong = "" if result["max_error"] <= result["error_bound"] else "  WRONG RESULT"
        figures = [
            *(str(result[name]) for name in ("m_total", "n", "k")),
            *(f"{result[name]:.3f}" for name in ("fused_ms", "library_ms", "wire_ms", "host_driven_ms")),
            *(f"{result[name]:.3f}" for name in ("speedup", "floor_fraction", "sustained_floor_fraction")),
            *(f"{result[name]:.2g}" for name in ("max_error", "error_bound")),
        ]
        print(columns.format(*figures) + mark + wrong, flush=True)
        if "gemm_ms" in result:
            against = result["gemm_against_library"]
            print(f"         the grouped GEMM alone: {result['gemm_ms']:.3f} ms, {against:.3f} of the library's speed")
    if json_path is not None:
        with open(json_path, "w") as file:
            json.dump({"machine": machine(), "results": results}, file, indent=1)
    return 0 if all(result["max_error"] <= result["error_bound"] for result in results) else 1
