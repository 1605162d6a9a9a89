"""What the demo calls: for each operator inputs, the call, and the same by PyTorch in float64.

A function here has the name of its operator. `shape` is that of all ranks, as `mkernel trace` takes it. By default it
is small enough for the simulator, about a second a call, or, if `large`, one for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import mkernel as mk
from mkernel.operators import Shape
from mkernel.runtime.group import Group

DTYPE = torch.bfloat16
EPS = torch.finfo(DTYPE).eps


@dataclass(frozen=True)
class Case:
    """One operator on one rank.

    inputs: what each rank holds, in words.
    call: the operator. result: the tensor to be checked, of what the call gave.
    exact: the same in float64, and how far the result may be from it, as a number or element by element. All
        ranks call it, together.
    library: the arithmetic of this rank alone, by PyTorch, for comparing times.
    sends: bytes that a rank sends to each other rank of its node, and to its counterpart in each other node;
        None where that depends on the data.
    """

    inputs: str
    call: Callable[[], Any]
    exact: Callable[[], tuple[torch.Tensor, torch.Tensor | float]]
    library: Callable[[], object]
    result: Callable[[Any], torch.Tensor] = lambda given: given
    sends: tuple[int, int] | None = None


def simulated_shape(op: str, ranks: int) -> Shape:
    """The shape, as `mkernel trace` takes it, of an operator's case in the simulator."""
    return {
        "all_gather_matmul": (64 * ranks, 64, 128),
        "matmul_reduce_scatter": (32 * ranks, 64, 32 * ranks),
        "matmul_all_reduce": (96, 64, 32 * ranks),
        "ring_attention": (1, 2, 32 * ranks, 64),
        "moe_dispatch_matmul": (48 * ranks, 32, 32),
        "moe_combine": (16 * ranks, 32),
        "moe_ffn": (16 * ranks, 32, 32),
    }[op]


def large_shape(op: str, ranks: int) -> Shape:
    """The same on GPUs."""
    return {
        "all_gather_matmul": (1024 * ranks, 2048, 4096),
        "matmul_reduce_scatter": (1024 * ranks, 2048, 1024 * ranks),
        "matmul_all_reduce": (4096, 2048, 1024 * ranks),
        "ring_attention": (1, 16, 1024 * ranks, 128),
        "moe_dispatch_matmul": (1024 * ranks, 1024, 2048),
        "moe_combine": (1024 * ranks, 2048),
        "moe_ffn": (1024 * ranks, 1024, 2048),
    }[op]


def _default(op: str, group: Group, large: bool) -> Shape:
    return (large_shape if large else simulated_shape)(op, group.size)


def _random(group: Group, seed: int, *shape: int, what: int = 0) -> torch.Tensor:
    generator = torch.Generator(group.device).manual_seed(1000 * seed + 10 * group.rank + what)
    return torch.randn(*shape, generator=generator, device=group.device, dtype=DTYPE)


