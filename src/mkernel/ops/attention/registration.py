"""torch.ops.mkernel.ring_attention and its gradient: with the group by name, and the boundaries of documents as a
tensor.

The operators return the result and its log-sum-exp, whether a caller wants that or not: the gradient needs it. The
gradient is another operator, `ring_attention_backward`, which has none itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.attention.backward import ring_attention_backward
from mkernel.ops.attention.lengths import counts_of
from mkernel.ops.attention.run import check_layout, check_scoring, result_shape, ring_attention
from mkernel.ops.attention.sequences import Counts, Documents, Scoring, boundaries_of, pair_of
from mkernel.runtime.config import Config

Numbers = Sequence[int] | None  # an encoded configuration, a window, or lengths
OPTIONS = (
    "bool is_causal, float? scale, float softcap, bool enable_gqa, str layout, Tensor? cu_seqlens, int[]? window_size, "
    "int[]? seq_lens, int[]? query_lens, str group"
)
PARAMETERS = f"Tensor query, Tensor key, Tensor value, {OPTIONS}"


def refuse_options(scale: Any, softcap: Any, layout: Any) -> None:
    """Refuse options as in calls without gradients: PyTorch would refuse those of another type in its own words. Not
    while a graph is traced: then they may be symbols."""
    if not torch.compiler.is_compiling():
        check_scoring(Scoring(scale, softcap))
        check_layout(layout)


def packed(documents: Documents, window_size: Any, seq_lens: Counts, query_lens: Counts) -> tuple[Any, ...]:
    """Boundaries of documents, a window and lengths, as arguments of the registered operators. They are refused as in
    calls without gradients, except while a graph is traced: then they may be symbols."""
    traced = torch.compiler.is_compiling()
    if documents is not None and not isinstance(documents, torch.Tensor):
        documents = torch.tensor(
            list(documents) if traced else boundaries_of(documents), dtype=torch.int64, device="cpu"
        )
    if traced:
        return documents, window_size, seq_lens, query_lens
    return documents, pair_of(window_size), counts_of("seq_lens", seq_lens), counts_of("query_lens", query_lens)


def as_pair(window_size: Numbers) -> Any:
    """A window, as the functions take it: a list of integers of the registered operators is not hashable."""
    return None if window_size is None else tuple(window_size)


def call(
    arguments: tuple[Any, ...], group: Any, config: Config | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the registered operator with its first arguments and the others."""
    rest = (library.name_of(group), library.encoded(config))
    if out is None:
        return torch.ops.mkernel.ring_attention(*arguments, *rest)
    return out, torch.ops.mkernel.ring_attention_out(*arguments, *rest, out)


# -- on real tensors


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None,
    softcap: float, enable_gqa: bool, layout: str, cu_seqlens: torch.Tensor | None, window_size: Numbers,
    seq_lens: Numbers, query_lens: Numbers, group: str, config: Numbers = None, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    result, lse = ring_attention(
        query, key, value, is_causal=is_causal, scale=scale, softcap=softcap, enable_gqa=enable_gqa, layout=layout,
        cu_seqlens=cu_seqlens, window_size=as_pair(window_size), seq_lens=seq_lens, query_lens=query_lens,
        return_lse=True, group=group, out=out, config=library.decoded(config),
    )  # fmt: skip
    assert lse is not None
    return result, lse


def _attend_into(*arguments: Any) -> torch.Tensor:
    return _attend(*arguments)[1]


def _attend_backward(
    dout: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, dlse: torch.Tensor | None, is_causal: bool, scale: float | None, softcap: float,
    enable_gqa: bool, layout: str, cu_seqlens: torch.Tensor | None, window_size: Numbers, seq_lens: Numbers,
    query_lens: Numbers, group: str, config: Numbers = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return ring_attention_backward(
        dout, query, key, value, out, lse, dlse=dlse, is_causal=is_causal, scale=scale, softcap=softcap,
        enable_gqa=enable_gqa, layout=layout, cu_seqlens=cu_seqlens, window_size=as_pair(window_size),
        seq_lens=seq_lens, query_lens=query_lens, group=group, config=library.decoded(config),
    )  # fmt: skip


# -- shapes


def _fake_lse(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(result_shape(query, value)), _fake_lse(query)


def _fake_backward(
    dout: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


# -- the gradient


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, *ctx.options, cu_seqlens, window_size, seq_lens, query_lens, ctx.group, _ = inputs
    ctx.sizes = window_size, seq_lens, query_lens
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    """All ranks compute all gradients, whichever of them a rank needs: it is one call."""
    query, key, value, out, lse, cu_seqlens = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else library.dense(dout)
    gradients = torch.ops.mkernel.ring_attention_backward(
        dout, query, key, value, out, lse, dlse, *ctx.options, cu_seqlens, *ctx.sizes, ctx.group, None
    )
    wanted = (gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad))
    return (*wanted, *[None] * 11)


library.define(
    "ring_attention", f"({PARAMETERS}, int[]? config=None) -> (Tensor, Tensor)", _attend, _fake,
    save=_save, backward=_backward,
)  # fmt: skip
library.define(
    "ring_attention_out", f"({PARAMETERS}, int[]? config, Tensor(a!) out) -> Tensor", _attend_into, _fake_lse
)
library.define(
    "ring_attention_backward",
    "(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? dlse, "
    f"{OPTIONS}, int[]? config=None) -> (Tensor, Tensor, Tensor)",
    _attend_backward, _fake_backward, backward=library.no_backward("ring_attention_backward"),
)  # fmt: skip
