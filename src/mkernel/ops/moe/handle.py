"""The handle of a dispatch: where each row came from, and thus where its result returns to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mkernel.ops.moe.routing import Tables
from mkernel.ops.moe.sizes import Sizes
from mkernel.runtime.group import Group


@dataclass(frozen=True, eq=False)
class Handle:
    """Where the rows of a dispatch came from, and thus where their results return to.

    Row i of y, for i below the sum of `counts`, is token `token[i]` of rank `source[i]`. Rows are grouped by expert:
    `counts[e]` of them belong to the e-th expert of this rank. Rows of y beyond the sum are not written. The three
    tensors are on the rank's device. On a GPU they are valid once the kernel has finished, not when the call returns.
    """

    group: Group
    counts: torch.Tensor  # [experts]
    source: torch.Tensor  # [capacity]
    token: torch.Tensor  # [capacity]
    sizes: Sizes
    tables: Tables

    @property
    def capacity(self) -> int:
        return self.sizes.capacity
