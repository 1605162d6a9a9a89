"""Operators with scales on several processes on CPUs, and as PyTorch sees them."""

import pytest
from support.forked_processes import run_ranks

CALLS = """
    from support import every_operator
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    assert (group.size, group.nodes) == ({ranks}, {nodes})
    for name, call in every_operator.OPERATORS.items():
        if "scaled" in name:
            for _ in range(2):
                call(group)
    group.close()
    print("right on rank", group.rank)
"""

REGISTERED = """
    from support import scaled_checks
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT)
    scaled_checks.run(group)
    print("right on rank", group.rank)
    group.close()
"""


def assert_right(program, ranks):
    for rank, (output, code) in enumerate(run_ranks(program, ranks, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


@pytest.mark.thorough
@pytest.mark.parametrize(("nodes", "gpus_per_node"), [(1, 2), (2, 2)])
def test_calls(nodes, gpus_per_node):
    ranks = nodes * gpus_per_node
    program = CALLS.format(ranks=ranks, nodes=nodes, gpus_per_node=gpus_per_node if nodes > 1 else None)
    assert_right(program, ranks)


@pytest.mark.thorough
def test_registered():
    assert_right(REGISTERED, 2)
