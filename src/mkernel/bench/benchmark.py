"""How an operator's package describes its benchmark; its registry entry refers to it (operators.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.operators import Reference, Shape
from mkernel.runtime.group import Group


@dataclass(frozen=True)
class Published:
    """How the figures published for the CUDA library mKernel compare with a run here (published.py).

    shape: (the published size, ranks) -> the shape that gives each rank as much work as in the published run.
    traffic: size -> bytes that a rank sends within its node, and to the other node.
    needs_all_ranks: a rank's work grows with the number of ranks, at the same size per rank.
    note: what else to consider in the comparison.
    """

    shape: Callable[[int, int], Shape]
    traffic: Callable[[int], tuple[float, float]]
    needs_all_ranks: bool = False
    note: str = ""


@dataclass(frozen=True)
class Latency:
    """A call whose latency is measured (calls.py), and that of the library for the same problem on one GPU, with
    everything in place. name: what the library's call is called."""

    call: Callable[[], object]
    library: Callable[[], object]
    name: str


# rows of a decoding step up to a small prefill, for one matrix n x k ...
SHARED_GPU_ROWS = tuple((m, 8192, 8192) for m in (16, 64, 128, 256, 512, 1024, 2048))
# ... and for three
FEW_ROWS = tuple(
    (m, n, k) for n, k in ((8192, 8192), (1024, 8192), (4096, 4096)) for m in (1, 16, 64, 128, 256, 512, 1024, 2048)
)


@dataclass(frozen=True)
class Benchmark:
    """How to measure an operator.

    measure: (group, *shape, dtype, config, repeats, **options) -> figures, the same on every rank. Collective.
    several_nodes: can it be measured on several nodes?
    problem: the `mkernel.bench.problems.Problem` for NCCL and PyTorch's symmetric memory; None if it is not compared
        with them. Their processes import it, so it must be a reference, "package.module:name".
    published: how published figures compare; None if there are none.
    latency: (group, shape, dtype) -> the call that `mkernel bench --latency` measures; None if it does not.
    latency_shapes: the shapes that it measures by default.
    shared_gpu_shapes: the shapes that `mkernel.bench.shared_gpu` measures beside PyTorch's symmetric memory.
    """

    measure: Callable[..., dict[str, Any]]
    several_nodes: bool = True
    problem: Reference | None = None
    published: Published | None = None
    latency: Callable[[Group, Shape, torch.dtype], Latency] | None = None
    latency_shapes: tuple[Shape, ...] = ()
    shared_gpu_shapes: tuple[Shape, ...] = ()
