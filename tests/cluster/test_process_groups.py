"""mk.init for parts of a job: sibling, overlapping and nested process groups, as tensor, data and pipeline parallelism
make them."""

import pytest
from support.forked_processes import run_ranks

WORKS = """
    import os, random
    import torch
    import torch.distributed as dist
    from support.open_handles import open_files_and_threads
    from support.patience import WAIT
    from torch.distributed.device_mesh import init_device_mesh
    import mkernel as mk

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    def works(group, ranks):
        '''The rows of these ranks of the job, and of no others, in their order.'''
        assert (group.size, group.rank) == (len(ranks), ranks.index(rank)), group
        for turn in range(2):
            a = torch.full((3, 16), float(100 * turn + rank + 1), device=group.device)
            y = mk.all_gather_matmul(a, torch.eye(16, device=group.device), group=group)
            group.synchronize()
            expected = torch.tensor([100.0 * turn + member + 1 for member in ranks]).repeat_interleave(3)
            assert torch.equal(y[:, 5].cpu(), expected), (ranks, y[:, 5], expected)

    def made_of(process_group):
        return mk.init(process_group, timeout=WAIT)
"""

MESHES = """
    shape = {shape}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp")[-len(shape):])
    groups = {{}}
    for name in random.Random({seed}).sample(mesh.mesh_dim_names, len(shape)):
        pg = mesh[name].get_group()
        groups[name] = made_of(pg), dist.get_process_group_ranks(pg)
        works(*groups[name])
    whole = made_of(None)
    for name, (group, ranks) in groups.items():
        works(group, ranks)
        works(whole, list(range(size)))
        part = whole.split(ranks[0])  # the same ranks, as a part of ours
        works(part, ranks)
        works(group, ranks)
    for group, _ in groups.values():
        group.close()
    works(whole, list(range(size)))
    whole.close()
    print("right on rank", rank)
"""


@pytest.mark.parametrize(("shape", "seed"), [((3, 2), 2), pytest.param((2, 2, 2), 3, marks=pytest.mark.thorough)])
def test_meshes(shape, seed):
    ranks = 1
    for size in shape:
        ranks *= size
    check(run_ranks(WORKS + MESHES.format(shape=shape, seed=seed), ranks))


ANY_ORDER = """
    mine, theirs = [[0, 1], [2, 3]][rank // 2], [[2, 3], [0, 1]][rank // 2]
    # made by some ranks only, and in another order on each half
    local = dict(use_local_synchronization=True)
    works(made_of(dist.new_group(mine, **local)), mine)
    if rank in (1, 2):
        works(made_of(dist.new_group([1, 2], **local)), [1, 2])
        works(made_of(dist.new_group([1, 2], **local)), [1, 2])
    # made by all, in the same order, used in another order on each half
    all_of_them = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    chosen = [pg for pg in all_of_them if dist.get_rank(pg) >= 0]
    for pg in chosen if rank < 2 else reversed(chosen):
        if dist.get_process_group_ranks(pg) in (mine,):
            works(made_of(pg), mine)
    for pg in all_of_them[2:]:
        if dist.get_rank(pg) >= 0:
            works(made_of(pg), dist.get_process_group_ranks(pg))
    # the same process group twice, and another one of the same ranks
    another = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    twice = [made_of(chosen[0]), made_of(chosen[0]), made_of(another)]
    for group in (*twice, *reversed(twice)):
        works(group, dist.get_process_group_ranks(chosen[0]))
    try:
        mk.init(all_of_them[1 - rank // 2])
        raise AssertionError("taken for a rank of another group")
    except mk.ArgumentError as refusal:
        assert "not one of its ranks" in str(refusal), refusal
    print("right on rank", rank)
    dist.barrier()
"""


def test_groups_made_in_any_order_and_by_some_ranks_only():
    check(run_ranks(WORKS + ANY_ORDER, 4))


IN_A_ROW = """
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = [[0, 1], [2, 3]][rank // 2]

    counts = []
    for turn in range(8):
        # sizes of nodes: shared memory, or TCP and a proxy
        group = mk.init(pairs[rank // 2], timeout=WAIT, gpus_per_node=1 if turn % 4 == 3 else None)
        works(group, mine)
        inner = group.subset([1, 0])
        works(inner, mine[::-1])
        inner.close()
        group.close()
        counts.append(open_files_and_threads())
    assert counts[3] == counts[-1], counts
    group = made_of(None)
    a, b = torch.ones(2, 16, device=group.device), torch.ones(16, 2, device=group.device)
    config = mk.Config(ctas=2)
    for _ in range({calls}):
        assert (mk.all_gather_matmul(a, b, group=group, config=config) == 16).all()
    group.close()
    assert counts[-1] == open_files_and_threads(), (counts[-1], open_files_and_threads())
    assert not [name for name in os.listdir("/dev/shm") if "mkernel" in name]
    print("right on rank", rank)
    dist.barrier()
"""


@pytest.mark.thorough
def test_groups_in_a_row_leave_nothing_behind():
    check(run_ranks(WORKS + IN_A_ROW.format(calls=200), 4))


def check(results):
    for rank, (output, code) in enumerate(results):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output
