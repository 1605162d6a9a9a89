"""PyTorch's TokenSwitch (torch.distributed._token_switch, from 2.15 on), the interface of expert-parallel dispatch and
combine, with mkernel's operators behind it.

    switch = TokenSwitch(process_group, num_experts, max_dispatch_tokens_per_rank, max_recv_tokens_per_rank)
    routing = switch.create_routing(topk_idx, counts, layout="expert_major")
    rows, row_weights, _ = switch.dispatch(routing, tokens, topk_weights, max_recv_tokens)
    out = switch.combine(routing, experts(rows, counts) * row_weights[:, None])

The arguments are those of TokenSwitchNCCL, which is the implementation that comes with PyTorch. Here a group may be
anything that `mk` takes, and needs no NCCL EP.

Who does what. The interface creates the routing before the tokens are known. So `create_routing` dispatches rows of one
number, which fills the tables of the routing. `dispatch` moves tokens and weights with these tables
(ops/moe/redispatch.py), without routing a token again. `combine` is a `mk.moe_combine` with weights of one. Autograd is
that of PyTorch's base class: the gradient of `dispatch` is a `combine`, and that of `combine` a `dispatch`; weights
have no gradient. All calls are collective, including those of backward passes.

What it costs in addition to `mk.moe_dispatch`: the dispatch of one number per token, and a copy of the rows, because
the interface provides the memory for them, with zeros after the rows of the last expert. Programs that call mkernel
directly should use `mk.moe_ffn`.

This module imports a private module of PyTorch, so nothing else here imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _token_switch as interface  # type: ignore[attr-defined,unused-ignore]

from mkernel.ops.moe import Handle, moe_combine, moe_dispatch
from mkernel.ops.moe.arguments import check_weights
from mkernel.ops.moe.redispatch import Moved, redispatch
from mkernel.runtime.collective import collective
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current
from mkernel.runtime.matmul import check_tensor
from mkernel.runtime.operands import DTYPES

LAYOUT, DISPATCH = "expert_major", "TokenSwitch.dispatch"


@collective
def _move(tokens: torch.Tensor, weights: torch.Tensor, handle: Handle, *, group: Group) -> Moved:
    """Tokens, and the weights of their slots, as rows of their experts."""
    sizes = handle.sizes
    check_tensor(DISPATCH, group, "tokens", tokens, 2)
    if tokens.dtype not in DTYPES:
        raise ArgumentError(f"tokens has dtype {tokens.dtype}; supported are {', '.join(map(str, DTYPES))}")
    if len(tokens) != sizes.tokens:
        raise ArgumentError(f"tokens has {len(tokens)} rows, but the routing is that of {sizes.tokens} tokens")
    check_tensor(DISPATCH, group, "topk_weights", weights, 2)
    check_weights(weights, sizes.tokens, sizes.k)
    group.agree(
        DISPATCH, columns=tokens.shape[1], dtype=tokens.dtype, k=sizes.k, max_tokens=sizes.max_tokens,
        chunk_rows=sizes.chunk_rows,
    )  # fmt: skip
    return redispatch(group, handle, tokens, weights=weights)


class TokenSwitch(interface.TokenSwitch):
    """Dispatch and combine of expert parallelism behind PyTorch's interface.

    Args:
        process_group: the group whose ranks share the experts: a ProcessGroup, a `mk.Group`, a mesh or a name.
        num_experts: experts of all ranks; divisible by their number.
        max_dispatch_tokens_per_rank: the most tokens that a rank dispatches, the same on every rank.
        max_recv_tokens_per_rank: the capacity: how many rows a rank can receive, one for each token and expert. Rows
            beyond it are a `mk.CapacityError` on all ranks. A `dispatch` with a smaller max_recv_tokens leaves out what
            is beyond that; `combine` then returns NaN for tokens that lack a row.
        max_token_bytes: not needed here.
    """

    def __init__(
        self, process_group: Any, num_experts: int, max_dispatch_tokens_per_rank: int, max_recv_tokens_per_rank: int,
        max_token_bytes: int | None = None,
    ):  # fmt: skip
        self._group = current(process_group)
        if num_experts % self._group.size:
            raise ArgumentError(f"num_experts is {num_experts}, which {self._group.size} ranks cannot divide equally")
        self._experts = num_experts // self._group.size
        self._max_tokens, self._max_recv_tokens_per_rank = max_dispatch_tokens_per_rank, max_recv_tokens_per_rank

    @torch.no_grad()
    def create_routing(
        self, topk_idx: torch.Tensor, per_expert_token_counts: torch.Tensor | None = None, *, layout: str
    ) -> Any:
        """The routing of these ids. Writes how many rows each expert of this rank gets to per_expert_token_counts."""
        if layout != LAYOUT:
            raise ArgumentError(f"layout must be {LAYOUT!r}, got {layout!r}")
        numbers = torch.zeros(len(topk_idx), 1, device=topk_idx.device)
        _, handle = moe_dispatch(
            numbers, topk_idx, self._experts, group=self._group, capacity=self._max_recv_tokens_per_rank,
            max_tokens=self._max_tokens,
        )  # fmt: skip
        if per_expert_token_counts is not None:
            per_expert_token_counts[: self._experts].copy_(handle.counts)
        return interface.Routing(handle=handle, topk_idx=topk_idx, layout=layout)

    def _alloc_dispatch_outputs(
        self, routing: Any, tokens: torch.Tensor, topk_weights: torch.Tensor, max_recv_tokens: int, H: int, K: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return tokens.new_empty(max_recv_tokens, H), topk_weights.new_empty(max_recv_tokens), None

    @torch.no_grad()
    def _dispatch(
        self, routing: Any, tokens: torch.Tensor, topk_weights: torch.Tensor, out_tokens: torch.Tensor,
        out_topk_weights: torch.Tensor | None, out_topk_idx: torch.Tensor | None,
    ) -> None:  # fmt: skip
        handle: Handle = routing.handle
        moved = _move(tokens, topk_weights, handle, group=self._group)
        assert moved.weights is not None
        row = torch.arange(handle.capacity, device=tokens.device)
        beyond = row >= handle.counts.sum()
        for out, rows in ((out_tokens, moved.rows), (out_topk_weights, moved.weights)):
            if out is None:
                continue
            if len(out) > handle.capacity:
                out[handle.capacity :].zero_()
            target = out[: handle.capacity]
            shape = (-1, *[1] * (out.dim() - 1))
            target.copy_(rows[: len(target)]).masked_fill_(beyond[: len(target)].view(shape), 0)

    @torch.no_grad()
    def _combine(self, routing: Any, expert_tokens: torch.Tensor, out_tokens: torch.Tensor) -> None:
        handle: Handle = routing.handle
        rows = expert_tokens[: handle.capacity]
        if len(rows) < handle.capacity:  # those behind the last one that is needed may be left out; no others
            missing = rows.new_full((handle.capacity - len(rows), rows.shape[1]), float("nan"))
            rows = torch.cat([rows, missing])
        ones = torch.ones_like(routing.topk_idx, dtype=torch.float32)
        moe_combine(rows, handle, ones, group=self._group, out=out_tokens)
