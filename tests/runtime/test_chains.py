"""Who waited for whom: from records to the culprit."""

import dataclasses
import random

import pytest
import torch

import mkernel as mk
from mkernel.runtime import chains
from mkernel.runtime.chains import NetworkFailure


def wait(rank, peer, signal="arrived", *, timed_out=True, seconds=1.0, op="all_gather_matmul", cta=3):
    return mk.WaitRecord(timed_out, op, rank, "compute", cta, signal, peer, 0, 1, 2, seconds)


def ends(found):
    return [chain.culprit for chain in found]


def test_no_records_no_chain():
    assert chains.find([]) == []


def test_a_chain_ends_at_the_rank_that_waited_for_nobody():
    (chain,) = chains.find([wait(1, 2), wait(0, 1), wait(2, 7)])
    assert chain.short == "rank 0 -> rank 1 -> rank 2 -> rank 7"
    assert [record.rank for record in chain.waits] == [0, 1, 2]
    assert chain.waiters == (0, 1, 2)
    assert "rank 7 waited for nobody: it never came to all_gather_matmul" in str(chain)
    assert not chain.cycle


def test_waits_within_a_rank_lead_nowhere_else():
    (chain,) = chains.find([wait(0, -1, "placed")])
    assert "rank 0 waited for itself" in str(chain)
    (chain,) = chains.find([wait(0, -1, "placed"), wait(0, 2)])
    assert chain.short == "rank 0 -> rank 2"


def test_who_only_heard_of_it_waited_for_nobody():
    """A launch that ended after the group had given up adds nothing to the chain."""
    assert chains.find([wait(1, -1, "nothing", timed_out=False)]) == []
    (chain,) = chains.find([wait(0, 2), wait(1, -1, "nothing", timed_out=False)])
    assert chain.waiters == (0,)


def test_everybody_waits_for_one():
    (chain,) = chains.find([wait(rank, 3) for rank in range(8) if rank != 3])
    assert chain.short == "rank 0 -> rank 3"
    assert chain.waiters == (0, 1, 2, 4, 5, 6, 7)
    assert "ranks 1, 2, 4, 5, 6 and 7 waited for rank 3 too" in str(chain)


def test_waits_that_were_given_up_lead_on_too():
    """Rank 1 left because rank 0's wait had run out; what it waited for counts all the same."""
    (chain,) = chains.find([wait(0, 1), wait(1, 2, timed_out=False)])
    assert chain.culprit == ("rank", 2)


def test_the_wait_that_says_most_is_shown():
    shown = wait(0, 1, seconds=5.0, cta=9)
    (chain,) = chains.find([wait(0, 1, seconds=9.0, timed_out=False), shown, wait(0, 1, seconds=2.0)])
    assert chain.waits == (shown,)


def test_two_culprits():
    found = chains.find([wait(0, 5), wait(1, 6), wait(2, 6), wait(3, 6)])
    assert ends(found) == [("rank", 6), ("rank", 5)]  # the one that most waited for first


@pytest.mark.parametrize("signal", ["ring space", "sent"])
def test_a_dead_proxy(signal):
    (chain,) = chains.find([wait(0, 4), wait(4, 0, signal)])
    assert chain.short == "rank 0 -> rank 4 -> the network proxy of rank 4"
    assert chain.culprit == ("proxy", 4)
    assert "did not go on" in chain.reason


def test_a_network_that_failed_is_the_culprit_whatever_else_waited():
    records = [wait(0, 1), wait(1, 2), wait(3, 9)]
    found = chains.find(records, [NetworkFailure(1, "connection to rank 2 was reset")])
    assert ends(found) == [("network", 1), ("rank", 2), ("rank", 9)]
    assert found[0].short == "rank 0 -> the network of rank 1"
    assert "the network of rank 1 failed: connection to rank 2 was reset" in str(found[0])


def test_a_failure_without_waits():
    (chain,) = chains.find([], [NetworkFailure(2, "no route")])
    assert chain.culprit == ("network", 2)
    assert chain.waiters == (2,)
    assert "no route" in str(chain)


def test_a_cycle_in_different_calls():
    records = [wait(0, 1, op="matmul_all_reduce"), wait(1, 0), wait(5, 0)]
    (chain,) = chains.find(records)
    assert chain.cycle
    assert chain.short == "rank 0 -> rank 1 -> rank 0"
    assert "rank 0 in matmul_all_reduce, rank 1 in all_gather_matmul" in chain.reason
    assert chain.waiters == (0, 1, 5)


