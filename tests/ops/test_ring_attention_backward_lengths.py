"""Gradients of ring_attention with more or fewer queries than keys, and with values of another head dimension: of the
kernel, and through autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.attention_gradients import NAMES, assert_gradients, call, cotangents
from support.attention_reference import Case
from support.operator_calls import assert_same, cluster_name, run
from torch.nn.attention.bias import causal_lower_right

import mkernel as mk

CLUSTERS = [(1, 1), (1, 2), (1, 3), (2, 2)]


def small(**more):
    return mk.Config(tile_m=16, tile_n=16, **more)


@pytest.mark.parametrize(("queries", "length", "causal"), [(7, 40, True), (21, 6, True), (1, 33, False)])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_lengths(cluster, queries, length, causal):
    case = Case(length, queries=queries, heads=2, kv_heads=1, causal=causal)
    run(lambda group: call(group, case, config=small()), cluster=cluster, seed=queries)


def test_alignment_is_that_of_pytorch():
    """One rank, causal: the gradients of causal_lower_right."""
    case = Case(29, queries=11, heads=2, kv_heads=2, causal=True)

    def work(group):
        given = [case.part(name, 0).requires_grad_() for name in NAMES]
        dout = cotangents(case, 0)[0]
        found = torch.autograd.grad(mk.ring_attention(*given, is_causal=True), given, dout)
        out = F.scaled_dot_product_attention(*given, attn_mask=causal_lower_right(11, 29))
        for gradient, expected in zip(found, torch.autograd.grad(out, given, dout)):
            assert torch.allclose(gradient, expected, atol=1e-5)

    run(work, cluster=(1, 1))


def test_queries_before_the_first_key():
    """They see nothing, so they have no gradient and give none, whatever reaches their results."""
    case = Case(4, queries=20, causal=True)

    def work(group):
        dq, _, _ = call(group, case, config=small())
        blind = max(0, 2 * 16 - 20 * group.rank)
        assert not dq[:, :, :blind].any()
        assert bool(dq[:, :, blind:].any(3).all())

    run(work)


@pytest.mark.parametrize(("queries", "length", "window"), [(5, 24, (6, 0)), (24, 5, (3, 5)), (5, 24, (-1, 2))])
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
        ((1, 2), 256, 192, torch.bfloat16),
        ((1, 2), 192, 192, torch.float32),
    ],
)
def test_head_dimension_of_values(cluster, dim, value_dim, dtype):
    case = Case(20, heads=2, kv_heads=1, dim=dim, value_dim=value_dim, dtype=dtype, causal=True)
    run(lambda group: call(group, case), cluster=cluster)


@pytest.mark.parametrize("kv_heads", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_everything_differs(kv_heads):
    """With few slots, which are reused, or heads in several parts; again with the same bits."""
    length = 20 if kv_heads == 4 else 64
    case = Case(length, queries=9, heads=8, kv_heads=kv_heads, dim=96, value_dim=64, batch=2, causal=True)

    def work(group):
        return [call(group, case, config=small(steps=1)) for _ in range(2)]

    for first, again in run(work, cluster=(1, 3), slow={1: 0.02}):
        for gradient, other in zip(first, again):
            assert_same(gradient, other)


def test_memory_is_that_of_wide_slots_and_narrow_partials():
    """Keys and values take slots of the wider ones; partials have the columns of each, rounded up."""
    case = Case(32, kv_heads=5, heads=5, queries=16, dim=64, value_dim=128, dtype=torch.bfloat16)

    def work(group):
        call(group, case, config=small(steps=2))
        [workspace] = [w for (op, _), w in group._workspaces.items() if op == "ring_attention_backward"]
        slots = 2 * 2 * 5 * 32 * 128 * case.dtype.itemsize
        partials = 4 / 3 * 2 * 5 * 32 * (64 + 128) * 4
        assert workspace.segment.memory.numel() - workspace.data_start <= slots + partials + 3 * 256

    run(work, cluster=(1, 4))


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_through_autograd(cluster):
    """Both results have gradients, as those of a cache in which earlier keys are learnt."""
    case = Case(18, queries=7, heads=2, kv_heads=1, dim=192, value_dim=128, causal=True, softcap=0.0)

    def work(group):
        given = [case.part(name, group.rank).requires_grad_() for name in NAMES]
        results = mk.ring_attention(*given, return_lse=True, **case.arguments())
        torch.autograd.backward(results, list(cotangents(case, group.rank)))
        assert_gradients([tensor.grad for tensor in given], case, group.rank, group.size)

    run(work, cluster=cluster)


def test_no_queries():
    """Keys and values that nobody sees have gradients of zero."""

    def work(group):
        query = torch.zeros(1, 2, 0, 64)
        key, value = torch.ones(1, 2, 5, 64), torch.ones(1, 2, 5, 128)
        out = torch.zeros(1, 2, 0, 128)
        dq, dk, dv = mk.ring_attention_backward(out, query, key, value, out, torch.zeros(1, 2, 0))
        assert (dq.shape, dk.shape, dv.shape) == (query.shape, key.shape, value.shape)
        assert not dk.any()
        assert not dv.any()

    run(work)
