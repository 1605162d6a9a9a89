"""Processes on GPUs: what can be said without one."""

from mkernel.runtime.cuda_processes import shares_of


def test_every_rank_knows_every_share():
    """Plans ask for the CTAs of all ranks of a group, not only of their own."""
    assert shares_of([("a", 132), ("b", 80), ("a", 132), ("a", 132)]) == {0: 44, 1: 80, 2: 44, 3: 44}
    assert shares_of([("a", 2)] * 4) == dict.fromkeys(range(4), 1), "more ranks than SMs"
