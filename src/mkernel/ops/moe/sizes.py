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

LINE = 64  # alignment of rows in a workspace, in bytes


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit


def power_above(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def row_stride_of(columns: int, dtype: torch.dtype) -> int:
    """The distance between rows of a workspace, in elements."""
    return round_up(columns * dtype.itemsize, LINE) // dtype.itemsize


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call. max_tokens, k and chunk_rows are the same on every rank."""

    world_size: int
    ranks_per_node: int
    tokens: int  # of this rank
    max_tokens: int  # bound on the tokens of any rank
    k: int  # experts per token
    experts: int  # of this rank
    capacity: int  # bound on the rows of this rank
    chunk_rows: int

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def chunks(self) -> int:
        return math.ceil(self.max_tokens / self.chunk_rows)

    @property
    def expected_rows(self) -> int:
        """Rows of this rank if the routing is balanced."""
        return min(self.max_tokens * self.k, self.capacity)


def agree(
    op: str, group: Group, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, capacity: int | None,
    max_tokens: int | None, config: Config | None, choose: Callable[[int], Config | None], **more: Any,
) -> Sizes:  # fmt: skip
    """The sizes of a call, with those that must be the same on every rank agreed on. Collective.

    If max_tokens is None, the ranks exchange their numbers of tokens. They do so at every call, because the tokens of
    another rank may have changed even if this rank's have not.

    `choose` maps the largest number of tokens of any rank to the configuration of the call: the given one, or a tuned
    one whose chunks are the same on every rank.
    """
    tokens, k = topk_ids.shape
    agreed = dict(hidden=x.shape[1], k=k, dtype=x.dtype, max_tokens=max_tokens, **more)
    if max_tokens is not None:
        total_tokens, largest = group.size * max_tokens, max(max_tokens, 1)
        sizes = sized(group, topk_ids, experts, capacity, largest, total_tokens, choose(largest))
        group.agree(op, **agreed, chunk_rows=sizes.chunk_rows)
        return sizes
    # the chunk size depends on the numbers of tokens, still unknown here: compare where it will come from instead
    chunk_rows = "tuned" if config is None else config.chunk_rows or "default"
    all_tokens = group.all_gather_checked(op, tokens, **agreed, chunk_rows=chunk_rows)
    largest = max(*all_tokens, 1)
    return sized(group, topk_ids, experts, capacity, largest, sum(all_tokens), choose(largest))


def sized(
    group: Group, topk_ids: torch.Tensor, experts: int, capacity: int | None, max_tokens: int, total_tokens: int,
    config: Config | None,
) -> Sizes:  # fmt: skip
    """The sizes of a call in which a rank has at most `max_tokens` tokens and all ranks together `total_tokens`."""
    tokens, k = topk_ids.shape
    if capacity is None:
        capacity = total_tokens * k if experts else 0  # in the worst case, all ids name experts of this rank
    return Sizes(
        group.size,
        group.gpus_per_node,
        tokens,
        max_tokens,
        k,
        experts,
        capacity,
        chunk_rows_of(group, max_tokens, k, config),
    )


def slots_of(topk_ids: Any) -> int:
    """Experts per token; 1 if topk_ids is not a matrix, which is rejected later."""
    return topk_ids.shape[1] if isinstance(topk_ids, torch.Tensor) and topk_ids.dim() == 2 else 1


def capacity_of(
    capacity: int | None, factor: float | None, max_tokens: int | None, k: int, world_size: int
) -> int | None:
    """The capacity that a caller chooses, directly or as a multiple of the rows that a rank has if the routing is
    balanced and ranks have equally many experts: max_tokens * k."""
    if factor is None:
        return capacity
    if capacity is not None:
        raise ArgumentError(
            "capacity and capacity_factor both say how many rows this rank can receive: pass one of them"
        )
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 < factor < math.inf:
        raise ArgumentError(f"capacity_factor must be a number above 0, got {factor!r}")
    if not isinstance(max_tokens, int) or max_tokens < 0:
        raise ArgumentError(
            "capacity_factor needs max_tokens, the largest number of tokens of any rank: the capacity is "
            "capacity_factor * max_tokens * k rows"
        )
    return min(math.ceil(factor * max_tokens * k), world_size * max_tokens * k)


def chunk_rows_of(group: Group, max_tokens: int, k: int, config: Config | None) -> int:
    """Tokens per chunk: a power of two, derived from values that are the same on every rank. A CTA holds the ids of a
    whole chunk in registers."""
    given = config.chunk_rows if config is not None else None
    if given is None:
        return planning.rows_per_chunk(max_tokens, 32 if group.target.type == "cuda" else 8)
    most = planning.REGISTERS // power_above(k)
    if given & (given - 1) or given > most:
        raise ArgumentError(
            f"config.chunk_rows must be a power of two for this operator, and at most {most} with {k} experts for each "
            f"token; got {given}"
        )
    return given
