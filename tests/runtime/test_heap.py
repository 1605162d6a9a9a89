"""The symmetric heap: the same on every rank, and given back when nobody needs it."""

import gc
import weakref

import pytest
import torch

import mkernel as mk
from mkernel.runtime.heap import ALIGNMENT
from mkernel.sim.network import Proxy


def simulate(fn, *args, nodes=1, gpus=2, seed=0, timeout=1.0):
    return mk.spawn(fn, *args, nodes=nodes, gpus_per_node=gpus, device="cpu", seed=seed, timeout=timeout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8])
def test_a_tensor_of_any_type(dtype):
    def rank(group):
        x = mk.empty(3, 5, dtype=dtype)
        x.fill_(group.rank + 1)
        group.barrier()
        return x

    for number, x in enumerate(simulate(rank)):
        assert (x.shape, x.dtype, x.device.type) == ((3, 5), dtype, "cpu")
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0
        assert (x == number + 1).all(), "it lives on after the cluster"


def test_ways_to_say_the_size():
    def rank(group):
        shapes = [mk.empty(2, 3), mk.empty((2, 3)), mk.empty([2, 3]), mk.empty(torch.Size([2, 3]))]
        return [tuple(x.shape) for x in shapes], mk.empty(7).shape, mk.empty().shape, mk.empty(0, 4).shape

    assert simulate(rank) == [([(2, 3)] * 4, (7,), (), (0, 4))] * 2


def test_it_is_at_the_same_place_on_every_rank():
    def rank(group):
        kept = [mk.empty(size) for size in (10, 1000, 1)]
        found = [group.heap.find(x) for x in kept]
        assert group.heap.find(kept[1][400:])[1] == 800
        assert group.heap.find(torch.zeros(4)) is None
        mine = [segment.memory.data_ptr() for segment, _ in found]
        return [(segment.number, offset) for segment, offset in found], mine, [s.addresses for s, _ in found]

    results = simulate(rank, gpus=3)
    places, _, tables = results[0]
    assert len({number for number, _ in places}) == 3
    for other, mine, addresses in results:
        assert other == places
        assert addresses == tables
        for number, address in enumerate(mine):
            assert address in addresses[number]


def test_other_nodes_are_not_mapped():
    def rank(group):
        segment, _ = group.heap.find(mk.empty(8))
        return [address != 0 for address in segment.addresses]

    here, there = [True, True, False, False], [False, False, True, True]
    assert simulate(rank, nodes=2, gpus=2) == [here, here, there, there]


def held(group) -> int:
    """Bytes in the heap once the ranks have told each other what they dropped."""
    tick = group.empty(1)
    size = group.heap.nbytes - ALIGNMENT
    del tick
    return size


def test_it_is_given_back_when_it_was_dropped():
    def rank(group):
        before = held(group)
        x = mk.empty(5000)
        during = held(group)
        del x
        return before, during, held(group)

    for before, during, after in simulate(rank):
        assert during >= before + 10000
        assert after <= before + ALIGNMENT, "but for the last small one, which was dropped just now"


def test_views_keep_it_alive():
    def rank(group):
        before = held(group)
        x = mk.empty(100, 100, dtype=torch.float32)
        view = x.t()[3:7].unsqueeze(0)
        number = group.heap.find(x)[0].number
        view.fill_(5.0)
        del x
        gc.collect()
        during = held(group)
        assert group.heap.find(view)[0].number == number
        assert (view == 5.0).all()
        del view
        return during - before, held(group) - before

    for during, after in simulate(rank):
        assert during >= 40000
        assert after <= ALIGNMENT


def test_tensors_in_other_objects_keep_it_alive():
    def rank(group):
        before = held(group)
        parameter = torch.nn.Parameter(mk.empty(5000).fill_(1.0), requires_grad=False)
        during = held(group)
        storage = parameter.untyped_storage()
        del parameter
        still = held(group)
        del storage
        return during - before, still - before, held(group) - before

    for during, still, after in simulate(rank):
        assert during >= 10000
        assert still >= 10000
        assert after <= ALIGNMENT


def test_it_is_kept_until_the_last_rank_drops_it():
    def rank(group):
        before = held(group)
        kept = [mk.empty(5000)]
        if group.rank == 0:
            kept.clear()
        during = held(group)
        kept.clear()
        return during - before, held(group) - before

    for during, after in simulate(rank, gpus=3):
        assert during >= 10000
        assert after <= ALIGNMENT


def test_ranks_may_drop_in_different_orders():
    def rank(group):
        before = held(group)
        kept = [mk.empty(1000 * (i + 1)) for i in range(4)]
        sizes = []
        # another order on every rank; after each drop something is allocated
        for i in range(4):
            kept[(i + group.rank) % 4 if group.rank else 3 - i] = None
            sizes.append(held(group) - before)
        return sizes

    results = simulate(rank, gpus=3)
    assert all(sizes == results[0] for sizes in results), "the ranks disagree about what is left"
    assert results[0][-1] <= ALIGNMENT
    assert results[0] == sorted(results[0], reverse=True)


def test_many_short_lives_do_not_add_up():
    def rank(group):
        most = 0
        for size in range(40):
            x = mk.empty(1000 + size)
            most = max(most, group.heap.nbytes)
            del x
        return most

    assert max(simulate(rank)) < 12 * ALIGNMENT


