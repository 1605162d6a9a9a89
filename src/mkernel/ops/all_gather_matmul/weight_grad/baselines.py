"""Baselines of all_gather_matmul_weight_grad: NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mkernel.bench import nccl
from mkernel.bench.problems import Calls, Products


def draw(
    rank: int, rows: int, m_total: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A rank's a [rows, k] and dy [m_total, n]."""
    generator = torch.Generator(device).manual_seed(rank)
    a = torch.randn(rows, k, device=device, dtype=dtype, generator=generator)
    return a, torch.randn(m_total, n, device=device, dtype=dtype, generator=generator)


class WeightGrad(Products):
    """The second operand is dy, and the result has k rows."""

    def operands(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(rank, self.m // self.size, self.m, self.n, self.k, self.dtype, self.device)

    @property
    def kept(self) -> range:
        return range(self.k)

    def exact(self, everyone: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: slice) -> torch.Tensor:
        return torch.cat([a[:, rows] for a, _ in everyone]).double().t() @ self.w.double()

    def nccl(self, group: dist.ProcessGroup) -> Calls:
        gathered, out = self.like(self.m, self.k), self.like(self.k, self.n)

        def gather_first() -> torch.Tensor:
            nccl.all_gather(gathered, self.a, group=group)
            return torch.mm(gathered.t(), self.w, out=out)

        return {"all_gather, then GEMM": gather_first}
