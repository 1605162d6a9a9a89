"""The way over NCCL: its collective before or after the library's GEMM, for the operators that multiply.

All ranks are in this process, so NCCL is too: torch.cuda.nccl drives all GPUs from one thread. That needs a
GPU for each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mkernel.bench.timing import Stopwatch
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def refusal(op: str, ranks: int, nodes: int) -> str | None:
    """Why it can not be measured here; None if it can."""
    if op not in OPERATORS:
        return f"NCCL's way is there for {', '.join(OPERATORS)}, not for {op}"
    if nodes > 1:
        return "NCCL between nodes needs a process for each rank; mkernel bench has all ranks in one"
    if ranks < 2 or ranks > torch.cuda.device_count():
        return f"NCCL needs a GPU for each of 2 or more ranks; here are {torch.cuda.device_count()} for {ranks}"
    return None


def measure(group: Group, op: str, shape: tuple[int, ...], dtype: torch.dtype, repeats: int) -> float:
    """Median milliseconds in bursts; runs on every rank, the same figure comes back on each."""
    if op not in OPERATORS:
        raise ArgumentError(f"NCCL's way is there for {', '.join(OPERATORS)}, not for {op}")
    m, n, k = shape
    size, device = group.size, group.device

    def tensor(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype)

    if op == "all_gather_matmul":
        a, w, middle, out = tensor(m // size, k), tensor(n, k), tensor(m, k), tensor(m, n)
    else:
        rows = m // size if op == "matmul_reduce_scatter" else m
        a, w, middle, out = tensor(m, k // size), tensor(n, k // size), tensor(m, n), tensor(rows, n)
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    everyone: list[Any] = group.exchange("NCCL", (stream, a, w, middle, out))
    took = 0.0
    if group.rank == 0:
        took = _time(op, everyone, repeats)
    return group.exchange("NCCL", took)[0]


def _time(op: str, everyone: list[Any], repeats: int) -> float:
    import torch.cuda.nccl as nccl

    streams, a, w, middle, out = (list(part) for part in zip(*everyone))

    def multiply(left: list[torch.Tensor], into: list[torch.Tensor]) -> None:
        for stream, x, y, z in zip(streams, left, w, into):
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                torch.mm(x, y.t(), out=z)

    def call() -> None:
        if op == "all_gather_matmul":
            nccl.all_gather(a, middle, streams=streams)
            multiply(middle, out)
        elif op == "matmul_reduce_scatter":
            multiply(a, middle)
            nccl.reduce_scatter(middle, out, streams=streams)
        else:
            multiply(a, middle)
            nccl.all_reduce(middle, out, streams=streams)

    call()
    for stream in streams:
        stream.synchronize()
    calls: dict[str, Callable[[], object]] = {"nccl": call}
    return Stopwatch(streams).bursts(calls, repeats)["nccl"]
