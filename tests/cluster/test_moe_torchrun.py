"""A mixture-of-experts layer on several processes on CPUs: two nodes that talk over TCP."""

import pytest
from support.forked_processes import run_ranks

PROGRAM = """
    import sys

    import torch
    from support.moe_gradients import ffn_gradients, halves_gradients
    from support.moe_reference import Layer, combine, ffn
    from support.patience import WAIT

    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node=2)
    assert (group.size, group.nodes) == (4, 2)
    layer = Layer((6, 3, 9, 0), (2, 1, 0, 2), k=3)
    combine(group, layer)
    for turn in range(2):
        ffn(group, layer, turn, max_tokens=10)
    try:
        ffn(group, layer, capacity=1, max_tokens=10)
        sys.exit("nobody noticed")
    except mk.CapacityError as refusal:
        assert "whose capacity is 1" in str(refusal), refusal
    ffn(group, layer, 3, max_tokens=10)
    ffn_gradients(group, layer, save="activations")
    halves_gradients(group, layer, 1, max_tokens=10)
    group.close()
    print("right on rank", group.rank)
"""


@pytest.mark.thorough
def test_two_nodes_over_tcp():
    for rank, (output, code) in enumerate(run_ranks(PROGRAM, 4, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output
