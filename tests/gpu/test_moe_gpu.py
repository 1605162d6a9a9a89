"""The mixture-of-experts operators on a GPU: several ranks share it."""

import pytest
import torch

import mkernel as mk


def spawn(fn, *args, cluster, **kwargs):
    kwargs.setdefault("timeout", 20.0)
    return mk.spawn(fn, *args, nodes=cluster[0], gpus_per_node=cluster[1], device="cuda", **kwargs)


class Layer:
    """Inputs of one rank, and what all ranks have, for the reference."""

    def __init__(self, group, tokens, experts, k, hidden, inter, dtype, seed=0, skewed=False):
        self.group = group
        generator = torch.Generator(group.device).manual_seed(1000 * seed + group.rank)

        def randn(*shape, scale=1.0):
            return (torch.randn(*shape, device=group.device, generator=generator) * scale).to(dtype)

        total = sum(experts)
        self.experts = experts
        self.x = randn(tokens[group.rank], hidden)
        scores = torch.rand(tokens[group.rank], total, device=group.device, generator=generator)
        if skewed:
            scores = scores ** torch.arange(1, total + 1, device=group.device)
        self.ids = scores.topk(k, dim=1).indices
        dropped = torch.rand(self.ids.shape, device=group.device, generator=generator) < 0.05
        self.ids = torch.where(dropped, -1, self.ids)
        self.weights = torch.rand(self.ids.shape, device=group.device, generator=generator)
        mine = experts[group.rank]
        self.w = randn(mine, hidden, inter, scale=hidden**-0.5)
        self.gate_up = randn(mine, hidden, 2 * inter, scale=hidden**-0.5)
        self.down = randn(mine, inter, hidden, scale=inter**-0.5)
        torch.cuda.current_stream(group.device).synchronize()
        self.everyone = group.exchange("layer", self)

    def rows(self):
        """(counts, sources, tokens, rows) of this rank's experts, in order; empty tensors if it has none."""
        first = sum(self.experts[: self.group.rank])
        counts, sources, tokens, rows = [], [self.ids.new_empty(0)], [self.ids.new_empty(0)], [self.x[:0]]
        for expert in range(first, first + self.experts[self.group.rank]):
            found = 0
            for source, other in enumerate(self.everyone):
                at = (other.ids == expert).nonzero()[:, 0]
                found += len(at)
                sources.append(torch.full_like(at, source))
                tokens.append(at)
                rows.append(other.x[at])
            counts.append(found)
        return counts, torch.cat(sources), torch.cat(tokens), torch.cat(rows)

    def result(self, of_expert):
        """(float64 sum of weight * of_expert, the sum of absolute values)."""
        x, total, size = self.x.double(), torch.zeros_like(self.x.double()), torch.zeros_like(self.x.double())
        number = 0
        for other in self.everyone:
            for expert in range(len(other.w)):
                share = (self.weights.double() * (self.ids == number)).sum(1, keepdim=True)
                value, magnitude = of_expert(other, expert, x)
                total, size = total + share * value, size + share * magnitude
                number += 1
        return total, size


def ffn_of(other, expert, x):
    gate, up = (x @ other.gate_up[expert].double()).chunk(2, dim=1)
    inner = torch.nn.functional.silu(gate) * up
    return inner @ other.down[expert].double(), inner.abs() @ other.down[expert].double().abs()


def check_sum(y, exact, magnitude, depth):
    eps = torch.finfo(y.dtype).eps
    terms = depth**0.5 if y.dtype == torch.float32 else 0.0
    error = (y.double() - exact).abs()
    assert bool((error <= (4 + 2 * terms) * eps * magnitude + 1e-30).all()), error.max().item()


def check_dispatch(layer, y, handle):
    counts, sources, tokens, rows = layer.rows()
    assert handle.counts.tolist() == counts
    assert torch.equal(handle.source[: len(rows)].long(), sources)
    assert torch.equal(handle.token[: len(rows)].long(), tokens)
    assert (y.dtype, y.shape) == (layer.x.dtype, (len(handle.source), layer.w.shape[2]))
    products = [part.double() @ w.double() for part, w in zip(rows.split(counts), layer.w)]
    exact = torch.cat([y[:0].double(), *products])
    assert exact.shape == (len(rows), y.shape[1])
    depth = layer.x.shape[1]
    terms = depth**0.5 if y.dtype == torch.float32 else 0.0
    error = (y[: len(rows)].double() - exact).abs().max().item() if len(rows) else 0.0
    assert error <= (4 + 4 * terms) * torch.finfo(y.dtype).eps, error


