"""Gradients of attention in float64, on one device, for the tests of ring_attention_backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

import mkernel as mk
from support.attention_reference import Case, scores_of

NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Gradients:
    """Of one tensor: exact values, and for each the bound of its error."""

    exact: torch.Tensor
    bound: torch.Tensor


def cotangents(case, rank, turn=0, with_lse=True):
    """(dout, dlse) of a rank; dlse is None unless wanted."""
    generator = torch.Generator().manual_seed(7919 * (1000 * turn + rank) + 17)
    dout = torch.randn(case.batch, case.heads, case.length, case.dim, generator=generator).to(case.dtype)
    dlse = torch.randn(case.batch, case.heads, case.length, generator=generator)
    return dout, dlse if with_lse else None


@lru_cache(maxsize=8)
def exact(case: Case, size: int, turn: int = 0, with_lse: bool = True) -> list[Gradients]:
    """dq, dk, dv of all ranks, in the order of ranks, through PyTorch's own gradients. A row that sees no key has none.

    Bounds. The kernel rounds weights and gradients of scores to the dtype, and the result; `out`, of which delta is
    made, was rounded before. Each rounding is at most eps/2 relative to a term. Everything else is fp32.
    """
    query, key, value = (case.whole(name, size, turn).double().requires_grad_() for name in NAMES)
    given = [cotangents(case, rank, turn, with_lse) for rank in range(size)]
    dout = torch.cat([dout for dout, _ in given], 2).double()
    seen = torch.cat([torch.cat([case.seen(r, s, size) for s in range(size)], 1) for r in range(size)], 0)
    scores = scores_of(case, query, key, seen)
    group = case.heads // case.kv_heads
    weights = torch.softmax(scores, -1)
    out = weights @ value.repeat_interleave(group, 1)
    results, gradients = [out], [dout]
    if with_lse:
        results.append(scores.logsumexp(-1))
        gradients.append(torch.cat([dlse for _, dlse in given], 2).double())
    found = torch.autograd.grad(results, [query, key, value], gradients)
    with torch.no_grad():
        bounds = _bounds(case, query, key, value, weights, out, dout, gradients[1] if with_lse else None)
    return [Gradients(each, bound) for each, bound in zip(found, bounds)]


def _bounds(case, query, key, value, weights, out, dout, dlse):
    eps, fp32 = torch.finfo(case.dtype).eps, 2.0**-23
    group = case.heads // case.kv_heads
    scale = case.dim**-0.5 if case.scale is None else case.scale
    wide_key, wide_value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    dp = dout @ wide_value.mT
    delta = (dout * out).sum(-1, keepdim=True) - (0 if dlse is None else dlse[..., None])
    ds = (weights * (dp - delta)).abs()
    # scores, their exponentials, and sums in fp32: errors relative to a weight
    score = scale * query.abs() @ wide_key.abs().mT
    relative = fp32 * (8 + 2 * score)
    size = (dout.abs() @ wide_value.abs().mT) + (dout * out).abs().sum(-1, keepdim=True) + (0 if dlse is None else dlse.abs()[..., None])
    error_of_delta = eps / 2 * (dout * out).abs().sum(-1, keepdim=True) if case.dtype != torch.float32 else 0.0
    error_of_ds = ds * (eps / 2 + relative) + weights * (error_of_delta + size * (16 * fp32 + relative))
    error_of_weights = weights * (eps / 2 + relative)

    def per_kv_head(tensor):
        batch, _, rows, dim = tensor.shape
        return tensor.view(batch, case.kv_heads, group, rows, dim).sum(2)

    length = key.shape[2]
    sums = fp32 * length**0.5
    raw = [
        scale * (error_of_ds + ds * sums) @ wide_key.abs(),
        per_kv_head(scale * (error_of_ds + ds * sums).mT @ query.abs()),
        per_kv_head((error_of_weights + weights * sums).mT @ dout.abs()),
    ]
    exact_size = [
        scale * ds @ wide_key.abs(), per_kv_head(scale * ds.mT @ query.abs()), per_kv_head(weights.mT @ dout.abs())
    ]
    return [1.05 * (error + eps / 2 * magnitude) + 1e-30 for error, magnitude in zip(raw, exact_size)]


def assert_gradients(found, case, rank, size, turn=0, with_lse=True, dtype=None):
    """Every element within the bound of float64. NaN never passes."""
    rows = slice(rank * case.length, (rank + 1) * case.length)
    for name, actual, reference in zip(("dq", "dk", "dv"), found, exact(case, size, turn, with_lse)):
        expected, bound = reference.exact[:, :, rows], reference.bound[:, :, rows]
        assert actual.shape == expected.shape, name
        assert actual.dtype == case.dtype, name
        error = (actual.double() - expected).abs()
        worst = (error / bound).max().item() if error.numel() else 0.0
        assert bool((error <= bound).all()), f"{name} of rank {rank}: {worst} bounds, largest error {error.max().item()}"


def call(group, case, turn=0, *, with_lse=True, tensors=None, dout=None, config=None, forward_config=None):
    """One forward and one backward call on this rank, with the case's values; gradients and inputs are checked."""
    given = tensors or [case.part(name, group.rank, turn) for name in NAMES]
    made, dlse = cotangents(case, group.rank, turn, with_lse)
    dout = made if dout is None else dout
    out, lse = mk.ring_attention(*given, group=group, return_lse=True, config=forward_config, **case.arguments())
    inputs = [dout, *given, out, lse, *([dlse] if with_lse else [])]
    before = [tensor.clone() for tensor in inputs]
    found = mk.ring_attention_backward(
        dout, *given, out, lse, dlse=dlse, group=group, config=config, **case.arguments()
    )
    assert all(torch.equal(tensor, old) for tensor, old in zip(inputs, before))
    assert_gradients(found, case, group.rank, group.size, turn, with_lse)
    return found
