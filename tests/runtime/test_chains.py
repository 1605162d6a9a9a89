"""Who waited for whom: from records to the culprit."""

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.roles import COMPUTE, INTRA
from mkernel.lang.signals import ARRIVED, ENTERED, finish, notify, wait
from mkernel.runtime import chains, records
from mkernel.runtime.chains import NetworkFailure
from mkernel.runtime.world import Launch


def waited(rank, peer, signal="arrived", *, timed_out=True, seconds=1.0, op="all_gather_matmul", cta=3):
    return mk.WaitRecord(timed_out, op, rank, "compute", cta, signal, peer, 0, 1, 2, seconds)


def ends(found):
    return [chain.culprit for chain in found]


def test_no_records_no_chain():
    assert chains.find([]) == []


def test_a_chain_ends_at_the_rank_that_waited_for_nobody():
    (chain,) = chains.find([waited(1, 2), waited(0, 1), waited(2, 7)])
    assert chain.short == "rank 0 -> rank 1 -> rank 2 -> rank 7"
    assert [record.rank for record in chain.waits] == [0, 1, 2]
    assert chain.waiters == (0, 1, 2)
    assert "rank 7 waited for nobody: it never called all_gather_matmul" in str(chain)
    assert not chain.cycle


def test_waits_within_a_rank_lead_nowhere_else():
    (chain,) = chains.find([waited(0, -1, "placed")])
    assert "rank 0 waited for itself" in str(chain)
    (chain,) = chains.find([waited(0, -1, "placed"), waited(0, 2)])
    assert chain.short == "rank 0 -> rank 2"


def test_who_only_heard_of_it_waited_for_nobody():
    """A launch that ended after the group had given up adds nothing to the chain."""
    assert chains.find([waited(1, -1, "nothing", timed_out=False)]) == []
    (chain,) = chains.find([waited(0, 2), waited(1, -1, "nothing", timed_out=False)])
    assert chain.waiters == (0,)


def test_everybody_waits_for_one():
    (chain,) = chains.find([waited(rank, 3) for rank in range(8) if rank != 3])
    assert chain.short == "rank 0 -> rank 3"
    assert chain.waiters == (0, 1, 2, 4, 5, 6, 7)
    assert "ranks 1, 2, 4, 5, 6 and 7 waited for rank 3 too" in str(chain)


def test_waits_that_were_given_up_lead_on_too():
    """Rank 1 left because rank 0's wait had run out; what it waited for counts all the same."""
    (chain,) = chains.find([waited(0, 1), waited(1, 2, timed_out=False)])
    assert chain.culprit == ("rank", 2)


def test_the_wait_that_says_most_is_shown():
    shown = waited(0, 1, seconds=5.0, cta=9)
    (chain,) = chains.find([waited(0, 1, seconds=9.0, timed_out=False), shown, waited(0, 1, seconds=2.0)])
    assert chain.waits == (shown,)


def test_two_culprits():
    found = chains.find([waited(0, 5), waited(1, 6), waited(2, 6), waited(3, 6)])
    assert ends(found) == [("rank", 6), ("rank", 5)]  # the one that most waited for first


@pytest.mark.parametrize("signal", ["ring space", "sent"])
def test_a_dead_proxy(signal):
    (chain,) = chains.find([waited(0, 4), waited(4, 0, signal)])
    assert chain.short == "rank 0 -> rank 4 -> the network proxy of rank 4"
    assert chain.culprit == ("proxy", 4)
    assert "made no progress" in chain.reason


def test_a_network_that_failed_is_the_culprit_whatever_else_waited():
    records = [waited(0, 1), waited(1, 2), waited(3, 9)]
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
    records = [waited(0, 1, op="matmul_all_reduce"), waited(1, 0), waited(5, 0)]
    (chain,) = chains.find(records)
    assert chain.cycle
    assert chain.short == "rank 0 -> rank 1 -> rank 0"
    assert "rank 0 in matmul_all_reduce, rank 1 in all_gather_matmul" in chain.reason
    assert chain.waiters == (0, 1, 5)


def test_a_cycle_of_three_in_one_call():
    (chain,) = chains.find([waited(2, 0), waited(0, 1), waited(1, 2)])
    assert chain.short == "rank 0 -> rank 1 -> rank 2 -> rank 0"
    assert "rank 2 for signal 'arrived' (index 0, it is 1 instead of 2) from rank 0" in chain.reason


def test_a_cycle_beside_a_way_out_is_no_culprit():
    """0 and 1 wait for each other, but 1 also waits for 2, which never came: that explains both."""
    (chain,) = chains.find([waited(0, 1), waited(1, 0), waited(1, 2)])
    assert chain.culprit == ("rank", 2)
    assert chain.waiters == (0, 1)