def arguments(layer):
    return layer.x, layer.ids, layer.weights, layer.gate_up, layer.down


# every case is another binary or two, which take their time to compile: few cases, each for something
over_cases = pytest.mark.parametrize(
    ("cluster", "dtype", "hidden", "inter", "k"),
    [
        ((1, 1), torch.bfloat16, 256, 384, 4),
        ((1, 4), torch.bfloat16, 256, 384, 4),
        ((1, 4), torch.float16, 72, 130, 3),  # matrices through pointers
        ((1, 1), torch.float32, 256, 384, 4),
        ((2, 2), torch.bfloat16, 256, 384, 4),
    ],
    ids=["1x1", "1x4", "1x4 ragged fp16", "1x1 fp32", "2x2"],
)

SIZES = {
    (1, 1): ((300,), (5,)),
    (1, 4): ((300, 0, 129, 1), (3, 5, 0, 4)),
    (2, 2): ((300, 0, 129, 1), (3, 5, 0, 4)),
}


@over_cases
def test_dispatch_and_combine(cluster, dtype, hidden, inter, k):
    def on_rank(group):
        for seed in range(3):
            layer = Layer(group, *SIZES[cluster], k, hidden, inter, dtype, seed=seed, skewed=seed == 2)
            y, handle = mk.moe_dispatch_matmul(layer.x, layer.ids, layer.w)
            z = mk.moe_combine(y, handle, layer.weights)
            group.synchronize()
            check_dispatch(layer, y, handle)
            exact, magnitude = torch.zeros_like(z.double()), torch.zeros_like(z.double())
            number = 0
            for other in layer.everyone:
                for expert in range(len(other.w)):
                    share = (layer.weights.double() * (layer.ids == number)).sum(1, keepdim=True)
                    w = other.w[expert].double()
                    exact += share * (layer.x.double() @ w)
                    magnitude += share * (layer.x.double().abs() @ w.abs())
                    number += 1
            check_sum(z, exact, magnitude, hidden)
            group.barrier()

    spawn(on_rank, cluster=cluster)


@over_cases
def test_ffn(cluster, dtype, hidden, inter, k):
    def on_rank(group):
        for seed in range(3):
            layer = Layer(group, *SIZES[cluster], k, hidden, inter, dtype, seed=seed, skewed=seed == 2)
            y = mk.moe_ffn(*arguments(layer))
            group.synchronize()
            check_sum(y, *layer.result(ffn_of), hidden + inter)
            group.barrier()

    spawn(on_rank, cluster=cluster)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 4)], ids=["1x1", "1x4"])
def test_a_larger_layer(cluster):
    """Many blocks and columns: every CTA has several tiles of both GEMMs."""

    def on_rank(group):
        layer = Layer(group, (1024,) * group.size, (8,) * group.size, 8, 1024, 768, torch.bfloat16)
        ys = [mk.moe_ffn(*arguments(layer), max_tokens=1024, capacity=12000) for _ in range(4)]
        group.synchronize()
        check_sum(ys[0], *layer.result(ffn_of), 1024)
        assert all(torch.equal(ys[0], y) for y in ys), "other bits on another run"
        y, handle = mk.moe_dispatch_matmul(layer.x, layer.ids, layer.w, max_tokens=1024, capacity=12000)
        group.synchronize()
        check_dispatch(layer, y, handle)
        group.barrier()

    spawn(on_rank, cluster=cluster)


def test_transposed_matrices_and_strides():
    def on_rank(group):
        layer = Layer(group, (100, 70), (3, 2), 2, 256, 192, torch.bfloat16)
        w = layer.w.transpose(1, 2).contiguous().transpose(1, 2)
        wide = torch.zeros(len(layer.x), 512, device=group.device, dtype=layer.x.dtype)
        wide[:, ::2] = layer.x
        y, handle = mk.moe_dispatch_matmul(wide[:, ::2], layer.ids.int(), w)
        plain, _ = mk.moe_dispatch_matmul(layer.x, layer.ids, layer.w)
        group.synchronize()
        rows = int(handle.counts.sum())
        assert torch.equal(y[:rows], plain[:rows])
        check_dispatch(layer, y, handle)
        group.barrier()

    spawn(on_rank, cluster=(1, 2))


