"""What the demo shows of an operator: inputs, the call, and the same by PyTorch in float64.

An operator's package has a `Demo`, which its entry in the registry names (operators.py).
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

    inputs: what each rank holds, in words.
    call: the operator. result: the tensor to be checked, of what the call gave.
    exact: the same in float64, and how far the result may be from it, as a number or element by element. All
        ranks call it, together.
    library: the arithmetic of this rank alone, by PyTorch, for comparing times.
    sends: bytes that a rank sends to each other rank of its node, and to its counterpart in each other node;
        None where that depends on the data.
    """

    inputs: str
    call: Callable[[], Any]
    exact: Callable[[], tuple[torch.Tensor, torch.Tensor | float]]
    library: Callable[[], object]
    result: Callable[[Any], torch.Tensor] = lambda given: given
    sends: tuple[int, int] | None = None


@dataclass(frozen=True)
class Demo:
    """How an operator is shown.

    case: (group, shape, seed, large) -> the case of this rank. The shape is that of all ranks, as `mkernel trace` takes
        it; large: it is one for a GPU. Collective.
    simulated, large: ranks -> a shape for the simulator, about a second a call, and one for GPUs.
    """

    case: Callable[[Group, Shape, int, bool], Case]
    simulated: Callable[[int], Shape]
    large: Callable[[int], Shape]

    def on_rank(self, group: Group, seed: int, *, large: bool = False, shape: Shape | None = None) -> Case:
        """The case of this rank, by default for a shape of the demo."""
        shape = shape or (self.large if large else self.simulated)(group.size)
        return self.case(group, shape, seed, large)


def random(group: Group, seed: int, *shape: int, what: int = 0) -> torch.Tensor:
    """Random numbers of this rank; `what` tells its tensors apart."""
    generator = torch.Generator(group.device).manual_seed(1000 * seed + 10 * group.rank + what)
    return torch.randn(*shape, generator=generator, device=group.device, dtype=DTYPE)


def everyones(group: Group, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each rank has of a tensor, here."""
    group.synchronize()  # what others read has been written
    return [part.to(group.device) for part in group.exchange(what, tensor)]
