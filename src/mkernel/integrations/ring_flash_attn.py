"""The functions of the package ring-flash-attn, by their names: a program that imports them from here instead runs one
fused kernel per call, forward and backward.

    from mkernel.integrations.ring_flash_attn import zigzag_ring_flash_attn_func

Tensors are [batch, seq_local, heads, dim]; packed ones are [batch, seq_local, 2, heads, dim] with keys and values, or
[batch, seq_local, 3, heads, dim] with queries, too. `ring_` functions take the contiguous layout, `zigzag_ring_`
functions the zigzag layout (`mk.ring_attention`); the latter are causal there, and so they are here. Fewer heads of
keys and values are grouped-query attention.

What differs: `group` may be anything that stands for a group, and defaults to mkernel's current group. `window_size` is
honoured by all functions. `deterministic` may be anything: results always have the same bits. `dropout_p` and
`alibi_slopes` are refused unless they are off. With `return_attn_probs`, the result is (out, log-sum-exp, None).

The functions for sequences of several lengths (`*_varlen_*`), which divide every document evenly among the ranks, are
not here: pass `cu_seqlens` of the whole sequence to `mk.ring_attention`. Neither are the striped ones.
"""

from __future__ import annotations

from typing import Any

import torch

from mkernel.ops.attention import ring_attention
from mkernel.runtime.collective import traceable
from mkernel.runtime.errors import ArgumentError

__all__ = [
    "ring_flash_attn_func", "ring_flash_attn_kvpacked_func", "ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_kvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func",
]  # fmt: skip


@traceable()
def attend(
    layout: str, parts: tuple[torch.Tensor, ...], dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], alibi_slopes: Any, return_attn_probs: bool, *, group: Any = None,
) -> Any:  # fmt: skip
    """What all functions do. parts: query, key and value; or a tensor with all of them; or query and one with both."""
    query, key, value = _unpacked(parts)
    if alibi_slopes is not None:
        raise ArgumentError("alibi_slopes must be None: ring_attention adds no bias to scores")
    if layout == "zigzag" and not causal:
        raise ArgumentError(
            "causal must be True in the zigzag layout, as in ring-flash-attn; mk.ring_attention also takes False"
        )
    result, lse = ring_attention(
        query, key, value, None, dropout_p, causal, scale=softmax_scale, enable_gqa=query.shape[-2] != key.shape[-2],
        layout=layout, input_layout="bshd", window_size=window_size, return_lse=True, group=group,
    )  # fmt: skip
    return (result, lse, None) if return_attn_probs else result


def _unpacked(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    *apart, packed = parts
    count = 3 - len(apart)
    if count == 1:
        return parts
    if packed.dim() != 5 or packed.shape[2] != count:
        name = "kv" if apart else "qkv"
        raise ArgumentError(f"{name} must be [batch, seq_local, {count}, heads, dim], got shape {tuple(packed.shape)}")
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
