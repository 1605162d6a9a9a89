"""Benchmark of ring_attention_backward against what it replaces: copy all keys and values, call cuDNN's backward pass,
copy partial gradients back and add them up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mkernel.bench.benchmark import Benchmark
from mkernel.bench.timing import Link, time_ways
from mkernel.ops.attention import ring_attention
from mkernel.ops.attention.backward import explained, prepare
from mkernel.ops.attention.backward.launch import Tensors
from mkernel.ops.attention.bench import heads_of, sdpa_lock
from mkernel.ops.attention.sequences import Pattern, Scoring, Sequences, from_zigzag
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group


class Library:
    """cuDNN's forward pass, done once, and its backward pass."""

    def __init__(self, tensors: list[torch.Tensor], causal: bool, dout: torch.Tensor):
        self.inputs = [tensor.data.requires_grad_() for tensor in tensors]  # they may be overwritten later
        self.dout = dout
        with sdpa_lock, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            query, key, value = self.inputs
            self.out = F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)


def measure(
    group: Group, batch: int, heads: int, positions: int, dim: int, dtype: torch.dtype, config: Config | None,
    repeats: int, *, causal: bool = False, zigzag: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measure one shape; `positions` is the length of the whole sequence. Runs on every rank and returns the same
    figures on each. The error is that of dq, dk and dv against the library, relative to the largest gradient."""
    layout = "zigzag" if zigzag else "contiguous"
    size, rank, device = group.size, group.rank, group.device
    length = positions // size
    query, key, value = heads_of(rank, size, (batch, heads, positions, dim), dtype, device)
    dout = heads_of(size + rank, size, (batch, heads, positions, dim), dtype, device)[0]
    given: Any = dict(is_causal=causal, layout=layout)
    out, lse = ring_attention(query, key, value, **given, return_lse=True)
    group.synchronize()
    parts = group.exchange("parts", (query, key, value, dout))
    sequences = Sequences(size, length, Pattern(causal, "zigzag" if zigzag else "contiguous"))
    merge = from_zigzag if zigzag else (lambda tensors: torch.cat(list(tensors), 2))
    whole = [merge([part[i].to(device) for part in parts]) for i in range(4)]
    library = Library(whole[:3], causal, whole[3])
    gathered = [torch.empty_like(tensor) for tensor in whole[1:3]]
    share = slice(rank * heads // size, (rank + 1) * heads // size)
    shared = Library([tensor[:, share] for tensor in whole[:3]], causal, whole[3][:, share])  # the causal baseline
    local = Library([query, *gathered], False, dout)
    link, rate = Link(device), group.world.links.nvlink
    ranks = range(size)
    rows = max(sum(sequences.keys_sent(source, to) for to in ranks if to != source) for source in ranks)
    row_bytes = batch * heads * 2 * dim * (query.element_size() + 4)  # keys and values, then partials in fp32
    wire_ms = rows * row_bytes / (rate * 1e6) if rate else 0.0

    def host_driven() -> None:
        link.open()
        for source, (_, k, v, _) in enumerate(parts):
            gathered[0][:, :, source * length : (source + 1) * length].copy_(k)
            gathered[1][:, :, source * length : (source + 1) * length].copy_(v)
        link.hold(int(wire_ms * 1e6))
        shared() if causal else local()

    def one_rank() -> None:
        if rank == 0:
            library()

    tensors = Tensors(
        dout, query, key, value, out, lse, None, *(torch.empty_like(each) for each in (query, key, value))
    )
    call = (group, tensors, Pattern(causal, layout), Scoring(), config)
    launch, plan = prepare(*call), explained(*call)
    host_driven()
    one_rank()
    torch.cuda.current_stream(device).synchronize()
    times, sustained = time_ways(group, dict(library=one_rank, fused=launch, host_driven=host_driven), repeats)
    group.synchronize()
    at = torch.from_numpy(sequences.positions(rank)).to(device)
    error = max(
        group.exchange("errors", _error((tensors.dq, tensors.dk, tensors.dv), [each[:, :, at] for each in library()]))
    )
    gpus = min(torch.cuda.device_count(), size)
    floor_ms = max(times["library"] / gpus, wire_ms)
    return {
        "op": "ring_attention_backward", "batch": batch, "heads": heads, "positions": positions, "dim": dim,
        "causal": causal, "layout": layout, "dtype": str(dtype).removeprefix("torch."), "ranks": size,
        "nodes": group.nodes, "gpus": torch.cuda.device_count(), "kernel": plan.kernel, "link_gb_per_s": rate,
        "emulated": size > torch.cuda.device_count() or rate is not None,
        "fused_ms": times["fused"], "library_ms": times["library"] / gpus, "wire_ms": wire_ms, "network_ms": 0.0,
        "host_driven_ms": times["host_driven"], "speedup": times["host_driven"] / times["fused"],
        "floor_fraction": floor_ms / times["fused"],
        "sustained_fused_ms": sustained["fused"], "sustained_library_ms": sustained["library"] / gpus,
        "sustained_host_driven_ms": sustained["host_driven"],
        "sustained_floor_fraction": max(sustained["library"] / gpus, wire_ms) / sustained["fused"],
        "max_error": error, "error_bound": 1.0,
        "plan": str(plan),
    }  # fmt: skip


def _error(found: tuple[torch.Tensor, ...], expected: list[torch.Tensor]) -> float:
    """The largest difference from the library, as a multiple of 16 eps of the largest gradient. Both are rounded."""
    worst = 0.0
    for gradient, other in zip(found, expected):
        difference = (gradient.double() - other.double()).abs().max()
        worst = max(worst, float(difference / (16 * torch.finfo(gradient.dtype).eps * other.double().abs().max())))
    return worst


BENCHMARK = Benchmark(measure, several_nodes=False)
