"""The functions of ring-flash-attn: right, differentiable, and clear about what they do not take."""

import inspect
import itertools

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
            (lambda: attend(query[0, 0, 0], query, query), r"query must be \[batch, seq_local, heads, dim\]"),
            (lambda: attend([1.0], query, query), "query must be a torch.Tensor, got list"),
            (lambda: ring_flash_attn.ring_flash_attn_qkvpacked_func(None), "got NoneType"),
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
    made = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
    for packed, names in first.items():
        function = getattr(ring_flash_attn, f"llama3_flash_attn_varlen{packed}_func")
        assert list(inspect.signature(function).parameters) == names + made + rest


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


DOCUMENTS = (0, 5, 20, 20, 32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", ["", "_kvpacked", "_qkvpacked"])
def test_packed_documents(packed, causal):
    """Of which each rank holds an equal part, with gradients."""
    function = getattr(ring_flash_attn, f"llama3_flash_attn_varlen{packed}_func")
    case = Case(16, heads=2, kv_heads=2, causal=causal, documents=DOCUMENTS)

    def work(group):
        query, key, value = (part[0].requires_grad_() for part in parts_of(case, group.rank))
        made = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor(DOCUMENTS, dtype=torch.int32), causal, group.rank, group.size
        )
        given = {
            "": (query, key, value),
            "_kvpacked": (query, torch.stack([key, value], 1)),
            "_qkvpacked": (torch.stack([query, key, value], 1),),
        }[packed]
        *others, documents = made
        arguments = (*given, *others, 1, documents)
        assert isinstance(function(*arguments, causal=causal, group=group), torch.Tensor)
        out, lse, nothing = function(*arguments, causal=causal, return_attn_probs=True, group=group)
        assert nothing is None
        expected = exact(case, group.rank, group.size)
        assert_attention(out.transpose(0, 1)[None], lse[None], expected, case)
        (dq,) = torch.autograd.grad(out.sum(), [query])
        assert dq.abs().sum() > 0
        with pytest.raises(
            mk.ArgumentError, match=r"local_k_slice must be the last value of.*got slice\(0, 16, None\)"
        ):
            function(*given, *others, 1, slice(0, 16), group=group)

    run(work, cluster=(1, 2))


@pytest.mark.parametrize(
    ("bounds", "causal", "rank", "queries", "keys"),
    [
        ((0, 5, 20, 32), True, 0, [0, 5, 16], [0, 5, 16]),
        ((0, 5, 20, 32), False, 0, [0, 5, 16], [0, 5, 20]),
        ((0, 5, 20, 32), True, 1, [0, 4, 16], [0, 15, 27]),
        ((0, 16, 32), True, 1, [0, 16], [0, 16]),
        ((0, 32), True, 1, [0, 16], [0, 32]),
        ((0, 32), False, 0, [0, 16], [0, 32]),
    ],
)
def test_prepared_documents(bounds, causal, rank, queries, keys):
    """What ring-flash-attn returns for them, but for the slice."""
    made = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(bounds), causal, rank, 2)
    assert [each.tolist() for each in made[:2]] == [queries, keys]
    assert made[2:4] == tuple(max(b - a for a, b in itertools.pairwise(each)) for each in (queries, keys))
    assert made[4].bounds == bounds
    with pytest.raises(mk.ArgumentError, match="must end at a multiple of the 3 ranks, got 32"):
        ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 32]), causal, rank, 3)
