"""What the mixture-of-experts operators refuse, in words that help; and what mk.explain says."""

from __future__ import annotations

import pytest
import torch
from support.moe_reference import Layer, dispatch
from support.operator_calls import run

import mkernel as mk
from mkernel.ops.moe import arguments as checks

LAYER = Layer((6,), (2,), k=2, hidden=16, out=8, dtype=torch.float32)


def alone(function):
    """Run a function of the group on a single rank."""
    return run(function, cluster=(1, 1))[0]


def arguments(**changes):
    values = dict(
        x=LAYER.x(0), topk_ids=LAYER.ids(0), topk_weights=LAYER.weights(0), w=LAYER.w(0),
        w_gate_up=LAYER.gate_up(0), w_down=LAYER.down(0),
    )  # fmt: skip
    return values | changes


def call_dispatch(given, **more):
    return mk.moe_dispatch_matmul(given["x"], given["topk_ids"], given["w"], **more)


def call_ffn(given, **more):
    return mk.moe_ffn(given["x"], given["topk_ids"], given["topk_weights"], given["w_gate_up"], given["w_down"], **more)


BOTH = [
    (dict(x=torch.ones(6)), {}, "x must have 2 dimensions"),
    (dict(x=[1]), {}, "x must be a torch.Tensor, got list"),
    (dict(x=torch.ones(6, 16, dtype=torch.float64)), {}, "x has dtype torch.float64; supported are"),
    (dict(x=torch.ones(5, 16, requires_grad=True)), {}, "topk_ids has 6 rows, but x has 5 tokens"),
    ({}, dict(save="everything"), "save must be 'inputs' or 'activations', got 'everything'"),
    (dict(x=torch.ones(5, 16)), {}, "topk_ids has 6 rows, but x has 5 tokens"),
    (dict(topk_ids=torch.zeros(6, 2)), {}, r"topk_ids has dtype torch.float32; it must be torch.int32 or torch.int64"),
    (dict(topk_ids=torch.zeros(6, 17, dtype=torch.int64)), {}, "it must be 1 to 16"),
    ({}, dict(capacity=-1), "capacity must be a whole number, 0 or more, and less than .*; got -1"),
    ({}, dict(capacity=2**31), "capacity must be a whole number, 0 or more, and less than .*; got 2147483648"),
    ({}, dict(max_tokens=2**40), "max_tokens must be a whole number, 0 or more, and less than"),
    ({}, dict(max_tokens=2.5), "max_tokens must be a whole number"),
    ({}, dict(max_tokens=5), "x has 6 tokens, more than the 5 that max_tokens declares"),
    ({}, dict(config=mk.Config(chunk_rows=3)), "config.chunk_rows must be a power of two"),
    ({}, dict(config=mk.Config(ctas=100)), "config.ctas is 100, but only 6 CTAs"),
    ({}, dict(config=mk.Config(intra_ctas=0)), "config.intra_ctas must be at least 1"),
    ({}, dict(config=3), "config must be a mk.Config"),
    (
        {},
        dict(config=mk.Config(join_tiles=2)),
        "config.join_tiles does not apply to moe_.*: a counter assigns tiles to CTAs",
    ),
]
DISPATCH = [
    (dict(w=torch.ones(2, 15, 8)), {}, r"its second dimension \(15\) must be the size of a token \(16\)"),
    (dict(w=torch.ones(16, 8)), {}, "w must have 3 dimensions"),
    (dict(w=torch.ones(2, 16, 8).half()), {}, "w has dtype torch.float16, but x has torch.float32"),
    (dict(w=torch.ones(2, 16, 0)), {}, "matrices must have at least 1 column"),
]
FFN = [
    ({}, dict(activation="tanh"), "activation must be one of silu, gelu, relu, relu2, none; got 'tanh'"),
    (dict(w_gate_up=torch.ones(2, 16, 7)), {}, "half of its columns are gate, half are up"),
    (
        dict(w_down=torch.ones(2, 7, 16)),
        {},
        r"its second dimension \(7\) must be half of the columns of w_gate_up \(8\)",
    ),
    (dict(w_down=torch.ones(3, 8, 16)), {}, r"w_down is \(3, 8, 16\), but must be \(2, 8, 16\)"),
    (dict(topk_weights=torch.ones(6, 3)), {}, r"topk_weights is \(6, 3\), but must be \(6, 2\)"),
    (dict(topk_weights=torch.ones(6, 2, dtype=torch.int32)), {}, "it must be a floating point type"),
    ({}, dict(out=torch.ones(6, 15)), r"out has shape \(6, 15\), but the result has \(6, 16\)"),
    ({}, dict(out=torch.ones(6, 16).half()), "out has dtype torch.float16"),
    ({}, dict(out=torch.ones(6, 1).expand(6, 16)), "out is an expanded tensor"),
    ({}, dict(config=mk.Config(tile_n=16)), "config.tile_n must be at least 32"),
]


