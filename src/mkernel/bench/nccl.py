"""The NCCL baseline: its collectives before or after the library's GEMM or attention, with one process per GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mkernel.bench.peers import Peer
from mkernel.bench.problems import Problem, Ways
from mkernel.operators import Shape

TITLE = "NCCL"
BACKEND = "nccl"

# their names in newer PyTorch, where the old names warn
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def refusal(problem: type[Problem], shape: Shape, dtype: torch.dtype) -> str | None:
    """Why it cannot be measured; None if it can."""
    return None if dist.is_nccl_available() else "this PyTorch was built without NCCL"


def prepare(problem: Problem, peer: Peer) -> Ways:
    """The calls to time, on every rank."""
    group = dist.new_group(backend=BACKEND)
    assert isinstance(group, dist.ProcessGroup), "this rank is in the group of all"
    one = torch.ones(1, device=problem.device)
    return Ways(lambda: dist.all_reduce(one, group=group), problem.nccl(group))
