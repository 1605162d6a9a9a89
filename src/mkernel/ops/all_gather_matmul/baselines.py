"""Baselines of all_gather_matmul: NCCL, and PyTorch's symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mkernel.bench import nccl, symm_mem
from mkernel.bench.problems import Calls, Products, Ways, draw
from mkernel.operators import Shape


class Gather(Products):
    def operands(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(rank, self.m // self.size, self.n, self.k, self.dtype, self.device)

    def exact(self, everyone: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: slice) -> torch.Tensor:
        return torch.cat([a for a, _ in everyone])[rows].double() @ self.w.double().t()

    def nccl(self, group: dist.ProcessGroup) -> Calls:
        gathered, out = self.like(self.m, self.k), self.like(self.m, self.n)

        def gather_first() -> torch.Tensor:
            nccl.all_gather(gathered, self.a, group=group)
            return torch.mm(gathered, self.w.t(), out=out)

        return {"all_gather, then GEMM": gather_first}

    @classmethod
    def symm_mem_refusal(cls, shape: Shape, dtype: torch.dtype) -> str | None:
        return None

    def symm_mem(self) -> Ways:
        name = symm_mem.world().group_name

        def fused() -> torch.Tensor:
            operator = torch.ops.symm_mem.fused_all_gather_matmul
            return operator(self.a, [self.w.t()], 0, name, return_A=False)[1][0]

        return Ways(symm_mem.barrier(self.device), {"fused_all_gather_matmul": fused})
