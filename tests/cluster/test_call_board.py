"""Processes that compare their calls on the board: without the store as long as they agree, and as before where they do
not."""

import pytest
from support.forked_processes import run_ranks

START = """
    import os, signal, sys, time
    import torch
    import mkernel as mk
    from mkernel.runtime import call_board, processes
    from support.patience import HANG, WAIT

    used = []  # what this rank has done with the store

    class Counted:
        def __init__(self, store):
            self._store = store
        def __getattr__(self, name):
            used.append(name)
            return getattr(self._store, name)

    def count(group):
        messages = group.world.exchange.messages
        if not isinstance(messages.store, Counted):
            messages.store = Counted(messages.store)
        used.clear()

    def refused(words, act):
        try:
            act()
        except mk.ArgumentError as refusal:
            assert all(word in str(refusal) for word in words), refusal
        else:
            raise SystemExit("not refused")

    def board_of(group):
        return group.world.exchange._boards.get(group.name)
"""

END = """
    print("right on rank", os.environ["RANK"], flush=True)
    torch.distributed.barrier()
"""


def assert_right(program, ranks, **how):
    for rank, (output, code) in enumerate(run_ranks(START + program + END, ranks, **how)):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


MACHINES = """
    processes.host_name = lambda: "machine " + {hosts!r}[int(os.environ["RANK"])]
"""

AGREE = """
    group = mk.init(timeout=WAIT)
    assert board_of(group) is not None
    good, known = torch.ones(16, 16), torch.ones(32, 16)
    for a in (good, known, good, known):
        mk.all_gather_matmul(a, good)
    count(group)
    for a in (good, known, known, good):
        assert (mk.all_gather_matmul(a, good) == 16).all()
    assert not used, used
    for i in range(600):  # calls alternate, and with them what a record is overwritten with
        group.agree("all_gather_matmul", call=i % 3)
        if i == 3:
            count(group)
        group.confirm()
    assert not used, used
    group._call = None
    group.barrier()
    assert used
"""


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aab", pytest.param("abab", marks=pytest.mark.thorough)])
def test_known_calls_that_agree_do_not_use_the_store(hosts):
    assert_right((MACHINES if "b" in hosts else "").format(hosts=hosts) + AGREE, len(hosts))


DIFFER = """
    group = mk.init(timeout=WAIT)
    good, known = torch.ones(16, 16), torch.ones(32, 16)
    mine = known if group.rank == 1 else good

    def call(a=good):
        assert (mk.all_gather_matmul(a, good) == 16).all()

    def usable():
        count(group)
        for a in (good, known):
            call(a)
        assert not used, used

    call(known), call()
    for _ in range(2):
        refused(["all_gather_matmul(m=16,", "all_gather_matmul(m=32,", "rank 1"], lambda: call(mine))
        usable()
    for times in (1, 2, 3, 4):  # a rank refuses its arguments, also several times in a row
        for _ in range(times):
            if group.rank == 2:
                refused(["dtype"], lambda: mk.all_gather_matmul(good, good.bfloat16()))
            else:
                refused(["rank 2 refused its call of all_gather_matmul", "dtype"], call)
        usable()
    for act in (group.barrier, lambda: mk.matmul_all_reduce(good, good), lambda: call(torch.ones(17, 16))):
        for slow in (0, 1):  # one waits in the store, the others on the board, in either order
            if (group.rank == 0) == slow:
                time.sleep(0.3)
            refused(["rank"], act if group.rank == 0 else call)
        usable()
    # refused while the others are still busy with what all have confirmed
    for round in range(3):
        call()
        if group.rank == 0:
            time.sleep(0.1)
            call()
        else:
            call()
        for _ in range(2):
            if group.rank:
                refused(["dtype"], lambda: mk.all_gather_matmul(good, good.bfloat16()))
            else:
                refused(["refused its call"], call)
        usable()
    if group.rank == 1:
        time.sleep(2)  # late
    count(group)
    call()
    assert set(used) <= {{"check"}}, used  # now and then: are the others still there?
    group.close()
    assert board_of(group) is None
"""


@pytest.mark.thorough
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_calls_that_differ_are_named_and_the_group_stays_usable(hosts):
    assert_right((MACHINES if "b" in hosts else "").format(hosts=hosts) + DIFFER.format(), 3)


SUBGROUPS = """
    def files():
        return len(os.listdir("/proc/self/fd")), open("/proc/self/maps").read().count("mkernel calls")

    world = mk.init(timeout=WAIT)
    a = torch.ones(16, 16)
    world.barrier()
    before = files()
    assert before[1] == world.size
    pair = world.subset([0, 1]) if world.rank < 2 else None
    alone = world.subset([world.rank])
    other = world.split(world.rank % 2)
    torch.distributed.barrier()
    groups = [group for group in (world, pair, alone, other, world.subset([2, 1, 0])) if group is not None]
    assert all((board_of(group) is None) == (group.size == 1) for group in groups)
    for group in groups:
        mk.all_gather_matmul(a, a, group=group)
    numbers = [group._exchanges for group in groups]
    count(world)
    for i in range(6):
        for group in groups[::-1] if i % 2 else groups:
            assert (mk.all_gather_matmul(a, a, group=group) == 16).all()
    assert not used, used
    taken = [group._exchanges - before for group, before in zip(groups, numbers)]
    assert taken == [0 if group.size == 1 else 6 for group in groups], taken
    if pair is not None:
        refused(["barrier"], pair.barrier if pair.rank else lambda: mk.all_gather_matmul(a, a, group=pair))
        assert (mk.all_gather_matmul(a, a, group=pair) == 16).all()
    # a forked child leaves the board of its parent alone
    world.agree("all_gather_matmul", forked=True)
    record = [bytes(page) for page in board_of(world)._pages.values()]
    torch.distributed.barrier()
    child = os.fork()
    if not child:
        try:
            world.confirm()
        except mk.MKernelError as refusal:
            os._exit(0 if "which forked this one" in str(refusal) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    torch.distributed.barrier()
    assert record == [bytes(page) for page in board_of(world)._pages.values()]
    torch.distributed.barrier()
    world.confirm()
    world._call = None
    torch.distributed.barrier()
    world.barrier()
    for group in (pair, alone):
        if group is not None:
            group.close()
    del group, groups, pair, alone, other  # some are not closed
    import gc
    gc.collect()
    assert files()[1] == before[1], files()
    world.close()
    assert files()[1] == 0, files()
    gc.collect()
    assert files()[0] <= before[0], (before, files())
"""


