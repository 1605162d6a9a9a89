"""Groups by name, as operators of torch.library find them."""

import pytest
import torch

import mkernel as mk
from mkernel.runtime.group import named, set_current
from mkernel.runtime.group_names import name_in_graph


def test_every_rank_finds_its_own_group():
    def program(group):
        even = group.split(group.rank % 2)
        again = group.subset([0, 1]) if group.rank < 2 else None
        assert named(group.group_name) is group
        assert named(even.group_name) is even
        assert again is None or named(again.group_name) is again
        return group.group_name, even.group_name, again and again.group_name

    names = mk.spawn(program, nodes=2, gpus_per_node=2, device="cpu")
    assert [name for name, _, _ in names] == ["world:2x2"] * 4
    assert names[0][1] == names[2][1] != names[1][1] == names[3][1]
    assert names[0][2] == names[1][2] not in (names[0][1], names[1][1])


def test_two_groups_of_the_same_ranks_have_two_names():
    def program(group):
        first, second = group.subset([0, 1]), group.subset([0, 1])
        assert first.group_name != second.group_name
        assert named(first.group_name) is first
        assert named(second.group_name) is second

    mk.spawn(program, device="cpu")


def test_the_shape_is_part_of_the_name():
    def name(group):
        return group.group_name

    shapes = [(1, 2), (2, 1), (1, 3)]
    assert len({mk.spawn(name, nodes=n, gpus_per_node=g, device="cpu")[0] for n, g in shapes}) == 3


def test_a_name_outlives_no_group():
    def program(group):
        made = group.subset([group.rank])
        name = made.group_name
        del made
        with pytest.raises(mk.MKernelError, match=r"no group named 'world:1x2/\d#1:1x1'.*world:1x2"):
            named(name)

    mk.spawn(program, device="cpu")


def test_whose_group_it_is_must_be_known():
    def program(group):
        group.barrier()
        set_current(None)
        try:
            with pytest.raises(mk.MKernelError, match="2 ranks in this process"):
                named(group.group_name)
        finally:
            set_current(group)
        group.barrier()

    mk.spawn(program, device="cpu")


def test_operators_take_names():
    def program(group):
        pair = group.split(group.rank // 2)
        a = torch.full((2, 16), float(group.rank))
        gathered = mk.all_gather_matmul(a, torch.eye(16), group=pair.group_name)
        scattered = mk.matmul_reduce_scatter(torch.ones(4, 16), torch.eye(16), group=group.group_name)
        assert mk.empty(4, group=pair.group_name).shape == (4,)
        assert mk.explain("all_gather_matmul", a, torch.eye(16), group=pair.group_name)
        return gathered[:, 7].tolist(), scattered.tolist()

    found = mk.spawn(program, nodes=2, gpus_per_node=2, device="cpu")
    assert [rows for rows, _ in found] == [[0, 0, 1, 1]] * 2 + [[2, 2, 3, 3]] * 2
    assert [scattered for _, scattered in found] == [[[4.0] * 16]] * 4


@pytest.mark.parametrize("wrong", [7, object(), b"world:1x2", ["world:1x2"], torch.ones(2)])
def test_what_stands_for_a_group(wrong):
    def program(group):
        with pytest.raises(mk.ArgumentError) as refusal:
            mk.all_gather_matmul(torch.ones(2, 16), torch.eye(16), group=wrong)
        for part in ("mk.Group", "ProcessGroup", "DeviceMesh", "name", type(wrong).__name__):
            assert part in str(refusal.value)

    mk.spawn(program, device="cpu")


def test_graphs_use_the_group_of_the_thread_that_traces_them():
    group = mk.init()

    def program(ranks):
        assert name_in_graph(None) == ranks.group_name == "world:1x2"

    for _ in range(2):
        mk.spawn(program, device="cpu")
        assert name_in_graph(None) == group.group_name == "world:1x1"
    with pytest.raises(ZeroDivisionError):
        mk.spawn(lambda ranks: 1 / 0, device="cpu")
    assert name_in_graph(None) == group.group_name


def test_a_name_finds_no_group_of_another_rank():
    def program(group):
        alone = group.subset([group.rank])
        names = group.exchange("names", alone.group_name)
        for rank, name in enumerate(names):
            if rank == group.rank:
                assert named(name) is alone
            else:
                with pytest.raises(mk.MKernelError, match="no group named"):
                    named(name)
        group.barrier()

    mk.spawn(program, device="cpu")


def test_graphs_with_a_process_group_that_has_no_group_yet():
    """The first call makes it. The graph is not compiled again for that, nor for other groups."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        process_group, made, others = torch.distributed.new_group([0]), [], []
        a, b = torch.ones(2, 3, 4), torch.ones(4, 5)

        def count(graph, inputs):
            made.append(graph)
            return graph

        compiled = torch.compile(
            lambda a: mk.all_gather_matmul(a, [b, b], gather_dim=1, group=process_group), backend=count, fullgraph=True
        )
        for _ in range(3):
            assert (compiled(a)[1] == 4).all()
            others.append(mk.init().subset([0]))
        assert len(made) == 1
    finally:
        torch.distributed.destroy_process_group()
