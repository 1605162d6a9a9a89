"""Small test kernels in the simulator, with everything around them that an operator's launch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import mkernel as mk
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.world import Launch
from mkernel.sim.interpreter import argument, python_function, run
from mkernel.sim.scheduler import Options

OP = "all_gather_matmul"
SOON = 2e-4  # simulated seconds, for waits that are meant to time out


def simulate(fn: Callable[..., Any], *args: Any, nodes: int = 1, gpus: int = 1, seed: int = 0, timeout: float = 1.0,
             **options: Any) -> list[Any]:  # fmt: skip
    """fn(group, *args) on every rank; options are those of the simulator."""
    return mk.spawn(
        fn, *args, nodes=nodes, gpus_per_node=gpus, device="cpu", seed=seed, timeout=timeout, sim=Options(**options)
    )


def workspace_of(group: Group, signal_words: int = 64, half_bytes: int = 1024) -> Workspace:
    """A workspace of at least this size."""
    return group.workspace(OP, signal_words, half_bytes)


def launch(group: Group, workspace: Workspace, kernel: Any, grid: int = 1, **arguments: Any) -> None:
    """Run kernel(context, **arguments) on this rank, to its end."""
    group.launch(
        Launch(op=OP, group=group, kernel=kernel, grid=grid, arguments=dict(context=workspace.context, **arguments))
    )


@contextmanager
def as_cta(program_id: int = 0, num_programs: int = 1) -> Iterator[Callable[..., Any]]:
    """Inside, jit functions that touch no memory can be called: call(function, *numbers) -> numbers.

    Numbers that a kernel knows when it is compiled are given as tl.constexpr, or by name.
    """
    cta = SimpleNamespace(program_id=program_id, num_programs=num_programs)

    def call(function: Any, *numbers: int, **constants: Any) -> Any:
        result = run(cta, python_function(function), *map(argument, numbers), **constants)
        return tuple(int(part._data) for part in result) if isinstance(result, tuple) else int(result._data)

    yield call
