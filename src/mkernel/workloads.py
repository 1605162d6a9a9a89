"""A call of each operator for a given shape, with random numbers: what `mkernel trace` and `mkernel tune` run.

Shapes are those of `mkernel bench` (see operators.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mkernel import operators
from mkernel.bench import moe, shapes
from mkernel.operators import Operator, Shape
from mkernel.ops import all_gather_matmul as _all_gather_matmul
from mkernel.ops import attention as _ring_attention
from mkernel.ops.moe import combine as _moe_combine
from mkernel.ops.moe import dispatch_matmul as _moe_dispatch_matmul
from mkernel.ops.moe import ffn as _moe_ffn
from mkernel.ops.reduce import all_reduce as _matmul_all_reduce
from mkernel.ops.reduce import reduce_scatter as _matmul_reduce_scatter
from mkernel.ops.reduce.call import Sum
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Tried:
    """What tuning needs to know of a call.

    prepare: the launch with a configuration. explain: the plan. sizes: as the operator's Tunable names them.
    """

    prepare: Callable[[Config | None], Launch]
    explain: Callable[[Config | None], Any]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Call:
    """One rank's call, ready to be made again and again, as a user would."""

    run: Callable[[Config | None], torch.Tensor]
    tried: Tried


@dataclass(frozen=True)
class Cost:
    """What a call costs the simulator, all ranks together: what `mkernel.estimates` estimates times from.

    tiles: of results, and what costs about as much, such as chunks of tokens that are routed. dots: tile steps.
    copies: copies of a few KiB between ranks. elements: numbers that the ranks hold in tensors and workspaces.
    """

    tiles: int
    dots: int
    copies: int
    elements: int


@dataclass(frozen=True)
class Workload:
    """How an operator is called for a shape.

    simulated: a shape for the simulator, of two ranks.
    make: (group, shape, dtype, **options) -> the call of this rank. Collective.
    cost: (shape, ranks) -> what a call costs the simulator.
    tunable: how its configurations are kept.
    options: what else may be said of a call.
    """

    op: str
    simulated: Shape
    make: Callable[..., Call]
    cost: Callable[[Shape, int], Cost]
    tunable: Tunable
    options: tuple[str, ...] = ()

    @property
    def operator(self) -> Operator:
        return operators.with_parts()[self.op]

    @property
    def on_gpu(self) -> Shape:
        return self.operator.shapes[0]

    def parse(self, text: str, ranks: int) -> Shape:
        """A shape as people write it: 16384x2048x8192."""
        return shapes.parse(text, self.operator, ranks)

    def smallest(self, ranks: int) -> Shape:
        """The simulated shape, for so many ranks."""
        return tuple(
            math.ceil(size / ranks) * ranks if name in self.operator.shared else size
            for name, size in zip(self.operator.dimensions, self.simulated)
        )


