"""ring_attention and its gradient where ranks hold different numbers of positions, and in the zigzag layout with
sequences of any length."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.attention_gradients import NAMES, assert_gradients, cotangents
from support.attention_gradients import call as call_backward
from support.attention_reference import Case
from support.attention_reference import call as call_forward
from support.operator_calls import assert_same, cluster_name, run

import mkernel as mk
from mkernel.ops.attention.lengths import zigzag_lengths
from mkernel.ops.attention.run import check_options
from mkernel.ops.attention.sequences import Scoring, pattern_of

THOROUGH = pytest.mark.thorough


def small(**more):
    return mk.Config(tile_m=16, tile_n=16, **more)


def both(case, cluster=(1, 2), config=None, turns=1, **options):
    """Forward and backward calls: the gradient is computed from the result, so both are checked."""
    config = config or small()

    def work(group):
        found = []
        for turn in range(turns):
            out, lse = call_forward(group, case, turn, config=config)
            found.append((out, lse, *call_backward(group, case, turn, config=config, forward_config=config)))
        return found

    return run(work, cluster=cluster, **options)


LENGTHS = {
    "one more": ((1, 2), (21, 20)),
    "tiles and less": ((1, 3), (40, 1, 17)),
    "last is longest": ((1, 3), (3, 16, 50)),
    "one is empty": ((1, 3), (20, 0, 33)),
    "first is empty": ((1, 2), (0, 20)),
    "two levels": ((2, 2), (7, 33, 0, 18)),
    "two nodes": ((2, 1), (33, 18)),
    "three nodes": ((3, 2), (7, 0, 20, 3, 16, 1)),
}
QUICK_LENGTHS = ("tiles and less", "first is empty", "two levels")


@pytest.mark.parametrize("causal", [pytest.param(False, marks=THOROUGH), True])
@pytest.mark.parametrize(
    "name", [name if name in QUICK_LENGTHS else pytest.param(name, marks=THOROUGH) for name in LENGTHS]
)
def test_contiguous(name, causal):
    cluster, lengths = LENGTHS[name]
    both(Case(0, heads=2, kv_heads=1, causal=causal, seq_lens=lengths), cluster, seed=len(name))


@pytest.mark.parametrize(
    ("cluster", "keys", "queries"),
    [
        ((1, 2), (20, 33), (1, 0)),
        ((1, 3), (17, 0, 20), (0, 5, 19)),
        ((2, 2), (16, 3, 0, 9), (0, 0, 0, 1)),
        pytest.param((1, 2), (5, 2), (20, 18), marks=THOROUGH),
    ],
)
def test_queries_of_a_cache(cluster, keys, queries):
    """As many queries as there are on each rank, aligned at the last key of all."""
    both(Case(0, causal=True, seq_lens=keys, query_lens=queries, value_dim=128, dim=96), cluster)


@pytest.mark.parametrize("whole", [5, 43, *(pytest.param(whole, marks=THOROUGH) for whole in (1, 22, 64 + 7))])
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), pytest.param((1, 3), marks=THOROUGH), (2, 2)], ids=cluster_name)
def test_zigzag(cluster, whole):
    lengths = zigzag_lengths(whole, cluster[0] * cluster[1])
    both(Case(0, causal=whole != 22, layout="zigzag", seq_lens=lengths), cluster, seed=whole)


def test_zigzag_with_an_odd_number_on_every_rank():
    """There is nothing to say: the lengths are the same, and only the pieces are not."""
    both(Case(9, causal=True, layout="zigzag"), (1, 2), turns=2)


DOCUMENTS = {
    "of any length": (0, 7, 30, 45),
    "single positions": (0, 1, 2, 3, 22, 23, 44, 45),
    "between pieces": (0, 12, 23, 34, 45),
    "one": (0, 45),
}
OTHERS = ("of any length", "between pieces", "one")


@pytest.mark.parametrize("cluster", [(1, 2), pytest.param((2, 2), marks=THOROUGH)], ids=cluster_name)
@pytest.mark.parametrize("name", ["single positions", *(pytest.param(name, marks=THOROUGH) for name in OTHERS)])
def test_packed_documents_in_the_zigzag_layout(name, cluster):
    """The last boundary says how long the sequence is, so seq_lens need not."""
    lengths = zigzag_lengths(45, cluster[0] * cluster[1])
    case = Case(0, causal=True, layout="zigzag", documents=DOCUMENTS[name], seq_lens=lengths, passes=name in OTHERS[:2])
    both(case, cluster)


@pytest.mark.parametrize("window", [(6, 0), pytest.param((3, 5), marks=THOROUGH)])
def test_windows_and_documents_where_lengths_differ(window):
    case = Case(0, causal=window[1] == 0, window=window, documents=(0, 19, 40, 61), seq_lens=(33, 5, 23))
    both(case, (1, 3))


@pytest.mark.parametrize(
    ("cluster", "lengths", "steps", "heads"),
    [
        ((1, 3), (16, 30, 0), 1, 3),
        pytest.param((1, 3), (64, 30, 48), 1, 1, marks=THOROUGH),
        pytest.param((2, 2), (16, 9, 0, 32), 2, 6, marks=THOROUGH),
    ],
)
def test_slots_are_reused(cluster, lengths, steps, heads):
    """And heads come in several parts, with a straggler; the same bits in every run. A rank without positions frees
    rounds, too."""
    case = Case(0, heads=heads, kv_heads=heads, causal=True, seq_lens=lengths)
    options = [{"slow": {0: 0.02}}, {"seed": 5, "late": {1: 2000}}]
    one, other = (both(case, cluster, small(steps=steps), turns=2, **each) for each in options)
    for mine, theirs in zip(one, other):
        for results, others in zip(mine, theirs):
            for result, again in zip(results, others):
                assert_same(result, again)


def test_dtypes_and_strides():
    case = Case(0, heads=4, kv_heads=2, batch=2, dtype=torch.bfloat16, causal=True, seq_lens=(18, 7))

    def work(group):
        tensors = [case.part(name, group.rank).transpose(1, 2).contiguous().transpose(1, 2) for name in NAMES]
        call_backward(group, case, tensors=tensors, config=small())

    run(work)


def test_lengths_change_from_call_to_call():
    def work(group):
        for turn, lengths in enumerate([(20, 3), (3, 20), (16, 16), (0, 5)]):
            case = Case(0, causal=True, seq_lens=lengths)
            call_backward(group, case, turn, config=small())

    run(work, slow={1: 0.02})


def test_equal_lengths_are_an_ordinary_call():
    def work(group):
        given = [torch.zeros(1, 1, 8, 64)] * 3
        for layout in ("contiguous", "zigzag"):
            plan = mk.explain("ring_attention", *given, layout=layout, seq_lens=[8, 8], query_lens=(8, 8))
            assert plan.places is None
            assert plan.spans is None
        odd = mk.explain("ring_attention", *[torch.zeros(1, 1, 9, 64)] * 3, layout="zigzag")
        assert odd.places.tolist() == [0, 5, 14, 4, 5, 5, 10, 4]

    run(work)


def test_explain():
    """On every rank, also on one without positions: rounds and buffers are the same on all."""
    case = Case(0, heads=4, kv_heads=4, seq_lens=(32, 0, 7))

    def work(group):
        given = [case.part(name, group.rank) for name in NAMES]
        forward = mk.explain("ring_attention", *given, **case.arguments(), config=small(steps=2))
        lse = torch.zeros(given[0].shape[:3])
        backward = mk.explain("ring_attention_backward", given[0], *given, given[0], lse, **case.arguments())
        return [(plan.rounds, plan.window, plan.part_rows, plan.chunks, plan.padded) for plan in (forward, backward)]

    plans = run(work, cluster=(1, 3))
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_through_autograd(cluster):
    """A rank without positions, which has gradients without rows."""
    case = Case(0, heads=2, kv_heads=1, causal=True, seq_lens=(0, 11))

    def work(group):
        given = [case.part(name, group.rank).requires_grad_() for name in NAMES]
        results = mk.ring_attention(*given, return_lse=True, **case.arguments())
        torch.autograd.backward(results, list(cotangents(case, group.rank)))
        assert_gradients([tensor.grad for tensor in given], case, group.rank, group.size)
        module = mk.nn.ContextParallelAttention(is_causal=True, input_layout="bhsd")
        lens = torch.tensor([0, 11])
        assert_same(module(*given, seq_lens=lens, query_lens=lens), results[0])
        query = case.part("query", group.rank)[:, :, -1:]
        one = (0, 1)
        out = module(query, *given[1:], seq_lens=lens, query_lens=one)
        assert out.shape[2] == one[group.rank]
        assert_same(out, mk.ring_attention(query, *given[1:], **case.arguments() | dict(query_lens=one)))

    run(work, cluster=cluster)


def test_memory_is_that_of_the_longest_rank():
    """Slots hold two steps of as many keys and values as the longest rank has. Those of partials hold one of every rank
    for as many rounds."""
    case = Case(0, heads=4, kv_heads=4, dtype=torch.bfloat16, seq_lens=(32, 8, 0))
    step = 2 * 4 * 32 * 64

    def work(group):
        call_backward(group, case, config=small(steps=2), forward_config=small(steps=2))
        found = {op: workspace for (op, _), workspace in group._workspaces.items()}
        sizes = {
            "ring_attention": 2 * step * 2,
            "ring_attention_backward": 2 * step * 2 + 3 / 2 * 2 * step * 4 + 2 * 256,
        }
        for op, size in sizes.items():
            assert found[op].segment.memory.numel() - found[op].data_start <= size, op

    run(work, cluster=(1, 3))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 5, 13])
def test_to_and_from_zigzag(size, length):
    sequence = torch.arange(2 * length).view(1, 2, length, 1)

    def work(group):
        part = mk.to_zigzag(sequence)
        case = Case(0, layout="zigzag", seq_lens=zigzag_lengths(length, size))
        assert torch.equal(part, sequence[:, :, case.positions(group.rank, size)])
        assert torch.equal(mk.to_zigzag(sequence.transpose(0, 2), dim=0), part.transpose(0, 2))
        return part

    parts = run(work, cluster=(1, size))
    assert torch.equal(mk.from_zigzag(parts), sequence)
    assert torch.equal(mk.from_zigzag([part.transpose(2, 3) for part in parts], dim=-1), sequence.transpose(2, 3))


REFUSED = {
    "too few": (dict(seq_lens=[8]), "seq_lens must be 2 numbers from 0, one for each rank"),
    "negative": (dict(seq_lens=[8, -1]), "seq_lens must be 2 numbers from 0"),
    "no numbers": (dict(seq_lens="ab"), "seq_lens must be a sequence of integers"),
    "floats": (dict(query_lens=torch.tensor([8.0, 8.0])), "query_lens must be a sequence of integers"),
    "one number": (dict(seq_lens=16), "seq_lens must be a sequence of integers, got 16"),
    "a window of floats": (dict(window_size=(1.0, 0)), "window_size must be a pair of integers"),
    "a document of floats": (dict(cu_seqlens=[0, 7.9, 16]), "cu_seqlens must be a tensor or a sequence of integers"),
    "documents are a length": (dict(cu_seqlens=16), "cu_seqlens must be a tensor or a sequence of integers, got 16"),
    "another length": (dict(seq_lens=[9, 9]), "seq_lens says that rank . holds 9 positions, but key has 8"),
    "other queries": (dict(query_lens=[9, 9]), "query_lens says that rank . holds 9 positions, but query has 8"),
    "documents of others": (dict(seq_lens=[8, 8], cu_seqlens=[0, 17]), "ascending, from 0 to 16"),
    "descending documents": (dict(layout="zigzag", cu_seqlens=[0, -3]), "ascending, from 0 to its length; got 0, .*-3"),
    "documents that end early": (dict(layout="zigzag", cu_seqlens=[0, 14]), "cu_seqlens ends at 14, and key has 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, words = REFUSED[name]

    def work(group):
        plain = torch.zeros(1, 1, 8, 64)
        for query in (plain, plain.clone().requires_grad_()):
            with pytest.raises(mk.ArgumentError, match=words):
                mk.ring_attention(query, plain, plain, **changes)
        mk.ring_attention(plain, plain, plain)

    run(work)


def test_lengths_that_no_layout_has():
    def work(group):
        given = [torch.zeros(1, 1, (6, 8)[group.rank], 64)] * 3
        with pytest.raises(mk.ArgumentError, match=r"in the zigzag layout they hold \(7, 7\) of 14 positions"):
            mk.ring_attention(*given, layout="zigzag", seq_lens=[6, 8])
        with pytest.raises(
            mk.ArgumentError, match=r"^seq_lens says .*, but query has 2: .* unless query_lens is given"
        ):
            mk.ring_attention(given[0][:, :, :2], *given[1:], seq_lens=[6, 8])
        with pytest.raises(mk.ArgumentError, match="with cu_seqlens, these must be the same"):
            mk.ring_attention(given[0][:, :, :2], *given[1:], seq_lens=[6, 8], query_lens=[2, 2], cu_seqlens=[0, 14])
        with pytest.raises(
            mk.ArgumentError,
            match=r"pass the same values.*(1, 1, 6, 64.*seq_lens=None.*1, 1, 8|1, 1, 8, 64.*seq_lens=None.*1, 1, 6)",
        ):
            mk.ring_attention(*given)
        empty = [tensor[:, :, :0] for tensor in given]
        with pytest.raises(mk.ArgumentError, match="no rank holds any key, but there are 14 queries"):
            mk.ring_attention(given[0], *empty[1:], seq_lens=[0, 0], query_lens=[6, 8])
        out = mk.ring_attention(*empty, seq_lens=[0, 0])
        assert out.shape == (1, 1, 0, 64)
        for lens in ([6, 8], np.array([6, 8]), torch.tensor([6, 8])):
            mk.ring_attention(*given, seq_lens=lens)

    run(work)


def test_the_limit_is_that_of_all_lengths():
    """One rank may hold nearly everything."""
    group = SimpleNamespace(size=2, rank=0)
    tensor = torch.empty(1, 1, 2**30, 64, device="meta")

    def pattern(layout, *lens):
        check_options(group, tensor, tensor, layout, False, Scoring())
        return pattern_of(group, tensor, tensor, False, layout, None, None, lens)

    assert pattern("contiguous", (2**30, 2**30 - 1), None).lengths.keys == (2**30, 2**30 - 1)
    for call in (("zigzag", None, None), ("contiguous", None, None), ("contiguous", (2**30, 2**30), None)):
        with pytest.raises(mk.ArgumentError, match="the sequence has 2147483648 positions; the limit is"):
            pattern(*call)


def test_parts_without_a_dimension():
    with pytest.raises(mk.ArgumentError, match=r"parts must have a dimension 2 \(dim\).*; got \(3, 4\), \(3, 4\)"):
        mk.from_zigzag([torch.zeros(3, 4)] * 2)
    with pytest.raises(mk.ArgumentError, match="each a tensor; got list"):
        mk.from_zigzag([[1, 2], [3, 4]])


@pytest.mark.parametrize(("sequence", "got"), [(torch.zeros(3, 4), r"\(3, 4\)"), ([1, 2], "list")], ids=["2-D", "list"])
def test_a_sequence_without_a_dimension(sequence, got):
    def work(group):
        with pytest.raises(mk.ArgumentError, match=rf"sequence must be a tensor with a dimension 2 \(dim\).*got {got}"):
            mk.to_zigzag(sequence)

    run(work, cluster=(1, 1))


def test_ranks_must_agree_on_lengths():
    def work(group):
        given = [torch.zeros(1, 1, 8, 64)] * 3
        with pytest.raises(mk.ArgumentError, match="must pass the same values"):
            mk.ring_attention(*given, seq_lens=[8, 9] if group.rank == 0 else [9, 8])
        mk.ring_attention(*given)

    run(work)
