"""The sizes of a call, and what the ranks agree on before they launch it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group

LINE = 64  # bytes that rows in a workspace are aligned to


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit


def power_above(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def row_stride_of(columns: int, dtype: torch.dtype) -> int:
    """Elements from one row to the next in a workspace."""
    return round_up(columns * dtype.itemsize, LINE) // dtype.itemsize


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call. max_tokens, k and chunk_rows are the same on every rank."""

    world_size: int
    ranks_per_node: int
    tokens: int  # of this rank
    max_tokens: int  # of any rank, at the most
    k: int  # experts of a token
    experts: int  # of this rank
    capacity: int  # rows of this rank, at the most
    chunk_rows: int

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def chunks(self) -> int:
        return math.ceil(self.max_tokens / self.chunk_rows)

    @property
    def expected_rows(self) -> int:
        """Rows of this rank, if every rank gets its share."""
        return min(self.max_tokens * self.k, self.capacity)


def agree(
    op: str, group: Group, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, capacity: int | None,
    max_tokens: int | None, config: Config | None, choose: Callable[[int], Config | None], **more: Any,
) -> Sizes:  # fmt: skip
    """The sizes of a call, those that must be the same on every rank made so. Without max_tokens the ranks
    tell each other how many tokens they have: at every call, because the others' may have changed when this
    rank's have not. `choose` gives the configuration of a call in which no rank has more than so many: the given one,
    or a tuned one whose chunks are the same on every rank."""
    tokens, k = topk_ids.shape
    alike = dict(hidden=x.shape[1], k=k, dtype=x.dtype, max_tokens=max_tokens, **more)
    if max_tokens is not None:
        total, most = group.size * max_tokens, max(max_tokens, 1)
        sizes = sized(group, topk_ids, experts, capacity, most, total, choose(most))
        group.agree(op, **alike, chunk_rows=sizes.chunk_rows)
        return sizes
    # chunks follow from how many tokens there are: ranks compare where they take them from
    chunk_rows = "tuned" if config is None else config.chunk_rows or "default"
    everyones = group.all_gather_checked(op, tokens, **alike, chunk_rows=chunk_rows)
    most = max(*everyones, 1)
    return sized(group, topk_ids, experts, capacity, most, sum(everyones), choose(most))


def sized(
    group: Group, topk_ids: torch.Tensor, experts: int, capacity: int | None, most: int, total: int,
    config: Config | None,
) -> Sizes:  # fmt: skip
    """The sizes of a call in which no rank has more than `most` tokens, and all have `total`."""
    tokens, k = topk_ids.shape
    if capacity is None:
        capacity = total * k if experts else 0  # all ids of all tokens may name experts of this rank, or one of them
    return Sizes(
        group.size, group.gpus_per_node, tokens, most, k, experts, capacity, chunk_rows_of(group, most, k, config)
    )


def chunk_rows_of(group: Group, max_tokens: int, k: int, config: Config | None) -> int:
    """Tokens of a chunk: a power of two, from what is the same on every rank. A CTA keeps all their ids."""
    given = config.chunk_rows if config is not None else None
    if given is None:
        return planning.rows_per_chunk(max_tokens, 32 if group.device.type == "cuda" else 8)
    most = planning.REGISTERS // power_above(k)
    if given & (given - 1) or given > most:
        raise ArgumentError(
            f"config.chunk_rows must be a power of two for this operator, and at most {most} with {k} experts for each "
            f"token; got {given}"
        )
    return given
