"""Every operator on clusters of four and eight nodes, in 20 schedules each: with ranks that are slow or late, CTAs that
run one after the other, a ring with little room, and a rank that never comes. The backward pass of the mixture of
experts in a few schedules: its launches are those of these operators."""

from dataclasses import replace

import pytest
import torch
from support import operator_calls
from support.attention_reference import Case
from support.moe_gradients import Trains
from support.moe_reference import Layer
from support.moe_scaled_reference import ScaledFfn, ScaledLayer
from support.scaled_reference import BLOCKS, Quantized, ScaledGather, ScaledSum
from support.scenarios import (
    REDUCE,
    SCATTER,
    Attends,
    AttendsBackward,
    Gathers,
    Routes,
    ScaledFfns,
    ScaledGathers,
    ScaledRoutes,
    ScaledSums,
    Sums,
    WeightGrads,
)

import mkernel as mk
from mkernel import operators

pytestmark = pytest.mark.thorough

GRADIENTS = "moe_ffn, backward"
# Whose CTAs wait for those with a higher program id: all of a launch must run at once, which the launch sees to.
AT_ONCE = {
    "all_gather_matmul_weight_grad", "ring_attention", "ring_attention_backward", "moe_dispatch_matmul", "moe_dispatch",
    "moe_combine", "moe_ffn", "moe_dispatch_scaled_matmul", "scaled_moe_ffn", GRADIENTS,
}  # fmt: skip

CLUSTERS = [(4, 2), (4, 4), (8, 1)]
SEEDS = 20
SEEDS_OF_GRADIENTS = {(4, 2): 5, (4, 4): 2, (8, 1): 5}  # with fewer ranks, as many as there are kinds of schedules


def layer(cluster, kind=Layer, **given):
    ranks = range(cluster[0] * cluster[1])
    tokens, experts = tuple((3 * rank + 2) % 4 for rank in ranks), tuple((rank + 1) % 3 for rank in ranks)
    return kind(tokens, experts, **{"hidden": 16, "out": 16, "dtype": torch.float32} | given)


def scaled_sum(rows, n):
    return ScaledSum(rows, n, 40, torch.bfloat16, how=Quantized(BLOCKS))


def attends(kind, cluster):
    return kind(cluster, Case(8, heads=1, kv_heads=1, dim=64, dtype=torch.float32, causal=True, layout="zigzag"))


SCENARIOS = {
    "all_gather_matmul": Gathers,
    "all_gather_matmul_weight_grad": lambda cluster: WeightGrads(cluster, m=16, passes=2),
    "matmul_reduce_scatter": lambda cluster: Sums(cluster, SCATTER, rows=20 * cluster[0] * cluster[1]),
    "matmul_all_reduce": lambda cluster: Sums(cluster, REDUCE, rows=40, n=20),
    "ring_attention": lambda cluster: attends(Attends, cluster),
    "ring_attention_backward": lambda cluster: attends(AttendsBackward, cluster),
    "moe_dispatch_matmul": lambda cluster: Routes(cluster, "moe_dispatch_matmul", layer(cluster)),
    "moe_dispatch": lambda cluster: Routes(cluster, "moe_dispatch", layer(cluster)),
    "moe_combine": lambda cluster: Routes(cluster, "moe_combine", layer(cluster)),
    "moe_ffn": lambda cluster: Routes(cluster, "moe_ffn", layer(cluster)),
    "all_gather_scaled_matmul": lambda cluster: ScaledGathers(cluster, ScaledGather(6, 5, 144, how=Quantized(BLOCKS))),
    "scaled_matmul_reduce_scatter": lambda cluster: ScaledSums(
        cluster, SCATTER, scaled_sum(20 * cluster[0] * cluster[1], 5)
    ),
    "scaled_matmul_all_reduce": lambda cluster: ScaledSums(cluster, REDUCE, scaled_sum(40, 20)),
    "moe_dispatch_scaled_matmul": lambda cluster: ScaledRoutes(cluster, layer(cluster, ScaledLayer, hidden=144)),
    "scaled_moe_ffn": lambda cluster: ScaledFfns(cluster, layer(cluster, ScaledFfn, hidden=32, out=128)),
}


def test_every_operator_has_a_scenario():
    assert {*SCENARIOS} == {*operators.registered()}


def run_seeds(scenario, op, seeds, monkeypatch):
    """The first schedules, of which five in a row are of different kinds."""
    size = scenario.cluster[0] * scenario.cluster[1]
    for seed in range(seeds):
        one_by_one = {} if op in AT_ONCE else {"resident": 1}
        options = ({"slow": {seed % size: 0.1}}, {"late": {seed % size: 300}}, one_by_one, {"ring": 2}, {})[seed % 5]
        # to look for races doubles the time; what a rank may see of another's memory is weak without it, too
        monkeypatch.setitem(operator_calls.SIMULATOR, "races", seed % 4 == 3)
        for name in ("slow", "late"):
            monkeypatch.setitem(operator_calls.SIMULATOR, name, options.pop(name, {}))
        # the second call meets ranks that are not done with the first, the third uses a half of the workspace again
        calls = 3 if seed == SEEDS - 1 else 2 if seed % 6 == 5 else 1
        replace(scenario, calls=calls, ctas=min(scenario.ctas, 3), **options).run(seed)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=operator_calls.cluster_name)
@pytest.mark.parametrize("op", SCENARIOS)
def test_many_seeds(op, cluster, monkeypatch):
    run_seeds(SCENARIOS[op](cluster), op, SEEDS, monkeypatch)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=operator_calls.cluster_name)
def test_a_few_seeds_of_gradients(cluster, monkeypatch):
    run_seeds(Trains(cluster, layer=layer(cluster)), GRADIENTS, SEEDS_OF_GRADIENTS[cluster], monkeypatch)


@pytest.mark.parametrize("cluster", [(4, 2), (8, 1)], ids=operator_calls.cluster_name)
@pytest.mark.parametrize("op", SCENARIOS)
def test_a_dead_peer(op, cluster, monkeypatch):
    """All others find out, and name it; nobody goes on with what is missing."""
    scenario = SCENARIOS[op](cluster)
    dead = cluster[0] * cluster[1] // 2
    found = []

    def work(group):
        scenario.work(group)
        if group.rank == dead:
            return
        with pytest.raises(mk.CommTimeout) as caught:
            scenario.work(group)
        found.append(caught.value)

    operator_calls.run(work, cluster=cluster, seed=1, timeout=1e-4)
    assert len(found) == cluster[0] * cluster[1] - 1
    assert any(record.peer == dead for failure in found for record in failure.records)


def test_experts_on_32_ranks():
    SCENARIOS["moe_ffn"]((4, 8)).run(seed=0)
