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
from mkernel.operators import Shape
from mkernel.ops import all_gather_matmul as _all_gather_matmul
from mkernel.ops import matmul_all_reduce as _matmul_all_reduce
from mkernel.ops import matmul_reduce_scatter as _matmul_reduce_scatter
from mkernel.ops.moe_dispatch_matmul import moe_dispatch_matmul
from mkernel.ops.moe_ffn import moe_ffn
from mkernel.ops.ring_attention import ring_attention
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.sums import Sum
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
    """One rank's call, ready to be made again and again, as a user would. `tried`: for operators that are tuned."""

    run: Callable[[Config | None], torch.Tensor]
    tried: Tried | None = None


@dataclass(frozen=True)
class Workload:
    """How an operator is called for a shape.

    simulated: a shape for the simulator, of two ranks.
    make: (group, shape, dtype) -> the call of this rank. Collective.
    tunable: how its configurations are kept; None where it is not tuned.
    """

    op: str
    simulated: Shape
    make: Callable[[Group, Shape, torch.dtype], Call]
    tunable: Tunable | None = None

    @property
    def on_gpu(self) -> Shape:
        return operators.here()[self.op].shapes[0]

    def parse(self, text: str, ranks: int) -> Shape:
        """A shape as people write it: 16384x2048x8192."""
        return shapes.parse(text, operators.here()[self.op], ranks)

    def smallest(self, ranks: int) -> Shape:
        """The simulated shape, for so many ranks."""
        operator = operators.here()[self.op]
        return tuple(
            math.ceil(size / ranks) * ranks if name in operator.shared else size
            for name, size in zip(operator.dimensions, self.simulated)
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
        explain=lambda config: _all_gather_matmul.plan(group, a, b, out, False, config),
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
            explain=lambda config: operator.plan(group, Sum(a, b, out, config=config)),
            sizes=dict(m=m, n=n, k=a.shape[1]),
        )
        return Call(lambda config: getattr(operator, name)(a, b, group=group, out=out, config=config), tried)

    return make


def _attention(group: Group, shape: Shape, dtype: torch.dtype) -> Call:
    batch, heads, sequence, dim = shape
    q, k, v = (_randn(group, batch, heads, sequence // group.size, dim, dtype=dtype, seed=i) for i in range(3))

    def run(config: Config | None) -> torch.Tensor:
        result: Any = ring_attention(q, k, v, is_causal=True, group=group, config=config)
        return result

    return Call(run)


def _routing(group: Group, tokens: int) -> tuple[int, torch.Tensor]:
    """Experts of a rank, as many as in the benchmark, and the random ones of each token; fewer in the simulator."""
    experts, chosen = (moe.EXPERTS, moe.SLOTS) if group.device.type == "cuda" else (2, 2)
    generator = torch.Generator(group.device).manual_seed(77 + group.rank)
    scores = torch.rand(tokens, experts * group.size, device=group.device, generator=generator)
    return experts, scores.topk(min(chosen, experts * group.size), dim=1).indices


def _dispatch(group: Group, shape: Shape, dtype: torch.dtype) -> Call:
    tokens, out, hidden = shape
    mine = tokens // group.size
    experts, ids = _routing(group, mine)
    x = _randn(group, mine, hidden, dtype=dtype, seed=0)
    w = _randn(group, experts, hidden, out, dtype=dtype, seed=1)

    def run(config: Config | None) -> torch.Tensor:
        return moe_dispatch_matmul(x, ids, w, max_tokens=mine, group=group, config=config)[0]

    return Call(run)


def _ffn(group: Group, shape: Shape, dtype: torch.dtype) -> Call:
    tokens, inter, hidden = shape
    mine = tokens // group.size
    experts, ids = _routing(group, mine)
    x = _randn(group, mine, hidden, dtype=dtype, seed=0)
    gate_up = _randn(group, experts, hidden, 2 * inter, dtype=dtype, seed=1) * hidden**-0.5
    down = _randn(group, experts, inter, hidden, dtype=dtype, seed=2) * inter**-0.5
    weights = _randn(group, mine, ids.shape[1], dtype=torch.float32, seed=3).softmax(1)

    def run(config: Config | None) -> torch.Tensor:
        return moe_ffn(x, ids, weights, gate_up, down, max_tokens=mine, group=group, config=config)

    return Call(run)


WORKLOADS = {
    workload.op: workload
    for workload in (
        Workload("all_gather_matmul", (256, 128, 128), _all_gather, _all_gather_matmul.TUNABLE),
        Workload(
            "matmul_reduce_scatter", (256, 128, 128),
            _summing(_matmul_reduce_scatter, "matmul_reduce_scatter", True), _matmul_reduce_scatter.TUNABLE,
        ),
        Workload(
            "matmul_all_reduce", (128, 128, 128),
            _summing(_matmul_all_reduce, "matmul_all_reduce", False), _matmul_all_reduce.TUNABLE,
        ),
        Workload("ring_attention", (1, 2, 128, 64), _attention),
        Workload("moe_dispatch_matmul", (64, 64, 32), _dispatch),
        Workload("moe_ffn", (32, 32, 32), _ffn),
    )
}  # fmt: skip


def workload_of(op: str) -> Workload:
    """The workload of an operator; an error that names those that there are."""
    if op not in WORKLOADS:
        raise ArgumentError(f"there is no operator {op!r} here; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[op]


def tunable() -> dict[str, Tunable]:
    """The operators that are tuned."""
    return {op: workload.tunable for op, workload in WORKLOADS.items() if workload.tunable is not None}
