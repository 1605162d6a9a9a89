"""What an operator's package says about its benchmark; its entry in the registry names it (operators.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.operators import Reference, Shape
from mkernel.runtime.group import Group


@dataclass(frozen=True)
class Published:
    """How figures that the CUDA library mKernel published compare with a run here (published.py).

    shape: (the published size, ranks) -> the shape that gives each rank as much as it has there.
    traffic: size -> bytes that a rank sends inside its node and to the other one.
    needs_all_ranks: what a rank computes grows with the number of ranks, at the same size of each.
    note: what else there is to know for who compares them.
    """

    shape: Callable[[int, int], Shape]
    traffic: Callable[[int], tuple[float, float]]
    needs_all_ranks: bool = False
    note: str = ""


@dataclass(frozen=True)
class Benchmark:
    """How an operator is measured.

    measure: (group, *shape, dtype, config, repeats, **options) -> figures, the same on every rank. Collective.
    several_nodes: can it be measured on several nodes?
    problem: the `mkernel.bench.problems.Problem` of NCCL and PyTorch's symmetric memory; None if it is not compared
        with them. Their processes import it: it must be named, as "package.module:name".
    published: how published figures compare; None if there are none.
    host_call: (group, a, b) -> the call whose cost to the host `mkernel.bench.host_time` measures, of an operator that
        multiplies a [m, k] and b [k, n].
    """

    measure: Callable[..., dict[str, Any]]
    several_nodes: bool = True
    problem: Reference | None = None
    published: Published | None = None
    host_call: Callable[[Group, torch.Tensor, torch.Tensor], object] | None = None
