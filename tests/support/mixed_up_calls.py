"""Ranks that mix up calls that all of them have made before. Runs on every rank, in the simulator or in processes."""

import re

import pytest
import torch

import mkernel as mk

KNOWN = 3  # calls of each kind before ranks mix them up: by then they are prepared, where that is possible


def _randn(group, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(group.rank)).to(group.device)


def _attention(group, large):
    return [_randn(group, 1, 2, 8 if large else 4, 64) for _ in range(3)]


def all_gather_matmul(group, large):
    a, b = _randn(group, 8 if large else 4, 16), _randn(group, 16, 4)
    return lambda: mk.all_gather_matmul(a, b, group=group)


def all_gather_matmul_weight_grad(group, large):
    rows = 8 if large else 4
    a, dy = _randn(group, rows, 16), _randn(group, group.size * rows, 4)
    return lambda: mk.all_gather_matmul_weight_grad(a, dy, group=group)


def matmul_reduce_scatter(group, large):
    a, b = _randn(group, group.size * (8 if large else 4), 16), _randn(group, 16, 4)
    return lambda: mk.matmul_reduce_scatter(a, b, group=group)


def matmul_all_reduce(group, large):
    a, b = _randn(group, 8 if large else 4, 16), _randn(group, 16, 4)
    return lambda: mk.matmul_all_reduce(a, b, group=group)


def ring_attention(group, large):
    inputs = _attention(group, large)
    return lambda: mk.ring_attention(*inputs, group=group)


def ring_attention_backward(group, large):
    inputs = _attention(group, large)
    out, lse = inputs[0].clone(), torch.zeros(inputs[0].shape[:-1], device=group.device)
    return lambda: mk.ring_attention_backward(inputs[0], *inputs, out, lse, group=group)


def _routed(group, hidden):
    x = _randn(group, 5, hidden)
    ids = torch.arange(10, device=group.device).view(5, 2) % (2 * group.size)
    return x, ids, torch.ones(5, 2, device=group.device)


def moe_dispatch_matmul(group, large):
    hidden = 32 if large else 16
    x, ids, _ = _routed(group, hidden)
    w = _randn(group, 2, hidden, 8)
    return lambda: mk.moe_dispatch_matmul(x, ids, w, group=group)


def moe_dispatch_scaled_matmul(group, large):
    hidden = 32 if large else 16
    x, ids, _ = _routed(group, hidden)
    w, scale_w = mk.quantize(_randn(group, 2, 8, hidden))
    given = x, ids, w.transpose(1, 2), None, scale_w.transpose(1, 2)
    return lambda: mk.moe_dispatch_scaled_matmul(*given, recipe_x="RowWise", group=group)


def moe_dispatch(group, large):
    x, ids, _ = _routed(group, 32 if large else 16)
    return lambda: mk.moe_dispatch(x, ids, 2, group=group)


def moe_combine(group, large):
    x, ids, weights = _routed(group, 16)
    y, handle = mk.moe_dispatch_matmul(x, ids, _randn(group, 2, 16, 8), group=group)
    z = _randn(group, len(y), 32 if large else 16)
    return lambda: mk.moe_combine(z, handle, weights, group=group)


def moe_ffn(group, large):
    hidden = 32 if large else 16
    x, ids, weights = _routed(group, hidden)
    w13, w2 = _randn(group, 2, hidden, 16), _randn(group, 2, 8, hidden)
    return lambda: mk.moe_ffn(x, ids, weights, w13, w2, group=group)


def scaled_moe_ffn(group, large):
    hidden = 32 if large else 16
    x, ids, weights = _routed(group, hidden)
    gate_up = mk.quantize(_randn(group, 2, 16, hidden))
    down = mk.quantize(_randn(group, 2, hidden, 8), "BlockWise128x128")
    (w1, scale_1), (w2, scale_2) = ([each.transpose(1, 2) for each in pair] for pair in (gate_up, down))
    given = x, ids, weights, w1, w2, None, scale_1, scale_2
    return lambda: mk.scaled_moe_ffn(*given, recipe_x="RowWise", group=group)


def _scaled(group, function, m, n, k):
    a, scale_a = mk.quantize(_randn(group, m, k))
    w, scale_w = mk.quantize(_randn(group, n, k))
    return lambda: function(a, w.t(), scale_a, scale_w.t(), group=group)


def all_gather_scaled_matmul(group, large):
    return _scaled(group, mk.all_gather_scaled_matmul, 32 if large else 16, 8, 16)


def scaled_matmul_reduce_scatter(group, large):
    return _scaled(group, mk.scaled_matmul_reduce_scatter, (32 if large else 16) * group.size, 8, 16)


def scaled_matmul_all_reduce(group, large):
    return _scaled(group, mk.scaled_matmul_all_reduce, 32 if large else 16, 8, 16)


CALLS = {
    call.__name__: call
    for call in (
        all_gather_matmul, all_gather_matmul_weight_grad, matmul_reduce_scatter, matmul_all_reduce, ring_attention,
        ring_attention_backward, moe_dispatch_matmul, moe_dispatch_scaled_matmul, moe_dispatch, moe_combine,
        moe_ffn, scaled_moe_ffn, all_gather_scaled_matmul, scaled_matmul_reduce_scatter, scaled_matmul_all_reduce,
    )
}  # fmt: skip


def _finish(group, call):
    call()
    group.synchronize()  # where calls return before they are done, the error may come here


def mix_up(group, name, other):
    """One rank makes another call than the rest: of another shape, and of another operator. Every rank is told, by the
    names of both calls, and the group can be used afterwards."""
    small, large = (CALLS[name](group, size) for size in (False, True))
    stranger = CALLS[other](group, False)
    for call in (small, large, stranger) * KNOWN:
        call()
    group.synchronize()
    for odd in {0, group.size - 1}:
        for wrong, named in ((large, name), (stranger, other)):
            with pytest.raises(
                mk.ArgumentError, match=r"must pass the same values|same calls in the same order"
            ) as caught:
                _finish(group, wrong if group.rank == odd else small)
            told = str(caught.value)
            assert len(re.findall(rf"\b{name}\(", told)) == (2 if named == name else 1), told
            assert re.search(rf"\b{named}\(", told), told
            _finish(group, small)
