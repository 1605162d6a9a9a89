"""Topology: every group is nodes x GPUs, however its ranks lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkernel.runtime.topology import Topology


@pytest.mark.parametrize(
    ("node_ids", "nodes", "gpus"),
    [
        ([0], 1, 1),
        ([7], 1, 1),
        ([0, 0, 0, 0], 1, 4),
        ([0, 0, 1, 1], 2, 2),
        ([5, 5, 2, 2, 9, 9], 3, 2),
        ([0, 1, 2], 3, 1),
        # nodes of different sizes are cut into equal parts
        ([0, 0, 1], 3, 1),
        ([0, 0, 0, 0, 1, 1], 3, 2),
        ([0] * 6 + [1] * 4, 5, 2),
        ([0] * 6 + [1] * 3, 3, 3),
        ([0] * 8 + [1] * 7, 15, 1),
        # ranks of a node that are not neighbours count as different nodes
        ([0, 1, 0, 1], 4, 1),
        ([0, 0, 1, 1, 0, 0], 3, 2),
        ([0, 0, 0, 1, 0, 0, 0], 7, 1),
    ],
)
def test_of(node_ids, nodes, gpus):
    topology = Topology.of(node_ids)
    assert (topology.nodes, topology.gpus_per_node, topology.size) == (nodes, gpus, len(node_ids))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24))
def test_ranks_of_a_node_really_share_one(node_ids):
    topology = Topology.of(node_ids)
    assert topology.nodes * topology.gpus_per_node == topology.size == len(node_ids)
    for rank, physical in enumerate(node_ids):
        node = topology.node_of(rank)
        assert 0 <= node < topology.nodes
        assert rank == node * topology.gpus_per_node + topology.local_rank_of(rank)
        assert physical == node_ids[node * topology.gpus_per_node]


@given(st.integers(1, 6), st.integers(1, 8))
def test_regular_groups_stay_as_they_are(nodes, gpus):
    assert Topology.of([node for node in range(nodes) for _ in range(gpus)]) == Topology(nodes, gpus)
