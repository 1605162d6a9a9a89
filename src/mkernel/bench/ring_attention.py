"""ring_attention beside what it replaces: copy all keys and values, then call cuDNN."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mkernel.bench.timing import Link, Stopwatch
from mkernel.ops.ring_attention import explain, prepare, ring_attention
from mkernel.runtime.config import Config
from mkernel.runtime.cuda import CudaWorld
from mkernel.runtime.group import Group
from mkernel.runtime.sequences import Sequences, from_zigzag
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links

Shape = tuple[int, int, int, int]  # batch, heads, positions of the whole sequence, head dimension
DEFAULT_SHAPES: list[Shape] = [(4, 16, 12288, 128), (4, 16, 49152, 128)]
ROWS_CHECKED = 16  # of each rank and head, in float64


_one_at_a_time = threading.Lock()  # which kernel torch takes is a setting of the process, and ranks are threads


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    with _one_at_a_time, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def measure(
    group: Group, shape: Shape, dtype: torch.dtype, causal: bool, layout: str, config: Config | None, repeats: int
) -> dict[str, Any]:
    """One shape; runs on every rank, the same figures come back on each."""
    batch, heads, positions, dim = shape
    size, rank, device = group.size, group.rank, group.device
    length = positions // size
    generator = torch.Generator(device).manual_seed(rank)
    query, key, value = (
        torch.randn(batch, heads, length, dim, device=device, dtype=dtype, generator=generator) for _ in range(3)
    )
    out = torch.empty_like(query)
    torch.cuda.current_stream(device).synchronize()
    parts = group.exchange("parts", (query, key, value))

    sequences = Sequences(size, length, layout == "zigzag", causal, None)
    row_bytes = batch * heads * 2 * dim * query.element_size()
    sent = max(sum(sequences.keys_sent(s, r) for r in range(size) if r != s) for s in range(size)) * row_bytes
    rate = group.world.links.nvlink
    wire_ms = sent / (rate * 1e6) if rate else 0.0

    merge = from_zigzag if layout == "zigzag" else (lambda tensors: torch.cat(list(tensors), 2))
    whole = [merge([part[i].to(device) for part in parts]) for i in range(3)]
    gathered = [torch.empty_like(tensor) for tensor in whole[1:]]
    link = Link(device)
    share = slice(rank * heads // size, (rank + 1) * heads // size)

    def library() -> None:
        # the whole problem in one call, on all SMs: nobody's rate is better
        if rank == 0:
            _cudnn(whole[0], whole[1], whole[2], causal)

    def host_driven() -> None:
        link.open()
        for source, (_, k, v) in enumerate(parts):
            gathered[0][:, :, source * length : (source + 1) * length].copy_(k)
            gathered[1][:, :, source * length : (source + 1) * length].copy_(v)
        link.hold(int(wire_ms * 1e6))
        if causal:  # balanced over the ranks, as no layout is in this way: a share of the heads
            _cudnn(whole[0][:, share], whole[1][:, share], whole[2][:, share], True)
        else:
            _cudnn(query, gathered[0], gathered[1], False)

    stream = torch.cuda.current_stream(device)
    host_driven()
    library()
    stream.synchronize()
    launch = prepare(group, query, key, value, out, None, causal, None, layout, None, config)
    everyone = group.exchange("ready", (launch, stream, library, host_driven))
    measured: tuple[dict[str, float], dict[str, float]] = ({}, {})
    if rank == 0:
        assert isinstance(group.world, CudaWorld)
        measured = _time(group.world, everyone, repeats)
    times, sustained = group.exchange("times", measured)[0]

    out.fill_(float("nan"))
    ring_attention(query, key, value, is_causal=causal, layout=layout, out=out, config=config)
    group.synchronize()
    error = max(group.exchange("error", _error(sequences, rank, query, out, whole)))
    gpus = min(torch.cuda.device_count(), size)
    floor_ms = max(times["library"] / gpus, wire_ms)
    plan = explain(query, key, value, is_causal=causal, layout=layout, out=out, config=config)
    return {
        "op": "ring_attention",
        "batch": batch,
        "heads": heads,
        "positions": positions,
        "dim": dim,
        "causal": causal,
        "layout": layout,
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": size,
        "gpus": torch.cuda.device_count(),
        "kernel": plan.kernel,
        "link_gb_per_s": rate,
        "emulated": size > torch.cuda.device_count() or rate is not None,
        "fused_ms": times["fused"],
        "library_ms": times["library"] / gpus,
        "wire_ms": wire_ms,
        "host_driven_ms": times["host_driven"],
        "speedup": times["host_driven"] / times["fused"],
        "floor_fraction": floor_ms / times["fused"],
        "sustained_fused_ms": sustained["fused"],
        "sustained_library_ms": sustained["library"] / gpus,
        "sustained_host_driven_ms": sustained["host_driven"],
        "sustained_floor_fraction": max(sustained["library"] / gpus, wire_ms) / sustained["fused"],
        "error_in_bounds": error,  # 1.0 is the largest that is right
        "plan": str(plan),
    }


def _error(
    sequences: Sequences, rank: int, query: torch.Tensor, out: torch.Tensor, whole: Sequence[torch.Tensor]
) -> float:
    """The largest error of some rows, in bounds: eps times the weighted mean of |value|, and 2^-18."""
    length, positions = query.shape[2], whole[1].shape[2]
    rows = torch.linspace(0, length - 1, min(ROWS_CHECKED, length), device=query.device).long()
    at = torch.from_numpy(sequences.positions(rank)).to(query.device)[rows]
    worst = 0.0
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            scores = query[b, h, rows].double() @ whole[1][b, h].double().t() * query.shape[3] ** -0.5
            if sequences.causal:
                scores = scores.masked_fill(
                    torch.arange(positions, device=query.device)[None] > at[:, None], -torch.inf
                )
            weights, value = torch.softmax(scores, -1), whole[2][b, h].double()
            bound = torch.finfo(query.dtype).eps * (weights @ value.abs()) + 2.0**-18
            error = ((out[b, h, rows].double() - weights @ value).abs() / bound).max().item()
            worst = max(worst, error if error == error else float("inf"))
    return worst


def _time(world: CudaWorld, everyone: Sequence[Any], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of the three ways on the streams of all ranks, in bursts and sustained."""
    streams = [stream for _, stream, _, _ in everyone]

    def fused() -> None:
        world.launch_together({rank: (launch, stream) for rank, (launch, stream, _, _) in enumerate(everyone)})

    def on_all(which: int) -> Callable[[], None]:
        def run() -> None:
            for entry in everyone:
                with torch.cuda.stream(entry[1]):
                    entry[which]()

        return run

    calls = {"library": on_all(2), "fused": fused, "host_driven": on_all(3)}
    stopwatch = Stopwatch(streams)
    return stopwatch.bursts(calls, repeats), stopwatch.sustained(calls, repeats)


