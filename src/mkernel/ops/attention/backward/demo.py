"""ring_attention_backward in the demo."""

from __future__ import annotations

import torch

from mkernel.demo.case import EPS, Case, Demo, everyones, random
from mkernel.operators import Shape
from mkernel.ops.attention.backward import ring_attention_backward
from mkernel.runtime.group import Group


def case(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    batch, heads, positions, dim = shape
    length = positions // group.size
    causal = not large  # without a mask, all ranks have the same work, so times are easier to compare
    query, key, value, dout = (random(group, seed, batch, heads, length, dim, what=what) for what in range(4))
    out, lse = _attended(group, query, key, value, causal)
    whole = [torch.zeros_like(key).repeat(1, 1, group.size, 1).requires_grad_() for _ in range(2)]
    own = query.clone().requires_grad_()

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        """dq, dk and dv, of which each rank has the sum over its queries or keys. Bounds: weights, gradients of scores
        and results are rounded, and so was `out`."""
        q, k, v, do = (
            torch.cat(everyones(group, name, tensor), dim=2).double()
            for name, tensor in (("query", query), ("key", key), ("value", value), ("dout", dout))
        )
        scores = q @ k.mT * dim**-0.5
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        weights = scores.softmax(-1)
        terms = do * (weights @ v)
        ds = weights * (do @ v.mT - terms.sum(-1, keepdim=True))
        error = 1.5 * EPS * ds.abs() + EPS * weights * terms.abs().sum(-1, keepdim=True)
        factor = dim**-0.5
        rows = slice(group.rank * length, (group.rank + 1) * length)
        gradients = torch.stack([factor * ds @ k, factor * ds.mT @ q, weights.mT @ do])[:, :, :, rows]
        bounds = [factor * error @ k.abs(), factor * error.mT @ q.abs(), 1.5 * EPS * weights.mT @ do.abs()]
        return gradients, torch.stack(bounds)[:, :, :, rows] + 2.0**-18

    def library() -> None:
        attended = torch.nn.functional.scaled_dot_product_attention(own, whole[0], whole[1])
        torch.autograd.grad(attended, [own, *whole], dout)

    return Case(
        inputs=f"query, key and value, {batch} x {heads} x {length} x {dim}, its part of a sequence, the result of "
        f"ring_attention and its gradient" + ("; a causal mask" if causal else ""),
        call=lambda: ring_attention_backward(dout, query, key, value, out, lse, is_causal=causal),
        result=torch.stack,
        exact=exact,
        library=library,
    )


def _attended(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of attention and its log-sum-exp, by PyTorch."""
    length, dim = query.shape[2:]
    keys = torch.cat(everyones(group, "all keys", key), dim=2).float()
    values = torch.cat(everyones(group, "all values", value), dim=2).float()
    scores = query.float() @ keys.mT * dim**-0.5
    if causal:
        own_positions = torch.arange(length, device=group.device) + group.rank * length
        later = torch.arange(keys.shape[2], device=group.device) > own_positions[:, None]
        scores = scores.masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ values).to(query.dtype), scores.logsumexp(-1)


DEMO = Demo(case, simulated=lambda ranks: (1, 1, 32 * ranks, 64), large=lambda ranks: (1, 16, 1024 * ranks, 128))
