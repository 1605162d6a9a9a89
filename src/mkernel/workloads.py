"""A call of each operator for a given shape, with random numbers: what `mkernel trace` and `mkernel tune` run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.ops import all_gather_matmul as _all_gather_matmul
from mkernel.ops import matmul_all_reduce as _matmul_all_reduce
from mkernel.ops import matmul_reduce_scatter as _matmul_reduce_scatter
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.sums import Sum
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Call:
    """One rank's call, ready to be made again and again: as a user would, or as a launch."""

    run: Callable[[Config | None], torch.Tensor]
    prepare: Callable[[Config | None], Launch]
    explain: Callable[[Config | None], Any]  # its plan
    sizes: dict[str, int]  # as its Tunable names them


@dataclass(frozen=True)
class Workload:
    """How an operator is called for a shape.

    sizes: what the numbers of a shape are, of all ranks together; shared: those that are divided among them.
    on_gpu, simulated: shapes for those who name none.
    make: (group, shape, dtype) -> the call of this rank. Collective.
    tunable: how its configurations are kept.
    """

    op: str
    sizes: tuple[str, ...]
    shared: tuple[str, ...]
    on_gpu: tuple[int, ...]
    simulated: tuple[int, ...]
    make: Callable[[Group, tuple[int, ...], torch.dtype], Call]
    tunable: Tunable

    def parse(self, text: str, ranks: int) -> tuple[int, ...]:
        """A shape as people write it: 16384x2048x8192."""
        parts = text.strip().lower().split("x")
        example = "x".join(str(number) for number in self.on_gpu)
        if len(parts) != len(self.sizes) or not all(part.isdigit() and int(part) for part in parts):
            raise ArgumentError(
                f"{text!r} is no shape of {self.op}; write {' x '.join(self.sizes)} as {len(self.sizes)} whole "
                f"numbers, 1 or more: {example}"
            )
        shape = tuple(int(part) for part in parts)
        for name, size in zip(self.sizes, shape):
            if name in self.shared and size % ranks:
                raise ArgumentError(f"{text}: {name} ({size}) must be divisible by the {ranks} ranks")
        return shape

    def smallest(self, ranks: int) -> tuple[int, ...]:
        """The simulated shape, for so many ranks."""
        return tuple(
            math.ceil(size / ranks) * ranks if name in self.shared else size
            for name, size in zip(self.sizes, self.simulated)
        )


def _randn(group: Group, rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(group.device).manual_seed(1000 * seed + group.rank)
    return torch.randn(rows, columns, device=group.device, generator=generator).to(dtype)


def _all_gather(group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> Call:
    m_total, n, k = shape
    a = _randn(group, m_total // group.size, k, dtype, 0)
    b = _randn(group, n, k, dtype, 1).t()
    out = torch.empty(m_total, n, device=group.device, dtype=dtype)

    def run(config: Config | None) -> torch.Tensor:
        result = _all_gather_matmul.all_gather_matmul(a, b, group=group, out=out, config=config)
        assert isinstance(result, torch.Tensor)
        return result

    def prepare(config: Config | None) -> Launch:
        return _all_gather_matmul.prepare(group, a, b, out, None, config)

    def explain(config: Config | None) -> Any:
        return _all_gather_matmul.plan(group, a, b, out, False, config)

    sizes = dict(m=a.shape[0], n=n, k=k)

    return Call(run, prepare, explain, sizes)


def _reduce_scatter(group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> Call:
    m, n, k = shape
    a = _randn(group, m, k // group.size, dtype, 0)
    b = _randn(group, n, k // group.size, dtype, 1).t()
    out = torch.empty(m // group.size, n, device=group.device, dtype=dtype)

    def run(config: Config | None) -> torch.Tensor:
        return _matmul_reduce_scatter.matmul_reduce_scatter(a, b, group=group, out=out, config=config)

    def prepare(config: Config | None) -> Launch:
        return _matmul_reduce_scatter.prepare(group, Sum(a, b, out, config=config))

    def explain(config: Config | None) -> Any:
        return _matmul_reduce_scatter.plan(group, Sum(a, b, out, config=config))

    sizes = dict(m=m, n=n, k=a.shape[1])

    return Call(run, prepare, explain, sizes)


def _all_reduce(group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> Call:
    m, n, k = shape
    a = _randn(group, m, k // group.size, dtype, 0)
    b = _randn(group, n, k // group.size, dtype, 1).t()
    out = torch.empty(m, n, device=group.device, dtype=dtype)

    def run(config: Config | None) -> torch.Tensor:
        return _matmul_all_reduce.matmul_all_reduce(a, b, group=group, out=out, config=config)

    def prepare(config: Config | None) -> Launch:
        return _matmul_all_reduce.prepare(group, Sum(a, b, out, config=config))

    def explain(config: Config | None) -> Any:
        return _matmul_all_reduce.plan(group, Sum(a, b, out, config=config))

    sizes = dict(m=m, n=n, k=a.shape[1])

    return Call(run, prepare, explain, sizes)


WORKLOADS = {
    workload.op: workload
    for workload in (
        Workload(
            "all_gather_matmul", ("m_total", "n", "k"), ("m_total",), (16384, 2048, 8192), (256, 128, 128),
            _all_gather, _all_gather_matmul.TUNABLE,
        ),
        Workload(
            "matmul_reduce_scatter", ("m", "n", "k"), ("m", "k"), (8192, 8192, 8192), (256, 128, 128),
            _reduce_scatter, _matmul_reduce_scatter.TUNABLE,
        ),
        Workload(
            "matmul_all_reduce", ("m", "n", "k"), ("k",), (8192, 8192, 8192), (128, 128, 128),
            _all_reduce, _matmul_all_reduce.TUNABLE,
        ),
    )
}  # fmt: skip


def workload_of(op: str) -> Workload:
    """The workload of an operator; an error that names those that there are."""
    if op not in WORKLOADS:
        raise ArgumentError(f"there is no operator {op!r} here; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[op]
