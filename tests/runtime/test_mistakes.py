"""What ranks do wrong together: every rank is told, and the group works afterwards as if nothing had been called."""

import pytest
import torch
from support.operator_calls import run

import mkernel as mk
from mkernel.sim.backend import SimMemory

CLUSTERS = [(1, 2), (1, 3), (2, 1), (2, 2)]


def gather(group, rows=5):
    """A call, not looked at yet."""
    a = torch.full((rows, 16), float(group.world_rank + 1))
    return mk.all_gather_matmul(a, torch.ones(16, 3), group=group)


def is_right(group, y):
    expected = torch.tensor([member + 1.0 for member in group.members])
    return torch.equal(y[:, 2], 16 * expected.repeat_interleave(len(y) // group.size))


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.thorough
def test_calls_on_a_stream_behind_a_mistake(cluster):
    """A call on a stream returns before it is done: what a rank queues next must not run beside what is taken back."""

    def on_rank(group):
        with group.world.stream(group.world_rank, "side"):
            gather(group, 4)
            gather(group, 7)
            with pytest.raises(mk.ArgumentError, match=r"m=4|m=7"):
                gather(group, 4 if group.rank else 7)
            results = [gather(group) for _ in range(3)]
            group.synchronize()
        assert all(is_right(group, y) for y in results)

    for seed in range(6):
        run(on_rank, cluster=cluster, seed=seed)


@pytest.mark.thorough
def test_a_launch_that_is_taken_back_takes_no_time():
    """Its many waits end one after the other, and meanwhile nobody else times out."""

    def on_rank(group):
        query = torch.ones(1, 4, 24, 64)
        attend = lambda: mk.ring_attention(query, query, query)  # noqa: E731
        attend()
        before = group.world.scheduler.clock
        with pytest.raises(mk.ArgumentError, match="same calls in the same order"):
            attend() if group.rank == 0 else gather(group)
        passed = group.world.scheduler.clock - before
        assert is_right(group, gather(group))
        return passed

    for seed in range(4):
        assert run(on_rank, cluster=(5, 1), seed=seed) == [0] * 5


@pytest.mark.thorough
def test_ranks_that_refuse_do_not_run_into_what_others_launched():
    """All but one refuse what that one has launched; one of them comes late to it, when others make the next call."""

    def on_rank(group):
        gather(group, 4)
        gather(group, 5)
        for _ in range(3):
            with pytest.raises(mk.ArgumentError):
                gather(group, 4) if group.rank == 2 else mk.all_gather_matmul("a", "b", group=group)
            assert is_right(group, gather(group))

    for seed in range(12):
        run(on_rank, cluster=(1, 4), seed=seed, slow={0: 0.02})


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_a_workspace_that_could_not_grow_is_kept(cluster):
    """Every rank refuses once while the others were about to have a larger workspace."""

    def on_rank(group):
        assert is_right(group, gather(group, 4))
        large = torch.ones(40, 16)
        for wrong in range(group.size):
            config = mk.Config(ctas=10**5) if group.rank == wrong else None
            with pytest.raises(mk.ArgumentError, match=r"config\.ctas"):
                mk.all_gather_matmul(large, torch.ones(16, 4), config=config)
        kept = mk.empty(64)  # an allocation gives back what all ranks have dropped
        for _ in range(3):
            assert is_right(group, gather(group, 4))
        numbers = dict(group.heap.segments())
        assert all(workspace.segment.number in numbers for workspace in group._workspaces.values())
        return kept.shape

    run(on_rank, cluster=cluster)


@pytest.mark.parametrize(
    "sizes", [(("one", 8, 64), ("two", 8, 64)), (("one", 8, 1024), ("one", 136, 512))], ids=["operators", "parts"]
)
def test_workspaces_of_the_same_size_are_not_mixed_up(sizes):
    """Of two operators, or cut in another way: ranks would not know that they have different ones."""

    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match=r"make the same calls|pass the same values"):
            group.workspace(*sizes[group.rank])
        for size in sizes:
            group.workspace(*size)

    run(on_rank)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_a_group_is_closed_by_all_or_by_none(cluster):
    def on_rank(group):
        part = group.split(0)
        assert is_right(part, gather(part))
        with pytest.raises(mk.ArgumentError, match="make the same calls in the same order"):
            part.close() if group.rank == 0 else gather(part)
        assert is_right(part, gather(part))
        part.close()
        with pytest.raises(mk.MKernelError, match="closed"):
            gather(part)
        assert is_right(group, gather(group))

    for seed in range(2):
        run(on_rank, cluster=cluster, seed=seed)


def test_a_dtype_that_is_none_of_torch():
    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match=r"dtype must be a torch\.dtype.*'float'"):
            mk.empty(64, dtype="float" if group.rank else torch.float32)
        assert mk.empty(64).shape == (64,)

    run(on_rank)


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=str)
def test_an_allocation_that_fails_on_one_rank(cluster, monkeypatch):
    """Segments have the same numbers on all ranks afterwards, and a workspace that was given back is made again."""
    fails = []
    allocate = SimMemory.allocate

    def sometimes(memory, rank, nbytes):
        if rank in fails and nbytes > 4096:
            fails.remove(rank)
            raise MemoryError("there is no more")
        return allocate(memory, rank, nbytes)

    monkeypatch.setattr(SimMemory, "allocate", sometimes)

    def on_rank(group):
        assert is_right(group, gather(group, 4))
        for wrong in range(group.size):
            for rows in (80 * (wrong + 1), 4):
                group.barrier()
                if group.rank == wrong:
                    fails.append(group.world_rank)
                group.barrier()
                if rows > 4:
                    with pytest.raises((MemoryError, mk.ArgumentError), match="there is no more"):
                        gather(group, rows)
                else:
                    fails.clear()
                    assert is_right(group, gather(group, 4))
        a = mk.empty(5, 16, dtype=torch.float32)  # over the network it is sent by the number of its segment
        a.fill_(group.world_rank + 1)
        assert is_right(group, mk.all_gather_matmul(a, torch.ones(16, 3)))
        return [number for number, _ in group.heap.segments()]

    first, *others = run(on_rank, cluster=cluster)
    assert all(max(other) == max(first) for other in others)
