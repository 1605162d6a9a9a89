"""Attention in float64, and a plain ring, for the tests of ring_attention."""

import math
from dataclasses import dataclass

import torch

import mkernel as mk


@dataclass(frozen=True)
class Case:
    """A call: shapes of one rank, masks, and values that any rank can make. queries, value_dim: where they differ from
    length and dim. seq_lens, query_lens: where ranks hold different numbers of positions; length is then not
    used. passes: whether the call is passed them. `turn` numbers calls."""

    length: int
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1
    dim: int = 64
    dtype: torch.dtype = torch.float32
    causal: bool = False
    layout: str = "contiguous"
    documents: tuple[int, ...] | None = None
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    queries: int | None = None
    value_dim: int | None = None
    seq_lens: tuple[int, ...] | None = None
    query_lens: tuple[int, ...] | None = None
    passes: bool = True

    @property
    def rows(self):
        return self.length if self.queries is None else self.queries

    def keys_of(self, rank):
        return self.length if self.seq_lens is None else self.seq_lens[rank]

    def rows_of(self, rank):
        if self.query_lens is not None:
            return self.query_lens[rank]
        return self.rows if self.seq_lens is None else self.seq_lens[rank]

    def part(self, which, rank, turn=0):
        """query, key or value of a rank."""
        heads = self.heads if which == "query" else self.kv_heads
        seed = 3 * (1000 * turn + rank) + ("query", "key", "value").index(which)
        generator = torch.Generator().manual_seed(seed)
        rows = self.rows_of(rank) if which == "query" else self.keys_of(rank)
        columns = self.value_dim if which == "value" and self.value_dim else self.dim
        return torch.randn(self.batch, heads, rows, columns, generator=generator).to(self.dtype)

    def whole(self, which, size, turn=0):
        """All ranks' parts, in the order of ranks."""
        return torch.cat([self.part(which, rank, turn) for rank in range(size)], 2)

    def query_positions(self, rank, size):
        """Where a rank's queries lie: the last one of all ranks at the last key."""
        if self.queries is None and self.query_lens is None:
            return self.positions(rank, size)
        keys, rows = (sum(count(each) for each in range(size)) for count in (self.keys_of, self.rows_of))
        return keys - rows + sum(map(self.rows_of, range(rank))) + torch.arange(self.rows_of(rank))

    def positions(self, rank, size):
        """Where a rank's keys lie in the sequence."""
        counts = [self.keys_of(each) for each in range(size)]
        if self.layout == "contiguous":
            return sum(counts[:rank]) + torch.arange(counts[rank])
        pieces = torch.arange(sum(counts)).tensor_split(2 * size)
        return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])

    def seen(self, rank, source, size):
        """[rows of the rank, rows of the source]: which sees which."""
        row, key = self.query_positions(rank, size)[:, None], self.positions(source, size)[None, :]
        seen = row >= key if self.causal else torch.ones(len(row), key.shape[1], dtype=torch.bool)
        if self.documents is not None:
            bounds = torch.tensor(self.documents)
            seen &= torch.searchsorted(bounds, row, right=True) == torch.searchsorted(bounds, key, right=True)
        before, after = self.window or (-1, -1)
        if before >= 0:
            seen &= key >= row - before
        if after >= 0:
            seen &= key <= row + after
        return seen

    def arguments(self):
        return dict(
            is_causal=self.causal, layout=self.layout, cu_seqlens=self.documents, scale=self.scale,
            enable_gqa=self.heads != self.kv_heads, window_size=self.window,
            softcap=self.softcap, **(dict(seq_lens=self.seq_lens, query_lens=self.query_lens) if self.passes else {}),
        )  # fmt: skip


def scores_of(case, query, key, seen):
    """Scores of query [batch, heads, rows, dim] with key [batch, kv_heads, keys, dim], -inf where not seen."""
    group = case.heads // case.kv_heads
    scale = case.dim**-0.5 if case.scale is None else case.scale
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    return scores.masked_fill(~seen.to(scores.device), -math.inf)


def exact(case, rank, size, turn=0, device="cpu"):
    """(result, lse, weighted mean of |value|) of a rank, in float64."""
    query, key, value = (
        x.double().to(device)
        for x in (case.part("query", rank, turn), case.whole("key", size, turn), case.whole("value", size, turn))
    )
    seen = torch.cat([case.seen(rank, source, size) for source in range(size)], 1)
    scores = scores_of(case, query, key, seen)
    value = value.repeat_interleave(case.heads // case.kv_heads, 1)
    weights = torch.softmax(scores, -1)
    weights = weights.nan_to_num()  # of rows that see nothing
    return weights @ value, scores.logsumexp(-1), weights @ value.abs()


def plain_ring(case, rank, size, turn=0):
    """(result, lse): a ring as it is usually written. At step s the keys of the rank s behind are here;
    their attention is merged into what there is by the log-sum-exps of both."""
    query = case.part("query", rank, turn).double()
    out, lse = None, None
    for step in range(size):
        source = (rank - step) % size
        scores = scores_of(case, query, case.part("key", source, turn).double(), case.seen(rank, source, size))
        value = case.part("value", source, turn).double().repeat_interleave(case.heads // case.kv_heads, 1)
        block_lse = scores.logsumexp(-1, keepdim=True)
        block_out = torch.softmax(scores, -1).nan_to_num() @ value
        if out is None:
            out, lse = block_out, block_lse
        else:
            share = torch.sigmoid(block_lse - lse).nan_to_num()
            out, lse = out - share * (out - block_out), torch.logaddexp(lse, block_lse)
    return out, lse.squeeze(-1)


def assert_attention(result, lse, expected, case):
    """Within the documented bound of float64. NaN never passes.

    The weights and the result are rounded to the dtype: together at most eps times the weighted mean of
    |value|. Everything else is fp32: scores of some 10, their exponentials and sums, a few dozen roundings.
    """
    out, exact_lse, mean = expected
    assert result.shape == out.shape
    assert result.dtype == case.dtype
    bound = torch.finfo(case.dtype).eps * mean + 2.0**-18
    error = (result.double() - out).abs()
    assert bool((error <= bound).all()), f"largest error {error.max().item()}, {(error / bound).max().item()} bounds"
    if lse is not None:
        assert lse.dtype == torch.float32
        assert lse.shape == exact_lse.shape
        close = (lse.double() - exact_lse).abs() <= 1e-5 * (1 + exact_lse.abs())
        assert bool((close | (lse.double() == exact_lse)).all())


def call(group, case, turn=0, *, tensors=None, **arguments):
    """One call on this rank, with the case's values; the result, the log-sum-exp and the inputs are checked."""
    names = ("query", "key", "value")
    given = tensors or [case.part(name, group.rank, turn) for name in names]
    before = [tensor.clone() for tensor in given]
    result, lse = mk.ring_attention(*given, group=group, return_lse=True, **case.arguments(), **arguments)
    assert all(torch.equal(tensor, old) for tensor, old in zip(given, before))
    assert_attention(result, lse, exact(case, group.rank, group.size, turn), case)
    return result, lse
