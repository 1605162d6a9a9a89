"""The handle of a dispatch: where rows came from, and so where results go back to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mkernel.ops.moe.routing import Tables
from mkernel.ops.moe.sizes import Sizes
from mkernel.runtime.group import Group


@dataclass(frozen=True, eq=False)
class Handle:
    """Where the rows of a dispatch came from, and so where results go back to.

    Row i of y, for i below the sum of `counts`, is token `token[i]` of rank `source[i]`. Rows are grouped by
    expert; `counts[e]` rows belong to the e-th expert of this rank. All three are on the rank's device, and
    on a GPU they are there when the call is done, not when it returns. Rows of y beyond them are not written.
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
