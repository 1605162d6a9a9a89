"""Every operator in many schedules: no false alarm of the race detector, no wrong result. A few in every run of the
suite; MKERNEL_TEST_SEEDS=1000 for a night."""

import os

import pytest
import torch
from support import attention_reference
from support.moe_reference import Layer
from support.moe_scaled_reference import ScaledFfn, ScaledLayer
from support.scenarios import (
    MULTICAST,
    REDUCE,
    SCATTER,
    SLICED,
    Attends,
    AttendsBackward,
    Gathers,
    Routes,
    ScaledFfns,
    ScaledRoutes,
    Sums,
    WeightGrads,
)

SEEDS = int(os.environ.get("MKERNEL_TEST_SEEDS", "3"))
CLUSTERS = [(1, 2), (2, 1), (2, 2)]


def layer(ranks):
    return Layer((7, 0, 3, 5)[:ranks], (2, 1, 0, 2)[:ranks], hidden=16, out=16, dtype=torch.float32)


def scaled_ffn(size):
    return ScaledFfn((5, 3, 0, 4)[:size], (2, 1, 1, 0)[:size], hidden=48, out=128)


def scaled_layer(size):
    return ScaledLayer((5, 3, 0, 4)[:size], (2, 1, 1, 0)[:size], hidden=144, out=16)


def attends(cluster):
    case = attention_reference.Case(8, heads=2, kv_heads=1, dim=64, dtype=torch.float32, causal=True, layout="zigzag")
    return [kind(cluster, case, calls=2) for kind in (Attends, AttendsBackward)]


SCENARIOS = {
    "all_gather_matmul": [Gathers(cluster, calls=3, heap=cluster == (1, 2)) for cluster in CLUSTERS],
    "all_gather_matmul_weight_grad": [WeightGrads(cluster, calls=2, heap=cluster == (1, 2)) for cluster in CLUSTERS],
    "matmul_reduce_scatter": [Sums(cluster, SCATTER, calls=3) for cluster in CLUSTERS],
    "matmul_all_reduce": [Sums(cluster, REDUCE, calls=3) for cluster in CLUSTERS]
    + [Sums((1, 2), way, calls=3) for way in (SLICED, MULTICAST)],
    "ring_attention": [attends(cluster)[0] for cluster in CLUSTERS],
    "ring_attention_backward": [attends(cluster)[1] for cluster in CLUSTERS],
    "moe_dispatch_matmul": [Routes(c, "moe_dispatch_matmul", layer(c[0] * c[1])) for c in CLUSTERS],
    "moe_dispatch_scaled_matmul": [ScaledRoutes(c, calls=2, layer=scaled_layer(c[0] * c[1])) for c in CLUSTERS],
    "scaled_moe_ffn": [ScaledFfns(c, calls=2, layer=scaled_ffn(c[0] * c[1])) for c in CLUSTERS],
    "moe_dispatch": [Routes(c, "moe_dispatch", layer(c[0] * c[1])) for c in CLUSTERS],
    "moe_combine": [Routes(c, "moe_combine", layer(c[0] * c[1])) for c in CLUSTERS],
    "moe_ffn": [Routes(c, "moe_ffn", layer(c[0] * c[1])) for c in CLUSTERS],
}


@pytest.mark.parametrize("op", SCENARIOS)
@pytest.mark.thorough
def test_all_pass(op):
    scenarios = SCENARIOS[op]
    for seed in range(SEEDS):
        scenarios[seed % len(scenarios)].run(seed)
