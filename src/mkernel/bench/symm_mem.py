"""The baseline with PyTorch's symmetric memory: the operators of torch.ops.symm_mem, with one process per GPU."""

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
    """Why it cannot be measured; None if it can."""
    return problem.symm_mem_refusal(shape, dtype)


def prepare(problem: Problem, peer: Peer) -> Ways:
    """The calls to time, on every rank."""
    return problem.symm_mem()


# -- for the problems


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def shared(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor in symmetric memory."""
    return symmetric_memory.empty(*shape, device=device, dtype=dtype)


def barrier(device: torch.device) -> Callable[[], None]:
    """A function that blocks the current stream until all ranks have arrived."""
    signals = shared(1, device=device, dtype=torch.int32)
    return lambda: symmetric_memory.rendezvous(signals, world()).barrier()
