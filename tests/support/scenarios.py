"""Scenarios in which broken variants of the operators must show: small calls of each operator, whose results are
checked on every rank."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

import mkernel as mk
from support import attention_gradients, attention_reference, operator_calls, reduce_reference, weight_grad_reference
from support.broken_variants import SimulatedCalls
from support.moe_reference import Layer, combine, dispatch, dispatch_rows, ffn
from support.moe_scaled_reference import ScaledFfn, ScaledLayer, dispatch_scaled, ffn_scaled
from support.operator_calls import assert_product, assert_same
from support.reduce_reference import WAYS
from support.scaled_reference import ScaledGather, ScaledSum, call_gather, call_sum

SCATTER, REDUCE, SLICED, MULTICAST = WAYS


@dataclass(frozen=True)
class Gathers(SimulatedCalls):
    """all_gather_matmul. n: columns, of each rank or of all; heap: a lies in the symmetric heap and is overwritten
    after each call."""

    op: ClassVar = "all_gather_matmul"
    _: KW_ONLY
    heap: bool = False
    chunk_rows: int = 4
    n: int | tuple[int, ...] = 5

    def work(self, group):
        case = operator_calls.Case(12, self.n, 8)
        config = mk.Config(tile_m=16, tile_n=16, tile_k=16, chunk_rows=self.chunk_rows)
        a = mk.empty(case.m, case.k, dtype=case.dtype) if self.heap else None
        for turn in range(self.calls):
            if a is None:
                operator_calls.call(group, case, turn, config=config)
            else:
                b = case.weights(group.rank, turn)
                y = mk.all_gather_matmul(a.copy_(case.rows(group.rank, turn)), b, config=config)
                a.fill_(float("nan"))
                assert_product(y, case.gathered(group.size, turn), b)


@dataclass(frozen=True)
class WeightGrads(SimulatedCalls):
    """all_gather_matmul_weight_grad. n: columns, of each rank or of all; heap: a lies in the symmetric heap and is
    overwritten after each call; passes, join_tiles, chunk_rows: of the configuration."""

    op: ClassVar = "all_gather_matmul_weight_grad"
    _: KW_ONLY
    heap: bool = False
    n: int | tuple[int, ...] = 20
    m: int = 36
    passes: int = 3
    join_tiles: int = 1
    chunk_rows: int = 16

    def work(self, group):
        case = weight_grad_reference.Case(self.m, self.n, 24)
        config = mk.Config(
            tile_m=16, tile_n=16, tile_k=16, chunk_rows=self.chunk_rows, passes=self.passes, join_tiles=self.join_tiles
        )
        a = mk.empty(case.m, case.k, dtype=case.dtype) if self.heap else None
        for turn in range(self.calls):
            if a is None:
                weight_grad_reference.call(group, case, turn, config=config)
            else:
                dy = case.gradient(group.rank, group.size, turn)
                y = mk.all_gather_matmul_weight_grad(a.copy_(case.rows(group.rank, turn)), dy, config=config)
                a.fill_(float("nan"))
                weight_grad_reference.assert_weight_grad(y, case.gathered(group.size, turn), dy)


@dataclass(frozen=True)
class Sums(SimulatedCalls):
    """matmul_reduce_scatter or matmul_all_reduce. way: which of them, and how it sums."""

    way: str
    _: KW_ONLY
    rows: int = 20
    n: int = 5
    ctas: int = 2
    dtype: torch.dtype = torch.bfloat16

    @property
    def op(self):
        return reduce_reference.name_of(self.way)

    def prepare(self, patch):
        reduce_reference.choose(self.way, patch)

    def run(self, seed, replace=None):
        results = super().run(seed, replace)
        if self.way != SCATTER:
            for turns in zip(*results):
                for other in turns[1:]:
                    assert_same(other, turns[0])

    def work(self, group):
        case = reduce_reference.Sum(self.rows, self.n, 8, self.dtype)
        config = mk.Config(tile_m=16, tile_n=128, tile_k=16) if self.way == SLICED else reduce_reference.SMALL
        return [reduce_reference.call(group, self.way, case, turn, config=config) for turn in range(self.calls)]


@dataclass(frozen=True)
class FewRows(SimulatedCalls):
    """Calls that take the kernels for few rows. rows: of each rank; columns: of the calls, in turn."""

    op: str
    _: KW_ONLY
    team: int = 2
    rows: int = 3
    columns: tuple[int, ...] = (20,)
    dtype: torch.dtype = torch.float32
    ctas: int = 4

    def work(self, group):
        config = mk.Config(tile_m=16, tile_n=16, tile_k=16, team_ctas=self.team)
        for turn in range(self.calls):
            n = self.columns[turn % len(self.columns)]
            if self.op == Gathers.op:
                operator_calls.call(group, operator_calls.Case(self.rows, n, 40, self.dtype), turn, config=config)
            else:
                case = reduce_reference.Sum(self.rows * group.size, n, 40, self.dtype)
                reduce_reference.call(group, self.op, case, turn, config=config)


@dataclass(frozen=True)
class Attends(SimulatedCalls):
    """ring_attention. arrives: bytes that rank 1 sends to rank 0 in each call, all of which must be there when it
    ends. team: CTAs that share the keys of a tile."""

    op: ClassVar = "ring_attention"
    case: attention_reference.Case
    steps: int | None = None
    arrives: int = 0
    team: int | None = None

    def work(self, group):
        config = mk.Config(tile_m=16, tile_n=16, steps=self.steps, team_ctas=self.team)
        for turn in range(self.calls):
            attention_reference.call(group, self.case, turn, config=config)
            if group.rank == 0 and self.arrives:
                assert group.world.traffic.network[1][0] == (turn + 1) * self.arrives


@dataclass(frozen=True)
class AttendsBackward(SimulatedCalls):
    """ring_attention_backward. Its inputs come from a plain attention, so that only it is broken."""

    op: ClassVar = "ring_attention_backward"
    case: attention_reference.Case
    steps: int | None = None
    others: tuple[attention_reference.Case, ...] = ()  # further calls, with the default number of steps

    def work(self, group):
        calls = [(self.case, self.steps)] * self.calls + [(case, None) for case in self.others]
        given = [attention_gradients.inputs(group, case, turn) for turn, (case, _) in enumerate(calls)]
        for turn, (case, steps) in enumerate(calls):
            arguments, dlse = given[turn]
            config = mk.Config(tile_m=16, tile_n=16, steps=steps)
            found = mk.ring_attention_backward(*arguments, dlse=dlse, config=config, **case.arguments())
            attention_gradients.assert_gradients(found, case, group.rank, group.size, turn)


LITTLE = Layer((7, 5), (2, 2), hidden=16, out=16, dtype=torch.float32)
LITTLE_SCALED = ScaledLayer((7, 5), (2, 2), hidden=144, out=16)
LITTLE_SCALED_FFN = ScaledFfn((7, 5), (2, 2), hidden=144, out=128)
EXPERT_CALLS = {"moe_dispatch_matmul": dispatch, "moe_dispatch": dispatch_rows, "moe_combine": combine, "moe_ffn": ffn}


@dataclass(frozen=True)
class Routes(SimulatedCalls):
    """An operator of the mixture of experts."""

    op: str
    layer: Layer = LITTLE

    def work(self, group):
        # with max_tokens ranks exchange nothing on the host, so that they may be a call ahead of each other
        arguments = dict(
            config=mk.Config(tile_m=16, tile_n=32, tile_k=16, chunk_rows=4), max_tokens=max(8, *self.layer.tokens)
        )
        for turn in range(self.calls):
            EXPERT_CALLS[self.op](group, self.layer, turn, **arguments)


@dataclass(frozen=True)
class ScaledGathers(SimulatedCalls):
    """all_gather_scaled_matmul."""

    op: ClassVar = "all_gather_matmul"  # whose workspace it is, for records of waits
    case: ScaledGather

    def work(self, group):
        config = mk.Config(tile_m=16, tile_n=16, tile_k=32, chunk_rows=4)
        for turn in range(self.calls):
            call_gather(group, self.case, turn, config=config)


@dataclass(frozen=True)
class ScaledSums(SimulatedCalls):
    """scaled_matmul_reduce_scatter or scaled_matmul_all_reduce."""

    way: str
    case: ScaledSum

    def work(self, group):
        for turn in range(self.calls):
            call_sum(group, self.way, self.case, turn, config=mk.Config(tile_m=16, tile_n=16, tile_k=32))


@dataclass(frozen=True)
class ScaledRoutes(SimulatedCalls):
    """moe_dispatch_scaled_matmul. quantizes: tokens are quantized by the kernel."""

    op: ClassVar = "moe_dispatch_matmul"  # whose workspace it is, for records of waits
    layer: ScaledLayer = LITTLE_SCALED
    quantizes: bool = True

    def work(self, group):
        config = mk.Config(tile_m=16, tile_n=32, tile_k=32, chunk_rows=4)
        for turn in range(self.calls):
            dispatch_scaled(
                group, self.layer, turn, quantizes=self.quantizes, config=config, max_tokens=max(self.layer.tokens)
            )


@dataclass(frozen=True)
class ScaledFfns(SimulatedCalls):
    """scaled_moe_ffn."""

    op: ClassVar = "moe_ffn"
    layer: ScaledFfn = LITTLE_SCALED_FFN
    quantizes: bool = True

    def work(self, group):
        config = mk.Config(tile_m=16, tile_n=32, tile_k=32, chunk_rows=4)
        for turn in range(self.calls):
            ffn_scaled(
                group, self.layer, turn, quantizes=self.quantizes, config=config, max_tokens=max(self.layer.tokens)
            )
