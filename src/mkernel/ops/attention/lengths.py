"""How many positions each rank holds, if the numbers differ.

Contiguous: any numbers, which the caller lists. Zigzag: the sequence is divided into 2*world pieces, of which the first
ones may have one position more, as with `torch.tensor_split`. So the length of the sequence determines what each rank
holds.
"""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any, NamedTuple

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group

Piece = tuple[int, int]  # where it starts in the whole sequence, and how many positions it has


class Lengths(NamedTuple):
    """The number of keys and of queries of each rank. They are the same in the zigzag layout."""

    keys: tuple[int, ...]
    queries: tuple[int, ...]


def zigzag_pieces(length: int, size: int) -> list[Piece]:
    """The 2*size pieces of a sequence in the zigzag layout."""
    least, more = divmod(length, 2 * size)
    return [(i * least + min(i, more), least + (i < more)) for i in range(2 * size)]


def zigzag_lengths(length: int, size: int) -> tuple[int, ...]:
    """The number of positions of each rank in the zigzag layout."""
    pieces = zigzag_pieces(length, size)
    return tuple(pieces[rank][1] + pieces[2 * size - 1 - rank][1] for rank in range(size))


def pieces_of(lengths: tuple[int, ...], layout: str) -> list[tuple[Piece, Piece]]:
    """The two pieces of a sequence that each rank holds; in the contiguous layout the second one is empty."""
    size, whole = len(lengths), sum(lengths)
    if layout == "zigzag":
        pieces = zigzag_pieces(whole, size)
        return [(pieces[rank], pieces[2 * size - 1 - rank]) for rank in range(size)]
    ends = accumulate(lengths)
    return [((end - count, count), (whole, 0)) for end, count in zip(ends, lengths)]


def lengths_of(
    group: Group, layout: str, given: tuple[Any, Any], length: int, rows: int, packed: int | None
) -> Lengths | None:
    """What each rank holds; None if all hold `length` keys and `rows` queries, in pieces of the same size.

    Args:
        given: seq_lens and query_lens, as callers pass them.
        length, rows: keys and queries of this rank.
        packed: positions of all documents together, if there are documents.
    """
    size = group.size
    if given[0] is None and given[1] is None:
        whole = size * length if packed is None or layout != "zigzag" else packed
        most = whole if layout == "zigzag" else max(whole, size * rows)
        if most >= 2**31:
            raise ArgumentError(f"the sequence has {most} positions; the limit is {2**31 - 1}")
        if rows and not length and not whole:
            raise ArgumentError(
                f"key has no positions, but query has {rows}: a rank needs at least one key, unless seq_lens says that "
                f"others have some"
            )
        if layout != "zigzag" or (whole == size * length and whole % (2 * size) == 0):
            return None
        keys = queries = zigzag_lengths(whole, size)
        if keys[group.rank] != length:
            raise ArgumentError(
                f"cu_seqlens ends at {whole}, and key has {length} positions on rank {group.rank}: in the zigzag "
                f"layout, a sequence of {whole} positions has {keys[group.rank]} there (see mk.to_zigzag)"
            )
    else:
        keys = (length,) * size if given[0] is None else _counts("seq_lens", given[0], size)
        queries = keys if given[1] is None else _counts("query_lens", given[1], size)
        given_queries = "seq_lens" if given[1] is None else "query_lens"
        _check(group, layout, Lengths(keys, queries), length, rows, given_queries)
    alike = len(set(keys)) == len(set(queries)) == 1
    if alike and (layout != "zigzag" or sum(keys) % (2 * size) == 0):
        return None
    return Lengths(keys, queries)


def counts_of(name: str, given: Any) -> tuple[int, ...] | None:
    """The numbers of positions of the ranks, as integers."""
    try:
        return None if given is None else tuple(operator.index(count) for count in given)
    except TypeError as problem:
        raise ArgumentError(f"{name} must be a sequence of integers, got {given!r}") from problem


def _counts(name: str, given: Any, size: int) -> tuple[int, ...]:
    counts = counts_of(name, given)
    assert counts is not None
    if len(counts) != size or min(counts) < 0:
        raise ArgumentError(f"{name} must be {size} numbers from 0, one for each rank; got {counts}")
    return counts


def _check(group: Group, layout: str, lengths: Lengths, length: int, rows: int, given_queries: str) -> None:
    """given_queries: the argument that says what lengths.queries is."""
    rank, keys, queries = group.rank, *lengths
    for name, counts, what, count in (("seq_lens", keys, "key", length), (given_queries, queries, "query", rows)):
        if counts[rank] != count:
            raise ArgumentError(
                f"{name} says that rank {rank} holds {counts[rank]} positions, but {what} has {count}: the numbers of "
                f"all ranks are {counts}"
                + "; there are as many queries unless query_lens is given"
                * (what == "query" and name == "seq_lens")
            )
    if max(sum(keys), sum(queries)) >= 2**31:
        raise ArgumentError(f"the sequence has {max(sum(keys), sum(queries))} positions; the limit is {2**31 - 1}")
    if any(queries) and not any(keys):
        raise ArgumentError(f"no rank holds any key, but there are {sum(queries)} queries: there must be at least one")
    if layout == "zigzag" and not keys == queries == zigzag_lengths(sum(keys), group.size):
        raise ArgumentError(
            f"the ranks hold {keys} keys and {queries} queries, but in the zigzag layout they hold "
            f"{zigzag_lengths(sum(keys), group.size)} of {sum(keys)} positions (see mk.to_zigzag)"
        )
