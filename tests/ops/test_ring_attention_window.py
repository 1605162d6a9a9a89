"""Windows: a position sees only positions near its own, in ring_attention and its gradient."""

import pytest
import torch
from support import attention_gradients, attention_reference
from support.attention_reference import Case
from support.operator_calls import assert_same, cluster_name, run

import mkernel as mk
from mkernel.ops.attention.sequences import Pattern, Sequences

SMALL = mk.Config(tile_m=16, tile_n=16)
THOROUGH = pytest.mark.thorough
CLUSTERS = [(1, 1), (1, 2), (1, 3), (2, 2)]
PATTERNS = [
    (True, "zigzag", (5, 0)),
    (True, "contiguous", (0, 0)),
    (True, "contiguous", (40, -1)),
    (False, "contiguous", (3, 2)),
    (False, "zigzag", (-1, 4)),
]
patterns = pytest.mark.parametrize(("causal", "layout", "window"), PATTERNS)


@patterns
@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_forward(cluster, causal, layout, window):
    case = Case(22, causal=causal, layout=layout, window=window)
    run(lambda group: attention_reference.call(group, case, config=SMALL), cluster=cluster, seed=cluster[0])


@patterns
@pytest.mark.parametrize(
    "cluster", [pytest.param(each, marks=() if each == (1, 2) else THOROUGH) for each in CLUSTERS], ids=cluster_name
)
def test_backward(cluster, causal, layout, window):
    case = Case(22, causal=causal, layout=layout, window=window)
    run(lambda group: attention_gradients.call(group, case, config=SMALL), cluster=cluster, seed=cluster[0])


@THOROUGH
@pytest.mark.parametrize("call", [attention_reference.call, attention_gradients.call], ids=["forward", "backward"])
@pytest.mark.parametrize("cluster", [(1, 3), (2, 2)], ids=cluster_name)
def test_with_everything_else(cluster, call):
    """Packed documents, grouped heads, few slots, several calls."""
    documents = (0, 7, 30, 31, 24 * cluster[0] * cluster[1])

    def work(group):
        for turn, window in enumerate([(9, 0), (2, 3)]):
            case = Case(24, heads=4, kv_heads=2, causal=turn != 1, layout="zigzag", documents=documents, window=window)
            call(group, case, turn, config=mk.Config(tile_m=16, tile_n=16, steps=2))

    run(work, cluster=cluster)


def test_stragglers():
    def work(group):
        for turn in range(3):
            attention_reference.call(group, Case(32, heads=3, kv_heads=3, causal=True, window=(20, 0)), turn)

    run(work, cluster=(1, 3), slow={1: 0.02})


def test_a_window_that_hides_nothing_changes_nothing():
    """Not the plan, either: it reads nothing from memory."""

    def work(group):
        given = [Case(16, causal=True).part(name, group.rank) for name in ("query", "key", "value")]
        plain = mk.ring_attention(*given, is_causal=True)
        for window in ((31, 0), (-1, -1), (100, 7)):
            assert_same(mk.ring_attention(*given, is_causal=True, window_size=window), plain)
            explained = mk.explain("ring_attention", *given, is_causal=True, window_size=window)
            assert explained.spans is None
        with_gradients = [tensor.requires_grad_() for tensor in given]
        assert_same(mk.ring_attention(*with_gradients, is_causal=True, window_size=(2**70, 7)).detach(), plain)

    run(work, cluster=(1, 2))


def test_keys_outside_of_the_window_are_not_sent():
    """Rank 2 sees keys of rank 1, rank 1 of rank 0; nobody needs more."""

    def work(group):
        attention_reference.call(group, Case(32, causal=True, window=(8, 0)), config=SMALL)
        return group.world.traffic

    nvlink = run(work, cluster=(1, 4))[0].nvlink
    pairs = {(source, target) for source in range(4) for target in range(4) if nvlink[source][target] > 4096}
    assert pairs == {(0, 1), (1, 2), (2, 3)}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_work_is_proportional_to_the_window(layout):
    """Of all ranks together, in blocks of keys."""

    def blocks(window):
        sequences = Sequences(4, 4096, Pattern(True, layout, None, window))
        return sum(int(sequences.key_blocks(rank, 128, 128).sum()) for rank in range(4))

    tiles = 4 * 4096 // 128
    for keys in (1024, 2048, 4096):
        assert blocks((keys - 1, None)) <= tiles * (keys // 128 + 1)
    assert blocks(None) > 4 * blocks((1023, None))


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (5, "window_size must be a pair of integers"),
        ((1, 2, 3), "window_size must be a pair of integers"),
        ((1.5, 0), "window_size must be a pair of integers"),
        ((-2, 0), "from 0, or -1 for no limit"),
    ],
)
def test_invalid_windows(window, message):
    def work(group):
        query = torch.randn(1, 1, 8, 64)
        with pytest.raises(mk.ArgumentError, match=message):
            mk.ring_attention(query, query, query, window_size=window)
        mk.ring_attention(query, query, query)

    run(work, cluster=(1, 2))


def test_ranks_with_different_windows_are_told():
    def work(group):
        query = torch.randn(1, 1, 8, 64)
        with pytest.raises(mk.ArgumentError, match="window_size"):
            mk.ring_attention(query, query, query, window_size=(group.rank, 0))

    run(work, cluster=(1, 2))


@THOROUGH
def test_gradients_of_a_graph():
    """torch.compile passes the window to the registered operators as a list."""
    case = Case(16, causal=True, window=(6, 0))

    def work(group):
        given = [case.part(name, group.rank).requires_grad_() for name in ("query", "key", "value")]

        def loss(query, key, value):
            return mk.ring_attention(query, key, value, is_causal=True, window_size=(6, 0)).square().sum()

        results = []
        for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
            results.append(torch.autograd.grad(function(*given), given))
        for plain, compiled in zip(*results):
            assert_same(plain, compiled)

    run(work, cluster=(1, 2))


def test_arguments_in_the_order_of_pytorch():
    def work(group):
        given = [Case(16).part(name, group.rank) for name in ("query", "key", "value")]
        assert_same(mk.ring_attention(*given, None, 0.0, True), mk.ring_attention(*given, is_causal=True))
        with pytest.raises(mk.ArgumentError, match=r"dropout_p must be 0, got 0\.1"):
            mk.ring_attention(*given, None, 0.1)
        with pytest.raises(mk.ArgumentError, match=r"attn_mask must be None.*is_causal, cu_seqlens"):
            mk.ring_attention(*given, torch.ones(16, 16))
        mk.ring_attention(*given)

    run(work, cluster=(1, 2))


def test_the_module():
    case = Case(16, heads=2, kv_heads=2, window=(3, 1))

    def work(group):
        given = [case.part(name, group.rank) for name in ("query", "key", "value")]
        module = mk.nn.ContextParallelAttention(window_size=(3, 1), input_layout="bhsd")
        assert "window_size=(3, 1)" in repr(module)
        assert_same(module(*given), mk.ring_attention(*given, window_size=(3, 1)))
        with pytest.raises(mk.ArgumentError, match="window_size"):
            mk.nn.ContextParallelAttention(window_size=3)

    run(work, cluster=(1, 2))
