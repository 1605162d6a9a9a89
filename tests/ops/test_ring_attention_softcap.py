"""Scores that are capped: softcap * tanh(score / softcap), in ring_attention and its gradient."""

import pytest
import torch
from support import attention_gradients, attention_reference
from support.attention_reference import Case
from support.operator_calls import assert_same, cluster_name, run

import mkernel as mk

SMALL = mk.Config(tile_m=16, tile_n=16)
CLUSTERS = [(1, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("softcap", [0.5, 3, 30.0])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_forward(cluster, softcap):
    """Large scores too: the cap changes them."""
    case = Case(22, causal=True, layout="zigzag", softcap=softcap, scale=1.5, dtype=torch.bfloat16)
    run(lambda group: attention_reference.call(group, case, config=SMALL), cluster=cluster)


@pytest.mark.parametrize("softcap", [0.5, 3, 30.0])
@pytest.mark.parametrize(
    "cluster", [pytest.param(each, marks=() if each == (1, 2) else pytest.mark.thorough) for each in CLUSTERS]
)
def test_backward(cluster, softcap):
    case = Case(22, heads=2, softcap=softcap, window=(9, 3), dtype=torch.bfloat16)
    run(lambda group: attention_gradients.call(group, case, config=SMALL), cluster=cluster)


def test_a_large_cap_loses_no_digits():
    """It multiplies the error of tanh, and changes next to nothing else. One of 1000 is exceeded by some scores."""
    for case in (Case(20, softcap=1e6), Case(20, softcap=1e3, scale=40.0)):
        run(lambda group, case=case: attention_gradients.call(group, case, config=SMALL), cluster=(1, 2))
        run(lambda group, case=case: attention_reference.call(group, case, config=SMALL), cluster=(1, 1))


def test_it_matters():
    """A cap that nearly all scores exceed makes all keys alike, and one that none exceeds does nothing."""
    case = Case(16, scale=100.0)

    def work(group):
        given = [case.part(name, group.rank) for name in ("query", "key", "value")]
        flat = mk.ring_attention(*given, scale=100.0, softcap=1e-3)
        mean = torch.cat([case.part("value", rank) for rank in range(group.size)], 2).mean(2, keepdim=True)
        assert (flat - mean).abs().max() < 2e-2
        plain, capped = (mk.ring_attention(*given, softcap=cap) for cap in (0.0, 1e4))
        assert (plain - capped).abs().max() < 1e-2
        assert not torch.equal(plain, mk.ring_attention(*given, softcap=2.0))

    run(work, cluster=(1, 2))


def test_gradients_by_autograd():
    def work(group):
        given = [Case(16).part(name, group.rank).requires_grad_() for name in ("query", "key", "value")]
        out, lse = mk.ring_attention(*given, softcap=2.0, return_lse=True)
        found = torch.autograd.grad(out.sum(), given)
        ones = torch.ones_like(out)
        plain = [tensor.detach() for tensor in given]
        for one, other in zip(found, mk.ring_attention_backward(ones, *plain, out.detach(), lse.detach(), softcap=2.0)):
            assert_same(one, other)

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("softcap", [-1.0, float("inf"), float("nan"), "30", True, None])
def test_invalid(softcap):
    def work(group):
        query = torch.randn(1, 1, 8, 64)
        with pytest.raises(mk.ArgumentError, match="softcap must be 0"):
            mk.ring_attention(query, query, query, softcap=softcap)
        mk.ring_attention(query, query, query)

    run(work, cluster=(1, 2))
