"""What the tests of the mixture-of-experts operators have in common: layers, and plain references."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import mkernel as mk
from support.operator_calls import assert_close, assert_same


def activation_of(name):
    """In PyTorch."""
    functional = torch.nn.functional
    return {
        "silu": functional.silu, "gelu": lambda x: functional.gelu(x, approximate="tanh"), "relu": torch.relu,
        "relu2": lambda x: torch.relu(x).square(), "none": lambda x: x,
    }[name]  # fmt: skip


def of_expert(bias, expert):
    """In float64; zero without a bias."""
    return torch.zeros((), dtype=torch.float64) if bias is None else bias[expert].double()


SMALL = mk.Config(tile_m=16, tile_n=32, tile_k=16)


@dataclass(frozen=True)
class Layer:
    """Tokens and experts of every rank. routing: "random" (different experts, some ids dropped), "zipf" (a few experts
    get most), "one" (all tokens to one expert), "none" (all dropped), "twice" (experts may be named twice), "same" (all
    ids of all tokens name one expert)."""

    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    k: int = 2
    hidden: int = 24
    out: int = 20
    dtype: torch.dtype = torch.bfloat16
    routing: str = "random"
    activation: str = "silu"  # of moe_ffn
    has_bias: bool = False

    @property
    def size(self):
        return len(self.tokens)

    @property
    def all_experts(self):
        return sum(self.experts)

    def first(self, rank):
        """The id of a rank's first expert."""
        return sum(self.experts[:rank])

    def _generator(self, *key):
        return torch.Generator().manual_seed(hash(key) % 2**31)

    def _values(self, *shape, key, scale=1.0):
        return (torch.randn(*shape, generator=self._generator(*key)) * scale).to(self.dtype)

    def x(self, rank, turn=0):
        return self._values(self.tokens[rank], self.hidden, key=(1, rank, turn))

    def ids(self, rank, turn=0):
        tokens, count, generator = self.tokens[rank], self.all_experts, self._generator(2, rank, turn)
        if self.routing == "one":
            return torch.full((tokens, self.k), -1).index_fill_(1, torch.tensor(0), (turn + 1) % count)
        if self.routing == "same" and count:
            return torch.full((tokens, self.k), turn % count)
        if self.routing == "none" or count == 0:
            return torch.full((tokens, self.k), -1)
        if self.routing == "twice":
            return torch.randint(-1, count, (tokens, self.k), generator=generator)
        scores = torch.rand(tokens, max(count, self.k), generator=generator)
        if self.routing == "zipf":
            scores = scores ** torch.arange(1, scores.shape[1] + 1)
        ids = scores.argsort(1, descending=True)[:, : self.k]
        dropped = torch.rand(tokens, self.k, generator=generator) < 0.1
        return torch.where((ids >= count) | dropped, -1, ids)

    def weights(self, rank, turn=0):
        """Those of dropped ids are NaN: nobody may look at them."""
        weights = torch.rand(self.tokens[rank], self.k, generator=self._generator(3, rank, turn)) - 0.3
        return weights.masked_fill(self.ids(rank, turn) < 0, float("nan"))

    def w(self, rank, turn=0):
        return self._values(self.experts[rank], self.hidden, self.out, key=(4, rank, turn))

    def gate_up(self, rank, turn=0):
        shape = (self.experts[rank], self.hidden, 2 * self.out)
        return self._values(*shape, key=(5, rank, turn), scale=self.hidden**-0.5)

    def down(self, rank, turn=0):
        shape = (self.experts[rank], self.out, self.hidden)
        return self._values(*shape, key=(6, rank, turn), scale=self.out**-0.5)

    def _bias(self, rank, columns, key):
        return self._values(self.experts[rank], columns, key=key) if self.has_bias else None

    def bias(self, rank, turn=0):
        return self._bias(rank, self.out, (8, rank, turn))

    def b_gate_up(self, rank, turn=0):
        return self._bias(rank, 2 * self.out, (9, rank, turn))

    def b_down(self, rank, turn=0):
        return self._bias(rank, self.hidden, (10, rank, turn))

    def biases(self, rank, turn=0):
        """Arguments of moe_ffn."""
        return dict(b_gate_up=self.b_gate_up(rank, turn), b_down=self.b_down(rank, turn))

    # -- references

    def rows(self, rank, turn=0):
        """(counts, sources, tokens) of the rows of a rank's experts, in order."""
        counts, sources, tokens = [], [], []
        for expert in range(self.first(rank), self.first(rank) + self.experts[rank]):
            before = len(sources)
            for source in range(self.size):
                for token, _ in (self.ids(source, turn) == expert).nonzero().tolist():
                    sources.append(source)
                    tokens.append(token)
            counts.append(len(sources) - before)
        return counts, sources, tokens

    def dispatched(self, rank, turn=0):
        """The rows themselves."""
        _, sources, tokens = self.rows(rank, turn)
        everyone = [self.x(source, turn) for source in range(self.size)]
        rows = [everyone[source][token] for source, token in zip(sources, tokens, strict=True)]
        return torch.stack(rows) if rows else torch.empty(0, self.hidden, dtype=self.dtype)

    def result_of_experts(self, rank, turn, columns, per_expert):
        """(sum of weight * row, sum of their absolute values), in float64. per_expert(owner, expert) is the
        function of an expert, rows -> (rows, magnitudes)."""
        x, ids = self.x(rank, turn).double(), self.ids(rank, turn)
        weights = self.weights(rank, turn).double().nan_to_num(0.0)
        total = magnitude = torch.zeros(len(x), columns, dtype=torch.float64)
        for owner in range(self.size):
            for expert in range(self.experts[owner]):
                value, size = per_expert(owner, expert)(x)
                share = (weights * (ids == self.first(owner) + expert)).sum(1, keepdim=True)
                large = (weights.abs() * (ids == self.first(owner) + expert)).sum(1, keepdim=True)
                total = total + share * value
                magnitude = magnitude + large * size
        return total, magnitude

    def combined(self, rank, turn=0):
        def function(owner, expert):
            w, bias = self.w(owner, turn)[expert].double(), of_expert(self.bias(owner, turn), expert)
            return lambda x: (x @ w + bias, x.abs() @ w.abs() + bias.abs())

        return self.result_of_experts(rank, turn, self.out, function)

    def ffn(self, rank, turn=0):
        def function(owner, expert):
            gate, up = self.gate_up(owner, turn)[expert].double().chunk(2, dim=1)
            down = self.down(owner, turn)[expert].double()
            before, after = (of_expert(bias, expert) for bias in self.biases(owner, turn).values())

            def apply(x):
                pre = x @ torch.cat([gate, up], dim=1) + before
                inner = activation_of(self.activation)(pre[:, : self.out]) * pre[:, self.out :]
                return inner @ down + after, inner.abs() @ down.abs() + after.abs()

            return apply

        return self.result_of_experts(rank, turn, self.hidden, function)


