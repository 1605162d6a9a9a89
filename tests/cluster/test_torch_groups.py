"""ProcessGroups, DeviceMeshes and names where a group is taken: made once, kept, and found again."""

from support.forked_processes import run_ranks

WORKS = """
    import os, timeit
    import torch
    import torch.distributed as dist
    from datetime import timedelta
    from support.open_handles import open_files_and_threads
    from support.patience import WAIT
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    import mkernel as mk
    from mkernel.runtime.group import current

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def start(times=0):
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        apart = dist.PrefixStore(f"started {times} times before", store)
        dist.init_process_group("gloo", store=apart, rank=rank, world_size=size, timeout=timedelta(seconds=WAIT))

    start()

    def works(group, ranks):
        '''The rows of these ranks of the job, and of no others, in their order.'''
        a = torch.full((3, 16), float(rank + 1))
        y = mk.all_gather_matmul(a, torch.eye(16), group=group)
        assert torch.equal(y[:, 5], torch.tensor([member + 1.0 for member in ranks]).repeat_interleave(3)), y[:, 5]
        return current(group)

    def refused(group, *parts):
        try:
            works(group, [])
        except mk.ArgumentError as refusal:
            for part in parts:
                assert part in str(refusal), (part, str(refusal))
        else:
            raise AssertionError(f"{group} was taken")

    def no_current_group():
        try:
            current()
        except mk.MKernelError as none:
            assert "no group yet" in str(none), none
        else:
            raise AssertionError("the current group has changed")
"""

END = """
    print("right on rank", rank)
    try:
        dist.barrier()
    except RuntimeError:
        pass  # a rank that is through may have ended, and closed its connections
"""

MESH = """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    tp, dp = rows[rank // 2], columns[rank % 2]
    refused(mesh, "2 dimensions", "('dp', 'tp')", "mesh['tp']")
    refused(init_device_mesh("cpu", (4, 1)), "2 dimensions", "mesh_dim_names")
    group = works(mesh["tp"], tp)
    no_current_group()
    process_group = mesh["tp"].get_group()
    for same in (mesh["tp"], process_group, process_group.group_name, group.group_name, group):
        assert works(same, tp) is group, same
    across = works(mesh["dp"].get_group().group_name, dp)  # made by its name
    assert works(mesh["dp"], dp) is across is not group
    assert mk.empty(4, 4, group=mesh["dp"]).shape == (4, 4)
    assert str(mk.explain("all_gather_matmul", torch.ones(3, 16), torch.eye(16), group=mesh["dp"]))
    flat = mesh[("dp", "tp")]._flatten()
    whole = works(flat, [0, 1, 2, 3])
    assert works(flat.get_group(), [0, 1, 2, 3]) is whole

    # another process group of the same ranks is another group, with another name
    another = [dist.new_group(members) for members in rows][rank // 2]
    again = works(another, tp)
    assert again is not group and again.group_name != group.group_name
    assert works(group.group_name, tp) is group and works(again.group_name, tp) is again

    # of what the ranks of one dimension are not in
    theirs = [dist.new_group(members) for members in rows][1 - rank // 2]
    refused(theirs, "not one of its ranks")
    pair = DeviceMesh("cpu", [0, 3], _init_backend=True)
    if rank in (0, 3):
        works(pair, [0, 3])
    else:
        refused(pair, "[0, 3]", f"rank {rank}")
    for wrong in (7, object(), process_group.group_name + "?", [0, 1], b"0"):
        refused(wrong, "group must be a mk.Group", "ProcessGroup", "DeviceMesh", "name", type(wrong).__name__)

    # a repeated call finds its group in a few microseconds
    names = [mesh["tp"], process_group, process_group.group_name]
    seconds = [min(timeit.repeat(lambda: current(name), number=200, repeat=20)) / 200 for name in names]
    assert max(seconds) < 100e-6, seconds
"""


def test_meshes_process_groups_and_names():
    check(run_ranks(WORKS + MESH + END, 4, store="apart"))


OVERLAPPING = """
    pairs = [[0, 1], [1, 2], [0, 2]]
    groups = [dist.new_group(pair) for pair in pairs]
    everyone = [0, 1, 2]
    made = {}
    for turn in range(2):  # the first turn makes them
        for pair, group in zip(pairs, groups):
            if rank in pair:
                found = works(group if turn else dist.distributed_c10d._get_process_group_name(group), pair)
                assert made.setdefault(tuple(pair), found) is found
            else:
                refused(group, "not one of its ranks")
        found = works(dist.group.WORLD, everyone)
        assert made.setdefault(tuple(everyone), found) is found
    assert len({id(group) for group in made.values()}) == 3
    for number in everyone:  # a process group of one rank
        alone = dist.new_group([number])
        if rank == number:
            assert works(alone, [rank]) is works(alone, [rank])
            assert current(alone).size == 1
"""


