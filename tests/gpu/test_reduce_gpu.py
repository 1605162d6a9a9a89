"""matmul_reduce_scatter and matmul_all_reduce on a GPU: several ranks share it.

`pytest tests/gpu/test_reduce_gpu.py -k one_node` needs no network; the others are in `two_nodes`.
"""

import time

import pytest
import torch
import triton
import triton.language as tl
from support.package_copies import copied

import mkernel as mk
from mkernel.ops.reduce import protocol
from mkernel.ops.reduce.all_reduce import plan as all_reduce_plan

SENTINEL = 12345.0
CLUSTERS = [(1, 1), (1, 2), (1, 3), (1, 4)]
NODES = [(2, 1), (2, 2), (2, 4)]


def randn(group, *shape, dtype=torch.bfloat16, seed=0, common=False):
    number = 1000 * seed + (999 if common else group.rank)
    generator = torch.Generator(group.device).manual_seed(number)
    return torch.randn(*shape, device=group.device, dtype=torch.float32, generator=generator).to(dtype)


def spawn(fn, *args, cluster=(1, 4), **kwargs):
    kwargs.setdefault("timeout", 10.0)
    return mk.spawn(fn, *args, nodes=cluster[0], gpus_per_node=cluster[1], device="cuda", **kwargs)


def check(group, y, a, b, *, bias=None, residual=None, reduce_dtype=None):
    """y against float64, within the documented bound: every part that travels is rounded once, and once more
    in a node's sum; fp32 sums of k terms are rounded at every term."""
    torch.cuda.current_stream().synchronize()
    parts = [(x.double() @ w.double()).to(group.device) for x, w in group.exchange("inputs", (a, b))]
    sizes = [(x.double().abs() @ w.double().abs()).to(group.device) for x, w in group.exchange("inputs", (a, b))]
    group.synchronize()
    rows = a.shape[0] // group.size
    scattered = y.shape[0] != a.shape[0] or group.size == 1
    mine = slice(group.rank * rows, (group.rank + 1) * rows) if scattered else slice(None)
    exact, travelled, magnitude = (sum(tensors)[mine] for tensors in (parts, [part.abs() for part in parts], sizes))
    for more in (bias, residual):
        if more is not None:
            exact = exact + more.double()
    half = torch.finfo(reduce_dtype or a.dtype).eps / 2
    k = group.size * a.shape[1] + group.size + 2
    bound = 2 * half * travelled * 1.01 + torch.finfo(y.dtype).eps * exact.abs() + k * 2**-23 * magnitude + 1e-30
    error = (y.double() - exact).abs()
    assert bool((error <= bound).all()), f"rank {group.rank}: error {(error - bound).max().item()} over the bound"
    if not scattered:
        assert all(torch.equal(y, other.to(group.device)) for other in group.exchange("y", y)), "bits differ"


SHAPES = [(256, 512, 256), (129, 257, 65), (1, 1, 1), (7, 131, 8), (640, 384, 512), (37, 1000, 333), (300, 2560, 96)]


def call_all(group, rows, n, k, dtype):
    m = rows * group.size
    a, b = randn(group, m, k, dtype=dtype), randn(group, k, n, dtype=dtype, seed=1)
    check(group, mk.matmul_reduce_scatter(a, b), a, b)
    w = randn(group, n, k, dtype=dtype, seed=2)
    bias, residual = randn(group, n, dtype=dtype, seed=3, common=True), randn(group, rows, n, dtype=dtype, seed=4)
    y = mk.matmul_reduce_scatter(a, w.t(), bias=bias, residual=residual)
    check(group, y, a, w.t(), bias=bias, residual=residual)
    y = mk.matmul_reduce_scatter(a, w.t(), reduce_dtype=torch.float32)
    check(group, y, a, w.t(), reduce_dtype=torch.float32)
    residual = randn(group, m, n, dtype=dtype, seed=5, common=True)
    check(group, mk.matmul_all_reduce(a, b), a, b)
    y = mk.matmul_all_reduce(a, w.t(), bias=bias, residual=residual)
    check(group, y, a, w.t(), bias=bias, residual=residual)
    # other tiles, and so other numbers of them
    config = mk.Config(tile_m=64, tile_n=64, warps=4)
    y = mk.matmul_all_reduce(a, w.t(), reduce_dtype=torch.float32, config=config)
    check(group, y, a, w.t(), reduce_dtype=torch.float32)
    y = mk.matmul_reduce_scatter(a, b, config=config)
    check(group, y, a, b)