def check_rows(layer, rank, handle, turn=0):
    """The handle of a dispatch is as the plain reference says. Returns the counts of rows."""
    counts, sources, tokens = layer.rows(rank, turn)
    assert handle.counts.tolist() == counts
    rows = sum(counts)
    assert handle.source[:rows].tolist() == sources
    assert handle.token[:rows].tolist() == tokens
    return counts


def check_dispatch(layer, rank, y, handle, turn=0, w=None):
    """Everything that a dispatch returns is as the plain reference says."""
    counts = check_rows(layer, rank, handle, turn)
    rows = sum(counts)
    x, w = layer.dispatched(rank, turn).double(), (layer.w(rank, turn) if w is None else w).double()
    bias = layer.bias(rank, turn)
    split = zip(x.split(counts), w, strict=True) if counts else ()
    parts = [part @ matrix + of_expert(bias, expert) for expert, (part, matrix) in enumerate(split)]
    exact = torch.cat(parts) if parts else torch.empty(0, w.shape[2], dtype=torch.float64)
    assert_close(y[:rows], exact, layer.hidden)
    assert y[rows:].isnan().all(), "rows beyond the counts were written"


def assert_sum(y, exact, magnitude, depth):
    """A weighted sum of products: every value that is handed on is rounded once, at most 5 times on its way; fp32
    sums are rounded at every term, too."""
    eps = torch.finfo(y.dtype).eps
    terms = depth**0.5 if y.dtype == torch.float32 else 0.0
    assert y.shape == exact.shape
    error = (y.double() - exact).abs()
    bound = (4 + 2 * terms) * eps * magnitude + 1e-30
    assert bool((error <= bound).all()), f"largest error {error.max()}, bound there {bound[error > bound][:1]}"


def dispatch(group, layer, turn=0, *, check=True, **arguments):
    """One checked call of moe_dispatch_matmul on this rank."""
    rank = group.rank
    y, handle = mk.moe_dispatch_matmul(
        layer.x(rank, turn), layer.ids(rank, turn), layer.w(rank, turn), group=group, bias=layer.bias(rank, turn),
        **arguments,
    )  # fmt: skip
    if check:
        check_dispatch(layer, rank, y, handle, turn)
    return y, handle


def dispatch_rows(group, layer, turn=0, **arguments):
    """One checked call of moe_dispatch on this rank."""
    rank = group.rank
    y, handle = mk.moe_dispatch(
        layer.x(rank, turn), layer.ids(rank, turn), layer.experts[rank], group=group, **arguments
    )
    check_rows(layer, rank, handle, turn)
    expected = layer.dispatched(rank, turn)
    assert_same(y[: len(expected)], expected)
    assert y[len(expected) :].isnan().all(), "rows beyond the counts were written"
    return y, handle


def combine(group, layer, turn=0, **arguments):
    """A dispatch and a checked combine on this rank."""
    rank = group.rank
    y, handle = dispatch(group, layer, turn, **arguments)
    z = mk.moe_combine(y, handle, layer.weights(rank, turn), group=group)
    if layer.tokens[rank]:
        assert_sum(z, *layer.combined(rank, turn), layer.hidden)
    return z


def ffn(group, layer, turn=0, **arguments):
    """One checked call of moe_ffn on this rank."""
    rank = group.rank
    before = layer.x(rank, turn)
    x = before.clone()
    y = mk.moe_ffn(
        x, layer.ids(rank, turn), layer.weights(rank, turn), layer.gate_up(rank, turn), layer.down(rank, turn),
        group=group, activation=layer.activation, **layer.biases(rank, turn), **arguments,
    )  # fmt: skip
    assert_same(x, before)
    if layer.tokens[rank]:
        assert_sum(y, *layer.ffn(rank, turn), layer.hidden + layer.out)
    return y


# a layer for every cluster: ranks with other numbers of tokens and experts, also none
LAYERS = {
    (1, 1): Layer((11,), (3,)),
    (1, 2): Layer((9, 5), (2, 3)),
    (1, 3): Layer((0, 20, 3), (2, 0, 3), k=3),
    (2, 1): Layer((9, 17), (2, 2)),
    (2, 2): Layer((9, 3, 17, 0), (2, 1, 2, 3), k=4),
    (3, 2): Layer((4, 5, 6, 0, 8, 9), (1, 2, 0, 2, 1, 1), k=3),
}


def layer_of(cluster, **changes):
    return replace(LAYERS[cluster], **changes)
