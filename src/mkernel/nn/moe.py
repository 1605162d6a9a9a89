"""A mixture-of-experts layer whose experts are divided among the ranks.

Shared experts, which every token goes to, are computed in the same launch as the others. Each rank has all of them as
its last experts, after its own experts in memory, so that the kernel gets one tensor of matrices. A token names the
shared experts of its own rank in additional columns of its ids, with a weight of one. So they need no communication,
and their tiles are computed while other tokens, or results, are in flight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mkernel.nn import fp8_experts
from mkernel.nn.fp8_experts import check_experts_recipe
from mkernel.nn.initial import agreed_generator
from mkernel.nn.replicated import with_summed_gradient
from mkernel.nn.router import TopKRouter
from mkernel.nn.shards import (
    ParallelModule,
    check_divisible,
    check_gathered,
    check_positive,
    copy_into,
    is_dtensor,
)
from mkernel.ops.moe import moe_ffn
from mkernel.ops.moe.arguments import MOST_SLOTS, check_activation, check_experts, check_save
from mkernel.ops.moe.sizes import capacity_of
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import current

NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


class _Joined(torch.autograd.Function):
    """Two tensors as one: a view if the second is behind the first in memory, otherwise a copy of both."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        ctx.own = len(own)
        same_memory = own.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr()
        if same_memory and own.storage_offset() + own.numel() == shared.storage_offset() and own.is_contiguous():
            return own.as_strided((len(own) + len(shared), *own.shape[1:]), own.stride())
        return torch.cat([own, shared])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient[: ctx.own], gradient[ctx.own :]


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor to fill with values of a parameter: itself, unless FSDP has divided it."""
    if not is_dtensor(parameter):
        return parameter
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


class ParallelExperts(ParallelModule):
    """The experts of a mixture-of-experts layer, divided among the ranks: rank r has experts r*num_experts/world to
    (r+1)*num_experts/world-1. Each is a SwiGLU MLP. Arguments as in `ExpertParallelMoE`.

    `gate_up_proj` is [num_experts/world, 2*intermediate_size, hidden_size], gate above up; `down_proj` is
    [num_experts/world, hidden_size, intermediate_size]. With bias=True, `gate_up_proj_bias` is [num_experts/world,
    2*intermediate_size] and `down_proj_bias` [num_experts/world, hidden_size]. Each has a counterpart for the shared
    experts, if there are any: `shared_gate_up_proj` [shared_experts, 2*intermediate_size, hidden_size] and so on. These
    are the same on every rank.
    """

    shard_dims = {"gate_up_proj": 0, "down_proj": 0, "gate_up_proj_bias": 0, "down_proj_bias": 0}  # noqa: RUF012
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, *, shared_experts: int = 0,
        bias: bool = False, group: Any = None, capacity: int | None = None, capacity_factor: float | None = None,
        max_tokens: int | None = None, activation: str = "silu", save: str = "inputs", fp8: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__(group)
        check_save(save)
        check_activation(activation)
        check_positive(hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts)
        check_experts_recipe(fp8, bias, save, intermediate_size)
        check_divisible("num_experts", num_experts, self.world_size)
        check_experts("shared_experts", shared_experts)
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.shared_experts = shared_experts
        self.capacity, self.capacity_factor, self.max_tokens = capacity, capacity_factor, max_tokens
        self.save, self.activation, self.fp8 = save, activation, fp8
        mine = num_experts // self.world_size
        like: dict[str, Any] = dict(device=device, dtype=dtype)
        inner = 2 * intermediate_size
        shapes = ((inner, hidden_size), (hidden_size, intermediate_size), (inner,), (hidden_size,))
        for name, shape in zip(NAMES, shapes, strict=True):
            missing = name.endswith("bias") and not bias
            whole = None if missing else torch.empty(mine + shared_experts, *shape, **like)
            self.register_parameter(name, None if whole is None else nn.Parameter(whole[:mine]))
            if shared_experts:
                self.register_parameter(f"shared_{name}", None if whole is None else nn.Parameter(whole[mine:]))
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Each matrix starts as the weight of an `nn.Linear`, and each bias as that of one. Every rank draws those of
        all experts and keeps its own, so the values do not depend on the number of ranks."""
        mine = self.num_experts // self.world_size
        first = self.membership.rank * mine
        with agreed_generator(self.membership.known_group, self.down_proj.device, generator) as generator:
            for name in NAMES:
                parameter = getattr(self, name)
                if parameter is None:
                    continue
                bound = (self.intermediate_size if name.startswith("down") else self.hidden_size) ** -0.5
                own = _plain(parameter)
                drawn = torch.empty_like(own[0])
                for expert in range(self.num_experts):
                    drawn.uniform_(-bound, bound, generator=generator)
                    if first <= expert < first + mine:
                        own[expert - first] = drawn
                copy_into(parameter, own)
                if self.shared_experts:
                    shared = getattr(self, f"shared_{name}")
                    copy_into(shared, _plain(shared).uniform_(-bound, bound, generator=generator))

    def _adjoin(self) -> None:
        """Move shared experts behind the others in memory."""
        for name in NAMES if self.shared_experts else ():
            own, shared = getattr(self, name), getattr(self, f"shared_{name}")
            if own is not None and not is_dtensor(own):
                both = torch.cat([own.data, shared.data])
                own.data, shared.data = both[: len(own)], both[len(own) :]

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelExperts:
        super()._apply(fn, recurse)  # of `to` and the like: moves each parameter on its own
        self._adjoin()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, or of a module from a file
        self._adjoin()

    def _all(self, name: str) -> torch.Tensor | None:
        """A parameter of all experts that this rank computes."""
        own = getattr(self, name)
        if own is None or not self.shared_experts:
            return own
        shared = with_summed_gradient(getattr(self, f"shared_{name}"), self.group)
        return torch.cat([own, shared]) if torch.compiler.is_compiling() else _Joined.apply(own, shared)

    def _with_shared(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights that also name the shared experts, behind the other ones of their rank."""
        mine, rank, shared = self.num_experts // self.world_size, self.membership.rank, self.shared_experts
        first = rank * (mine + shared) + mine
        of_shared = torch.arange(first, first + shared, dtype=ids.dtype, device=ids.device).expand(len(ids), shared)
        moved = ids + ids.div(mine, rounding_mode="floor") * shared  # negative ones stay so
        return torch.cat([moved, of_shared], dim=1), torch.cat([weights, weights.new_ones(len(ids), shared)], dim=1)

    def _capacity(self, tokens: int, k: int) -> int | None:
        """The capacity with the rows of shared experts, which are only those of this rank's tokens."""
        capacity = capacity_of(self.capacity, self.capacity_factor, self.max_tokens, k, self.world_size)
        if not self.shared_experts or (capacity is None and self.max_tokens is None):
            return capacity
        tokens = tokens if self.max_tokens is None else self.max_tokens
        return (self.world_size * tokens * k if capacity is None else capacity) + tokens * self.shared_experts

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums of the results of each token's experts, plus those of the shared ones. x: [tokens,
        hidden_size]."""
        capacity = self._capacity(len(x), ids.shape[1])
        if self.shared_experts:
            ids, weights = self._with_shared(ids, weights)
        gate_up, down, b_gate_up, b_down = (self._all(name) for name in NAMES)
        assert gate_up is not None
        assert down is not None
        if self.fp8 is not None:
            return fp8_experts.moe_ffn(
                x, ids, weights, gate_up, down, self.fp8, group=self.group, capacity=capacity,
                max_tokens=self.max_tokens, activation=self.activation,
            )  # fmt: skip
        return moe_ffn(
            x, ids, weights, gate_up.transpose(1, 2), down.transpose(1, 2), group=self.group, b_gate_up=b_gate_up,
            b_down=b_down, capacity=capacity, max_tokens=self.max_tokens, activation=self.activation, save=self.save,
        )  # fmt: skip

    def extra_repr(self) -> str:
        more = f", shared_experts={self.shared_experts}" if self.shared_experts else ""
        more += "" if self.down_proj_bias is None else ", bias=True"
        more += "" if self.fp8 is None else f", fp8={self.fp8!r}"
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}{more}, shard {self.membership.rank} of {self.membership.size}"
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
        shared_experts: experts that every token goes to, with a weight of one, besides its top_k. Every rank has all of
            them and computes those of its own tokens, in the same kernel; the backward pass sums their gradients over
            the ranks. They are as large as the others: the one of DeepSeek-V3 with n times their inner features is n
            of them. With top_k at most 16.
        bias: add a bias to the products with each matrix of an expert.
        normalize, scores, scale, groups, top_groups, correction_bias: of the router, see `TopKRouter`.
        group: the group whose ranks share the experts; None is the current group.
        capacity, capacity_factor, max_tokens, activation, save: as in `mk.moe_ffn`. The capacity is without the rows of
            shared experts.
        fp8: multiply in fp8 what is quantized in each forward pass: "RowWise" or "BlockWise", for what shares a scale
            (see `mkernel.nn.fp8_experts`). None: no. The router is not quantized. Only with bias=False and
            save="inputs".
        generator: as in `ColumnParallelLinear`.

    Input and output: [..., hidden_size], this rank's tokens. Their number may differ between ranks.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, shared_experts: int = 0,
        bias: bool = False, normalize: bool = True, scores: str = "softmax", scale: float = 1.0, groups: int = 1,
        top_groups: int = 1, correction_bias: bool = False, group: Any = None, capacity: int | None = None,
        capacity_factor: float | None = None, max_tokens: int | None = None, activation: str = "silu",
        save: str = "inputs", fp8: str | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__()
        check_experts("shared_experts", shared_experts)
        if isinstance(top_k, int) and top_k + shared_experts > MOST_SLOTS:
            raise ArgumentError(
                f"top_k is {top_k} and shared_experts {shared_experts}: a token can go to at most {MOST_SLOTS} experts"
            )
        group = current(group)
        like: dict[str, Any] = dict(device=device, dtype=dtype)
        with agreed_generator(group, torch.empty(0, **like).device, generator) as generator:
            like["generator"] = generator
            self.gate = TopKRouter(
                hidden_size, num_experts, top_k, normalize=normalize, scores=scores, scale=scale, groups=groups,
                top_groups=top_groups, correction_bias=correction_bias, **like,
            )  # fmt: skip
            self.experts = ParallelExperts(
                hidden_size, intermediate_size, num_experts, shared_experts=shared_experts, bias=bias, group=group,
                capacity=capacity, capacity_factor=capacity_factor, max_tokens=max_tokens, activation=activation,
                save=save, fp8=fp8, **like,
            )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_gathered(self, "gate")
        tokens = x.reshape(-1, x.shape[-1])
        weight = with_summed_gradient(self.gate.weight, self.experts.group)
        return self.experts(tokens, *self.gate.route(tokens, weight)).reshape(x.shape)
