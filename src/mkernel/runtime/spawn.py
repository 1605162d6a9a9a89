"""mk.spawn: a small cluster inside this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import restore_current
from mkernel.runtime.planning import check_timeout
from mkernel.runtime.world import Links

if TYPE_CHECKING:
    from mkernel.sim.scheduler import Options


@contextlib.contextmanager
def require_simulator() -> Iterator[None]:
    """Turn an ImportError inside into an error that names the missing package."""
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
            visible GPUs as threads. If there are fewer GPUs than ranks, several ranks share a GPU
            and its SMs. "auto" is "cuda" if there is a GPU.
        seed: seed of the simulator's schedule. A failure prints it, and recurs with the same seed.
        timeout: how long a wait may last, in seconds; in the simulator, in simulated seconds.
        links: rates to pace links to, for measurements on a GPU.
        sim: options of the simulator, such as slow or late ranks, or CTAs that run one after the other.
    """
    if not callable(fn):
        raise ArgumentError(f"fn must be a function of a group, which mk.spawn calls on every rank; got {fn!r}")
    check_cluster(nodes, gpus_per_node)
    check_timeout(timeout)
    if not isinstance(seed, int):
        raise ArgumentError(f"seed must be an integer, got {seed!r}")
    if links is not None and not isinstance(links, Links):
        raise ArgumentError(f"links must be a mk.Links, got {type(links).__name__}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    cluster: Any = dict(nodes=nodes, gpus_per_node=gpus_per_node, timeout=timeout)
    try:
        if device == "cpu":
            with require_simulator():
                from mkernel.sim.scheduler import Options
                from mkernel.sim.world import spawn as simulate
            if sim is not None and not isinstance(sim, Options):
                raise ArgumentError(f"sim must be a mkernel.sim.scheduler.Options, got {type(sim).__name__}")
            return simulate(fn, args, seed=seed, options=sim, **cluster)
        from mkernel.runtime.cuda_threads import spawn as run_on_gpus

        return run_on_gpus(fn, args, links=links or Links(), **cluster)
    finally:
        restore_current()