def test_two_cycles():
    found = chains.find([waited(0, 1), waited(1, 0), waited(2, 3), waited(3, 2)])
    assert [chain.short for chain in found] == ["rank 0 -> rank 1 -> rank 0", "rank 2 -> rank 3 -> rank 2"]


def test_waits_for_the_ranks_own_ctas_lead_nowhere_else():
    (chain,) = chains.find([waited(0, 0), waited(0, 2)])
    assert chain.short == "rank 0 -> rank 2"
    (chain,) = chains.find([waited(0, 0), waited(1, 0)])
    assert "waited for itself" in chain.reason
    assert chain.waiters == (0, 1)


def test_many_ranks_end():
    """Any graph: every rank that waited is explained, and every chain is one."""
    for seed in range(200):
        draw = random.Random(seed)
        ranks = draw.randint(1, 12)
        records = [
            waited(
                draw.randrange(ranks), draw.randrange(ranks), draw.choice(["arrived", "sent"]), seconds=draw.random()
            )
            for _ in range(draw.randint(1, 30))
        ]
        failures = [NetworkFailure(draw.randrange(ranks), "broken")] if draw.random() < 0.3 else []
        found = chains.find(records, failures)
        assert {record.rank for record in records} <= {rank for chain in found for rank in chain.waiters}
        for chain in found:
            assert all(one.peer == next_one.rank for one, next_one in zip(chain.waits, chain.waits[1:]))
            assert str(chain)


def test_a_long_line_of_ranks():
    (chain,) = chains.find([waited(rank, rank + 1) for rank in range(2000)])
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

    with pytest.raises(mk.CommTimeout, match="rank 2 waited for nobody: it never called barrier"):
        mk.spawn(one_does_not_come, nodes=1, gpus_per_node=3, device="cpu", timeout=1e-4)


def test_records_of_other_groups_are_not_mixed():
    mine, same, other = (mk.CommTimeout("late", [waited(0, 1)]) for _ in range(3))
    same.records = (waited(1, 2),)
    other.records = (waited(2, 0),)
    mine.group = same.group = "world"
    other.group = "half"
    assert chains.join(mine, [mine, same, other]) is mine
    assert mine.others == same.records
    assert "rank 0 -> rank 1 -> rank 2;" in str(mine)


def test_an_error_alone_says_what_it_said():
    mine = mk.CommTimeout("late", [waited(0, 1)])
    assert str(chains.join(mine, [mine])) == "late"
    assert dataclasses.asdict(mine.records[0])["peer"] == 1


# -- kernels whose signals are wrong, in an operator that is not part of the package

ENTERED_WORD, ARRIVED_WORDS = tl.constexpr(0), tl.constexpr(1)
RIGHT, SILENT, LATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
OWN_SIGNAL, OWN_ROLE = tl.constexpr(50), tl.constexpr(5)


@triton.jit
def shift_kernel(context, x, y, data_start, half, SIZE: tl.constexpr, HOW: tl.constexpr, KIND: tl.constexpr):
    """Gives every rank a number of its left neighbour; SILENT: rank 0 does not tell, LATE: all wait first."""
    epoch = current_epoch(context)
    rank = rank_of(context)
    left, right = (rank + SIZE - 1) % SIZE, (rank + 1) % SIZE
    parity = (epoch % 2).to(tl.int32)
    mine = segment_of(context, rank, tl.int64)
    notify(segment_of(context, left, tl.int64) + ENTERED_WORD, epoch)
    here = wait(context, mine + ENTERED_WORD, epoch - 1, INTRA, ENTERED, right, 0)
    if HOW == LATE:
        here = wait(context, mine + ARRIVED_WORDS + parity, epoch, OWN_ROLE, KIND, left, 3) & here
    tl.store(segment_of(context, right, tl.float32) + data_start + parity * half, tl.load(x))
    if (HOW != SILENT) | (rank != 0):
        notify(segment_of(context, right, tl.int64) + ARRIVED_WORDS + parity, epoch)
    here = wait(context, mine + ARRIVED_WORDS + parity, epoch, COMPUTE, KIND, left, 3) & here
    arrived = tl.load(segment_of(context, rank, tl.float32) + data_start + parity * half)
    tl.store(y, tl.where(here, arrived, float("nan")))
    finish(context, epoch, SIZE)


