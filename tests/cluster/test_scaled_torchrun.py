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

RECIPES = """
    from support.patience import WAIT
    from support.scaled_reference import RECIPES, Quantized, ScaledGather, ScaledSum, call_gather, call_sum
    import torch
    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    for recipe in RECIPES:
        for rows, n, k in ((1, 1, 1), (5, 131, 261), (17, 40, 128)):
            how = Quantized(recipe, (torch.float8_e5m2, torch.float8_e4m3fn))
            gather = ScaledGather(rows, tuple(n if rank != 1 else 0 for rank in range(group.size)), k, how=how)
            for turn in range(2):
                call_gather(group, gather, turn, return_gathered=turn == 1)
            call_sum(group, "matmul_reduce_scatter", ScaledSum(rows * group.size, n, k, torch.bfloat16, how=how))
            call_sum(group, "matmul_all_reduce", ScaledSum(rows, n, k, torch.float32, how=how))
        if recipe[0] == recipe[1] == "RowWise" or "Block" in recipe[0]:
            x = torch.randn(9, 261)
            w, scale_w = mk.quantize(torch.randn(20, 261), recipe[1])
            a, scale_a = mk.quantize(x, recipe[0])
            y = mk.all_gather_scaled_matmul(a, w.t(), scale_a, scale_w.t())
            for _ in range(2):
                quantizing = mk.all_gather_scaled_matmul(x, w.t(), None, scale_w.t(), recipe_a=recipe[0])
                assert torch.equal(quantizing, y)
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
@pytest.mark.parametrize(("ranks", "gpus_per_node"), [(1, None), (3, None), (4, 2)])
def test_recipes(ranks, gpus_per_node):
    """All of them, with odd shapes, and rows that the kernel quantizes."""
    assert_right(RECIPES.format(gpus_per_node=gpus_per_node), ranks)


@pytest.mark.thorough
def test_registered():
    assert_right(REGISTERED, 2)
