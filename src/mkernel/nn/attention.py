"""Attention over a sequence that is divided among the ranks, as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mkernel.nn.shards import Membership
from mkernel.ops.attention import ring_attention
from mkernel.ops.attention.run import check_input_layout, check_layout, check_scoring
from mkernel.ops.attention.sequences import Counts, Documents, Scoring, window_of
from mkernel.runtime.group import Group, current


class ContextParallelAttention(nn.Module):
    """Attention of this rank's queries over the keys and values of all ranks, in one kernel (`mk.ring_attention`). It
    has no parameters.

    Args:
        is_causal, scale: as in `torch.nn.functional.scaled_dot_product_attention`, for the whole sequence.
        layout: which positions of the sequence a rank holds: "contiguous" or "zigzag", see `mk.ring_attention`.
        window_size: how many positions before and after its own a position sees, see `mk.ring_attention`.
        softcap: bounds the scores, see `mk.ring_attention`; 0 is off.
        input_layout: the order of dimensions of inputs and output: "bshd" is [batch, seq_local, heads, dim], "bhsd" is
            [batch, heads, seq_local, dim].
        group: the group whose ranks share the sequence; None is the current group.

    `forward(query, key, value, cu_seqlens=None, seq_lens=None, query_lens=None)`: query has a multiple of the heads of
    key and value (grouped-query attention). cu_seqlens are the boundaries of packed documents, seq_lens the number of
    positions of each rank, if not all hold the same number, query_lens the number of queries, if it is another one; see
    `mk.ring_attention`.
    """

    def __init__(
        self, *, is_causal: bool = False, scale: float | None = None, layout: str = "contiguous",
        window_size: tuple[int, int] | None = None, softcap: float = 0.0, input_layout: str = "bshd",
        group: Any = None,
    ):  # fmt: skip
        super().__init__()
        check_layout(layout)
        check_input_layout(input_layout)
        check_scoring(Scoring(scale, softcap))
        window_of(window_size, is_causal, whole=2**31)  # raises if it is invalid
        self.is_causal, self.scale, self.layout, self.input_layout = is_causal, scale, layout, input_layout
        self.window_size, self.softcap = window_size, softcap
        self.membership = Membership(current(group))

    @property
    def group(self) -> Group:
        """The group whose ranks share the sequence."""
        return self.membership.group

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: Documents = None,
        seq_lens: Counts = None,
        query_lens: Counts = None,
    ) -> torch.Tensor:
        result = ring_attention(
            query, key, value, is_causal=self.is_causal, scale=self.scale, softcap=self.softcap,
            enable_gqa=True, layout=self.layout, input_layout=self.input_layout,
            cu_seqlens=cu_seqlens, window_size=self.window_size, seq_lens=seq_lens, query_lens=query_lens,
            group=self.group,
        )  # fmt: skip
        assert isinstance(result, torch.Tensor)
        return result

    def extra_repr(self) -> str:
        shown = [f"is_causal={self.is_causal}", f"layout={self.layout!r}", f"input_layout={self.input_layout!r}"]
        if self.window_size is not None:
            shown.append(f"window_size={self.window_size}")
        if self.scale is not None:
            shown.append(f"scale={self.scale}")
        if self.softcap:
            shown.append(f"softcap={self.softcap}")
        return ", ".join([*shown, f"part {self.membership.rank} of {self.membership.size}"])
