"""What the baselines in processes of their own compute: a rank's inputs, and how wrong a result is.

Inputs are drawn from the rank's number, so a process has the same ones as the rank that ran the fused operator, and
knows those of the others without asking. A result is held against float64, as the fused one is, by the same measure.
An operator's package has a `Problem` of its own, which its `Benchmark` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mkernel.operators import Shape

ROWS = 4096  # of a product that is checked at a time: float64 takes a lot of memory

Calls = dict[str, Callable[[], torch.Tensor]]  # by the name of the way, each returning this rank's result


@dataclass(frozen=True)
class Ways:
    """How a library computes an operator. `meet` puts something on the current stream that ends on no rank before all
    have come to it. `notes`: which way was left out, and why."""

    meet: Callable[[], object]
    calls: Calls
    notes: list[str] = field(default_factory=list)


class Problem:
    """What a rank has to compute, for libraries that need a process for each rank."""

    def __init__(
        self, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device, options: Sequence[str]
    ):
        self.rank, self.size, self.shape = rank, size, shape
        self.dtype, self.device, self.options = dtype, device, options

    def error(self, result: torch.Tensor) -> float:
        """How wrong a result of this rank is, as `max_error` of the benchmark."""
        raise NotImplementedError

    def nccl(self, group: dist.ProcessGroup) -> Calls:
        """What NCCL's collectives and the library do."""
        raise NotImplementedError

    @classmethod
    def symm_mem_refusal(cls, shape: Shape, dtype: torch.dtype) -> str | None:
        """Why PyTorch's symmetric memory does not compute it; None if it does."""
        return "PyTorch has no symmetric-memory operator for it"

    def symm_mem(self) -> Ways:
        """What PyTorch's symmetric-memory operators do."""
        raise NotImplementedError


def draw(
    rank: int, rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [rows, depth] and w [columns, depth], the transposed b, of a rank."""
    generator = torch.Generator(device).manual_seed(rank)
    a = torch.randn(rows, depth, device=device, dtype=dtype, generator=generator)
    return a, torch.randn(columns, depth, device=device, dtype=dtype, generator=generator)


class Products(Problem):
    """Products of matrices: m x n x k over all ranks, of which a rank keeps rows `kept`."""

    def __init__(
        self, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device, options: Sequence[str]
    ):
        super().__init__(rank, size, shape, dtype, device, options)
        self.m, self.n, self.k = shape
        self.a, self.w = self.operands(rank)

    def operands(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """a and w of any rank."""
        raise NotImplementedError

    @property
    def kept(self) -> range:
        return range(self.m)

    def exact(self, everyone: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: slice) -> torch.Tensor:
        """Rows of the result in float64, of what all ranks have."""
        raise NotImplementedError

    def like(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device=self.device, dtype=self.dtype)

    def error(self, result: torch.Tensor) -> float:
        """The largest error of an element."""
        everyone = [self.operands(rank) for rank in range(self.size)]
        rows = len(self.kept)
        if tuple(result.shape) != (rows, self.n):
            raise RuntimeError(f"the result is {tuple(result.shape)} instead of {(rows, self.n)}")
        worst = 0.0
        for first in range(0, rows, ROWS):
            some = self.kept[first : first + ROWS]
            exact = self.exact(everyone, slice(some.start, some.stop))
            worst = larger(worst, (result[first : first + ROWS].double() - exact).abs().max().item())
        return worst


def larger(worst: float, error: float) -> float:
    """The larger one of two errors; NaN is larger than anything."""
    return max(worst, error) if error == error else float("inf")


def worst_of(errors: Sequence[float]) -> float:
    """The largest of all ranks' errors; infinite if one of them is NaN."""
    return max(errors) if all(error == error for error in errors) else float("inf")
