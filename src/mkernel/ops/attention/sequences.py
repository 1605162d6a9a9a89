"""A sharded sequence, on the host: which positions a rank holds, and which positions it sees."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from mkernel.ops.attention.lengths import Lengths, Piece, lengths_of, pieces_of, zigzag_lengths, zigzag_pieces
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current

Documents = torch.Tensor | Sequence[int] | None  # boundaries of packed documents, as callers pass them
Counts = Sequence[int] | None  # positions of each rank, as callers pass them


class Pattern(NamedTuple):
    """Which positions the ranks hold, and which of them a position sees: validated arguments of a call.

    documents: boundaries of packed documents, from 0 to the length of the whole sequence. window: how many positions
    before and after its own a position sees; None is no limit. lengths: None if every rank holds the same number, in
    pieces of the same size.
    """

    is_causal: bool
    layout: str
    documents: tuple[int, ...] | None = None
    window: tuple[int | None, int | None] | None = None
    lengths: Lengths | None = None

    @property
    def has_spans(self) -> bool:
        """Whether the kernel reads from memory what each row sees."""
        return self.documents is not None or self.window is not None or self.lengths is not None

    @property
    def binary(self) -> tuple[bool, int | None]:
        """What it decides about the binary of a kernel; everything else is data to it."""
        return self.has_spans, None if self.lengths is None else max(self.lengths.keys)

    def longest(self, length: int) -> int:
        """The most keys of any rank, given those of this rank."""
        return length if self.lengths is None else max(self.lengths.keys)

    def shapes(self, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
        """The shapes of query and key that all ranks must have: with the positions of every rank, if they differ. And
        seq_lens, so that the message for ranks that differ says what they may have forgotten."""
        if self.lengths is None:
            return dict(query=tuple(query.shape), key=tuple(key.shape), seq_lens=None)
        keys, queries = self.lengths
        query_shape, key_shape = (*query.shape[:2], queries, query.shape[3]), (*key.shape[:2], keys, key.shape[3])
        return dict(query=query_shape, key=key_shape, seq_lens=keys)

    def is_empty(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether no rank has anything to compute."""
        if self.lengths is None:
            return not query.numel()
        return not (query.shape[0] * query.shape[1] * key.shape[1] and any(self.lengths.queries))


class Scoring(NamedTuple):
    """How scores are made of products of queries and keys: times scale, which is dim**-0.5 if it is None; then, if
    softcap is not 0, softcap * tanh(score / softcap)."""

    scale: float | None = None
    softcap: float = 0.0


