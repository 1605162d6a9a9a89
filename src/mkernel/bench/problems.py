"""What the baselines in processes of their own compute: a rank's inputs, and how wrong a result is.

Inputs are drawn from the rank's number, so a process has the same ones as the rank that ran the fused operator, and
knows those of the others without asking. A result is held against float64, as the fused one is, by the same measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mkernel.bench import moe, ring_attention
from mkernel.bench.reduction import operands
from mkernel.operators import Shape
from mkernel.ops.attention.sequences import Sequences

OPERATORS = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "ring_attention", "moe_dispatch_matmul",
    "moe_ffn",
)  # fmt: skip
ROWS = 4096  # of a product that is checked at a time: float64 takes a lot of memory


@dataclass(frozen=True)
class Ways:
    """How a library computes an operator: `calls` by the name of the way, each returning this rank's result.
    `meet` puts something on the current stream that ends on no rank before all have come to it. `notes`: which way
    was left out, and why."""

    meet: Callable[[], object]
    calls: dict[str, Callable[[], torch.Tensor]]
    notes: list[str] = field(default_factory=list)


class Products:
    """all_gather_matmul, matmul_reduce_scatter and matmul_all_reduce."""

    def __init__(self, op: str, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device):
        self.op, self.rank, self.size = op, rank, size
        self.m, self.n, self.k = shape
        self.device, self.dtype = device, dtype
        self.a, self.w = self._of(rank)

    def _of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return operands(self.op, rank, self.size, (self.m, self.n, self.k), self.dtype, self.device)

    def error(self, result: torch.Tensor) -> float:
        """The largest error of an element."""
        everyone = [self._of(rank) for rank in range(self.size)]
        rows = self.m // self.size if self.op == "matmul_reduce_scatter" else self.m
        begin = self.rank * rows if self.op == "matmul_reduce_scatter" else 0
        if tuple(result.shape) != (rows, self.n):
            raise RuntimeError(f"the result is {tuple(result.shape)} instead of {(rows, self.n)}")
        gathered = torch.cat([a for a, _ in everyone]) if self.op == "all_gather_matmul" else None
        worst = 0.0
        exact: Any
        for first in range(0, rows, ROWS):
            some = slice(begin + first, begin + min(first + ROWS, rows))
            if gathered is not None:
                exact = gathered[some].double() @ self.w.double().t()
            else:
                exact = sum(a[some].double() @ w.double().t() for a, w in everyone)
            worst = _larger(worst, (result[first : first + ROWS].double() - exact).abs().max().item())
        return worst


class Attention:
    """ring_attention."""

    def __init__(
        self, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device, causal: bool, zigzag: bool
    ):
        self.rank, self.size, self.device = rank, size, device
        everyone = [ring_attention.heads_of(source, size, shape, dtype, device) for source in range(size)]
        self.query, self.key, self.value = everyone[rank]
        self.sequences = Sequences(size, self.query.shape[2], zigzag, causal, None)
        order = self.order()
        self._whole = [torch.cat([parts[i] for parts in everyone], 2)[:, :, order] for i in range(3)]

    def order(self) -> torch.Tensor:
        """Where in the rows of all ranks, one rank after the other, each position of the sequence is."""
        positions = [torch.from_numpy(self.sequences.positions(rank)) for rank in range(self.size)]
        return torch.argsort(torch.cat(positions)).to(self.device)

    def error(self, result: torch.Tensor) -> float:
        """The largest error of some rows, in bounds."""
        return ring_attention.error_of(self.sequences, self.rank, self.query, result, self._whole)


class Experts:
    """moe_dispatch_matmul and moe_ffn. Rows are sent in the order of their experts: `token` is whose, `slot` which of
    its experts; `counts[source][expert]` how many. They are computed in the order of the expert, then of the source."""

    def __init__(self, op: str, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device):
        tokens, n, hidden = shape
        self.op, self.rank, self.size, self.hidden, self.device = op, rank, size, hidden, device
        self._n, self._dtype = n, dtype
        self._everyone = [moe.tokens_of(source, size, tokens // size, hidden, dtype, device) for source in range(size)]
        self.mine = self._everyone[rank]
        self.matrices = self._matrices(rank)
        chosen = self.mine.ids.flatten()
        order = torch.argsort(chosen, stable=True)
        self.token = order // moe.SLOTS
        self.back = torch.argsort(order)  # where in the sent rows each token's slots are
        self.counts = torch.stack(
            [torch.bincount(each.ids.flatten(), minlength=size * moe.EXPERTS) for each in self._everyone]
        )

    def _matrices(self, rank: int) -> list[torch.Tensor]:
        # drawn from the same numbers as the rank's tokens, after them
        tokens = moe.tokens_of(rank, self.size, len(self.mine.x), self.hidden, self._dtype, self.device)
        return [tokens.matrices(*shape) for shape in moe.matrix_shapes(self.op, self._n, self.hidden)]

    def arriving(self, rank: int) -> torch.Tensor:
        """[source, expert of the rank]: how many rows come."""
        return self.counts[:, rank * moe.EXPERTS : (rank + 1) * moe.EXPERTS]

    def combined(self, returned: torch.Tensor) -> torch.Tensor:
        """The tokens' weighted sums of rows that have come back in the order in which they were sent."""
        rows = returned[self.back].view(len(self.mine.x), moe.SLOTS, self.hidden)
        return (rows * self.mine.weights.unsqueeze(2).to(rows.dtype)).sum(1)

    def error(self, result: torch.Tensor) -> float:
        """The largest error: of moe_dispatch_matmul of an element, of moe_ffn relative to what is added up."""
        if self.op == "moe_ffn":
            matrices = (self._matrices(rank) for rank in range(self.size))
            return moe.ffn_error(self.mine, ((gate_up, down) for gate_up, down in matrices), result)
        where, _, counts = moe.rows_of([each.ids for each in self._everyone], self.rank)
        rows = torch.cat([each.x for each in self._everyone])[where]
        if len(result) != len(rows):
            raise RuntimeError(f"there are {len(result)} rows instead of {len(rows)}")
        worst = 0.0
        for part, found, matrix in zip(rows.split(counts.tolist()), result.split(counts.tolist()), self.matrices[0]):
            if len(part):
                worst = _larger(worst, (found.double() - part.double() @ matrix.double()).abs().max().item())
        return worst


Problem = Products | Attention | Experts


def make(
    op: str, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device, options: Sequence[str]
) -> Problem:
    """What a rank has to compute."""
    assert op in OPERATORS, op
    if op == "ring_attention":
        return Attention(rank, size, shape, dtype, device, "causal" in options, "zigzag" in options)
    if op in ("moe_dispatch_matmul", "moe_ffn"):
        return Experts(op, rank, size, shape, dtype, device)
    return Products(op, rank, size, shape, dtype, device)


def _larger(worst: float, error: float) -> float:
    return max(worst, error) if error == error else float("inf")  # NaN is larger than anything
