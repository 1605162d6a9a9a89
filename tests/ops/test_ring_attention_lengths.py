"""ring_attention with more or fewer queries than keys, with values of another head dimension, and with CTAs that share
the keys of a tile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.attention_reference import Case, call
from support.operator_calls import assert_same, cluster_name, run
from torch.nn.attention.bias import causal_lower_right

import mkernel as mk
from mkernel.ops.attention.plan import LEAST_SPAN

CLUSTERS = [(1, 1), (1, 2), (1, 3), (2, 2)]


def small(**more):
    return mk.Config(tile_m=16, tile_n=16, **more)


@pytest.mark.parametrize(("queries", "length", "causal"), [(7, 40, True), (21, 6, True), (1, 33, False), (3, 18, True)])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_lengths(cluster, queries, length, causal):
    case = Case(length, queries=queries, heads=2, kv_heads=1, causal=causal)
    run(lambda group: call(group, case, config=small()), cluster=cluster, seed=queries)


def test_alignment_is_that_of_pytorch():
    """One rank, causal: the last query sees the last key, as with causal_lower_right."""
    case = Case(29, queries=11, heads=2, kv_heads=2, causal=True)

    def work(group):
        query, key, value = (case.part(name, 0) for name in ("query", "key", "value"))
        out = mk.ring_attention(query, key, value, is_causal=True, config=small())
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(11, 29))
        assert torch.allclose(out, expected, atol=1e-5)

    run(work, cluster=(1, 1))


def test_queries_before_the_first_key():
    """More queries than keys: the first ones see nothing."""
    case = Case(4, queries=20, causal=True)

    def work(group):
        out, lse = call(group, case, config=small())
        blind = max(0, 2 * 16 - 20 * group.rank)
        assert not out[:, :, :blind].any()
        assert bool((lse[:, :, :blind] == -torch.inf).all())
        assert bool((lse[:, :, blind:] > -torch.inf).all())

    run(work)


@pytest.mark.parametrize("window", [(6, 0), (3, 5), (0, 0), (-1, 2)])
@pytest.mark.parametrize(("queries", "length"), [(5, 24), (24, 5)])
def test_windows(queries, length, window):
    case = Case(length, queries=queries, window=window, causal=window[1] == 0)
    run(lambda group: call(group, case, config=small()))


@pytest.mark.parametrize(
    ("cluster", "dim", "value_dim", "dtype"),
    [
        ((1, 1), 192, 128, torch.bfloat16),
        ((1, 2), 192, 128, torch.float16),
        ((1, 3), 64, 128, torch.float32),
        ((2, 2), 192, 128, torch.float32),
        ((2, 1), 64, 96, torch.float32),
        ((1, 2), 192, 192, torch.float32),
    ],
)
def test_head_dimension_of_values(cluster, dim, value_dim, dtype):
    case = Case(20, heads=2, kv_heads=1, dim=dim, value_dim=value_dim, dtype=dtype, causal=True)
    run(lambda group: call(group, case), cluster=cluster)


def test_everything_differs():
    """With few slots, which are reused, and a given tensor for the result."""
    case = Case(20, queries=9, heads=8, kv_heads=4, dim=96, value_dim=64, batch=2, causal=True)

    def work(group):
        for turn in range(2):
            out = torch.full((2, 8, 9, 64), -77.0)
            result, _ = call(group, case, turn, out=out, config=small(steps=1))
            assert result is out

    run(work, cluster=(1, 3))


@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
@pytest.mark.parametrize("team", [2, 4])
def test_keys_are_shared_by_several_ctas(cluster, team):
    case = Case(70, queries=5, heads=2, kv_heads=1, causal=team == 2)
    config = small(team_ctas=team)

    def work(group):
        for turn in range(2):
            call(group, case, turn, config=config)
        tensors = [case.part(name, group.rank) for name in ("query", "key", "value")]
        plan = mk.explain("ring_attention", *tensors, enable_gqa=True, config=config)
        assert plan.config.team_ctas == team
        assert f"{team} CTAs share the keys of each of the 2 tiles" in str(plan)

    run(work, cluster=cluster, seed=team)


def test_the_bits_do_not_depend_on_who_is_last():
    case = Case(100, queries=2, heads=2, kv_heads=2, batch=2, causal=True)
    results = [
        run(lambda group: call(group, case, config=small(team_ctas=4)), cluster=(1, 2), seed=seed) for seed in range(4)
    ]
    for other in results[1:]:
        for (out, lse), (first, first_lse) in zip(other, results[0]):
            assert_same(out, first)
            assert_same(lse, first_lse)


def test_ctas_share_keys_where_there_are_few_tiles():
    """And where there are enough keys for each."""

    def shared(length, queries, heads):
        def work(group):
            query, key = torch.zeros(1, heads, queries, 64), torch.zeros(1, heads, length, 64)
            return mk.explain("ring_attention", query, key, key).config

        return run(work, cluster=(1, 1), ctas=8)[0]

    block = shared(32, 1, 1).tile_n
    assert shared(8 * LEAST_SPAN * block, 1, 1).team_ctas == 8
    assert shared(8 * LEAST_SPAN * block, 1, 3).team_ctas == 2
    assert shared(2 * LEAST_SPAN * block, 1, 1).team_ctas == 2
    assert shared(8 * LEAST_SPAN * block, 1, 8).team_ctas == 1
    assert shared(8 * LEAST_SPAN * block, 1, 1).tile_m == 16


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_peer_leaves_the_counts_at_zero(seed):
    """CTAs that gave up have counted themselves, too."""
    case = Case(64, queries=3)

    def work(group):
        call(group, case, config=small(team_ctas=2))
        if group.rank == 1:
            return
        with pytest.raises(mk.CommTimeout):
            call(group, case, 1, config=small(team_ctas=2))
        [workspace] = [w for (op, _), w in group._workspaces.items() if op == "ring_attention"]
        from mkernel.lang.context import READY

        assert not workspace.state[READY.value :].any()

    run(work, cluster=(1, 2), timeout=1e-4, seed=seed)