@pytest.mark.parametrize("cluster", [(1, 1), (1, 4)], ids=["1x1", "1x4"])
def test_over_capacity_is_an_error_and_the_group_goes_on(cluster):
    def on_rank(group):
        layer = Layer(group, (200,) * group.size, (2,) * group.size, 2, 128, 128, torch.bfloat16)
        for _ in range(2):
            y = mk.moe_ffn(*arguments(layer), capacity=10, max_tokens=200)
            with pytest.raises(mk.CapacityError, match="whose capacity is 10"):
                group.synchronize()
            assert y.isnan().all()
            y = mk.moe_ffn(*arguments(layer), max_tokens=200)
            group.synchronize()
            check_sum(y, *layer.result(ffn_of), 256)
        ids = layer.ids.clone()
        ids[0, 0] = 2 * group.size
        mk.moe_dispatch_matmul(layer.x, ids, layer.w, max_tokens=200)
        with pytest.raises(mk.RoutingError, match="beyond the last"):
            group.synchronize()
        group.barrier()

    spawn(on_rank, cluster=cluster)


def test_late_ranks_and_many_calls():
    def on_rank(group):
        layer = Layer(group, (256, 100, 31), (2, 2, 2), 3, 256, 256, torch.bfloat16)
        results = []
        for i in range(12):
            if group.rank == i % 3:
                torch.cuda._sleep(5_000_000)
            results.append(mk.moe_ffn(*arguments(layer), max_tokens=256))
        group.synchronize()
        check_sum(results[0], *layer.result(ffn_of), 512)
        assert all(torch.equal(results[0], y) for y in results)
        group.barrier()

    spawn(on_rank, cluster=(1, 3))


def test_a_captured_graph_follows_the_routing():
    def on_rank(group):
        stream = torch.cuda.current_stream()
        layer = Layer(group, (128,), (4,), 2, 256, 256, torch.bfloat16)
        out = torch.empty_like(layer.x)
        mk.moe_ffn(*arguments(layer), out=out, max_tokens=128)
        group.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            mk.moe_ffn(*arguments(layer), out=out, max_tokens=128)
        for _ in range(4):
            layer.x.copy_(torch.randn(layer.x.shape, device=group.device))
            layer.ids.copy_(torch.rand(128, 4, device=group.device).topk(2, dim=1).indices)
            graph.replay()
            group.synchronize()
            check_sum(out, *layer.result(ffn_of), 512)

    spawn(on_rank, cluster=(1, 1))


def test_dead_peer_is_reported():
    def on_rank(group):
        layer = Layer(group, (64,) * 3, (2,) * 3, 2, 128, 128, torch.bfloat16)
        mk.moe_ffn(*arguments(layer), max_tokens=64)
        group.synchronize()
        if group.rank == 2:
            return None
        y = mk.moe_ffn(*arguments(layer), max_tokens=64)
        with pytest.raises(mk.CommTimeout) as caught:
            group.synchronize()
        assert caught.value.record.op == "moe_ffn"
        assert y.isnan().all()
        return caught.value.record.peer

    assert 2 in spawn(on_rank, cluster=(1, 3), timeout=1.0)


def test_paced_links_take_their_time():
    def on_rank(group):
        layer = Layer(group, (1024,) * 2, (2,) * 2, 2, 4096, 128, torch.bfloat16)
        mk.moe_dispatch_matmul(layer.x, layer.ids, layer.w, max_tokens=1024)
        group.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y, handle = mk.moe_dispatch_matmul(layer.x, layer.ids, layer.w, max_tokens=1024)
        end.record()
        group.synchronize()
        check_dispatch(layer, y, handle)
        first = 2 * group.rank
        others = layer.everyone[1 - group.rank].ids
        needed = int(((others >= first) & (others < first + 2)).any(1).sum())
        return start.elapsed_time(end), needed * 4096 * 2 / 5e9 * 1e3

    for took, wire in spawn(on_rank, cluster=(1, 2), links=mk.Links(nvlink=5.0)):
        assert took >= 0.9 * wire
