"""The ring_attention workload of `mkernel trace`, `tune` and `compile`."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.operators import Shape
from mkernel.ops.attention import TUNABLE, explain, prepare, ring_attention
from mkernel.ops.attention.sequences import Pattern, Scoring
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.workloads import Call, Cost, Tried, Workload, blocks, pieces, randn


def make(
    group: Group, shape: Shape, dtype: torch.dtype, *, causal: bool = True, zigzag: bool = False,
    kv_heads: int | None = None,
) -> Call:  # fmt: skip
    batch, heads, sequence, dim = shape
    length, layout = sequence // group.size, "zigzag" if zigzag else "contiguous"
    q = randn(group, batch, heads, length, dim, dtype=dtype, seed=0)
    k, v = (randn(group, batch, kv_heads or heads, length, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    out = torch.empty_like(q)
    given: Any = dict(is_causal=causal, layout=layout, enable_gqa=True, group=group, out=out)

    def run(config: Config | None) -> torch.Tensor:
        result = ring_attention(q, k, v, **given, config=config)
        assert isinstance(result, torch.Tensor)
        return result

    tried = Tried(
        prepare=lambda config: prepare(group, q, k, v, out, None, Pattern(causal, layout), Scoring(), config),
        explain=lambda config: explain(q, k, v, **given, config=config),
        sizes=dict(batch=batch, heads=heads, kv_heads=k.shape[1], length=length, dim=dim, causal=causal, zigzag=zigzag),
    )
    return Call(run, tried)


def cost(shape: Shape, ranks: int) -> Cost:
    batch, heads, positions, dim = shape
    length = positions // ranks
    tiles = ranks * batch * heads * blocks(length)
    seen = (ranks * blocks(length) + 1) / 2  # key blocks that a tile attends to on average: the causal half of all
    held = batch * heads * length * dim
    return Cost(
        tiles,
        round(2 * tiles * seen),
        ranks * (ranks - 1) * 2 * batch * heads * pieces(length, dim),
        ranks * (4 + 2 * ranks) * held,
    )


WORKLOAD = Workload("ring_attention", (1, 2, 128, 64), (1, 1, 4, 1), make, cost, TUNABLE)
