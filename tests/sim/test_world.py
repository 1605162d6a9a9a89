"""The simulated cluster: poison, streams, traffic, and the same run again in another process."""

import gc
import io
import os
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.patience import HANG

import mkernel as mk
from mkernel.sim import progress

from .harness import simulate

SOON = 1e-3


def workspace_of(group):
    (workspace,) = group._workspaces.values()
    return workspace


def in_a_new_process(source: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


# -- poison


def test_what_others_sent_is_poisoned_after_the_launch():
    """So a launch that reads its half too early reads NaN, not the rows of two epochs ago."""

    def rank(group):
        m, k = 8, 16
        for epoch in range(1, 5):
            mk.all_gather_matmul(torch.full((m, k), float(epoch)), torch.ones(k, 4))
            used = workspace_of(group).half(epoch % 2).view(torch.float32)[: group.size * m * k].view(group.size, -1)
            for source in range(group.size):
                if source != group.rank:
                    assert used[source].isnan().all()

    for nodes, gpus in ((1, 3), (3, 1)):
        simulate(rank, nodes=nodes, gpus=gpus)


def test_outputs_start_as_nan():
    assert simulate(lambda group: group.world.memory.empty(0, (3,), torch.bfloat16).isnan().all().item()) == [True]


# -- streams


def test_launches_of_a_stream_run_in_order_and_calls_return_at_once():
    def rank(group):
        a = torch.ones(8, 16)
        mk.all_gather_matmul(a, torch.ones(16, 4))
        results = []
        with group.world.stream(group.world_rank, "side"):
            mk.all_gather_matmul(a, torch.ones(16, 4))
            group.synchronize()
            for _ in range(3):
                results.append(mk.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 4)))
            early = any(result.isnan().any() for result in results)
        group.synchronize()
        return bool(early), [bool((result == 16).all()) for result in results]

    for seed in range(4):
        for early, right in simulate(rank, gpus=2, seed=seed):
            assert early
            assert right == [True] * 3


def test_launches_of_a_stream_may_share_their_tensors():
    def rank(group):
        a, b = torch.ones(8, 16), torch.ones(16, 4)
        with group.world.stream(group.world_rank, "side"):
            results = [mk.all_gather_matmul(a, b) for _ in range(3)]
        group.synchronize()
        return [bool((result == 16).all()) for result in results]

    assert simulate(rank, gpus=2) == [[True] * 3] * 2


def test_two_streams_have_their_own_workspaces():
    def rank(group):
        results = []
        for name in ("one", "two", "one", "two"):
            with group.world.stream(group.world_rank, name):
                results.append(mk.all_gather_matmul(torch.full((8, 16), group.rank + 1.0), torch.ones(16, 4)))
        group.synchronize()
        return len(group._workspaces), [result[::8, 0].tolist() for result in results]

    for seed in range(4):
        assert simulate(rank, gpus=2, seed=seed) == [(2, [[16.0, 32.0]] * 4)] * 2


def alone_on_a_stream(group) -> torch.Tensor | None:
    """Both ranks have used the stream before, so that rank 0's second call meets nobody until it is launched."""
    with group.world.stream(group.world_rank, "side"):
        mk.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 4))
        group.synchronize()
        if group.rank == 0:
            return mk.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 4))


def test_a_timeout_on_a_stream_is_told_by_synchronize():
    def rank(group):
        y = alone_on_a_stream(group)
        if y is not None:
            with pytest.raises(mk.CommTimeout, match="rank 0"):
                group.synchronize()
            return y[:8].isfinite().all().item(), y[8:].isnan().all().item()

    assert simulate(rank, gpus=2, timeout=SOON)[0] == (True, True)


def test_a_timeout_on_a_stream_is_not_lost():
    """Nobody synchronizes, so the end of the cluster must tell."""

    def rank(group):
        alone_on_a_stream(group)

    with pytest.raises(mk.CommTimeout, match="rank 0"):
        simulate(rank, gpus=2, timeout=SOON)


# -- traffic


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_bytes_are_counted_where_they_go(nodes, gpus):
    m, k, n = 8, 16, 4
    rows = m * k * 4

    def rank(group):
        mk.all_gather_matmul(torch.ones(m, k), torch.ones(k, n))
        group.barrier()
        return group.world.traffic

    traffic = simulate(rank, nodes=nodes, gpus=gpus)[0]
    size = nodes * gpus
    for source in range(size):
        for target in range(size):
            same_node, same_local = source // gpus == target // gpus, source % gpus == target % gpus
            pushed = rows * nodes if same_node and source != target else 0
            sent = rows if same_local and not same_node else 0
            assert traffic.nvlink[source][target] == pushed
            assert traffic.network[source][target] == sent
    assert len(set(traffic.multiplications)) == 1


# -- again

REPLAY = """
    import torch, mkernel as mk

    def rank(group):
        a, b = torch.full((40, 32), group.rank + 1.0), torch.ones(32, 24)
        mk.all_gather_matmul(a, b)
        return group.world.scheduler.steps, group.world.traffic.before_last_arrival

    print(mk.spawn(rank, nodes=2, gpus_per_node=2, device="cpu", seed=5))
"""