def test_a_cycle_of_three_in_one_call():
    (chain,) = chains.find([wait(2, 0), wait(0, 1), wait(1, 2)])
    assert chain.short == "rank 0 -> rank 1 -> rank 2 -> rank 0"
    assert "the same calls in the same order" in chain.reason


def test_a_cycle_beside_a_way_out_is_no_culprit():
    """0 and 1 wait for each other, but 1 also waits for 2, which never came: that explains both."""
    (chain,) = chains.find([wait(0, 1), wait(1, 0), wait(1, 2)])
    assert chain.culprit == ("rank", 2)
    assert chain.waiters == (0, 1)


def test_two_cycles():
    found = chains.find([wait(0, 1), wait(1, 0), wait(2, 3), wait(3, 2)])
    assert [chain.short for chain in found] == ["rank 0 -> rank 1 -> rank 0", "rank 2 -> rank 3 -> rank 2"]


def test_waits_for_the_ranks_own_ctas_lead_nowhere_else():
    (chain,) = chains.find([wait(0, 0), wait(0, 2)])
    assert chain.short == "rank 0 -> rank 2"
    (chain,) = chains.find([wait(0, 0), wait(1, 0)])
    assert "waited for itself" in chain.reason
    assert chain.waiters == (0, 1)


def test_many_ranks_end():
    """Any graph: every rank that waited is explained, and every chain is one."""
    for seed in range(200):
        draw = random.Random(seed)
        ranks = draw.randint(1, 12)
        records = [
            wait(draw.randrange(ranks), draw.randrange(ranks), draw.choice(["arrived", "sent"]), seconds=draw.random())
            for _ in range(draw.randint(1, 30))
        ]
        failures = [NetworkFailure(draw.randrange(ranks), "broken")] if draw.random() < 0.3 else []
        found = chains.find(records, failures)
        assert {record.rank for record in records} <= {rank for chain in found for rank in chain.waiters}
        for chain in found:
            assert all(one.peer == next_one.rank for one, next_one in zip(chain.waits, chain.waits[1:]))
            assert str(chain)


def test_a_long_line_of_ranks():
    (chain,) = chains.find([wait(rank, rank + 1) for rank in range(2000)])
    assert chain.culprit == ("rank", 2000)
    assert len(chain.waits) == 2000


def test_the_simulator_joins_what_its_ranks_know():
    def rank_one_leaves(group):
        a, b = torch.ones(16, 16), torch.ones(16, 16)
        mk.all_gather_matmul(a, b)
        if group.rank != 1:
            mk.all_gather_matmul(a, b)

    with pytest.raises(
        mk.CommTimeout, match=r"Who waited for whom: rank [02] -> rank 1; rank 1 waited for nobody"
    ) as e:
        mk.spawn(rank_one_leaves, nodes=1, gpus_per_node=3, device="cpu", timeout=1e-4)
    assert {record.rank for record in e.value.records + e.value.others} == {0, 2}
    assert set(e.value.records).isdisjoint(e.value.others)


def test_host_code_that_waits_is_in_the_chain():
    def one_does_not_come(group):
        if group.rank != 2:
            group.barrier()

    with pytest.raises(mk.CommTimeout, match="rank 2 waited for nobody: it never came to barrier"):
        mk.spawn(one_does_not_come, nodes=1, gpus_per_node=3, device="cpu", timeout=1e-4)


def test_records_of_other_groups_are_not_mixed():
    mine, same, other = (mk.CommTimeout("late", [wait(0, 1)]) for _ in range(3))
    same.records = (wait(1, 2),)
    other.records = (wait(2, 0),)
    mine.group = same.group = "world"
    other.group = "half"
    assert chains.join(mine, [mine, same, other]) is mine
    assert mine.others == same.records
    assert "rank 0 -> rank 1 -> rank 2;" in str(mine)


def test_an_error_alone_says_what_it_said():
    mine = mk.CommTimeout("late", [wait(0, 1)])
    assert str(chains.join(mine, [mine])) == "late"
    assert dataclasses.asdict(mine.records[0])["peer"] == 1
