"""The functions of ring-flash-attn: right, differentiable, and clear about what they do not take."""

import inspect

import pytest
import torch
from support.attention_reference import Case, assert_attention, exact
from support.operator_calls import assert_same, run

import mkernel as mk
from mkernel.integrations import ring_flash_attn

NAMES = ("query", "key", "value")
LAYOUTS = {"ring": "contiguous", "zigzag_ring": "zigzag"}


def parts_of(case, rank):
    """query, key and value, [batch, seq_local, heads, dim]."""
    return [case.part(name, rank).transpose(1, 2).contiguous() for name in NAMES]


@pytest.mark.parametrize("packed", ["", "_kvpacked", "_qkvpacked"])
@pytest.mark.parametrize("prefix", LAYOUTS)
def test_functions(prefix, packed):
    """With the right result, and gradients of the packed tensors."""
    function = getattr(ring_flash_attn, f"{prefix}_flash_attn{packed}_func")
    heads = 2 if packed == "_qkvpacked" else 4
    case = Case(16, heads=heads, kv_heads=2, causal=True, layout=LAYOUTS[prefix], scale=0.2, window=(9, 0))

    def work(group):
        query, key, value = parts_of(case, group.rank)
        given = {
            "": (query, key, value),
            "_kvpacked": (query, torch.stack([key, value], 2)),
            "_qkvpacked": (torch.stack([query, key, value], 2) if packed == "_qkvpacked" else None,),
        }[packed]
        given = [tensor.requires_grad_() for tensor in given]
        out, lse, nothing = function(
            *given, softmax_scale=0.2, causal=True, window_size=(9, 0), return_attn_probs=True, group=group
        )
        assert nothing is None
        assert out.shape == query.shape
        assert_attention(out.transpose(1, 2), lse, exact(case, group.rank, group.size), case)
        out.sum().backward()
        plain = [tensor.transpose(1, 2).requires_grad_() for tensor in (query.detach(), key, value)]
        plain = [tensor.detach().requires_grad_() for tensor in plain]
        arguments = dict(case.arguments(), enable_gqa=True)
        mk.ring_attention(*plain, **arguments).sum().backward()
        expected = [tensor.grad.transpose(1, 2) for tensor in plain]
        found = {
            "": lambda: [tensor.grad for tensor in given],
            "_kvpacked": lambda: [given[0].grad, *given[1].grad.unbind(2)],
            "_qkvpacked": lambda: given[0].grad.unbind(2),
        }[packed]()
        for one, other in zip(found, expected):
            assert_same(one, other)

    run(work, cluster=(1, 2))


def test_what_is_refused():
    def work(group):
        query = torch.randn(1, 8, 2, 64)
        attend, zigzag = ring_flash_attn.ring_flash_attn_func, ring_flash_attn.zigzag_ring_flash_attn_func
        for call, words in (
            (lambda: attend(query, query, query, dropout_p=0.5), "dropout_p must be 0"),
            (lambda: attend(query, query, query, alibi_slopes=torch.ones(2)), "alibi_slopes must be None"),
            (lambda: zigzag(query, query, query), "causal must be True in the zigzag layout"),
            (lambda: ring_flash_attn.ring_flash_attn_qkvpacked_func(query), r"\[batch, seq_local, 3, heads, dim\]"),
            (lambda: attend(query[0], query, query), r"query must be \[batch, seq_local, heads, dim\]"),
        ):
            with pytest.raises(mk.ArgumentError, match=words):
                call()

    run(work, cluster=(1, 1))


def test_arguments_are_those_of_the_package():
    rest = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic"]
    rest += ["return_attn_probs", "group"]
    first = {"": ["q", "k", "v"], "_kvpacked": ["q", "kv"], "_qkvpacked": ["qkv"]}
    for prefix in LAYOUTS:
        for packed, names in first.items():
            function = getattr(ring_flash_attn, f"{prefix}_flash_attn{packed}_func")
            assert list(inspect.signature(function).parameters) == names + rest


@pytest.mark.parametrize("given_out", [False, True])
def test_the_order_of_dimensions(given_out):
    case = Case(16, heads=2, kv_heads=2)

    def work(group):
        query, key, value = parts_of(case, group.rank)
        out = torch.empty_like(query) if given_out else None
        result, lse = mk.ring_attention(query, key, value, input_layout="bshd", return_lse=True, out=out)
        assert result is out or not given_out
        assert_attention(result.transpose(1, 2), lse, exact(case, group.rank, group.size), case)
        with pytest.raises(mk.ArgumentError, match="input_layout must be one of 'bhsd', 'bshd'"):
            mk.ring_attention(query, key, value, input_layout="sbhd")

    run(work, cluster=(1, 2))
