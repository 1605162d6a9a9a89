"""Routers: which experts a token goes to, and with which weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mkernel.nn.shards import check_positive, copy_into
from mkernel.ops.moe.arguments import MOST_SLOTS
from mkernel.ops.reduce import matmul_all_reduce
from mkernel.runtime.errors import ArgumentError

BEST = 2  # experts that stand for a group when groups are compared
SCORES = ("softmax", "sigmoid")
EXACT = 2048  # integers below it are exact in all formats of a product: TF32 has 11 bits


@torch.no_grad()
def expert_load(ids: torch.Tensor, num_experts: int, *, group: Any = None) -> torch.Tensor:
    """How many tokens of all ranks go to each expert: what `TopKRouter.adjust_bias` takes. Collective; the host does
    not wait for it.

    Args:
        ids: the experts of this rank's tokens, as a router returns them; negative ones are dropped. Fewer than four
            million may name the same expert.
        num_experts: experts of the whole layer.
        group: the group whose ranks share them; None is the current group.

    Returns:
        [num_experts], int64, the same on every rank.
    """
    places = (ids.flatten() + 1).clamp_min(0).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, places, torch.ones_like(places))[1:]
    digits = torch.stack([counts // EXACT, counts % EXACT]).float()
    with torch.autocast(ids.device.type, enabled=False):  # bf16 would round them
        identity = torch.eye(2, dtype=torch.float32, device=ids.device)
        high, low = matmul_all_reduce(identity, digits, group=group).long()
    return high * EXACT + low


class TopKRouter(nn.Module):
    """Chooses the experts of each token: the `top_k` with the largest scores. Scores are computed in fp32, also under
    autocast. The defaults are those of Mixtral and Qwen-MoE; DeepSeek-V3 has scores="sigmoid", correction_bias=True,
    groups=8, top_groups=4 and scale=2.5.

    Args:
        hidden_size: features of a token.
        num_experts: experts of the whole layer.
        top_k: experts per token.
        normalize: divide the weights of a token's experts by their sum, as Mixtral does.
        scores: "softmax" or "sigmoid" of x @ weight.t(). The weights of a token's experts are their scores.
        scale: what the weights are multiplied by at the end.
        groups, top_groups: experts are divided into `groups` of consecutive ones; a token goes to experts of its
            `top_groups` best groups only, those with the largest sums of their two best scores.
        correction_bias: have a buffer `e_score_correction_bias` [num_experts] in fp32, zeros at first. It is added to
            the scores where experts are chosen, and does not change weights: `adjust_bias` balances the load with it.
            It stays in fp32 where the module is converted (`to(torch.bfloat16)`).
        generator: what the initial values are drawn from. None is torch's default generator.

    `forward(x)`, x [tokens, hidden_size], returns (ids [tokens, top_k], weights [tokens, top_k] in fp32).
    """

    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, normalize: bool = True, scores: str = "softmax",
        scale: float = 1.0, groups: int = 1, top_groups: int = 1, correction_bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__()
        check_positive(hidden_size=hidden_size, num_experts=num_experts, top_k=top_k, groups=groups)
        check_positive(top_groups=top_groups)
        if top_k > min(num_experts, MOST_SLOTS):
            raise ArgumentError(
                f"top_k is {top_k}; it must be at most num_experts ({num_experts}) and at most {MOST_SLOTS}"
            )
        if scores not in SCORES:
            raise ArgumentError(f"scores must be one of {', '.join(SCORES)}; got {scores!r}")
        if num_experts % groups or top_groups > groups or top_k > num_experts // groups * top_groups:
            raise ArgumentError(
                f"groups is {groups} and top_groups {top_groups}: groups must divide num_experts ({num_experts}), and "
                f"top_groups of them must exist and hold top_k ({top_k}) experts"
            )
        self.hidden_size, self.num_experts, self.top_k, self.normalize = hidden_size, num_experts, top_k, normalize
        self.scores, self.scale, self.groups, self.top_groups = scores, scale, groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """The weight as that of `nn.Linear`, and a correction bias of zeros."""
        weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device=self.weight.device)
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        copy_into(self.weight, weight)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def _apply(self, fn: Any, recurse: bool = True) -> TopKRouter:
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)  # of `to` and the like
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:  # in bf16, small steps would be lost
            self.e_score_correction_bias = bias.to(moved.device)
        return self

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.route(x, self.weight)

    def route(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` with another weight in place of the module's."""
        with torch.autocast(x.device.type, enabled=False):
            logits = x.float() @ weight.float().t()
        scores = torch.softmax(logits, dim=-1) if self.scores == "softmax" else torch.sigmoid(logits)
        ids = self._choose(scores.detach())
        weights = scores.gather(-1, ids)
        if self.normalize:
            # sigmoids may all be zero
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return ids, weights if self.scale == 1.0 else weights * self.scale

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The ids of the experts of each token."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.top_groups < self.groups:
            grouped = scores.unflatten(-1, (self.groups, -1))
            best = grouped.topk(min(BEST, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter(
                -1, best.topk(self.top_groups, dim=-1).indices, True
            )
            scores = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices

    @torch.no_grad()
    def adjust_bias(self, load: torch.Tensor, rate: float = 0.001) -> None:
        """Balance the load without a loss for it, as DeepSeek-V3 does after each step: raise the bias of experts with
        less than the average load by `rate`, and lower that of the others. load: [num_experts], how many tokens of all
        ranks have gone to each expert (`expert_load`); it must be the same on every rank."""
        bias = self.e_score_correction_bias
        if bias is None:
            raise ArgumentError("this router has no bias to adjust: build it with correction_bias=True")
        if tuple(load.shape) != (self.num_experts,):
            raise ArgumentError(f"load has shape {tuple(load.shape)}, but must have {(self.num_experts,)}")
        load = load.to(bias)
        bias += rate * torch.sign(load.mean() - load)

    def extra_repr(self) -> str:
        more = "" if self.scores == "softmax" else f", scores={self.scores}"
        if self.groups > 1:
            more += f", groups={self.groups}, top_groups={self.top_groups}"
        return (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"normalize={self.normalize}{more}"
        )
