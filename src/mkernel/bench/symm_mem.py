"""The way over PyTorch's symmetric memory: the operators of torch.ops.symm_mem, a process for each GPU.

- all_gather_matmul: fused_all_gather_matmul.
- matmul_reduce_scatter: fused_matmul_reduce_scatter.
- matmul_all_reduce: the library's GEMM into symmetric memory, then one_shot_all_reduce, two_shot_all_reduce_ or, with
  multicast, multimem_all_reduce_; the fastest counts.
- moe_dispatch_matmul: all_to_all_vdev_2d, which needs NVSHMEM, then the library's grouped GEMM.
- moe_ffn: the same, the second GEMM, and all_to_all_vdev_2d_offset back.
- ring_attention: there is none.

A token goes once to each of its experts. All counts are known beforehand, as they are to the host-driven way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from mkernel.bench import moe
from mkernel.bench.peers import Peer
from mkernel.bench.problems import Experts, Problem, Products, Ways
from mkernel.operators import Shape

TITLE = "symm_mem"


def refusal(op: str, shape: Shape, dtype: torch.dtype) -> str | None:
    """Why it can not be measured; None if it can."""
    if op == "ring_attention":
        return "PyTorch has no symmetric-memory operator for attention"
    if op == "matmul_all_reduce":
        if dtype == torch.float16:
            return "PyTorch's symmetric-memory all-reduces add bf16 and fp32, not fp16"
        if shape[0] * shape[1] * dtype.itemsize % 4:
            return "PyTorch's symmetric-memory all-reduces take whole words of 4 bytes: m x n must be even"
    if op in ("moe_dispatch_matmul", "moe_ffn") and not symmetric_memory.is_nvshmem_available():
        return "torch.ops.symm_mem.all_to_all_vdev_2d needs NVSHMEM, and this PyTorch has or finds none"
    return None


def prepare(problem: Problem, peer: Peer) -> Ways:
    """What PyTorch's operators do, on every rank."""
    if isinstance(problem, Experts):
        return _experts(problem)
    assert isinstance(problem, Products), "refused before"
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    ops, a, b = torch.ops.symm_mem, problem.a, problem.w.t()
    meeting = _shared(1, device=problem.device, dtype=torch.int32)

    def meet() -> None:
        symmetric_memory.rendezvous(meeting, group).barrier()

    def gather() -> torch.Tensor:
        return ops.fused_all_gather_matmul(a, [b], 0, name, return_A=False)[1][0]

    def scatter() -> torch.Tensor:
        return ops.fused_matmul_reduce_scatter(a, b, "sum", 0, name)

    if problem.op == "all_gather_matmul":
        return Ways(meet, {"fused_all_gather_matmul": gather})
    if problem.op == "matmul_reduce_scatter":
        return Ways(meet, {"fused_matmul_reduce_scatter": scatter})
    product = _shared(problem.m, problem.n, device=problem.device, dtype=problem.dtype)

    def reduced(operator: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: operator(torch.mm(a, b, out=product), "sum", name)

    calls = {way: reduced(getattr(ops, way)) for way in ("one_shot_all_reduce", "two_shot_all_reduce_")}
    notes = []
    if symmetric_memory.rendezvous(product, group).multicast_ptr:
        calls["multimem_all_reduce_"] = reduced(ops.multimem_all_reduce_)
    else:
        notes.append("multimem_all_reduce_ left out: no multicast between these GPUs")
    return Ways(meet, calls, notes)


def _shared(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return symmetric_memory.empty(*shape, device=device, dtype=dtype)


def _experts(problem: Experts) -> Ways:
    symmetric_memory.set_backend("NVSHMEM")
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    ops, size, x = torch.ops.symm_mem, problem.size, problem.mine.x
    # an expert without rows gets one that nobody looks at; all ranks' memory is as large as the largest needs
    counts = [problem.arriving(rank).sum(0) for rank in range(size)]
    most = max(int(each.clamp_min(1).sum()) for each in counts)
    placed = counts[problem.rank].clamp_min(1)
    total = int(placed.sum())
    starts = (placed.cumsum(0) - placed).tolist()
    real = torch.cat([torch.arange(at, at + n) for at, n in zip(starts, counts[problem.rank].tolist())]).to(x.device)

    def shared(*shape: int, dtype: torch.dtype = x.dtype) -> torch.Tensor:
        memory = _shared(*shape, device=x.device, dtype=dtype).zero_()
        symmetric_memory.rendezvous(memory, group)
        return memory

    sent, returned = (shared(len(problem.token), problem.hidden) for _ in range(2))
    arrived, done = (shared(most, problem.hidden) for _ in range(2))
    splits = shared(size * moe.EXPERTS, dtype=torch.int64).copy_(problem.counts[problem.rank])
    there, back = (shared(2, size * moe.EXPERTS, dtype=torch.int64) for _ in range(2))  # splits, and offsets
    meeting = [shared(size, dtype=torch.int32) for _ in range(2)]
    compute = moe.library_of(problem.matrices, arrived[:total], placed)

    def dispatch() -> torch.Tensor:
        torch.index_select(x, 0, problem.token, out=sent)
        ops.all_to_all_vdev_2d(sent, arrived, splits, there, name)
        return compute(arrived[:total])

    def dispatch_matmul() -> torch.Tensor:
        return dispatch() if len(real) == total else dispatch()[real]

    def ffn() -> torch.Tensor:
        done[:total].copy_(dispatch())
        ops.all_to_all_vdev_2d_offset(done, returned, there, back, name)
        return problem.combined(returned)

    way = "all_to_all_vdev_2d, then grouped GEMM"
    call = dispatch_matmul if problem.op == "moe_dispatch_matmul" else ffn
    return Ways(lambda: ops.nvshmem_all_to_all(*meeting, name), {way: call})
