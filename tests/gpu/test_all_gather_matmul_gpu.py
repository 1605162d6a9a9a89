"""all_gather_matmul on a GPU: several ranks share it."""

import gc
import time

import pytest
import torch
import triton
from harness import check, everyones, randn
from support.package_copies import copied

import mkernel as mk
import mkernel.ops
from mkernel.ops.all_gather_matmul import protocol
from mkernel.ops.all_gather_matmul.protocol import notify_chunk

SENTINEL = 12345.0


def cuda(fn, *args, ranks=2, **kwargs):
    kwargs.setdefault("timeout", 10.0)
    return mk.spawn(fn, *args, gpus_per_node=ranks, device="cuda", **kwargs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 512, 256), (129, 257, 65), (1, 1, 1), (7, 131, 8), (640, 384, 1024), (37, 1000, 333)]
)
def test_shapes(ranks, dtype, m, n, k):
    def on_rank(group):
        a, b = randn(group, m, k, dtype=dtype), randn(group, k, n, dtype=dtype, seed=1)
        check(group, mk.all_gather_matmul(a, b), a, b)
        w = randn(group, n, k, dtype=dtype, seed=2)
        check(group, mk.all_gather_matmul(a, w.t()), a, w.t())

    cuda(on_rank, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("m", "n", "k"), [(2048, 512, 1024), (1024, 2056, 136), (4096, 200, 64)])