@pytest.mark.parametrize(("changes", "more", "message"), BOTH + DISPATCH, ids=lambda value: None)
def test_dispatch_refuses(changes, more, message):
    def work(group):
        with pytest.raises(mk.ArgumentError, match=message):
            call_dispatch(arguments(**changes), **more)

    alone(work)


@pytest.mark.parametrize(("changes", "more", "message"), BOTH + FFN, ids=lambda value: None)
def test_ffn_refuses(changes, more, message):
    def work(group):
        with pytest.raises(mk.ArgumentError, match=message):
            call_ffn(arguments(**changes), **more)

    alone(work)


def test_out_must_not_overlap_the_tokens():
    def work(group):
        given = arguments()
        with pytest.raises(mk.ArgumentError, match="out overlaps x in memory"):
            call_ffn(given, out=given["x"])

    alone(work)


def test_combine_refuses():
    def work(group):
        y, handle = dispatch(group, LAYER)
        weights = LAYER.weights(0)
        for given, more, message in [
            ((y, "handle", weights), {}, "handle must be the handle that a dispatch returned; got str"),
            ((y[:-1], handle, weights), {}, "must have all 12 rows of the dispatch"),
            ((y.double(), handle, weights), {}, "y has dtype torch.float64"),
            ((y, handle, weights[:3]), {}, r"topk_weights is \(3, 2\), but must be \(6, 2\)"),
            ((y, handle, weights), dict(out=torch.ones(6, 7)), "out has shape"),
            ((y, handle, weights), dict(out=y[:6]), "out overlaps y"),
            ((y, handle, weights), dict(config=mk.Config(ctas=7)), "config.ctas is 7, but must be 1 to 6"),
            ((y, handle, weights), dict(group=group.subset([0])), "handle comes from a dispatch on another group"),
        ]:
            with pytest.raises(mk.ArgumentError, match=message):
                mk.moe_combine(*given, **more)

    alone(work)


def test_combine_refuses_also_where_gradients_are_needed():
    """A registered operator knows the tokens of a handle only from the weights."""

    def work(group):
        y, handle = dispatch(group, LAYER)
        y = torch.zeros_like(y).requires_grad_()
        for weights in (torch.rand(7, 2), torch.rand(3, 2), torch.rand(6, 1)):
            with pytest.raises(mk.ArgumentError, match=r"topk_weights is .* but must be \(6, 2\)"):
                mk.moe_combine(y, handle, weights)
        with pytest.raises(mk.ArgumentError, match="handle comes from a dispatch on another group"):
            mk.moe_combine(y, handle, torch.rand(6, 2), group=group.subset([0]))
        mk.moe_combine(y, handle, torch.rand(6, 2)).sum().backward()

    alone(work)


