"""An override for TorchTitan: its expert-parallel token dispatcher, with mkernel's operators in it.

    --override.imports mkernel.integrations.torchtitan_moe.token_dispatcher

TorchTitan's mixture of experts calls a dispatcher before and after its experts. The default dispatcher, which is
replaced, reorders tokens, exchanges counts, waits for them on the host, exchanges tokens with all-to-all and reorders
them again; afterwards it does the reverse. This one calls `mk.moe_dispatch` and `mk.moe_combine`: one kernel each. A
token crosses the network once, not once for each of its experts, and the host never waits for a count. Groups may span
nodes.

The rows of all experts are in one tensor of fixed size. The contents of rows after those of the last expert are
undefined; TorchTitan's grouped GEMMs take the ends of experts from the counts, and never read them.

This module imports TorchTitan, so nothing else here imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common import token_dispatcher as titan

from mkernel.ops.moe import Handle, moe_combine, moe_dispatch
from mkernel.runtime.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What combine needs of a dispatch."""

    handle: Handle
    scores: torch.Tensor


class TokenDispatcher(titan.AllToAllTokenDispatcher):
    """Moves tokens to the ranks of their experts, and the experts' results back as sums weighted by the scores.

    Differentiable in tokens, results and scores. Without expert parallelism, the dispatcher that is replaced does the
    work.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.AllToAllTokenDispatcher.Config):
        """As that of the dispatcher that is replaced; it builds this one.

        capacity_factor: as in `mk.moe_dispatch`. None is enough for any routing.
        """

        capacity_factor: float | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self.capacity_factor = config.capacity_factor

    def _group(self) -> Any:
        """The process group of expert parallelism."""
        assert self.ep_mesh is not None
        return self.ep_mesh.get_group()

    def dispatch(
        self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:  # fmt: skip
        """(rows of this rank's experts, how many rows each has, metadata for `combine`)."""
        if self.ep_mesh is None:
            return super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        experts, others = divmod(self.num_experts, self.ep_mesh.size())
        if others:
            raise ArgumentError(
                f"num_experts is {self.num_experts}, which {self.ep_mesh.size()} ranks of expert parallelism cannot "
                f"divide equally"
            )
        # TorchTitan pads sequences, so all ranks have this many tokens
        rows, handle = moe_dispatch(
            x_TD, topk_expert_ids_TK, experts, group=self._group(), max_tokens=x_TD.shape[0],
            capacity_factor=self.capacity_factor,
        )  # fmt: skip
        return rows, handle.counts, Dispatched(handle=handle, scores=topk_scores_TK)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """The sums, [tokens, features]."""
        if self.ep_mesh is None:
            return super().combine(routed_output_RD, metadata, x_TD)
        return moe_combine(routed_output_RD, metadata.handle, metadata.scores, group=self._group())


# exact: not of its subclass for quantized experts, TorchAOTokenDispatcher, which pads the rows of each expert
@override(
    target=titan.AllToAllTokenDispatcher.Config, exact=True,
    description="mkernel: expert parallelism in one kernel each way",
)  # fmt: skip
def token_dispatcher(
    config: titan.AllToAllTokenDispatcher.Config, *, capacity_factor: float | None = None
) -> TokenDispatcher.Config:
    """Replace the token dispatcher."""
    return derive(config, TokenDispatcher.Config, capacity_factor=capacity_factor)
