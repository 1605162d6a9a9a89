"""What the demo shows of an operator: inputs, the call, and the same result computed by PyTorch in float64.

An operator's package defines a `Demo`, and its registry entry refers to it (operators.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.operators import Shape
from mkernel.runtime.group import Group

DTYPE = torch.bfloat16
EPS = torch.finfo(DTYPE).eps


@dataclass(frozen=True)
class Case:
    """One operator on one rank.

    inputs: a description of what each rank holds.
    call: calls the operator. result: extracts the tensor to check from what the call returned.
    exact: the result in float64, and the error bound, as a number or per element. Collective.
    library: this rank's arithmetic alone, by PyTorch, to compare times.
    sends: bytes that a rank sends to each other rank of its node, and to its counterpart in each other node; None if
        that depends on the data.
    """

    inputs: str
    call: Callable[[], Any]
    exact: Callable[[], tuple[torch.Tensor, torch.Tensor | float]]
    library: Callable[[], object]
    result: Callable[[Any], torch.Tensor] = lambda given: given
    sends: tuple[int, int] | None = None


@dataclass(frozen=True)
class Demo:
    """How to demonstrate an operator.

    case: (group, shape, seed, large) -> this rank's case. The shape is over all ranks, as for `mkernel trace`; `large`:
        the shape is for a GPU. Collective.
    simulated, large: ranks -> a shape for the simulator, about a second per call, and one for GPUs.
    """

    case: Callable[[Group, Shape, int, bool], Case]
    simulated: Callable[[int], Shape]
    large: Callable[[int], Shape]

    def on_rank(self, group: Group, seed: int, *, large: bool = False, shape: Shape | None = None) -> Case:
        """This rank's case, by default for one of the demo's shapes."""
        shape = shape or (self.large if large else self.simulated)(group.size)
        return self.case(group, shape, seed, large)


def random(group: Group, seed: int, *shape: int, what: int = 0) -> torch.Tensor:
    """This rank's random numbers; `what` distinguishes its tensors."""
    generator = torch.Generator(group.device).manual_seed(1000 * seed + 10 * group.rank + what)
    return torch.randn(*shape, generator=generator, device=group.device, dtype=DTYPE)


def everyones(group: Group, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, copied to this rank's device."""
    group.synchronize()  # the tensors are complete before other ranks read them
    return [part.to(group.device) for part in group.exchange(what, tensor)]
