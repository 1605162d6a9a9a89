"""Several nodes on a GPU, in one process: requests from kernels, copies by native proxies.

These tests use a kernel of PyTorch for the first time only while none of ours waits for the network: see
docs/getting-started.md.
"""

import functools
import gc

import pytest
import torch
from harness import check, everyones, in_process, limited, randn

import mkernel as mk
import mkernel.net

pytestmark = pytest.mark.usefixtures("limited")
__all__ = ["limited"]

CLUSTERS = [(2, 1), (2, 2), (3, 2), (2, 4)]


def cuda(fn, *args, cluster=(2, 2), **kwargs):
    kwargs.setdefault("timeout", 10.0)
    return mk.spawn(fn, *args, nodes=cluster[0], gpus_per_node=cluster[1], device="cuda", **kwargs)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_shapes(cluster):
    def on_rank(group):
        assert (group.nodes, group.gpus_per_node) == cluster
        for m, n, k in [(256, 512, 256), (129, 257, 65), (1, 1, 1), (640, 384, 1024)]:
            a, b = randn(group, m, k), randn(group, k, n, seed=1)
            check(group, mk.all_gather_matmul(a, b), a, b)
        w = randn(group, n, k, seed=2)
        check(group, mk.all_gather_matmul(a, w.t()), a, w.t())

    cuda(on_rank, cluster=cluster)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_strides_and_gathered(dtype):
    def on_rank(group):
        m, n, k = 200, 264, 192
        a, b = randn(group, m, 2 * k, dtype=dtype)[:, ::2], randn(group, k, n, dtype=dtype, seed=1)
        y, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
        check(group, y, a, b)
        assert torch.equal(gathered.double(), everyones(group, a))

    cuda(on_rank)


def test_rows_in_the_heap_are_sent_from_where_they_are():
    def on_rank(group):
        x = mk.empty(3, 256, 256)
        b = randn(group, 256, 512, seed=1)
        for i in range(9):
            a = x[i % 3]  # at different places of the segment, and overwritten at once
            a.fill_(float("nan"))
            a.copy_(randn(group, 256, 256, seed=i))
            kept = a.clone()
            y = mk.all_gather_matmul(a, b)
            a.fill_(float("nan"))
            check(group, y, kept, b)

    cuda(on_rank)


@pytest.mark.parametrize("cluster", [(2, 2), (3, 1)])
def test_many_calls_without_synchronisation(cluster):
    def on_rank(group):
        inputs = []
        for i in range(40):
            m, n, k = [(256, 512, 256), (64, 128, 512), (130, 300, 72)][i % 3]
            inputs.append((randn(group, m, k, seed=i), randn(group, k, n, seed=100 + i)))
        group.synchronize()
        calls = [(mk.all_gather_matmul(a, b), a, b) for a, b in inputs]
        for y, a, b in calls:
            check(group, y, a, b)

    cuda(on_rank, cluster=cluster)


def test_late_rank_and_same_bits():
    def on_rank(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        results = []
        for i in range(6):
            if group.rank == i % group.size:
                torch.cuda._sleep(20_000_000)
            results.append(mk.all_gather_matmul(a, b))
        check(group, results[-1], a, b)
        assert all(torch.equal(results[0], other) for other in results)

    cuda(on_rank, cluster=(3, 2))


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_overtake_each_other(monkeypatch, seed):
    monkeypatch.setattr(
        mkernel.net, "LoopbackTransport", functools.partial(mkernel.net.LoopbackTransport, shuffle=seed)
    )

    def on_rank(group):
        for i in range(6):
            m, k = (512, 256) if i % 2 else (300, 64)
            a, b = randn(group, m, k, seed=i), randn(group, k, 256, seed=10 + i)
            check(group, mk.all_gather_matmul(a, b), a, b)

    cuda(on_rank)


@pytest.mark.parametrize("cluster", [(2, 2), (3, 2)])
def test_every_row_crosses_once(cluster):
    def on_rank(group):
        m, n, k, calls = 512, 256, 512, 3
        before = group.world.network.statistics(group)
        for i in range(calls):
            a, b = randn(group, m, k, seed=i), randn(group, k, n, seed=1)
            check(group, mk.all_gather_matmul(a, b), a, b)
        group.quiet()
        after = group.world.network.statistics(group)
        assert after.bytes - before.bytes == calls * (group.nodes - 1) * m * k * 2
        assert after.completions == after.requests

    cuda(on_rank, cluster=cluster)


def test_groups_across_nodes():
    def on_rank(group):
        across = group.split(group.rank % 2)
        assert (across.nodes, across.gpus_per_node) == (2, 1)
        a, b = randn(group, 192, 256), randn(group, 256, 320, seed=1)
        done = []
        for _ in range(4):
            done += [(on, mk.all_gather_matmul(a, b, group=on)) for on in (group, across)]
        for on, y in done:
            check(on, y, a, b)
        across.close()
        check(group, mk.all_gather_matmul(a, b, group=group), a, b)

    cuda(on_rank)


def test_paced_network_takes_its_time():
    def on_rank(group):
        a, b = randn(group, 2048, 4096), randn(group, 4096, 256, seed=1)
        mk.all_gather_matmul(a, b)
        group.synchronize()
        group.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100_000_000)  # 50 ms in which the hosts call: their time is not the network's
        start.record()
        y = mk.all_gather_matmul(a, b)
        end.record()
        check(group, y, a, b)
        return start.elapsed_time(end)

    times = cuda(on_rank, cluster=(2, 1), links=mk.Links(network=2.0, network_latency=5e-6))
    wire = 2048 * 4096 * 2 / 2e9 * 1e3
    assert wire * 0.98 <= min(times) <= max(times) < wire * 1.5


