"""Forward passes that keep what a backward pass needs (backward.py).

They are the forward passes of the operators, with bounds that the caller knows: the capacity, the largest number of
tokens of any rank, the tokens of a chunk and the rows of a block. These are the numbers of the handle
(`Handle.numbers`), so that a backward pass, or a graph that was traced, needs nothing else to find the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mkernel.ops.moe import dispatch_matmul, dispatch_rows, ffn
from mkernel.ops.moe.arguments import check_ffn
from mkernel.ops.moe.grouped import Biases
from mkernel.ops.moe.handle import Handle, numbers_of
from mkernel.ops.moe.plan import tile_height
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group


def _as_decided(config: Config | None, numbers: Sequence[int]) -> Config:
    return replace(config or Config(), chunk_rows=numbers[4], tile_m=numbers[5])


# -- moe_ffn


@collective
def moe_ffn_kept(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, numbers: Sequence[int], *, group: Any, keep: str, config: Config | None,
    activation: str = "silu", biases: Biases = ffn.NO_BIASES,
) -> tuple[torch.Tensor, Handle, ffn.Memory]:  # fmt: skip
    """moe_ffn: its result, its handle, and the memory in which it has kept its activations if keep is "activations"."""
    _, _, capacity, max_tokens, *_ = numbers
    check_ffn(group, x, topk_ids, topk_weights, w_gate_up, w_down, biases, capacity, max_tokens, None, config)
    config = _as_decided(ffn.choose(group, x, topk_ids, w_down, max_tokens, config), numbers)
    sizes = ffn.agree(group, x, topk_ids, w_down, capacity, max_tokens, config)
    out = group.world.memory.empty(group.world_rank, tuple(x.shape), x.dtype)
    launch, handle, own = ffn.prepare_kept(
        group, x, topk_ids, topk_weights, w_gate_up, w_down, out, sizes, config, keep, activation, biases
    )
    group.launch(launch)
    return out, handle, own


def ffn_numbers(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, biases: Biases, capacity: int | None, max_tokens: int | None, config: Config | None,
) -> tuple[int, ...]:  # fmt: skip
    """`Handle.numbers` of a call of moe_ffn. Collective."""
    with torch.no_grad():
        check_ffn(group, x, topk_ids, topk_weights, w_gate_up, w_down, biases, capacity, max_tokens, None, config)
    sizes = ffn.agree(group, x, topk_ids, w_down, capacity, max_tokens, config)
    chosen = ffn.choose(group, x, topk_ids, w_down, sizes.max_tokens, config)
    return numbers_of(sizes, tile_height(group.target, x.dtype, chosen))


# -- moe_dispatch_matmul


@collective
def moe_dispatch_matmul_kept(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, numbers: Sequence[int], *,
    group: Any, keep: str, config: Config | None,
) -> tuple[torch.Tensor, Handle, torch.Tensor]:  # fmt: skip
    """moe_dispatch_matmul: its result, its handle, and the rows of x, for a backward pass if keep is "activations"."""
    _, _, capacity, max_tokens, *_ = numbers
    dispatch_matmul.check(group, x, topk_ids, w, bias, capacity, max_tokens, config)
    config = _as_decided(dispatch_matmul.choose(group, x, topk_ids, w, max_tokens, config), numbers)
    sizes = dispatch_matmul.agree(group, x, topk_ids, w, capacity, max_tokens, config)
    launch, y, handle, rows = dispatch_matmul.prepare_kept(group, x, topk_ids, w, sizes, config, keep, bias)
    group.launch(launch)
    return y, handle, rows


def dispatch_numbers(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
    capacity: int | None, max_tokens: int | None, config: Config | None,
) -> tuple[int, ...]:  # fmt: skip
    """`Handle.numbers` of a call of moe_dispatch_matmul. Collective."""
    with torch.no_grad():
        dispatch_matmul.check(group, x, topk_ids, w, bias, capacity, max_tokens, config)
    sizes = dispatch_matmul.agree(group, x, topk_ids, w, capacity, max_tokens, config)
    chosen = dispatch_matmul.choose(group, x, topk_ids, w, sizes.max_tokens, config)
    return numbers_of(sizes, tile_height(group.target, x.dtype, chosen))


# -- moe_dispatch


@collective
def moe_dispatch_kept(
    x: torch.Tensor, topk_ids: torch.Tensor, numbers: Sequence[int], *, group: Any, config: Config | None
) -> tuple[torch.Tensor, Handle]:
    """moe_dispatch. There is nothing to keep but the handle."""
    _, experts, capacity, max_tokens, *_ = numbers
    dispatch_rows.check(group, x, topk_ids, experts, capacity, max_tokens, config)
    config = _as_decided(dispatch_rows.choose(group, x, topk_ids, experts, max_tokens, config), numbers)
    sizes = dispatch_rows.agree(group, x, topk_ids, experts, capacity, max_tokens, config)
    launch, rows, handle = dispatch_rows.prepare(group, x, topk_ids, sizes, config)
    group.launch(launch)
    return rows, handle


def rows_numbers(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, capacity: int | None, max_tokens: int | None,
    config: Config | None,
) -> tuple[int, ...]:  # fmt: skip
    """`Handle.numbers` of a call of moe_dispatch. Collective."""
    with torch.no_grad():
        dispatch_rows.check(group, x, topk_ids, experts, capacity, max_tokens, config)
    sizes = dispatch_rows.agree(group, x, topk_ids, experts, capacity, max_tokens, config)
    chosen = dispatch_rows.choose(group, x, topk_ids, experts, sizes.max_tokens, config)
    return numbers_of(sizes, tile_height(group.target, x.dtype, chosen))
