"""The way over PyTorch's symmetric memory: the operators of torch.ops.symm_mem, a process for each GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from mkernel.bench.peers import Peer
from mkernel.bench.problems import Problem, Ways
from mkernel.operators import Shape

TITLE = "symm_mem"


def refusal(problem: type[Problem], shape: Shape, dtype: torch.dtype) -> str | None:
    """Why it can not be measured; None if it can."""
    return problem.symm_mem_refusal(shape, dtype)


def prepare(problem: Problem, peer: Peer) -> Ways:
    """What PyTorch's operators do, on every rank."""
    return problem.symm_mem()


# -- for the problems


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def shared(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Symmetric memory."""
    return symmetric_memory.empty(*shape, device=device, dtype=dtype)


def barrier(device: torch.device) -> Callable[[], None]:
    """Holds the current stream until all ranks have come to it."""
    signals = shared(1, device=device, dtype=torch.int32)
    return lambda: symmetric_memory.rendezvous(signals, world()).barrier()
