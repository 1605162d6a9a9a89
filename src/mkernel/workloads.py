"""A call of an operator for a given shape, with random numbers: what `mkernel trace`, `tune` and `compile` run.

An operator's package has a `Workload`, which its entry in the registry names (operators.py). Shapes are those of
`mkernel bench`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mkernel import operators
from mkernel.operators import Operator, Shape
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Tried:
    """What tuning needs to know of a call.

    prepare: the launch with a configuration. explain: the plan. sizes: as the operator's Tunable names them.
    """

    prepare: Callable[[Config | None], Launch]
    explain: Callable[[Config | None], Any]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Call:
    """One rank's call, ready to be made again and again, as a user would."""

    run: Callable[[Config | None], torch.Tensor]
    tried: Tried


@dataclass(frozen=True)
class Cost:
    """What a call costs the simulator, all ranks together: what `mkernel.estimates` estimates times from.

    tiles: of results, and what costs about as much, such as chunks of tokens that are routed. dots: tile steps.
    copies: copies of a few KiB between ranks. elements: numbers that the ranks hold in tensors and workspaces.
    """

    tiles: int
    dots: int
    copies: int
    elements: int


@dataclass(frozen=True)
class Workload:
    """How an operator is called for a shape.

    simulated: a shape for the simulator, of two ranks.
    deeper: by how much each of its sizes is multiplied for a call with more steps to each tile.
    make: (group, shape, dtype, **options) -> the call of this rank. Collective.
    cost: (shape, ranks) -> what a call costs the simulator.
    tunable: how its configurations are kept; None if it takes none.
    """

    op: str
    simulated: Shape
    deeper: Shape
    make: Callable[..., Call]
    cost: Callable[[Shape, int], Cost]
    tunable: Tunable | None = None

    @property
    def operator(self) -> Operator:
        return operators.find(self.op)

    @property
    def on_gpu(self) -> Shape:
        return self.operator.shapes[0]

    def smallest(self, ranks: int) -> Shape:
        """The simulated shape, for so many ranks."""
        return tuple(
            math.ceil(size / ranks) * ranks if name in self.operator.shared else size
            for name, size in zip(self.operator.dimensions, self.simulated)
        )


def workload_of(op: str) -> Workload:
    """The workload of an operator; an error that names those that there are."""
    return operators.find(op, "workload").load("workload")


# -- inputs


def is_only_compiled(group: Group) -> bool:
    """Is this a group of GPUs that are not there (see compiling.py)? Its launches are prepared, but never run."""
    return group.device.type != group.world.devices[group.world_rank].type


def empty(group: Group, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of a rank that nobody has written yet."""
    return torch.empty(shape, device=group.world.devices[group.world_rank], dtype=dtype)


def randn(group: Group, *shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """This rank's random numbers. Where a call is only compiled, nobody reads them, and they are left out."""
    if is_only_compiled(group):
        return empty(group, *shape, dtype=dtype)
    generator = torch.Generator(group.device).manual_seed(1000 * seed + group.rank)
    return torch.randn(*shape, device=group.device, generator=generator).to(dtype).mul_(scale)


# -- what the simulator has to do; tiles are those of planning.default_tiles for the CPU

TILE = 32
COPY = 2048  # numbers that a CTA copies at a time


def blocks(*sizes: int) -> int:
    """Tiles that cover so many rows and columns."""
    return math.prod(math.ceil(size / TILE) for size in sizes)


def pieces(rows: int, columns: int) -> int:
    """Pieces in which a CTA copies rows to another rank."""
    return math.ceil(rows / 4) * math.ceil(columns / (COPY // 4))