def test_ranks_must_call_alike():
    def work(group):
        x = torch.ones(4, 16 + group.rank)
        with pytest.raises(mk.ArgumentError, match="must pass the same values"):
            mk.moe_dispatch_matmul(x, torch.zeros(4, 2, dtype=torch.int64), torch.ones(1, 16 + group.rank, 8))

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("known", [0, 1], ids=lambda rank: f"rank {rank} does what is known")
def test_ranks_must_call_alike_also_later(known):
    """One rank calls as before, which is known to be alike; the other one does not."""
    ids, w = torch.arange(2).expand(4, 2), torch.ones(1, 16, 8)

    def work(group):
        mk.moe_dispatch_matmul(torch.ones(4, 16), ids, w)
        k = 2 if group.rank == known else 1
        with pytest.raises(
            mk.ArgumentError, match=r"must pass the same values.*k=2.*k=1|must pass the same values.*k=1.*k=2"
        ):
            mk.moe_dispatch_matmul(torch.ones(4, 16), ids[:, :k], w)
        mk.moe_dispatch_matmul(torch.ones(4, 16), ids, w)  # the group can be used again

    run(work, cluster=(1, 2))


def test_explain():
    def work(group):
        x, ids, w = torch.ones(64, 32), torch.zeros(64, 2, dtype=torch.int64), torch.ones(3, 32, 32)
        dispatch_plan = mk.explain("moe_dispatch_matmul", x.clone().requires_grad_(), ids, w, capacity=100)
        weights = torch.ones(64, 2)
        ffn_plan = mk.explain("moe_ffn", x, ids, weights, torch.ones(3, 32, 14), torch.ones(3, 7, 32), max_tokens=70)
        y, handle = dispatch(group, Layer((3, 4), (1, 1), dtype=torch.float32))
        return (
            str(dispatch_plan),
            str(ffn_plan),
            str(mk.explain("moe_combine", y, handle, torch.ones(3 + group.rank, 2))),
        )

    dispatch_plan, ffn_plan, combine_plan = run(work, cluster=(1, 2))[0]
    assert "capacity 100 rows for 3 experts" in dispatch_plan
    assert "0 send, 5 intra" in dispatch_plan
    assert "capacity 280 rows for 3 experts" in ffn_plan
    assert "w_gate_up has no contiguous, 16-byte aligned rows" in ffn_plan
    assert combine_plan.startswith("moe_combine: 6 CTAs, 1 chunks of 8 tokens per rank")


def test_nodes_of_too_many_ranks(monkeypatch):
    monkeypatch.setattr(checks, "MOST_RANKS_PER_NODE", 1)

    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match="at most 1 ranks per node, but this group has 2"):
            call_dispatch(arguments())

    run(on_rank, cluster=(1, 2))


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)])
def test_calls_behind_an_invalid_routing_stay_within_the_capacity(cluster):
    """On a GPU, and in CUDA graphs, a combine and a backward pass may follow before the error is raised."""
    layer = Layer((6, 6), (2, 2), k=2, hidden=16, out=8, dtype=torch.float32, routing="same", has_bias=True)

    def work(group):
        rank, bounds = group.rank, dict(capacity=4, max_tokens=6)
        names = ("x", "weights", "gate_up", "down", "b_gate_up", "b_down")
        leaves = [getattr(layer, name)(rank).requires_grad_() for name in names]
        found = []

        def train():
            x, weights, *matrices, b_gate_up, b_down = leaves
            biases = dict(b_gate_up=b_gate_up, b_down=b_down)
            found.append(mk.moe_ffn(x, layer.ids(rank), weights, *matrices, **biases, **bounds))
            found[0].sum().backward()
            group.synchronize()

        def combine():
            y, handle = mk.moe_dispatch_matmul(layer.x(rank), layer.ids(rank), layer.w(rank), **bounds)
            found.extend([y, mk.moe_combine(y, handle, layer.weights(rank))])
            group.synchronize()

        with group.world.stream(rank, "queue"):
            for calls in (train, combine):
                with pytest.raises(mk.CapacityError):
                    calls()
        return all(each.isnan().all() for each in (*found, *(leaf.grad for leaf in leaves)))

    assert all(run(work, cluster=cluster))