def test_gathered_rows_of_the_kernel_for_hopper(ranks, m, n, k):
    def on_rank(group):
        a, w = randn(group, m, k), randn(group, n, k, seed=1)
        for b in (w.t(), w.t().contiguous()):
            y, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
            check(group, y, a, b)
            assert torch.equal(gathered.double(), everyones(group, a))

    cuda(on_rank, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_strides_out_and_gathered(ranks):
    def on_rank(group):
        m, n, k = 200, 264, 192
        a = randn(group, m, 2 * k)[:, ::2]
        b = randn(group, 2 * k, n + 1, seed=1)[::2, 1:]
        frame = torch.full((group.size * m + 2, n + 16), SENTINEL, device=group.device, dtype=a.dtype)
        out = frame[1:-1, 8:-8]
        y, gathered = mk.all_gather_matmul(a, b, out=out, return_gathered=True)
        assert y.data_ptr() == out.data_ptr()
        check(group, out, a, b)
        assert torch.equal(gathered.double(), everyones(group, a))
        border = frame.clone()
        border[1:-1, 8:-8] = SENTINEL
        assert (border == SENTINEL).all()
        transposed = torch.empty(n, group.size * m, device=group.device, dtype=a.dtype).t()
        mk.all_gather_matmul(a.t().contiguous().t(), b, out=transposed)
        check(group, transposed, a, b)

    cuda(on_rank, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_empty_inputs(ranks):
    def on_rank(group):
        for m, n, k in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
            y = mk.all_gather_matmul(randn(group, m, k), randn(group, k, n, seed=1))
            assert y.shape == (group.size * m, n)
            assert (y == 0).all()
        n = 0 if group.rank == 0 else 64
        a, b = randn(group, 64, 64), randn(group, 64, n, seed=1)
        check(group, mk.all_gather_matmul(a, b), a, b)

    cuda(on_rank, ranks=ranks)


def test_many_calls_without_synchronisation():
    def on_rank(group):
        calls = []
        for i in range(50):
            m, n, k = [(256, 512, 256), (64, 128, 512), (130, 300, 72)][i % 3]
            a, b = randn(group, m, k, seed=i), randn(group, k, n, seed=100 + i)
            calls.append((mk.all_gather_matmul(a, b), a, b))
        for y, a, b in calls:
            check(group, y, a, b)

    cuda(on_rank, ranks=4)


def test_same_bits_every_time():
    def on_rank(group):
        a, b = randn(group, 300, 512), randn(group, 512, 700, seed=1)
        results = [mk.all_gather_matmul(a, b) for _ in range(5)]
        group.synchronize()
        assert all(torch.equal(results[0], other) for other in results)

    cuda(on_rank, ranks=3)


def test_two_groups_and_two_streams():
    def on_rank(group):
        pair = group.split(group.rank % 2)
        streams = [torch.cuda.Stream() for _ in range(2)]
        ready = torch.cuda.current_stream()
        inputs = [(randn(group, 192, 256, seed=i), randn(group, 256, 320, seed=10 + i)) for i in range(10)]
        done = []
        for i, (a, b) in enumerate(inputs):
            stream = streams[i % 2]
            stream.wait_stream(ready)
            with torch.cuda.stream(stream):
                done.append((group, mk.all_gather_matmul(a, b, group=group), a, b))
                done.append((pair, mk.all_gather_matmul(a, b, group=pair), a, b))
        group.synchronize()
        for on, y, a, b in done:
            check(on, y, a, b)

    cuda(on_rank, ranks=4)


def test_late_rank():
    def on_rank(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        for i in range(5):
            if group.rank == i % group.size:
                torch.cuda._sleep(20_000_000)
            y = mk.all_gather_matmul(a, b)
        check(group, y, a, b)

    cuda(on_rank, ranks=3)


def test_captured_graph_is_replayed():
    def on_rank(group):
        stream = torch.cuda.current_stream()
        a, b = randn(group, 256, 128), randn(group, 128, 512, seed=1)
        out = torch.empty(group.size * 256, 512, device=group.device, dtype=a.dtype)
        mk.all_gather_matmul(a, b, out=out)
        group.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            mk.all_gather_matmul(a, b, out=out)
        for i in range(5):
            a.copy_(randn(group, 256, 128, seed=50 + i))
            graph.replay()
            mk.all_gather_matmul(a, b, out=out[:].view_as(out))  # eager calls in between count on
            check(group, out, a, b)

    cuda(on_rank, ranks=1)


def test_dead_peer_is_reported_and_the_others_go_on():
    def on_rank(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        check(group, mk.all_gather_matmul(a, b), a, b)
        if group.rank == 2:
            return None
        mk.all_gather_matmul(a, b)
        with pytest.raises(mk.CommTimeout) as caught:
            group.synchronize()
        record = caught.value.record
        assert record.op == "all_gather_matmul"
        assert record.rank == group.rank
        assert record.seen < record.expected
        with pytest.raises(mk.CommTimeout):
            mk.all_gather_matmul(a, b)
        left = group.subset([0, 1, 3])
        y = mk.all_gather_matmul(a, b, group=left)
        check(left, y, a, b)
        return record.peer

    peers = cuda(on_rank, ranks=4, timeout=1.0)
    assert set(peers) - {None} == {2}


def test_rank_that_ends_before_the_first_call_is_named():
    def on_rank(group):
        if group.rank == 1:
            return
        with pytest.raises(mk.CommTimeout) as caught:
            mk.all_gather_matmul(randn(group, 64, 64), randn(group, 64, 64, seed=1))
        assert (caught.value.record.peer, caught.value.record.signal) == (1, "call")

    cuda(on_rank, ranks=2, timeout=1.0)


def test_rank_that_stays_away_is_named():
    def on_rank(group):
        if group.rank == 1:
            time.sleep(2.0)
            return
        with pytest.raises(mk.CommTimeout, match="rank 1 to make the same call"):
            mk.all_gather_matmul(randn(group, 64, 64), randn(group, 64, 64, seed=1))

    cuda(on_rank, ranks=2, timeout=0.5)


@triton.jit
def notify_all_but_one(comm, gather, peer, source, chunk):
    if chunk != 1:
        notify_chunk(comm, gather, peer, source, chunk)


@pytest.mark.parametrize("kernel", ["portable", "hopper"])
def test_lost_signal_times_out_and_the_process_goes_on(tmp_path, kernel):
    config = None if kernel == "hopper" else mk.Config(stages=3)

    def on_rank(group, broken):
        a, b = randn(group, 512, 256), randn(group, 256, 512, seed=1)
        y = broken.all_gather_matmul(a, b, config=config)
        begun = time.monotonic()
        with pytest.raises(mk.CommTimeout) as caught:
            group.synchronize()
        assert time.monotonic() - begun < 3.0
        record = caught.value.record
        assert (record.signal, record.peer, record.index) == ("arrived", 1 - group.rank, 1)
        assert (record.seen, record.expected) == (0, 1)
        assert y.isnan().any()
        again = group.subset(range(group.size))
        check(again, mk.all_gather_matmul(a, b, group=again, config=mk.Config(stages=2)), a, b)

    with copied(tmp_path, "ops.all_gather_matmul", {protocol.notify_chunk: notify_all_but_one}) as broken:
        cuda(on_rank, broken, ranks=2, timeout=1.0)

    def afterwards(group):
        a, b = randn(group, 512, 256), randn(group, 256, 512, seed=1)
        check(group, mk.all_gather_matmul(a, b), a, b)

    cuda(afterwards, ranks=3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_for_hopper(ranks, dtype):
    """Ragged columns and depths, both layouts of b, and ranks of which some take the portable kernel."""

    def on_rank(group):
        for i, (m, n, k) in enumerate([(384, 136, 8), (256, 520, 200), (384, 2056, 1032), (128, 4096, 64)]):
            if i == 3 and group.rank == 0:
                n = 64
            a = randn(group, m, k, dtype=dtype, seed=i)
            w = randn(group, n, k, dtype=dtype, seed=10 + i)
            b = randn(group, k, n, dtype=dtype, seed=20 + i)
            assert ("Hopper" in str(mk.explain("all_gather_matmul", a, b))) == (n > 128)
            for _ in range(3):
                a.mul_(-1)
                one, two = mk.all_gather_matmul(a, b), mk.all_gather_matmul(a, w.t())
            check(group, one, a, b)
            check(group, two, a, w.t())

    cuda(on_rank, ranks=ranks)


def test_memory_is_given_back():
    def on_rank(group):
        for i in range(3):
            x = mk.empty(1024, 1024)
            y = mk.all_gather_matmul(x.fill_(1), torch.ones(1024, 64 * (i + 1), device="cuda", dtype=x.dtype))
            assert (y == 1024).all()
            del x, y
        group.close()

    cuda(on_rank)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        cuda(on_rank)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_paced_links_take_their_time():
    def on_rank(group):
        a, b = randn(group, 2048, 4096), randn(group, 4096, 256, seed=1)
        mk.all_gather_matmul(a, b)
        group.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        group.barrier()
        torch.cuda._sleep(100_000_000)  # 50 ms in which the hosts call: their time is not the link's
        start.record()
        y = mk.all_gather_matmul(a, b)
        end.record()
        check(group, y, a, b)
        return start.elapsed_time(end)

    times = cuda(on_rank, ranks=2, links=mk.Links(nvlink=5.0))
    wire = 2048 * 4096 * 2 / 5e9 * 1e3
    assert wire * 0.98 <= min(times) <= max(times) < wire * 1.5


def test_refusals_before_the_launch():
    def on_rank(group):
        a = randn(group, 64, 64)
        with pytest.raises(mk.ArgumentError, match="b is on cpu"):
            mk.all_gather_matmul(a, torch.zeros(64, 64, dtype=a.dtype))
        with pytest.raises(mk.ArgumentError, match=r"config\.ctas"):
            mk.all_gather_matmul(a, a, config=mk.Config(ctas=10_000))
        with pytest.raises(mk.ArgumentError, match=r"m=64,.*m=6[567],|m=6[567],.*m=64,"):
            mk.all_gather_matmul(randn(group, 64 + group.rank, 64), a)
        check(group, mk.all_gather_matmul(a, a), a, a)

    cuda(on_rank)
