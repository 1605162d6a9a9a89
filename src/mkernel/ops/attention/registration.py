"""torch.ops.mkernel.ring_attention: with the group by name, and the boundaries of documents as a tensor. Forward only.

Both operators return the log-sum-exp, or an empty tensor where it is not wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.attention.run import ring_attention
from mkernel.ops.attention.sequences import Documents
from mkernel.runtime.config import Config

Numbers = Sequence[int] | None  # an encoded configuration
PARAMETERS = (
    "Tensor query, Tensor key, Tensor value, bool is_causal, float? scale, bool enable_gqa, str layout, "
    "Tensor? cu_seqlens, bool return_lse, str group"
)


def as_tensor(documents: Documents) -> torch.Tensor | None:
    """The boundaries of documents, as an argument of the registered operators."""
    return documents if documents is None or isinstance(documents, torch.Tensor) else torch.tensor(list(documents))


def call(
    arguments: tuple[Any, ...], return_lse: bool, group: Any, config: Config | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the registered operator with its first arguments and the others."""
    rest = (return_lse, library.name_of(group), library.encoded(config))
    if out is None:
        return torch.ops.mkernel.ring_attention(*arguments, *rest)
    return out, torch.ops.mkernel.ring_attention_out(*arguments, *rest, out)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None,
    enable_gqa: bool, layout: str, cu_seqlens: torch.Tensor | None, return_lse: bool, group: str,
    config: Numbers = None, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    result, lse = ring_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, layout=layout,
        cu_seqlens=cu_seqlens, return_lse=return_lse, group=group, out=out, config=library.decoded(config),
    )  # fmt: skip
    return result, lse if lse is not None else query.new_empty(0, dtype=torch.float32)


def _attend_into(*arguments: Any) -> torch.Tensor:
    return _attend(*arguments)[1]


def _fake_lse(query: torch.Tensor, return_lse: bool) -> torch.Tensor:
    return query.new_empty(query.shape[:3] if return_lse else (0,), dtype=torch.float32)


def _fake(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), _fake_lse(query, others[7])


def _fake_into(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return _fake_lse(query, others[7])


library.define(
    "ring_attention", f"({PARAMETERS}, int[]? config=None) -> (Tensor, Tensor)", _attend, _fake,
    backward=library.no_backward("ring_attention"),
)  # fmt: skip
library.define(
    "ring_attention_out", f"({PARAMETERS}, int[]? config, Tensor(a!) out) -> Tensor", _attend_into, _fake_into
)
