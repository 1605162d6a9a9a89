"""The ring_attention_backward workload of `mkernel trace`, `tune` and `compile`."""

from __future__ import annotations

from typing import Any

import torch

from mkernel.operators import Shape
from mkernel.ops.attention.backward import TUNABLE, explained, prepare, ring_attention_backward
from mkernel.ops.attention.backward.launch import Tensors
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
    q, dout = (randn(group, batch, heads, length, dim, dtype=dtype, seed=seed) for seed in (0, 3))
    k, v = (randn(group, batch, kv_heads or heads, length, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    given: Any = dict(is_causal=causal, layout=layout, enable_gqa=True, group=group)
    # as random as the others: how long a call takes does not depend on their values
    out = randn(group, batch, heads, length, dim, dtype=dtype, seed=4)
    lse = randn(group, batch, heads, length, dtype=torch.float32, seed=5)

    pattern, scoring = Pattern(causal, layout), Scoring()
    tensors = Tensors(dout, q, k, v, out, lse, None, *(torch.empty_like(tensor) for tensor in (q, k, v)))

    def run(config: Config | None) -> torch.Tensor:
        found = ring_attention_backward(dout, q, k, v, out, lse, **given, config=config)
        return torch.cat([gradient.ravel() for gradient in found])

    tried = Tried(
        prepare=lambda config: prepare(group, tensors, pattern, scoring, config),
        explain=lambda config: explained(group, tensors, pattern, scoring, config),
        sizes=dict(batch=batch, heads=heads, kv_heads=k.shape[1], length=length, dim=dim, causal=causal, zigzag=zigzag),
    )
    return Call(run, tried)


def cost(shape: Shape, ranks: int) -> Cost:
    batch, heads, positions, dim = shape
    length = positions // ranks
    tiles = ranks * batch * heads * blocks(length)  # of queries, and of keys
    seen = (ranks * blocks(length) + 1) / 2  # key blocks that a tile of queries sees on average: the causal half of all
    held = batch * heads * length * dim
    return Cost(
        tiles * (2 + ranks),  # of dq, blocks of keys of all ranks, and reductions
        round(7 * tiles * seen),
        ranks * (ranks - 1) * 6 * batch * heads * pieces(length, dim),
        ranks * (9 + 6 * ranks) * held,
    )


WORKLOAD = Workload(TUNABLE.op, (1, 2, 128, 64), (1, 1, 4, 1), make, cost, TUNABLE)
