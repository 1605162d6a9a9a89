"""Prepared calls: repeated launches give what first ones give, and only calls of the same kind are repeated."""

import pytest
import torch
from support.repeating import Repeater, repeating

import mkernel as mk
from mkernel.runtime.errors import ArgumentError

M, N, K = 32, 48, 64


@pytest.fixture
def repeated(monkeypatch):
    return repeating(monkeypatch)


def inputs(group, seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * seed + group.rank)
    return torch.randn(*shape, generator=generator).to(dtype)


def gathered(group, tensor):
    return torch.cat(group.exchange("rows", tensor.clone()))


def finish(group, call, *args):
    call(*args)
    group.synchronize()


def total(group, tensor):
    return sum(part.double() for part in group.exchange("sum", tensor.clone()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_repeated_all_gather_matmul(repeated, ranks):
    def on_rank(group):
        kept = []
        for seed in range(5):
            a, b = inputs(group, seed, M, K), inputs(group, seed + 50, K, N)
            y, rows = mk.all_gather_matmul(a, b, return_gathered=True)
            group.synchronize()
            kept.append((a, b, y, rows))
        for a, b, y, rows in kept:  # every call has results of its own
            everyone = gathered(group, a)
            assert torch.equal(rows, everyone)
            assert (y.double() - everyone.double() @ b.double()).abs().max() < 1e-3

    mk.spawn(on_rank, gpus_per_node=ranks)
    assert len(repeated) == 3 * ranks


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_repeated_sums(repeated, op):
    def on_rank(group):
        for seed, step in [(seed, step) for step in (1, 2) for seed in range(4)]:
            a, b = inputs(group, seed, M, K), inputs(group, seed + 50, K, N)
            bias = torch.full((step * N,), 1.0 + seed)[::step]
            y = getattr(mk, op)(a, b, bias=bias)
            group.synchronize()
            exact = total(group, a.double() @ b.double()) + bias.double()
            if op == "matmul_reduce_scatter":
                exact = exact.chunk(group.size)[group.rank]
            assert (y.double() - exact).abs().max() < 1e-3

    mk.spawn(on_rank, gpus_per_node=2)
    assert len(repeated) == 2 * 2 * 2


@pytest.mark.parametrize("recipe", [("RowWise", "RowWise"), ("BlockWise1x128", "BlockWise128x128")], ids="-".join)
def test_repeated_calls_with_scales(repeated, recipe):
    """The same results as of the operators without scales, of what the fp8 stands for; also of rows that the kernel
    quantizes."""

    def on_rank(group):
        for seed in range(4):
            x, w = inputs(group, seed, M, 144), inputs(group, seed + 50, N, 144)
            (a, scale_a), (w8, scale_w) = mk.quantize(x, recipe[0]), mk.quantize(w, recipe[1])
            results = [
                mk.all_gather_scaled_matmul(a, w8.t(), scale_a, scale_w.t()),
                mk.all_gather_scaled_matmul(x, w8.t(), None, scale_w.t(), recipe_a=recipe[0]),
                mk.scaled_matmul_all_reduce(a, w8.t(), scale_a, scale_w.t(), out_dtype=torch.float32),
            ]
            group.synchronize()
            assert torch.equal(results[0], results[1])
            rows, columns = mk.dequantize(a, scale_a).double(), mk.dequantize(w8, scale_w).double().t()
            torch.testing.assert_close(results[0].double(), gathered(group, rows) @ columns, rtol=5e-3, atol=1e-3)
            torch.testing.assert_close(results[2].double(), total(group, rows @ columns), rtol=1e-4, atol=1e-3)

    mk.spawn(on_rank, gpus_per_node=2)
    assert len(repeated) == 2 * 3 * 2


def test_repeated_weight_gradients(repeated):
    def on_rank(group):
        for seed in range(4):
            a, dy = inputs(group, seed, M, K), inputs(group, seed + 50, 2 * M, N)
            dw = mk.all_gather_matmul_weight_grad(a, dy)
            group.synchronize()
            assert (dw.double() - gathered(group, a).double().t() @ dy.double()).abs().max() < 1e-3

    mk.spawn(on_rank, gpus_per_node=2)
    assert len(repeated) == 2 * 2


@pytest.mark.parametrize("window", [None, (5, 0), [5, 0]])
@pytest.mark.parametrize("team_ctas", [None, 2])  # teams have scratch memory, which is no result
def test_repeated_ring_attention(repeated, window, team_ctas):
    config = team_ctas and mk.Config(team_ctas=team_ctas)

    def on_rank(group):
        for seed in range(4):
            q, k, v = (inputs(group, seed + 10 * i, 1, 2, 48, 64) for i in range(3))
            y, lse = mk.ring_attention(q, k, v, is_causal=True, window_size=window, return_lse=True, config=config)
            group.synchronize()
            keys, values = (torch.cat(group.exchange("kv", t.clone()), dim=2).double() for t in (k, v))
            scores = q.double() @ keys.mT / 8
            rows = torch.arange(48)[:, None] + 48 * group.rank
            hidden = (torch.arange(96) > rows) | (torch.arange(96) < rows - (5 if window else 96))
            scores = scores.masked_fill(hidden, float("-inf"))
            assert (y.double() - scores.softmax(-1) @ values).abs().max() < 1e-4
            assert (lse.double() - scores.logsumexp(-1)).abs().max() < 1e-4

    mk.spawn(on_rank, gpus_per_node=2)
    assert len(repeated) == 2 * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_repeated_moe_ffn(repeated, ranks):
    tokens, hidden, inter, experts, k = 12, 32, 32, 2, 2

    def on_rank(group):
        gate_up = inputs(group, 100, experts, hidden, 2 * inter) / hidden**0.5
        down = inputs(group, 101, experts, inter, hidden) / inter**0.5
        for seed in range(4):
            x = inputs(group, seed, tokens, hidden)
            weights, ids = inputs(group, seed + 50, tokens, experts * group.size).softmax(-1).topk(k)
            again = dict(group=group, max_tokens=tokens)
            y = mk.moe_ffn(x, ids, weights, gate_up, down, **again)
            group.synchronize()
            first = mk.moe_ffn(
                x, ids, weights, gate_up, down, **again, config=mk.Config(ctas=3 + seed % 3)
            )  # another key
            group.synchronize()
            assert torch.equal(y, first)

    mk.spawn(on_rank, gpus_per_node=ranks)
    assert len(repeated) == 2 * ranks


def test_results_that_are_passed(repeated):
    def on_rank(group):
        a, b = inputs(group, 1, M, K), inputs(group, 2, K, N)
        exact = gathered(group, a).double() @ b.double()
        for _ in range(4):
            out = torch.full((2 * M, N), float("nan"))
            assert mk.all_gather_matmul(a, b, out=out) is out
            group.synchronize()
            assert (out.double() - exact).abs().max() < 1e-3
        both = torch.zeros(2 * M + K, N)  # the same layouts, but the result overlaps b
        with pytest.raises(ArgumentError, match="out overlaps b"):
            mk.all_gather_matmul(a, both[M : M + K], out=both[: 2 * M])
        mk.all_gather_matmul(a, b, out=out)

    mk.spawn(on_rank, gpus_per_node=2)
    assert len(repeated) == 2 * 3


def test_what_has_no_key_is_never_repeated(repeated):
    def on_rank(group):
        a, b = inputs(group, 1, M, K), inputs(group, 2, K, N)
        exact = gathered(group, a).double() @ b.double()

        def check(a, b, **options):
            y = mk.all_gather_matmul(a, b, **options)
            group.synchronize()
            assert (y.double() - exact).abs().max() < 1e-3

        for _ in range(3):
            check(a, b)
        assert len(repeated) == group.size
        done = len(repeated)
        group.barrier()
        shared = group.empty(M, K, dtype=torch.float32)
        shared.copy_(a)
        for _ in range(3):
            check(shared, b)  # in the symmetric heap
        with mk.trace():
            check(a, b)
        group.barrier()
        assert len(repeated) == done
        group.barrier()
        # the heap has changed: the next call prepares anew
        for _ in range(3):
            check(a, b)
        group.barrier()
        assert len(repeated) == done + 2 * group.size

    mk.spawn(on_rank, gpus_per_node=2)


def test_a_call_is_not_repeated_while_it_is_captured(repeated, monkeypatch):
    def on_rank(group):
        a, b = inputs(group, 1, M, K), inputs(group, 2, K, N)
        for _ in range(3):
            mk.all_gather_matmul(a, b)
        assert len(repeated) == 1
        with monkeypatch.context() as patch:
            patch.setattr(Repeater, "stream_key", lambda repeater, rank: None)
            mk.all_gather_matmul(a, b)
        assert len(repeated) == 1
        mk.all_gather_matmul(a, b)
        assert len(repeated) == 2

    mk.spawn(on_rank, gpus_per_node=1)


def test_prepared_calls_are_forgotten_with_the_agreements(repeated, monkeypatch):
    """All ranks forget agreements together; a prepared call would leave out the exchange that renews its own."""
    monkeypatch.setattr("mkernel.runtime.group.AGREEMENTS_KEPT", 1)

    def on_rank(group):
        a, b = inputs(group, 1, M, K), inputs(group, 2, K, N)
        for _ in range(3):
            mk.all_gather_matmul(a, b)
        group.barrier()
        assert len(repeated) == 2
        group.barrier()
        mk.all_gather_matmul(a[: M // 2], b)  # needs no larger workspace
        mk.all_gather_matmul(a, b)
        group.barrier()
        assert len(repeated) == 2

    mk.spawn(on_rank, gpus_per_node=2)


def test_calls_that_pytorch_has_to_see_are_not_cut_short(repeated):
    """A call that differs from a prepared one only in what PyTorch makes of it."""

    def on_rank(group):
        a, b = inputs(group, 1, M, K), inputs(group, 2, K, N)
        bias = torch.ones(N)
        for _ in range(3):
            y = mk.all_gather_matmul(a, b)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert mk.all_gather_matmul(a, b).dtype == torch.bfloat16
        weight = b.clone().requires_grad_()
        assert mk.all_gather_matmul(a, weight).requires_grad
        assert torch.equal(mk.all_gather_matmul(a, b, bias=bias), y + bias)
        shaped = mk.all_gather_matmul(a.view(4, M // 4, K), b, gather_dim=1)
        assert shaped.shape == (4, group.size * M // 4, N)
        both, rows = mk.all_gather_matmul(a, b, return_gathered=True)
        assert torch.equal(both, y)
        assert rows.shape == (group.size * M, K)
        with pytest.raises(TypeError, match="all_gather_matmul"):
            mk.all_gather_matmul(a, b, bias)
        with pytest.raises(TypeError, match="unknown"):
            mk.all_gather_matmul(a, b, unknown=1)
        assert torch.equal(mk.all_gather_matmul(a=a, b=b), y)

    mk.spawn(on_rank, gpus_per_node=1)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_ranks_that_mix_up_repeated_calls(repeated, op):
    """The error is raised on every rank and names both calls; the group can be used again."""

    def on_rank(group):
        call = getattr(mk, op)
        small, large = (inputs(group, 1, m, K) for m in (M, 2 * M))
        b = inputs(group, 2, K, N)
        for _ in range(3):
            call(small, b)
            call(large, b)
        group.synchronize()
        with pytest.raises(ArgumentError, match=f"m={M}.*m={2 * M}|m={2 * M}.*m={M}"):
            finish(group, call, small if group.rank else large, b)
        call(small, b)
        group.synchronize()

    mk.spawn(on_rank, gpus_per_node=2)
    assert len(repeated) >= 4


def test_a_refused_call_after_repeated_ones(repeated):
    def on_rank(group):
        a, b = inputs(group, 1, M, K), inputs(group, 2, K, N)
        for _ in range(3):
            mk.all_gather_matmul(a, b)
        with pytest.raises(ArgumentError, match=r"rank 1 refused|a.s columns"):
            finish(group, mk.all_gather_matmul, a[:, 1:] if group.rank else a, b)
        mk.all_gather_matmul(a, b)
        group.synchronize()

    mk.spawn(on_rank, gpus_per_node=2)
