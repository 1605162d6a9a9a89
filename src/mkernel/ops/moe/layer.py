"""mk.moe_ffn, the mixture-of-experts layer, and `torch.ops.mkernel.moe_ffn`. Forward only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.moe import ffn
from mkernel.runtime.collective import traceable
from mkernel.runtime.config import Config

Numbers = Sequence[int] | None  # an encoded configuration
PARAMETERS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, str group, int? capacity, "
    "int? max_tokens"
)


@traceable(ffn.repeat)
def moe_ffn(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    group: Any = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """A mixture-of-experts layer in one kernel: dispatch tokens to their experts, apply SwiGLU there, combine.

    Forward only: tensors that require grad are refused.

    Args:
        x: [tokens, hidden], this rank's tokens. Their number may differ between ranks and may be 0. Any strides.
        topk_ids: [tokens, k], k from 1 to 16, int32 or int64: the experts of each token, numbered across ranks in rank
            order. Negative ids are dropped.
        topk_weights: [tokens, k], floating point: the weights of the experts.
        w_gate_up: [experts, hidden, 2*inter], gate, then up, of this rank's experts. Their number may differ between
            ranks and may be 0. A transposed view of [experts, 2*inter, hidden] is read without a copy.
        w_down: [experts, inter, hidden], likewise.
        group, capacity, max_tokens, config: as in moe_dispatch_matmul. capacity is in rows, one for each token and
            expert on this rank.
        out: [tokens, hidden], where to put the result; must not overlap an input.

    Returns:
        [tokens, hidden] in x's type. Products are accumulated in fp32. Activations, the experts' results, and sums that
        leave a rank or a node are rounded to x's type. The same input gives the same bits. A token whose ids were all
        dropped gets zeros.

    Raises:
        ArgumentError: before anything is launched.
        CapacityError, RoutingError: as in moe_dispatch_matmul; the result is NaN.
        CommTimeout: a peer did not arrive within the group's timeout.
    """
    if not library.needs_dispatcher(x, topk_ids, topk_weights, w_gate_up, w_down, out):
        return ffn.moe_ffn(
            x, topk_ids, topk_weights, w_gate_up, w_down, group=group, capacity=capacity, max_tokens=max_tokens,
            out=out, config=config,
        )  # fmt: skip
    library.refuse_gradients(
        "moe_ffn", x=x, topk_weights=topk_weights, w_gate_up=w_gate_up, w_down=w_down, out=out
    )  # fmt: skip
    name, numbers = library.name_of(group), library.encoded(config)
    arguments = (x, topk_ids, topk_weights, w_gate_up, w_down, name, capacity, max_tokens, numbers)
    if out is None:
        return torch.ops.mkernel.moe_ffn(*arguments)
    torch.ops.mkernel.moe_ffn_out(*arguments, out)
    return out


def _run(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, group: str, capacity: int | None, max_tokens: int | None, config: Numbers = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return ffn.moe_ffn(
        x, topk_ids, topk_weights, w_gate_up, w_down, group=group, capacity=capacity, max_tokens=max_tokens, out=out,
        config=library.decoded(config),
    )  # fmt: skip


def _run_into(*arguments: Any) -> None:
    _run(*arguments)


library.define(
    "moe_ffn", f"({PARAMETERS}, int[]? config=None) -> Tensor", _run, lambda x, *_: x.new_empty(x.shape),
    backward=library.no_backward("moe_ffn"),
)  # fmt: skip
library.define(
    "moe_ffn_out", f"({PARAMETERS}, int[]? config, Tensor(a!) out) -> ()", _run_into, lambda *_: None
)  # fmt: skip
