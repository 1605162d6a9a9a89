"""Groups: who is in, who comes when, and what happens when somebody does not."""

import re

import pytest
import torch

import mkernel as mk
from mkernel.runtime.group import current, set_current
from mkernel.sim.backend import SimLauncher
from mkernel.sim.scheduler import Options

SOON = 1e-3


def simulate(fn, *args, nodes=1, gpus=2, seed=0, timeout=1.0, **options):
    return mk.spawn(
        fn, *args, nodes=nodes, gpus_per_node=gpus, device="cpu", seed=seed, timeout=timeout, sim=Options(**options)
    )


def works(group) -> bool:
    """An operator over the group gives what it should."""
    a = torch.full((5, 16), float(group.world_rank + 1))
    y, gathered = mk.all_gather_matmul(a, torch.ones(16, 3), group=group, return_gathered=True)
    expected = torch.tensor([member + 1.0 for member in group.members]).repeat_interleave(5)
    return torch.equal(gathered[:, 0], expected) and torch.equal(y[:, 2], 16 * expected)


def test_numbers_of_a_rank():
    def rank(group):
        return (group.rank, group.size, group.nodes, group.node, group.gpus_per_node, group.local_rank,
                group.device.type, repr(group))  # fmt: skip

    for number, found in enumerate(simulate(rank, nodes=2, gpus=3)):
        words = f"Group(rank {number} of 6, node {number // 3} of 2 x 3, cpu)"
        assert found == (number, 6, 2, number // 3, 3, number % 3, "cpu", words)


# -- parts of a group


def test_split_by_color():
    def rank(group):
        part = group.split(group.rank % 2)
        return part.members, part.rank, part.size, works(part), works(group)

    for seed in range(2):
        for number, found in enumerate(simulate(rank, gpus=4, seed=seed)):
            assert found == ((number % 2, number % 2 + 2), number // 2, 2, True, True)


def test_split_by_key():
    def rank(group):
        backwards = group.split(0, key=-group.rank)
        mixed = group.split(7, key=group.rank % 2)
        return backwards.members, mixed.members, backwards.rank, works(backwards), works(mixed)

    for number, found in enumerate(simulate(rank, gpus=4)):
        assert found == ((3, 2, 1, 0), (0, 2, 1, 3), 3 - number, True, True)


def test_split_without_some():
    def rank(group):
        part = group.split(None if group.rank == 1 else 0)
        again = group.split(group.rank // 2)
        return part and (part.members, works(part)), again.members, works(again)

    first = ((0, 2, 3), True)
    assert simulate(rank, gpus=4) == [
        (first, (0, 1), True),
        (None, (0, 1), True),
        (first, (2, 3), True),
        (first, (2, 3), True),
    ]


def test_splits_of_splits_have_their_own_names():
    def rank(group):
        part = group.split(group.rank // 2)
        alone = part.split(part.rank)
        together = part.split(0)
        names = {group.name, part.name, alone.name, together.name}
        return alone.size, together.size, len(names), works(alone), works(together)

    assert simulate(rank, gpus=4) == [(1, 2, 4, True, True)] * 4


def test_groups_across_nodes():
    def rank(group):
        column = group.split(group.local_rank)
        row = group.split(group.node)
        return (column.nodes, column.gpus_per_node, row.nodes, row.gpus_per_node), works(column), works(row)

    assert simulate(rank, nodes=2, gpus=2) == [((2, 1, 1, 2), True, True)] * 4


def test_a_group_that_is_no_rectangle():
    def rank(group):
        if group.rank == 3:
            return None
        part = group.subset([0, 1, 2])
        return part.nodes, part.gpus_per_node, works(part)

    assert simulate(rank, nodes=2, gpus=2) == [(3, 1, True)] * 3 + [None]


def test_subset_in_any_order():
    def rank(group):
        if group.rank not in (1, 3):
            return None
        part = group.subset([3, 1])
        return part.rank, part.members, works(part)

    assert simulate(rank, gpus=4) == [None, (1, (3, 1), True), None, (0, (3, 1), True)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0, 0], "distinct numbers"),
        ([0, 2], "from 0 to 1"),
        ([-1, 0], "from 0 to 1"),
        ([], "is not in"),
        ([1], "rank 0 is not in"),
    ],
)
def test_subsets_that_make_no_sense(ranks, words):
    def rank(group):
        if group.rank == 0:
            with pytest.raises(mk.ArgumentError, match=words):
                group.subset(ranks)

    simulate(rank)


def test_a_split_after_a_subset_of_some():
    """The others took no part in the subset, and must agree about the next group all the same."""

    def rank(group):
        if group.rank < 2:
            assert works(group.subset([0, 1]))
        part = group.split(group.rank % 2)
        return part.members, works(part)

    assert simulate(rank, gpus=4) == [((number % 2, number % 2 + 2), True) for number in range(4)]


def test_subsets_that_overlap():
    def rank(group):
        found = []
        for pair in ([0, 1], [1, 2], [0, 2]):
            if group.rank in pair:
                found.append(works(group.subset(pair)))
        return found

    assert simulate(rank, gpus=3) == [[True, True]] * 3


def test_the_same_subset_twice():
    def rank(group):
        first, second = group.subset([0, 1]), group.subset([0, 1])
        return first.name != second.name, works(second), works(first), works(second)

    assert simulate(rank) == [(True, True, True, True)] * 2


# -- exchanges


def test_exchange_gives_all_values_in_order():
    def rank(group):
        first = group.exchange("letters", "abc"[group.rank])
        second = group.exchange("numbers", group.rank**2)
        part = group.split(0, key=-group.rank)
        return first, second, part.exchange("again", group.rank)

    for seed in range(3):
        assert simulate(rank, gpus=3, seed=seed) == [(["a", "b", "c"], [0, 1, 4], [2, 1, 0])] * 3


def test_nobody_leaves_a_barrier_before_all_have_come():
    for seed in range(6):
        log = []

        def rank(group):
            for turn in range(3):
                log.append((turn, "came"))
                group.barrier()
                log.append((turn, "left"))

        simulate(rank, gpus=3, seed=seed, slow={1: 0.1})
        for turn in range(3):
            came = [i for i, entry in enumerate(log) if entry == (turn, "came")]
            left = [i for i, entry in enumerate(log) if entry == (turn, "left")]
            assert len(came) == len(left) == 3
            assert max(came) < min(left)


@pytest.mark.parametrize("what", ["barrier", "empty", "split", "all_gather_matmul"])
def test_a_rank_that_does_not_come_is_named(what):
    def rank(group):
        if group.rank == 1:
            return None
        try:
            if what == "barrier":
                group.barrier()
            elif what == "empty":
                mk.empty(3)
            elif what == "split":
                group.split(0)
            else:
                mk.all_gather_matmul(torch.ones(4, 16), torch.ones(16, 4))
        except mk.CommTimeout as error:
            return str(error)

    zero, one, two = simulate(rank, gpus=3, timeout=SOON)
    assert one is None
    for number, message in ((0, zero), (2, two)):
        assert f"rank {number}" in message
        assert re.search(r"for ranks? \[?1\b", message), message


def test_a_group_that_waited_in_vain_is_not_used_again():
    """The ranks would count their calls differently, and take an old one for a new one."""

    def rank(group):
        if group.rank == 1:
            return
        with pytest.raises(mk.CommTimeout) as first:
            mk.all_gather_matmul(torch.ones(4, 16), torch.ones(16, 4))
        with pytest.raises(mk.CommTimeout) as second:
            group.barrier()
        assert first.value.records == second.value.records
        assert works(group.subset([0, 2]))

    simulate(rank, gpus=3, timeout=SOON)


def test_a_rank_that_stops_coming_is_named_by_the_kernel():
    def rank(group):
        assert works(group)
        if group.rank == 1:
            return None
        try:
            works(group)
        except mk.CommTimeout as error:
            return error

    zero, _, two = simulate(rank, gpus=3, timeout=SOON)
    for number, error in ((0, zero), (2, two)):
        assert error.record.op == "all_gather_matmul"
        assert error.record.rank == number
        assert "can no longer be used" in str(error)
    assert any(record.peer == 1 for error in (zero, two) for record in error.records)
    assert any(record.timed_out for error in (zero, two) for record in error.records)


def test_life_goes_on_without_a_lost_rank():
    def rank(group):
        assert works(group)
        if group.rank == 1:
            return None
        with pytest.raises(mk.CommTimeout) as first:
            works(group)
        with pytest.raises(mk.CommTimeout) as second:
            mk.empty(3)
        assert first.value.records == second.value.records
        with pytest.raises(mk.CommTimeout):
            group.synchronize()
        group.close()
        left = group.subset([0, 2])
        return works(left), mk.empty(4, group=left).shape, works(left)

    found = simulate(rank, gpus=3, timeout=SOON)
    assert found == [(True, (4,), True), None, (True, (4,), True)]


def test_ranks_that_call_differently_are_told():
    def rank(group):
        with pytest.raises(mk.ArgumentError) as caught:
            mk.all_gather_matmul(torch.ones(4 + group.rank, 16), torch.ones(16, 4))
        return str(caught.value)

    for message in simulate(rank):
        assert "all_gather_matmul" in message
        assert "m=4" in message
        assert "m=5" in message


def test_ranks_that_mix_up_what_all_know_are_told():
    """At every call, on all ranks, by the names of both calls; nothing is launched, and the group is as it was."""

    def rank(group):
        few, many = torch.ones(4, 16), torch.ones(5, 16)
        for rows in (few, many, few):
            mk.all_gather_matmul(rows, torch.ones(16, 4))
        for _ in range(3):
            with pytest.raises(mk.ArgumentError, match=r"rank [02] .*m=4.* rank 1 .*m=5|rank 1 .*m=5.* rank 0 .*m=4"):
                mk.all_gather_matmul(many if group.rank == 1 else few, torch.ones(16, 4))
            assert works(group)
        with pytest.raises(mk.ArgumentError, match=r"same calls in the same order.*all_gather_matmul\("):
            group.barrier() if group.rank else mk.all_gather_matmul(few, torch.ones(16, 4))
        return works(group)

    for seed in range(3):
        assert simulate(rank, gpus=3, seed=seed) == [True] * 3


def test_what_one_rank_refuses_all_refuse():
    def rank(group):
        assert works(group)
        rows = torch.ones(17 if group.rank == 1 else 16, 16)
        with pytest.raises(mk.ArgumentError) as caught:  # 17 rows cannot be divided among two ranks
            mk.matmul_reduce_scatter(rows, torch.ones(16, 4))
        with pytest.raises(mk.ArgumentError) as other:
            mk.all_gather_matmul(rows if group.rank else "rows", torch.ones(16, 4))
        return str(caught.value), str(other.value), works(group)

    for seed in range(3):
        zero, one = simulate(rank, seed=seed)
        assert "rank 1 refused its call of matmul_reduce_scatter" in zero[0]
        assert one[0] in zero[0]
        assert "17" in one[0]
        assert "rank 0 refused its call of all_gather_matmul: a must be a torch.Tensor, got str" in one[1]
        assert zero[2]
        assert one[2]


def test_agreements_are_forgotten_together(monkeypatch):
    """Sizes, or documents, may be new at every call: what was agreed on must not grow for ever."""
    monkeypatch.setattr("mkernel.runtime.group.AGREEMENTS_KEPT", 3)

    def rank(group):
        for turn in range(10):
            group.agree("op", m=turn)
            group.agree("op", m=turn // 2)
        return len(group._agreed)

    for known in simulate(rank, gpus=3):
        assert known <= 3


def test_a_captured_workspace_is_kept_when_a_larger_one_is_made(monkeypatch):
    """A graph that is replayed later writes into it, on all ranks."""
    capturing = []
    monkeypatch.setattr(SimLauncher, "capturing", lambda launcher, rank: bool(capturing))

    def rank(group):
        small = group.workspace("all_gather_matmul", 8, 64)
        capturing.append(group.rank)
        assert group.workspace("all_gather_matmul", 8, 64) is small
        group.barrier()
        capturing.clear()
        group.barrier()
        large = group.workspace("all_gather_matmul", 8, 4096)
        assert group.workspace("all_gather_matmul", 16, 4096) is not large
        mk.empty(8)  # gives back what all ranks have dropped
        return [workspace.segment.number in dict(group.heap.segments()) for workspace in (small, large)]

    assert simulate(rank) == [[True, False]] * 2


# -- the current group


def test_the_current_group_is_each_rank_s_own():
    def rank(group):
        assert current() is group
        group.barrier()
        assert current() is group
        part = group.split(0)
        set_current(part)
        group.barrier()
        assert current() is part
        assert current(group) is group
        return current().rank

    assert simulate(rank, gpus=3) == [0, 1, 2]
    with pytest.raises(mk.MKernelError, match="there is no group"):
        current()


@pytest.mark.parametrize("wrong", ["world", 3, object()])
def test_a_group_must_be_a_group(wrong):
    with pytest.raises(mk.ArgumentError, match=r"must be a mk\.Group"):
        current(wrong)
