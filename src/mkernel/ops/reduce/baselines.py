"""Baselines for matmul_reduce_scatter and matmul_all_reduce: NCCL and PyTorch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from mkernel.bench import nccl, symm_mem
from mkernel.bench.problems import Calls, Products, Ways, draw
from mkernel.operators import Shape
from mkernel.ops.reduce.bench import bound_of


class _Sum(Products):
    def operands(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(rank, self.m, self.n, self.k // self.size, self.dtype, self.device)

    def exact(self, everyone: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: slice) -> torch.Tensor:
        return torch.stack([a[rows].double() @ w.double().t() for a, w in everyone]).sum(0)

    @property
    def error_bound(self) -> float:
        return bound_of(self.k, self.k // self.size, self.size, self.dtype)


class ReduceScatter(_Sum):
    @property
    def kept(self) -> range:
        rows = self.m // self.size
        return range(self.rank * rows, (self.rank + 1) * rows)

    def nccl(self, group: dist.ProcessGroup) -> Calls:
        product, out = self.like(self.m, self.n), self.like(self.m // self.size, self.n)

        def scatter_last() -> torch.Tensor:
            torch.mm(self.a, self.w.t(), out=product)
            nccl.reduce_scatter(out, product, group=group)
            return out

        return {"GEMM, then reduce_scatter": scatter_last}

    @classmethod
    def symm_mem_refusal(cls, shape: Shape, dtype: torch.dtype) -> str | None:
        return None

    def symm_mem(self) -> Ways:
        name = symm_mem.world().group_name

        def fused() -> torch.Tensor:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a, self.w.t(), "sum", 0, name)

        return Ways(symm_mem.barrier(self.device), {"fused_matmul_reduce_scatter": fused})


class AllReduce(_Sum):
    def nccl(self, group: dist.ProcessGroup) -> Calls:
        out = self.like(self.m, self.n)

        def reduce_last() -> torch.Tensor:
            torch.mm(self.a, self.w.t(), out=out)
            dist.all_reduce(out, group=group)
            return out

        return {"GEMM, then all_reduce": reduce_last}

    @classmethod
    def symm_mem_refusal(cls, shape: Shape, dtype: torch.dtype) -> str | None:
        if dtype == torch.float16:
            return "PyTorch's symmetric-memory all-reduces support bf16 and fp32, not fp16"
        if shape[0] * shape[1] * dtype.itemsize % 4:
            return "PyTorch's symmetric-memory all-reduces operate on 4-byte words: m x n must be even"
        return None

    def symm_mem(self) -> Ways:
        """The library's GEMM into symmetric memory, then each of PyTorch's all-reduces; the fastest one counts."""
        ops, group = torch.ops.symm_mem, symm_mem.world()
        product = symm_mem.shared(self.m, self.n, device=self.device, dtype=self.dtype)

        def reduced(operator: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
            return lambda: operator(torch.mm(self.a, self.w.t(), out=product), "sum", group.group_name)

        calls = {way: reduced(getattr(ops, way)) for way in ("one_shot_all_reduce", "two_shot_all_reduce_")}
        notes = []
        if symmetric_memory.rendezvous(product, group).multicast_ptr:
            calls["multimem_all_reduce_"] = reduced(ops.multimem_all_reduce_)
        else:
            notes.append("multimem_all_reduce_ was skipped: these GPUs have no multicast")
        return Ways(symm_mem.barrier(self.device), calls, notes)