def test_memory_is_given_back():
    def on_rank(group):
        for i in range(3):
            x = mk.empty(1024, 1024)
            y = mk.all_gather_matmul(x.fill_(1), torch.ones(1024, 64 * (i + 1), device="cuda", dtype=x.dtype))
            group.synchronize()
            assert (y == 1024).all()
            del x, y
        group.close()

    cuda(on_rank)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        cuda(on_rank)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


LOST = """
    import time
    import pytest, torch
    from harness import check, randn
    import mkernel as mk

    def on_rank(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        check(group, mk.all_gather_matmul(a, b), a, b)
        group.barrier()
        if group.rank == 0:
            {fault}
        group.barrier()
        begun = time.monotonic()
        with pytest.raises((mk.CommTimeout, mk.TransportError)) as caught:
            for _ in range(3):  # a rank whose own requests are lost has all it needs for the first
                mk.all_gather_matmul(a, b)
                group.synchronize()
        took = time.monotonic() - begun
        again = group.subset(range(group.size))
        check(again, mk.all_gather_matmul(a, b, group=again), a, b)
        return type(caught.value).__name__, str(caught.value), took

    for kind, text, took in mk.spawn(on_rank, nodes=2, gpus_per_node=2, device="cuda", timeout=4.0):
        print(kind, f"{{took:.3f}} s", text)
        assert took < 7.0

    def afterwards(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        check(group, mk.all_gather_matmul(a, b), a, b)

    mk.spawn(afterwards, nodes=3, gpus_per_node=1, device="cuda", timeout=10.0)
    print("went on")
"""


def test_a_request_that_is_never_served():
    output = in_process(LOST.format(fault="group.world.network.connection(group).proxy.stop(0)"))
    assert "went on" in output, output
    assert output.count("CommTimeout") >= 4, output
    assert "rank 0's rows" in output, output


def test_a_network_that_fails():
    """Rank 0's memory is gone: its proxy fails, and that of rank 2, and their nodes hear of it at once."""
    output = in_process(LOST.format(fault="group.world.network.connection(group).transport.detach(1)"))
    assert "went on" in output, output
    told = [line for line in output.splitlines() if line.startswith("TransportError")]
    assert any("network proxy of rank 2: target: segment 1 is not attached on rank 0" in line for line in told), output
    assert all("What waited for it: all_gather_matmul: rank" in line for line in told), output


def test_what_follows_a_first_call_may_be_used_for_the_first_time():
    """The driver loads a kernel of PyTorch when it is used first, and waits for ours then, which wait for the
    network; and the network's proxy waits for the driver."""
    in_process("""
        import torch
        from harness import check, randn
        import mkernel as mk

        def on_rank(group):
            b = randn(group, 1024, 256, seed=1)
            for rows, function in ((1024, torch.erfinv), (512, torch.lgamma), (256, torch.digamma)):
                a = randn(group, rows, 1024)
                y = mk.all_gather_matmul(a, b)  # takes up to 0.2 s: the network is slow
                if group.rank == 1:
                    function(y)
                check(group, y, a, b)

        mk.spawn(on_rank, nodes=2, gpus_per_node=2, device="cuda", timeout=10.0, links=mk.Links(network=0.01))
    """)
