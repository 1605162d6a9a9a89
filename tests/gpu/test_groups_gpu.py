"""Groups beside each other, ranks that call different things, and ranks that are interrupted, on a GPU."""

import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from harness import check, limited, randn  # noqa: F401
from support.forked_processes import run_ranks

import mkernel as mk

sys.path.append(str(Path(__file__).parents[1] / "cluster"))
import test_faults
import test_process_groups

pytestmark = pytest.mark.usefixtures("limited")


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def cuda(fn, nodes=1, gpus_per_node=4, **options):
    return mk.spawn(fn, nodes=nodes, gpus_per_node=gpus_per_node, device="cuda", **options)


@pytest.mark.parametrize("nodes", [1, 2])
def test_threads_in_several_groups(nodes):
    def on_rank(group):
        groups = [group, group.split(group.rank // 2), group.split(group.rank % 2)]
        groups.append(group.subset([3, 1]) if group.rank % 2 else group.subset([0, 2]))
        groups.append(group.split(group.rank // 2, key=-group.rank))
        for turn in range(3):
            for place, each in enumerate(groups if turn % 2 else reversed(groups)):
                a, b = randn(group, 64, 64, seed=10 * turn + place), randn(group, 64, 64)
                check(each, mk.all_gather_matmul(a, b, group=each), a, b)
        for each in groups[1:]:
            each.close()
        a = randn(group, 64, 64)
        check(group, mk.all_gather_matmul(a, a), a, a)

    cuda(on_rank, nodes=nodes, gpus_per_node=4 // nodes)


@pytest.mark.parametrize("nodes", [1, 2])
def test_threads_that_call_something_else(nodes):
    def on_rank(group):
        for op in (mk.all_gather_matmul, mk.matmul_reduce_scatter, mk.matmul_all_reduce):
            good, known = randn(group, 64, 64), randn(group, 128, 64)
            before = op(good, good), op(known, good)
            for bad in (randn(group, 65, 64), known, randn(group, 192, 64)):
                with pytest.raises(mk.ArgumentError, match=r"rank 1|65"):
                    op(bad if group.rank == 1 else good, good)
                after = op(good, good), op(known, good)
                group.synchronize()
                assert all(torch.equal(one, other) for one, other in zip(before, after))
        with pytest.raises(mk.ArgumentError, match=r"matmul_all_reduce\(|all_gather_matmul\("):
            mk.matmul_all_reduce(good, good) if group.rank else mk.all_gather_matmul(good, good)
        with pytest.raises(mk.ArgumentError, match="same calls"):
            group.barrier() if group.rank else mk.all_gather_matmul(good, good)
        check(group, mk.all_gather_matmul(good, good), good, good)

    cuda(on_rank, nodes=nodes, gpus_per_node=4 // nodes)


@pytest.mark.parametrize("in_kernel", [True, False])
def test_an_interrupt_ends_all_threads(in_kernel):
    def on_rank(group):
        a = randn(group, 64, 64)
        check(group, mk.all_gather_matmul(a, a), a, a)
        if group.rank == 0:
            if not in_kernel:
                threading.Timer(1.0, interrupt).start()
                threading.Event().wait(4.0)
                return
            # launched by all others, which then spin
            group.world.launcher.start = lambda *_, start=group.world.launcher.start: start(*_) if _[0] else None
            threading.Timer(1.0, interrupt).start()
        mk.all_gather_matmul(a, a)
        group.synchronize()

    with pytest.raises(KeyboardInterrupt):
        cuda(on_rank, timeout=600.0)


def test_processes_in_meshes():
    program = test_process_groups.WORKS + test_process_groups.MESHES.format(shape=(2, 2), seed=1)
    test_process_groups.check(run_ranks(program, 4, seconds=100))


def test_processes_in_groups_made_in_any_order():
    test_process_groups.check(run_ranks(test_process_groups.WORKS + test_process_groups.ANY_ORDER, 4, seconds=100))


def test_processes_leave_nothing_behind():
    program = test_process_groups.WORKS + test_process_groups.IN_A_ROW.format(calls=20)
    test_process_groups.check(run_ranks(program, 4, seconds=100))


@pytest.mark.parametrize("gpus_per_node", [2, 1])
def test_processes_that_call_something_else(gpus_per_node):
    test_faults.test_a_rank_that_calls_something_else(gpus_per_node)


@pytest.mark.parametrize(("gpus_per_node", "seed"), [(2, 1), (2, 2), (1, 3)])
def test_processes_that_are_interrupted(gpus_per_node, seed):
    test_faults.test_interrupted(gpus_per_node, seed)