FILES = """
    group = mk.init(timeout=WAIT)
    before = len(os.listdir("/proc/self/fd"))
    groups = [group.subset([0, 1, 2]) for _ in range(5)]
    x = [mk.empty(16) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) <= before + 5 + 5
    for each in groups:
        each.close()
"""


def test_a_group_or_a_tensor_takes_one_file_descriptor_however_many_ranks_share_it():
    assert_right(FILES, 3)


def test_subgroups_have_boards_of_their_own_and_leave_nothing_behind():
    assert_right(SUBGROUPS, 3)


NONE = """
    from mkernel.runtime import connect
    if {what!r} == "connect.listen":
        processes.host_name = lambda: f"machine {{int(os.environ['RANK']) // 2}}"
    if os.environ["RANK"] == "1":
        usual = {what}
        def failing(first, *rest):
            # other files, and the transports of operators, can be had
            if {what!r} == "os.memfd_create" and first != "mkernel calls":
                return usual(first, *rest)
            if {what!r} == "connect.listen" and rest[0].streams > 1:
                return usual(first, *rest)
            raise {error}("not allowed")
        {what} = failing
    group = mk.init(timeout=WAIT)
    assert board_of(group) is None
    assert "mkernel calls" not in open("/proc/self/maps").read()
    a = torch.ones(16, 16)
    mk.all_gather_matmul(a, a)
    count(group)
    assert (mk.all_gather_matmul(a, a) == 16).all()
    assert "set" in used, "as before"
    refused(["barrier"], group.barrier if group.rank else lambda: mk.all_gather_matmul(a, a))
    assert (mk.all_gather_matmul(a, a) == 16).all()
    group.close()
"""


@pytest.mark.parametrize(
    ("error", "what"),
    [
        ("mk.TransportError", "connect.listen"),
        pytest.param("PermissionError", "call_board._map_page", marks=pytest.mark.thorough),
        pytest.param("OSError", "os.memfd_create", marks=pytest.mark.thorough),
    ],
)
def test_without_a_board_the_store_serves(error, what):
    assert_right(NONE.format(error=error, what=what), 3)


FOREIGN = """
    from mkernel.runtime import liveness
    mapped = call_board._map_page
    # as in another PID namespace: the numbers lead to a file of the right size, but not to the page
    call_board._map_page = lambda process, handle, *rest: mapped(process, liveness.presence().handle, *rest)
    group = mk.init(timeout=WAIT)
    assert board_of(group) is None
    a = torch.ones(16, 16)
    for _ in range(2):
        assert (mk.all_gather_matmul(a, a) == 16).all()
    group.close()
"""


def test_another_file_is_not_taken_for_the_page():
    assert_right(FOREIGN, 2)


MISSING = """
    group = mk.init(timeout=2 * HANG)
    a = torch.ones(16, 16)
    for _ in range(2):
        mk.all_gather_matmul(a, a)
    store = torch.distributed.distributed_c10d._get_default_store()
    torch.distributed.barrier()
    count(group)
    if group.rank == 1:
        while store.add("waiting", 0) < 2:
            time.sleep(0.05)
        time.sleep(0.2)
        if {dies}:
            os.kill(os.getpid(), signal.SIGKILL)
        while store.add("done", 0) < 2:
            time.sleep(0.05)
        os._exit(0)
    store.add("waiting", 1)
    if not {dies}:
        group.timeout = 1.5
    begun = time.monotonic()
    try:
        mk.all_gather_matmul(a, a)
        raise SystemExit("rank 1 has not called this")
    except mk.MKernelError as late:
        print("raised:", type(late).__name__, late, flush=True)
        assert "rank 1" in str(late), late
        if not {elsewhere} or not {dies}:  # the network notices that a rank of another machine is gone
            assert isinstance(late, mk.CommTimeout)
            assert late.record.peer == 1, late.record
            assert [record.peer for record in late.records] == [1]
            assert {dies} or 1.5 <= late.record.seconds < 60, late.record
    assert used.count("set") <= 1, used  # the report that the group is broken
    assert time.monotonic() - begun < 60
    store.add("done", 1)
    while store.add("done", 0) < 2:
        time.sleep(0.05)
    os._exit(0)
"""


@pytest.mark.parametrize(("dies", "hosts"), [(True, "aaa"), (False, "aaa"), (True, "aba"), (False, "aba")])
def test_a_rank_that_does_not_reach_the_board_is_named(dies, hosts):
    machines, elsewhere = MACHINES.format(hosts=hosts) if "b" in hosts else "", "b" in hosts
    results = run_ranks(START + machines + MISSING.format(dies=dies, elsewhere=elsewhere), 3, store="apart")
    for rank, (output, code) in enumerate(results):
        if rank == 1:
            assert code == (-9 if dies else 0), output
        else:
            assert code == 0, output
            how = ("RankLost rank 1 is lost" if hosts == "aaa" else "") if dies else "CommTimeout"
            assert f"raised: {how}" in output, output
