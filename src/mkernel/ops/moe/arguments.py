"""Checks of arguments: an `ArgumentError` names the argument and the rule that it violates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkernel.ops.moe.grouped import Biases
from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.gpus import name_of
from mkernel.runtime.group import Group
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import DTYPES, has_descriptors

MOST_SLOTS = 16
ACTIVATIONS = ("silu", "gelu", "relu", "relu2", "none")
MOST_RANKS_PER_NODE = 64  # reduction.py has one bit for each in a 64-bit word
WEIGHT_DTYPES = (*DTYPES, torch.float64)  # dtypes of topk_weights, which are converted to fp32


def check_tokens(
    op: str, group: Group, x: torch.Tensor, topk_ids: torch.Tensor, dtypes: Sequence[torch.dtype] = tuple(DTYPES)
) -> None:
    """Reject tokens and ids that cannot be routed. dtypes: those that tokens may have."""
    if not has_descriptors(group.target):
        raise ArgumentError(
            f"{op} needs tensor descriptors (TMA), which {name_of(group.target)} does not have; it runs on Hopper "
            "(compute capability 9.0) or newer"
        )
    check_tensor(op, group, "x", x, 2)
    check_tensor(op, group, "topk_ids", topk_ids, 2)
    if x.dtype not in dtypes:
        raise ArgumentError(f"x has dtype {x.dtype}; supported are {', '.join(str(d) for d in dtypes)}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"topk_ids has dtype {topk_ids.dtype}; it must be torch.int32 or torch.int64")
    if topk_ids.shape[0] != x.shape[0]:
        raise ArgumentError(f"topk_ids has {topk_ids.shape[0]} rows, but x has {x.shape[0]} tokens")
    if group.gpus_per_node > MOST_RANKS_PER_NODE:
        raise ArgumentError(
            f"{op} supports at most {MOST_RANKS_PER_NODE} ranks per node, but this group has {group.gpus_per_node}: "
            f"take fewer ranks as a node: gpus_per_node of mk.init, --gpus-per-node of the tools"
        )
    if not 1 <= topk_ids.shape[1] <= MOST_SLOTS:
        raise ArgumentError(f"topk_ids has {topk_ids.shape[1]} experts per token; it must be 1 to {MOST_SLOTS}")
    if x.shape[1] < 1:
        raise ArgumentError(f"x has shape {tuple(x.shape)}: tokens must have at least 1 element")


def check_matrices(op: str, group: Group, name: str, w: Any, dtype: torch.dtype, rows: int, of: str) -> None:
    """Reject matrices of experts that cannot multiply rows of `rows` elements. of: what `rows` is, for the message."""
    check_tensor(op, group, name, w, 3)
    if w.dtype != dtype:
        raise ArgumentError(f"{name} has dtype {w.dtype}, but x has {dtype}: they must be the same")
    if w.shape[1] != rows:
        raise ArgumentError(f"{name} is {tuple(w.shape)}: its second dimension ({w.shape[1]}) must be {of} ({rows})")
    if w.shape[2] < 1:
        raise ArgumentError(f"{name} is {tuple(w.shape)}: matrices must have at least 1 column")


def check_bias(
    op: str, group: Group, name: str, bias: torch.Tensor | None, w: torch.Tensor, of: str,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Reject a bias that cannot be added to products with the matrices w of the experts. of: their name. dtype: that of
    the products, if it is not theirs."""
    if bias is None:
        return
    check_tensor(op, group, name, bias)
    expected = (w.shape[0], w.shape[2])
    if dtype is not None and bias.dtype != dtype:
        raise ArgumentError(f"{name} has dtype {bias.dtype}, but the result has {dtype}: they must be the same")
    if dtype is None and bias.dtype != w.dtype:
        raise ArgumentError(f"{name} has dtype {bias.dtype}, but {of} has {w.dtype}: they must be the same")
    if tuple(bias.shape) != expected:
        raise ArgumentError(f"{name} is {tuple(bias.shape)}, but must be {expected}: the experts and columns of {of}")


