"""A drop-in replacement for the package ring-flash-attn: a program that imports its functions from here runs one fused
kernel per call, forward and backward.

    from mkernel.integrations.ring_flash_attn import zigzag_ring_flash_attn_func

Tensors are [batch, seq_local, heads, dim]; packed ones are [batch, seq_local, 2, heads, dim] with keys and values, or
[batch, seq_local, 3, heads, dim] with queries, too. `ring_` functions take the contiguous layout, `zigzag_ring_`
functions the zigzag layout (`mk.ring_attention`); the latter are causal there, and so they are here. Fewer heads of
keys and values are grouped-query attention.

What differs: `group` may be anything that stands for a group, and defaults to mkernel's current group. `window_size` is
honoured by all functions. `deterministic` may be anything: results always have the same bits. `dropout_p` and
`alibi_slopes` are refused unless they are off. With `return_attn_probs`, the result is (out, log-sum-exp, None).

`llama3_flash_attn_varlen_` functions are for packed documents, of whose positions every rank holds an equal part:
tensors are [positions, heads, dim]. `llama3_flash_attn_prepare_cu_seqlens` makes what they take, and its last value is
not a slice: it holds the documents of the whole sequence. `heads_k_stride` has no effect: memory does not depend on it.

The other functions for documents (`*_varlen_*`), which divide each document among the ranks, are not here: pass
`cu_seqlens` of the whole sequence to `mk.ring_attention`. Neither are the striped ones.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from mkernel.ops.attention import ring_attention
from mkernel.runtime.collective import traceable
from mkernel.runtime.errors import ArgumentError

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
]


@traceable()
def attend(
    layout: str, parts: tuple[torch.Tensor, ...], dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], alibi_slopes: Any, return_attn_probs: bool, *, documents: Any = None,
    group: Any = None,
) -> Any:  # fmt: skip
    """What all functions do. parts: query, key and value; or a tensor with all of them; or query and one with both.
    documents: boundaries of packed documents."""
    if documents is not None:
        if not isinstance(documents, WholeDocuments):
            raise ArgumentError(
                f"local_k_slice must be the last value of mkernel's llama3_flash_attn_prepare_cu_seqlens, got "
                f"{documents!r}"
            )
        parts = tuple(part[None] for part in parts)
    query, key, value = _unpacked(parts)
    if alibi_slopes is not None:
        raise ArgumentError("alibi_slopes must be None: ring_attention adds no bias to scores")
    if layout == "zigzag" and not causal:
        raise ArgumentError(
            "causal must be True in the zigzag layout, as in ring-flash-attn; mk.ring_attention also takes False"
        )
    result, lse = ring_attention(
        query, key, value, None, dropout_p, causal, scale=softmax_scale, enable_gqa=True, layout=layout,
        input_layout="bshd", cu_seqlens=None if documents is None else documents.bounds,
        window_size=window_size, return_lse=True, group=group,
    )  # fmt: skip
    if documents is not None:
        result, lse = result[0], lse[0]
    return (result, lse, None) if return_attn_probs else result


def _unpacked(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    *apart, packed = parts
    count = 3 - len(apart)
    if count == 1:
        return parts
    if not isinstance(packed, torch.Tensor) or packed.dim() != 5 or packed.shape[2] != count:
        name = "kv" if apart else "qkv"
        got = f"shape {tuple(packed.shape)}" if isinstance(packed, torch.Tensor) else type(packed).__name__
        raise ArgumentError(f"{name} must be [batch, seq_local, {count}, heads, dim], got {got}")
    return (*apart, *packed.unbind(2))


def ring_flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention over a sequence in the contiguous layout, with separate queries, keys and values."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("contiguous", (q, k, v), *options, group=group)


def ring_flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention over a sequence in the contiguous layout, with keys and values in one tensor."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("contiguous", (q, kv), *options, group=group)


def ring_flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention over a sequence in the contiguous layout, with queries, keys and values in one tensor."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("contiguous", (qkv,), *options, group=group)


def zigzag_ring_flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention over a sequence in the zigzag layout, with separate queries, keys and values."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("zigzag", (q, k, v), *options, group=group)


def zigzag_ring_flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention over a sequence in the zigzag layout, with keys and values in one tensor."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("zigzag", (q, kv), *options, group=group)


def zigzag_ring_flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention over a sequence in the zigzag layout, with queries, keys and values in one tensor."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("zigzag", (qkv,), *options, group=group)


# -- packed documents


class WholeDocuments(NamedTuple):
    """Boundaries of packed documents in the whole sequence, which stands for ring-flash-attn's `local_k_slice`."""

    bounds: tuple[int, ...]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, WholeDocuments]:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, documents) of a rank that holds its equal part of packed
    documents, for the `llama3_` functions. Only the last one counts there; the others are what ring-flash-attn returns.

    Args:
        cu_seqlens: boundaries of the documents in the whole sequence, from 0 to a multiple of world_size.
        causal: whether attention will be causal.
    """
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[-1] % world_size:
        raise ArgumentError(
            f"cu_seqlens must end at a multiple of the {world_size} ranks, got {bounds[-1] if bounds else 'nothing'}: "
            f"every rank holds an equal part. mk.ring_attention takes parts of any lengths"
        )
    length = bounds[-1] // world_size
    first, end = rank * length, (rank + 1) * length
    left = bisect_left(bounds, first)
    left -= bounds[left] != first
    documents = bounds[left : bisect_left(bounds, end) + 1]
    queries = [min(max(bound, first), end) - first for bound in documents]
    keys = [(min(bound, end) if causal else bound) - documents[0] for bound in documents]
    longest = [max((b - a for a, b in pairwise(each)), default=0) for each in (queries, keys)]
    tensors = [torch.tensor(each, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for each in (queries, keys)]
    return tensors[0], tensors[1], longest[0], longest[1], WholeDocuments(tuple(bounds))


def llama3_flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: WholeDocuments, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention within packed documents, with separate queries, keys and values. The arguments from cu_seqlens_q to
    local_k_slice are those of `llama3_flash_attn_prepare_cu_seqlens`."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("contiguous", (q, k, v), *options, documents=local_k_slice, group=group)


def llama3_flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: WholeDocuments, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention within packed documents, with keys and values in one tensor. The arguments from cu_seqlens_q to
    local_k_slice are those of `llama3_flash_attn_prepare_cu_seqlens`."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("contiguous", (q, kv), *options, documents=local_k_slice, group=group)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: WholeDocuments, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attention within packed documents, with queries, keys and values in one tensor. The arguments from cu_seqlens_q
    to local_k_slice are those of `llama3_flash_attn_prepare_cu_seqlens`."""
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    return attend("contiguous", (qkv,), *options, documents=local_k_slice, group=group)
