"""When a rank is lost, nobody is deceived: a call on any other rank raises, or its result is right.

A rank that gives up a wait runs to the end of its launch, and may hand on what it never got. Whoever takes that
must hear of it, also if all its own waits were answered.
"""

import pytest
from support.operator_calls import run

import mkernel as mk
from mkernel import operators


def outcome(group, case, exact, bound):
    """The error that a call raised, or 'right'."""
    try:
        result = case.result(case.call())
        group.synchronize()
    except mk.CommTimeout as failure:
        return f"raised: {failure}"
    error = (result.double() - exact).abs()
    assert bool((error <= bound).all()), f"rank {group.rank} was given a wrong result, and no error"
    return "right"


@pytest.mark.parametrize("name", operators.registered("bench"))
@pytest.mark.parametrize(
    ("cluster", "dead", "slow"),
    [((2, 2), 0, 3), pytest.param((2, 2), 1, 2, marks=pytest.mark.thorough), ((1, 3), 0, 2)],
)
def test_nobody_is_deceived(name, cluster, dead, slow):
    """`slow` is late: when it polls, ranks that have given up have already passed on what it waits for."""

    def work(group):
        case = operators.find(name).load("demo").on_rank(group, 0)
        exact, bound = case.exact()
        assert outcome(group, case, exact, bound) == "right"
        return "dead" if group.rank == dead else outcome(group, case, exact, bound)

    outcomes = run(work, cluster=cluster, slow={slow: 1e-4})
    assert any("raised" in outcome for outcome in outcomes)