@pytest.fixture(params=["sliced", "two levels"])
def way(request, monkeypatch):
    """Small results are cut into slices by default: both ways must be right."""
    monkeypatch.setattr(all_reduce_plan, "LARGEST_SLICED", 2**30 if request.param == "sliced" else 0)
    return request.param


@pytest.mark.parametrize("cluster", [(1, 2), (1, 4)])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 512, 256), (129, 257, 65), (1, 1, 1), (300, 2560, 96), (1300, 1300, 64)]
)
def test_one_node_both_ways(way, cluster, m, n, k):
    def on_rank(group):
        for dtype in (torch.bfloat16, torch.float32):
            a, b = randn(group, m, k, dtype=dtype), randn(group, k, n, dtype=dtype, seed=1)
            sliced = mk.explain("matmul_all_reduce", a, b).sliced
            assert sliced if way == "sliced" and m == n == 1 else not sliced or way == "sliced"
            bias = randn(group, n, dtype=dtype, seed=3, common=True)
            for _ in range(3):
                check(group, mk.matmul_all_reduce(a, b, bias=bias), a, b, bias=bias)

    spawn(on_rank, cluster=cluster)


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@HOPPER
@pytest.mark.parametrize("mixed", [False, True], ids=["all ranks", "all but one"])
@pytest.mark.parametrize(
    ("ranks", "m", "n", "k", "dtype"),
    [
        (4, 4136, 2056, 512, torch.bfloat16),
        (3, 3000, 3080, 256, torch.float16),
        (2, 4096, 4096, 64, torch.bfloat16),
        (8, 4096, 2304, 1024, torch.bfloat16),
    ],
)
def test_one_node_all_reduce_for_hopper(ranks, m, n, k, dtype, mixed):
    """Also where one rank takes the portable kernel, because TMA cannot read its rows: they share the protocol."""

    def on_rank(group):
        odd = mixed and group.rank == 1
        a = randn(group, m, k + odd, dtype=dtype)[:, :k]
        b = randn(group, n, k, dtype=dtype, seed=1).t()
        assert mk.explain("matmul_all_reduce", a, b).hopper == (not odd)
        results = [mk.matmul_all_reduce(a, b) for _ in range(3)]
        for y in results:
            check(group, y, a, b)
            assert torch.equal(y, results[0])

    spawn(on_rank, cluster=(1, ranks))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_one_node_shapes(cluster, dtype, rows, n, k):
    spawn(call_all, rows, n, k, dtype, cluster=cluster)


