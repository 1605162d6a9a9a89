"""mk.moe_dispatch_matmul or mk.moe_dispatch, and mk.moe_combine, the two halves of a layer, for PyTorch: gradients,
graphs, autocast."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.moe import combine, dispatch_matmul, dispatch_rows, training
from mkernel.ops.moe.arguments import check_save
from mkernel.ops.moe.combine import check_handle
from mkernel.ops.moe.handle import Handle, handle_in, numbers_in_graph, traced_handle
from mkernel.ops.moe.sizes import capacity_of, slots_of
from mkernel.runtime.collective import traceable
from mkernel.runtime.config import Config


@traceable()
def moe_dispatch_matmul(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    save: str = "inputs",
    config: Config | None = None,
) -> tuple[torch.Tensor, Handle]:
    """Send every token to the ranks of its experts and multiply it there, overlapped, in one kernel.

    Differentiable: x, w and bias have gradients (ops/moe/backward.py). The gradient of rows beyond the sum of the
    counts is not used. The backward pass is a collective call, too.

    Args:
        x: [tokens, hidden], this rank's tokens. Their number may differ between ranks and may be 0. Any strides.
        topk_ids: [tokens, k], k from 1 to 16, int32 or int64: the experts of each token, numbered across ranks in rank
            order. Negative ids are dropped. A token that names an expert twice makes two rows.
        w: [experts, hidden, out], the matrices of this rank's experts. Their number may differ between ranks and may be
            0. A transposed view of [experts, out, hidden] is read without a copy.
        group: the group; the current one by default.
        bias: [experts, out], what is added to the products of each expert.
        capacity: how many rows this rank can receive; may differ between ranks. None is enough for any routing: the
            tokens of all ranks times k, or 0 without experts. If the ids of a token are distinct, as torch.topk returns
            them, the tokens of all ranks times min(k, experts) are enough.
        capacity_factor: a capacity that grows with the expected load instead: capacity_factor * max_tokens * k rows,
            but no more than any routing needs. 1.0 is enough if the routing is balanced and ranks have equally many
            experts. Needs max_tokens.
        max_tokens: the largest number of tokens of any rank, the same on every rank; it determines the size of
            workspaces. If None, the ranks exchange it on the host at every call, which costs time and keeps the call
            from returning before the other ranks have made it.
        save: what is kept for the backward pass, where there is one: "inputs", only what the caller passes and the
            handle; tokens are dispatched once more. Or "activations": also the rows of the experts, capacity x hidden
            elements.
        config: tiles, chunks and CTAs; None selects good defaults.

    Returns:
        (y, handle): y [capacity, out] holds the rows of this rank's experts, grouped by expert, within an expert by
        source rank, then token. `handle.counts` is the number of rows of each expert; `handle.source` and
        `handle.token` say where each row came from. Rows of y beyond the sum of counts are not written. bf16, fp16 or
        fp32, accumulated in fp32.

    Raises:
        ArgumentError: before anything is launched.
        CapacityError: some rank has more rows than its capacity. All ranks raise it, nothing is computed (y is NaN),
            and the group remains usable. RoutingError: an id is beyond the last expert; likewise. On a GPU, where
            calls return before they are done, the next call on the group or `group.synchronize()` raises them.
        CommTimeout: a peer did not arrive within the group's timeout.
    """
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), library.size_of(group))
    check_save(save)
    x, w, bias = library.autocast(x, w, bias)
    library.refuse_transforms(x=x, w=w, bias=bias)
    if not library.needs_dispatcher(x, topk_ids, w, bias):
        return dispatch_matmul.moe_dispatch_matmul(
            x, topk_ids, w, group=group, bias=bias, capacity=capacity, max_tokens=max_tokens, config=config
        )
    if isinstance(group, str):
        numbers = numbers_in_graph("moe_dispatch_matmul", group, x, topk_ids, w.shape[0], capacity, max_tokens, config)
    else:
        numbers = training.dispatch_numbers(group, x, topk_ids, w, bias, capacity, max_tokens, config)
    # what is kept does not depend on whether w is frozen, which other ranks cannot know
    y, tables, _ = torch.ops.mkernel.moe_dispatch_matmul(
        x, topk_ids, w, bias, library.name_of(group), list(numbers), save == "activations", library.encoded(config)
    )
    if isinstance(group, str):
        return y, traced_handle(group, tables, x.shape[0], numbers)
    return y, handle_in(group, tables, x.shape[0], numbers)


@traceable()
def moe_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    *,
    group: Any = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, Handle]:
    """Send every token to the ranks of its experts, in one kernel, and do nothing else there: for experts of your own.
    `mk.moe_combine` takes their results back.

    Differentiable: x has a gradient, which is a `mk.moe_combine` of that of the rows. The gradient of rows beyond the
    sum of the counts is not used. The backward pass is a collective call, too.

    Args:
        x, topk_ids: as in moe_dispatch_matmul.
        experts: how many experts this rank has; may differ between ranks and may be 0.
        group, capacity, capacity_factor, max_tokens, config: as in moe_dispatch_matmul.

    Returns:
        (rows, handle): rows [capacity, hidden], the tokens of this rank's experts, in the order of the rows of
        moe_dispatch_matmul, whose handle this is, too. Rows beyond the sum of `handle.counts` are not written. The ends
        of the experts' rows are `handle.counts.cumsum(0)`, which is what torch._grouped_mm takes as offs.

    Raises:
        ArgumentError: before anything is launched.
        CapacityError, RoutingError: as in moe_dispatch_matmul, which their messages name: both share a workspace. The
            rows are NaN.
        CommTimeout: a peer did not arrive within the group's timeout; likewise.
    """
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), library.size_of(group))
    library.refuse_transforms(x=x)
    if not library.needs_dispatcher(x, topk_ids):
        return dispatch_rows.moe_dispatch(
            x, topk_ids, experts, group=group, capacity=capacity, max_tokens=max_tokens, config=config
        )
    if isinstance(group, str):
        numbers = numbers_in_graph("moe_dispatch", group, x, topk_ids, experts, capacity, max_tokens, config)
    else:
        numbers = training.rows_numbers(group, x, topk_ids, experts, capacity, max_tokens, config)
    rows, tables = torch.ops.mkernel.moe_dispatch(
        x, topk_ids, library.name_of(group), list(numbers), library.encoded(config)
    )
    if isinstance(group, str):
        return rows, traced_handle(group, tables, x.shape[0], numbers)
    return rows, handle_in(group, tables, x.shape[0], numbers)


@traceable()
def moe_combine(
    y: torch.Tensor,
    handle: Handle,
    topk_weights: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Return the experts' rows to the ranks of their tokens, as the weighted sum of each token's rows.

    Differentiable: y and topk_weights have gradients (ops/moe/backward.py). The gradient of rows of y beyond the sum of
    the counts is zero. The backward pass is a collective call, too.

    Args:
        y: [capacity, columns], what this rank's experts computed from the rows of a dispatch, in the same order. Any
            width, the same on every rank.
        handle: what that dispatch returned.
        topk_weights: [tokens, k], floating point: the weights of this rank's tokens for each of their experts. Weights
            of dropped ids are ignored.
        group: the group of the dispatch; the current one by default.
        out: [tokens, columns], where to put the result; must not overlap an input. Not with tensors that
            require grad.
        config: `ctas`, `warps` and `copy_bytes`; None selects good defaults.

    Returns:
        [tokens, columns] in y's type, summed in fp32 in a fixed order. Sums that leave a rank or a node are rounded to
        y's type on the way. A token whose ids were all dropped gets zeros.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not arrive within the group's timeout.
    """
    library.refuse_transforms(y=y, topk_weights=topk_weights)
    if not library.needs_dispatcher(y, topk_weights, out):
        return combine.moe_combine(y, handle, topk_weights, group=group, out=out, config=config)
    check_handle(handle, group, topk_weights)
    library.refuse_out_with_gradients(out, y, topk_weights)
    given = (y, handle.memory, topk_weights, library.name_of(group), list(handle.numbers), library.encoded(config))
    if out is None:
        return torch.ops.mkernel.moe_combine(*given)
    torch.ops.mkernel.moe_combine_out(*given, out)
    return out