@dataclass(frozen=True)
class Sequences:
    """The positions of each rank's rows in the whole sequence, and the positions that each row sees. The host's
    counterpart of mask.py. length: keys of a rank, or of the rank with most. queries: queries of a rank, if all have
    the same number; None for as many as keys."""

    size: int
    length: int
    pattern: Pattern
    queries: int | None = None

    @property
    def lengths(self) -> Lengths | None:
        return self.pattern.lengths

    @property
    def whole(self) -> int:
        """The number of keys of all ranks."""
        return self.size * self.length if self.lengths is None else sum(self.lengths.keys)

    @cached_property
    def pieces(self) -> list[tuple[Piece, Piece]] | None:
        """What keys each rank holds, where ranks hold different numbers of them."""
        return None if self.lengths is None else pieces_of(self.lengths.keys, self.pattern.layout)

    def rows_of(self, rank: int) -> int:
        """The number of queries of a rank."""
        if self.lengths is not None:
            return self.lengths.queries[rank]
        return self.length if self.queries is None else self.queries

    @property
    def zigzag(self) -> bool:
        return self.pattern.layout == "zigzag"

    @property
    def causal(self) -> bool:
        return self.pattern.is_causal

    def positions(self, rank: int) -> np.ndarray:
        """Positions of a rank's queries."""
        rows = self.rows_of(rank)
        index = np.arange(rows)
        if self.lengths is not None:
            if self.zigzag:
                first, second = pieces_of(self.lengths.queries, "zigzag")[rank]
                return np.where(index < first[1], first[0] + index, second[0] + index - first[1])
            before = sum(self.lengths.queries[:rank])
            return before + index + self.whole - sum(self.lengths.queries)
        if not self.zigzag:
            return rank * rows + index + self.size * (self.length - rows)
        half = self.length // 2
        return np.where(index < half, rank * half + index, (2 * self.size - 2 - rank) * half + index)

    def keys_below(self, positions: np.ndarray, rank: int) -> np.ndarray:
        """For each position, the number of a rank's keys below it."""
        if self.pieces is not None:
            (start, count), (second, more) = self.pieces[rank]
            return np.clip(positions - start, 0, count) + np.clip(positions - second, 0, more)
        if not self.zigzag:
            return np.clip(positions - rank * self.length, 0, self.length)
        half = self.length // 2
        first = np.clip(positions - rank * half, 0, half)
        return first + np.clip(positions - (2 * self.size - 1 - rank) * half, 0, half)

    def seen(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends): each row of a rank sees positions start..end-1. A rank without queries, where others have
        some, has one row that sees nothing."""
        at = self.positions(rank)
        if self.lengths is not None and not len(at):
            return np.zeros(1, np.int64), np.zeros(1, np.int64)
        starts, ends = np.zeros_like(at), np.full_like(at, self.whole)
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
        first = np.arange(0, len(starts), tile_m)
        last = np.minimum(first + tile_m, len(starts)) - 1
        blocks = np.zeros(len(first), dtype=np.int64)
        for source in range(self.size):
            low, high = self.keys_below(starts[first], source), self.keys_below(ends[last], source)
            blocks += np.where(low < high, -(-high // tile_n) - low // tile_n, 0)
        return blocks

    def span(self, rank: int) -> tuple[int, int]:
        """(start, end): the smallest interval of positions that includes everything that the rows of a rank see."""
        starts, ends = self.seen(rank)
        return (int(starts[0]), int(ends[-1])) if len(starts) else (0, 0)

    def keys_sent(self, source: int, rank: int) -> int:
        """How many of a source's keys a rank receives, before rounding up to chunks."""
        below = self.keys_below(np.array(self.span(rank)), source)
        return max(int(below[1] - below[0]), 0)


def pattern_of(
    group: Group, query: torch.Tensor, key: torch.Tensor, is_causal: bool, layout: str, cu_seqlens: Any,
    window_size: Any, lens: tuple[Any, Any],
) -> Pattern:  # fmt: skip
    """The pattern of a call whose layout is valid. query, key: of this rank. lens: seq_lens and query_lens."""
    length, rows = key.shape[2], query.shape[2]
    documents = boundaries_of(cu_seqlens)
    if documents is not None:
        _check_ascending(documents)
    lengths = lengths_of(group, layout, lens, length, rows, None if documents is None else documents[-1])
    whole, queries = (group.size * length, group.size * rows) if lengths is None else map(sum, lengths)
    if documents is not None:
        if (lengths is None and rows != length) or (lengths is not None and lengths.keys != lengths.queries):
            raise ArgumentError(
                f"query has {rows} positions on each rank and key has {length}: with cu_seqlens, these must be the same"
                if lengths is None
                else f"the ranks hold {lengths.keys} keys and {lengths.queries} queries: with cu_seqlens, these must "
                f"be the same"
            )
        documents = _documents_of(documents, whole, listed=lens[0] is not None)
    window = window_of(window_size, bool(is_causal), max(whole, queries))
    return Pattern(bool(is_causal), layout, documents, window, lengths)


def pair_of(window_size: Any) -> tuple[int, int] | None:
    """How many positions before and after its own a position sees, as integers of 64 bits: no sequence has so many."""
    if window_size is None:
        return None
    try:
        before, after = (min(operator.index(count), 2**62) for count in window_size)
    except (TypeError, ValueError) as problem:
        raise ArgumentError(
            f"window_size must be a pair of integers, how many positions before and after its own a position sees; got "
            f"{window_size!r}"
        ) from problem
    return before, after


def window_of(window_size: Any, is_causal: bool, whole: int) -> tuple[int | None, int | None] | None:
    """How many positions a row sees before and after its own, validated; None where all, or none that the causal mask
    would not hide. whole: the length of the whole sequence of keys, or of queries if it is longer."""
    pair = pair_of(window_size)
    if pair is None:
        return None
    before, after = pair
    if min(before, after) < -1:
        raise ArgumentError(f"window_size must be a pair of numbers from 0, or -1 for no limit; got {window_size!r}")
    limits = (
        None if before == -1 or before >= whole - 1 else before,
        None if after == -1 or after >= whole - 1 or is_causal else after,
    )
    return None if limits == (None, None) else limits


