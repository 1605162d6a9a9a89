"""Benchmark of ring_attention against what it replaces: copy all keys and values, then call cuDNN."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mkernel.bench.benchmark import Benchmark, Latency, Published
from mkernel.bench.published import RANKS, gathered
from mkernel.bench.timing import Link, time_ways
from mkernel.operators import Shape
from mkernel.ops.attention import explain, prepare, ring_attention
from mkernel.ops.attention.sequences import Pattern, Scoring, Sequences, from_zigzag
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group

ROWS_CHECKED = 16  # rows of each rank and head that are compared with float64


sdpa_lock = threading.Lock()  # sdpa_kernel sets the backend of the whole process, and ranks are threads


def cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_lock, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def heads_of(
    rank: int, size: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a rank."""
    batch, heads, positions, dim = shape
    generator = torch.Generator(device).manual_seed(rank)

    def draw() -> torch.Tensor:
        return torch.randn(batch, heads, positions // size, dim, device=device, dtype=dtype, generator=generator)

    return draw(), draw(), draw()


def _wire_ms(group: Group, sequences: Sequences, row_bytes: int) -> float:
    """How long the rank that sends the most keys and values occupies its paced link; 0 if links are not paced."""
    rate = group.world.links.nvlink
    ranks = range(group.size)
    sent = max(sum(sequences.keys_sent(source, to) for to in ranks if to != source) for source in ranks) * row_bytes
    return sent / (rate * 1e6) if rate else 0.0


def measure(
    group: Group, batch: int, heads: int, positions: int, dim: int, dtype: torch.dtype, config: Config | None,
    repeats: int, *, causal: bool = False, zigzag: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measure one shape; `positions` is the length of the whole sequence. Runs on every rank and returns the same
    figures on each."""
    layout = "zigzag" if zigzag else "contiguous"
    if batch * heads * positions**2 * dim >= 1e13:
        repeats = min(repeats, 8)
    size, rank, device = group.size, group.rank, group.device
    length = positions // size
    query, key, value = heads_of(rank, size, (batch, heads, positions, dim), dtype, device)
    out = torch.empty_like(query)
    torch.cuda.current_stream(device).synchronize()
    parts = group.exchange("parts", (query, key, value))
    sequences = Sequences(size, length, Pattern(causal, layout))
    rate = group.world.links.nvlink
    wire_ms = _wire_ms(group, sequences, row_bytes=batch * heads * 2 * dim * query.element_size())

    merge = from_zigzag if layout == "zigzag" else (lambda tensors: torch.cat(list(tensors), 2))
    whole = [merge([part[i].to(device) for part in parts]) for i in range(3)]
    gathered = [torch.empty_like(tensor) for tensor in whole[1:]]
    link = Link(device)
    share = slice(rank * heads // size, (rank + 1) * heads // size)

    def library() -> None:
        # the whole problem in one call, on all SMs: the best possible rate
        if rank == 0:
            cudnn(whole[0], whole[1], whole[2], causal)

    def host_driven() -> None:
        link.open()
        for source, (_, k, v) in enumerate(parts):
            gathered[0][:, :, source * length : (source + 1) * length].copy_(k)
            gathered[1][:, :, source * length : (source + 1) * length].copy_(v)
        link.hold(int(wire_ms * 1e6))
        if causal:  # each rank takes a share of the heads, a better balance than any layout gives this baseline
            cudnn(whole[0][:, share], whole[1][:, share], whole[2][:, share], True)
        else:
            cudnn(query, gathered[0], gathered[1], False)

    host_driven()
    library()
    torch.cuda.current_stream(device).synchronize()
    launch = prepare(group, query, key, value, out, None, Pattern(causal, layout), Scoring(), config)
    times, sustained = time_ways(group, dict(library=library, fused=launch, host_driven=host_driven), repeats)

    out.fill_(float("nan"))
    ring_attention(query, key, value, is_causal=causal, layout=layout, out=out, config=config)
    group.synchronize()
    error = max(group.exchange("errors", error_of(sequences, rank, query, out, whole)))
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
        "nodes": group.nodes,
        "gpus": torch.cuda.device_count(),
        "kernel": plan.kernel,
        "link_gb_per_s": rate,
        "emulated": size > torch.cuda.device_count() or rate is not None,
        "fused_ms": times["fused"],
        "library_ms": times["library"] / gpus,
        "wire_ms": wire_ms,
        "network_ms": 0.0,
        "host_driven_ms": times["host_driven"],
        "speedup": times["host_driven"] / times["fused"],
        "floor_fraction": floor_ms / times["fused"],
        "sustained_fused_ms": sustained["fused"],
        "sustained_library_ms": sustained["library"] / gpus,
        "sustained_host_driven_ms": sustained["host_driven"],
        "sustained_floor_fraction": max(sustained["library"] / gpus, wire_ms) / sustained["fused"],
        "max_error": error,
        "error_bound": 1.0,  # max_error is a multiple of the bound
        "plan": str(plan),
    }


def error_of(
    sequences: Sequences, rank: int, query: torch.Tensor, out: torch.Tensor, whole: Sequence[torch.Tensor]
) -> float:
    """The largest error of some rows, as a multiple of its bound: eps times the weighted mean of |value| + 2^-18."""
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


def _traffic(size: int) -> tuple[float, float]:
    block = 2 * 4 * 16 * (size // RANKS) * 128 * 2
    return gathered(block)


def _latency(group: Group, shape: Shape, dtype: torch.dtype) -> Latency:
    batch, heads, positions, dim = shape
    generator = torch.Generator(group.device).manual_seed(group.rank)
    sizes = (3, batch, heads, positions // group.size, dim)
    q, k, v = torch.randn(sizes, device=group.device, dtype=dtype, generator=generator)
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda and dtype != torch.float32 else SDPBackend.MATH

    def library() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return Latency(lambda: ring_attention(q, k, v, group=group), library, "SDPA")


BENCHMARK = Benchmark(
    measure,
    several_nodes=False,
    latency=_latency,
    latency_shapes=tuple((4, 16, length, dim) for dim in (64, 128) for length in (512, 1024, 2048, 4096, 8192, 16384)),
    problem="mkernel.ops.attention.baselines:Attention",
    published=Published(
        shape=lambda size, ranks: (4, 16, size // 16 * ranks, 128),
        traffic=_traffic,
        needs_all_ranks=True,
        note="the same in attention: a rank's queries against one block of keys; every rank contributes one such block",
    ),
)
