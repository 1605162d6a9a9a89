"""The handle of a dispatch: where each row came from, and thus where its result returns to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.moe.plan import tile_height
from mkernel.ops.moe.routing import Tables, table_words, tables_in
from mkernel.ops.moe.sizes import Sizes
from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group


@dataclass(frozen=True, eq=False)
class Handle:
    """Where the rows of a dispatch came from, and thus where their results return to.

    Row i of y, for i below the sum of `counts`, is token `token[i]` of rank `source[i]`. Rows are grouped by expert:
    `counts[e]` of them belong to the e-th expert of this rank. Rows of y beyond the sum are not written. The three
    tensors are on the rank's device. On a GPU they are valid once the kernel has finished, not when the call returns.
    """

    group: Any  # Group; its name while a graph is traced
    counts: torch.Tensor  # [experts]
    source: torch.Tensor  # [capacity]
    token: torch.Tensor  # [capacity]
    memory: torch.Tensor  # of the tables
    tables: Tables
    # the handle can be restored from these: experts per token, experts of this rank, capacity, bound on the tokens of
    # any rank, tokens per chunk, rows of a block
    numbers: tuple[int, ...]
    tokens: int  # of this rank; symbolic while a graph is traced
    known_sizes: Sizes | None  # None while a graph is traced

    @property
    def capacity(self) -> int:
        return self.numbers[2]

    @property
    def tile_m(self) -> int:
        return self.numbers[5]

    @property
    def sizes(self) -> Sizes:
        assert self.known_sizes is not None, "while a graph is traced, a handle has no sizes"
        return self.known_sizes


def _handle(
    group: Any, world_size: int, memory: torch.Tensor, numbers: Sequence[int], tokens: int, sizes: Sizes | None
) -> Handle:
    k, experts, capacity, max_tokens = numbers[:4]
    tables = tables_in(memory, world_size, max_tokens, k, experts, capacity)
    return Handle(
        group=group,
        counts=tables.expert_counts[:experts],
        source=tables.row_source[:capacity],
        token=tables.row_token[:capacity],
        memory=memory,
        tables=tables,
        numbers=tuple(numbers),
        tokens=tokens,
        known_sizes=sizes,
    )


def numbers_of(sizes: Sizes, tile_m: int) -> tuple[int, ...]:
    """`Handle.numbers` of a call."""
    return sizes.k, sizes.experts, sizes.capacity, sizes.max_tokens, sizes.chunk_rows, tile_m


def numbers_in_graph(
    op: str, group: str, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> tuple[int, ...]:  # fmt: skip
    """`Handle.numbers` of a call that is traced, or whose tensors have no values. The ranks cannot be asked then."""
    if max_tokens is None:
        raise ArgumentError(
            f"{op}: max_tokens must be given where a call is traced or its tensors have no values, and gradients or a "
            f"handle are wanted: the sizes of its results depend on it. Pass the largest number of tokens of any rank"
        )
    k, device = topk_ids.shape[1], x.device
    given, most = config or Config(), max(max_tokens, 1)
    if capacity is None:
        capacity = library.size_of(group) * max_tokens * k if experts else 0
    chunk_rows = given.chunk_rows or planning.rows_per_chunk(most, 32 if device.type == "cuda" else 8)
    return k, experts, capacity, most, chunk_rows, tile_height(device, x.dtype, config)


def new_handle(group: Group, sizes: Sizes, tile_m: int) -> Handle:
    """The handle of a dispatch that is about to write its tables."""
    words = table_words(sizes.world_size, sizes.max_tokens, sizes.k, sizes.experts, sizes.capacity)
    memory = group.world.memory.empty(group.world_rank, (words,), torch.float32).view(torch.int32)
    return _handle(group, sizes.world_size, memory, numbers_of(sizes, tile_m), sizes.tokens, sizes)


def handle_in(group: Group, memory: torch.Tensor, tokens: int, numbers: Sequence[int]) -> Handle:
    """The handle of a dispatch that has written its tables to this memory. tokens: of this rank."""
    k, experts, capacity, max_tokens, chunk_rows, _ = numbers
    sizes = Sizes(group.size, group.gpus_per_node, tokens, max_tokens, k, experts, capacity, chunk_rows)
    return _handle(group, group.size, memory, numbers, tokens, sizes)


def traced_handle(group: str, memory: torch.Tensor, tokens: int, numbers: Sequence[int]) -> Handle:
    """The handle of a dispatch in a graph that is being traced."""
    return _handle(group, library.size_of(group), memory, numbers, tokens, None)