def shift(group, how=RIGHT, op="a_shift_of_my_own", kind=ARRIVED):
    x, y = torch.full((1,), float(group.rank)), group.world.memory.empty(group.world_rank, (1,), torch.float32)
    workspace = group.workspace(op, 3, 4)
    arguments = dict(
        context=workspace.context, x=x, y=y, data_start=workspace.data_start // 4, half=workspace.half_bytes // 4,
        SIZE=group.size, HOW=how, KIND=kind,
    )  # fmt: skip
    group.launch(Launch(op=op, group=group, kernel=shift_kernel, grid=1, arguments=arguments))
    return y.item()


def shifted(*how, ranks=3, **more):
    def on_rank(group):
        return [shift(group, one, **more) for one in how]

    return mk.spawn(on_rank, nodes=1, gpus_per_node=ranks, device="cpu", timeout=1e-4)


def test_an_operator_from_outside_the_package_needs_no_list():
    assert shifted(RIGHT, RIGHT) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


def test_operators_are_numbered_alike_by_all_threads():
    names = [f"operator {number}" for number in range(50)]
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(records.number_of, names * 8))
    assert numbers == [records.OPS.index(name) for name in names] * 8
    assert len(set(numbers)) == len(names)


def test_a_timeout_names_an_operator_signal_and_role_from_outside():
    with pytest.raises(mk.CommTimeout) as caught:
        shifted(LATE, ranks=2, op="mine", kind=OWN_SIGNAL)
    record = caught.value.record
    assert (record.op, record.signal, record.role) == ("mine", "signal 50", "role 5")
    assert "rank 1 (index 3): signal 'signal 50' is 0, expected 1" in str(dataclasses.replace(record, peer=1))
    assert "rank -1" not in str(dataclasses.replace(record, peer=-1))


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_missing_notify_is_not_blamed_on_the_calls(calls_before):
    with pytest.raises(mk.CommTimeout) as caught:
        shifted(*[RIGHT] * calls_before, SILENT)
    text = str(caught.value)
    assert "rank 1 -> rank 0; rank 0 waited for nobody" in text
    assert "It made the same calls and is in a_shift_of_my_own too, or has left it" in text
    assert f"rank 1 never saw signal 'arrived' (index 3, it is {max(calls_before - 1, 0)} instead of" in text
    assert "look at the signals of the kernel" in text
    assert "must make the same calls" not in text
    assert "never called" not in text


def test_a_wait_before_its_notify_is_not_blamed_on_the_calls():
    with pytest.raises(mk.CommTimeout) as caught:
        shifted(RIGHT, LATE, ranks=2)
    text = str(caught.value)
    assert "they waited for each other, all of them in a_shift_of_my_own" in text
    assert "rank 0 for signal 'arrived' (index 3, it is 0 instead of 2) from rank 1" in text
    assert "rank 1 for signal 'arrived' (index 3, it is 0 instead of 2) from rank 0" in text
    assert "look at the signals of the kernel" in text
    assert "must make the same calls" not in text


def test_calls_that_differ_are_told():
    def on_rank(group):
        shift(group)
        group.workspace("another", 3, 4)  # what is collective about the two, in the same order
        if group.rank == 1:
            shift(group, op="another")
        else:
            shift(group)

    with pytest.raises(mk.ArgumentError) as caught:
        mk.spawn(on_rank, nodes=1, gpus_per_node=2, device="cpu", timeout=1e-4)
    text = str(caught.value)
    assert "all ranks of the group must make the same calls in the same order" in text
    assert "a_shift_of_my_own(" in text
    assert "another(" in text


def test_ranks_of_one_operator_that_made_different_calls_before():
    records = [waited(0, 1), waited(1, 0)]
    calls = {0: ["a", "b"], 1: ["b"], 2: ["a", "b"]}
    (chain,) = chains.find(records, calls=calls)
    assert "Call 1 of rank 0 is a, of rank 1 is b. All ranks must make the same calls" in chain.reason
    (chain,) = chains.find([waited(0, 1)], calls={0: ["a", "b"], 1: ["a"]})
    assert "rank 1 waited for nobody: it never called all_gather_matmul" in chain.reason
    assert "Call 2 of rank 0 is b, of rank 1 was not made" in chain.reason


def test_without_the_calls_nothing_is_claimed_about_them():
    (chain,) = chains.find([waited(0, 1)])
    assert "never called all_gather_matmul, was lost on the way, or left it without raising signal" in chain.reason
    (chain,) = chains.find([waited(0, 1), waited(1, 0)])
    assert "must make the same calls" not in chain.reason
    assert "all of them in all_gather_matmul: rank 0 for signal 'arrived'" in chain.reason


def test_a_rank_that_ended_its_launch_had_come():
    (chain,) = chains.find([waited(0, 1), waited(1, -1, "nothing", timed_out=False)])
    assert chain.culprit == ("rank", 1)
    assert "never called" not in chain.reason
    assert "look at the signals of the kernel" in chain.reason
