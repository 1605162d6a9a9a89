"""mk.spawn: a whole small cluster inside this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.planning import check_timeout
from mkernel.runtime.world import Links

if TYPE_CHECKING:
    from mkernel.sim.scheduler import Options


@contextlib.contextmanager
def simulator_is_there() -> Iterator[None]:
    """Names the package that an import of the simulator misses."""
    try:
        yield
    except ImportError as missing:
        advice = "pip install 'mkernel-gpu[sim]'"
        raise ArgumentError(f"the simulator needs the package {missing.name}: {advice}") from missing


def check_cluster(nodes: int, gpus_per_node: int) -> None:
    for name, value in (("nodes", nodes), ("gpus_per_node", gpus_per_node)):
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name} must be a whole number, 1 or more; got {value!r}")


def spawn(
    fn: Callable[..., Any],
    *args: Any,
    nodes: int = 1,
    gpus_per_node: int = 2,
    device: str = "auto",
    seed: int = 0,
    timeout: float = 30.0,
    links: Links | None = None,
    sim: Options | None = None,
) -> list[Any]:
    """Run `fn(group, *args)` on every rank of a cluster of nodes x gpus_per_node; results by rank.

    Args:
        device: "cpu" is the simulator: deterministic, no GPU needed. "cuda" puts the ranks on the
            visible GPUs as threads, several to a GPU when there are fewer GPUs than ranks; they
            share its SMs. "auto" is "cuda" where there is a GPU.
        seed: of the simulator's schedule. A failure prints it, and the same seed fails again.
        timeout: seconds that a wait may last; simulated ones when simulating.
        links: pace links to given rates, for measurements on a GPU.
        sim: how the simulator behaves: slow or late ranks, CTAs that run one after the other.
    """
    check_cluster(nodes, gpus_per_node)
    check_timeout(timeout)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        with simulator_is_there():
            from mkernel.sim.world import spawn as simulate
        return simulate(fn, args, nodes=nodes, gpus_per_node=gpus_per_node, seed=seed, timeout=timeout, options=sim)
    if device == "cuda":
        from mkernel.runtime.cuda import spawn as run_on_gpus

        return run_on_gpus(fn, args, nodes=nodes, gpus_per_node=gpus_per_node, timeout=timeout, links=links or Links())
    raise ArgumentError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