@pytest.mark.thorough
def test_a_seed_means_the_same_in_another_process():
    """Whatever the addresses of tensors and the order of sets are there."""
    first, second = (in_a_new_process(REPLAY, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert first.stdout, first.stderr
    assert first.stdout == second.stdout


SPIN = """
    import torch, triton, triton.language as tl
    import mkernel as mk
    from mkernel.runtime.world import Launch

    @triton.jit
    def spin(flag):
        while tl.load(flag) == 0:
            pass

    def rank(group):
        group.launch(Launch("all_gather_matmul", group, spin, 1, dict(flag=torch.zeros(1, dtype=torch.int64))))

    try:
        mk.spawn(rank, gpus_per_node=1, device="cpu")
    except mk.SimulatorError as error:
        print(error)
"""


def test_polling_with_plain_loads_ends_too(tmp_path):
    """It is wrong on a GPU as well, so it must be told and not hang."""
    script = tmp_path / "spin.py"
    script.write_text(textwrap.dedent(SPIN))
    try:
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HANG, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("the simulator hangs")
    assert "rank 0" in done.stdout, done.stderr
    assert "CTA 0" in done.stdout


def test_grad_mode_is_a_ranks_own():
    """torch keeps it per thread, and every rank has one."""

    def on_rank(group):
        before = torch.is_grad_enabled()
        with torch.set_grad_enabled(group.rank == 0):
            group.barrier()
            mk.all_gather_matmul(torch.ones(16, 16), torch.ones(16, 16))
            inside = torch.is_grad_enabled()
            group.barrier()
        return before, inside, torch.is_grad_enabled()

    expected = [(True, rank == 0, True) for rank in range(3)]
    assert mk.spawn(on_rank, nodes=1, gpus_per_node=3, device="cpu", seed=2) == expected
    assert torch.is_grad_enabled()


def test_inference_mode_is_a_ranks_own():
    def fn(group):
        before = torch.is_inference_mode_enabled()
        with torch.inference_mode(group.rank == 0):
            group.barrier()
            inside = torch.is_inference_mode_enabled()
            group.barrier()
        return before, inside, torch.is_inference_mode_enabled()

    assert mk.spawn(fn, gpus_per_node=2, device="cpu") == [(False, True, False), (False, False, False)]
    assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        assert mk.spawn(fn, gpus_per_node=2, device="cpu") == [(True, True, True), (True, False, True)]
        assert torch.is_inference_mode_enabled()


def test_operators_in_and_outside_of_inference_mode():
    """What they keep from call to call is written to in both."""

    def calls(group):
        a, q = torch.ones(4, 4), torch.ones(1, 1, 4, 64)
        ids, weights = torch.full((4, 1), group.rank), torch.ones(4, 1)
        y, handle = mk.moe_dispatch_matmul(a, ids, torch.ones(1, 4, 2))
        return [
            float(result.sum())
            for result in (
                mk.all_gather_matmul(mk.empty(4, 4, dtype=torch.float32).fill_(1), a),
                mk.matmul_reduce_scatter(a, a),
                mk.matmul_all_reduce(a, a),
                mk.ring_attention(q, q, q),
                mk.moe_combine(y, handle, weights),
                mk.moe_ffn(a, ids, weights, torch.ones(1, 4, 2), torch.ones(1, 1, 4)),
            )
        ]

    def fn(group):
        with torch.inference_mode():
            inside = calls(group)
        outside = calls(group)
        with torch.inference_mode():
            return inside == outside == calls(group)

    assert mk.spawn(fn, gpus_per_node=2, device="cpu") == [True, True]


def test_threads_simulate_one_after_the_other():
    def on_rank(group):
        return float(mk.all_gather_matmul(torch.ones(20, 20), torch.ones(20, 20)).sum())

    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(mk.spawn, on_rank, device="cpu", seed=seed) for seed in range(2)]
        assert [task.result() for task in done] == [[16000.0, 16000.0]] * 2


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_simulation_says_how_far_it_is(monkeypatch, terminal):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "NEXT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "STEPS", 1)
    mk.spawn(lambda group: mk.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 8)), device="cpu")
    assert ("launches done, in all_gather_matmul" in stream.getvalue()) == terminal
    assert stream.getvalue().endswith("\r\033[K" if terminal else "")


# -- nothing is kept


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_cluster_is_freed_when_nobody_holds_it(nodes):
    """Groups, their heaps and multicast addresses included: clusters of large problems do not fit twice."""

    def on_rank(group):
        a = torch.ones(8, 16, dtype=torch.bfloat16)
        mk.all_gather_matmul(a, torch.ones(16, 16, dtype=torch.bfloat16), group=group)
        mk.matmul_all_reduce(a, torch.ones(16, 16, dtype=torch.bfloat16), group=group)
        group.heap.tensor((64,), torch.float32)
        return weakref.ref(group.world), weakref.ref(group.heap.segments()[0][1].untyped_storage())

    kept = [reference for references in simulate(on_rank, nodes=nodes, gpus=2) for reference in references]
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)