def boundaries_of(cu_seqlens: Any) -> tuple[int, ...] | None:
    """The boundaries of packed documents, as integers."""
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
        return tuple(operator.index(bound) for bound in cu_seqlens)
    except TypeError as problem:
        raise ArgumentError(f"cu_seqlens must be a tensor or a sequence of integers, got {cu_seqlens!r}") from problem


def _check_ascending(bounds: tuple[int, ...]) -> None:
    if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ArgumentError(
            f"cu_seqlens must be the boundaries of the documents in the whole sequence: at least 2 numbers, ascending, "
            f"from 0 to its length; got {f'{bounds[0]}, ..., {bounds[-1]}' if bounds else 'nothing'}"
        )


def _documents_of(bounds: tuple[int, ...], whole: int, listed: bool) -> tuple[int, ...]:
    """The ascending boundaries of packed documents, in a sequence of so many positions. listed: whether seq_lens is
    given."""
    if bounds[-1] != whole:
        what = "the sum of seq_lens" if listed else "world * seq_local"
        more = "" if listed else ". If the ranks hold different numbers of positions, pass seq_lens"
        raise ArgumentError(
            f"cu_seqlens must be the boundaries of the documents in the whole sequence: ascending, from 0 to {whole} "
            f"({what}); got {bounds[0]}, ..., {bounds[-1]}{more}"
        )
    return tuple(sorted(set(bounds)))  # empty documents have no effect


def to_zigzag(sequence: torch.Tensor, *, dim: int = 2, group: Group | None = None) -> torch.Tensor:
    """This rank's part of a sequence, in the zigzag layout. Every rank passes the whole sequence.

    The sequence is divided into 2*world pieces along `dim`, and rank r gets pieces r and 2*world-1-r. If its length is
    not a multiple of 2*world, the first pieces have one position more than the others, as with `torch.tensor_split`.
    There is no communication.
    """
    group = current(group)
    if not isinstance(sequence, torch.Tensor) or not -sequence.dim() <= dim < sequence.dim():
        raise ArgumentError(
            f"sequence must be a tensor with a dimension {dim} (dim), along which it is divided; got "
            f"{tuple(sequence.shape) if isinstance(sequence, torch.Tensor) else type(sequence).__name__}"
        )
    pieces = zigzag_pieces(sequence.shape[dim], group.size)
    mine = (pieces[group.rank], pieces[2 * group.size - 1 - group.rank])
    return torch.cat([sequence.narrow(dim, start, count) for start, count in mine], dim)


def from_zigzag(parts: Sequence[torch.Tensor], *, dim: int = 2) -> torch.Tensor:
    """The whole sequence, given the parts of all ranks in the zigzag layout, in rank order."""
    parts = tuple(parts)
    if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        got = ", ".join(sorted({type(part).__name__ for part in parts})) or "none"
        raise ArgumentError(f"parts must hold one part per rank, each a tensor; got {got}")
    if any(not -part.dim() <= dim < part.dim() for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ArgumentError(f"parts must have a dimension {dim} (dim), along which they are joined; got {shapes}")
    lengths = tuple(part.shape[dim] for part in parts)
    others = {(*part.shape[: dim % part.dim()], *part.shape[dim % part.dim() + 1 :]) for part in parts}
    if len(others) > 1 or lengths != zigzag_lengths(sum(lengths), len(parts)):
        raise ArgumentError(
            f"parts must be those of mk.to_zigzag, of which {len(parts)} ranks have "
            f"{zigzag_lengths(sum(lengths), len(parts))} of {sum(lengths)} positions in dimension {dim}; got "
            f"{', '.join(str(tuple(part.shape)) for part in parts)}"
        )
    pieces = zigzag_pieces(sum(lengths), len(parts))
    halves = [part.split([pieces[rank][1], lengths[rank] - pieces[rank][1]], dim) for rank, part in enumerate(parts)]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], dim)
