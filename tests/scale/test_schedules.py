"""The model takes tiles and chunks in the order in which the kernels do: seen in traces of the simulator."""

from collections import defaultdict

import pytest
import torch
from support.workloads import workload_of

import mkernel as mk
from mkernel.ops.all_gather_matmul.model import tiles_of_others
from mkernel.ops.reduce.model import tiles_of_scatter
from mkernel.sim.scheduler import Options

CLUSTERS = [(1, 3), (2, 2), (4, 1), (4, 2)]


def traced(op, shape, cluster, config=None):
    """(plan, {CTA: [(source or owner, tile), ...]} of rank 1) of a call in the simulator."""

    def on_rank(group):
        made = workload_of(op).make(group, shape, torch.float32)
        plan = made.tried.explain(config)
        with mk.trace() as trace:
            made.run(config)
        if group.rank != 1:
            return None
        found = defaultdict(list)
        for event in sorted(trace.of(1, "tile"), key=lambda event: event.start):
            found[event.cta].append((event.peer, event.index))
        return plan, found

    nodes, gpus = cluster
    return mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus, device="cpu", sim=Options(ctas=5, races=False))[1]


@pytest.mark.parametrize(("nodes", "gpus"), CLUSTERS)
def test_all_gather_matmul(nodes, gpus):
    ranks, cluster = nodes * gpus, (nodes, gpus)
    plan, found = traced("all_gather_matmul", (64 * ranks, 96, 32), cluster)
    modelled = defaultdict(list)
    for counts, tile, source, _ in tiles_of_others(plan, 1, cluster, blocks=2, column_blocks=3):
        for step in range(len(tile)):
            for cta in range(plan.config.ctas):
                if step < counts[cta]:
                    modelled[cta].append((source[step, cta], tile[step, cta]))
    assert sum(map(len, modelled.values())) == 6 * (ranks - 1)
    for cta, tiles in found.items():
        assert [each for each in tiles if each[0] != 1] == modelled[cta]


@pytest.mark.parametrize(("nodes", "gpus"), CLUSTERS)
def test_matmul_reduce_scatter(nodes, gpus):
    ranks, cluster = nodes * gpus, (nodes, gpus)
    plan, found = traced("matmul_reduce_scatter", (64 * ranks, 96, 32 * ranks), cluster)
    modelled = defaultdict(list)
    for lanes, node, rank, tile in tiles_of_scatter(plan, cluster):
        for i, cta in enumerate(lanes):
            owner = (1 // gpus + node[i]) % nodes * gpus + (1 + rank[i]) % gpus
            modelled[cta].append((owner, tile[i]))
    assert sum(map(len, modelled.values())) == 6 * ranks
    assert found == modelled
