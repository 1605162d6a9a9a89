"""Repeated calls on a GPU: the driver launches them without Triton, and they compute what first calls compute."""

import pytest
import torch
from harness import bound, check, limited, randn

import mkernel as mk

pytestmark = pytest.mark.usefixtures("limited")
__all__ = ["limited"]


def ready_calls(group):
    """How many calls of the group are prepared, and can be repeated by the driver alone."""
    return sum(call.ready is not None for call in group.prepared._calls.values())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_gather_matmul(ranks, dtype):
    """Also with results that stay in use, and with a result that the caller passes."""

    def on_rank(group):
        kept = []
        b = randn(group, 512, 384, dtype=dtype, seed=99)
        for seed in range(6):
            a = randn(group, 128, 512, dtype=dtype, seed=seed)
            kept.append((a, mk.all_gather_matmul(a, b)))
        assert ready_calls(group) == 1
        for a, y in kept:
            check(group, y, a, b)
        out = torch.empty_like(kept[0][1])
        for a, _ in kept:
            out.fill_(float("nan"))
            mk.all_gather_matmul(a, b, out=out)
            check(group, out, a, b)
        assert ready_calls(group) == 2

    mk.spawn(on_rank, gpus_per_node=ranks, device="cuda", timeout=30.0)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("m", [128, 2048])
def test_sums(op, ranks, m):
    def on_rank(group):
        for seed in range(5):
            a, b = randn(group, m, 256, seed=seed), randn(group, 256, 512, seed=seed + 50)
            bias = torch.full((512,), 1.0 + seed, device=group.device, dtype=torch.bfloat16)
            y = getattr(mk, op)(a, b, bias=bias)
            product = a.double() @ b.double()
            torch.cuda.current_stream().synchronize()
            exact = sum(group.exchange("products", product)) + bias.double()
            if op == "matmul_reduce_scatter":
                exact = exact.chunk(group.size)[group.rank]
            error = (y.double() - exact).abs().max().item()
            assert error <= group.size * bound(256, torch.bfloat16) * 4, (seed, error)
        assert ready_calls(group) == 1

    mk.spawn(on_rank, gpus_per_node=ranks, device="cuda", timeout=30.0)


@pytest.mark.parametrize("ranks", [1, 4])
def test_ring_attention(ranks):
    def on_rank(group):
        for seed in range(5):
            q, k, v = (randn(group, 1, 4, 512, 128, seed=seed + 10 * i) for i in range(3))
            y, lse = mk.ring_attention(q, k, v, is_causal=True, return_lse=True)
            first, first_lse = mk.ring_attention(
                q, k, v, is_causal=True, return_lse=True, scale=128**-0.5 * (1 + 1e-9 * (seed + 1))
            )  # another key, and the same computation
            group.synchronize()
            assert torch.equal(y, first)
            assert torch.equal(lse, first_lse)
        assert ready_calls(group) == 1

    mk.spawn(on_rank, gpus_per_node=ranks, device="cuda", timeout=30.0)


def test_moe_ffn():
    tokens, hidden, inter, experts, k = 64, 256, 256, 4, 2

    def on_rank(group):
        gate_up = randn(group, experts, hidden, 2 * inter, seed=100) / 16
        down = randn(group, experts, inter, hidden, seed=101) / 16
        for seed in range(5):
            x = randn(group, tokens, hidden, seed=seed)
            logits = randn(group, tokens, experts * group.size, seed=seed + 50).float()
            weights, ids = logits.softmax(-1).topk(k)
            y = mk.moe_ffn(x, ids, weights, gate_up, down, max_tokens=tokens)
            first = mk.moe_ffn(x, ids, weights, gate_up, down, max_tokens=tokens, config=mk.Config(group_m=seed + 2))
            group.synchronize()
            assert torch.equal(y, first)
        assert ready_calls(group) == 1

    mk.spawn(on_rank, gpus_per_node=2, device="cuda", timeout=60.0)


def test_several_streams():
    """Repeated calls on two streams run one after the other."""

    def on_rank(group):
        b = randn(group, 512, 384, seed=99)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream(group.device)]
        inputs = [randn(group, 128, 512, seed=seed) for seed in range(8)]
        torch.cuda.current_stream().synchronize()
        results = []
        for a in inputs:
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append((a, mk.all_gather_matmul(a, b)))
        group.synchronize()
        assert ready_calls(group) == 2
        for a, y in results:
            check(group, y, a, b)

    mk.spawn(on_rank, gpus_per_node=2, device="cuda", timeout=30.0)


def test_graphs_in_between():
    """A graph that was captured between repeated calls keeps working, and so do they."""

    def on_rank(group):
        b = randn(group, 512, 384, seed=99)
        stream = torch.cuda.Stream(group.device)
        inputs = [randn(group, 128, 512, seed=seed) for seed in range(6)]
        fixed = inputs[0].clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for a in inputs:
                mk.all_gather_matmul(a, b)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            captured = mk.all_gather_matmul(fixed, b)
        for a in inputs:
            fixed.copy_(a)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            check(group, captured, a, b)
            with torch.cuda.stream(stream):
                y = mk.all_gather_matmul(a, b)
            check(group, y, a, b)
        assert ready_calls(group) == 1

    mk.spawn(on_rank, gpus_per_node=1, device="cuda", timeout=30.0)


def test_ranks_that_mix_up_repeated_calls():
    def on_rank(group):
        b = randn(group, 512, 384, seed=99)
        small, large = (randn(group, m, 512, seed=m) for m in (128, 256))
        for _ in range(4):
            mk.all_gather_matmul(small, b)
            mk.all_gather_matmul(large, b)
        with pytest.raises(mk.ArgumentError, match=r"m=128.*m=256|m=256.*m=128"):
            mk.all_gather_matmul(small if group.rank else large, b)
        check(group, mk.all_gather_matmul(small, b), small, b)

    mk.spawn(on_rank, gpus_per_node=2, device="cuda", timeout=30.0)
