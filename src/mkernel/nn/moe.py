"""A mixture-of-experts layer whose experts are divided among the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mkernel.nn.initial import agreed_generator
from mkernel.nn.replicated import with_summed_gradient
from mkernel.nn.router import TopKRouter
from mkernel.nn.shards import ParallelModule, check_divisible, check_positive
from mkernel.ops.moe import moe_ffn
from mkernel.ops.moe.arguments import check_activation, check_save
from mkernel.runtime.group import current


class ParallelExperts(ParallelModule):
    """The experts of a mixture-of-experts layer, divided among the ranks: rank r has experts r*num_experts/world to
    (r+1)*num_experts/world-1. Each is a SwiGLU MLP. Arguments as in `ExpertParallelMoE`.

    `gate_up_proj` is [num_experts/world, 2*intermediate_size, hidden_size], gate above up; `down_proj` is
    [num_experts/world, hidden_size, intermediate_size]. With bias=True, `gate_up_proj_bias` is [num_experts/world,
    2*intermediate_size] and `down_proj_bias` [num_experts/world, hidden_size].
    """

    shard_dims = {"gate_up_proj": 0, "down_proj": 0, "gate_up_proj_bias": 0, "down_proj_bias": 0}  # noqa: RUF012
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, *, bias: bool = False, group: Any = None,
        capacity: int | None = None, max_tokens: int | None = None, activation: str = "silu", save: str = "inputs",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__(group)
        check_save(save)
        check_activation(activation)
        check_positive(hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts)
        check_divisible("num_experts", num_experts, self.world_size)
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.capacity, self.max_tokens, self.save, self.activation = capacity, max_tokens, save, activation
        mine = num_experts // self.world_size
        like: dict[str, Any] = dict(device=device, dtype=dtype)
        self.gate_up_proj = nn.Parameter(torch.empty(mine, 2 * intermediate_size, hidden_size, **like))
        self.down_proj = nn.Parameter(torch.empty(mine, hidden_size, intermediate_size, **like))
        for name, columns in (("gate_up_proj_bias", 2 * intermediate_size), ("down_proj_bias", hidden_size)):
            self.register_parameter(name, nn.Parameter(torch.empty(mine, columns, **like)) if bias else None)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Each matrix starts as the weight of an `nn.Linear`, and each bias as that of one. Every rank draws those of
        all experts and keeps its own, so the values do not depend on the number of ranks."""
        mine = self.num_experts // self.world_size
        first = self.membership.rank * mine
        with agreed_generator(self.membership.known_group, self.down_proj.device, generator) as generator:
            pairs = ((self.gate_up_proj, self.gate_up_proj_bias), (self.down_proj, self.down_proj_bias))
            drawings = [(one, matrix.shape[2] ** -0.5) for matrix, bias in pairs for one in (matrix, bias)]
            for parameter, bound in drawings:
                if parameter is None:
                    continue
                drawn = torch.empty_like(parameter[0])
                for expert in range(self.num_experts):
                    drawn.uniform_(-bound, bound, generator=generator)
                    if first <= expert < first + mine:
                        parameter[expert - first] = drawn

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums of the results of each token's experts. x: [tokens, hidden_size]."""
        return moe_ffn(
            x, ids, weights, self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2), group=self.group,
            b_gate_up=self.gate_up_proj_bias, b_down=self.down_proj_bias, capacity=self.capacity,
            max_tokens=self.max_tokens, activation=self.activation, save=self.save,
        )  # fmt: skip

    def extra_repr(self) -> str:
        bias = "" if self.down_proj_bias is None else ", bias=True"
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}{bias}, shard {self.membership.rank} of {self.membership.size}"
        )


class ExpertParallelMoE(nn.Module):
    """A mixture-of-experts layer: a top-k router, and SwiGLU experts that are divided among the ranks, in one
    kernel (`mk.moe_ffn`).

    The loss is the sum of all ranks' losses: each rank calls `backward` on that of its own tokens. The gradients of the
    experts and of the router then cover the tokens of all ranks, as those of the plain module on one device would: the
    backward pass sums the router's over the ranks. Every rank must call `backward`.

    The parameters have the names and shapes of Hugging Face's Mixtral and Qwen-MoE blocks (transformers 5):
    `gate.weight` [num_experts, hidden_size], replicated; `experts.gate_up_proj` [num_experts, 2*intermediate_size,
    hidden_size], gate above up, and `experts.down_proj` [num_experts, hidden_size, intermediate_size], divided by
    experts. With bias=True, those of GPT-OSS's experts, too: `experts.gate_up_proj_bias` and `experts.down_proj_bias`.

    Args:
        hidden_size: features of the input and the output.
        intermediate_size: inner features of an expert.
        num_experts: experts of the whole layer; divisible by the number of ranks.
        top_k: experts per token.
        bias: add a bias to the products with each matrix of an expert.
        normalize, scores, scale, groups, top_groups, correction_bias: of the router, see `TopKRouter`.
        group: the group whose ranks share the experts; None is the current group.
        capacity, max_tokens, activation, save: as in `mk.moe_ffn`.
        generator: as in `ColumnParallelLinear`.

    Input and output: [..., hidden_size], this rank's tokens. Their number may differ between ranks.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, bias: bool = False,
        normalize: bool = True, scores: str = "softmax", scale: float = 1.0, groups: int = 1, top_groups: int = 1,
        correction_bias: bool = False, group: Any = None, capacity: int | None = None, max_tokens: int | None = None,
        activation: str = "silu", save: str = "inputs", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__()
        group = current(group)
        like: dict[str, Any] = dict(device=device, dtype=dtype)
        with agreed_generator(group, torch.empty(0, **like).device, generator) as generator:
            like["generator"] = generator
            self.gate = TopKRouter(
                hidden_size, num_experts, top_k, normalize=normalize, scores=scores, scale=scale, groups=groups,
                top_groups=top_groups, correction_bias=correction_bias, **like,
            )  # fmt: skip
            self.experts = ParallelExperts(
                hidden_size, intermediate_size, num_experts, bias=bias, group=group, capacity=capacity,
                max_tokens=max_tokens, activation=activation, save=save, **like,
            )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weight = with_summed_gradient(self.gate.weight, self.experts.group)
        return self.experts(tokens, *self.gate.route(tokens, weight)).reshape(x.shape)