def run(
    shape: Shape,
    *,
    ranks: int,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    layout: str = "contiguous",
    link: float | None,
    config: Config | None = None,
) -> dict[str, Any]:
    """Measure one shape. `link`: GB/s of a whole GPU's link; ranks that share a GPU get their share of
    it, as they get their share of its SMs. None does not pace."""
    sharing = -(-ranks // torch.cuda.device_count())
    links = Links(nvlink=link / sharing) if link and ranks > 1 else Links()
    batch, heads, positions, dim = shape
    repeats = 40 if batch * heads * positions**2 * dim < 1e13 else 8

    def on_rank(group: Group) -> dict[str, Any]:
        return measure(group, shape, dtype, causal, layout, config, repeats)

    return spawn(on_rank, nodes=1, gpus_per_node=ranks, device="cuda", links=links, timeout=600.0)[0]


def main(
    shapes: list[Shape] | None,
    ranks: int,
    nodes: int,
    dtype: str,
    causal: bool,
    layout: str,
    link: float | None,
    json_path: str | None,
) -> int:
    """What `mkernel bench ring_attention` does. Returns the exit code."""
    from mkernel.bench import DTYPES, machine

    if not torch.cuda.is_available():
        print("mkernel bench measures time, which needs a GPU; there is none here. `mkernel demo` runs without.")
        return 1
    if nodes != 1:
        print("mkernel bench: several nodes on CUDA are not supported yet.")
        return 2
    columns = "{:>22} {:>8} {:>10} {:>9} {:>9} {:>9} {:>11} {:>8} {:>14} {:>9} {:>15}"
    names = "shape kernel mask fused cuDNN wire host-driven speed-up floor_fraction sustained error_in_bounds"
    print("times in ms, medians of short bursts; sustained: the floor fraction under a long load")
    print(columns.format(*(name.replace("_", " ") for name in names.split())))
    results = []
    for shape in shapes or DEFAULT_SHAPES:
        result = run(shape, ranks=ranks, dtype=DTYPES[dtype], causal=causal, layout=layout, link=link)
        results.append(result)
        mark = "  emulated" if result["emulated"] else ""
        wrong = "" if result["error_in_bounds"] <= 1.0 else "  WRONG RESULT"
        figures = [
            "B{}xH{}xS{}xD{}".format(*shape),
            result["kernel"],
            (layout if ranks > 1 else "causal") if causal else "none",
            *(f"{result[name]:.3f}" for name in ("fused_ms", "library_ms", "wire_ms", "host_driven_ms")),
            *(f"{result[name]:.3f}" for name in ("speedup", "floor_fraction", "sustained_floor_fraction")),
            f"{result['error_in_bounds']:.2g}",
        ]
        print(columns.format(*figures) + mark + wrong, flush=True)
    if json_path is not None:
        with open(json_path, "w") as file:
            json.dump({"machine": machine(), "results": results}, file, indent=1)
    return 0 if all(result["error_in_bounds"] <= 1.0 for result in results) else 1