@pytest.mark.parametrize("cluster", NODES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_two_nodes_shapes(cluster, rows, n, k):
    spawn(call_all, rows, n, k, torch.bfloat16, cluster=cluster)


def strides(group):
    rows, n, k = 200, 264, 192
    m = rows * group.size
    a = randn(group, m, 2 * k)[:, ::2]
    b = randn(group, 2 * k, n + 1, seed=1)[::2, 1:]
    frame = torch.full((rows + 2, n + 16), SENTINEL, device=group.device, dtype=a.dtype)
    out = frame[1:-1, 8:-8]
    assert mk.matmul_reduce_scatter(a, b, out=out) is out
    check(group, out, a, b)
    border = frame.clone()
    border[1:-1, 8:-8] = SENTINEL
    assert (border == SENTINEL).all()
    transposed = torch.empty(n, rows, device=group.device, dtype=a.dtype).t()
    residual = randn(group, n, rows, seed=5).t()
    mk.matmul_reduce_scatter(a.t().contiguous().t(), b, residual=residual, out=transposed)
    check(group, transposed, a, b, residual=residual)
    together = residual.contiguous()
    before = together.clone()
    mk.matmul_reduce_scatter(a, b, residual=together, out=together)
    check(group, together, a, b, residual=before)


def test_one_node_strides():
    spawn(strides)


def test_two_nodes_strides():
    spawn(strides, cluster=(2, 2))


def strides_of_all_reduce(group):
    m, n, k = 333, 264, 192
    a, b = randn(group, m, 2 * k)[:, ::2], randn(group, 2 * k, n + 1, seed=1)[::2, 1:]
    frame = torch.full((m + 2, n + 16), SENTINEL, device=group.device, dtype=a.dtype)
    out = frame[1:-1, 8:-8]
    assert mk.matmul_all_reduce(a, b, out=out) is out
    check(group, out, a, b)
    border = frame.clone()
    border[1:-1, 8:-8] = SENTINEL
    assert (border == SENTINEL).all()
    together = randn(group, n, m, seed=5, common=True).t()
    before = together.clone()
    mk.matmul_all_reduce(a.t().contiguous().t(), b, residual=together, out=together)
    check(group, together, a, b, residual=before)


def test_one_node_strides_of_all_reduce(way):
    spawn(strides_of_all_reduce)


def test_two_nodes_strides_of_all_reduce():
    spawn(strides_of_all_reduce, cluster=(2, 2))


def no_depth(group):
    bias = randn(group, 64, common=True)
    y = mk.matmul_reduce_scatter(randn(group, 8 * group.size, 0), randn(group, 0, 64), bias=bias)
    group.synchronize()
    assert torch.equal(y, bias.expand(8, 64))
    assert mk.matmul_reduce_scatter(randn(group, 0, 8), randn(group, 8, 64)).shape == (0, 64)


def test_one_node_no_depth():
    spawn(no_depth, cluster=(1, 3))


def many_calls(group):
    calls = []
    for i in range(50):
        rows, n, k = [(256, 512, 256), (64, 128, 512), (130, 300, 72)][i % 3]
        a, b = randn(group, rows * group.size, k, seed=i), randn(group, k, n, seed=100 + i)
        calls.append((mk.matmul_reduce_scatter(a, b), a, b))
        calls.append((mk.matmul_all_reduce(a, b), a, b))
    for y, a, b in calls:
        check(group, y, a, b)


def test_one_node_many_calls_without_synchronisation():
    spawn(many_calls)


def test_two_nodes_many_calls_without_synchronisation():
    spawn(many_calls, cluster=(2, 2))


def large(group):
    """Every CTA has many tiles of every kind, and the tiles do not come out even."""
    rows, n, k = 1160, 4096 + 264, 512
    a, w = randn(group, rows * group.size, k), randn(group, n, k, seed=1)
    for op in (mk.matmul_reduce_scatter, mk.matmul_all_reduce):
        results = [op(a, w.t()) for _ in range(4)]
        check(group, results[0], a, w.t())
        group.synchronize()
        assert all(torch.equal(results[0], other) for other in results), "other bits on another run"


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_one_node_large(cluster):
    spawn(large, cluster=cluster)


@pytest.mark.parametrize("cluster", NODES)
def test_two_nodes_large(cluster):
    spawn(large, cluster=cluster)


def two_groups(group):
    pair = group.split(group.rank % 2)
    streams = [torch.cuda.Stream() for _ in range(2)]
    ready = torch.cuda.current_stream()
    inputs = [(randn(group, 192, 256, seed=i), randn(group, 256, 320, seed=10 + i)) for i in range(10)]
    done = []
    for i, (a, b) in enumerate(inputs):
        stream = streams[i % 2]
        stream.wait_stream(ready)
        with torch.cuda.stream(stream):
            done.append((group, mk.matmul_reduce_scatter(a, b, group=group), a, b))
            done.append((pair, mk.matmul_reduce_scatter(a, b, group=pair), a, b))
            done.append((group, mk.matmul_all_reduce(a, b, group=group), a, b))
            done.append((pair, mk.matmul_all_reduce(a, b, group=pair), a, b))
    group.synchronize()
    for on, y, a, b in done:
        check(on, y, a, b)


def test_one_node_two_groups_and_two_streams():
    spawn(two_groups)


def test_one_node_late_rank():
    def on_rank(group):
        a, b = randn(group, 252, 256), randn(group, 256, 512, seed=1)
        for i in range(5):
            if group.rank == i % group.size:
                torch.cuda._sleep(20_000_000)
            y, z = mk.matmul_reduce_scatter(a, b), mk.matmul_all_reduce(a, b)
        check(group, y, a, b)
        check(group, z, a, b)

    spawn(on_rank, cluster=(1, 3))


def test_one_node_captured_graph_is_replayed():
    def on_rank(group):
        a, b = randn(group, 256, 128), randn(group, 128, 512, seed=1)
        out = torch.empty(256, 512, device=group.device, dtype=a.dtype)
        mk.matmul_reduce_scatter(a, b, out=out)
        group.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            mk.matmul_reduce_scatter(a, b, out=out)
        for i in range(5):
            a.copy_(randn(group, 256, 128, seed=50 + i))
            graph.replay()
            check(group, out, a, b)

    spawn(on_rank, cluster=(1, 1))


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_one_node_dead_peer_is_reported_and_the_others_go_on(name):
    op = getattr(mk, name)

    def on_rank(group):
        a, b = randn(group, 768, 256), randn(group, 256, 2048, seed=1)
        check(group, op(a, b), a, b)
        if group.rank == 2:
            return None
        op(a, b)
        with pytest.raises(mk.CommTimeout) as caught:
            group.synchronize()
        record = caught.value.record
        assert (record.op, record.rank) == (name, group.rank)
        assert record.signal in ("partial", "finished tile")
        left = group.subset([0, 1, 3])
        check(left, op(a, b, group=left), a, b)
        return {other.peer for other in caught.value.records}

    assert 2 in set().union(*(peers for peers in spawn(on_rank, timeout=1.0) if peers))


@triton.jit
def forget_partial(comm, signal, IN_LOOP: tl.constexpr):
    pass


def test_one_node_lost_signal_times_out(tmp_path):
    def on_rank(group, broken):
        a, b = randn(group, 512, 256), randn(group, 256, 512, seed=1)
        y = broken.matmul_reduce_scatter(a, b)
        begun = time.monotonic()
        with pytest.raises(mk.CommTimeout) as caught:
            group.synchronize()
        assert time.monotonic() - begun < 3.0
        record = caught.value.record
        assert (record.signal, record.peer, record.seen, record.expected) == ("partial", 1 - group.rank, 0, 1)
        assert y.isnan().any()
        again = group.subset(range(group.size))
        check(again, mk.matmul_reduce_scatter(a, b, group=again), a, b)

    with copied(tmp_path, "ops.reduce.reduce_scatter", {protocol.notify_partial: forget_partial}) as broken:
        spawn(on_rank, broken, cluster=(1, 2), timeout=1.0)


def test_one_node_paced_links_take_their_time():
    def on_rank(group):
        a, b = randn(group, 8192, 64), randn(group, 64, 4096, seed=1)
        mk.matmul_reduce_scatter(a, b)
        group.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y = mk.matmul_reduce_scatter(a, b)
        end.record()
        check(group, y, a, b)
        return start.elapsed_time(end)

    times = spawn(on_rank, cluster=(1, 2), links=mk.Links(nvlink=5.0))
    wire = 4096 * 4096 * 2 / 5e9 * 1e3
    assert wire * 0.98 <= min(times) <= max(times) < wire * 1.5
