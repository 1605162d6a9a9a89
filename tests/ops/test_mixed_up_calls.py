"""Ranks that mix up two calls that all of them know: every operator, in the simulator and in processes."""

import pytest
from support.forked_processes import run_ranks
from support.mixed_up_calls import CALLS, mix_up

import mkernel as mk
from mkernel import operators

NAMES = list(CALLS)
OTHERS = dict(zip(NAMES, NAMES[1:] + NAMES[:1]))


def test_every_operator_is_here():
    assert set(operators.registered()) <= set(CALLS)


@pytest.mark.parametrize(
    "cluster", [(1, 2), *(pytest.param(each, marks=pytest.mark.thorough) for each in ((1, 3), (2, 2)))]
)
@pytest.mark.parametrize("name", NAMES)
def test_in_the_simulator(name, cluster):
    nodes, gpus = cluster
    mk.spawn(mix_up, name, OTHERS[name], nodes=nodes, gpus_per_node=gpus, device="cpu")


PROCESSES = """
    import torch
    import mkernel as mk
    from support.mixed_up_calls import mix_up
    from support.patience import WAIT

    group = mk.init(timeout=WAIT)
    for name, other in {pairs}:
        mix_up(group, name, other)
    print("right on rank", group.rank, flush=True)
    torch.distributed.barrier()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("first", [0, 1])
def test_in_processes(first):
    pairs = list(OTHERS.items())[first::2]
    for output, code in run_ranks(PROCESSES.format(pairs=pairs), 2):
        assert code == 0, output
        assert "right on rank" in output