def _randn(group: Group, *shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(group.device).manual_seed(1000 * seed + group.rank)
    return torch.randn(*shape, device=group.device, generator=generator).to(dtype)


def _all_gather(group: Group, shape: Shape, dtype: torch.dtype) -> Call:
    m_total, n, k = shape
    a = _randn(group, m_total // group.size, k, dtype=dtype, seed=0)
    b = _randn(group, n, k, dtype=dtype, seed=1).t()
    out = torch.empty(m_total, n, device=group.device, dtype=dtype)

    def run(config: Config | None) -> torch.Tensor:
        result = _all_gather_matmul.all_gather_matmul(a, b, group=group, out=out, config=config)
        assert isinstance(result, torch.Tensor)
        return result

    tried = Tried(
        prepare=lambda config: _all_gather_matmul.prepare(group, a, b, out, None, config),
        explain=lambda config: _all_gather_matmul.explain(a, b, group=group, out=out, config=config),
        sizes=dict(m=a.shape[0], n=n, k=k),
    )
    return Call(run, tried)


def _summing(operator: Any, name: str, scatter: bool) -> Callable[[Group, Shape, torch.dtype], Call]:
    def make(group: Group, shape: Shape, dtype: torch.dtype) -> Call:
        m, n, k = shape
        a = _randn(group, m, k // group.size, dtype=dtype, seed=0)
        b = _randn(group, n, k // group.size, dtype=dtype, seed=1).t()
        out = torch.empty(m // group.size if scatter else m, n, device=group.device, dtype=dtype)
        tried = Tried(
            prepare=lambda config: operator.prepare(group, Sum(a, b, out, config=config)),
            explain=lambda config: operator.explain(a, b, group=group, out=out, config=config),
            sizes=dict(m=m, n=n, k=a.shape[1]),
        )
        return Call(lambda config: getattr(operator, name)(a, b, group=group, out=out, config=config), tried)

    return make


def _attention(
    group: Group, shape: Shape, dtype: torch.dtype, *, causal: bool = True, zigzag: bool = False,
    kv_heads: int | None = None,
) -> Call:  # fmt: skip
    batch, heads, sequence, dim = shape
    length, layout = sequence // group.size, "zigzag" if zigzag else "contiguous"
    q = _randn(group, batch, heads, length, dim, dtype=dtype, seed=0)
    k, v = (_randn(group, batch, kv_heads or heads, length, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    out = torch.empty_like(q)
    given: Any = dict(is_causal=causal, layout=layout, enable_gqa=True, group=group, out=out)

    def run(config: Config | None) -> torch.Tensor:
        result = _ring_attention.ring_attention(q, k, v, **given, config=config)
        assert isinstance(result, torch.Tensor)
        return result

    tried = Tried(
        prepare=lambda config: _ring_attention.prepare(group, q, k, v, out, None, causal, None, layout, None, config),
        explain=lambda config: _ring_attention.explain(q, k, v, **given, config=config),
        sizes=dict(
            batch=batch, heads=heads, kv_heads=k.shape[1], length=length, dim=dim, causal=causal, zigzag=zigzag
        ),
    )  # fmt: skip
    return Call(run, tried)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a rank and their random experts: as many as in the benchmark; fewer in the simulator."""

    x: torch.Tensor
    ids: torch.Tensor
    experts: int  # of a rank

    @staticmethod
    def of(
        group: Group, tokens: int, hidden: int, dtype: torch.dtype, experts: int | None, topk: int | None
    ) -> _Tokens:
        on_gpu = group.device.type == "cuda"
        experts = experts or (moe.EXPERTS if on_gpu else EXPERTS)
        everyone = experts * group.size
        topk = topk or min(moe.SLOTS if on_gpu else SLOTS, everyone)
        if topk > everyone:
            raise ArgumentError(f"a token can not have {topk} experts: there are {everyone}, {experts} on each rank")
        generator = torch.Generator(group.device).manual_seed(77 + group.rank)
        scores = torch.rand(tokens // group.size, everyone, device=group.device, generator=generator)
        x = _randn(group, len(scores), hidden, dtype=dtype, seed=0)
        return _Tokens(x, scores.topk(topk, dim=1).indices, experts)

    @property
    def bounds(self) -> dict[str, Any]:
        """Room for a quarter more rows than a rank has if they are even."""
        return dict(capacity=self.ids.numel() * 5 // 4 + 64, max_tokens=len(self.x))

    def weights(self, group: Group) -> torch.Tensor:
        return _randn(group, *self.ids.shape, dtype=torch.float32, seed=3).softmax(1)

    def sizes(self, **more: int) -> dict[str, int]:
        return dict(tokens=len(self.x), k=self.ids.shape[1], experts=self.experts, **more)


def _dispatch(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None
) -> Call:
    tokens, out, hidden = shape
    mine = _Tokens.of(group, tokens, hidden, dtype, experts, topk)
    w = _randn(group, mine.experts, hidden, out, dtype=dtype, seed=1)
    operator, given = _moe_dispatch_matmul, (mine.x, mine.ids, w)

    def run(config: Config | None) -> torch.Tensor:
        y, handle = operator.moe_dispatch_matmul(*given, **mine.bounds, group=group, config=config)
        # rows beyond the last expert's are not written
        return y.masked_fill_(torch.arange(len(y), device=y.device)[:, None] >= handle.counts.sum(), 0)

    def prepare(config: Config | None) -> Launch:
        routing = operator.agree(group, *given, **mine.bounds, config=config)
        return operator.prepare(group, *given, routing, config)[0]

    tried = Tried(
        prepare=prepare,
        explain=lambda config: operator.explain(*given, **mine.bounds, group=group, config=config),
        sizes=mine.sizes(hidden=hidden, out=out),
    )
    return Call(run, tried)


def _combine(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None
) -> Call:
    tokens, columns = shape
    mine = _Tokens.of(group, tokens, 64, dtype, experts, topk)
    w = _randn(group, mine.experts, 64, columns, dtype=dtype, seed=1)
    y, handle = _moe_dispatch_matmul.moe_dispatch_matmul(mine.x, mine.ids, w, **mine.bounds, group=group)
    out = torch.empty(len(mine.x), columns, device=group.device, dtype=dtype)
    operator, given = _moe_combine, (y, handle, mine.weights(group))
    tried = Tried(
        prepare=lambda config: operator.prepare(group, *given, out, config),
        explain=lambda config: operator.explain(*given, group=group, out=out, config=config),
        sizes=mine.sizes(columns=columns),
    )
    return Call(lambda config: operator.moe_combine(*given, group=group, out=out, config=config), tried)


def _ffn(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None
) -> Call:
    tokens, inter, hidden = shape
    mine = _Tokens.of(group, tokens, hidden, dtype, experts, topk)
    gate_up = _randn(group, mine.experts, hidden, 2 * inter, dtype=dtype, seed=1) * hidden**-0.5
    down = _randn(group, mine.experts, inter, hidden, dtype=dtype, seed=2) * inter**-0.5
    out = torch.empty_like(mine.x)
    operator, given = _moe_ffn, (mine.x, mine.ids, mine.weights(group), gate_up, down)

    def prepare(config: Config | None) -> Launch:
        routing = operator.agree(group, mine.x, mine.ids, down, **mine.bounds, config=config)
        return operator.prepare(group, *given, out, routing, config)

    tried = Tried(
        prepare=prepare,
        explain=lambda config: operator.explain(*given, **mine.bounds, group=group, out=out, config=config),
        sizes=mine.sizes(inter=inter, hidden=hidden),
    )
    return Call(lambda config: operator.moe_ffn(*given, **mine.bounds, group=group, out=out, config=config), tried)


# -- what the simulator has to do; tiles are those of planning.default_tiles for the CPU

TILE = 32
COPY = 2048  # numbers that a CTA copies at a time
TOKENS = 8  # of a chunk
EXPERTS, SLOTS = 2, 2  # see _Tokens


def _blocks(*sizes: int) -> int:
    return math.prod(math.ceil(size / TILE) for size in sizes)


def _pieces(rows: int, columns: int) -> int:
    """Pieces in which a CTA copies rows to another rank."""
    return math.ceil(rows / 4) * math.ceil(columns / (COPY // 4))


def _cost_of_gather(shape: Shape, ranks: int) -> Cost:
    m_total, n, k = shape
    m = m_total // ranks
    tiles = ranks * ranks * _blocks(m, n)
    return Cost(
        tiles, tiles * _blocks(k), ranks * (ranks - 1) * _pieces(m, k), ranks * (m * k + n * k + m_total * (n + 2 * k))
    )


def _cost_of_scatter(shape: Shape, ranks: int) -> Cost:
    m_total, n, k = shape
    tiles = ranks * ranks * _blocks(m_total // ranks, n)
    held = (m_total + n) * k // ranks + 3 * m_total * n
    return Cost(tiles, tiles * _blocks(k // ranks), ranks * m_total * n // COPY, ranks * held)


def _cost_of_all_reduce(shape: Shape, ranks: int) -> Cost:
    m, n, k = shape
    tiles = ranks * _blocks(m, n)
    # small sums are made by every rank for itself, of everybody's parts
    return Cost(
        tiles, tiles * _blocks(k // ranks), ranks * ranks * m * n // COPY,
        ranks * ((m + n) * k // ranks + (1 + 2 * min(ranks, 4)) * m * n),
    )  # fmt: skip


def _cost_of_attention(shape: Shape, ranks: int) -> Cost:
    batch, heads, positions, dim = shape
    length = positions // ranks
    tiles = ranks * batch * heads * _blocks(length)
    seen = (ranks * _blocks(length) + 1) / 2  # blocks of keys that a tile attends to, of all of them the causal half
    held = batch * heads * length * dim
    return Cost(
        tiles,
        round(2 * tiles * seen),
        ranks * (ranks - 1) * 2 * batch * heads * _pieces(length, dim),
        ranks * (4 + 2 * ranks) * held,
    )


def _blocks_of_rows(tokens: int, ranks: int) -> int:
    """Blocks of rows that the experts of all ranks have."""
    experts = EXPERTS * ranks
    return experts * math.ceil(tokens * min(SLOTS, experts) / experts / TILE)


def _cost_of_dispatch(shape: Shape, ranks: int) -> Cost:
    tokens, out, hidden = shape
    tiles = _blocks_of_rows(tokens, ranks) * _blocks(out)
    held = EXPERTS * hidden * out * ranks + SLOTS * tokens * (out + hidden) * 2 + ranks * tokens * hidden
    return Cost(
        tiles + ranks * math.ceil(tokens / TOKENS), tiles * _blocks(hidden), SLOTS * tokens * hidden // COPY, held
    )


def _cost_of_combine(shape: Shape, ranks: int) -> Cost:
    tokens, columns = shape
    routed = _cost_of_dispatch((tokens, columns, 64), ranks)  # its input is made by a dispatch
    chunks = ranks * math.ceil(tokens / TOKENS)
    return Cost(
        routed.tiles + chunks, routed.dots, routed.copies + SLOTS * tokens * columns // COPY, 2 * routed.elements
    )


def _cost_of_ffn(shape: Shape, ranks: int) -> Cost:
    tokens, inter, hidden = shape
    blocks = _blocks_of_rows(tokens, ranks)
    tiles = blocks * (_blocks(inter) + _blocks(hidden))
    held = 3 * EXPERTS * hidden * inter * ranks + SLOTS * tokens * (inter + hidden) * 2 + ranks * tokens * hidden
    return Cost(
        tiles + 2 * ranks * math.ceil(tokens / TOKENS), 3 * blocks * _blocks(inter, hidden),
        2 * SLOTS * tokens * hidden // COPY, held,
    )  # fmt: skip


WORKLOADS = {
    workload.op: workload
    for workload in (
        Workload("all_gather_matmul", (256, 128, 128), _all_gather, _cost_of_gather, _all_gather_matmul.TUNABLE),
        Workload(
            "matmul_reduce_scatter", (256, 128, 128),
            _summing(_matmul_reduce_scatter, "matmul_reduce_scatter", True), _cost_of_scatter,
            _matmul_reduce_scatter.TUNABLE,
        ),
        Workload(
            "matmul_all_reduce", (128, 128, 128),
            _summing(_matmul_all_reduce, "matmul_all_reduce", False), _cost_of_all_reduce, _matmul_all_reduce.TUNABLE,
        ),
        Workload(
            "ring_attention", (1, 2, 128, 64), _attention, _cost_of_attention, _ring_attention.TUNABLE,
            ("causal", "zigzag", "kv_heads"),
        ),
        Workload(
            "moe_dispatch_matmul", (64, 64, 32), _dispatch, _cost_of_dispatch, _moe_dispatch_matmul.TUNABLE,
            ("experts", "topk"),
        ),
        Workload("moe_combine", (64, 32), _combine, _cost_of_combine, _moe_combine.TUNABLE, ("experts", "topk")),
        Workload("moe_ffn", (32, 32, 32), _ffn, _cost_of_ffn, _moe_ffn.TUNABLE, ("experts", "topk")),
    )
}  # fmt: skip


def workload_of(op: str) -> Workload:
    """The workload of an operator; an error that names those that there are."""
    if op not in WORKLOADS:
        raise ArgumentError(f"there is no operator {op!r} here; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[op]