def test_a_workspace_that_grows_replaces_the_old_one():
    def rank(group):
        sizes = [group.heap.nbytes]
        for half in (1024, 512, 4096, 2048, 4096, 16384):
            workspace = group.workspace("all_gather_matmul", 16, half)
            assert workspace.half_bytes >= half
            assert workspace.half(1).numel() == workspace.half_bytes
            sizes.append(group.heap.nbytes)
        return [size - sizes[0] for size in sizes[1:]]

    signals = ALIGNMENT
    assert simulate(rank)[0] == [signals + 2 * half for half in (1024, 1024, 4096, 4096, 4096, 16384)]


def test_a_workspace_never_shrinks_in_one_direction_to_grow_in_the_other():
    def rank(group):
        group.workspace("all_gather_matmul", 1000, 1024)
        workspace = group.workspace("all_gather_matmul", 10, 8192)
        assert workspace.signal_words == 1000
        same = group.workspace("all_gather_matmul", 1000, 8192)
        return same is workspace

    assert simulate(rank) == [True, True]


def test_operators_do_not_make_the_heap_grow():
    def rank(group):
        a, b = torch.randn(40, 32), torch.randn(32, 16)
        sizes = set()
        for _ in range(4):
            mk.all_gather_matmul(a, b)
            sizes.add(group.heap.nbytes)
        return len(sizes)

    assert simulate(rank) == [1, 1]


def test_close_gives_everything_back():
    def rank(group):
        part = group.split(0)
        x = mk.empty(100, group=part)
        mk.all_gather_matmul(torch.randn(8, 16), torch.randn(16, 8), group=part)
        before = part.heap.nbytes
        part.close()
        part.close()
        x.fill_(1.0)  # the tensor outlives its group
        assert x.sum() == 100
        with pytest.raises(mk.MKernelError, match="closed"):
            mk.empty(1, group=part)
        with pytest.raises(mk.MKernelError, match="closed"):
            mk.all_gather_matmul(torch.randn(8, 16), torch.randn(16, 8), group=part)
        del x
        return before > 0, part.heap.nbytes, mk.empty(3).shape

    assert simulate(rank) == [(True, 0, (3,))] * 2


@pytest.mark.parametrize("seed", range(3))
def test_different_sizes_are_refused_on_every_rank(seed):
    def rank(group):
        with pytest.raises(mk.ArgumentError) as caught:
            mk.empty(32 * (1 + group.rank))
        # and the group goes on
        return str(caught.value), mk.empty(5).shape

    for message, shape in simulate(rank, gpus=3, seed=seed):
        assert "same size on every rank" in message
        for number in range(3):
            assert f"{number}: {64 * (number + 1)} bytes" in message
        assert shape == (5,)


@pytest.mark.parametrize("size", [(-1,), (2, -3), (2.5,), ("3",), (None,), ((2, -1),), ([1.0],)])
def test_sizes_that_make_no_sense(size):
    def rank(group):
        with pytest.raises(mk.ArgumentError, match="size must be"):
            mk.empty(*size)

    simulate(rank, gpus=1)


def test_there_must_be_a_group():
    with pytest.raises(mk.MKernelError, match=r"mk\.init"):
        mk.empty(3)
    with pytest.raises(mk.MKernelError, match=r"must be a mk\.Group"):
        mk.empty(3, group="world")


def test_no_group_survives_its_cluster():
    groups = []

    def rank(group):
        groups.append(weakref.ref(group))
        part = group.split(group.rank % 2)
        groups.append(weakref.ref(part))
        x = mk.empty(8, 16)
        mk.all_gather_matmul(x.fill_(1.0), torch.ones(16, 8).bfloat16())
        mk.all_gather_matmul(x, torch.ones(16, 8).bfloat16(), group=part)
        return x

    kept = simulate(rank, nodes=2, gpus=2)
    gc.collect()
    assert len(groups) == 8
    assert [ref() for ref in groups] == [None] * 8
    assert all((x == 1).all() for x in kept)


def test_no_group_survives_a_failure():
    groups = []

    def rank(group):
        groups.append(weakref.ref(group))
        if group.rank == 1:
            raise ValueError("on purpose")
        group.barrier()

    def attempt():
        with pytest.raises(ValueError, match="on purpose"):
            simulate(rank, nodes=2, gpus=1)

    attempt()
    gc.collect()
    assert [ref() for ref in groups] == [None] * len(groups)


def proxies(group):
    return sum(isinstance(task, Proxy) for task in group.world.scheduler.tasks)


def test_a_closed_group_leaves_nothing_running():
    """Groups of several nodes have a network proxy, which must end with them."""

    def rank(group):
        group.barrier()
        before = proxies(group)
        for _ in range(3):
            part = group.split(0)
            part.close()
        seen = weakref.ref(part)
        del part
        gc.collect()
        group.barrier()
        return proxies(group) - before, seen() is None

    assert simulate(rank, nodes=2, gpus=1) == [(0, True)] * 2


def test_a_subgroup_ends_with_its_last_reference():
    def rank(group):
        part = group.split(0)
        seen = weakref.ref(part)
        x = mk.empty(8, group=part)
        del part
        gc.collect()
        x.fill_(2.0)
        return seen() is None, x.sum().item()

    assert simulate(rank) == [(True, 16.0)] * 2
