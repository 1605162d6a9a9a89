"""A sharded sequence, on the host: which positions a rank holds, and which positions it sees."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current

Documents = torch.Tensor | Sequence[int] | None  # boundaries of packed documents, as callers pass them


class Pattern(NamedTuple):
    """Which positions the ranks hold, and which of them a position sees: validated arguments of a call.

    documents: boundaries of packed documents, from 0 to the length of the whole sequence. window: how many positions
    before and after its own a position sees; None is no limit.
    """

    is_causal: bool
    layout: str
    documents: tuple[int, ...] | None = None
    window: tuple[int | None, int | None] | None = None

    @property
    def has_spans(self) -> bool:
        """Whether the kernel reads from memory what each row sees."""
        return self.documents is not None or self.window is not None


class Scoring(NamedTuple):
    """How scores are made of products of queries and keys: times scale, which is dim**-0.5 if it is None; then, if
    softcap is not 0, softcap * tanh(score / softcap)."""

    scale: float | None = None
    softcap: float = 0.0


@dataclass(frozen=True)
class Sequences:
    """The positions of each rank's rows in the whole sequence, and the positions that each row sees. The host's
    counterpart of mask.py. length: keys of a rank. queries: queries of a rank; None for as many as keys."""

    size: int
    length: int
    pattern: Pattern
    queries: int | None = None

    @property
    def rows(self) -> int:
        """The number of queries of a rank."""
        return self.length if self.queries is None else self.queries

    @property
    def zigzag(self) -> bool:
        return self.pattern.layout == "zigzag"

    @property
    def causal(self) -> bool:
        return self.pattern.is_causal

    def positions(self, rank: int) -> np.ndarray:
        """Positions of a rank's queries."""
        index = np.arange(self.rows)
        if not self.zigzag:
            return rank * self.rows + index + self.size * (self.length - self.rows)
        half = self.length // 2
        return np.where(index < half, rank * half + index, (2 * self.size - 2 - rank) * half + index)

    def keys_below(self, positions: np.ndarray, rank: int) -> np.ndarray:
        """For each position, the number of a rank's keys below it."""
        if not self.zigzag:
            return np.clip(positions - rank * self.length, 0, self.length)
        half = self.length // 2
        first = np.clip(positions - rank * half, 0, half)
        return first + np.clip(positions - (2 * self.size - 1 - rank) * half, 0, half)

    def seen(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends): each row of a rank sees positions start..end-1."""
        at = self.positions(rank)
        starts, ends = np.zeros_like(at), np.full_like(at, self.size * self.length)
        if self.pattern.documents is not None:
            bounds = np.array(self.pattern.documents)
            document = np.searchsorted(bounds, at, side="right")
            starts, ends = bounds[document - 1], bounds[np.minimum(document, len(bounds) - 1)]
        before, after = self.pattern.window or (None, None)
        if before is not None:
            starts = np.maximum(starts, at - before)
        if after is not None:
            ends = np.minimum(ends, at + after + 1)
        if self.causal:
            ends = at + 1
        return starts, ends

    def key_blocks(self, rank: int, tile_m: int, tile_n: int) -> np.ndarray:
        """The number of key blocks that each of a rank's tiles of queries attends to."""
        starts, ends = self.seen(rank)
        first = np.arange(0, self.rows, tile_m)
        last = np.minimum(first + tile_m, self.rows) - 1
        blocks = np.zeros(len(first), dtype=np.int64)
        for source in range(self.size):
            low, high = self.keys_below(starts[first], source), self.keys_below(ends[last], source)
            blocks += np.where(low < high, -(-high // tile_n) - low // tile_n, 0)
        return blocks

    def span(self, rank: int) -> tuple[int, int]:
        """(start, end): the smallest interval of positions that includes everything that the rows of a rank see."""
        starts, ends = self.seen(rank)
        return (int(starts[0]), int(ends[-1])) if self.rows else (0, 0)

    def keys_sent(self, source: int, rank: int) -> int:
        """How many of a source's keys a rank receives, before rounding up to chunks."""
        below = self.keys_below(np.array(self.span(rank)), source)
        return max(int(below[1] - below[0]), 0)


def pattern_of(
    group: Group, is_causal: bool, layout: str, cu_seqlens: Any, window_size: Any, length: int,
    queries: int | None = None,
) -> Pattern:  # fmt: skip
    """The pattern of a call whose layout is valid. length: keys of a rank. queries: queries of a rank; None for as many
    as keys."""
    rows = length if queries is None else queries
    if cu_seqlens is not None and rows != length:
        raise ArgumentError(
            f"query has {rows} positions on each rank and key has {length}: with cu_seqlens, these must be the same"
        )
    window = window_of(window_size, bool(is_causal), group.size * max(length, rows))
    return Pattern(bool(is_causal), layout, documents_of(group, cu_seqlens, length), window)


def window_of(window_size: Any, is_causal: bool, whole: int) -> tuple[int | None, int | None] | None:
    """How many positions a row sees before and after its own, validated; None where all, or none that the causal mask
    would not hide. whole: the length of the whole sequence of keys, or of queries if it is longer."""
    if window_size is None:
        return None
    try:
        before, after = (operator.index(count) for count in window_size)
    except (TypeError, ValueError) as problem:
        raise ArgumentError(
            f"window_size must be a pair of integers, how many positions before and after its own a position sees; got "
            f"{window_size!r}"
        ) from problem
    if min(before, after) < -1:
        raise ArgumentError(f"window_size must be a pair of numbers from 0, or -1 for no limit; got {window_size!r}")
    limits = (
        None if before == -1 or before >= whole - 1 else before,
        None if after == -1 or after >= whole - 1 or is_causal else after,
    )
    return None if limits == (None, None) else limits


def documents_of(group: Group, cu_seqlens: Any, length: int) -> tuple[int, ...] | None:
    """The boundaries of packed documents, validated."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, torch.Tensor):
        whole_numbers = not (cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool)
        if cu_seqlens.dim() != 1 or not whole_numbers:
            raise ArgumentError(
                f"cu_seqlens must be a 1-D tensor of integers, got {cu_seqlens.dtype} of shape "
                f"{tuple(cu_seqlens.shape)}"
            )
        cu_seqlens = cu_seqlens.tolist()
    try:
        bounds = tuple(operator.index(bound) for bound in cu_seqlens)
    except TypeError as problem:
        raise ArgumentError(f"cu_seqlens must be a tensor or a sequence of integers, got {cu_seqlens!r}") from problem
    whole = group.size * length
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != whole or any(a > b for a, b in pairwise(bounds)):
        shown = f"{bounds[0]}, ..., {bounds[-1]}" if bounds else "nothing"
        raise ArgumentError(
            f"cu_seqlens must be the boundaries of the documents in the whole sequence: ascending, from 0 to {whole} "
            f"(world * seq_local); got {shown}"
        )
    return tuple(sorted(set(bounds)))  # empty documents have no effect


def to_zigzag(sequence: torch.Tensor, *, dim: int = 2, group: Group | None = None) -> torch.Tensor:
    """This rank's part of a sequence, in the zigzag layout. Every rank passes the whole sequence.

    The sequence is divided into 2*world equal pieces along `dim`, and rank r gets pieces r and 2*world-1-r. There is no
    communication.
    """
    group = current(group)
    size, length = group.size, sequence.shape[dim]
    if length % (2 * size):
        raise ArgumentError(
            f"sequence has {length} positions in dimension {dim}, which is not a multiple of {2 * size} (2 * world): "
            f"pad it to {length + -length % (2 * size)}"
        )
    pieces = sequence.chunk(2 * size, dim) if length else [sequence] * 2 * size
    return torch.cat([pieces[group.rank], pieces[2 * size - 1 - group.rank]], dim)


def from_zigzag(parts: Sequence[torch.Tensor], *, dim: int = 2) -> torch.Tensor:
    """The whole sequence, given the parts of all ranks in the zigzag layout, in rank order."""
    if not parts:
        raise ArgumentError("parts must hold one part per rank; got none")
    if len({part.shape for part in parts}) > 1 or parts[0].shape[dim] % 2:
        raise ArgumentError(
            f"parts must all have the same shape, with an even size in dimension {dim}; got "
            f"{', '.join(str(tuple(p.shape)) for p in parts)}"
        )
    halves = [part.tensor_split(2, dim) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], dim)
