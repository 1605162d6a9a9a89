"""Plain kernels in the simulator: no workspace, only the tensors they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mkernel as mk
from mkernel.runtime.group import Group
from mkernel.runtime.world import Launch
from mkernel.sim.scheduler import Options

OP = "all_gather_matmul"


def launch(group: Group, kernel: Any, grid: int = 1, **arguments: Any) -> None:
    """Run kernel(**arguments) on this rank, to its end."""
    group.launch(Launch(op=OP, group=group, kernel=kernel, grid=grid, arguments=arguments))


def simulate(fn: Callable[..., Any], *args: Any, nodes: int = 1, gpus: int = 1, seed: int = 0, timeout: float = 1.0,
             **options: Any) -> list[Any]:  # fmt: skip
    """fn(group, *args) on every rank; options are those of the simulator."""
    return mk.spawn(
        fn, *args, nodes=nodes, gpus_per_node=gpus, device="cpu", seed=seed, timeout=timeout, sim=Options(**options)
    )


def run(kernel: Any, grid: int = 1, seed: int = 0, **arguments: Any) -> None:
    """The kernel alone, on one rank."""
    simulate(lambda group: launch(group, kernel, grid, **arguments), seed=seed)
