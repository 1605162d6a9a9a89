"""Random programs on random groups of simulated ranks; see tests/support/random_programs.py."""

import random

import pytest
from support.operator_calls import run
from support.random_programs import CALLS, RESIDENT, Program, compare_bits, seeds

CLUSTERS = [(1, 2), (1, 3), (2, 1), (2, 2), (1, 4), (3, 1), (2, 3), (3, 2)]
STEPS = 12


def cluster_of(seed):
    """(cluster, options of the simulator) of a seed."""
    rng = random.Random(-seed - 1)
    cluster = rng.choice(CLUSTERS)
    somebody = rng.randrange(cluster[0] * cluster[1])
    options = rng.choice(
        [{}, {}, dict(slow={somebody: 0.05}), dict(late={somebody: 500}), dict(resident=1), dict(ctas=3),
         dict(multicast=True)]
    )  # fmt: skip
    return cluster, options


def run_program(seed, steps=STEPS):
    cluster, options = cluster_of(seed)
    calls = RESIDENT if "resident" in options else CALLS
    compare_bits(
        run(lambda group: Program(group, seed, steps, calls=calls).run(), cluster=cluster, seed=seed, **options)
    )


@pytest.mark.parametrize(
    "seed", seeds([0, 1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 7))])
)
def test_random_programs(seed):
    run_program(seed)
