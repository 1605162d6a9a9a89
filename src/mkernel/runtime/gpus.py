"""Which GPUs the kernels run on; docs/versions.md has the table."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from mkernel.runtime.errors import ArgumentError

OLDEST = (8, 0)  # Ampere
SUPPORTED = "mkernel runs on NVIDIA GPUs of compute capability 8.0 (Ampere) or newer"


@dataclass(frozen=True)
class SimulatedGpu:
    """The GPU for which the simulator plans calls: see `Options.capability` in sim/scheduler.py."""

    capability: tuple[int, int]
    type: str = "cuda"


Target = torch.device | SimulatedGpu  # what calls are planned for


def capability(target: Target) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return target.capability if isinstance(target, SimulatedGpu) else torch.cuda.get_device_capability(target)


def name_of(device: Target) -> str:
    """A GPU in words: NVIDIA A100 (cuda:0, compute capability 8.0)."""
    major, minor = capability(device)
    if isinstance(device, SimulatedGpu):
        return f"a simulated GPU (compute capability {major}.{minor})"
    if not isinstance(device, torch.device):  # one that calls are only compiled for
        return str(device)
    return f"{torch.cuda.get_device_name(device)} ({device}, compute capability {major}.{minor})"


def check_gpu(device: torch.device) -> None:
    """Refuse a GPU that cannot run the kernels. For AMD GPUs, Triton 3.9 compiles some of them, but drops the PTX."""
    if torch.version.hip is not None:
        name = f"{torch.cuda.get_device_name(device)} ({device}) is an AMD GPU, and kernels contain PTX"
    elif torch.cuda.get_device_capability(device) < OLDEST:
        name = f"{name_of(device)} is too old"
    else:
        return
    raise ArgumentError(f"device: {name}; {SUPPORTED}, and in the simulator: mk.spawn(..., device='cpu')")


def take_device() -> torch.device:
    """The GPU of this process, made the current one: the current GPU, or, if that is the first one, which may just be
    the default, the one numbered LOCAL_RANK."""
    if torch.cuda.current_device() == 0:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
