"""ring_attention in the demo."""

from __future__ import annotations

import torch

from mkernel.demo.case import EPS, Case, Demo, everyones, random
from mkernel.operators import Shape
from mkernel.ops.attention import ring_attention
from mkernel.runtime.group import Group


def case(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    batch, heads, positions, dim = shape
    length = positions // group.size
    causal = not large  # without a mask, all ranks have the same work, so times are easier to compare
    query, key, value = (random(group, seed, batch, heads, length, dim, what=what) for what in range(3))
    all_keys, all_values = (torch.zeros_like(key).repeat(1, 1, group.size, 1) for _ in range(2))

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat(everyones(group, "key", key), dim=2).double()
        values = torch.cat(everyones(group, "value", value), dim=2).double()
        scores = query.double() @ keys.transpose(-1, -2) * dim**-0.5
        if causal:
            own_positions = torch.arange(length, device=group.device) + group.rank * length
            later = torch.arange(keys.shape[2], device=group.device) > own_positions[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        weights = scores.softmax(-1)
        # weights and result are rounded once each; everything else is fp32
        return weights @ values, EPS * (weights @ values.abs()) + 2.0**-18

    return Case(
        inputs=f"query, key and value, {batch} x {heads} x {length} x {dim}, its part of a sequence"
        + ("; a causal mask" if causal else ""),
        call=lambda: ring_attention(query, key, value, is_causal=causal),
        exact=exact,
        library=lambda: torch.nn.functional.scaled_dot_product_attention(query, all_keys, all_values),
    )


DEMO = Demo(case, simulated=lambda ranks: (1, 2, 32 * ranks, 64), large=lambda ranks: (1, 16, 1024 * ranks, 128))