def test_overlapping_process_groups():
    check(run_ranks(WORKS + OVERLAPPING + END, 3, store="apart"))


INIT = """
    # what mk.init has made of a process group is its group, with what mk.init was told
    group = mk.init(timeout=WAIT, gpus_per_node=1)
    assert works(dist.group.WORLD, [0, 1]) is works(None, [0, 1]) is group and group.nodes == 2
    second = mk.init(timeout=WAIT)
    assert works(dist.group.WORLD, [0, 1]) is works("0", [0, 1]) is second and second.nodes == 1
    assert works(group.group_name, [0, 1]) is group and works(second.group_name, [0, 1]) is second
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for same in (mesh["tp"], mesh["tp"].get_group().group_name):
        assert mk.init(same, timeout=WAIT) is works(mesh["tp"], [0, 1])
    for wrong in (mesh, "nothing", 7, dist.GroupMember.NON_GROUP_MEMBER):
        try:
            mk.init(wrong)
        except mk.ArgumentError as refusal:
            assert str(refusal).startswith("process_group"), refusal
        else:
            raise AssertionError(wrong)
    mk.runtime.group.set_current(second)
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=WAIT / 2))
    third = works(pair, [0, 1])
    assert current() is second, "the current group has changed"
    assert third.timeout == WAIT / 2
    third.close()
    fourth = works(pair, [0, 1])
    assert fourth is not third
    works(second, [0, 1])
    works(group, [0, 1])
"""


def test_groups_of_init_and_closed_groups():
    check(run_ranks(WORKS + INIT + END, 2, store="apart"))


DESTROYED = """
    pair = dist.new_group([0, 1])
    works(pair, [0, 1])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["tp"]
    works(mesh, [0, 1])
    # what this rank has queued is waited for before the memory of a group is released
    released = []
    mk.Group.quiet, quiet = lambda group: (released.append(group.group_name), quiet(group)), mk.Group.quiet
    name = current(pair).group_name
    dist.destroy_process_group(pair)
    refused(pair, "destroyed")
    assert released == [name], released
    short = dist.new_group([0, 1])
    released[:], name = [], works(short, [0, 1]).group_name
    dist.destroy_process_group(short)
    assert not released
    del short
    assert released == [name], released
    names, counts = set(), []
    for turn in range(4):
        pair = dist.new_group([0, 1])
        for each in (pair, dist.group.WORLD):
            group = mk.init(each, gpus_per_node=1 + turn % 2, timeout=WAIT)
            assert works(each, [0, 1]) is works(each.group_name, [0, 1]) is group
            assert group.nodes == 2 - turn % 2
            names.add(group.group_name)
        mk.runtime.group.set_current(None)
        del group
        dist.barrier()
        if turn % 2:
            dist.destroy_process_group()
            refused(pair, "destroyed")
            refused(mesh, "destroyed")
            refused("0", "'0'")
            start(turn)
        else:
            dist.destroy_process_group(pair)
        del pair, each
        counts.append(open_files_and_threads())
    assert len(names) == 8, names
    assert counts[1] == counts[3], counts
"""


def test_destroyed_process_groups():
    check(run_ranks(WORKS + DESTROYED + END, 2, store="apart"))


SPAWN = """
    def on_rank(group):
        refused(dist.group.WORLD, "under mk.spawn", "group_name")
        part = group.split(group.rank % 2)
        assert current(part.group_name) is part
        return mk.all_gather_matmul(torch.full((1, 16), float(group.rank)), torch.eye(16), group=part.group_name)[:, 3]

    found = mk.spawn(on_rank, nodes=2, gpus_per_node=2, device="cpu")
    assert [each.tolist() for each in found] == [[0, 2], [1, 3]] * 2, found
    alone = works(dist.group.WORLD, [0])
    assert works(alone.group_name, [0]) is works("0", [0]) is alone
    no_current_group()
"""


def test_one_process_that_spawns():
    check(run_ranks(WORKS + SPAWN + END, 1, store="apart"))


def check(results):
    for rank, (output, code) in enumerate(results):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output
