"""Processes that die, are interrupted, late or forked: the others hear of it in time, say who it was, and go on."""

import re
import signal

import pytest
from support.forked_processes import run_ranks

LOST = """
    import os, signal, sys, time
    import torch
    from support.patience import HANG
    import mkernel as mk
    from mkernel.runtime import processes

    machine = int(os.environ["RANK"]) // {per_machine}  # as if there were so many ranks on a machine
    processes.host_name = lambda: f"machine {{machine}}"
    group = mk.init(timeout=2 * HANG, gpus_per_node={gpus_per_node})  # what is noticed is noticed without it
    a = torch.ones(16, 16)
    for _ in range(2):
        assert (mk.all_gather_matmul(a, a) == 16).all()
    group.barrier()  # a rank that is still in its call would rightly raise there

    def end():
        if {how!r} == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif {how!r} == "a bug":
            raise ValueError("a bug")
        os._exit(3)

    if group.rank == {victim} and {between_calls}:
        end()
    if group.rank == {victim}:
        group.confirm, confirm = (lambda: (confirm(), end())), group.confirm  # when all are about to launch
    try:
        while True:
            mk.all_gather_matmul(a, a)
    except (mk.CommTimeout, mk.TransportError) as failure:
        print("noticed:", type(failure).__name__, failure, flush=True)
    left = group.subset([rank for rank in range(group.size) if rank != {victim}])
    assert (mk.all_gather_matmul(a, a, group=left) == 16).all()
    print("went on: rank", group.rank, flush=True)
    store = torch.distributed.distributed_c10d._get_default_store()

    def until(what, count):
        while store.add(what, 0) < count:
            time.sleep(0.05)

    store.add("done", 1)
    until("done", group.size - 1)  # nobody leaves while another is still in the call
    if group.rank:
        store.add("left", 1)
        os._exit(0)
    until("left", group.size - 2)  # the store is in this process
"""


def lost(ranks, victim, gpus_per_node, per_machine, how="killed", between_calls=True):
    program = LOST.format(
        victim=victim, gpus_per_node=gpus_per_node, per_machine=per_machine, how=how, between_calls=between_calls
    )  # fmt: skip
    results = run_ranks(program, ranks)
    for rank, (output, code) in enumerate(results):
        if rank == victim:
            assert code == {"killed": -signal.SIGKILL, "a bug": 1, "exits": 3}[how], output
        else:
            assert code == 0, output
            assert "noticed:" in output, output
            assert f"went on: rank {rank}" in output, output
    return [output for output, _ in results]


def test_killed_in_one_node():
    outputs = lost(3, victim=1, gpus_per_node=3, per_machine=3)
    assert all("RankLost rank 1" in output for rank, output in enumerate(outputs) if rank != 1), outputs


@pytest.mark.parametrize("how", ["killed", "a bug", "exits"])
def test_lost_in_the_middle_of_a_call(how):
    outputs = lost(3, victim=2, gpus_per_node=3, per_machine=3, how=how, between_calls=False)
    for output in outputs[:2]:
        assert "RankLost rank 2" in output, outputs


