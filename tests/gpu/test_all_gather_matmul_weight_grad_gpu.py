"""all_gather_matmul_weight_grad on a GPU: several ranks share it."""

import pytest
import torch
from harness import bound, everyones, randn

import mkernel as mk


def cuda(fn, *args, ranks=2, **kwargs):
    kwargs.setdefault("timeout", 10.0)
    return mk.spawn(fn, *args, gpus_per_node=ranks, device="cuda", **kwargs)


def check(group, y, a, dy):
    exact = everyones(group, a).t() @ dy.double()
    group.synchronize()
    error = (y.double() - exact).abs().max().item() if y.numel() else 0.0
    assert error <= bound(len(dy), a.dtype), f"rank {group.rank}: error {error}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 512, 256), (129, 257, 65), (1, 1, 1), (7, 131, 8), (640, 1024, 384), (37, 1000, 333)]
)
def test_shapes(ranks, dtype, m, n, k):
    def on_rank(group):
        a, dy = randn(group, m, k, dtype=dtype), randn(group, group.size * m, n, dtype=dtype, seed=1)
        check(group, mk.all_gather_matmul_weight_grad(a, dy), a, dy)
        out = torch.empty(n, k, dtype=dtype, device=group.device).t()
        check(group, mk.all_gather_matmul_weight_grad(a, dy, out=out), a, dy)

    cuda(on_rank, ranks=ranks)


@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("held", [1, 3])
def test_passes(passes, held):
    """Each configuration gives the same bits in every call."""

    def on_rank(group):
        a, dy = randn(group, 640, 1024), randn(group, group.size * 640, 1536, seed=1)
        config = mk.Config(passes=passes, held_tiles=held, ctas=16)
        results = [mk.all_gather_matmul_weight_grad(a, dy, config=config) for _ in range(5)]
        check(group, results[0], a, dy)
        for other in results[1:]:
            assert torch.equal(other, results[0])

    cuda(on_rank, ranks=4)


def test_layouts():
    def on_rank(group):
        m, n, k = 200, 264, 192
        a = randn(group, m, 2 * k)[:, ::2]
        dy = randn(group, group.size * m, n + 1, seed=1)[:, 1:]
        check(group, mk.all_gather_matmul_weight_grad(a, dy), a, dy)
        dy = randn(group, n, group.size * m, seed=2).t()
        frame = torch.full((k + 2, n + 16), 12345.0, device=group.device, dtype=a.dtype)
        check(group, mk.all_gather_matmul_weight_grad(a, dy, out=frame[1:-1, 8:-8]), a, dy)
        frame[1:-1, 8:-8] = 12345.0
        assert (frame == 12345.0).all()

    cuda(on_rank, ranks=2)


@pytest.mark.parametrize("heap", [False, True])
def test_two_nodes(heap):
    def on_rank(group):
        for turn in range(3):
            a, dy = randn(group, 384, 512, seed=turn), randn(group, group.size * 384, 640, seed=10 + turn)
            if heap:
                a = group.empty(384, 512, dtype=a.dtype).copy_(a)
            check(group, mk.all_gather_matmul_weight_grad(a, dy), a, dy)

    cuda(on_rank, ranks=2, nodes=2)


def test_a_captured_graph_is_replayed():
    def on_rank(group):
        stream = torch.cuda.current_stream()
        a, dy = randn(group, 256, 512), randn(group, group.size * 256, 768, seed=1)
        out = torch.empty(768, 512, dtype=a.dtype, device=group.device).t()
        mk.all_gather_matmul_weight_grad(a, dy, out=out)
        group.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            mk.all_gather_matmul_weight_grad(a, dy, out=out)
        for turn in range(3):
            dy.copy_(randn(group, group.size * 256, 768, seed=2 + turn))
            graph.replay()
            check(group, out, a, dy)

    cuda(on_rank, ranks=1)
