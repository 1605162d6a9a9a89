"""Workloads: calls of an operator for a given shape, with random inputs, for `mkernel trace`, `tune` and `compile`.

An operator's package defines a `Workload`, and its registry entry refers to it (operators.py). Shapes are those of
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
from mkernel.runtime.quantization import empty_operands, quantize_operands
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Tried:
    """What tuning needs to know about a call.

    prepare: configuration -> launch. explain: configuration -> plan. sizes: named as in the operator's Tunable.
    """

    prepare: Callable[[Config | None], Launch]
    explain: Callable[[Config | None], Any]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Call:
    """One rank's call, which can be repeated, made through the public function."""

    run: Callable[[Config | None], torch.Tensor]
    tried: Tried


@dataclass(frozen=True)
class Cost:
    """What a call costs the simulator, over all ranks. `mkernel.estimates` derives times from it.

    tiles: result tiles, and what costs about as much, such as chunks of tokens to be routed. dots: tile k-steps.
    copies: copies of a few KiB between ranks. elements: elements of the ranks' tensors and workspaces.
    """

    tiles: int
    dots: int
    copies: int
    elements: int


@dataclass(frozen=True)
class Workload:
    """How to call an operator for a shape.

    simulated: a shape for the simulator, for two ranks.
    deeper: factors by which to multiply its sizes for a call with more k-steps per tile.
    make: (group, shape, dtype, **options) -> this rank's call. Collective.
    cost: (shape, ranks) -> what a call costs the simulator.
    tunable: how its configurations are stored; None if it takes no configuration.
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
        """The shape for the simulator, rounded up to be divisible among this many ranks."""
        return tuple(
            math.ceil(size / ranks) * ranks if name in self.operator.shared else size
            for name, size in zip(self.operator.dimensions, self.simulated)
        )


# -- inputs


def is_only_compiled(group: Group) -> bool:
    """Is this a group of GPUs that do not exist (see compiling.py)? Its launches are prepared, but never run."""
    return group.device.type != group.world.devices[group.world_rank].type


def empty(group: Group, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor in this rank's memory."""
    return torch.empty(shape, device=group.world.devices[group.world_rank], dtype=dtype)


def randn(group: Group, *shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """This rank's random numbers; uninitialized where a call is only compiled, because nothing reads them."""
    if is_only_compiled(group):
        return empty(group, *shape, dtype=dtype)
    generator = torch.Generator(group.device).manual_seed(1000 * seed + group.rank)
    return torch.randn(*shape, device=group.device, generator=generator).to(dtype).mul_(scale)


def quantized(
    group: Group, m: int, n: int, k: int, *, tensorwise: bool = False, blockwise: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """This rank's random operands in fp8: (a [m, k], b [k, n], scale_a, scale_b)."""
    a, w = (randn(group, rows, k, dtype=torch.float32, seed=seed) for seed, rows in enumerate((m, n)))
    make = empty_operands if is_only_compiled(group) else quantize_operands
    return make(a, w, tensorwise=tensorwise, blockwise=blockwise)


# -- costs in the simulator; tiles are those of planning.default_tiles for the CPU

TILE = 32
COPY = 2048  # elements that a CTA copies at a time


def blocks(*sizes: int) -> int:
    """The number of tiles that cover these rows and columns."""
    return math.prod(math.ceil(size / TILE) for size in sizes)


def pieces(rows: int, columns: int) -> int:
    """The number of pieces in which a CTA copies rows to another rank."""
    return math.ceil(rows / 4) * math.ceil(columns / (COPY // 4))