def check_weights(topk_weights: torch.Tensor, tokens: int, k: int) -> None:
    """Reject weights that do not match the tokens and their k experts."""
    if topk_weights.dtype not in WEIGHT_DTYPES:
        raise ArgumentError(
            f"topk_weights has dtype {topk_weights.dtype}; it must be a floating point type of 16 bits or more: "
            f"{', '.join(map(str, WEIGHT_DTYPES))}"
        )
    if tuple(topk_weights.shape) != (tokens, k):
        raise ArgumentError(f"topk_weights is {tuple(topk_weights.shape)}, but must be {(tokens, k)}: tokens x k")


def check_experts(name: str, experts: int) -> None:
    """Reject an invalid number of experts."""
    if not isinstance(experts, int) or isinstance(experts, bool) or experts < 0:
        raise ArgumentError(f"{name} must be a whole number, 0 or more; got {experts!r}")


def check_bounds(tokens: int, capacity: int | None, max_tokens: int | None) -> None:
    """Reject invalid bounds, and a max_tokens that is below the number of tokens."""
    for name, value in (("capacity", capacity), ("max_tokens", max_tokens)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31):
            raise ArgumentError(f"{name} must be a whole number, 0 or more, and less than 2**31; got {value!r}")
    if max_tokens is not None and tokens > max_tokens:
        raise ArgumentError(f"x has {tokens} tokens, more than the {max_tokens} that max_tokens declares")


def check_config(op: str, config: Config | None) -> None:
    """Reject a configuration that an operator with a dispatch cannot use."""
    planning.check_given(config)
    if config is not None and config.join_tiles is not None:
        raise ArgumentError(
            f"config.join_tiles does not apply to {op}: a counter assigns tiles to CTAs as they become free"
        )


def check_ffn(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, biases: Biases, capacity: int | None, max_tokens: int | None, out: torch.Tensor | None,
    config: Config | None,
) -> None:  # fmt: skip
    """Reject arguments that moe_ffn cannot compute with."""
    check_config("moe_ffn", config)
    check_tokens("moe_ffn", group, x, topk_ids)
    check_tensor("moe_ffn", group, "topk_weights", topk_weights)
    check_weights(topk_weights, x.shape[0], topk_ids.shape[1])
    check_matrices("moe_ffn", group, "w_gate_up", w_gate_up, x.dtype, x.shape[1], "the size of a token")
    if w_gate_up.shape[2] % 2:
        raise ArgumentError(
            f"w_gate_up is {tuple(w_gate_up.shape)}: its last dimension must be even, because half of its columns are "
            f"gate, half are up"
        )
    inter = w_gate_up.shape[2] // 2
    check_matrices("moe_ffn", group, "w_down", w_down, x.dtype, inter, "half of the columns of w_gate_up")
    if w_down.shape[0] != w_gate_up.shape[0] or w_down.shape[2] != x.shape[1]:
        raise ArgumentError(
            f"w_down is {tuple(w_down.shape)}, but must be {(w_gate_up.shape[0], inter, x.shape[1])}: the experts of "
            f"w_gate_up, half of its columns, the size of a token"
        )
    check_bias("moe_ffn", group, "b_gate_up", biases.gate_up, w_gate_up, "w_gate_up")
    check_bias("moe_ffn", group, "b_down", biases.down, w_down, "w_down")
    check_bounds(x.shape[0], capacity, max_tokens)
    if out is not None:
        check_tensor("moe_ffn", group, "out", out)
        inputs = dict(x=x, topk_ids=topk_ids, topk_weights=topk_weights, w_gate_up=w_gate_up, w_down=w_down)
        more = dict(b_gate_up=biases.gate_up, b_down=biases.down)
        inputs |= {name: bias for name, bias in more.items() if bias is not None}
        check_out(out, tuple(x.shape), "tokens, hidden", x.dtype, inputs)


def check_save(save: str) -> None:
    """Reject an unknown choice of what a forward pass keeps."""
    if save not in ("inputs", "activations"):
        raise ArgumentError(f"save must be 'inputs' or 'activations', got {save!r}")


def check_activation(activation: str) -> None:
    """Reject an activation that moe_ffn does not have."""
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