@pytest.mark.parametrize("between_calls", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_killed_on_another_machine(between_calls):
    """Its counterpart hears of it from the network, its neighbour from the system, the others from these two."""
    outputs = lost(4, victim=3, gpus_per_node=2, per_machine=2, between_calls=between_calls)
    assert "RankLost rank 3" in outputs[2], outputs
    assert "TransportError" in outputs[1] or "RankLost rank 3" in outputs[1], outputs
    assert all("rank 3" in output for output in outputs[:3]), outputs


INTERRUPTED = """
    import os, random, signal, threading
    import torch
    from support.patience import HANG
    import mkernel as mk

    group = mk.init(timeout=2 * HANG, gpus_per_node={gpus_per_node})
    a = torch.ones(16, 16, device=group.device)
    mk.all_gather_matmul(a, a)
    try:
        if group.rank == 1:
            pause = random.Random({seed}).uniform(0.0, 0.5)  # so that it comes in the middle of anything
            threading.Timer(pause, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            mk.all_gather_matmul(a, a)
    except BaseException as failure:
        print("ended:", type(failure).__name__, failure, flush=True)
    try:
        mk.all_gather_matmul(a, a)
    except mk.MKernelError as failure:
        print("stays broken:", failure, flush=True)
    store = torch.distributed.distributed_c10d._get_default_store()
    if group.rank:
        store.set("done", "1")
    else:
        store.wait(["done"])  # it is in this process
"""


@pytest.mark.parametrize(("gpus_per_node", "seed"), [(2, 1), (2, 2), (2, 3), (1, 4)])
def test_interrupted(gpus_per_node, seed):
    (zero, code), (one, other) = run_ranks(INTERRUPTED.format(gpus_per_node=gpus_per_node, seed=seed), 2)
    assert (code, other) == (0, 0), zero + one
    assert "ended: KeyboardInterrupt" in one, one
    assert "ended: RankLost rank 1 is lost" in zero or "ended: TransportError" in zero, zero
    assert "KeyboardInterrupt" in zero or gpus_per_node == 1, zero
    assert "rank 1" in zero, zero
    assert zero.count("stays broken") == one.count("stays broken") == 1, zero + one


LATE = """
    import logging
    from datetime import timedelta
    import torch
    from support.patience import HANG
    import mkernel as mk
    from mkernel.runtime import store_exchange

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=HANG + 1))
    store = torch.distributed.distributed_c10d._get_default_store()
    group = mk.init()
    assert group.timeout == HANG + 1, group.timeout
    a = torch.ones(16, 16)
    mk.all_gather_matmul(a, a)
    torch.distributed.barrier()

    class Told(logging.Handler):
        def emit(self, record):
            print("logged:", record.getMessage(), flush=True)
            store.set(f"rank {group.rank} has logged", "1")

    logging.getLogger("mkernel").addHandler(Told())
    usual, store_exchange.WARN_SECONDS = store_exchange.WARN_SECONDS, 1.0
    if group.rank == 1:
        store.wait(["rank 0 has logged"])  # a checkpoint
    assert (mk.all_gather_matmul(a, a) == 16).all()
    store_exchange.WARN_SECONDS = usual
    part = torch.distributed.new_group([0, 1], timeout=timedelta(seconds=HANG + 2))
    assert mk.init(part).timeout == HANG + 2
    assert mk.init(part, timeout=HANG + 3).timeout == HANG + 3
    print("right on rank", group.rank, flush=True)
    torch.distributed.barrier()
"""


def test_a_late_rank_is_waited_for_and_named():
    (zero, code), (one, other) = run_ranks(LATE, 2)
    assert (code, other) == (0, 0), zero + one
    assert "right on rank 0" in zero, zero
    assert "right on rank 1" in one, one
    assert zero.count("logged: ") == 1, zero
    assert re.search(r"logged: all_gather_matmul: rank 0 has waited \d+ s for rank 1 to make the same call", zero), zero
    assert "logged:" not in one, one


PATIENT = """
    import time
    from types import SimpleNamespace
    import torch
    from support.patience import WAIT
    import mkernel as mk
    from mkernel.sim import scheduler

    passed = 0  # seconds by which the clock of this rank's kernels is ahead
    scheduler.time = SimpleNamespace(
        monotonic=lambda: time.monotonic() + passed,
        monotonic_ns=lambda: time.monotonic_ns() + passed * 10**9,
        sleep=time.sleep,
    )
    group = mk.init(timeout=WAIT)
    a = torch.ones(16, 16)
    mk.all_gather_matmul(a, a)

    def later():
        global passed
        confirm()
        passed += int(2 * WAIT)
        if group.rank:
            time.sleep(0.5)  # so that the other one waits, and looks at its clock

    group.confirm, confirm = later, group.confirm
    # after the ranks have agreed: of the host's time no wait of a kernel may be charged
    assert (mk.all_gather_matmul(a, a) == 16).all()
    assert passed
    print("patient: rank", group.rank, flush=True)
    group.barrier()
    group.close()
    torch.distributed.destroy_process_group()
"""


def test_a_wait_is_as_long_as_it_lasts():
    for rank, (output, code) in enumerate(run_ranks(PATIENT, 2)):
        assert code == 0, output
        assert f"patient: rank {rank}" in output, output


ONE_MORE_ROW = """
    import torch
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    for op in (mk.all_gather_matmul, mk.matmul_reduce_scatter, mk.matmul_all_reduce):
        good = torch.ones(16, 16, device=group.device)
        known = torch.ones(32, 16, device=group.device)
        before = op(good, good), op(known, good)
        for bad in (torch.ones(17, 16, device=group.device), known, good.bfloat16()):
            try:
                op(bad if group.rank == 1 else good, good.to(bad.dtype) if group.rank == 1 else good)
                raise SystemExit(f"{{op.__name__}}: rank {{group.rank}} was given something")
            except mk.ArgumentError as refusal:
                assert "rank 1" in str(refusal) or group.rank == 1, refusal
            assert torch.equal(op(good, good), before[0]), "the group can be used again"
            assert torch.equal(op(known, good), before[1])
    try:  # another operator, known to all
        mk.matmul_all_reduce(good, good) if group.rank else mk.all_gather_matmul(good, good)
        raise SystemExit("nobody noticed")
    except mk.ArgumentError as refusal:
        assert "matmul_all_reduce(" in str(refusal) and "all_gather_matmul(" in str(refusal), refusal
    assert torch.equal(op(good, good), before[0])
    group.close()
    print("right on rank", group.rank, flush=True)
    torch.distributed.barrier()
"""


@pytest.mark.parametrize("gpus_per_node", [2, 1])
def test_a_rank_that_calls_something_else(gpus_per_node):
    for rank, (output, code) in enumerate(run_ranks(ONE_MORE_ROW.format(gpus_per_node=gpus_per_node), 2)):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


FORKED = """
    import multiprocessing, os, sys, warnings
    import torch
    from support.patience import WAIT
    import mkernel as mk

    warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
    group = mk.init(timeout=WAIT, gpus_per_node=1)
    a = torch.full((16, 16), float(group.rank))
    x = mk.empty(4, 16, dtype=torch.float32)

    def expected(words, act):
        try:
            act()
        except mk.MKernelError as refusal:
            assert words in str(refusal), refusal
        else:
            raise AssertionError("taken")

    def child():
        for act in (
            lambda: mk.all_gather_matmul(a, a), lambda: mk.empty(3), group.barrier, group.synchronize, group.close,
            lambda: group.split(0), lambda: group.subset([0, 1]), lambda: mk.explain("all_gather_matmul", a, a),
        ):  # fmt: skip
            expected("which forked this one", act)
        expected("had called torch.distributed.init_process_group", mk.init)
        connection = group.world.network.connection(group)
        expected("belongs to process", lambda: connection.transport.attach(77, torch.zeros(8)))
        expected("belongs to process", lambda: connection.proxy.stop(1.0))

    before = mk.all_gather_matmul(a, torch.eye(16))
    for leave in (sys.exit, os._exit):
        process = os.fork()
        if not process:
            try:
                child()
            except BaseException as failure:
                print("child:", type(failure).__name__, failure, flush=True)
                os._exit(1)
            leave(0)
        assert os.waitpid(process, 0)[1] == 0
        assert torch.equal(mk.all_gather_matmul(a, torch.eye(16)), before)
    group.barrier()
    group.close()
    print("right on rank", group.rank, flush=True)
    torch.distributed.barrier()
"""


@pytest.mark.thorough
def test_a_forked_child_is_refused_and_the_parent_goes_on():
    for rank, (output, code) in enumerate(run_ranks(FORKED, 2, forked=False)):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


LATE_FAILURE = """
    import torch
    from support.patience import WAIT
    import mkernel as mk
    from mkernel.runtime import tuned

    torch.distributed.init_process_group("gloo")
    connections = []

    def failing(group):
        connections.append(group.world.network.connections)
        assert len(connections[0]) == 1
        raise ValueError("something")

    usual, tuned.table_of = tuned.table_of, failing
    try:
        mk.init(timeout=WAIT, gpus_per_node=1, transport="tcp")
        raise SystemExit("made")
    except ValueError as failure:
        assert str(failure) == "something", failure
    assert connections == [{}]
    torch.distributed.barrier()
    tuned.table_of = usual
    group = mk.init(timeout=WAIT, gpus_per_node=1, transport="tcp")
    group.close()
    print("right on rank", torch.distributed.get_rank())
    torch.distributed.barrier()
"""


def test_a_group_that_fails_late_leaves_no_connection_and_can_be_made_again():
    (zero, code), (one, other) = run_ranks(LATE_FAILURE, 2)
    assert (code, other) == (0, 0), zero + one
    assert "right on rank 0" in zero, zero
    assert "right on rank 1" in one, one


INTERRUPTED_EARLY = """
    import torch
    from support.patience import WAIT
    import mkernel as mk
    from mkernel.runtime.cpu_processes import SharedMemory

    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 0:
        def interrupted(*_):
            raise KeyboardInterrupt
        SharedMemory.allocate = interrupted
    try:
        mk.init(timeout=WAIT)
        raise SystemExit("made")
    except (KeyboardInterrupt, mk.MKernelError) as failure:
        print("raised:", type(failure).__name__, failure, flush=True)
    torch.distributed.barrier()
"""


def test_an_interrupt_before_the_group_has_memory():
    """There is no abort flag to raise yet, but the others hear of it all the same."""
    (zero, code), (one, other) = run_ranks(INTERRUPTED_EARLY, 2)
    assert (code, other) == (0, 0), zero + one
    assert "raised: KeyboardInterrupt" in zero, zero
    assert "raised: RankLost rank 0 is lost: it left mk.init on KeyboardInterrupt" in one, one
