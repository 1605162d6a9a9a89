"""Gradients of attention in float64, on one device, for the tests of ring_attention_backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

import mkernel as mk
from support import attention_reference
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
    columns = case.value_dim or case.dim
    dout = torch.randn(case.batch, case.heads, case.rows_of(rank), columns, generator=generator).to(case.dtype)
    dlse = torch.randn(case.batch, case.heads, case.rows_of(rank), generator=generator)
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
    blind = ~seen.any(1, keepdim=True)  # softmax would make NaN of them
    scores = scores.masked_fill(blind, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(blind, 0.0)
    out = weights @ value.repeat_interleave(group, 1)
    results, gradients = [out], [dout]
    if with_lse:
        results.append(scores.logsumexp(-1).masked_fill(blind[:, 0], 0.0))
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
    of_lse = 0.0 if dlse is None else dlse[..., None]
    products = (dout * out).abs().sum(-1, keepdim=True)
    delta = (dout * out).sum(-1, keepdim=True) - of_lse
    ds = (weights * (dout @ wide_value.mT - delta)).abs()
    # In fp32: scores and dp are sums over the columns of a head, whose errors add up like a random walk. A weight has
    # the error of its score, of the log-sum-exp and of the exponential.
    scores = scale * (query.square() @ wide_key.square().mT).sqrt()
    terms = (dout.square() @ wide_value.square().mT).sqrt() + products + abs(of_lse)
    of_weight = fp32 * (6 + 3 * scores)
    # below the smallest normal number, which is 6e-5 in fp16, numbers are rounded to multiples of a fixed one
    least = torch.finfo(case.dtype).smallest_normal * eps / 2
    error_of_weights = weights * (eps / 2 + of_weight) + least * (weights > 0)
    error_of_delta = eps / 2 * products if case.dtype != torch.float32 else 0.0
    error_of_ds = ds * (eps / 2 + of_weight) + weights * (error_of_delta + 2 * fp32 * terms) + least * (weights > 0)

    def per_kv_head(tensor):
        batch, _, rows, dim = tensor.shape
        return tensor.view(batch, case.kv_heads, group, rows, dim).sum(2)

    sums = eps / 2 + 4 * fp32  # the result is rounded, too
    of_dq, of_dk, of_dv = error_of_ds + sums * ds, error_of_ds + sums * ds, error_of_weights + sums * weights
    bounds = [
        scale * of_dq @ wide_key.abs(),
        per_kv_head(scale * of_dk.mT @ query.abs()),
        per_kv_head(of_dv.mT @ dout.abs()),
    ]
    return [bound + least + 1e-30 for bound in bounds]


def assert_gradients(found, case, rank, size, turn=0, with_lse=True):
    """Every element within the bound of float64. NaN never passes."""
    for name, actual, reference in zip(("dq", "dk", "dv"), found, exact(case, size, turn, with_lse)):
        count = case.rows_of if name == "dq" else case.keys_of
        first = sum(map(count, range(rank)))
        rows = slice(first, first + count(rank))
        expected, bound = reference.exact[:, :, rows], reference.bound[:, :, rows]
        assert actual.shape == expected.shape, name
        assert actual.dtype == case.dtype, name
        error = (actual.double() - expected).abs()
        worst = (error / bound).max().item() if error.numel() else 0.0
        assert bool((error <= bound).all()), (
            f"{name} of rank {rank}: {worst} bounds, largest error {error.max().item()}"
        )


def inputs(group, case, turn=0):
    """((dout, query, key, value, out, lse), dlse) of this rank, for a call without a forward call before it."""
    query, key, value = (case.part(name, group.rank, turn) for name in NAMES)
    dout, dlse = cotangents(case, group.rank, turn)
    out, lse, _ = attention_reference.exact(case, group.rank, group.size, turn)
    return (dout, query, key, value, out.to(case.dtype), lse.float()), dlse


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
