"""The mixture-of-experts operators in the demo."""

from __future__ import annotations

import torch

from mkernel.demo.case import EPS, Case, Demo, everyones, random
from mkernel.operators import Shape
from mkernel.ops.moe import (
    moe_combine,
    moe_dispatch,
    moe_dispatch_matmul,
    moe_dispatch_scaled_matmul,
    moe_ffn,
    scaled_moe_ffn,
)
from mkernel.runtime.group import Group
from mkernel.runtime.quantization import dequantize, quantize


def _experts(large: bool) -> tuple[int, int]:
    """Experts per rank, and per token."""
    return (4, 4) if large else (2, 2)


def _routing(group: Group, tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(group.device).manual_seed(77 + 1000 * seed + group.rank)
    scores = torch.rand(tokens, experts * group.size, generator=generator, device=group.device)
    return scores.topk(top_k, dim=1).indices


def _dispatch(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    everyones_tokens, out, hidden = shape
    tokens, (experts, top_k) = everyones_tokens // group.size, _experts(large)
    x = random(group, seed, tokens, hidden)
    w = random(group, seed, experts, hidden, out, what=1)
    ids = _routing(group, tokens, experts, top_k, seed)

    def exact() -> tuple[torch.Tensor, float]:
        everyone = torch.cat(everyones(group, "x", x)).double()
        chosen = torch.cat(everyones(group, "ids", ids))
        parts = []
        for expert in range(experts):
            token = (chosen == group.rank * experts + expert).nonzero()[:, 0]  # by source rank, then token
            parts.append(everyone[token] @ w[expert].double())
        return torch.cat(parts), 4 * hidden**0.5 * EPS

    return Case(
        inputs=f"{tokens} tokens of {hidden}, each for {top_k} experts, and {experts} experts of {hidden} x {out}",
        call=lambda: moe_dispatch_matmul(x, ids, w, max_tokens=tokens),
        result=lambda given: given[0][: int(given[1].counts.sum())],
        exact=exact,
        library=lambda: x.repeat(top_k, 1).view(experts, -1, hidden) @ w,
    )


def _scaled_dispatch(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    everyones_tokens, out, hidden = shape
    tokens, (experts, top_k) = everyones_tokens // group.size, _experts(large)
    x, scale_x = quantize(random(group, seed, tokens, hidden), "BlockWise1x128")
    w, scale_w = quantize(random(group, seed, experts, out, hidden, what=1), "BlockWise128x128")
    ids = _routing(group, tokens, experts, top_k, seed)
    wide = w.to(torch.bfloat16).transpose(1, 2)

    def exact() -> tuple[torch.Tensor, float]:
        everyone = torch.cat(everyones(group, "x", dequantize(x, scale_x, torch.float64)))
        chosen = torch.cat(everyones(group, "ids", ids))
        matrices = dequantize(w, scale_w, torch.float64).transpose(1, 2)
        named = range(group.rank * experts, (group.rank + 1) * experts)
        rows = [everyone[(chosen == expert).nonzero()[:, 0]] for expert in named]
        return torch.cat([part @ matrix for part, matrix in zip(rows, matrices)]), 4 * hidden**0.5 * EPS

    return Case(
        inputs=f"{tokens} tokens of {hidden} in fp8, each for {top_k} experts, {experts} experts of {hidden} x {out}, "
        "and scales of blocks",
        call=lambda: moe_dispatch_scaled_matmul(
            x, ids, w.transpose(1, 2), scale_x, scale_w.transpose(1, 2), max_tokens=tokens
        ),
        result=lambda given: given[0][: int(given[1].counts.sum())],
        exact=exact,
        library=lambda: x.to(torch.bfloat16).repeat(top_k, 1).view(experts, -1, hidden) @ wide,
    )


def _rows(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    everyones_tokens, hidden = shape
    tokens, (experts, top_k) = everyones_tokens // group.size, _experts(large)
    x = random(group, seed, tokens, hidden)
    ids = _routing(group, tokens, experts, top_k, seed)

    def exact() -> tuple[torch.Tensor, float]:
        everyone = torch.cat(everyones(group, "x", x)).double()
        chosen = torch.cat(everyones(group, "ids", ids))
        named = range(group.rank * experts, (group.rank + 1) * experts)
        return torch.cat([everyone[(chosen == expert).nonzero()[:, 0]] for expert in named]), 1e-30

    return Case(
        inputs=f"{tokens} tokens of {hidden}, each for {top_k} of {experts} experts per rank",
        call=lambda: moe_dispatch(x, ids, experts, max_tokens=tokens),
        result=lambda given: given[0][: int(given[1].counts.sum())],
        exact=exact,
        library=lambda: x.repeat(top_k, 1),
    )


def _combine(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    """A dispatch in here produces the input of the combine."""
    everyones_tokens, columns = shape
    tokens, (experts, top_k), hidden = everyones_tokens // group.size, _experts(large), 32
    x = random(group, seed, tokens, hidden)
    w = random(group, seed, experts, hidden, columns, what=1) * hidden**-0.5
    ids = _routing(group, tokens, experts, top_k, seed)
    weights = random(group, seed, tokens, top_k, what=3).float().softmax(1)
    y, handle = moe_dispatch_matmul(x, ids, w, max_tokens=tokens)

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        total = magnitude = torch.zeros(tokens, columns, dtype=torch.float64, device=group.device)
        for expert, matrix in enumerate(torch.cat(everyones(group, "w", w))):
            share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
            total = total + share * (x.double() @ matrix.double())
            magnitude = magnitude + share * (x.double().abs() @ matrix.double().abs())
        return total, 4 * EPS * magnitude + 1e-30  # as for moe_ffn

    return Case(
        inputs=f"the rows of {experts} experts, {columns} columns each, for {tokens} tokens, each with {top_k} experts",
        call=lambda: moe_combine(y, handle, weights),
        exact=exact,
        library=lambda: (weights[:, :, None] * y[: ids.numel()].view(*ids.shape, columns)).sum(1),
    )


def _ffn(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    everyones_tokens, inter, hidden = shape
    tokens, (experts, top_k) = everyones_tokens // group.size, _experts(large)
    x = random(group, seed, tokens, hidden)
    gate_up = random(group, seed, experts, hidden, 2 * inter, what=1) * hidden**-0.5
    down = random(group, seed, experts, inter, hidden, what=2) * inter**-0.5
    ids = _routing(group, tokens, experts, top_k, seed)
    weights = random(group, seed, tokens, top_k, what=3).float().softmax(1)

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        total = magnitude = torch.zeros(tokens, hidden, dtype=torch.float64, device=group.device)
        pairs = zip(everyones(group, "gate_up", gate_up), everyones(group, "down", down))
        for expert, (w1, w2) in enumerate((one, two) for first, second in pairs for one, two in zip(first, second)):
            share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
            gate, up = (x.double() @ w1.double()).chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            total = total + share * (inner @ w2.double())
            magnitude = magnitude + share * (inner.abs() @ w2.double().abs())
        return total, 4 * EPS * magnitude + 1e-30  # values are rounded a few times on their way

    def library() -> torch.Tensor:
        gate, up = (x.repeat(top_k, 1).view(experts, -1, hidden) @ gate_up).chunk(2, dim=2)
        return (torch.nn.functional.silu(gate) * up) @ down

    return Case(
        inputs=f"{tokens} tokens of {hidden}, each for {top_k} experts, and {experts} experts of {inter} inner columns",
        call=lambda: moe_ffn(x, ids, weights, gate_up, down, max_tokens=tokens),
        exact=exact,
        library=library,
    )


def _scaled_ffn(group: Group, shape: Shape, seed: int, large: bool) -> Case:
    everyones_tokens, inter, hidden = shape
    tokens, (experts, top_k) = everyones_tokens // group.size, _experts(large)
    x, scale_x = quantize(random(group, seed, tokens, hidden), "BlockWise1x128")
    gate_up = quantize(random(group, seed, experts, 2 * inter, hidden, what=1) * hidden**-0.5, "BlockWise128x128")
    down = quantize(random(group, seed, experts, hidden, inter, what=2) * inter**-0.5, "BlockWise128x128")
    (w1, scale_1), (w2, scale_2) = ([each.transpose(1, 2) for each in pair] for pair in (gate_up, down))
    ids = _routing(group, tokens, experts, top_k, seed)
    weights = random(group, seed, tokens, top_k, what=3).float().softmax(1)
    wide = [dequantize(*pair).to(torch.bfloat16).transpose(1, 2) for pair in (gate_up, down)]

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        rows = dequantize(x, scale_x, torch.float64)
        total = bound = torch.zeros(tokens, hidden, dtype=torch.float64, device=group.device)
        matrices = (("gate_up", gate_up), ("down", down))
        pairs = zip(*(everyones(group, name, dequantize(*pair, torch.float64)) for name, pair in matrices))
        for expert, (one, two) in enumerate((a, b) for first, second in pairs for a, b in zip(first, second)):
            share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
            gate, up = (rows @ one.T).chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            # inner activations are rounded to fp8: by 2**-4 of them, or of the smallest normal number
            error = 2**-4 * inner.abs().clamp_min(2**-14 * inner.abs().amax())
            total = total + share * (inner @ two.T)
            bound = bound + share * (error @ two.T.abs() + 4 * EPS * inner.abs() @ two.T.abs())
        return total, bound + 1e-30

    def library() -> torch.Tensor:
        gate, up = (x.to(torch.bfloat16).repeat(top_k, 1).view(experts, -1, hidden) @ wide[0]).chunk(2, dim=2)
        return (torch.nn.functional.silu(gate) * up) @ wide[1]

    return Case(
        inputs=f"{tokens} tokens of {hidden} in fp8, each for {top_k} experts, {experts} experts of {inter} inner "
        "columns, and scales of blocks",
        call=lambda: scaled_moe_ffn(x, ids, weights, w1, w2, scale_x, scale_1, scale_2, max_tokens=tokens),
        exact=exact,
        library=library,
    )


DISPATCH_MATMUL = Demo(
    _dispatch, simulated=lambda ranks: (48 * ranks, 32, 32), large=lambda ranks: (1024 * ranks, 1024, 2048)
)
DISPATCH_SCALED = Demo(
    _scaled_dispatch, simulated=lambda ranks: (48 * ranks, 32, 144), large=lambda ranks: (1024 * ranks, 1024, 2048)
)
DISPATCH = Demo(_rows, simulated=lambda ranks: (48 * ranks, 32), large=lambda ranks: (1024 * ranks, 2048))
COMBINE = Demo(_combine, simulated=lambda ranks: (16 * ranks, 32), large=lambda ranks: (1024 * ranks, 2048))
FFN = Demo(_ffn, simulated=lambda ranks: (16 * ranks, 32, 32), large=lambda ranks: (1024 * ranks, 1024, 2048))
SCALED_FFN = Demo(
    _scaled_ffn, simulated=lambda ranks: (16 * ranks, 128, 32), large=lambda ranks: (1024 * ranks, 1024, 2048)
)
