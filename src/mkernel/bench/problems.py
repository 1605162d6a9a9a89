"""What the baselines with one process per rank compute: a rank's inputs, and the error of a result.

Inputs are drawn with the rank as seed. So a process has the same inputs as the rank that ran the fused operator, and
knows those of the other ranks without communication. A result is compared with float64 by the same measure as the
fused one. An operator's package defines a `Problem`, and its `Benchmark` refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mkernel.operators import Shape

ROWS = 4096  # rows that are checked at a time: float64 takes a lot of memory

Calls = dict[str, Callable[[], torch.Tensor]]  # by name; each returns this rank's result


@dataclass(frozen=True)
class Ways:
    """The ways in which a library can compute an operator. `barrier` enqueues a barrier of all ranks on the current
    stream. `notes` say which ways were skipped, and why."""

    barrier: Callable[[], object]
    calls: Calls
    notes: list[str] = field(default_factory=list)


class Problem:
    """What a rank has to compute, for libraries that need one process per rank."""

    def __init__(
        self, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device, options: Sequence[str]
    ):
        self.rank, self.size, self.shape = rank, size, shape
        self.dtype, self.device, self.options = dtype, device, options

    def error(self, result: torch.Tensor) -> float:
        """The error of this rank's result, as in `max_error` of the benchmark."""
        raise NotImplementedError

    def nccl(self, group: dist.ProcessGroup) -> Calls:
        """The calls to time with NCCL's collectives and the library."""
        raise NotImplementedError

    @classmethod
    def symm_mem_refusal(cls, shape: Shape, dtype: torch.dtype) -> str | None:
        """Why PyTorch's symmetric memory cannot compute it; None if it can."""
        return "PyTorch has no symmetric-memory operator for it"

    def symm_mem(self) -> Ways:
        """The calls to time with PyTorch's symmetric-memory operators."""
        raise NotImplementedError


def draw(
    rank: int, rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's a [rows, depth] and w [columns, depth], the transpose of b."""
    generator = torch.Generator(device).manual_seed(rank)
    a = torch.randn(rows, depth, device=device, dtype=dtype, generator=generator)
    return a, torch.randn(columns, depth, device=device, dtype=dtype, generator=generator)


class Products(Problem):
    """Matrix products: m x n x k over all ranks; a rank keeps the rows `kept`."""

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
        """Rows of the result in float64, from all ranks' operands."""
        raise NotImplementedError

    @property
    def error_bound(self) -> float:
        """What `error` may be at most, as in `error_bound` of the benchmark."""
        return product_bound(self.k, self.dtype)

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


def product_bound(depth: int, dtype: torch.dtype) -> float:
    """Bound for the largest error of a product of normally distributed numbers, with sums of `depth` terms. fp32 sums
    are rounded after every term, in the precision of the result: the bound has an extra term for that."""
    rounding = 4 * depth * torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
    return 4 * depth**0.5 * torch.finfo(dtype).eps + rounding


def fast_accumulation_bound(depth: int) -> float:
    """How much fast accumulation of fp8 adds to `product_bound`: the error of sums of `depth` products of normally
    distributed numbers that never leave Hopper's tensor cores. torch._scaled_mm has the same error with
    use_fast_accum.

    An instruction aligns 32 products with the running sum, and truncates each at 2**-13 of the largest of them: that is
    at most q = 2**-13 * |running sum|, once the sum is larger than its terms. What is cut off a product has its sign,
    so these errors have a random sign, too, a variance of at most q**2 / 3, and add up at random. After t products, the
    sum is z * sqrt(t) for an element whose sum is z standard deviations. So the variance of its error is the sum over t
    of 2**-26 * z**2 * t / 3, or (2**-13 * z * depth)**2 / 6. The error is that times y, a normal number that does not
    depend on z. Among 2**26 elements, the largest |y * z| is 16 to 17, hence 17 / sqrt(6) = 7 times 2**-13 * depth;
    rounded up to a power of two, the bound is depth * 2**-10. As the mean of |a| * |b| is 2/pi, it is
    1.6 * 2**-10 * sum(|a| * |b|)."""
    return depth * 2**-10


def larger(worst: float, error: float) -> float:
    """The larger of two errors; NaN counts as infinite."""
    return max(worst, error) if error == error else float("inf")


def worst_of(errors: Sequence[float]) -> float:
    """The largest of all ranks' errors; infinite if one of them is NaN."""
    return max(errors) if all(error == error for error in errors) else float("inf")
