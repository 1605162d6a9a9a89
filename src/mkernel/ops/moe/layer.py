"""mk.moe_ffn, the mixture-of-experts layer, for PyTorch: gradients, graphs, autocast."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.moe import ffn, registration, training
from mkernel.ops.moe.arguments import check_activation, check_save
from mkernel.ops.moe.grouped import Biases
from mkernel.ops.moe.handle import numbers_in_graph
from mkernel.ops.moe.sizes import capacity_of, slots_of
from mkernel.runtime.collective import traceable
from mkernel.runtime.config import Config


@traceable(ffn.repeat)
def moe_ffn(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    group: Any = None,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    activation: str = "silu",
    save: str = "inputs",
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """A mixture-of-experts layer in one kernel: dispatch tokens to their experts, apply SwiGLU there, combine.

    Differentiable: x, topk_weights, matrices and biases have gradients. The backward pass takes the routing of the
    forward pass (ops/moe/backward.py). It is a collective call, too: every rank must make it.

    Args:
        x: [tokens, hidden], this rank's tokens. Their number may differ between ranks and may be 0. Any strides.
        topk_ids: [tokens, k], k from 1 to 16, int32 or int64: the experts of each token, numbered across ranks in rank
            order. Negative ids are dropped.
        topk_weights: [tokens, k], floating point: the weights of the experts.
        w_gate_up: [experts, hidden, 2*inter], gate, then up, of this rank's experts. Their number may differ between
            ranks and may be 0. A transposed view of [experts, 2*inter, hidden] is read without a copy.
        w_down: [experts, inter, hidden], likewise.
        b_gate_up: [experts, 2*inter], what is added to the products with w_gate_up, before the activation.
        b_down: [experts, hidden], what is added to the products with w_down, before they are weighted.
        group, capacity, capacity_factor, max_tokens, config: as in moe_dispatch_matmul. capacity is in rows, one for
            each token and expert on this rank.
        activation: of gate: "silu" (SwiGLU), "gelu" (GeGLU, with tanh), "relu" (ReGLU), "relu2" (the square of ReLU) or
            "none" (gate * up).
        save: what is kept for the backward pass, where there is one: "inputs", only what the caller passes and the
            tables of the routing; tokens are dispatched, and gate and up computed, once more. Or "activations": also
            the rows of the experts, and gate and up: capacity x (hidden + 2*inter) elements.
        out: [tokens, hidden], where to put the result; must not overlap an input. Not with tensors that require grad.

    Returns:
        [tokens, hidden] in x's type. Products are accumulated in fp32. Activations, the experts' results, and sums that
        leave a rank or a node are rounded to x's type. The same input gives the same bits. A token whose ids were all
        dropped gets zeros.

    Raises:
        ArgumentError: before anything is launched.
        CapacityError, RoutingError: as in moe_dispatch_matmul; the result is NaN.
        CommTimeout: a peer did not arrive within the group's timeout.
    """
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), library.size_of(group))
    check_save(save)
    check_activation(activation)
    x, w_gate_up, w_down, b_gate_up, b_down = library.autocast(x, w_gate_up, w_down, b_gate_up, b_down)
    tensors = dict(
        x=x, topk_weights=topk_weights, w_gate_up=w_gate_up, w_down=w_down, b_gate_up=b_gate_up, b_down=b_down
    )
    library.refuse_transforms(**tensors)
    if not library.needs_dispatcher(*tensors.values(), topk_ids, out):
        return ffn.moe_ffn(
            x, topk_ids, topk_weights, w_gate_up, w_down, group=group, b_gate_up=b_gate_up, b_down=b_down,
            capacity=capacity, max_tokens=max_tokens, activation=activation, out=out, config=config,
        )  # fmt: skip
    library.refuse_out_with_gradients(out, *tensors.values())
    name, numbers = library.name_of(group), library.encoded(config)
    matrices = (x, topk_ids, topk_weights, w_gate_up, w_down)
    given = (*matrices, b_gate_up, b_down)
    if out is not None:
        torch.ops.mkernel.moe_ffn_out(*given, name, capacity, max_tokens, activation, numbers, out)
        return out
    if not library.needs_gradients(*tensors.values()):
        return torch.ops.mkernel.moe_ffn(*given, name, capacity, max_tokens, activation, numbers)
    if isinstance(group, str):
        sizes = numbers_in_graph("moe_ffn", group, x, topk_ids, w_down.shape[0], capacity, max_tokens, config)
    else:
        sizes = training.ffn_numbers(group, *matrices, Biases(b_gate_up, b_down), capacity, max_tokens, config)
    return registration.kept_result(given, name, sizes, activation, save, numbers)
