"""A sequence that is cut over ranks: who holds what and who sees what, on the host."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current


@dataclass(frozen=True)
class Sequences:
    """Where the ranks' rows lie in the whole sequence, and which positions each row sees; what
    mask.py does in kernels, for the host."""

    size: int
    length: int
    zigzag: bool
    causal: bool
    documents: tuple[int, ...] | None  # boundaries of packed documents, from 0 to size * length

    def positions(self, rank: int) -> np.ndarray:
        """Positions of a rank's rows."""
        index = np.arange(self.length)
        if not self.zigzag:
            return rank * self.length + index
        half = self.length // 2
        return np.where(index < half, rank * half + index, (2 * self.size - 2 - rank) * half + index)

    def keys_below(self, positions: np.ndarray, rank: int) -> np.ndarray:
        """How many of a rank's rows lie below the given positions."""
        if not self.zigzag:
            return np.clip(positions - rank * self.length, 0, self.length)
        half = self.length // 2
        first = np.clip(positions - rank * half, 0, half)
        return first + np.clip(positions - (2 * self.size - 1 - rank) * half, 0, half)

    def seen(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends): each row of a rank sees positions start..end-1."""
        at = self.positions(rank)
        starts, ends = np.zeros_like(at), np.full_like(at, self.size * self.length)
        if self.documents is not None:
            bounds = np.array(self.documents)
            document = np.searchsorted(bounds, at, side="right")
            starts, ends = bounds[document - 1], bounds[np.minimum(document, len(bounds) - 1)]
        if self.causal:
            ends = at + 1
        return starts, ends

    def key_blocks(self, rank: int, tile_m: int, tile_n: int) -> np.ndarray:
        """How many blocks of keys each of a rank's tiles of queries goes through."""
        starts, ends = self.seen(rank)
        first = np.arange(0, self.length, tile_m)
        last = np.minimum(first + tile_m, self.length) - 1
        blocks = np.zeros(len(first), dtype=np.int64)
        for source in range(self.size):
            low, high = self.keys_below(starts[first], source), self.keys_below(ends[last], source)
            blocks += np.where(low < high, -(-high // tile_n) - low // tile_n, 0)
        return blocks

    def span(self, rank: int) -> tuple[int, int]:
        """What the rows of a rank see together, with all that lies in between."""
        starts, ends = self.seen(rank)
        return (int(starts[0]), int(ends[-1])) if self.length else (0, 0)

    def keys_sent(self, source: int, rank: int) -> int:
        """How many of a source's keys a rank gets, but for the rounding to chunks."""
        below = self.keys_below(np.array(self.span(rank)), source)
        return max(int(below[1] - below[0]), 0)


def documents_of(group: Group, cu_seqlens: Any, length: int) -> tuple[int, ...] | None:
    """The boundaries of packed documents, checked."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, torch.Tensor):
        whole_numbers = not (cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool)
        if cu_seqlens.dim() != 1 or not whole_numbers:
            raise ArgumentError(
                f"cu_seqlens must be a tensor of whole numbers with one dimension, got {cu_seqlens.dtype} of shape "
                f"{tuple(cu_seqlens.shape)}"
            )
        cu_seqlens = cu_seqlens.tolist()
    try:
        bounds = tuple(operator.index(bound) for bound in cu_seqlens)
    except TypeError as problem:
        raise ArgumentError(
            f"cu_seqlens must be a tensor or a sequence of whole numbers, got {cu_seqlens!r}"
        ) from problem
    whole = group.size * length
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != whole or any(a > b for a, b in pairwise(bounds)):
        shown = f"{bounds[0]}, ..., {bounds[-1]}" if bounds else "nothing"
        raise ArgumentError(
            f"cu_seqlens must be the boundaries of the documents in the whole sequence: growing, from 0 to {whole} "
            f"(world * seq_local); got {shown}"
        )
    return tuple(sorted(set(bounds)))  # a document of no length changes nothing


def to_zigzag(sequence: torch.Tensor, *, dim: int = 2, group: Group | None = None) -> torch.Tensor:
    """This rank's part, in the zigzag layout, of a whole sequence that every rank has.

    Of 2*world equal pieces along `dim`, rank r gets pieces r and 2*world-1-r. Nothing is communicated.
    """
    group = current(group)
    size, length = group.size, sequence.shape[dim]
    if length % (2 * size):
        raise ArgumentError(
            f"sequence has {length} positions in dimension {dim}, which {2 * size} equal pieces (2 * world) do not "
            f"divide: pad it to {length + -length % (2 * size)}"
        )
    pieces = sequence.chunk(2 * size, dim) if length else [sequence] * 2 * size
    return torch.cat([pieces[group.rank], pieces[2 * size - 1 - group.rank]], dim)


def from_zigzag(parts: Sequence[torch.Tensor], *, dim: int = 2) -> torch.Tensor:
    """The whole sequence, from the parts that all ranks have in the zigzag layout, in the order of ranks."""
    if not parts:
        raise ArgumentError("parts must be the parts of all ranks; got none")
    if len({part.shape for part in parts}) > 1 or parts[0].shape[dim] % 2:
        raise ArgumentError(
            f"parts must have one shape, even in dimension {dim}; got {', '.join(str(tuple(p.shape)) for p in parts)}"
        )
    halves = [part.tensor_split(2, dim) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], dim)
