"""What ring_attention refuses, in which words, and that a refused call leaves the group usable."""

from __future__ import annotations

import pytest
import torch
from support.attention_reference import Case, call
from support.operator_calls import run

import mkernel as mk


def zeros(*shape, **options):
    return torch.zeros(shape or (1, 2, 8, 64), **options)


SAME = (zeros(), zeros(), zeros())
FRAME = zeros(1, 2, 8, 256)
REFUSED = {
    "query is no tensor": (([1.0], zeros(), zeros()), {}, ["query must be a torch.Tensor", "list"]),
    "out is no tensor": (SAME, {"out": 3}, ["out must be a torch.Tensor", "int"]),
    "3 dimensions": ((zeros(2, 8, 64), zeros(), zeros()), {}, ["query must be [batch, heads, seq_local, dim]"]),
    "elsewhere": ((zeros(), zeros(device="meta"), zeros()), {}, ["key is on meta", "this rank's device is cpu"]),
    "grad": (
        (zeros(requires_grad=True), zeros(), zeros()),
        dict(out=zeros()),
        ["out cannot be combined with tensors that require grad", "torch.no_grad()"],
    ),
    "two dtypes": ((zeros(), zeros(), zeros(dtype=torch.float16)), {}, ["value has dtype torch.float16", "the same"]),
    "float64": ((zeros(dtype=torch.float64),) * 3, {}, ["query has dtype torch.float64", "torch.bfloat16"]),
    "head dimension": ((zeros(1, 2, 8, 80),) * 3, {}, ["head dimension 80", "64, 96, 128, 192, 256", "scale=80**-0.5"]),
    "key and value differ": ((zeros(), zeros(), zeros(1, 1, 8, 64)), {}, ["key is (1, 2, 8, 64)", "value is"]),
    "value's dim": ((*SAME[:2], zeros(1, 2, 8, 80)), {}, ["value has head dimension 80", "64, 96, 128, 192, 256"]),
    "batches differ": ((zeros(), *[zeros(2, 2, 8, 64)] * 2), {}, ["batch and dim must be the same"]),
    "no keys": ((zeros(), *[zeros(1, 2, 0, 64)] * 2), {}, ["key has no positions", "query has 8"]),
    "zigzag of different lengths": (
        (zeros(), *[zeros(1, 2, 10, 64)] * 2),
        {"layout": "zigzag"},
        ["query has 8 positions", "key has 10", "layout='contiguous'"],
    ),
    "documents of different lengths": (
        (zeros(), *[zeros(1, 2, 10, 64)] * 2),
        {"cu_seqlens": (0, 20)},
        ["query has 8 positions", "key has 10", "cu_seqlens"],
    ),
    "out without value's dim": (
        (*SAME[:2], zeros(1, 2, 8, 128)),
        {"out": zeros()},
        ["out", "(1, 2, 8, 128)", "as query, with value's dim"],
    ),
    "heads differ": ((zeros(), *[zeros(1, 1, 8, 64)] * 2), {}, ["2 heads and key has 1", "enable_gqa=True"]),
    "no multiple": (
        (zeros(1, 3, 8, 64), zeros(), zeros()),
        {"enable_gqa": True},
        ["3 heads, which is not a multiple of key's 2"],
    ),
    "layout": (SAME, {"layout": "ring"}, ["layout must be one of 'contiguous', 'zigzag'", "'ring'"]),
    "layout with gradients": ((zeros(requires_grad=True),) * 3, {"layout": None}, ["layout must be", "got None"]),
    "scale with gradients": ((zeros(requires_grad=True),) * 3, {"scale": "1"}, ["scale must be a number", "'1'"]),
    "softcap with gradients": ((zeros(requires_grad=True),) * 3, {"softcap": None}, ["softcap must be 0", "got None"]),
    "input_layout": (SAME, {"input_layout": ["bshd"]}, ["input_layout must be one of 'bhsd', 'bshd'"]),
    "out in another order": (
        (zeros(1, 8, 2, 64),) * 3,
        {"out": zeros(), "input_layout": "bshd"},
        ["out has shape (1, 2, 8, 64), but the result has (1, 8, 2, 64)"],
    ),
    "scale 0": (SAME, {"scale": 0.0}, ["scale must be a number greater than 0", "0.0"]),
    "negative scale": (SAME, {"scale": -1.0}, ["scale must be", "negate query"]),
    "no scale": (SAME, {"scale": float("nan")}, ["scale must be", "finite"]),
    "out of another shape": (SAME, {"out": zeros(1, 2, 8, 128)}, ["out has shape (1, 2, 8, 128)", "(1, 2, 8, 64)"]),
    "out of another dtype": (SAME, {"out": zeros(dtype=torch.float16)}, ["out has dtype torch.float16"]),
    "out is query": (SAME, {"out": SAME[0]}, ["out overlaps query"]),
    "out overlaps value": (
        (zeros(), zeros(), FRAME[..., :64]),
        {"out": FRAME[..., 32:96]},
        ["out overlaps value in memory"],
    ),
    "expanded out": (SAME, {"out": zeros(1, 1, 8, 64).expand(1, 2, 8, 64)}, ["out is an expanded tensor"]),
    "cu_seqlens of floats": (SAME, {"cu_seqlens": torch.zeros(3)}, ["cu_seqlens must be a 1-D tensor of integers"]),
    "cu_seqlens in a list, of floats": (SAME, {"cu_seqlens": [0, 7.9, 16]}, ["sequence of integers", "7.9"]),
    "cu_seqlens is a length": (SAME, {"cu_seqlens": 16}, ["cu_seqlens must be a tensor or a sequence", "got 16"]),
    "cu_seqlens too short": (SAME, {"cu_seqlens": [0]}, ["cu_seqlens must be the boundaries", "at least 2 numbers"]),
    "cu_seqlens of a rank": (
        SAME,
        {"cu_seqlens": [0, 8]},
        ["from 0 to 16 (world * seq_local)", "got 0, ..., 8", "pass seq_lens"],
    ),
    "cu_seqlens shrinks": (SAME, {"cu_seqlens": [0, 9, 5, 16]}, ["ascending"]),
    "config is none": (SAME, {"config": 3}, ["config must be a mk.Config"]),
    "config.tile_k": (SAME, {"config": mk.Config(tile_k=16)}, ["config.tile_k does not apply to ring_attention"]),
    "config.steps 0": (SAME, {"config": mk.Config(steps=0)}, ["config.steps must be at least 1"]),
    "config.ctas": (SAME, {"config": mk.Config(ctas=1000)}, ["config.ctas is 1000", "must all be resident"]),
    "config.intra_ctas": (SAME, {"config": mk.Config(intra_ctas=0)}, ["config.intra_ctas must be at least 1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    args, options, words = REFUSED[name]

    def work(group):
        before = group.heap.nbytes
        with pytest.raises(mk.ArgumentError) as caught:
            mk.ring_attention(*args, **options)
        for word in words:
            assert word in str(caught.value)
        assert group.heap.nbytes == before

    run(work)


def test_the_gradient_has_no_teams():
    def work(group):
        with pytest.raises(mk.ArgumentError, match=r"config\.team_ctas does not apply to ring_attention_backward"):
            mk.ring_attention_backward(*[zeros()] * 5, zeros(1, 2, 8), config=mk.Config(team_ctas=2))

    run(work, cluster=(1, 1))


def test_too_few_steps():
    def work(group):
        with pytest.raises(mk.ArgumentError, match=r"config\.steps is 1, but must be at least 4"):
            mk.ring_attention(*[zeros(1, 1, 16, 64)] * 3, config=mk.Config(tile_n=16, steps=1))

    run(work, cluster=(1, 3))


@pytest.mark.parametrize(
    "differ",
    [
        lambda rank: dict(is_causal=rank == 0),
        lambda rank: dict(layout=("zigzag", "contiguous")[rank]),
        lambda rank: dict(cu_seqlens=[0, 4 + rank, 16]),
        lambda rank: dict(config=mk.Config(steps=2 + rank)),
        lambda rank: dict(config=mk.Config(tile_n=16 << rank)),
    ],
)
def test_ranks_must_agree(differ):
    def work(group):
        with pytest.raises(mk.ArgumentError, match="must pass the same values"):
            mk.ring_attention(*SAME, **differ(group.rank))
        call(group, Case(5))

    run(work)


def test_beside_each_other_is_not_over_each_other():
    """One tensor for query, key, value and out, each a quarter of its columns, or of its heads."""

    def work(group):
        case = Case(8, heads=2, kv_heads=2)
        for quarters in (zeros(1, 2, 8, 256).chunk(4, 3), zeros(1, 8, 8, 64).chunk(4, 1)):
            tensors = [
                quarter.copy_(case.part(name, group.rank)) for quarter, name in zip(quarters, ("query", "key", "value"))
            ]
            call(group, case, tensors=tensors, out=quarters[3])

    run(work)


def test_no_group():
    with pytest.raises(mk.MKernelError, match=r"mk\.init"):
        mk.ring_attention(*SAME)
