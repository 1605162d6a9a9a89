"""The mixture-of-experts operators as `mkernel trace`, `tune` and `compile` call them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.operators import Shape
from mkernel.ops.moe import combine, dispatch_matmul, dispatch_rows, ffn, scaled, scaled_ffn
from mkernel.ops.moe.sizes import Sizes
from mkernel.runtime import quantization
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.scaling import blocks_of
from mkernel.runtime.world import Launch
from mkernel.workloads import COPY, TILE, Call, Cost, Tried, Workload, blocks, empty, is_only_compiled, randn

EXPERTS, SLOTS = 16, 8  # experts per rank and per token, on GPUs
SIMULATED_EXPERTS, SIMULATED_SLOTS = 2, 2
TOKENS = 8  # per chunk


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a rank and their random experts: with as many experts as in the benchmark, or fewer in the
    simulator."""

    x: torch.Tensor
    ids: torch.Tensor
    experts: int  # of a rank

    @staticmethod
    def of(
        group: Group, tokens: int, hidden: int, dtype: torch.dtype, experts: int | None, topk: int | None
    ) -> _Tokens:
        on_gpu = group.device.type == "cuda"
        experts = experts or (EXPERTS if on_gpu else SIMULATED_EXPERTS)
        everyone = experts * group.size
        topk = topk or min(SLOTS if on_gpu else SIMULATED_SLOTS, everyone)
        if topk > everyone:
            raise ArgumentError(f"a token cannot have {topk} experts: there are {everyone}, {experts} on each rank")
        own = tokens // group.size
        x = randn(group, own, hidden, dtype=dtype, seed=0)
        if is_only_compiled(group):
            return _Tokens(x, empty(group, own, topk, dtype=torch.int64), experts)
        generator = torch.Generator(group.device).manual_seed(77 + group.rank)
        scores = torch.rand(own, everyone, device=group.device, generator=generator)
        return _Tokens(x, scores.topk(topk, dim=1).indices, experts)

    @property
    def bounds(self) -> dict[str, Any]:
        """A capacity of a quarter more rows than a rank has if the routing is balanced."""
        return dict(capacity=self.ids.numel() * 5 // 4 + 64, max_tokens=len(self.x))

    def weights(self, group: Group) -> torch.Tensor:
        return randn(group, *self.ids.shape, dtype=torch.float32, seed=3).softmax(1)

    def sizes(self, **more: int) -> dict[str, int]:
        return dict(tokens=len(self.x), k=self.ids.shape[1], experts=self.experts, **more)


def _dispatch(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None
) -> Call:
    tokens, out, hidden = shape
    mine = _Tokens.of(group, tokens, hidden, dtype, experts, topk)
    w = randn(group, mine.experts, hidden, out, dtype=dtype, seed=1)
    given = (mine.x, mine.ids, w)

    def run(config: Config | None) -> torch.Tensor:
        y, handle = dispatch_matmul.moe_dispatch_matmul(*given, **mine.bounds, group=group, config=config)
        # rows beyond those of the last expert are not written
        return y.masked_fill_(torch.arange(len(y), device=y.device)[:, None] >= handle.counts.sum(), 0)

    def prepare(config: Config | None) -> Launch:
        routing = dispatch_matmul.agree(group, *given, **mine.bounds, config=config)
        return dispatch_matmul.prepare(group, *given, routing, config)[0]

    tried = Tried(
        prepare=prepare,
        explain=lambda config: dispatch_matmul.explain(*given, **mine.bounds, group=group, config=config),
        sizes=mine.sizes(hidden=hidden, out=out),
    )
    return Call(run, tried)


def _scaled_dispatch(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None,
    blockwise: bool = False, fast_accum: bool = False, quantize: bool = False,
) -> Call:  # fmt: skip
    """dtype: that of the result. quantize: the kernel quantizes tokens."""
    tokens, out, hidden = shape
    mine = _Tokens.of(group, tokens, hidden, torch.bfloat16, experts, topk)
    recipe, of_w = ("BlockWise1x128", "BlockWise128x128") if blockwise else ("RowWise", "RowWise")
    w, scale_w = _quantized(group, randn(group, mine.experts, out, hidden, dtype=torch.float32, seed=1), of_w)
    x, scale_x = (mine.x, None) if quantize else _quantized(group, mine.x, recipe)
    given = (x, mine.ids, w.transpose(1, 2), scale_x, scale_w.transpose(1, 2))
    options: dict[str, Any] = dict(out_dtype=dtype, use_fast_accum=fast_accum)
    if quantize:
        options |= dict(recipe_x=recipe)
    named = options | mine.bounds

    def run(config: Config | None) -> torch.Tensor:
        y, handle = scaled.moe_dispatch_scaled_matmul(*given, **named, group=group, config=config)
        return y.masked_fill_(torch.arange(len(y), device=y.device)[:, None] >= handle.counts.sum(), 0)

    def prepare(config: Config | None) -> Launch:
        packed = scaled.check(group, *given, **named, config=config)
        routing = scaled.agree(group, x, mine.ids, given[2], packed, **mine.bounds, config=config)
        return scaled.prepare(group, x, mine.ids, given[2], packed, routing, config)[0]

    tried = Tried(
        prepare=prepare,
        explain=lambda config: scaled.explain(*given, **named, group=group, config=config),
        sizes=mine.sizes(hidden=hidden, out=out, blockwise=blockwise, quantizes=quantize),
    )
    return Call(run, tried)


def _quantized(group: Group, values: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What `mk.quantize` returns, with any values where a call is only compiled."""
    if not is_only_compiled(group):
        return quantization.quantize(values, recipe)
    *outer, rows, columns = values.shape
    shape = {
        "RowWise": (rows, 1), "BlockWise1x128": (rows, blocks_of(columns)),
        "BlockWise128x128": (blocks_of(rows), blocks_of(columns)),
    }[recipe]  # fmt: skip
    return values.new_empty(values.shape, dtype=torch.float8_e4m3fn), values.new_empty(
        *outer, *shape, dtype=torch.float32
    )


def _rows(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None
) -> Call:
    tokens, hidden = shape
    mine = _Tokens.of(group, tokens, hidden, dtype, experts, topk)
    given = (mine.x, mine.ids, mine.experts)

    def run(config: Config | None) -> torch.Tensor:
        y, handle = dispatch_rows.moe_dispatch(*given, **mine.bounds, group=group, config=config)
        return y.masked_fill_(torch.arange(len(y), device=y.device)[:, None] >= handle.counts.sum(), 0)

    def prepare(config: Config | None) -> Launch:
        routing = dispatch_rows.agree(group, *given, **mine.bounds, config=config)
        return dispatch_rows.prepare(group, mine.x, mine.ids, routing, config)[0]

    tried = Tried(
        prepare=prepare,
        explain=lambda config: dispatch_rows.explain(*given, **mine.bounds, group=group, config=config),
        sizes=mine.sizes(hidden=hidden),
    )
    return Call(run, tried)


def _combine(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None
) -> Call:
    tokens, columns = shape
    mine = _Tokens.of(group, tokens, 64, dtype, experts, topk)
    w = randn(group, mine.experts, 64, columns, dtype=dtype, seed=1)
    if is_only_compiled(group):
        routing: Sizes = dispatch_matmul.agree(group, mine.x, mine.ids, w, **mine.bounds, config=None)
        _, y, handle = dispatch_matmul.prepare(group, mine.x, mine.ids, w, routing, None)
    else:
        y, handle = dispatch_matmul.moe_dispatch_matmul(mine.x, mine.ids, w, **mine.bounds, group=group)
    out = empty(group, len(mine.x), columns, dtype=dtype)
    given = (y, handle, mine.weights(group))
    tried = Tried(
        prepare=lambda config: combine.prepare(group, *given, out, config),
        explain=lambda config: combine.explain(*given, group=group, out=out, config=config),
        sizes=mine.sizes(columns=columns),
    )
    return Call(lambda config: combine.moe_combine(*given, group=group, out=out, config=config), tried)


def _ffn(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None
) -> Call:
    tokens, inter, hidden = shape
    mine = _Tokens.of(group, tokens, hidden, dtype, experts, topk)
    gate_up = randn(group, mine.experts, hidden, 2 * inter, dtype=dtype, seed=1, scale=hidden**-0.5)
    down = randn(group, mine.experts, inter, hidden, dtype=dtype, seed=2, scale=inter**-0.5)
    out = torch.empty_like(mine.x)
    given = (mine.x, mine.ids, mine.weights(group), gate_up, down)

    def prepare(config: Config | None) -> Launch:
        routing = ffn.agree(group, mine.x, mine.ids, down, **mine.bounds, config=config)
        return ffn.prepare(group, *given, out, routing, config)

    tried = Tried(
        prepare=prepare,
        explain=lambda config: ffn.explain(*given, **mine.bounds, group=group, out=out, config=config),
        sizes=mine.sizes(inter=inter, hidden=hidden),
    )
    return Call(lambda config: ffn.moe_ffn(*given, **mine.bounds, group=group, out=out, config=config), tried)


def _scaled_ffn(
    group: Group, shape: Shape, dtype: torch.dtype, *, experts: int | None = None, topk: int | None = None,
    blockwise: bool = False, quantize: bool = False,
) -> Call:  # fmt: skip
    """quantize: the kernel quantizes tokens. The result is bf16, whatever dtype is."""
    tokens, inter, hidden = shape
    mine = _Tokens.of(group, tokens, hidden, torch.bfloat16, experts, topk)
    recipe, of_w = ("BlockWise1x128", "BlockWise128x128") if blockwise else ("RowWise", "RowWise")
    wide = dict(dtype=torch.float32)
    gate_up = randn(group, mine.experts, 2 * inter, hidden, seed=1, scale=hidden**-0.5, **wide)
    down = randn(group, mine.experts, hidden, inter, seed=2, scale=inter**-0.5, **wide)
    (w1, scale_1), (w2, scale_2) = _quantized(group, gate_up, of_w), _quantized(group, down, "BlockWise128x128")
    x, scale_x = (mine.x, None) if quantize else _quantized(group, mine.x, recipe)
    weights, out = mine.weights(group), torch.empty_like(mine.x)
    w1, w2, scale_1, scale_2 = (each.transpose(1, 2) for each in (w1, w2, scale_1, scale_2))
    tensors = (x, mine.ids, weights, w1, w2)
    given = (*tensors, scale_x, scale_1, scale_2)
    named: dict[str, Any] = dict(mine.bounds, out=out) | (dict(recipe_x=recipe) if quantize else {})

    def prepare(config: Config | None) -> Launch:
        packed = scaled_ffn.check(group, *given, **named, config=config)
        routing = scaled_ffn.agree(group, x, mine.ids, w2, packed, **mine.bounds, config=config)
        return scaled_ffn.prepare(group, *tensors, out, packed, routing, config)[0]

    tried = Tried(
        prepare=prepare,
        explain=lambda config: scaled_ffn.explain(*given, **named, group=group, config=config),
        sizes=mine.sizes(inter=inter, hidden=hidden, blockwise=blockwise, quantizes=quantize),
    )
    return Call(lambda config: scaled_ffn.scaled_moe_ffn(*given, **named, group=group, config=config), tried)


# -- what the simulator has to do


def _blocks_of_rows(tokens: int, ranks: int) -> int:
    """The number of blocks of rows, over the experts of all ranks."""
    experts = SIMULATED_EXPERTS * ranks
    return experts * math.ceil(tokens * min(SIMULATED_SLOTS, experts) / experts / TILE)


def _cost_of_dispatch(shape: Shape, ranks: int) -> Cost:
    tokens, out, hidden = shape
    tiles = _blocks_of_rows(tokens, ranks) * blocks(out)
    rows = SIMULATED_SLOTS * tokens
    held = SIMULATED_EXPERTS * hidden * out * ranks + rows * (out + hidden) * 2 + ranks * tokens * hidden
    return Cost(tiles + ranks * math.ceil(tokens / TOKENS), tiles * blocks(hidden), rows * hidden // COPY, held)


def _cost_of_rows(shape: Shape, ranks: int) -> Cost:
    tokens, hidden = shape
    rows = SIMULATED_SLOTS * tokens
    return Cost(
        ranks * math.ceil(tokens / TOKENS), 0, rows * hidden // COPY, rows * hidden * 2 + ranks * tokens * hidden
    )


def _cost_of_combine(shape: Shape, ranks: int) -> Cost:
    tokens, columns = shape
    routed = _cost_of_dispatch((tokens, columns, 64), ranks)  # a dispatch produces its input
    chunks = ranks * math.ceil(tokens / TOKENS)
    copies = routed.copies + SIMULATED_SLOTS * tokens * columns // COPY
    return Cost(routed.tiles + chunks, routed.dots, copies, 2 * routed.elements)


def _cost_of_ffn(shape: Shape, ranks: int) -> Cost:
    tokens, inter, hidden = shape
    of_rows = _blocks_of_rows(tokens, ranks)
    tiles = of_rows * (blocks(inter) + blocks(hidden))
    rows = SIMULATED_SLOTS * tokens
    held = 3 * SIMULATED_EXPERTS * hidden * inter * ranks + rows * (inter + hidden) * 2 + ranks * tokens * hidden
    return Cost(
        tiles + 2 * ranks * math.ceil(tokens / TOKENS),
        3 * of_rows * blocks(inter, hidden),
        2 * rows * hidden // COPY,
        held,
    )


def _cost_of_scaled_ffn(shape: Shape, ranks: int) -> Cost:
    """A tile of the first GEMM has 128 columns of gate and of up."""
    tokens, inter, hidden = shape
    plain, of_rows = _cost_of_ffn(shape, ranks), _blocks_of_rows(tokens, ranks)
    wide = math.ceil(inter / 128)
    dots = of_rows * (2 * wide * blocks(hidden) + blocks(inter, hidden))
    return Cost(plain.tiles + of_rows * (wide - blocks(inter)), dots, plain.copies, plain.elements)


DISPATCH_MATMUL = Workload(
    "moe_dispatch_matmul", (64, 64, 32), (1, 1, 8), _dispatch, _cost_of_dispatch, dispatch_matmul.TUNABLE
)
DISPATCH_SCALED = Workload(scaled.OP, (64, 64, 32), (1, 1, 8), _scaled_dispatch, _cost_of_dispatch, scaled.TUNABLE)
DISPATCH = Workload("moe_dispatch", (64, 32), (1, 8), _rows, _cost_of_rows, dispatch_rows.TUNABLE)
COMBINE = Workload("moe_combine", (64, 32), (1, 8), _combine, _cost_of_combine, combine.TUNABLE)
SCALED_FFN = Workload(scaled_ffn.OP, (32, 128, 32), (1, 128, 8), _scaled_ffn, _cost_of_scaled_ffn, scaled_ffn.TUNABLE)
FFN = Workload("moe_ffn", (32, 32, 32), (1, 1, 8), _ffn, _cost_of_ffn, ffn.TUNABLE)