def _everyones(group: Group, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    group.synchronize()  # what others read has been written
    return [part.to(group.device) for part in group.exchange(what, tensor)]


def all_gather_matmul(group: Group, large: bool, seed: int, shape: Shape | None = None) -> Case:
    m_total, n, k = shape or _default("all_gather_matmul", group, large)
    m = m_total // group.size
    a, b = _random(group, seed, m, k), _random(group, seed, k, n, what=1)
    gathered = torch.zeros(group.size * m, k, dtype=DTYPE, device=group.device)
    block = m * k * DTYPE.itemsize

    def exact() -> tuple[torch.Tensor, float]:
        return torch.cat(_everyones(group, "a", a)).double() @ b.double(), 4 * k**0.5 * EPS

    return Case(
        inputs=f"a {m} x {k}, its rows of a taller matrix, and b {k} x {n}",
        call=lambda: mk.all_gather_matmul(a, b),
        exact=exact,
        library=lambda: gathered @ b,
        sends=(group.nodes * block, block),
    )


def _reducing(
    group: Group, shape: Shape, seed: int, call: Callable[..., torch.Tensor], rows: slice, *, scattered: bool
) -> Case:
    m, n, k_total = shape
    k = k_total // group.size
    block = m // group.size * n * DTYPE.itemsize
    a, b = _random(group, seed, m, k), _random(group, seed, k, n, what=1)

    def exact() -> tuple[torch.Tensor, float]:
        pairs = zip(_everyones(group, "a", a), _everyones(group, "b", b))
        total = sum((x[rows].double() @ y.double() for x, y in pairs), torch.zeros((), device=group.device))
        # the error of one long product, and a rounding of each rank's part
        parts = (group.size - 1) ** 0.5 * 5 * k**0.5 * EPS / 2
        return total, 4 * (group.size * k) ** 0.5 * EPS + parts

    return Case(
        inputs=f"a {m} x {k} and b {k} x {n}, its slice of a deeper product",
        call=lambda: call(a, b),
        exact=exact,
        library=lambda: a @ b,
        sends=(group.nodes * block, block) if scattered else None,
    )


def matmul_reduce_scatter(group: Group, large: bool, seed: int, shape: Shape | None = None) -> Case:
    shape = shape or _default("matmul_reduce_scatter", group, large)
    rows = shape[0] // group.size
    mine = slice(group.rank * rows, (group.rank + 1) * rows)
    return _reducing(group, shape, seed, mk.matmul_reduce_scatter, mine, scattered=True)


def matmul_all_reduce(group: Group, large: bool, seed: int, shape: Shape | None = None) -> Case:
    shape = shape or _default("matmul_all_reduce", group, large)
    return _reducing(group, shape, seed, mk.matmul_all_reduce, slice(None), scattered=False)


def ring_attention(group: Group, large: bool, seed: int, shape: Shape | None = None) -> Case:
    batch, heads, positions, dim = shape or _default("ring_attention", group, large)
    length = positions // group.size
    causal = not large  # without a mask all ranks have as much to do, so times say more
    query, key, value = (_random(group, seed, batch, heads, length, dim, what=what) for what in range(3))
    all_keys, all_values = (torch.zeros_like(key).repeat(1, 1, group.size, 1) for _ in range(2))

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat(_everyones(group, "key", key), dim=2).double()
        values = torch.cat(_everyones(group, "value", value), dim=2).double()
        scores = query.double() @ keys.transpose(-1, -2) * dim**-0.5
        if causal:
            place = torch.arange(length, device=group.device) + group.rank * length
            later = torch.arange(keys.shape[2], device=group.device) > place[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        weights = scores.softmax(-1)
        # weights and result are rounded once each; the rest is fp32
        return weights @ values, EPS * (weights @ values.abs()) + 2.0**-18

    return Case(
        inputs=f"query, key and value, {batch} x {heads} x {length} x {dim}, its part of a sequence"
        + ("; a causal mask" if causal else ""),
        call=lambda: mk.ring_attention(query, key, value, is_causal=causal),
        exact=exact,
        library=lambda: torch.nn.functional.scaled_dot_product_attention(query, all_keys, all_values),
    )


def _experts(large: bool) -> tuple[int, int]:
    """Experts of a rank, and of a token."""
    return (4, 4) if large else (2, 2)


def _routing(group: Group, tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(group.device).manual_seed(77 + 1000 * seed + group.rank)
    scores = torch.rand(tokens, experts * group.size, generator=generator, device=group.device)
    return scores.topk(top_k, dim=1).indices


def moe_dispatch_matmul(group: Group, large: bool, seed: int, shape: Shape | None = None) -> Case:
    everyones_tokens, out, hidden = shape or _default("moe_dispatch_matmul", group, large)
    tokens, (experts, top_k) = everyones_tokens // group.size, _experts(large)
    x = _random(group, seed, tokens, hidden)
    w = _random(group, seed, experts, hidden, out, what=1)
    ids = _routing(group, tokens, experts, top_k, seed)

    def exact() -> tuple[torch.Tensor, float]:
        everyone = torch.cat(_everyones(group, "x", x)).double()
        chosen = torch.cat(_everyones(group, "ids", ids))
        parts = []
        for expert in range(experts):
            token = (chosen == group.rank * experts + expert).nonzero()[:, 0]  # by source rank, then token
            parts.append(everyone[token] @ w[expert].double())
        return torch.cat(parts), 4 * hidden**0.5 * EPS

    return Case(
        inputs=f"{tokens} tokens of {hidden}, each for {top_k} experts, and {experts} experts of {hidden} x {out}",
        call=lambda: mk.moe_dispatch_matmul(x, ids, w, max_tokens=tokens),
        result=lambda given: given[0][: int(given[1].counts.sum())],
        exact=exact,
        library=lambda: x.repeat(top_k, 1).view(experts, -1, hidden) @ w,
    )


def moe_combine(group: Group, large: bool, seed: int, shape: Shape | None = None) -> Case:
    """Not in the demo, where it is a part of moe_ffn. Its input is made by a dispatch, here."""
    everyones_tokens, columns = shape or _default("moe_combine", group, large)
    tokens, (experts, top_k), hidden = everyones_tokens // group.size, _experts(large), 32
    x = _random(group, seed, tokens, hidden)
    w = _random(group, seed, experts, hidden, columns, what=1) * hidden**-0.5
    ids = _routing(group, tokens, experts, top_k, seed)
    weights = _random(group, seed, tokens, top_k, what=3).float().softmax(1)
    y, handle = mk.moe_dispatch_matmul(x, ids, w, max_tokens=tokens)

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        total = magnitude = torch.zeros(tokens, columns, dtype=torch.float64, device=group.device)
        for expert, matrix in enumerate(torch.cat(_everyones(group, "w", w))):
            share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
            total = total + share * (x.double() @ matrix.double())
            magnitude = magnitude + share * (x.double().abs() @ matrix.double().abs())
        return total, 4 * EPS * magnitude + 1e-30  # as for moe_ffn

    return Case(
        inputs=f"the rows of {experts} experts, {columns} columns each, for {tokens} tokens, each with {top_k} experts",
        call=lambda: mk.moe_combine(y, handle, weights),
        exact=exact,
        library=lambda: (weights[:, :, None] * y[: ids.numel()].view(*ids.shape, columns)).sum(1),
    )


def moe_ffn(group: Group, large: bool, seed: int, shape: Shape | None = None) -> Case:
    everyones_tokens, inter, hidden = shape or _default("moe_ffn", group, large)
    tokens, (experts, top_k) = everyones_tokens // group.size, _experts(large)
    x = _random(group, seed, tokens, hidden)
    gate_up = _random(group, seed, experts, hidden, 2 * inter, what=1) * hidden**-0.5
    down = _random(group, seed, experts, inter, hidden, what=2) * inter**-0.5
    ids = _routing(group, tokens, experts, top_k, seed)
    weights = _random(group, seed, tokens, top_k, what=3).float().softmax(1)

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        total = magnitude = torch.zeros(tokens, hidden, dtype=torch.float64, device=group.device)
        everyones = zip(_everyones(group, "gate_up", gate_up), _everyones(group, "down", down))
        for expert, (w1, w2) in enumerate((one, two) for first, second in everyones for one, two in zip(first, second)):
            share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
            gate, up = (x.double() @ w1.double()).chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            total = total + share * (inner @ w2.double())
            magnitude = magnitude + share * (inner.abs() @ w2.double().abs())
        return total, 4 * EPS * magnitude + 1e-30  # values are rounded when they are handed on, a few times

    def library() -> torch.Tensor:
        gate, up = (x.repeat(top_k, 1).view(experts, -1, hidden) @ gate_up).chunk(2, dim=2)
        return (torch.nn.functional.silu(gate) * up) @ down

    return Case(
        inputs=f"{tokens} tokens of {hidden}, each for {top_k} experts, and {experts} experts of {inter} inner columns",
        call=lambda: mk.moe_ffn(x, ids, weights, gate_up, down, max_tokens=tokens),
        exact=exact,
        library=library,
    )
